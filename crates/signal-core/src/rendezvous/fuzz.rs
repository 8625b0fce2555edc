//! Every byte that a peer may send: frames that are random, cut short, changed in places or out of turn, into the parser,
//! into rank 0 and into another rank, before and after they trust the sender. Nothing panics, nothing lasts longer than
//! patience allows, memory stays within one frame a peer, and strangers disturb nobody.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use rustix::net::{
    AddressFamily, SendFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, send, shutdown,
    socketpair,
};

use crate::error::{Error, Rendezvous as Reason};

use super::conn::{Conn, Deadline};
use super::join::{STRANGERS, follow, lead};
use super::offer::{Offer, Parcel};
use super::secret::{Secret, hex, random};
use super::star::{Beat, Links, Star};
use super::unix::unix_socket;
use super::wire::{Frame, MAX_FRAME, MAX_GREETING, MAX_MESSAGE, Malformed, Ranks, Refused, Verdict};

/// The patience of ranks that a peer keeps waiting.
const PATIENCE: Duration = Duration::from_millis(15);
/// How much later an end may be on a busy machine.
const SLACK: Duration = Duration::from_secs(3);
const LONG: Duration = Duration::from_secs(60);

/// Cases, times SIGNAL_TEST_SCALE. The same ones each time, so that what fails is what has changed; a longer run tries
/// others.
fn run<S: Strategy>(cases: u32, strategy: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>) {
    let scale: f64 = std::env::var("SIGNAL_TEST_SCALE").map_or(1.0, |text| text.parse().unwrap());
    let cases = (f64::from(cases) * scale).max(1.0) as u32;
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 200, ..Config::default() };
    let mut runner = match scale > 1.0 {
        true => TestRunner::new(config),
        false => TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)),
    };
    runner.run(&strategy, test).unwrap_or_else(|failure| panic!("{failure}"));
}

fn ranks() -> impl Strategy<Value = Ranks> {
    any::<u8>().prop_map(|bits| Ranks::of((0..8).filter(|rank| bits >> rank & 1 == 1)))
}

fn verdict() -> impl Strategy<Value = Verdict> {
    prop_oneof![
        (ranks(), any::<u32>())
            .prop_map(|(missing, after)| Verdict::Absent { missing, after: Duration::from_millis(after.into()) }),
        ranks().prop_map(|missing| Verdict::Lost { missing }),
        any::<(u32, u32)>().prop_map(|(rank, world)| Verdict::World { rank, world }),
    ]
}

fn frame() -> impl Strategy<Value = Frame> {
    let bytes = || vec(any::<u8>(), 0..100);
    // Often such as are expected, so that the cases get further than the first check.
    let sequence = || prop_oneof![3 => Just(1_u64), 1 => any::<u64>()];
    let rank = || prop_oneof![3 => 0..3_u32, 1 => any::<u32>()];
    prop_oneof![
        any::<[u8; 32]>().prop_map(|nonce| Frame::Hello { nonce }),
        any::<[u8; 32]>().prop_map(|nonce| Frame::Challenge { nonce }),
        (rank(), rank(), any::<[u8; 32]>()).prop_map(|(rank, world, mac)| Frame::Proof { rank, world, mac }),
        any::<[u8; 32]>().prop_map(|mac| Frame::Welcome { mac }),
        prop_oneof![
            Just(Refused::Secret),
            Just(Refused::Version),
            any::<u32>().prop_map(Refused::World),
            Just(Refused::Duplicate),
            Just(Refused::Rank)
        ]
        .prop_map(Frame::Refuse),
        ranks().prop_map(|present| Frame::Waiting { present }),
        Just(Frame::Start),
        (sequence(), bytes()).prop_map(|(sequence, bytes)| Frame::Give { sequence, bytes }),
        (sequence(), rank(), bytes()).prop_map(|(sequence, rank, bytes)| Frame::Part { sequence, rank, bytes }),
        verdict().prop_map(Frame::Fail),
    ]
}

