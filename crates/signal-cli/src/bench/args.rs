//! The command line of `signal bench`.

use std::path::PathBuf;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args as ClapArgs, FromArgMatches, ValueEnum};
use signal_comm::kernel::RowFormat;
use signal_comm::layout::MAX_GPUS;
use signal_comm::{Algorithm, Collective, Dtype, FastSum, ReduceOp, parse_bytes};

use super::compare::{self, Rival};
use super::norm;
use super::seat::Position;
use crate::backend::{self, BackendName, GroupArgs};
use crate::error::{CliError, Result};
use crate::seed;

/// Largest size of a default run on GPUs.
const DEFAULT_MAX_BYTES: usize = 64 << 20;
/// Largest size of a default run on CPU threads: a default run is to end within half a minute on two cores.
const DEFAULT_MAX_BYTES_HOST: usize = 16 << 20;
/// Sets of buffers, unless the command line has its own number.
const DEFAULT_SETS: u32 = 5;
/// The algorithm that leaves the choice to the library.
const AUTO: &str = "auto";

#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// What to measure
    #[arg(value_name = "COLLECTIVE", value_parser = collective_parser())]
    pub(crate) collective: Collective,

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

    /// Algorithm, one that the collective has; auto leaves the choice to the library
    #[arg(short = 'a', long, default_value = AUTO)]
    pub(crate) algo: String,

    /// Operator of what reduces [default: sum]
    #[arg(short = 'o', long, value_parser = op_parser())]
    pub(crate) op: Option<ReduceOp>,

    /// Adds a residual to what an all-reduce, reduce-scatter or all-gather gives, and norms each row of it. Sizes are those of whole rows
    #[arg(long, value_enum)]
    pub(crate) norm: Option<Norm>,

    /// Elements of a row to norm
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..=1 << 20), requires = "norm")]
    pub(crate) hidden: u32,

    /// What normed rows become: their own type, or codes with scales [default: plain]
    #[arg(long, value_name = "FORMAT", value_parser = format_parser(), requires = "norm")]
    pub(crate) norm_output: Option<RowFormat>,

    /// Keeps f32 between sum, residual and norm, instead of rounding each
    #[arg(long, requires = "norm")]
    pub(crate) fast: bool,

    /// Measures the vendor's library beside, in the same run on the same buffers: nccl with cuda, rccl with rocm
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIBRARY", conflicts_with_all = ["norm", "sweep"])]
    pub(crate) compare: Vec<Rival>,

    /// Root of what has one [default: 0]
    #[arg(short = 'r', long, value_name = "RANK")]
    pub(crate) root: Option<usize>,

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

    /// Tries many grids at each size, out of place if possible; the row is the fastest's, the line above it names the next ones
    #[arg(long, conflicts_with_all = ["blocks", "threads"])]
    pub(crate) sweep: bool,

    /// Where inputs and outputs lie
    #[arg(long, value_enum, default_value_t = Memory::Symmetric)]
    pub(crate) memory: Memory,

    /// Which buffers calls use [default: rotating]
    #[arg(long, value_enum)]
    pub(crate) buffers: Option<Buffers>,

    /// Sets of rotating buffers, memory permitting; 1 is the same as --buffers same [default: 5]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) sets: Option<u32>,

    /// Seed of the random data; a run with the same seed has the same data [default: the clock]
    #[arg(long, value_parser = seed::parse)]
    pub(crate) seed: Option<u64>,

    /// Writes machine, arguments and results to a file
    #[arg(long, value_name = "FILE")]
    pub(crate) json: Option<PathBuf>,

    /// Writes a line for each size, place and library to a file, under a line with the columns' names
    #[arg(long, value_name = "FILE")]
    pub(crate) csv: Option<PathBuf>,

    /// Writes inputs and outputs to a directory, with a manifest, for a check by someone else
    #[arg(long, value_name = "DIR")]
    pub(crate) dump: Option<PathBuf>,

    /// Self-test of the check: flips one bit of this rank's output after the timed run, which has to be found
    #[arg(long, value_name = "RANK", hide = true)]
    pub(crate) corrupt: Option<usize>,
}

/// What becomes of rows behind a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Norm {
    /// RMSNorm, with a weight.
    Rms,
    /// LayerNorm, with a weight and a bias.
    Layer,
}

/// Which buffers the calls of a batch use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Buffers {
    /// All the same: a call finds its data where the last one left it, in a cache if it fits.
    Same,
    /// They go round several sets.
    Rotating,
}

