//! `signal soak`: random programs, for as long as one likes.
//!
//! A run is a sequence of rounds. In each, every rank has a thread that makes some dozens of calls without waiting for any,
//! falling behind and catching up at random: every collective in all its forms, typed and raw, on all domains, and among them calls
//! with something wrong, which every rank must refuse without a trace; then every output of every call on every rank is compared, bit by bit, with the
//! scalar reference, and so is all memory around it. With `--faults` some rounds hold a fault, which must end as the library
//! promises, on every rank, and after which all ranks recover; the next round shows that they did. The first thing that is
//! wrong ends the run.

mod args;
mod data;
mod fault;
mod program;
mod report;
mod round;
mod watchdog;

use std::time::Duration;

use signal_comm::Backend;

pub(crate) use self::args::Args;
use self::program::{Round, Shape};
use self::report::Report;
use self::round::{Outcome, Ranks};
use self::watchdog::Watchdog;
use crate::backend::{WithBackend, with_backend};
use crate::error::{CliError, Result};
use crate::machine::print;
use crate::seed;

/// After this and twenty deadlines a round counts as hung. Rounds take less than a second, apart from faults.
const PATIENCE: Duration = Duration::from_secs(60);
/// Things that are wrong in one round, up to which each is printed.
const MOST_FINDINGS: usize = 8;

/// Runs the soak. An error if an argument was wrong, or anything that the library did.
pub(crate) fn run(args: &Args) -> Result<()> {
    let seed = args.seed.unwrap_or_else(seed::from_clock);
    with_backend(args.group.backend, Soak { args, seed })
}

/// The work, once a backend is open.
struct Soak<'a> {
    args: &'a Args,
    seed: u64,
}

impl WithBackend for Soak<'_> {
    type Output = ();

    fn run<B: Backend>(self, backend: &B) -> Result<()> {
        let Soak { args, seed } = self;
        let available = backend.devices()?;
        let world = args.world(available.len())?;
        let devices: Vec<B::Device> = available.iter().cycle().take(world).cloned().collect();
        let settings = args.settings()?;
        let (host, faults, domains) = (Ranks::<B>::on_host(&devices), args.faults, settings.domains);
        let shape = Shape { seed, world, host, faults, domains };
        let mut groups = Vec::new();
        for domains in [settings.domains, true] {
            let mut of_group = settings.clone();
            of_group.domains = domains;
            groups.push(Ranks::<B>::create(&devices, of_group, args.group.share_devices, shape.grids())?);
        }
        let mut report = Report::start(args, seed, &settings, &groups[0].comms)?;
        let limit = PATIENCE + 20 * settings.timeout;
        let watchdog = Watchdog::new(format!("seed {seed:#x}"), args.first_round, limit);
        let result = self.rounds(&shape, &mut groups, &mut report, &watchdog);
        report.finish(result.is_ok())?;
        result
    }
}

impl Soak<'_> {
    fn rounds<B: Backend>(
        &self,
        shape: &Shape,
        groups: &mut [Ranks<B>],
        report: &mut Report,
        watchdog: &Watchdog,
    ) -> Result<()> {
        let time = self.args.time();
        for number in self.args.first_round.. {
            let round = Round::generate(shape, number);
            watchdog.begin(number);
            let corrupt = self.args.corrupt.filter(|_| number == self.args.first_round);
            let outcome = groups[usize::from(round.domains)].run(&round, shape.seed, corrupt);
            let outcome = outcome.map_err(|error| self.failure(&round, &error.to_string()))?;
            report.rounds += 1;
            report.calls += outcome.calls;
            report.outputs += outcome.outputs;
            report.mismatches += outcome.wrong.len() as u64;
            self.judge(&round, &outcome)?;
            if let Some(fault) = &round.fault {
                report.survived(fault.kind);
            }
            report.progress()?;
            // Not right behind a fault: the next round shows that the ranks have recovered.
            let over = report.elapsed() >= time && round.fault.is_none();
            if over && (report.all_faults() > 0 || !self.args.faults) {
                break;
            }
        }
        Ok(())
    }

    /// Prints what was wrong in a round, and makes an error of the first.
    fn judge(&self, round: &Round, outcome: &Outcome) -> Result<()> {
        let wrong = outcome.wrong.iter().map(|(call, rank, wrong)| {
            let what = round.calls[*call].describe();
            let place = round.calls[*call].place(*rank).map_or_else(String::new, |place| format!(", {place}"));
            let differ = match wrong.elements {
                0 => String::new(),
                elements => format!("{elements} element(s) differ from the reference: "),
            };
            format!("call {call} ({what}), rank {rank}{place}: {differ}{}", wrong.first)
        });
        let findings: Vec<String> = outcome.trouble.iter().cloned().chain(wrong).collect();
        let Some(first) = findings.first() else { return Ok(()) };
        for finding in findings.iter().take(MOST_FINDINGS) {
            print(&format!("# round {}: {finding}\n", round.number))?;
        }
        Err(self.failure(round, first))
    }

    fn failure(&self, round: &Round, what: &str) -> CliError {
        let fault = round.fault.as_ref().map_or_else(String::new, |fault| format!(" ({})", fault.describe()));
        CliError::Soak(format!("seed {:#x}, round {}{fault}: {what}", self.seed, round.number))
    }
}
