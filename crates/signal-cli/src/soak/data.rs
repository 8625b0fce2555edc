//! The buffers of a call: prepared on all ranks, used by each in its own time, checked at the end.

use std::ops::Range;

use signal_comm::{Backend, CallOptions, Communicator, DeviceBuffer, Element, Error, Result};
use signal_conformance::job::{Job, Operands, RankData, RawOperands, Twist};

use super::program::{Collective, Memory, Place};

/// Elements behind a slice that must stay as they are; those before it are as many as its start.
const GUARD: usize = 19;

/// What stands around slices.
fn canary<T: Element>() -> T {
    T::from_bits(0xc0de_5a5a)
}

/// What an output holds before a call.
fn poison<T: Element>() -> T {
    T::from_bits(0xbad0_a5a5)
}

/// One rank's part in a call, whatever its element type.
pub(super) trait Step<B: Backend>: Send {
    /// Enqueues the call.
    fn launch(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()>;
    /// Waits for the stream and compares; `None` if everything is as it has to be.
    fn check(&self, stream: &B::Stream) -> Result<Option<Wrong>>;
    /// Flips a bit of what the call left: the check has to find it.
    fn corrupt(&mut self, stream: &B::Stream) -> Result<()>;
}

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wrong {
    /// Elements whose bits differ.
    pub(super) elements: usize,
    /// The first of them, in words.
    pub(super) first: String,
}

/// A barrier: nothing to prepare and nothing to compare.
pub(super) struct Barrier {
    pub(super) options: CallOptions,
}

impl<B: Backend> Step<B> for Barrier {
    fn launch(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        comm.with(self.options).barrier(stream)
    }

    fn check(&self, _: &B::Stream) -> Result<Option<Wrong>> {
        Ok(None)
    }

