//! `signal bench` on CPU threads: results, reports, and that its check can fail.
#![cfg(feature = "host")]
#![allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]

mod common;

use std::fs;

use common::{fresh_path, parse, signal, signal_with};
use serde_json::Value;

/// Keeps a run short: few batches of few calls, each set of buffers still used.
const SHORT: &str = "--batches 3 --iters 7 --warmup 1";

#[test]
fn every_dtype_and_algorithm_is_right() {
    for dtype in ["f32", "f16", "bf16"] {
        for algorithm in ["auto", "one-stage", "two-stage"] {
            let line = format!("bench all-reduce --ranks 3 -b 1002 -e 40K -f 6 -d {dtype} --algo {algorithm} {SHORT}");
            let rows = signal(&line).rows();
            assert_eq!(rows.len(), 3);
            for row in rows {
                assert_eq!(row.len(), 17, "{row:?}");
                assert_eq!((row[2].as_str(), row[3].as_str(), row[4].as_str()), (dtype, "sum", "-1"));
                assert_eq!((row[9].as_str(), row[15].as_str()), ("0", "0"), "wrong elements");
                for time in [&row[5], &row[6], &row[11], &row[12]] {
                    assert!(time.parse::<f64>().unwrap() > 0.0, "{row:?}");
                }
            }
        }
    }
}

#[test]
fn sizes_round_down_and_bandwidths_follow() {
    let rows = signal(&format!("bench all-reduce --ranks 4 -b 1001 -e 5000 -f 2 -d f32 {SHORT}")).rows();
    let sizes: Vec<_> = rows.iter().map(|row| (row[0].as_str(), row[1].as_str())).collect();
    assert_eq!(sizes, [("1000", "250"), ("2000", "500"), ("4004", "1001")]);
    for row in rows {
        let numbers: Vec<f64> = row[5..9].iter().map(|text| text.parse().unwrap()).collect();
        let [time, p99, algbw, busbw] = numbers[..] else { panic!("{row:?}") };
        let bytes: f64 = row[0].parse().unwrap();
        assert!(p99 >= time, "{row:?}");
        // The table rounds to 3 decimals.
        assert!((algbw - bytes / time / 1e3).abs() < 2e-3, "{row:?}");
        assert!((busbw - algbw * 1.5).abs() < 2e-3, "{row:?}");
    }
}

/// A collective, whether it has a root and reduces, the parts of a buffer among three ranks, and which forms it has.
struct Case {
    name: &'static str,
    rooted: bool,
    reduces: bool,
    parts: usize,
    out_of_place: bool,
    in_place: bool,
}

const CASES: [Case; 9] = [
    case("all-reduce", [false, true, false, true, true]),
    case("reduce-scatter", [false, true, true, true, true]),
    case("all-gather", [false, false, true, true, true]),
    case("broadcast", [true, false, false, false, true]),
    case("scatter", [true, false, true, true, false]),
    case("gather", [true, false, true, true, false]),
    case("reduce", [true, true, false, true, true]),
    case("all-to-all", [false, false, true, true, true]),
    case("send-recv", [false, false, false, true, false]),
];

const fn case(name: &'static str, [rooted, reduces, parts, out_of_place, in_place]: [bool; 5]) -> Case {
    Case { name, rooted, reduces, parts: if parts { 3 } else { 1 }, out_of_place, in_place }
}

