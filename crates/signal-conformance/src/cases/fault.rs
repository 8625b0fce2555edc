//! Bounded waits (P13): what is missing is named, nothing hangs (B29, B57, B61).

use std::time::{Duration, Instant};

use signal_core::{
    Algorithm, Backend, CallOptions, Communicator, DeviceBuffer, Error, Phase, ReduceOp, Result, Timeout,
};

use crate::compare;
use crate::exchange::{Exchange, random_inputs, sum, works};
use crate::place::Place;
use crate::rig::Rig;
use crate::world::{World, options};

/// Long enough for the ranks that are not missing to get there on a machine with far more to do than cores.
const DEADLINE: Duration = Duration::from_millis(600);

/// A machine that is busy may be this late in noticing; still far from what several deadlines would take, or none.
const SLACK: Duration = Duration::from_secs(3);

/// What the ranks do while one is missing.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operation {
    Barrier,
    AllReduce(Algorithm),
}

impl Operation {
    pub(crate) const ALL: [Operation; 5] = [
        Operation::Barrier,
        Operation::AllReduce(Algorithm::OneStage),
        Operation::AllReduce(Algorithm::TwoStage),
        Operation::AllReduce(Algorithm::Lamport),
        Operation::AllReduce(Algorithm::TwoShot),
    ];

    fn name(self) -> &'static str {
        match self {
            Operation::Barrier => "barrier",
            Operation::AllReduce(Algorithm::OneStage) => "one-stage all-reduce",
            Operation::AllReduce(Algorithm::TwoStage) => "two-stage all-reduce",
            Operation::AllReduce(Algorithm::Lamport) => "lamport all-reduce",
            Operation::AllReduce(Algorithm::TwoShot) => "two-shot all-reduce",
            Operation::AllReduce(other) => panic!("no name for {other}"),
        }
    }

    /// Where its first wait is.
    fn phase(self) -> &'static str {
        if self.uses_region() { "exchange" } else { "start barrier" }
    }

    fn uses_region(self) -> bool {
        matches!(self, Operation::AllReduce(algorithm) if algorithm.uses_region())
    }

    /// Enqueues on one rank.
    pub(crate) fn launch<B: Backend>(
        self,
        comm: &mut Communicator<B>,
        stream: &B::Stream,
        buffer: &mut DeviceBuffer<B, f32>,
        adjust: impl FnOnce(&mut CallOptions),
    ) -> Result<()> {
        let mut options = options(|o| (o.blocks, o.threads) = (Some(2), Some(2)));
        adjust(&mut options);
        match self {
            Operation::Barrier => comm.with(options).barrier(stream),
            Operation::AllReduce(algorithm) => {
                options.algorithm = Some(algorithm);
                comm.with(options).all_reduce_in_place(stream, buffer, ReduceOp::Sum)
            }
        }
    }
}

fn short_lived<B: Backend>(rig: &Rig<B>, ranks: usize) -> World<B> {
    rig.world_with(ranks, |s| s.timeout = DEADLINE)
}

/// The timeout that a wait on this rank ends with.
fn timeout<B: Backend>(world: &World<B>, rank: usize) -> Timeout {
    match world.comms[rank].wait(&world.streams[rank]) {
        Err(Error::Timeout(timeout)) => timeout.as_ref().clone(),
        other => panic!("rank {rank} of {}: {other:?} is not a timeout", world.ranks()),
    }
}

