//! Memory that a user has allocated by himself: read in place where that is possible, and right in any case.

use signal_core::reference::Rng;
use signal_core::{
    Algorithm, ApiMisuse, Backend, Communicator, DeviceBuffer, DeviceFamily, Dtype, Error, Link, MemoryKind, ReduceOp,
    Registration, Result,
};

use crate::compare;
use crate::exchange::{random_inputs, sum, works};
use crate::place::below;
use crate::rig::{Rig, scaled};
use crate::world::options;

const COUNT: usize = 501;
/// Elements of a buffer, of which a part is registered.
const LEN: usize = 1200;
const REGISTERED: std::ops::Range<usize> = 100..1100;

/// Whether ranks of one process can be let at memory of `hipMalloc`, `cuMemAlloc` or the CPU's.
fn is_reached<B: Backend>(comm: &Communicator<B>) -> bool {
    comm.link() != Link::Pinned && B::describe(comm.device()).family != DeviceFamily::Amd
}

/// Registers the part of a buffer, or no bytes.
fn register<B: Backend>(
    comm: &mut Communicator<B>,
    buffer: &DeviceBuffer<B, f32>,
    is_empty: bool,
) -> Result<Registration<B>> {
    let bytes = if is_empty { 0 } else { 4 * REGISTERED.len() };
    // SAFETY: cases drop buffers behind the registration, and wait for their calls.
    unsafe { comm.register(buffer.address() + 4 * REGISTERED.start as u64, bytes) }
}

/// An all-reduce of `COUNT` elements from element `at` of one buffer to the same place of another.
fn call<B: Backend>(
    comm: &mut Communicator<B>,
    stream: &B::Stream,
    [input, output]: [&DeviceBuffer<B, f32>; 2],
    (algorithm, at): (Algorithm, usize),
) -> Result<()> {
    let [input, output] = [input, output].map(|buffer| buffer.address() + 4 * at as u64);
    let call = comm.with(options(|o| (o.algorithm, o.blocks, o.threads) = (Some(algorithm), Some(2), Some(2))));
    // SAFETY: both ranges lie in buffers that live until the case has waited, and nothing else uses them.
    unsafe { call.all_reduce_raw(stream, input, output, COUNT, Dtype::F32, ReduceOp::Sum) }
}

/// Inputs and outputs that are registered, on all ranks or on some; called, captured, and called again when they no longer are.
pub fn register_is_read_in_place<B: Backend>(rig: &Rig<B>) {
    for ranks in [1, 2, 3, 8] {
        let mut world = rig.world(ranks);
        let (mut inputs, outputs) = (world.local::<f32>(LEN), world.local::<f32>(LEN));
        let mut registrations = Vec::new();
        world.each(|rank, comm, _| {
            let is_empty = ranks > 2 && rank == 1;
            let is_reached = is_reached(comm) && !is_empty;
            for buffer in [&inputs[rank], &outputs[rank]] {
                let registration = register(comm, buffer, is_empty)?;
                assert_eq!(registration.refusal().is_none(), is_reached, "{:?}", registration.refusal());
                let start = buffer.address() + 4 * REGISTERED.start as u64;
                let in_place = [(0, 4000), (8, 3992), (4000, 0)].map(|(at, n)| comm.is_read_in_place(start + at, n));
                assert_eq!(in_place, [is_reached; 3]);
                assert!(!comm.is_read_in_place(start - 4, 8) && !comm.is_read_in_place(start, 4001));
                registrations.push(registration);
            }
            Ok(())
        });
        for round in 0..3 {
            for algorithm in Algorithm::ALL_REDUCE {
                let data = random_inputs::<f32>(ranks, 20 + round, LEN);
                let expected = sum(&data);
                // The second round is captured; in the third nothing is registered.
                let graphs: Vec<_> = (0..ranks)
                    .filter(|_| round == 1)
                    .map(|rank| {
                        let buffers = [&inputs[rank], &outputs[rank]];
                        world.capture(rank, |comm, stream| call(comm, stream, buffers, (algorithm, 103)))
                    })
                    .collect();
                for at in [100, 103, 599] {
                    world.each(|rank, comm, stream| {
                        inputs[rank].write(stream, &data[rank])?;
                        match graphs.get(rank) {
                            Some(graph) => B::replay(graph, stream),
                            None => call(comm, stream, [&inputs[rank], &outputs[rank]], (algorithm, at)),
                        }
                    });
                    world.wait();
                    let at = if round == 1 { 103 } else { at };
                    for (rank, output) in outputs.iter().enumerate() {
                        let found = &output.read(&world.streams[rank]).unwrap()[at..at + COUNT];
                        let what = format!("rank {rank} of {ranks}, {algorithm}, round {round}, at {at}");
                        compare::assert_bits(&what, found, &expected[at..at + COUNT]);
                    }
                }
            }
            if round == 1 {
                registrations.clear();
                world.each(|rank, comm, _| {
                    assert!(!comm.is_read_in_place(inputs[rank].address() + 4 * REGISTERED.start as u64, 4));
                    Ok(())
                });
            }
        }
    }
}

