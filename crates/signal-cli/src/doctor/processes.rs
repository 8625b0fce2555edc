//! Whether ranks that are processes work together: this program starts two, which make a few all-reduces and compare the results.

use std::env;
use std::io::Read as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::backend::BackendName;

/// Both processes have to have ended by then.
const PATIENCE: Duration = Duration::from_secs(30);

/// Tries it; `pinned`: with what they share in pinned memory of the host. The reason if it does not work.
pub(super) fn work_together(backend: BackendName, pinned: bool) -> Result<(), String> {
    let program = env::current_exe().map_err(|why| why.to_string())?;
    let name = backend.name();
    let arguments =
        ["bench", "all-reduce", "--backend", name, "--spawn", "2", "--share-devices", "-b", "64K", "-e", "64K"];
    let mut command = Command::new(program);
    command.args(arguments).args(["--batches", "3", "--iters", "5", "--warmup", "0"]).env("SIGNAL_TIMEOUT", "10");
    command.env_remove("SIGNAL_TRACE").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    if pinned {
        command.env("SIGNAL_P2P", "0");
    }
    within(command, PATIENCE)
}

/// Runs a command; its last line on standard error if it fails, or that it took too long.
fn within(mut command: Command, patience: Duration) -> Result<(), String> {
    let mut child = command.spawn().map_err(|why| why.to_string())?;
    let began = Instant::now();
    let status = loop {
        match child.try_wait().map_err(|why| why.to_string())? {
            Some(status) => break status,
            None if began.elapsed() > patience => {
                // Those that it has started end with it.
                let _ = child.kill();
                let _ = child.wait();
                return Err(format!("two processes did not end in {} s", patience.as_secs()));
            }
            None => std::thread::sleep(Duration::from_millis(10)),
        }
    };
    if status.success() {
        return Ok(());
    }
    let mut said = String::new();
    let _ = child.stderr.take().map(|mut stderr| stderr.read_to_string(&mut said));
    let last = said.lines().rfind(|line| !line.is_empty()).map(|line| line.trim_start_matches("error: ").to_owned());
    Err(last.unwrap_or_else(|| status.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]).stderr(Stdio::piped());
        command
    }

    #[test]
    fn failures_are_told_and_nothing_hangs() {
        let patience = Duration::from_millis(300);
        assert_eq!(within(shell("exit 0"), PATIENCE), Ok(()));
        assert_eq!(
            within(shell("echo first >&2; echo 'error: no way' >&2; exit 1"), PATIENCE),
            Err("no way".to_owned())
        );
        assert_eq!(within(shell("exit 3"), PATIENCE), Err("exit status: 3".to_owned()));
        let began = Instant::now();
        assert!(within(shell("exec sleep 60"), patience).unwrap_err().contains("did not end"));
        assert!(began.elapsed() < Duration::from_secs(20));
    }
}
