//! Completion (P3): when a rank's kernel has finished, its input is its own again, however slow its peers are (B03 to B05).
//!
//! The host image alone can hold a rank up inside the kernel; elsewhere these cases run without that.

use std::time::Duration;

use half::f16;
use signal_core::{Algorithm, Backend, Communicator, DeviceBuffer, Phase, ReduceOp, Result};

use crate::compare;
use crate::exchange::{Exchange, random_inputs, sum};
use crate::place::Place;
use crate::rig::{Rig, scaled};
use crate::world::{World, options};

/// How long the slow rank stays behind a barrier.
const DELAY: Duration = Duration::from_millis(20);

/// What the fast rank writes over its input.
const JUNK: u32 = 0x7777_7777;

/// Rounds in which each rank is once the fast one; the next rank is slow, right behind the start barrier.
fn overwritten<B: Backend>(rig: &Rig<B>, places: impl Fn(usize, usize) -> Vec<Place>) {
    for ranks in [2, 3, 5] {
        let mut world = rig.world(ranks);
        for round in 0..scaled(4) as usize {
            for (fast, algorithm) in (0..ranks).flat_map(|r| Algorithm::ALL_REDUCE.map(|a| (r, a))) {
                let options = options(|o| (o.algorithm, o.blocks, o.threads) = (Some(algorithm), Some(2), Some(1)));
                let places = places(ranks, fast);
                let mut exchange = Exchange::<B, f32>::random(&mut world, 500, round as u64, options, &places);
                exchange.lanes[(fast + 1) % ranks].options.delay = Some((Phase::Start, DELAY));
                exchange.launch(&mut world, fast);
                exchange.lanes[fast].overwrite_input(&world.streams[fast], JUNK);
                exchange.finish(&world);
            }
        }
    }
}

/// Peers read the input where it lies.
pub fn input_overwritten_symmetric<B: Backend>(rig: &Rig<B>) {
    overwritten(rig, |ranks, _| vec![Place::symmetric(); ranks]);
}

/// The kernel stages the input: the overwritten memory is the caller's own, and still the sums must stand.
pub fn input_overwritten_staged<B: Backend>(rig: &Rig<B>) {
    overwritten(rig, |ranks, _| vec![Place::local(); ranks]);
}

/// The fast rank is out of place among ranks that are in place.
pub fn input_overwritten_in_place<B: Backend>(rig: &Rig<B>) {
    overwritten(rig, |ranks, fast| {
        let place = |rank| if rank == fast { Place::symmetric() } else { Place::symmetric().in_place() };
        (0..ranks).map(place).collect()
    });
}

/// The next call stages over the scratch that a slow peer still reads: its own window, or the sums of a shard (B06, B28).
pub fn input_overwritten_by_the_next_call<B: Backend>(rig: &Rig<B>) {
    const SCRATCH: usize = 64 << 10;
    for ranks in [2, 3] {
        let mut world = rig.world_with(ranks, |s| s.scratch_bytes = SCRATCH);
        for round in 0..scaled(3) as usize {
            for (first, phase) in [
                (Algorithm::OneStage, Phase::Start),
                (Algorithm::TwoStage, Phase::Start),
                (Algorithm::TwoStage, Phase::Middle),
                (Algorithm::TwoStagePush, Phase::Start),
                (Algorithm::TwoStagePush, Phase::Middle),
            ] {
                let slow = round % ranks;
                let with = |a| options(|o| (o.algorithm, o.blocks, o.threads) = (Some(a), Some(2), Some(1)));
                let local = vec![Place::local(); ranks];
                let mut seed = 0;
                let mut calls = [first, Algorithm::OneStage, Algorithm::TwoStagePush, Algorithm::TwoStage, first].map(
                    |algorithm| {
                        seed += 1;
                        // More than fits the scratch: the staged window covers all of it.
                        let count = SCRATCH / 2 + 100;
                        Exchange::<B, f16>::random(&mut world, count, seed, with(algorithm), &local)
                    },
                );
                calls[0].lanes[slow].options.delay = Some((phase, DELAY));
                for call in &mut calls {
                    call.launch(&mut world, 0);
                }
                for call in &calls {
                    call.finish(&world);
                }
            }
        }
    }
}

