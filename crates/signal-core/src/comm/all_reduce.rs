//! The all-reduce: one call, checked and planned.

use std::sync::Arc;

use bytemuck::{Zeroable, bytes_of};

use crate::backend::Backend;
use crate::buffer::{Slice, SliceMut};
use crate::collective::Collective;
use crate::dtype::{Dtype, Element, ReduceOp};
use crate::error::{ApiMisuse, Result};
use crate::kernel::{
    Algorithm, AllReduceParams, FLAG_ALLOW_NEXT, FLAG_PUSH, FLAG_STAGED, FastSum, GroupParams, Kernel,
};
use crate::layout::{MAX_GPUS, PACK_BYTES, most_lamport_bytes};
use crate::plan::{Load, Plan};

use super::Symmetric;
use super::call::{ALL_RANKS, Call, Work};
use super::check::{Amount, Description};
use super::exchange::{Exchange, Piece};
use super::span::{Span, check_pointer};

/// A raw input or output.
#[derive(Clone, Copy, Debug)]
struct Operands {
    input: u64,
    output: u64,
    count: usize,
    dtype: Dtype,
}

impl<B: Backend> Call<'_, B> {
    /// See [`Communicator::all_reduce`](crate::Communicator::all_reduce).
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`](crate::Communicator::all_reduce).
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

    /// See [`Communicator::all_reduce_in_place`](crate::Communicator::all_reduce_in_place).
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`](crate::Communicator::all_reduce).
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
    /// As [`Communicator::all_reduce`](crate::Communicator::all_reduce), and [`ApiMisuse::NullPointer`], [`ApiMisuse::Misaligned`],
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
        unsafe {
            self.launch_all_reduce(stream, operands, [&symmetric, &target].map(Option::as_ref), uses.as_slice(), op)
        }
    }

    pub(super) fn all_reduce_slices<T: Element>(
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
        let symmetric = [self.symmetric_of(&input), self.symmetric_of(&output)];
        // SAFETY: slices lie within buffers of this device, which `uses` and the symmetric buffer keep alive; the output
        // is borrowed exclusively. The borrow ends with the call, as the documentation of the streams' order says.
        unsafe {
            let symmetric = symmetric.each_ref().map(Option::as_ref);
            self.launch_all_reduce(stream, operands, symmetric, &[input.memory(), output.memory()], op)
        }
    }

    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw), for spans of `count` elements, but for the memory that they name.
    pub(super) unsafe fn all_reduce_spans(
        self,
        stream: &B::Stream,
        [input, output]: &[Span<B>; 2],
        (count, dtype): (usize, Dtype),
        op: ReduceOp,
    ) -> Result<()> {
        let operands = Operands { input: input.address, output: output.address, count, dtype };
        let symmetric = [input.symmetric.as_ref(), output.symmetric.as_ref()];
        let uses: Vec<&B::Buffer> = input.memory.iter().chain(&output.memory).collect();
        // SAFETY: passed on to the caller.
        unsafe { self.launch_all_reduce(stream, operands, symmetric, &uses, op) }
    }

    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw), but for memory named in `uses`; symmetric buffers, where given, are of this
    /// group and their parts of this rank hold the input and the output.
    unsafe fn launch_all_reduce(
        self,
        stream: &B::Stream,
        operands: Operands,
        [symmetric, target]: [Option<&Arc<Symmetric<B>>>; 2],
        uses: &[&B::Buffer],
        op: ReduceOp,
    ) -> Result<()> {
        let Operands { input, output, count, dtype } = operands;
        let plan = self.comm.plan_with(&self.options, count, dtype, op);
        if plan.algorithm == Algorithm::Lines {
            // SAFETY: passed on to the caller.
            return unsafe { self.launch_lines(stream, operands, symmetric, uses, (op, plan)) };
        }
        if !Algorithm::ALL_REDUCE.contains(&plan.algorithm) {
            let (collective, algorithm) = (Collective::AllReduce, plan.algorithm);
            return Err(ApiMisuse::Algorithm { collective, algorithm }.into());
        }
        let group = self.begin(plan.blocks, plan.threads)?;
        let bytes = operands.check()?;
        let amount = Amount::Elements(count, dtype, op);
        let described = Description::collective(Collective::AllReduce, &plan, 0, amount);
        if count == 0 {
            return self.check_alone(stream, described);
        }
        match plan.algorithm {
            Algorithm::Lamport => check_lamport(bytes, self.comm.world_size(), group.domain, (dtype, op))?,
            Algorithm::TwoShot => check_region(group.domain, dtype, op)?,
            _ => {}
        }
        let in_place = input == output;
        let packs = bytes.div_ceil(PACK_BYTES as u64);
        let params = AllReduceParams {
            group,
            input,
            output,
            bytes,
            packs,
            whole_packs: bytes / PACK_BYTES as u64,
            window_packs: window_packs(plan.algorithm, &group, packs),
            op: op as u32,
            dtype: dtype as u32,
            ..AllReduceParams::zeroed()
        };
        // What peers touch, if it is where they can.
        let (touched, at) = match plan.algorithm {
            // In place, this rank would overwrite what its peers are still reading.
            Algorithm::OneStage => (symmetric.filter(|_| !in_place), input),
            Algorithm::TwoStage => (symmetric, input),
            Algorithm::TwoStagePush => (target, output),
            // Each rank pushes from its own memory.
            _ => (None, input),
        };
        let mut params =
            AllReduceParams { view: touched.map_or([at; MAX_GPUS], |s| s.seen_by_ranks(self.comm.rank, at)), ..params };
        if touched.is_none() && !plan.algorithm.uses_region() {
            params.group.flags |= FLAG_STAGED;
        }
        if plan.algorithm == Algorithm::TwoStagePush {
            params.group.flags |= FLAG_PUSH;
        }
        let kernel = kernel_for(&plan, &params, op, dtype);
        let work = Work {
            kernel,
            grid: plan.blocks,
            threads: plan.threads,
            params: bytes_of(&params),
            partners: ALL_RANKS,
            same_grid: true,
            described: Some([described; MAX_GPUS]),
        };
        let read = touched.iter().flat_map(|symmetric| symmetric.all_memory());
        // SAFETY: the parameters are the kernel's. Input and output are of this rank, by the caller's promise; peers read
        // the symmetric buffer or this rank's scratch, which the launch keeps alive.
        unsafe { self.launch(stream, work, read.chain(uses.iter().copied())) }
    }

    /// An all-reduce in which every rank has all of its input for each rank.
    ///
    /// # Safety
    /// As [`launch_all_reduce`](Self::launch_all_reduce).
    unsafe fn launch_lines(
        self,
        stream: &B::Stream,
        operands: Operands,
        symmetric: Option<&Arc<Symmetric<B>>>,
        uses: &[&B::Buffer],
        (op, plan): (ReduceOp, Plan),
    ) -> Result<()> {
        let Operands { input, output, count, dtype } = operands;
        let bytes = operands.check()?;
        let memory = symmetric.map(|s| s.memory(self.comm.rank)).into_iter().chain(uses.iter().copied());
        let span = |memory: &B::Buffer| Span { address: 0, bytes: 0, symmetric: None, memory: Some(memory.clone()) };
        let spans: Vec<Span<B>> = memory.map(span).collect();
        let piece = |address| [Piece { address, bytes, symmetric: None }; MAX_GPUS];
        let exchange = Exchange {
            collective: Collective::AllReduce,
            root: 0,
            send: piece(input),
            receive: piece(output),
            one_for_all: true,
            in_place: input == output,
            reduction: Some((op, dtype)),
            load: Load { bytes, largest: bytes },
            amount: Amount::Elements(count, dtype, op),
            counts: None,
            spans: &spans,
        };
        // SAFETY: passed on to the caller.
        unsafe { self.launch_planned(stream, &exchange, plan) }
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
            check_pointer(what, address, bytes, Some(dtype))?;
        }
        if input != output && input < output + bytes && output < input + bytes {
            return Err(ApiMisuse::Overlap { input, output, bytes }.into());
        }
        Ok(bytes)
    }
}

