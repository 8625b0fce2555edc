//! Streams, domains and lifetimes (P11, P14).

use std::time::{Duration, Instant};

use signal_core::reference::Rng;
use signal_core::{
    Algorithm, ApiMisuse, Backend, CallOptions, Communicator, DeviceBuffer, Error, Phase, ReduceOp, Result,
};

use crate::compare;
use crate::exchange::{Exchange, Step, random_inputs, sum, works};
use crate::place::{Place, below};
use crate::rig::{Rig, scaled};
use crate::world::{World, options};

const COUNT: usize = 300;

/// Calls on one domain alternate between streams; each takes the output of the one before as its input, with nothing
/// but the domain to order them.
pub fn streams_second_stream_is_ordered<B: Backend>(rig: &Rig<B>) {
    for ranks in [1, 2, 3] {
        in_order(&mut rig.world(ranks), |comm, call, stream, buffers| {
            let by = options(|o| {
                (*o, o.algorithm) = (call.options, Some(Algorithm::ALL_REDUCE[call.number / 2 % 5]));
            });
            comm.with(by).all_reduce(stream, buffers.0, buffers.1, ReduceOp::Sum)
        });
    }
}

/// One of the calls of [`in_order`].
pub(crate) struct Ordered {
    pub(crate) number: usize,
    pub(crate) options: CallOptions,
}

/// Where it reads and where it writes.
pub(crate) type Buffers<'a, B> = (&'a DeviceBuffer<B, f32>, &'a mut DeviceBuffer<B, f32>);

/// All-reduces on alternating streams, as `make` makes them, each of what the one before has left. Rank 0 is once slow to leave.
pub(crate) fn in_order<B: Backend>(
    world: &mut World<B>,
    make: impl Fn(&mut Communicator<B>, Ordered, &B::Stream, Buffers<'_, B>) -> Result<()>,
) {
    let ranks = world.ranks();
    let more = world.more_streams();
    let inputs = random_inputs::<f32>(ranks, 1, COUNT);
    let (mut a, mut b) = (world.alloc::<f32>(COUNT), world.local::<f32>(COUNT));
    world.each(|rank, _, stream| a[rank].write(stream, &inputs[rank]));
    world.wait();
    for number in 0..12 {
        world.each(|rank, comm, stream| {
            let stream = if number % 3 == rank % 2 { &more[rank] } else { stream };
            let options = options(|o| {
                o.blocks = Some(2);
                o.delay = (number == 1 && rank == 0).then_some((Phase::Exit, Duration::from_millis(20)));
            });
            let buffers = if number % 2 == 0 { (&a[rank], &mut b[rank]) } else { (&b[rank], &mut a[rank]) };
            make(comm, Ordered { number, options }, stream, buffers)
        });
    }
    world.wait();
    let expected = (1..12).fold(sum(&inputs), |previous, _| sum(&vec![previous; ranks]));
    for (rank, stream) in more.iter().enumerate() {
        world.comms[rank].wait(stream).unwrap();
        compare::assert_bits(&format!("rank {rank} of {ranks}"), &a[rank].read(stream).unwrap(), &expected);
    }
}

/// A call on one domain goes through while a call on another still waits for its peer (B09, B10).
pub fn streams_domains_run_at_once<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world_with(2, |s| s.domains = true);
    let more = world.more_streams();
    for algorithm in [Algorithm::OneStage, Algorithm::TwoStage] {
        let on = |domain| options(|o| (o.domain, o.algorithm, o.blocks) = (domain, Some(algorithm), Some(2)));
        let places = [Place::symmetric(), Place::local()];
        let mut first = Exchange::<B, f32>::random(&mut world, COUNT, 1, on(0), &places);
        let mut second = Exchange::<B, f32>::random(&mut world, COUNT, 2, on(5), &places);
        B::synchronize(&world.streams[0]).unwrap();
        B::synchronize(&world.streams[1]).unwrap();

        first.lanes[0].launch(&mut world.comms[0], &world.streams[0]).unwrap();
        for rank in 0..2 {
            second.lanes[rank].launch(&mut world.comms[rank], &more[rank]).unwrap();
        }
        for rank in 0..2 {
            world.comms[rank].wait(&more[rank]).unwrap();
            second.lanes[rank].check(&more[rank]);
        }
        assert!(!B::is_idle(&world.streams[0]).unwrap(), "domain 0 went through without rank 1");
        first.lanes[1].launch(&mut world.comms[1], &world.streams[1]).unwrap();
        first.finish(&world);
    }
}