/// One rank never comes. The others stop after one deadline and name it; then their communicators refuse all work.
pub fn timeout_names_missing_rank<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3, 5, 8].into_iter().filter(|ranks| *ranks < 8 || !rig.is_host()) {
        for (which, operation) in Operation::ALL.into_iter().enumerate() {
            let absent = (which + 1) % ranks;
            let mut world = rig.world_with(ranks, |s| (s.timeout, s.domains) = (DEADLINE, true));
            let domain = if ranks == 3 && !operation.uses_region() { 5 } else { 0 };
            let mut buffers = world.alloc::<f32>(1000);
            // Calls that everybody makes, so that the number of the failing one says something.
            for _ in 0..2 {
                world.each(|rank, comm, stream| {
                    operation.launch(comm, stream, &mut buffers[rank], |o| o.domain = domain)
                });
            }
            world.wait();

            let began = Instant::now();
            for rank in (0..ranks).filter(|r| *r != absent) {
                let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
                operation.launch(comm, stream, &mut buffers[rank], |o| o.domain = domain).unwrap();
            }
            for rank in (0..ranks).filter(|r| *r != absent) {
                let found = timeout(&world, rank);
                let what = format!("{operation:?} of {ranks} without {absent}: {found:?}");
                assert_eq!((found.rank, found.missing.as_slice()), (rank, [absent].as_slice()), "{what}");
                assert_ne!(found.reporter, absent, "{what}");
                assert_eq!((found.operation, found.phase), (operation.name(), operation.phase()), "{what}");
                assert_eq!((found.sequence, found.domain, found.deadline), (3, domain, DEADLINE), "{what}");
                assert!(found.block < 2, "{what}");
                assert!(found.to_string().contains(&format!("missing rank(s) [{absent}]")), "{found}");
            }
            let took = began.elapsed();
            assert!(took >= DEADLINE * 9 / 10 && took < DEADLINE + SLACK, "{operation:?} of {ranks} took {took:?}");

            for rank in (0..ranks).filter(|r| *r != absent) {
                let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
                let cause = comm.status().unwrap_err();
                assert!(matches!(&cause, Error::Timeout(t) if t.missing == [absent]), "{cause:?}");
                for operation in Operation::ALL.into_iter().filter(|o| domain == 0 || !o.uses_region()) {
                    let refused =
                        operation.launch(comm, stream, &mut buffers[rank], |o| o.domain = domain).unwrap_err();
                    assert_eq!(refused, Error::Poisoned { cause: Box::new(cause.clone()) });
                }
                assert_eq!(comm.status(), Err(cause), "the status did not stay");
            }
        }
    }
}

/// Blocks of many waves, of which one waits for the peers: the others leave with it, after one deadline.
pub fn timeout_in_wide_blocks<B: Backend>(rig: &Rig<B>) {
    let host = rig.is_host();
    let threads = if host { 9 } else { 256 };
    for ranks in [2, 3] {
        for operation in Operation::ALL {
            let absent = ranks - 1;
            let mut world = short_lived(rig, ranks);
            let mut buffers = world.alloc::<f32>(100_000);
            let began = Instant::now();
            for rank in 0..absent {
                let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
                operation.launch(comm, stream, &mut buffers[rank], |o| o.threads = Some(threads)).unwrap();
            }
            (0..absent).for_each(|rank| assert_eq!(timeout(&world, rank).missing, [absent], "{operation:?}"));
            assert!(began.elapsed() < DEADLINE + SLACK, "{operation:?} of {ranks}: {:?}", began.elapsed());
        }
    }
}

/// A fault is the matter of one communicator: others of the same process, on the same devices, go on.
pub fn timeout_leaves_other_communicators_alone<B: Backend>(rig: &Rig<B>) {
    let mut other = rig.world(2);
    let mut world = short_lived(rig, 2);
    works(&mut other);
    world.comms[0].barrier(&world.streams[0]).unwrap();
    works(&mut other);
    assert_eq!(timeout(&world, 0).missing, [1]);
    works(&mut other);
    drop(world);
    works(&mut other);
    works(&mut rig.world(2));
}

/// A rank that comes after the deadline hears that it was the one missing, at once.
pub fn timeout_names_late_rank<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3, 8].into_iter().filter(|ranks| *ranks < 8 || !rig.is_host()) {
        for operation in Operation::ALL {
            let late = ranks - 1;
            let mut world = short_lived(rig, ranks);
            let mut buffers = world.alloc::<f32>(1000);
            for rank in 0..late {
                let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
                operation.launch(comm, stream, &mut buffers[rank], |_| ()).unwrap();
            }
            (0..late).for_each(|rank| assert_eq!(timeout(&world, rank).missing, [late]));

            let began = Instant::now();
            let (comm, stream) = (&mut world.comms[late], &world.streams[late]);
            operation.launch(comm, stream, &mut buffers[late], |_| ()).unwrap();
            let found = timeout(&world, late);
            assert!(found.reporter < late && found.missing == [late], "{operation:?}: {found:?}");
            assert!(began.elapsed() < SLACK, "{:?}", began.elapsed());
        }
    }
}

