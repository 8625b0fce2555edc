//! Which ranks this process is, and how it meets the others.

use std::env;
use std::time::Duration;

use signal_comm::layout::MAX_GPUS;
use signal_comm::rendezvous::Launch;
use signal_comm::{Id, Rendezvous, UnixRendezvous};

use super::args::Args;
use super::line::Line;
use crate::error::{CliError, Result};
use crate::machine::SPAWNED;

/// The part of this process in a bench.
pub(super) enum Seat {
    /// All ranks.
    All,
    /// One of the ranks that `--spawn` has started.
    Spawned { rank: usize, world: usize, id: Id, line: Line },
    /// One of the ranks that a launcher has started.
    Launched(Launch),
}

/// What a process is to do.
pub(super) enum Found {
    /// Its part.
    Seat(Seat),
    /// To start this many processes that have seats.
    Start(usize),
}

/// Which rank a process with one rank has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) rank: usize,
    pub(super) world: usize,
    /// Its number among the ranks of this machine, and theirs.
    pub(super) local_rank: usize,
    pub(super) local_world: usize,
}

impl Seat {
    /// What the command line and the environment say.
    pub(super) fn find(args: &Args) -> Result<Found> {
        if args.launched {
            return Ok(Found::Seat(Seat::Launched(Launch::from_env()?)));
        }
        let Some(world) = args.spawn.map(|world| world as usize) else { return Ok(Found::Seat(Seat::All)) };
        let Some(value) = env::var_os(SPAWNED) else { return Ok(Found::Start(world)) };
        // Its value is a secret.
        let not_ours = || CliError::Arguments(format!("{SPAWNED} is set, but not by signal bench --spawn {world}"));
        let (rank, id) = value.to_str().and_then(parse).filter(|(rank, _)| *rank < world).ok_or_else(not_ours)?;
        Ok(Found::Seat(Seat::Spawned { rank, world, id, line: Line::take()? }))
    }

    /// The one rank of this process, unless it has all.
    pub(super) fn position(&self) -> Option<Position> {
        match self {
            Seat::All => None,
            Seat::Spawned { rank, world, .. } => {
                Some(Position { rank: *rank, world: *world, local_rank: *rank, local_world: *world })
            }
            Seat::Launched(Launch { rank, world, local_rank, local_world, .. }) => {
                let (local_rank, local_world) = (local_rank.unwrap_or(*rank), local_world.unwrap_or(*world));
                Some(Position { rank: *rank, world: *world, local_rank, local_world })
            }
        }
    }

    /// Meets the other ranks. Collective; each call makes a group of its own.
    pub(super) fn meet(&self, patience: Duration) -> Result<Option<Box<dyn Rendezvous>>> {
        Ok(match self {
            Seat::All => None,
            // The listener is gone before anyone is told to go on, so the id serves the next group.
            Seat::Spawned { rank, world, id, .. } => {
                Some(Box::new(UnixRendezvous::from_id(id, *rank, *world, patience)?))
            }
            Seat::Launched(launch) => Some(launch.meet(patience)?),
        })
    }

    /// The way to the process that has started this one, if that is of this program.
    pub(super) fn line(&self) -> Option<&Line> {
        match self {
            Seat::Spawned { line, .. } => Some(line),
            _ => None,
        }
    }
}

/// The value of the variable that makes a process `rank` of the group with this id.
pub(super) fn variable(rank: usize, id: &Id) -> String {
    format!("{rank}:{}", id.to_hex())
}

fn parse(value: &str) -> Option<(usize, Id)> {
    let (rank, digits) = value.split_once(':')?;
    let id = Id::from_hex(digits).ok()?;
    rank.parse().ok().filter(|rank| *rank < MAX_GPUS).map(|rank| (rank, id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seat_survives_the_environment() {
        let id = Id::new().unwrap();
        let text = variable(3, &id);
        assert_eq!(parse(&text), Some((3, id)));
        for wrong in ["", "3", "3:", "3:00", &text[1..], &text[..text.len() - 2], &variable(8, &id), "0:é"] {
            assert_eq!(parse(wrong), None, "{wrong}");
        }
    }
}
