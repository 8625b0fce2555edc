//! What the processes of a bench tell each other. Where one process has all ranks there is nobody to tell, and all of this is
//! trivial.
//!
//! A process that fails says so at the meeting that the others come to next, whatever that is for: so all of them end, and for the
//! same reason.

use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use signal_comm::Rendezvous;

use super::line::Line;
use crate::error::{CliError, Result};

/// The processes of a bench, as one of them sees them.
pub(super) struct Together {
    /// The way to the others, if there are any.
    others: Option<Others>,
}

struct Others {
    rendezvous: Box<dyn Rendezvous>,
    timeout: Duration,
    /// To the process that has started this one.
    line: Option<Line>,
    /// What has ended the run, once all know.
    verdict: Option<Word>,
}

/// An error that one process tells another.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
pub(super) struct Word {
    pub(super) code: u8,
    pub(super) text: String,
    /// It is of a peer that did not do its part, and has more to say.
    pub(super) blames_peer: bool,
}

impl From<&CliError> for Word {
    fn from(error: &CliError) -> Self {
        Word { code: error.exit_code(), text: error.to_string(), blames_peer: error.blames_peer() }
    }
}

impl Together {
    /// One process with all ranks.
    pub(super) fn alone() -> Self {
        Together { others: None }
    }

    /// A process with one rank. `timeout` is how long a call waits for its peers.
    pub(super) fn of_ranks(rendezvous: Box<dyn Rendezvous>, timeout: Duration, line: Option<Line>) -> Self {
        Together { others: Some(Others { rendezvous, timeout, line, verdict: None }) }
    }

    pub(super) fn is_alone(&self) -> bool {
        self.others.is_none()
    }

    /// Whether this process prints, and writes what there is one of.
    pub(super) fn leads(&self) -> bool {
        self.others.as_ref().is_none_or(|others| others.rendezvous.rank() == 0)
    }

    /// What all processes have. Collective.
    pub(super) fn gather<T: DeserializeOwned + Serialize>(&mut self, own: T) -> Result<Vec<T>> {
        match &mut self.others {
            None => Ok(vec![own]),
            Some(others) => others.exchange(Ok(own)),
        }
    }

    /// The largest of what all processes have. Collective.
    pub(super) fn max<T: Copy + DeserializeOwned + Ord + Serialize>(&mut self, own: T) -> Result<T> {
        Ok(self.gather(own)?.into_iter().fold(own, T::max))
    }

    /// The sum of what all processes have. Collective.
    pub(super) fn sum(&mut self, own: u64) -> Result<u64> {
        Ok(self.gather(own)?.into_iter().sum())
    }

    /// Goes on with what this process has if no process has failed; else gives the error that all of them end with. Collective.
    pub(super) fn agree<T>(&mut self, own: Result<T>) -> Result<T> {
        let Some(others) = &mut self.others else { return own };
        let said = own.as_ref().map(drop).map_err(Word::from);
        match (others.exchange(said), own) {
            (Ok(_), own) => own,
            // That of the meeting itself: what this process knew before says more.
            (Err(CliError::Signal(_)), Err(own)) => Err(others.told(own)),
            (Err(error), _) => Err(others.told(error)),
        }
    }
}

impl Others {
    fn exchange<T: DeserializeOwned + Serialize>(&mut self, own: Result<T, Word>) -> Result<Vec<T>> {
        let rank = self.rendezvous.rank();
        if let Some(verdict) = &self.verdict {
            return Err(verdict.error(rank));
        }
        // Whoever has failed still waits for peers whose kernels wait for it; whoever goes on, for that one too.
        let patience = match own {
            Ok(_) => self.timeout.saturating_mul(2).saturating_add(Duration::from_secs(10)),
            Err(_) => self.timeout.saturating_add(Duration::from_secs(5)),
        };
        let protocol = |peer, why: serde_json::Error| {
            let why = why.to_string();
            CliError::Signal(signal_comm::error::Rendezvous::Protocol { rank, peer, why }.into())
        };
        let message = serde_json::to_vec(&own).map_err(|why| protocol(rank, why))?;
        let mut said: Vec<Result<Value, Word>> = Vec::new();
        for (peer, bytes) in self.rendezvous.gather(&message, patience)?.iter().enumerate() {
            said.push(serde_json::from_slice(bytes).map_err(|why| protocol(peer, why))?);
        }
        self.verdict = verdict(&said);
        if let Some(verdict) = &self.verdict {
            return Err(verdict.error(rank));
        }
        let values = said.into_iter().flatten().enumerate();
        values.map(|(peer, value)| serde_json::from_value(value).map_err(|why| protocol(peer, why))).collect()
    }