/// Two communicators on the same devices, enqueued in opposite orders by the ranks (B68).
pub fn streams_two_communicators_at_once<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut worlds = [rig.world(ranks), rig.world(ranks)];
        for round in 0..10 {
            let mut calls = [0, 1].map(|w: usize| {
                let call =
                    options(|o| (o.algorithm, o.blocks) = (Some(Algorithm::ALL_REDUCE[(round + w) % 5]), Some(2)));
                let places = vec![Place::symmetric(); ranks];
                Exchange::<B, f32>::random(&mut worlds[w], COUNT, (10 * round + w) as u64, call, &places)
            });
            for rank in 0..ranks {
                for w in if rank % 2 == 0 { [0, 1] } else { [1, 0] } {
                    let world = &mut worlds[w];
                    calls[w].lanes[rank].launch(&mut world.comms[rank], &world.streams[rank]).unwrap();
                }
            }
            calls.iter().zip(&worlds).for_each(|(call, world)| drop(call.finish(world)));
        }
    }
}

/// Inputs and communicators go right behind the call; the outputs are right all the same.
pub fn streams_drop_behind_the_call<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3, 5] {
        for algorithm in Algorithm::ALL_REDUCE {
            let mut world = rig.world(ranks);
            let inputs = random_inputs::<f32>(ranks, 7, COUNT);
            let mut sources = world.alloc::<f32>(COUNT);
            // Not symmetric: such a buffer would keep the whole group.
            let mut targets = world.local::<f32>(COUNT);
            world.each(|rank, comm, stream| {
                sources[rank].write(stream, &inputs[rank])?;
                let call = options(|o| {
                    (o.algorithm, o.blocks) = (Some(algorithm), Some(2));
                    o.delay = (rank == 1).then_some((Phase::Start, Duration::from_millis(20)));
                });
                comm.with(call).all_reduce(stream, &sources[rank], &mut targets[rank], ReduceOp::Sum)
            });
            drop(sources);
            let streams = world.streams.clone();
            drop(world);
            let expected = sum(&inputs);
            for (target, stream) in targets.iter().zip(&streams) {
                compare::assert_bits("behind a dropped communicator", &target.read(stream).unwrap(), &expected);
            }
        }
    }
}

/// A rank is dropped while its call still waits for a peer that has not come yet: the drop does not wait, and the peer
/// finds all that it needs.
pub fn streams_drop_one_rank_early<B: Backend>(rig: &Rig<B>) {
    for algorithm in Algorithm::ALL_REDUCE {
        let mut world = rig.world(2);
        let call = options(|o| (o.algorithm, o.blocks) = (Some(algorithm), Some(2)));
        let mut exchange = Exchange::<B, f32>::random(&mut world, COUNT, 3, call, &[Place::symmetric(); 2]);
        exchange.lanes[0].launch(&mut world.comms[0], &world.streams[0]).unwrap();
        drop(world.comms.remove(0));
        exchange.lanes[1].launch(&mut world.comms[0], &world.streams[1]).unwrap();
        for rank in 0..2 {
            exchange.lanes[rank].check(&world.streams[rank]);
        }
    }
}

/// One thread drops the communicators of all ranks, used or not, in any order; streams and buffers may go before them
/// or after them.
pub fn streams_drop_idle_communicators<B: Backend>(rig: &Rig<B>) {
    for ranks in [1, 2, 8] {
        drop(rig.world(ranks));
        let mut world = rig.world(ranks);
        let buffers = world.alloc::<f32>(COUNT);
        works(&mut world);
        let mut comms: Vec<Communicator<B>> = std::mem::take(&mut world.comms);
        drop(world);
        comms.rotate_left(ranks / 2);
        drop(comms);
        drop(buffers);
    }
    works(&mut rig.world(2));
}

