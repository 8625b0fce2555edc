//! Graphs: captured calls advance the protocol on the device alone (P5; B12, B13).

use half::f16;
use signal_core::reference::Rng;
use signal_core::{Algorithm, Backend, Communicator, DeviceBuffer, ReduceOp, Result};

use crate::cases::overwrite::Dropped;
use crate::compare;
use crate::exchange::{random_inputs, sum, works};
use crate::place::below;
use crate::rig::{Rig, scaled};
use crate::world::{World, options};

const COUNT: usize = 203;

/// One rank's buffers of a short network: `a` is reduced into `b`, `b` into `c` and `d`, `half` in place.
struct Net<B: Backend> {
    a: DeviceBuffer<B, f32>,
    b: DeviceBuffer<B, f32>,
    c: DeviceBuffer<B, f32>,
    d: DeviceBuffer<B, f32>,
    half: DeviceBuffer<B, f16>,
}

impl<B: Backend> Net<B> {
    fn calls(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        let with = |a, blocks| options(|o| (o.algorithm, o.blocks, o.threads) = (Some(a), Some(blocks), Some(2)));
        comm.with(with(Algorithm::OneStage, 2)).all_reduce(stream, &self.a, &mut self.b, ReduceOp::Sum)?;
        comm.with(with(Algorithm::TwoStage, 3)).all_reduce_in_place(stream, &mut self.half, ReduceOp::Sum)?;
        comm.barrier(stream)?;
        comm.with(with(Algorithm::Lamport, 2)).all_reduce(stream, &self.b, &mut self.d, ReduceOp::Sum)?;
        comm.with(with(Algorithm::TwoStage, 1)).all_reduce(stream, &self.b, &mut self.c, ReduceOp::Sum)
    }
}

/// Copies of `c`, `d` and `half`.
type Copies<B> = ([DeviceBuffer<B, f32>; 2], DeviceBuffer<B, f16>);

/// The networks of all ranks, and the results of every run that went through them.
struct Nets<B: Backend> {
    nets: Vec<Net<B>>,
    /// Runs begun.
    runs: u64,
    /// Of the runs that were not checked yet: the number, and the results by rank.
    results: Vec<(u64, Vec<Copies<B>>)>,
}

impl<B: Backend> Nets<B> {
    fn new(world: &mut World<B>) -> Self {
        let (a, b, c) = (world.alloc(COUNT), world.alloc(COUNT), world.local(COUNT));
        let (d, half) = (world.local(COUNT), world.alloc(COUNT));
        let nets = a.into_iter().zip(b).zip(c).zip(d).zip(half);
        let nets = nets.map(|((((a, b), c), d), half)| Net { a, b, c, d, half });
        Nets { nets: nets.collect(), runs: 0, results: Vec::new() }
    }

    /// Enqueues new inputs, lets `run` enqueue the calls of each rank, and enqueues copies of the outputs.
    fn step(
        &mut self,
        world: &mut World<B>,
        mut run: impl FnMut(usize, &mut Net<B>, &mut Communicator<B>, &B::Stream) -> Result<()>,
    ) {
        let seed = self.runs;
        let inputs = random_inputs::<f32>(world.ranks(), seed, COUNT);
        let halves = random_inputs::<f16>(world.ranks(), seed, COUNT);
        let (c, d) = (world.local(COUNT), world.local(COUNT));
        let mut copies: Vec<Copies<B>> =
            c.into_iter().zip(d).zip(world.local(COUNT)).map(|((c, d), half)| ([c, d], half)).collect();
        world.each(|rank, comm, stream| {
            let net = &mut self.nets[rank];
            net.a.write(stream, &inputs[rank])?;
            net.half.write(stream, &halves[rank])?;
            net.c.fill_bytes(stream, 0xdead_beef)?;
            net.d.fill_bytes(stream, 0xdead_beef)?;
            run(rank, net, comm, stream)?;
            copies[rank].0[0].copy_from(stream, &net.c)?;
            copies[rank].0[1].copy_from(stream, &net.d)?;
            copies[rank].1.copy_from(stream, &net.half)
        });
        self.results.push((self.runs, copies));
        self.runs += 1;
    }

