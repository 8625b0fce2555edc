//! What a run found, as data: what the table prints and what `--json` writes.

use std::fs;
use std::path::Path;

use serde::Serialize;
use signal_comm::{Backend, Dtype, Plan};

use super::args::Args;
use super::compare::Contender;
use super::measure::Measurement;
use super::norm;
use super::ranks::Ranks;
use super::shape::{Shape, Size};
use crate::error::{CliError, Result};
use crate::machine::{Device, Machine, signal_variables};

/// The whole run.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    /// By rank.
    pub(super) devices: Vec<Device>,
    /// SIGNAL_* variables in force.
    pub(super) environment: Vec<(String, String)>,
    pub(super) arguments: Arguments,
    /// What the errors are measured against and that they are not scaled.
    error_unit: &'static str,
    pub(super) rows: Vec<Row>,
    /// Why the run failed.
    pub(super) error: Option<String>,
}

/// The arguments with their defaults filled in.
#[derive(Debug, Serialize)]
pub(super) struct Arguments {
    pub(super) collective: &'static str,
    pub(super) backend: &'static str,
    pub(super) ranks: usize,
    /// Each rank is a process; else all are of one.
    pub(super) processes: bool,
    pub(super) dtype: &'static str,
    /// What stands behind the collective, if anything does.
    pub(super) norm: Option<String>,
    /// "none" where nothing is reduced.
    pub(super) op: &'static str,
    /// -1 where there is none.
    pub(super) root: i64,
    pub(super) algo: String,
    pub(super) graph: Option<u32>,
    pub(super) iters: Option<u32>,
    pub(super) batches: Option<u32>,
    pub(super) warmup: u32,
    pub(super) blocks: Option<u32>,
    pub(super) threads: Option<u32>,
    pub(super) memory: &'static str,
    /// "same" or "rotating".
    pub(super) buffers: &'static str,
    /// Sets of buffers, where the memory has room for them; a row has its own number.
    pub(super) sets: u32,
    pub(super) share_devices: bool,
    pub(super) seed: u64,
    pub(super) timeout_seconds: f64,
}

/// One size. With a norm behind a collective, algorithm and grid are what that alone would take.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    /// Of the side of a call that has more.
    pub(super) bytes: usize,
    /// Elements of a rank's part, as nccl-tests counts them; of all where there are no parts.
    pub(super) count: usize,
    pub(super) dtype: &'static str,
    pub(super) op: &'static str,
    pub(super) root: i64,
    pub(super) algorithm: &'static str,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    /// Independent sets of buffers that the calls went round.
    pub(super) sets: usize,
    /// `None` where the collective has no such form.
    pub(super) out_of_place: Option<Timing>,
    pub(super) in_place: Option<Timing>,
    /// Other libraries, measured beside.
    pub(super) contenders: Vec<Contender>,
}

/// One size in one place.
#[derive(Debug, Serialize)]
pub(super) struct Timing {
    /// Median over the batches of the slowest rank's time a call.
    pub(super) time_us: f64,
    pub(super) min_us: f64,
    pub(super) p99_us: f64,
    pub(super) batches: usize,
    pub(super) calls_per_batch: u32,
    pub(super) algbw_gb_s: f64,
    pub(super) busbw_gb_s: f64,
    pub(super) wrong: u64,
    /// `null` stands for infinite.
    pub(super) max_error: f64,
}

impl Report {
    pub(super) fn new<B: Backend>(args: &Args, ranks: &Ranks<B>) -> Self {
        let arguments = Arguments {
            collective: ranks.shape.collective.name(),
            backend: B::NAME,
            ranks: ranks.world(),
            processes: !ranks.together.is_alone(),
            dtype: args.dtype.name(),
            norm: norm::describe(args),
            op: ranks.shape.op_name(),
            root: ranks.shape.root_number(),
            algo: args.algo.clone(),
            graph: args.graph,
            iters: args.iters,
            batches: args.batches,
            warmup: args.warmup,
            blocks: args.blocks,
            threads: args.threads,
            memory: if args.norm.is_some() { "local" } else { args.memory.name() },
            buffers: args.policy().name(),
            sets: args.sets(),
            share_devices: args.group.share_devices,
            seed: ranks.seed,
            timeout_seconds: ranks.communicators[0].settings().timeout.as_secs_f64(),
        };
        Report {
            machine: Machine::here(),
            devices: ranks.devices.clone(),
            environment: signal_variables(),
            arguments,
            error_unit: "absolute difference from the exact value in f64, not scaled",
            rows: Vec::new(),
            error: None,
        }
    }

