//! The collectives as methods of a communicator: what each does. With options of their own they are methods of
//! [`Call`](super::Call).

use bytemuck::Pod;

use crate::backend::Backend;
use crate::buffer::{Slice, SliceMut};
use crate::dtype::{Element, ReduceOp};
use crate::error::Result;

use super::domain::callers;
use super::{CallOptions, Transfers};

callers! {
/// Data moves bit by bit, whatever its type. Reductions have the same bits wherever they are computed: those of an all-reduce.
///
/// Input and output do not overlap, but for the forms in place. A rank's data lies in memory of its own device; what lies in
/// [symmetric memory](crate::Communicator::alloc) is read by peers in place, and all else is staged.
impl<B: Backend> Communicator<B> {
    /// Enqueues an all-reduce: `output` becomes the reduction of all ranks' `input`, with the same bits on every rank.
    ///
    /// # Errors
    /// [`ApiMisuse`](crate::ApiMisuse) before anything is enqueued; [`Error::Timeout`](crate::Error::Timeout),
    /// [`Error::Aborted`](crate::Error::Aborted) or [`Error::Poisoned`](crate::Error::Poisoned) of an earlier call; errors of the driver.
    pub fn all_reduce<'a, T: Element>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_reduce(stream, input, output, op)
    }

    /// Enqueues an all-reduce that overwrites its input.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_in_place<'a, T: Element>(
        &mut self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_reduce_in_place(stream, buffer, op)
    }

    /// Enqueues a barrier: work behind it on any rank's stream starts after the work before it on every rank's.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce).
    pub fn barrier(&mut self, stream: &B::Stream) -> Result<()> {
        self.with(CallOptions::default()).barrier(stream)
    }

    /// Enqueues a reduce-scatter: `output` becomes this rank's part of the reduction of all ranks' `input`, which holds a part for
    /// each rank, one behind the other.
    ///
    /// # Errors
    /// As [`all_reduce`](Self::all_reduce), and [`Error::RankMismatch`](crate::Error::RankMismatch) of an earlier call.
    pub fn reduce_scatter<'a, T: Element>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.with(CallOptions::default()).reduce_scatter(stream, input, output, op)
    }

    /// A reduce-scatter whose result replaces this rank's part of its input.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    pub fn reduce_scatter_in_place<'a, T: Element>(
        &mut self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
        op: ReduceOp,
    ) -> Result<()> {
        self.with(CallOptions::default()).reduce_scatter_in_place(stream, buffer, op)
    }

    /// A reduce-scatter with parts of `counts[r]` elements for each rank r, which may be 0.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter), and [`ApiMisuse::Counts`](crate::ApiMisuse::Counts).
    pub fn reduce_scatter_ragged<'a, T: Element>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        counts: &[usize],
        op: ReduceOp,
    ) -> Result<()> {
        self.with(CallOptions::default()).reduce_scatter_ragged(stream, input, output, counts, op)
    }

    /// Enqueues a reduction to one rank: `output`, which the root alone must bring, becomes the reduction of all ranks' `input`.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter), and [`ApiMisuse::Rank`](crate::ApiMisuse::Rank),
    /// [`ApiMisuse::NoBuffer`](crate::ApiMisuse::NoBuffer).
    pub fn reduce<'a, T: Element>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: Option<SliceMut<'a, B, T>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        self.with(CallOptions::default()).reduce(stream, input, output, op, root)
    }

    /// A reduction to one rank that overwrites the root's input; the others' stay as they are.
    ///
    /// # Errors
    /// As [`reduce`](Self::reduce).
    pub fn reduce_in_place<'a, T: Element>(
        &mut self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
        op: ReduceOp,
        root: usize,
    ) -> Result<()> {
        self.with(CallOptions::default()).reduce_in_place(stream, buffer, op, root)
    }

    /// Enqueues an all-gather: `output` becomes all ranks' `input`, one behind the other.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    pub fn all_gather<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_gather(stream, input, output)
    }

    /// An all-gather in which this rank's part of `buffer` is its input.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    pub fn all_gather_in_place<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_gather_in_place(stream, buffer)
    }

    /// An all-gather with `counts[r]` elements of each rank r, which may be 0.
    ///
    /// # Errors
    /// As [`reduce_scatter_ragged`](Self::reduce_scatter_ragged).
    pub fn all_gather_ragged<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        counts: &[usize],
    ) -> Result<()> {
        self.with(CallOptions::default()).all_gather_ragged(stream, input, output, counts)
    }

    /// Enqueues a broadcast: every rank's `buffer` becomes what the root's is.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter), and [`ApiMisuse::Rank`](crate::ApiMisuse::Rank).
    pub fn broadcast<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
        root: usize,
    ) -> Result<()> {
        self.with(CallOptions::default()).broadcast(stream, buffer, root)
    }

    /// Enqueues a scatter: `output` becomes this rank's part of the root's `input`, which the root alone must bring.
    ///
    /// # Errors
    /// As [`reduce`](Self::reduce).
    pub fn scatter<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        input: Option<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        root: usize,
    ) -> Result<()> {
        self.with(CallOptions::default()).scatter(stream, input, output, root)
    }

    /// Enqueues a gather: `output`, which the root alone must bring, becomes all ranks' `input`, one behind the other.
    ///
    /// # Errors
    /// As [`reduce`](Self::reduce).
    pub fn gather<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: Option<SliceMut<'a, B, T>>,
        root: usize,
    ) -> Result<()> {
        self.with(CallOptions::default()).gather(stream, input, output, root)
    }

    /// Enqueues an all-to-all: `output` becomes this rank's part of every rank's `input`, one behind the other.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    pub fn all_to_all<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_to_all(stream, input, output)
    }

    /// An all-to-all that overwrites its input.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter).
    pub fn all_to_all_in_place<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        buffer: impl Into<SliceMut<'a, B, T>>,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_to_all_in_place(stream, buffer)
    }

    /// An all-to-all in which rank s has `counts[s * world_size + r]` elements for rank r, which may be 0. Every rank brings all
    /// counts. `input` holds this rank's parts and `output` those for it, one behind the other.
    ///
    /// # Errors
    /// As [`reduce_scatter_ragged`](Self::reduce_scatter_ragged).
    pub fn all_to_all_ragged<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        output: impl Into<SliceMut<'a, B, T>>,
        counts: &[usize],
    ) -> Result<()> {
        self.with(CallOptions::default()).all_to_all_ragged(stream, input, output, counts)
    }

    /// An all-to-all whose sizes are on the device, for graphs that are captured before anybody knows them, as an expert-parallel
    /// dispatch: this rank has `counts[r]` elements for rank r. `input` and `output` have room for as many elements for each rank, one
    /// room behind the other, the same on all ranks; of each room of `output` only as many elements are written as came.
    /// `received_counts[r]` becomes the elements that rank r has for this one. A count that is larger than the room is delivered as it is,
    /// and the room's elements are moved.
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter), and [`ApiMisuse::NoRoom`](crate::ApiMisuse::NoRoom).
    pub fn all_to_all_counted<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        counts: impl Into<Slice<'a, B, u32>>,
        output: impl Into<SliceMut<'a, B, T>>,
        received_counts: impl Into<SliceMut<'a, B, u32>>,
    ) -> Result<()> {
        self.with(CallOptions::default()).all_to_all_counted(stream, input, counts, output, received_counts)
    }

    /// Enqueues a send of `input` to rank `to`, which makes the matching [`receive`](Self::receive). As the input may be overwritten
    /// once it has finished, it waits for that: two ranks that send to each other use [`send_receive`](Self::send_receive), or
    /// [`transfers`](Self::transfers).
    ///
    /// # Errors
    /// As [`reduce_scatter`](Self::reduce_scatter), and [`ApiMisuse::Rank`](crate::ApiMisuse::Rank).
    pub fn send<'a, T: Pod>(&mut self, stream: &B::Stream, input: impl Into<Slice<'a, B, T>>, to: usize) -> Result<()> {
        let input = input.into();
        self.transfers().send(input, to)?.launch(stream)
    }

    /// Enqueues a receive into `output` of what rank `from` sends, which has as many bytes.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn receive<'a, T: Pod>(
        &mut self,
        stream: &B::Stream,
        output: impl Into<SliceMut<'a, B, T>>,
        from: usize,
    ) -> Result<()> {
        let output = output.into();
        self.transfers().receive(output, from)?.launch(stream)
    }

    /// Enqueues both, as one launch: a send of `input` to rank `to`, and a receive into `output` from rank `from`.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_receive<'a, T: Pod, U: Pod>(
        &mut self,
        stream: &B::Stream,
        (input, to): (impl Into<Slice<'a, B, T>>, usize),
        (output, from): (impl Into<SliceMut<'a, B, U>>, usize),
    ) -> Result<()> {
        let (input, output) = (input.into(), output.into());
        self.transfers().send(input, to)?.receive(output, from)?.launch(stream)
    }

    /// Sends and receives that are launched together.
    pub fn transfers(&mut self) -> Transfers<'_, B> {
        self.with(CallOptions::default()).transfers()
    }
}
}
