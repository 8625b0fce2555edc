//! One collective on all ranks, by its job: prepared, enqueued, checked.

use std::ops::Range;

use signal_core::reference::Rng;
use signal_core::{Backend, CallOptions, Communicator, DeviceBuffer, Element, Result};

use crate::compare;
use crate::exchange::{GUARD, Step, canary, of_word};
pub(crate) use crate::job::Job;
use crate::job::{Operands, RankData};
use crate::place::{Memory, below, pick};
use crate::world::World;

/// Where buffers lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Where {
    Symmetric,
    Local,
    /// Drawn for each buffer, as is its first element.
    Anywhere,
}

impl Where {
    pub(crate) const ALL: [Where; 3] = [Where::Symmetric, Where::Local, Where::Anywhere];

    fn draw(self, rng: &mut Rng) -> (Memory, usize) {
        match self {
            Where::Symmetric => (Memory::Symmetric(0), 0),
            Where::Local => (Memory::Local, 0),
            Where::Anywhere => (pick(rng, &[Memory::Symmetric(0), Memory::Local]), pick(rng, &[0, 0, 1, 2, 3, 16, 21])),
        }
    }
}

/// Counts to send and received counts, and what they have to be.
type Counts<B> = ([DeviceBuffer<B, u32>; 2], [Vec<u32>; 2]);

/// One rank's part in a job.
pub(crate) struct Lane<B: Backend, T: Element> {
    what: String,
    job: Job,
    in_place: bool,
    pub(crate) options: CallOptions,
    buffers: Vec<DeviceBuffer<B, T>>,
    ranges: Vec<Range<usize>>,
    /// What each whole buffer has to hold after the call.
    after: Vec<Vec<T>>,
    /// Buffers that are only read: the first ones.
    inputs: usize,
    /// Counts on the device, and what they have to hold after the call.
    counts: Option<Counts<B>>,
}

/// A job on all ranks.
pub(crate) struct Pieces<B: Backend, T: Element> {
    /// By rank.
    pub(crate) lanes: Vec<Lane<B, T>>,
}

impl<B: Backend, T: Element> Pieces<B, T> {
    /// Allocates, fills inputs, poisons outputs and sets canaries. Enqueues only.
    pub(crate) fn new(world: &mut World<B>, job: &Job, rng: &mut Rng, options: CallOptions, place: Where) -> Self {
        let ranks = world.ranks();
        let in_place = job.has_in_place() && below(rng, 2) == 0;
        let data = job.data::<T>(ranks, rng.next_u64(), in_place);
        let places: Vec<Vec<_>> = data.iter().map(|of| of.operands.iter().map(|_| place.draw(rng)).collect()).collect();
        let most = places.iter().map(Vec::len).max().unwrap_or(0);
        let mut buffers: Vec<Vec<DeviceBuffer<B, T>>> = (0..ranks).map(|_| Vec::new()).collect();
        for number in 0..most {
            let lens = data
                .iter()
                .zip(&places)
                .filter_map(|(of, places)| Some(places.get(number)?.1 + of.operands.get(number)?.after.len()));
            let len = lens.max().unwrap_or(0) + GUARD;
            let of = |rank: usize| places[rank].get(number);
            let any = (0..ranks).any(|rank| of(rank).is_some_and(|(memory, _)| *memory != Memory::Local));
            let mut symmetric: Vec<_> = if any {
                world.alloc::<T>(len).into_iter().map(Some).collect()
            } else {
                (0..ranks).map(|_| None).collect()
            };
            for rank in 0..ranks {
                match of(rank) {
                    None => (),
                    Some((Memory::Local, _)) => {
                        buffers[rank].push(DeviceBuffer::new(world.comms[rank].device(), len).unwrap());
                    }
                    Some(_) => buffers[rank].push(symmetric[rank].take().unwrap()),
                }
            }
        }
        let mut lanes = Vec::new();
        for (rank, (RankData { operands, counts }, mut buffers)) in data.into_iter().zip(buffers).enumerate() {
            let stream = &world.streams[rank];
            let (mut ranges, mut after) = (Vec::new(), Vec::new());
            let inputs = operands.iter().filter(|operand| !operand.written).count();
            for ((operand, buffer), (_, first)) in operands.into_iter().zip(&mut buffers).zip(&places[rank]) {
                let range = *first..first + operand.after.len();
                let mut image = vec![canary(); buffer.len()];
                image[range.clone()].copy_from_slice(&operand.before);
                buffer.write(stream, &image).unwrap();
                image[range.clone()].copy_from_slice(&operand.after);
                ranges.push(range);
                after.push(image);
            }
            let counts = counts.map(|counts| {
                let buffer = || DeviceBuffer::new(world.comms[rank].device(), ranks).unwrap();
                let mut buffers: [DeviceBuffer<B, u32>; 2] = [buffer(), buffer()];
                buffers[0].write(stream, &counts[0]).unwrap();
                buffers[1].write(stream, &vec![0xbad; ranks]).unwrap();
                (buffers, counts)
            });
            let CallOptions { algorithm, blocks, threads, domain, .. } = options;
            let what = format!(
                "rank {rank} of {ranks}, {job:?} of {}, {algorithm:?} {blocks:?}x{threads:?} on domain {domain}, in place: {in_place}, {:?}",
                T::DTYPE,
                places[rank]
            );
            let job = job.clone();
            lanes.push(Lane { what, job, in_place, options, buffers, ranges, after, inputs, counts });
        }
        Pieces { lanes }
    }

    /// Enqueues on every rank, `first` first.
    pub(crate) fn launch(&mut self, world: &mut World<B>, first: usize) {
        let ranks = world.ranks();
        for rank in (first..first + ranks).map(|r| r % ranks) {
            let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
            let lane = &mut self.lanes[rank];
            lane.launch(comm, stream).unwrap_or_else(|e| panic!("{}: {e}", lane.what));
        }
    }

    /// Waits for every rank, and checks every buffer.
    pub(crate) fn finish(&self, world: &World<B>) {
        world.wait();
        self.lanes.iter().zip(&world.streams).for_each(|(lane, stream)| lane.check(stream));
    }

    /// Launches and finishes.
    pub(crate) fn run(mut self, world: &mut World<B>, first: usize) {
        self.launch(world, first);
        self.finish(world);
    }
}

impl<B: Backend, T: Element> Lane<B, T> {
    /// Fills what is only read with `word`, behind the call.
    pub(crate) fn overwrite_inputs(&mut self, stream: &B::Stream, word: u32) {
        for (buffer, after) in self.buffers.iter_mut().zip(&mut self.after).take(self.inputs) {
            buffer.fill_bytes(stream, word).unwrap();
            after.fill(of_word(word));
        }
    }
}

impl<B: Backend, T: Element> Step<B> for Lane<B, T> {
    fn launch(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        let counts = self.counts.as_mut().map(|(buffers, _)| buffers);
        let (buffers, ranges) = (&mut self.buffers[..], &self.ranges[..]);
        let operands = Operands { buffers, ranges, counts, in_place: self.in_place };
        self.job.launch(comm, self.options, stream, operands)
    }

    fn check(&self, stream: &B::Stream) {
        for (number, (buffer, after)) in self.buffers.iter().zip(&self.after).enumerate() {
            let found = buffer.read(stream).unwrap();
            compare::assert_bits(&format!("{}: buffer {number}", self.what), &found, after);
        }
        for (buffer, expected) in self.counts.iter().flat_map(|(buffers, expected)| buffers.iter().zip(expected)) {
            compare::assert_bits(&format!("{}: counts", self.what), &buffer.read(stream).unwrap(), expected);
        }
    }
}