/// A rank gets stuck behind the start barrier; on the host alone it can be made to.
pub fn timeout_in_mid_call<B: Backend>(rig: &Rig<B>) {
    if !rig.is_host() {
        eprintln!("not run: only the host image can hold a rank up inside a kernel");
        return;
    }
    for (algorithm, at, phase) in [
        (Algorithm::OneStage, Phase::Start, "exit barrier"),
        (Algorithm::TwoStage, Phase::Start, "middle barrier"),
        (Algorithm::TwoStage, Phase::Middle, "exit barrier"),
        (Algorithm::TwoStagePush, Phase::Start, "middle barrier"),
        (Algorithm::TwoStagePush, Phase::Middle, "exit barrier"),
        (Algorithm::Lamport, Phase::Start, "exchange"),
        (Algorithm::TwoShot, Phase::Start, "exchange"),
    ] {
        let mut world = short_lived(rig, 3);
        let mut buffers = world.alloc::<f32>(1000);
        let operation = Operation::AllReduce(algorithm);
        world.each(|rank, comm, stream| {
            let delay = (rank == 1).then_some((at, 2 * DEADLINE));
            operation.launch(comm, stream, &mut buffers[rank], |o| o.delay = delay)
        });
        for rank in [0, 2] {
            let found = timeout(&world, rank);
            let what = (found.missing.as_slice(), found.phase);
            assert_eq!(what, ([1].as_slice(), phase), "{algorithm}, rank 1 late at {at:?}: {found:?}");
            assert_ne!(found.reporter, 1, "{algorithm}: {found:?}");
        }
        // The others had arrived at the barrier before they left it, so the late rank may even have finished. Then its
        // next call tells.
        let (comm, stream) = (&mut world.comms[1], &world.streams[1]);
        if comm.wait(stream).is_ok() {
            comm.barrier(stream).unwrap();
        }
        let found = timeout(&world, 1);
        assert_eq!(found.missing, [1], "{algorithm}: {found:?}");
        assert_ne!(found.reporter, 1, "{algorithm}: {found:?}");
    }
}

/// Ranks that do not make the same call: a fault of the program that nothing can check beforehand, and no hang (B57).
pub fn timeout_ends_different_calls<B: Backend>(rig: &Rig<B>) {
    let [barrier, one, two, lamport, two_shot] = Operation::ALL;
    for (first, second) in [
        (barrier, one),
        (barrier, two),
        (one, two),
        (barrier, lamport),
        (two, lamport),
        (one, two_shot),
        (barrier, two_shot),
    ] {
        let mut world = short_lived(rig, 2);
        // Staged by one block, so that no rank reads what another one writes: a data race otherwise.
        let mut buffers = world.local::<f32>(1000);
        let began = Instant::now();
        world.each(|rank, comm, stream| {
            let operation = if rank == 0 { first } else { second };
            operation.launch(comm, stream, &mut buffers[rank], |o| o.blocks = Some(1))
        });
        // Both start; the one with fewer barriers may finish. The other misses it.
        let ours = timeout(&world, 1);
        let (comm, stream) = (&mut world.comms[0], &world.streams[0]);
        if comm.wait(stream).is_ok() {
            comm.barrier(stream).unwrap();
        }
        // Each waits for the other, so both may reach their deadline at once; whoever is woken says what its waker said.
        for found in [timeout(&world, 0), ours] {
            assert_eq!(found.missing, [1 - found.reporter], "{first:?} and {second:?}: {found:?}");
        }
        assert!(began.elapsed() < DEADLINE + SLACK, "{first:?} and {second:?}: {:?}", began.elapsed());
    }
}

