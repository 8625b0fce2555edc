//! The command line of `signal bench all-reduce`.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args as ClapArgs, ValueEnum};
use signal_comm::layout::MAX_GPUS;
use signal_comm::{Algorithm, Dtype, FastSum, parse_bytes};

use super::seat::Position;
use crate::backend::{self, BackendName, GroupArgs};
use crate::error::{CliError, Result};
use crate::seed;

/// Largest size of a default run on GPUs.
const DEFAULT_MAX_BYTES: usize = 64 << 20;
/// Largest size of a default run on CPU threads: a default run is to end within half a minute on two cores.
const DEFAULT_MAX_BYTES_HOST: usize = 16 << 20;

#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) group: GroupArgs,

    /// Starts N processes, one for each rank, instead of having all ranks in one
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX_GPUS as u64), conflicts_with = "ranks")]
    pub(crate) spawn: Option<u64>,

    /// Is one rank of those that torchrun, mpirun, mpiexec or srun has started, or that SIGNAL_RANK and SIGNAL_WORLD describe
    #[arg(long, conflicts_with_all = ["ranks", "spawn"])]
    pub(crate) launched: bool,

    /// Smallest size in bytes, with K, M or G for powers of 1024
    #[arg(short = 'b', long, alias = "minbytes", value_name = "SIZE", default_value = "1K", value_parser = parse_size)]
    pub(crate) min_bytes: usize,

    /// Largest size in bytes [default: 16M on host, else 64M]
    #[arg(short = 'e', long, alias = "maxbytes", value_name = "SIZE", value_parser = parse_size)]
    pub(crate) max_bytes: Option<usize>,

    /// Factor from one size to the next
    #[arg(short = 'f', long, alias = "stepfactor", value_name = "FACTOR", default_value = "2", value_parser = parse_factor)]
    pub(crate) step_factor: usize,

    /// Element type
    #[arg(short = 'd', long, alias = "datatype", default_value = "f32", value_parser = dtype_parser())]
    pub(crate) dtype: Dtype,

    /// Algorithm; auto leaves the choice to the library
    #[arg(long, default_value = "auto", value_parser = algorithm_parser())]
    pub(crate) algo: Choice,

    /// Captures N calls in one graph on each rank, and measures its replays
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) graph: Option<u32>,

    /// Calls in a batch; a batch is what is timed [default: up to 20, fewer where a call takes long]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000), conflicts_with = "graph")]
    pub(crate) iters: Option<u32>,

    /// Batches of each size and place [default: as many as fit a fifth of a second, from 3 to 50]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) batches: Option<u32>,

    /// Calls before the timed ones
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(..=100_000))]
    pub(crate) warmup: u32,

    /// Blocks a call [default: the library's plan]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) blocks: Option<u32>,

    /// Threads a block [default: the library's plan]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) threads: Option<u32>,

    /// Tries many grids at each size, out of place; the row is the fastest's, the line above it names the next ones
    #[arg(long, conflicts_with_all = ["blocks", "threads"])]
    pub(crate) sweep: bool,

    /// Where inputs and outputs lie
    #[arg(long, value_enum, default_value_t = Memory::Symmetric)]
    pub(crate) memory: Memory,

    /// Sets of buffers that calls go round, memory permitting: with 1, every call finds its data where the last one left it
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) sets: u32,

    /// Seed of the random data; a run with the same seed has the same data [default: the clock]
    #[arg(long, value_parser = seed::parse)]
    pub(crate) seed: Option<u64>,

    /// Writes machine, arguments and results to a file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Writes inputs and outputs to a directory, with a manifest, for a check by someone else
    #[arg(long, value_name = "DIR")]
    pub(crate) dump: Option<PathBuf>,

    /// Self-test of the check: flips one bit of this rank's output after the timed run, which has to be found
    #[arg(long, value_name = "RANK", hide = true)]
    pub(crate) corrupt: Option<usize>,
}

/// An algorithm, or none for "auto". A type of its own, because clap takes an `Option` for an optional argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Choice(pub(crate) Option<Algorithm>);

impl Choice {
    pub(crate) fn name(self) -> &'static str {
        self.0.map_or("auto", Algorithm::name)
    }
}

/// Where the buffers of a bench lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Memory {
    /// Allocated by the communicator: peers read it where it is.
    Symmetric,
    /// Any device memory: only its own rank touches it, so the kernel stages it.
    Local,
}

