//! Ends the process when a round hangs. Every wait of the library is bounded, so that this is a finding like any other; but
//! a thread that does not come back cannot be asked to.

use std::process;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// What the number of rounds becomes when nothing more is to be watched.
const OVER: u64 = u64::MAX;

/// Watches from its creation until it is dropped.
pub(super) struct Watchdog {
    rounds: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    /// Each round may take `limit`, rounds being counted from `first`; `what` is said of the run when one takes longer.
    pub(super) fn new(what: String, first: u64, limit: Duration) -> Self {
        let rounds = Arc::new(AtomicU64::new(first));
        let seen = rounds.clone();
        let watch = move || {
            let (mut round, mut since) = (first, Instant::now());
            loop {
                thread::park_timeout(limit / 10);
                match seen.load(Ordering::Acquire) {
                    OVER => return,
                    now if now == round && since.elapsed() > limit => {
                        eprintln!("error: {what}, round {round}: it hangs, after {limit:?} it has not ended");
                        process::exit(1);
                    }
                    now if now == round => {}
                    now => (round, since) = (now, Instant::now()),
                }
            }
        };
        Watchdog { rounds, thread: Some(thread::spawn(watch)) }
    }

    /// Says that `round` begins.
    pub(super) fn begin(&self, round: u64) {
        self.rounds.store(round, Ordering::Release);
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.rounds.store(OVER, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It does not panic.
            let _ = thread.join();
        }
    }
}
