//! Bad input to calls: a named error, nothing launched, nothing written, and the communicator works on.

use std::ops::Range;

use signal_core::{Algorithm, ApiMisuse, Backend, DeviceBuffer, Error, ReduceOp, Result};

use crate::exchange::works;
use crate::rig::Rig;
use crate::world::{World, options};

const LEN: usize = 64;

/// What buffers hold that nobody may write.
pub(crate) const UNTOUCHED: u32 = 0x4a4a_4a4a;

/// Asserts that a call broke exactly this rule.
pub(crate) fn refused<T: std::fmt::Debug>(found: Result<T>, expected: ApiMisuse) {
    match found {
        Err(Error::ApiMisuse(found)) => assert_eq!(found, expected),
        other => panic!("expected {expected:?}, found {other:?}"),
    }
}

/// Two ranks with an input and an output each, to be refused with.
pub(crate) struct Refusals<B: Backend> {
    pub(crate) world: World<B>,
    pub(crate) inputs: Vec<DeviceBuffer<B, f32>>,
    pub(crate) outputs: Vec<DeviceBuffer<B, f32>>,
}

impl<B: Backend> Refusals<B> {
    pub(crate) fn new(mut world: World<B>) -> Self {
        let (mut inputs, mut outputs) = (world.alloc(LEN), world.alloc(LEN));
        world.each(|rank, _, stream| {
            inputs[rank].fill_bytes(stream, UNTOUCHED)?;
            outputs[rank].fill_bytes(stream, UNTOUCHED)
        });
        world.wait();
        Refusals { world, inputs, outputs }
    }

    /// After refusals: buffers are as they were, and all ranks can still work.
    pub(crate) fn end(mut self) {
        self.world.wait();
        for (rank, stream) in self.world.streams.iter().enumerate() {
            for buffer in [&self.inputs[rank], &self.outputs[rank]] {
                let words = buffer.read(stream).unwrap();
                assert!(words.iter().all(|w| w.to_bits() == UNTOUCHED), "rank {rank}: a refused call wrote");
            }
        }
        works(&mut self.world);
    }
}

/// Slices that do not fit a buffer, and slices that do not fit each other.
pub fn misuse_lengths_and_ranges<B: Backend>(rig: &Rig<B>) {
    let mut r = Refusals::new(rig.world(2));
    let (comm, stream) = (&mut r.world.comms[0], &r.world.streams[0]);
    for (input, output) in [(8, 7), (7, 8), (0, 1), (1, 0), (LEN, 1)] {
        let slices = (r.inputs[0].slice(0..input).unwrap(), r.outputs[0].slice_mut(0..output).unwrap());
        refused(comm.all_reduce(stream, slices.0, slices.1, ReduceOp::Sum), ApiMisuse::Length { input, output });
    }
    let ranges: [Range<usize>; 4] = [
        Range { start: 0, end: LEN + 1 },
        Range { start: LEN + 1, end: LEN + 1 },
        Range { start: 5, end: 4 },
        Range { start: 1, end: usize::MAX },
    ];
    for range in ranges {
        let expected = ApiMisuse::Range { start: range.start, end: range.end, len: LEN };
        refused(r.inputs[0].slice(range.clone()).map(|_| ()), expected.clone());
        refused(r.outputs[0].slice_mut(range).map(|_| ()), expected);
    }
    assert_eq!(r.inputs[0].slice(LEN..LEN).unwrap().len(), 0);
    r.end();
}

/// Buffers that are too large, and transfers that do not fit; a buffer of nothing is a buffer.
pub fn misuse_buffers<B: Backend>(rig: &Rig<B>) {
    let mut r = Refusals::new(rig.world(2));
    let (comm, stream) = (&mut r.world.comms[0], &r.world.streams[0]);
    let device = comm.device().clone();
    for count in [usize::MAX, usize::MAX / 4 + 1] {
        let expected = ApiMisuse::TooLarge { count, element_bytes: 4 };
        refused(DeviceBuffer::<B, f32>::new(&device, count).map(|_| ()), expected.clone());
        refused(comm.alloc::<f32>(count).map(|_| ()), expected);
    }
    let short = DeviceBuffer::<B, f32>::new(&device, LEN - 1).unwrap();
    refused(r.outputs[0].write(stream, &[0.0; LEN + 1]), ApiMisuse::Length { input: LEN + 1, output: LEN });
    refused(r.outputs[0].copy_from(stream, &short), ApiMisuse::Length { input: LEN - 1, output: LEN });

    let mut empty = comm.alloc::<f32>(0).unwrap();
    let mut none = DeviceBuffer::<B, f32>::new(&device, 0).unwrap();
    assert!(empty.is_empty() && none.is_empty() && empty.address() != 0);
    none.write(stream, &[]).unwrap();
    assert_eq!(none.read(stream).unwrap(), []);
    // Rank 1 makes no call, and is not missed.
    comm.all_reduce(stream, &empty, &mut none, ReduceOp::Sum).unwrap();
    comm.all_reduce_in_place(stream, &mut empty, ReduceOp::Sum).unwrap();
    comm.wait(stream).unwrap();
    let _ = r.world.comms[1].alloc::<f32>(0).unwrap();
    r.end();
}

