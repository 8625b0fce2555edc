//! The rules of the collectives besides all-reduce: what is refused, what is found out, what ends a wait; and the wrap of lines.

use std::time::Duration;

use signal_core::layout::{LINE_BANKS_BYTES, MAX_GPUS};
use signal_core::reference::Rng;
use signal_core::{
    Algorithm, ApiMisuse, Backend, CallOptions, Collective, Communicator, DeviceBuffer, Error, ReduceOp, Result,
};

use crate::exchange::works;
use crate::pieces::{Job, Pieces, Where};
use crate::place::{below, pick};
use crate::rig::{Rig, scaled};
use crate::world::{World, options};

const BY_LINES: fn(&mut CallOptions) = |o| o.algorithm = Some(Algorithm::Lines);

/// A working call of each kind.
fn all_work<B: Backend>(world: &mut World<B>) {
    let mut rng = Rng::new(1);
    for collective in Collective::ALL.into_iter().filter(|c| *c != Collective::AllReduce) {
        for algorithm in collective.algorithms() {
            let job = Job::draw(&mut rng, collective, world.ranks(), 200);
            let options = options(|o| o.algorithm = Some(*algorithm));
            Pieces::<B, f32>::new(world, &job, &mut rng, options, Where::Anywhere).run(world, 0);
        }
    }
    works(world);
}

/// The count of calls by lines wraps, with the banks full of what looks like the first calls' lines.
pub fn lines_count_wraps<B: Backend>(rig: &Rig<B>) {
    for (ranks, before) in [(2, 0), (2, 1), (2, 7), (3, 2), (8, 3)] {
        let mut rng = Rng::new(before);
        let mut world = rig.world_with(ranks, |s| s.domains = before == 7);
        let mut calls = |world: &mut World<B>, count: usize| {
            for _ in 0..count {
                let collective =
                    pick(&mut rng, &[Collective::AllGather, Collective::ReduceScatter, Collective::Broadcast]);
                let job = Job::draw(&mut rng, collective, ranks, 300);
                let options = options(|o| {
                    BY_LINES(o);
                    (o.blocks, o.threads) = pick(&mut rng, &[(Some(1), Some(1)), (Some(3), Some(2))]);
                });
                Pieces::<B, f32>::new(world, &job, &mut rng, options, Where::Anywhere).run(world, 0);
            }
        };
        // Leaves lines of the epochs that come again.
        calls(&mut world, 12);
        for comm in &mut world.comms {
            comm.preset_line_count(0xffff_fffd - before as u32).unwrap();
        }
        calls(&mut world, 20);
    }
    let mut comm = rig.world(1).comms.remove(0);
    assert_eq!(comm.preset_line_count(0xffff_fffe), Err(ApiMisuse::LamportFlag(0xffff_fffe).into()));
}

/// Pieces as large as a slot, and one element more; on every domain.
pub fn lines_limits<B: Backend>(rig: &Rig<B>) {
    for (domains, ranks) in [(false, 2), (true, 3)] {
        let mut world = rig.world_with(ranks, |s| s.domains = domains);
        let mut rng = Rng::new(4);
        let limit = LINE_BANKS_BYTES / if domains { 8 } else { 1 } / (2 * MAX_GPUS) / 2;
        for domain in [0, 1, 7].into_iter().filter(|domain| domains || *domain == 0) {
            let options = options(|o| {
                BY_LINES(o);
                o.domain = domain;
            });
            for bytes in [limit - 1, limit, limit - 8, limit - 9] {
                for job in [Job::AllGather(vec![bytes; ranks]), Job::Broadcast(bytes, ranks - 1), Job::AllToAll(bytes)]
                {
                    Pieces::<B, u8>::new(&mut world, &job, &mut rng, options, Where::Anywhere).run(&mut world, 0);
                }
            }
            let mut buffer = world.local::<u8>(limit + 1);
            for (rank, buffer) in buffer.iter_mut().enumerate() {
                let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
                let (bytes, limit) = (limit as u64 + 1, limit as u64);
                let expected = Err(ApiMisuse::LinesTooLarge { bytes, limit }.into());
                assert_eq!(comm.with(options).broadcast(stream, &mut *buffer, 0), expected);
                let found = comm.with(options).all_reduce_in_place(stream, buffer, ReduceOp::Max);
                assert_eq!(found, expected);
            }
        }
        all_work(&mut world);
    }
}

