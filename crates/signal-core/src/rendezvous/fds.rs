//! File descriptors between the ranks of one machine: memory that a peer is to map travels as one.
//!
//! Every rank listens at a random name, which it publishes by a gather together with a random token; connects to each peer;
//! and sends it the peer's token, its own rank and its descriptors as one message. The peer answers once it
//! has them, and keeps the connection until it has everything from everybody: so a peer that dies is noticed at once.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen, recv, recvmsg, send, sendmsg,
};

use crate::error::{ApiMisuse, Error, Rendezvous as Reason, Result};
use crate::signal::check_rank;

use super::Rendezvous;
use super::conn::{Deadline, wait};
use super::offer::{Offer, PARCEL, Parcel};
use super::secret::{hex, random};
use super::unix::{is_own_user, unix_socket};
use super::wire::{Frame, MAX_GREETING, Verdict};

/// Most descriptors that one message can carry (SCM_MAX_FD of Linux).
pub const MAX_FDS: usize = 253;

/// Connections at once that have brought nothing yet; the oldest goes when one more comes. They may take their time: a
/// rank that was stopped comes only once.
const STRANGERS: usize = 32;

/// Gives `fds` to every rank and returns what every rank gave, by rank; its own as duplicates. Collective: every rank gives
/// equally many. All are closed on exec.
///
/// An error on one rank ends the group ([`Rendezvous::end`]): the others' exchange fails too, or their next gather if they
/// were done.
///
/// # Errors
/// [`Disagreement`](Reason::Disagreement) where ranks give different numbers; [`Unreachable`](Reason::Unreachable) where they
/// run on different machines or in containers with network namespaces of their own; [`Absent`](Reason::Absent) and
/// [`Lost`](Reason::Lost) as for a gather; [`ApiMisuse::TooMany`] over [`MAX_FDS`].
pub fn exchange(
    rendezvous: &mut dyn Rendezvous,
    fds: &[BorrowedFd<'_>],
    patience: Duration,
) -> Result<Vec<Vec<OwnedFd>>> {
    let (rank, world) = (rendezvous.rank(), rendezvous.world_size());
    check_rank(rank, world)?;
    if fds.len() > MAX_FDS {
        return Err(ApiMisuse::TooMany { what: "file descriptors", given: fds.len(), limit: MAX_FDS }.into());
    }
    // However it ends here, the others must not wait for what does not come; some may be on their way to the next gather.
    meet(rendezvous, fds, Deadline::new(patience)).inspect_err(|error| rendezvous.end(error))
}

fn meet(rendezvous: &mut dyn Rendezvous, fds: &[BorrowedFd<'_>], deadline: Deadline) -> Result<Vec<Vec<OwnedFd>>> {
    let (rank, world) = (rendezvous.rank(), rendezvous.world_size());
    let name = format!("signal-comm/fds/{}", hex(&random::<16>()?));
    let own = Offer::new(name, fds.len())?;
    // Everybody listens before the gather ends, so everybody can connect at once after it.
    let listener = unix_socket(SocketType::SEQPACKET)?;
    let address = SocketAddrUnix::new_abstract_name(own.name.as_bytes()).map_err(|error| failed("name", error))?;
    bind(&listener, &address).map_err(|error| failed("bind", error))?;
    listen(&listener, 128).map_err(|error| failed("listen", error))?;

    let offers = rendezvous.gather(&own.encode(), deadline.left())?;
    if offers.len() != world {
        let why = format!("a gather gave {} parts", offers.len());
        return Err(Reason::Protocol { rank, peer: 0, why }.into());
    }
    let offers = Offer::decode_all(&offers, rank)?;
    let duplicate = |fd: &BorrowedFd<'_>| fd.try_clone_to_owned().map_err(|error| failed("dup", error));
    let given = fds.iter().map(duplicate).collect::<Result<Vec<_>>>()?;
    let mut peers: Vec<_> = (0..world).map(|_| Peer::default()).collect();
    peers[rank].given = Some(given);
    peers[rank].received = true;

    let mut round = Round { rank, offers: &offers, fds, listener, peers, strangers: Vec::new() };
    round.run(deadline).inspect_err(|error| round.dismiss(error))?;
    Ok(round.peers.into_iter().filter_map(|peer| peer.given).collect())
}

/// One exchange.
struct Round<'a> {
    rank: usize,
    offers: &'a [Offer],
    fds: &'a [BorrowedFd<'a>],
    listener: OwnedFd,
    peers: Vec<Peer>,
    strangers: Vec<OwnedFd>,
}