impl Memory {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Memory::Symmetric => "symmetric",
            Memory::Local => "local",
        }
    }
}

impl Args {
    /// The element counts to run, smallest first.
    pub(crate) fn counts(&self) -> Result<Vec<usize>> {
        let element = self.dtype.bytes();
        let max_bytes = self.max_bytes.unwrap_or(match self.group.backend {
            // A larger -b alone asks for that one size.
            BackendName::Host => DEFAULT_MAX_BYTES_HOST.max(self.min_bytes),
            _ => DEFAULT_MAX_BYTES.max(self.min_bytes),
        });
        if self.min_bytes > max_bytes {
            return Err(CliError::Arguments(format!("-b {} is larger than -e {max_bytes}", self.min_bytes)));
        }
        if self.min_bytes < element {
            return Err(CliError::Arguments(format!("-b {} holds no whole {} element", self.min_bytes, self.dtype)));
        }
        let sizes = std::iter::successors(Some(self.min_bytes), |size| size.checked_mul(self.step_factor));
        Ok(sizes.take_while(|size| *size <= max_bytes).map(|size| size / element).collect())
    }

    /// The number of ranks of one process that has all of them, given how many devices there are.
    pub(super) fn world(&self, devices: usize) -> Result<usize> {
        let world = self.group.world(devices)?;
        backend::check_corrupt(self.corrupt, world)?;
        Ok(world)
    }

    /// Refuses one rank of several processes for whose ranks there are too few devices.
    pub(super) fn check_position(&self, position: &Position, devices: usize) -> Result<()> {
        self.group.check_devices(position.local_world, devices)?;
        backend::check_corrupt(self.corrupt, position.world)
    }
}

fn parse_size(text: &str) -> Result<usize, String> {
    match parse_bytes(text) {
        Some(0) => Err("a size is at least 1 byte".to_owned()),
        Some(bytes) => Ok(bytes),
        None => Err("a size is a number of bytes that fits the address space, with K, M, G or nothing".to_owned()),
    }
}

/// With 1 the sizes would not grow.
fn parse_factor(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|factor| *factor >= 2).ok_or_else(|| "a factor is a whole number, 2 or more".to_owned())
}

fn dtype_parser() -> impl TypedValueParser<Value = Dtype> {
    let dtypes = FastSum::ALL.map(FastSum::dtype);
    PossibleValuesParser::new(dtypes.map(Dtype::name)).try_map(move |name| {
        let found = dtypes.into_iter().find(|dtype| dtype.name() == name);
        found.ok_or_else(|| format!("no dtype {name}"))
    })
}

fn algorithm_parser() -> impl TypedValueParser<Value = Choice> {
    let names = std::iter::once("auto").chain(Algorithm::ALL.map(Algorithm::name));
    // The parser has refused every other name.
    PossibleValuesParser::new(names).map(|name| Choice(Algorithm::from_name(&name)))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn counts(line: &str) -> Result<Vec<usize>> {
        Line::try_parse_from(format!("bench {line}").split_whitespace())?.args.counts()
    }

    #[test]
    fn sizes_have_binary_units() {
        for (text, bytes) in
            [("1", 1), ("1000", 1000), ("1K", 1024), ("3kb", 3072), ("64M", 64 << 20), ("1GiB", 1 << 30)]
        {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in ["", "K", "-1", "1.5K", "1T", "0", "0M", "99999999999999999999", "99999999999G", "1 K"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_round_down_to_whole_elements() {
        assert_eq!(counts("-b 1001 -e 5000 -f 2 -d f16").unwrap(), [500, 1001, 2002]);
        assert_eq!(counts("-b 7 -e 7 -d f32").unwrap(), [1]);
        assert_eq!(counts("-b 1K -e 4K -f 18446744073709551615").unwrap(), [256]);
        assert_eq!(counts("-b 32M").unwrap(), [8 << 20]);
        assert_eq!(counts("").unwrap().len(), 15);
        assert_eq!(counts("--backend cuda").unwrap().len(), 17);
    }

    #[test]
    fn sizes_that_cannot_be_meant_are_refused() {
        assert!(counts("-b 2K -e 1K").unwrap_err().to_string().contains("larger than -e 1024"));
        assert!(counts("-b 3 -e 1K").unwrap_err().to_string().contains("no whole f32"));
    }
}
