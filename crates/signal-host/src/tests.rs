//! Tests of the whole backend.

use std::thread;
use std::time::{Duration, Instant};

use signal_core::backend::{Backend, MemoryKind};
use signal_core::error::{ApiMisuse, Error, Result};

use crate::sync::Shared;
use crate::testing::*;
use crate::*;

#[test]
fn work_on_a_stream_runs_in_order() {
    const COUNT: usize = 300;
    let bench = Bench::new();
    let (log, cursor) = (bench.buffer(COUNT * 8), bench.buffer(8));
    let gate = bench.hold(&bench.stream);
    for number in 0..COUNT as u64 {
        bench.launch(
            &bench.stream,
            APPEND,
            (1, 1),
            &[Host::address(&log), Host::address(&cursor), number],
            &[&log, &cursor],
        );
    }
    assert!(!Host::is_idle(&bench.stream).unwrap());
    gate.open();
    assert_eq!(bench.words(&log, COUNT), (0..COUNT as u64).collect::<Vec<_>>());
    assert_eq!(bench.stream.lanes(), 0);
}

#[test]
fn copies_fills_and_uploads_are_ordered_with_kernels() {
    let bench = Bench::new();
    let (a, b) = (bench.buffer(64), bench.buffer(64));
    let gate = bench.hold(&bench.stream);
    let mut source = 5u64.to_ne_bytes();
    Host::fill(&bench.stream, &a, 0, 64, 0).unwrap();
    Host::upload(&bench.stream, &source, &a, 8).unwrap();
    source.fill(0xff);
    bench.launch(&bench.stream, BUMP, (2, 4), &[Host::address(&a)], &[&a]);
    Host::copy(&bench.stream, (&a, 0), (&b, 16), 48).unwrap();
    Host::fill(&bench.stream, &a, 0, 64, 1).unwrap();
    Host::copy(&bench.stream, (&b, 16), (&b, 8), 24).unwrap();
    gate.open();
    assert_eq!(bench.words(&a, 8), [0x1_0000_0001; 8]);
    assert_eq!(bench.words(&b, 8), [0, 1, 6, 1, 1, 1, 1, 1]);
}

#[test]
fn kernels_of_two_streams_wait_for_each_other() {
    let bench = Bench::new();
    let other = Host::create_stream(&host().devices().unwrap()[1]).unwrap();
    assert_ne!(Host::stream_id(&bench.stream), Host::stream_id(&other));
    assert_eq!(Host::stream_device(&other), host().devices().unwrap()[1]);
    let module = Host::load(&Host::stream_device(&other)).unwrap();
    let second = Bench { host: host(), device: Host::stream_device(&other), module, stream: other };
    let flags = bench.buffer(256);
    let (first, last) = (Host::address(&flags), Host::address(&flags) + 128);
    for _ in 0..20 {
        Host::fill(&bench.stream, &flags, 0, 256, 0).unwrap();
        Host::synchronize(&bench.stream).unwrap();
        bench.launch(&bench.stream, MEET, (1, 1), &[first, last], &[&flags]);
        second.launch(&second.stream, MEET, (1, 1), &[last, first], &[&flags]);
        Host::synchronize(&second.stream).unwrap();
        Host::synchronize(&bench.stream).unwrap();
    }
}

#[test]
fn all_threads_of_a_grid_are_there_at_once() {
    let bench = Bench::new();
    for shape in [(512, 1), (64, 4), (1, 32), (3, 1), (128, 4)] {
        let counters = bench.buffer(128);
        let params = [Host::address(&counters), Host::address(&counters) + 64];
        bench.launch(&bench.stream, ASSEMBLE, shape, &params, &[&counters]);
        let seen = bench.words(&counters, 9);
        assert_eq!((seen[0], seen[8]), ((shape.0 * shape.1) as u64, 0), "{shape:?}");
    }
    // Grown for the first, reused by the others.
    assert_eq!(bench.stream.lanes(), 511);
}

