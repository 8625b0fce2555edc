//! What the ranks of one communicator share in one process.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::{Backend, DeviceFamily, StreamId};
use crate::error::{ApiMisuse, Result};
use crate::layout::NUM_BARRIER_DOMAINS;

use super::fault::HostBlock;
use super::symmetric::PendingAllocations;

/// One rank's share: its device and the memory that its peers reach.
#[derive(Debug)]
pub(crate) struct Member<B: Backend> {
    pub(crate) device: B::Device,
    /// Signal, Control and scratch.
    pub(crate) memory: B::Buffer,
    pub(crate) host: HostBlock<B>,
    /// For uploads that must not queue behind the user's work.
    pub(crate) service: B::Stream,
}

/// The ranks of one communicator. Alive while any of them, or any symmetric buffer, is.
#[derive(Debug)]
pub(crate) struct Group<B: Backend> {
    pub(crate) members: Vec<Member<B>>,
    pub(crate) family: DeviceFamily,
    /// Blocks that can be resident at once on every rank.
    pub(crate) block_budget: u32,
    pub(crate) max_threads: u32,
    pending: Mutex<PendingAllocations<B>>,
    streams: Mutex<Vec<RankStreams<B>>>,
}

/// The stream that each domain of a rank was last used on.
#[derive(Debug)]
struct RankStreams<B: Backend> {
    /// False once the rank's communicator is gone: its streams may go to other ranks, but its calls may still run.
    alive: bool,
    last: [Option<B::Stream>; NUM_BARRIER_DOMAINS],
}

impl<B: Backend> Group<B> {
    pub(crate) fn new(members: Vec<Member<B>>, family: DeviceFamily, block_budget: u32, max_threads: u32) -> Self {
        let streams = members.iter().map(|_| RankStreams { alive: true, last: Default::default() }).collect();
        Group { members, family, block_budget, max_threads, pending: Mutex::default(), streams: Mutex::new(streams) }
    }

    pub(crate) fn lock_pending(&self) -> MutexGuard<'_, PendingAllocations<B>> {
        // A panic elsewhere leaves the list whole: it is changed only after everything that can fail.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that `rank` uses `stream` for `domain` from now on.
    ///
    /// # Errors
    /// Another rank uses the stream.
    pub(crate) fn use_stream(&self, rank: usize, domain: u32, stream: &B::Stream) -> Result<()> {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let id: StreamId = B::stream_id(stream);
        for (first, other) in streams.iter().enumerate() {
            if first != rank && other.alive && other.last.iter().flatten().any(|s| B::stream_id(s) == id) {
                return Err(ApiMisuse::SharedStream { first, second: rank }.into());
            }
        }
        streams[rank].last[domain as usize] = Some(stream.clone());
        Ok(())
    }

    /// Every stream on which a call of any rank may still run.
    pub(crate) fn streams(&self) -> Vec<B::Stream> {
        let streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams.iter().flat_map(|rank| rank.last.iter().flatten().cloned()).collect()
    }

    /// Notes that the rank's communicator is gone.
    pub(crate) fn leave(&self, rank: usize) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        streams[rank].alive = false;
        if streams.iter().all(|rank| !rank.alive) {
            drop(streams);
            // Allocations that some rank never made: nobody will come for them, and they hold the group.
            let abandoned = std::mem::take(&mut *self.lock_pending());
            drop(abandoned);
        }
    }

    /// Bases of all ranks' memory as `rank`'s device sees them: in one process an address means the same everywhere.
    pub(crate) fn bases(self: &Arc<Self>) -> impl Iterator<Item = u64> {
        self.members.iter().map(|member| B::address(&member.memory))
    }
}
