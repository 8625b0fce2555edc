//! Back to work after a fault, in place (P13): everybody's kernels end, then each rank's memory is prepared anew, and only
//! when all of it is ready does anybody launch again. Between these steps the ranks meet: a kernel that still ran could
//! signal into memory that is being prepared, and one that ran already would have its signals erased.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::backend::Backend;
use crate::error::{ApiMisuse, Rendezvous, Result};
use crate::layout::{MAX_GPUS, SIGNAL_START, Signal};

use super::group::{Group, Ranks};
use super::{Communicator, Member};

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

    /// `rank`'s part of a recovery.
    fn recover(
        &self,
        rank: usize,
        world: usize,
        patience: Duration,
        drain: impl FnOnce() -> Result<()>,
        prepare: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let number = self.completed.load(Ordering::Acquire) + 1;
        // Of an attempt that failed.
        self.ready[rank].store(number - 1, Ordering::Release);
        let met = drain()
            .and_then(|()| Self::meet(&self.drained, rank, number, world, patience))
            .and_then(|()| prepare())
            .and_then(|()| Self::meet(&self.ready, rank, number, world, patience));
        if met.is_err() {
            self.drained[rank].store(number - 1, Ordering::Release);
            self.ready[rank].store(number - 1, Ordering::Release);
            return met;
        }
        self.completed.fetch_max(number, Ordering::AcqRel);
        Ok(())
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
    /// again. Ranks that are processes may not: after an error of the rendezvous, such as [`Rendezvous::Lost`] with a rank that
    /// died, what goes on is a new group. [`ApiMisuse::DomainTaken`] while a [`domain`](Self::domain) of this rank's has a handle;
    /// [`ApiMisuse::Capture`] while a stream of the group's is capturing; errors of the driver.
    pub fn recover(&mut self) -> Result<()> {
        let comm = &self.member;
        let (group, patience) = (&comm.group, comm.settings.timeout);
        let stop = || comm.check_all_free().and_then(|()| drain(group));
        match &group.ranks {
            Ranks::Here(here) => {
                here.meeting.recover(comm.rank, group.world(), patience, stop, || comm.prepare())?;
            }
            Ranks::Apart(processes) => {
                let mut link = processes.lock();
                link.exchange("recover", stop(), patience)?;
                link.exchange("recover: memory is ready", comm.prepare(), patience)?;
            }
        }
        comm.forget_fault();
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
    /// [`ApiMisuse::NotAllRanks`] unless `ranks` are all ranks of one group, in any order; [`ApiMisuse::DomainTaken`] while a
    /// [`domain`](Self::domain) of theirs has a handle; [`ApiMisuse::Capture`] while a stream of theirs is capturing; errors of the
    /// driver. Nothing but complete success makes the ranks usable again.
    pub fn recover_all(ranks: &mut [Self]) -> Result<()> {
        let group = Self::group_of_all(ranks)?;
        ranks.iter().try_for_each(|comm| comm.member.check_all_free())?;
        drain(&group)?;
        ranks.iter().try_for_each(|comm| comm.member.prepare())?;
        ranks.iter().for_each(|comm| comm.member.forget_fault());
        Ok(())
    }

    /// The group of which `ranks` are all ranks, in any order.
    pub(super) fn group_of_all(ranks: &[Self]) -> Result<Arc<Group<B>>> {
        let none = ApiMisuse::NotAllRanks { given: 0, found: 0, world: 0 };
        let group = &ranks.first().ok_or(none)?.member.group;
        let world = group.world();
        let mut present = vec![false; world];
        for comm in ranks.iter().map(|comm| &comm.member).filter(|comm| Arc::ptr_eq(&comm.group, group)) {
            present[comm.rank] = true;
        }
        if ranks.len() != world || present.contains(&false) {
            let found = present.iter().filter(|here| **here).count();
            return Err(ApiMisuse::NotAllRanks { given: ranks.len(), found, world }.into());
        }
        Ok(group.clone())
    }
}

impl<B: Backend> Member<B> {
    /// Prepares this rank's memory as it was when the group was made.
    fn prepare(&self) -> Result<()> {
        Signal::init_signal_buffer::<B>(&self.own.service, self.memory(), SIGNAL_START, self.rank, self.world_size())?;
        self.group.pace.reset(self.rank);
        self.own.host.reset()
    }
}

/// Waits for every stream on which a call of the group was made; faults have ended them, or their deadlines do.
fn drain<B: Backend>(group: &Group<B>) -> Result<()> {
    group.streams().iter().try_for_each(B::synchronize)
}
