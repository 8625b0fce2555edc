//! One call: checking, planning, launching.

use std::sync::Arc;
use std::time::Duration;

use bytemuck::{Zeroable, bytes_of};

use crate::backend::{Backend, Launch};
use crate::buffer::{DeviceBuffer, Slice, SliceMut};
use crate::dtype::{Dtype, Element, ReduceOp};
use crate::error::{ApiMisuse, Result};
use crate::kernel::{
    Algorithm, AllReduceParams, BarrierParams, BarrierProbeParams, CheckParams, FLAG_ALLOW_NEXT, FLAG_STAGED, FastSum,
    GroupParams, Kernel, Phase,
};
use crate::layout::{LAMPORT_SLOT_BYTES, MAX_GPUS, PACK_BYTES};
use crate::plan::Plan;
use crate::signal::check_domain;

use super::check::Description;
use super::{Communicator, Symmetric};

/// What one call does differently. Every rank must pass the same options for the same call.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct CallOptions {
    /// The algorithm, instead of the tuning table's.
    pub algorithm: Option<Algorithm>,
    /// The barrier domain, 0 unless [`Settings::domains`](crate::Settings::domains) is on.
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
    comm: &'c mut Communicator<B>,
    options: CallOptions,
}

/// A raw input or output.
#[derive(Clone, Copy, Debug)]
struct Operands {
    input: u64,
    output: u64,
    count: usize,
    dtype: Dtype,
}

impl<'c, B: Backend> Call<'c, B> {
    pub(crate) fn new(comm: &'c mut Communicator<B>, options: CallOptions) -> Self {
        Call { comm, options }
    }

