//! Ranks that leave or do not come, after the group has formed.

use std::time::Duration;

use signal_core::error::Rendezvous as Reason;
use signal_core::{Error, Rendezvous};

use super::tools::{LONG, assert_absent, assert_lost, run, tcp, unix, within};

const SOON: Duration = Duration::from_millis(200);

fn groups(world: usize) -> [Vec<Box<dyn Rendezvous>>; 2] {
    [unix(world), tcp(world)]
}

#[test]
fn a_rank_that_does_not_come_is_named_by_all() {
    for absent in [0, 2] {
        for group in groups(4) {
            let results = run(group, |mut one| {
                one.gather(b"all are here", LONG).unwrap();
                if one.rank() == absent {
                    // Still alive.
                    std::thread::sleep(SOON * 2);
                    return None;
                }
                // Their patience ends at different times.
                std::thread::sleep(Duration::from_millis(30 * one.rank() as u64));
                let first = within(SOON, || one.gather(b"", SOON));
                let second = within(Duration::ZERO, || one.gather(b"", LONG));
                assert_eq!(first, second, "the group has ended");
                Some(first)
            });
            results.iter().flatten().for_each(|result| assert_absent(result, &[absent]));
        }
    }
}

/// Rank 0 has more patience than the others: it is told by the first that loses it.
#[test]
fn the_shortest_patience_decides() {
    let results = run(unix(3), |mut one| {
        let patience = if one.rank() == 1 { SOON } else { LONG };
        if one.rank() == 2 {
            std::thread::sleep(SOON * 3);
        }
        within(SOON * 3, || one.gather(b"", patience))
    });
    results.iter().for_each(|result| assert_absent(result, &[2]));
}

#[test]
fn a_rank_that_leaves_is_named_by_all_at_once() {
    for leaver in [0, 1, 3] {
        for group in groups(4) {
            let results = run(group, |mut one| {
                one.gather(b"all are here", LONG).unwrap();
                if one.rank() == leaver {
                    // The others are in their gather by then.
                    std::thread::sleep(Duration::from_millis(100));
                    return None;
                }
                let first = within(Duration::from_millis(100), || one.gather(b"", LONG));
                assert_eq!(first, one.gather(b"", LONG), "the group has ended");
                Some(first)
            });
            results.iter().flatten().for_each(|result| assert_lost(result, &[leaver]));
        }
    }
}

/// A rank that was ready and then left is gone, even if others are late as well.
#[test]
fn a_rank_that_leaves_while_others_are_late_is_named() {
    let group = unix(3);
    let results = run(group, |mut one| match one.rank() {
        1 => {
            let result = one.gather(b"", SOON);
            assert_absent(&result, &[2]);
            None
        }
        2 => {
            std::thread::sleep(SOON * 2);
            Some(within(Duration::ZERO, || one.gather(b"", LONG)))
        }
        _ => Some(within(SOON, || one.gather(b"", LONG))),
    });
    // It said why before it went.
    results.iter().flatten().for_each(|result| assert_absent(result, &[2]));
}

#[test]
fn all_who_left_are_named() {
    let results = run(unix(5), |mut one| {
        let rank = one.rank();
        if rank == 1 || rank == 4 {
            return None;
        }
        std::thread::sleep(Duration::from_millis(200));
        Some(within(Duration::ZERO, || one.gather(b"", LONG)))
    });
    results.iter().flatten().for_each(|result| assert_lost(result, &[1, 4]));
}

/// A rank that ends its group says why, and is not itself taken for the cause.
#[test]
fn who_ends_a_group_says_why() {
    for ender in [0, 2] {
        for group in groups(4) {
            let reason = Error::from(Reason::Lost { rank: ender, missing: vec![1] });
            let results = run(group, |mut one| {
                let rank = one.rank();
                if rank == ender {
                    one.end(&reason);
                    assert_eq!(one.gather(b"", LONG), Err(reason.clone()));
                    return None;
                }
                Some(within(Duration::ZERO, || one.gather(b"", LONG))).filter(|_| rank != 1)
            });
            results.iter().flatten().for_each(|result| assert_lost(result, &[1]));
        }
    }
    // For a reason of its own.
    let results = run(unix(3), |mut one| {
        if one.rank() == 1 {
            // One that names nobody there is.
            one.end(&Error::from(Reason::Lost { rank: 1, missing: vec![7] }));
            // Not because it leaves.
            std::thread::sleep(SOON);
            return None;
        }
        Some(within(Duration::ZERO, || one.gather(b"", LONG)))
    });
    results.iter().flatten().for_each(|result| assert_lost(result, &[1]));
}
