//! All-reduce against the reference: sizes, grids, memory, worlds (P2, P4, P12, P14).

use std::time::Duration;

use half::{bf16, f16};
use signal_core::reference::Rng;
use signal_core::{Algorithm, Backend, CallOptions, Communicator, Dtype, Element, Phase, ReduceOp};

use crate::compare;
use crate::exchange::{Exchange, Step, poison, random_inputs, sum};
use crate::place::{Mix, below, pick};
use crate::rig::{Rig, WORLDS, scaled, settings};
use crate::world::{World, options};

/// Blocks and threads of a call.
type Grid = (u32, u32);

const GRIDS: [Grid; 4] = [(1, 1), (2, 1), (3, 2), (4, 4)];

fn call(algorithm: Algorithm, grid: Grid) -> CallOptions {
    options(|o| (o.algorithm, o.blocks, o.threads) = (Some(algorithm), Some(grid.0), Some(grid.1)))
}

/// `count` and its neighbours.
fn around(count: usize) -> impl Iterator<Item = usize> {
    count.saturating_sub(1)..=count + 1
}

/// Elements in 16 bytes.
fn pack<T: Element>() -> usize {
    16 / T::DTYPE.bytes()
}

/// Each size with each algorithm; grid and places change from call to call, and on the host one rank may be late behind
/// every start barrier.
fn sweep<B: Backend, T: Element>(
    world: &mut World<B>,
    sizes: &[usize],
    grids: &[Grid],
    late: Option<Duration>,
    rng: &mut Rng,
) {
    let ranks = world.ranks();
    for (i, &count) in sizes.iter().enumerate() {
        // One of them in a run that is scaled down, which has another purpose than to try every size with each.
        let one = [pick(rng, &Algorithm::ALL_REDUCE)];
        let algorithms: &[Algorithm] = if scaled(10) < 10 { &one } else { &Algorithm::ALL_REDUCE };
        for &algorithm in algorithms {
            let mix = Mix::ALL[(i + below(rng, 2) * 7) % Mix::ALL.len()];
            let places = mix.places(ranks, rng);
            let options = call(algorithm, pick(rng, grids));
            let mut exchange = Exchange::<B, T>::random(world, count, rng.next_u64(), options, &places);
            exchange.lanes[below(rng, ranks)].options.delay = late.map(|late| (Phase::Start, late));
            exchange.run(world, below(rng, ranks));
        }
    }
}

/// Nothing, less than a pack, and around multiples of a pack and of a pack for each rank (B42).
pub fn all_reduce_matches_small_sizes<B: Backend>(rig: &Rig<B>) {
    for ranks in WORLDS {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(ranks as u64);
        for_dtypes!(T => {
            let mut sizes = vec![0, 1, 2, 3, 7, 8, 9];
            for packs in [1, 2, 5, 32] {
                sizes.extend(around(packs * pack::<T>()));
                sizes.extend(around(packs * pack::<T>() * ranks));
            }
            sweep::<B, T>(&mut world, &sizes, &GRIDS, None, &mut rng);
        });
    }
}

/// Around one pass of the whole grid, for one rank's part and for all of it.
pub fn all_reduce_matches_around_grid_limits<B: Backend>(rig: &Rig<B>) {
    for ranks in WORLDS {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(100 + ranks as u64);
        for_dtypes!(T => {
            for grid in GRIDS {
                let pass = (grid.0 * grid.1) as usize * pack::<T>();
                let sizes: Vec<usize> = around(pass).chain(around(pass * ranks)).chain(around(2 * pass)).collect();
                sweep::<B, T>(&mut world, &sizes, &[grid], None, &mut rng);
            }
        });
    }
}

/// Messages of less than the smallest scratch, of about as much, and of several windows. A late rank lets its peers'
/// blocks drift apart, into the next window.
pub fn all_reduce_matches_windows<B: Backend>(rig: &Rig<B>) {
    const SCRATCH: usize = 64 << 10;
    let late = Some(Duration::from_micros(500));
    for ranks in [1, 2, 3, 8] {
        let mut world = rig.world_with(ranks, |s| s.scratch_bytes = SCRATCH);
        let mut rng = Rng::new(200 + ranks as u64);
        for_dtypes!(T => {
            let window = SCRATCH / T::DTYPE.bytes();
            // A two-stage window leaves room for the sums of one shard: one rank's part of ranks + 1.
            let staged = window * ranks / (ranks + 1);
            let sizes = [window - 1, window + 1, staged, staged + 1, 3 * window + 13];
            sweep::<B, T>(&mut world, &sizes, &[(2, 1), (3, 2)], late, &mut rng);
        });
    }
}

