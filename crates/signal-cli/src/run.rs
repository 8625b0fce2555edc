//! `signal run --trace FILE -- PROGRAM`: a timeline of the calls of a program that uses the library.
//!
//! The library writes it, as `SIGNAL_TRACE` asks it to; here the file is begun, and made whole when the program has ended, however it has.

use std::ffi::OsString;
use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf, absolute};
use std::process::Command;

use clap::Args as ClapArgs;
use serde_json::Value;

use crate::error::{CliError, Result};
use crate::machine::print;

#[derive(ClapArgs, Clone, Debug)]
pub(crate) struct Args {
    /// Writes the timeline to this file, in the Chrome trace format
    #[arg(long, value_name = "FILE", required = true)]
    trace: PathBuf,

    /// The program and its arguments
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Runs the program. Its failure is this one's.
pub(crate) fn run(args: &Args) -> Result<()> {
    let Some((program, rest)) = args.program.split_first() else { return Ok(()) };
    // The program may go elsewhere before it makes a call.
    let path = absolute(&args.trace).map_err(CliError::file(&args.trace))?;
    fs::write(&path, "[\n").map_err(CliError::file(&path))?;
    let status = Command::new(program).args(rest).env("SIGNAL_TRACE", &path).status();
    let status = status.map_err(CliError::file(Path::new(program)));
    let events = finish(&path)?;
    let status = status?;
    if !status.success() {
        let code = status.code().or(status.signal().map(|signal| 128 + signal)).unwrap_or(1);
        let text = format!("{}: {status}", Path::new(program).display());
        return Err(CliError::Program { code: u8::try_from(code).unwrap_or(1), text });
    }
    match calls(&events) {
        0 => Err(CliError::Program { code: 1, text: "the program made no call of the library".to_owned() }),
        calls => Ok(print(&format!("# {}: {calls} calls\n", args.trace.display()))?),
    }
}

/// Makes the file an array that ends, of the lines that are whole: whoever was killed may have left part of one.
fn finish(path: &Path) -> Result<Vec<Value>> {
    let text = fs::read_to_string(path).map_err(CliError::file(path))?;
    let lines = text.lines().map(|line| line.trim_end_matches(','));
    let events: Vec<Value> = lines.filter_map(|line| serde_json::from_str(line).ok()).collect();
    let lines: Vec<String> = events.iter().map(ToString::to_string).collect();
    fs::write(path, format!("[\n{}\n]\n", lines.join(",\n"))).map_err(CliError::file(path))?;
    Ok(events)
}

/// Calls that ran, on all ranks.
fn calls(events: &[Value]) -> usize {
    let waits = |event: &Value| event["name"].as_str().is_some_and(|name| name.starts_with("wait for rank"));
    let enqueued = |event: &Value| {
        event["name"].as_str().is_some_and(|name| name.starts_with("enqueue ") || name.starts_with("capture "))
    };
    events.iter().filter(|event| event["ph"] == "X" && !waits(event) && !enqueued(event)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_whole_is_kept() {
        let path = std::env::temp_dir().join(format!("signal-run-{}.json", std::process::id()));
        let call = r#"{"name":"all-reduce","ph":"X","ts":1,"dur":1,"pid":1,"tid":1,"args":{}}"#;
        let wait = call.replace("all-reduce", "wait for rank 1");
        let enqueue = call.replace("all-reduce", "enqueue all-reduce");
        fs::write(&path, format!("[\n{call},\n{wait},\n{enqueue},\n{{\"name\":\"all-re")).unwrap();
        let events = finish(&path).unwrap();
        assert_eq!((events.len(), calls(&events)), (3, 1));
        let whole: Vec<Value> = serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        assert_eq!(whole, events);
        fs::remove_file(&path).unwrap();
    }
}
