//! Settings, and running compilers.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

/// Errors end the build with their text.
pub(crate) type Result<T> = std::result::Result<T, String>;

/// Does something with each item, all of them at once; the results are in the items' order.
pub(crate) fn at_once<I: Send, T: Send>(
    items: impl Iterator<Item = I>,
    act: impl Fn(I) -> Result<T> + Sync,
) -> Result<Vec<T>> {
    thread::scope(|scope| {
        let act = &act;
        let running: Vec<_> = items.map(|item| scope.spawn(move || act(item))).collect();
        let join =
            |run: thread::ScopedJoinHandle<'_, _>| run.join().unwrap_or_else(|_| Err("a thread panicked".into()));
        running.into_iter().map(join).collect()
    })
}

/// An environment variable, empty if unset; the script runs again when it changes.
pub(crate) fn env(name: &str) -> Result<String> {
    let cargo_sets_it = name.starts_with("CARGO_") || name == "OUT_DIR" || name == "TARGET";
    if !cargo_sets_it {
        println!("cargo::rerun-if-env-changed={name}");
    }
    match std::env::var(name) {
        Ok(value) => Ok(value),
        Err(std::env::VarError::NotPresent) => Ok(String::new()),
        Err(std::env::VarError::NotUnicode(_)) => Err(format!("{name} is not UTF-8")),
    }
}

/// An environment variable as a path, if set.
pub(crate) fn env_path(name: &str) -> Result<Option<PathBuf>> {
    let value = env(name)?;
    Ok((!value.is_empty()).then(|| PathBuf::from(value)))
}

/// `program` in the folders of PATH.
pub(crate) fn in_path(program: &str) -> Result<Option<PathBuf>> {
    let path = env("PATH")?;
    Ok(std::env::split_paths(&path).map(|folder| folder.join(program)).find(|file| file.is_file()))
}

/// How a compiler's run went wrong.
pub(crate) enum Failure {
    /// It could not be started.
    Start(String),
    /// It said no; what it said.
    Refused(String),
}

impl Failure {
    /// One line, for a warning.
    pub(crate) fn summary(&self) -> String {
        let text = match self {
            Failure::Start(text) | Failure::Refused(text) => text,
        };
        let lines = || text.lines().map(str::trim).filter(|line| !line.is_empty());
        lines().find(|line| line.contains("error")).or_else(|| lines().next()).unwrap_or("no message").to_owned()
    }
}

/// Runs a compiler to its end; its standard output.
pub(crate) fn run(command: &mut Command) -> std::result::Result<String, Failure> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command.output().map_err(|e| Failure::Start(format!("{program}: {e}")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let mut said = String::from_utf8_lossy(&output.stderr).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stdout));
    if said.trim().is_empty() {
        said = format!("{program}: {}", output.status);
    }
    Err(Failure::Refused(said))
}

/// Compiles our sources with a compiler that is known to work: any failure ends the build.
pub(crate) fn compile(what: &str, command: &mut Command) -> Result<()> {
    run(command).map(drop).map_err(|failure| match failure {
        Failure::Start(text) | Failure::Refused(text) => format!("{what} kernels do not compile\n{text}"),
    })
}

/// What `compiler --version` says of the version, without the paths that differ between machines.
pub(crate) fn version(compiler: &Path) -> std::result::Result<String, Failure> {
    let text = run(Command::new(compiler).arg("--version"))?;
    let lines = text.lines().filter(|line| !line.starts_with("InstalledDir") && !line.starts_with("Configuration"));
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

/// Writes a file, reads a file: with its name in the error.
pub(crate) fn write(path: &Path, content: impl AsRef<[u8]>) -> Result<()> {
    fs::write(path, content).map_err(|e| format!("{}: {e}", path.display()))
}

/// See [`write`].
pub(crate) fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).map_err(|e| format!("{}: {e}", path.display()))
}