/// Lengths, roots, counts and algorithms that do not fit are refused before anything is launched, on every rank alike.
pub fn misuse_exchanges<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(3);
    let mut buffers = world.alloc::<f32>(12);
    let mut others = world.local::<f32>(13);
    for rank in 0..3 {
        let (comm, stream) = (&mut world.comms[rank], &world.streams[rank].clone());
        let (a, b) = (&mut buffers[rank], &mut others[rank]);
        let refused = |found: Result<()>, expected: ApiMisuse| assert_eq!(found, Err(expected.into()), "rank {rank}");
        let parts = |what, found, expected, parts, part| ApiMisuse::Parts { what, found, expected, parts, part };
        let op = ReduceOp::Sum;

        refused(comm.reduce_scatter(stream, &*a, &mut *b, op), parts("input", 12, 39, 3, 13));
        refused(comm.all_gather(stream, &*a, &mut *b), parts("output", 13, 36, 3, 12));
        refused(comm.all_gather_in_place(stream, &mut *b), parts("buffer", 13, 12, 3, 4));
        refused(comm.reduce_scatter_in_place(stream, &mut *b, op), parts("buffer", 13, 12, 3, 4));
        refused(comm.all_to_all_in_place(stream, &mut *b), parts("buffer", 13, 12, 3, 4));
        let lengths = ApiMisuse::Length { input: 12, output: 13 };
        refused(comm.all_to_all(stream, &*a, &mut *b), lengths.clone());
        let output = Some(b.slice_mut(..).unwrap());
        refused(comm.reduce(stream, &*a, output, op, rank), lengths);
        for counts in [&[4, 4][..], &[1; 9]] {
            let expected = ApiMisuse::Counts { found: counts.len(), world: 3 };
            refused(comm.all_gather_ragged(stream, &*a, &mut *b, counts), expected.clone());
            refused(comm.reduce_scatter_ragged(stream, &*a, &mut *b, counts, op), expected);
        }
        let counts = ApiMisuse::Counts { found: 3, world: 3 };
        refused(comm.all_to_all_ragged(stream, &*a, &mut *b, &[1; 3]), counts);
        refused(comm.all_gather_ragged(stream, &*a, &mut *b, &[12, 0, 0]), parts("output", 13, 12, 1, 12));
        let own = a.slice(..5).unwrap();
        refused(comm.all_gather_ragged(stream, own, &mut *b, &[4, 4, 4]), parts("output", 13, 12, 3, 4));
        let fits = b.slice_mut(..12).unwrap();
        refused(comm.all_gather_ragged(stream, own, fits, &[4, 4, 4]), parts("input", 5, 4, 1, 4));
        let huge = usize::MAX / 8;
        let too_large = ApiMisuse::TooLarge { count: huge, element_bytes: 4 };
        refused(comm.all_gather_ragged(stream, &*a, &mut *b, &[huge, huge, huge]), too_large);
        // Of another rank alone.
        let mut counts = [0; 9];
        counts[(rank + 1) % 3 * 3 + (rank + 2) % 3] = usize::MAX;
        let (none, nothing) = (a.slice(..0).unwrap(), b.slice_mut(..0).unwrap());
        let too_large = ApiMisuse::TooLarge { count: usize::MAX, element_bytes: 4 };
        refused(comm.all_to_all_ragged(stream, none, nothing, &counts), too_large);

        for root in [3, 8, usize::MAX] {
            let expected = ApiMisuse::Rank { rank: root, world: 3 };
            refused(comm.broadcast(stream, &mut *a, root), expected.clone());
            refused(comm.reduce_in_place(stream, &mut *a, op, root), expected.clone());
            refused(comm.gather(stream, &*a, None, root), expected.clone());
            refused(comm.scatter(stream, None, &mut *a, root), expected.clone());
            refused(comm.send(stream, &*a, root), expected.clone());
            refused(comm.receive(stream, &mut *a, root), expected);
        }
        let missing = |collective, what| ApiMisuse::NoBuffer { collective, rank, what };
        refused(comm.gather(stream, &*a, None, rank), missing(Collective::Gather, "output"));
        refused(comm.scatter(stream, None, &mut *a, rank), missing(Collective::Scatter, "input"));
        refused(comm.reduce(stream, &*a, None, op, rank), missing(Collective::Reduce, "output"));

        for algorithm in Algorithm::ALL.into_iter().filter(|a| !Collective::Broadcast.algorithms().contains(a)) {
            let expected = ApiMisuse::Algorithm { collective: Collective::Broadcast, algorithm };
            refused(comm.with(options(|o| o.algorithm = Some(algorithm))).broadcast(stream, &mut *a, 0), expected);
        }
        let expected = ApiMisuse::Algorithm { collective: Collective::SendRecv, algorithm: Algorithm::Lines };
        let to_other = comm.with(options(BY_LINES)).transfers().send(&*a, (rank + 1) % 3).unwrap();
        refused(to_other.launch(stream), expected);
        let expected = ApiMisuse::Algorithm { collective: Collective::AllReduce, algorithm: Algorithm::Pull };
        let pull = options(|o| o.algorithm = Some(Algorithm::Pull));
        refused(comm.with(pull).all_reduce_in_place(stream, &mut *a, op), expected);

        let twice = |what| Error::from(ApiMisuse::SecondTransfer { what, peer: 1 });
        assert_eq!(comm.transfers().send(&*a, 1).unwrap().send(&*b, 1).unwrap_err(), twice("send"));
        let first = comm.transfers().receive(&mut *a, 1).unwrap();
        assert_eq!(first.receive(&mut *b, 1).unwrap_err(), twice("receive"));
        let to_itself = comm.transfers().send(&*a, rank).unwrap().receive(&mut *b, rank).unwrap();
        refused(to_itself.launch(stream), parts("output", 52, 48, 1, 48));
    }
    all_work(&mut world);
}

