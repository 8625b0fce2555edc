//! One load: a checked pass of single calls, then timed batches, checked as well.

use std::time::Duration;

use signal_comm::Backend;

use super::args::Args;
use super::ranks::{Ranks, Work};
use crate::error::Result;

/// Time for the batches of one size and place, unless `--batches` says how many they are.
const BUDGET: Duration = Duration::from_millis(200);
/// Batches whatever they take: a median of fewer says nothing.
const MIN_BATCHES: usize = 3;
/// Batches however short they are.
const MAX_BATCHES: usize = 50;
/// Calls in a batch, unless `--iters` says how many they are or they take too long.
const CALLS: u32 = 20;

/// Calls that go round a few sets of buffers, and what must come of them.
pub(super) trait Load<B: Backend> {
    /// Sets of buffers.
    fn sets(&self) -> usize;
    /// Enqueues what makes every set ready for a batch.
    fn prepare(&mut self, ranks: &Ranks<B>) -> Result<()>;
    /// Enqueues one call, on one set, on every rank of this process.
    fn enqueue(&mut self, ranks: &mut Ranks<B>, set: usize) -> Result<()>;
    /// Compares the outputs of this process's ranks with what a batch of `work` must have left there.
    fn check(&mut self, ranks: &Ranks<B>, work: &Work<B>, found: &mut Measurement) -> Result<()>;
    /// Makes one element wrong of one of this process's ranks, to test the check.
    fn corrupt(&mut self, ranks: &Ranks<B>, index: usize) -> Result<()>;
}

/// What was found of a load.
#[derive(Debug, Default)]
pub(super) struct Measurement {
    /// Microseconds a call, each a batch's mean on its slowest rank; sorted.
    pub(super) times: Vec<f64>,
    pub(super) calls: u32,
    /// Elements whose bits were wrong, over all ranks, sets and both passes.
    pub(super) wrong: u64,
    /// Largest error of a single call against exact values, over all ranks and sets.
    pub(super) max_error: f64,
}

impl Measurement {
    /// The value below which a part of the times lies, by nearest rank.
    pub(super) fn quantile(&self, part: f64) -> f64 {
        let index = (part * self.times.len() as f64).ceil() as usize;
        self.times.get(index.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }
}

/// Measures and checks a load.
pub(super) fn measure<B: Backend>(ranks: &mut Ranks<B>, load: &mut impl Load<B>, args: &Args) -> Result<Measurement> {
    let mut found = Measurement::default();

    // A single call on each set, before anything is warm.
    let once = Work::Calls(load.sets() as u32);
    load.prepare(ranks)?;
    let mut time = ranks.batch(load, &once)? / once.calls();
    load.check(ranks, &once, &mut found)?;

    if args.warmup > 0 {
        time = ranks.batch(load, &Work::Calls(args.warmup))? / args.warmup;
    }
    let work = match args.graph {
        Some(calls) => {
            let mut work = ranks.capture(load, calls)?;
            // A graph's first replay uploads it.
            ranks.batch(load, &work)?;
            // The first time, behind few replays, may hold the wait for a rank whose launch comes last, which would then be taken for long calls that need few
            // replays before them.
            for times in [4, 1] {
                work.set_lead(ranks.batch(load, &work)?, times);
            }
            work
        }
        None => Work::Calls(args.iters.unwrap_or_else(|| calls_in_batch(time, load.sets()))),
    };
    found.calls = work.calls();

    let mut total = Duration::ZERO;
    while !enough_batches(args.batches, found.times.len(), total) {
        // Outside the timed part. In place it also keeps the number of calls on results of calls, and so the result, known.
        load.prepare(ranks)?;
        let time = ranks.batch(load, &work)?;
        total += time;
        found.times.push(time.as_secs_f64() * 1e6 / f64::from(found.calls));
    }
    found.times.sort_by(f64::total_cmp);

    if let Some(index) = ranks.here().position(|rank| args.corrupt == Some(rank)) {
        load.corrupt(ranks, index)?;
    }
    load.check(ranks, &work, &mut found)?;
    found.wrong = ranks.together.sum(found.wrong)?;
    // No error is negative, so that bits are in the order of the values; and JSON, in which processes talk, has no infinity.
    found.max_error = f64::from_bits(ranks.together.max(found.max_error.to_bits())?);
    Ok(found)
}

/// Calls that three batches can have in the budget, and no fewer than there are sets.
fn calls_in_batch(time: Duration, sets: usize) -> u32 {
    let affordable = BUDGET.as_nanos() / (MIN_BATCHES as u128 * time.as_nanos().max(1));
    CALLS.min(affordable as u32).max(sets as u32)
}

fn enough_batches(wanted: Option<u32>, done: usize, total: Duration) -> bool {
    match wanted {
        Some(batches) => done >= batches as usize,
        None => done >= MAX_BATCHES || (done >= MIN_BATCHES && total >= BUDGET),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_measured_values() {
        let times: Vec<f64> = (1..=50).map(f64::from).collect();
        let found = Measurement { times, calls: 1, ..Measurement::default() };
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|part| found.quantile(part)), [1.0, 25.0, 50.0, 50.0]);
    }

    #[test]
    fn batches_fit_the_budget() {
        assert_eq!(calls_in_batch(Duration::from_micros(3), 5), 20);
        assert_eq!(calls_in_batch(Duration::from_millis(5), 5), 13);
        assert_eq!(calls_in_batch(Duration::from_secs(1), 5), 5);
        assert!(!enough_batches(None, 2, BUDGET * 9));
        assert!(enough_batches(None, 3, BUDGET));
        assert!(enough_batches(None, 50, Duration::ZERO));
        assert!(!enough_batches(Some(60), 59, BUDGET * 9));
    }
}
