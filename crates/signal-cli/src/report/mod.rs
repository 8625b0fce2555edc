//! `signal report`: a page of what `signal bench` measured.

mod chart;
mod input;
mod page;
mod series;

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use self::chart::Limits;
use self::input::Run;
use crate::error::{CliError, Result};
use crate::machine::print;

#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// Files that `signal bench --json` wrote
    #[arg(value_name = "FILE", required = true)]
    inputs: Vec<PathBuf>,

    /// The page to write: HTML that needs nothing else
    #[arg(short = 'o', long, value_name = "FILE")]
    output: PathBuf,

    /// What stands above it
    #[arg(long, default_value = "Signal: time and bandwidth of collectives")]
    title: String,

    /// The commit that was measured
    #[arg(long)]
    commit: Option<String>,

    /// Draws what a link carries in one direction, in GB/s
    #[arg(long, value_name = "GB/S", value_parser = positive)]
    link_gb_s: Option<f64>,

    /// Draws the least time of a call, in microseconds
    #[arg(long, value_name = "US", value_parser = positive)]
    floor_us: Option<f64>,
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|value: &f64| value.is_finite() && *value > 0.0)
        .ok_or_else(|| "a number above 0 is needed".to_owned())
}

/// Writes the page.
pub(crate) fn run(args: &Args) -> Result<()> {
    let same = |input: &PathBuf| match (fs::canonicalize(input), fs::canonicalize(&args.output)) {
        (Ok(input), Ok(output)) => input == output,
        _ => false,
    };
    if let Some(input) = args.inputs.iter().find(|input| same(input)) {
        return Err(CliError::Arguments(format!("-o {} would overwrite an input", input.display())));
    }
    let runs = args.inputs.iter().map(|path| Run::read(path)).collect::<Result<Vec<_>>>()?;
    let limits = Limits { link_gb_s: args.link_gb_s, floor_us: args.floor_us };
    let page = page::render(&args.title, &runs, limits, args.commit.as_deref())?;
    write(&args.output, &page)?;
    Ok(print(&format!("# {}: {} runs\n", args.output.display(), runs.len()))?)
}

/// Whoever reads the file meanwhile finds the old page or the new one.
fn write(path: &Path, text: &str) -> Result<()> {
    let mut beside = path.as_os_str().to_owned();
    beside.push(".new");
    let beside = PathBuf::from(beside);
    fs::write(&beside, text).map_err(CliError::file(path))?;
    fs::rename(&beside, path).map_err(CliError::file(path))
}