#[test]
fn every_collective_is_right_in_one_process_and_in_several() {
    for Case { name, rooted, reduces, parts, out_of_place, in_place } in CASES {
        let root = if rooted { "--root 1" } else { "" };
        for more in [
            format!("--ranks 3 -d f32 {SHORT}"),
            format!("--ranks 3 -d bf16 --memory local {SHORT}"),
            "--ranks 3 -d f16 --graph 3 --batches 3".to_owned(),
            format!("--ranks 3 -d f32 --buffers same {SHORT}"),
            format!("--spawn 3 -d f16 {SHORT}"),
        ] {
            let rows = signal(&format!("bench {name} {root} -b 1003 -e 9K -f 9 {more}")).rows();
            assert_eq!(rows.len(), 2, "{name} {more}");
            for (row, asked) in rows.iter().zip([1003, 9027]) {
                let element = if row[2] == "f32" { 4 } else { 2 };
                let count = asked / element / parts;
                assert_eq!(
                    (row[0].as_str(), row[1].as_str()),
                    (&*(count * parts * element).to_string(), &*count.to_string())
                );
                assert_eq!(row[3], if reduces { "sum" } else { "none" });
                assert_eq!(row[4], if rooted { "1" } else { "-1" });
                let forms = [(&row[5..11], out_of_place), (&row[11..17], in_place)];
                for (columns, has) in forms {
                    assert_eq!(columns[4], if has { "0" } else { "N/A" }, "{name} {more}: {row:?}");
                    assert_eq!(columns.iter().all(|column| column == "N/A"), !has);
                }
            }
        }
        for line in ["--ranks 2", "--ranks 1", "--spawn 2"] {
            assert_eq!(signal(&format!("bench {name} {line} -e 2K {SHORT}")).rows().len(), 2);
        }
    }
}

#[test]
fn bus_bandwidths_are_those_of_nccl_tests() {
    for (name, factor) in [
        ("all-reduce", 4.0 / 3.0),
        ("reduce-scatter", 2.0 / 3.0),
        ("all-gather", 2.0 / 3.0),
        ("broadcast", 1.0),
        ("scatter", 2.0 / 3.0),
        ("gather", 2.0 / 3.0),
        ("reduce", 1.0),
        ("all-to-all", 2.0 / 3.0),
        ("send-recv", 1.0),
    ] {
        let json = fresh_path(&format!("busbw_{name}.json"));
        let line = format!("bench {name} --ranks 3 -b 6K -e 6K --buffers same {SHORT} --json {}", json.display());
        signal(&line).rows();
        let report = parse(&json);
        assert_eq!(
            (&report["arguments"]["collective"], &report["arguments"]["buffers"]),
            (&name.into(), &"same".into())
        );
        let row = &report["rows"][0];
        let timings = ["out_of_place", "in_place"].map(|place| &row[place]);
        for timing in timings.into_iter().filter(|timing| !timing.is_null()) {
            let [time, algbw, busbw] = ["time_us", "algbw_gb_s", "busbw_gb_s"].map(|key| timing[key].as_f64().unwrap());
            let expected = row["bytes"].as_f64().unwrap() / time / 1e3;
            assert!(
                (algbw / expected - 1.0).abs() < 1e-9 && (busbw / (algbw * factor) - 1.0).abs() < 1e-9,
                "{name} {row}"
            );
        }
    }
}

#[test]
fn every_operator_is_right() {
    for op in ["sum", "min", "max", "prod", "avg"] {
        for collective in ["all-reduce", "reduce-scatter", "reduce"] {
            let rows = signal(&format!("bench {collective} --ranks 3 -b 3K -e 3K -d bf16 -o {op} {SHORT}")).rows();
            assert_eq!((rows[0][3].as_str(), rows[0][9].as_str(), rows[0][15].as_str()), (op, "0", "0"));
        }
    }
}

#[test]
fn the_policy_of_buffers_is_said_and_recorded() {
    for (more, policy, sets) in [("", "rotating", 5), ("--sets 2", "rotating", 2), ("--buffers same", "same", 1)] {
        let json = fresh_path(&format!("buffers_{sets}.json"));
        let run = signal(&format!("bench all-gather --ranks 2 -e 1K {more} {SHORT} --json {}", json.display()));
        assert_eq!(run.rows().len(), 1);
        assert!(run.stdout.contains(&format!("# buffers: {policy}, ")), "{}", run.stdout);
        let report = parse(&json);
        let found = (&report["arguments"]["buffers"], &report["arguments"]["sets"], &report["rows"][0]["sets"]);
        assert_eq!(found, (&policy.into(), &sets.into(), &sets.into()));
    }
}

#[test]
fn graphs_of_fewer_and_more_calls_than_sets_are_right() {
    for graph in [1, 3, 12] {
        let rows = signal(&format!("bench all-reduce --ranks 2 -e 2K -d bf16 --graph {graph} --batches 3")).rows();
        assert_eq!(rows.len(), 2);
    }
}

