//! Gathers over connections that are made: ranks send to rank 0, and rank 0 sends everything to all.
//!
//! A group ends for all of its ranks at once and for one reason. Rank 0 sees every connection; while it waits it says ten
//! times a second whom it has heard from, so a rank whose patience ends knows who is missing, says so, and rank 0 passes
//! it on. A rank that dies closes its socket, and that is passed on too.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::{ApiMisuse, Error, Rendezvous, Result};

use super::conn::{Conn, Deadline, wait};
use super::wire::{Frame, MAX_FRAME, MAX_MESSAGE, Ranks, Verdict};

/// Before this no rank is told that others are late: most gathers are done by then.
const FIRST_BEAT: Duration = Duration::from_millis(20);
/// Between two words of rank 0 that it is at work.
const BEAT: Duration = Duration::from_millis(100);
/// Without a word from rank 0 for this long, it is rank 0 that is missing.
const SILENCE: Duration = Duration::from_secs(1);

/// A rank's place in a group that has formed.
#[derive(Debug)]
pub(super) struct Star {
    rank: usize,
    world: usize,
    /// Of the last gather.
    sequence: u64,
    links: Links,
    failed: Option<Error>,
}

#[derive(Debug)]
pub(super) enum Links {
    /// Of rank 0, by rank; the own place is empty.
    Hub(Vec<Option<Conn>>),
    /// To rank 0.
    Leaf(Conn),
}

/// Why a gather ends: for a reason that all ranks share, or one that is this rank's alone.
#[derive(Debug)]
pub(super) enum Fault {
    /// The others are told that, or told it.
    Shared(Verdict),
    /// This peer broke the rules; the others are told that it is lost.
    Peer(usize, String),
    /// The operating system's.
    Local(Error),
}

impl From<Error> for Fault {
    fn from(error: Error) -> Self {
        Fault::Local(error)
    }
}

impl Fault {
    pub(super) fn lost(rank: usize) -> Self {
        Fault::Shared(Verdict::Lost { missing: Ranks::of([rank]) })
    }

    /// The error of `rank`, and what it tells the others.
    pub(super) fn settle(self, rank: usize, world: usize) -> (Error, Verdict) {
        match self {
            Fault::Shared(verdict) => (verdict.error(rank, world), verdict),
            Fault::Peer(peer, why) => {
                let missing = Ranks::of([peer]);
                (Rendezvous::Protocol { rank, peer, why }.into(), Verdict::Lost { missing })
            }
            Fault::Local(error) => (error, Verdict::Lost { missing: Ranks::of([rank]) }),
        }
    }
}

impl Star {
    pub(super) fn new(rank: usize, world: usize, links: Links) -> Self {
        Star { rank, world, sequence: 0, links, failed: None }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn world(&self) -> usize {
        self.world
    }

    /// Bytes of memory for what peers send.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        match &self.links {
            Links::Hub(members) => members.iter().flatten().map(Conn::held).sum(),
            Links::Leaf(hub) => hub.held(),
        }
    }

    pub(super) fn gather(&mut self, bytes: &[u8], patience: Duration) -> Result<Vec<Vec<u8>>> {
        if let Some(error) = &self.failed {
            return Err(error.clone());
        }
        if bytes.len() > MAX_MESSAGE {
            return Err(ApiMisuse::TooMany { what: "bytes in a gather", given: bytes.len(), limit: MAX_MESSAGE }.into());
        }
        self.sequence += 1;
        let deadline = Deadline::new(patience);
        let (rank, world, sequence) = (self.rank, self.world, self.sequence);
        let result = match &mut self.links {
            Links::Hub(members) => collect(members, bytes, sequence, deadline)
                .and_then(|parts| distribute(members, &parts, sequence, deadline).map(|()| parts)),
            Links::Leaf(hub) => exchange(hub, bytes, rank, world, sequence, deadline),
        };
        result.map_err(|fault| {
            let (error, verdict) = fault.settle(rank, world);
            self.fail(error.clone(), verdict);
            error
        })
    }

    pub(super) fn end(&mut self, error: &Error) {
        if self.failed.is_none() {
            let verdict = Verdict::of(error).filter(|verdict| verdict.fits(self.world));
            let verdict = verdict.unwrap_or(Verdict::Lost { missing: Ranks::of([self.rank]) });
            self.fail(error.clone(), verdict);
        }
    }

    fn fail(&mut self, error: Error, verdict: Verdict) {
        match &mut self.links {
            Links::Hub(members) => dismiss(members, verdict),
            Links::Leaf(hub) => leave(hub, self.rank, verdict),
        }
        self.failed = Some(error);
    }
}

