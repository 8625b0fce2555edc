//! `signal bench` whose ranks are processes: the same rows, reports and files as from one process, and an end for all
//! processes when one fails, is killed or loses its parent.
#![cfg(feature = "host")]
#![allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]

mod common;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use common::{Run, command, fresh_path, parse, signal, signal_with};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

const SHORT: &str = "--batches 3 --iters 7 --warmup 1";
/// Less than the deadline of a call, which nothing here waits for.
const PROMPT: Duration = Duration::from_secs(30);

#[test]
fn processes_have_the_rows_of_one() {
    for (world, dtype, more) in [
        (1, "f32", SHORT),
        (2, "f32", SHORT),
        (3, "bf16", "--batches 3 --algo two-stage --memory local --sets 2"),
        (2, "f16", "--batches 3 --graph 3"),
        (2, "f32", "--batches 3 --sweep"),
    ] {
        let run = signal(&format!("bench all-reduce --spawn {world} -b 1002 -e 40K -f 6 -d {dtype} {more}"));
        let rows = run.rows();
        assert_eq!(rows.len(), 3, "{run:?}");
        for row in rows {
            assert_eq!(
                (row.len(), row[2].as_str(), row[9].as_str(), row[15].as_str()),
                (17, dtype, "0", "0"),
                "{row:?}"
            );
        }
        let header = |line: &str| run.stdout.lines().filter(|found| found.contains(line)).count();
        assert_eq!(header(&format!("ranks {world} in processes")), 1);
        assert_eq!(header("#  Rank"), world);
    }
    let line = format!("bench all-reduce -e 1K --spawn 2 --share-devices {SHORT}");
    signal_with(&line, &[("SIGNAL_HOST_DEVICES", "1")]).rows();
}

#[test]
fn processes_write_what_one_writes() {
    for collective in ["all-reduce", "reduce-scatter"] {
        one_and_three(collective);
    }
}

fn one_and_three(collective: &str) {
    let run = |name: &str, ranks: &str| {
        let name = format!("{name}_{collective}");
        let (json, dump) = (fresh_path(&format!("{name}.json")), fresh_path(&name));
        let line = format!("bench {collective} {ranks} -b 1K -e 4K -f 4 -d f16 --seed 9 {SHORT}");
        signal(&format!("{line} --json {} --dump {}", json.display(), dump.display())).rows();
        let mut files: Vec<_> = fs::read_dir(&dump).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        let files = files.iter().map(|path| (path.file_name().unwrap().to_owned(), fs::read(path).unwrap()));
        (parse(&json), files.collect::<Vec<_>>())
    };
    let (one, one_files) = run("one_process", "--ranks 3");
    let (three, three_files) = run("three_processes", "--spawn 3");
    assert_eq!(one_files.len(), 2 * 3 * 3 + 1);
    assert!(one_files == three_files);
    assert_eq!((&one["arguments"]["processes"], &three["arguments"]["processes"]), (&false.into(), &true.into()));
    assert_eq!(three["error"], Value::Null);
    let devices = |report: &Value| report["devices"].as_array().unwrap().clone();
    assert_eq!(devices(&one), devices(&three));
    // The id by which ranks meet is a secret.
    assert_eq!(three["environment"], Value::Array(Vec::new()));
    let measured = |report: &Value| -> Vec<Value> {
        let rows = report["rows"].as_array().unwrap().iter();
        let what = |row: &Value| row["out_of_place"]["max_error"].clone();
        rows.flat_map(|row| [row["bytes"].clone(), row["sets"].clone(), what(row)]).collect()
    };
    assert_eq!(measured(&one), measured(&three));
}