#[test]
fn other_memory_shared_devices_and_one_rank_are_right() {
    for line in ["--ranks 2 --memory local", "--ranks 1", "--ranks 2 --blocks 1 --threads 1"] {
        signal(&format!("bench all-reduce -e 1K {line} {SHORT}")).rows();
    }
    let line = format!("bench all-reduce -e 1K --ranks 2 --share-devices {SHORT}");
    signal_with(&line, &[("SIGNAL_HOST_DEVICES", "1")]).rows();
}

#[test]
fn a_sweep_names_grids_and_takes_the_fastest() {
    let json = fresh_path("sweep.json");
    let line = format!("bench all-reduce --ranks 2 -b 16K -e 16K --sweep --json {}", json.display());
    assert_eq!(signal(&line).rows().len(), 1);
    let report = parse(&json);
    assert!(report["rows"][0]["blocks"].as_u64().unwrap() >= 1);
    signal("bench all-reduce --ranks 2 --sweep --blocks 2").refused(2, "--sweep");
}

#[test]
fn a_flipped_bit_is_found() {
    for line in ["-d f32", "-d f16 --graph 6", "-d bf16 --algo two-stage"] {
        let json = fresh_path("corrupt.json");
        let run = signal(&format!(
            "bench all-reduce --ranks 2 -e 2K --corrupt 1 {line} --batches 3 --json {}",
            json.display()
        ));
        // A bit in each of two sizes and two places.
        run.refused(1, "4 elements differ from the reference");
        let report = parse(&json);
        assert_eq!(report["rows"][1]["in_place"]["wrong"], 1);
        assert!(report["error"].as_str().unwrap().contains("4 elements"));
    }
}

/// Also where a rank has no result, and nothing was to be written.
#[test]
fn a_flipped_bit_of_every_collective_is_found() {
    for Case { name, out_of_place, in_place, .. } in CASES {
        for (rank, more) in [(0, ""), (1, "--graph 6")] {
            let run = signal(&format!("bench {name} --ranks 2 -e 1K --corrupt {rank} --batches 3 {more}"));
            let forms = usize::from(out_of_place) + usize::from(in_place);
            run.refused(1, &format!("{forms} elements differ from the reference"));
        }
    }
}

#[test]
fn json_holds_machine_arguments_and_rows() {
    let path = fresh_path("bench.json");
    let line = format!("bench all-reduce --ranks 2 -b 1K -e 4K -d f16 --algo two-stage --seed 0x2a {SHORT} --json");
    signal_with(&format!("{line} {}", path.display()), &[("SIGNAL_SCRATCH", "1M")]).rows();
    let report = parse(&path);
    assert_eq!(report["devices"].as_array().unwrap().len(), 2);
    assert_eq!(report["environment"][0][1], "1M");
    assert_eq!(report["arguments"]["seed"], 42);
    assert_eq!(report["arguments"]["processes"], false);
    assert_eq!(report["arguments"]["timeout_seconds"], 60.0);
    assert_eq!(report["error"], Value::Null);
    let rows = report["rows"].as_array().unwrap();
    assert_eq!(rows.len(), 3);
    for row in rows {
        assert_eq!(row["algorithm"], "two-stage");
        for place in [&row["out_of_place"], &row["in_place"]] {
            let [min, median, p99] = ["min_us", "time_us", "p99_us"].map(|name| place[name].as_f64().unwrap());
            assert!(0.0 < min && min <= median && median <= p99, "{place}");
            assert_eq!(
                (&place["wrong"], &place["batches"], &place["calls_per_batch"]),
                (&0.into(), &3.into(), &7.into())
            );
        }
    }
}

