//! The collectives besides all-reduce: what each rank holds afterwards, at every kind of size and place.

use std::time::Duration;

use half::bf16;
use signal_core::layout::most_line_bytes;
use signal_core::reference::Rng;
use signal_core::{Algorithm, Backend, Collective, Element, Phase};

use crate::pieces::{Job, Pieces, Where};
use crate::place::{below, pick};
use crate::rig::{Rig, WORLDS, is_scaled_down, scaled};
use crate::world::{World, options};

/// The largest piece that goes by lines, where domains are closed.
const MOST_LINE_BYTES: usize = most_line_bytes(1);

/// All but the all-reduce.
const ALL: [Collective; 8] = {
    use Collective::{AllGather, AllToAll, Broadcast, Gather, Reduce, ReduceScatter, Scatter, SendRecv};
    [ReduceScatter, AllGather, Broadcast, Scatter, Gather, Reduce, AllToAll, SendRecv]
};

fn run<B: Backend, T: Element>(world: &mut World<B>, rng: &mut Rng, collective: Collective, count: usize) {
    let job = Job::draw(rng, collective, world.ranks(), count);
    let fits = job.lines().is_some_and(|largest| largest * T::DTYPE.bytes() <= MOST_LINE_BYTES);
    let options = options(|o| {
        o.algorithm = pick(rng, &[None, Some(Algorithm::Pull), Some(Algorithm::Push), Some(Algorithm::Lines)])
            .filter(|a| fits || *a != Algorithm::Lines);
        (o.blocks, o.threads) = pick(rng, &[(None, None), (Some(1), Some(1)), (Some(3), Some(2)), (Some(2), Some(3))]);
    });
    let place = pick(rng, &Where::ALL);
    let first = below(rng, world.ranks());
    Pieces::<B, T>::new(world, &job, rng, options, place).run(world, first);
}

/// Around packs, and multiples of packs for each rank.
pub fn exchanges_match_small_sizes<B: Backend>(rig: &Rig<B>) {
    for ranks in WORLDS {
        let mut world = rig.world(ranks);
        let mut rng = Rng::new(ranks as u64);
        for _ in 0..scaled(2) {
            for collective in ALL {
                for_dtypes!(T => {
                    let pack = 16 / T::DTYPE.bytes();
                    for count in [0, 1, 2, 3, pack - 1, pack, pack + 1, pack * ranks + below(&mut rng, 3) - 1, 777] {
                        run::<B, T>(&mut world, &mut rng, collective, count);
                    }
                }; u8 bf16 f32 i64);
            }
        }
    }
}

/// More than the scratch holds, and around what it holds of one piece.
pub fn exchanges_match_windows<B: Backend>(rig: &Rig<B>) {
    const SCRATCH: usize = 64 << 10;
    for ranks in if is_scaled_down() { vec![2, 3] } else { vec![1, 2, 3, 8] } {
        let mut world = rig.world_with(ranks, |s| s.scratch_bytes = SCRATCH);
        let mut rng = Rng::new(9 + ranks as u64);
        for collective in ALL {
            for window in [SCRATCH, SCRATCH / ranks / 128 * 128] {
                for count in [window / 4 - 4, window / 4, window / 4 + 1, 2 * window / 4 + 5] {
                    run::<B, f32>(&mut world, &mut rng, collective, count);
                }
                let count = window + below(&mut rng, 40);
                run::<B, u8>(&mut world, &mut rng, collective, count);
            }
        }
    }
}

/// Sizes around those at which the grid ends.
pub fn exchanges_match_around_grid_limits<B: Backend>(rig: &Rig<B>) {
    let mut rng = Rng::new(77);
    for ranks in [2, 3, 4] {
        let mut world = rig.world(ranks);
        for collective in ALL {
            let (blocks, threads) = pick(&mut rng, &[(1, 1), (2, 2), (4, 1), (3, 3)]);
            let options = options(|o| (o.blocks, o.threads) = (Some(blocks), Some(threads)));
            let packs = (blocks * threads) as usize;
            for elements in [4 * packs - 1, 4 * packs, 4 * packs + 1, 32 * packs, 36 * packs + 3] {
                let job = Job::draw(&mut rng, collective, ranks, elements);
                let place = pick(&mut rng, &Where::ALL);
                Pieces::<B, f32>::new(&mut world, &job, &mut rng, options, place).run(&mut world, 0);
            }
        }
    }
}

/// One call of each rank with data for some ranks and none for others.
pub fn exchanges_between_some_ranks<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(5);
    let mut rng = Rng::new(5);
    let jobs = [
        // Both first.
        Job::Transfers(vec![(0, 1, 1000), (1, 0, 1000)]),
        Job::Transfers(vec![(0, 1, 60_000), (1, 0, 3)]),
        // A ring, and a rank that sends to itself.
        Job::Transfers((0..5).map(|rank| (rank, (rank + 1) % 5, 100 * rank + 1)).collect()),
        Job::Transfers(vec![(2, 2, 500), (3, 2, 7)]),
        Job::Transfers(vec![(4, 4, 33)]),
        Job::Transfers(vec![(0, 3, 0), (1, 2, 5)]),
        Job::Transfers(vec![]),
        Job::AllGather(vec![0, 0, 9, 0, 0]),
        Job::ReduceScatter(vec![0, 1000, 0, 0, 3], signal_core::ReduceOp::Sum),
        Job::AllToAllRagged((0..25).map(|pair| if pair == 13 { 4000 } else { 0 }).collect()),
        Job::AllToAllRagged(vec![0; 25]),
    ];
    for round in 0..scaled(3) as usize {
        for job in &jobs {
            let place = Where::ALL[round % 3];
            Pieces::<B, bf16>::new(&mut world, job, &mut rng, options(|_| ()), place).run(&mut world, round % 5);
        }
    }
}

/// An input is overwritten right behind the call, while another rank is slow (P3).
pub fn exchanges_inputs_are_overwritten<B: Backend>(rig: &Rig<B>) {
    let mut rng = Rng::new(3);
    for ranks in [2, 3] {
        let mut world = rig.world(ranks);
        for _ in 0..scaled(3) {
            for (fast, collective) in (0..ranks).flat_map(|rank| ALL.map(|collective| (rank, collective))) {
                let job = Job::draw(&mut rng, collective, ranks, 500);
                let grid = options(|o| (o.blocks, o.threads) = (Some(2), Some(1)));
                let place = pick(&mut rng, &[Where::Symmetric, Where::Local]);
                let mut pieces = Pieces::<B, f32>::new(&mut world, &job, &mut rng, grid, place);
                pieces.lanes[(fast + 1) % ranks].options.delay = Some((Phase::Start, Duration::from_millis(10)));
                pieces.launch(&mut world, fast);
                pieces.lanes[fast].overwrite_inputs(&world.streams[fast], 0x7777_7777);
                pieces.finish(&world);
            }
        }
    }
}
