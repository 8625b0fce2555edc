//! Groups within a group: its ranks part by colour.
//!
//! The blocks that fit on a device are divided too (P4), as ranks of both groups may call at once. Each rank is in one of the new
//! groups at most, so what these get, each by itself, is one half of what the old group had left, which keeps the other. Nobody may
//! be making a call meanwhile, as ranks would differ in its grid; and calls made before must have ended, as their grids were larger.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::backend::Backend;
use crate::error::{ApiMisuse, Error, Rendezvous, Result};
use crate::plan::Topology;
use crate::rendezvous::{Id, UnixRendezvous};
use crate::settings::Settings;

use super::builder::{Seat, connection, seat};
use super::group::{BlockBudget, Group, Here, Ranks, lock};
use super::process::{self, Processes};
use super::{Communicator, Member};

/// Between two looks whether all have come.
const NAP: Duration = Duration::from_micros(200);

/// What a rank asks for.
#[derive(Clone, Copy, Debug, Deserialize, Serialize)]
struct Wish {
    color: Option<u32>,
    key: i64,
}

/// Where ranks of one process meet that split on threads of their own.
#[derive(Debug)]
pub(crate) struct Splitting<B: Backend> {
    /// By rank: what it asks for and brings, from when it comes until all have.
    wishes: Vec<Option<(Wish, B::Module)>>,
    /// By rank: what it has not fetched yet.
    results: Vec<Option<Result<Option<Communicator<B>>>>>,
}

impl<B: Backend> Splitting<B> {
    pub(crate) fn new(world: usize) -> Self {
        Splitting { wishes: (0..world).map(|_| None).collect(), results: (0..world).map(|_| None).collect() }
    }

    /// All wishes, once all have come; they are taken.
    fn all(&mut self) -> Option<Vec<(Wish, B::Module)>> {
        if self.wishes.iter().any(Option::is_none) {
            return None;
        }
        Some(self.wishes.iter_mut().filter_map(Option::take).collect())
    }

    /// Sends those home who have come.
    fn give_up(&mut self, after: Duration) {
        let missing: Vec<usize> = (0..self.wishes.len()).filter(|rank| self.wishes[*rank].is_none()).collect();
        for (rank, wish) in self.wishes.iter_mut().enumerate() {
            if wish.take().is_some() {
                self.results[rank] = Some(Err(Rendezvous::Absent { rank, missing: missing.clone(), after }.into()));
            }
        }
    }
}

impl<B: Backend> Communicator<B> {
    /// Splits the group: ranks of one `color` form a group of their own, in the order of their `key`, and of their ranks here where
    /// keys are equal. A rank without a colour takes part, and gets `None`. This communicator goes on: it, the new ones, and those of
    /// other colours may have calls under way at the same time, each on streams of its own.
    ///
    /// Collective: every rank of the group calls it, on threads of their own, and it waits for this rank's earlier calls and for the
    /// other ranks as long as for a call's peers ([`Settings::timeout`]). Where one thread drives all ranks, see
    /// [`split_all`](Self::split_all).
    ///
    /// The new communicators have the settings of this one, with Signals and scratch of their own. The blocks that fit on the devices
    /// are divided, so that calls of all of them fit at once: the new groups get half of what this one has left, each within its
    /// ranks' part, and this one keeps the other half, also when they are gone. Grids that the tuning table would take beyond it are cut
    /// down, those that a call asks for refused. Graphs that were captured before have the larger grids of then: capture them again if
    /// they are replayed beside the new groups' calls.
    ///
    /// # Errors
    /// [`Rendezvous::Absent`] with the ranks that did not come: all may try again. Ranks that are processes may not, nor after
    /// [`Rendezvous::Lost`] with a rank that died; they may after [`Rendezvous::Failed`] with one that had an error.
    /// [`ApiMisuse::Grid`] when half of the blocks is none, or fewer than [`Settings::blocks`]; [`ApiMisuse::DomainTaken`] while a
    /// [`domain`](Self::domain) of this rank's has a handle; [`Error::Timeout`] and the like of an earlier call; [`ApiMisuse::Capture`]
    /// while a stream of this rank's is capturing; errors of the driver, such as out of memory. What fails for one rank or colour fails
    /// for all, with the ranks named as they are here, and nothing is divided then.
    pub fn split(&mut self, color: Option<u32>, key: i64) -> Result<Option<Self>> {
        let comm = &*self.member;
        let wish = Wish { color, key };
        match &comm.group.ranks {
            Ranks::Here(here) => split_here(comm, here, wish),
            Ranks::Apart(processes) => split_apart(comm, processes, wish),
        }
    }

