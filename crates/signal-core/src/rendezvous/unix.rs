//! Ranks of one machine, over a Unix socket with an abstract name: it is in no file system, and goes with the process.

use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with};

use crate::error::{Error, Rendezvous as Reason, Result};
use crate::signal::{check_rank, check_world};

use super::conn::Deadline;
use super::id::Id;
use super::join::form;
use super::secret::{Secret, digest, hex};
use super::star::Star;
use super::{Rendezvous, pause};

/// Ranks of one machine that meet at a name.
///
/// The name is one of an abstract Unix socket, which ends with the process that holds it, so that a crash leaves nothing
/// behind. It is seen in one network namespace only: containers that have their own do not meet.
#[derive(Debug)]
pub struct UnixRendezvous {
    star: Star,
}

impl UnixRendezvous {
    /// Meets the ranks that use the same [`Id`]; rank 0 listens. Collective. An id serves one group at a time.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn from_id(id: &Id, rank: usize, world: usize, patience: Duration) -> Result<Self> {
        Self::meet(id.name(), &id.secret(), rank, world, patience)
    }

    /// Meets the ranks that use the same `name` and `secret`, under one user. Collective: returns when all are there.
    ///
    /// Processes of other users are turned away in any case, so on one machine the secret may be empty.
    ///
    /// # Errors
    /// [`ApiMisuse::WorldSize`](crate::ApiMisuse::WorldSize) and [`ApiMisuse::Rank`](crate::ApiMisuse::Rank);
    /// [`Absent`](Reason::Absent) with all ranks that did not come within `patience`; [`Lost`](Reason::Lost) with ranks that
    /// died meanwhile; [`Disagreement`](Reason::Disagreement) where world sizes or versions of the rendezvous differ;
    /// [`Refused`](Reason::Refused) where this rank is there already or its secret is not that of rank 0;
    /// [`Address`](Reason::Address) and [`Protocol`](Reason::Protocol) where the name is somebody else's.
    pub fn new(name: &str, secret: &[u8], rank: usize, world: usize, patience: Duration) -> Result<Self> {
        // A name of any length, and no two users' are the same.
        let uid = rustix::process::geteuid().as_raw();
        let hash = digest(&[b"signal name", &uid.to_le_bytes(), name.as_bytes()]);
        Self::meet(&hex(&hash[..16]), &Secret::new(secret), rank, world, patience)
    }

    fn meet(name: &str, secret: &Secret, rank: usize, world: usize, patience: Duration) -> Result<Self> {
        check_world(world)?;
        check_rank(rank, world)?;
        let deadline = Deadline::new(patience);
        let name = format!("signal-comm/{name}");
        let claim = || claim(&name, rank, deadline);
        let reach = |_| reach(&name, rank);
        let star = form(claim, is_own_user, reach, secret, (rank, world), deadline)?;
        Ok(UnixRendezvous { star })
    }
}

impl Rendezvous for UnixRendezvous {
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

/// A socket that closes on exec and does not block.
pub(super) fn unix_socket(kind: SocketType) -> Result<OwnedFd> {
    socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
        .map_err(|error| Reason::System { why: format!("no unix socket: {error}") }.into())
}

/// Whether the process at the other end is of this user. The kernel says so, not the peer.
pub(super) fn is_own_user(peer: &OwnedFd) -> bool {
    // The effective user is what the kernel records at connect and listen.
    socket_peercred(peer).is_ok_and(|peer| peer.uid == rustix::process::geteuid())
}

/// Listens at a name, once whoever holds it lets go: the group before may still be forming.
fn claim(name: &str, rank: usize, deadline: Deadline) -> Result<OwnedFd> {
    let address = abstract_address(name, rank)?;
    let socket = unix_socket(SocketType::STREAM)?;
    loop {
        match bind(&socket, &address) {
            Ok(()) => break,
            Err(Errno::ADDRINUSE) if !deadline.passed() => std::thread::sleep(pause(deadline)),
            Err(Errno::ADDRINUSE) => {
                let why = "another process listens there; is there a second rank 0?".to_owned();
                return Err(Reason::Address { rank, address: format!("@{name}"), why }.into());
            }
            Err(error) => return Err(cannot(name, rank, error)),
        }
    }
    listen(&socket, 128).map_err(|error| cannot(name, rank, error))?;
    Ok(socket)
}

/// A connection to whoever listens at a name, if anybody does.
fn reach(name: &str, rank: usize) -> Result<Option<OwnedFd>> {
    let address = abstract_address(name, rank)?;
    let socket = unix_socket(SocketType::STREAM)?;
    match connect(&socket, &address) {
        Ok(()) if is_own_user(&socket) => Ok(Some(socket)),
        Ok(()) => {
            let why = "a process of another user listens there".to_owned();
            Err(Reason::Address { rank, address: format!("@{name}"), why }.into())
        }
        // Nobody listens, the queue is full, or a signal came: all of that may change.
        Err(Errno::CONNREFUSED | Errno::AGAIN | Errno::INTR) => Ok(None),
        Err(error) => Err(cannot(name, rank, error)),
    }
}

fn abstract_address(name: &str, rank: usize) -> Result<SocketAddrUnix> {
    SocketAddrUnix::new_abstract_name(name.as_bytes()).map_err(|error| cannot(name, rank, error))
}

fn cannot(name: &str, rank: usize, error: Errno) -> Error {
    Reason::Address { rank, address: format!("@{name}"), why: error.to_string() }.into()
}