#[test]
fn a_grid_hands_its_writes_to_later_work() {
    let bench = Bench::new();
    let numbers = bench.buffer(64 * 8);
    for _ in 0..50 {
        bench.launch(&bench.stream, BUMP, (16, 4), &[Host::address(&numbers)], &[&numbers]);
        // Other threads for the same numbers.
        bench.launch(&bench.stream, BUMP, (64, 1), &[Host::address(&numbers)], &[&numbers]);
    }
    assert_eq!(bench.words(&numbers, 64), [100; 64]);
}

#[test]
fn a_graph_is_replayed_on_its_own_buffers() {
    let bench = Bench::new();
    let (numbers, copies) = (bench.buffer(64), bench.buffer(64));
    Host::begin_capture(&bench.stream).unwrap();
    assert!(Host::is_capturing(&bench.stream).unwrap());
    let start = Host::record(&bench.stream).unwrap();
    {
        let scratch = bench.buffer(64);
        Host::upload(&bench.stream, &[0; 64], &scratch, 0).unwrap();
        bench.launch(&bench.stream, BUMP, (2, 4), &[Host::address(&scratch)], &[&scratch]);
        bench.launch(&bench.stream, BUMP, (8, 1), &[Host::address(&numbers)], &[&numbers]);
        Host::copy(&bench.stream, (&scratch, 0), (&copies, 0), 64).unwrap();
        Host::wait(&bench.stream, &start).unwrap();
    }
    let end = Host::record(&bench.stream).unwrap();
    let graph = Host::end_capture(&bench.stream).unwrap();
    assert!(!Host::is_capturing(&bench.stream).unwrap());
    assert!(Host::is_idle(&bench.stream).unwrap());
    assert_eq!(bench.words(&numbers, 8), [0; 8]);
    assert!(!Host::is_complete(&end).unwrap());
    assert!(matches!(Host::elapsed(&start, &end), Err(Error::Driver { .. })));
    for _ in 0..100 {
        Host::replay(&graph, &bench.stream).unwrap();
    }
    assert_eq!(bench.words(&numbers, 8), [100; 8]);
    assert_eq!(bench.words(&copies, 8), [1; 8]);
    assert!(Host::elapsed(&start, &end).unwrap() < Duration::from_secs(60));
    // A replay may outlive the graph's handle, and run on a stream that never launched.
    let stream = Host::create_stream(&bench.device).unwrap();
    let gate = bench.hold(&stream);
    Host::replay(&graph, &stream).unwrap();
    drop(graph);
    gate.open();
    Host::synchronize(&stream).unwrap();
    assert_eq!(bench.words(&numbers, 8), [101; 8]);
    drop((numbers, copies, gate));
    assert_eq!(bench.host.allocated_bytes(), 0);
}

#[test]
fn a_graph_may_hold_a_graph() {
    let bench = Bench::new();
    let numbers = bench.buffer(8);
    let capture = |work: &dyn Fn()| {
        Host::begin_capture(&bench.stream).unwrap();
        work();
        Host::end_capture(&bench.stream).unwrap()
    };
    let inner = capture(&|| bench.launch(&bench.stream, BUMP, (1, 1), &[Host::address(&numbers)], &[&numbers]));
    let outer = capture(&|| (0..3).for_each(|_| Host::replay(&inner, &bench.stream).unwrap()));
    drop(inner);
    Host::replay(&outer, &bench.stream).unwrap();
    Host::replay(&outer, &bench.stream).unwrap();
    assert_eq!(bench.words(&numbers, 1), [6]);
}