/// Tells all ranks why the group ends, and that nothing more comes. The sockets stay: closing them with something unread
/// would reset the connection, which may overtake the word.
pub(super) fn dismiss(members: &mut [Option<Conn>], verdict: Verdict) {
    let word: Arc<[u8]> = Frame::Fail(verdict).encode().into();
    for member in members.iter_mut().flatten() {
        member.send(word.clone());
        member.finish();
    }
}

/// Leaves rank 0, and tells it what it cannot see by itself.
pub(super) fn leave(hub: &mut Conn, rank: usize, verdict: Verdict) {
    let seen = |missing| missing == Ranks::of([0]) || missing == Ranks::of([rank]);
    if !matches!(verdict, Verdict::Lost { missing } if seen(missing)) {
        hub.send(Frame::Fail(verdict).encode());
    }
    hub.finish();
}

/// Says now and then that rank 0 is at work.
#[derive(Debug)]
pub(super) struct Beat {
    next: Instant,
    /// Who was present when it was last said; nobody before that.
    told: Ranks,
}

impl Beat {
    pub(super) fn new() -> Self {
        Beat { next: Instant::now() + FIRST_BEAT, told: Ranks::default() }
    }

    /// The time until the next word is due.
    pub(super) fn left(&self) -> Duration {
        self.next.saturating_duration_since(Instant::now())
    }

    /// Tells `members` who is present, if it is time or has changed since: a rank whose patience ends must not name one that
    /// has just come.
    pub(super) fn tell(&mut self, members: &mut [Option<Conn>], present: Ranks) {
        let changed = self.told != Ranks::default() && self.told != present;
        if !changed && !self.left().is_zero() {
            return;
        }
        self.told = present;
        self.next = Instant::now() + BEAT;
        let word: Arc<[u8]> = Frame::Waiting { present }.encode().into();
        // Who does not read, because it is stopped, must not have words pile up here.
        for member in members.iter_mut().flatten().filter(|member| !member.is_sending()) {
            member.send(word.clone());
        }
    }
}

/// Rank 0: everybody's part.
fn collect(members: &mut [Option<Conn>], own: &[u8], sequence: u64, deadline: Deadline) -> Result<Vec<Vec<u8>>, Fault> {
    let world = members.len();
    let mut parts: Vec<Option<Vec<u8>>> = vec![None; world];
    parts[0] = Some(own.to_vec());
    let mut beat = Beat::new();
    loop {
        let mut lost = Ranks::default();
        for (rank, member) in members.iter_mut().enumerate() {
            let Some(member) = member else { continue };
            member.flush();
            loop {
                match member.next(MAX_FRAME) {
                    Ok(Some(Frame::Give { sequence: theirs, bytes }))
                        if theirs == sequence && parts[rank].is_none() =>
                    {
                        parts[rank] = Some(bytes);
                    }
                    Ok(Some(Frame::Fail(verdict))) if verdict.fits(world) => return Err(Fault::Shared(verdict)),
                    Ok(Some(other)) => return Err(Fault::Peer(rank, unexpected(&other))),
                    Ok(None) => {
                        lost = lost.and(member.has_ended().then_some(rank));
                        break;
                    }
                    Err(why) => return Err(Fault::Peer(rank, why.to_string())),
                }
            }
        }
        if lost != Ranks::default() {
            return Err(Fault::Shared(Verdict::Lost { missing: lost }));
        }
        let present = Ranks::of((0..world).filter(|rank| parts[*rank].is_some()));
        if (0..world).all(|rank| present.contains(rank)) {
            return Ok(parts.into_iter().flatten().collect());
        }
        if deadline.passed() {
            let missing = Ranks::of((0..world).filter(|rank| !present.contains(*rank)));
            return Err(Fault::Shared(Verdict::Absent { missing, after: deadline.patience }));
        }
        beat.tell(members, present);
        let mut fds: Vec<_> = members.iter().flatten().map(Conn::interest).collect();
        wait(&mut fds, deadline.left().min(beat.left()))?;
    }
}

