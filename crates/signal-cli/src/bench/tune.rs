//! `signal tune`: measures which algorithm and grid are fastest at each size, and writes them to a file that the library loads.
//!
//! A candidate is measured as the bench measures: results are checked before and after, and a time is the slowest rank's over all processes, so all ranks
//! see the same numbers and choose alike.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;
use half::{bf16, f16};
use indicatif::{ProgressBar, ProgressStyle};
use signal_comm::{
    Algorithm, Backend, Collective, DeviceFamily, Dtype, Element, Error, FastSum, Plan, Tuning, TuningRow, TuningTable,
};

use super::args::{self, Args as BenchArgs};
use super::data::{self, Sets};
use super::load;
use super::ranks::Ranks;
use super::seat::{Found, Seat};
use super::shape::{Place, Size};
use super::{finish, spawn, sweep};
use crate::backend::{BackendName, GroupArgs, WithBackend, with_backend};
use crate::error::{CliError, Result};
use crate::machine::{binary_size, print};
use crate::seed;

/// Largest sizes of a default run.
const MOST_BYTES: usize = 64 << 20;
const MOST_BYTES_HOST: usize = 1 << 20;
/// Batches of each candidate: enough to tell it from others; the first few are measured again.
const BATCHES: u32 = 7;
const FINALISTS: usize = 4;
/// Times this near are equal: the smaller grid is taken, which leaves room to others.
const SAME: f64 = 1.01;
/// An algorithm so many times as slow as the fastest, at two sizes in a row, is tried no more at larger ones, where it lies ever further behind.
const HOPELESS: f64 = 2.0;
/// Sets of buffers that calls go round: what a large one reads, no cache holds anyway.
const SETS: u32 = 5;
const SETS_OF_LARGE: u32 = 2;
const LARGE: usize = 4 << 20;

#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// What to tune [default: all but send-recv, whose ranks must take the same grid at all sizes]
    #[arg(value_name = "COLLECTIVE", value_parser = args::collective_parser())]
    collectives: Vec<Collective>,

    #[command(flatten)]
    group: GroupArgs,

    /// Starts N processes, one for each rank, instead of having all ranks in one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=8), conflicts_with = "ranks")]
    spawn: Option<u64>,

    /// Is one rank of those that torchrun, mpirun, mpiexec or srun has started, or that SIGNAL_RANK and SIGNAL_WORLD describe
    #[arg(long, conflicts_with_all = ["ranks", "spawn"])]
    launched: bool,

    /// Smallest size in bytes, with K, M or G for powers of 1024; each further one is twice as large
    #[arg(short = 'b', long, value_name = "SIZE", default_value = "512", value_parser = args::parse_size)]
    min_bytes: usize,

    /// Largest size in bytes [default: 1M on host, else 64M]
    #[arg(short = 'e', long, value_name = "SIZE", value_parser = args::parse_size)]
    max_bytes: Option<usize>,

    /// Element type
    #[arg(short = 'd', long, default_value = "bf16", value_parser = args::dtype_parser())]
    dtype: Dtype,

    /// Calls in the graph whose replays are measured; 0: calls enqueued one by one
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(..=10_000))]
    graph: u32,

    /// File to write; one that is there keeps its tables for other collectives, links and numbers of ranks [default: standard output]
    #[arg(short = 'o', long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// What to say of the measurement in the file
    #[arg(long, value_name = "TEXT")]
    note: Option<String>,
}

impl Args {
    fn collectives(&self) -> Vec<Collective> {
        match self.collectives.as_slice() {
            [] => Collective::ALL.into_iter().filter(|collective| *collective != Collective::SendRecv).collect(),
            chosen => chosen.to_vec(),
        }
    }

    /// The bench of one collective.
    fn bench(&self, collective: Collective) -> Result<BenchArgs> {
        let mut args = BenchArgs::of(collective)?;
        args.group = self.group.clone();
        (args.spawn, args.launched, args.dtype) = (self.spawn, self.launched, self.dtype);
        (args.min_bytes, args.graph) = (self.min_bytes, Some(self.graph).filter(|calls| *calls > 0));
        let most = if self.group.backend == BackendName::Host { MOST_BYTES_HOST } else { MOST_BYTES };
        args.max_bytes = Some(self.max_bytes.unwrap_or(most.max(self.min_bytes)));
        Ok(args)
    }

