//! `signal run`: a timeline that viewers open, of programs that end well and of others.
#![cfg(feature = "host")]
#![allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]

mod common;

use common::{fresh_path, parse, signal};
use serde_json::Value;

const BENCH: &str = "bench all-reduce -b 1K -e 1K --batches 3 --iters 5 --warmup 0";

fn traced(name: &str, program: &str) -> (common::Run, Vec<Value>) {
    let path = fresh_path(name);
    let run = signal(&format!("run --trace {} -- {program}", path.display()));
    let events = parse(&path).as_array().unwrap().clone();
    (run, events)
}

fn names<'a>(events: &'a [Value], start: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["name"].as_str().unwrap().starts_with(start)).collect()
}

#[test]
fn a_bench_in_threads_and_in_processes() {
    let tool = env!("CARGO_BIN_EXE_signal");
    for (ranks, processes) in [("--ranks 3", 1), ("--spawn 2", 2)] {
        let (run, events) = traced(&format!("run{processes}.json"), &format!("{tool} {BENCH} {ranks}"));
        run.rows();
        assert!(run.stdout.contains("calls\n"), "{run:?}");
        let calls = names(&events, "all-reduce of 256 f32 (sum, ");
        assert!(calls.len() > 40, "{}", calls.len());
        assert_eq!(names(&events, "enqueue all-reduce of 256 f32 (sum, ").len(), calls.len());
        let mut found: Vec<_> = calls.iter().map(|call| call["pid"].as_u64().unwrap()).collect();
        found.sort_unstable();
        found.dedup();
        assert_eq!(found.len(), processes);
        assert!(names(&events, "wait for rank 0").iter().all(|wait| wait["dur"].as_f64().unwrap() >= 0.0));
        // Each span is on a track that has a name.
        let tracks: Vec<_> = names(&events, "thread_name").iter().map(|event| event["tid"].clone()).collect();
        assert!(calls.iter().all(|call| tracks.contains(&call["tid"])));
    }
}

#[test]
fn a_program_that_fails_is_this_ones_failure() {
    let (run, events) = traced("run-false.json", "false");
    run.refused(1, "false: exit status: 1");
    assert!(events.is_empty());
    traced("run-sh.json", "sh no-such-script").0.code.filter(|code| *code == 127 || *code == 2).unwrap();
    traced("run-none.json", "no-such-program").0.refused(1, "no-such-program: ");
    traced("run-true.json", "true").0.refused(1, "the program made no call of the library");
    let path = fresh_path("no-such-folder").join("run.json");
    signal(&format!("run --trace {} -- true", path.display())).refused(1, "no-such-folder");
    signal("run --trace x").refused(2, "<PROGRAM>");
    signal("run -- true").refused(2, "--trace <FILE>");
    // The tool's own errors are passed on.
    let (run, _) = traced("run-wrong.json", &format!("{} bench all-reduce --ranks 99", env!("CARGO_BIN_EXE_signal")));
    assert_eq!(run.code, Some(2), "{run:?}");
}
