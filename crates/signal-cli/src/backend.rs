//! Choice of a backend at run time. The library dispatches statically, so what is to be done is a value with a generic
//! method, and each compiled backend instantiates it.

use std::fmt;

use clap::{Args, ValueEnum};
use signal_comm::Backend;
use signal_comm::layout::MAX_GPUS;

use crate::error::{CliError, Result};

/// The backends that this tool knows, compiled in or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendName {
    /// CPU threads.
    Host,
    /// NVIDIA GPUs through the CUDA driver.
    Cuda,
    /// AMD GPUs through the HIP runtime.
    Rocm,
}

impl BackendName {
    pub(crate) const ALL: [BackendName; 3] = [BackendName::Host, BackendName::Cuda, BackendName::Rocm];

    /// The name of the backend and of the cargo feature that compiles it in.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            BackendName::Host => "host",
            BackendName::Cuda => "cuda",
            BackendName::Rocm => "rocm",
        }
    }

    pub(crate) const fn is_compiled(self) -> bool {
        match self {
            BackendName::Host => cfg!(feature = "host"),
            BackendName::Cuda => cfg!(feature = "cuda"),
            BackendName::Rocm => cfg!(feature = "rocm"),
        }
    }
}

impl fmt::Display for BackendName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Something to do with whichever backend was chosen.
pub(crate) trait WithBackend {
    type Output;
    fn run<B: Backend>(self, backend: &B) -> Result<Self::Output>;
}

/// Opens the backend and hands it to `work`. The error of opening it names what is missing.
pub(crate) fn with_backend<W: WithBackend>(name: BackendName, work: W) -> Result<W::Output> {
    match name {
        #[cfg(feature = "host")]
        BackendName::Host => work.run(&signal_comm::host::open()?),
        #[cfg(feature = "cuda")]
        BackendName::Cuda => work.run(&signal_comm::cuda::open()?),
        #[cfg(feature = "rocm")]
        BackendName::Rocm => work.run(&signal_comm::rocm::open()?),
        // Not reached when all features are on.
        #[allow(unreachable_patterns)]
        missing => {
            drop(work);
            Err(CliError::NotCompiled(missing))
        }
    }
}

/// Who takes part, on the command line of whatever runs collectives.
#[derive(Args, Clone, Debug)]
pub(crate) struct GroupArgs {
    /// Who executes the kernels
    #[arg(long, value_enum, default_value_t = BackendName::Host)]
    pub(crate) backend: BackendName,

    /// Number of ranks, each on a device of its own [default: 2 on host, else all devices]
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=MAX_GPUS as u64))]
    pub(crate) ranks: Option<u64>,

    /// Lets ranks share a device when there are more ranks than devices
    #[arg(long)]
    pub(crate) share_devices: bool,
}

impl GroupArgs {
    /// The number of ranks, given how many devices there are: as asked for, else 2 on CPU threads and all devices elsewhere.
    pub(crate) fn world(&self, devices: usize) -> Result<usize> {
        let name = self.backend;
        let world = match (self.ranks, name) {
            (Some(ranks), _) => ranks as usize,
            (None, BackendName::Host) => 2.min(devices),
            (None, _) => devices.min(MAX_GPUS),
        };
        self.check_devices(world, devices)?;
        Ok(world)
    }

    /// Refuses more ranks than devices, unless they may share them.
    pub(crate) fn check_devices(&self, ranks: usize, devices: usize) -> Result<()> {
        if ranks > devices && !self.share_devices {
            let name = self.backend;
            return Err(CliError::Arguments(format!(
                "{ranks} ranks need {ranks} devices, {name} has {devices}; --share-devices lets ranks share one"
            )));
        }
        Ok(())
    }
}

/// Refuses a rank to corrupt that is not there.
pub(crate) fn check_corrupt(rank: Option<usize>, world: usize) -> Result<()> {
    match rank {
        Some(rank) if rank >= world => {
            Err(CliError::Arguments(format!("--corrupt {rank}: the ranks are 0 to {}", world - 1)))
        }
        _ => Ok(()),
    }
}
