//! Handles of domains: calls from several threads at once (P11).

use std::time::Duration;

use signal_core::{Algorithm, ApiMisuse, Backend, Communicator, DeviceBuffer, Domain, Error, ReduceOp, Result};

use crate::cases::misuse::{Refusals, refused};
use crate::cases::streams::in_order;
use crate::compare;
use crate::exchange::{random_inputs, sum, works};
use crate::rig::{Rig, is_scaled_down, scaled};
use crate::world::options;

const COUNT: usize = 300;
/// Of the handles.
const DOMAINS: [u32; 3] = [1, 4, 7];

/// One rank's all-reduces on a domain, with barriers in between: each takes what the one before has made, and all inputs differ
/// between domains.
fn chain<B: Backend>(domain: &mut Domain<B>, stream: &B::Stream, calls: u32) {
    let inputs = random_inputs::<f32>(domain.world_size(), u64::from(domain.domain()), COUNT);
    let mut buffers = [0, 1].map(|_| DeviceBuffer::<B, f32>::new(domain.device(), COUNT).unwrap());
    let mut expected = inputs[domain.rank()].clone();
    buffers[0].write(stream, &expected).unwrap();
    for call in 0..calls {
        let [from, to] = &mut buffers;
        let grid = options(|o| {
            o.algorithm = Some([Algorithm::OneStage, Algorithm::TwoStage][call as usize % 2]);
            (o.blocks, o.threads) = (Some(1 + call % 3), Some(2));
        });
        // The largest of equal inputs is that input: the numbers stay as they are.
        let op = if call == 0 { ReduceOp::Sum } else { ReduceOp::Max };
        domain.with(grid).all_reduce(stream, &*from, &mut *to, op).unwrap();
        if call == 0 {
            expected = sum(&inputs);
        }
        if call % 5 == 1 {
            domain.barrier(stream).unwrap();
        }
        buffers.swap(0, 1);
    }
    domain.wait(stream).unwrap();
    compare::assert_bits(&format!("domain {}", domain.domain()), &buffers[0].read(stream).unwrap(), &expected);
}

/// A thread for each domain of each rank, and one for its communicator, all with calls in flight at once, eager ones and some that wait
/// for a peer.
pub fn domains_on_threads_at_once<B: Backend>(rig: &Rig<B>) {
    for ranks in [1, 2, 3] {
        let mut world = rig.world_with(ranks, |s| s.domains = true);
        let calls = scaled(60);
        world.threads(vec![(); ranks], |rank, (), comm, stream| {
            let handles: Vec<Domain<B>> = DOMAINS.iter().map(|domain| comm.domain(*domain).unwrap()).collect();
            std::thread::scope(|scope| {
                let spawn = |mut domain: Domain<B>| {
                    let stream = B::create_stream(domain.device()).unwrap();
                    scope.spawn(move || chain(&mut domain, &stream, calls))
                };
                let threads: Vec<_> = handles.into_iter().map(spawn).collect();
                let mut domain = comm.domain(0).unwrap();
                chain(&mut domain, stream, calls);
                drop(domain);
                let inputs = random_inputs::<f32>(ranks, 5, COUNT);
                let mut buffer = DeviceBuffer::<B, f32>::new(comm.device(), COUNT).unwrap();
                for _ in 0..calls {
                    buffer.write(stream, &inputs[rank]).unwrap();
                    comm.all_reduce_in_place(stream, &mut buffer, ReduceOp::Sum).unwrap();
                }
                compare::assert_bits("the communicator", &buffer.read(stream).unwrap(), &sum(&inputs));
                threads.into_iter().for_each(|thread| thread.join().unwrap());
            });
            comm.status().unwrap();
        });
        works(&mut world);
    }
}

