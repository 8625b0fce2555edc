//! The buffers of a size: a few independent sets, each with its random inputs and the result that they must give.

use std::ops::Range;
use std::thread;

use signal_comm::reference::{self, Rng};
use signal_comm::{Backend, DeviceBuffer, DeviceFamily, Element, ReduceOp};

use super::args::{Args, Memory};
use super::check;
use super::measure::Place;
use super::ranks::Ranks;
use crate::error::{CliError, Result};
use crate::machine::binary_size;

/// More than one set is taken from at most one part in this many of the memory: the host keeps references beside them.
const MEMORY_SHARE: u64 = 8;
/// What outputs hold before a call: a NaN in every type, which no sum of finite values is.
const GARBAGE: u32 = u32::MAX;
/// Elements below which a second thread is not worth its start.
const PARALLEL_FROM: usize = 1 << 15;

/// One call's buffers on the ranks of this process.
pub(super) struct Set<B: Backend, T: Element> {
    pub(super) inputs: Vec<DeviceBuffer<B, T>>,
    pub(super) outputs: Vec<DeviceBuffer<B, T>>,
    /// Seed of each rank's input, over all processes: the result depends on all of them.
    seeds: Vec<u64>,
    /// What one call must give, on every rank.
    pub(super) expected: Vec<T>,
    /// The largest error of `expected` against sums in f64.
    pub(super) expected_error: f64,
}

/// All sets of a size.
pub(super) struct Sets<B: Backend, T: Element> {
    pub(super) sets: Vec<Set<B, T>>,
}

impl<B: Backend, T: Element> Sets<B, T> {
    /// Allocates and fills the sets of one size with data that depends on the seed and the size only.
    pub(super) fn create(ranks: &mut Ranks<B>, args: &Args, count: usize) -> Result<Self> {
        let (memory, seed) = (args.memory, ranks.seed);
        let number = affordable_sets(ranks, count * T::DTYPE.bytes(), args.sets)?;
        let sets = (0..number).map(|index| Set::create(ranks, memory, [seed, count as u64, index as u64], count));
        Ok(Sets { sets: sets.collect::<Result<_>>()? })
    }

    pub(super) fn len(&self) -> usize {
        self.sets.len()
    }

    /// The inputs of a set, by rank of the world, as they were written.
    pub(super) fn inputs(&self, set: usize) -> Vec<Vec<T>> {
        self.sets[set].host_inputs()
    }

    /// Enqueues what makes every output ready for a batch: the input to be added to in place, else garbage.
    pub(super) fn prepare(&mut self, ranks: &Ranks<B>, place: Place) -> Result<()> {
        for set in &mut self.sets {
            for ((stream, input), output) in ranks.streams.iter().zip(&set.inputs).zip(&mut set.outputs) {
                match place {
                    Place::InPlace => output.copy_from(stream, input)?,
                    Place::OutOfPlace => output.fill_bytes(stream, GARBAGE)?,
                }
            }
        }
        Ok(())
    }
}

impl<B: Backend, T: Element> Set<B, T> {
    fn create(ranks: &mut Ranks<B>, memory: Memory, name: [u64; 3], count: usize) -> Result<Self> {
        let mut allocate = || -> Result<Vec<DeviceBuffer<B, T>>> {
            let buffers = ranks.communicators.iter_mut().map(|communicator| match memory {
                Memory::Symmetric => communicator.alloc(count),
                Memory::Local => DeviceBuffer::new(communicator.device(), count),
            });
            Ok(buffers.collect::<Result<_, _>>()?)
        };
        let (inputs, outputs) = (allocate()?, allocate()?);
        let seed = name.into_iter().fold(0, |state, part| Rng::new(state ^ part).next_u64());
        let seeds = (0..ranks.world() as u64).map(|rank| Rng::new(seed ^ rank).next_u64()).collect();
        let mut set = Set { inputs, outputs, seeds, expected: Vec::new(), expected_error: 0.0 };
        let data = set.host_inputs();
        for ((buffer, stream), values) in set.inputs.iter_mut().zip(&ranks.streams).zip(&data[ranks.here()]) {
            buffer.write(stream, values)?;
        }
        (set.expected, set.expected_error) = reference(&data);
        Ok(set)
    }