/// What is between this rank and a peer.
#[derive(Default)]
struct Peer {
    /// The connection that this rank made.
    out: Option<OwnedFd>,
    /// Whether the descriptors went out on it.
    sent: bool,
    /// Whether the peer has said that it has them.
    received: bool,
    /// Whether the peer has closed it.
    gone: bool,
    /// The connection that the peer made; kept until all is done.
    back: Option<OwnedFd>,
    /// What came on it.
    given: Option<Vec<OwnedFd>>,
}

impl Round<'_> {
    fn run(&mut self, deadline: Deadline) -> Result<()> {
        loop {
            let mut blocked = false;
            for peer in 0..self.peers.len() {
                if peer == self.rank {
                    continue;
                }
                blocked |= !self.deliver(peer)?;
                self.hear(peer)?;
            }
            self.accept()?;
            self.receive()?;
            if self.peers.iter().all(|peer| peer.received && peer.given.is_some()) {
                return Ok(());
            }
            // Looked at only after all that had come was taken: a peer that is done leaves too.
            let gone = |peer: &Peer| peer.gone && !(peer.received && peer.given.is_some());
            let lost: Vec<_> = (0..self.peers.len()).filter(|peer| gone(&self.peers[*peer])).collect();
            if !lost.is_empty() {
                // It may have left because of another, and have said so on a connection that was taken only now.
                (0..self.peers.len()).try_for_each(|peer| self.hear(peer))?;
                return Err(Reason::Lost { rank: self.rank, missing: lost }.into());
            }
            if deadline.passed() {
                let late = |peer: &Peer| !peer.received || peer.given.is_none();
                let missing = (0..self.peers.len()).filter(|peer| late(&self.peers[*peer])).collect();
                return Err(Reason::Absent { rank: self.rank, missing, after: deadline.patience }.into());
            }
            self.pause(deadline, blocked)?;
        }
    }

    fn pause(&self, deadline: Deadline, blocked: bool) -> Result<()> {
        let mut limit = deadline.left();
        if blocked {
            // A full queue of a peer's cannot be waited for.
            limit = limit.min(Duration::from_millis(2));
        }
        let mut fds = vec![PollFd::new(&self.listener, PollFlags::IN)];
        fds.extend(self.strangers.iter().map(|fd| PollFd::new(fd, PollFlags::IN)));
        for peer in &self.peers {
            fds.extend(peer.out.iter().filter(|_| !peer.gone).map(|out| PollFd::new(out, PollFlags::IN)));
            fds.extend(peer.back.iter().map(|back| PollFd::new(back, PollFlags::IN)));
        }
        wait(&mut fds, limit)
    }

    /// Sends a peer what it gets, once. False if that has to be tried again.
    fn deliver(&mut self, peer: usize) -> Result<bool> {
        if self.peers[peer].sent {
            return Ok(true);
        }
        let unreachable = |why: &str| Reason::Unreachable { rank: self.rank, peer, why: why.to_owned() };
        if self.peers[peer].out.is_none() {
            let socket = unix_socket(SocketType::SEQPACKET)?;
            let address = SocketAddrUnix::new_abstract_name(self.offers[peer].name.as_bytes())
                .map_err(|error| unreachable(&format!("its name cannot be used: {error}")))?;
            match connect(&socket, &address) {
                Ok(()) => {}
                Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
                // It listened when it published the name.
                Err(Errno::CONNREFUSED) if self.offers[peer].knows_network() => {
                    (self.peers[peer].sent, self.peers[peer].gone) = (true, true);
                    return Ok(true);
                }
                Err(Errno::CONNREFUSED) => {
                    return Err(unreachable("it died, or it is in another network namespace (container)").into());
                }
                Err(error) => return Err(failed("connect", error)),
            }
            if !is_own_user(&socket) {
                return Err(unreachable("a process of another user listens at its name").into());
            }
            self.peers[peer].out = Some(socket);
        }
        let Some(socket) = &self.peers[peer].out else { return Ok(false) };
        let parcel = Parcel { token: self.offers[peer].token, rank: self.rank, count: self.fds.len() }.encode();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        // An empty message of rights is not one that can be sent.
        if !self.fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(self.fds)) {
            return Err(failed("sendmsg", Errno::NOBUFS));
        }
        match sendmsg(socket, &[IoSlice::new(&parcel)], &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
            // Where it has gone, its last word is still to be heard.
            Ok(_) | Err(Errno::PIPE | Errno::CONNRESET) => self.peers[peer].sent = true,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(error) => return Err(failed("sendmsg", error)),
        }
        Ok(true)
    }

    /// What a peer says, on either connection: that it has its descriptors, or that it gives up and why.
    fn hear(&mut self, peer: usize) -> Result<()> {
        let (rank, world) = (self.rank, self.peers.len());
        let Peer { out, back, received, gone, .. } = &mut self.peers[peer];
        let mut words = Vec::new();
        if let Some(out) = out.as_ref().filter(|_| !*gone) {
            let word = hear(out);
            *gone = word == Word::Gone;
            words.push(word);
        }
        if let Some(socket) = back {
            let word = hear(socket);
            if word == Word::Gone {
                // What was said on the other one counts.
                *back = None;
            }
            words.push(word);
        }
        for word in words {
            match word {
                Word::Nothing | Word::Gone => {}
                Word::Frame(Frame::Start) => *received = true,
                Word::Frame(Frame::Fail(verdict)) if verdict.fits(world) => return Err(verdict.error(rank, world)),
                Word::Frame(_) | Word::Nonsense => {
                    let why = "it answered with what is no receipt".to_owned();
                    return Err(Reason::Protocol { rank, peer, why }.into());
                }
            }
        }
        Ok(())
    }

    fn accept(&mut self) -> Result<()> {
        for _ in 0..STRANGERS {
            match accept_with(&self.listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
                Ok(fd) if is_own_user(&fd) => {
                    if self.strangers.len() == STRANGERS {
                        self.strangers.remove(0);
                    }
                    self.strangers.push(fd);
                }
                Ok(_) | Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => return Ok(()),
                Err(error) => return Err(failed("accept", error)),
            }
        }
        Ok(())
    }

    /// Takes what strangers sent; those who sent something else go, and what they sent is closed.
    fn receive(&mut self) -> Result<()> {
        for socket in std::mem::take(&mut self.strangers) {
            match take_message(&socket) {
                Err(Errno::AGAIN) => self.strangers.push(socket),
                Ok(message) => {
                    let Some(parcel) = Parcel::decode(&message.bytes) else { continue };
                    let expected = self.fds.len();
                    let own = &self.offers[self.rank];
                    let Some(peer) = self.peers.get_mut(parcel.rank) else { continue };
                    if !own.is_token(&parcel.token) || parcel.count != expected || peer.given.is_some() {
                        continue;
                    }
                    if message.fds.len() < expected {
                        // The kernel drops those for which this process has no room left.
                        return Err(failed("recvmsg", Errno::MFILE));
                    }
                    say(&socket, Frame::Start);
                    peer.given = Some(message.fds);
                    peer.back = Some(socket);
                }
                Err(_) => {}
            }
        }
        Ok(())
    }

    /// Tells the peers who is missing, on every connection there is; without a word they would name this rank.
    fn dismiss(&mut self, error: &Error) {
        let Some(verdict) = Verdict::of(error) else { return };
        // Those who wait to be taken get a word too, or an end where even that fails.
        let _ = self.accept();
        let connections = self.peers.iter().flat_map(|peer| [&peer.out, &peer.back]).flatten();
        for socket in connections.chain(&self.strangers) {
            say(socket, Frame::Fail(verdict));
        }
    }
}

