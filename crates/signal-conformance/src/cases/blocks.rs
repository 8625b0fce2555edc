//! How many blocks calls may have (P4).

use signal_core::{ApiMisuse, Backend, Collective, Communicator, DeviceBuffer, Dtype, Error, ReduceOp};

use crate::cases::misuse::refused;
use crate::exchange::Exchange;
use crate::place::Place;
use crate::rig::{Rig, settings};
use crate::world::{World, options};

const COUNT: usize = 300;

/// The most blocks of `threads` threads that a call of each rank may have.
pub(crate) fn budget<B: Backend>(world: &mut World<B>, threads: u32) -> u32 {
    let ranks = world.comms.iter_mut().zip(&world.streams);
    let all: Vec<u32> = ranks.map(|(comm, stream)| budget_of(comm, stream, threads)).collect();
    assert!(all.iter().all(|budget| *budget == all[0]), "{all:?}");
    all[0]
}

/// The same of one rank, found by asking for more.
pub(crate) fn budget_of<B: Backend>(comm: &mut Communicator<B>, stream: &B::Stream, threads: u32) -> u32 {
    let grid = options(|o| (o.blocks, o.threads) = (Some(u32::MAX), Some(threads)));
    match comm.with(grid).barrier(stream) {
        Err(Error::ApiMisuse(ApiMisuse::Grid { blocks: u32::MAX, budget })) => budget,
        other => panic!("{other:?}"),
    }
}

/// A budget of blocks: what is proposed is cut down to it, and what is asked for beyond it is refused.
pub fn max_blocks_is_a_budget<B: Backend>(rig: &Rig<B>) {
    let large = |comm: &Communicator<B>| comm.plan(1 << 22, Dtype::F32, ReduceOp::Sum).blocks;
    let exchange = |comm: &Communicator<B>| comm.plan_of(Collective::AllGather, 1 << 24).blocks;
    let free = rig.world(2);
    assert!(large(&free.comms[0]) > 1 && exchange(&free.comms[0]) > 1);
    for most in [1, 2] {
        let devices = rig.devices_for(2);
        let builder = Communicator::<B>::builder().share_devices(true).max_blocks(most);
        let built = builder.clone().settings(settings()).all_local(&devices).unwrap();
        let pairs: Vec<_> = devices.iter().map(|device| (device.clone(), settings())).collect();
        let with = builder.all_local_with(&pairs).unwrap();
        let set = rig.world_with(2, |s| s.max_blocks = Some(most));
        for mut world in [World::new(built), World::new(with), set] {
            assert!(world.comms.iter().all(|comm| large(comm) == most && exchange(comm) == most));
            assert_eq!(world.comms[0].settings().max_blocks, Some(most));
            for threads in [1, 32] {
                assert_eq!(budget(&mut world, threads), most);
            }
            let too_many = options(|o| (o.blocks, o.threads) = (Some(most + 1), Some(1)));
            let refusal = ApiMisuse::Grid { blocks: most + 1, budget: most };
            let (comm, stream) = (&mut world.comms[0], &world.streams[0]);
            let mut buffer = DeviceBuffer::<B, f32>::new(comm.device(), COUNT).unwrap();
            refused(comm.with(too_many).barrier(stream), refusal.clone());
            refused(comm.with(too_many).all_reduce_in_place(stream, &mut buffer, ReduceOp::Sum), refusal.clone());
            refused(comm.with(too_many).broadcast(stream, &mut buffer, 0), refusal);
            let call = options(|o| (o.blocks, o.threads) = (Some(most), Some(1)));
            Exchange::<B, f32>::random(&mut world, 5000, 1, call, &[Place::symmetric(); 2]).run(&mut world, 0);
            Exchange::<B, f32>::random(&mut world, 60_000, 1, options(|_| ()), &[Place::local(); 2]).run(&mut world, 0);
        }
    }
    let too_many = Communicator::<B>::builder().settings({
        let mut settings = settings();
        (settings.max_blocks, settings.blocks) = (Some(2), Some(3));
        settings
    });
    let found = too_many.share_devices(true).all_local(&rig.devices_for(2)).map(drop);
    refused(found, ApiMisuse::Grid { blocks: 3, budget: 2 });
}

/// Calls on all domains fit together.
pub fn max_blocks_of_domains<B: Backend>(rig: &Rig<B>) {
    let mut closed = rig.world(2);
    let mut open = rig.world_with(2, |s| s.domains = true);
    for threads in [1, 32, 128] {
        let (whole, part) = (budget(&mut closed, threads), budget(&mut open, threads));
        // On GPUs more may fit than a grid may have.
        let most = if rig.is_host() { whole / 8 } else { whole };
        assert!((1..=most).contains(&part), "{part} of {whole} blocks of {threads} threads");
        let (comm, stream) = (&mut open.comms[0], &open.streams[0]);
        for domain in 0..8 {
            let mut handle = comm.domain(domain).unwrap();
            let grid = options(|o| (o.blocks, o.threads) = (Some(part + 1), Some(threads)));
            refused(handle.with(grid).barrier(stream), ApiMisuse::Grid { blocks: part + 1, budget: part });
        }
    }
    // As wide as may be on every domain, of which none can end before the others have begun.
    let cut = rig.is_host().then_some(16); // a block is a thread there
    let mut world = rig.world_with(2, |s| (s.domains, s.max_blocks) = (true, cut));
    let streams: Vec<_> = (0..8).map(|_| world.more_streams()).collect();
    let blocks = budget(&mut world, 1);
    for turn in [0, 1] {
        for (domain, streams) in streams.iter().enumerate() {
            let rank = (domain + turn) % 2;
            let mut handle = world.comms[rank].domain(domain as u32).unwrap();
            let grid = options(|o| (o.blocks, o.threads) = (Some(blocks), Some(1)));
            handle.with(grid).barrier(&streams[rank]).unwrap();
        }
    }
    for (rank, comm) in world.comms.iter().enumerate() {
        streams.iter().for_each(|streams| comm.wait(&streams[rank]).unwrap());
    }
}
