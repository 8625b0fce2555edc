//! Sends and receives.

use bytemuck::Pod;

use crate::backend::Backend;
use crate::buffer::{Slice, SliceMut};
use crate::collective::Collective;
use crate::error::{ApiMisuse, Result};
use crate::layout::MAX_GPUS;
use crate::plan::Load;
use crate::signal::check_rank;

use super::call::Call;
use super::check::Amount;
use super::exchange::{Exchange, Piece};
use super::span::{Span, check_len};

/// Sends and receives that are launched together, as one kernel: at most one each way between this rank and any other, or itself.
/// Made by [`Communicator::transfers`](crate::Communicator::transfers).
///
/// Their order does not matter: two ranks that both send first do not wait for each other. What a pair of ranks sends and receives,
/// each way, both must put into one launch, or neither: a send meets its receive in the peer's next launch that has any business
/// with this rank.
#[derive(Debug)]
#[must_use = "nothing moves until it is launched"]
pub struct Transfers<'c, B: Backend> {
    call: Call<'c, B>,
    /// By peer.
    sends: [Option<Span<B>>; MAX_GPUS],
    receives: [Option<Span<B>>; MAX_GPUS],
}

impl<'c, B: Backend> Transfers<'c, B> {
    fn new(call: Call<'c, B>) -> Self {
        Transfers { call, sends: Default::default(), receives: Default::default() }
    }

    /// Adds a send of `input` to rank `to`, bit by bit. `to` receives as many bytes.
    ///
    /// # Errors
    /// [`ApiMisuse::Rank`], [`ApiMisuse::SecondTransfer`], [`ApiMisuse::WrongDevice`].
    pub fn send<'a, T: Pod>(mut self, input: impl Into<Slice<'a, B, T>>, to: usize) -> Result<Self>
    where
        'a: 'c,
    {
        let span = self.call.span("input", input.into())?;
        self.add_send(span, to)?;
        Ok(self)
    }

    /// Adds a receive into `output` of what rank `from` sends, which has as many bytes.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn receive<'a, T: Pod>(mut self, output: impl Into<SliceMut<'a, B, T>>, from: usize) -> Result<Self>
    where
        'a: 'c,
    {
        let span = self.call.span("output", output.into().as_slice())?;
        self.add_receive(span, from)?;
        Ok(self)
    }

    /// The raw layer of [`send`](Self::send).
    ///
    /// # Safety
    /// As [`Call::all_reduce_raw`], until the launch has finished on its stream.
    ///
    /// # Errors
    /// As [`send`](Self::send), and [`ApiMisuse::NullPointer`].
    pub unsafe fn send_raw(mut self, input: u64, bytes: usize, to: usize) -> Result<Self> {
        let span = self.call.raw_span("input", input, bytes as u64, None)?;
        self.add_send(span, to)?;
        Ok(self)
    }

    /// The raw layer of [`receive`](Self::receive).
    ///
    /// # Safety
    /// As [`Call::all_reduce_raw`], until the launch has finished on its stream.
    ///
    /// # Errors
    /// As [`send`](Self::send), and [`ApiMisuse::NullPointer`].
    pub unsafe fn receive_raw(mut self, output: u64, bytes: usize, from: usize) -> Result<Self> {
        let span = self.call.raw_span("output", output, bytes as u64, None)?;
        self.add_receive(span, from)?;
        Ok(self)
    }

    fn add_send(&mut self, span: Span<B>, to: usize) -> Result<()> {
        check_rank(to, self.call.comm.world_size())?;
        put(&mut self.sends[to], span, ("send", to))
    }

    fn add_receive(&mut self, span: Span<B>, from: usize) -> Result<()> {
        check_rank(from, self.call.comm.world_size())?;
        put(&mut self.receives[from], span, ("receive", from))
    }

    /// Enqueues all of them. Nothing to send and nothing to receive is Ok, and launches nothing.
    ///
    /// # Errors
    /// [`ApiMisuse::Overlap`]; [`ApiMisuse::Parts`] where this rank sends itself another length than it receives; as
    /// [`Communicator::all_reduce`](crate::Communicator::all_reduce).
    pub fn launch(self, stream: &B::Stream) -> Result<()> {
        let Transfers { call, sends, receives } = self;
        let rank = call.comm.rank;
        let bytes_of = |span: &Option<Span<B>>| span.as_ref().map_or(0, |span| span.bytes);
        let (sent, received) = (bytes_of(&sends[rank]), bytes_of(&receives[rank]));
        check_len("output", received as usize, sent as usize, (1, sent as usize))?;
        let written: Vec<&Span<B>> = receives.iter().flatten().collect();
        for (at, output) in written.iter().enumerate() {
            for other in sends.iter().flatten().chain(written[..at].iter().copied()) {
                other.check_apart(output, |_, _| false)?;
            }
        }
        // In one list, of which the pieces borrow.
        let is_send = sends.each_ref().map(Option::is_some);
        let is_receive = receives.each_ref().map(Option::is_some);
        let spans: Vec<Span<B>> = sends.into_iter().chain(receives).flatten().collect();
        let mut all = spans.iter();
        let mut piece = |given: bool| {
            let span = if given { all.next() } else { None };
            span.map_or(Piece::NONE, |span| Piece::of(span, 0, span.bytes))
        };
        let (send, receive) = (is_send.map(&mut piece), is_receive.map(&mut piece));
        let largest = send.iter().chain(&receive).map(|piece| piece.bytes).max().unwrap_or(0);
        let exchange = Exchange {
            collective: Collective::SendRecv,
            root: 0,
            send,
            receive,
            one_for_all: false,
            in_place: false,
            reduction: None,
            load: Load { bytes: largest, largest },
            amount: Amount::Bytes(0),
            counts: None,
            spans: &spans,
        };
        // SAFETY: slices lie within buffers of this device, which the spans keep alive and which the calls that added them have
        // borrowed for as long as this value; of raw spans the callers answer for that.
        unsafe { call.launch_exchange(stream, &exchange) }
    }
}

fn put<B: Backend>(place: &mut Option<Span<B>>, span: Span<B>, (what, peer): (&'static str, usize)) -> Result<()> {
    if place.is_some() {
        return Err(ApiMisuse::SecondTransfer { what, peer }.into());
    }
    *place = Some(span);
    Ok(())
}

impl<'c, B: Backend> Call<'c, B> {
    /// See [`Communicator::transfers`](crate::Communicator::transfers).
    pub fn transfers(self) -> Transfers<'c, B> {
        Transfers::new(self)
    }
}
