//! Arguments that cannot be meant are refused in one line, before anything is launched.

mod common;

use std::time::{Duration, Instant};

use common::signal;

#[test]
fn bad_arguments_are_refused_at_once() {
    let start = Instant::now();
    for (arguments, reason) in [
        ("--ranks 0", "0 is not in 1..=8"),
        ("--ranks 9", "9 is not in 1..=8"),
        ("--ranks two", "'two' for '--ranks"),
        ("-b 2K -e 1K", "-b 2048 is larger than -e 1024"),
        ("-b 0", "at least 1 byte"),
        ("-b 1 -e 4", "-b 1 holds no whole f32 element"),
        ("-b 1X", "with K, M, G or nothing"),
        ("-e 99999999999G", "address space"),
        ("-f 1", "2 or more"),
        ("-f 0", "2 or more"),
        ("-d f64", "possible values: f32, f16, bf16"),
        (
            "--algo ring",
            "all-reduce has no such algorithm [possible values: auto, one-stage, two-stage, two-stage-push, lamport, two-shot, ll]",
        ),
        ("-a pull", "all-reduce has no such algorithm"),
        ("-o xor", "possible values: sum, min, max, prod, avg"),
        ("--root 0", "--root 0: all-reduce has no root"),
        ("--buffers none", "possible values: same, rotating"),
        ("--buffers same --sets 2", "--buffers same has one set of buffers"),
        ("--backend vulkan", "possible values: host, cuda, rocm"),
        ("--spawn 0", "0 is not in 1..=8"),
        ("--spawn 9", "9 is not in 1..=8"),
        ("--spawn 2 --ranks 2", "'--spawn <N>' cannot be used with '--ranks <RANKS>'"),
        ("--launched --ranks 2", "'--launched' cannot be used with '--ranks <RANKS>'"),
        ("--launched --spawn 2", "'--launched' cannot be used with '--spawn <N>'"),
        ("--graph 0", "0 is not in 1..=10000"),
        ("--graph 3 --iters 3", "cannot be used with"),
        ("--iters 0", "0 is not in"),
        ("--blocks 0", "0 is not in"),
        ("--seed x", "'x' for '--seed"),
        ("--hidden 64", "--norm <NORM>"),
        ("--norm batch", "possible values: rms, layer"),
        ("--norm rms --norm-output e5m2", "possible values: plain, e4m3, e4m3-row, e4m3-group, i8-row, mxfp8, nvfp4"),
        ("--norm rms --norm-output mxfp8 --hidden 33", "mxfp8 has blocks of 32 elements"),
        ("--norm rms -o max", "the norm is of sums"),
        ("--norm rms --sweep", "--norm goes with none of"),
        ("--no-such-flag", "--no-such-flag"),
    ] {
        signal(&format!("bench all-reduce {arguments}")).refused(2, reason);
    }
    for (arguments, reason) in [
        ("all-scatter", "'all-scatter' for '<COLLECTIVE>' [possible values: all-reduce, reduce-scatter, all-gather"),
        ("all-gather -a two-stage", "all-gather has no such algorithm [possible values: auto, pull, push, ll]"),
        ("broadcast --op sum", "--op sum: broadcast reduces nothing"),
        ("send-recv --root 0", "--root 0: send-recv has no root"),
        ("gather --root -1", "-1"),
        ("--ranks 2", "<COLLECTIVE>"),
    ] {
        signal(&format!("bench {arguments}")).refused(2, reason);
    }
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn a_backend_that_is_not_compiled_in_names_its_feature() {
    for (backend, compiled) in
        [("host", cfg!(feature = "host")), ("cuda", cfg!(feature = "cuda")), ("rocm", cfg!(feature = "rocm"))]
    {
        if !compiled {
            signal(&format!("bench all-reduce --backend {backend}")).refused(2, &format!("--features {backend}"));
        }
    }
}

#[cfg(feature = "host")]
#[test]
fn what_only_the_machine_can_refuse_is_refused_before_the_table() {
    for (arguments, code, reason) in [
        ("-e 1K --corrupt 2", 2, "the ranks are 0 to 1"),
        ("-b 1G -e 256G", 2, "which has"),
        ("-e 1K --json /no/such/directory/file", 1, "/no/such/directory/file"),
        ("-e 1K --dump /dev/null/directory", 1, "/dev/null/directory"),
        ("-e 1K --blocks 100000", 1, "100000 blocks"),
        ("-e 1K --spawn 2 --corrupt 2", 2, "the ranks are 0 to 1"),
        ("-e 1K --spawn 3 --blocks 100000", 1, "100000 blocks"),
        ("-e 1K --spawn 3 --json /no/such/directory/file", 1, "/no/such/directory/file"),
        ("-b 1G -e 256G --spawn 2", 2, "which has"),
    ] {
        let run = signal(&format!("bench all-reduce {arguments}"));
        run.refused(code, reason);
        assert!(run.stdout.lines().all(|line| line.starts_with('#')), "{run:?}");
    }
    for (arguments, reason) in [
        ("reduce --ranks 2 --root 2", "--root 2: the ranks are 0 to 1"),
        ("broadcast --spawn 3 --root 3", "--root 3: the ranks are 0 to 2"),
        ("all-gather --ranks 3 -b 8", "8 bytes hold no whole f32 element in each of 3 parts of all-gather"),
        ("all-to-all --spawn 3 -b 8", "8 bytes hold no whole f32 element in each of 3 parts of all-to-all"),
    ] {
        signal(&format!("bench {arguments}")).refused(2, reason);
    }
    let few = common::signal_with("bench all-reduce -e 1K --ranks 3", &[("SIGNAL_HOST_DEVICES", "2")]);
    few.refused(2, "3 ranks need 3 devices, host has 2; --share-devices");
    let few = common::signal_with("bench all-reduce -e 1K --spawn 3", &[("SIGNAL_HOST_DEVICES", "2")]);
    few.refused(2, "3 ranks need 3 devices, host has 2; --share-devices");
}

#[test]
fn help_lists_the_options() {
    let help = signal("bench all-reduce --help");
    assert_eq!(help.code, Some(0));
    for option in [
        "--backend",
        "--ranks",
        "--spawn",
        "--launched",
        "-b,",
        "-e,",
        "-f,",
        "-d,",
        "-a,",
        "-o,",
        "--root",
        "--buffers",
        "send-recv",
        "--graph",
        "--json",
        "--dump",
        "--seed",
    ] {
        assert!(help.stdout.contains(option), "{option} in {}", help.stdout);
    }
    assert!(!help.stdout.contains("--corrupt"));
}