/// Raw operands: null, misaligned, and overlapping in any way but that in place.
pub fn misuse_exchanges_raw<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(2);
    let buffers = world.alloc::<f32>(64);
    for (rank, buffer) in buffers.iter().enumerate() {
        let (comm, stream, at) = (&mut world.comms[rank], &world.streams[rank], buffer.address());
        let call = |comm: &mut Communicator<B>, input: u64, output: u64| {
            let op = ReduceOp::Sum;
            // SAFETY: refused, or within the buffer, which outlives the calls and which nothing else touches.
            unsafe {
                [
                    comm.with(CallOptions::default()).all_gather_raw(stream, input, output, 64),
                    comm.with(CallOptions::default()).all_to_all_raw(stream, input, output, 32),
                    comm.with(CallOptions::default()).reduce_scatter_raw(
                        stream,
                        input,
                        output,
                        8,
                        signal_core::Dtype::F32,
                        op,
                    ),
                ]
            }
        };
        let overlap = |input: u64, output: u64, bytes: u64| Err(ApiMisuse::Overlap { input, output, bytes }.into());
        for (input, output) in [(at + 4, at), (at, at + 4), (at + 16, at)] {
            let expected = [overlap(input, output, 128), overlap(input, output, 64), overlap(input, output, 64)];
            assert_eq!(call(comm, input, output), expected);
        }
        let null = |what| Err(ApiMisuse::NullPointer { what }.into());
        assert_eq!(call(comm, 0, at), [null("input"), null("input"), null("input")]);
        assert_eq!(call(comm, at, 0), [null("output"), null("output"), null("output")]);
        let dtype = signal_core::Dtype::F32;
        let misaligned = |what, address| Err(ApiMisuse::Misaligned { what, address, dtype }.into());
        // SAFETY: refused.
        let found =
            unsafe { comm.with(CallOptions::default()).reduce_raw(stream, at + 2, at, 4, dtype, ReduceOp::Sum, 0) };
        assert_eq!(found, misaligned("input", at + 2));
        let too_large = |count| Err(ApiMisuse::TooLarge { count, element_bytes: 1 }.into());
        // SAFETY: refused.
        let found =
            unsafe { comm.with(CallOptions::default()).broadcast_raw(stream, u64::MAX - 5, isize::MAX as usize, 0) };
        assert_eq!(found, too_large(isize::MAX as usize));
    }
    // Two receives into one place.
    let (comm, stream, at) = (&mut world.comms[0], &world.streams[0], buffers[0].address());
    // SAFETY: refused.
    let group = unsafe { comm.transfers().receive_raw(at, 64, 0).and_then(|t| t.receive_raw(at + 60, 64, 1)) };
    // SAFETY: refused.
    let group = unsafe { group.and_then(|t| t.send_raw(at + 128, 64, 0)) };
    let expected = ApiMisuse::Overlap { input: at, output: at + 60, bytes: 64 };
    assert_eq!(group.unwrap().launch(stream), Err(expected.into()));
    all_work(&mut world);
}

