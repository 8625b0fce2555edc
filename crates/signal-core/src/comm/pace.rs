//! How far a rank may run ahead of its peers.
//!
//! A stream takes a bounded number of launches, about a thousand on CUDA; one more waits inside the driver until the first has
//! ended. If that one waits for a peer whose calls come from the same thread, or from a thread that the driver holds up too,
//! nothing moves until the deadline. So a rank that is far ahead is stopped here, before it launches.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::{ApiMisuse, Result};
use crate::layout::{MAX_GPUS, NUM_BARRIER_DOMAINS};

/// Calls that a rank may be ahead of a partner.
pub(crate) const MOST_AHEAD: u64 = 512;
/// Between two looks at the peers.
const NAP: Duration = Duration::from_micros(50);

/// What the ranks of a group have enqueued.
#[derive(Debug)]
pub(crate) struct Pace {
    /// By rank and domain: the calls of each domain have a stream, and perhaps a thread, of their own.
    ranks: Vec<[Progress; NUM_BARRIER_DOMAINS]>,
    /// Calls of some rank were captured: replays are not seen here, so counts no longer tell who is ahead.
    graphs: AtomicBool,
}

#[derive(Debug)]
struct Progress {
    /// Calls with each rank, those of graphs not counted. `u64::MAX` once this rank is gone.
    calls: [AtomicU64; MAX_GPUS],
    /// The thread that makes them: at first the one that made the communicator; 0 if it is not known.
    thread: AtomicU64,
}

impl Progress {
    fn new() -> Self {
        Progress { calls: Default::default(), thread: AtomicU64::new(this_thread()) }
    }
}

impl Pace {
    pub(crate) fn new(world: usize) -> Self {
        debug_assert!(world <= MAX_GPUS);
        let rank = |_| std::array::from_fn(|_| Progress::new());
        Pace { ranks: (0..world).map(rank).collect(), graphs: AtomicBool::new(false) }
    }

    // Relaxed throughout: the numbers order nothing, and an old one only makes a rank look again.

