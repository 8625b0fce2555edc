//! `signal doctor`: what is there, what is not, and why.

mod common;

use common::signal_with;

#[cfg(feature = "host")]
#[test]
fn the_host_backend_is_listed_with_its_peers() {
    let run = signal_with("doctor", &[("SIGNAL_HOST_DEVICES", "3"), ("SIGNAL_SCRATCH", "2M")]);
    assert_eq!(run.code, Some(0), "{run:?}");
    assert!(run.stdout.contains("backend host: usable"), "{run:?}");
    // 3 devices reach each other in both directions.
    assert_eq!(run.stdout.matches(" CAN ").count() + run.stdout.matches(" CAN\n").count(), 6, "{}", run.stdout);
    assert!(!run.stdout.contains("CANNOT"));
    for part in [
        "ranks share memory of their devices",
        "38 MiB peer-visible",
        "SIGNAL_SCRATCH=2M",
        "SIGNAL_HOST_DEVICES=3",
        "24.8 MiB Signal",
    ] {
        assert!(run.stdout.contains(part), "{part} in {}", run.stdout);
    }
}

#[cfg(feature = "host")]
#[test]
fn memory_of_the_host_is_said_to_be_slow() {
    let run = signal_with("doctor", &[("SIGNAL_HOST_DEVICES", "2"), ("SIGNAL_P2P", "0")]);
    assert!(run.stdout.contains("pinned memory of the host, which is slow: SIGNAL_P2P=0"), "{run:?}");
}

#[cfg(feature = "host")]
#[test]
fn json_names_every_backend() {
    let run = signal_with("doctor --json", &[("SIGNAL_HOST_DEVICES", "2")]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let report: serde_json::Value = serde_json::from_str(&run.stdout).unwrap();
    let names: Vec<_> = report["backends"].as_array().unwrap().iter().map(|b| b["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["host", "cuda", "rocm"]);
    let host = &report["backends"][0];
    assert_eq!((&host["usable"], &host["problem"]), (&true.into(), &serde_json::Value::Null));
    assert!(host["devices"][1]["image"]["ok"].is_string());
    assert_eq!(host["peers"][0][1]["can"], true);
    for matrix in ["read_gb_s", "barrier_us"] {
        for (row, column) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            assert!(host["matrices"][matrix][row][column].as_f64().unwrap() > 0.0, "{host}");
        }
    }
    assert_eq!(
        (&host["processes"], &host["pinned"]),
        (&serde_json::json!({"ok": null}), &serde_json::json!({"ok": null}))
    );
    assert!(host["verdicts"].as_array().unwrap().iter().all(|verdict| verdict["works"] == true), "{host}");
    for (index, compiled) in [(1, cfg!(feature = "cuda")), (2, cfg!(feature = "rocm"))] {
        let backend = &report["backends"][index];
        assert_eq!(backend["compiled"], compiled);
        assert!(backend["usable"] == true || backend["problem"].is_string(), "{backend}");
    }
    let memory = &report["memory"]["ok"];
    assert_eq!(memory["signal_bytes"], 25_952_272);
}

#[cfg(feature = "host")]
#[test]
fn verdicts_come_last_and_variables_of_others_are_explained() {
    let run = signal_with("doctor --quick", &[("SIGNAL_HOST_DEVICES", "2"), ("CUDA_LAUNCH_BLOCKING", "1")]);
    assert_eq!(run.code, Some(0), "{run:?}");
    let verdict = run.stdout.split_once("\nverdict\n").unwrap().1;
    assert!(verdict.contains("host: collectives: yes\n"), "{verdict}");
    assert!(run.stdout.contains("CUDA_LAUNCH_BLOCKING=1: 1: each launch waits"), "{run:?}");
    // Nothing is measured, no process started.
    assert!(!run.stdout.contains("GB/s") && !verdict.contains("processes"), "{run:?}");
    for (feature, compiled) in [("cuda", cfg!(feature = "cuda")), ("rocm", cfg!(feature = "rocm"))] {
        let refused = verdict.contains(&format!("{feature}: collectives: no: "));
        assert!(compiled || (refused && verdict.contains(&format!("--features {feature}"))), "{verdict}");
    }
}

#[test]
fn settings_that_cannot_be_read_are_named() {
    let run = signal_with("doctor", &[("SIGNAL_TIMEOUT", "soon")]);
    run.refused(1, "no backend is usable");
    assert!(run.stdout.contains("no communicator can be made") && run.stdout.contains("soon"), "{run:?}");
}

#[cfg(not(any(feature = "host", feature = "cuda", feature = "rocm")))]
#[test]
fn nothing_compiled_in_is_an_error_that_names_the_features() {
    let run = signal_with("doctor", &[]);
    run.refused(1, "no backend is usable");
    assert!(run.stdout.contains("--features host"), "{run:?}");
}
