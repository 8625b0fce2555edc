//! Ranks anywhere, over TCP to an address of rank 0's.

use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::sockopt::{set_socket_reuseaddr, set_tcp_nodelay, socket_error};
use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, getsockname, listen, socket_with};

use crate::error::{ApiMisuse, Error, Rendezvous as Reason, Result};
use crate::signal::{check_rank, check_world};

use super::conn::{Deadline, wait};
use super::join::{form, lead};
use super::secret::Secret;
use super::star::Star;
use super::{Rendezvous, pause};

/// Ranks that meet at an address of rank 0's.
///
/// The secret says who is one of them. What they send is not encrypted: use it in a network that you trust not to change
/// what it carries.
#[derive(Debug)]
pub struct TcpRendezvous {
    star: Star,
}

impl TcpRendezvous {
    /// Least bytes of a secret: who listens in can try secrets without asking anybody.
    pub const MIN_SECRET_BYTES: usize = 16;

    /// Meets the ranks that use the same `address` (`host:port`) and `secret`; rank 0 listens there. Collective: returns
    /// when all are there. The port is free for others afterwards, and for the next group.
    ///
    /// `patience` does not bound the look-up of a host by its name, which is the system's.
    ///
    /// # Errors
    /// Those of [`UnixRendezvous::new`](super::UnixRendezvous::new), and [`ApiMisuse::ShortSecret`].
    pub fn new(address: &str, secret: &[u8], rank: usize, world: usize, patience: Duration) -> Result<Self> {
        Self::check(secret, rank, world)?;
        let deadline = Deadline::new(patience);
        let claim = || claim(address, deadline);
        let reach = |deadline| reach(address, rank, deadline);
        let star = form(claim, admit, reach, &Secret::new(secret), (rank, world), deadline)?;
        Ok(TcpRendezvous { star })
    }

    /// Rank 0, on a socket that listens already: bound to port 0, it has a port that the others can be told.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn lead(listener: TcpListener, secret: &[u8], world: usize, patience: Duration) -> Result<Self> {
        Self::check(secret, 0, world)?;
        let unusable = |error: std::io::Error| cannot("the given listener", 0, error);
        listener.set_nonblocking(true).map_err(unusable)?;
        let deadline = Deadline::new(patience);
        let star = lead(listener.into(), admit, &Secret::new(secret), world, deadline)?;
        Ok(TcpRendezvous { star })
    }

    fn check(secret: &[u8], rank: usize, world: usize) -> Result<()> {
        check_world(world)?;
        check_rank(rank, world)?;
        if secret.len() < Self::MIN_SECRET_BYTES {
            return Err(ApiMisuse::ShortSecret { bytes: secret.len(), least: Self::MIN_SECRET_BYTES }.into());
        }
        Ok(())
    }
}

impl Rendezvous for TcpRendezvous {
    fn rank(&self) -> usize {
        self.star.rank()
    }

    fn world_size(&self) -> usize {
        self.star.world()
    }

    fn gather(&mut self, bytes: &[u8], patience: Duration) -> Result<Vec<Vec<u8>>> {
        self.star.gather(bytes, patience)
    }

    fn end(&mut self, error: &Error) {
        self.star.end(error);
    }
}

/// Small frames that are answered must not wait for more to send.
fn admit(peer: &OwnedFd) -> bool {
    set_tcp_nodelay(peer, true).is_ok()
}

fn claim(address: &str, deadline: Deadline) -> Result<OwnedFd> {
    loop {
        let found = resolve(address, 0)?;
        let mut last = None;
        for candidate in &found {
            match listen_at(candidate) {
                Ok(socket) => return Ok(socket),
                Err(error) => last = Some(error),
            }
        }
        match last {
            // The group before may still be forming, and a host's name may not be known everywhere yet.
            None | Some(Errno::ADDRINUSE) if !deadline.passed() => std::thread::sleep(pause(deadline)),
            None => return Err(cannot(address, 0, "no such host")),
            Some(Errno::ADDRINUSE) => {
                return Err(cannot(address, 0, "another process listens there; is there a second rank 0?"));
            }
            Some(Errno::ADDRNOTAVAIL) => return Err(cannot(address, 0, "it is not an address of rank 0's machine")),
            Some(error) => return Err(cannot(address, 0, error)),
        }
    }
}

fn listen_at(address: &SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = socket_for(address)?;
    // Else the connections of the group before, which linger for a minute, hold the port.
    set_socket_reuseaddr(&socket, true)?;
    bind(&socket, address)?;
    listen(&socket, 128)?;
    Ok(socket)
}

fn reach(address: &str, rank: usize, deadline: Deadline) -> Result<Option<OwnedFd>> {
    for candidate in resolve(address, rank)? {
        let socket = socket_for(&candidate).map_err(|error| cannot(address, rank, error))?;
        let began = match connect(&socket, &candidate) {
            Ok(()) => Ok(()),
            Err(Errno::INPROGRESS | Errno::INTR) => finish(&socket, deadline)?,
            Err(error) => Err(error),
        };
        match began {
            // A port from the range that the system gives out may be given to this very connection, which then meets itself.
            Ok(()) if getsockname(&socket).is_ok_and(|own| own == candidate.into()) => {}
            Ok(()) if admit(&socket) => return Ok(Some(socket)),
            // Whatever it is, it may change while rank 0 starts.
            Ok(()) | Err(_) => {}
        }
    }
    Ok(None)
}

/// Waits for a connection that was begun. An attempt does not last for all of the patience: packets to a machine that is
/// not up yet are repeated at growing intervals, and a new attempt comes through sooner.
fn finish(socket: &OwnedFd, deadline: Deadline) -> Result<Result<(), Errno>> {
    let attempt = Deadline::new(deadline.left().min(Duration::from_secs(3)));
    loop {
        let mut fds = [PollFd::new(socket, PollFlags::OUT)];
        wait(&mut fds, attempt.left())?;
        if !fds[0].revents().is_empty() {
            return Ok(socket_error(socket).and_then(|result| result));
        }
        if attempt.passed() {
            return Ok(Err(Errno::TIMEDOUT));
        }
    }
}

fn socket_for(address: &SocketAddr) -> Result<OwnedFd, Errno> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    socket_with(family, SocketType::STREAM, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
}

/// Addresses of a host; none while its name is not known.
fn resolve(address: &str, rank: usize) -> Result<Vec<SocketAddr>> {
    match address.to_socket_addrs() {
        Ok(found) => Ok(found.collect()),
        Err(error) if error.kind() == ErrorKind::InvalidInput => Err(cannot(address, rank, "host:port is needed")),
        Err(_) => Ok(Vec::new()),
    }
}

fn cannot(address: &str, rank: usize, why: impl ToString) -> Error {
    Reason::Address { rank, address: address.to_owned(), why: why.to_string() }.into()
}