/// What a peer may send.
fn attack() -> impl Strategy<Value = Vec<u8>> {
    let valid = || frame().prop_map(|frame| frame.encode());
    let changed = (valid(), vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)).prop_map(|(mut bytes, changes)| {
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        bytes
    });
    let cut = (valid(), any::<prop::sample::Index>()).prop_map(|(mut bytes, at)| {
        bytes.truncate(at.index(bytes.len()));
        bytes
    });
    // A header that is right and announces as much as it may, or more.
    let large = (1..11_u16, prop_oneof![Just(MAX_MESSAGE as u32), any::<u32>()]).prop_map(|(kind, length)| {
        let mut bytes = Frame::Start.encode();
        bytes[6..8].copy_from_slice(&kind.to_le_bytes());
        bytes[8..12].copy_from_slice(&length.to_le_bytes());
        bytes
    });
    let piece = prop_oneof![4 => valid(), 2 => changed, 1 => cut, 1 => large, 1 => vec(any::<u8>(), 0..200)];
    vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

/// Begins as it should, to get further.
fn attack_after(openings: &'static [&'static [(u32, bool)]]) -> impl Strategy<Value = Vec<u8>> {
    let parts = |opening: &[(u32, bool)]| {
        let part = |(rank, given): &(u32, bool)| {
            let (sequence, bytes) = (1, vec![9; 10]);
            match given {
                true => Frame::Give { sequence, bytes },
                false => Frame::Part { sequence, rank: *rank, bytes },
            }
            .encode()
        };
        opening.iter().flat_map(part).collect::<Vec<u8>>()
    };
    let rest = prop_oneof![Just(Vec::new()), attack()];
    (prop::sample::select(openings), rest).prop_map(move |(opening, rest)| [parts(opening), rest].concat())
}