#[test]
fn events_order_streams_and_tell_time() {
    let bench = Bench::new();
    let other = Host::create_stream(&bench.device).unwrap();
    let numbers = bench.buffer(8);
    for round in 1..=20 {
        let gate = bench.hold(&bench.stream);
        let start = Host::record(&bench.stream).unwrap();
        bench.launch(&bench.stream, BUMP, (1, 1), &[Host::address(&numbers)], &[&numbers]);
        let end = Host::record(&bench.stream).unwrap();
        Host::wait(&other, &end).unwrap();
        bench.launch(&other, BUMP, (1, 1), &[Host::address(&numbers)], &[&numbers]);
        assert!(!Host::is_complete(&end).unwrap());
        assert!(!Host::is_idle(&other).unwrap());
        gate.open();
        Host::synchronize(&other).unwrap();
        assert!(Host::is_complete(&end).unwrap());
        assert!(Host::elapsed(&start, &end).unwrap() < Duration::from_secs(60));
        assert_eq!(bench.words(&numbers, 1), [2 * round]);
    }
}

#[test]
fn queued_work_keeps_its_buffers() {
    let bench = Bench::new();
    let gate = bench.hold(&bench.stream);
    let (used, kept) = (bench.buffer(1 << 20), bench.buffer(1 << 10));
    bench.launch(&bench.stream, BUMP, (8, 1), &[Host::address(&used)], &[&used]);
    Host::keep_until(&kept, &bench.stream);
    drop((used, kept));
    assert_eq!(bench.host.allocated_bytes(), (1 << 20) + (1 << 10) + 4);
    gate.open();
    Host::synchronize(&bench.stream).unwrap();
    assert_eq!(bench.host.allocated_bytes(), 4);
}

#[test]
fn a_dropped_stream_finishes_its_work() {
    let bench = Bench::new();
    let numbers = bench.buffer(64);
    let event = {
        let stream = Host::create_stream(&bench.device).unwrap();
        let gate = bench.hold(&stream);
        for _ in 0..10 {
            bench.launch(&stream, BUMP, (4, 2), &[Host::address(&numbers)], &[&numbers]);
        }
        let event = Host::record(&stream).unwrap();
        drop(stream.clone());
        drop(stream);
        assert!(!Host::is_complete(&event).unwrap());
        gate.open();
        event
    };
    Host::wait(&bench.stream, &event).unwrap();
    assert_eq!(bench.words(&numbers, 8), [10; 8]);
}

#[test]
fn streams_come_and_go() {
    let bench = Bench::new();
    let numbers = bench.buffer(16);
    for _ in 0..100 {
        let stream = Host::create_stream(&bench.device).unwrap();
        bench.launch(&stream, BUMP, (2, 1), &[Host::address(&numbers)], &[&numbers]);
        Host::wait(&bench.stream, &Host::record(&stream).unwrap()).unwrap();
        Host::synchronize(&bench.stream).unwrap();
    }
    assert_eq!(bench.words(&numbers, 2), [100, 100]);
}

#[test]
fn a_stream_serves_several_threads() {
    let bench = Shared::new(Bench::new());
    let (log, cursor) = (bench.buffer(400 * 8), bench.buffer(8));
    // Joined by hand: the end of `thread::scope` is another thing that ThreadSanitizer does not see.
    let threads: Vec<_> = (0..4)
        .map(|t| {
            let (bench, log, cursor) = (bench.clone(), log.clone(), cursor.clone());
            thread::spawn(move || {
                for i in 0..100 {
                    let params = [Host::address(&log), Host::address(&cursor), t * 100 + i];
                    bench.launch(&bench.stream, APPEND, (1, 1), &params, &[&log, &cursor]);
                    if i % 10 == 0 {
                        Host::synchronize(&bench.stream).unwrap();
                    }
                }
            })
        })
        .collect();
    for t in threads {
        t.join().unwrap();
    }
    Host::synchronize(&bench.stream).unwrap();
    assert!(Host::is_idle(&bench.stream).unwrap());
    let mut seen = bench.words(&log, 400);
    for t in 0..4 {
        let mine: Vec<_> = seen.iter().filter(|n| **n / 100 == t).collect();
        assert!(mine.is_sorted());
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..400).collect::<Vec<_>>());
}

