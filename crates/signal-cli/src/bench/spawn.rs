//! `--spawn`: starts the ranks as processes of this program, and sees to it that they end together.

use std::env;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use signal_comm::Id;

use super::line::{last_word, say};
use super::seat;
use super::together::Word;
use crate::error::{CliError, Result};
use crate::machine::SPAWNED;

/// How long ranks may take to end, once they know that they have to: the rows so far are still written.
const GRACE: Duration = Duration::from_secs(10);

/// A rank's process. None outlives this value.
struct Rank {
    child: Child,
    socket: UnixStream,
}

impl Drop for Rank {
    fn drop(&mut self) {
        // Both fail where it has ended and was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs this very command line in processes, one for each rank. The error of one ends all.
pub(super) fn run(world: usize) -> Result<()> {
    let id = Id::new()?;
    let (tell, told) = mpsc::channel();
    let mut ranks = Vec::new();
    for rank in 0..world {
        let process = Rank::start(rank, &id)?;
        let (socket, tell) = (process.socket.try_clone()?, tell.clone());
        ranks.push(Some(process));
        // Nobody listens any more once the run is over.
        thread::spawn(move || tell.send((rank, last_word(&socket))));
    }

    let mut ending = Ending::default();
    while ranks.iter().any(Option::is_some) {
        let Ok((rank, word)) = told.recv_timeout(ending.left()) else { break };
        let Some(mut process) = ranks[rank].take() else { continue };
        let status = process.child.wait()?;
        if ending.note(rank, word, status)
            && let Some(word) = ending.cause()
        {
            // Who has gone meanwhile needs no word.
            ranks.iter().flatten().for_each(|other| drop(say(&other.socket, word)));
        }
    }
    match ending.cause() {
        None => Ok(()),
        Some(word) => Err(CliError::Rank { code: word.code, text: word.text.clone(), told: false }),
    }
}

impl Rank {
    fn start(rank: usize, id: &Id) -> Result<Self> {
        let program = env::current_exe()?;
        let (socket, theirs) = UnixStream::pair()?;
        let child = Command::new(&program)
            .args(env::args_os().skip(1))
            .env(SPAWNED, seat::variable(rank, id))
            .stdin(OwnedFd::from(theirs))
            // The table is rank 0's.
            .stdout(if rank == 0 { Stdio::inherit() } else { Stdio::null() })
            .spawn()
            .map_err(CliError::file(&program))?;
        Ok(Rank { child, socket })
    }
}

/// Why the ranks end.
#[derive(Default)]
struct Ending {
    /// The end of a process that said nothing: nobody knows more than that.
    death: Option<Word>,
    /// The first error that a rank has told.
    word: Option<Word>,
    began: Option<Instant>,
}

impl Ending {
    /// Takes in that a rank has ended. Whether that was the first one that failed.
    fn note(&mut self, rank: usize, word: Option<Word>, status: ExitStatus) -> bool {
        match word {
            None if status.success() => return false,
            Some(word) => {
                self.word.get_or_insert(word);
            }
            None => {
                let how = match status.signal() {
                    Some(signal) => format!("was ended by signal {signal}"),
                    None => format!("ended with {status}"),
                };
                let text = format!("rank {rank} {how}");
                self.death.get_or_insert(Word { code: 1, text, blames_peer: false });
            }
        }
        let first = self.began.is_none();
        self.began.get_or_insert_with(Instant::now);
        first
    }

    fn cause(&self) -> Option<&Word> {
        self.death.as_ref().or(self.word.as_ref())
    }

    /// How long to wait for the next one.
    fn left(&self) -> Duration {
        self.began.map_or(Duration::MAX, |began| GRACE.saturating_sub(began.elapsed()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_death_counts_more_than_what_others_say_of_it() {
        let (good, killed, code) = (ExitStatus::from_raw(0), ExitStatus::from_raw(9), ExitStatus::from_raw(101 << 8));
        let word = |text: &str| Some(Word { code: 1, text: text.to_owned(), blames_peer: true });
        let mut ending = Ending::default();
        assert!(!ending.note(3, None, good) && ending.cause().is_none() && ending.left() == Duration::MAX);
        assert!(ending.note(0, word("rank 0: rank(s) [1] died or left"), code));
        assert_eq!(ending.cause().map(|word| word.text.as_str()), Some("rank 0: rank(s) [1] died or left"));
        assert!(!ending.note(2, word("another"), code));
        assert!(!ending.note(1, None, killed));
        assert_eq!(ending.cause().map(|word| word.text.as_str()), Some("rank 1 was ended by signal 9"));
        assert!(ending.left() <= GRACE);
        let mut ending = Ending::default();
        assert!(ending.note(1, None, code));
        assert_eq!(ending.cause().map(|word| word.text.as_str()), Some("rank 1 ended with exit status: 101"));
    }
}
