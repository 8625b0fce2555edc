//! The barrier (P1, P2).

use std::time::Duration;

use signal_core::layout::NUM_BARRIER_DOMAINS;
use signal_core::{ApiMisuse, Backend, BarrierProbe, CallOptions, DeviceBuffer, Error};

use crate::rig::{Rig, is_scaled_down, scaled};
use crate::world::{World, options};

/// What `mismatches` holds before a probe: a block that did not finish leaves it.
const NEVER: u32 = u32::MAX;

/// Every world size, every domain, several blocks' worth of calls in a row.
pub fn barrier_every_world_and_domain<B: Backend>(rig: &Rig<B>) {
    for ranks in 1..=8 {
        let mut world = rig.world_with(ranks, |s| s.domains = true);
        for call in 0..3 * NUM_BARRIER_DOMAINS as u32 {
            let domain = call % NUM_BARRIER_DOMAINS as u32;
            world.each(|_, comm, stream| comm.with(options(|o| o.domain = domain)).barrier(stream));
        }
        world.each(|_, comm, stream| comm.barrier(stream));
        world.wait();
    }
}

/// No rank gets through before the last one has come.
pub fn barrier_waits_for_the_last_rank<B: Backend>(rig: &Rig<B>) {
    for ranks in [2, 3, 8] {
        let mut world = rig.world(ranks);
        let last = ranks / 2;
        for rank in (0..ranks).filter(|r| *r != last) {
            world.comms[rank].barrier(&world.streams[rank]).unwrap();
        }
        std::thread::sleep(Duration::from_millis(30));
        for rank in (0..ranks).filter(|r| *r != last) {
            assert!(!B::is_idle(&world.streams[rank]).unwrap(), "rank {rank} of {ranks} did not wait for rank {last}");
        }
        world.comms[last].barrier(&world.streams[last]).unwrap();
        world.wait();
    }
}

/// Worlds 1 to 8, blocks, threads, with and without random delays: no token may be missed (B01, B02, B08).
pub fn barrier_probe_worlds_and_grids<B: Backend>(rig: &Rig<B>) {
    let (worlds, grids): (&[usize], &[u32]) =
        if is_scaled_down() { (&[1, 2, 3, 8], &[1, 3]) } else { (&[1, 2, 3, 4, 5, 6, 7, 8], &[1, 3, 16]) };
    for &ranks in worlds {
        let mut world = rig.world(ranks);
        for &blocks in grids {
            for threads in [1, 2] {
                for max_delay in [0, 50] {
                    // Few threads get many rounds.
                    let rounds = scaled(1000 / (ranks as u32 * blocks * threads)).max(6);
                    let grid = options(|o| (o.blocks, o.threads) = (Some(blocks), Some(threads)));
                    probe(&mut world, grid, rounds, max_delay);
                }
            }
        }
    }
}

/// 10^5 rounds of two ranks with random delays between the barriers.
pub fn barrier_probe_long<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(2);
    let one_block = options(|o| (o.blocks, o.threads) = (Some(1), Some(1)));
    for max_delay in [0, 3, 40] {
        probe(&mut world, one_block, scaled(20_000), max_delay);
    }
    let two_blocks = options(|o| (o.blocks, o.threads) = (Some(2), Some(2)));
    probe(&mut world, two_blocks, scaled(6_000), 10);
}

/// Probes on all domains at once, each on a stream of its own: domains share no word (B09, B10).
pub fn barrier_probe_every_domain_at_once<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world_with(2, |s| s.domains = true);
    let domains = 0..NUM_BARRIER_DOMAINS as u32;
    let streams: Vec<Vec<B::Stream>> = domains.clone().map(|_| world.more_streams()).collect();
    let mut results = Vec::new();
    for rank in 0..world.ranks() {
        // Ranks start the domains in opposite orders.
        for step in domains.clone() {
            let domain = if rank == 0 { step } else { domains.end - 1 - step };
            let stream = &streams[domain as usize][rank];
            let grid = options(|o| (o.blocks, o.threads, o.domain) = (Some(2), Some(1), domain));
            let comm = &mut world.comms[rank];
            let mut mismatches = DeviceBuffer::<B, u32>::new(comm.device(), 2).unwrap();
            mismatches.fill_bytes(stream, NEVER).unwrap();
            comm.with(grid).barrier_probe(stream, &request(scaled(200), domain, 20), &mut mismatches).unwrap();
            results.push((rank, domain, mismatches));
        }
    }
    for (rank, domain, mismatches) in results {
        let stream = &streams[domain as usize][rank];
        world.comms[rank].wait(stream).unwrap();
        assert_eq!(mismatches.read(stream).unwrap(), [0; 2], "rank {rank}, domain {domain}");
    }
}

/// The widest grid that the ranks can hold at once: 1,024 blocks where there is room.
pub fn barrier_probe_widest_grid<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world(2);
    let grid = |blocks| options(|o| (o.blocks, o.threads) = (Some(blocks), Some(1)));
    let blocks = match world.comms[0].with(grid(1025)).barrier(&world.streams[0]) {
        Err(Error::ApiMisuse(ApiMisuse::Grid { blocks: 1025, budget })) => budget,
        other => panic!("1,025 blocks: {other:?}"),
    };
    if rig.devices().len() >= 2 {
        assert_eq!(blocks, 1024, "blocks of one thread that fit a device");
    }
    probe(&mut world, grid(blocks), 4, 0);
}

fn request(rounds: u32, seed: u32, max_delay: u32) -> BarrierProbe {
    let mut request = BarrierProbe::default();
    (request.rounds, request.seed, request.max_delay) = (rounds, seed, max_delay);
    request
}

/// Runs a probe on every rank.
fn probe<B: Backend>(world: &mut World<B>, grid: CallOptions, rounds: u32, max_delay: u32) {
    let blocks = grid.blocks.unwrap();
    let mut results = world.local::<u32>(blocks as usize + 1);
    let request = request(rounds, rounds ^ blocks, max_delay);
    world.each(|rank, comm, stream| {
        results[rank].fill_bytes(stream, NEVER)?;
        comm.with(grid).barrier_probe(stream, &request, &mut results[rank])
    });
    world.wait();
    for (rank, result) in results.iter().enumerate() {
        let mut found = result.read(&world.streams[rank]).unwrap();
        assert_eq!(found.pop(), Some(NEVER), "the probe wrote beyond its {blocks} blocks");
        let wrong: u64 = found.iter().map(|w| u64::from(*w)).sum();
        assert_eq!(wrong, 0, "rank {rank} of {}, {grid:?}, {request:?}: rounds with wrong tokens", world.ranks());
    }
}
