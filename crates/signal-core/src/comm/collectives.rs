//! The collectives besides all-reduce: what each takes, and which pieces it makes of that.

use bytemuck::Pod;

use crate::backend::Backend;
use crate::buffer::{Slice, SliceMut};
use crate::collective::Collective;
use crate::dtype::{Dtype, Element, ReduceOp};
use crate::error::{ApiMisuse, Result};
use crate::layout::MAX_GPUS;
use crate::plan::{self, Load};
use crate::signal::check_rank;

use super::call::Call;
use super::check::Amount;
use super::exchange::{Exchange, Piece, Pieces};
use super::span::{Span, check_len};

impl<B: Backend> Call<'_, B> {
    /// See [`Communicator::reduce_scatter`](crate::Communicator::reduce_scatter).
    ///
    /// # Errors
    /// As there.
    pub fn reduce_scatter<'a, T: Element>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        let (input, output) = (input.into(), output.into());
        let parts = self.equal(output.len(), size_of::<T>())?;
        self.reduce_scatter_slices(stream, input, output.as_slice(), &parts, op)
    }

    /// See [`Communicator::reduce_scatter_in_place`](crate::Communicator::reduce_scatter_in_place).
    ///
    /// # Errors
    /// As there.
    pub fn reduce_scatter_in_place<'a, T: Element>(
        self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        let buffer = buffer.into();
        let part = self.part("buffer", buffer.len())?;
        let own = buffer.as_slice().part(self.comm.rank * part, part);
        let parts = self.equal(part, size_of::<T>())?;
        self.reduce_scatter_slices(stream, buffer.as_slice(), own, &parts, op)
    }

    /// See [`Communicator::reduce_scatter_ragged`](crate::Communicator::reduce_scatter_ragged).
    ///
    /// # Errors
    /// As there.
    pub fn reduce_scatter_ragged<'a, T: Element>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        let parts = self.ragged(counts, size_of::<T>())?;
        self.reduce_scatter_slices(stream, input.into(), output.into().as_slice(), &parts, op)
    }

    /// The raw layer of [`reduce_scatter`](Self::reduce_scatter), with `count` elements for each rank.
    ///
    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw), with an input of world size x `count` elements.
    ///
    /// # Errors
    /// As [`all_reduce_raw`](Self::all_reduce_raw).
    pub unsafe fn reduce_scatter_raw(
        self,
        stream: &B::Stream,
        input: u64,
        output: u64,
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
    ) -> Result<()> {
        let parts = self.equal(count, dtype.bytes())?;
        let input = self.raw_span("input", input, parts.total(), Some(dtype))?;
        let output = self.raw_span("output", output, parts.of(self.comm.rank), Some(dtype))?;
        // SAFETY: passed on to the caller.
        unsafe { self.launch_reduce_scatter(stream, [input, output], &parts, (op, dtype)) }
    }

    /// See [`Communicator::reduce`](crate::Communicator::reduce).
    ///
    /// # Errors
    /// As there.
    pub fn reduce<'a, T: Element>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: Option<SliceMut<'a, B, T>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let input = input.into();
        if let Some(output) = output.as_ref().filter(|output| output.len() != input.len()) {
            return Err(ApiMisuse::Length { input: input.len(), output: output.len() }.into());
        }
        let target = output.as_ref().map(|output| self.span("output", output.as_slice())).transpose()?;
        let input = self.span("input", input)?;
        // SAFETY: slices lie within buffers of this device, which the spans keep alive; the output is borrowed exclusively.
        unsafe { self.launch_reduce(stream, input, target, root, (op, T::DTYPE)) }
    }

    /// See [`Communicator::reduce_in_place`](crate::Communicator::reduce_in_place).
    ///
    /// # Errors
    /// As there.
    pub fn reduce_in_place<'a, T: Element>(
        self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let buffer = buffer.into();
        let input = self.span("buffer", buffer.as_slice())?;
        let output = self.span("buffer", buffer.as_slice())?;
        // SAFETY: the slice lies within a buffer of this device, which the spans keep alive, and is borrowed exclusively.
        unsafe { self.launch_reduce(stream, input, Some(output), root, (op, T::DTYPE)) }
    }

    /// The raw layer of [`reduce`](Self::reduce). Only the root's `output` is looked at.
    ///
    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw).
    ///
    /// # Errors
    /// As [`all_reduce_raw`](Self::all_reduce_raw), and [`ApiMisuse::Rank`].
    #[allow(clippy::too_many_arguments)] // they are what the collective takes
    pub unsafe fn reduce_raw(
        self,
        stream: &B::Stream,
        input: u64,
        output: u64,
        count: usize,
        dtype: Dtype,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        let bytes = byte_count(count, dtype.bytes())?;
        let input = self.raw_span("input", input, bytes, Some(dtype))?;
        let at_root = self.comm.rank == root;
        let output = at_root.then(|| self.raw_span("output", output, bytes, Some(dtype))).transpose()?;
        // SAFETY: passed on to the caller.
        unsafe { self.launch_reduce(stream, input, output, root, (op, dtype)) }
    }

    /// See [`Communicator::all_gather`](crate::Communicator::all_gather).
    ///
    /// # Errors
    /// As there.
    pub fn all_gather<'a, T: Pod>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
    ) -> Result<()> {
        let (input, output) = (input.into(), output.into());
        let parts = self.equal(input.len(), size_of::<T>())?;
        self.all_gather_slices(stream, input, output.as_slice(), &parts)
    }

    /// See [`Communicator::all_gather_in_place`](crate::Communicator::all_gather_in_place).
    ///
    /// # Errors
    /// As there.
    pub fn all_gather_in_place<'a, T: Pod>(
        self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
    ) -> Result<()> {
        let buffer = buffer.into();
        let part = self.part("buffer", buffer.len())?;
        let own = buffer.as_slice().part(self.comm.rank * part, part);
        let parts = self.equal(part, size_of::<T>())?;
        self.all_gather_slices(stream, own, buffer.as_slice(), &parts)
    }

    /// See [`Communicator::all_gather_ragged`](crate::Communicator::all_gather_ragged).
    ///
    /// # Errors
    /// As there.
    pub fn all_gather_ragged<'a, T: Pod>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        counts: &[usize],
    ) -> Result<()> {
        let parts = self.ragged(counts, size_of::<T>())?;
        self.all_gather_slices(stream, input.into(), output.into().as_slice(), &parts)
    }

    /// The raw layer of [`all_gather`](Self::all_gather), with `bytes` bytes of each rank.
    ///
    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw), with an output of world size x `bytes`.
    ///
    /// # Errors
    /// As [`all_reduce_raw`](Self::all_reduce_raw).
    pub unsafe fn all_gather_raw(self, stream: &B::Stream, input: u64, output: u64, bytes: usize) -> Result<()> {
        let parts = self.equal(bytes, 1)?;
        let input = self.raw_span("input", input, parts.of(self.comm.rank), None)?;
        let output = self.raw_span("output", output, parts.total(), None)?;
        // SAFETY: passed on to the caller.
        unsafe { self.launch_all_gather(stream, [input, output], &parts) }
    }

    /// See [`Communicator::broadcast`](crate::Communicator::broadcast).
    ///
    /// # Errors
    /// As there.
    pub fn broadcast<'a, T: Pod>(
        self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
        root: usize,
    ) -> Result<()> {
        let span = self.span("buffer", buffer.into().as_slice())?;
        // SAFETY: the slice lies within a buffer of this device, which the span keeps alive, and is borrowed exclusively.
        unsafe { self.launch_broadcast(stream, span, root) }
    }

    /// The raw layer of [`broadcast`](Self::broadcast).
    ///
    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw); `buffer` has `bytes` bytes.
    ///
    /// # Errors
    /// As [`all_reduce_raw`](Self::all_reduce_raw), and [`ApiMisuse::Rank`].
    pub unsafe fn broadcast_raw(self, stream: &B::Stream, buffer: u64, bytes: usize, root: usize) -> Result<()> {
        let span = self.raw_span("buffer", buffer, bytes as u64, None)?;
        // SAFETY: passed on to the caller.
        unsafe { self.launch_broadcast(stream, span, root) }
    }

    /// See [`Communicator::scatter`](crate::Communicator::scatter).
    ///
    /// # Errors
    /// As there.
    pub fn scatter<'a, T: Pod>(
        self,
        stream: &B::Stream,
        input: Option<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        root: usize,
    ) -> Result<()> {
        let output = output.into();
        let parts = self.equal(output.len(), size_of::<T>())?;
        if let Some(input) = input.filter(|_| self.comm.rank == root) {
            self.check_parts("input", input.len(), output.len())?;
        }
        let source = input.map(|input| self.span("input", input)).transpose()?;
        let output = self.span("output", output.as_slice())?;
        // SAFETY: slices lie within buffers of this device, which the spans keep alive; the output is borrowed exclusively.
        unsafe { self.launch_rooted(stream, Collective::Scatter, (source, output), &parts, root) }
    }

    /// The raw layer of [`scatter`](Self::scatter), with `bytes` bytes for each rank. Only the root's `input` is looked at.
    ///
    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw), with an input of world size x `bytes` on the root.
    ///
    /// # Errors
    /// As [`all_reduce_raw`](Self::all_reduce_raw), and [`ApiMisuse::Rank`].
    pub unsafe fn scatter_raw(
        self,
        stream: &B::Stream,
        input: u64,
        output: u64,
        bytes: usize,
        root: usize,
    ) -> Result<()> {
        let parts = self.equal(bytes, 1)?;
        let at_root = self.comm.rank == root;
        let input = at_root.then(|| self.raw_span("input", input, parts.total(), None)).transpose()?;
        let output = self.raw_span("output", output, bytes as u64, None)?;
        // SAFETY: passed on to the caller.
        unsafe { self.launch_rooted(stream, Collective::Scatter, (input, output), &parts, root) }
    }

    /// See [`Communicator::gather`](crate::Communicator::gather).
    ///
    /// # Errors
    /// As there.
    pub fn gather<'a, T: Pod>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: Option<SliceMut<'a, B, T>>,
        root: usize,
    ) -> Result<()> {
        let input = input.into();
        let parts = self.equal(input.len(), size_of::<T>())?;
        if let Some(output) = output.as_ref().filter(|_| self.comm.rank == root) {
            self.check_parts("output", output.len(), input.len())?;
        }
        let target = output.as_ref().map(|output| self.span("output", output.as_slice())).transpose()?;
        let input = self.span("input", input)?;
        // SAFETY: slices lie within buffers of this device, which the spans keep alive; the output is borrowed exclusively.
        unsafe { self.launch_rooted(stream, Collective::Gather, (target, input), &parts, root) }
    }

    /// The raw layer of [`gather`](Self::gather), with `bytes` bytes of each rank. Only the root's `output` is looked at.
    ///
    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw), with an output of world size x `bytes` on the root.
    ///
    /// # Errors
    /// As [`all_reduce_raw`](Self::all_reduce_raw), and [`ApiMisuse::Rank`].
    pub unsafe fn gather_raw(
        self,
        stream: &B::Stream,
        input: u64,
        output: u64,
        bytes: usize,
        root: usize,
    ) -> Result<()> {
        let parts = self.equal(bytes, 1)?;
        let input = self.raw_span("input", input, bytes as u64, None)?;
        let at_root = self.comm.rank == root;
        let output = at_root.then(|| self.raw_span("output", output, parts.total(), None)).transpose()?;
        // SAFETY: passed on to the caller.
        unsafe { self.launch_rooted(stream, Collective::Gather, (output, input), &parts, root) }
    }

    /// See [`Communicator::all_to_all`](crate::Communicator::all_to_all).
    ///
    /// # Errors
    /// As there.
    pub fn all_to_all<'a, T: Pod>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
    ) -> Result<()> {
        let (input, output) = (input.into(), output.into());
        if input.len() != output.len() {
            return Err(ApiMisuse::Length { input: input.len(), output: output.len() }.into());
        }
        let parts = self.equal(self.part("input", input.len())?, size_of::<T>())?;
        let spans = [self.span("input", input)?, self.span("output", output.as_slice())?];
        // SAFETY: slices lie within buffers of this device, which the spans keep alive; the output is borrowed exclusively.
        unsafe { self.launch_all_to_all(stream, spans, &parts) }
    }

    /// See [`Communicator::all_to_all_in_place`](crate::Communicator::all_to_all_in_place).
    ///
    /// # Errors
    /// As there.
    pub fn all_to_all_in_place<'a, T: Pod>(
        self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
    ) -> Result<()> {
        let buffer = buffer.into();
        let parts = self.equal(self.part("buffer", buffer.len())?, size_of::<T>())?;
        let spans = [self.span("buffer", buffer.as_slice())?, self.span("buffer", buffer.as_slice())?];
        // SAFETY: the slice lies within a buffer of this device, which the spans keep alive, and is borrowed exclusively.
        unsafe { self.launch_all_to_all(stream, spans, &parts) }
    }

    /// See [`Communicator::all_to_all_ragged`](crate::Communicator::all_to_all_ragged).
    ///
    /// # Errors
    /// As there.
    pub fn all_to_all_ragged<'a, T: Pod>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        counts: &[usize],
    ) -> Result<()> {
        let (input, output, world) = (input.into(), output.into(), self.comm.world_size());
        if counts.len() != world * world {
            return Err(ApiMisuse::Counts { found: counts.len(), world }.into());
        }
        let rank = self.comm.rank;
        let sent = Parts::new(counts[rank * world..].iter().take(world).copied(), size_of::<T>())?;
        let received = Parts::new(counts[rank..].iter().step_by(world).copied(), size_of::<T>())?;
        sent.check("input", input.len(), size_of::<T>())?;
        received.check("output", output.len(), size_of::<T>())?;
        let spans = [self.span("input", input)?, self.span("output", output.as_slice())?];
        // The largest of any rank, so that all have one grid. Other ranks' counts may be anything.
        let largest = byte_count(counts.iter().copied().max().unwrap_or(0), size_of::<T>())?;
        let load = Load { bytes: largest.saturating_mul(world as u64), largest };
        let amount = Amount::Ragged(hash_of(counts.iter().copied(), size_of::<T>()));
        // SAFETY: slices lie within buffers of this device, which the spans keep alive; the output is borrowed exclusively.
        unsafe { self.launch_all_to_all_of(stream, spans, [&sent, &received], amount, load) }
    }

    fn reduce_scatter_slices<T: Element>(
        self,
        stream: &B::Stream,
        input: Slice<'_, B, T>,
        output: Slice<'_, B, T>,
        parts: &Parts,
        op: ReduceOp,
    ) -> Result<()> {
        parts.check("input", input.len(), size_of::<T>())?;
        parts.check_one("output", output.len(), size_of::<T>(), self.comm.rank)?;
        let spans = [self.span("input", input)?, self.span("output", output)?];
        // SAFETY: slices lie within buffers of this device, which the spans keep alive; the output is borrowed exclusively.
        unsafe { self.launch_reduce_scatter(stream, spans, parts, (op, T::DTYPE)) }
    }

    fn all_gather_slices<T: Pod>(
        self,
        stream: &B::Stream,
        input: Slice<'_, B, T>,
        output: Slice<'_, B, T>,
        parts: &Parts,
    ) -> Result<()> {
        parts.check("output", output.len(), size_of::<T>())?;
        parts.check_one("input", input.len(), size_of::<T>(), self.comm.rank)?;
        let spans = [self.span("input", input)?, self.span("output", output)?];
        // SAFETY: slices lie within buffers of this device, which the spans keep alive; the output is borrowed exclusively.
        unsafe { self.launch_all_gather(stream, spans, parts) }
    }

    /// # Safety
    /// As [`launch_exchange`](Self::launch_exchange), for an input with a part for each rank, and an output of this rank's part.
    pub(super) unsafe fn launch_reduce_scatter(
        self,
        stream: &B::Stream,
        spans: [Span<B>; 2],
        parts: &Parts,
        reduction: (ReduceOp, Dtype),
    ) -> Result<()> {
        let rank = self.comm.rank;
        let [input, output] = &spans;
        input.check_apart(output, |input, output| output == input + parts.start(rank))?;
        let amount = parts.amount(|bytes| Amount::Elements(bytes / reduction.1.bytes(), reduction.1, reduction.0));
        let exchange = Exchange {
            collective: Collective::ReduceScatter,
            root: 0,
            send: self.pieces(|peer| Piece::of(input, parts.start(peer), parts.of(peer))),
            receive: self.pieces(|_| Piece::of(output, 0, parts.of(rank))),
            one_for_all: false,
            in_place: false,
            reduction: Some(reduction),
            load: parts.load(),
            amount,
            counts: None,
            spans: &spans,
        };
        // SAFETY: passed on to the caller.
        unsafe { self.launch_exchange(stream, &exchange) }
    }

    /// # Safety
    /// As [`launch_exchange`](Self::launch_exchange), for operands of equal length.
    unsafe fn launch_reduce(
        self,
        stream: &B::Stream,
        input: Span<B>,
        output: Option<Span<B>>,
        root: usize,
        reduction: (ReduceOp, Dtype),
    ) -> Result<()> {
        let at_root = self.check_root(Collective::Reduce, root, ("output", output.is_some()))?;
        let bytes = input.bytes;
        if let Some(output) = output.as_ref().filter(|_| at_root) {
            input.check_apart(output, |input, output| input == output)?;
        }
        let spans: Vec<_> = [Some(input), output].into_iter().flatten().collect();
        let to_root = |peer: usize| if peer == root { Piece::of(&spans[0], 0, bytes) } else { Piece::NONE };
        let result = spans.get(1).filter(|_| at_root);
        let exchange = Exchange {
            collective: Collective::Reduce,
            root,
            send: self.pieces(to_root),
            receive: self.pieces(|_| result.map_or(Piece::NONE, |output| Piece::of(output, 0, bytes))),
            one_for_all: true,
            in_place: false,
            reduction: Some(reduction),
            load: Load { bytes, largest: bytes },
            amount: Amount::Elements(bytes as usize / reduction.1.bytes(), reduction.1, reduction.0),
            counts: None,
            spans: &spans,
        };
        // SAFETY: passed on to the caller.
        unsafe { self.launch_exchange(stream, &exchange) }
    }

    /// # Safety
    /// As [`launch_exchange`](Self::launch_exchange), for an input of this rank's part and an output with all.
    pub(super) unsafe fn launch_all_gather(self, stream: &B::Stream, spans: [Span<B>; 2], parts: &Parts) -> Result<()> {
        let rank = self.comm.rank;
        let [input, output] = &spans;
        input.check_apart(output, |input, output| input == output + parts.start(rank))?;
        let exchange = Exchange {
            collective: Collective::AllGather,
            root: 0,
            send: self.pieces(|_| Piece::of(input, 0, parts.of(rank))),
            receive: self.pieces(|peer| Piece::of(output, parts.start(peer), parts.of(peer))),
            one_for_all: true,
            in_place: false,
            reduction: None,
            load: parts.load(),
            amount: parts.amount(|bytes| Amount::Bytes(bytes as u64)),
            counts: None,
            spans: &spans,
        };
        // SAFETY: passed on to the caller.
        unsafe { self.launch_exchange(stream, &exchange) }
    }

    /// # Safety
    /// As [`launch_exchange`](Self::launch_exchange).
    unsafe fn launch_broadcast(self, stream: &B::Stream, buffer: Span<B>, root: usize) -> Result<()> {
        let at_root = self.check_root(Collective::Broadcast, root, ("buffer", true))?;
        let spans = [buffer];
        let whole = Piece::of(&spans[0], 0, spans[0].bytes);
        let exchange = Exchange {
            collective: Collective::Broadcast,
            root,
            send: self.pieces(|peer| if at_root && peer != root { whole } else { Piece::NONE }),
            receive: self.pieces(|peer| if peer == root && !at_root { whole } else { Piece::NONE }),
            one_for_all: true,
            in_place: false,
            reduction: None,
            load: Load { bytes: whole.bytes, largest: whole.bytes },
            amount: Amount::Bytes(whole.bytes),
            counts: None,
            spans: &spans,
        };
        // SAFETY: passed on to the caller.
        unsafe { self.launch_exchange(stream, &exchange) }
    }

    /// A scatter, or a gather.
    ///
    /// # Safety
    /// As [`launch_exchange`](Self::launch_exchange), for this rank's part, and on the root for all of them.
    unsafe fn launch_rooted(
        self,
        stream: &B::Stream,
        collective: Collective,
        (all, part): (Option<Span<B>>, Span<B>),
        parts: &Parts,
        root: usize,
    ) -> Result<()> {
        let scatters = collective == Collective::Scatter;
        let what = if scatters { "input" } else { "output" };
        let at_root = self.check_root(collective, root, (what, all.is_some()))?;
        let all = all.filter(|_| at_root);
        if let Some(all) = &all {
            let (input, output) = if scatters { (all, &part) } else { (&part, all) };
            input.check_apart(output, |_, _| part.address == all.address + parts.start(root))?;
        }
        let spans: Vec<_> = [Some(part), all].into_iter().flatten().collect();
        let of_root =
            |peer: usize| if at_root { Piece::of(&spans[1], parts.start(peer), parts.of(peer)) } else { Piece::NONE };
        let of_all =
            |peer: usize| if peer == root { Piece::of(&spans[0], 0, parts.of(self.comm.rank)) } else { Piece::NONE };
        let (of_root, of_all) = (self.pieces(of_root), self.pieces(of_all));
        let (send, receive) = if scatters { (of_root, of_all) } else { (of_all, of_root) };
        let exchange = Exchange {
            collective,
            root,
            send,
            receive,
            one_for_all: !scatters,
            in_place: false,
            reduction: None,
            load: parts.load(),
            amount: parts.amount(|bytes| Amount::Bytes(bytes as u64)),
            counts: None,
            spans: &spans,
        };
        // SAFETY: passed on to the caller.
        unsafe { self.launch_exchange(stream, &exchange) }
    }

    /// The raw layer of [`all_to_all`](Self::all_to_all), with `bytes` bytes for each rank; in place if `input` is `output`.
    ///
    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw), with operands of world size x `bytes`.
    ///
    /// # Errors
    /// As [`all_reduce_raw`](Self::all_reduce_raw).
    pub unsafe fn all_to_all_raw(self, stream: &B::Stream, input: u64, output: u64, bytes: usize) -> Result<()> {
        let parts = self.equal(bytes, 1)?;
        let input = self.raw_span("input", input, parts.total(), None)?;
        let output = self.raw_span("output", output, parts.total(), None)?;
        // SAFETY: passed on to the caller.
        unsafe { self.launch_all_to_all(stream, [input, output], &parts) }
    }

    /// # Safety
    /// As [`launch_exchange`](Self::launch_exchange), for operands with equal parts.
    unsafe fn launch_all_to_all(self, stream: &B::Stream, spans: [Span<B>; 2], parts: &Parts) -> Result<()> {
        let amount = Amount::Bytes(parts.of(0));
        // SAFETY: passed on to the caller.
        unsafe { self.launch_all_to_all_of(stream, spans, [parts, parts], amount, parts.load()) }
    }

    /// # Safety
    /// As [`launch_exchange`](Self::launch_exchange), for an input with the parts to send and an output with those to receive.
    unsafe fn launch_all_to_all_of(
        self,
        stream: &B::Stream,
        spans: [Span<B>; 2],
        [sent, received]: [&Parts; 2],
        amount: Amount,
        load: Load,
    ) -> Result<()> {
        let [input, output] = &spans;
        let in_place = input.address == output.address;
        // Pieces of one size lie at one place in both.
        let equal = matches!(amount, Amount::Bytes(_));
        input.check_apart(output, |input, output| equal && input == output)?;
        let exchange = Exchange {
            collective: Collective::AllToAll,
            root: 0,
            send: self.pieces(|peer| Piece::of(input, sent.start(peer), sent.of(peer))),
            receive: self.pieces(|peer| Piece::of(output, received.start(peer), received.of(peer))),
            one_for_all: false,
            in_place,
            reduction: None,
            load,
            amount,
            counts: None,
            spans: &spans,
        };
        // SAFETY: passed on to the caller.
        unsafe { self.launch_exchange(stream, &exchange) }
    }

    /// A piece for each rank of the group.
    pub(super) fn pieces<'p>(&self, piece: impl Fn(usize) -> Piece<'p, B>) -> Pieces<'p, B> {
        std::array::from_fn(|peer| if peer < self.comm.world_size() { piece(peer) } else { Piece::NONE })
    }

    /// A rank's part of `len` elements.
    pub(super) fn part(&self, what: &'static str, len: usize) -> Result<usize> {
        let world = self.comm.world_size();
        let part = len / world;
        self.check_parts(what, len, part)?;
        Ok(part)
    }

    fn check_parts(&self, what: &'static str, found: usize, part: usize) -> Result<()> {
        let parts = self.comm.world_size();
        let expected = part.saturating_mul(parts);
        Ok(check_len(what, found, expected, (parts, part))?)
    }

    /// Equal parts of `count` elements of `size` bytes.
    pub(super) fn equal(&self, count: usize, size: usize) -> Result<Parts> {
        Parts::new(std::iter::repeat_n(count, self.comm.world_size()), size)
    }

    fn ragged(&self, counts: &[usize], size: usize) -> Result<Parts> {
        let world = self.comm.world_size();
        if counts.len() != world {
            return Err(ApiMisuse::Counts { found: counts.len(), world }.into());
        }
        Parts::new(counts.iter().copied(), size)
    }

    /// Whether this rank is the root, which must bring what it alone needs.
    fn check_root(&self, collective: Collective, root: usize, (what, given): (&'static str, bool)) -> Result<bool> {
        let rank = self.comm.rank;
        check_rank(root, self.comm.world_size())?;
        if rank == root && !given {
            return Err(ApiMisuse::NoBuffer { collective, rank, what }.into());
        }
        Ok(rank == root)
    }
}

