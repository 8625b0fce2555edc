//! Checked mode: ranks that make different calls are told so, all of them, before data moves.

use half::bf16;
use signal_core::reference::Rng;
use signal_core::{Algorithm, Backend, CallOptions, Communicator, Dtype, Element, Error, ReduceOp, Result};

use crate::cases::recover::many_calls;
use crate::compare::assert_bits;
use crate::exchange::{Exchange, random_inputs, sum};
use crate::place::{Mix, below, pick};
use crate::rig::{Rig, scaled};
use crate::world::{World, options};

/// One rank's call.
#[derive(Clone, Copy, Debug)]
enum Made {
    Barrier(u32),
    AllReduce { count: usize, dtype: Dtype, algorithm: Algorithm, grid: (u32, u32) },
}

const USUAL: Made = all_reduce(1000, Dtype::F32, Algorithm::OneStage, (2, 32));

const fn all_reduce(count: usize, dtype: Dtype, algorithm: Algorithm, grid: (u32, u32)) -> Made {
    Made::AllReduce { count, dtype, algorithm, grid }
}

impl Made {
    /// How the library speaks of it.
    fn text(self) -> String {
        match self {
            Made::Barrier(blocks) => format!("a barrier on {blocks} x 32 threads"),
            Made::AllReduce { count: 0, .. } => "an all-reduce of nothing".to_owned(),
            Made::AllReduce { count, dtype, algorithm, grid: (blocks, threads) } => {
                format!("an all-reduce of {count} {dtype} (sum, {algorithm}) on {blocks} x {threads} threads")
            }
        }
    }

    fn make<B: Backend>(self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        match self {
            Made::Barrier(blocks) => comm.with(grid(blocks, 32)).barrier(stream),
            Made::AllReduce { dtype: Dtype::Bf16, .. } => self.all_reduce::<B, bf16>(comm, stream),
            Made::AllReduce { .. } => self.all_reduce::<B, f32>(comm, stream),
        }
    }

    fn all_reduce<B: Backend, T: Element>(self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        let Made::AllReduce { count, algorithm, grid: (blocks, threads), .. } = self else { return Ok(()) };
        let mut buffer = signal_core::DeviceBuffer::<B, T>::new(comm.device(), count)?;
        let mut call = grid(blocks, threads);
        call.algorithm = Some(algorithm);
        comm.with(call).all_reduce_in_place(stream, &mut buffer, ReduceOp::Sum)
    }
}

fn grid(blocks: u32, threads: u32) -> CallOptions {
    options(|o| (o.blocks, o.threads) = (Some(blocks), Some(threads)))
}

fn checked<B: Backend>(rig: &Rig<B>, ranks: usize) -> World<B> {
    rig.world_with(ranks, |s| s.check = true)
}

/// One rank calls something else: every rank names itself, the first rank that differs, and both calls. Then all recover.
pub fn check_names_both_calls<B: Backend>(rig: &Rig<B>) {
    let others = [
        all_reduce(1001, Dtype::F32, Algorithm::OneStage, (2, 32)),
        all_reduce(1000, Dtype::Bf16, Algorithm::OneStage, (2, 32)),
        all_reduce(1000, Dtype::F32, Algorithm::Lamport, (2, 32)),
        all_reduce(1000, Dtype::F32, Algorithm::OneStage, (3, 32)),
        all_reduce(1000, Dtype::F32, Algorithm::OneStage, (2, 64)),
        all_reduce(0, Dtype::F32, Algorithm::OneStage, (2, 32)),
        Made::Barrier(1),
    ];
    for ranks in [2, 3] {
        let mut world = checked(rig, ranks);
        for (round, other) in others.into_iter().enumerate() {
            let odd = round % ranks;
            world.each(
                |rank, comm, stream| if rank == odd { other.make(comm, stream) } else { USUAL.make(comm, stream) },
            );
            for rank in 0..ranks {
                let found = world.comms[rank].wait(&world.streams[rank]);
                let (ours, theirs) = if rank == odd { (other, USUAL) } else { (USUAL, other) };
                let first = if rank != odd { odd } else { usize::from(odd == 0) };
                let expected = Error::RankMismatch { rank, ours: ours.text(), other: first, theirs: theirs.text() };
                assert_eq!(found, Err(expected), "{ranks} ranks, rank {odd} makes {other:?}");
            }
            Communicator::recover_all(&mut world.comms).unwrap();
            many_calls(&mut world, scaled(4), round as u64);
        }
    }
}

/// Equal calls go through with the right results, from threads that run ahead of each other, and from a graph.
pub fn check_lets_equal_calls_through<B: Backend>(rig: &Rig<B>) {
    const COUNT: usize = 500;
    for ranks in [1, 2, 3, 8] {
        let mut world = checked(rig, ranks);
        let mut rng = Rng::new(ranks as u64);
        for _ in 0..scaled(10) {
            let call = options(|o| o.algorithm = Some(pick(&mut rng, &Algorithm::ALL_REDUCE)));
            let places = pick(&mut rng, &Mix::ALL).places(ranks, &mut rng);
            let count = below(&mut rng, 3000);
            Exchange::<B, bf16>::random(&mut world, count, rng.next_u64(), call, &places)
                .run(&mut world, below(&mut rng, ranks));
        }
        let inputs = random_inputs::<f32>(ranks, 3, COUNT);
        let (mut sources, mut targets) = (world.alloc::<f32>(COUNT), world.local::<f32>(COUNT));
        world.each(|rank, _, stream| sources[rank].write(stream, &inputs[rank]));
        let graphs: Vec<B::Graph> = (0..ranks)
            .map(|rank| {
                world.capture(rank, |comm, stream| {
                    comm.barrier(stream)?;
                    comm.all_reduce(stream, &sources[rank], &mut targets[rank], ReduceOp::Sum)
                })
            })
            .collect();
        for _ in 0..3 {
            world.each(|rank, _, stream| B::replay(&graphs[rank], stream));
        }
        world.wait();
        for (target, stream) in targets.iter().zip(&world.streams) {
            assert_bits(&format!("{ranks} ranks, checked, in a graph"), &target.read(stream).unwrap(), &sum(&inputs));
        }
    }
}
