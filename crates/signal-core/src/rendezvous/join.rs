//! How a group forms: rank 0 listens, the others come to it, and each side proves that it knows the secret.
//!
//! A rank says hello with a nonce; rank 0 answers with its own; the rank signs both with its rank and world size; rank 0
//! does too. Until then it is a stranger: it has little memory and little time, and can do nothing but be closed. The
//! socket that listens is closed before anybody is told to start, so that ranks which go on to form their next group
//! under the same name never come to this one.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};

use crate::error::{ApiMisuse, Error, Refusal, Rendezvous, Result};

use super::conn::{Conn, Deadline, wait};
use super::secret::{Secret, random};
use super::star::{Beat, Fault, Links, News, Star, dismiss, flush_all, leave, next_of_hub, unexpected};
use super::wire::{Bytes32, Frame, MAX_GREETING, Malformed, Ranks, Refused, VERSION, Verdict};

/// How long a stranger may take to prove itself.
const GREETING: Duration = Duration::from_secs(2);
/// Strangers at once. The oldest goes when one more comes: who knows the secret needs a moment only, and comes again.
pub(super) const STRANGERS: usize = 32;
/// The longest pause before a rank tries again to reach rank 0.
const PAUSE: Duration = Duration::from_millis(20);

/// Somebody who has not proven anything yet.
#[derive(Debug)]
struct Stranger {
    conn: Conn,
    since: Instant,
    /// Its nonce and ours, once it has said hello.
    nonces: Option<(Bytes32, Bytes32)>,
}

/// What has become of a stranger.
enum Outcome {
    Waits(Stranger),
    Goes,
    Joins(usize, Conn),
    /// It is one of us, but cannot be: that ends the group.
    Ends(Verdict),
}

/// `rank`'s way into a group of `world`. Rank 0 listens at what `claim` gives, where the others `reach` it.
pub(super) fn form(
    claim: impl FnOnce() -> Result<OwnedFd>,
    admit: impl Fn(&OwnedFd) -> bool,
    reach: impl FnMut(Deadline) -> Result<Option<OwnedFd>>,
    secret: &Secret,
    (rank, world): (usize, usize),
    deadline: Deadline,
) -> Result<Star> {
    match rank {
        0 if world == 1 => Ok(Star::new(0, 1, Links::Hub(vec![None]))),
        0 => lead(claim()?, admit, secret, world, deadline),
        _ => follow(reach, secret, rank, world, deadline),
    }
}

/// Rank 0 of a group of `world`: takes ranks from `listener` until all are there. `admit` prepares an accepted socket or
/// turns it away.
pub(super) fn lead(
    listener: OwnedFd,
    admit: impl Fn(&OwnedFd) -> bool,
    secret: &Secret,
    world: usize,
    deadline: Deadline,
) -> Result<Star> {
    let mut members: Vec<Option<Conn>> = (0..world).map(|_| None).collect();
    let met = assemble(&listener, admit, secret, &mut members, deadline).and_then(|()| {
        drop(listener);
        let start: Arc<[u8]> = Frame::Start.encode().into();
        members.iter_mut().flatten().for_each(|member| member.send(start.clone()));
        flush_all(&mut members, deadline)
    });
    match met {
        Ok(()) => Ok(Star::new(0, world, Links::Hub(members))),
        Err(fault) => {
            let (error, verdict) = fault.settle(0, world);
            dismiss(&mut members, verdict);
            Err(error)
        }
    }
}

