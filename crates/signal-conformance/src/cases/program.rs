//! Sequences of calls that have nothing in common: sizes, types, algorithms, memory, grids and who is late.

use std::time::Duration;

use half::{bf16, f16};
use signal_core::reference::Rng;
use signal_core::{Algorithm, Backend, CallOptions, Communicator, Dtype, Element, Phase, Result};

use crate::exchange::{Exchange, Step};
use crate::pieces::{Job, Pieces, Where};
use crate::place::{Mix, Place, below, pick};
use crate::rig::{Rig, scaled};
use crate::world::{World, options};

/// A barrier as a step.
pub(crate) struct Barrier;

impl<B: Backend> Step<B> for Barrier {
    fn launch(&mut self, comm: &mut Communicator<B>, stream: &B::Stream) -> Result<()> {
        comm.barrier(stream)
    }

    fn check(&self, _: &B::Stream) {}
}

/// A call of a program.
pub(crate) enum Drawn {
    Barrier,
    AllReduce(Drawing),
}

/// An all-reduce of a program.
pub(crate) struct Drawing {
    pub(crate) count: usize,
    pub(crate) dtype: Dtype,
    pub(crate) options: CallOptions,
    pub(crate) places: Vec<Place>,
    /// Of the inputs.
    pub(crate) seed: u64,
    /// On the host one rank now and then falls behind within the kernel, too.
    late: Option<(usize, Phase)>,
}

impl Drawing {
    /// The options of one rank's call.
    pub(crate) fn options_of(&self, rank: usize) -> CallOptions {
        let late = self.late.filter(|(late, _)| *late == rank);
        options(|o| (*o, o.delay) = (self.options, late.map(|(_, phase)| (phase, Duration::from_millis(2)))))
    }
}

/// The next call of a program of `ranks` ranks.
pub(crate) fn draw(rng: &mut Rng, ranks: usize) -> Drawn {
    use Algorithm::{Lamport, OneStage, TwoShot, TwoStage};
    if below(rng, 10) == 0 {
        return Drawn::Barrier;
    }
    let count = match below(rng, 20) {
        0 => below(rng, 60_000),
        1..5 => below(rng, 5_000),
        _ => below(rng, 200),
    };
    let options = options(|o| {
        o.algorithm = pick(rng, &[None, Some(OneStage), Some(TwoStage), Some(Lamport), Some(TwoShot)]);
        (o.blocks, o.threads) = pick(rng, &[(None, None), (Some(1), Some(1)), (Some(3), Some(2)), (Some(4), None)]);
    });
    let places = pick(rng, &Mix::ALL).places(ranks, rng);
    let seed = rng.next_u64();
    let late = (below(rng, 16) == 0).then(|| below(rng, ranks));
    let phase = pick(rng, &[Phase::Start, Phase::Middle, Phase::Exit, Phase::Exchange]);
    let dtype = pick(rng, &[Dtype::F32, Dtype::F16, Dtype::Bf16]);
    Drawn::AllReduce(Drawing { count, dtype, options, places, seed, late: late.map(|rank| (rank, phase)) })
}

/// A program for each rank; every call has buffers of its own.
fn program<B: Backend>(world: &mut World<B>, rng: &mut Rng, calls: u32) -> Vec<Vec<Box<dyn Step<B>>>> {
    let ranks = world.ranks();
    let mut program: Vec<Vec<Box<dyn Step<B>>>> = (0..ranks).map(|_| Vec::new()).collect();
    for _ in 0..calls {
        if below(rng, 3) == 0 {
            match below(rng, 3) {
                0 => add_exchange::<B, u8>(world, rng, &mut program),
                1 => add_exchange::<B, f32>(world, rng, &mut program),
                _ => add_exchange::<B, bf16>(world, rng, &mut program),
            }
            continue;
        }
        let drawing = match draw(rng, ranks) {
            Drawn::Barrier => {
                program.iter_mut().for_each(|steps| steps.push(Box::new(Barrier)));
                continue;
            }
            Drawn::AllReduce(drawing) => drawing,
        };
        match drawing.dtype {
            Dtype::F32 => add::<B, f32>(world, &drawing, &mut program),
            Dtype::F16 => add::<B, f16>(world, &drawing, &mut program),
            _ => add::<B, bf16>(world, &drawing, &mut program),
        }
    }
    program
}

/// Any collective.
fn add_exchange<B: Backend, T: Element>(world: &mut World<B>, rng: &mut Rng, program: &mut [Vec<Box<dyn Step<B>>>]) {
    let count = if below(rng, 8) == 0 { below(rng, 20_000) } else { below(rng, 300) };
    let job = Job::draw_any(rng, world.ranks(), count);
    let algorithms = job.algorithms(T::DTYPE, 0, 1);
    let options = options(|o| {
        o.algorithm = (below(rng, 4) > 0).then(|| pick(rng, &algorithms));
        (o.blocks, o.threads) = pick(rng, &[(None, None), (Some(1), Some(1)), (Some(3), Some(2))]);
    });
    let place = pick(rng, &Where::ALL);
    let mut pieces = Pieces::<B, T>::new(world, &job, rng, options, place);
    if below(rng, 16) == 0 {
        let phase = pick(rng, &[Phase::Start, Phase::Exit, Phase::Exchange]);
        let late = below(rng, world.ranks());
        pieces.lanes[late].options.delay = Some((phase, Duration::from_millis(2)));
    }
    for (steps, lane) in program.iter_mut().zip(pieces.lanes) {
        steps.push(Box::new(lane));
    }
}