impl Buffers {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Buffers::Same => "same",
            Buffers::Rotating => "rotating",
        }
    }
}

/// Where the buffers of a bench lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Memory {
    /// Allocated by the communicator: peers read it where it is.
    Symmetric,
    /// Any device memory: only its own rank touches it, so the kernel stages it.
    Local,
    /// The same, registered: peers read it where it is. An error where they cannot.
    Registered,
}

impl Memory {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Memory::Symmetric => "symmetric",
            Memory::Local => "local",
            Memory::Registered => "registered",
        }
    }
}

impl Args {
    /// Of a command line that names the collective and nothing else.
    pub(super) fn of(collective: Collective) -> Result<Self> {
        let command = Args::augment_args(clap::Command::new("bench"));
        let matches = command.try_get_matches_from(["bench", collective.name()])?;
        Ok(Args::from_arg_matches(&matches)?)
    }

    /// Refuses what the collective does not have, and what contradicts itself.
    pub(crate) fn check(&self) -> Result<()> {
        let collective = self.collective;
        self.algorithm()?;
        if let Some(op) = self.op.filter(|_| !collective.reduces()) {
            return Err(CliError::Arguments(format!("--op {op}: {collective} reduces nothing")));
        }
        if let Some(root) = self.root.filter(|_| !collective.has_root()) {
            return Err(CliError::Arguments(format!("--root {root}: {collective} has no root")));
        }
        compare::check(self)?;
        if self.norm.is_some() {
            norm::check(self)?;
        }
        match (self.buffers, self.sets) {
            (Some(Buffers::Same), Some(2..)) | (Some(Buffers::Rotating), Some(1)) => Err(CliError::Arguments(
                "--buffers same has one set of buffers, --buffers rotating has more".to_owned(),
            )),
            _ => Ok(()),
        }
    }

    /// The algorithm that is asked for, or none to leave the choice to the library.
    pub(super) fn algorithm(&self) -> Result<Option<Algorithm>> {
        if self.algo == AUTO {
            return Ok(None);
        }
        let has = self.collective.algorithms();
        if let Some(algorithm) = has.iter().find(|algorithm| algorithm.name() == self.algo) {
            return Ok(Some(*algorithm));
        }
        let names =
            [AUTO].into_iter().chain(has.iter().map(|algorithm| algorithm.name())).collect::<Vec<_>>().join(", ");
        let (algo, collective) = (&self.algo, self.collective);
        Err(CliError::Arguments(format!(
            "invalid value '{algo}' for '--algo': {collective} has no such algorithm [possible values: {names}]"
        )))
    }

    /// Sets of buffers to go round, memory permitting.
    pub(super) fn sets(&self) -> u32 {
        match self.buffers {
            Some(Buffers::Same) => 1,
            _ => self.sets.unwrap_or(DEFAULT_SETS),
        }
    }

    /// What that amounts to.
    pub(super) fn policy(&self) -> Buffers {
        if self.sets() == 1 { Buffers::Same } else { Buffers::Rotating }
    }

