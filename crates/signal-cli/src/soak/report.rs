//! What a soak says: what it is going to do, how far it is, what it found.

use std::time::{Duration, Instant};

use signal_comm::{Backend, Communicator, Settings};

use super::args::Args;
use super::fault::Kind;
use crate::error::Result;
use crate::machine::{binary_size, print, signal_variables};

/// Time from one line of progress to the next.
const EVERY: Duration = Duration::from_secs(10);

/// Counts of a run, and when it last said something.
pub(super) struct Report {
    began: Instant,
    said: Instant,
    pub(super) rounds: u64,
    /// Calls that ranks have made, all ranks together.
    pub(super) calls: u64,
    /// Outputs compared, all ranks together.
    pub(super) outputs: u64,
    /// Faults after which all ranks recovered, by kind.
    pub(super) faults: [u64; Kind::ALL.len()],
    /// Outputs or inputs of a call that were not what they had to be, all ranks together.
    pub(super) mismatches: u64,
}

impl Report {
    /// Prints what is going to be done.
    pub(super) fn start<B: Backend>(
        args: &Args,
        seed: u64,
        settings: &Settings,
        comms: &[Communicator<B>],
    ) -> Result<Self> {
        let faults = if args.faults { "with faults" } else { "no faults" };
        let mut text = format!(
            "# signal {} soak backend {} ranks {} minutes {} seed {seed:#x} first round {} {faults} deadline {:?} scratch {}\n",
            env!("CARGO_PKG_VERSION"),
            args.group.backend,
            comms.len(),
            args.minutes,
            args.first_round,
            settings.timeout,
            binary_size(settings.scratch_bytes as u64),
        );
        for comm in comms {
            text += &format!("#  Rank {} on {}\n", comm.rank(), B::describe(comm.device()).label());
        }
        for (name, value) in signal_variables() {
            text += &format!("#  {name}={value}\n");
        }
        print(&text)?;
        let now = Instant::now();
        Ok(Report { began: now, said: now, rounds: 0, calls: 0, outputs: 0, faults: Default::default(), mismatches: 0 })
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// Prints a line when it is time to.
    pub(super) fn progress(&mut self) -> Result<()> {
        if self.said.elapsed() >= EVERY {
            self.said = Instant::now();
            print(&format!("# {:>6.0} s: {}\n", self.began.elapsed().as_secs_f64(), self.counts()))?;
        }
        Ok(())
    }

    pub(super) fn survived(&mut self, kind: Kind) {
        let kinds = Kind::ALL.iter().zip(&mut self.faults);
        kinds.filter(|(other, _)| **other == kind).for_each(|(_, count)| *count += 1);
    }

    pub(super) fn all_faults(&self) -> u64 {
        self.faults.iter().sum()
    }

    /// Prints the counts.
    pub(super) fn finish(&self, good: bool) -> Result<()> {
        let mut text = format!("{} in {:.1} s: {}\n", self.counts(), self.elapsed().as_secs_f64(), verdict(good));
        if self.all_faults() > 0 {
            let kinds = Kind::ALL.iter().zip(self.faults).filter(|(_, count)| *count > 0);
            let kinds: Vec<String> = kinds.map(|(kind, count)| format!("{count} {}", kind.name())).collect();
            text += &format!("# faults: {}\n", kinds.join(", "));
        }
        Ok(print(&text)?)
    }

    fn counts(&self) -> String {
        let Report { calls, rounds, outputs, mismatches, .. } = self;
        let faults = self.all_faults();
        format!(
            "{calls} calls, {rounds} rounds, {outputs} outputs compared, {faults} faults survived, {mismatches} mismatches"
        )
    }
}

fn verdict(good: bool) -> &'static str {
    if good { "OK" } else { "FAILED" }
}
