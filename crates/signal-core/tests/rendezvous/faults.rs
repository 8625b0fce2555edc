//! Ranks that leave or do not come, after the group has formed.

use std::sync::Barrier;
use std::time::Duration;

use signal_core::error::Rendezvous as Reason;
use signal_core::{Error, Rendezvous};

use super::tools::{LONG, assert_absent, assert_lost, each, run, tcp, unix, within};

/// Patience that ends in vain, and that suffices for ranks which are there on a busy machine.
const SOON: Duration = Duration::from_millis(600);

fn groups(world: usize) -> [Vec<Box<dyn Rendezvous>>; 2] {
    [unix(world), tcp(world)]
}

#[test]
fn a_rank_that_does_not_come_is_named_by_all() {
    each(0..4, |case| {
        let absent = [0, 2][case / 2];
        let group = if case % 2 == 0 { unix(4) } else { tcp(4) };
        let results = run(group, |mut one| {
            one.gather(b"all are here", LONG).unwrap();
            if one.rank() == absent {
                // Alive until all have given up.
                return Err(one);
            }
            // Their patience ends at different times.
            std::thread::sleep(Duration::from_millis(30 * one.rank() as u64));
            let first = within(SOON, || one.gather(b"", SOON));
            let second = within(Duration::ZERO, || one.gather(b"", LONG));
            assert_eq!(first, second, "the group has ended");
            Ok(first)
        });
        results.iter().flatten().for_each(|result| assert_absent(result, &[absent]));
    });
}

/// The others have more patience: they are told by the first that loses it, also who comes after that.
#[test]
fn the_shortest_patience_decides() {
    let given_up = Barrier::new(2);
    let results = run(unix(3), |mut one| match one.rank() {
        1 => {
            let result = within(SOON, || one.gather(b"", SOON));
            given_up.wait();
            result
        }
        2 => {
            given_up.wait();
            within(Duration::ZERO, || one.gather(b"", LONG))
        }
        _ => within(SOON, || one.gather(b"", LONG)),
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
            // It is not named because it leaves.
            return Err(one);
        }
        Ok(within(Duration::ZERO, || one.gather(b"", LONG)))
    });
    results.iter().flatten().for_each(|result| assert_lost(result, &[1]));
}