    /// Wrong elements of all sizes.
    pub(super) fn wrong(&self) -> u64 {
        let others = self.rows.iter().flat_map(|row| &row.contenders);
        let others = others.flat_map(|other| other.out_of_place.iter().chain(&other.in_place));
        self.timings().chain(others).map(|timing| timing.wrong).sum()
    }

    /// Mean bus bandwidth over sizes and places, as nccl-tests has it.
    pub(super) fn mean_busbw(&self) -> f64 {
        self.timings().map(|timing| timing.busbw_gb_s).sum::<f64>() / self.timings().count().max(1) as f64
    }

    pub(super) fn write(&self, path: &Path) -> Result<()> {
        write_json(path, self)
    }

    /// The same as lines of values that commas separate; none of them has any.
    pub(super) fn write_csv(&self, path: &Path) -> Result<()> {
        let Arguments { collective, ranks, .. } = self.arguments;
        let mut text = "collective,dtype,op,root,ranks,bytes,count,place,library,algorithm,blocks,threads,min_us,time_us,p99_us,algbw_gb_s,busbw_gb_s,wrong\n"
            .to_owned();
        for row in &self.rows {
            let Row { bytes, count, dtype, op, root, algorithm, blocks, threads, .. } = row;
            let own = [("signal", format!("{algorithm},{blocks},{threads}"), &row.out_of_place, &row.in_place)];
            let others = row.contenders.iter().map(|o| (o.name, ",,".to_owned(), &o.out_of_place, &o.in_place));
            for (library, plan, out_of_place, in_place) in own.into_iter().chain(others) {
                for (place, timing) in [("out of place", out_of_place), ("in place", in_place)] {
                    let Some(Timing { min_us, time_us, p99_us, algbw_gb_s, busbw_gb_s, wrong, .. }) = timing else {
                        continue;
                    };
                    text += &format!(
                        "{collective},{dtype},{op},{root},{ranks},{bytes},{count},{place},{library},{plan},{min_us},{time_us},{p99_us},{algbw_gb_s},{busbw_gb_s},{wrong}\n"
                    );
                }
            }
        }
        fs::write(path, text).map_err(CliError::file(path))
    }

    fn timings(&self) -> impl Iterator<Item = &Timing> {
        self.rows.iter().flat_map(Row::timings)
    }
}

impl Row {
    /// `measured` is out of place, then in place.
    pub(super) fn new(
        shape: &Shape,
        (size, dtype): (Size, Dtype),
        plan: Plan,
        sets: usize,
        measured: [Option<&Measurement>; 2],
    ) -> Self {
        let [out_of_place, in_place] = measured.map(|found| found.map(|found| Timing::new(found, size.bytes, shape)));
        Row {
            bytes: size.bytes,
            count: size.count,
            dtype: dtype.name(),
            op: shape.op_name(),
            root: shape.root_number(),
            algorithm: plan.algorithm.name(),
            blocks: plan.blocks,
            threads: plan.threads,
            sets,
            out_of_place,
            in_place,
            contenders: Vec::new(),
        }
    }

    pub(super) fn timings(&self) -> impl Iterator<Item = &Timing> {
        self.out_of_place.iter().chain(&self.in_place)
    }
}

impl Timing {
    pub(super) fn new(found: &Measurement, bytes: usize, shape: &Shape) -> Self {
        let time_us = found.quantile(0.5);
        // Bytes a microsecond are megabytes a second.
        let algbw = bytes as f64 / time_us / 1e3;
        Timing {
            time_us,
            min_us: found.quantile(0.0),
            p99_us: found.quantile(0.99),
            batches: found.times.len(),
            calls_per_batch: found.calls,
            algbw_gb_s: algbw,
            busbw_gb_s: algbw * shape.bus_factor(),
            wrong: found.wrong,
            max_error: found.max_error,
        }
    }
}

/// Writes a value as indented JSON.
pub(super) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec_pretty(value).map_err(std::io::Error::from).map_err(CliError::file(path))?;
    fs::write(path, text).map_err(CliError::file(path))
}
