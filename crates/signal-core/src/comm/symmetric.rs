//! Symmetric memory: allocations that every rank made together, so that peers can read them in place (P14).

use std::sync::Arc;

use crate::backend::{Backend, MemoryKind};
use crate::error::{ApiMisuse, Result};

use super::group::Group;

/// One symmetric allocation: a buffer on every rank.
#[derive(Debug)]
pub(crate) struct Symmetric<B: Backend> {
    group: Arc<Group<B>>,
    memory: Vec<B::Buffer>,
}

impl<B: Backend> Symmetric<B> {
    pub(crate) fn memory(&self, rank: usize) -> &B::Buffer {
        &self.memory[rank]
    }

    pub(crate) fn all_memory(&self) -> &[B::Buffer] {
        &self.memory
    }

    pub(crate) fn belongs_to(&self, group: &Arc<Group<B>>) -> bool {
        Arc::ptr_eq(&self.group, group)
    }
}

impl<B: Backend> Drop for Symmetric<B> {
    fn drop(&mut self) {
        // A peer may still read this memory: in a call for which it brought another buffer, when this rank's own call has
        // failed. Whatever can is enqueued on the ranks' streams now.
        for stream in self.group.streams() {
            for memory in &self.memory {
                B::keep_until(memory, &stream);
            }
        }
    }
}

/// Allocation calls that some rank has made and some rank has not.
#[derive(Debug)]
pub(crate) struct PendingAllocations<B: Backend>(Vec<Pending<B>>);

#[derive(Debug)]
struct Pending<B: Backend> {
    call: u64,
    bytes: usize,
    first: usize,
    /// Ranks still to come.
    waiting: usize,
    buffer: Arc<Symmetric<B>>,
}

impl<B: Backend> Default for PendingAllocations<B> {
    fn default() -> Self {
        PendingAllocations(Vec::new())
    }
}

/// `rank`'s allocation call number `call`, of `bytes`, for which `capacity` is taken. In one process the first rank to make a call allocates for all.
pub(crate) fn allocate<B: Backend>(
    group: &Arc<Group<B>>,
    rank: usize,
    call: u64,
    bytes: usize,
    capacity: usize,
) -> Result<Arc<Symmetric<B>>> {
    let mut pending = group.lock_pending();
    if let Some(at) = pending.0.iter().position(|p| p.call == call) {
        let found = &mut pending.0[at];
        if found.bytes != bytes {
            return Err(ApiMisuse::UnequalAlloc { rank, bytes, first: found.first, expected: found.bytes }.into());
        }
        found.waiting -= 1;
        return Ok(if found.waiting == 0 { pending.0.swap_remove(at).buffer } else { found.buffer.clone() });
    }

    let memory = group
        .members
        .iter()
        .map(|member| B::allocate(&member.device, capacity, MemoryKind::PeerVisible))
        .collect::<Result<Vec<_>>>()?;
    let buffer = Arc::new(Symmetric { group: group.clone(), memory });
    let waiting = group.members.len() - 1;
    if waiting > 0 {
        pending.0.push(Pending { call, bytes, first: rank, waiting, buffer: buffer.clone() });
    }
    Ok(buffer)
}