    /// [`split`](Self::split) for all ranks of a group of one process, by one thread. `wishes` are the ranks' colours and keys, and
    /// the new communicators come, in the order of `ranks`.
    ///
    /// # Errors
    /// [`ApiMisuse::NotAllRanks`] unless `ranks` are all ranks of one group, in any order; [`ApiMisuse::Colors`] unless there are as
    /// many wishes; as [`split`](Self::split).
    pub fn split_all(ranks: &mut [Self], wishes: &[(Option<u32>, i64)]) -> Result<Vec<Option<Self>>> {
        let group = Self::group_of_all(ranks)?;
        if wishes.len() != ranks.len() {
            return Err(ApiMisuse::Colors { found: wishes.len(), world: ranks.len() }.into());
        }
        let Ranks::Here(here) = &group.ranks else {
            // A group of one.
            return ranks.iter_mut().zip(wishes).map(|(comm, (color, key))| comm.split(*color, *key)).collect();
        };
        ranks.iter().try_for_each(|comm| comm.member.stop())?;
        let mut by_rank: Vec<_> = ranks.iter().zip(wishes).collect();
        by_rank.sort_by_key(|(comm, _)| comm.member.rank);
        let bring =
            |(comm, &(color, key)): (&Self, &(Option<u32>, i64))| (Wish { color, key }, comm.member.own.module.clone());
        let brought = by_rank.into_iter().map(bring).collect();
        let mut made = part(&group, here, &ranks[0].member.settings, brought)?;
        Ok(ranks.iter().map(|comm| made[comm.member.rank].take()).collect())
    }
}

impl<B: Backend> Member<B> {
    /// Waits for this rank's calls; no more can come.
    fn stop(&self) -> Result<()> {
        self.check_all_free()?;
        self.check_poison()?;
        self.group.streams_of(self.rank).iter().try_for_each(B::synchronize)?;
        self.check_poison()
    }
}

/// The last rank to come makes the groups, and the others fetch theirs.
fn split_here<B: Backend>(comm: &Member<B>, here: &Here<B>, wish: Wish) -> Result<Option<Communicator<B>>> {
    let (rank, patience) = (comm.rank, comm.settings.timeout);
    comm.stop()?;
    let all = {
        let mut splitting = lock(&here.splitting);
        splitting.wishes[rank] = Some((wish, comm.own.module.clone()));
        splitting.all()
    };
    if let Some(all) = all {
        let made = part(&comm.group, here, &comm.settings, all);
        let mut results: Vec<_> = match made {
            Ok(made) => made.into_iter().map(Ok).collect(),
            Err(error) => here.devices.iter().map(|_| Err(error.clone())).collect(),
        };
        // Other threads than this one may make their calls.
        for child in results.iter().flatten().flatten() {
            child.member.group.pace.changes_threads(child.member.rank);
        }
        let own = results[rank].as_mut().map_err(|error| error.clone()).map(Option::take);
        let mut splitting = lock(&here.splitting);
        for (other, result) in results.into_iter().enumerate().filter(|(other, _)| *other != rank) {
            splitting.results[other] = Some(result);
        }
        return own;
    }
    let began = Instant::now();
    loop {
        let mut splitting = lock(&here.splitting);
        // Once all have come, only the driver is waited for.
        if splitting.wishes[rank].is_some() && began.elapsed() > patience {
            splitting.give_up(patience);
        }
        if let Some(result) = splitting.results[rank].take() {
            return result;
        }
        drop(splitting);
        std::thread::sleep(NAP);
    }
}

/// Makes the groups of ranks of this process, all of which are waiting. Gives each rank's new communicator.
fn part<B: Backend>(
    group: &Group<B>,
    here: &Here<B>,
    settings: &Settings,
    brought: Vec<(Wish, B::Module)>,
) -> Result<Vec<Option<Communicator<B>>>> {
    let wishes: Vec<Wish> = brought.iter().map(|(wish, _)| *wish).collect();
    let mut made: Vec<Option<Communicator<B>>> = brought.iter().map(|_| None).collect();
    let groups = groups(&wishes);
    for ranks in &groups {
        let budget = half_for(&group.budget, settings)?;
        let seats = ranks.iter().map(|rank| {
            let (device, module) = (here.devices[*rank].clone(), brought[*rank].1.clone());
            let service = B::create_stream(&device)?;
            Ok(Seat { device, module, service })
        });
        let seats = seats.collect::<Result<Vec<_>>>()?;
        let link = connection(settings, &seats)?;
        let topology = Topology { link, world: ranks.len(), ..group.topology };
        for (rank, comm) in ranks.iter().zip(seat(seats, settings, topology, budget)?) {
            made[*rank] = Some(comm);
        }
    }
    if !groups.is_empty() {
        group.budget.give_half();
    }
    Ok(made)
}

/// The new groups: each one's ranks in their new order.
fn groups(wishes: &[Wish]) -> Vec<Vec<usize>> {
    let mut colors: Vec<u32> = wishes.iter().filter_map(|wish| wish.color).collect();
    colors.sort_unstable();
    colors.dedup();
    let ranks_of = |color| {
        let mut ranks: Vec<usize> = (0..wishes.len()).filter(|rank| wishes[*rank].color == Some(color)).collect();
        ranks.sort_by_key(|rank| wishes[*rank].key); // a stable sort
        ranks
    };
    colors.into_iter().map(ranks_of).collect()
}

