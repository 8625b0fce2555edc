//! After a fault: all ranks recover in place, and everything works as before (P13).

use std::time::Duration;

use half::bf16;
use signal_core::error::Rendezvous;
use signal_core::reference::Rng;
use signal_core::{Algorithm, ApiMisuse, Backend, Communicator, Error, Phase, ReduceOp};

use crate::cases::fault::Operation;
use crate::cases::misuse::refused;
use crate::compare;
use crate::exchange::{Exchange, random_inputs, sum, works};
use crate::place::{Mix, below, pick};
use crate::rig::{Rig, is_scaled_down, scaled};
use crate::world::{World, options};

const COUNT: usize = 1000;

/// Short, so that the case is; the suite's patience is for what must not happen.
fn deadline() -> Duration {
    Duration::from_millis(if is_scaled_down() { 1500 } else { 300 })
}

fn short_lived<B: Backend>(rig: &Rig<B>, ranks: usize) -> World<B> {
    rig.world_with(ranks, |s| s.timeout = deadline())
}

/// Enqueues `operation` on every rank but `absent`, and waits until all of them have given up.
fn fail<B: Backend>(world: &mut World<B>, operation: Operation, absent: usize) {
    let mut buffers = world.local::<f32>(COUNT);
    for rank in (0..world.ranks()).filter(|rank| *rank != absent) {
        let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
        operation.launch(comm, stream, &mut buffers[rank], |_| ()).unwrap();
    }
    for rank in (0..world.ranks()).filter(|rank| *rank != absent) {
        let found = world.comms[rank].wait(&world.streams[rank]);
        assert!(matches!(&found, Err(Error::Timeout(t)) if t.missing == [absent]), "{operation:?}: {found:?}");
    }
}

/// Calls of every kind, each checked.
pub(crate) fn many_calls<B: Backend>(world: &mut World<B>, calls: u32, seed: u64) {
    let mut rng = Rng::new(seed);
    let ranks = world.ranks();
    for _ in 0..calls {
        let algorithm = pick(&mut rng, &Algorithm::ALL_REDUCE);
        let call = options(|o| (o.algorithm, o.blocks, o.threads) = (Some(algorithm), Some(2), Some(2)));
        let places = pick(&mut rng, &Mix::ALL).places(ranks, &mut rng);
        let count = 1 + below(&mut rng, 2000);
        Exchange::<B, bf16>::random(world, count, rng.next_u64(), call, &places).run(world, below(&mut rng, ranks));
    }
}

/// Each kind of call fails for want of a rank, then all recover; again and again on one group. A graph captured before the
/// first fault gives the right result after the last one.
pub fn recover_after_a_missing_rank<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3, 8] {
        let mut world = short_lived(rig, ranks);
        let inputs = random_inputs::<f32>(ranks, 5, COUNT);
        let (mut sources, mut targets) = (world.alloc::<f32>(COUNT), world.local::<f32>(COUNT));
        world.each(|rank, _, stream| sources[rank].write(stream, &inputs[rank]));
        let graphs: Vec<B::Graph> = (0..ranks)
            .map(|rank| {
                world.capture(rank, |comm, stream| {
                    for algorithm in Algorithm::ALL_REDUCE {
                        let call = options(|o| o.algorithm = Some(algorithm));
                        comm.with(call).all_reduce(stream, &sources[rank], &mut targets[rank], ReduceOp::Sum)?;
                    }
                    Ok(())
                })
            })
            .collect();
        // From the second on, and eight ranks for the sake of their number alone.
        let operations = Operation::ALL.into_iter().cycle().skip(1).take(if ranks == 8 { 1 } else { 4 });
        for (round, operation) in operations.enumerate() {
            let absent = round % ranks;
            fail(&mut world, operation, absent);
            Communicator::recover_all(&mut world.comms).unwrap();
            many_calls(&mut world, scaled(20), round as u64);
            world.each(|rank, _, stream| {
                targets[rank].fill_bytes(stream, 0)?;
                B::replay(&graphs[rank], stream)
            });
            world.wait();
            for (target, stream) in targets.iter().zip(&world.streams) {
                let what = format!("{ranks} ranks, after a fault of {operation:?}");
                compare::assert_bits(&what, &target.read(stream).unwrap(), &sum(&inputs));
            }
        }
    }
}

/// The missing rank makes its call after all, and finds the abort; then all recover.
pub fn recover_with_a_late_rank<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        for algorithm in Algorithm::ALL_REDUCE {
            let mut world = short_lived(rig, ranks);
            let operation = Operation::AllReduce(algorithm);
            fail(&mut world, operation, ranks - 1);
            let mut buffer = world.local::<f32>(COUNT);
            let (comm, stream) = (&mut world.comms[ranks - 1], &world.streams[ranks - 1]);
            operation.launch(comm, stream, &mut buffer[ranks - 1], |_| ()).unwrap();
            // Not waited for: recovery does.
            Communicator::recover_all(&mut world.comms).unwrap();
            many_calls(&mut world, scaled(10), 1);
        }
    }
}