    fn corrupt(&mut self, _: &B::Stream) -> Result<()> {
        Ok(())
    }
}

/// One rank's part in a collective.
struct Lane<B: Backend, T: Element> {
    /// As it is called: with what is wrong with it, if anything is.
    job: Job,
    options: CallOptions,
    raw: bool,
    twist: Option<Twist>,
    in_place: bool,
    buffers: Vec<DeviceBuffer<B, T>>,
    /// As they are called.
    ranges: Vec<Range<usize>>,
    /// Likewise, by the raw layer.
    addresses: Vec<u64>,
    /// By buffer: what all of it has to hold.
    expected: Vec<Expected<T>>,
    /// Counts on the device, and what they have to be.
    counts: Option<Counts<B>>,
    /// A call with something wrong was not refused.
    accepted: bool,
}

struct Expected<T> {
    what: &'static str,
    start: usize,
    image: Vec<T>,
}

/// The steps of a collective, by rank.
pub(super) fn collective<B: Backend, T: Element>(
    comms: &mut [Communicator<B>],
    streams: &[B::Stream],
    call: &Collective,
    options: CallOptions,
) -> Result<Vec<Box<dyn Step<B>>>> {
    let Collective { job, raw, twist, data, places, .. } = call;
    let world = comms.len();
    let [apart, together] = [false, true].map(|in_place| {
        // Made only where some rank has it.
        let wanted = places.iter().any(|place| (place.in_place && job.has_in_place()) == in_place);
        if wanted { job.data::<T>(world, *data, in_place) } else { Vec::new() }
    });
    let (mut apart, mut together) = (apart.into_iter(), together.into_iter());
    let mut ranks = Vec::new();
    for place in places {
        // Both go on, so that each rank gets its own.
        let (apart, together) = (apart.next(), together.next());
        let in_place = place.in_place && job.has_in_place();
        ranks.push((in_place, if in_place { together } else { apart }));
    }
    let operands_of = |rank: &(bool, Option<RankData<T>>)| rank.1.as_ref().map_or(0, |data| data.operands.len());
    let most = ranks.iter().map(operands_of).max().unwrap_or(0);
    let mut buffers: Vec<Vec<DeviceBuffer<B, T>>> = comms.iter().map(|_| Vec::new()).collect();
    for number in 0..most {
        let which = number % 2;
        let len = |((_, data), place): (&(bool, Option<RankData<T>>), &Place)| {
            let operand = data.as_ref().and_then(|data| data.operands.get(number));
            operand.map(|operand| place.starts[which] + operand.after.len())
        };
        let lens: Vec<Option<usize>> = ranks.iter().zip(places).map(len).collect();
        let room = lens.iter().flatten().max().unwrap_or(&0) + GUARD;
        let memories: Vec<Option<Memory>> =
            lens.iter().zip(places).map(|(len, place)| len.map(|_| place.memories[which])).collect();
        for (all, buffer) in buffers.iter_mut().zip(allocate(comms, &memories, room)?) {
            all.extend(buffer);
        }
    }
    let mut steps: Vec<Box<dyn Step<B>>> = Vec::with_capacity(world);
    for (rank, ((in_place, data), mut buffers)) in ranks.into_iter().zip(buffers).enumerate() {
        let (stream, place) = (&streams[rank], &places[rank]);
        let (operands, counts) = data.map_or((Vec::new(), None), |data| (data.operands, data.counts));
        let (mut ranges, mut addresses, mut expected) = (Vec::new(), Vec::new(), Vec::new());
        for (number, (operand, buffer)) in operands.into_iter().zip(&mut buffers).enumerate() {
            let start = place.starts[number % 2];
            let before = image(buffer.len(), start, &operand.before);
            buffer.write(stream, &before)?;
            ranges.push(start..start + operand.after.len());
            addresses.push(buffer.address() + (start * size_of::<T>()) as u64);
            let what = if operand.written { "output" } else { "input" };
            // What is refused leaves everything as it was.
            let image = if twist.is_some() { before } else { image(buffer.len(), start, &operand.after) };
            expected.push(Expected { what, start, image });
        }
        let mut called = job.clone();
        if let Some(twist) = twist {
            called = twist.job(job);
            twist.ranges(&mut ranges);
            twist.addresses(rank, job, T::DTYPE, &mut addresses);
        }
        let counts = counts.map(|counts| own_counts(&comms[rank], stream, counts, twist.is_some())).transpose()?;
        steps.push(Box::new(Lane {
            job: called,
            options: twist.as_ref().map_or(options, |twist| twist.options(options)),
            raw: *raw,
            twist: twist.clone(),
            in_place,
            buffers,
            ranges,
            addresses,
            expected,
            counts,
            accepted: false,
        }));
    }
    Ok(steps)
}

type Counts<B> = ([DeviceBuffer<B, u32>; 2], [Vec<u32>; 2]);

/// Counts on the device of one rank: those that it sends, and those that it gets, unless its call is refused.
fn own_counts<B: Backend>(
    comm: &Communicator<B>,
    stream: &B::Stream,
    [sent, received]: [Vec<u32>; 2],
    refused: bool,
) -> Result<Counts<B>> {
    let buffer = || DeviceBuffer::new(comm.device(), sent.len());
    let mut buffers = [buffer()?, buffer()?];
    let before = vec![poison::<u32>(); received.len()];
    buffers[0].write(stream, &sent)?;
    buffers[1].write(stream, &before)?;
    Ok((buffers, [sent, if refused { before } else { received }]))
}

impl<B: Backend, T: Element> Lane<B, T> {
    fn call(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        let Lane { job, options, in_place, buffers, ranges, addresses, counts, .. } = self;
        if !self.raw {
            let counts = counts.as_mut().map(|(buffers, _)| buffers);
            return job.launch(comm, *options, stream, Operands { buffers, ranges, counts, in_place: *in_place });
        }
        let counts = counts.as_ref().map_or([0; 2], |([sent, received], _)| [sent.address(), received.address()]);
        let operands = RawOperands { addresses: addresses.clone(), counts, in_place: *in_place };
        // SAFETY: what is wrong is refused. Else operands lie within this rank's buffers, which nothing else touches and which live
        // until all ranks have waited for their streams.
        unsafe { job.launch_raw(comm, *options, stream, T::DTYPE, &operands) }
    }
}

impl<B: Backend, T: Element> Step<B> for Lane<B, T> {
    fn launch(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        let called = self.call(comm, stream);
        if self.twist.is_none() {
            return called;
        }
        match called {
            Err(Error::ApiMisuse(_)) => Ok(()),
            Ok(()) => {
                self.accepted = true;
                Ok(())
            }
            // Of a fault, which others see too.
            Err(other) => Err(other),
        }
    }

    fn check(&self, stream: &B::Stream) -> Result<Option<Wrong>> {
        if self.accepted {
            return Ok(Some(Wrong { elements: 0, first: "it was accepted".to_owned() }));
        }
        for (buffer, Expected { what, start, image }) in self.buffers.iter().zip(&self.expected) {
            if let Some(wrong) = compare(what, *start, &buffer.read(stream)?, image) {
                return Ok(Some(wrong));
            }
        }
        for (buffer, expected) in self.counts.iter().flat_map(|(buffers, expected)| buffers.iter().zip(expected)) {
            if let Some(wrong) = compare("counts", 0, &buffer.read(stream)?, expected) {
                return Ok(Some(wrong));
            }
        }
        Ok(None)
    }

