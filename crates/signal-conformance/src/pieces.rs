//! One collective other than all-reduce on all ranks: drawn, prepared, enqueued, checked.

use std::ops::Range;

use signal_core::reference::{self, Rng, random_inputs};
use signal_core::{Backend, CallOptions, Collective, Communicator, DeviceBuffer, Element, ReduceOp, Result};

use crate::compare;
use crate::exchange::{GUARD, Step, canary, of_word, poison};
use crate::place::{Memory, below, pick};
use crate::world::World;

/// A call, as far as all ranks must agree on it. Counts are of elements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Job {
    /// With a count for each rank.
    ReduceScatter(Vec<usize>, ReduceOp),
    AllGather(Vec<usize>),
    /// From or to the root.
    Broadcast(usize, usize),
    Scatter(usize, usize),
    Gather(usize, usize),
    Reduce(usize, usize, ReduceOp),
    /// For each rank.
    AllToAll(usize),
    /// From each rank (rows) to each.
    AllToAllRagged(Vec<usize>),
    /// From, to, elements.
    Transfers(Vec<(usize, usize, usize)>),
}

impl Job {
    /// A job of a collective, of about `count` elements for each rank.
    pub(crate) fn draw(rng: &mut Rng, collective: Collective, ranks: usize, count: usize) -> Self {
        let root = below(rng, ranks);
        let op = pick(rng, &[ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Max, ReduceOp::Avg]);
        let ragged = below(rng, 2) == 0;
        let some = |rng: &mut Rng| if below(rng, 4) == 0 { 0 } else { below(rng, 2 * count + 1) };
        match collective {
            Collective::ReduceScatter if ragged => Job::ReduceScatter((0..ranks).map(|_| some(rng)).collect(), op),
            Collective::ReduceScatter => Job::ReduceScatter(vec![count; ranks], op),
            Collective::AllGather if ragged => Job::AllGather((0..ranks).map(|_| some(rng)).collect()),
            Collective::AllGather => Job::AllGather(vec![count; ranks]),
            Collective::Broadcast => Job::Broadcast(count, root),
            Collective::Scatter => Job::Scatter(count, root),
            Collective::Gather => Job::Gather(count, root),
            Collective::Reduce => Job::Reduce(count, root, op),
            Collective::AllToAll if ragged => Job::AllToAllRagged((0..ranks * ranks).map(|_| some(rng)).collect()),
            Collective::AllToAll => Job::AllToAll(count),
            _ => {
                let pairs = (0..ranks * ranks).filter(|_| below(rng, 2) == 0).collect::<Vec<_>>();
                Job::Transfers(pairs.into_iter().map(|pair| (pair / ranks, pair % ranks, some(rng))).collect())
            }
        }
    }

    /// Elements of the largest piece, where it can go by lines.
    pub(crate) fn lines(&self) -> Option<usize> {
        match self {
            Job::ReduceScatter(counts, _) | Job::AllGather(counts) | Job::AllToAllRagged(counts) => {
                counts.iter().max().copied()
            }
            Job::Broadcast(count, _) | Job::Scatter(count, _) | Job::Gather(count, _) => Some(*count),
            Job::Reduce(count, ..) | Job::AllToAll(count) => Some(*count),
            Job::Transfers(_) => None,
        }
    }

    /// Whether it has a form in place, for the rank.
    fn has_in_place(&self) -> bool {
        match self {
            Job::ReduceScatter(counts, _) | Job::AllGather(counts) => counts.iter().all(|count| *count == counts[0]),
            Job::AllToAll(_) | Job::Reduce(..) => true,
            _ => false,
        }
    }

