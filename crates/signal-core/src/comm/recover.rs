//! Back to work after a fault, in place (P13): everybody's kernels end, then each rank's memory is prepared anew, and only
//! when all of it is ready does anybody launch again. Between these steps the ranks meet: a kernel that still ran could
//! signal into memory that is being prepared, and one that ran already would have its signals erased.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::error::{ApiMisuse, Rendezvous, Result};
use crate::layout::{MAX_GPUS, SIGNAL_START, Signal};

use super::Communicator;
use super::group::Group;

/// Where ranks of one process meet that recover on threads of their own. The numbers are of recoveries.
#[derive(Debug, Default)]
pub(crate) struct MeetingPoint {
    completed: AtomicU64,
    /// By rank: the recovery for which its kernels have ended.
    drained: [AtomicU64; MAX_GPUS],
    /// By rank: the recovery for which its memory is ready.
    ready: [AtomicU64; MAX_GPUS],
}

impl MeetingPoint {
    /// Says that `rank` has reached `place` of recovery `number`, and waits until `world` ranks have.
    fn meet(place: &[AtomicU64; MAX_GPUS], rank: usize, number: u64, world: usize, patience: Duration) -> Result<()> {
        // Release, and acquire below: what a rank did before it came is seen by those who meet it.
        place[rank].store(number, Ordering::Release);
        let began = Instant::now();
        loop {
            let missing: Vec<usize> = (0..world).filter(|r| place[*r].load(Ordering::Acquire) < number).collect();
            if missing.is_empty() {
                return Ok(());
            }
            if began.elapsed() > patience {
                return Err(Rendezvous::Absent { rank, missing, after: patience }.into());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
    }
}

impl<B: Backend> Communicator<B> {
    /// Returns this rank to a working state after a fault, or after an abort; harmless when there was none. Collective: every
    /// rank of the group calls it, on threads of their own, and it waits for them as long as for a call's peers
    /// ([`Settings::timeout`](crate::Settings::timeout)). Where one thread drives all ranks, see
    /// [`recover_all`](Self::recover_all), which says more.
    ///
    /// # Errors
    /// [`Rendezvous::Absent`] with the ranks that did not come: the communicator stays as it was, and all ranks may try
    /// again. [`ApiMisuse::Capture`] while a stream of the group's is capturing; errors of the driver.
    pub fn recover(&mut self) -> Result<()> {
        let group = self.group.clone();
        let (rank, world, patience) = (self.rank, group.members.len(), self.settings.timeout);
        let point = &group.meeting;
        let number = point.completed.load(Ordering::Acquire) + 1;
        // Of an attempt that failed.
        point.ready[rank].store(number - 1, Ordering::Release);
        let met = drain(&group)
            .and_then(|()| MeetingPoint::meet(&point.drained, rank, number, world, patience))
            .and_then(|()| prepare(&group, rank))
            .and_then(|()| MeetingPoint::meet(&point.ready, rank, number, world, patience));
        if met.is_err() {
            point.drained[rank].store(number - 1, Ordering::Release);
            point.ready[rank].store(number - 1, Ordering::Release);
            return met;
        }
        point.completed.fetch_max(number, Ordering::AcqRel);
        self.poison = OnceLock::new();
        Ok(())
    }

    /// Returns all ranks of a group of one process to a working state after a fault, or after an abort; harmless when there
    /// was none. Buffers keep their addresses and graphs captured before stay valid. Whether the call that failed has
    /// finished on some rank is unknown: treat its outputs as lost on all of them.
    ///
    /// It waits for every stream that a call was made on; their kernels have left or leave at their deadlines. Graphs that
    /// were replayed on other streams must have ended.
    ///
    /// # Errors
    /// [`ApiMisuse::NotAllRanks`] unless `ranks` are all ranks of one group, in any order; [`ApiMisuse::Capture`] while a
    /// stream of theirs is capturing; errors of the driver. Nothing but complete success makes the ranks usable again.
    pub fn recover_all(ranks: &mut [Self]) -> Result<()> {
        let world = ranks.first().map_or(0, Self::world_size);
        let mut present = vec![false; world];
        for comm in ranks.iter() {
            if Arc::ptr_eq(&comm.group, &ranks[0].group) {
                present[comm.rank] = true;
            }
        }
        if ranks.is_empty() || ranks.len() != world || present.contains(&false) {
            let found = present.iter().filter(|here| **here).count();
            return Err(ApiMisuse::NotAllRanks { given: ranks.len(), found, world }.into());
        }
        let group = ranks[0].group.clone();

        drain(&group)?;
        (0..world).try_for_each(|rank| prepare(&group, rank))?;
        for comm in ranks {
            comm.poison = OnceLock::new();
        }
        Ok(())
    }
}

/// Waits for every stream on which a call of the group was made; faults have ended them, or their deadlines do.
fn drain<B: Backend>(group: &Group<B>) -> Result<()> {
    group.streams().iter().try_for_each(B::synchronize)
}

/// Prepares a rank's memory as it was when the group was made.
fn prepare<B: Backend>(group: &Group<B>, rank: usize) -> Result<()> {
    let member = &group.members[rank];
    Signal::init_signal_buffer::<B>(&member.service, &member.memory, SIGNAL_START, rank, group.members.len())?;
    group.pace.reset(rank);
    member.host.reset()
}