    fn corrupt(&mut self, stream: &B::Stream) -> Result<()> {
        // An output if there is one, else what must stay as it is.
        let last = self.expected.iter().rposition(|expected| expected.what == "output");
        let Some(buffer) = self.buffers.get_mut(last.unwrap_or(0)) else { return Ok(()) };
        let mut values = buffer.read(stream)?;
        let middle = values.len() / 2;
        if let Some(value) = values.get_mut(middle) {
            *value = T::from_bits(value.to_bits() ^ 1);
        }
        buffer.write(stream, &values)
    }
}

/// `values` at `start` of a buffer of `len` elements, with canaries around.
fn image<T: Element>(len: usize, start: usize, values: &[T]) -> Vec<T> {
    let mut image = vec![canary(); len];
    image[start..start + values.len()].copy_from_slice(values);
    image
}

/// The elements of a buffer that are not what they have to be; they are numbered from `start`.
fn compare<T: Element>(what: &str, start: usize, found: &[T], expected: &[T]) -> Option<Wrong> {
    // Almost always equal: compare as memory first.
    if bytemuck::cast_slice::<T, u8>(found) == bytemuck::cast_slice::<T, u8>(expected) {
        return None;
    }
    let pairs = found.iter().zip(expected).enumerate();
    let mut wrong = pairs.filter(|(_, (found, expected))| found.to_bits() != expected.to_bits());
    let (index, (found, expected)) = wrong.next()?;
    let element = index as i64 - start as i64;
    let digits = 2 + 2 * T::DTYPE.bytes();
    let text = |value: &T| format!("{:#0digits$x} ({value:?})", value.to_bits());
    let first = format!("element {element} of its {what} is {}, expected {}", text(found), text(expected));
    Some(Wrong { elements: 1 + wrong.count(), first })
}

/// A buffer for each rank that asks for memory. Symmetric buffers come into being on every rank; those that a rank does not use are
/// dropped.
fn allocate<B: Backend, T: Element>(
    comms: &mut [Communicator<B>],
    memories: &[Option<Memory>],
    len: usize,
) -> Result<Vec<Option<DeviceBuffer<B, T>>>> {
    let number = |memory: &Option<Memory>| match memory {
        Some(Memory::Symmetric(number)) => Some(*number),
        _ => None,
    };
    let mut buffers: Vec<Option<DeviceBuffer<B, T>>> = memories.iter().map(|_| None).collect();
    for set in 0..memories.iter().filter_map(number).max().map_or(0, |most| most + 1) {
        for ((comm, memory), buffer) in comms.iter_mut().zip(memories).zip(&mut buffers) {
            let symmetric = comm.alloc(len)?;
            if number(memory) == Some(set) {
                *buffer = Some(symmetric);
            }
        }
    }
    for ((comm, memory), buffer) in comms.iter().zip(memories).zip(&mut buffers) {
        if *memory == Some(Memory::Local) {
            *buffer = Some(DeviceBuffer::new(comm.device(), len)?);
        }
    }
    Ok(buffers)
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use signal_comm::{ReduceOp, reference};

    use super::*;

    #[test]
    fn a_difference_is_named_by_its_place_in_the_slice() {
        let expected = image(8, 2, &[1.0f32, 2.0, 3.0]);
        assert_eq!(compare("output", 2, &expected, &expected), None);
        let mut found = expected.clone();
        found[4] = 4.0;
        found[7] = 0.0;
        let wrong = compare("output", 2, &found, &expected).unwrap();
        let first = "element 2 of its output is 0x40800000 (4.0), expected 0x40400000 (3.0)";
        assert_eq!(wrong, Wrong { elements: 2, first: first.to_owned() });
        found[0] = -0.0;
        assert!(
            compare("input", 2, &found, &expected).unwrap().first.starts_with("element -2 of its input is 0x80000000")
        );
    }

    #[test]
    fn sums_of_inputs_depend_on_the_order_in_every_type() {
        fn depends<T: Element>() {
            let inputs = reference::random_inputs::<T>(4, 1, 400);
            let forward: Vec<&[T]> = inputs.iter().map(Vec::as_slice).collect();
            let backward: Vec<&[T]> = inputs.iter().rev().map(Vec::as_slice).collect();
            let sum = |inputs: &[&[T]]| reference::all_reduce(inputs, ReduceOp::Sum);
            assert_ne!(sum(&forward), sum(&backward), "{}", T::DTYPE);
            assert!(sum(&forward).iter().all(|value| value.to_f64().is_finite()));
        }
        depends::<f32>();
        depends::<f16>();
        depends::<bf16>();
    }
}
