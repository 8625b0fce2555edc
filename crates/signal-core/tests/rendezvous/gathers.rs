//! Gathers that go well.

use std::time::Duration;

use signal_core::{ApiMisuse, Error, Id, Rendezvous, UnixRendezvous};

use super::tools::{LONG, each, name, run, tcp, unix};

/// What `rank` sends in its gather number `turn`: of lengths that differ from rank to rank and from turn to turn.
fn message(rank: usize, turn: usize) -> Vec<u8> {
    (0..(rank * 37 + turn * 11) % 300).map(|i| (i + rank * 3 + turn * 5) as u8).collect()
}

fn gathers(group: Vec<Box<dyn Rendezvous>>, turns: usize) {
    let world = group.len();
    let ranks = run(group, |mut one| {
        assert_eq!(one.world_size(), world);
        for turn in 0..turns {
            let all = one.gather(&message(one.rank(), turn), LONG).unwrap();
            let expected: Vec<_> = (0..world).map(|rank| message(rank, turn)).collect();
            assert_eq!(all, expected, "turn {turn} of rank {}", one.rank());
        }
        one.rank()
    });
    assert_eq!(ranks, (0..world).collect::<Vec<_>>());
}

#[test]
fn every_world_gathers() {
    for world in 1..=8 {
        gathers(unix(world), 40);
    }
    for world in [1, 2, 5, 8] {
        gathers(tcp(world), 40);
    }
}

#[test]
fn a_thousand_gathers() {
    gathers(unix(4), 1000);
    gathers(tcp(3), 1000);
}

#[test]
fn messages_are_empty_or_as_large_as_allowed() {
    const LIMIT: usize = 1 << 20;
    for group in [unix(4), tcp(4)] {
        run(group, |mut one| {
            let rank = one.rank();
            assert_eq!(one.gather(&[], LONG).unwrap(), vec![Vec::new(); 4]);
            for turn in 0..2 {
                let own = vec![rank as u8 + turn; LIMIT];
                let all = one.gather(&own, LONG).unwrap();
                assert!(all.iter().enumerate().all(|(rank, part)| *part == vec![rank as u8 + turn; LIMIT]));
            }
            let large = one.gather(&vec![0; LIMIT + 1], LONG);
            let expected = ApiMisuse::TooMany { what: "bytes in a gather", given: LIMIT + 1, limit: LIMIT };
            assert_eq!(large, Err(Error::ApiMisuse(expected)));
            // Nothing was sent, so the group goes on; and only one rank sends much.
            let own = vec![7; if rank == 2 { LIMIT } else { 0 }];
            let lengths: Vec<_> = one.gather(&own, LONG).unwrap().iter().map(Vec::len).collect();
            assert_eq!(lengths, [0, 0, LIMIT, 0]);
        });
    }
}

#[test]
fn a_late_rank_is_waited_for() {
    let name = name("late");
    each(0..3, |rank| {
        std::thread::sleep(Duration::from_millis(150 * rank as u64));
        let mut one = UnixRendezvous::new(&name, b"", rank, 3, LONG).unwrap();
        std::thread::sleep(Duration::from_millis(150 * (2 - rank) as u64));
        assert_eq!(one.gather(&[rank as u8], LONG).unwrap(), [[0], [1], [2]]);
    });
    // Rank 0 last.
    each(0..3, |rank| {
        std::thread::sleep(Duration::from_millis(if rank == 0 { 300 } else { 0 }));
        UnixRendezvous::new(&name, b"", rank, 3, LONG).unwrap();
    });
}

#[test]
fn groups_at_once_do_not_meet() {
    let ids: Vec<_> = (0..3).map(|_| Id::new().unwrap()).collect();
    each(0..6, |thread| {
        let (group, rank) = (thread / 2, thread % 2);
        let mut one = UnixRendezvous::from_id(&ids[group], rank, 2, LONG).unwrap();
        for _ in 0..50 {
            let all = one.gather(&[group as u8, rank as u8], LONG).unwrap();
            assert_eq!(all, [[group as u8, 0], [group as u8, 1]]);
        }
    });
}

/// The next group forms at once under the name of the last, while that one's ranks still gather.
#[test]
fn groups_may_follow_each_other_at_one_name() {
    let name = name("again");
    each(0..4, |rank| {
        let mut groups = Vec::new();
        for turn in 0..20_u8 {
            groups.push((turn, UnixRendezvous::new(&name, b"", rank, 4, LONG).unwrap()));
        }
        for (turn, group) in &mut groups {
            assert_eq!(group.gather(&[*turn], LONG).unwrap(), vec![vec![*turn]; 4]);
        }
    });
}
