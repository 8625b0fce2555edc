//! What ends the tool with a non-zero exit code, each as one line.

use std::io;
use std::path::{Path, PathBuf};

use signal_comm::error::{Error, Rendezvous};

use crate::backend::BackendName;

pub(crate) type Result<T, E = CliError> = std::result::Result<T, E>;

#[derive(Debug, thiserror::Error)]
pub(crate) enum CliError {
    /// The command line cannot be meant.
    #[error("{0}")]
    Arguments(String),
    /// The library refused or failed.
    #[error("{0}")]
    Signal(#[from] signal_comm::Error),
    /// The library that Signal is compared with refused or failed.
    #[error("{0}")]
    Nccl(#[from] signal_nccl::Error),
    /// The backend's code is not in this binary.
    #[error("this `signal` was built without the {0} backend; build it with `--features {0}`")]
    NotCompiled(BackendName),
    /// A file could not be written.
    #[error("{}: {cause}", path.display())]
    File { path: PathBuf, cause: io::Error },
    /// Standard output could not be written.
    #[error("standard output: {0}")]
    Output(#[from] io::Error),
    /// What has ended all ranks of a bench whose ranks are processes; `told` where it is not for this process to print.
    #[error("{text}")]
    Rank { code: u8, text: String, told: bool },
    /// Results were wrong.
    #[error("{0} elements differ from the reference")]
    Mismatch(u64),
    /// A soak found something wrong: where, and what.
    #[error("{0}")]
    Soak(String),
    /// What `signal run` ran has failed, and has said so itself.
    #[error("{text}")]
    Program { code: u8, text: String },
    /// Doctor found nothing to work with.
    #[error("no backend is usable")]
    NothingUsable,
}

impl CliError {
    pub(crate) fn file(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |cause| CliError::File { path: path.to_owned(), cause }
    }

    /// 2 when the command line is at fault, as clap has it, else 1.
    pub(crate) fn exit_code(&self) -> u8 {
        match self {
            CliError::Arguments(_) | CliError::NotCompiled(_) => 2,
            CliError::Rank { code, .. } | CliError::Program { code, .. } => *code,
            _ => 1,
        }
    }

    /// Whether another process prints it.
    pub(crate) fn is_told(&self) -> bool {
        matches!(self, CliError::Rank { told: true, .. })
    }

    /// Whether it says that a peer did not do its part, which has a reason of its own.
    pub(crate) fn blames_peer(&self) -> bool {
        let CliError::Signal(error) = self else { return false };
        match error {
            Error::Timeout(_) | Error::Aborted { .. } | Error::Poisoned { .. } => true,
            Error::Rendezvous(why) => {
                matches!(why, Rendezvous::Absent { .. } | Rendezvous::Lost { .. } | Rendezvous::Failed { .. })
            }
            _ => false,
        }
    }
}

impl From<clap::Error> for CliError {
    /// Joins clap's message to one line, without the usage and the pointer to `--help` that follow it.
    fn from(error: clap::Error) -> Self {
        let text = error.render().to_string();
        let lines = text.lines().map(str::trim);
        let message = lines.take_while(|line| !line.starts_with("Usage:") && !line.starts_with("For more information"));
        let line = message.filter(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
        CliError::Arguments(line.strip_prefix("error: ").unwrap_or(&line).to_owned())
    }
}
