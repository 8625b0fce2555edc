//! Runs the binary.
#![allow(dead_code, reason = "each test file uses a part")]
#![allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// What a run left behind.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) code: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

/// Runs `signal` with arguments separated by blanks.
pub(crate) fn signal(line: &str) -> Run {
    signal_with(line, &[])
}

/// Runs `signal` in an environment whose only SIGNAL_* variables are these.
pub(crate) fn signal_with(line: &str, variables: &[(&str, &str)]) -> Run {
    Run::of(command(line, variables).output().unwrap())
}

/// What [`signal_with`] runs.
pub(crate) fn command(line: &str, variables: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_signal"));
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_string_lossy().starts_with("SIGNAL_")) {
        command.env_remove(name);
    }
    command.args(line.split_whitespace()).envs(variables.iter().copied());
    command
}

/// A report that `signal` has written.
pub(crate) fn parse(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

impl Run {
    pub(crate) fn of(output: Output) -> Self {
        Run {
            code: output.status.code(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// Asserts that the run was good and returns its table, a row for each size.
    pub(crate) fn rows(&self) -> Vec<Vec<String>> {
        assert_eq!(self.code, Some(0), "{self:?}");
        assert_eq!(self.stderr, "", "nothing but a terminal gets a progress bar");
        let rows = self.stdout.lines().filter(|line| !line.starts_with('#'));
        rows.map(|row| row.split_whitespace().map(str::to_owned).collect()).collect()
    }

    /// Asserts that the run was refused with one line that names the reason.
    pub(crate) fn refused(&self, code: i32, reason: &str) {
        assert_eq!(self.code, Some(code), "{self:?}");
        assert_eq!(self.stderr.lines().count(), 1, "one line: {self:?}");
        assert!(self.stderr.starts_with("error: ") && self.stderr.contains(reason), "{reason:?} in {self:?}");
    }
}

/// A path of this test's own for a file or a directory, not there yet.
pub(crate) fn fresh_path(name: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_file(&path);
    let _ = std::fs::remove_dir_all(&path);
    path
}