    /// See [`Communicator::all_reduce`].
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce<'a, T: Element>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        let (input, output) = (input.into(), output.into());
        if input.len() != output.len() {
            return Err(ApiMisuse::Length { input: input.len(), output: output.len() }.into());
        }
        self.all_reduce_slices(stream, input, output.as_slice(), op)
    }

    /// See [`Communicator::all_reduce_in_place`].
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`].
    pub fn all_reduce_in_place<'a, T: Element>(
        self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        let buffer = buffer.into();
        self.all_reduce_slices(stream, buffer.as_slice(), buffer.as_slice(), op)
    }

    /// The raw layer: addresses as this rank's device sees them. An input that lies in one of this rank's symmetric
    /// buffers is read in place; any other is staged.
    ///
    /// # Safety
    /// - `input` and `output` point at `count` elements of `dtype` on this rank's device, which stay allocated until the
    ///   call has finished on `stream`.
    /// - Nothing else writes the input, or touches the output, until then.
    /// - After a fault, peers may read the input, if it is symmetric, until this rank's communicator is dropped.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`], and [`ApiMisuse::NullPointer`], [`ApiMisuse::Misaligned`],
    /// [`ApiMisuse::Overlap`].
    pub unsafe fn all_reduce_raw(
        self,
        stream: &B::Stream,
        input: u64,
        output: u64,
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
    ) -> Result<()> {
        let operands = Operands { input, output, count, dtype };
        let bytes = operands.check()?;
        let symmetric = self.comm.find_symmetric(input, bytes);
        let target = self.comm.find_symmetric(output, bytes);
        let uses = target.as_ref().map(|s| s.memory(self.comm.rank));
        // SAFETY: passed on to the caller.
        unsafe { self.launch_all_reduce(stream, operands, symmetric.as_ref(), uses.as_slice(), op) }
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
        let described = Some(Description::barrier(blocks, threads));
        // SAFETY: the parameters are the barrier's, and name no memory but the group's.
        unsafe { self.launch(stream, described, Kernel::Barrier, blocks, threads, bytes_of(&params), None, &[]) }
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
        let uses = [mismatches.memory()];
        // SAFETY: the parameters are the probe's; the tokens fit the scratch and the counts fit `mismatches`, which
        // `uses` keeps alive and which the caller has lent exclusively.
        unsafe { self.launch(stream, None, Kernel::BarrierProbe, blocks, threads, bytes_of(&params), None, &uses) }
    }

    fn all_reduce_slices<T: Element>(
        self,
        stream: &B::Stream,
        input: Slice<'_, B, T>,
        output: Slice<'_, B, T>,
        op: ReduceOp,
    ) -> Result<()> {
        self.check_device("input", input.memory())?;
        self.check_device("output", output.memory())?;
        let operands =
            Operands { input: input.address(), output: output.address(), count: input.len(), dtype: T::DTYPE };
        let symmetric = input.symmetric().filter(|s| s.belongs_to(&self.comm.group)).filter(|s| {
            // Another rank's part of the buffer, on a shared device, is not what peers would be told of.
            B::address(s.memory(self.comm.rank)) == B::address(input.memory())
        });
        // SAFETY: slices lie within buffers of this device, which `uses` and the symmetric buffer keep alive; the output
        // is borrowed exclusively. The borrow ends with the call, as the documentation of the streams' order says.
        unsafe { self.launch_all_reduce(stream, operands, symmetric, &[input.memory(), output.memory()], op) }
    }

    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw), but for memory named in `uses`; `symmetric`, if given, is of this
    /// group and its part of this rank holds the input.
    unsafe fn launch_all_reduce(
        self,
        stream: &B::Stream,
        operands: Operands,
        symmetric: Option<&Arc<Symmetric<B>>>,
        uses: &[&B::Buffer],
        op: ReduceOp,
    ) -> Result<()> {
        let Operands { input, output, count, dtype } = operands;
        let plan = self.comm.plan_with(&self.options, count, dtype, op);
        let group = self.begin(plan.blocks, plan.threads)?;
        let bytes = operands.check()?;
        let described = Description::all_reduce(&plan, count, dtype, op);
        if count == 0 {
            return self.check_alone(stream, described);
        }
        if plan.algorithm == Algorithm::Lamport {
            check_lamport(bytes, group.domain, dtype, op)?;
        }
        let in_place = input == output;
        let params = AllReduceParams {
            group,
            input,
            output,
            count: count as u64,
            packs: bytes.div_ceil(PACK_BYTES as u64),
            whole_packs: bytes / PACK_BYTES as u64,
            window_packs: window_packs(plan.algorithm, &group),
            op: op as u32,
            ..AllReduceParams::zeroed()
        };
        let readable = symmetric.filter(|_| match plan.algorithm {
            // In place, this rank would overwrite what its peers are still reading.
            Algorithm::OneStage => !in_place,
            Algorithm::TwoStage => true,
            // Each rank pushes from its own memory.
            Algorithm::Lamport => false,
        });
        let mut params = AllReduceParams {
            view: readable.map_or([input; MAX_GPUS], |s| s.seen_by_ranks(self.comm.rank, input)),
            ..params
        };
        if readable.is_none() && plan.algorithm != Algorithm::Lamport {
            params.group.flags |= FLAG_STAGED;
        }
        let kernel = kernel_for(&plan, &params, op, dtype);
        let (blocks, threads, readable) = (plan.blocks, plan.threads, readable.map(|s| &**s));
        // SAFETY: the parameters are the kernel's. Input and output are of this rank, by the caller's promise; peers read
        // the symmetric buffer or this rank's scratch, which the launch keeps alive.
        unsafe { self.launch(stream, Some(described), kernel, blocks, threads, bytes_of(&params), readable, uses) }
    }

    /// Checks what all calls have in common, and gives the parameters that they share, for a grid of `blocks` of `threads`.
    fn begin(&self, blocks: u32, threads: u32) -> Result<GroupParams> {
        let CallOptions { domain, delay, .. } = self.options;
        check_domain(domain)?;
        if domain > 0 && !self.comm.settings.domains {
            return Err(ApiMisuse::DomainsClosed(domain).into());
        }
        let mut group = self.comm.group_params(domain);
        if self.comm.allows_early(blocks, threads) {
            group.flags |= FLAG_ALLOW_NEXT;
        }
        if let Some((phase, time)) = delay {
            group.delay_phase = phase as u32;
            group.delay_ticks = time.as_nanos() as u64;
        }
        Ok(group)
    }

    fn check_device(&self, what: &'static str, memory: &B::Buffer) -> Result<()> {
        let device = B::buffer_device(memory);
        if device != *self.comm.device() { Err(self.comm.wrong_device(what, &device)) } else { Ok(()) }
    }

    /// In checked mode a call without elements is compared too, since the peers' may have some.
    fn check_alone(self, stream: &B::Stream, described: Description) -> Result<()> {
        if !self.comm.checks() {
            return Ok(());
        }
        self.comm.check_poison()?;
        self.comm.take_stream(self.options.domain, stream)?;
        self.launch_check(stream, described)
    }

    /// Enqueues the comparison of this call with the peers'.
    fn launch_check(&self, stream: &B::Stream, described: Description) -> Result<()> {
        let comm = &self.comm;
        let (grid, threads) = (1, comm.group.whole_wave(1));
        let params = CheckParams { group: self.begin(grid, threads)?, description: described.words() };
        let early = comm.allows_early(grid, threads);
        let uses = comm.group_memory();
        let params = bytes_of(&params);
        let launch = Launch { kernel: Kernel::Check, grid, threads, params, early, uses: uses.as_slice() };
        // SAFETY: the parameters are the check's, and name no memory but the group's, which is in the list.
        unsafe { B::launch(stream, &comm.own.module, &launch) }
    }

    /// # Safety
    /// As [`Backend::launch`]; the group's memory and that of `symmetric` are added to `uses` here.
    #[allow(clippy::too_many_arguments)] // each is a field of the launch
    unsafe fn launch(
        self,
        stream: &B::Stream,
        described: Option<Description>,
        kernel: Kernel,
        grid: u32,
        threads: u32,
        params: &[u8],
        symmetric: Option<&Symmetric<B>>,
        uses: &[&B::Buffer],
    ) -> Result<()> {
        self.comm.group.budget.check(grid, threads)?;
        self.comm.check_poison()?;
        self.comm.take_stream(self.options.domain, stream)?;
        self.comm.keep_pace(stream)?;
        if let Some(described) = described.filter(|_| self.comm.checks()) {
            self.launch_check(stream, described)?;
        }
        let comm = self.comm;
        let mut all = comm.group_memory();
        all.extend(symmetric.iter().flat_map(|s| s.all_memory()));
        all.extend(uses.iter().copied());
        let early = comm.allows_early(grid, threads);
        let launch = Launch { kernel, grid, threads, params, early, uses: all.as_slice() };
        // SAFETY: passed on to the caller; the group's memory is in the list.
        unsafe { B::launch(stream, &comm.own.module, &launch) }
    }
}