    /// What every rank holds in each of its buffers before and after. Of a buffer that is an output alone, nothing is said before.
    fn contents<T: Element>(&self, ranks: usize, seed: u64, in_place: bool) -> Vec<Vec<Content<T>>> {
        let bits = |seed: u64, len: usize| -> Vec<T> {
            let mut rng = Rng::new(seed);
            (0..len).map(|_| T::from_bits(rng.next_u64())).collect()
        };
        let of_ranks = |len: &dyn Fn(usize) -> usize| -> Vec<Vec<T>> {
            (0..ranks).map(|rank| bits(seed ^ (rank as u64 + 1) << 40, len(rank))).collect()
        };
        let reduced =
            |inputs: &[Vec<T>], op| reference::all_reduce(&inputs.iter().map(Vec::as_slice).collect::<Vec<_>>(), op);
        let input = |data: &[T]| Content { before: Some(data.to_vec()), after: data.to_vec() };
        let output = |data: Vec<T>| Content { before: None, after: data };
        match self {
            Job::ReduceScatter(counts, op) => {
                let inputs = random_inputs::<T>(ranks, seed, counts.iter().sum());
                let result = reduced(&inputs, *op);
                let part = |rank: usize| start(counts, rank)..start(counts, rank + 1);
                let contents = |rank: usize| {
                    if !in_place {
                        return vec![input(&inputs[rank]), output(result[part(rank)].to_vec())];
                    }
                    let mut both = input(&inputs[rank]);
                    both.after[part(rank)].copy_from_slice(&result[part(rank)]);
                    vec![both]
                };
                (0..ranks).map(contents).collect()
            }
            Job::AllGather(counts) => {
                let inputs = of_ranks(&|rank| counts[rank]);
                let result = inputs.concat();
                let contents = |rank: usize| {
                    if !in_place {
                        return vec![input(&inputs[rank]), output(result.clone())];
                    }
                    let mut before = vec![poison(); result.len()];
                    before[start(counts, rank)..start(counts, rank + 1)].copy_from_slice(&inputs[rank]);
                    vec![Content { before: Some(before), after: result.clone() }]
                };
                (0..ranks).map(contents).collect()
            }
            Job::Broadcast(count, root) => {
                let data = bits(seed, *count);
                (0..ranks).map(|rank| vec![if rank == *root { input(&data) } else { output(data.clone()) }]).collect()
            }
            Job::Scatter(count, root) => {
                let data = bits(seed, count * ranks);
                let part = |rank: usize| output(data[rank * count..][..*count].to_vec());
                let contents = |rank| if rank == *root { vec![input(&data), part(rank)] } else { vec![part(rank)] };
                (0..ranks).map(contents).collect()
            }
            Job::Gather(count, root) => {
                let inputs = of_ranks(&|_| *count);
                let contents = |rank: usize| {
                    let mut contents = vec![input(&inputs[rank])];
                    contents.extend((rank == *root).then(|| output(inputs.concat())));
                    contents
                };
                (0..ranks).map(contents).collect()
            }
            Job::Reduce(count, root, op) => {
                let inputs = random_inputs::<T>(ranks, seed, *count);
                let result = reduced(&inputs, *op);
                let contents = |rank: usize| match (rank == *root, in_place) {
                    (false, _) => vec![input(&inputs[rank])],
                    (true, false) => vec![input(&inputs[rank]), output(result.clone())],
                    (true, true) => vec![Content { before: Some(inputs[rank].clone()), after: result.clone() }],
                };
                (0..ranks).map(contents).collect()
            }
            Job::AllToAll(count) => {
                let contents = all_to_all(&of_ranks(&|_| count * ranks), &vec![*count; ranks * ranks]);
                let contents = contents.into_iter().map(|[before, after]| {
                    if in_place {
                        return vec![Content { before: Some(before), after }];
                    }
                    vec![input(&before), output(after)]
                });
                contents.collect()
            }
            Job::AllToAllRagged(counts) => {
                let inputs = of_ranks(&|rank| counts[rank * ranks..][..ranks].iter().sum());
                let contents = all_to_all(&inputs, counts).into_iter();
                contents.map(|[before, after]| vec![input(&before), output(after)]).collect()
            }
            Job::Transfers(transfers) => {
                let data: Vec<Vec<T>> =
                    transfers.iter().enumerate().map(|(at, (_, _, count))| bits(seed + at as u64, *count)).collect();
                let contents = |rank: usize| {
                    let sent = transfers.iter().zip(&data).filter(|((from, ..), _)| *from == rank);
                    let received = transfers.iter().zip(&data).filter(|((_, to, _), _)| *to == rank);
                    let sent = sent.map(|(_, data)| input(data));
                    sent.chain(received.map(|(_, data)| output(data.clone()))).collect()
                };
                (0..ranks).map(contents).collect()
            }
        }
    }
}