/// A thread for each rank. At first one does not come, and the others say who; then all recover, twice in a row.
pub fn recover_with_a_thread_a_rank<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3] {
        let mut world = short_lived(rig, ranks);
        let absent = ranks - 1;
        fail(&mut world, Operation::AllReduce(Algorithm::OneStage), absent);
        world.threads(vec![(); ranks], |rank, (), comm, _| {
            if rank != absent {
                let found = comm.recover();
                assert!(
                    matches!(&found, Err(Error::Rendezvous(Rendezvous::Absent { rank: r, missing, .. }))
                        if *r == rank && missing.contains(&absent)),
                    "{found:?}"
                );
                assert!(comm.status().is_err(), "rank {rank} forgot the fault");
            }
        });
        for round in 0..2 {
            world.threads(vec![(); ranks], |_, (), comm, _| comm.recover().unwrap());
            many_calls(&mut world, scaled(10), round);
        }
    }
}

/// A rank stops for longer than the deadline at each point of each algorithm, on the host, whose kernels alone can be made to.
/// The others name it, in this call or, where it had done its part, in the next; then all recover, and many calls are right.
pub fn recover_after_a_stop_at_every_point<B: Backend>(rig: &Rig<B>) {
    if !rig.is_host() {
        eprintln!("not run: only the host image can hold a rank up inside a kernel");
        return;
    }
    let points = [
        (Algorithm::OneStage, Phase::Start), // its input is published, the peers' are not read
        (Algorithm::OneStage, Phase::Exit),  // behind the last barrier
        (Algorithm::TwoStage, Phase::Start),
        (Algorithm::TwoStage, Phase::Middle), // between the stages
        (Algorithm::TwoStage, Phase::Exit),
        (Algorithm::TwoStagePush, Phase::Middle),
        (Algorithm::Lamport, Phase::Start),    // before the push
        (Algorithm::Lamport, Phase::Exchange), // before the advance
        (Algorithm::TwoShot, Phase::Start),
        (Algorithm::TwoShot, Phase::Exchange),
    ];
    for (index, (algorithm, at)) in points.into_iter().enumerate() {
        let ranks = [2, 3][index % 2];
        let mut world = short_lived(rig, ranks);
        let stopped = index % ranks;
        let mut buffers = world.alloc::<f32>(COUNT);
        let operation = Operation::AllReduce(algorithm);
        for delay in [Some((at, 3 * deadline())), None] {
            world.each(|rank, comm, stream| {
                let delay = delay.filter(|_| rank == stopped);
                operation.launch(comm, stream, &mut buffers[rank], |o| o.delay = delay)
            });
        }
        for rank in (0..ranks).filter(|rank| *rank != stopped) {
            let found = world.comms[rank].wait(&world.streams[rank]);
            assert!(
                matches!(&found, Err(Error::Timeout(t)) if t.missing == [stopped]),
                "{algorithm}, rank {stopped} of {ranks} stops at {at:?}: {found:?}"
            );
        }
        Communicator::recover_all(&mut world.comms).unwrap();
        many_calls(&mut world, scaled(20), index as u64);
    }
}

/// After an abort, after nothing at all, and with the ranks in another order.
pub fn recover_after_an_abort<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(3);
    Communicator::recover_all(&mut world.comms).unwrap();
    works(&mut world);
    world.comms[0].barrier(&world.streams[0]).unwrap();
    world.comms[0].abort_handle().abort().unwrap();
    let found = world.comms[0].wait(&world.streams[0]);
    assert_eq!(found, Err(Error::Aborted { rank: 0, by: 0 }));
    world.comms.rotate_left(1);
    Communicator::recover_all(&mut world.comms).unwrap();
    world.comms.rotate_right(1);
    works(&mut world);
}

/// Some ranks, ranks of two groups, or none.
pub fn misuse_recover<B: Backend>(rig: &Rig<B>) {
    let (mut world, mut other) = (rig.world(2), rig.world(2));
    let missing = |given, found, world| ApiMisuse::NotAllRanks { given, found, world };
    refused(Communicator::<B>::recover_all(&mut []), missing(0, 0, 0));
    refused(Communicator::recover_all(&mut world.comms[..1]), missing(1, 1, 2));
    std::mem::swap(&mut world.comms[1], &mut other.comms[1]);
    refused(Communicator::recover_all(&mut world.comms), missing(2, 1, 2));
    std::mem::swap(&mut world.comms[1], &mut other.comms[1]);
    Communicator::recover_all(&mut world.comms).unwrap();
    works(&mut world);
    works(&mut other);
}