#[test]
fn enqueuing_does_not_wait() {
    let bench = Bench::new();
    let gate = bench.hold(&bench.stream);
    let started = Instant::now();
    let big = bench.buffer(64 << 20);
    Host::fill(&bench.stream, &big, 0, 64 << 20, 3).unwrap();
    bench.launch(&bench.stream, BUMP, (8, 1), &[Host::address(&big)], &[&big]);
    drop(big);
    assert!(started.elapsed() < Duration::from_secs(10));
    assert!(!Host::is_idle(&bench.stream).unwrap());
    gate.open();
    Host::synchronize(&bench.stream).unwrap();
    assert!(Host::is_idle(&bench.stream).unwrap());
}

#[test]
fn what_the_host_wrote_is_seen_by_the_kernel() {
    let bench = Bench::new();
    let numbers = bench.buffer(8);
    let first = Host::host_pointer(&numbers).unwrap().cast::<u64>();
    for round in 0..50 {
        // SAFETY: the word lies in the live buffer; nothing is queued that touches it.
        unsafe { first.write(round) };
        bench.launch(&bench.stream, BUMP, (1, 1), &[Host::address(&numbers)], &[&numbers]);
        Host::synchronize(&bench.stream).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { first.read() }, round + 1);
    }
}

#[test]
fn misuse_is_named_and_enqueues_nothing() {
    let bench = Bench::new();
    let (buffer, stream) = (bench.buffer(64), &bench.stream);
    let elsewhere = Host::allocate(&bench.host.devices().unwrap()[1], 64, MemoryKind::Device).unwrap();
    let misuse = |result: Result<()>| match result {
        Err(Error::ApiMisuse(misuse)) => misuse,
        other => panic!("{other:?}"),
    };
    let range = |start, end| ApiMisuse::Range { start, end, len: 64 };
    assert_eq!(misuse(Host::upload(stream, &[0; 9], &buffer, 56)), range(56, 65));
    assert_eq!(misuse(Host::upload(stream, &[0], &buffer, usize::MAX)), range(usize::MAX, usize::MAX));
    assert_eq!(misuse(Host::download(stream, &buffer, 1, &mut [0; 64])), range(1, 65));
    assert_eq!(misuse(Host::fill(stream, &buffer, 64, 4, 0)), range(64, 68));
    assert_eq!(misuse(Host::copy(stream, (&buffer, 0), (&buffer, 32), 33)), range(32, 65));
    assert_eq!(misuse(Host::copy(stream, (&buffer, 60), (&buffer, 0), 8)), range(60, 68));
    for (offset, bytes) in [(0, 6), (2, 4)] {
        assert!(matches!(misuse(Host::fill(stream, &buffer, offset, bytes, 0)), ApiMisuse::Setting { .. }));
    }
    let (found, expected) = ("CPU 1".to_string(), "CPU 0".to_string());
    let wrong = |what| ApiMisuse::WrongDevice { what, found: found.clone(), expected: expected.clone() };
    assert_eq!(misuse(Host::upload(stream, &[0], &elsewhere, 0)), wrong("buffer"));
    assert_eq!(misuse(Host::copy(stream, (&buffer, 0), (&elsewhere, 0), 1)), wrong("buffer"));
    let launch = |shape, params: &[u64]| misuse(bench.try_launch(stream, BUMP, shape, params, &[]));
    assert_eq!(launch((0, 1), &[0]), ApiMisuse::Grid { blocks: 0, budget: 1024 });
    assert_eq!(launch((1025, 1), &[0]), ApiMisuse::Grid { blocks: 1025, budget: 1024 });
    assert_eq!(launch((9, 1024), &[0]), ApiMisuse::Grid { blocks: 9, budget: 8 });
    assert_eq!(launch((1, 0), &[0]), ApiMisuse::Threads { threads: 0, limit: 1024 });
    assert_eq!(launch((1, 1025), &[0]), ApiMisuse::Threads { threads: 1025, limit: 1024 });
    assert_eq!(launch((1, 1), &[0; 129]), ApiMisuse::BufferTooSmall { found: 1024, needed: 1032 });
    let second = Host::create_stream(&Host::buffer_device(&elsewhere)).unwrap();
    let module = misuse(bench.try_launch(&second, BUMP, (1, 1), &[0], &[]));
    assert_eq!(module, ApiMisuse::WrongDevice { what: "module", found: "CPU 0".into(), expected: "CPU 1".into() });
    let (here, there) = (Host::record(stream).unwrap(), Host::record(&second).unwrap());
    assert_eq!(misuse(Host::elapsed(&here, &there).map(drop)), wrong("event"));
    Host::begin_capture(&second).unwrap();
    let graph = Host::end_capture(&second).unwrap();
    assert_eq!(misuse(Host::replay(&graph, stream)), wrong("graph"));
    assert_eq!(stream.lanes(), 0);
    assert_eq!(bench.words(&buffer, 8), [0; 8]);
}

