//! `signal bench all-reduce`: time and bandwidth by size, every result checked.
//!
//! One thread drives all ranks of a process: calls only enqueue, so each call is enqueued rank by rank and nothing waits before
//! every rank has its part. At each size, out of place and in place, there are two checked passes: one call on each of a few
//! sets of fresh random buffers, then the timed batches, whose calls go round the same sets. What the timed calls left
//! is compared too, bit by bit, so a number in the table stands for results that were right while it was measured.
//!
//! One process has all ranks; with `--spawn` or `--launched` each has one. Then every process does the same, with the inputs of
//! all ranks from one seed, and what they have to know of each other they gather ([`together`]): times, which also decide how
//! much is measured, and what was wrong.

mod args;
mod check;
mod data;
mod dump;
mod line;
mod measure;
mod ranks;
mod report;
mod seat;
mod spawn;
mod sweep;
mod table;
mod together;

use std::fs::OpenOptions;
use std::path::Path;

use half::{bf16, f16};
use signal_comm::{Backend, Dtype, Element};

pub(crate) use self::args::Args;
use self::data::Sets;
use self::dump::Dump;
use self::measure::{Measurement, Place};
use self::ranks::Ranks;
use self::report::{Report, Row};
use self::seat::{Found, Seat};
use self::table::Table;
use self::together::Word;
use crate::backend::{WithBackend, with_backend};
use crate::error::{CliError, Result};
use crate::seed;

/// Runs the bench. An error if an argument, a call or a result was wrong.
pub(crate) fn run(args: &Args) -> Result<()> {
    let counts = args.counts()?;
    let seed = args.seed.unwrap_or_else(seed::from_clock);
    let seat = match Seat::find(args)? {
        Found::Seat(seat) => seat,
        Found::Start(world) => return spawn::run(world),
    };
    let result = with_backend(args.group.backend, AllReduce { args, counts: &counts, seat: &seat, seed });
    match (result, seat.line()) {
        // For its parent to print.
        (Err(error), Some(line)) => {
            let word = Word::from(&error);
            line.report(&word);
            Err(CliError::Rank { code: word.code, text: word.text, told: true })
        }
        (result, _) => result,
    }
}

/// The work, once a backend is open.
struct AllReduce<'a> {
    args: &'a Args,
    counts: &'a [usize],
    seat: &'a Seat,
    seed: u64,
}

impl WithBackend for AllReduce<'_> {
    type Output = ();

    fn run<B: Backend>(self, backend: &B) -> Result<()> {
        match self.args.dtype {
            Dtype::F32 => self.run_typed::<B, f32>(backend),
            Dtype::F16 => self.run_typed::<B, f16>(backend),
            Dtype::Bf16 => self.run_typed::<B, bf16>(backend),
            other => Err(CliError::Arguments(format!("bench has no data of type {other}"))),
        }
    }
}

impl AllReduce<'_> {
    fn run_typed<B: Backend, T: Element>(&self, backend: &B) -> Result<()> {
        let mut ranks = Ranks::<B>::create(backend, self.args, self.seat, self.seed)?;
        let leads = ranks.together.leads();
        let json = self.args.json.as_deref().filter(|_| leads);
        let mut report = Report::new(self.args, &ranks);
        let prepared = self.prepare::<B, T>(&ranks, &report, json);
        let (mut dump, table) = ranks.agree(prepared)?;
        let result = self.run_sizes::<B, T>(&mut ranks, &mut report, &table, dump.as_mut());
        // The rows so far are of use even when a later size failed.
        let result = result.and_then(|()| table.finish(&report)).and_then(|()| match report.wrong() {
            0 => Ok(()),
            wrong => Err(CliError::Mismatch(wrong)),
        });
        let result = ranks.agree(result);
        report.error = result.as_ref().err().map(ToString::to_string);
        if let Some(path) = json {
            report.write(path)?;
        }
        result
    }

    /// Refuses before the start what could not be done at the end. Prints the header.
    fn prepare<B: Backend, T: Element>(
        &self,
        ranks: &Ranks<B>,
        report: &Report,
        json: Option<&Path>,
    ) -> Result<(Option<Dump>, Table)> {
        let largest = self.counts.last().map_or(0, |count| count * T::DTYPE.bytes());
        data::affordable_sets(ranks, largest, self.args.sets)?;
        if let Some(path) = json {
            OpenOptions::new().create(true).append(true).open(path).map_err(CliError::file(path))?;
        }
        let leads = ranks.together.leads();
        let dump = self.args.dump.as_deref().map(|place| Dump::create(place, report, leads)).transpose()?;
        Ok((dump, Table::start(report, self.counts.len(), !leads)?))
    }

    fn run_sizes<B: Backend, T: Element>(
        &self,
        ranks: &mut Ranks<B>,
        report: &mut Report,
        table: &Table,
        mut dump: Option<&mut Dump>,
    ) -> Result<()> {
        for &count in self.counts {
            table.progress("data", count * T::DTYPE.bytes());
            let mut sets = Sets::<B, T>::create(ranks, self.args, count)?;
            if self.args.sweep {
                table.progress("grids", count * T::DTYPE.bytes());
                let tried = sweep::sweep(ranks, &mut sets, count * T::DTYPE.bytes(), self.args)?;
                table.tried(&tried)?;
            }
            let mut measure = |place: Place, ranks: &mut Ranks<B>| -> Result<Measurement<T>> {
                table.progress(place.name(), count * T::DTYPE.bytes());
                measure::measure(ranks, &mut sets, place, self.args)
            };
            let out_of_place = measure(Place::OutOfPlace, ranks)?;
            let in_place = measure(Place::InPlace, ranks)?;
            if let Some(dump) = dump.as_deref_mut() {
                let here = ranks.here();
                dump.write(here.clone(), &sets.inputs(0)[here], &out_of_place.outputs, &in_place.outputs)?;
                // Until all processes have written theirs.
                ranks.together.gather(())?;
                dump.note::<T>(count)?;
            }
            let plan = ranks.plan(count, T::DTYPE);
            let row = Row::new(count, T::DTYPE, plan, sets.len(), [&out_of_place, &in_place], ranks.world());
            table.row(&row)?;
            report.rows.push(row);
        }
        Ok(())
    }
}