/// How an operand is divided among the ranks, in bytes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    starts: [u64; MAX_GPUS],
    bytes: [u64; MAX_GPUS],
    equal: bool,
}

impl Parts {
    fn new(counts: impl Iterator<Item = usize>, size: usize) -> Result<Self> {
        let mut parts = Parts { starts: [0; MAX_GPUS], bytes: [0; MAX_GPUS], equal: true };
        let (mut total, mut first) = (0u64, None);
        for (rank, count) in counts.take(MAX_GPUS).enumerate() {
            let bytes = byte_count(count, size)?;
            (parts.starts[rank], parts.bytes[rank]) = (total, bytes);
            parts.equal &= *first.get_or_insert(bytes) == bytes;
            let too_large = ApiMisuse::TooLarge { count, element_bytes: size };
            total = total.checked_add(bytes).filter(|total| *total <= isize::MAX as u64).ok_or(too_large)?;
        }
        Ok(parts)
    }

    pub(super) fn start(&self, rank: usize) -> u64 {
        self.starts[rank]
    }

    pub(super) fn of(&self, rank: usize) -> u64 {
        self.bytes[rank]
    }

    pub(super) fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }

    pub(super) fn load(&self) -> Load {
        Load { bytes: self.total(), largest: self.bytes.into_iter().max().unwrap_or(0) }
    }

    /// Refuses an operand that does not hold all of them.
    fn check(&self, what: &'static str, found: usize, size: usize) -> Result<()> {
        let expected = self.total() as usize / size.max(1);
        let parts = self.bytes.iter().filter(|bytes| **bytes > 0).count();
        Ok(check_len(what, found, expected, (parts, expected / parts.max(1)))?)
    }

    /// Refuses an operand that does not hold the part of `rank`.
    fn check_one(&self, what: &'static str, found: usize, size: usize, rank: usize) -> Result<()> {
        let expected = self.of(rank) as usize / size.max(1);
        Ok(check_len(what, found, expected, (1, expected))?)
    }

    /// What is compared of them: the bytes of a part, or a hash of all.
    fn amount(&self, equal: impl Fn(usize) -> Amount) -> Amount {
        if self.equal {
            equal(self.bytes[0] as usize)
        } else {
            Amount::Ragged(hash_of(self.bytes.map(|bytes| bytes as usize), 1))
        }
    }
}

fn hash_of(counts: impl IntoIterator<Item = usize>, size: usize) -> u64 {
    plan::fnv(counts.into_iter().flat_map(|count| ((count * size) as u64).to_le_bytes()))
}

fn byte_count(count: usize, size: usize) -> Result<u64> {
    let too_large = ApiMisuse::TooLarge { count, element_bytes: size };
    let bytes = count.checked_mul(size).filter(|bytes| *bytes <= isize::MAX as usize);
    bytes.map(|bytes| bytes as u64).ok_or(too_large.into())
}
