//! `signal report`: a page of a real run, and that a browser shows it.
#![cfg(feature = "host")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "clippy knows tests, but not what they call")]

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use common::{fresh_path, signal};

/// The report of a short run.
fn measured(name: &str, line: &str) -> PathBuf {
    let json = fresh_path(name);
    signal(&format!("bench {line} -b 512 -e 4K --batches 3 --iters 5 --json {}", json.display())).rows();
    json
}

/// The page of some reports.
fn page(name: &str, inputs: &[&Path], more: &str) -> PathBuf {
    let html = fresh_path(name);
    let inputs: Vec<String> = inputs.iter().map(|input| input.display().to_string()).collect();
    let run = signal(&format!("report {} -o {} {more}", inputs.join(" "), html.display()));
    assert_eq!(run.code, Some(0), "{run:?}");
    html
}

#[test]
fn a_page_of_real_runs() {
    let reduce = measured("report-a.json", "all-reduce --ranks 2");
    let graphs = fresh_path("report-b.json");
    let line = "bench all-reduce --ranks 2 -b 512 -e 4K --batches 3 --graph 5";
    signal(&format!("{line} --json {}", graphs.display())).rows();
    let broadcast = measured("report-c.json", "broadcast --ranks 3 -d bf16");
    let text = fs::read_to_string(page(
        "report.html",
        &[&reduce, &graphs, &broadcast],
        "--commit 1234abc --link-gb-s 10 --floor-us 2 --title Mine",
    ))
    .unwrap();
    for part in [
        "<title>Mine</title>",
        "Commit: 1234abc",
        "<h2>all-reduce, f32, out of place</h2>",
        "<h2>all-reduce, f32, in place</h2>",
        "<h2>broadcast, bf16, in place</h2>",
        "Signal, eager",
        "Signal, graphs of 5",
        "link, 10 GB/s",
        "CPU 0 (x86_64)",
    ] {
        assert!(text.contains(part), "{part}");
    }
    assert!(!text.contains("<h2>broadcast, bf16, out of place</h2>") && !text.contains("<script"));
    assert_eq!(text.matches("<svg ").count(), 6);
}

#[test]
fn what_is_no_report_is_named() {
    let html = fresh_path("report-never.html");
    let line = |input: &Path| format!("report {} -o {}", input.display(), html.display());
    signal(&line(Path::new("no-such.json"))).refused(1, "no-such.json: ");
    let other = fresh_path("report-other.json");
    for (text, reason) in [("[]", "is no report of signal bench"), ("{\"machine\":", "EOF"), ("{}", "missing field")] {
        fs::write(&other, text).unwrap();
        signal(&line(&other)).refused(2, reason);
        signal(&line(&other)).refused(2, "report-other.json");
    }
    let json = measured("report-same.json", "all-reduce");
    let before = fs::read(&json).unwrap();
    signal(&format!("report {0} -o {0}", json.display())).refused(2, "would overwrite an input");
    assert_eq!(fs::read(&json).unwrap(), before);
    signal(&format!("report {} -o {}", json.display(), html.join("deeper").display())).refused(1, "report-never.html");
    signal(&format!("report {} -o {} --link-gb-s 0", json.display(), html.display())).refused(2, "above 0");
    signal("report x.json").refused(2, "--output <FILE>");
    assert!(!html.exists());
}

/// What the browser that `SIGNAL_BROWSER` names makes of a page.
fn browser(html: &Path, arguments: &[&str]) -> Vec<u8> {
    let browser = std::env::var_os("SIGNAL_BROWSER").expect("SIGNAL_BROWSER names a browser");
    let profile = fresh_path("report-browser");
    let output = Command::new(browser)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"])
        .args(["--disable-component-update", "--disable-sync", "--window-size=1000,1500"])
        .arg(format!("--user-data-dir={}", profile.display()))
        .args(arguments)
        .arg(format!("file://{}", fs::canonicalize(html).unwrap().display()))
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    output.stdout
}

#[test]
#[ignore = "needs a browser: SIGNAL_BROWSER=/usr/bin/chromium"]
fn a_browser_shows_it() {
    let json = measured("report-shown.json", "all-reduce --ranks 2");
    let html = page("report-shown.html", &[&json], "--floor-us 1");
    let found = String::from_utf8(browser(&html, &["--dump-dom"])).unwrap();
    // As parsed: all that was opened was closed where it belongs.
    for part in ["<h2>all-reduce, f32, out of place</h2>", "</svg>", "4 KiB</td>", "</body></html>"] {
        assert!(found.contains(part), "{part}: {found}");
    }
    assert_eq!(found.matches("<svg role=\"img\"").count(), 4);
    let picture = |html: &Path, name: &str| {
        let path = fresh_path(name);
        browser(html, &[&format!("--screenshot={}", path.display())]);
        fs::metadata(path).unwrap().len()
    };
    // A chart alone, and as much of nothing: white takes little room.
    let text = fs::read_to_string(&html).unwrap();
    let svg = &text[text.find("<svg ").unwrap()..text.find("</svg>").unwrap()];
    let (opening, _) = svg.split_once('>').unwrap();
    let [chart, blank] = [("chart", svg), ("blank", &format!("{opening}>"))].map(|(name, svg)| {
        let path = fresh_path(&format!("report-{name}.html"));
        fs::write(&path, format!("<!doctype html><body>{svg}</svg></body>")).unwrap();
        picture(&path, &format!("report-{name}.png"))
    });
    assert!(chart > 3 * blank, "{chart} and {blank} bytes");
}
