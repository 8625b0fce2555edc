//! File descriptors between ranks.

use std::fmt;
use std::fs::File;
use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::any;
use proptest::sample::Index;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
    connect, sendmsg, socket_with,
};
use signal_core::error::Rendezvous as Reason;
use signal_core::rendezvous::fds::{MAX_FDS, exchange};
use signal_core::{ApiMisuse, Error, Rendezvous, Result};

use super::tools::{LONG, assert_absent, assert_lost, run, tcp, unix, within};

fn memory(content: &[u8]) -> OwnedFd {
    let file = File::from(memfd_create("signal-test", MemfdFlags::CLOEXEC).unwrap());
    file.write_all_at(content, 0).unwrap();
    file.into()
}

fn content(fd: &OwnedFd) -> Vec<u8> {
    let file = File::from(fd.try_clone().unwrap());
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn everybody_gets_everybodys_descriptors() {
    for (world, count) in [(1, 2), (2, 1), (4, 3), (8, 2), (3, 0), (2, MAX_FDS)] {
        for group in [unix(world), tcp(world)] {
            run(group, |mut one| {
                let own: Vec<_> = (0..count).map(|i| memory(&[one.rank() as u8, i as u8, 42])).collect();
                let own: Vec<_> = own.iter().map(AsFd::as_fd).collect();
                let all = exchange(&mut one, &own, LONG).unwrap();
                assert_eq!(all.iter().map(Vec::len).collect::<Vec<_>>(), vec![count; world]);
                for (rank, fds) in all.iter().enumerate() {
                    for (i, fd) in fds.iter().enumerate() {
                        assert_eq!(content(fd), [rank as u8, i as u8, 42]);
                        let flags = rustix::io::fcntl_getfd(fd).unwrap();
                        assert!(flags.contains(rustix::io::FdFlags::CLOEXEC), "would leak into children");
                    }
                }
                // What one writes, the others see.
                one.gather(b"", LONG).unwrap();
                if let Some(fd) = all[0].first().filter(|_| one.rank() + 1 == world) {
                    File::from(fd.try_clone().unwrap()).write_all_at(b"!", 0).unwrap();
                }
                one.gather(b"", LONG).unwrap();
                if let Some(fd) = all[0].first() {
                    assert_eq!(content(fd)[0], b'!');
                }
            });
        }
    }
}

#[test]
fn unequal_counts_are_named_by_all() {
    let results = run(unix(3), |mut one| {
        let own = [memory(b"1"), memory(b"2")];
        let own: Vec<_> = own.iter().map(AsFd::as_fd).take(if one.rank() == 1 { 1 } else { 2 }).collect();
        exchange(&mut one, &own, LONG).map(|_| ())
    });
    let (ours, theirs) = ("2".to_owned(), "1".to_owned());
    let name = "number of file descriptors";
    let expected = Reason::Disagreement { name, first: 0, ours, rank: 1, theirs };
    results.into_iter().for_each(|result| assert_eq!(result, Err(Error::Rendezvous(expected.clone()))));
}

#[test]
fn too_many_are_refused() {
    let fd = memory(b"");
    let mut one = unix(1).pop().unwrap();
    let result = exchange(&mut one, &[fd.as_fd(); MAX_FDS + 1], LONG).map(|_| ());
    let expected = ApiMisuse::TooMany { what: "file descriptors", given: MAX_FDS + 1, limit: MAX_FDS };
    assert_eq!(result, Err(Error::ApiMisuse(expected)));
}

/// Changes what gathers return, and sees it.
struct Tapped<F>(Box<dyn Rendezvous>, F);

impl<F> fmt::Debug for Tapped<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<F: FnMut(&mut Vec<Vec<u8>>) + Send> Rendezvous for Tapped<F> {
    fn rank(&self) -> usize {
        self.0.rank()
    }

    fn world_size(&self) -> usize {
        self.0.world_size()
    }

    fn gather(&mut self, bytes: &[u8], patience: Duration) -> Result<Vec<Vec<u8>>> {
        let mut all = self.0.gather(bytes, patience)?;
        (self.1)(&mut all);
        Ok(all)
    }

    fn end(&mut self, error: &Error) {
        self.0.end(error);
    }
}

// Where things stand in an offer.
const MACHINE: usize = 48;
const NETWORK: usize = 84;
const NAME: usize = 100;

fn tapped(
    group: Vec<Box<dyn Rendezvous>>,
    tap: impl Fn(usize, &mut Vec<Vec<u8>>) + Send + Copy + 'static,
) -> Vec<Box<dyn Rendezvous>> {
    let tap = |one: Box<dyn Rendezvous>| {
        let rank = one.rank();
        Box::new(Tapped(one, move |all: &mut Vec<Vec<u8>>| tap(rank, all))) as Box<dyn Rendezvous>
    };
    group.into_iter().map(tap).collect()
}

fn exchange_one(mut one: Box<dyn Rendezvous>, patience: Duration) -> Result<Vec<Vec<OwnedFd>>> {
    exchange(&mut one, &[memory(b"mine").as_fd()], patience)
}

#[test]
fn ranks_on_other_machines_or_networks_are_named() {
    for (at, says) in [(MACHINE, "machine"), (NETWORK, "network namespace")] {
        let group = tapped(unix(3), move |_, all| all[2][at] ^= 1);
        for result in run(group, |one| within(Duration::ZERO, || exchange_one(one, LONG))) {
            match result {
                Err(Error::Rendezvous(Reason::Unreachable { peer: 2, why, .. })) => {
                    assert!(why.contains(says), "{why}")
                }
                other => panic!("{other:?}"),
            }
        }
    }
}

/// What two namespaces look like from inside, if the kernel does not tell: the name is not there.
#[test]
fn a_peer_that_does_not_listen_is_named() {
    let group = tapped(unix(2), |_, all| all[1][NAME] ^= 1);
    let results = run(group, |one| within(Duration::ZERO, || exchange_one(one, LONG)));
    assert_lost(&results[0], &[1]);
    let group = tapped(unix(2), |_, all| {
        all.iter_mut().for_each(|part| part[NETWORK..NAME].fill(0));
        all[1][NAME] ^= 1;
    });
    match &run(group, |one| exchange_one(one, LONG))[0] {
        Err(Error::Rendezvous(Reason::Unreachable { peer: 1, why, .. })) => assert!(why.contains("container"), "{why}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranks_that_do_not_come_are_named() {
    const SOON: Duration = Duration::from_millis(600);
    // To the gather, which names them.
    let results = run(unix(3), |one| {
        if one.rank() == 1 {
            // Alive until the others have given up.
            return Err(one);
        }
        Ok(within(SOON, || exchange_one(one, SOON)))
    });
    results.iter().flatten().for_each(|result| assert_absent(result, &[1]));
    // After it.
    let group = tapped(unix(3), |rank, _| std::thread::sleep(SOON * if rank == 1 { 2 } else { 0 }));
    let results = run(group, |one| within(SOON * 2, || (one.rank(), exchange_one(one, SOON))));
    for (rank, result) in &results {
        match rank {
            1 => assert!(result.is_err()),
            _ => assert_absent(result, &[1]),
        }
    }
}

/// Processes of this user that have found the names, but not the tokens; they bring descriptors too.
#[test]
fn strangers_get_nothing_and_disturb_nobody() {
    let group = tapped(unix(3), |rank, all| {
        if rank == 2 {
            all.iter().for_each(|part| intrude(&part[NAME..]));
        }
    });
    for result in run(group, |one| exchange_one(one, LONG)) {
        let all = result.unwrap();
        assert!(all.iter().all(|fds| fds.len() == 1 && content(&fds[0]) == b"mine"));
    }
}

/// Connects to a name again and again: with nothing, with noise, and with a parcel that has everything but the token.
fn intrude(name: &[u8]) {
    let address = SocketAddrUnix::new_abstract_name(name).unwrap();
    let mut parcel = [0; 48];
    parcel[..8].copy_from_slice(b"SGFD\x01\0\0\0");
    // In the name of the rank that lets them in, which gives its own only afterwards.
    parcel[40] = 2;
    parcel[44] = 1;
    for bytes in [&b""[..], b"noise", &parcel, &[0; 4000]] {
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
        connect(&socket, &address).unwrap();
        if bytes.is_empty() {
            continue;
        }
        let fd = memory(b"theirs");
        let fds = [fd.as_fd(), fd.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds[..if bytes.len() == 48 { 1 } else { 2 }])));
        sendmsg(&socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).unwrap();
    }
}

/// Whatever a rank publishes, the others end.
#[test]
fn any_offer_is_survived() {
    const SOON: Duration = Duration::from_millis(30);
    let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha));
    let changes = vec((any::<Index>(), any::<u8>()), 1..6);
    let cases = (changes, any::<bool>(), vec(any::<u8>(), 0..300));
    runner
        .run(&cases, |(changes, whole, noise)| {
            let tap = move |one: Box<dyn Rendezvous>| {
                let (changes, noise) = (changes.clone(), noise.clone());
                Box::new(Tapped(one, move |all: &mut Vec<Vec<u8>>| {
                    if !whole {
                        all[1] = noise.clone();
                    }
                    let part = &mut all[1];
                    for (at, value) in &changes {
                        if !part.is_empty() {
                            let at = at.index(part.len());
                            part[at] = *value;
                        }
                    }
                })) as Box<dyn Rendezvous>
            };
            let group = unix(2).into_iter().map(tap).collect();
            run(group, |one| within(SOON, || exchange_one(one, SOON)));
            Ok(())
        })
        .unwrap();
}

/// In a process of its own: this one's other tests open and close descriptors meanwhile.
#[test]
fn descriptors_do_not_leak() {
    const CHILD: &str = "SIGNAL_TEST_LEAKS";
    if std::env::var_os(CHILD).is_none() {
        let test = std::env::current_exe().unwrap();
        let arguments = ["--exact", "rendezvous::fds::descriptors_do_not_leak", "--nocapture"];
        let output = Command::new(test).args(arguments).env(CHILD, "1").output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        return;
    }
    let open = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let round = || {
        everybody_gets_everybodys_descriptors();
        unequal_counts_are_named_by_all();
        ranks_on_other_machines_or_networks_are_named();
        a_peer_that_does_not_listen_is_named();
        ranks_that_do_not_come_are_named();
        strangers_get_nothing_and_disturb_nobody();
    };
    round();
    let before = open();
    round();
    assert_eq!(open(), before, "descriptors are left open");
}
