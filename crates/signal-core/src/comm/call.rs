//! One call: checking, planning, launching.

use std::time::Duration;

use bytemuck::bytes_of;

use crate::backend::{Backend, Launch};
use crate::buffer::DeviceBuffer;
use crate::error::{ApiMisuse, Result};
use crate::kernel::{
    Algorithm, BarrierParams, BarrierProbeParams, CheckParams, FLAG_ALLOW_NEXT, GroupParams, Kernel, Phase,
};
use crate::layout::MAX_GPUS;

#[cfg(doc)]
use super::Communicator;
use super::Member;
use super::check::Description;
use super::trace;

/// What one call does differently. Every rank must pass the same options for the same call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CallOptions {
    /// The algorithm, instead of the tuning table's.
    pub algorithm: Option<Algorithm>,
    /// The barrier domain of a communicator's call, 0 unless [`Settings::domains`](crate::Settings::domains) is on; to call from
    /// several threads at once, see [`Communicator::domain`].
    pub domain: u32,
    /// Blocks of the grid, instead of the tuning table's.
    pub blocks: Option<u32>,
    /// Threads a block, instead of the tuning table's.
    pub threads: Option<u32>,
    /// Test hook of the host backend: this rank pauses in the kernel, right behind this phase's barrier.
    #[doc(hidden)]
    pub delay: Option<(Phase, Duration)>,
}

/// A test of the barriers: see [`Call::barrier_probe`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BarrierProbe {
    /// Rounds of two barriers each.
    pub rounds: u32,
    /// Seed of tokens and delays.
    pub seed: u32,
    /// Longest delay between barriers, in polls; 0 for none.
    pub max_delay: u32,
}

/// A call about to be made.
#[derive(Debug)]
#[must_use = "nothing happens until a collective is called on it"]
pub struct Call<'c, B: Backend> {
    pub(super) comm: &'c Member<B>,
    pub(super) options: CallOptions,
    /// Whether the handle of its domain makes it.
    by_handle: bool,
    /// Bytes at the end of the scratch that it does without.
    withheld: u64,
}

/// One launch of a kernel, but for the memory that it uses.
pub(super) struct Work<'a> {
    pub(super) kernel: Kernel,
    pub(super) grid: u32,
    pub(super) threads: u32,
    pub(super) params: &'a [u8],
    /// The ranks that it meets, as bits.
    pub(super) partners: u32,
    /// Whether all ranks launch this grid: then it may be launched early, and let the next one be.
    pub(super) same_grid: bool,
    /// What is compared with its partners in checked mode.
    pub(super) described: Option<Compared>,
}

/// What is compared with each rank.
pub(super) type Compared = [Description; MAX_GPUS];

/// All ranks, as bits.
pub(super) const ALL_RANKS: u32 = (1 << MAX_GPUS) - 1;

impl<'c, B: Backend> Call<'c, B> {
    /// A call of whatever is borrowed exclusively for as long.
    pub(super) fn new(comm: &'c Member<B>, options: CallOptions, by_handle: bool) -> Self {
        Call { comm, options, by_handle, withheld: 0 }
    }

    /// Another call with the same options, for what takes two, which does without so many bytes at the end of the scratch.
    pub(super) fn again(&self, withheld: u64) -> Self {
        Call { comm: self.comm, options: self.options, by_handle: self.by_handle, withheld }
    }

    /// Enqueues a barrier; see [`Communicator::barrier`].
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn barrier(self, stream: &B::Stream) -> Result<()> {
        let blocks = self.options.blocks.unwrap_or(1);
        let threads = self.options.threads.unwrap_or((MAX_GPUS as u32).min(self.comm.group.budget.max_threads()));
        let threads = self.comm.group.whole_wave(threads);
        let group = self.begin(blocks, threads)?;
        let params = BarrierParams { group };
        let work = Work {
            kernel: Kernel::Barrier,
            grid: blocks,
            threads,
            params: bytes_of(&params),
            partners: ALL_RANKS,
            same_grid: true,
            described: Some([Description::barrier(blocks, threads); MAX_GPUS]),
        };
        // SAFETY: the parameters are the barrier's, and name no memory but the group's.
        unsafe { self.launch(stream, work, []) }
    }