/// The check of a stranger: raw files and integer arithmetic, nothing of the library.
#[test]
fn a_dump_can_be_checked_by_someone_else() {
    for (dtype, bytes) in [("f32", 4), ("bf16", 2)] {
        let directory = fresh_path(&format!("dump_{dtype}"));
        let line =
            format!("bench all-reduce --ranks 3 -b 1K -e 12K -f 3 -d {dtype} {SHORT} --dump {}", directory.display());
        signal(&line).rows();
        let manifest = parse(&directory.join("manifest.json"));
        assert_eq!((&manifest["dtype"], &manifest["ranks"]), (&dtype.into(), &3.into()));
        let sizes = manifest["sizes"].as_array().unwrap();
        assert_eq!(sizes.len(), 3);
        for size in sizes {
            let files = size["files"].as_array().unwrap();
            let read = |rank: usize, kind: &str| fs::read(directory.join(files[rank][kind].as_str().unwrap())).unwrap();
            let inputs: Vec<Vec<u8>> = (0..3).map(|rank| read(rank, "input")).collect();
            assert_ne!(inputs[0], inputs[1], "each rank has data of its own");
            assert_eq!(inputs[0].len(), bytes * size["count"].as_u64().unwrap() as usize);
            let widened: Vec<Vec<f32>> = inputs.iter().map(|input| widen(input, bytes)).collect();
            let sums = (0..widened[0].len()).map(|i| widened.iter().fold(0.0f32, |sum, values| sum + values[i]));
            let expected: Vec<u8> = sums.flat_map(|sum| narrow(sum, bytes)).collect();
            for rank in 0..3 {
                assert!(read(rank, "output") == expected, "rank {rank}, {dtype}, {}", size["bytes"]);
                assert!(read(rank, "in_place") == expected, "rank {rank}, {dtype}, {}", size["bytes"]);
            }
        }
    }
}

/// The definitions of the collectives, once more and of their own: raw files and plain copies.
#[test]
fn a_dump_of_every_collective_can_be_checked_by_someone_else() {
    for Case { name, rooted, .. } in CASES {
        let directory = fresh_path(&format!("dump_{name}"));
        let root = if rooted { "--root 1" } else { "" };
        let line = format!("bench {name} {root} --ranks 3 -b 1K -e 1K {SHORT} --dump {}", directory.display());
        signal(&line).rows();
        let size = &parse(&directory.join("manifest.json"))["sizes"][0];
        let part = 4 * size["count"].as_u64().unwrap() as usize;
        let read = |rank: usize, kind: &str| -> Option<Vec<u8>> {
            size["files"][rank][kind].as_str().map(|name| fs::read(directory.join(name)).unwrap())
        };
        let inputs: Vec<Vec<u8>> = (0..3).map(|rank| read(rank, "input").unwrap_or_default()).collect();
        let of = |rank: usize, index: usize| inputs[rank][index * part..(index + 1) * part].to_vec();
        let reduced = |index: usize| -> Vec<u8> {
            let values = [0, 1, 2].map(|rank| widen(&of(rank, index), 4));
            (0..part / 4).flat_map(|i| narrow(values.iter().fold(0.0f32, |sum, values| sum + values[i]), 4)).collect()
        };
        let gathered = |index: usize| [of(0, index), of(1, index), of(2, index)].concat();
        let mut checked = 0;
        for rank in 0..3 {
            let expected = match name {
                "all-reduce" => Some(reduced(0)),
                "reduce-scatter" => Some(reduced(rank)),
                "all-gather" => Some(gathered(0)),
                "broadcast" => Some(of(1, 0)),
                "scatter" => Some(of(1, rank)),
                "gather" => (rank == 1).then(|| gathered(0)),
                "reduce" => (rank == 1).then(|| reduced(0)),
                "all-to-all" => Some(gathered(rank)),
                "send-recv" => Some(of((rank + 2) % 3, 0)),
                _ => unreachable!("{name}"),
            };
            for kind in ["output", "in_place"] {
                let Some(found) = read(rank, kind) else { continue };
                assert!(Some(found) == expected, "{name}: {kind} of rank {rank}");
                checked += 1;
            }
        }
        let expected = match name {
            "gather" => 1,
            "reduce" => 2,
            "broadcast" | "scatter" | "send-recv" => 3,
            _ => 6,
        };
        assert_eq!(checked, expected, "{name}");
    }
}

#[test]
fn a_sweep_of_what_is_in_place_only_is_one() {
    assert_eq!(signal("bench broadcast --ranks 2 -b 4K -e 4K --sweep --batches 3").rows().len(), 1);
}