/// Raw calls whose bytes have no type: any address, in place where that is so.
pub fn exchanges_raw<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(3);
    let mut buffers = world.alloc::<u8>(600);
    for first in [0, 1, 7] {
        for (rank, buffer) in buffers.iter_mut().enumerate() {
            let data: Vec<u8> = (0..600).map(|i| (i as u8).wrapping_mul(7) ^ (rank as u8) << 6).collect();
            buffer.write(&world.streams[rank], &data).unwrap();
        }
        let addresses: Vec<u64> = buffers.iter().map(|buffer| buffer.address() + first).collect();
        world.each(|rank, comm, stream| {
            let at = addresses[rank];
            // SAFETY: within the buffer, which outlives the calls and which nothing else touches.
            unsafe {
                comm.with(options(|_| ())).all_gather_raw(stream, at + 33 * rank as u64, at, 33)?;
                comm.with(options(|_| ())).all_to_all_raw(stream, at + 300, at + 300, 41)?;
                comm.with(options(|_| ())).scatter_raw(stream, at + 500, at + 450, 5, 2)?;
                comm.with(options(|_| ())).gather_raw(stream, at + 456, at + 550, 3, 0)?;
                comm.with(options(|_| ())).broadcast_raw(stream, at + 570, 9, 1)
            }
        });
        world.wait();
        let before = |rank: usize, i: usize| ((i + first as usize) as u8).wrapping_mul(7) ^ (rank as u8) << 6;
        for (rank, buffer) in buffers.iter().enumerate() {
            let found = &buffer.read(&world.streams[rank]).unwrap()[first as usize..];
            let expected = |i: usize| match i {
                0..99 => before(i / 33, i),
                300..423 => before((i - 300) / 41, 300 + rank * 41 + (i - 300) % 41),
                450..455 => before(2, 500 + rank * 5 + i - 450),
                550..559 if rank == 0 => before((i - 550) / 3, 456 + (i - 550) % 3),
                570..579 => before(1, i),
                _ => before(rank, i),
            };
            let wrong = (0..590).find(|i| found[*i] != expected(*i));
            assert_eq!(wrong, None, "rank {rank}, from byte {first}");
        }
    }
}

