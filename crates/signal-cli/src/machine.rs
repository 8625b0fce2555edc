//! Descriptions of this machine and its devices, for the reports of both commands.

use std::io::{self, Write};

use serde::{Deserialize, Serialize};
use signal_comm::DeviceInfo;

/// The machine's CPU side.
#[derive(Debug, Serialize)]
pub(crate) struct Machine {
    pub(crate) signal_version: &'static str,
    pub(crate) os: &'static str,
    pub(crate) arch: &'static str,
    /// CPUs that this process may use; 0 if unknown.
    pub(crate) cpus: usize,
}

impl Machine {
    pub(crate) fn here() -> Self {
        Machine {
            signal_version: env!("CARGO_PKG_VERSION"),
            os: std::env::consts::OS,
            arch: std::env::consts::ARCH,
            cpus: std::thread::available_parallelism().map_or(0, usize::from),
        }
    }
}

/// A device in a report.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) uuid: String,
    pub(crate) pci: Option<String>,
    pub(crate) arch: String,
    pub(crate) family: String,
    pub(crate) memory_bytes: u64,
    pub(crate) compute_units: u32,
    pub(crate) clock_hz: u64,
    pub(crate) max_block_threads: u32,
}

impl From<DeviceInfo> for Device {
    fn from(info: DeviceInfo) -> Self {
        Device {
            name: info.name,
            uuid: info.uuid,
            pci: info.pci,
            arch: info.arch,
            family: format!("{:?}", info.family).to_lowercase(),
            memory_bytes: info.memory_bytes,
            compute_units: info.compute_units,
            clock_hz: info.clock_hz,
            max_block_threads: info.max_block_threads,
        }
    }
}

/// "64 MiB" where that is exact, else one decimal.
pub(crate) fn binary_size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["bytes", "KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.checked_ilog2().unwrap_or(0) / 10).min(4);
    let unit = UNITS[power as usize];
    if bytes.is_multiple_of(1 << (10 * power)) {
        return format!("{} {unit}", bytes >> (10 * power));
    }
    format!("{:.1} {unit}", bytes as f64 / (1u64 << (10 * power)) as f64)
}

/// Makes a process a rank of a bench that another process has started.
pub(crate) const SPAWNED: &str = "SIGNAL_SPAWNED";

/// Variables that the library reads, and any other that looks as if it should. Reports are no place for secrets.
pub(crate) fn signal_variables() -> Vec<(String, String)> {
    let text = |s: std::ffi::OsString| s.to_string_lossy().into_owned();
    let all = std::env::vars_os().map(|(name, value)| (text(name), text(value)));
    let mut found: Vec<_> = all.filter(|(name, _)| name.starts_with("SIGNAL_") && name != SPAWNED).collect();
    for (_, secret) in found.iter_mut().filter(|(name, _)| name == "SIGNAL_SECRET") {
        "(not shown)".clone_into(secret);
    }
    found.sort();
    found
}

/// Writes to standard output; `print!` would panic when the reader has gone away.
pub(crate) fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}