#[test]
fn a_seed_gives_the_same_data_whatever_the_algorithm() {
    let dump = |algorithm: &str, seed: u64| {
        let directory = fresh_path(&format!("seed_{algorithm}_{seed}"));
        let line = format!("bench all-reduce --ranks 2 -b 3K -e 3K --algo {algorithm} --seed {seed} {SHORT} --dump");
        signal(&format!("{line} {}", directory.display())).rows();
        ["input", "output"].map(|kind| fs::read(directory.join(format!("3072_rank1_{kind}.bin"))).unwrap())
    };
    let one_stage = dump("one-stage", 1);
    assert!(one_stage == dump("two-stage", 1));
    assert!(one_stage[0] != dump("two-stage", 2)[0]);
}

/// Little-endian f32, or bf16 as the upper half of one.
fn widen(bytes: &[u8], size: usize) -> Vec<f32> {
    let bits = bytes.chunks_exact(size).map(|element| match *element {
        [a, b] => u32::from_le_bytes([0, 0, a, b]),
        [a, b, c, d] => u32::from_le_bytes([a, b, c, d]),
        _ => unreachable!("elements have 2 or 4 bytes"),
    });
    bits.map(f32::from_bits).collect()
}

/// Rounds a finite value to nearest even.
fn narrow(value: f32, size: usize) -> Vec<u8> {
    let bits = value.to_bits();
    match size {
        2 => {
            let upper = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            (upper as u16).to_le_bytes().to_vec()
        }
        _ => bits.to_le_bytes().to_vec(),
    }
}

#[test]
fn norms_behind_collectives_are_right() {
    let json = fresh_path("norm.json");
    for (collective, norm) in [
        ("all-reduce", "rms"),
        ("all-reduce", "layer --fast --norm-output e4m3-row"),
        ("reduce-scatter", "layer --norm-output i8-row"),
        ("all-gather", "rms --norm-output nvfp4 --spawn 2"),
        ("all-reduce", "rms --norm-output e4m3-group --graph 3 --ranks 3"),
    ] {
        let line = format!("bench {collective} --norm {norm} --hidden 96 -d bf16 -b 100 -e 1200 -f 3 --batches 3");
        let rows = signal(&format!("{line} --json {}", json.display())).rows();
        assert!(rows.len() >= 2, "{line}: {rows:?}");
        assert!(rows.iter().all(|row| row[9] == "0" && row[11] == "N/A"), "{line}: {rows:?}");
        let report = parse(&json);
        let said = report["arguments"]["norm"].as_str().unwrap();
        assert!(said.contains("of rows of 96 to "), "{said}");
        // Whole rows.
        assert!(report["rows"].as_array().unwrap().iter().all(|row| row["bytes"].as_u64().unwrap() % 192 == 0));
    }
    let run = signal("bench all-reduce --norm rms --hidden 96 -b 1K -e 1K --batches 3 --corrupt 1");
    assert_eq!(run.code, Some(1));
    assert!(run.stdout.contains("# Wrong elements: 1 FAILED"), "{run:?}");
}

#[test]
fn lines_of_values_say_what_the_report_says() {
    let (csv, json) = (fresh_path("bench.csv"), fresh_path("bench-csv.json"));
    let line = format!("bench all-reduce -b 512 -e 1K {SHORT} --csv {} --json {}", csv.display(), json.display());
    signal(&line).rows();
    let text = fs::read_to_string(&csv).unwrap();
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(lines.len(), 1 + 2 * 2, "{text}");
    assert!(lines.iter().all(|line| line.len() == lines[0].len()), "{text}");
    let at = |name: &str| lines[0].iter().position(|column| *column == name).unwrap();
    let report = parse(&json);
    let first = &report["rows"][0]["out_of_place"];
    assert_eq!(
        (lines[1][at("bytes")], lines[1][at("place")], lines[1][at("library")]),
        ("512", "out of place", "signal")
    );
    for column in ["min_us", "time_us", "p99_us", "busbw_gb_s"] {
        let [here, there] = [lines[1][at(column)].parse::<f64>().unwrap(), first[column].as_f64().unwrap()];
        // JSON is read with an error in the last place.
        assert!((here - there).abs() <= 1e-12 * there, "{column}: {here} and {there}");
    }
    signal(&format!("bench all-reduce -b 512 -e 512 --csv {}", csv.join("x").display())).refused(1, "bench.csv");
}
