//! `signal soak` on CPU threads: a run with faults, one that repeats, and that its check can fail.
#![cfg(feature = "host")]
#![allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]

mod common;

use std::time::{Duration, Instant};

use common::{Run, signal, signal_with};

/// The number before a word of the counts at the end.
fn count(run: &Run, word: &str) -> u64 {
    let line = run.stdout.lines().rfind(|line| !line.starts_with('#')).unwrap();
    let (before, _) = line.split_once(word).unwrap();
    before.split_whitespace().last().unwrap().parse().unwrap()
}

#[test]
fn faults_are_survived_and_every_output_is_right() {
    let run = signal("soak --backend host --ranks 3 --minutes 0.03 --seed 7 --faults");
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""), "{run:?}");
    for part in ["backend host", "ranks 3", "minutes 0.03", "seed 0x7", "with faults", "deadline 600ms"] {
        assert!(run.stdout.lines().next().unwrap().contains(part), "{part} in {run:?}");
    }
    assert!(count(&run, " faults survived") >= 1 && count(&run, " rounds") >= 2, "{run:?}");
    assert!(count(&run, " calls") > count(&run, " outputs") && count(&run, " outputs") > 100, "{run:?}");
    assert_eq!(count(&run, " mismatches"), 0);
    assert!(run.stdout.contains(": OK\n") && run.stdout.contains(" missing"), "{run:?}");
}

#[test]
fn a_run_without_faults_has_none_and_ends_in_time() {
    let began = Instant::now();
    let line = "soak --ranks 2 --share-devices --minutes 0.005 --seed 0xfeed";
    let run = signal_with(line, &[("SIGNAL_HOST_DEVICES", "1"), ("SIGNAL_SCRATCH", "64K")]);
    assert_eq!((run.code, count(&run, " faults"), count(&run, " mismatches")), (Some(0), 0, 0), "{run:?}");
    for part in ["seed 0xfeed", "no faults", "deadline 60s", "scratch 64 KiB", "SIGNAL_SCRATCH=64K"] {
        assert!(run.stdout.contains(part), "{part} in {run:?}");
    }
    assert!(began.elapsed() < Duration::from_secs(20), "{:?}", began.elapsed());
}

#[test]
fn flipped_bits_are_found_and_named() {
    let corrupt = |round: u64| {
        let run = signal(&format!("soak --ranks 2 --seed 9 --corrupt 1 --first-round {round}"));
        run.refused(1, &format!("seed 0x9, round {round}: call "));
        assert!(run.stderr.contains("rank 1") && run.stderr.contains("1 element(s) differ"), "{run:?}");
        assert!(run.stderr.contains("of its output is 0x") && run.stderr.contains(", expected 0x"), "{run:?}");
        assert!(run.stdout.contains(": FAILED\n"), "{run:?}");
        assert_eq!(count(&run, " rounds"), 1);
        // One bit in each output of the rank.
        assert_eq!(count(&run, " mismatches") * 2, count(&run, " outputs"));
        run.stderr
    };
    // The same round is the same program with the same data.
    assert_eq!(corrupt(5), corrupt(5));
    assert_ne!(corrupt(5), corrupt(6));
}

#[test]
fn bad_arguments_are_refused() {
    for (arguments, reason) in [
        ("--ranks 0", "0 is not in 1..=8"),
        ("--ranks 9", "9 is not in 1..=8"),
        ("--minutes 0", "a number above 0"),
        ("--minutes soon", "a number above 0"),
        ("--seed 0xg", "'0xg' for '--seed"),
        ("--backend vulkan", "possible values: host, cuda, rocm"),
        ("--ranks 1 --faults", "--faults needs 2 ranks"),
        ("--corrupt 2", "the ranks are 0 to 1"),
        ("--no-such-flag", "--no-such-flag"),
    ] {
        signal(&format!("soak {arguments}")).refused(2, reason);
    }
    let few = signal_with("soak --ranks 3", &[("SIGNAL_HOST_DEVICES", "2")]);
    few.refused(2, "3 ranks need 3 devices, host has 2; --share-devices");
    signal_with("soak", &[("SIGNAL_TIMEOUT", "0")]).refused(1, "SIGNAL_TIMEOUT=0");
}