/// What each rank sends, and what it gets.
fn all_to_all<T: Copy>(inputs: &[Vec<T>], counts: &[usize]) -> Vec<[Vec<T>; 2]> {
    let ranks = inputs.len();
    let part = |from: usize, to: usize| {
        let row = &counts[from * ranks..][..ranks];
        &inputs[from][start(row, to)..start(row, to + 1)]
    };
    let received = |to: usize| (0..ranks).flat_map(|from| part(from, to).to_vec()).collect::<Vec<_>>();
    (0..ranks).map(|rank| [inputs[rank].clone(), received(rank)]).collect()
}

/// Where the part of `rank` begins.
fn start(counts: &[usize], rank: usize) -> usize {
    counts[..rank].iter().sum()
}

/// A buffer's elements before and after the call.
struct Content<T> {
    before: Option<Vec<T>>,
    after: Vec<T>,
}

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

/// One rank's part in a job.
pub(crate) struct Lane<B: Backend, T: Element> {
    what: String,
    rank: usize,
    ranks: usize,
    job: Job,
    in_place: bool,
    pub(crate) options: CallOptions,
    buffers: Vec<DeviceBuffer<B, T>>,
    ranges: Vec<Range<usize>>,
    /// What each whole buffer has to hold after the call.
    after: Vec<Vec<T>>,
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
        let contents = job.contents::<T>(ranks, rng.next_u64(), in_place);
        let places: Vec<Vec<_>> = contents.iter().map(|of| of.iter().map(|_| place.draw(rng)).collect()).collect();
        let most = contents.iter().map(Vec::len).max().unwrap_or(0);
        let mut buffers: Vec<Vec<DeviceBuffer<B, T>>> = (0..ranks).map(|_| Vec::new()).collect();
        for number in 0..most {
            let lens =
                contents.iter().zip(&places).filter_map(|(c, p)| Some(p.get(number)?.1 + c.get(number)?.after.len()));
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
        for (rank, (contents, mut buffers)) in contents.into_iter().zip(buffers).enumerate() {
            let (mut ranges, mut after) = (Vec::new(), Vec::new());
            for ((content, buffer), (_, first)) in contents.into_iter().zip(&mut buffers).zip(&places[rank]) {
                let range = *first..first + content.after.len();
                let mut image = vec![canary(); buffer.len()];
                match &content.before {
                    Some(before) => image[range.clone()].copy_from_slice(before),
                    None => image[range.clone()].fill(poison()),
                }
                buffer.write(&world.streams[rank], &image).unwrap();
                image[range.clone()].copy_from_slice(&content.after);
                ranges.push(range);
                after.push(image);
            }
            let CallOptions { algorithm, blocks, threads, domain, .. } = options;
            let what = format!(
                "rank {rank} of {ranks}, {job:?} of {}, {algorithm:?} {blocks:?}x{threads:?} on domain {domain}, in place: {in_place}, {:?}",
                T::DTYPE,
                places[rank]
            );
            let job = job.clone();
            lanes.push(Lane { what, rank, ranks, job, in_place, options, buffers, ranges, after });
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
        let inputs = match &self.job {
            Job::Broadcast(_, root) => usize::from(self.rank == *root),
            Job::Scatter(_, root) => usize::from(self.rank == *root),
            Job::Transfers(transfers) => transfers.iter().filter(|(from, ..)| *from == self.rank).count(),
            Job::Reduce(_, root, _) if self.in_place => usize::from(self.rank != *root),
            _ => usize::from(!self.in_place),
        };
        for (buffer, after) in self.buffers.iter_mut().zip(&mut self.after).take(inputs) {
            buffer.fill_bytes(stream, word).unwrap();
            after.fill(of_word(word));
        }
    }
}

impl<B: Backend, T: Element> Step<B> for Lane<B, T> {
    fn launch(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        let call = comm.with(self.options);
        let ranges = &self.ranges;
        if let Job::Transfers(transfers) = &self.job {
            let sends = transfers.iter().filter(|(from, ..)| *from == self.rank).map(|(_, to, _)| *to);
            let receives = transfers.iter().filter(|(_, to, _)| *to == self.rank).map(|(from, ..)| *from);
            let sends: Vec<usize> = sends.collect();
            let (inputs, outputs) = self.buffers.split_at_mut(sends.len());
            let mut group = call.transfers();
            for ((to, buffer), range) in sends.iter().zip(inputs).zip(ranges) {
                group = group.send(buffer.slice(range.clone())?, *to)?;
            }
            for ((from, buffer), range) in receives.zip(outputs).zip(&ranges[sends.len()..]) {
                group = group.receive(buffer.slice_mut(range.clone())?, from)?;
            }
            return group.launch(stream);
        }
        let (first, second) = self.buffers.split_at_mut(1);
        let (first, range) = (&mut first[0], ranges[0].clone());
        let mut second = second.first_mut().map(|buffer| buffer.slice_mut(ranges[1].clone())).transpose()?;
        // What only those bring who have two buffers.
        let other = |second: &mut Option<_>| second.take().unwrap();
        match &self.job {
            Job::ReduceScatter(_, op) if self.in_place => {
                call.reduce_scatter_in_place(stream, first.slice_mut(range)?, *op)
            }
            Job::ReduceScatter(counts, op) if counts.iter().all(|count| *count == counts[0]) => {
                call.reduce_scatter(stream, first.slice(range)?, other(&mut second), *op)
            }
            Job::ReduceScatter(counts, op) => {
                call.reduce_scatter_ragged(stream, first.slice(range)?, other(&mut second), counts, *op)
            }
            Job::AllGather(_) if self.in_place => call.all_gather_in_place(stream, first.slice_mut(range)?),
            Job::AllGather(counts) if counts.iter().all(|count| *count == counts[0]) => {
                call.all_gather(stream, first.slice(range)?, other(&mut second))
            }
            Job::AllGather(counts) => call.all_gather_ragged(stream, first.slice(range)?, other(&mut second), counts),
            Job::Broadcast(_, root) => call.broadcast(stream, first.slice_mut(range)?, *root),
            Job::Scatter(_, root) if self.rank == *root => {
                call.scatter(stream, Some(first.slice(range)?), other(&mut second), *root)
            }
            Job::Scatter(_, root) => call.scatter(stream, None, first.slice_mut(range)?, *root),
            Job::Gather(_, root) => call.gather(stream, first.slice(range)?, second, *root),
            Job::Reduce(_, root, op) if self.in_place => {
                call.reduce_in_place(stream, first.slice_mut(range)?, *op, *root)
            }
            Job::Reduce(_, root, op) => call.reduce(stream, first.slice(range)?, second, *op, *root),
            Job::AllToAll(_) if self.in_place => call.all_to_all_in_place(stream, first.slice_mut(range)?),
            Job::AllToAll(_) => call.all_to_all(stream, first.slice(range)?, other(&mut second)),
            Job::AllToAllRagged(counts) => {
                assert_eq!(counts.len(), self.ranks * self.ranks);
                call.all_to_all_ragged(stream, first.slice(range)?, other(&mut second), counts)
            }
            Job::Transfers(_) => unreachable!("launched above"),
        }
    }

    fn check(&self, stream: &B::Stream) {
        for (number, (buffer, after)) in self.buffers.iter().zip(&self.after).enumerate() {
            let found = buffer.read(stream).unwrap();
            compare::assert_bits(&format!("{}: buffer {number}", self.what), &found, after);
        }
    }
}
