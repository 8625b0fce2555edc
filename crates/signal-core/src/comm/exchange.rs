//! Collectives in which each rank has a piece of data for each rank: what they share on the host.

use std::mem::offset_of;
use std::sync::Arc;

use bytemuck::bytes_of;

use crate::backend::Backend;
use crate::collective::Collective;
use crate::dtype::{Dtype, ReduceOp};
use crate::error::{ApiMisuse, Result};
use crate::kernel::{
    Algorithm, CountedParams, ExchangeParams, FLAG_PUSH, FLAG_STAGED, FLAG_WHOLE, FastSum, Kernel, Operation,
};
use crate::layout::{CONTROL_OFFSET, Control, LINE_BANKS_BYTES, MAX_GPUS};
use crate::plan::{self, LINE_DATA_BYTES, Load, Plan};

use super::Symmetric;
use super::call::{ALL_RANKS, Call, Work};
use super::check::{Amount, Description};
use super::span::Span;

/// Addresses of data are below it: a kernel sends a seal in the bits above.
const MOST_ADDRESS: u64 = 1 << 50;
/// What fits those bits.
const SEALS: u64 = 1 << 11;
/// Windows are a multiple of it, the GPUs' cache line, so that staged pieces do not meet in one.
const LINE: u64 = 128;

/// Data of this rank for some rank, or of some rank for this one.
#[derive(Debug)]
pub(super) struct Piece<'a, B: Backend> {
    pub(super) address: u64,
    pub(super) bytes: u64,
    /// The symmetric buffer that it lies in, if any.
    pub(super) symmetric: Option<&'a Arc<Symmetric<B>>>,
}

impl<B: Backend> Clone for Piece<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Piece<'_, B> {}

impl<'a, B: Backend> Piece<'a, B> {
    pub(super) const NONE: Self = Piece { address: 0, bytes: 0, symmetric: None };

    /// `bytes` bytes of a span, from byte `start` on.
    pub(super) fn of(span: &'a Span<B>, start: u64, bytes: u64) -> Self {
        Piece { address: span.address + start, bytes, symmetric: span.symmetric.as_ref() }
    }
}

/// A piece for each rank.
pub(super) type Pieces<'a, B> = [Piece<'a, B>; MAX_GPUS];

/// Counts of elements in memory of this rank's device, a u32 for each rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Counts {
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) element_bytes: usize,
}

/// What this rank takes part in.
#[derive(Debug)]
pub(super) struct Exchange<'a, B: Backend> {
    pub(super) collective: Collective,
    /// 0 where there is none.
    pub(super) root: usize,
    pub(super) send: Pieces<'a, B>,
    pub(super) receive: Pieces<'a, B>,
    /// Whether every rank that gets a piece from another gets the same.
    pub(super) one_for_all: bool,
    /// Whether peers must not read the input: this rank overwrites it meanwhile.
    pub(super) in_place: bool,
    pub(super) reduction: Option<(ReduceOp, Dtype)>,
    /// What the plan is made for, the same on all ranks; of 0 bytes: nothing moves on any rank. Of sends and receives each pair has
    /// its own.
    pub(super) load: Load,
    /// What is compared in checked mode; not of sends and receives.
    pub(super) amount: Amount,
    /// Where sizes are, if they are on the device; pieces then are as large as they may be.
    pub(super) counts: Option<Counts>,
    /// Memory of this rank.
    pub(super) spans: &'a [Span<B>],
}