impl Operands {
    /// Checks the addresses and gives the bytes of each operand.
    fn check(&self) -> Result<u64> {
        let &Operands { input, output, count, dtype } = self;
        if count == 0 {
            return Ok(0);
        }
        let too_large = || ApiMisuse::TooLarge { count, element_bytes: dtype.bytes() };
        let bytes = (count as u64).checked_mul(dtype.bytes() as u64).ok_or_else(too_large)?;
        for (what, address) in [("input", input), ("output", output)] {
            if address == 0 {
                return Err(ApiMisuse::NullPointer { what }.into());
            }
            if address % dtype.bytes() as u64 != 0 {
                return Err(ApiMisuse::Misaligned { what, address, dtype }.into());
            }
            address.checked_add(bytes).ok_or_else(too_large)?;
        }
        if input != output && input < output + bytes && output < input + bytes {
            return Err(ApiMisuse::Overlap { input, output, bytes }.into());
        }
        Ok(bytes)
    }
}

/// Refuses what the Lamport region cannot take.
pub(super) fn check_lamport(bytes: u64, domain: u32, dtype: Dtype, op: ReduceOp) -> Result<(), ApiMisuse> {
    if FastSum::of(op, dtype).is_none() {
        return Err(ApiMisuse::LamportType { op, dtype });
    }
    if bytes > LAMPORT_SLOT_BYTES as u64 {
        return Err(ApiMisuse::LamportTooLarge { bytes, limit: LAMPORT_SLOT_BYTES });
    }
    if domain != 0 { Err(ApiMisuse::LamportDomain(domain)) } else { Ok(()) }
}

/// Packs a thread up to which a message is small: as many loads of each rank at once are not worth their registers.
const SMALL_PACKS: u64 = 2;

/// The kernel of a planned all-reduce. Ranks may differ in it, as in whether their input is staged: the one-stage kernels
/// meet each other.
fn kernel_for(plan: &Plan, params: &AllReduceParams, op: ReduceOp, dtype: Dtype) -> Kernel {
    let threads = u64::from(plan.blocks) * u64::from(plan.threads);
    let few_ranks = params.group.world <= Kernel::SMALL_WORLD;
    let few_packs = params.packs <= params.window_packs.min(SMALL_PACKS.saturating_mul(threads));
    let Some(sum) = FastSum::of(op, dtype) else {
        return match plan.algorithm {
            Algorithm::TwoStage => Kernel::AllReduceTwoStageAny(dtype),
            _ => Kernel::AllReduceOneStageAny(dtype),
        };
    };
    match plan.algorithm {
        Algorithm::OneStage if few_ranks && few_packs && params.group.flags & !FLAG_ALLOW_NEXT == 0 => {
            Kernel::AllReduceSmall(sum)
        }
        Algorithm::Lamport if few_ranks => Kernel::AllReduceLamportSmall(sum),
        algorithm => Kernel::AllReduce(algorithm, sum),
    }
}

/// Packs of one window: as many as the domain's scratch can hold staged, and for two stages reduced too. The same on
/// every rank, whether it stages or not.
fn window_packs(algorithm: Algorithm, group: &GroupParams) -> u64 {
    let packs = group.scratch_bytes / PACK_BYTES as u64;
    let world = u64::from(group.world);
    match algorithm {
        Algorithm::OneStage | Algorithm::Lamport => packs,
        // w staged packs and ceil(w / world) sums: with w = world x k that is (world + 1) x k.
        Algorithm::TwoStage => packs / (world + 1) * world,
    }
}

/// HostControl, the group's memory, a symmetric buffer, input and output.
const MAX_BUFFERS: usize = 1 + 2 * MAX_GPUS + 2;

/// Memory that one launch uses, gathered without a heap allocation.
pub(super) struct BufferList<'a, T> {
    items: [&'a T; MAX_BUFFERS],
    len: usize,
}

impl<'a, T: 'a> BufferList<'a, T> {
    pub(super) fn new(first: &'a T) -> Self {
        BufferList { items: [first; MAX_BUFFERS], len: 1 }
    }

    pub(super) fn extend(&mut self, items: impl IntoIterator<Item = &'a T>) {
        for item in items {
            debug_assert!(self.len < MAX_BUFFERS);
            self.items[self.len] = item;
            self.len += 1;
        }
    }

    fn as_slice(&self) -> &[&'a T] {
        &self.items[..self.len]
    }
}