/// A thread for each rank, which allocates, calls and frees again and again: freeing must not wait for a peer's kernel that
/// waits for this rank.
pub fn streams_buffers_come_and_go<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut world = rig.world(ranks);
        let inputs = random_inputs::<f32>(ranks, 7, COUNT);
        let expected = sum(&inputs);
        world.threads(vec![(); ranks], |rank, (), comm, stream| {
            let mut rng = Rng::new(rank as u64);
            for round in 0..scaled(300) {
                let buffer = |len| DeviceBuffer::<B, f32>::new(comm.device(), len).unwrap();
                // Of another size each time, so that it is not taken from what the last round left.
                let _other = buffer(1024 * (1 + below(&mut rng, 50)));
                let (mut source, mut target) = (buffer(COUNT), buffer(COUNT));
                source.write(stream, &inputs[rank]).unwrap();
                // The copy ends and the device is idle, a moment before this rank's kernel comes.
                let (pause, began) = (Duration::from_micros(below(&mut rng, 200) as u64), Instant::now());
                while began.elapsed() < pause {
                    std::thread::yield_now();
                }
                comm.all_reduce(stream, &source, &mut target, ReduceOp::Sum).unwrap();
                let found = target.read(stream).unwrap();
                comm.status().unwrap();
                compare::assert_bits(&format!("rank {rank} of {ranks}, round {round}"), &found, &expected);
            }
        });
    }
}

/// One thread enqueues for one rank only: it is told before the stream takes no more, nothing is launched, and once the
/// peers have their calls everything goes on.
pub fn streams_one_thread_cannot_run_ahead<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut world = rig.world(ranks);
        let mut made = 0;
        let limit = loop {
            match world.comms[0].barrier(&world.streams[0]) {
                Ok(()) => made += 1,
                Err(Error::ApiMisuse(ApiMisuse::RunAhead { rank: 0, slowest: 1, limit, same_thread: true })) => {
                    break limit;
                }
                Err(other) => panic!("{other}"),
            }
        };
        assert_eq!(made, limit);
        // A graph may hold any number of calls, whatever the peers have captured.
        let captured = world.capture(0, |comm, stream| (0..10).try_for_each(|_| comm.barrier(stream)));
        for rank in 1..ranks {
            (0..limit).for_each(|_| world.comms[rank].barrier(&world.streams[rank]).unwrap());
        }
        world.wait();
        drop(captured);
        works(&mut world);
    }
}

/// A thread for each rank, of which one comes late: the others wait for it, whatever number of calls they make.
pub fn streams_fast_threads_wait<B: Backend>(rig: &Rig<B>) {
    const CALLS: usize = 3000;
    for ranks in [2, 3] {
        let mut world = rig.world(ranks);
        let inputs = random_inputs::<f32>(ranks, 9, COUNT);
        let expected = sum(&inputs);
        world.threads(vec![(); ranks], |rank, (), comm, stream| {
            let mut source = DeviceBuffer::<B, f32>::new(comm.device(), COUNT).unwrap();
            let mut target = DeviceBuffer::<B, f32>::new(comm.device(), COUNT).unwrap();
            source.write(stream, &inputs[rank]).unwrap();
            if rank == ranks - 1 {
                std::thread::sleep(Duration::from_millis(300));
            }
            let call = options(|o| (o.algorithm, o.blocks, o.threads) = (Some(Algorithm::Lamport), Some(1), Some(1)));
            for _ in 0..scaled(CALLS as u32) {
                comm.with(call).all_reduce(stream, &source, &mut target, ReduceOp::Sum).unwrap();
            }
            compare::assert_bits("behind many calls", &target.read(stream).unwrap(), &expected);
            comm.status().unwrap();
        });
    }
}