    fn note(&self) -> String {
        let how =
            if self.graph > 0 { format!("in graphs of {}", self.graph) } else { "enqueued one by one".to_owned() };
        let measured = format!("{}, {how}, signal {}", self.dtype, env!("CARGO_PKG_VERSION"));
        self.note.as_ref().map_or(measured.clone(), |note| format!("{note}; {measured}"))
    }
}

/// Measures, and writes the file.
pub(crate) fn run(args: &Args) -> Result<()> {
    let collectives = args.collectives();
    if collectives.contains(&Collective::SendRecv) {
        let why =
            "send-recv has no plans to tune: its ranks exchange pieces of several sizes and must take the same grid";
        return Err(CliError::Arguments(why.to_owned()));
    }
    let Some(first) = collectives.first() else { return Ok(()) };
    let first = args.bench(*first)?;
    let sizes = first.sizes()?;
    let seat = match Seat::find(&first)? {
        Found::Seat(seat) => seat,
        Found::Start(world) => return spawn::run(world),
    };
    let seed = seed::from_clock();
    finish(
        with_backend(args.group.backend, Tune { args, collectives: &collectives, sizes: &sizes, seat: &seat, seed }),
        &seat,
    )
}

struct Tune<'a> {
    args: &'a Args,
    collectives: &'a [Collective],
    /// Before they are rounded down.
    sizes: &'a [usize],
    seat: &'a Seat,
    seed: u64,
}

impl WithBackend for Tune<'_> {
    type Output = ();

    fn run<B: Backend>(self, backend: &B) -> Result<()> {
        match FastSum::ALL.into_iter().find(|fast| fast.dtype() == self.args.dtype) {
            Some(FastSum::F32) => self.run_typed::<B, f32>(backend),
            Some(FastSum::F16) => self.run_typed::<B, f16>(backend),
            _ => self.run_typed::<B, bf16>(backend),
        }
    }
}

/// A plan, and microseconds a call.
type Tried = (Plan, f64);

