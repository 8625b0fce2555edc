//! Groups of threads, and what is expected of their errors.

use std::fmt::Debug;
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use signal_core::error::Rendezvous as Reason;
use signal_core::{Error, Rendezvous, Result, TcpRendezvous, UnixRendezvous};

/// For what is expected to go well: as long as a busy machine may need.
pub(crate) const LONG: Duration = Duration::from_secs(60);
/// How late an end may be on a busy machine.
pub(crate) const SLACK: Duration = Duration::from_secs(3);
pub(crate) const SECRET: &[u8] = b"thirty-two bytes that tests share";

/// A name that no other test uses, nor another run of this one.
pub(crate) fn name(test: &str) -> String {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    format!("{test}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

/// A thread for each of `ranks`; what they return, in that order.
pub(crate) fn each<T: Send>(ranks: impl IntoIterator<Item = usize>, body: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = ranks.into_iter().map(|rank| scope.spawn(move || body(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// All ranks of a group, over Unix sockets.
pub(crate) fn unix(world: usize) -> Vec<Box<dyn Rendezvous>> {
    let name = name("group");
    each(0..world, |rank| {
        Box::new(UnixRendezvous::new(&name, SECRET, rank, world, LONG).unwrap()) as Box<dyn Rendezvous>
    })
}

/// All ranks of a group, over TCP.
pub(crate) fn tcp(world: usize) -> Vec<Box<dyn Rendezvous>> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let lead = || TcpRendezvous::lead(listener.try_clone().unwrap(), SECRET, world, LONG);
    let follow = |rank| TcpRendezvous::new(&address, SECRET, rank, world, LONG);
    each(0..world, |rank| Box::new(if rank == 0 { lead() } else { follow(rank) }.unwrap()) as Box<dyn Rendezvous>)
}

/// Runs every rank of a group on a thread of its own; each takes its rendezvous with it.
pub(crate) fn run<T: Send>(group: Vec<Box<dyn Rendezvous>>, body: impl Fn(Box<dyn Rendezvous>) -> T + Sync) -> Vec<T> {
    let body = &body;
    std::thread::scope(|scope| {
        let threads: Vec<_> = group.into_iter().map(|one| scope.spawn(move || body(one))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// What a call returns, and that it took at most `limit` and some slack.
pub(crate) fn within<T>(limit: Duration, call: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = call();
    assert!(began.elapsed() < limit + SLACK, "took {:?} where {limit:?} was the limit", began.elapsed());
    result
}

pub(crate) fn assert_absent<T: Debug>(result: &Result<T>, expected: &[usize]) {
    match result {
        Err(Error::Rendezvous(Reason::Absent { missing, .. })) => assert_eq!(missing, expected, "{result:?}"),
        other => panic!("expected that {expected:?} are absent, not {other:?}"),
    }
}

pub(crate) fn assert_lost<T: Debug>(result: &Result<T>, expected: &[usize]) {
    match result {
        Err(Error::Rendezvous(Reason::Lost { missing, .. })) => assert_eq!(missing, expected, "{result:?}"),
        other => panic!("expected that {expected:?} are lost, not {other:?}"),
    }
}