/// Ranks that disagree in sizes are told so before anything is read, without checked mode too where they pull.
pub fn exchanges_find_other_sizes<B: Backend>(rig: &Rig<B>) {
    for (check, algorithm) in [(false, Algorithm::Pull), (true, Algorithm::Pull), (false, Algorithm::Push)] {
        let moved = options(|o| o.algorithm = Some(algorithm));
        for case in 0..4 {
            let mut world = rig.world_with(2, |s| s.check = check);
            let buffers = world.alloc::<f32>(4000);
            let mut outputs = world.local::<f32>(8000);
            for (rank, (input, output)) in buffers.iter().zip(&mut outputs).enumerate() {
                let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
                let len = 1000 + rank;
                let input = input.slice(..if case == 1 { 2 * len } else { len }).unwrap();
                match case {
                    0 => comm.with(moved).all_gather(stream, input, output.slice_mut(..2 * len).unwrap()),
                    1 => {
                        comm.with(moved).reduce_scatter(stream, input, output.slice_mut(..len).unwrap(), ReduceOp::Sum)
                    }
                    2 => comm.send_receive(stream, (input, 1 - rank), (output.slice_mut(..len).unwrap(), 1 - rank)),
                    // One receives where the other does not send.
                    _ if rank == 0 => comm.send(stream, input, 1),
                    _ => comm.send_receive(stream, (input, 0), (output.slice_mut(..len).unwrap(), 0)),
                }
                .unwrap();
            }
            for (rank, (comm, stream)) in world.comms.iter().zip(&world.streams).enumerate() {
                match comm.wait(stream) {
                    Err(Error::RankMismatch { rank: found, other, .. }) => {
                        assert_eq!((found, other), (rank, 1 - rank), "case {case}, {algorithm}");
                    }
                    other => panic!("case {case}, checked: {check}: rank {rank} found {other:?}"),
                }
            }
            Communicator::recover_all(&mut world.comms).unwrap();
            all_work(&mut world);
        }
    }
}

/// A rank that does not come is named by those who have business with it, and only they wait.
pub fn exchanges_name_who_is_missing<B: Backend>(rig: &Rig<B>) {
    const DEADLINE: Duration = Duration::from_millis(400);
    let calls: [(&str, CallOptions); 4] = [
        ("broadcast", CallOptions::default()),
        ("all-gather", options(|o| o.algorithm = Some(Algorithm::Pull))),
        ("all-gather", options(BY_LINES)),
        ("send-recv", CallOptions::default()),
    ];
    for (name, options) in calls {
        let mut world = rig.world_with(3, |s| s.timeout = DEADLINE);
        let mut inputs = world.alloc::<f32>(30);
        let mut outputs = world.local::<f32>(90);
        let missing = 2;
        for rank in 0..2 {
            let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
            let (input, output) = (&mut inputs[rank], &mut outputs[rank]);
            match name {
                "broadcast" => comm.with(options).broadcast(stream, input, missing),
                "all-gather" => comm.with(options).all_gather(stream, &*input, output),
                _ if rank == 0 => comm.receive(stream, input, missing),
                _ => comm.send_receive(stream, (&*input, 1), (output.slice_mut(..30).unwrap(), 1)),
            }
            .unwrap();
        }
        for rank in 0..2 {
            let found = world.comms[rank].wait(&world.streams[rank]);
            if name == "send-recv" && rank == 1 {
                // It may have been done before rank 0 gave up, and told it.
                assert!(matches!(found, Ok(()) | Err(Error::Timeout(_))), "{found:?}");
                continue;
            }
            match found {
                Err(Error::Timeout(timeout)) => {
                    assert_eq!((timeout.missing.as_slice(), timeout.operation), (&[missing][..], name), "rank {rank}");
                }
                other => panic!("{name}: rank {rank} found {other:?}"),
            }
        }
        Communicator::recover_all(&mut world.comms).unwrap();
        all_work(&mut world);
    }
}