/// Inputs in symmetric memory that is dropped while calls still need it.
pub(crate) struct Dropped<B: Backend> {
    inputs: Vec<Vec<f32>>,
    /// Two allocations.
    sources: [Vec<DeviceBuffer<B, f32>>; 2],
    /// Ranks use one or the other, so that no rank's own buffer says where its peers' inputs lie.
    scattered: bool,
    pub(crate) targets: Vec<DeviceBuffer<B, f32>>,
}

impl<B: Backend> Dropped<B> {
    const COUNT: usize = 203;
    const LEN: usize = 2 * Self::COUNT;

    pub(crate) fn new(world: &mut World<B>, scattered: bool) -> Self {
        let inputs = random_inputs::<f32>(world.ranks(), 4, Self::COUNT);
        let mut sources = [world.alloc(Self::LEN), world.alloc(Self::LEN)];
        world.each(|rank, _, stream| {
            let mut image = vec![0.0; Self::LEN];
            image[rank..rank + Self::COUNT].copy_from_slice(&inputs[rank]);
            sources.iter_mut().try_for_each(|source| source[rank].write(stream, &image))
        });
        Dropped { inputs, sources, scattered, targets: world.local(Self::COUNT) }
    }

    /// Enqueues, or captures, the call of one rank.
    pub(crate) fn call(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        let rank = comm.rank();
        let source = &self.sources[if self.scattered { rank % 2 } else { 0 }][rank];
        let options = options(|o| (o.blocks, o.threads) = (Some(2), Some(1)));
        let input = source.slice(rank..rank + Self::COUNT)?;
        comm.with(options).all_reduce(stream, input, &mut self.targets[rank], ReduceOp::Sum)
    }

    /// Drops the inputs on all ranks and allocates as much again, full of junk.
    pub(crate) fn reuse(&mut self, world: &mut World<B>) -> Vec<DeviceBuffer<B, f32>> {
        self.sources = [Vec::new(), Vec::new()];
        let mut junk = world.alloc(Self::LEN);
        junk.extend(world.alloc(Self::LEN));
        let ranks = world.ranks();
        for (i, buffer) in junk.iter_mut().enumerate() {
            buffer.fill_bytes(&world.streams[i % ranks], JUNK).unwrap();
        }
        junk
    }

    /// Waits; the sums are those of the inputs, the junk is as it was.
    pub(crate) fn check(&self, world: &World<B>, junk: &[DeviceBuffer<B, f32>]) {
        world.wait();
        let expected = sum(&self.inputs);
        for (rank, target) in self.targets.iter().enumerate() {
            compare::assert_bits(&format!("rank {rank}"), &target.read(&world.streams[rank]).unwrap(), &expected);
        }
        for (i, buffer) in junk.iter().enumerate() {
            let found = buffer.read(&world.streams[i % world.ranks()]).unwrap();
            compare::assert_bits("newer memory", &found, &vec![f32::from_bits(JUNK); Self::LEN]);
        }
    }
}

/// All ranks drop the inputs of a call that has not begun yet, because one rank is late, and take new memory.
pub fn input_freed_behind_the_call<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        for scattered in [false, true] {
            let mut world = rig.world(ranks);
            let mut dropped = Dropped::new(&mut world, scattered);
            world.each(|rank, comm, stream| {
                let late = options(|o| o.delay = (rank == 1).then_some((Phase::Start, DELAY)));
                comm.with(late).barrier(stream)?;
                dropped.call(comm, stream)
            });
            let junk = dropped.reuse(&mut world);
            dropped.check(&world, &junk);
        }
    }
}