/// Refuses what the Lamport region cannot take in one window.
pub(super) fn check_lamport(
    bytes: u64,
    world: usize,
    domain: u32,
    (dtype, op): (Dtype, ReduceOp),
) -> Result<(), ApiMisuse> {
    check_region(domain, dtype, op)?;
    let limit = most_lamport_bytes(world);
    if bytes > limit as u64 { Err(ApiMisuse::LamportTooLarge { bytes, limit }) } else { Ok(()) }
}

/// Refuses what the Lamport region cannot take.
pub(super) fn check_region(domain: u32, dtype: Dtype, op: ReduceOp) -> Result<(), ApiMisuse> {
    if FastSum::of(op, dtype).is_none() {
        return Err(ApiMisuse::LamportType { op, dtype });
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
            Algorithm::TwoStage | Algorithm::TwoStagePush => Kernel::AllReduceTwoStageAny,
            _ => Kernel::AllReduceOneStageAny,
        };
    };
    match plan.algorithm {
        Algorithm::OneStage if few_ranks && few_packs && params.group.flags & !FLAG_ALLOW_NEXT == 0 => {
            Kernel::AllReduceSmall(sum)
        }
        Algorithm::Lamport if few_ranks => Kernel::AllReduceLamportSmall(sum),
        Algorithm::Lamport => Kernel::AllReduceLamport(sum),
        Algorithm::TwoStage | Algorithm::TwoStagePush => Kernel::AllReduceTwoStage(sum),
        Algorithm::TwoShot if few_ranks => Kernel::AllReduceTwoShotSmall(sum),
        Algorithm::TwoShot => Kernel::AllReduceTwoShot(sum),
        _ => Kernel::AllReduceOneStage(sum),
    }
}

/// Packs of one window of a message of `all`: as many as the domain's scratch can hold staged, and for two stages reduced too. The
/// same on every rank, whether it stages or not.
fn window_packs(algorithm: Algorithm, group: &GroupParams, all: u64) -> u64 {
    let packs = group.scratch_bytes / PACK_BYTES as u64;
    let world = u64::from(group.world);
    match algorithm {
        Algorithm::OneStage | Algorithm::Lamport | Algorithm::Pull | Algorithm::Push | Algorithm::Lines => packs,
        // The sums of world shards, and as many shards for this rank.
        Algorithm::TwoStagePush => packs / (2 * world) * world,
        Algorithm::TwoShot => {
            // Of a sender's slots, of which few ranks have several: all for two ranks, half for shards and half for sums for more.
            // Equal windows, so that the last is no shorter than the ranks are many.
            let slots = (most_lamport_bytes(group.world as usize) / PACK_BYTES) as u64;
            let most = if world <= 2 { slots } else { slots / 2 * world };
            all.div_ceil(all.div_ceil(most).max(1))
        }
        // w staged packs and ceil(w / world) sums: with w = world x k that is (world + 1) x k.
        Algorithm::TwoStage => packs / (world + 1) * world,
    }
}
