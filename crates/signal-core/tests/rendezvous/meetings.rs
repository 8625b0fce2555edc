//! Who is taken into a group, and who is not.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use signal_core::error::{Refusal, Rendezvous as Reason};
use signal_core::{ApiMisuse, Error, Id, Rendezvous, Result, TcpRendezvous, UnixRendezvous};

use super::tools::{LONG, SECRET, assert_absent, each, name, within};

/// Patience that ends in vain, and that suffices for ranks which are there on a busy machine.
const SOON: Duration = Duration::from_millis(700);

fn reason<T: std::fmt::Debug>(result: Result<T>) -> Reason {
    match result {
        Err(Error::Rendezvous(reason)) => reason,
        other => panic!("expected an error of the rendezvous, not {other:?}"),
    }
}

#[test]
fn absent_ranks_are_named_by_all() {
    // Whoever comes first loses patience first; all have to know whom rank 0 waited for.
    let orders = [[0, 1, 4], [1, 4, 0], [4, 0, 1]];
    each(0..3, |order| {
        let name = name("absent");
        let results = each(0..3, |place| {
            std::thread::sleep(Duration::from_millis(60 * place as u64));
            within(SOON, || UnixRendezvous::new(&name, b"", orders[order][place], 5, SOON))
        });
        results.iter().for_each(|result| assert_absent(result, &[2, 3]));
    });
}

#[test]
fn an_absent_rank_0_is_named() {
    const SOON: Duration = Duration::from_millis(200);
    let name = name("no-hub");
    let results = each(1..3, |rank| within(SOON, || UnixRendezvous::new(&name, b"", rank, 3, SOON)));
    results.iter().for_each(|result| assert_absent(result, &[0]));
    // A port that nobody listens at.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    assert_absent(&within(SOON, || TcpRendezvous::new(&address, SECRET, 1, 2, SOON)), &[0]);
    // Something that takes connections and says nothing, as a rank 0 that is stopped.
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = mute.local_addr().unwrap().to_string();
    assert_absent(&within(SOON, || TcpRendezvous::new(&address, SECRET, 1, 2, SOON)), &[0]);
}

#[test]
fn a_wrong_secret_is_refused_and_disturbs_nobody() {
    let name = name("secret");
    let results = each(0..3, |thread| {
        let secret: &[u8] = if thread == 1 { b"wrong" } else { SECRET };
        // The stranger comes first.
        std::thread::sleep(Duration::from_millis(if thread == 2 { 200 } else { 0 }));
        UnixRendezvous::new(&name, secret, thread.min(1), 2, LONG).map(|mut one| one.gather(&[], LONG).unwrap())
    });
    assert_eq!(results[0], Ok(vec![vec![]; 2]));
    assert_eq!(results[2], Ok(vec![vec![]; 2]));
    let refused = Reason::Refused { rank: 1, why: Refusal::Secret };
    assert_eq!(reason(results[1].clone()), refused);
}

#[test]
fn a_rank_that_is_there_already_is_refused() {
    let name = name("duplicate");
    let results = each(0..4, |thread| {
        let rank = [0, 1, 1, 2][thread];
        // Rank 2 comes when one of the two has been taken.
        std::thread::sleep(Duration::from_millis(if rank == 2 { 200 } else { 0 }));
        UnixRendezvous::new(&name, SECRET, rank, 3, LONG).map(|mut one| one.gather(&[], LONG).unwrap())
    });
    let refused: Vec<_> = results.iter().filter(|result| result.is_err()).cloned().map(reason).collect();
    assert_eq!(refused, [Reason::Refused { rank: 1, why: Refusal::Duplicate }]);
}

#[test]
fn a_second_rank_0_is_told() {
    let name = name("hubs");
    let results = each(0..2, |_| within(SOON, || UnixRendezvous::new(&name, SECRET, 0, 2, SOON)).map(|_| ()));
    let told = results.iter().filter(|result| matches!(result, Err(Error::Rendezvous(Reason::Address { .. }))));
    // The one that held the name may have let go in time for the other.
    assert!(told.count() <= 1);
    assert!(results.iter().all(Result::is_err));
}