/// Domains that do not exist, and domains that were not opened.
pub fn misuse_domains<B: Backend>(rig: &Rig<B>) {
    for open in [false, true] {
        let mut r = Refusals::new(rig.world_with(2, |s| s.domains = open));
        let (comm, stream) = (&mut r.world.comms[0], &r.world.streams[0]);
        let mut expect = |domain: u32, expected: ApiMisuse| {
            let on = options(|o| o.domain = domain);
            refused(comm.with(on).barrier(stream), expected.clone());
            refused(comm.with(on).all_reduce(stream, &r.inputs[0], &mut r.outputs[0], ReduceOp::Sum), expected.clone());
            refused(comm.with(on).all_reduce_in_place(stream, &mut r.outputs[0], ReduceOp::Sum), expected);
        };
        for domain in [8, 9, u32::MAX] {
            expect(domain, ApiMisuse::Domain(domain));
        }
        if !open {
            expect(1, ApiMisuse::DomainsClosed(1));
            expect(7, ApiMisuse::DomainsClosed(7));
        }
        r.end();
    }
}

/// Grids that cannot be resident, blocks that are too wide, and results that have no room.
pub fn misuse_grids<B: Backend>(rig: &Rig<B>) {
    let mut r = Refusals::new(rig.world(2));
    let limit = B::describe(r.world.comms[0].device()).max_block_threads;
    let (comm, stream) = (&mut r.world.comms[0], &r.world.streams[0]);
    let mut try_grid = |blocks: Option<u32>, threads: Option<u32>, expected: &dyn Fn(&ApiMisuse) -> bool| {
        for algorithm in Algorithm::ALL_REDUCE {
            let grid = options(|o| (o.blocks, o.threads, o.algorithm) = (blocks, threads, Some(algorithm)));
            let found = comm.with(grid).all_reduce(stream, &r.inputs[0], &mut r.outputs[0], ReduceOp::Sum);
            assert!(matches!(&found, Err(Error::ApiMisuse(e)) if expected(e)), "{blocks:?}x{threads:?}: {found:?}");
        }
    };
    for blocks in [0, 1025, u32::MAX] {
        try_grid(
            Some(blocks),
            Some(1),
            &|e| matches!(e, ApiMisuse::Grid { blocks: b, budget } if *b == blocks && (1..=1024).contains(budget)),
        );
    }
    for threads in [0, limit + 1, u32::MAX] {
        try_grid(
            Some(1),
            Some(threads),
            &|e| matches!(e, ApiMisuse::Threads { threads: t, limit: l } if *t == threads && *l <= limit),
        );
    }
    // The number of all threads does not fit 64 bits once it is multiplied.
    try_grid(Some(u32::MAX), Some(u32::MAX), &|e| matches!(e, ApiMisuse::Threads { .. }));
    let mut short = DeviceBuffer::<B, u32>::new(comm.device(), 2).unwrap();
    let grid = options(|o| (o.blocks, o.threads) = (Some(3), Some(1)));
    let found = comm.with(grid).barrier_probe(stream, &signal_core::BarrierProbe::default(), &mut short);
    assert!(matches!(found, Err(Error::ApiMisuse(ApiMisuse::BufferTooSmall { .. }))), "{found:?}");
    r.end();
}

/// Two ranks on one stream would wait for each other in one queue.
pub fn misuse_shared_stream<B: Backend>(rig: &Rig<B>) {
    let device = rig.devices()[0].clone();
    let comms = signal_core::Communicator::<B>::builder()
        .settings(crate::rig::settings())
        .share_devices(true)
        .all_local(&[device.clone(), device]);
    let mut r = Refusals::new(World::new(comms.unwrap()));
    let stream = B::create_stream(&rig.devices()[0]).unwrap();
    // Rank 0 has used the stream and will be joined on it by nobody.
    let other = r.world.streams[1].clone();
    r.world.comms[0].barrier(&stream).unwrap();
    let expected = ApiMisuse::SharedStream { first: 0, second: 1 };
    refused(r.world.comms[1].barrier(&stream), expected.clone());
    refused(r.world.comms[1].all_reduce(&stream, &r.inputs[1], &mut r.outputs[1], ReduceOp::Sum), expected.clone());
    // Nor when rank 0 has moved on: its call is still there, and would wait for the one behind it.
    let own = r.world.streams[0].clone();
    r.world.comms[0].barrier(&own).unwrap();
    refused(r.world.comms[1].barrier(&stream), expected);
    for _ in 0..2 {
        r.world.comms[1].barrier(&other).unwrap();
    }
    r.world.comms[0].wait(&own).unwrap();
    r.world.comms[1].wait(&other).unwrap();
    // When that is done the stream is free.
    r.world.comms[1].barrier(&stream).unwrap();
    r.world.comms[0].barrier(&own).unwrap();
    r.world.comms[1].wait(&stream).unwrap();
    r.end();
}

