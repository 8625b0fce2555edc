//! Kernels of a user. Here they are the library's own, loaded once more as if a user had brought them: no other are in every backend's image.
//! examples/bias_gelu has one that is made with `signal/device.h`.

use std::time::Duration;

use bytemuck::Zeroable;
use signal_core::error::Image;
use signal_core::kernel::{AllReduceParams, BarrierParams};
use signal_core::layout::PACK_BYTES;
use signal_core::reference::random_inputs;
use signal_core::{
    Algorithm, ApiMisuse, Backend, CallOptions, Communicator, DeviceBuffer, Error, ReduceOp, Result, UserKernel,
    UserLaunch, reference,
};

use crate::cases::misuse::refused;
use crate::cases::split::split;
use crate::compare::assert_bits;
use crate::exchange::works;
use crate::rig::{Rig, scaled};
use crate::world::{World, options};

/// Of up to four ranks, like an all-reduce of a user's.
const SUM: &str = "signal_all_reduce_lamport_small_sum_f32";
const BARRIER: &str = "signal_barrier";

/// A rank's kernels: the sum and the barrier.
type Kernels<B> = [UserKernel<B>; 2];

fn load<B: Backend>(world: &World<B>) -> Vec<Kernels<B>> {
    let load =
        |comm: &Communicator<B>| UserKernel::load_unmarked(comm.device(), B::image(comm.device()), [SUM, BARRIER]);
    world.comms.iter().map(load).collect::<Result<_>>().unwrap()
}

fn sum<B: Backend>(
    comm: &mut Communicator<B>,
    stream: &B::Stream,
    kernel: &UserKernel<B>,
    launch: UserLaunch,
    (input, output): (&DeviceBuffer<B, f32>, &mut DeviceBuffer<B, f32>),
) -> Result<()> {
    let bytes = 4 * input.len() as u64;
    let packs = bytes.div_ceil(PACK_BYTES as u64);
    let params = |group| AllReduceParams {
        group,
        input: input.address(),
        output: output.address(),
        bytes,
        packs,
        whole_packs: bytes / PACK_BYTES as u64,
        window_packs: packs,
        ..AllReduceParams::zeroed()
    };
    let call = comm.with(CallOptions::default());
    // SAFETY: the parameters are the kernel's, and name the two buffers, which are of one length.
    unsafe { call.launch_kernel(stream, kernel, launch, params, [input.memory(), output.memory()]) }
}

fn barrier<B: Backend>(
    comm: &mut Communicator<B>,
    stream: &B::Stream,
    kernel: &UserKernel<B>,
    launch: UserLaunch,
    domain: u32,
) -> Result<()> {
    let call = comm.with(options(|o| o.domain = domain));
    // SAFETY: the parameters are the barrier's.
    unsafe { call.launch_kernel(stream, kernel, launch, |group| BarrierParams { group }, []) }
}

