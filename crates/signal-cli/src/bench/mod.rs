//! `signal bench`: time and bandwidth of a collective by size, every result checked.
//!
//! One thread drives all ranks of a process: calls only enqueue, so each call is enqueued rank by rank and nothing waits before
//! every rank has its part. At each size, out of place and in place where the collective has both, there are two checked
//! passes: one call on each of a few sets of fresh random buffers, then the timed batches, whose calls go round the same sets.
//! What the timed calls left is compared too, bit by bit, so a number in the table stands for results that were right while it
//! was measured.
//!
//! What a collective does to the parts of its buffers is data ([`shape`]), from which sizes, inputs, expected results and
//! bandwidths follow; only the call itself is code of its own ([`calls`]).
//!
//! One process has all ranks; with `--spawn` or `--launched` each has one. Then every process does the same, with the inputs of
//! all ranks from one seed, and what they have to know of each other they gather ([`together`]): times, which also decide how
//! much is measured, and what was wrong.

mod args;
mod calls;
mod check;
mod compare;
mod data;
mod dump;
mod expected;
mod line;
mod load;
mod measure;
mod norm;
mod ranks;
mod report;
mod seat;
mod shape;
mod spawn;
mod sweep;
mod table;
mod together;
pub(crate) mod tune;

use std::fs::OpenOptions;
use std::path::Path;

use half::{bf16, f16};
use signal_comm::{Backend, Dtype, Element, Float};

pub(crate) use self::args::Args;
use self::compare::Beside;
use self::data::Sets;
use self::dump::Dump;
use self::load::Measured;
use self::ranks::Ranks;
use self::report::{Report, Row};
use self::seat::{Found, Seat};
use self::shape::{Place, Size};
use self::table::Table;
use self::together::Word;
use crate::backend::{WithBackend, with_backend};
use crate::error::{CliError, Result};
use crate::seed;

/// Runs the bench. An error if an argument, a call or a result was wrong.
pub(crate) fn run(args: &Args) -> Result<()> {
    args.check()?;
    let bytes = args.sizes()?;
    let seed = args.seed.unwrap_or_else(seed::from_clock);
    let seat = match Seat::find(args)? {
        Found::Seat(seat) => seat,
        Found::Start(world) => return spawn::run(world),
    };
    finish(with_backend(args.group.backend, Bench { args, bytes: &bytes, seat: &seat, seed }), &seat)
}

/// Ends a rank with its result, of whose error a process that was started for it tells whoever has started it.
fn finish(result: Result<()>, seat: &Seat) -> Result<()> {
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
struct Bench<'a> {
    args: &'a Args,
    /// The sizes to run, before they are rounded down.
    bytes: &'a [usize],
    seat: &'a Seat,
    seed: u64,
}

impl WithBackend for Bench<'_> {
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

