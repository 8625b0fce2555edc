//! Symmetric memory: allocations that every rank made together, so that peers can read them in place (P14). Where ranks meet in the host's memory
//! it is memory of their devices all the same, and staged as any other.

use std::sync::Arc;

use crate::backend::{Backend, MemoryKind};
use crate::error::{ApiMisuse, Result};
use crate::layout::MAX_GPUS;

use super::Member;
use super::group::{Group, Here, Ranks};
use super::process::Processes;

/// One symmetric allocation: a buffer on every rank.
#[derive(Debug)]
pub(crate) struct Symmetric<B: Backend> {
    group: Arc<Group<B>>,
    /// As this process sees them, by rank from [`first`](Self::first) on.
    memory: Vec<B::Buffer>,
    /// Not 0 where this process has its own part alone: no peer reaches it, or it is a user's.
    first: usize,
    /// Where each rank sees this one's. `None` where all ranks are of one process, in which an address means the same to all.
    seen: Option<[u64; MAX_GPUS]>,
}

impl<B: Backend> Symmetric<B> {
    /// Memory of `comm`'s rank that its user has allocated; `seen`: where each rank sees its first byte, if not at the same address.
    ///
    /// # Safety
    /// See [`Communicator::register`](super::Communicator::register).
    pub(super) unsafe fn borrowed(
        comm: &Member<B>,
        address: u64,
        bytes: usize,
        seen: Option<[u64; MAX_GPUS]>,
    ) -> Arc<Self> {
        // SAFETY: passed on to the caller.
        let own = unsafe { B::borrow(comm.device(), address, bytes) };
        Arc::new(Symmetric { group: comm.group.clone(), memory: vec![own], first: comm.rank, seen })
    }

    pub(crate) fn memory(&self, rank: usize) -> &B::Buffer {
        &self.memory[rank - self.first]
    }

    pub(crate) fn all_memory(&self) -> &[B::Buffer] {
        &self.memory
    }

    /// Where each rank sees `address`, which lies in `rank`'s part.
    pub(crate) fn seen_by_ranks(&self, rank: usize, address: u64) -> [u64; MAX_GPUS] {
        let offset = address - B::address(self.memory(rank));
        self.seen.map_or([address; MAX_GPUS], |seen| seen.map(|start| start + offset))
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

/// `comm`'s `call`th allocation, of `bytes`, for which `capacity` is taken.
pub(super) fn allocate<B: Backend>(
    comm: &Member<B>,
    call: u64,
    bytes: usize,
    capacity: usize,
) -> Result<Arc<Symmetric<B>>> {
    match &comm.group.ranks {
        Ranks::Here(here) => allocate_here(comm, here, call, (bytes, capacity)),
        Ranks::Apart(processes) => allocate_apart(comm, processes, call, (bytes, capacity)),
    }
}

/// The first rank to make a call allocates for all.
fn allocate_here<B: Backend>(
    comm: &Member<B>,
    here: &Here<B>,
    call: u64,
    (bytes, capacity): (usize, usize),
) -> Result<Arc<Symmetric<B>>> {
    let rank = comm.rank;
    let mut pending = here.lock_pending();
    if let Some(at) = pending.0.iter().position(|p| p.call == call) {
        let found = &mut pending.0[at];
        if found.bytes != bytes {
            return Err(ApiMisuse::UnequalAlloc { rank, bytes, first: found.first, expected: found.bytes }.into());
        }
        found.waiting -= 1;
        return Ok(if found.waiting == 0 { pending.0.swap_remove(at).buffer } else { found.buffer.clone() });
    }

    let kind = if comm.group.reaches_peers() { MemoryKind::PeerVisible } else { MemoryKind::Device };
    let memory = here.devices.iter().map(|device| B::allocate(device, capacity, kind));
    let memory = memory.collect::<Result<Vec<_>>>()?;
    let buffer = Arc::new(Symmetric { group: comm.group.clone(), memory, first: 0, seen: None });
    let waiting = here.devices.len() - 1;
    if waiting > 0 {
        pending.0.push(Pending { call, bytes, first: rank, waiting, buffer: buffer.clone() });
    }
    Ok(buffer)
}

/// Each rank allocates its own part, and maps the others' where it reaches them.
fn allocate_apart<B: Backend>(
    comm: &Member<B>,
    processes: &Processes<B>,
    call: u64,
    (bytes, capacity): (usize, usize),
) -> Result<Arc<Symmetric<B>>> {
    let (streams, patience) = (comm.group.streams(), comm.settings.timeout);
    let mut link = processes.lock();
    let group = comm.group.clone();
    if !group.reaches_peers() {
        let own = link.allocate_own(comm.device(), (bytes, capacity), patience)?;
        return Ok(Arc::new(Symmetric { group, memory: vec![own], first: comm.rank, seen: None }));
    }
    let (memory, seen) = link.allocate(comm.device(), call, (bytes, capacity), &streams, patience)?;
    Ok(Arc::new(Symmetric { group, memory, first: 0, seen: Some(seen) }))
}