impl Tune<'_> {
    fn run_typed<B: Backend, T: Element>(&self, backend: &B) -> Result<()> {
        let mut tuning = None;
        for &collective in self.collectives {
            let bench = self.args.bench(collective)?;
            let mut ranks = Ranks::<B>::create(backend, &bench, self.seat, self.seed)?;
            if tuning.is_none() {
                let begun = self.begin(&ranks);
                tuning = Some(ranks.agree(begun)?);
            }
            let table = self.table::<B, T>(&mut ranks, &bench);
            let added = table.and_then(|table| Ok(tuning.as_mut().map_or(Ok(()), |tuning| tuning.add(table))?));
            ranks.agree(added)?;
            // After each collective: what was measured is not lost if a later one fails.
            let written = match &tuning {
                Some(tuning) if ranks.together.leads() => self.write(tuning, collective),
                _ => Ok(()),
            };
            ranks.agree(written)?;
        }
        Ok(())
    }

    /// What the file holds already, for these devices, or nothing. Refuses before the start what could not be written at the end.
    fn begin<B: Backend>(&self, ranks: &Ranks<B>) -> Result<Tuning> {
        let device = B::describe(ranks.device());
        let Some(path) = self.args.output.as_deref() else { return Ok(Tuning::new(&device)) };
        if !path.exists() {
            let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
            fs::metadata(folder).map_err(CliError::file(folder))?;
            return Ok(Tuning::new(&device));
        }
        let there = Tuning::read(path)?;
        there.check_device(&device)?;
        Ok(there)
    }

    fn table<B: Backend, T: Element>(&self, ranks: &mut Ranks<B>, bench: &BenchArgs) -> Result<TuningTable> {
        let (collective, world, link) = (bench.collective, ranks.world(), ranks.communicators[0].link());
        let mut table = TuningTable::new(collective, link, world, self.args.note());
        let mut behind = Behind::default();
        let screen =
            Screen::start(collective, world, self.sizes.len(), (ranks.together.leads(), self.args.output.is_none()))?;
        for bytes in self.sizes {
            let size = ranks.shape.size(*bytes, T::DTYPE)?;
            let bench =
                BenchArgs { sets: Some(if size.bytes < LARGE { SETS } else { SETS_OF_LARGE }), ..bench.clone() };
            data::affordable_sets(ranks, size.bytes, bench.sets())?;
            let own = ranks.plan(size, T::DTYPE);
            let tried = self.size::<B, T>(ranks, &bench, size, own, (&behind, &screen))?;
            let us = |plan: Plan| tried.iter().find(|(other, _)| *other == plan).map_or(f64::NAN, |(_, us)| *us);
            let best = best_of_each(&tried);
            behind.note(&best);
            screen.row(size.bytes, &best, (own, us(own)))?;
            let rows = best.iter().map(|(plan, us)| TuningRow::new(collective, world, *bytes as u64, *plan, *us));
            table.rows.extend(rows);
        }
        screen.finish();
        Ok(table)
    }

    /// All candidates of a size that the device can run, the library's own plan among them.
    fn size<B: Backend, T: Element>(
        &self,
        ranks: &mut Ranks<B>,
        bench: &BenchArgs,
        size: Size,
        own: Plan,
        (behind, screen): (&Behind, &Screen),
    ) -> Result<Vec<Tried>> {
        let mut sets = Sets::<B, T>::create(ranks, bench, size)?;
        let host = B::describe(ranks.device()).family == DeviceFamily::Host;
        let short = BenchArgs { batches: Some(BATCHES), ..bench.clone() };
        let mut plans = vec![own];
        for algorithm in bench.collective.algorithms().iter().filter(|algorithm| !behind.is_hopeless(**algorithm)) {
            let grids = sweep::grids(host, size.bytes.div_ceil(16));
            plans.extend(
                grids.map(|(blocks, threads)| Plan::new(*algorithm, blocks, threads)).filter(|plan| *plan != own),
            );
        }
        let mut tried: Vec<Tried> = Vec::new();
        let mut refused: Vec<Algorithm> = Vec::new();
        for plan in plans {
            if refused.contains(&plan.algorithm) {
                continue;
            }
            screen.progress(size.bytes, plan);
            match time(ranks, &mut sets, plan, &short) {
                Ok(us) => tried.push((plan, us)),
                Err(CliError::Signal(Error::ApiMisuse(why))) if why.is_of_grid() => {}
                // An algorithm that does not take so many bytes.
                Err(CliError::Signal(Error::ApiMisuse(_))) => refused.push(plan.algorithm),
                Err(error) => return Err(error),
            }
        }
        // Again, and longer: the fastest, the best of each algorithm, and the library's own. Whatever disturbed the machine the first time is over.
        tried.sort_by(|a, b| a.1.total_cmp(&b.1));
        let best = best_of_each(&tried);
        for (place, (plan, us)) in tried.iter_mut().enumerate() {
            if place < FINALISTS || *plan == own || best.iter().any(|(other, _)| other == plan) {
                *us = us.min(time(ranks, &mut sets, *plan, bench)?);
            }
        }
        tried.sort_by(|a, b| a.1.total_cmp(&b.1));
        Ok(tried)
    }

    fn write(&self, tuning: &Tuning, collective: Collective) -> Result<()> {
        let text = tuning.to_toml();
        match self.args.output.as_deref() {
            // Whoever reads it meanwhile finds the old file or the new one.
            Some(path) => {
                let mut beside = path.as_os_str().to_owned();
                beside.push(".new");
                let beside = PathBuf::from(beside);
                fs::write(&beside, text).map_err(CliError::file(&beside))?;
                fs::rename(&beside, path).map_err(CliError::file(path))
            }
            None if self.collectives.last() == Some(&collective) => Ok(print(&text)?),
            None => Ok(()),
        }
    }
}

/// Microseconds a call of this plan; an error if a result is wrong.
fn time<B: Backend, T: Element>(
    ranks: &mut Ranks<B>,
    sets: &mut Sets<B, T>,
    plan: Plan,
    args: &BenchArgs,
) -> Result<f64> {
    ranks.set_plan(plan);
    let place = ranks.shape.places().first().copied().unwrap_or(Place::OutOfPlace);
    let found = load::measure(ranks, sets, place, args).map(|measured| measured.found);
    ranks.leave_plan();
    match found? {
        found if found.wrong > 0 => Err(CliError::Mismatch(found.wrong)),
        found => Ok(found.quantile(0.5)),
    }
}

/// Algorithms that are far behind the fastest, and at how many sizes in a row.
#[derive(Default)]
struct Behind(Vec<(Algorithm, u32)>);

impl Behind {
    fn note(&mut self, best: &[Tried]) {
        let Some((_, fastest)) = best.first() else { return };
        let far = |(_, us): &&Tried| *us > HOPELESS * fastest;
        let sizes = |algorithm| self.0.iter().find(|(other, _)| *other == algorithm).map_or(0, |(_, sizes)| *sizes);
        let now: Vec<_> =
            best.iter().filter(far).map(|(plan, _)| (plan.algorithm, sizes(plan.algorithm) + 1)).collect();
        // What was not tried stays where it is.
        let untried = self.0.iter().filter(|(old, _)| !best.iter().any(|(plan, _)| plan.algorithm == *old));
        self.0 = untried.copied().chain(now).collect();
    }