    /// Counts a call of `rank` on `domain` with `partners`, as bits. If it is far ahead of one of them, waits until it no longer is, at most for
    /// `patience` and while `go_on` holds.
    ///
    /// # Errors
    /// [`ApiMisuse::RunAhead`], at once if the slowest partner's calls come from this thread; what `go_on` says.
    pub(crate) fn step(
        &self,
        (rank, domain): (usize, usize),
        partners: u32,
        patience: Duration,
        go_on: impl Fn() -> Result<()>,
    ) -> Result<()> {
        if self.graphs.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (me, mine) = (this_thread(), &self.ranks[rank][domain]);
        mine.thread.store(me, Ordering::Relaxed);
        let mut began = None;
        while let Some((slowest, _)) = self.slowest((rank, domain), partners).filter(|(_, ahead)| *ahead >= MOST_AHEAD)
        {
            let same_thread = self.ranks[slowest][domain].thread.load(Ordering::Relaxed) == me;
            if same_thread || began.get_or_insert_with(Instant::now).elapsed() > patience {
                return Err(ApiMisuse::RunAhead { rank, slowest, limit: MOST_AHEAD, same_thread }.into());
            }
            go_on()?;
            std::thread::sleep(NAP);
        }
        for peer in self.peers(rank, partners) {
            mine.calls[peer].fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    fn peers(&self, rank: usize, partners: u32) -> impl Iterator<Item = usize> {
        (0..self.ranks.len()).filter(move |peer| *peer != rank && partners >> peer & 1 == 1)
    }

    /// The partner that is farthest behind, and by how many calls.
    fn slowest(&self, (rank, domain): (usize, usize), partners: u32) -> Option<(usize, u64)> {
        let ahead = |peer: usize| {
            let [ours, theirs] =
                [(rank, peer), (peer, rank)].map(|(a, b)| self.ranks[a][domain].calls[b].load(Ordering::Relaxed));
            (peer, ours.saturating_sub(theirs))
        };
        self.peers(rank, partners).map(ahead).min_by_key(|(_, ahead)| std::cmp::Reverse(*ahead))
    }

    /// A call was captured: from now on nobody is stopped.
    pub(crate) fn captures(&self) {
        self.graphs.store(true, Ordering::Relaxed);
    }

    /// Nobody knows which thread will make the next calls of a domain.
    pub(crate) fn changes_thread(&self, rank: usize, domain: usize) {
        self.ranks[rank][domain].thread.store(0, Ordering::Relaxed);
    }

    /// The same of all domains.
    pub(crate) fn changes_threads(&self, rank: usize) {
        (0..NUM_BARRIER_DOMAINS).for_each(|domain| self.changes_thread(rank, domain));
    }

    /// Nobody waits for this rank any more: a call that misses it ends at its deadline.
    pub(crate) fn leave(&self, rank: usize) {
        self.set(rank, u64::MAX);
    }

    /// After a recovery all ranks are level.
    pub(crate) fn reset(&self, rank: usize) {
        self.set(rank, 0);
    }

    fn set(&self, rank: usize, count: u64) {
        self.ranks[rank]
            .iter()
            .flat_map(|domain| &domain.calls)
            .for_each(|calls| calls.store(count, Ordering::Relaxed));
    }
}

/// A number for the calling thread, never 0.
fn this_thread() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local!(static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed));
    NUMBER.with(|number| *number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn step(pace: &Pace, rank: usize) -> Result<()> {
        pace.step((rank, 0), u32::MAX, Duration::from_millis(20), || Ok(()))
    }

    #[test]
    fn one_thread_is_told_at_once() {
        let pace = Pace::new(3);
        for _ in 0..MOST_AHEAD {
            step(&pace, 0).unwrap();
        }
        let refused = |found: Result<()>, by: usize| {
            let expected = ApiMisuse::RunAhead { rank: 0, slowest: by, limit: MOST_AHEAD, same_thread: true };
            assert_eq!(found, Err(Error::ApiMisuse(expected)));
        };
        refused(step(&pace, 0), 1);
        step(&pace, 1).unwrap();
        refused(step(&pace, 0), 2);
        pace.leave(2);
        step(&pace, 0).unwrap();
        refused(step(&pace, 0), 1);
        (0..3).for_each(|rank| pace.reset(rank));
        step(&pace, 0).unwrap();
        pace.captures();
        (0..3 * MOST_AHEAD).for_each(|_| step(&pace, 0).unwrap());
    }

    #[test]
    fn those_without_business_are_left_alone() {
        let pace = Pace::new(3);
        let step = |rank, partners| pace.step((rank, 0), partners, Duration::from_millis(20), || Ok(()));
        (0..3 * MOST_AHEAD).for_each(|_| [step(0, 0b010), step(1, 0b001)].into_iter().for_each(|found| found.unwrap()));
        (0..MOST_AHEAD).for_each(|_| step(2, 0b010).unwrap());
        let expected = ApiMisuse::RunAhead { rank: 2, slowest: 1, limit: MOST_AHEAD, same_thread: true };
        assert_eq!(step(2, 0b011), Err(Error::ApiMisuse(expected)));
        step(2, 0b001).unwrap();
    }

    #[test]
    fn domains_do_not_stand_for_each_other() {
        let pace = Pace::new(2);
        let step = |rank, domain| pace.step((rank, domain), u32::MAX, Duration::from_millis(20), || Ok(()));
        (0..MOST_AHEAD).for_each(|_| step(0, 1).unwrap());
        (0..MOST_AHEAD).for_each(|_| step(1, 2).unwrap());
        let refused = |found, rank, same_thread| {
            let expected = ApiMisuse::RunAhead { rank, slowest: 1 - rank, limit: MOST_AHEAD, same_thread };
            assert_eq!(found, Err(Error::ApiMisuse(expected)));
        };
        refused(step(0, 1), 0, true);
        // The handle of a domain may be on its way to another thread.
        pace.changes_thread(0, 2);
        refused(step(1, 2), 1, false);
        step(0, 2).unwrap();
        step(1, 2).unwrap();
        refused(step(1, 2), 1, true);
    }

    #[test]
    fn another_thread_is_waited_for() {
        let pace = Pace::new(2);
        std::thread::scope(|scope| {
            let fast = scope.spawn(|| {
                (0..3 * MOST_AHEAD).try_for_each(|_| pace.step((0, 0), u32::MAX, Duration::from_secs(60), || Ok(())))
            });
            let slow = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                (0..3 * MOST_AHEAD).try_for_each(|_| pace.step((1, 0), u32::MAX, Duration::from_secs(60), || Ok(())))
            });
            fast.join().unwrap().unwrap();
            slow.join().unwrap().unwrap();
        });
    }

    #[test]
    fn patience_and_faults_end_the_wait() {
        let pace = Pace::new(2);
        let found = std::thread::scope(|scope| {
            scope.spawn(|| (0..=MOST_AHEAD).try_for_each(|_| step(&pace, 0))).join().unwrap()
        });
        let expected = ApiMisuse::RunAhead { rank: 0, slowest: 1, limit: MOST_AHEAD, same_thread: false };
        assert_eq!(found, Err(Error::ApiMisuse(expected)));
        let aborted = Error::Aborted { rank: 0, by: 1 };
        let stop = || Err(aborted.clone());
        let found = std::thread::scope(|scope| {
            scope.spawn(|| pace.step((0, 0), u32::MAX, Duration::from_secs(60), stop)).join().unwrap()
        });
        assert_eq!(found, Err(aborted));
    }
}