    /// The inputs of all ranks, generated again: keeping them would double the host memory.
    pub(super) fn host_inputs(&self) -> Vec<Vec<T>> {
        let count = self.inputs.first().map_or(0, DeviceBuffer::len);
        parallel(&self.seeds, |&seed| reference::random(seed, count))
    }
}

/// The sum in rank order, and its largest error against sums in f64.
fn reference<T: Element>(inputs: &[Vec<T>]) -> (Vec<T>, f64) {
    let count = inputs.first().map_or(0, Vec::len);
    let part = |range: &Range<usize>| {
        let inputs: Vec<&[T]> = inputs.iter().map(|input| &input[range.clone()]).collect();
        let sum = reference::all_reduce(&inputs, ReduceOp::Sum);
        let error = check::max_error(&sum, &reference::all_reduce_f64(&inputs));
        (sum, error)
    };
    let mut sum = Vec::with_capacity(count);
    let mut error = 0.0f64;
    for (values, worst) in parallel(&chunks(count), part) {
        sum.extend(values);
        error = error.max(worst);
    }
    (sum, error)
}

/// The result of `applications` calls in place: after the first, every rank holds the same.
pub(super) fn applied<T: Element>(once: &[T], world: usize, applications: u32) -> Vec<T> {
    let part = |range: &Range<usize>| {
        let mut values = once[range.clone()].to_vec();
        for _ in 1..applications {
            values = reference::all_reduce(&vec![&values[..]; world], ReduceOp::Sum);
        }
        values
    };
    parallel(&chunks(once.len()), part).concat()
}

/// Equal parts of `0..count`, one for each CPU.
fn chunks(count: usize) -> Vec<Range<usize>> {
    let cpus = if count < PARALLEL_FROM { 1 } else { thread::available_parallelism().map_or(1, usize::from) };
    (0..cpus).map(|part| part * count / cpus..(part + 1) * count / cpus).collect()
}

/// `work` on every item, each on a thread of its own, in order.
fn parallel<I: Sync, O: Send>(items: &[I], work: impl Fn(&I) -> O + Sync) -> Vec<O> {
    if let [item] = items {
        return vec![work(item)];
    }
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = items.iter().map(|item| scope.spawn(move || work(item))).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, O>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}

/// How many sets of two buffers of `bytes` a rank can be had; an error if not one.
pub(super) fn affordable_sets<B: Backend>(ranks: &Ranks<B>, bytes: usize, wanted: u32) -> Result<usize> {
    let family = B::describe(ranks.device()).family;
    let mut affordable = u64::from(wanted);
    for device in &ranks.devices {
        // CPU devices are slices of one memory.
        let sharers = match family {
            DeviceFamily::Host => ranks.world(),
            _ => ranks.devices.iter().filter(|other| other.uuid == device.uuid).count(),
        };
        let set_bytes = 2 * bytes as u64 * sharers as u64;
        if set_bytes > device.memory_bytes {
            let (need, have) = (binary_size(set_bytes), binary_size(device.memory_bytes));
            let size = binary_size(bytes as u64);
            return Err(CliError::Arguments(format!("{size} a rank need {need} on {}, which has {have}", device.name)));
        }
        affordable = affordable.min(device.memory_bytes / MEMORY_SHARE / set_bytes);
    }
    Ok(affordable.max(1) as usize)
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::*;

    #[test]
    fn a_reference_does_not_depend_on_how_it_is_cut() {
        let count = PARALLEL_FROM + 3;
        let inputs: Vec<Vec<f16>> = (0..3).map(|seed| reference::random(seed, count)).collect();
        let whole: Vec<&[f16]> = inputs.iter().map(Vec::as_slice).collect();
        let (sum, error) = reference(&inputs);
        assert_eq!(sum, reference::all_reduce(&whole, ReduceOp::Sum));
        assert_eq!(error, check::max_error(&sum, &reference::all_reduce_f64(&whole)));
    }

    #[test]
    fn applications_in_place_overflow_like_the_kernel() {
        let once = [f16::from_f32(60000.0), f16::from_f32(-1.5)];
        assert_eq!(applied(&once, 2, 1), once);
        assert_eq!(applied(&once, 2, 3), [f16::INFINITY, f16::from_f32(-6.0)]);
    }
}