    fn is_hopeless(&self, algorithm: Algorithm) -> bool {
        self.0.iter().any(|(other, sizes)| *other == algorithm && *sizes >= 2)
    }
}

/// The best plan of each algorithm, the fastest first. `tried` is in that order.
fn best_of_each(tried: &[Tried]) -> Vec<Tried> {
    let mut best: Vec<Tried> = Vec::new();
    for (plan, us) in tried {
        if best.iter().any(|(other, _)| other.algorithm == plan.algorithm) {
            continue;
        }
        let rivals = tried.iter().filter(|(other, time)| other.algorithm == plan.algorithm && *time <= us * SAME);
        best.extend(rivals.min_by_key(|(plan, _)| u64::from(plan.blocks) * u64::from(plan.threads)));
    }
    best.sort_by(|a, b| a.1.total_cmp(&b.1));
    best
}

/// What is shown meanwhile.
struct Screen {
    /// On standard error; draws nothing where that is no terminal.
    bar: ProgressBar,
    /// Another process prints it.
    silent: bool,
    /// Standard output is the file.
    aside: bool,
}

impl Screen {
    fn start(collective: Collective, world: usize, sizes: usize, (leads, aside): (bool, bool)) -> Result<Self> {
        let bar = if leads { ProgressBar::new(sizes as u64) } else { ProgressBar::hidden() };
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} {msg} {elapsed} (about {eta} more)") {
            bar.set_style(style);
        }
        let screen = Screen { bar, silent: !leads, aside };
        screen.line(&format!(
            "# {collective} of {world} ranks: bytes, the fastest plan and its us, the library's own\n"
        ))?;
        Ok(screen)
    }

    fn progress(&self, bytes: usize, plan: Plan) {
        let Plan { algorithm, blocks, threads, .. } = plan;
        self.bar.set_message(format!("{}: {algorithm} {blocks}x{threads}", binary_size(bytes as u64)));
    }

    fn row(&self, bytes: usize, best: &[Tried], (own, own_us): Tried) -> Result<()> {
        self.bar.inc(1);
        let Some((plan, us)) = best.first() else {
            return Err(CliError::Arguments(format!("no plan runs at {}", binary_size(bytes as u64))));
        };
        let text = |plan: Plan| format!("{} {}x{}", plan.algorithm, plan.blocks, plan.threads);
        self.line(&format!("{bytes:>12}  {:<26} {us:>9.2}  {:<26} {own_us:>9.2}\n", text(*plan), text(own)))
    }

    fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn line(&self, text: &str) -> Result<()> {
        if self.silent {
            return Ok(());
        }
        Ok(self.bar.suspend(|| if self.aside { std::io::stderr().write_all(text.as_bytes()) } else { print(text) })?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_far_behind_twice_is_left() {
        let plan = |algorithm, us| (Plan::new(algorithm, 1, 64), us);
        use Algorithm::{Lamport, Lines, OneStage};
        let mut behind = Behind::default();
        behind.note(&[plan(Lamport, 1.0), plan(OneStage, 1.9), plan(Lines, 2.1)]);
        assert!(!behind.is_hopeless(Lines));
        behind.note(&[plan(OneStage, 1.0), plan(Lamport, 2.5), plan(Lines, 3.0)]);
        assert_eq!([Lines, Lamport, OneStage].map(|a| behind.is_hopeless(a)), [true, false, false]);
        // Not tried any more, it stays so; a better size counts anew.
        behind.note(&[plan(OneStage, 1.0), plan(Lamport, 1.5)]);
        behind.note(&[plan(OneStage, 1.0), plan(Lamport, 2.5)]);
        assert_eq!([Lines, Lamport, OneStage].map(|a| behind.is_hopeless(a)), [true, false, false]);
    }

    #[test]
    fn of_equals_the_smaller_grid_is_taken() {
        let plan = |algorithm, blocks, us| (Plan::new(algorithm, blocks, 64), us);
        use Algorithm::{Lamport, OneStage};
        let tried = [
            plan(Lamport, 64, 2.0),
            plan(Lamport, 8, 2.01),
            plan(OneStage, 1, 3.0),
            plan(Lamport, 1, 3.5),
            plan(OneStage, 2, 3.6),
        ];
        assert_eq!(best_of_each(&tried), [tried[1], tried[2]]);
        assert_eq!(best_of_each(&[]), []);
    }
}
