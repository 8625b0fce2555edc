//! Reach, and what all ranks have to agree on.

use signal_core::{Backend, Dtype, Link, MemoryKind, ReduceOp, prove_peer};

use crate::rig::{Rig, WORLDS};

/// Data gets from each device to each other one and back, in both directions (B37, B64), in memory of every kind that peers see.
pub fn prove_peer_between_all_pairs<B: Backend>(rig: &Rig<B>) {
    // Access is given to what is there already, too.
    let shared = |device| B::allocate(device, 4096, MemoryKind::Shared).unwrap();
    let _there: Vec<B::Buffer> = rig.devices().iter().map(shared).collect();
    for (i, from) in rig.devices().iter().enumerate() {
        for (j, to) in rig.devices().iter().enumerate() {
            let access = B::peer_access(from, to).unwrap();
            assert_eq!(access.link == Link::SameDevice, i == j, "{access:?}");
            assert_eq!(access.refusal, None);
            B::enable_peer(from, to).unwrap();
            for kind in [MemoryKind::PeerVisible, MemoryKind::Shared] {
                prove_peer::<B>(from, to, kind).unwrap();
            }
        }
    }
}

/// The plan depends on count and element type alone (P4).
pub fn plan_is_the_same_on_every_rank<B: Backend>(rig: &Rig<B>) {
    for ranks in WORLDS {
        let world = rig.world(ranks);
        for dtype in Dtype::ALL {
            for count in [0, 1, 8, 1000, 32 << 10, 1 << 20, 64 << 20] {
                let first = world.comms[0].plan(count, dtype, ReduceOp::Sum);
                assert!((1..=1024).contains(&first.blocks) && first.threads >= 1, "{first:?}");
                for comm in &world.comms {
                    assert_eq!(
                        comm.plan(count, dtype, ReduceOp::Sum),
                        first,
                        "rank {}, {count} x {dtype}",
                        comm.rank()
                    );
                }
            }
        }
    }
}
