//! One all-reduce on all ranks: prepared, enqueued, checked.

use std::ops::Range;
use std::sync::Arc;

pub(crate) use signal_core::reference::random_inputs;
use signal_core::{Algorithm, Backend, CallOptions, Communicator, DeviceBuffer, Element, ReduceOp, Result, reference};

use crate::compare;
use crate::place::{Memory, Place};
use crate::world::World;

/// Canary elements behind a slice; those before it are as many as its start.
pub(crate) const GUARD: usize = 19;

/// What an output holds before a call.
pub(crate) fn poison<T: Element>() -> T {
    of_word(0xbad0_a5a5)
}

/// An element of memory that is filled with this word.
pub(crate) fn of_word<T: Element>(word: u32) -> T {
    T::from_bits(u64::from(word) << 32 | u64::from(word))
}

/// What stands around slices.
pub(crate) fn canary<T: Element>() -> T {
    of_word(0xc0de_5a5a)
}

/// The sum that every rank has to hold.
pub(crate) fn sum<T: Element>(inputs: &[Vec<T>]) -> Vec<T> {
    reduced(inputs, ReduceOp::Sum)
}

/// What every rank has to hold.
pub(crate) fn reduced<T: Element>(inputs: &[Vec<T>], op: ReduceOp) -> Vec<T> {
    let inputs: Vec<&[T]> = inputs.iter().map(Vec::as_slice).collect();
    reference::all_reduce(&inputs, op)
}

/// One rank's part in a program of calls, whatever its element type.
pub(crate) trait Step<B: Backend>: Send {
    /// Enqueues the call.
    fn launch(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()>;
    /// Waits for the stream and panics unless the call did what it had to.
    fn check(&self, stream: &B::Stream);
}

/// One rank's part in an all-reduce.
pub(crate) struct Lane<B: Backend, T: Element> {
    what: String,
    pub(crate) options: CallOptions,
    op: ReduceOp,
    pub(crate) input: DeviceBuffer<B, T>,
    input_range: Range<usize>,
    /// `None` when in place.
    output: Option<(DeviceBuffer<B, T>, Range<usize>)>,
    /// What the whole input buffer has to hold after the call, apart from an output in place.
    input_image: Vec<T>,
    expected: Arc<[T]>,
}

impl<B: Backend, T: Element> Lane<B, T> {
    /// Writes `values` to their place in the first of two buffers, poison to that of the output in the second, and canaries around
    /// both. Enqueues only.
    pub(crate) fn new(
        what: &str,
        stream: &B::Stream,
        (mut input, mut output): (DeviceBuffer<B, T>, DeviceBuffer<B, T>),
        values: &[T],
        options: CallOptions,
        place: &Place,
        (op, expected): (ReduceOp, Arc<[T]>),
    ) -> Self {
        let count = values.len();
        let input_range = place.input_start..place.input_start + count;
        let output_range = place.output_start..place.output_start + count;
        let mut input_image = vec![canary(); input.len()];
        input_image[input_range.clone()].copy_from_slice(values);
        input.write(stream, &input_image).unwrap();
        let output = (!place.in_place).then(|| {
            let mut image = vec![canary(); output.len()];
            image[output_range.clone()].fill(poison());
            output.write(stream, &image).unwrap();
            (output, output_range)
        });
        let CallOptions { algorithm, blocks, threads, domain, .. } = options;
        let grid = format!("{algorithm:?} {blocks:?}x{threads:?} on domain {domain}");
        let what = format!("{what}, {op} of {count} x {}, {grid}, {place:?}", T::DTYPE);
        Lane { what, options, op, input, input_range, output, input_image, expected }
    }

    /// Fills the input buffer with `word`, behind the call.
    pub(crate) fn overwrite_input(&mut self, stream: &B::Stream, word: u32) {
        assert!(self.output.is_some(), "the input of a call in place is its output");
        self.input.fill_bytes(stream, word).unwrap();
        self.input_image.fill(of_word(word));
    }

    /// Waits, checks, and returns the output.
    pub(crate) fn output(&self, stream: &B::Stream) -> Vec<T> {
        let found = self.input.read(stream).unwrap();
        let mut input = self.input_image.clone();
        let output = match &self.output {
            None => {
                input[self.input_range.clone()].copy_from_slice(&found[self.input_range.clone()]);
                found[self.input_range.clone()].to_vec()
            }
            Some((buffer, range)) => {
                let found = buffer.read(stream).unwrap();
                let mut surroundings = vec![canary(); found.len()];
                surroundings[range.clone()].copy_from_slice(&found[range.clone()]);
                compare::assert_bits(&format!("{}: surroundings of the output", self.what), &found, &surroundings);
                found[range.clone()].to_vec()
            }
        };
        compare::assert_same(&format!("{}: output", self.what), &output, &self.expected);
        compare::assert_bits(&format!("{}: input or its surroundings", self.what), &found, &input);
        output
    }
}

impl<B: Backend, T: Element> Step<B> for Lane<B, T> {
    fn launch(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        let call = comm.with(self.options);
        match &mut self.output {
            None => call.all_reduce_in_place(stream, self.input.slice_mut(self.input_range.clone())?, self.op),
            Some((output, range)) => call.all_reduce(
                stream,
                self.input.slice(self.input_range.clone())?,
                output.slice_mut(range.clone())?,
                self.op,
            ),
        }
    }

