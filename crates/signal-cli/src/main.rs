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
mod seed;
mod soak;

use std::process::ExitCode;

use clap::error::ErrorKind;
use clap::{Parser, Subcommand};

use crate::error::CliError;

/// GPU collectives with one protocol on CUDA, ROCm and CPU threads.
#[derive(Debug, Parser)]
#[command(name = "signal", version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measures a collective and checks every result, in the layout of nccl-tests.
    #[command(arg_required_else_help = true)]
    Bench(bench::Args),
    /// Measures which plans are fastest on this machine, and writes them to a file that the library loads.
    Tune(bench::tune::Args),
    /// Runs random programs of collectives until the time is over, and checks every result.
    Soak(soak::Args),
    /// Lists backends, devices and who reaches whose memory, and says why something is not available.
    Doctor(doctor::Args),
}

fn main() -> ExitCode {
    let result = match Cli::try_parse() {
        Ok(Cli { command: Command::Bench(args) }) => bench::run(&args),
        Ok(Cli { command: Command::Tune(args) }) => bench::tune::run(&args),
        Ok(Cli { command: Command::Soak(args) }) => soak::run(&args),
        Ok(Cli { command: Command::Doctor(args) }) => doctor::run(&args),
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