/// Right results between the library's own calls of the same region, eagerly and in graphs.
pub fn user_kernels_between_calls<B: Backend>(rig: &Rig<B>) {
    const COUNT: usize = 1003;
    for ranks in [1, 2, 3] {
        let mut world = rig.world(ranks);
        let kernels = load(&world);
        let (mut inputs, mut outputs) = (world.local::<f32>(COUNT), world.local::<f32>(COUNT));
        let mut own = world.local::<f32>(COUNT);
        let launch = UserLaunch::new(2, 3).lamport(4 * COUNT as u64);
        let mut round = |world: &mut World<B>, seed: u64| {
            let data = random_inputs::<f32>(ranks, seed, COUNT);
            world.each(|rank, comm, stream| {
                inputs[rank].write(stream, &data[rank])?;
                outputs[rank].fill_bytes(stream, 0x7fc0_1234)?;
                let lamport = options(|o| o.algorithm = Some(Algorithm::Lamport));
                comm.with(lamport).all_reduce(stream, &inputs[rank], &mut own[rank], ReduceOp::Sum)?;
                sum(comm, stream, &kernels[rank][0], launch, (&inputs[rank], &mut outputs[rank]))?;
                barrier(comm, stream, &kernels[rank][1], UserLaunch::new(2, 1), 0)
            });
            world.wait();
            let slices: Vec<&[f32]> = data.iter().map(Vec::as_slice).collect();
            let expected = reference::all_reduce(&slices, ReduceOp::Sum);
            for (output, stream) in outputs.iter().zip(&world.streams) {
                assert_bits("a user's kernel", &output.read(stream).unwrap(), &expected);
            }
        };
        for seed in 0..u64::from(scaled(8)) {
            round(&mut world, seed);
        }
        let (mut sources, mut targets) = (world.local::<f32>(COUNT), world.local::<f32>(COUNT));
        let data = random_inputs::<f32>(ranks, 99, COUNT);
        world.each(|rank, _, stream| sources[rank].write(stream, &data[rank]));
        world.wait();
        let graphs: Vec<B::Graph> = (0..ranks)
            .map(|rank| {
                world.capture(rank, |comm, stream| {
                    let buffers = (&sources[rank], &mut targets[rank]);
                    sum(comm, stream, &kernels[rank][0], launch, buffers)
                })
            })
            .collect();
        sources.clear(); // the graphs keep them
        for _ in 0..4 {
            world.each(|rank, _, stream| B::replay(&graphs[rank], stream));
        }
        world.wait();
        let slices: Vec<&[f32]> = data.iter().map(Vec::as_slice).collect();
        for (target, stream) in targets.iter().zip(&world.streams) {
            assert_bits("in a graph", &target.read(stream).unwrap(), &reference::all_reduce(&slices, ReduceOp::Sum));
        }
        works(&mut world);
    }
}

/// What is wrong is said before anything is launched.
pub fn user_kernels_refused<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world_with(2, |s| s.domains = true);
    let kernels = load(&world);
    let device = world.comms[0].device().clone();
    let missing = UserKernel::<B>::load_unmarked(&device, B::image(&device), [SUM, "no_such_kernel"]).unwrap_err();
    assert!(matches!(&missing, Error::Image(Image::Kernel { kernel, .. }) if kernel == "no_such_kernel"), "{missing}");
    // The library's own image is none of `signal/device.h`.
    let unmarked = UserKernel::<B>::load(&device, B::image(&device), [SUM]).unwrap_err();
    assert!(matches!(&unmarked, Error::Image(Image::Abi { .. })), "{unmarked}");

    let (input, mut output) = (world.local::<f32>(8), world.local::<f32>(8));
    let most = world.comms[0].most_blocks(&kernels[0][1], 32);
    let (comm, stream) = (&mut world.comms[0], &world.streams[0]);
    let of = UserLaunch::new;
    for blocks in [0, most + 1, 1025, u32::MAX] {
        let found = barrier(comm, stream, &kernels[0][1], of(blocks, 32), 0);
        let is_grid = matches!(
            &found,
            Err(Error::ApiMisuse(ApiMisuse::Grid { budget, .. } | ApiMisuse::KernelGrid { budget, .. }))
                if *budget >= most && *budget <= 1024
        );
        assert!(is_grid, "{blocks}: {found:?}");
    }
    for threads in [0, u32::MAX] {
        let found = barrier(comm, stream, &kernels[0][1], of(1, threads), 0);
        assert!(matches!(&found, Err(Error::ApiMisuse(ApiMisuse::Threads { .. }))), "{threads}: {found:?}");
    }
    refused(barrier(comm, stream, &kernels[0][1], of(1, 1), 8), ApiMisuse::Domain(8));
    let region = of(1, 1).lamport(32);
    refused(barrier(comm, stream, &kernels[0][1], region, 3), ApiMisuse::LamportDomain(3));
    let (bytes, limit) = ((4 << 20) + 1, 4 << 20);
    let too_large = ApiMisuse::LamportTooLarge { bytes, limit };
    refused(sum(comm, stream, &kernels[0][0], of(1, 1).lamport(bytes), (&input[0], &mut output[0])), too_large);
    refused(
        sum(comm, stream, &kernels[0][0], of(1, 1).lamport(0), (&input[0], &mut output[0])),
        ApiMisuse::LamportOfNothing,
    );
    if rig.devices().len() > 1 {
        let wrong = |found: Result<()>, what: &str| {
            let is_wrong =
                matches!(&found, Err(Error::ApiMisuse(ApiMisuse::WrongDevice { what: w, .. })) if *w == what);
            assert!(is_wrong, "{found:?}");
        };
        wrong(sum(comm, stream, &kernels[1][0], region, (&input[0], &mut output[0])), "kernel");
        wrong(sum(comm, &world.streams[1], &kernels[0][0], region, (&input[0], &mut output[0])), "stream");
        wrong(sum(comm, stream, &kernels[0][0], region, (&input[1], &mut output[0])), "buffer");
    }
    // A domain of its own is one.
    world.each(|rank, comm, stream| barrier(comm, stream, &kernels[rank][1], of(1, 1), 3));
    world.wait();
    works(&mut world);

    // The grid that is taken fits, and what a split gives away is not there any more.
    let cut = rig.is_host().then_some(32);
    let mut world = rig.world_with(2, |s| s.max_blocks = cut);
    let kernels = load(&world);
    let most = |world: &World<B>| world.comms[0].most_blocks(&kernels[0][1], 32);
    let before = most(&world);
    let children = split(&mut world, &[(Some(0), 0), (Some(0), 0)]);
    assert!(most(&world) + most(&children[0]) <= before && most(&children[0]) > 0);
    let widest = of(most(&world), 32);
    world.each(|rank, comm, stream| barrier(comm, stream, &kernels[rank][1], widest, 0));
    world.wait();
}

