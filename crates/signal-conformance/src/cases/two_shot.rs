//! All-reduces that run through the Lamport region in windows: their edges, what may follow what, and ranks out of step.

use std::time::Duration;

use half::{bf16, f16};
use signal_core::kernel::Phase;
use signal_core::reference::Rng;
use signal_core::{Algorithm, ApiMisuse, Backend, CallOptions, Communicator, DeviceBuffer, Dtype, Element, ReduceOp};

use crate::cases::misuse::refused;
use crate::exchange::{Exchange, works};
use crate::place::{Mix, Place, pick};
use crate::rig::{Rig, is_scaled_down, scaled};
use crate::world::{World, options};

const SLOT: usize = 1 << 20;

fn two_shot(blocks: u32, threads: u32) -> CallOptions {
    options(|o| (o.algorithm, o.blocks, o.threads) = (Some(Algorithm::TwoShot), Some(blocks), Some(threads)))
}

/// The most bytes of one window.
fn window(ranks: usize) -> usize {
    match ranks {
        1 | 2 => 8 / ranks * SLOT,
        3 | 4 => ranks * SLOT,
        _ => ranks * SLOT / 2,
    }
}

fn run<B: Backend, T: Element>(
    world: &mut World<B>,
    bytes: usize,
    seed: u64,
    grid: CallOptions,
    places: &[Place],
    first: usize,
) {
    Exchange::<B, T>::random(world, bytes / T::DTYPE.bytes(), seed, grid, places).run(world, first);
}

/// Sizes around one window and several, and of fewer packs than ranks, in every kind of place.
pub fn two_shot_sizes<B: Backend>(rig: &Rig<B>) {
    for ranks in [1, 2, 3, 8] {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(ranks as u64);
        let (one, pack) = (window(ranks), 16 * ranks);
        let mut sizes = vec![2, 16, pack - 16, pack, pack + 16, 3 * pack - 2, 4 * pack + 18, 40_000];
        // A window is megabytes a rank, which the reference adds element by element.
        match ranks {
            _ if is_scaled_down() => {}
            2 => sizes.extend([one - 16, one, 2 * one + 4_098]),
            3 => sizes.push(one + 16),
            _ => sizes.push(one),
        }
        for (call, bytes) in sizes.into_iter().enumerate() {
            let grid = two_shot(pick(&mut rng, &[1, 2, 5]), pick(&mut rng, &[1, 2]));
            let places = pick(&mut rng, &Mix::ALL).places(ranks, &mut rng);
            let seed = rng.next_u64();
            match call % 3 {
                0 => run::<B, bf16>(&mut world, bytes, seed, grid, &places, call % ranks),
                1 => run::<B, f32>(&mut world, bytes, seed, grid, &places, call % ranks),
                _ => run::<B, f16>(&mut world, bytes, seed, grid, &places, call % ranks),
            }
        }
    }
}

/// Calls of one, two and many windows and by Lamport's algorithm behind each other, of several grids, not waited for one by one, on
/// both sides of the flag's wrap: a window is a call.
pub fn two_shot_and_lamport_follow_each_other<B: Backend>(rig: &Rig<B>) {
    for (ranks, first) in [(2, 0), (2, 0xffff_fff7), (3, 0xffff_fffa)] {
        let mut world = rig.world(ranks);
        for comm in &mut world.comms {
            comm.preset_lamport_flag(first).unwrap();
        }
        let mut rng = Rng::new(u64::from(first) + ranks as u64);
        let one = window(ranks);
        let largest = if is_scaled_down() { one + 64 } else { 3 * one };
        let sizes = [40, 3 * one, 30, 3_000, one + 64, 700, 16_384, 60, 2 * one + 32, 1_000, one, 2_000, 40];
        let mut calls: Vec<_> = sizes
            .into_iter()
            .filter(|bytes| *bytes <= largest)
            .map(|bytes| {
                let by_region = bytes <= 16_384 && rng.next_u64().is_multiple_of(2);
                let algorithm = if by_region { Algorithm::Lamport } else { Algorithm::TwoShot };
                let grid = options(|o| {
                    (o.algorithm, o.blocks, o.threads) = (Some(algorithm), Some(pick(&mut rng, &[1, 2, 3])), Some(2));
                });
                let places = pick(&mut rng, &Mix::ALL).places(ranks, &mut rng);
                Exchange::<B, f32>::random(&mut world, bytes / 4, rng.next_u64(), grid, &places)
            })
            .collect();
        for call in &mut calls {
            call.launch(&mut world, 0);
        }
        for call in &calls {
            call.finish(&world);
        }
    }
}

/// One rank stops at each point of a call of many windows, while the others run ahead as far as they can.
pub fn two_shot_out_of_step<B: Backend>(rig: &Rig<B>) {
    if !rig.is_host() {
        eprintln!("not run: only the host image can hold a rank up inside a kernel");
        return;
    }
    for ranks in [2, 3] {
        let mut world = rig.world(ranks);
        for (round, phase) in
            [Phase::Start, Phase::Middle, Phase::Exchange].into_iter().cycle().take(scaled(3) as usize).enumerate()
        {
            let places = vec![Place::symmetric(); ranks];
            let sizes = [2 * window(ranks) + 8, 100, 600];
            let mut calls = sizes
                .map(|bytes| Exchange::<B, f32>::random(&mut world, bytes / 4, round as u64, two_shot(2, 2), &places));
            calls[round % 2].lanes[round % ranks].options.delay = Some((phase, Duration::from_millis(20)));
            for call in &mut calls {
                call.launch(&mut world, 0);
            }
            for call in &calls {
                call.finish(&world);
            }
        }
    }
}

/// Other types, operators and domains have other algorithms; a setting leaves those calls alone.
pub fn two_shot_takes_what_the_region_takes<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world_with(2, |s| (s.domains, s.algorithm) = (true, Some(Algorithm::TwoShot)));
    let (comm, stream) = (&mut world.comms[0], &world.streams[0]);
    let algorithm = |comm: &Communicator<B>, count, dtype, op| comm.plan(count, dtype, op).algorithm;
    assert_eq!(algorithm(comm, 10_000_000, Dtype::Bf16, ReduceOp::Sum), Algorithm::TwoShot);
    assert_eq!(algorithm(comm, 8, Dtype::Bf16, ReduceOp::Sum), Algorithm::Lamport, "fewer packs than ranks");
    assert!(!algorithm(comm, 1000, Dtype::I32, ReduceOp::Sum).uses_region());
    assert!(!algorithm(comm, 1000, Dtype::Bf16, ReduceOp::Max).uses_region());
    let forced = options(|o| o.algorithm = Some(Algorithm::TwoShot));
    let mut integers = DeviceBuffer::<B, i32>::new(comm.device(), 100).unwrap();
    let (op, dtype) = (ReduceOp::Sum, Dtype::I32);
    refused(comm.with(forced).all_reduce_in_place(stream, &mut integers, op), ApiMisuse::LamportType { op, dtype });
    let mut floats = DeviceBuffer::<B, f32>::new(comm.device(), 100).unwrap();
    let elsewhere = options(|o| (o.algorithm, o.domain) = (Some(Algorithm::TwoShot), 2));
    refused(comm.with(elsewhere).all_reduce_in_place(stream, &mut floats, op), ApiMisuse::LamportDomain(2));
    works(&mut world);
}
