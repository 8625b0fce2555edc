//! Bad input to the creation of communicators.

use std::time::Duration;

use signal_core::error::Rendezvous;
use signal_core::{Algorithm, ApiMisuse, Backend, Communicator, Error, Settings};

use crate::cases::misuse::refused;
use crate::exchange::works;
use crate::rig::{Rig, settings};

/// A setting by name, and what is done to it.
type Change = (&'static str, fn(&mut Settings));

/// 0 and 9 ranks.
pub fn misuse_world_sizes<B: Backend>(rig: &Rig<B>) {
    for ranks in [0, 9, 100] {
        let builder = || Communicator::<B>::builder().settings(settings()).share_devices(true);
        let devices = rig.devices_for(ranks);
        refused(builder().all_local(&devices), ApiMisuse::WorldSize(ranks));
        let pairs: Vec<_> = devices.iter().map(|d| (d.clone(), settings())).collect();
        refused(builder().all_local_with(&pairs), ApiMisuse::WorldSize(ranks));
    }
}

/// Each setting that ranks have to share, by name, with both values (P4, B68).
pub fn misuse_different_settings<B: Backend>(rig: &Rig<B>) {
    let changes: [Change; 11] = [
        ("SIGNAL_EARLY_LAUNCH", |s| s.early_launch = false),
        ("SIGNAL_ORDERED", |s| s.ordered_barriers = true),
        ("SIGNAL_CHECK", |s| s.check = true),
        ("SIGNAL_SCRATCH", |s| s.scratch_bytes *= 2),
        ("SIGNAL_TIMEOUT", |s| s.timeout += Duration::from_secs(1)),
        ("SIGNAL_DOMAINS", |s| s.domains = true),
        ("SIGNAL_ALGO", |s| s.algorithm = Some(Algorithm::TwoStage)),
        ("SIGNAL_MAX_BLOCKS", |s| s.max_blocks = Some(2)),
        ("SIGNAL_BLOCKS", |s| s.blocks = Some(2)),
        ("SIGNAL_THREADS", |s| s.threads = Some(1)),
        ("SIGNAL_TRACE", |s| s.trace = Some("never-made.json".into())),
    ];
    for (changed, change) in changes {
        for odd in [1, 2] {
            let mut pairs: Vec<_> = rig.devices_for(3).into_iter().map(|d| (d, settings())).collect();
            change(&mut pairs[odd].1);
            let builder = Communicator::<B>::builder().share_devices(true);
            match builder.all_local_with(&pairs) {
                Err(Error::Rendezvous(Rendezvous::Disagreement { name, first, ours, rank, theirs })) => {
                    assert_eq!((name, first, rank), (changed, 0, odd));
                    assert_ne!(ours, theirs, "{name}");
                }
                other => panic!("{changed}: {other:?}"),
            }
        }
    }
    let pairs: Vec<_> = rig.devices_for(2).into_iter().map(|d| (d, settings())).collect();
    let comms = Communicator::<B>::builder().share_devices(true).all_local_with(&pairs).unwrap();
    works(&mut crate::world::World::new(comms));
}

/// Settings that no rank could use.
pub fn misuse_unusable_settings<B: Backend>(rig: &Rig<B>) {
    let changes: [Change; 6] = [
        ("SIGNAL_SCRATCH", |s| s.scratch_bytes = 0),
        ("SIGNAL_SCRATCH", |s| s.scratch_bytes = (64 << 10) - 1),
        ("SIGNAL_TIMEOUT", |s| s.timeout = Duration::ZERO),
        ("SIGNAL_MAX_BLOCKS", |s| s.max_blocks = Some(0)),
        ("SIGNAL_BLOCKS", |s| s.blocks = Some(0)),
        ("SIGNAL_THREADS", |s| s.threads = Some(0)),
    ];
    for (changed, change) in changes {
        let mut settings = settings();
        change(&mut settings);
        let builder = Communicator::<B>::builder().settings(settings).share_devices(true);
        match builder.all_local(&rig.devices_for(2)) {
            Err(Error::ApiMisuse(ApiMisuse::Setting { name, .. })) => assert_eq!(name, changed),
            other => panic!("{changed}: {other:?}"),
        }
    }
    // What no device could run is refused here, not at the first call.
    let too_many = |change: fn(&mut Settings)| {
        let mut settings = settings();
        change(&mut settings);
        let builder = Communicator::<B>::builder().settings(settings).share_devices(true);
        builder.all_local(&rig.devices_for(2)).unwrap_err()
    };
    let found = too_many(|s| s.blocks = Some(u32::MAX));
    assert!(matches!(found, Error::ApiMisuse(ApiMisuse::Grid { blocks: u32::MAX, .. })), "{found:?}");
    let found = too_many(|s| s.threads = Some(u32::MAX));
    assert!(matches!(found, Error::ApiMisuse(ApiMisuse::Threads { threads: u32::MAX, .. })), "{found:?}");
}

/// One device for two ranks takes an explicit word.
pub fn misuse_shared_device<B: Backend>(rig: &Rig<B>) {
    let device = &rig.devices()[0];
    let twice = [device.clone(), device.clone()];
    match Communicator::<B>::builder().settings(settings()).all_local(&twice) {
        Err(Error::ApiMisuse(ApiMisuse::SharedDevice { first: 0, second: 1, device })) => assert!(!device.is_empty()),
        other => panic!("{other:?}"),
    }
    let comms = Communicator::<B>::builder().settings(settings()).share_devices(true).all_local(&twice);
    works(&mut crate::world::World::new(comms.unwrap()));
}
