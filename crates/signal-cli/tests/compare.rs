//! `signal bench --compare`: refusals everywhere, and through the ROCm backend on libraries that stand for the HIP runtime and RCCL: `LD_LIBRARY_PATH` has them
//! where ci/test.sh runs the ignored cases.
#![allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]

mod common;

use common::signal;
#[cfg(feature = "rocm")]
use common::{Run, fresh_path, parse, signal_with};

#[test]
fn what_cannot_be_compared_is_refused_at_once() {
    signal("bench all-reduce --compare nccl").refused(2, "NCCL runs on the cuda backend, and this is host");
    signal("bench all-reduce --backend cuda --compare rccl")
        .refused(2, "RCCL runs on the rocm backend, and this is cuda");
    signal("bench all-reduce --backend rocm --compare rccl,nccl").refused(2, "--compare nccl");
    signal("bench all-reduce --compare gloo").refused(2, "possible values: nccl, rccl");
    signal("bench all-reduce --compare nccl --norm rms").refused(2, "cannot be used with");
}

#[cfg(feature = "rocm")]
fn rocm(line: &str, fails: &str) -> Run {
    let short = "--batches 3 --iters 5 --warmup 1 -b 512 -e 4K";
    let library = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let variables = [("NCCL_ABI_FAILS", fails), ("LD_LIBRARY_PATH", &library), ("SIGNAL_TIMEOUT", "2")];
    signal_with(&format!("bench {line} --backend rocm --compare rccl {short}"), &variables)
}

#[cfg(feature = "rocm")]
#[test]
#[ignore = "needs the libraries of tests/hip-abi and tests/nccl-abi"]
fn the_library_is_measured_beside() {
    let json = fresh_path("compare.json");
    for collective in [
        "all-reduce",
        "all-reduce -d bf16 --ranks 3",
        "reduce-scatter",
        "all-gather --ranks 3",
        "broadcast --root 1",
        "reduce --root 1",
        "scatter",
        "gather --root 1 --ranks 3",
        "all-to-all --ranks 3",
        "send-recv --ranks 3",
    ] {
        let ranks = if collective.contains("--ranks") { "" } else { "--ranks 2" };
        let run = rocm(&format!("{collective} {ranks} --json {}", json.display()), "");
        assert_eq!(run.code, Some(0), "{collective}: {run:?}");
        assert_eq!(run.stdout.matches(" rccl 2.28.9:").count(), 4, "{run:?}");
        assert!(run.stdout.contains("x Signal's"), "{run:?}");
        let report = parse(&json);
        for row in report["rows"].as_array().unwrap() {
            let other = &row["contenders"][0];
            assert_eq!((&other["name"], &other["refusal"]), (&"rccl".into(), &serde_json::Value::Null));
            for place in ["out_of_place", "in_place"] {
                let lacks = row[place].is_null() || (collective.starts_with("all-to-all") && place == "in_place");
                assert_eq!(other[place].is_null(), lacks, "{collective}: {row}");
                assert!(lacks || other[place]["wrong"] == 0, "{collective}: {row}");
            }
        }
    }
}

#[cfg(feature = "rocm")]
#[test]
#[ignore = "needs the libraries of tests/hip-abi and tests/nccl-abi"]
fn a_library_that_fails_is_told_and_nothing_hangs() {
    for collective in ["all-reduce", "all-gather"] {
        let run = rocm(&format!("{collective} --ranks 2"), "corrupt");
        assert_eq!(run.code, Some(1), "{run:?}");
        assert!(run.stdout.contains("WRONG") && run.stdout.contains("FAILED"), "{run:?}");
    }
    let run = rocm("all-reduce --ranks 2", "init");
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stderr.contains("ncclCommInitRank failed: a failure that a test asked for (1)"), "{run:?}");
    let run = rocm("all-reduce --ranks 2", "hang");
    assert_eq!(run.code, Some(1), "{run:?}");
    assert!(run.stderr.contains("RCCL did not end within 4 s"), "{run:?}");
    rocm("all-reduce --ranks 1", "").refused(2, "of one rank there is nothing to compare");
    let line = "bench all-reduce --backend rocm --ranks 2 --compare rccl";
    let library = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let absent = [("LD_LIBRARY_PATH", library.as_str()), ("SIGNAL_RCCL", "/nowhere/librccl.so.1")];
    signal_with(line, &absent).refused(1, "RCCL cannot be loaded; tried /nowhere/librccl.so.1");
}