    fn check(&self, stream: &B::Stream) {
        self.output(stream);
    }
}

/// One all-reduce on all ranks.
pub(crate) struct Exchange<B: Backend, T: Element> {
    /// By rank.
    pub(crate) lanes: Vec<Lane<B, T>>,
}

impl<B: Backend, T: Element> Exchange<B, T> {
    /// Allocates, fills inputs with random elements, poisons outputs and sets canaries. Enqueues only.
    pub(crate) fn random(
        world: &mut World<B>,
        count: usize,
        seed: u64,
        options: CallOptions,
        places: &[Place],
    ) -> Self {
        Self::of(world, &random_inputs(world.ranks(), seed, count), options, places)
    }

    /// Like [`random`](Self::random) with given inputs.
    pub(crate) fn of(world: &mut World<B>, inputs: &[Vec<T>], options: CallOptions, places: &[Place]) -> Self {
        Self::by(ReduceOp::Sum, world, inputs, options, places)
    }

    /// The same with any operator.
    pub(crate) fn by(
        op: ReduceOp,
        world: &mut World<B>,
        inputs: &[Vec<T>],
        options: CallOptions,
        places: &[Place],
    ) -> Self {
        assert_eq!((inputs.len(), places.len()), (world.ranks(), world.ranks()));
        let count = inputs[0].len();
        let expected: Arc<[T]> = reduced(inputs, op).into();
        let len = buffer_len(places, count);
        let place_inputs: Vec<Memory> = places.iter().map(|p| p.input).collect();
        let place_outputs: Vec<Memory> = places.iter().map(|p| p.output).collect();
        let buffers = allocate(world, &place_inputs, len).into_iter();
        let outputs = allocate(world, &place_outputs, len);
        let lanes = buffers.zip(outputs).zip(inputs).zip(places).enumerate();
        let lanes = lanes.map(|(rank, (((input, output), values), place))| {
            let what = format!("rank {rank} of {}", world.ranks());
            Lane::new(&what, &world.streams[rank], (input, output), values, options, place, (op, expected.clone()))
        });
        Exchange { lanes: lanes.collect() }
    }

    /// Enqueues on every rank; `first` says which rank comes first.
    pub(crate) fn launch(&mut self, world: &mut World<B>, first: usize) {
        let ranks = world.ranks();
        for rank in (first..first + ranks).map(|r| r % ranks) {
            self.launch_one(world, rank);
        }
    }

    /// Enqueues on one rank.
    pub(crate) fn launch_one(&mut self, world: &mut World<B>, rank: usize) {
        let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
        let lane = &mut self.lanes[rank];
        lane.launch(comm, stream).unwrap_or_else(|e| panic!("{}: {e}", lane.what));
    }

    /// Waits for every rank, checks every output and that all ranks hold the same bits. Returns those.
    pub(crate) fn finish(&self, world: &World<B>) -> Vec<T> {
        world.wait();
        let mut outputs = self.lanes.iter().zip(&world.streams).map(|(lane, stream)| lane.output(stream));
        let first = outputs.next().unwrap();
        for (other, lane) in outputs.zip(&self.lanes[1..]) {
            compare::assert_bits(&format!("{}: compared with rank 0", lane.what), &other, &first);
        }
        first
    }

    /// Launches and finishes.
    pub(crate) fn run(mut self, world: &mut World<B>, first: usize) -> Vec<T> {
        self.launch(world, first);
        self.finish(world)
    }

    /// The lanes as steps of a program, by rank.
    pub(crate) fn into_steps(self) -> impl Iterator<Item = Box<dyn Step<B>>> {
        self.lanes.into_iter().map(|lane| Box::new(lane) as Box<dyn Step<B>>)
    }
}

/// A call of each algorithm that has to work: what cases end with after a refusal.
pub(crate) fn works<B: Backend>(world: &mut World<B>) {
    for algorithm in Algorithm::ALL_REDUCE {
        let options = crate::world::options(|o| o.algorithm = Some(algorithm));
        let places = vec![Place::symmetric(); world.ranks()];
        Exchange::<B, f32>::random(world, 77, 3, options, &places).run(world, 0);
    }
}

/// Elements of every buffer of a call of `count` elements.
pub(crate) fn buffer_len(places: &[Place], count: usize) -> usize {
    places.iter().map(|p| p.input_start.max(p.output_start)).max().unwrap() + count + GUARD
}

/// Symmetric buffers that all ranks must allocate so that each has the memory that it asks for.
pub(crate) fn symmetric_buffers<'a>(memories: impl Iterator<Item = &'a Memory>) -> usize {
    memories.map(|m| if let Memory::Symmetric(k) = m { k + 1 } else { 0 }).max().unwrap()
}

/// A buffer for each rank in the memory that it asks for. Symmetric buffers come into being on every rank; those that
/// a rank does not use are dropped.
fn allocate<B: Backend, T: Element>(world: &mut World<B>, memories: &[Memory], len: usize) -> Vec<DeviceBuffer<B, T>> {
    let sets = symmetric_buffers(memories.iter());
    let mut symmetric: Vec<Vec<Option<DeviceBuffer<B, T>>>> =
        (0..sets).map(|_| world.alloc(len).into_iter().map(Some).collect()).collect();
    let buffers = memories.iter().enumerate().map(|(rank, memory)| match memory {
        Memory::Local => DeviceBuffer::new(world.comms[rank].device(), len).unwrap(),
        Memory::Symmetric(k) => symmetric[*k][rank].take().unwrap(),
    });
    buffers.collect()
}
