//! The page: one file of HTML, without scripts, and with nothing from elsewhere.

use std::fmt::Write as _;

use super::chart::{self, Limits, Quantity};
use super::input::{Run, Timing};
use super::series::{Series, topics};
use crate::error::Result;
use crate::machine::binary_size;

const STYLE: &str = "\
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin-bottom:.2rem}h2{font-size:1.2rem;margin-top:2.5rem}
figure{margin:1rem 0;background:#fff;border:1px solid #ccc;border-radius:6px;padding:.5rem}
svg{display:block;width:100%;height:auto}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.85rem}
th,td{padding:.2rem .6rem;border-bottom:1px solid #8884;text-align:right;white-space:nowrap}
th:first-child,td:first-child,.left{text-align:left}
.bad{border:2px solid #c00;border-radius:6px;padding:.5rem 1rem;font-weight:600}
.note{color:#777}
details{margin:.5rem 0}";

/// Text, as HTML has it.
pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// The page of some runs. `commit`: what was measured.
pub(super) fn render(title: &str, runs: &[Run], limits: Limits, commit: Option<&str>) -> Result<String> {
    let title = escape(title);
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" content=\"width=device-width\">\n\
         <title>{title}</title>\n<style>\n{STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
    );
    page += &faults(runs);
    page += &machines(runs, commit);
    for (topic, series) in topics(runs) {
        let name = topic.title();
        let _ = writeln!(page, "<h2>{}</h2>", escape(&name));
        if series.iter().all(|series| series.points.is_empty()) {
            page += "<p>No size was measured.</p>\n";
            continue;
        }
        for quantity in [Quantity::Latency, Quantity::BusBandwidth] {
            // Of one rank nothing crosses a link.
            if quantity == Quantity::BusBandwidth
                && !series.iter().flat_map(|s| &s.points).any(|p| p.timing.busbw_gb_s > 0.0)
            {
                continue;
            }
            let svg = chart::draw(&format!("{name}: {}", quantity.name()), quantity, &series, limits)?;
            let _ = writeln!(page, "<figure>\n{svg}\n</figure>");
        }
        page += &table(&series);
    }
    page += &refusals(runs);
    page += "<p class=\"note\">Times are of calls in batches, per call on the slowest rank: the median over batches, the least, and the 99th percentile. Bandwidths are from the median, and \
             those of the bus as nccl-tests counts them. \u{201c}Wrong\u{201d}: elements of all ranks whose bits were not those of the scalar reference; of another library, whose values were too far off.</p>\n";
    page += "</body>\n</html>\n";
    Ok(page)
}

/// What nobody may overlook.
fn faults(runs: &[Run]) -> String {
    let mut text = String::new();
    for run in runs {
        let file = escape(&run.path.display().to_string());
        if let Some(error) = &run.error {
            let _ = writeln!(text, "<p class=\"bad\">{file}: the run failed: {}</p>", escape(error));
        }
        let wrong: u64 = run
            .rows
            .iter()
            .flat_map(|row| [&row.places.out_of_place, &row.places.in_place])
            .flatten()
            .map(|t| t.wrong)
            .sum();
        if wrong > 0 {
            let _ = writeln!(text, "<p class=\"bad\">{file}: {wrong} elements of Signal's results were wrong</p>");
        }
        let wrong = run.rows.iter().flat_map(|row| &row.contenders).filter(|other| {
            [&other.places.out_of_place, &other.places.in_place].into_iter().flatten().any(|timing| timing.wrong > 0)
        });
        let mut names: Vec<&str> = wrong.map(|other| other.name.as_str()).collect();
        names.dedup();
        for name in names {
            let _ = writeln!(text, "<p class=\"bad\">{file}: results of {} were wrong</p>", escape(name));
        }
    }
    text
}

fn machines(runs: &[Run], commit: Option<&str>) -> String {
    let commit = commit.map_or_else(|| "not recorded".to_owned(), escape);
    let mut text = format!(
        "<p>Commit: {commit}</p>\n<div class=\"scroll\"><table>\n<tr><th>File</th><th class=\"left\">Signal</th><th class=\"left\">Ranks</th><th class=\"left\">How</th><th class=\"left\">Devices</th><th class=\"left\">Machine</th></tr>\n"
    );
    for run in runs {
        let a = &run.arguments;
        let mut devices: Vec<String> =
            run.devices.iter().map(|device| format!("{} ({})", device.name, device.arch)).collect();
        devices.dedup();
        let how = a.graph.map_or_else(|| "one by one".to_owned(), |calls| format!("graphs of {calls}"));
        let cells = [
            run.path.display().to_string(),
            run.machine.signal_version.clone(),
            format!("{} on {}{}", a.ranks, a.backend, if a.processes { ", a process each" } else { "" }),
            format!("{how}; {} memory, {} buffers; algorithm {}", a.memory, a.buffers, a.algo),
            devices.join(", "),
            format!("{} {}, {} CPUs", run.machine.os, run.machine.arch, run.machine.cpus),
        ];
        let cells: String = cells.iter().map(|cell| format!("<td class=\"left\">{}</td>", escape(cell))).collect();
        let _ = writeln!(text, "<tr>{cells}</tr>");
    }
    text += "</table></div>\n";
    let mut settings: Vec<String> =
        runs.iter().flat_map(|run| &run.environment).map(|(name, value)| format!("{name}={value}")).collect();
    settings.sort_unstable();
    settings.dedup();
    if !settings.is_empty() {
        let _ = writeln!(text, "<p>Settings: {}</p>", escape(&settings.join(", ")));
    }
    text
}

/// All numbers of a topic; of others with their time as a multiple of Signal's.
fn table(series: &[Series]) -> String {
    let mut sizes: Vec<u64> = series.iter().flat_map(|series| &series.points).map(|point| point.bytes).collect();
    sizes.sort_unstable();
    sizes.dedup();
    let own = series.iter().find(|series| series.is_own);
    let mut text = "<details open><summary>Numbers</summary><div class=\"scroll\"><table>\n<tr><th>Size</th><th class=\"left\">Who</th><th>min us</th><th>median us</th><th>p99 us</th><th>algbw GB/s</th><th>busbw GB/s</th><th>wrong</th><th>time / Signal's</th><th class=\"left\">algorithm</th></tr>\n".to_owned();
    for bytes in sizes {
        for line in series {
            let Some(point) = line.at(bytes) else { continue };
            let Timing { time_us, min_us, p99_us, algbw_gb_s, busbw_gb_s, wrong } = point.timing;
            let base = own.and_then(|own| own.at(bytes)).map(|own| own.timing.time_us);
            let ratio = base.filter(|_| own.is_none_or(|own| own.name != line.name));
            let ratio = ratio.map_or_else(String::new, |base| format!("{:.2}", time_us / base));
            let (name, algorithm) = (escape(&line.name), escape(&point.algorithm));
            let _ = writeln!(
                text,
                "<tr><td>{}</td><td class=\"left\">{name}</td><td>{min_us:.2}</td><td>{time_us:.2}</td><td>{p99_us:.2}</td><td>{algbw_gb_s:.2}</td><td>{busbw_gb_s:.2}</td><td>{wrong}</td><td>{ratio}</td><td class=\"left\">{algorithm}</td></tr>",
                binary_size(bytes)
            );
        }
    }
    text + "</table></div></details>\n"
}

/// Why others were not measured.
fn refusals(runs: &[Run]) -> String {
    let mut said: Vec<String> = Vec::new();
    for run in runs {
        for other in run.rows.iter().flat_map(|row| &row.contenders) {
            if let Some(why) = &other.refusal {
                said.push(format!("{}: {}: {why}", run.path.display(), other.name));
            }
        }
    }
    said.dedup();
    said.iter().map(|said| format!("<p>Not measured: {}</p>\n", escape(said))).collect()
}

#[cfg(test)]
mod tests {
    use super::super::series::tests::{NCCL, run};
    use super::*;

    fn page(runs: &[Run]) -> String {
        render("A <title>", runs, Limits { link_gb_s: Some(400.0), floor_us: Some(1.2) }, Some("abc&d")).unwrap()
    }

    #[test]
    fn a_page_stands_alone_and_says_all() {
        let page = page(&[run("a.json", "", NCCL)]);
        for text in [
            "A &lt;title&gt;",
            "abc&amp;d",
            "A &lt;GPU&gt;",
            "nccl 2.28.9",
            "link, 400 GB/s",
            "floor, 1.2 us",
            "4.00",
            "graphs of 50",
        ] {
            assert!(page.contains(text), "{text}");
        }
        assert!(!page.contains("<GPU>") && !page.contains("<script"));
        let links = page.replace("http://www.w3.org/2000/svg", "");
        assert!(
            !links.contains("http:") && !links.contains("https:") && !links.contains("url(") && !links.contains("src=")
        );
        assert_eq!(page.matches("<svg role=\"img\"").count(), 2);
    }

    #[test]
    fn what_went_wrong_stands_at_the_top() {
        let wrong = run("a.json", "\"wrong\":0=>\"wrong\":3", "");
        let failed = run("b.json", "\"error\":null=>\"error\":\"rank 1 < late\"", "");
        let refused = run("c.json", "", r#"{"name":"nccl","refusal":"one rank & no more"}"#);
        let page = page(&[wrong, failed, refused]);
        let top = &page[..page.find("<table>").unwrap()];
        assert!(top.contains("a.json: 6 elements of Signal's results were wrong"), "{top}");
        assert!(top.contains("b.json: the run failed: rank 1 &lt; late"), "{top}");
        assert!(page.contains("Not measured: c.json: nccl: one rank &amp; no more"));
    }

    #[test]
    fn a_run_without_rows_is_a_page_too() {
        let mut empty = run("a.json", "", "");
        empty.rows.clear();
        assert!(page(&[empty]).contains("a.json"));
    }
}
