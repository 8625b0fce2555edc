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
use super::group::{Group, Ranks};

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
    /// died, what goes on is a new group. [`ApiMisuse::Capture`] while a stream of the group's is capturing; errors of the driver.
    pub fn recover(&mut self) -> Result<()> {
        let (group, patience) = (self.group.clone(), self.settings.timeout);
        match &group.ranks {
            Ranks::Here(here) => {
                here.meeting.recover(self.rank, group.world(), patience, || drain(&group), || self.prepare())?;
            }
            Ranks::Apart(processes) => {
                let mut link = processes.lock();
                link.exchange("recover", drain(&group), patience)?;
                link.exchange("recover: memory is ready", self.prepare(), patience)?;
            }
        }
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
        drain(&ranks[0].group)?;
        ranks.iter().try_for_each(Self::prepare)?;
        for comm in ranks {
            comm.poison = OnceLock::new();
        }
        Ok(())
    }

    /// Prepares this rank's memory as it was when the group was made.
    fn prepare(&self) -> Result<()> {
        let (memory, world) = (&self.group.memory[self.rank], self.world_size());
        Signal::init_signal_buffer::<B>(&self.own.service, memory, SIGNAL_START, self.rank, world)?;
        self.group.pace.reset(self.rank);
        self.own.host.reset()
    }
}

/// Waits for every stream on which a call of the group was made; faults have ended them, or their deadlines do.
fn drain<B: Backend>(group: &Group<B>) -> Result<()> {
    group.streams().iter().try_for_each(B::synchronize)
}