    /// The sizes in bytes to run, smallest first, before they are rounded down to what the collective can divide.
    pub(crate) fn sizes(&self) -> Result<Vec<usize>> {
        let max_bytes = self.max_bytes.unwrap_or(match self.group.backend {
            // A larger -b alone asks for that one size.
            BackendName::Host => DEFAULT_MAX_BYTES_HOST.max(self.min_bytes),
            _ => DEFAULT_MAX_BYTES.max(self.min_bytes),
        });
        if self.min_bytes > max_bytes {
            return Err(CliError::Arguments(format!("-b {} is larger than -e {max_bytes}", self.min_bytes)));
        }
        if self.min_bytes < self.dtype.bytes() {
            return Err(CliError::Arguments(format!("-b {} holds no whole {} element", self.min_bytes, self.dtype)));
        }
        let sizes = std::iter::successors(Some(self.min_bytes), |size| size.checked_mul(self.step_factor));
        Ok(sizes.take_while(|size| *size <= max_bytes).collect())
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

pub(super) fn parse_size(text: &str) -> Result<usize, String> {
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

pub(super) fn dtype_parser() -> impl TypedValueParser<Value = Dtype> {
    let dtypes = FastSum::ALL.map(FastSum::dtype);
    PossibleValuesParser::new(dtypes.map(Dtype::name)).try_map(move |name| {
        let found = dtypes.into_iter().find(|dtype| dtype.name() == name);
        found.ok_or_else(|| format!("no dtype {name}"))
    })
}

fn format_parser() -> impl TypedValueParser<Value = RowFormat> {
    PossibleValuesParser::new(RowFormat::ALL.map(RowFormat::name)).try_map(|name| {
        let found = RowFormat::ALL.into_iter().find(|format| format.name() == name);
        found.ok_or_else(|| format!("no format {name}"))
    })
}

fn op_parser() -> impl TypedValueParser<Value = ReduceOp> {
    PossibleValuesParser::new(ReduceOp::ALL.map(ReduceOp::name)).try_map(|name| {
        let found = ReduceOp::ALL.into_iter().find(|op| op.name() == name);
        found.ok_or_else(|| format!("no operator {name}"))
    })
}

pub(super) fn collective_parser() -> impl TypedValueParser<Value = Collective> {
    let value = |collective: Collective| PossibleValue::new(collective.name()).help(about(collective));
    PossibleValuesParser::new(Collective::ALL.map(value))
        .try_map(|name| Collective::from_name(&name).ok_or_else(|| format!("no collective {name}")))
}

fn about(collective: Collective) -> &'static str {
    match collective {
        Collective::AllReduce => "Every rank gets the reduction of all ranks' data",
        Collective::ReduceScatter => "Every rank gets its part of the reduction of all ranks' data",
        Collective::AllGather => "Every rank gets all ranks' data",
        Collective::Broadcast => "Every rank gets the root's data",
        Collective::Scatter => "Every rank gets its part of the root's data",
        Collective::Gather => "The root gets all ranks' data",
        Collective::Reduce => "The root gets the reduction of all ranks' data",
        Collective::AllToAll => "Every rank gets its part of every rank's data",
        Collective::SendRecv => "Every rank sends to the next one and receives from the one before, in one launch",
        _ => "",
    }
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

    fn args(line: &str) -> Result<Args> {
        let args = Line::try_parse_from(format!("bench {line}").split_whitespace())?.args;
        args.check()?;
        Ok(args)
    }

    fn sizes(line: &str) -> Result<Vec<usize>> {
        args(&format!("all-reduce {line}"))?.sizes()
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
    fn sizes_grow_by_the_factor() {
        assert_eq!(sizes("-b 1001 -e 5000 -f 2 -d f16").unwrap(), [1001, 2002, 4004]);
        assert_eq!(sizes("-b 7 -e 7 -d f32").unwrap(), [7]);
        assert_eq!(sizes("-b 1K -e 4K -f 18446744073709551615").unwrap(), [1024]);
        assert_eq!(sizes("-b 32M").unwrap(), [32 << 20]);
        assert_eq!(sizes("").unwrap().len(), 15);
        assert_eq!(sizes("--backend cuda").unwrap().len(), 17);
    }

    #[test]
    fn sizes_that_cannot_be_meant_are_refused() {
        assert!(sizes("-b 2K -e 1K").unwrap_err().to_string().contains("larger than -e 1024"));
        assert!(sizes("-b 3 -e 1K").unwrap_err().to_string().contains("no whole f32"));
    }

    #[test]
    fn every_collective_takes_its_algorithms_and_no_others() {
        for collective in Collective::ALL {
            assert_eq!(args(collective.name()).unwrap().algorithm().unwrap(), None);
            for algorithm in Algorithm::ALL {
                let args = args(&format!("{collective} -a {algorithm}"));
                if collective.algorithms().contains(&algorithm) {
                    assert_eq!(args.unwrap().algorithm().unwrap(), Some(algorithm));
                } else {
                    let refused = args.unwrap_err().to_string();
                    let named = collective.algorithms().iter().all(|has| refused.contains(has.name()));
                    assert!(named && refused.contains(collective.name()), "{refused}");
                }
            }
        }
    }

    #[test]
    fn the_policy_of_buffers_is_one_of_two() {
        let policy = |line: &str| args(&format!("all-reduce {line}")).map(|args| (args.policy(), args.sets()));
        for (line, expected) in [
            ("", (Buffers::Rotating, 5)),
            ("--buffers rotating", (Buffers::Rotating, 5)),
            ("--buffers rotating --sets 3", (Buffers::Rotating, 3)),
            ("--sets 1", (Buffers::Same, 1)),
            ("--buffers same", (Buffers::Same, 1)),
            ("--buffers same --sets 1", (Buffers::Same, 1)),
        ] {
            assert_eq!(policy(line).unwrap(), expected, "{line}");
        }
        for line in ["--buffers same --sets 2", "--buffers rotating --sets 1"] {
            assert!(policy(line).is_err(), "{line}");
        }
    }
}