    /// Waits and checks every run since the last check.
    fn check(&mut self, world: &World<B>) {
        world.wait();
        for (run, copies) in self.results.drain(..) {
            let once = sum(&random_inputs::<f32>(world.ranks(), run, COUNT));
            let twice = sum(&vec![once; world.ranks()]);
            let half = sum(&random_inputs::<f16>(world.ranks(), run, COUNT));
            for (rank, (sums, h)) in copies.iter().enumerate() {
                let what = format!("run {run}, rank {rank} of {}", world.ranks());
                let stream = &world.streams[rank];
                for sum in sums {
                    compare::assert_bits(&what, &sum.read(stream).unwrap(), &twice);
                }
                compare::assert_bits(&what, &h.read(stream).unwrap(), &half);
            }
        }
    }
}

/// Captures the network on every rank.
fn capture<B: Backend>(world: &mut World<B>, nets: &mut Nets<B>) -> Vec<B::Graph> {
    (0..world.ranks()).map(|rank| world.capture(rank, |comm, stream| nets.nets[rank].calls(comm, stream))).collect()
}

/// A thousand replays on two ranks, fewer on others, waited for every fifty, each with new inputs and all its outputs checked.
pub fn graph_replays_with_changing_inputs<B: Backend>(rig: &Rig<B>) {
    for (ranks, replays) in [(1, 100), (2, 1000), (3, 100), (8, 20)] {
        let mut world = rig.world(ranks);
        let mut nets = Nets::new(&mut world);
        let graphs = capture(&mut world, &mut nets);
        for replay in 0..scaled(replays) {
            nets.step(&mut world, |rank, _, _, stream| B::replay(&graphs[rank], stream));
            if replay % 50 == 49 {
                nets.check(&world);
            }
        }
        nets.check(&world);
    }
}

/// Replays and eager calls in any order; captured after eager calls, not before.
pub fn graph_mixes_with_eager_calls<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut rng = Rng::new(ranks as u64);
        let mut world = rig.world(ranks);
        let mut nets = Nets::new(&mut world);
        for _ in 0..3 {
            nets.step(&mut world, |_, net, comm, stream| net.calls(comm, stream));
        }
        let graphs = capture(&mut world, &mut nets);
        for _ in 0..scaled(40) {
            let eager = below(&mut rng, 2) == 0;
            nets.step(
                &mut world,
                |rank, net, comm, stream| {
                    if eager { net.calls(comm, stream) } else { B::replay(&graphs[rank], stream) }
                },
            );
        }
        nets.check(&world);
    }
}

/// One rank replays what the others call: kernels cannot tell the difference (B63).
pub fn graph_on_one_rank_only<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        for captured in 0..ranks {
            let mut world = rig.world(ranks);
            let mut nets = Nets::new(&mut world);
            let graph = world.capture(captured, |comm, stream| nets.nets[captured].calls(comm, stream));
            for _ in 0..scaled(20) {
                nets.step(&mut world, |rank, net, comm, stream| {
                    if rank == captured { B::replay(&graph, stream) } else { net.calls(comm, stream) }
                });
            }
            nets.check(&world);
        }
    }
}

/// A graph outlives the handles of its buffers on all ranks: memory allocated after them must be other memory (B62).
pub fn graph_keeps_its_buffers<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        for scattered in [false, true] {
            let mut world = rig.world(ranks);
            let mut dropped = Dropped::new(&mut world, scattered);
            let graphs: Vec<B::Graph> =
                (0..ranks).map(|rank| world.capture(rank, |comm, stream| dropped.call(comm, stream))).collect();
            let junk = dropped.reuse(&mut world);
            for _ in 0..3 {
                world.each(|rank, _, stream| {
                    dropped.targets[rank].fill_bytes(stream, 0)?;
                    B::replay(&graphs[rank], stream)
                });
                dropped.check(&world, &junk);
            }
            drop(graphs);
            works(&mut world);
        }
    }
}