#[test]
fn a_flipped_bit_of_any_process_is_found() {
    for (rank, more) in [(0, "-d f32"), (2, "-d bf16 --graph 6")] {
        let json = fresh_path(&format!("processes_corrupt_{rank}.json"));
        let line = format!("bench all-reduce --spawn 3 -e 2K --corrupt {rank} {more} --batches 3 --json");
        let run = signal(&format!("{line} {}", json.display()));
        run.refused(1, "error: 4 elements differ from the reference");
        assert!(run.stdout.contains("# Wrong elements: 4 FAILED"));
        let report = parse(&json);
        assert_eq!(report["rows"][1]["in_place"]["wrong"], 1);
        assert!(report["error"].as_str().unwrap().contains("4 elements"));
    }
}

/// With this seed the flipped bit takes the one element further from the exact sum, out of place.
#[test]
fn the_largest_error_is_that_of_any_process() {
    let errors = |ranks: &str| {
        let json = fresh_path(&format!("error{ranks}.json"));
        let line = format!("bench all-reduce --{ranks} 2 -b 4 -e 4 --seed 1 --corrupt 1 {SHORT} --json");
        signal(&format!("{line} {}", json.display())).refused(1, "error: 2 elements differ from the reference");
        let report = parse(&json);
        ["out_of_place", "in_place"].map(|place| report["rows"][0][place]["max_error"].clone())
    };
    let expected = errors("ranks");
    assert_ne!(expected[0], expected[1]);
    assert_eq!(errors("spawn"), expected);
}

#[test]
fn an_error_of_one_process_ends_all_with_its_message() {
    let (json, dump) = (fresh_path("processes_failed.json"), fresh_path("processes_failed"));
    // Where rank 1 alone cannot write.
    fs::create_dir_all(dump.join("2048_rank1_input.bin")).unwrap();
    let line = format!("bench all-reduce --spawn 3 -e 8K {SHORT} --json {} --dump {}", json.display(), dump.display());
    let start = Instant::now();
    signal(&line).refused(1, "rank 1: ");
    assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
    let report = parse(&json);
    assert_eq!(report["rows"].as_array().unwrap().len(), 1, "the rows so far");
    assert!(report["error"].as_str().unwrap().contains("2048_rank1_input.bin"), "{report}");
    assert_eq!(parse(&dump.join("manifest.json"))["sizes"].as_array().unwrap().len(), 1);
}

#[test]
fn a_killed_process_is_named_and_ends_the_others() {
    for victim in [0, 1] {
        let json = fresh_path(&format!("killed_{victim}.json"));
        let bench = Running::start(&format!("--json {}", json.display()));
        let start = Instant::now();
        kill_process(bench.ranks[victim], Signal::KILL).unwrap();
        let ranks = bench.ranks.clone();
        bench.end().refused(1, &format!("rank {victim} was ended by signal 9"));
        assert!(start.elapsed() < PROMPT, "{:?}", start.elapsed());
        assert!(!ranks.into_iter().any(is_alive));
        if victim != 0 {
            let report = parse(&json);
            assert!(!report["rows"].as_array().unwrap().is_empty() && report["error"].is_string(), "{report}");
        }
    }
}

#[test]
fn no_process_outlives_its_parent() {
    let mut bench = Running::start("");
    bench.parent.kill().unwrap();
    let (ranks, start) = (bench.ranks.clone(), Instant::now());
    while ranks.iter().copied().any(is_alive) {
        assert!(start.elapsed() < PROMPT, "a rank goes on without its parent");
        sleep(Duration::from_millis(5));
    }
}