    /// Enqueues a test of the barriers: in each round every thread leaves a token for its peers, meets them, checks
    /// theirs, and meets them again. `mismatches[b]` becomes the number of rounds in which block b saw a wrong token.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`]; [`ApiMisuse::BufferTooSmall`] when `mismatches` has fewer elements than there
    /// are blocks, or the scratch fewer words than there are threads.
    pub fn barrier_probe(
        self,
        stream: &B::Stream,
        probe: &BarrierProbe,
        mismatches: &mut DeviceBuffer<B, u32>,
    ) -> Result<()> {
        let blocks = self.options.blocks.unwrap_or(1);
        let threads = self.comm.group.whole_wave(self.options.threads.unwrap_or(1));
        let group = self.begin(blocks, threads)?;
        if mismatches.len() < blocks as usize {
            let (found, needed) = (mismatches.len() * 4, blocks as usize * 4);
            return Err(ApiMisuse::BufferTooSmall { found, needed }.into());
        }
        let needed = blocks as usize * threads as usize * 4;
        if (group.scratch_bytes as usize) < needed {
            return Err(ApiMisuse::BufferTooSmall { found: group.scratch_bytes as usize, needed }.into());
        }
        self.check_device("output", mismatches.memory())?;
        let params = BarrierProbeParams {
            group,
            mismatches: mismatches.address(),
            rounds: probe.rounds,
            seed: probe.seed,
            max_delay: probe.max_delay,
            reserved: 0,
        };
        let work = Work {
            kernel: Kernel::BarrierProbe,
            grid: blocks,
            threads,
            params: bytes_of(&params),
            partners: ALL_RANKS,
            same_grid: true,
            described: None,
        };
        // SAFETY: the parameters are the probe's; the tokens fit the scratch and the counts fit `mismatches`, which
        // is kept alive and which the caller has lent exclusively.
        unsafe { self.launch(stream, work, [mismatches.memory()]) }
    }

    /// Checks what all calls have in common, and gives the parameters that they share, for a grid of `blocks` of `threads` that all
    /// ranks launch.
    pub(super) fn begin(&self, blocks: u32, threads: u32) -> Result<GroupParams> {
        let mut group = self.begin_apart()?;
        if self.comm.allows_early(blocks, threads) {
            group.flags |= FLAG_ALLOW_NEXT;
        }
        Ok(group)
    }

    /// The same for a call of which ranks launch grids of their own.
    pub(super) fn begin_apart(&self) -> Result<GroupParams> {
        let CallOptions { domain, delay, .. } = self.options;
        self.comm.check_lane(domain, self.by_handle)?;
        let mut group = self.comm.group_params(domain);
        group.scratch_bytes -= self.withheld;
        if let Some((phase, time)) = delay {
            group.delay_phase = phase as u32;
            group.delay_ticks = time.as_nanos() as u64;
        }
        Ok(group)
    }

    pub(super) fn check_device(&self, what: &'static str, memory: &B::Buffer) -> Result<()> {
        let device = B::buffer_device(memory);
        if device != *self.comm.device() { Err(self.comm.wrong_device(what, &device)) } else { Ok(()) }
    }

    /// In checked mode a call that moves nothing is compared too, since the peers' may move something.
    pub(super) fn check_alone(self, stream: &B::Stream, described: Description) -> Result<()> {
        if !self.comm.checks() {
            return Ok(());
        }
        self.comm.check_poison()?;
        self.comm.take_stream(self.options.domain, stream)?;
        self.launch_check(stream, ALL_RANKS, &[described; MAX_GPUS])
    }

    /// Enqueues the comparison of this call with the partners'.
    fn launch_check(&self, stream: &B::Stream, partners: u32, described: &Compared) -> Result<()> {
        let comm = &self.comm;
        let (grid, threads) = (1, comm.group.whole_wave(1));
        let description = described.map(Description::words);
        let partners = partners & ((1 << comm.world_size()) - 1);
        let params = CheckParams { group: self.begin(grid, threads)?, description, partners, reserved: 0 };
        let early = comm.allows_early(grid, threads);
        let uses = comm.group_memory();
        let params = bytes_of(&params);
        let launch = Launch { kernel: Kernel::Check.into(), grid, threads, params, early, uses: uses.as_slice() };
        // SAFETY: the parameters are the check's, and name no memory but the group's, which is in the list.
        unsafe { B::launch(stream, &comm.own.module, &launch) }
    }

