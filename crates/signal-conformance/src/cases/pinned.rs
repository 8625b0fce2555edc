//! Ranks whose devices do not reach each other, or are not to: what they share lies in the host's memory, and everything works as elsewhere.

use signal_core::error::ApiMisuse;
use signal_core::reference::Rng;
use signal_core::{Backend, Error, Link};

use crate::cases::program::from_one_thread;
use crate::cases::split::split;
use crate::exchange::works;
use crate::rig::{Rig, scaled};
use crate::world::World;

fn pinned<B: Backend>(rig: &Rig<B>, ranks: usize) -> World<B> {
    let world = rig.world_with(ranks, |s| (s.peer_to_peer, s.scratch_bytes) = (Some(false), 128 << 10));
    assert!(world.comms.iter().all(|comm| comm.link() == Link::Pinned));
    world
}

/// Calls of every kind, in memory of every kind.
pub fn pinned_random_programs<B: Backend>(rig: &Rig<B>) {
    for (ranks, calls) in [(2, 150), (3, 80), (8, 30)] {
        let mut rng = Rng::new(70 + ranks as u64);
        from_one_thread(&mut pinned(rig, ranks), &mut rng, scaled(calls));
    }
}

/// Symmetric memory is allocated as elsewhere: all ranks' parts are of one size. Groups of a split meet in the same way.
pub fn pinned_alloc_and_split<B: Backend>(rig: &Rig<B>) {
    let mut world = pinned(rig, 4);
    let mut halves = split(&mut world, &[0, 1, 2, 3].map(|rank| (Some(rank / 2), 0)));
    assert!(halves.iter().flat_map(|half| &half.comms).all(|comm| comm.link() == Link::Pinned));
    halves.iter_mut().for_each(works);
    works(&mut world);
    let buffer = world.comms[0].alloc::<f32>(100).unwrap();
    let found = world.comms[1].alloc::<f32>(101).map(drop);
    let expected = ApiMisuse::UnequalAlloc { rank: 1, bytes: 404, first: 0, expected: 400 };
    assert_eq!(found, Err(Error::ApiMisuse(expected)));
    drop(buffer);
}

/// One rank has nobody to meet.
pub fn pinned_needs_a_peer<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world_with(1, |s| s.peer_to_peer = Some(false));
    assert_eq!(world.comms[0].link(), Link::SameDevice);
    works(&mut world);
}