#[test]
fn ranks_of_a_launcher_make_one_table() {
    let launch = |name: &str, lines: [&str; 3]| {
        let meeting = format!("unix:{name}-{}", std::process::id());
        let ranks = lines.iter().enumerate().map(|(rank, line)| {
            let (rank, line) = (rank.to_string(), format!("bench all-reduce --launched -b 2K {line} {SHORT}"));
            let meeting = meeting.clone();
            thread::spawn(move || {
                let variables = [("SIGNAL_RANK", &*rank), ("SIGNAL_WORLD", "3"), ("SIGNAL_RENDEZVOUS", &*meeting)];
                signal_with(&line, &[&variables[..], &[("SIGNAL_SECRET", "of all three ranks")]].concat())
            })
        });
        ranks.collect::<Vec<_>>().into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<Run>>()
    };
    let runs = launch("good", ["-e 4K"; 3]);
    assert_eq!(runs[0].rows().len(), 2);
    assert!(runs[0].stdout.contains("SIGNAL_SECRET=(not shown)") && !runs[0].stdout.contains("of all three"));
    assert!(runs[1..].iter().all(|run| run.rows().is_empty() && run.stdout.is_empty()), "{runs:?}");

    let runs = launch("corrupt", ["-e 2K --corrupt 1"; 3]);
    runs[0].refused(1, "2 elements differ");
    assert!(
        runs[1..].iter().all(|run| run.code == Some(1) && run.stdout.is_empty() && run.stderr.is_empty()),
        "{runs:?}"
    );

    let runs = launch("different", ["-e 2K", "-e 2K", "-e 4K"]);
    assert!(runs.iter().all(|run| run.stdout.is_empty()), "{runs:?}");
    runs[0].refused(2, "ranks 0 and 2 were started with different arguments");

    signal("bench all-reduce --launched").refused(1, "nothing in the environment says which rank this is");
}

/// A bench of three processes that has printed its first row and has much to do.
struct Running {
    parent: Child,
    /// Open, and with room for all rows: else rank 0 would end because it cannot print.
    stdout: BufReader<ChildStdout>,
    ranks: Vec<Pid>,
}

impl Running {
    fn start(arguments: &str) -> Self {
        let line = format!("bench all-reduce --spawn 3 -b 1K -e 16M --batches 300 {arguments}");
        let mut parent = command(&line, &[]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdout = BufReader::new(parent.stdout.take().unwrap());
        let row = stdout.by_ref().lines().map(Result::unwrap).find(|line| !line.starts_with('#'));
        let ranks = if row.is_some() { (0..3).map(|rank| rank_of(&parent, rank)).collect() } else { Vec::new() };
        let running = Running { parent, stdout, ranks };
        assert!(row.is_some(), "{:?}", running.end());
        running
    }

    fn end(mut self) -> Run {
        let mut run = Run { code: self.parent.wait().unwrap().code(), stdout: String::new(), stderr: String::new() };
        self.stdout.read_to_string(&mut run.stdout).unwrap();
        self.parent.stderr.take().unwrap().read_to_string(&mut run.stderr).unwrap();
        run
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Of a test that fails. It has ended already otherwise.
        let _ = self.parent.kill();
        let _ = self.parent.wait();
    }
}

/// The process that is this rank.
fn rank_of(parent: &Child, rank: usize) -> Pid {
    let (parent, variable) = (parent.id().to_string(), format!("SIGNAL_SPAWNED={rank}:"));
    let found = fs::read_dir("/proc").unwrap().find_map(|entry| {
        let number: i32 = entry.unwrap().file_name().to_str()?.parse().ok()?;
        let environment = fs::read(format!("/proc/{number}/environ")).ok()?;
        let is_rank = environment.split(|byte| *byte == 0).any(|text| text.starts_with(variable.as_bytes()));
        (is_rank && status(number)?[1] == parent).then_some(number)
    });
    Pid::from_raw(found.unwrap()).unwrap()
}

/// A process that has ended may wait for somebody to take note.
fn is_alive(pid: Pid) -> bool {
    status(pid.as_raw_nonzero().get()).is_some_and(|status| status[0] != "Z" && status[0] != "X")
}

/// State and parent of a process (proc_pid_stat(5)).
fn status(number: i32) -> Option<[String; 2]> {
    let text = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    let mut words = text.rsplit_once(") ")?.1.split(' ').map(str::to_owned);
    Some([words.next()?, words.next()?])
}
