//! The command line of `signal soak`.

use std::env;
use std::time::Duration;

use clap::Args as ClapArgs;
use signal_comm::Settings;

use crate::backend::{self, GroupArgs};
use crate::error::{CliError, Result};
use crate::seed;

/// Deadline where nobody is late, unless SIGNAL_TIMEOUT says another.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Deadline with faults, likewise: each costs one. Long enough for ranks that are not meant to be late on a machine with more
/// to do than cores; with 0.3 s and thirty threads a core one was late all the same.
const TIMEOUT_WITH_FAULTS: Duration = Duration::from_millis(600);
/// Scratch, unless SIGNAL_SCRATCH says how much: so little that a large message takes several windows.
const SCRATCH_BYTES: usize = 256 << 10;
/// A year. More cannot be meant.
const MOST_MINUTES: f64 = 366.0 * 24.0 * 60.0;

#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(super) group: GroupArgs,

    /// How long to go on, in minutes, fractions allowed; the round that has begun is finished
    #[arg(long, value_name = "M", default_value = "1", value_parser = parse_minutes)]
    pub(super) minutes: f64,

    /// Seed of the program; a run with the same seed and ranks has the same program [default: the clock]
    #[arg(long, value_parser = seed::parse)]
    pub(super) seed: Option<u64>,

    /// Number of the round to begin with, to come to one that failed at once
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(super) first_round: u64,

    /// Lets ranks be missing or late, and calls be aborted; each time all ranks have to recover
    #[arg(long)]
    pub(super) faults: bool,

    /// Self-test of the check: flips one bit of each output of this rank in the first round, which has to be found
    #[arg(long, value_name = "RANK", hide = true)]
    pub(super) corrupt: Option<usize>,
}

impl Args {
    pub(super) fn time(&self) -> Duration {
        Duration::from_secs_f64(self.minutes * 60.0)
    }

    /// The number of ranks, given how many devices there are.
    pub(super) fn world(&self, devices: usize) -> Result<usize> {
        let world = self.group.world(devices)?;
        if self.faults && world < 2 {
            return Err(CliError::Arguments("--faults needs 2 ranks or more: one waits for nobody".to_owned()));
        }
        backend::check_corrupt(self.corrupt, world)?;
        Ok(world)
    }

    /// The environment's settings; what it leaves open is chosen for a soak.
    pub(super) fn settings(&self) -> Result<Settings> {
        let mut settings = Settings::from_env()?;
        if env::var_os("SIGNAL_TIMEOUT").is_none() {
            settings.timeout = if self.faults { TIMEOUT_WITH_FAULTS } else { TIMEOUT };
        }
        if env::var_os("SIGNAL_SCRATCH").is_none() {
            settings.scratch_bytes = SCRATCH_BYTES;
        }
        Ok(settings)
    }
}

fn parse_minutes(text: &str) -> Result<f64, String> {
    let minutes = text.parse().ok().filter(|minutes| *minutes > 0.0 && *minutes <= MOST_MINUTES);
    minutes.ok_or_else(|| "minutes are a number above 0 and up to a year, such as 90 or 0.5".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::backend::BackendName;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Result<Args> {
        Ok(Line::try_parse_from(format!("soak {line}").split_whitespace())?.args)
    }

    #[test]
    fn arguments_have_defaults() {
        let args = parse("").unwrap();
        assert_eq!(
            (args.group.backend, args.group.ranks, args.seed, args.faults),
            (BackendName::Host, None, None, false)
        );
        assert_eq!((args.time(), args.world(8).unwrap()), (Duration::from_secs(60), 2));
        let args = parse("--backend cuda --minutes 0.05 --seed 0x2A --faults").unwrap();
        assert_eq!((args.seed, args.time(), args.world(4).unwrap()), (Some(42), Duration::from_secs(3), 4));
    }

    #[test]
    fn minutes_are_a_positive_number() {
        for (text, minutes) in [("1", 1.0), ("0.03", 0.03), ("1e-3", 0.001), ("527040", 527040.0)] {
            assert_eq!(parse_minutes(text), Ok(minutes), "{text}");
        }
        for text in ["", "0", "-1", "nan", "inf", "1e9", "one", "1m"] {
            assert!(parse_minutes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (line, devices, reason) in [
            ("--ranks 1 --faults", 8, "needs 2 ranks"),
            ("--faults", 1, "needs 2 ranks"),
            ("--ranks 3", 2, "--share-devices"),
            ("--ranks 3 --corrupt 3", 8, "the ranks are 0 to 2"),
        ] {
            let refused = parse(line).unwrap().world(devices).unwrap_err().to_string();
            assert!(refused.contains(reason), "{line}: {refused}");
        }
        assert_eq!(parse("--ranks 3 --share-devices").unwrap().world(2).unwrap(), 3);
    }
}