/// A graph of many calls costs one deadline, not one for each call.
pub fn timeout_ends_a_graph_once<B: Backend>(rig: &Rig<B>) {
    const CALLS: usize = 20;
    let mut world = short_lived(rig, 2);
    let mut buffers = world.alloc::<f32>(1000);
    let graph = world.capture(0, |comm, stream| {
        let mut operations = Operation::ALL.into_iter().cycle().take(CALLS);
        operations.try_for_each(|operation| operation.launch(comm, stream, &mut buffers[0], |_| ()))
    });
    let began = Instant::now();
    B::replay(&graph, &world.streams[0]).unwrap();
    let found = timeout(&world, 0);
    assert_eq!((found.missing.as_slice(), found.sequence), ([1].as_slice(), 1), "{found:?}");
    assert!(began.elapsed() < DEADLINE + SLACK, "{CALLS} calls took {:?}", began.elapsed());
}

/// `abort` ends the wait of its rank and of the peers, long before the deadline, and says who asked.
pub fn abort_from_another_thread<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3, 5] {
        for operation in Operation::ALL {
            let (absent, by) = (ranks - 1, 0);
            let mut world = rig.world(ranks);
            let mut buffers = world.alloc::<f32>(1000);
            for rank in (0..ranks).filter(|r| *r != absent) {
                let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
                operation.launch(comm, stream, &mut buffers[rank], |_| ()).unwrap();
            }
            let handle = world.comms[by].abort_handle();
            let began = Instant::now();
            let aborter = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(30));
                handle.clone().abort().unwrap();
            });
            for rank in (0..ranks).filter(|r| *r != absent) {
                let found = world.comms[rank].wait(&world.streams[rank]).unwrap_err();
                assert_eq!(found, Error::Aborted { rank, by }, "{operation:?} of {ranks}");
                let refused = world.comms[rank].barrier(&world.streams[rank]).unwrap_err();
                assert_eq!(refused, Error::Poisoned { cause: Box::new(found) });
            }
            aborter.join().unwrap();
            assert!(began.elapsed() < SLACK, "{operation:?} of {ranks}: {:?}", began.elapsed());
        }
    }
    let mut world = rig.world(2);
    Exchange::<B, f32>::random(&mut world, 100, 1, options(|_| ()), &[Place::symmetric(); 2]).run(&mut world, 0);
}

/// A rank gave up waiting for a peer that is merely slow, and its next call was enqueued behind: what the slow one still reads
/// must not change under it, since its own call may yet succeed.
pub fn timeout_leaves_staged_data_alone<B: Backend>(rig: &Rig<B>) {
    if !rig.is_host() {
        eprintln!("not run: only the host image can hold a rank up inside a kernel");
        return;
    }
    const COUNT: usize = 3000;
    for algorithm in [Algorithm::OneStage, Algorithm::TwoStage] {
        let mut world = short_lived(rig, 2);
        let inputs = random_inputs::<f32>(2, 4, COUNT);
        let others = random_inputs::<f32>(1, 5, COUNT);
        let mut sources = world.local::<f32>(COUNT);
        let mut targets = world.local::<f32>(COUNT);
        let mut next = world.local::<f32>(COUNT);
        world.each(|rank, _, stream| sources[rank].write(stream, &inputs[rank]));
        next[0].write(&world.streams[0], &others[0]).unwrap();
        let call = |delay| {
            options(|o| (o.algorithm, o.blocks, o.threads, o.delay) = (Some(algorithm), Some(2), Some(2), delay))
        };
        world.each(|rank, comm, stream| {
            let delay = (rank == 1).then_some((Phase::Start, 3 * DEADLINE));
            comm.with(call(delay)).all_reduce(stream, &sources[rank], &mut targets[rank], ReduceOp::Sum)
        });
        let (comm, stream) = (&mut world.comms[0], &world.streams[0]);
        comm.with(call(None)).all_reduce_in_place(stream, &mut next[0], ReduceOp::Sum).unwrap();
        assert_eq!(timeout(&world, 0).missing, [1]);
        // With one barrier left, for which the other rank had left its signal, the slow rank succeeds; with two it does not.
        let found = world.comms[1].wait(&world.streams[1]);
        assert_eq!(found.is_ok(), algorithm == Algorithm::OneStage, "{algorithm}: {found:?}");
        if found.is_ok() {
            compare::assert_bits("the slow rank", &targets[1].read(&world.streams[1]).unwrap(), &sum(&inputs));
        }
    }
}