/// Sends all of `bytes` to a peer that may go, or that may not read.
fn throw(fd: &OwnedFd, bytes: &[u8]) {
    let _ = send(fd, bytes, SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
}

/// The next frame of a rank, unless it goes.
fn await_frame(conn: &mut Conn) -> Option<Frame> {
    loop {
        match conn.next(MAX_FRAME) {
            Ok(None) if conn.has_ended() => return None,
            Ok(None) => std::thread::sleep(Duration::from_micros(50)),
            Ok(frame) => return frame,
            Err(why) => panic!("a rank sent {why}"),
        }
    }
}

/// Two ends that are connected.
fn pair() -> (OwnedFd, OwnedFd) {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap()
}

/// A socket that listens at a name of its own.
fn listener(kind: SocketType) -> (OwnedFd, SocketAddrUnix) {
    let name = format!("signal-comm/fuzz/{}", hex(&random::<16>().unwrap()));
    let address = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let socket = unix_socket(kind).unwrap();
    bind(&socket, &address).unwrap();
    listen(&socket, 16).unwrap();
    (socket, address)
}

fn reach(address: &SocketAddrUnix) -> crate::Result<Option<OwnedFd>> {
    let socket = unix_socket(SocketType::STREAM)?;
    Ok(connect(&socket, address).is_ok().then_some(socket))
}

fn timed<T>(limit: Duration, call: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = call();
    assert!(began.elapsed() < limit + SLACK, "took {:?}", began.elapsed());
    result
}

#[test]
fn frames_survive_their_bytes() {
    run(2000, (frame(), vec(any::<u8>(), 0..40)), |(frame, rest)| {
        let mut bytes = frame.encode();
        let size = bytes.len();
        for cut in 0..size {
            prop_assert_eq!(Frame::decode(&bytes[..cut], MAX_FRAME), Ok(None), "cut at {}", cut);
        }
        bytes.extend(rest);
        prop_assert_eq!(Frame::decode(&bytes, MAX_FRAME), Ok(Some((frame, size))));
        Ok(())
    });
}

#[test]
fn any_bytes_are_read_or_refused() {
    run(4000, (attack(), any::<bool>()), |(bytes, greeting)| {
        let limit = if greeting { MAX_GREETING } else { MAX_FRAME };
        let mut rest = &bytes[..];
        while let Ok(Some((frame, size))) = Frame::decode(rest, limit) {
            prop_assert!(size <= rest.len() && size <= limit);
            // What is taken is what was sent, and nothing is made up.
            if let Frame::Give { bytes, .. } | Frame::Part { bytes, .. } = &frame {
                prop_assert!(bytes.len() < size);
            }
            rest = &rest[size..];
        }
        Ok(())
    });
}

#[test]
fn the_header_alone_decides_what_is_too_long() {
    for kind in 0..20_u16 {
        for length in [0, 1, 33, MAX_MESSAGE as u32 + 13, u32::MAX] {
            let mut bytes = Frame::Start.encode();
            bytes[6..8].copy_from_slice(&kind.to_le_bytes());
            bytes[8..12].copy_from_slice(&length.to_le_bytes());
            let result = Frame::decode(&bytes, MAX_FRAME);
            let possible = (kind, length) == (7, 0) || matches!((kind, length), (8 | 9, 33));
            assert_eq!(result.is_ok(), possible, "kind {kind} of {length} bytes gave {result:?}");
        }
    }
    let large = Frame::give(1, &[0; 100]);
    assert_eq!(Frame::decode(&large, MAX_GREETING), Err(Malformed::Length { kind: 8, length: 108 }));
}

#[test]
fn strangers_do_not_disturb_a_group_that_forms() {
    run(150, vec((attack(), any::<bool>()), 1..4), |attacks| {
        let (socket, address) = listener(SocketType::STREAM);
        let secret = Secret::new(b"secret");
        let (hub, leaf) = std::thread::scope(|scope| {
            // They are first in the queue.
            let strangers: Vec<_> = attacks.iter().map(|_| reach(&address).unwrap().unwrap()).collect();
            for (stranger, (bytes, goes)) in strangers.iter().zip(&attacks) {
                throw(stranger, bytes);
                if *goes {
                    let _ = shutdown(stranger, Shutdown::Both);
                }
            }
            let hub = scope.spawn(|| timed(LONG, || lead(socket, |_| true, &secret, 2, Deadline::new(LONG))));
            let leaf = scope.spawn(|| follow(|_| reach(&address), &secret, 1, 2, Deadline::new(LONG)));
            (hub.join().unwrap(), leaf.join().unwrap())
        });
        prop_assert!(hub.is_ok() && leaf.is_ok(), "{:?}, {:?}", hub, leaf);
        Ok(())
    });
}

#[test]
fn another_version_is_told_and_another_secret_too() {
    let (socket, address) = listener(SocketType::STREAM);
    let secret = Secret::new(b"secret");
    std::thread::scope(|scope| {
        let hub = scope.spawn(|| lead(socket, |_| true, &secret, 2, Deadline::new(LONG)));
        let stranger = || Conn::new(reach(&address).unwrap().unwrap());
        let mut other = stranger();
        let mut hello = Frame::Hello { nonce: [1; 32] }.encode();
        hello[4] = 7;
        other.send(hello);
        assert_eq!(await_frame(&mut other), Some(Frame::Refuse(Refused::Version)));
        assert_eq!(await_frame(&mut other), None);

        // Rank 0's own challenge and proof are of no use to who does not know the secret.
        let mut other = stranger();
        other.send(Frame::Hello { nonce: [1; 32] }.encode());
        let Some(Frame::Challenge { nonce }) = await_frame(&mut other) else { panic!("no challenge") };
        let mac = Secret::new(b"another").prove_rank(&[1; 32], &nonce, 1, 2);
        other.send(Frame::Proof { rank: 1, world: 2, mac }.encode());
        assert_eq!(await_frame(&mut other), Some(Frame::Refuse(Refused::Secret)));
        assert_eq!(await_frame(&mut other), None);
        // A proof that was heard once is of no use for another challenge.
        let mut other = stranger();
        other.send(Frame::Hello { nonce: [1; 32] }.encode());
        assert_ne!(await_frame(&mut other), Some(Frame::Challenge { nonce }));
        let mac = secret.prove_rank(&[1; 32], &nonce, 1, 2);
        other.send(Frame::Proof { rank: 1, world: 2, mac }.encode());
        assert_eq!(await_frame(&mut other), Some(Frame::Refuse(Refused::Secret)));

        assert!(follow(|_| reach(&address), &secret, 1, 2, Deadline::new(LONG)).is_ok());
        assert!(hub.join().unwrap().is_ok());
    });
}

/// What listens knows how to talk, but not the secret.
#[test]
fn a_false_rank_0_is_found_out() {
    let secret = Secret::new(b"secret");
    let (ours, theirs) = pair();
    let mut once = Some(ours);
    let result = std::thread::scope(|scope| {
        let leaf = scope.spawn(|| timed(LONG, || follow(|_| Ok(once.take()), &secret, 1, 2, Deadline::new(LONG))));
        let mut hub = Conn::new(theirs);
        assert!(matches!(await_frame(&mut hub), Some(Frame::Hello { .. })));
        hub.send(Frame::Challenge { nonce: [5; 32] }.encode());
        let Some(Frame::Proof { mac, .. }) = await_frame(&mut hub) else { panic!("no proof") };
        // The rank's own proof is what comes nearest.
        hub.send(Frame::Welcome { mac }.encode());
        hub.send(Frame::Start.encode());
        leaf.join().unwrap()
    });
    assert!(matches!(result, Err(Error::Rendezvous(Reason::Protocol { peer: 0, .. }))), "{result:?}");
}

/// A rank whose patience ends must not name one that has just come.
#[test]
fn who_comes_is_told_at_once() {
    let (conn, peer) = pair();
    let (mut members, mut peer) = (vec![None, Some(Conn::new(conn))], Conn::new(peer));
    let mut beat = Beat::new();
    std::thread::sleep(beat.left());
    for present in [Ranks::of([0]), Ranks::of([0, 2]), Ranks::of([0, 2, 3])] {
        beat.tell(&mut members, present);
        assert_eq!(peer.next(MAX_FRAME), Ok(Some(Frame::Waiting { present })));
    }
}

#[test]
fn a_silent_stranger_is_closed_in_time() {
    let (socket, address) = listener(SocketType::STREAM);
    let secret = Secret::new(b"secret");
    std::thread::scope(|scope| {
        let hub = scope.spawn(|| lead(socket, |_| true, &secret, 2, Deadline::new(LONG)));
        let mut stranger = Conn::new(reach(&address).unwrap().unwrap());
        let ended = timed(Duration::from_secs(2), || await_frame(&mut stranger));
        assert_eq!(ended, None);
        assert!(!hub.is_finished(), "the group waits on");
        assert!(follow(|_| reach(&address), &secret, 1, 2, Deadline::new(LONG)).is_ok());
        assert!(hub.join().unwrap().is_ok());
    });
}

#[test]
fn of_too_many_strangers_the_oldest_goes() {
    let (socket, address) = listener(SocketType::STREAM);
    let secret = Secret::new(b"secret");
    std::thread::scope(|scope| {
        let hub = scope.spawn(|| lead(socket, |_| true, &secret, 2, Deadline::new(LONG)));
        let mut strangers: Vec<_> = (0..STRANGERS + 1)
            .map(|_| {
                // The queue before it is shorter than the crowd.
                loop {
                    match reach(&address).unwrap() {
                        Some(fd) => break Conn::new(fd),
                        None => std::thread::yield_now(),
                    }
                }
            })
            .collect();
        assert_eq!(await_frame(&mut strangers[0]), None);
        std::thread::sleep(Duration::from_millis(100));
        let newest = &mut strangers[STRANGERS];
        assert_eq!(newest.next(MAX_FRAME), Ok(None));
        assert!(!newest.has_ended(), "it was its time that ended, not its place");
        assert!(follow(|_| reach(&address), &secret, 1, 2, Deadline::new(LONG)).is_ok());
        assert!(hub.join().unwrap().is_ok());
    });
}

/// The first connection is to a group that has just formed and closes its queue.
#[test]
fn a_rank_that_is_cut_off_before_it_is_taken_comes_again() {
    let (socket, address) = listener(SocketType::STREAM);
    let secret = Secret::new(b"secret");
    std::thread::scope(|scope| {
        let hub = scope.spawn(|| lead(socket, |_| true, &secret, 2, Deadline::new(LONG)));
        let mut closed = Some(pair().0);
        let connect = |_| closed.take().map_or_else(|| reach(&address), |fd| Ok(Some(fd)));
        assert!(follow(connect, &secret, 1, 2, Deadline::new(LONG)).is_ok());
        assert!(hub.join().unwrap().is_ok());
    });
}

#[test]
fn a_rank_survives_whatever_answers_it() {
    let good = AtomicUsize::new(0);
    run(150, (attack(), attack(), any::<bool>(), any::<bool>()), |(first, second, honest, goes)| {
        let secret = Secret::new(b"secret");
        let (ours, theirs) = pair();
        let mut once = Some(ours);
        let result = std::thread::scope(|scope| {
            let leaf = scope.spawn(|| {
                // A second attempt finds nobody.
                timed(PATIENCE, || follow(|_| Ok(once.take()), &secret, 1, 3, Deadline::new(PATIENCE)))
            });
            let mut hub = Conn::new(theirs);
            if honest {
                // Up to the welcome it is as it should be.
                let hello = await_frame(&mut hub);
                let challenge = [5; 32];
                hub.send(Frame::Challenge { nonce: challenge }.encode());
                if let (Some(Frame::Hello { nonce }), Some(Frame::Proof { .. })) = (hello, await_frame(&mut hub)) {
                    hub.send(Frame::Welcome { mac: secret.prove_hub(&nonce, &challenge, 1, 3) }.encode());
                }
            }
            hub.send(first.clone());
            hub.send(second.clone());
            if goes {
                hub.finish();
            }
            leaf.join().unwrap()
        });
        // Only who knows the secret can start a group.
        prop_assert!(honest || result.is_err(), "{:?}", result);
        good.fetch_add(usize::from(result.is_ok()), Ordering::Relaxed);
        Ok(())
    });
    assert_ne!(good.into_inner(), 0);
}

#[test]
fn rank_0_survives_its_ranks() {
    let good = AtomicUsize::new(0);
    let attack = || attack_after(&[&[], &[(0, true)], &[(0, true)]]);
    run(150, vec((attack(), any::<bool>()), 2), |attacks| {
        let (conns, peers): (Vec<_>, Vec<_>) = attacks.iter().map(|_| pair()).unzip();
        let members = std::iter::once(None).chain(conns.into_iter().map(|fd| Some(Conn::new(fd)))).collect();
        let mut star = Star::new(0, 3, Links::Hub(members));
        for (peer, (bytes, goes)) in peers.iter().zip(&attacks) {
            throw(peer, bytes);
            if *goes {
                let _ = shutdown(peer, Shutdown::Both);
            }
        }
        let first = timed(PATIENCE, || star.gather(b"mine", PATIENCE));
        if let Ok(parts) = &first {
            good.fetch_add(1, Ordering::Relaxed);
            prop_assert_eq!(parts.len(), 3);
            prop_assert_eq!(&parts[0], b"mine");
        } else {
            prop_assert_eq!(timed(Duration::ZERO, || star.gather(b"mine", LONG)), first);
        }
        prop_assert!(star.held() <= 2 * 2 * MAX_FRAME, "{} bytes are held", star.held());
        Ok(())
    });
    // Else the cases do not get as far as they should.
    assert_ne!(good.into_inner(), 0);
}

#[test]
fn a_rank_survives_its_rank_0() {
    let good = AtomicUsize::new(0);
    let attack = attack_after(&[&[], &[(0, false)], &[(0, false), (2, false)]]);
    run(150, (attack, any::<bool>()), |(bytes, goes)| {
        let (ours, theirs) = pair();
        let mut star = Star::new(1, 3, Links::Leaf(Conn::new(ours)));
        throw(&theirs, &bytes);
        if goes {
            let _ = shutdown(&theirs, Shutdown::Both);
        }
        let first = timed(PATIENCE, || star.gather(b"mine", PATIENCE));
        if let Ok(parts) = &first {
            good.fetch_add(1, Ordering::Relaxed);
            prop_assert_eq!(parts.len(), 3);
            prop_assert_eq!(&parts[1], b"mine");
        } else {
            prop_assert_eq!(timed(Duration::ZERO, || star.gather(b"mine", LONG)), first);
        }
        prop_assert!(star.held() <= 2 * MAX_FRAME, "{} bytes are held", star.held());
        Ok(())
    });
    assert_ne!(good.into_inner(), 0);
}

/// As many words as fit, without an end: each is right by itself.
#[test]
fn no_flood_outlasts_patience() {
    let (ours, theirs) = pair();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let word = Frame::Waiting { present: Ranks::of([0]) }.encode();
            while !stop.load(Ordering::Relaxed) {
                throw(&theirs, &word);
            }
        });
        let mut star = Star::new(1, 3, Links::Leaf(Conn::new(ours)));
        let patience = Duration::from_millis(200);
        let result = timed(patience, || star.gather(b"", patience));
        stop.store(true, Ordering::Relaxed);
        assert!(result.is_err());
    });
}