impl Bench<'_> {
    fn run_typed<B: Backend, T: Float>(&self, backend: &B) -> Result<()> {
        let mut ranks = Ranks::<B>::create(backend, self.args, self.seat, self.seed)?;
        let leads = ranks.together.leads();
        let json = self.args.json.as_deref().filter(|_| leads);
        let mut report = Report::new(self.args, &ranks);
        let prepared = self.prepare::<B, T>(&ranks, &report, json);
        let Prepared { sizes, mut dump, table } = ranks.agree(prepared)?;
        let mut rivals = Vec::new();
        for rival in &self.args.compare {
            rivals.push(Beside::create(*rival, &mut ranks)?);
        }
        let result = match self.args.norm {
            None => self.run_sizes::<B, T>(&mut ranks, (&sizes, &rivals), &mut report, &table, dump.as_mut()),
            Some(_) => self.run_norms::<B, T>(&mut ranks, &mut report, &table),
        };
        let result = result.and_then(|()| rivals.into_iter().try_for_each(Beside::end));
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
        if let Some(path) = self.args.csv.as_deref().filter(|_| leads) {
            report.write_csv(path)?;
        }
        result
    }

    /// Refuses before the start what could not be done at the end. Prints the header.
    fn prepare<B: Backend, T: Element>(
        &self,
        ranks: &Ranks<B>,
        report: &Report,
        json: Option<&Path>,
    ) -> Result<Prepared> {
        let size = |bytes: &usize| match norm::job(&ranks.shape, self.args, *bytes, T::DTYPE) {
            Some((_, size)) => Ok(size),
            None => ranks.shape.size(*bytes, T::DTYPE),
        };
        let sizes = self.bytes.iter().map(size).collect::<Result<Vec<_>>>()?;
        let largest = sizes.last().map_or(0, |size| size.bytes);
        data::affordable_sets(ranks, largest, self.args.sets())?;
        let csv = self.args.csv.as_deref().filter(|_| ranks.together.leads());
        for path in json.into_iter().chain(csv) {
            OpenOptions::new().create(true).append(true).open(path).map_err(CliError::file(path))?;
        }
        let leads = ranks.together.leads();
        let dump =
            self.args.dump.as_deref().map(|place| Dump::create(place, ranks.shape, report, leads)).transpose()?;
        let table = Table::start(report, sizes.len() * ranks.shape.places().len(), !leads)?;
        Ok(Prepared { sizes, dump, table })
    }

    fn run_sizes<B: Backend, T: Element>(
        &self,
        ranks: &mut Ranks<B>,
        (sizes, rivals): (&[Size], &[Beside]),
        report: &mut Report,
        table: &Table,
        mut dump: Option<&mut Dump>,
    ) -> Result<()> {
        for &size in sizes {
            table.progress("data", size.bytes);
            let mut sets = Sets::<B, T>::create(ranks, self.args, size)?;
            if self.args.sweep {
                table.progress("grids", size.bytes);
                let tried = sweep::sweep(ranks, &mut sets, self.args)?;
                table.tried(&tried)?;
            }
            let mut measure = |place: Place, ranks: &mut Ranks<B>| -> Result<Option<Measured<T>>> {
                if !ranks.shape.places().contains(&place) {
                    return Ok(None);
                }
                table.progress(place.name(), size.bytes);
                load::measure(ranks, &mut sets, place, self.args).map(Some)
            };
            let out_of_place = measure(Place::OutOfPlace, ranks)?;
            let in_place = measure(Place::InPlace, ranks)?;
            let measured = [out_of_place.as_ref(), in_place.as_ref()];
            if let Some(dump) = dump.as_deref_mut() {
                dump.write(ranks.here(), size, &sets.sets[0].data, measured)?;
                // Until all processes have written theirs.
                ranks.together.gather(())?;
                dump.note(size)?;
            }
            if sets.len() < self.args.sets() as usize {
                table.fewer_sets(sets.len(), self.args.sets())?;
            }
            let plan = ranks.plan(size, T::DTYPE);
            let found = measured.map(|measured| measured.map(|measured| &measured.found));
            let mut row = Row::new(&ranks.shape, (size, T::DTYPE), plan, sets.len(), found);
            for rival in rivals {
                table.progress("compare", size.bytes);
                row.contenders.push(rival.measure(ranks, &mut sets, self.args)?);
            }
            table.row(&row)?;
            report.rows.push(row);
        }
        Ok(())
    }

    /// With a norm behind the collective, out of place.
    fn run_norms<B: Backend, T: Float>(&self, ranks: &mut Ranks<B>, report: &mut Report, table: &Table) -> Result<()> {
        let mut before = None;
        for bytes in self.bytes {
            let Some((job, size)) = norm::job(&ranks.shape, self.args, *bytes, T::DTYPE) else { continue };
            // Sizes below a row, and those that are rounded to the same number.
            if before.replace(size.bytes) == Some(size.bytes) {
                continue;
            }
            table.progress("rows", size.bytes);
            let found = norm::measure::<B, T>(ranks, job, self.args)?;
            let plan = ranks.plan(size, T::DTYPE);
            let sets = self.args.sets() as usize;
            let row = Row::new(&ranks.shape, (size, T::DTYPE), plan, sets, [Some(&found), None]);
            table.row(&row)?;
            report.rows.push(row);
        }
        Ok(())
    }
}

/// What is there before the first call.
struct Prepared {
    sizes: Vec<Size>,
    dump: Option<Dump>,
    table: Table,
}
