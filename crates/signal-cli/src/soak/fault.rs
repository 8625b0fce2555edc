//! Faults: what goes wrong in a round, and how it has to end on each rank (P13).

use std::time::Duration;

use signal_comm::reference::Rng;
use signal_comm::{Error, Result};

use super::program::{Call, below, pick};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A rank makes neither the call nor those behind it.
    Missing,
    /// A rank makes the call after all others have given it up.
    Late,
    /// A rank makes the call about when the others' deadline passes.
    Close,
    /// A rank does not make the call, and another's waits are aborted before the deadline.
    Abort,
    /// All calls are made, and a rank's waits are aborted at some time.
    AbortAnytime,
}

impl Kind {
    pub(super) const ALL: [Kind; 5] = [Kind::Missing, Kind::Late, Kind::Close, Kind::Abort, Kind::AbortAnytime];

    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Missing => "missing",
            Kind::Late => "late",
            Kind::Close => "close to the deadline",
            Kind::Abort => "missing and aborted",
            Kind::AbortAnytime => "aborted",
        }
    }
}

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Fault {
    pub(super) kind: Kind,
    /// The call that it comes at.
    pub(super) call: usize,
    /// The rank that is missing or late.
    pub(super) rank: usize,
    /// The rank whose waits are aborted; another one.
    pub(super) by: usize,
    /// Where in its span the moment lies that is left to chance, from 0 to 1.
    pub(super) chance: f64,
}

/// How the calls of a rank have to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Done,
    /// The rank with the fault was missed.
    Missed,
    Aborted,
    DoneOrMissed,
    DoneOrAborted,
}

impl Fault {
    /// At one of the calls that no rank gets past alone; there is one at least.
    pub(super) fn generate(world: usize, calls: &[Call], rng: &mut Rng) -> Self {
        let meeting: Vec<usize> = (0..calls.len()).filter(|call| calls[*call].meets_all()).collect();
        let rank = below(rng, world);
        Fault {
            kind: pick(rng, &Kind::ALL),
            call: pick(rng, &meeting),
            rank,
            by: (rank + 1 + below(rng, world - 1)) % world,
            chance: below(rng, 1000) as f64 / 1000.0,
        }
    }

    /// When the abort comes after the round's start, if one does: soon enough to be before any deadline.
    pub(super) fn abort_after(&self, deadline: Duration) -> Option<Duration> {
        let span = match self.kind {
            Kind::Abort => deadline / 4,
            // About as long as a round takes, whatever the deadline.
            Kind::AbortAnytime => Duration::from_millis(30).min(deadline / 4),
            _ => return None,
        };
        Some(span.mul_f64(self.chance))
    }

    /// How long a rank that comes close to the deadline waits before its call.
    pub(super) fn pause(&self, deadline: Duration) -> Duration {
        deadline.mul_f64(0.9 + 0.2 * self.chance)
    }

    /// Whether `rank` stays away from the call.
    pub(super) fn keeps_away(&self, rank: usize) -> bool {
        rank == self.rank && matches!(self.kind, Kind::Missing | Kind::Abort)
    }

    pub(super) fn describe(&self) -> String {
        let Fault { kind, call, rank, by, .. } = self;
        match kind {
            Kind::AbortAnytime => format!("fault: rank {by} aborted"),
            Kind::Abort => format!("fault: rank {rank} missing from call {call} on, rank {by} aborted"),
            Kind::Missing => format!("fault: rank {rank} missing from call {call} on"),
            Kind::Late | Kind::Close => format!("fault: rank {rank} {} at call {call}", kind.name()),
        }
    }

    fn expected(&self, rank: usize) -> Expected {
        match self.kind {
            Kind::Missing if rank == self.rank => Expected::Done,
            // A rank that comes late hears that it was missed.
            Kind::Missing | Kind::Late => Expected::Missed,
            Kind::Close => Expected::DoneOrMissed,
            Kind::Abort if rank != self.rank => Expected::Aborted,
            Kind::Abort | Kind::AbortAnytime => Expected::DoneOrAborted,
        }
    }

    /// Calls that are over on every rank before the fault comes, so that their results count whatever happens.
    fn calls_before(&self) -> usize {
        match self.kind {
            Kind::Missing | Kind::Late | Kind::Close => self.call,
            Kind::Abort | Kind::AbortAnytime => 0,
        }
    }

    /// Whether `error` is what the fault gives on `rank`; the failed call is the device's call number `sequence`.
    fn explains(&self, error: &Error, rank: usize, sequence: u32) -> bool {
        match error {
            Error::Timeout(timeout) => {
                matches!(self.expected(rank), Expected::Missed | Expected::DoneOrMissed)
                    && (timeout.rank, timeout.missing.as_slice()) == (rank, [self.rank].as_slice())
                    && timeout.reporter != self.rank
                    && timeout.sequence == sequence
            }
            Error::Aborted { rank: on, by } => {
                matches!(self.expected(rank), Expected::Aborted | Expected::DoneOrAborted)
                    && (*on, *by) == (rank, self.by)
            }
            _ => false,
        }
    }
}

/// What became of one rank's calls.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) rank: usize,
    /// Calls made before the first that was refused.
    pub(super) made: usize,
    /// The errors of the calls from there on.
    pub(super) refused: Vec<Error>,
    /// What waiting for them gave.
    pub(super) status: Result<()>,
}

