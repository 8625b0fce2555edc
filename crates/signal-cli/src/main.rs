//! The `signal` tool: measures the collectives of the Signal library, puts them to the test for as long as one likes, and
//! says what this machine can run.
#![cfg_attr(
    not(any(feature = "host", feature = "cuda")),
    allow(dead_code, reason = "without a backend that runs collectives only errors are left to report")
)]

mod backend;
mod bench;
mod doctor;
mod error;
mod machine;
mod report;
mod run;
mod seed;
mod soak;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;

use crate::error::CliError;

/// GPU collectives with one protocol on CUDA, ROCm and CPU threads.
#[derive(Debug, Parser)]
#[command(name = "signal", version, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes:
  0  done, and every result was right
  1  a call failed, a result was wrong, a file could not be written, or nothing is usable
  2  the command line cannot be meant, or the backend is not compiled in
`signal run` ends with the code of its program, or 128 and the number of the signal that ended it.
An error is one line on standard error. `signal COMMAND --help` has examples.";

const BENCH_EXAMPLES: &str = "\
Examples:
  signal bench all-reduce
  signal bench all-reduce --backend cuda -d bf16 --graph 50 -b 512 -e 1G --json all-reduce.json
  signal bench all-gather --backend cuda --spawn 8
  signal bench all-reduce --backend cuda --ranks 2 --graph 50 --compare nccl --csv all-reduce.csv
  signal bench broadcast --backend cuda --root 1 --memory local
  signal bench all-reduce --norm rms --hidden 4096 --norm-output e4m3-row -d bf16 --graph 50
  signal bench reduce-scatter --launched";

const TUNE_EXAMPLES: &str = "\
Examples:
  signal tune --backend cuda -o tuning.toml
  signal tune all-reduce all-gather --backend cuda --ranks 4 -o tuning.toml
  signal tune --backend cuda --spawn 8 -e 256M -o tuning.toml --note idle
Then SIGNAL_TUNING=tuning.toml for whatever uses the library.";

const SOAK_EXAMPLES: &str = "\
Examples:
  signal soak --minutes 1
  signal soak --backend cuda --ranks 2 --minutes 60 --faults";

const REPORT_EXAMPLES: &str = "\
Examples:
  signal report all-reduce.json -o report.html
  signal report before.json after.json -o report.html --commit 1830c7e --link-gb-s 450 --floor-us 1.6";

const RUN_EXAMPLES: &str = "\
Examples:
  signal run --trace out.json -- signal bench all-reduce --ranks 2 -e 4K
  signal run --trace out.json -- torchrun --nproc-per-node 4 --no-python my-engine
Then open out.json in Perfetto (ui.perfetto.dev) or chrome://tracing.";

const DOCTOR_EXAMPLES: &str = "\
Examples:
  signal doctor
  signal doctor --json";

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  signal completions bash
  signal completions zsh
In bash: source <(signal completions bash)";

#[derive(Debug, Subcommand)]
enum Command {
    /// Measures a collective and checks every result, in the layout of nccl-tests.
    #[command(arg_required_else_help = true, after_help = BENCH_EXAMPLES)]
    Bench(bench::Args),
    /// Measures which plans are fastest on this machine, and writes them to a file that the library loads.
    #[command(after_help = TUNE_EXAMPLES)]
    Tune(bench::tune::Args),
    /// Makes a page of charts and tables of what bench has measured.
    #[command(arg_required_else_help = true, after_help = REPORT_EXAMPLES)]
    Report(report::Args),
    /// Runs random programs of collectives until the time is over, and checks every result.
    #[command(after_help = SOAK_EXAMPLES)]
    Soak(soak::Args),
    /// Runs a program that uses the library, and writes a timeline of its calls: when each was enqueued, ran, and waited for whom.
    #[command(arg_required_else_help = true, after_help = RUN_EXAMPLES)]
    Run(run::Args),
    /// Lists backends, devices and who reaches whose memory, and says why something is not available.
    #[command(after_help = DOCTOR_EXAMPLES)]
    Doctor(doctor::Args),
    /// Prints what makes a shell complete this tool's command lines.
    #[command(arg_required_else_help = true, after_help = COMPLETIONS_EXAMPLES)]
    Completions {
        /// The shell
        shell: Shell,
    },
}

/// Prints the script of a shell.
fn completions(shell: Shell) -> error::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "signal", &mut script);
    Ok(machine::print(&String::from_utf8_lossy(&script))?)
}

fn main() -> ExitCode {
    let result = match Cli::try_parse() {
        Ok(Cli { command: Command::Bench(args) }) => bench::run(&args),
        Ok(Cli { command: Command::Tune(args) }) => bench::tune::run(&args),
        Ok(Cli { command: Command::Soak(args) }) => soak::run(&args),
        Ok(Cli { command: Command::Report(args) }) => report::run(&args),
        Ok(Cli { command: Command::Run(args) }) => run::run(&args),
        Ok(Cli { command: Command::Doctor(args) }) => doctor::run(&args),
        Ok(Cli { command: Command::Completions { shell } }) => completions(shell),
        // Texts to read rather than one error: clap prints them.
        Err(text) if !text.use_stderr() || text.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            text.exit()
        }
        Err(error) => Err(CliError::from(error)),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            if !error.is_told() {
                eprintln!("error: {error}");
            }
            ExitCode::from(error.exit_code())
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]
mod tests {
    use super::*;

    #[test]
    fn every_example_is_a_command_line() {
        Cli::command().debug_assert();
        let mut examples = 0;
        for command in Cli::command().get_subcommands().filter(|command| command.get_name() != "help") {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.starts_with("Examples:"), "{}", command.get_name());
            for line in help.lines().filter_map(|line| line.strip_prefix("  ")) {
                let parsed = Cli::try_parse_from(line.split_whitespace());
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
                assert_eq!(line.split_whitespace().nth(1), Some(command.get_name()), "{line}");
                examples += 1;
            }
        }
        assert!(examples > 10);
    }
}
