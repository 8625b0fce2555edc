//! What `signal bench --json` wrote, as far as a page needs it. Fields that are not known are passed over, and what later versions add may be missing.

use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::error::{CliError, Result};

/// One run.
#[derive(Debug, Deserialize)]
pub(super) struct Run {
    #[serde(skip)]
    pub(super) path: PathBuf,
    pub(super) machine: Machine,
    #[serde(default)]
    pub(super) devices: Vec<Device>,
    #[serde(default)]
    pub(super) environment: Vec<(String, String)>,
    pub(super) arguments: Arguments,
    pub(super) rows: Vec<Row>,
    /// Why the run failed.
    #[serde(default)]
    pub(super) error: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Machine {
    pub(super) signal_version: String,
    pub(super) os: String,
    pub(super) arch: String,
    pub(super) cpus: usize,
}

#[derive(Debug, Deserialize)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) arch: String,
}

#[derive(Debug, Deserialize)]
pub(super) struct Arguments {
    pub(super) collective: String,
    pub(super) backend: String,
    pub(super) ranks: usize,
    #[serde(default)]
    pub(super) processes: bool,
    pub(super) dtype: String,
    #[serde(default)]
    pub(super) norm: Option<String>,
    pub(super) algo: String,
    #[serde(default)]
    pub(super) graph: Option<u32>,
    #[serde(default)]
    pub(super) memory: String,
    #[serde(default)]
    pub(super) buffers: String,
}

/// One size.
#[derive(Debug, Deserialize)]
pub(super) struct Row {
    pub(super) bytes: u64,
    #[serde(default)]
    pub(super) algorithm: String,
    #[serde(flatten)]
    pub(super) places: Places,
    #[serde(default)]
    pub(super) contenders: Vec<Contender>,
}

/// Another library, measured in the same run.
#[derive(Debug, Deserialize)]
pub(super) struct Contender {
    pub(super) name: String,
    #[serde(default)]
    pub(super) version: String,
    #[serde(flatten)]
    pub(super) places: Places,
    /// Why it was not measured.
    #[serde(default)]
    pub(super) refusal: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Places {
    #[serde(default)]
    pub(super) out_of_place: Option<Timing>,
    #[serde(default)]
    pub(super) in_place: Option<Timing>,
}

#[derive(Clone, Debug, Deserialize)]
pub(super) struct Timing {
    pub(super) time_us: f64,
    pub(super) min_us: f64,
    pub(super) p99_us: f64,
    pub(super) algbw_gb_s: f64,
    pub(super) busbw_gb_s: f64,
    #[serde(default)]
    pub(super) wrong: u64,
}

impl Timing {
    /// Whether it can be drawn on scales that begin above 0.
    pub(super) fn is_positive(&self) -> bool {
        [self.time_us, self.min_us, self.algbw_gb_s].into_iter().all(|value| value.is_finite() && value > 0.0)
    }
}

impl Run {
    /// Reads a file; an error names it, and what is wrong with it.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).map_err(CliError::file(path))?;
        let run: Run = serde_json::from_str(&text)
            .map_err(|why| CliError::Arguments(format!("{} is no report of signal bench: {why}", path.display())))?;
        Ok(Run { path: path.to_owned(), ..run })
    }

    /// The file's name without its folder and ending.
    pub(super) fn stem(&self) -> String {
        self.path.file_stem().map_or_else(String::new, |stem| stem.to_string_lossy().into_owned())
    }
}