/// Rank 0: everybody's part to all. A rank that has gone by now is found by the next gather: this one is complete.
fn distribute(members: &mut [Option<Conn>], parts: &[Vec<u8>], sequence: u64, deadline: Deadline) -> Result<(), Fault> {
    for (rank, part) in parts.iter().enumerate() {
        let part: Arc<[u8]> = Frame::part(sequence, rank, part).into();
        for (_, member) in members.iter_mut().enumerate().filter(|(peer, _)| *peer != rank) {
            if let Some(member) = member {
                member.send(part.clone());
            }
        }
    }
    flush_all(members, deadline)
}

/// Waits until all has been sent.
pub(super) fn flush_all(members: &mut [Option<Conn>], deadline: Deadline) -> Result<(), Fault> {
    loop {
        members.iter_mut().flatten().for_each(Conn::flush);
        let sending = |member: &&Conn| member.is_sending();
        let mut fds: Vec<_> = members.iter().flatten().filter(sending).map(Conn::interest_to_send).collect();
        if fds.is_empty() {
            return Ok(());
        }
        if deadline.passed() {
            let late = |(rank, member): (usize, &Option<Conn>)| member.as_ref().filter(sending).map(|_| rank);
            let missing = Ranks::of(members.iter().enumerate().filter_map(late));
            return Err(Fault::Shared(Verdict::Absent { missing, after: deadline.patience }));
        }
        wait(&mut fds, deadline.left())?;
    }
}

/// Another rank: its part to rank 0, and everybody's from there, in rank order.
fn exchange(
    hub: &mut Conn,
    own: &[u8],
    rank: usize,
    world: usize,
    sequence: u64,
    deadline: Deadline,
) -> Result<Vec<Vec<u8>>, Fault> {
    hub.send(Frame::give(sequence, own));
    let mut parts = Vec::with_capacity(world);
    let mut news = News::default();
    loop {
        if parts.len() == rank {
            parts.push(own.to_vec());
        }
        if parts.len() == world {
            return Ok(parts);
        }
        match next_of_hub(hub, world, deadline, &mut news)? {
            Frame::Part { sequence: theirs, rank: from, bytes }
                if theirs == sequence && from as usize == parts.len() =>
            {
                parts.push(bytes);
            }
            other => return Err(Fault::Peer(0, unexpected(&other))),
        }
    }
}

/// What rank 0 last said of the others, and when.
#[derive(Debug, Default)]
pub(super) struct News {
    last: Option<(Instant, Ranks)>,
}

impl News {
    /// Who is missing when this rank's patience has ended.
    fn verdict(&self, world: usize, deadline: Deadline) -> Verdict {
        let missing = match self.last.filter(|(when, _)| when.elapsed() < SILENCE) {
            Some((_, present)) => Ranks::of((0..world).filter(|rank| !present.contains(*rank))),
            None => Ranks::of([0]),
        };
        Verdict::Absent { missing, after: deadline.patience }
    }
}

/// The next frame from rank 0 that is no word about others.
pub(super) fn next_of_hub(hub: &mut Conn, world: usize, deadline: Deadline, news: &mut News) -> Result<Frame, Fault> {
    loop {
        hub.flush();
        match hub.next(MAX_FRAME) {
            Ok(Some(Frame::Waiting { present })) => {
                let complete = (0..world).all(|rank| present.contains(rank));
                news.last = Some((Instant::now(), present)).filter(|_| !complete);
                // However many of them come.
                if deadline.passed() {
                    return Err(Fault::Shared(news.verdict(world, deadline)));
                }
            }
            Ok(Some(Frame::Fail(verdict))) if verdict.fits(world) => return Err(Fault::Shared(verdict)),
            Ok(Some(frame)) => return Ok(frame),
            Ok(None) if hub.has_ended() => return Err(Fault::lost(0)),
            Ok(None) if deadline.passed() => {
                return Err(Fault::Shared(news.verdict(world, deadline)));
            }
            Ok(None) => wait(&mut [hub.interest()], deadline.left())?,
            Err(why) => return Err(Fault::Peer(0, why.to_string())),
        }
    }
}

/// What is wrong with a frame that can be read.
pub(super) fn unexpected(frame: &Frame) -> String {
    let what = match frame {
        Frame::Hello { .. } | Frame::Challenge { .. } | Frame::Proof { .. } | Frame::Welcome { .. } => "a greeting",
        Frame::Refuse(_) => "a refusal",
        Frame::Waiting { .. } => "a word about others",
        Frame::Start => "the word to start",
        Frame::Give { .. } | Frame::Part { .. } => "a part of another gather",
        Frame::Fail(_) => "a verdict about ranks that do not exist",
    };
    format!("it sent {what} out of turn")
}