/// A rank that does not come is named, calls are refused from then on, and all recover.
pub fn user_kernels_name_the_missing_rank<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world_with(3, |s| s.timeout = Duration::from_millis(600));
    let kernels = load(&world);
    let (input, mut output) = (world.local::<f32>(500), world.local::<f32>(500));
    let launch = UserLaunch::new(2, 3).lamport(2000);
    for rank in 1..3 {
        let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
        sum(comm, stream, &kernels[rank][0], launch, (&input[rank], &mut output[rank])).unwrap();
    }
    for rank in 1..3 {
        let (comm, stream) = (&mut world.comms[rank], &world.streams[rank]);
        match comm.wait(stream) {
            Err(Error::Timeout(found)) => assert_eq!(found.missing, [0]),
            other => panic!("{other:?}"),
        }
        let found = sum(comm, stream, &kernels[rank][0], launch, (&input[rank], &mut output[rank]));
        assert!(matches!(&found, Err(Error::Poisoned { .. })), "{found:?}");
    }
    Communicator::recover_all(&mut world.comms).unwrap();
    world.each(|rank, comm, stream| sum(comm, stream, &kernels[rank][0], launch, (&input[rank], &mut output[rank])));
    world.wait();
    works(&mut world);
}

/// In checked mode ranks that differ in the kernel, its grid or what is said of the call are told so.
pub fn user_kernels_are_checked<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world_with(2, |s| s.check = true);
    let kernels = load(&world);
    let usual = UserLaunch::new(2, 32).describe(77);
    let others = [(0, usual), (1, UserLaunch::new(1, 32).describe(77)), (1, usual.describe(78))];
    for (kernel, other) in others {
        // What all launch goes through.
        world.each(|rank, comm, stream| barrier(comm, stream, &kernels[rank][1], usual, 0));
        world.wait();
        let (input, mut output) = (world.local::<f32>(8), world.local::<f32>(8));
        world.each(|rank, comm, stream| match (rank, kernel) {
            (0, _) => barrier(comm, stream, &kernels[rank][1], usual, 0),
            (_, 0) => sum(comm, stream, &kernels[rank][0], other, (&input[rank], &mut output[rank])),
            _ => barrier(comm, stream, &kernels[rank][1], other, 0),
        });
        for rank in 0..2 {
            match world.comms[rank].wait(&world.streams[rank]) {
                Err(Error::RankMismatch { ours, theirs, .. }) => {
                    let both = if rank == 0 { [&ours, &theirs] } else { [&theirs, &ours] };
                    assert!(both.iter().all(|text| text.starts_with("a user's kernel (name ")) && ours != theirs);
                    assert!(both[0].ends_with("description 0x4d) on 2 x 32 threads"), "{both:?}");
                }
                other => panic!("{other:?}"),
            }
        }
        Communicator::recover_all(&mut world.comms).unwrap();
    }
    works(&mut world);
}