impl Ended {
    /// How many calls have results that count, if everything ended as `fault`, or none, has it; else what did not.
    /// `sequence` is the device's number for the call that the fault comes at.
    pub(super) fn judge(&self, fault: Option<&Fault>, sequence: u32) -> Result<usize, String> {
        let Ended { rank, made, refused, status } = self;
        let Some(fault) = fault else {
            return match refused.first().or(status.as_ref().err()) {
                None => Ok(*made),
                Some(error) => Err(format!("call {made} or one before it failed on rank {rank}: {error}")),
            };
        };
        let explains = |error: &Error| fault.explains(error, *rank, sequence);
        for (index, error) in refused.iter().enumerate() {
            // The first refusal tells the fault, the others that there was one.
            let fits = match error {
                Error::Poisoned { cause } if index > 0 => explains(cause),
                told => index == 0 && explains(told),
            };
            if !fits {
                return Err(format!("call {} was refused on rank {rank} with: {error}", made + index));
            }
        }
        let expected = fault.expected(*rank);
        match status {
            Ok(()) if !refused.is_empty() => Err(format!("rank {rank} forgot its fault: {}", refused[0])),
            Ok(()) if matches!(expected, Expected::Missed | Expected::Aborted) => {
                Err(format!("rank {rank} noticed nothing"))
            }
            Ok(()) => Ok(*made),
            Err(error) if !explains(error) => {
                Err(format!("rank {rank} ended with: {error}; call {sequence} on its device was to fail"))
            }
            Err(_) if *made < fault.calls_before() => {
                Err(format!("rank {rank} was refused call {made}, before the fault"))
            }
            Err(_) => Ok(fault.calls_before()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(kind: Kind) -> Fault {
        Fault { kind, call: 2, rank: 1, by: 0, chance: 0.5 }
    }

    fn ended(rank: usize, refused: Vec<Error>, status: Result<()>) -> Ended {
        Ended { rank, made: 5, refused, status }
    }

    fn poisoned(cause: Error) -> Error {
        Error::Poisoned { cause: Box::new(cause) }
    }

    #[test]
    fn without_a_fault_every_error_is_one() {
        let aborted = Error::Aborted { rank: 0, by: 0 };
        assert_eq!(ended(0, vec![], Ok(())).judge(None, 0), Ok(5));
        assert!(ended(0, vec![], Err(aborted.clone())).judge(None, 0).is_err());
        assert!(ended(0, vec![aborted], Ok(())).judge(None, 0).is_err());
    }

    #[test]
    fn aborts_name_who_asked() {
        let aborted = |rank, by| Error::Aborted { rank, by };
        let abort = fault(Kind::Abort);
        let judge = |rank, refused, status| ended(rank, refused, status).judge(Some(&abort), 3);
        assert_eq!(judge(2, vec![], Err(aborted(2, 0))), Ok(0));
        assert_eq!(judge(2, vec![aborted(2, 0), poisoned(aborted(2, 0))], Err(aborted(2, 0))), Ok(0));
        assert_eq!(judge(1, vec![], Ok(())), Ok(5), "the missing rank need not know");
        for (rank, refused, status) in [
            (2, vec![], Ok(())),
            (2, vec![], Err(aborted(2, 1))),
            (2, vec![], Err(aborted(0, 0))),
            (2, vec![aborted(2, 0), aborted(2, 0)], Err(aborted(2, 0))),
            (2, vec![poisoned(aborted(2, 0))], Err(aborted(2, 0))),
            (2, vec![aborted(2, 0)], Ok(())),
            (1, vec![], Err(aborted(1, 2))),
        ] {
            let verdict = judge(rank, refused.clone(), status.clone());
            assert!(verdict.is_err(), "rank {rank}, {refused:?}, {status:?}");
        }
        assert_eq!(ended(0, vec![], Ok(())).judge(Some(&fault(Kind::AbortAnytime)), 3), Ok(5));
    }

    /// A timeout cannot be made up, so one is had: rank 1 of two stays away from call 3.
    #[cfg(feature = "host")]
    #[test]
    fn timeouts_name_the_missing_rank_and_the_call() {
        use signal_comm::{Backend, Communicator, Settings, host};

        let devices = host::open().unwrap().devices().unwrap();
        let mut settings = Settings::default();
        settings.timeout = Duration::from_millis(100);
        let builder = Communicator::<host::Host>::builder().settings(settings).share_devices(true);
        let mut ranks = builder.all_local(&[devices[0].clone(), devices[0].clone()]).unwrap();
        let streams = [0, 1].map(|rank| host::Host::create_stream(ranks[rank].device()).unwrap());
        for call in 0..3 {
            for rank in (0..2).filter(|rank| call < 2 || *rank == 0) {
                ranks[rank].barrier(&streams[rank]).unwrap();
            }
        }
        let status = ranks[0].wait(&streams[0]);
        let error = status.clone().unwrap_err();
        let judge = |kind, sequence, refused| ended(0, refused, status.clone()).judge(Some(&fault(kind)), sequence);
        for kind in [Kind::Missing, Kind::Late, Kind::Close] {
            assert_eq!(judge(kind, 3, vec![]), Ok(2));
            assert_eq!(judge(kind, 3, vec![error.clone(), poisoned(error.clone())]), Ok(2));
            assert!(judge(kind, 4, vec![]).is_err(), "another call");
            let other = Fault { rank: 2, ..fault(kind) };
            assert!(ended(0, vec![], status.clone()).judge(Some(&other), 3).is_err(), "another rank");
        }
        assert!(judge(Kind::Abort, 3, vec![]).is_err() && judge(Kind::AbortAnytime, 3, vec![]).is_err());
        assert!(ended(0, vec![], Ok(())).judge(Some(&fault(Kind::Missing)), 3).is_err());
    }
}
