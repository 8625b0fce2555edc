//! How far a rank may run ahead of its peers.
//!
//! A stream takes a bounded number of launches, about a thousand on CUDA; one more waits inside the driver until the first has
//! ended. If that one waits for a peer whose calls come from the same thread, or from a thread that the driver holds up too,
//! nothing moves until the deadline. So a rank that is far ahead is stopped here, before it launches.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::error::{ApiMisuse, Result};
use crate::layout::MAX_GPUS;

/// Calls that a rank may be ahead of the slowest one.
pub(crate) const MOST_AHEAD: u64 = 512;
/// Between two looks at the peers.
const NAP: Duration = Duration::from_micros(50);

/// What the ranks of a group have enqueued, by rank.
#[derive(Debug)]
pub(crate) struct Pace {
    ranks: Vec<Progress>,
    /// Calls of some rank were captured: replays are not seen here, so counts no longer tell who is ahead.
    graphs: AtomicBool,
}

#[derive(Debug)]
struct Progress {
    /// Calls, those of graphs not counted. `u64::MAX` once the rank is gone.
    calls: AtomicU64,
    /// The thread that makes them: at first the one that made the communicator.
    thread: AtomicU64,
}

impl Pace {
    pub(crate) fn new(world: usize) -> Self {
        debug_assert!(world <= MAX_GPUS);
        let rank = |_| Progress { calls: AtomicU64::new(0), thread: AtomicU64::new(this_thread()) };
        Pace { ranks: (0..world).map(rank).collect(), graphs: AtomicBool::new(false) }
    }

    // Relaxed throughout: the numbers order nothing, and an old one only makes a rank look again.

    /// Counts a call of `rank`. If that is far ahead of a peer, waits until it no longer is, at most for `patience` and
    /// while `go_on` holds.
    ///
    /// # Errors
    /// [`ApiMisuse::RunAhead`], at once if the slowest peer's calls come from this thread; what `go_on` says.
    pub(crate) fn step(&self, rank: usize, patience: Duration, go_on: impl Fn() -> Result<()>) -> Result<()> {
        if self.graphs.load(Ordering::Relaxed) {
            return Ok(());
        }
        let (me, mine) = (this_thread(), &self.ranks[rank]);
        mine.thread.store(me, Ordering::Relaxed);
        let calls = mine.calls.load(Ordering::Relaxed);
        let mut began = None;
        while let Some((slowest, _)) = self.slowest().filter(|(_, its)| calls.saturating_sub(*its) >= MOST_AHEAD) {
            let same_thread = self.ranks[slowest].thread.load(Ordering::Relaxed) == me;
            if same_thread || began.get_or_insert_with(Instant::now).elapsed() > patience {
                return Err(ApiMisuse::RunAhead { rank, slowest, limit: MOST_AHEAD, same_thread }.into());
            }
            go_on()?;
            std::thread::sleep(NAP);
        }
        mine.calls.store(calls + 1, Ordering::Relaxed);
        Ok(())
    }

    fn slowest(&self) -> Option<(usize, u64)> {
        let calls = self.ranks.iter().map(|rank| rank.calls.load(Ordering::Relaxed)).enumerate();
        calls.filter(|(_, calls)| *calls != u64::MAX).min_by_key(|(_, calls)| *calls)
    }

    /// A call was captured: from now on nobody is stopped.
    pub(crate) fn captures(&self) {
        self.graphs.store(true, Ordering::Relaxed);
    }

    /// Nobody waits for this rank any more: a call that misses it ends at its deadline.
    pub(crate) fn leave(&self, rank: usize) {
        self.ranks[rank].calls.store(u64::MAX, Ordering::Relaxed);
    }

    /// After a recovery all ranks are level.
    pub(crate) fn reset(&self, rank: usize) {
        self.ranks[rank].calls.store(0, Ordering::Relaxed);
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
        pace.step(rank, Duration::from_millis(20), || Ok(()))
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
    fn another_thread_is_waited_for() {
        let pace = Pace::new(2);
        std::thread::scope(|scope| {
            let fast =
                scope.spawn(|| (0..3 * MOST_AHEAD).try_for_each(|_| pace.step(0, Duration::from_secs(60), || Ok(()))));
            let slow = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(30));
                (0..3 * MOST_AHEAD).try_for_each(|_| pace.step(1, Duration::from_secs(60), || Ok(())))
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
        let found =
            std::thread::scope(|scope| scope.spawn(|| pace.step(0, Duration::from_secs(60), stop)).join().unwrap());
        assert_eq!(found, Err(aborted));
    }
}