/// More than the limit, sent to one who waits for a frame: what is held stays within the limit.
#[test]
fn what_is_held_is_bounded() {
    for (limit, announced) in [(MAX_FRAME, MAX_MESSAGE as u32), (MAX_GREETING, 32)] {
        let (ours, theirs) = pair();
        let mut conn = Conn::new(ours);
        let mut header = Frame::Start.encode();
        header[6..8].copy_from_slice(&(if announced == 32 { 1_u16 } else { 8 }).to_le_bytes());
        header[8..12].copy_from_slice(&announced.to_le_bytes());
        throw(&theirs, &header);
        for _ in 0..400 {
            throw(&theirs, &[7; 8192]);
            let _ = conn.next(limit);
            assert!(conn.held() <= 2 * limit, "{} bytes of {limit}", conn.held());
        }
    }
}

#[test]
fn offers_and_parcels_are_read_or_refused() {
    let valid = Offer::new("a name".to_owned(), 3).unwrap();
    let changes = || vec((any::<prop::sample::Index>(), any::<u8>()), 0..4);
    run(2000, (vec(any::<u8>(), 0..300), changes(), any::<bool>()), |(noise, changes, whole)| {
        let mut bytes = if whole { valid.encode() } else { noise.clone() };
        let parcel = Parcel { token: valid.token, rank: 1, count: 3 };
        let mut other = if whole { parcel.encode().to_vec() } else { noise };
        for (at, value) in changes {
            for bytes in [&mut bytes, &mut other].into_iter().filter(|bytes| !bytes.is_empty()) {
                let at = at.index(bytes.len());
                bytes[at] = value;
            }
        }
        if let Ok(offers) = Offer::decode_all(&[valid.encode(), bytes], 0) {
            prop_assert_eq!(offers.len(), 2);
        }
        let _ = Parcel::decode(&other);
        Ok(())
    });
    assert_eq!(Offer::decode_all(&[valid.encode()], 0), Ok(vec![valid]));
}