/// One rank's buffers of a chain of calls, each of which takes what the one before gave.
struct Chain<B: Backend> {
    input: DeviceBuffer<B, u32>,
    gathered: DeviceBuffer<B, u32>,
    turned: DeviceBuffer<B, u32>,
    sum: DeviceBuffer<B, u32>,
    received: DeviceBuffer<B, u32>,
}

impl<B: Backend> Chain<B> {
    fn calls(&mut self, comm: &mut Communicator<B>, stream: &B::Stream, options: CallOptions) -> Result<()> {
        let (rank, ranks) = (comm.rank(), comm.world_size());
        comm.with(options).all_gather(stream, &self.input, &mut self.gathered)?;
        comm.with(options).all_to_all(stream, &self.gathered, &mut self.turned)?;
        comm.with(options).reduce_scatter(stream, &self.turned, &mut self.sum, ReduceOp::Sum)?;
        let (next, last) = ((rank + 1) % ranks, (rank + ranks - 1) % ranks);
        comm.send_receive(stream, (&self.sum, next), (&mut self.received, last))?;
        comm.with(options).broadcast(stream, &mut self.input, 1)
    }
}

/// A captured call of each kind, replayed with changing data among eager calls.
pub fn exchanges_in_graphs<B: Backend>(rig: &Rig<B>) {
    const COUNT: usize = 300;
    for ranks in [2, 3] {
        let mut world = rig.world(ranks);
        let (a, b, c, d, e) = (
            world.alloc(COUNT),
            world.alloc(COUNT * ranks),
            world.local(COUNT * ranks),
            world.local(COUNT),
            world.local(COUNT),
        );
        let chains = a.into_iter().zip(b).zip(c).zip(d).zip(e);
        let chain = |((((input, gathered), turned), sum), received)| Chain { input, gathered, turned, sum, received };
        let mut chains: Vec<Chain<B>> = chains.map(chain).collect();
        for algorithm in [Algorithm::Pull, Algorithm::Push, Algorithm::Lines] {
            let options = options(|o| o.algorithm = Some(algorithm));
            let capture = |rank: usize| world.capture(rank, |comm, stream| chains[rank].calls(comm, stream, options));
            let graphs: Vec<B::Graph> = (0..ranks).map(capture).collect();
            let mut rng = Rng::new(5);
            for round in 0..scaled(40) {
                let mut random = |_| (0..COUNT).map(|_| rng.next_u32()).collect::<Vec<u32>>();
                let data: Vec<Vec<u32>> = (0..ranks).map(&mut random).collect();
                let eager = below(&mut rng, ranks + 2);
                for (rank, chain) in chains.iter_mut().enumerate() {
                    let stream = &world.streams[rank];
                    chain.input.write(stream, &data[rank]).unwrap();
                    if rank == eager {
                        chain.calls(&mut world.comms[rank], stream, options).unwrap();
                    } else {
                        B::replay(&graphs[rank], stream).unwrap();
                    }
                }
                world.wait();
                let sum: Vec<u32> =
                    (0..COUNT).map(|i| data.iter().fold(0, |sum: u32, of| sum.wrapping_add(of[i]))).collect();
                for (rank, chain) in chains.iter().enumerate() {
                    let read = |buffer: &DeviceBuffer<B, u32>| buffer.read(&world.streams[rank]).unwrap();
                    let what = format!("rank {rank} of {ranks}, round {round}, {algorithm}");
                    assert!(read(&chain.gathered) == data.concat(), "{what}: gathered");
                    assert!(read(&chain.turned) == data[rank].repeat(ranks), "{what}: turned");
                    assert!(read(&chain.sum) == sum && read(&chain.received) == sum, "{what}: sum");
                    assert!(read(&chain.input) == data[1], "{what}: broadcast");
                }
            }
        }
    }
}