fn assemble(
    listener: &OwnedFd,
    admit: impl Fn(&OwnedFd) -> bool,
    secret: &Secret,
    members: &mut [Option<Conn>],
    deadline: Deadline,
) -> Result<(), Fault> {
    let world = members.len();
    let mut strangers: Vec<Stranger> = Vec::new();
    let mut beat = Beat::new();
    loop {
        accept(listener, &admit, &mut strangers)?;
        for stranger in std::mem::take(&mut strangers) {
            match stranger.step(secret, members)? {
                Outcome::Waits(stranger) => strangers.push(stranger),
                Outcome::Goes => {}
                Outcome::Joins(rank, conn) => members[rank] = Some(conn),
                Outcome::Ends(verdict) => return Err(Fault::Shared(verdict)),
            }
        }
        let mut lost = Ranks::default();
        for (rank, member) in members.iter_mut().enumerate() {
            let Some(member) = member else { continue };
            member.flush();
            match member.next(MAX_GREETING) {
                Ok(Some(Frame::Fail(verdict))) if verdict.fits(world) => return Err(Fault::Shared(verdict)),
                Ok(Some(other)) => return Err(Fault::Peer(rank, unexpected(&other))),
                Ok(None) => lost = lost.and(member.has_ended().then_some(rank)),
                Err(why) => return Err(Fault::Peer(rank, why.to_string())),
            }
        }
        if lost != Ranks::default() {
            return Err(Fault::Shared(Verdict::Lost { missing: lost }));
        }
        let present = Ranks::of((0..world).filter(|rank| *rank == 0 || members[*rank].is_some()));
        let missing = Ranks::of((0..world).filter(|rank| !present.contains(*rank)));
        if missing == Ranks::default() {
            return Ok(());
        }
        if deadline.passed() {
            return Err(Fault::Shared(Verdict::Absent { missing, after: deadline.patience }));
        }
        beat.tell(members, present);
        let oldest = strangers.first().map_or(GREETING, |stranger| GREETING.saturating_sub(stranger.since.elapsed()));
        let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
        fds.extend(strangers.iter().map(|stranger| stranger.conn.interest()));
        fds.extend(members.iter().flatten().map(Conn::interest));
        wait(&mut fds, deadline.left().min(beat.left()).min(oldest))?;
    }
}

fn accept(listener: &OwnedFd, admit: impl Fn(&OwnedFd) -> bool, strangers: &mut Vec<Stranger>) -> Result<()> {
    // No more at once than are kept, so that a crowd does not keep this rank from those who have come already.
    for _ in 0..STRANGERS {
        match accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(fd) if admit(&fd) => {
                if strangers.len() == STRANGERS {
                    strangers.remove(0);
                }
                strangers.push(Stranger { conn: Conn::new(fd), since: Instant::now(), nonces: None });
            }
            Ok(_) | Err(Errno::INTR | Errno::CONNABORTED | Errno::PROTO | Errno::PERM) => {}
            Err(Errno::AGAIN) => return Ok(()),
            Err(error) => return Err(Rendezvous::System { why: format!("accept failed: {error}") }.into()),
        }
    }
    Ok(())
}

impl Stranger {
    fn step(mut self, secret: &Secret, members: &[Option<Conn>]) -> Result<Outcome> {
        self.conn.flush();
        loop {
            let frame = match self.conn.next(MAX_GREETING) {
                Ok(Some(frame)) => frame,
                Ok(None) if self.conn.has_ended() || self.since.elapsed() > GREETING => return Ok(Outcome::Goes),
                Ok(None) => return Ok(Outcome::Waits(self)),
                Err(Malformed::Version(_)) => return Ok(self.refuse(Refused::Version)),
                Err(_) => return Ok(Outcome::Goes),
            };
            match (frame, self.nonces) {
                (Frame::Hello { nonce }, None) => {
                    let own = random()?;
                    self.nonces = Some((nonce, own));
                    self.conn.send(Frame::Challenge { nonce: own }.encode());
                }
                (Frame::Proof { rank, world, mac }, Some((hello, challenge))) => {
                    return Ok(if secret.is_rank(&hello, &challenge, rank, world, &mac) {
                        self.judge(rank, world, secret.prove_hub(&hello, &challenge, rank, world), members)
                    } else {
                        self.refuse(Refused::Secret)
                    });
                }
                _ => return Ok(Outcome::Goes),
            }
        }
    }

    /// It knows the secret.
    fn judge(mut self, rank: u32, world: u32, proof: Bytes32, members: &[Option<Conn>]) -> Outcome {
        if world as usize != members.len() {
            let _ = self.refuse(Refused::World(members.len() as u32));
            return Outcome::Ends(Verdict::World { rank, world });
        }
        match members.get(rank as usize) {
            // Rank 0 is this process.
            Some(None) if rank != 0 => {}
            None => return self.refuse(Refused::Rank),
            Some(_) => return self.refuse(Refused::Duplicate),
        }
        self.conn.send(Frame::Welcome { mac: proof }.encode());
        Outcome::Joins(rank as usize, self.conn)
    }

    fn refuse(mut self, why: Refused) -> Outcome {
        self.conn.send(Frame::Refuse(why).encode());
        Outcome::Goes
    }
}

