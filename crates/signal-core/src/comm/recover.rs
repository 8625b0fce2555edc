//! Back to work after a fault, in place.

use std::sync::{Arc, OnceLock};

use crate::backend::Backend;
use crate::error::{ApiMisuse, Result};
use crate::layout::Signal;

use super::Communicator;

impl<B: Backend> Communicator<B> {
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

        // First everybody's kernels end: one that still ran could signal into memory that is being prepared anew.
        for stream in group.streams() {
            B::synchronize(&stream)?;
        }
        for (rank, member) in group.members.iter().enumerate() {
            Signal::init_signal_buffer::<B>(&member.service, &member.memory, 0, rank, world)?;
            member.host.reset()?;
        }
        // And only when all of it is ready does anybody launch again.
        for comm in ranks {
            comm.poison = OnceLock::new();
        }
        Ok(())
    }
}
