//! Completion (P3): when a rank's kernel has finished, its input is its own again, however slow its peers are (B03 to B05).
//!
//! The host image alone can hold a rank up inside the kernel; elsewhere these cases run without that.

use std::time::Duration;

use half::f16;
use signal_core::{Algorithm, Backend, Phase};

use crate::exchange::{Exchange, Step};
use crate::place::Place;
use crate::rig::{Rig, scaled};
use crate::world::options;

/// How long the slow rank stays behind a barrier.
const DELAY: Duration = Duration::from_millis(20);

/// What the fast rank writes over its input.
const JUNK: u32 = 0x7777_7777;

/// Rounds in which each rank is once the fast one; the next rank is slow, right behind the start barrier.
fn overwritten<B: Backend>(rig: &Rig<B>, places: impl Fn(usize, usize) -> Vec<Place>) {
    for ranks in [2, 3, 5] {
        let mut world = rig.world(ranks);
        for round in 0..scaled(4) as usize {
            for (fast, algorithm) in (0..ranks).flat_map(|r| Algorithm::ALL.map(|a| (r, a))) {
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
            ] {
                let slow = round % ranks;
                let with = |a| options(|o| (o.algorithm, o.blocks, o.threads) = (Some(a), Some(2), Some(1)));
                let local = vec![Place::local(); ranks];
                let mut seed = 0;
                let mut calls = [first, Algorithm::OneStage, Algorithm::TwoStage, first].map(|algorithm| {
                    seed += 1;
                    // More than fits the scratch: the staged window covers all of it.
                    let count = SCRATCH / 2 + 100;
                    Exchange::<B, f16>::random(&mut world, count, seed, with(algorithm), &local)
                });
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

/// The fast rank drops its buffers instead, and takes new memory that it fills at once.
pub fn input_freed_behind_the_call<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut world = rig.world(ranks);
        for algorithm in Algorithm::ALL {
            for fast in 0..ranks {
                let options = options(|o| (o.algorithm, o.blocks, o.threads) = (Some(algorithm), Some(2), Some(1)));
                let places = vec![Place::symmetric(); ranks];
                let mut exchange = Exchange::<B, f32>::random(&mut world, 500, 6, options, &places);
                exchange.lanes[(fast + 1) % ranks].options.delay = Some((Phase::Start, DELAY));
                exchange.launch(&mut world, fast);
                drop(exchange.lanes.remove(fast));
                let mut reused = world.alloc::<f32>(500 + 19);
                reused[fast].fill_bytes(&world.streams[fast], JUNK).unwrap();
                world.wait();
                let others = world.streams.iter().enumerate().filter(|(rank, _)| *rank != fast);
                for (lane, (_, stream)) in exchange.lanes.iter().zip(others) {
                    lane.check(stream);
                }
            }
        }
    }
}
