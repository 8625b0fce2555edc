//! The all-to-all whose sizes are on the device, for graphs that are captured before anybody knows them.

use bytemuck::Pod;

use crate::backend::Backend;
use crate::buffer::{Slice, SliceMut};
use crate::collective::Collective;
use crate::error::{ApiMisuse, Result};
use crate::kernel::Algorithm;

use super::call::Call;
use super::check::Amount;
use super::exchange::{Counts, Exchange, Piece};
use super::span::Span;

impl<B: Backend> Call<'_, B> {
    /// See [`Communicator::all_to_all_counted`](crate::Communicator::all_to_all_counted).
    ///
    /// # Errors
    /// As there.
    pub fn all_to_all_counted<'a, T: Pod>(
        self,
        stream: &B::Stream,
        input: impl Into<Slice<'a, B, T>>,
        counts: impl Into<Slice<'a, B, u32>>,
        output: impl Into<SliceMut<'a, B, T>>,
        received_counts: impl Into<SliceMut<'a, B, u32>>,
    ) -> Result<()> {
        let (input, counts) = (input.into(), counts.into());
        let (output, received_counts) = (output.into(), received_counts.into());
        if input.len() != output.len() {
            return Err(ApiMisuse::Length { input: input.len(), output: output.len() }.into());
        }
        let world = self.comm.world_size();
        for found in [counts.len(), received_counts.len()] {
            if found != world {
                return Err(ApiMisuse::Counts { found, world }.into());
            }
        }
        let capacity = self.part("input", input.len())?;
        let spans = [
            self.span("input", input)?,
            self.span("output", output.as_slice())?,
            self.span("counts", counts)?,
            self.span("received_counts", received_counts.as_slice())?,
        ];
        // SAFETY: slices lie within buffers of this device, which the spans keep alive; output and received counts are borrowed
        // exclusively.
        unsafe { self.launch_counted(stream, &spans, capacity, size_of::<T>()) }
    }

    /// The raw layer of [`all_to_all_counted`](Self::all_to_all_counted): `input` and `output` have room for `capacity` elements of
    /// `element_bytes` bytes for each rank.
    ///
    /// # Safety
    /// As [`all_reduce_raw`](Self::all_reduce_raw), with operands of world size x `capacity` elements, and counts of world size u32.
    ///
    /// # Errors
    /// As [`all_reduce_raw`](Self::all_reduce_raw), and [`ApiMisuse::NoRoom`].
    #[expect(clippy::too_many_arguments, reason = "two operands, and their counts and sizes")]
    pub unsafe fn all_to_all_counted_raw(
        self,
        stream: &B::Stream,
        input: u64,
        counts: u64,
        output: u64,
        received_counts: u64,
        capacity: usize,
        element_bytes: usize,
    ) -> Result<()> {
        use crate::dtype::Dtype::U32;

        let bytes = self.equal(capacity, element_bytes)?.total();
        let of_counts = 4 * self.comm.world_size() as u64;
        let spans = [
            self.raw_span("input", input, bytes, None)?,
            self.raw_span("output", output, bytes, None)?,
            self.raw_span("counts", counts, of_counts, Some(U32))?,
            self.raw_span("received_counts", received_counts, of_counts, Some(U32))?,
        ];
        // SAFETY: passed on to the caller.
        unsafe { self.launch_counted(stream, &spans, capacity, element_bytes) }
    }

    /// # Safety
    /// As [`launch_exchange`](Self::launch_exchange), for input, output, counts and received counts.
    unsafe fn launch_counted(
        mut self,
        stream: &B::Stream,
        spans: &[Span<B>; 4],
        capacity: usize,
        element_bytes: usize,
    ) -> Result<()> {
        let [input, output, counts, received] = spans;
        let parts = self.equal(capacity, element_bytes)?;
        if parts.total() == 0 {
            return Err(ApiMisuse::NoRoom.into());
        }
        for (read, written) in
            [(input, output), (input, received), (counts, output), (counts, received), (output, received)]
        {
            read.check_apart(written, |_, _| false)?;
        }
        // Lines are read by who knows how many there are.
        let algorithm = *self.options.algorithm.get_or_insert(Algorithm::Pull);
        if algorithm != Algorithm::Pull {
            return Err(ApiMisuse::Algorithm { collective: Collective::AllToAll, algorithm }.into());
        }
        let exchange = Exchange {
            collective: Collective::AllToAll,
            root: 0,
            send: self.pieces(|peer| Piece::of(input, parts.start(peer), parts.of(peer))),
            receive: self.pieces(|peer| Piece::of(output, parts.start(peer), parts.of(peer))),
            one_for_all: false,
            in_place: false,
            reduction: None,
            load: parts.load(),
            amount: Amount::Counted(capacity as u64, element_bytes as u64),
            counts: Some(Counts { sent: counts.address, received: received.address, element_bytes }),
            spans,
        };
        // SAFETY: passed on to the caller.
        unsafe { self.launch_exchange(stream, &exchange) }
    }
}