#[test]
fn worlds_that_differ_are_named_by_all() {
    let name = name("worlds");
    let results = each(0..3, |rank| {
        let world = if rank == 2 { 4 } else { 3 };
        // The one that differs comes last.
        std::thread::sleep(Duration::from_millis(if rank == 2 { 200 } else { 0 }));
        within(Duration::ZERO, || UnixRendezvous::new(&name, SECRET, rank, world, LONG))
    });
    let (ours, theirs) = ("3".to_owned(), "4".to_owned());
    let expected = Reason::Disagreement { name: "world size", first: 0, ours, rank: 2, theirs };
    results.into_iter().for_each(|result| assert_eq!(reason(result), expected));
}

#[test]
fn what_makes_no_sense_is_refused_before_anybody_is_waited_for() {
    let id = Id::new().unwrap();
    let unix = |rank, world| UnixRendezvous::from_id(&id, rank, world, LONG).unwrap_err();
    assert_eq!(unix(0, 0), ApiMisuse::WorldSize(0).into());
    assert_eq!(unix(0, 9), ApiMisuse::WorldSize(9).into());
    assert_eq!(unix(2, 2), ApiMisuse::Rank { rank: 2, world: 2 }.into());
    let short = TcpRendezvous::new("127.0.0.1:1", b"short", 0, 2, LONG).unwrap_err();
    assert_eq!(short, ApiMisuse::ShortSecret { bytes: 5, least: 16 }.into());
    for address in ["localhost", "127.0.0.1:port", "127.0.0.1:70000"] {
        let result = within(Duration::ZERO, || TcpRendezvous::new(address, SECRET, 0, 2, LONG));
        assert!(matches!(reason(result), Reason::Address { rank: 0, .. }), "{address}");
    }
}

/// Strangers connect, and send nothing, nonsense, or what begins like a frame; some go and some stay.
#[test]
fn strangers_disturb_nobody() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let mut strangers = Vec::new();
    for i in 0..70 {
        let mut stranger = TcpStream::connect(address).unwrap();
        match i % 5 {
            0 => {}
            1 => stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap(),
            2 => stranger.write_all(b"SGRV").unwrap(),
            // A header of another version, and one that announces 4 GiB.
            3 => stranger.write_all(b"SGRV\x07\0\x01\0\x20\0\0\0").unwrap(),
            _ => stranger.write_all(b"SGRV\x01\0\x08\0\xff\xff\xff\xff").unwrap(),
        }
        if i % 2 == 0 {
            strangers.push(stranger);
        }
    }
    let results = each(0..3, |rank| {
        let mut one = if rank == 0 {
            TcpRendezvous::lead(listener.try_clone().unwrap(), SECRET, 3, LONG).unwrap()
        } else {
            TcpRendezvous::new(&address.to_string(), SECRET, rank, 3, LONG).unwrap()
        };
        one.gather(&[rank as u8], LONG).unwrap()
    });
    results.iter().for_each(|all| assert_eq!(*all, [[0], [1], [2]]));
}

/// Where a rank expects rank 0, something else listens.
#[test]
fn another_service_at_the_address_is_told_from_rank_0() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    for answer in [&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], b"SGRV\x01\0\x07\0\0\0\0\0"] {
        let results = each(0..2, |thread| match thread {
            0 => {
                let (mut peer, _) = listener.accept().unwrap();
                peer.write_all(answer).unwrap();
                Ok(())
            }
            _ => within(Duration::ZERO, || TcpRendezvous::new(&address, SECRET, 1, 2, LONG)).map(|_| ()),
        });
        assert!(matches!(reason(results[1].clone()), Reason::Protocol { rank: 1, peer: 0, .. }), "{results:?}");
    }
    // Another version of this library.
    let results = each(0..2, |thread| match thread {
        0 => {
            let (mut peer, _) = listener.accept().unwrap();
            peer.write_all(b"SGRV\x02\0\x05\0\x08\0\0\0\x02\0\0\0\0\0\0\0").unwrap();
            Ok(())
        }
        _ => within(Duration::ZERO, || TcpRendezvous::new(&address, SECRET, 1, 2, LONG)).map(|_| ()),
    });
    let (ours, theirs) = ("2".to_owned(), "1".to_owned());
    let name = "version of the rendezvous";
    assert_eq!(reason(results[1].clone()), Reason::Disagreement { name, first: 0, ours, rank: 1, theirs });
}
