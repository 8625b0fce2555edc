//! The conformance suite on the backend on CPU threads, and what can only be tried there.
#![cfg(feature = "host")]

use signal_comm::host::{self, Host, HostConfig, HostImage, HostImageTable};
use std::time::{Duration, Instant};

use signal_comm::error::{Image, Rendezvous, Unavailable};
use signal_comm::layout::LAYOUT_VERSION;
use signal_comm::{
    ApiMisuse, Backend, Communicator, DeviceBuffer, Error, Id, Link, MemoryKind, ReduceOp, Settings, UnixRendezvous,
    UserKernel, prove_peer,
};

signal_conformance::suite!(conformance, watched(), |host: &Host| assert_eq!(host.overwritten(), []));

/// The backend, with canaries around all memory: the suite's cases are told when a kernel writes outside.
fn watched() -> Result<Host, Error> {
    let mut config = HostConfig::from_env()?;
    config.canaries = true;
    host::open_with(config)
}

fn config(adjust: impl FnOnce(&mut HostConfig)) -> HostConfig {
    let mut config = HostConfig::default();
    adjust(&mut config);
    config
}

fn small() -> Settings {
    let mut settings = Settings::default();
    settings.scratch_bytes = Settings::MIN_SCRATCH_BYTES;
    settings
}

/// Waits until no buffer is left. Workers let go of what they ran when they have run it, which nobody waits for.
fn freed(host: &Host) {
    let began = Instant::now();
    while host.allocated_bytes() > 0 {
        assert!(began.elapsed() < Duration::from_secs(10), "{} bytes are left", host.allocated_bytes());
        std::thread::yield_now();
    }
}

/// A pair without peer access is refused by name, in the direction that is missing; the other direction works.
#[test]
fn misuse_blocked_peer_names_the_pair() {
    let host = host::open_with(config(|c| (c.devices, c.blocked_peers) = (3, vec![(2, 1)]))).unwrap();
    let devices = host.devices().unwrap();
    let name = |i: usize| Host::describe(&devices[i]).name;
    let refused = |found: Result<(), Error>| match found {
        Err(Error::Peer { from, to, why }) => {
            assert_eq!((from, to), (name(2), name(1)));
            assert!(!why.is_empty());
        }
        other => panic!("{other:?}"),
    };
    let access = Host::peer_access(&devices[2], &devices[1]).unwrap();
    assert!(access.refusal.is_some());
    assert_eq!(Host::peer_access(&devices[1], &devices[2]).unwrap().refusal, None);
    refused(Host::enable_peer(&devices[2], &devices[1]));
    refused(prove_peer::<Host>(&devices[2], &devices[1], MemoryKind::PeerVisible));
    prove_peer::<Host>(&devices[1], &devices[2], MemoryKind::PeerVisible).unwrap();

    let insisting = || {
        let mut settings = small();
        settings.peer_to_peer = Some(true);
        Communicator::<Host>::builder().settings(settings)
    };
    refused(insisting().all_local(&devices).map(|_| ()));
    let reachable = [devices[0].clone(), devices[2].clone()];
    let comms = insisting().all_local(&reachable).unwrap();
    assert_eq!((comms.len(), comms[0].link()), (2, Link::Host));
}