/// World sizes that the other cases leave out.
pub fn all_reduce_matches_every_world<B: Backend>(rig: &Rig<B>) {
    for ranks in 1..=8 {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(300 + ranks as u64);
        for_dtypes!(T => sweep::<B, T>(&mut world, &[1, 31, 1000, 4099], &GRIDS, None, &mut rng));
    }
}

/// Every relation of the ranks' memory, with a message of one pack and one of several passes (B49, B63).
pub fn all_reduce_matches_every_memory<B: Backend>(rig: &Rig<B>) {
    for ranks in WORLDS {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(400 + ranks as u64);
        for mix in Mix::ALL {
            for algorithm in Algorithm::ALL_REDUCE {
                for_dtypes!(T => for count in [pack::<T>(), 777] {
                    let places = mix.places(ranks, &mut rng);
                    let options = call(algorithm, pick(&mut rng, &GRIDS));
                    Exchange::<B, T>::random(&mut world, count, rng.next_u64(), options, &places).run(&mut world, 0);
                });
            }
        }
    }
}

/// Calls without options, from nothing to more than the tables' last step.
pub fn all_reduce_matches_default_plan<B: Backend>(rig: &Rig<B>) {
    for ranks in WORLDS {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(500 + ranks as u64);
        for_dtypes!(T => for bytes in [0, 16, 2 << 10, 65_552, 300_000] {
            let places = Mix::Anything.places(ranks, &mut rng);
            let count = bytes / T::DTYPE.bytes();
            let exchange = Exchange::<B, T>::random(&mut world, count, rng.next_u64(), CallOptions::default(), &places);
            exchange.run(&mut world, 0);
        });
    }
}

/// Each domain has its own counters and its own part of the scratch.
pub fn all_reduce_matches_on_every_domain<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut world = rig.world_with(ranks, |s| s.domains = true);
        let mut rng = Rng::new(600 + ranks as u64);
        for domain in 0..8 {
            for algorithm in Algorithm::ALL_REDUCE.into_iter().filter(|a| domain == 0 || !a.uses_region()) {
                let mut options = call(algorithm, (2, 2));
                options.domain = domain;
                let places = Mix::Anything.places(ranks, &mut rng);
                // The largest needs several windows of an eighth of the scratch.
                let counts: &[usize] = if algorithm == Algorithm::Lines { &[100, 16_384] } else { &[100, 100_003] };
                for &count in counts {
                    Exchange::<B, f16>::random(&mut world, count, rng.next_u64(), options, &places).run(&mut world, 0);
                }
            }
        }
    }
}

/// A thread for each rank enqueues as it pleases.
pub fn all_reduce_matches_with_a_thread_a_rank<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3, 8] {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(700 + ranks as u64);
        let mut lanes: Vec<Vec<_>> = (0..ranks).map(|_| Vec::new()).collect();
        for algorithm in Algorithm::ALL_REDUCE.into_iter().cycle().take(20) {
            let places = Mix::Anything.places(ranks, &mut rng);
            let options = call(algorithm, pick(&mut rng, &GRIDS));
            let exchange = Exchange::<B, bf16>::random(&mut world, 333, rng.next_u64(), options, &places);
            for (list, lane) in lanes.iter_mut().zip(exchange.lanes) {
                list.push(lane);
            }
        }
        world.threads(lanes, |_, mut lanes, comm, stream| {
            for lane in &mut lanes {
                lane.launch(comm, stream).unwrap();
            }
            comm.wait(stream).unwrap();
            for lane in &lanes {
                lane.check(stream);
            }
        });
    }
}