    /// The reason that whoever has started the ranks gives, where there is one and `error` is about a peer.
    fn told(&self, error: CliError) -> CliError {
        match self.line.as_ref().filter(|_| error.blames_peer()).and_then(Line::cause) {
            Some(cause) => cause.error(self.rendezvous.rank()),
            None => error,
        }
    }
}

impl Word {
    /// As the error of `rank`. All have it, one prints it.
    fn error(&self, rank: usize) -> CliError {
        CliError::Rank { code: self.code, text: self.text.clone(), told: rank != 0 }
    }
}

/// The error that stands for all: the first that is not of a peer's absence, if there is one.
fn verdict(said: &[Result<Value, Word>]) -> Option<Word> {
    let errors = || said.iter().enumerate().filter_map(|(rank, said)| said.as_ref().err().map(|word| (rank, word)));
    let (rank, word) = errors().find(|(_, word)| !word.blames_peer).or_else(|| errors().next())?;
    let common = errors().filter(|(_, other)| other.text == word.text).count() == said.len();
    let named = common || word.text.starts_with("rank ");
    let text = if named { word.text.clone() } else { format!("rank {rank}: {}", word.text) };
    Some(Word { text, ..word.clone() })
}

#[cfg(test)]
mod tests {
    use std::thread;

    use signal_comm::{Id, UnixRendezvous};

    use super::*;

    /// What each of three processes finds; here they are threads.
    fn three<T: Send>(work: impl Fn(usize, &mut Together) -> T + Sync) -> Vec<T> {
        let (id, timeout) = (Id::new().unwrap(), Duration::from_secs(20));
        let rank = |rank| {
            let rendezvous = UnixRendezvous::from_id(&id, rank, 3, timeout).unwrap();
            work(rank, &mut Together::of_ranks(Box::new(rendezvous), timeout, None))
        };
        thread::scope(|scope| {
            let threads: Vec<_> = (0..3).map(|at| scope.spawn(move || rank(at))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    #[test]
    fn numbers_meet() {
        let found = three(|rank, together| {
            let rank = rank as u64;
            (together.sum(10 + rank).unwrap(), together.max(rank).unwrap(), together.gather(rank).unwrap())
        });
        assert_eq!(found, vec![(33, 2, vec![0, 1, 2]); 3]);
        let mut alone = Together::alone();
        assert_eq!((alone.sum(5).unwrap(), alone.max(5).unwrap(), alone.gather(5).unwrap()), (5, 5, vec![5]));
        assert!(alone.leads() && alone.is_alone());
    }

    #[test]
    fn one_error_ends_all_whatever_they_came_for() {
        let found = three(|rank, together| {
            let failed = || CliError::Arguments("no disk".to_owned());
            let step = if rank == 1 { Err(failed()) } else { together.sum(1) };
            let again = together.agree(step).unwrap_err();
            let told = again.is_told();
            (again.to_string(), again.exit_code(), told)
        });
        let expected = |told| ("rank 1: no disk".to_owned(), 2, told);
        assert_eq!(found, [expected(false), expected(true), expected(true)]);
    }

    #[test]
    fn the_cause_comes_before_its_consequences() {
        let word = |text: &str, blames_peer| Err(Word { code: 1, text: text.to_owned(), blames_peer });
        let chosen = |said: &[Result<Value, Word>]| verdict(said).map(|word| word.text);
        assert_eq!(chosen(&[Ok(Value::Null), Ok(Value::Null)]), None);
        assert_eq!(chosen(&[word("lost", true), word("broken", false)]), Some("rank 1: broken".to_owned()));
        assert_eq!(chosen(&[Ok(Value::Null), word("rank 1: lost", true)]), Some("rank 1: lost".to_owned()));
        assert_eq!(chosen(&[word("both", false), word("both", false)]), Some("both".to_owned()));
    }

    #[test]
    fn a_process_that_leaves_is_named() {
        let found = three(|rank, together| match rank {
            2 => String::new(),
            _ => together.agree(Ok(())).unwrap_err().to_string(),
        });
        assert!(found[..2].iter().all(|error| error.contains("[2]")), "{found:?}");
    }
}