fn add<B: Backend, T: Element>(world: &mut World<B>, drawing: &Drawing, program: &mut [Vec<Box<dyn Step<B>>>]) {
    let Drawing { count, seed, options, places, .. } = drawing;
    let mut exchange = Exchange::<B, T>::random(world, *count, *seed, *options, places);
    for (rank, lane) in exchange.lanes.iter_mut().enumerate() {
        lane.options = drawing.options_of(rank);
    }
    for (steps, step) in program.iter_mut().zip(exchange.into_steps()) {
        steps.push(step);
    }
}

/// Sleeps, mostly not at all.
fn dawdle(rng: &mut Rng) {
    if below(rng, 8) == 0 {
        std::thread::sleep(Duration::from_micros(rng.below(1500)));
    }
}

/// A thread for each rank runs its program without ever waiting, falling behind and catching up at random; at the end
/// every output of every call is checked (B11, B14). Once in checked mode.
pub fn random_programs<B: Backend>(rig: &Rig<B>) {
    for (ranks, calls) in [(2, 300), (3, 200), (8, 60)] {
        let mut rng = Rng::new(ranks as u64);
        let mut world = rig.world_with(ranks, |s| (s.scratch_bytes, s.check) = (128 << 10, ranks == 3));
        let program = program(&mut world, &mut rng, scaled(calls));
        world.threads(program, |rank, mut steps, comm, stream| {
            let mut rng = Rng::new(1000 + rank as u64);
            for step in &mut steps {
                dawdle(&mut rng);
                step.launch(comm, stream).unwrap();
            }
            comm.wait(stream).unwrap_or_else(|e| panic!("rank {rank}: {e}"));
            steps.iter().for_each(|step| step.check(stream));
        });
    }
}

/// The same from one thread: it enqueues runs of calls for one rank after the other. Once with every barrier ordered.
pub fn random_programs_from_one_thread<B: Backend>(rig: &Rig<B>) {
    for (ranks, calls) in [(1, 100), (2, 200), (5, 80)] {
        let mut rng = Rng::new(50 + ranks as u64);
        let mut world = rig.world_with(ranks, |s| (s.scratch_bytes, s.ordered_barriers) = (64 << 10, ranks == 5));
        from_one_thread(&mut world, &mut rng, scaled(calls));
    }
}

/// Runs a program of so many calls.
pub(crate) fn from_one_thread<B: Backend>(world: &mut World<B>, rng: &mut Rng, calls: u32) {
    let ranks = world.ranks();
    let mut program = program(world, rng, calls);
    let mut next = vec![0; ranks];
    while next.iter().zip(&program).any(|(at, steps)| *at < steps.len()) {
        let rank = below(rng, ranks);
        for _ in 0..1 + below(rng, 12) {
            if let Some(step) = program[rank].get_mut(next[rank]) {
                step.launch(&mut world.comms[rank], &world.streams[rank]).unwrap();
                next[rank] += 1;
            }
        }
        dawdle(rng);
    }
    check(world, &program);
}

/// Counters that start near the end of u32 on every rank, then a hundred calls (H02, H03).
pub fn counter_wrap<B: Backend>(rig: &Rig<B>) {
    for (ranks, before_wrap) in [(2, 0), (2, 3), (2, 100), (3, 1), (3, 40), (8, 20)] {
        let mut rng = Rng::new(before_wrap.into());
        let mut world = rig.world(ranks);
        for comm in &mut world.comms {
            comm.preset_counters(u32::MAX - before_wrap).unwrap();
            // Its last value is skipped.
            comm.preset_lamport_flag(u32::MAX - 1 - before_wrap / 4).unwrap();
            comm.preset_line_count(u32::MAX - 2 - before_wrap / 4).unwrap();
        }
        // Not scaled: fewer calls would not reach the wrap.
        let mut program = program(&mut world, &mut rng, 100);
        for (rank, steps) in program.iter_mut().enumerate() {
            for step in steps {
                step.launch(&mut world.comms[rank], &world.streams[rank]).unwrap();
            }
        }
        check(&world, &program);
    }
}

fn check<B: Backend>(world: &World<B>, program: &[Vec<Box<dyn Step<B>>>]) {
    world.wait();
    for (steps, stream) in program.iter().zip(&world.streams) {
        steps.iter().for_each(|step| step.check(stream));
    }
}