/// Raw calls: input and output side by side in one buffer, also with nothing between them, and equal.
pub fn all_reduce_matches_raw_halves_of_one_buffer<B: Backend>(rig: &Rig<B>) {
    const COUNT: usize = 501;
    for ranks in [1, 2, 5] {
        let mut world = rig.world(ranks);
        for algorithm in Algorithm::ALL_REDUCE {
            for (input_at, output_at) in [(0, COUNT), (COUNT, 0), (8, 8), (3, 600)] {
                let inputs = random_inputs::<f32>(ranks, 9, COUNT);
                let mut buffers = world.alloc::<f32>(1200);
                world.each(|rank, comm, stream| {
                    let mut image = vec![poison::<f32>(); 1200];
                    image[input_at..input_at + COUNT].copy_from_slice(&inputs[rank]);
                    buffers[rank].write(stream, &image)?;
                    let base = buffers[rank].address();
                    let (input, output) = (base + 4 * input_at as u64, base + 4 * output_at as u64);
                    let call = comm.with(call(algorithm, (2, 2)));
                    // SAFETY: both ranges lie in the buffer, which lives beyond the wait below, and nothing else uses it.
                    unsafe { call.all_reduce_raw(stream, input, output, COUNT, Dtype::F32, ReduceOp::Sum) }
                });
                world.wait();
                let expected = sum(&inputs);
                for (rank, buffer) in buffers.iter().enumerate() {
                    let mut image = vec![poison::<f32>(); 1200];
                    image[input_at..input_at + COUNT].copy_from_slice(&inputs[rank]);
                    image[output_at..output_at + COUNT].copy_from_slice(&expected);
                    let what =
                        format!("rank {rank} of {ranks}, {algorithm}, input at {input_at}, output at {output_at}");
                    compare::assert_bits(&what, &buffer.read(&world.streams[rank]).unwrap(), &image);
                }
            }
        }
    }
}

/// Inputs in symmetric memory of another communicator, and in the part of another rank on the same device: both are
/// staged, since peers would look for them elsewhere.
pub fn all_reduce_matches_memory_of_others<B: Backend>(rig: &Rig<B>) {
    const COUNT: usize = 99;
    let device = &rig.devices()[0];
    let shared = || {
        let builder = Communicator::<B>::builder().settings(settings()).share_devices(true);
        World::new(builder.all_local(&[device.clone(), device.clone()]).unwrap())
    };
    let (mut world, mut other) = (shared(), shared());
    let inputs = random_inputs::<f32>(2, 11, COUNT);
    for algorithm in Algorithm::ALL_REDUCE {
        for (own, shift) in [(true, 1), (false, 0), (false, 1)] {
            // Rank r's input lies in the part of rank r + shift.
            let mut buffers = if own { world.alloc::<f32>(COUNT) } else { other.alloc(COUNT) };
            let mut outputs = world.alloc::<f32>(COUNT);
            world.each(|rank, comm, stream| {
                let buffer = &mut buffers[(rank + shift) % 2];
                buffer.write(stream, &inputs[rank])?;
                comm.with(call(algorithm, (2, 2))).all_reduce(stream, &*buffer, &mut outputs[rank], ReduceOp::Sum)
            });
            world.wait();
            for (rank, output) in outputs.iter().enumerate() {
                let found = output.read(&world.streams[rank]).unwrap();
                compare::assert_bits(&format!("rank {rank}, {algorithm}, own {own}, {shift}"), &found, &sum(&inputs));
            }
        }
    }
}

/// The same inputs give the same bits whatever the algorithm, the grid, the memory and the message around them (B52, B53).
pub fn all_reduce_same_bits_in_every_algorithm<B: Backend>(rig: &Rig<B>) {
    const ROW: usize = 384;
    for ranks in [2, 3, 8] {
        let mut world = rig.world_with(ranks, |s| s.scratch_bytes = 64 << 10);
        let mut rng = Rng::new(800 + ranks as u64);
        for_dtypes!(T => {
            let rows: Vec<Vec<T>> = random_inputs(ranks, 5, ROW);
            let mut bits: Option<Vec<T>> = None;
            for batch in [1, 2, 64] {
                let inputs: Vec<Vec<T>> = rows.iter().map(|row| row.repeat(batch)).collect();
                for algorithm in Algorithm::ALL_REDUCE {
                    for grid in [(1, 1), (3, 2)] {
                        let places = Mix::Anything.places(ranks, &mut rng);
                        let exchange = Exchange::<B, T>::of(&mut world, &inputs, call(algorithm, grid), &places);
                        for row in exchange.run(&mut world, 0).chunks(ROW) {
                            let first = bits.get_or_insert_with(|| row.to_vec());
                            compare::assert_bits(&format!("{algorithm}, batch {batch}"), row, first);
                        }
                    }
                }
            }
        });
    }
}
