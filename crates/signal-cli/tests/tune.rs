//! `signal tune` on CPU threads: what it writes is what the library takes.
#![cfg(feature = "host")]
#![allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]

mod common;

use std::fs;
use std::path::Path;

use common::{fresh_path, parse, signal, signal_with};
use signal_comm::{Algorithm, Collective, Tuning};

fn tune(line: &str, path: &Path) -> common::Run {
    signal(&format!("tune {line} --graph 0 -o {}", path.display()))
}

#[test]
fn what_was_measured_is_what_calls_take() {
    let path = fresh_path("tune.toml");
    let run = tune("all-reduce broadcast -b 512 -e 1K", &path);
    let rows = run.rows();
    assert_eq!(rows.iter().map(|row| row[0].as_str()).collect::<Vec<_>>(), ["512", "1024", "512", "1024"], "{run:?}");
    let tuning = Tuning::read(&path).unwrap();
    let [reduce, broadcast] = tuning.tables() else { panic!("{tuning:?}") };
    assert_eq!(
        (reduce.collective, reduce.world, broadcast.collective),
        (Collective::AllReduce, 2, Collective::Broadcast)
    );
    // Every algorithm, the fastest first, which the table on standard output names.
    let first: Vec<_> = reduce.rows.iter().filter(|row| row.max_bytes == 512).collect();
    assert_eq!(first.len(), Algorithm::ALL_REDUCE.len(), "{reduce:?}");
    assert!(first.is_sorted_by(|a, b| a.us <= b.us) && first[0].algorithm.name() == rows[0][1], "{reduce:?} {rows:?}");

    // A file that says otherwise is obeyed.
    let text = fs::read_to_string(&path).unwrap();
    let only = text.lines().filter(|line| !line.contains("max_bytes") || line.contains("two-stage-push"));
    fs::write(
        &path,
        only.map(|line| format!("{line}\n"))
            .collect::<String>()
            .split("\n[[table]]\ncollective = \"broadcast\"")
            .next()
            .unwrap(),
    )
    .unwrap();
    let json = fresh_path("tune.json");
    let line = format!("bench all-reduce -b 1K -e 2K --batches 3 --iters 5 --json {}", json.display());
    signal_with(&line, &[("SIGNAL_TUNING", path.to_str().unwrap())]).rows();
    let report = parse(&json);
    assert_eq!(report["rows"][0]["algorithm"], "two-stage-push");
    assert_ne!(report["rows"][1]["algorithm"], "two-stage-push");
}

#[test]
fn a_file_keeps_what_was_not_measured_again() {
    let path = fresh_path("tune-twice.toml");
    tune("gather -b 512 -e 512", &path).rows();
    tune("gather -b 512 -e 512 --ranks 3 --note again", &path).rows();
    tune("gather -b 1K -e 1K --spawn 2", &path).rows();
    let tuning = Tuning::read(&path).unwrap();
    let mut found: Vec<_> = tuning.tables().iter().map(|table| (table.world, table.rows[0].max_bytes)).collect();
    found.sort_unstable();
    assert_eq!(found, [(2, 1024), (3, 512)]);
    assert!(tuning.tables().iter().any(|table| table.note.starts_with("again; bf16, enqueued one by one")));
    assert!(!path.with_extension("toml.new").exists());
}

#[test]
fn the_file_may_be_standard_output() {
    let run = signal("tune scatter -b 512 -e 512 --graph 2");
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(Tuning::parse(&run.stdout).unwrap().tables().len(), 1);
    assert!(run.stderr.contains("# scatter of 2 ranks"), "{run:?}");
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_measured() {
    signal("tune send-recv").refused(2, "send-recv has no plans to tune");
    signal("tune all-reduce -b 2K -e 1K").refused(2, "-b 2048 is larger than -e 1024");
    signal("tune all-reduce -d f64").refused(2, "possible values: f32, f16, bf16");
    let line = |path: &Path| format!("tune gather -b 512 -e 512 -o {}", path.display());
    signal(&line(&fresh_path("no-such-folder").join("tune.toml"))).refused(1, "no-such-folder");
    let path = fresh_path("tune-other.toml");
    fs::write(&path, "not a table").unwrap();
    signal(&line(&path)).refused(1, "tune-other.toml: line 1: ");
    fs::write(&path, "format = 1\nlayout = 0\n").unwrap();
    signal(&line(&path)).refused(1, "run `signal tune` again");
    tune("gather -b 512 -e 512", &fresh_path("tune-of-here.toml")).rows();
    let other = fs::read_to_string(fresh_path("tune-x").with_file_name("tune-of-here.toml")).unwrap();
    fs::write(&path, other.replace("family = \"host\"", "family = \"amd\"")).unwrap();
    signal(&line(&path)).refused(1, "measured on amd");
    // The library refuses it too.
    let bench = "bench all-reduce -b 1K -e 1K";
    signal_with(bench, &[("SIGNAL_TUNING", path.to_str().unwrap())]).refused(1, "measured on amd");
    signal_with(bench, &[("SIGNAL_TUNING", "absent.toml")]).refused(1, "SIGNAL_TUNING: absent.toml: ");
}