/// A rank above 0 of a group of `world`: comes to rank 0 and waits until all are there. `connect` gives a socket, or
/// nothing while rank 0 does not listen.
pub(super) fn follow(
    mut connect: impl FnMut(Deadline) -> Result<Option<OwnedFd>>,
    secret: &Secret,
    rank: usize,
    world: usize,
    deadline: Deadline,
) -> Result<Star> {
    let mut pause = Duration::from_millis(1);
    let mut hub = loop {
        if let Some(fd) = connect(deadline)? {
            let mut conn = Conn::new(fd);
            if greet(&mut conn, secret, rank, world, deadline)? {
                break conn;
            }
        }
        if deadline.passed() {
            let verdict = Verdict::Absent { missing: Ranks::of([0]), after: deadline.patience };
            return Err(verdict.error(rank, world));
        }
        std::thread::sleep(pause.min(deadline.left()));
        pause = (pause * 2).min(PAUSE);
    };
    let fault = match next_of_hub(&mut hub, world, deadline, &mut News::default()) {
        Ok(Frame::Start) => return Ok(Star::new(rank, world, Links::Leaf(hub))),
        Ok(other) => Fault::Peer(0, unexpected(&other)),
        Err(fault) => fault,
    };
    let (error, verdict) = fault.settle(rank, world);
    leave(&mut hub, rank, verdict);
    Err(error)
}

/// Proves to rank 0 who this is, and has it prove itself. False if the connection ended before: what listened may have
/// been the last group's.
fn greet(conn: &mut Conn, secret: &Secret, rank: usize, world: usize, deadline: Deadline) -> Result<bool> {
    let hello = random()?;
    conn.send(Frame::Hello { nonce: hello }.encode());
    let challenge = match answer(conn, rank, world, deadline)? {
        Some(Frame::Challenge { nonce }) => nonce,
        Some(other) => return Err(distrust(rank, unexpected(&other))),
        None => return Ok(false),
    };
    let (me, all) = (rank as u32, world as u32);
    let mac = secret.prove_rank(&hello, &challenge, me, all);
    conn.send(Frame::Proof { rank: me, world: all, mac }.encode());
    match answer(conn, rank, world, deadline)? {
        Some(Frame::Welcome { mac }) if secret.is_hub(&hello, &challenge, me, all, &mac) => Ok(true),
        Some(Frame::Welcome { .. }) => Err(distrust(rank, "it does not know the secret".to_owned())),
        Some(other) => Err(distrust(rank, unexpected(&other))),
        None => Ok(false),
    }
}

/// The next frame of a greeting, or nothing once the connection or the time has ended.
fn answer(conn: &mut Conn, rank: usize, world: usize, deadline: Deadline) -> Result<Option<Frame>> {
    loop {
        conn.flush();
        match conn.next(MAX_GREETING) {
            Ok(Some(Frame::Refuse(why))) => return Err(refused(why, rank, world)),
            Ok(Some(frame)) => return Ok(Some(frame)),
            Ok(None) if conn.has_ended() || deadline.passed() => return Ok(None),
            Ok(None) => wait(&mut [conn.interest()], deadline.left())?,
            Err(Malformed::Version(theirs)) => return Err(version(rank, theirs)),
            Err(why) => return Err(distrust(rank, why.to_string())),
        }
    }
}

fn refused(why: Refused, rank: usize, world: usize) -> Error {
    let why = match why {
        Refused::Secret => Refusal::Secret,
        Refused::Duplicate => Refusal::Duplicate,
        Refused::Rank => return ApiMisuse::Rank { rank, world }.into(),
        Refused::World(ours) => {
            let (ours, theirs) = (ours.to_string(), world.to_string());
            return Rendezvous::Disagreement { name: "world size", first: 0, ours, rank, theirs }.into();
        }
        // Its header would have said another one.
        Refused::Version => return distrust(rank, "it refuses the version that it speaks itself".to_owned()),
    };
    Rendezvous::Refused { rank, why }.into()
}

fn version(rank: usize, theirs: u16) -> Error {
    let (ours, theirs) = (theirs.to_string(), VERSION.to_string());
    Rendezvous::Disagreement { name: "version of the rendezvous", first: 0, ours, rank, theirs }.into()
}

fn distrust(rank: usize, why: String) -> Error {
    Rendezvous::Protocol { rank, peer: 0, why }.into()
}