/// The same memory many times, with a call now and then: nothing is left behind.
pub fn register_again_and_again<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(2);
    let (mut inputs, outputs) = (world.local::<f32>(LEN), world.local::<f32>(LEN));
    let data = random_inputs::<f32>(2, 5, LEN);
    world.each(|rank, _, stream| inputs[rank].write(stream, &data[rank]));
    let expected = sum(&data);
    let mut rng = Rng::new(3);
    for round in 0..scaled(10_000) {
        let calls = below(&mut rng, 100) == 0;
        let mut registrations = Vec::new();
        world.each(|rank, comm, stream| {
            registrations.push(register(comm, &inputs[rank], false)?);
            if calls {
                call(comm, stream, [&inputs[rank], &outputs[rank]], (Algorithm::OneStage, 100))?;
            }
            Ok(())
        });
        if calls {
            world.wait();
            let found = &outputs[1].read(&world.streams[1]).unwrap()[100..100 + COUNT];
            compare::assert_bits(&format!("round {round}"), found, &expected[100..100 + COUNT]);
        }
    }
    assert!(!world.comms[0].is_read_in_place(inputs[0].address() + 4 * REGISTERED.start as u64, 4));
}

/// What cannot be registered: an error where no range is meant, and else the reason, before anything else is done.
pub fn register_refuses<B: Backend>(rig: &Rig<B>) {
    // The other rank has no error, and nobody waits for it.
    let mut world = rig.world(2);
    let comm = &mut world.comms[0];
    let asks_driver = B::describe(comm.device()).family == DeviceFamily::Nvidia && is_reached(comm);
    let mut try_range = |address, bytes| {
        // SAFETY: nothing is called with it.
        unsafe { comm.register(address, bytes) }.map(|registration| registration.refusal().map(str::to_owned))
    };
    let null = ApiMisuse::NullPointer { what: "registered memory" };
    assert_eq!(try_range(0, 4), Err(null.into()));
    assert!(matches!(try_range(u64::MAX, 2), Err(Error::ApiMisuse(ApiMisuse::TooLarge { .. }))));
    assert_eq!(try_range(0, 0), Ok(Some("it has no bytes".to_owned())));
    if asks_driver {
        let memory = B::allocate(&rig.devices()[0], 4096, MemoryKind::Device).unwrap();
        let address = B::address(&memory);
        assert_eq!(try_range(address + 4095, 1), Ok(None));
        assert!(try_range(address, 1 << 40).unwrap().unwrap().contains("beyond"));
        assert!(try_range(16, 16).unwrap().unwrap().contains("does not know"));
        let pinned = B::allocate(&rig.devices()[0], 4096, MemoryKind::HostMapped).unwrap();
        assert!(try_range(B::address(&pinned), 16).unwrap().unwrap().contains("not memory of a device"));
    }
    works(&mut world);
}