/// The budget of a new group. Both halves must do for what every call asks for.
fn half_for(budget: &BlockBudget, settings: &Settings) -> Result<BlockBudget> {
    let half = budget.half();
    half.check(settings.blocks.unwrap_or(1), settings.threads.unwrap_or(1))?;
    Ok(half)
}

/// What a process says of its rank.
#[derive(Deserialize, Serialize)]
struct Apart {
    wish: Wish,
    /// Of its new group, if that becomes the first rank's.
    id: Vec<u8>,
}

/// All ranks meet before and after: the new groups form each by itself, with connections of their own, which stay.
fn split_apart<B: Backend>(comm: &Member<B>, processes: &Processes<B>, wish: Wish) -> Result<Option<Communicator<B>>> {
    let patience = comm.settings.timeout;
    let mut link = processes.lock();
    let own = comm
        .stop()
        .and_then(|()| half_for(&comm.group.budget, &comm.settings))
        .and_then(|budget| Ok((budget, Apart { wish, id: Id::new()?.as_bytes().to_vec() })));
    let (budget, apart) = match own {
        Ok((budget, apart)) => (Ok(budget), Ok(apart)),
        Err(error) => (Err(error.clone()), Err(error)),
    };
    let all = link.exchange("split", apart, patience)?;
    let budget = budget?;
    let wishes: Vec<Wish> = all.iter().map(|apart| apart.wish).collect();
    let groups = groups(&wishes);
    let child = match groups.iter().find(|ranks| ranks.contains(&comm.rank)) {
        None => Ok(None),
        Some(ranks) => join(comm, ranks, &all[ranks[0]].id, budget).map(Some).map_err(|error| named(error, ranks)),
    };
    // A group that lacks a rank knows it after this rank's patience, and then comes.
    link.exchange(
        "split: groups are made",
        child.as_ref().map(drop).map_err(Error::clone),
        patience.saturating_mul(2),
    )?;
    if !groups.is_empty() {
        comm.group.budget.give_half();
    }
    child
}

/// Forms a group with `ranks`, of which this is one.
fn join<B: Backend>(comm: &Member<B>, ranks: &[usize], id: &[u8], budget: BlockBudget) -> Result<Communicator<B>> {
    let patience = comm.settings.timeout;
    let bytes = id.try_into().map_err(|_| Rendezvous::NotAnId("it has another length"))?;
    let rank = ranks.iter().position(|rank| *rank == comm.rank).unwrap_or(0);
    let rendezvous = UnixRendezvous::from_id(&Id::from_bytes(bytes)?, rank, ranks.len(), patience)?;
    let prepared = Ok((comm.settings.clone(), comm.own.module.clone()));
    process::connect(comm.device(), prepared, true, Some(budget), (Box::new(rendezvous), patience))
}

/// An error of a new group, with ranks as the old one has them.
fn named(error: Error, ranks: &[usize]) -> Error {
    let name = |rank: usize| ranks.get(rank).copied().unwrap_or(rank);
    let names = |missing: Vec<usize>| missing.into_iter().map(name).collect();
    match error {
        Error::Rendezvous(Rendezvous::Absent { rank, missing, after }) => {
            Rendezvous::Absent { rank: name(rank), missing: names(missing), after }.into()
        }
        Error::Rendezvous(Rendezvous::Lost { rank, missing }) => {
            Rendezvous::Lost { rank: name(rank), missing: names(missing) }.into()
        }
        Error::Rendezvous(Rendezvous::Failed { rank, why }) => Rendezvous::Failed { rank: name(rank), why }.into(),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_part_by_colour_in_the_order_of_their_keys() {
        let groups = |wishes: &[(Option<u32>, i64)]| {
            groups(&wishes.iter().map(|&(color, key)| Wish { color, key }).collect::<Vec<_>>())
        };
        assert_eq!(groups(&[(Some(0), 0); 3]), [[0, 1, 2]]);
        assert_eq!(groups(&[(Some(7), 0), (Some(2), 0), (Some(7), -1), (Some(2), 0)]), [[1, 3], [2, 0]]);
        assert_eq!(groups(&[(None, 0), (Some(1), 5), (Some(1), i64::MIN)]), [[2, 1]]);
        assert!(groups(&[(None, 0), (None, 1)]).is_empty());
    }

    #[test]
    fn ranks_of_a_new_group_are_named_as_in_the_old() {
        let absent = |rank, missing: &[usize]| {
            Error::from(Rendezvous::Absent { rank, missing: missing.to_vec(), after: Duration::from_secs(1) })
        };
        assert_eq!(named(absent(1, &[0, 2]), &[5, 3, 1]), absent(3, &[5, 1]));
        let failed = |rank| Error::from(Rendezvous::Failed { rank, why: "no memory".to_owned() });
        assert_eq!(named(failed(1), &[2, 0]), failed(0));
    }
}