/// Where a pair does not reach each other, ranks meet in the host's memory, if nobody insists; and part of them, who do reach each other, in their own again.
#[test]
fn pinned_where_a_pair_is_blocked() {
    let host = host::open_with(config(|c| (c.devices, c.blocked_peers) = (3, vec![(2, 1)]))).unwrap();
    let devices = host.devices().unwrap();
    let mut comms = Communicator::<Host>::builder().settings(small()).all_local(&devices).unwrap();
    let links = |comms: &[Communicator<Host>]| comms.iter().map(Communicator::link).collect::<Vec<_>>();
    assert_eq!(links(&comms), [Link::Pinned; 3]);
    sum_of_ranks(&mut comms);
    let mut parts: Vec<_> = std::thread::scope(|scope| {
        let split = |(rank, comm): (usize, &mut Communicator<Host>)| {
            comm.split(Some(u32::from(rank == 1)), 0).unwrap().unwrap()
        };
        let threads: Vec<_> = comms.iter_mut().enumerate().map(|each| scope.spawn(move || split(each))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    drop(parts.remove(1));
    assert_eq!(links(&parts), [Link::Host; 2]);
    sum_of_ranks(&mut parts);
    sum_of_ranks(&mut comms);
}

/// The same where each rank comes by itself, as processes do; one that insists is an error for all, with the reason.
#[test]
fn pinned_where_a_pair_is_blocked_apart() {
    let host = host::open_with(config(|c| (c.devices, c.blocked_peers) = (3, vec![(2, 1)]))).unwrap();
    let devices = host.devices().unwrap();
    let connect = |peer_to_peer| {
        let id = Id::new().unwrap();
        let mut settings = small();
        (settings.peer_to_peer, settings.timeout) = (peer_to_peer, Duration::from_secs(20));
        std::thread::scope(|scope| {
            let join = |rank: usize| {
                let rendezvous = UnixRendezvous::from_id(&id, rank, 3, settings.timeout)?;
                Communicator::<Host>::builder().settings(settings.clone()).connect(&devices[rank], rendezvous)
            };
            let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || join(rank))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let mut comms: Vec<_> = connect(None).into_iter().map(|comm| comm.unwrap()).collect();
    assert!(comms.iter().all(|comm| comm.link() == Link::Pinned));
    sum_of_ranks(&mut comms);
    for (rank, found) in connect(Some(true)).into_iter().enumerate() {
        match found.unwrap_err() {
            Error::Peer { from, to, .. } => assert_eq!((rank, from.as_str(), to.as_str()), (2, "CPU 2", "CPU 1")),
            Error::Rendezvous(Rendezvous::Failed { rank: 2, why }) => {
                assert!(rank != 2 && why.contains("blocks this direction"), "{why}")
            }
            other => panic!("rank {rank}: {other}"),
        }
    }
}

/// Each rank brings its number.
#[allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]
fn sum_of_ranks(comms: &mut [Communicator<Host>]) {
    let world = comms.len();
    let mut ranks: Vec<_> = comms
        .iter_mut()
        .map(|comm| {
            let stream = Host::create_stream(comm.device()).unwrap();
            let mut input = DeviceBuffer::<Host, f32>::new(comm.device(), 100_000).unwrap();
            input.write(&stream, &vec![comm.rank() as f32; 100_000]).unwrap();
            let output = DeviceBuffer::<Host, f32>::new(comm.device(), 100_000).unwrap();
            (stream, input, output)
        })
        .collect();
    for (comm, (stream, input, output)) in comms.iter_mut().zip(&mut ranks) {
        comm.all_reduce(stream, &*input, output, ReduceOp::Sum).unwrap();
    }
    let sum = (0..world).sum::<usize>() as f32;
    for (comm, (stream, _, output)) in comms.iter_mut().zip(&ranks) {
        comm.wait(stream).unwrap();
        assert_eq!(output.read(stream).unwrap(), vec![sum; 100_000]);
    }
}

/// Without a device there is nothing to open.
#[test]
fn misuse_no_device() {
    match host::open_with(config(|c| c.devices = 0)) {
        Err(Error::Unavailable { backend: "host", why: Unavailable::NoDevice(why) }) => assert!(!why.is_empty()),
        other => panic!("{other:?}"),
    }
}

/// A build without an image says what it was missing.
#[test]
fn misuse_missing_image() {
    let image = HostImage { table: None, fingerprint: 0, missing: "no C++ compiler" };
    let missing = Image::Missing { target: "host", missing: "no C++ compiler".to_owned() };
    assert_eq!(Host::open(image, HostConfig::default()).unwrap_err(), Error::Image(missing));
}

/// A user's table of another layout, and one without the mark of the header.
#[test]
fn misuse_users_table() {
    let device = host::open().unwrap().devices().unwrap().swap_remove(0);
    let load = |table| UserKernel::<Host>::load(&device, table, ["signal_barrier"]).map(|_| ()).unwrap_err();
    let (found, expected) = (LAYOUT_VERSION + 1, LAYOUT_VERSION);
    static OTHER: HostImageTable = HostImageTable::new(LAYOUT_VERSION + 1, &[]);
    assert_eq!(load(&OTHER), Image::Layout { target: "host", found, expected }.into());
    assert!(matches!(load(Host::image(&device)), Error::Image(Image::Abi { .. })));
}

/// What belongs to one opened device count does not fit more ranks without a word.
#[test]
fn misuse_fewer_devices_than_ranks() {
    let host = host::open_with(config(|c| c.devices = 2)).unwrap();
    let devices = host.devices().unwrap();
    let repeated: Vec<_> = devices.iter().cycle().take(3).cloned().collect();
    let found = Communicator::<Host>::builder().settings(small()).all_local(&repeated).unwrap_err();
    assert!(matches!(found, Error::ApiMisuse(ApiMisuse::SharedDevice { first: 0, second: 2, .. })), "{found:?}");
}

/// An allocation that some ranks never make is freed with the communicators.
#[test]
fn memory_is_freed_behind_an_unfinished_alloc() {
    let host = host::open_with(HostConfig::default()).unwrap();
    let devices = &host.devices().unwrap()[..3];
    let mut comms = Communicator::<Host>::builder().settings(small()).all_local(devices).unwrap();
    let (first, second) = (comms[0].alloc::<f32>(100).unwrap(), comms[2].alloc::<f32>(100).unwrap());
    drop((first, second, comms));
    freed(&host);
}

/// Everything is freed once the last handle is gone, also what calls and graphs held.
#[test]
fn memory_is_freed() {
    let host = host::open_with(HostConfig::default()).unwrap();
    for _ in 0..3 {
        let devices = &host.devices().unwrap()[..3];
        let mut comms = Communicator::<Host>::builder().settings(small()).all_local(devices).unwrap();
        let streams: Vec<_> = devices.iter().map(|d| Host::create_stream(d).unwrap()).collect();
        let mut graphs = Vec::new();
        for (comm, stream) in comms.iter_mut().zip(&streams) {
            let mut buffer = comm.alloc::<f32>(100).unwrap();
            buffer.write(stream, &[1.0; 100]).unwrap();
            comm.all_reduce_in_place(stream, &mut buffer, ReduceOp::Sum).unwrap();
            comm.barrier(stream).unwrap();
            graphs.push((stream.clone(), buffer));
        }
        for (stream, buffer) in &graphs {
            assert_eq!(buffer.read(stream).unwrap(), [3.0; 100]);
        }
        let captured: Vec<_> = comms
            .iter_mut()
            .zip(&streams)
            .zip(&mut graphs)
            .map(|((comm, stream), (_, buffer))| {
                Host::synchronize(stream).unwrap();
                Host::begin_capture(stream).unwrap();
                comm.all_reduce_in_place(stream, buffer, ReduceOp::Sum).unwrap();
                Host::end_capture(stream).unwrap()
            })
            .collect();
        drop(graphs);
        for (graph, stream) in captured.iter().zip(&streams) {
            Host::replay(graph, stream).unwrap();
        }
        drop(captured);
        for stream in &streams {
            Host::synchronize(stream).unwrap();
        }
        drop((comms, streams));
        freed(&host);
    }
}
