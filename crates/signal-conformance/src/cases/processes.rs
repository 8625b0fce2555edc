//! Ranks that are processes: everything works as in one, and a process that dies or stops is named and harms nobody.

use std::time::{Duration, Instant};

use half::{bf16, f16};
use rustix::process::Signal;
use signal_core::error::Rendezvous;
use signal_core::reference::Rng;
use signal_core::{
    Algorithm, ApiMisuse, Backend, CallOptions, Communicator, DeviceBuffer, DeviceFamily, Dtype, Element, Error, Link,
    MemoryKind, ReduceOp, Settings,
};

use crate::cases::blocks::budget_of;
use crate::cases::program::{Barrier, Drawing, Drawn, draw};
use crate::compare;
use crate::exchange::{Lane, Step, buffer_len, random_inputs, sum, symmetric_buffers};
use crate::place::{Memory, below};
use crate::processes::{Director, Member, ProcessCase, succeed};
use crate::rig::{is_scaled_down, scaled};
use crate::world::options;

const COUNT: usize = 1000;

/// World sizes to try. On one GPU processes take turns, which is slow.
fn worlds<B: Backend>(director: &Director<'_, B>) -> &'static [usize] {
    match director.rig.devices().len() {
        _ if director.rig.is_host() && is_scaled_down() => &[2],
        _ if director.rig.is_host() => &[2, 3, 5, 8],
        1 | 2 => &[2],
        _ => &[2, 4],
    }
}

/// Short, so that the case is; but processes may be more than cores.
fn deadline<B: Backend>(member: &Member<'_, B>) -> Duration {
    Duration::from_millis(match B::describe(&member.rig.devices()[0]).family {
        DeviceFamily::Host if !is_scaled_down() => 300 * member.world as u64,
        DeviceFamily::Host => 2000,
        DeviceFamily::Nvidia => 1000,
        // A block of 32 threads is so many on a few cores, where tests/hip-abi stands for the runtime.
        _ => 5000,
    })
}

/// Programs of calls of every kind: this rank's results are checked against the reference.
pub fn processes_random_programs<B: Backend>() -> ProcessCase<B> {
    ProcessCase {
        direct: |director| worlds(director).iter().for_each(|world| director.succeed(*world, "program")),
        member: |member| {
            let (mut comm, stream) = member.connect(|s| s.scratch_bytes = 128 << 10).unwrap();
            program(&mut comm, &stream, scaled(if member.world == 2 { 100 } else { 40 }), 3);
            drop(comm);
            let (mut comm, stream) = member.connect_as(1, member.rank, member.world, |_| ()).unwrap();
            comm.preset_counters(u32::MAX - 3).unwrap();
            comm.preset_lamport_flag(u32::MAX - 4).unwrap();
            drop(comm.alloc::<u8>(1).unwrap()); // all meet: a peer's call must not find what is to be preset yet
            program(&mut comm, &stream, 20, 4);
            drop(comm);
            let (mut comm, stream) =
                member.connect_as(2, member.rank, member.world, |s| s.peer_to_peer = Some(false)).unwrap();
            assert_eq!(comm.link(), Link::Pinned);
            program(&mut comm, &stream, scaled(40), 5);
            let found = comm.alloc::<u8>(100 + member.rank).map(drop).unwrap_err();
            assert!(matches!(found, Error::ApiMisuse(ApiMisuse::UnequalAlloc { rank: 1, first: 0, .. })), "{found}");
        },
    }
}

/// This rank's part of a program of `calls`, checked at the end.
fn program<B: Backend>(comm: &mut Communicator<B>, stream: &B::Stream, calls: u32, seed: u64) {
    let mut rng = Rng::new(seed);
    let mut steps: Vec<Box<dyn Step<B>>> = Vec::new();
    for _ in 0..calls {
        match draw(&mut rng, comm.world_size()) {
            Drawn::Barrier => steps.push(Box::new(Barrier)),
            Drawn::AllReduce(drawing) => match drawing.dtype {
                Dtype::F32 => steps.push(lane::<B, f32>(comm, stream, &drawing)),
                Dtype::F16 => steps.push(lane::<B, f16>(comm, stream, &drawing)),
                _ => steps.push(lane::<B, bf16>(comm, stream, &drawing)),
            },
        }
    }
    let mut rng = Rng::new(seed + comm.rank() as u64);
    for step in &mut steps {
        if below(&mut rng, 8) == 0 {
            std::thread::sleep(Duration::from_micros(rng.below(1500)));
        }
        step.launch(comm, stream).unwrap();
    }
    comm.wait(stream).unwrap();
    steps.iter().for_each(|step| step.check(stream));
}

fn lane<B: Backend, T: Element>(comm: &mut Communicator<B>, stream: &B::Stream, drawing: &Drawing) -> Box<dyn Step<B>> {
    let (rank, world) = (comm.rank(), comm.world_size());
    let Drawing { count, places, seed, .. } = drawing;
    let inputs = random_inputs::<T>(world, *seed, *count);
    let len = buffer_len(places, *count);
    // Every rank allocates what any of them needs.
    let mut buffer = |own: Memory, sets: usize| {
        let mut symmetric: Vec<DeviceBuffer<B, T>> = (0..sets).map(|_| comm.alloc(len).unwrap()).collect();
        match own {
            Memory::Local => DeviceBuffer::new(comm.device(), len).unwrap(),
            Memory::Symmetric(k) => symmetric.swap_remove(k),
        }
    };
    let input = buffer(places[rank].input, symmetric_buffers(places.iter().map(|place| &place.input)));
    let output = buffer(places[rank].output, symmetric_buffers(places.iter().map(|place| &place.output)));
    let what = format!("rank {rank} of {world} processes");
    let (options, expected) = (drawing.options_of(rank), (ReduceOp::Sum, sum(&inputs).into()));
    Box::new(Lane::new(&what, stream, (input, output), &inputs[rank], options, &places[rank], expected))
}

/// Graphs of every algorithm, replayed with changing inputs, mixed with calls, some ranks by calls alone.
pub fn processes_replay_graphs<B: Backend>() -> ProcessCase<B> {
    ProcessCase {
        direct: |director| director.succeed(worlds(director)[0], "graphs"),
        member: |member| {
            let (mut comm, stream) = member.connect(|_| ()).unwrap();
            let mut input = comm.alloc::<f32>(COUNT).unwrap();
            let mut output = DeviceBuffer::<B, f32>::new(comm.device(), COUNT).unwrap();
            let mut calls = |comm: &mut Communicator<B>, input: &DeviceBuffer<B, f32>| {
                for algorithm in Algorithm::ALL_REDUCE {
                    let call = options(|o| o.algorithm = Some(algorithm));
                    comm.with(call).all_reduce(&stream, input, &mut output, ReduceOp::Sum).unwrap();
                }
            };
            B::begin_capture(&stream).unwrap();
            calls(&mut comm, &input);
            let graph = B::end_capture(&stream).unwrap();
            for round in 0..scaled(100) {
                let inputs = random_inputs::<f32>(member.world, round.into(), COUNT);
                input.write(&stream, &inputs[member.rank]).unwrap();
                if round % 3 == 0 && member.rank == 1 {
                    calls(&mut comm, &input);
                } else {
                    B::replay(&graph, &stream).unwrap();
                }
                comm.wait(&stream).unwrap();
            }
            let last = random_inputs::<f32>(member.world, u64::from(scaled(100) - 1), COUNT);
            compare::assert_bits("the last replay", &output.read(&stream).unwrap(), &sum(&last));

            // A graph alone holds the memory that its rank brings, which peers read that bring other memory, and hold nothing.
            let mut symmetric = comm.alloc::<f32>(COUNT).unwrap();
            let mut local = DeviceBuffer::<B, f32>::new(comm.device(), COUNT).unwrap();
            let input = if member.rank == 0 { &mut symmetric } else { &mut local };
            input.write(&stream, &last[member.rank]).unwrap();
            B::begin_capture(&stream).unwrap();
            let call = options(|o| o.algorithm = Some(Algorithm::OneStage));
            comm.with(call).all_reduce(&stream, &*input, &mut output, ReduceOp::Sum).unwrap();
            let graph = B::end_capture(&stream).unwrap();
            drop((symmetric, local));
            for _ in 0..5 {
                drop(comm.alloc::<f32>(COUNT).unwrap());
                output.fill_bytes(&stream, 0).unwrap();
                B::replay(&graph, &stream).unwrap();
                comm.wait(&stream).unwrap();
                compare::assert_bits("what graphs hold", &output.read(&stream).unwrap(), &sum(&last));
            }
            drop(comm);
            output.fill_bytes(&stream, 0).unwrap();
            B::replay(&graph, &stream).unwrap();
            compare::assert_bits("a replay at the end", &output.read(&stream).unwrap(), &sum(&last));
        },
    }
}

/// Symmetric memory that comes and goes, groups too: no descriptor stays behind, and no mapping.
pub fn processes_leave_nothing_behind<B: Backend>() -> ProcessCase<B> {
    ProcessCase {
        direct: |director| {
            let files = || std::fs::read_dir("/dev/shm").map_or(0, Iterator::count);
            let before = files();
            director.succeed(worlds(director)[0], "come-and-go");
            assert_eq!(files(), before, "files in /dev/shm");
        },
        member: |member| {
            let device = &member.rig.devices_for(member.world)[member.rank];
            let open = || [count("/proc/self/fd"), shared_mappings()];
            let mut before = open();
            for round in 0..4 {
                let (mut comm, stream) = member.connect(|s| s.scratch_bytes = 64 << 10).unwrap();
                for _ in 0..scaled(50) {
                    let mut buffer = comm.alloc::<f32>(COUNT).unwrap();
                    buffer.fill_bytes(&stream, 0).unwrap();
                    comm.all_reduce_in_place(&stream, &mut buffer, ReduceOp::Sum).unwrap();
                    comm.wait(&stream).unwrap();
                }
                // Its own Signal and the peers', and what ranks have not told each other yet; on a GPU also what waits for the next
                // allocation.
                let mapped = shared_mappings();
                let most = if member.rig.is_host() { 3 } else { 6 };
                assert!(mapped <= most * member.world, "{mapped} mappings");
                drop((comm, stream));
                if round == 0 && !member.rig.is_host() {
                    before = open(); // what the driver opens at its first use
                }
                let began = Instant::now();
                while open() > before {
                    assert!(
                        began.elapsed() < Duration::from_secs(10),
                        "descriptors and mappings: {before:?}, now {:?}",
                        open()
                    );
                    // Memory goes back when it is next looked for.
                    drop(DeviceBuffer::<B, f32>::new(device, 1).unwrap());
                    std::thread::sleep(Duration::from_millis(5));
                }
            }
        },
    }
}

/// Memory that each process has allocated by itself, again and again. Others can map it if it was allocated for that.
pub fn processes_register<B: Backend>() -> ProcessCase<B> {
    ProcessCase {
        direct: |director| worlds(director).iter().for_each(|world| director.succeed(*world, "register")),
        member: |member| {
            let (mut comm, stream) = member.connect(|_| ()).unwrap();
            for kind in [MemoryKind::Device, MemoryKind::Shared] {
                register_again_and_again(&mut comm, &stream, kind);
            }
        },
    }
}

fn register_again_and_again<B: Backend>(comm: &mut Communicator<B>, stream: &B::Stream, kind: MemoryKind) {
    let (rank, world) = (comm.rank(), comm.world_size());
    let inputs = random_inputs::<f32>(world, 8, COUNT);
    let expected = sum(&inputs);
    let mut output = DeviceBuffer::<B, f32>::new(comm.device(), COUNT).unwrap();
    // From its fourth element on.
    let memory = B::allocate(comm.device(), 4 * (COUNT + 3), kind).unwrap();
    B::upload(stream, bytemuck::cast_slice(&inputs[rank]), &memory, 12).unwrap();
    let input = B::address(&memory) + 12;
    let is_nvidia = B::describe(comm.device()).family == DeviceFamily::Nvidia;
    let is_mapped = is_nvidia && kind == MemoryKind::Shared && comm.link() != Link::Pinned;
    let mut most = None;
    for round in 0..scaled(300) {
        // One rank may bring nothing.
        let bytes = if round % 3 == 1 && rank == 1 { 0 } else { 4 * COUNT };
        // SAFETY: the memory is dropped behind the registration, and behind all calls.
        let registration = unsafe { comm.register(input, bytes) }.unwrap();
        let refusal = registration.refusal();
        assert_eq!(refusal.is_none(), is_mapped && bytes > 0, "{refusal:?}");
        assert_eq!(comm.is_read_in_place(input, 4 * COUNT), refusal.is_none());
        let mut call = || {
            let call = comm.with(options(|o| o.algorithm = Some(Algorithm::OneStage)));
            // SAFETY: both live until the waits below, and nothing else uses them.
            unsafe { call.all_reduce_raw(stream, input, output.address(), COUNT, Dtype::F32, ReduceOp::Sum) }.unwrap();
        };
        if round % 8 == 0 {
            B::begin_capture(stream).unwrap();
            call();
            let graph = B::end_capture(stream).unwrap();
            B::replay(&graph, stream).unwrap();
            B::synchronize(stream).unwrap();
        } else {
            call();
        }
        comm.wait(stream).unwrap();
        compare::assert_bits(&format!("{kind:?}, round {round}"), &output.read(stream).unwrap(), &expected);
        output.fill_bytes(stream, 0).unwrap();
        let open = [count("/proc/self/fd"), shared_mappings()];
        let most = *most.get_or_insert(open.map(|count| count + 8));
        assert!(open[0] <= most[0] && open[1] <= most[1], "round {round}: {open:?}, at first {most:?}");
    }
}

fn count(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

fn shared_mappings() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().lines().filter(|line| line.contains("memfd:signal")).count()
}

/// A rank that comes late, one that stops, and an abort: the others name who was missing, all recover, and a graph from before is
/// right.
pub fn processes_recover<B: Backend>() -> ProcessCase<B> {
    ProcessCase {
        direct: |director| {
            for &world in worlds(director).iter().take(2) {
                let mut copies = director.start(world, "recover");
                // Stopped from outside while the others call.
                copies[1].said("stop me");
                copies[1].send(Signal::STOP);
                copies.iter_mut().filter(|copy| copy.rank != 1).for_each(|copy| copy.said("missed"));
                copies[1].send(Signal::CONT);
                succeed(copies);
            }
        },
        member: |member| {
            let (mut comm, stream) = member.connect(|s| s.timeout = deadline(member)).unwrap();
            let mut buffer = comm.alloc::<f32>(COUNT).unwrap();
            let inputs = random_inputs::<f32>(member.world, 5, COUNT);
            let mut output = DeviceBuffer::<B, f32>::new(comm.device(), COUNT).unwrap();
            buffer.write(&stream, &inputs[member.rank]).unwrap();
            B::begin_capture(&stream).unwrap();
            comm.all_reduce(&stream, &buffer, &mut output, ReduceOp::Sum).unwrap();
            let graph = B::end_capture(&stream).unwrap();
            let missed = |found| assert!(matches!(&found, Err(Error::Timeout(t)) if t.missing == [1]), "{found:?}");

            // Rank 1 is stopped from outside. What it was about to call, it finds to have failed.
            comm.barrier(&stream).unwrap();
            comm.wait(&stream).unwrap();
            if member.rank == 1 {
                member.say("stop me");
                std::thread::sleep(2 * deadline(member));
            }
            comm.all_reduce(&stream, &buffer, &mut output, ReduceOp::Sum).unwrap();
            missed(comm.wait(&stream));
            member.say("missed");
            assert!(matches!(comm.barrier(&stream), Err(Error::Poisoned { .. })));
            recover(&mut comm, 1);
            program(&mut comm, &stream, scaled(10), 1);

            // It comes late by itself.
            if member.rank == 1 {
                std::thread::sleep(2 * deadline(member));
            }
            comm.barrier(&stream).unwrap();
            missed(comm.wait(&stream));
            recover(&mut comm, 1);

            // Rank 0 waits, and gives up.
            if member.rank != 0 {
                std::thread::sleep(deadline(member) / 2);
            }
            comm.barrier(&stream).unwrap();
            if member.rank == 0 {
                std::thread::sleep(deadline(member) / 10);
                comm.abort_handle().abort().unwrap();
            }
            let found = comm.wait(&stream);
            assert!(matches!(found, Err(Error::Aborted { by: 0, .. })), "{found:?}");
            comm.recover().unwrap();
            program(&mut comm, &stream, scaled(10), 2);
            B::replay(&graph, &stream).unwrap();
            comm.wait(&stream).unwrap();
            compare::assert_bits("a graph from before", &output.read(&stream).unwrap(), &sum(&inputs));
        },
    }
}

/// Waits long enough for `late` to be there.
fn recover<B: Backend>(comm: &mut Communicator<B>, late: usize) {
    if comm.rank() != late {
        std::thread::sleep(comm.settings().timeout);
    }
    comm.recover().unwrap();
    comm.status().unwrap();
}

/// Ranks that differ, or fail, or do different things: all are told the same.
pub fn processes_refuse_differences<B: Backend>() -> ProcessCase<B> {
    ProcessCase {
        direct: |director| director.succeed(worlds(director)[0], "differ"),
        member: |member| {
            let (rank, world) = (member.rank, member.world);
            let failed = |found: signal_core::Result<(Communicator<B>, B::Stream)>| found.map(drop).unwrap_err();
            let scratch = |s: &mut Settings| s.scratch_bytes = (1 << 20) << rank.min(1);
            let found = failed(member.connect(scratch));
            let name = |found: &Error| match found {
                Error::Rendezvous(Rendezvous::Disagreement { name, first: 0, rank: 1, .. }) => *name,
                other => panic!("{other:?}"),
            };
            assert_eq!(name(&found), "SIGNAL_SCRATCH");

            // One cannot do its part.
            let found = failed(member.connect(|s| s.scratch_bytes = if rank == 1 { 1 } else { 1 << 20 }));
            match found {
                Error::ApiMisuse(ApiMisuse::Setting { name: "SIGNAL_SCRATCH", .. }) if rank == 1 => (),
                Error::Rendezvous(Rendezvous::Failed { rank: 1, why }) if rank != 1 => {
                    assert!(why.contains("SIGNAL_SCRATCH"), "{why}");
                }
                other => panic!("{other:?}"),
            }

            // One does not come.
            if rank != 1 {
                let found = failed(member.connect_as(1, rank, world, |s| s.timeout = Duration::from_millis(300)));
                assert!(
                    matches!(&found, Error::Rendezvous(Rendezvous::Absent { missing, .. }) if *missing == [1]),
                    "{found:?}"
                );
            }

            let (mut comm, stream) = member.connect(|_| ()).unwrap();
            let found = comm.alloc::<f32>(10 + rank.min(1)).map(drop).unwrap_err();
            let expected = ApiMisuse::UnequalAlloc { rank: 1, bytes: 44, first: 0, expected: 40 };
            assert_eq!(found, Error::ApiMisuse(expected));
            let found = if rank == 1 { comm.recover() } else { comm.alloc::<f32>(10).map(drop) };
            assert_eq!(name(&found.unwrap_err()), "collective call");
            // What all did together goes on.
            program(&mut comm, &stream, 5, 1);

            // A device for two ranks, without leave.
            if member.rig.devices_for(world)[0] == member.rig.devices_for(world)[1] {
                let rendezvous =
                    signal_core::rendezvous::UnixRendezvous::from_id(&member.ids[1], rank, world, deadline(member));
                let device = &member.rig.devices_for(world)[rank];
                let found = Communicator::<B>::connect(device, rendezvous.unwrap()).map(drop).unwrap_err();
                assert!(matches!(found, Error::ApiMisuse(ApiMisuse::SharedDevice { first: 0, second: 1, .. })));
            }
        },
    }
}

/// Two groups of the same processes at once, and two of different ones.
pub fn processes_two_groups<B: Backend>() -> ProcessCase<B> {
    ProcessCase {
        direct: |director| {
            let world = worlds(director)[0];
            let copies = [director.start(world, "both"), director.start(world, "both")];
            succeed(copies.into_iter().flatten().collect());
        },
        member: |member| {
            let (mut first, stream) = member.connect(|s| s.scratch_bytes = 64 << 10).unwrap();
            // In the other order.
            let rank = member.world - 1 - member.rank;
            let (mut second, other) = member.connect_as(1, rank, member.world, |s| s.scratch_bytes = 64 << 10).unwrap();
            let calls = scaled(20);
            std::thread::scope(|scope| {
                let thread = scope.spawn(|| program(&mut first, &stream, calls, 1));
                program(&mut second, &other, calls, 2);
                thread.join().unwrap();
            });
        },
    }
}

/// Rows and columns of processes, used at once with the whole; keys that reorder, ranks without a colour, a group of a group; and a
/// difference of one rank, which all are told of.
pub fn processes_split<B: Backend>() -> ProcessCase<B> {
    ProcessCase {
        direct: |director| {
            let worlds: &[usize] = if director.rig.is_host() { &[2, 4] } else { &worlds(director)[..1] };
            worlds.iter().for_each(|world| director.succeed(*world, "split"));
        },
        member: |member| {
            let (rank, world) = (member.rank, member.world);
            let small = |s: &mut Settings| (s.scratch_bytes, s.domains) = (64 << 10, true);
            let (mut comm, stream) = member.connect(small).unwrap();
            let before = budget_of(&mut comm, &stream, 1);
            let half = world / 2;
            let mut row = comm.split(Some((rank / half) as u32), 0).unwrap().unwrap();
            let mut column = comm.split(Some((rank % half) as u32), -(rank as i64)).unwrap().unwrap();
            assert_eq!([row.rank(), column.rank()], [rank % half, 1 - rank / half]);
            assert_eq!([row.world_size(), column.world_size()], [half, 2]);
            assert_eq!(row.settings(), comm.settings());
            let streams = [0, 1].map(|_| B::create_stream(comm.device()).unwrap());
            let budgets =
                [budget_of(&mut comm, &stream, 1), budget_of(&mut row, &stream, 1), budget_of(&mut column, &stream, 1)];
            assert_eq!(budgets, [before / 4, before / 2, before / 4]);
            let calls = scaled(20);
            std::thread::scope(|scope| {
                let threads = [
                    scope.spawn(|| program(&mut row, &streams[0], calls, 1)),
                    scope.spawn(|| program(&mut column, &streams[1], calls, 2)),
                ];
                program(&mut comm, &stream, calls, 3);
                threads.into_iter().for_each(|thread| thread.join().unwrap());
            });

            // The new group goes on without the old one, and splits in turn.
            let some = comm.split((rank > 0).then_some(0), 0).unwrap();
            assert_eq!(some.as_ref().map(Communicator::world_size), (rank > 0).then_some(world - 1));
            // A rank that cannot take part says why, and all can try again.
            let handle = (rank == 1).then(|| comm.domain(2).unwrap());
            let found = comm.split(Some(0), 0).map(drop).unwrap_err();
            drop(handle);
            match found {
                Error::ApiMisuse(ApiMisuse::DomainTaken(2)) => assert_eq!(rank, 1),
                Error::Rendezvous(Rendezvous::Failed { rank: 1, why }) => assert!(why.contains("domain 2"), "{why}"),
                other => panic!("{other:?}"),
            }
            assert_eq!(budget_of(&mut comm, &stream, 1), before / 8);
            assert!(comm.split(None, 0).unwrap().is_none());
            program(&mut comm, &stream, 5, 4);
            drop((comm, row));
            let mut single = column.split(Some(rank as u32), 0).unwrap().unwrap();
            assert_eq!((single.rank(), single.world_size()), (0, 1));
            program(&mut column, &streams[0], calls, 5);
            program(&mut single, &streams[1], calls, 6);
        },
    }
}

/// One is killed at a random moment while the groups are split again and again: the others, of all colours, end in time with its
/// name.
pub fn processes_kill_one_while_they_split<B: Backend>() -> ProcessCase<B> {
    ProcessCase {
        direct: |director| {
            let mut rng = Rng::new(11);
            let world = if director.rig.is_host() { 4 } else { worlds(director)[0] };
            for _ in 0..scaled(8) {
                let victim = below(&mut rng, world);
                let mut copies = director.start(world, &victim.to_string());
                copies[victim].said("splitting");
                std::thread::sleep(Duration::from_micros(rng.below(100_000)));
                copies.swap_remove(victim).kill();
                let killed = Instant::now();
                copies.iter_mut().for_each(|copy| copy.said("over"));
                let took = killed.elapsed();
                assert!(took < Duration::from_secs(20), "they took {took:?}");
                succeed(copies);
            }
        },
        member: |member| {
            let victim: usize = member.scenario.parse().unwrap();
            let deadline = deadline(member);
            let (mut comm, _) = member.connect(|s| (s.timeout, s.scratch_bytes) = (deadline, 64 << 10)).unwrap();
            member.say("splitting");
            let found = (0..).find_map(|round: usize| {
                // Once nothing is left to divide, they only meet.
                let color = (round < 8).then_some(((member.rank >> (round % 2)) & 1) as u32);
                comm.split(color, 0).err()
            });
            match found.unwrap() {
                Error::Rendezvous(Rendezvous::Lost { missing, .. } | Rendezvous::Absent { missing, .. }) => {
                    assert_eq!(missing, [victim]);
                }
                other => panic!("{other:?}"),
            }
            member.say("over");
        },
    }
}

/// One is killed at a random moment: the others end in time with its name, and go on without it.
pub fn processes_kill_one<B: Backend>() -> ProcessCase<B> {
    ProcessCase {
        direct: |director| {
            let mut rng = Rng::new(9);
            let worlds: &[usize] = if director.rig.is_host() { &[2, 3, 4] } else { worlds(director) };
            for round in 0..scaled(20) as usize {
                let world = worlds[round % worlds.len()];
                let victim = below(&mut rng, world);
                let mut copies = director.start(world, &victim.to_string());
                if round % 4 != 0 {
                    copies[victim].said("calling");
                }
                // In every fourth round while the group is made.
                std::thread::sleep(Duration::from_micros(rng.below(if round % 4 == 0 { 200_000 } else { 20_000 })));
                copies.swap_remove(victim).kill();
                let killed = Instant::now();
                copies.iter_mut().for_each(|copy| copy.said("without"));
                let took = killed.elapsed();
                assert!(took < Duration::from_secs(10), "they took {took:?}");
                succeed(copies);
            }
        },
        member: |member| {
            let victim: usize = member.scenario.parse().unwrap();
            let deadline = deadline(member);
            let lost = |found: &Error| match found {
                Error::Rendezvous(Rendezvous::Lost { missing, .. } | Rendezvous::Absent { missing, .. }) => {
                    assert_eq!(*missing, [victim], "{found}");
                }
                other => panic!("{other:?}"),
            };
            let connected = member.connect(|s| (s.timeout, s.scratch_bytes) = (deadline, 64 << 10));
            match connected {
                // It was killed before.
                Err(error) => lost(&error),
                Ok((mut comm, stream)) => {
                    let mut buffer = DeviceBuffer::<B, f32>::new(comm.device(), COUNT).unwrap();
                    member.say("calling");
                    let fault = (0..).find_map(|call: usize| {
                        let algorithm = Algorithm::ALL_REDUCE[call % Algorithm::ALL_REDUCE.len()];
                        let call: CallOptions = options(|o| o.algorithm = Some(algorithm));
                        let called = comm.with(call).all_reduce_in_place(&stream, &mut buffer, ReduceOp::Sum);
                        called.and_then(|()| comm.wait(&stream)).err()
                    });
                    match fault.unwrap() {
                        Error::Timeout(timeout) => assert_eq!(timeout.missing, [victim], "{timeout}"),
                        other => panic!("{other:?}"),
                    }
                    lost(&comm.recover().unwrap_err());
                }
            }
            member.say("without");
            if member.world > 2 || member.rank == 0 || victim == 0 {
                let rank = member.rank - usize::from(member.rank > victim);
                let (mut comm, stream) = member.connect_as(1, rank, member.world - 1, |_| ()).unwrap();
                program(&mut comm, &stream, 10, 1);
            }
        },
    }
}