/// What comes on a connection.
#[derive(Debug, PartialEq)]
enum Word {
    Nothing,
    Frame(Frame),
    Nonsense,
    /// The peer has closed it.
    Gone,
}

fn hear(socket: &OwnedFd) -> Word {
    loop {
        let mut bytes = [0; MAX_GREETING];
        return match recv(socket, &mut bytes, RecvFlags::DONTWAIT) {
            Ok((count @ 1.., _)) => match Frame::decode(&bytes[..count.min(MAX_GREETING)], MAX_GREETING) {
                Ok(Some((frame, _))) => Word::Frame(frame),
                _ => Word::Nonsense,
            },
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) => Word::Nothing,
            Ok((0, _)) | Err(_) => Word::Gone,
        };
    }
}

/// One frame, to a queue that has never held more than two; the peer may have gone.
fn say(socket: &OwnedFd, frame: Frame) {
    while let Err(Errno::INTR) = send(socket, &frame.encode(), SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {}
}

struct Message {
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

/// One message and its descriptors. [`Errno::AGAIN`] while there is none; other errors are final.
fn take_message(socket: impl AsFd) -> Result<Message, Errno> {
    loop {
        let mut bytes = [0; PARCEL + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::DONTWAIT;
        let message = match recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
            Err(Errno::INTR) => continue,
            result => result?,
        };
        let mut fds = Vec::new();
        for part in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = part {
                fds.extend(rights);
            }
        }
        if message.bytes == 0 {
            return Err(Errno::CONNRESET);
        }
        return Ok(Message { bytes: bytes[..message.bytes].to_vec(), fds });
    }
}

fn failed(call: &'static str, error: impl std::fmt::Display) -> Error {
    Reason::System { why: format!("exchange of file descriptors: {call} failed: {error}") }.into()
}