/// A stream that captures cannot wait for a call that is under way on another stream.
pub fn misuse_busy_domain_under_capture<B: Backend>(rig: &Rig<B>) {
    let mut r = Refusals::new(rig.world(2));
    let second = r.world.more_streams().swap_remove(0);
    r.world.comms[0].barrier(&r.world.streams[0]).unwrap();

    B::begin_capture(&second).unwrap();
    refused(r.world.comms[0].barrier(&second), ApiMisuse::BusyDomain(0));
    let refusal = r.world.comms[0].all_reduce(&second, &r.inputs[0], &mut r.outputs[0], ReduceOp::Sum);
    refused(refusal, ApiMisuse::BusyDomain(0));
    let graph = B::end_capture(&second).unwrap();

    // The capture went on and recorded nothing.
    B::replay(&graph, &second).unwrap();
    B::synchronize(&second).unwrap();
    r.world.comms[1].barrier(&r.world.streams[1]).unwrap();
    r.world.wait();

    // Once the other stream is through, capture may proceed.
    B::begin_capture(&second).unwrap();
    r.world.comms[0].barrier(&second).unwrap();
    let graph = B::end_capture(&second).unwrap();
    B::replay(&graph, &second).unwrap();
    r.world.comms[1].barrier(&r.world.streams[1]).unwrap();
    r.world.comms[0].wait(&second).unwrap();
    r.end();
}

/// Streams and buffers of another rank's device.
pub fn misuse_wrong_device<B: Backend>(rig: &Rig<B>) {
    if rig.devices().len() < 2 {
        eprintln!("not run: there is only one device");
        return;
    }
    let wrong = |found: Result<()>, which: &str| match found {
        Err(Error::ApiMisuse(ApiMisuse::WrongDevice { what, found, expected })) => {
            assert_eq!(what, which);
            assert_ne!(found, expected);
        }
        other => panic!("{which}: {other:?}"),
    };
    let mut r = Refusals::new(rig.world(2));
    let [mut own, mut foreign] = [0, 1].map(|rank| {
        let device = r.world.comms[rank].device();
        let mut buffer = DeviceBuffer::<B, f32>::new(device, LEN).unwrap();
        buffer.fill_bytes(&r.world.streams[rank], UNTOUCHED).unwrap();
        buffer
    });
    let (comm, streams) = (&mut r.world.comms[0], &r.world.streams);
    wrong(comm.barrier(&streams[1]), "stream");
    wrong(comm.all_reduce(&streams[1], &own, &mut r.outputs[0], ReduceOp::Sum), "stream");
    wrong(comm.all_reduce(&streams[0], &foreign, &mut own, ReduceOp::Sum), "input");
    wrong(comm.all_reduce(&streams[0], &own, &mut foreign, ReduceOp::Sum), "output");
    wrong(comm.all_reduce(&streams[0], &r.inputs[1], &mut own, ReduceOp::Sum), "input");
    wrong(comm.all_reduce(&streams[0], &own, &mut r.outputs[1], ReduceOp::Sum), "output");
    assert!(comm.all_reduce_in_place(&streams[0], &mut foreign, ReduceOp::Sum).is_err());
    for (buffer, stream) in [(&own, &streams[0]), (&foreign, &streams[1])] {
        assert!(buffer.read(stream).unwrap().iter().all(|w| w.to_bits() == UNTOUCHED));
    }
    r.end();
}

/// Call k of `alloc` has one size on all ranks.
pub fn misuse_unequal_alloc<B: Backend>(rig: &Rig<B>) {
    let mut r = Refusals::new(rig.world(3));
    let first = r.world.comms[1].alloc::<f32>(100).unwrap();
    refused(
        r.world.comms[0].alloc::<f32>(99),
        ApiMisuse::UnequalAlloc { rank: 0, bytes: 396, first: 1, expected: 400 },
    );
    refused(
        r.world.comms[2].alloc::<u16>(96),
        ApiMisuse::UnequalAlloc { rank: 2, bytes: 192, first: 1, expected: 400 },
    );
    // With the right size they catch up.
    let others = [0, 2].map(|rank| r.world.comms[rank].alloc::<u16>(200).unwrap());
    assert!(first.is_symmetric() && others.iter().all(DeviceBuffer::is_symmetric));
    r.end();
}

/// Capture ends once, on the stream on which it began.
pub fn misuse_capture_state<B: Backend>(rig: &Rig<B>) {
    let r = Refusals::new(rig.world(2));
    let stream = &r.world.streams[0];
    let wrong_state = |found: Error, expected: &str| match found {
        Error::ApiMisuse(ApiMisuse::Capture { state, .. }) => assert_eq!(state, expected),
        other => panic!("{other:?}"),
    };
    wrong_state(B::end_capture(stream).unwrap_err(), "not capturing");
    B::begin_capture(stream).unwrap();
    assert!(B::is_capturing(stream).unwrap());
    wrong_state(B::begin_capture(stream).unwrap_err(), "capturing");
    B::end_capture(stream).unwrap();
    assert!(!B::is_capturing(stream).unwrap());
    r.end();
}