/// One domain waits for a peer that does not call yet; the calls of another, from another thread, go through.
pub fn domains_do_not_wait_for_each_other<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world_with(2, |s| s.domains = true);
    let more = world.more_streams();
    world.comms[0].barrier(&world.streams[0]).unwrap();
    let handles: Vec<Domain<B>> = world.comms.iter_mut().map(|comm| comm.domain(6).unwrap()).collect();
    std::thread::scope(|scope| {
        let lanes = handles.into_iter().zip(&more);
        let threads: Vec<_> =
            lanes.map(|(mut domain, stream)| scope.spawn(move || chain(&mut domain, stream, scaled(20)))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
    assert!(!B::is_idle(&world.streams[0]).unwrap(), "domain 0 went through without rank 1");
    world.comms[1].barrier(&world.streams[1]).unwrap();
    world.wait();
}

/// A domain has one handle, and while it is alive nobody else calls there. Dropped, it can be taken again.
pub fn misuse_domain_handles<B: Backend>(rig: &Rig<B>) {
    let mut r = Refusals::new(rig.world_with(2, |s| s.domains = true));
    let more = r.world.more_streams();
    for round in 0..3 {
        for domain in [0, 1, 7] {
            let taken = ApiMisuse::DomainTaken(domain);
            let mut handles: Vec<_> = r.world.comms.iter_mut().map(|comm| comm.domain(domain).unwrap()).collect();
            assert_eq!(handles.iter().map(Domain::domain).collect::<Vec<_>>(), [domain; 2]);
            for rank in 0..2 {
                let (comm, stream) = (&mut r.world.comms[rank], &r.world.streams[rank]);
                let on = options(|o| o.domain = domain);
                refused(comm.domain(domain).map(drop), taken.clone());
                refused(comm.with(on).barrier(stream), taken.clone());
                let called = comm.with(on).all_reduce(stream, &r.inputs[rank], &mut r.outputs[rank], ReduceOp::Sum);
                refused(called, taken.clone());
                // Before any other rank is waited for.
                refused(comm.split(None, 0).map(drop), taken.clone());
                if domain == 0 {
                    refused(comm.barrier(stream), taken.clone());
                    comm.with(options(|o| o.domain = 5)).barrier(stream).unwrap();
                } else {
                    comm.barrier(stream).unwrap();
                }
                let stream = [stream, &more[rank]][round % 2];
                handles[rank].barrier(stream).unwrap();
                // Options do not lead a handle elsewhere.
                handles[rank].with(options(|o| o.domain = 3)).barrier(stream).unwrap();
                assert_eq!(
                    handles[rank].plan(100, signal_core::Dtype::F32, ReduceOp::Sum).algorithm == Algorithm::Lamport,
                    domain == 0
                );
            }
            refused(Communicator::recover_all(&mut r.world.comms), taken.clone());
            refused(r.world.comms[0].recover(), taken.clone());
            refused(Communicator::split_all(&mut r.world.comms, &[(None, 0); 2]).map(drop), taken);
            for (handle, stream) in handles.iter().zip(&r.world.streams) {
                handle.wait(stream).unwrap();
            }
            r.world.wait();
        }
        for domain in [8, u32::MAX] {
            refused(r.world.comms[0].domain(domain).map(drop), ApiMisuse::Domain(domain));
        }
    }
    r.end();

    // Without domains there is one.
    let mut r = Refusals::new(rig.world(2));
    for rank in 0..2 {
        let (comm, stream) = (&mut r.world.comms[rank], &r.world.streams[rank]);
        refused(comm.domain(1).map(drop), ApiMisuse::DomainsClosed(1));
        refused(comm.domain(8).map(drop), ApiMisuse::Domain(8));
        comm.domain(0).unwrap().barrier(stream).unwrap();
    }
    r.end();
}

/// A handle's last call is what the next handle's first one is ordered behind, also on another stream.
pub fn domains_stay_in_order_from_handle_to_handle<B: Backend>(rig: &Rig<B>) {
    for ranks in [1, 2, 3] {
        in_order(&mut rig.world_with(ranks, |s| s.domains = true), |comm, call, stream, (from, to)| {
            let by = options(|o| (*o, o.algorithm) = (call.options, Some(Algorithm::OneStage)));
            if call.number % 4 == 3 {
                let on = options(|o| (*o, o.domain) = (by, 2));
                return comm.with(on).all_reduce(stream, from, to, ReduceOp::Sum);
            }
            comm.domain(2)?.with(by).all_reduce(stream, from, to, ReduceOp::Sum)
        });
    }
}

/// A rank misses a call on one domain: everybody learns of it, on every domain, and all recover once the handles are back.
pub fn domains_share_a_fault<B: Backend>(rig: &Rig<B>) {
    let deadline = Duration::from_millis(if is_scaled_down() { 1500 } else { 300 });
    let mut world = rig.world_with(2, |s| (s.domains, s.timeout) = (true, deadline));
    let more = world.more_streams();
    for _ in 0..2 {
        let mut take = |domain| world.comms.iter_mut().map(|comm| comm.domain(domain).unwrap()).collect::<Vec<_>>();
        let (mut fails, mut others) = (take(3), take(5));
        fails[0].barrier(&world.streams[0]).unwrap();
        let missed = |found: Result<()>, rank| {
            let found = found.unwrap_err();
            assert!(
                matches!(&found, Error::Timeout(t) if t.missing == [1] && t.domain == 3 && t.rank == rank),
                "{found}"
            );
        };
        missed(fails[0].wait(&world.streams[0]), 0);
        let poisoned = |found: Result<()>| assert!(matches!(found, Err(Error::Poisoned { .. })), "{found:?}");
        poisoned(others[0].barrier(&more[0]));
        poisoned(world.comms[0].barrier(&more[0]));
        missed(others[0].status(), 0);
        // Rank 1 learns of it in its next call, whatever that is.
        others[1].barrier(&more[1]).unwrap();
        missed(others[1].wait(&more[1]), 1);
        poisoned(fails[1].barrier(&world.streams[1]));

        drop(fails);
        refused(Communicator::recover_all(&mut world.comms), ApiMisuse::DomainTaken(5));
        poisoned(others[0].barrier(&more[0]));
        drop(others);
        Communicator::recover_all(&mut world.comms).unwrap();
        for domain in [3, 5] {
            world.each(|rank, comm, _| comm.domain(domain)?.barrier(&more[rank]));
        }
        world.each(|rank, comm, _| comm.wait(&more[rank]));
        works(&mut world);
    }
}

/// A handle may be used when its communicator is gone, which leaves no rank in the lurch.
pub fn domains_outlive_their_communicator<B: Backend>(rig: &Rig<B>) {
    let mut world = rig.world_with(2, |s| s.domains = true);
    let mut handles: Vec<Domain<B>> = world.comms.iter_mut().map(|comm| comm.domain(4).unwrap()).collect();
    drop(std::mem::take(&mut world.comms));
    std::thread::scope(|scope| {
        let lanes = handles.iter_mut().zip(&world.streams);
        let threads: Vec<_> = lanes.map(|(domain, stream)| scope.spawn(move || chain(domain, stream, 10))).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
