//! The buffers of a call: prepared on all ranks, used by each in its own time, checked at the end.

use std::ops::Range;
use std::sync::Arc;

use signal_comm::reference;
use signal_comm::{Backend, CallOptions, Communicator, DeviceBuffer, Element, ReduceOp, Result};

use super::program::{AllReduce, Memory, Place};

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

/// One rank's part in an all-reduce.
struct Lane<B: Backend, T: Element> {
    options: CallOptions,
    op: ReduceOp,
    place: Place,
    input: DeviceBuffer<B, T>,
    /// `None` when in place.
    output: Option<DeviceBuffer<B, T>>,
    /// What the input held.
    values: Vec<T>,
    /// What it makes of all ranks' values.
    expected: Arc<[T]>,
}

/// The steps of an all-reduce, by rank.
pub(super) fn all_reduce<B: Backend, T: Element>(
    comms: &mut [Communicator<B>],
    streams: &[B::Stream],
    call: &AllReduce,
    options: CallOptions,
) -> Result<Vec<Box<dyn Step<B>>>> {
    let inputs = reference::random_inputs::<T>(comms.len(), call.data, call.count);
    let slices: Vec<&[T]> = inputs.iter().map(Vec::as_slice).collect();
    let expected: Arc<[T]> = reference::all_reduce(&slices, call.op).into();
    let room = |start: fn(&Place) -> usize| call.places.iter().map(start).max().unwrap_or(0) + call.count + GUARD;
    let memories = |of: fn(&Place) -> Memory| call.places.iter().map(of).collect::<Vec<_>>();
    let sources = allocate::<B, T>(comms, &memories(|place| place.input), room(|place| place.input_start))?;
    let targets = allocate::<B, T>(comms, &memories(|place| place.output), room(|place| place.output_start))?;
    let buffers = sources.into_iter().zip(targets).zip(inputs);
    let mut steps: Vec<Box<dyn Step<B>>> = Vec::with_capacity(comms.len());
    for (((mut input, mut output), values), (place, stream)) in buffers.zip(call.places.iter().zip(streams)) {
        input.write(stream, &image(input.len(), place.input_start, &values))?;
        let output = match place.in_place {
            true => None,
            false => {
                output.write(stream, &image(output.len(), place.output_start, &vec![poison(); call.count]))?;
                Some(output)
            }
        };
        steps.push(Box::new(Lane {
            options,
            op: call.op,
            place: *place,
            input,
            output,
            values,
            expected: expected.clone(),
        }));
    }
    Ok(steps)
}

impl<B: Backend, T: Element> Lane<B, T> {
    fn input_range(&self) -> Range<usize> {
        self.place.input_start..self.place.input_start + self.values.len()
    }

    fn output_range(&self) -> Range<usize> {
        self.place.output_start..self.place.output_start + self.values.len()
    }
}

impl<B: Backend, T: Element> Step<B> for Lane<B, T> {
    fn launch(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        let (source, target) = (self.input_range(), self.output_range());
        let call = comm.with(self.options);
        match &mut self.output {
            None => call.all_reduce_in_place(stream, self.input.slice_mut(source)?, self.op),
            Some(output) => call.all_reduce(stream, self.input.slice(source)?, output.slice_mut(target)?, self.op),
        }
    }

    fn check(&self, stream: &B::Stream) -> Result<Option<Wrong>> {
        let (source, target) = (self.place.input_start, self.place.output_start);
        let found = self.input.read(stream)?;
        Ok(match &self.output {
            None => compare("output", source, &found, &image(found.len(), source, &self.expected)),
            Some(output) => {
                let result = output.read(stream)?;
                compare("output", target, &result, &image(result.len(), target, &self.expected))
                    .or_else(|| compare("input", source, &found, &image(found.len(), source, &self.values)))
            }
        })
    }

    fn corrupt(&mut self, stream: &B::Stream) -> Result<()> {
        let at = match &self.output {
            None => self.input_range(),
            Some(_) => self.output_range(),
        };
        let buffer = self.output.as_mut().unwrap_or(&mut self.input);
        let mut values = buffer.read(stream)?;
        let middle = at.start + at.len() / 2;
        values[middle] = T::from_bits(values[middle].to_bits() ^ 1);
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

/// A buffer for each rank in the memory that it asks for. Symmetric buffers come into being on every rank; those that a
/// rank does not use are dropped.
fn allocate<B: Backend, T: Element>(
    comms: &mut [Communicator<B>],
    memories: &[Memory],
    len: usize,
) -> Result<Vec<DeviceBuffer<B, T>>> {
    let number = |memory: &Memory| match memory {
        Memory::Local => None,
        Memory::Symmetric(number) => Some(*number),
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
    let local = |(comm, buffer): (&Communicator<B>, Option<_>)| match buffer {
        Some(buffer) => Ok(buffer),
        None => DeviceBuffer::new(comm.device(), len),
    };
    comms.iter().zip(buffers).map(local).collect()
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

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