#[test]
fn capture_refuses_what_it_cannot_record() {
    let bench = Bench::new();
    let (stream, buffer) = (&bench.stream, bench.buffer(8));
    let is = |result: Result<()>, call, state| assert_eq!(result, Err(ApiMisuse::Capture { call, state }.into()));
    is(Host::end_capture(stream).map(drop), "end_capture", "not capturing");
    let before = Host::record(stream).unwrap();
    Host::begin_capture(stream).unwrap();
    is(Host::begin_capture(stream), "begin_capture", "capturing");
    is(Host::synchronize(stream), "synchronize", "capturing");
    is(Host::download(stream, &buffer, 0, &mut [0]), "download", "capturing");
    is(Host::wait(stream, &before), "wait", "capturing");
    let inside = Host::record(stream).unwrap();
    let _first = Host::end_capture(stream).unwrap();
    is(Host::wait(stream, &inside), "wait for an event of a capture", "not capturing");
    Host::begin_capture(stream).unwrap();
    is(Host::wait(stream, &inside), "wait", "capturing");
    // A stream may go away while it captures.
    drop(bench);
}

#[test]
fn running_out_of_threads_is_the_callers_error() {
    let config = HostConfig { max_threads: 100, ..HostConfig::default() };
    let bench = Bench::on(Host::open(IMAGE, config).unwrap());
    let numbers = bench.buffer(1024 * 8);
    let launch = |blocks| bench.try_launch(&bench.stream, BUMP, (blocks, 1), &[Host::address(&numbers)], &[&numbers]);
    for _ in 0..2 {
        let refused = launch(101);
        assert!(matches!(refused, Err(Error::Driver { call: "starting threads", .. })), "{refused:?}");
        assert!(Host::is_idle(&bench.stream).unwrap());
        assert_eq!(bench.stream.lanes(), 0);
    }
    launch(100).unwrap();
    assert_eq!(bench.words(&numbers, 101), [[1; 100].as_slice(), &[0]].concat());
    assert!(matches!(Host::create_stream(&bench.device), Err(Error::Driver { call: "starting threads", .. })));
    // The threads of a stream that goes away are free for others, soon.
    let Bench { host, device, stream, .. } = bench;
    drop(stream);
    while host.threads() > 0 {
        thread::yield_now();
    }
    Host::create_stream(&device).unwrap();
}

#[test]
fn the_image_describes_itself() {
    let bench = Bench::new();
    assert_eq!(Host::fingerprint(&bench.module), 0xfeed);
    for kernel in [APPEND, MEET, ASSEMBLE, HOLD, BUMP] {
        assert_eq!(Host::resident_blocks(&bench.module, kernel.into(), 1), Ok(1024));
    }
    assert_eq!(Host::NAME, "host");
    let debug = format!("{:?} {:?} {:?} {:?}", bench.host, bench.device, bench.stream, bench.module);
    assert!(debug.contains("CPU 0"));
}
