//! One size in one place: a checked pass of single calls, then timed batches, checked as well.

use std::time::Duration;

use signal_comm::{Backend, Element};

use super::args::Args;
use super::check;
use super::data::Sets;
use super::ranks::{Ranks, Work};
use super::shape::Place;
use crate::error::Result;

/// Time for the batches of one size and place, unless `--batches` says how many they are.
const BUDGET: Duration = Duration::from_millis(200);
/// Batches whatever they take: a median of fewer says nothing.
const MIN_BATCHES: usize = 3;
/// Batches however short they are.
const MAX_BATCHES: usize = 50;
/// Calls in a batch, unless `--iters` says how many they are or they take too long.
const CALLS: u32 = 20;

/// What was found at one size and place.
pub(super) struct Measurement<T> {
    /// Microseconds a call, each a batch's mean on its slowest rank; sorted.
    pub(super) times: Vec<f64>,
    pub(super) calls: u32,
    /// Elements whose bits were wrong, over all ranks, sets and both passes.
    pub(super) wrong: u64,
    /// Largest error of a single call against exact values, over all ranks and sets.
    pub(super) max_error: f64,
    /// Buffers of set 0 by rank of this process: of the timed calls out of place, of the single call in place.
    pub(super) outputs: Vec<Vec<T>>,
}

impl<T> Measurement<T> {
    /// The value below which a part of the times lies, by nearest rank.
    pub(super) fn quantile(&self, part: f64) -> f64 {
        let index = (part * self.times.len() as f64).ceil() as usize;
        self.times.get(index.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }
}

/// Measures and checks one size in one place.
pub(super) fn measure<B: Backend, T: Element>(
    ranks: &mut Ranks<B>,
    sets: &mut Sets<B, T>,
    place: Place,
    args: &Args,
) -> Result<Measurement<T>> {
    let mut found = Measurement { times: Vec::new(), calls: 0, wrong: 0, max_error: 0.0, outputs: Vec::new() };

    // A single call on each set, before anything is warm.
    let once = Work::Calls(sets.len() as u32);
    sets.prepare(ranks, place)?;
    let mut time = ranks.batch(sets, place, &once)? / once.calls();
    check_pass(ranks, sets, place, &once, &mut found)?;

    if args.warmup > 0 {
        time = ranks.batch(sets, place, &Work::Calls(args.warmup))? / args.warmup;
    }
    let work = match args.graph {
        Some(calls) => {
            let mut work = ranks.capture(sets, place, calls)?;
            // A graph's first replay uploads it.
            ranks.batch(sets, place, &work)?;
            // The first time, behind few replays, may hold the wait for a rank whose launch comes last, which would then be taken for long calls that need few
            // replays before them.
            for times in [4, 1] {
                work.set_lead(ranks.batch(sets, place, &work)?, times);
            }
            work
        }
        None => Work::Calls(args.iters.unwrap_or_else(|| calls_in_batch(time, sets.len()))),
    };
    found.calls = work.calls();

    let mut total = Duration::ZERO;
    while !enough_batches(args.batches, found.times.len(), total) {
        // Outside the timed part. In place it also keeps the number of calls on results of calls, and so the result, known.
        sets.prepare(ranks, place)?;
        let time = ranks.batch(sets, place, &work)?;
        total += time;
        found.times.push(time.as_secs_f64() * 1e6 / f64::from(found.calls));
    }
    found.times.sort_by(f64::total_cmp);

    if let Some(index) = ranks.here().position(|rank| args.corrupt == Some(rank)) {
        corrupt(ranks, sets, place, index)?;
    }
    check_pass(ranks, sets, place, &work, &mut found)?;
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

/// Compares every output of this process's ranks with what a batch of `work` must have left there.
fn check_pass<B: Backend, T: Element>(
    ranks: &Ranks<B>,
    sets: &Sets<B, T>,
    place: Place,
    work: &Work<B>,
    found: &mut Measurement<T>,
) -> Result<()> {
    for (index, set) in sets.sets.iter().enumerate() {
        // The calls went round the sets, so the first ones may have had one more.
        let calls = work.runs() * work.calls().saturating_sub(index as u32).div_ceil(sets.len() as u32);
        if calls == 0 {
            continue;
        }
        let again = (place == Place::InPlace && calls > 1).then(|| set.data.again(calls));
        let reduced = again.as_ref().unwrap_or(&set.data.once);
        let mut outputs = Vec::new();
        for ((rank, output), stream) in ranks.here().zip(&set.outputs).zip(&ranks.streams) {
            let output = output.read(stream)?;
            let wrong = check::wrong_elements(&output, &set.data.after(rank, place, calls, reduced));
            found.wrong += wrong;
            if again.is_none() && wrong > 0 {
                found.max_error = found.max_error.max(set.data.error_of(rank, place, &output));
            }
            outputs.push(output);
        }
        if again.is_none() {
            // Outputs with the right bits have the reference's error.
            found.max_error = found.max_error.max(set.data.error);
            if index == 0 {
                found.outputs = outputs;
            }
        }
    }
    Ok(())
}

/// Flips the lowest bit of the middle element of the first result of one of this process's ranks, in the device's memory; of the
/// whole buffer where the rank has no result, as nothing is to be written there.
fn corrupt<B: Backend, T: Element>(ranks: &Ranks<B>, sets: &mut Sets<B, T>, place: Place, index: usize) -> Result<()> {
    let result = sets.size.elements(ranks.shape.output(ranks.here().start + index, place));
    let (output, stream) = (&mut sets.sets[0].outputs[index], &ranks.streams[index]);
    let mut values = output.read(stream)?;
    let range = if result.is_empty() { 0..values.len() } else { result };
    let middle = range.start + range.len() / 2;
    values[middle] = T::from_bits(values[middle].to_bits() ^ 1);
    output.write(stream, &values)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_measured_values() {
        let times: Vec<f64> = (1..=50).map(f64::from).collect();
        let found = Measurement::<f32> { times, calls: 1, wrong: 0, max_error: 0.0, outputs: Vec::new() };
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
