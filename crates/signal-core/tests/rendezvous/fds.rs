//! File descriptors between ranks.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, memfd_create};
use signal_core::error::Rendezvous as Reason;
use signal_core::rendezvous::fds::{MAX_FDS, exchange};
use signal_core::{ApiMisuse, Error};

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

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
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
