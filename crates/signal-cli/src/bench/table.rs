//! The table on standard output, in the columns of nccl-tests, and the progress bar on the terminal.

use indicatif::{ProgressBar, ProgressStyle};

use super::report::{Report, Row, Timing};
use super::sweep::Tried;
use crate::error::Result;
use crate::machine::{binary_size, print};

pub(super) struct Table {
    /// On standard error; draws nothing where that is no terminal.
    bar: ProgressBar,
    /// Another process prints it.
    silent: bool,
}

impl Table {
    /// Prints the header, unless another process does. A step is one size in one place.
    pub(super) fn start(report: &Report, steps: usize, silent: bool) -> Result<Self> {
        let bar = if silent { ProgressBar::hidden() } else { ProgressBar::new(steps as u64) };
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed}") {
            bar.set_style(style);
        }
        let table = Table { bar, silent };
        table.print(&header(report))?;
        Ok(table)
    }

    /// Shows what is being done, and counts the step before as done.
    pub(super) fn progress(&self, step: &str, bytes: usize) {
        self.bar.set_message(format!("{}: {step}", binary_size(bytes as u64)));
    }

    pub(super) fn row(&self, row: &Row) -> Result<()> {
        let Row { bytes, count, dtype, op, root, out_of_place, in_place, .. } = row;
        self.bar.inc(row.timings().count() as u64);
        let (left, right) = (columns(out_of_place.as_ref()), columns(in_place.as_ref()));
        self.print(&format!("{bytes:>12} {count:>12} {dtype:>7} {op:>6} {root:>4} {left} {right}\n"))?;
        for other in &row.contenders {
            let beside = |name: &str, own: &Option<Timing>, timing: &Option<Timing>| {
                let (own, timing) = (own.as_ref()?, timing.as_ref()?);
                let (us, ratio, wrong) = (timing.time_us, timing.time_us / own.time_us, timing.wrong);
                let wrong = if wrong > 0 { format!(", {wrong} WRONG") } else { String::new() };
                Some(format!(" {name} {us:.2} us, {:.3} GB/s, {ratio:.2} x Signal's{wrong};", timing.busbw_gb_s))
            };
            let places = [
                beside("out of place", &row.out_of_place, &other.out_of_place),
                beside("in place", &row.in_place, &other.in_place),
            ];
            let places: String = places.into_iter().flatten().collect();
            self.print(&format!("#{:>11} {} {}:{}\n", "", other.name, other.version, places.trim_end_matches(';')))?;
        }
        Ok(())
    }

    /// Prints that the next row's calls had fewer sets of buffers than they were to go round.
    pub(super) fn fewer_sets(&self, sets: usize, wanted: u32) -> Result<()> {
        self.print(&format!("# no memory for {wanted} sets of buffers, {sets} at the next size\n"))
    }

    /// Prints the fastest grids of the next row's size.
    pub(super) fn tried(&self, tried: &[Tried]) -> Result<()> {
        let grids: Vec<String> =
            tried.iter().take(6).map(|(blocks, threads, us)| format!("{blocks}x{threads} {us:.2}")).collect();
        self.print(&format!("# blocks x threads, us: {}\n", grids.join(", ")))
    }

    /// Prints what holds for all sizes.
    pub(super) fn finish(&self, report: &Report) -> Result<()> {
        self.bar.finish_and_clear();
        let wrong = report.wrong();
        let verdict = if wrong == 0 { "OK" } else { "FAILED" };
        self.print(&format!(
            "# Wrong elements: {wrong} {verdict}\n# Mean bus bandwidth: {:.4} GB/s\n",
            report.mean_busbw()
        ))
    }

    /// Prints without mixing with the bar, where both are on one terminal.
    fn print(&self, text: &str) -> Result<()> {
        if !self.silent {
            self.bar.suspend(|| print(text))?;
        }
        Ok(())
    }
}

fn header(report: &Report) -> String {
    let arguments = &report.arguments;
    let mut text = format!(
        "# signal {} {} backend {} ranks {}{} algo {} memory {} seed {:#x}\n",
        report.machine.signal_version,
        arguments.collective,
        arguments.backend,
        arguments.ranks,
        if arguments.processes { " in processes" } else { "" },
        arguments.algo,
        arguments.memory,
        arguments.seed,
    );
    for (rank, device) in report.devices.iter().enumerate() {
        let pci = device.pci.as_ref().map_or_else(String::new, |pci| format!(" [{pci}]"));
        text += &format!("#  Rank {rank} on {}{pci} {}\n", device.name, device.arch);
    }
    for (name, value) in &report.environment {
        text += &format!("#  {name}={value}\n");
    }
    text += &match arguments.graph {
        Some(calls) => format!("# time: device events around replays of graphs of {calls} calls"),
        None => "# time: device events around batches of calls".to_owned(),
    };
    text += ", per call on the slowest rank: median and 99th percentile over batches; bandwidths from the median\n";
    if let Some(norm) = &arguments.norm {
        text += &format!("# behind it, in the same call: {norm}; count: elements of a rank's rows\n");
    }
    text += &match (arguments.buffers, arguments.sets) {
        (policy, 1) => format!("# buffers: {policy}, every call finds its data where the last one left it\n"),
        (policy, sets) => format!("# buffers: {policy}, calls go round {sets} sets\n"),
    };
    let reference = if arguments.op == "none" { "what was sent" } else { "the scalar reduction in rank order" };
    text +=
        &format!("# #wrong: elements of all ranks whose bits differ from {reference}, in single and in timed calls\n");
    text += match arguments.norm {
        None => "# maxerr: largest absolute difference from the exact value in f64, not scaled\n",
        Some(_) => "# maxerr: not measured behind a norm\n",
    };
    text += "# N/A: the collective has no such form\n#\n";
    let place = |name: &str| format!("{name:^width$}", width = COLUMNS);
    let units = format!("{:>9} {:>9} {:>8} {:>8} {:>7} {:>9}", "(us)", "(us)", "(GB/s)", "(GB/s)", "", "");
    let names = format!("{:>9} {:>9} {:>8} {:>8} {:>7} {:>9}", "time", "p99", "algbw", "busbw", "#wrong", "maxerr");
    let (out_of_place, in_place) = (place("out-of-place"), place("in-place"));
    let lines = [
        format!("#{:>11} {:>12} {:>7} {:>6} {:>4} {out_of_place} {in_place}", "", "", "", "", ""),
        format!("#{:>11} {:>12} {:>7} {:>6} {:>4} {names} {names}", "size", "count", "type", "redop", "root"),
        format!("#{:>11} {:>12} {:>7} {:>6} {:>4} {units} {units}", "(B)", "(elements)", "", "", ""),
    ];
    for line in &lines {
        text += line.trim_end();
        text += "\n";
    }
    text
}

/// Width of one place's columns.
const COLUMNS: usize = 9 + 9 + 8 + 8 + 7 + 9 + 5;

fn columns(timing: Option<&Timing>) -> String {
    let Some(timing) = timing else {
        let none = "N/A";
        return format!("{none:>9} {none:>9} {none:>8} {none:>8} {none:>7} {none:>9}");
    };
    let Timing { time_us, p99_us, algbw_gb_s, busbw_gb_s, wrong, max_error, .. } = timing;
    let decimals = if *p99_us < 1e6 { 2 } else { 0 };
    format!(
        "{time_us:>9.decimals$} {p99_us:>9.decimals$} {algbw_gb_s:>8.3} {busbw_gb_s:>8.3} {wrong:>7} {max_error:>9.1e}"
    )
}