    /// # Safety
    /// As [`Backend::launch`], with `uses`, to which the group's memory is added here.
    pub(super) unsafe fn launch<'a>(
        self,
        stream: &B::Stream,
        work: Work<'_>,
        uses: impl IntoIterator<Item = &'a B::Buffer>,
    ) -> Result<()>
    where
        B: 'a,
    {
        let Work { kernel, grid, threads, params, partners, same_grid, described } = work;
        let comm = self.comm;
        comm.group.budget.check(grid, threads)?;
        let mut all = comm.group_memory();
        for buffer in uses {
            all.extend([buffer]); // one by one: borrowed for as long as this list, not for 'a
        }
        let early = same_grid && comm.allows_early(grid, threads);
        let launch = Launch { kernel: kernel.into(), grid, threads, params, early, uses: all.as_slice() };
        // SAFETY: passed on to the caller; the group's memory is in the list.
        unsafe { self.launch_from(stream, &comm.own.module, &launch, partners, described.as_ref()) }
    }

    /// Launches what fits, behind all that may still speak against it.
    ///
    /// # Safety
    /// As [`Backend::launch`]; the group's memory is among what the launch uses.
    pub(super) unsafe fn launch_from(
        self,
        stream: &B::Stream,
        module: &B::Module,
        launch: &Launch<'_, B>,
        partners: u32,
        described: Option<&Compared>,
    ) -> Result<()> {
        self.comm.check_poison()?;
        self.comm.take_stream(self.options.domain, stream)?;
        self.comm.keep_pace(self.options.domain, stream, partners)?;
        // Of sends to each peer: of the first.
        let first = partners.trailing_zeros() as usize % MAX_GPUS;
        let description = described.map(|described| described[first]);
        trace::around(self.comm, stream, &self.options, (partners, description), || {
            if let Some(described) = described.filter(|_| self.comm.checks()) {
                self.launch_check(stream, partners, described)?;
            }
            // SAFETY: passed on to the caller.
            unsafe { B::launch(stream, module, launch) }
        })
    }
}

/// HostControl, the group's memory, a symmetric buffer, input and output.
const FEW_BUFFERS: usize = 1 + 2 * MAX_GPUS + 2;

/// Memory that one launch uses, gathered without a heap allocation where it is not more than most calls need.
pub(super) struct BufferList<'a, T> {
    few: [&'a T; FEW_BUFFERS],
    len: usize,
    /// All of them, once they are more.
    many: Vec<&'a T>,
}

impl<'a, T: 'a> BufferList<'a, T> {
    pub(super) fn new(first: &'a T) -> Self {
        BufferList { few: [first; FEW_BUFFERS], len: 1, many: Vec::new() }
    }

    pub(super) fn extend(&mut self, items: impl IntoIterator<Item = &'a T>) {
        for item in items {
            if self.len < FEW_BUFFERS {
                self.few[self.len] = item;
            } else {
                if self.many.is_empty() {
                    self.many.extend(self.few);
                }
                self.many.push(item);
            }
            self.len += 1;
        }
    }

    pub(super) fn as_slice(&self) -> &[&'a T] {
        if self.many.is_empty() { &self.few[..self.len] } else { &self.many }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_holds_few_buffers_and_many() {
        let numbers: Vec<usize> = (0..3 * FEW_BUFFERS).collect();
        for len in [1, 2, FEW_BUFFERS - 1, FEW_BUFFERS, FEW_BUFFERS + 1, 3 * FEW_BUFFERS] {
            let mut list = BufferList::new(&numbers[0]);
            list.extend(&numbers[1..len]);
            assert_eq!(list.as_slice(), numbers[..len].iter().collect::<Vec<_>>());
        }
    }
}