impl<B: Backend> Call<'_, B> {
    fn plan_exchange(&self, collective: Collective, load: Load) -> Result<Plan> {
        let plan = self.comm.plan_of_with(&self.options, collective, load);
        if !collective.algorithms().contains(&plan.algorithm) {
            return Err(ApiMisuse::Algorithm { collective, algorithm: plan.algorithm }.into());
        }
        Ok(plan)
    }

    /// # Safety
    /// The pieces lie in memory of this rank that the spans keep alive, or for which the caller answers as the raw layer says; those
    /// to receive are this call's alone.
    pub(super) unsafe fn launch_exchange(self, stream: &B::Stream, exchange: &Exchange<'_, B>) -> Result<()> {
        let collective = exchange.collective;
        let plan = self.plan_exchange(collective, exchange.load)?;
        // SAFETY: passed on to the caller.
        unsafe { self.launch_planned(stream, exchange, plan) }
    }

    /// # Safety
    /// As [`launch_exchange`](Self::launch_exchange).
    pub(super) unsafe fn launch_planned(
        self,
        stream: &B::Stream,
        exchange: &Exchange<'_, B>,
        plan: Plan,
    ) -> Result<()> {
        let Exchange { collective, root, reduction, .. } = *exchange;
        let (rank, world) = (self.comm.rank, self.comm.world_size());
        let apart = collective == Collective::SendRecv;
        let (lines, pushes) = (plan.algorithm == Algorithm::Lines, plan.algorithm == Algorithm::Push);
        // Pushed pieces lie in the scratch by who sent them.
        let one_for_all = exchange.one_for_all && !pushes;
        let group = if apart { self.begin_apart()? } else { self.begin(plan.blocks, plan.threads)? };
        let described = Description::collective(collective, &plan, root, exchange.amount);
        if exchange.load.bytes == 0 {
            return if apart { Ok(()) } else { self.check_alone(stream, described) };
        }
        let (bytes, limit) = (exchange.load.largest, self.comm.most_line_bytes());
        if lines && bytes > limit {
            return Err(ApiMisuse::LinesTooLarge { bytes, limit }.into());
        }

        let mut params = ExchangeParams {
            group,
            source: exchange.send.map(|piece| piece.address),
            send_bytes: exchange.send.map(|piece| piece.bytes),
            target: exchange.receive.map(|piece| piece.address),
            receive_bytes: exchange.receive.map(|piece| piece.bytes),
            window_bytes: group.scratch_bytes / if one_for_all { 1 } else { world as u64 } / LINE * LINE,
            slot_bytes: 0,
            banks: (CONTROL_OFFSET + offset_of!(Control, line_banks)) as u64
                + LINE_BANKS_BYTES as u64 / self.comm.shares() * u64::from(group.domain),
            blocks: [plan.blocks; MAX_GPUS],
            seal: [0; MAX_GPUS],
            operation: exchange.counts.map_or(collective.operation(), |_| Operation::AllToAllCounted) as u32,
            op: reduction.map_or(0, |(op, _)| op as u32),
            dtype: reduction.map_or(exchange.counts.map_or(0, |c| c.element_bytes as u32), |(_, dtype)| dtype as u32),
            reserved: 0,
        };
        if lines {
            params.slot_bytes = self.comm.line_slot_bytes();
            let pieces = exchange.send.iter().chain(&exchange.receive);
            if pieces.filter(|piece| piece.bytes > 0).all(|piece| (piece.address | piece.bytes) % LINE_DATA_BYTES == 0)
            {
                params.group.flags |= FLAG_WHOLE;
            }
        } else if !one_for_all {
            params.slot_bytes = params.window_bytes;
        }
        // What peers touch: pieces that they read, or write, or by lines none.
        let touched = if pushes { &exchange.receive } else { &exchange.send };
        let of_peers = || touched.iter().enumerate().filter(|(peer, piece)| *peer != rank && piece.bytes > 0);
        let adds = pushes && reduction.is_some();
        if pushes {
            params.group.flags |= FLAG_PUSH;
        }
        if !lines && (exchange.in_place || adds || of_peers().any(|(_, piece)| piece.symmetric.is_none())) {
            params.group.flags |= FLAG_STAGED;
        } else if !lines {
            let told = if pushes { &mut params.target } else { &mut params.source };
            for (peer, piece) in of_peers() {
                if let Some(symmetric) = piece.symmetric {
                    told[peer] = symmetric.seen_by_ranks(rank, piece.address)[peer];
                }
            }
        }
        let ends = |at: &[u64], bytes: &[u64]| at.iter().zip(bytes).map(|(at, bytes)| at.saturating_add(*bytes)).max();
        let highest = ends(&params.source, &params.send_bytes).max(ends(&params.target, &params.receive_bytes));
        if let Some(highest) = highest.filter(|highest| *highest >= MOST_ADDRESS) {
            return Err(ApiMisuse::AddressTooHigh { address: highest, limit: MOST_ADDRESS }.into());
        }
        if apart {
            // Each pair's, of what it alone moves.
            for peer in 0..world {
                let bytes = params.send_bytes[peer].max(params.receive_bytes[peer]);
                params.blocks[peer] = self.plan_exchange(collective, Load { bytes, largest: bytes })?.blocks;
            }
        }
        let grid = params.blocks.into_iter().take(world).max().unwrap_or(1);

        let mut partners = 0;
        let mut compared = [described; MAX_GPUS];
        for peer in (0..world).filter(|peer| *peer != rank) {
            let (sent, received) = (params.send_bytes[peer], params.receive_bytes[peer]);
            let (to_higher, to_lower) = if rank < peer { (sent, received) } else { (received, sent) };
            if !lines {
                params.seal[peer] = seal(&params, plan.threads, root, (peer, to_higher, to_lower));
            }
            partners |= u32::from(sent > 0 || received > 0) << peer;
            if apart {
                compared[peer] = Description::send_recv(to_higher, to_lower);
            }
        }
        let kernel = match reduction {
            None if exchange.counts.is_some() => Kernel::MoveCounted,
            None if lines => Kernel::LinesMove,
            None => Kernel::Move,
            Some((op, dtype)) if lines => FastSum::of(op, dtype).map_or(Kernel::LinesReduceAny, Kernel::LinesReduce),
            Some((op, dtype)) => FastSum::of(op, dtype).map_or(Kernel::ReduceScatterAny, Kernel::ReduceScatter),
        };
        let counted = exchange.counts.map(|counts| CountedParams {
            exchange: params,
            counts: counts.sent,
            received_counts: counts.received,
            element_bytes: counts.element_bytes as u64,
        });
        let work = Work {
            kernel,
            grid,
            threads: plan.threads,
            params: counted.as_ref().map_or(bytes_of(&params), bytes_of),
            partners: if lines || (self.comm.checks() && !apart) { ALL_RANKS } else { partners },
            same_grid: !apart,
            described: Some(compared),
        };
        let symmetric = exchange.spans.iter().flat_map(|span| span.symmetric.iter().flat_map(|s| s.all_memory()));
        let uses = symmetric.chain(exchange.spans.iter().flat_map(|span| &span.memory));
        // SAFETY: the parameters are the kernel's. Pieces are of this rank, by the caller's promise; peers read symmetric buffers or
        // this rank's scratch, which the launch keeps alive.
        unsafe { self.launch(stream, work, uses) }
    }
}

/// What both ranks of a pair make of what they must agree on: a peer that makes of it something else makes another call.
fn seal(params: &ExchangeParams, threads: u32, root: usize, pair: (usize, u64, u64)) -> u32 {
    let (peer, to_higher, to_lower) = pair;
    let ExchangeParams { operation, op, dtype, window_bytes, group, .. } = *params;
    let words = [
        u64::from(operation) << 32 | u64::from(op) << 16 | root as u64,
        u64::from(group.flags & FLAG_PUSH) << 32 | u64::from(dtype),
        u64::from(params.blocks[peer]) << 32 | u64::from(threads),
        window_bytes,
        to_higher,
        to_lower,
    ];
    let hash = plan::fnv(words.into_iter().flat_map(u64::to_le_bytes));
    // All bits of the hash, folded.
    ((hash ^ hash >> 11 ^ hash >> 22 ^ hash >> 33 ^ hash >> 44 ^ hash >> 55) % SEALS) as u32
}
