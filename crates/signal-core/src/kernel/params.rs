//! What kernels get and what they report, mirrored by `kernels/signal/params.h`.

use std::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

#[cfg(doc)]
use super::{Dtype, Kernel, ReduceOp};
use crate::layout::MAX_GPUS;

/// What a kernel was doing, for fault records (`SIGNAL_OP_*` in C++).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[non_exhaustive]
pub enum Operation {
    /// A barrier.
    Barrier = 1,
    /// A barrier probe.
    BarrierProbe = 2,
    /// A one-stage all-reduce.
    AllReduceOneStage = 3,
    /// A two-stage all-reduce.
    AllReduceTwoStage = 4,
    /// A Lamport all-reduce.
    AllReduceLamport = 5,
    /// The comparison of calls in checked mode.
    Check = 6,
    /// A reduce-scatter.
    ReduceScatter = 7,
    /// A reduction to one rank.
    Reduce = 8,
    /// An all-gather.
    AllGather = 9,
    /// A broadcast.
    Broadcast = 10,
    /// A scatter.
    Scatter = 11,
    /// A gather.
    Gather = 12,
    /// An all-to-all.
    AllToAll = 13,
    /// Sends and receives.
    SendRecv = 14,
    /// An all-reduce by lines.
    AllReduceLines = 15,
    /// A two-shot all-reduce.
    AllReduceTwoShot = 16,
    /// An all-to-all with counts on the device.
    AllToAllCounted = 17,
    /// An all-reduce with a norm behind it.
    AllReduceNorm = 18,
    /// A reduce-scatter with a norm behind it.
    ReduceScatterNorm = 19,
    /// An all-gather with a norm behind it.
    AllGatherNorm = 20,
    /// The meeting before a call that is traced.
    Trace = 21,
    /// A kernel of a user ([`Call::launch_kernel`](crate::Call::launch_kernel)).
    User = 64,
}

impl Operation {
    /// The name of the operation with this number, as kernels record it.
    pub fn name_of(number: u32) -> &'static str {
        match number {
            1 => "barrier",
            2 => "barrier probe",
            3 => "one-stage all-reduce",
            4 => "two-stage all-reduce",
            5 => "lamport all-reduce",
            6 => "check of a call",
            7 => "reduce-scatter",
            8 => "reduce",
            9 => "all-gather",
            10 => "broadcast",
            11 => "scatter",
            12 => "gather",
            13 => "all-to-all",
            14 => "send-recv",
            15 => "ll all-reduce",
            16 => "two-shot all-reduce",
            17 => "counted all-to-all",
            18 => "all-reduce with a norm",
            19 => "reduce-scatter with a norm",
            20 => "all-gather with a norm",
            21 => "meeting before a traced call",
            64 => "user's kernel",
            _ => "unknown operation",
        }
    }
}

/// Where in the operation a kernel was, for fault records and test delays (`SIGNAL_PHASE_*` in C++).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[non_exhaustive]
pub enum Phase {
    /// At the start barrier: inputs are being published.
    Start = 1,
    /// At the middle barrier: shards are being published.
    Middle = 2,
    /// At the exit barrier: this rank's memory is being released by its readers.
    Exit = 3,
    /// In the exchange of a Lamport call, which has no barriers.
    Exchange = 4,
}

impl Phase {
    /// The name of the phase with this number, as kernels record it.
    pub fn name_of(number: u32) -> &'static str {
        match number {
            1 => "start barrier",
            2 => "middle barrier",
            3 => "exit barrier",
            4 => "exchange",
            _ => "unknown phase",
        }
    }
}

/// Every barrier releases and acquires at system scope, also those that a platform would relax (P2).
pub const FLAG_ORDERED: u32 = 1;
/// Peers cannot read this rank's input in place, so the kernel copies it to the scratch, window by window (P14).
pub const FLAG_STAGED: u32 = 2;
/// The stream's next kernel may be launched while this one runs: there is room for it beside all that this one waits for
/// (P4, P9).
pub const FLAG_ALLOW_NEXT: u32 = 4;
/// Data is pushed: what ranks tell each other is where it goes.
pub const FLAG_PUSH: u32 = 8;
/// Of a call by lines: every piece of this rank is a whole number of lines, and aligned to them.
pub const FLAG_WHOLE: u32 = 16;

/// What every kernel needs to know about its rank and its peers.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct GroupParams {
    /// This rank's Control.
    pub control: u64,
    /// This rank's line counters of this domain: with the next two what a kernel needs first, worked out here, since
    /// each instruction before the first signal is paid for by every call.
    pub line_counters: u64,
    /// The lines of this domain that peers write here.
    pub lines: u64,
    /// The lines of this domain that this rank writes, block 0's first: from each peer's base.
    pub line_out: u32,
    /// This rank.
    pub rank: u32,
    /// World size.
    pub world: u32,
    /// `FLAG_*` bits.
    pub flags: u32,
    /// Base of each rank's communicator memory (its Signal), as this device sees it.
    pub base: [u64; MAX_GPUS],
    /// `base[rank]`.
    pub own: u64,
    /// Start of this domain's share of the scratch, from each rank's base.
    pub scratch_offset: u64,
    /// Bytes of this domain's share of the scratch.
    pub scratch_bytes: u64,
    /// This rank's HostControl, as this device sees it.
    pub host_control: u64,
    /// Longest wait at one barrier, in ticks of the platform's clock.
    pub deadline_ticks: u64,
    /// Test hook: how long, in ticks of the platform's clock.
    pub delay_ticks: u64,
    /// Test hook: the [`Phase`] after which this rank waits `delay_ticks`; 0 for none. Only the host image looks at it.
    pub delay_phase: u32,
    /// Barrier domain.
    pub domain: u32,
}

/// Parameters of [`Kernel::Barrier`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BarrierParams {
    /// Rank and peers.
    pub group: GroupParams,
}

/// Parameters of [`Kernel::BarrierProbe`]. Each block writes a token into its scratch, meets its peers, checks their
/// tokens, and meets them again, `rounds` times, with random delays between.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct BarrierProbeParams {
    /// Rank and peers.
    pub group: GroupParams,
    /// Address of `u32[grid]` on this rank's device: tokens that were wrong, by block.
    pub mismatches: u64,
    /// Rounds of two barriers each.
    pub rounds: u32,
    /// Seed of the delays.
    pub seed: u32,
    /// Longest delay, in iterations of a small loop; 0 for none.
    pub max_delay: u32,
    /// Kept zero.
    pub reserved: u32,
}

/// Parameters of [`Kernel::Check`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct CheckParams {
    /// Rank and peers.
    pub group: GroupParams,
    /// What this rank is about to call, as far as each peer must agree; the three highest bits of each word are clear.
    pub description: [[u64; 2]; MAX_GPUS],
    /// The ranks with whom it is compared, as bits.
    pub partners: u32,
    /// Kept zero.
    pub reserved: u32,
}

/// What [`Kernel::Trace`] leaves of one call, in ticks of the device's clock.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub struct TraceRecord {
    /// The call's number, by which the host knows it.
    pub call: u64,
    /// This rank had ended what came before.
    pub ready: u64,
    /// Each peer was seen to be ready too.
    pub seen: [u64; MAX_GPUS],
    /// The call could begin.
    pub began: u64,
    /// It had ended; 0: not yet.
    pub ended: u64,
}

/// Parameters of [`Kernel::Trace`]: before a call it meets the partners and notes when, behind the call it notes when that had ended.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct TraceParams {
    /// Rank and peers.
    pub group: GroupParams,
    /// Address of a u64: calls noted so far.
    pub count: u64,
    /// Address of `TraceRecord[capacity]`, which are used in turn.
    pub records: u64,
    /// The call's number.
    pub call: u64,
    /// Records.
    pub capacity: u32,
    /// The ranks that are met, as bits.
    pub partners: u32,
    /// 1: behind the call.
    pub is_end: u32,
    /// Kept zero.
    pub reserved: u32,
}

/// Parameters of [`Kernel::PeerProbe`], which needs no group: it proves that `remote` can be written and read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct PeerProbeParams {
    /// Address of `u32[words]`, usually on another device.
    pub remote: u64,
    /// Address of one u32 on this device: words that were read back wrong. Unused when writing.
    pub mismatches: u64,
    /// Words to write or to check.
    pub words: u32,
    /// Word i is `seed + i * 2654435761`, wrapping.
    pub seed: u32,
    /// 0 writes, 1 checks.
    pub check: u32,
    /// Ticks of the platform's clock that it waits before it touches `remote`; the stream's next kernel may be launched
    /// meanwhile. For tests of early launches.
    pub delay: u32,
}

/// Parameters of the kernels of an all-reduce, [`Kernel::AllReduceOneStage`] and those beside it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct AllReduceParams {
    /// Rank and peers.
    pub group: GroupParams,
    /// This rank's input, element-aligned.
    pub input: u64,
    /// This rank's output, element-aligned; equal to `input` or disjoint from it.
    pub output: u64,
    /// Bytes of the message.
    pub bytes: u64,
    /// Packs of the message, the last one perhaps ragged.
    pub packs: u64,
    /// Packs of the message that are whole.
    pub whole_packs: u64,
    /// Packs in one window of the message, the same on every rank; below 2^32.
    pub window_packs: u64,
    /// Where each rank sees this rank's input: what the start barrier tells the peers, unless the input is staged. This
    /// rank's own entry is always there.
    pub view: [u64; MAX_GPUS],
    /// The operator, for kernels that take any: its position in [`ReduceOp::ALL`].
    pub op: u32,
    /// The element type, likewise: its position in [`Dtype::ALL`].
    pub dtype: u32,
}

/// Parameters of [`Kernel::Move`], [`Kernel::ReduceScatter`] and their forms: what this rank has for each rank, and what it gets from each, all
/// in bytes. Both ranks of a pair agree on the two pieces between them, on the window and on the blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct ExchangeParams {
    /// Rank and peers.
    pub group: GroupParams,
    /// This rank's data for each rank: where that rank sees it, or, if it is staged, where this rank does. This rank's own entry is
    /// always where this rank sees it.
    pub source: [u64; MAX_GPUS],
    /// Bytes of it.
    pub send_bytes: [u64; MAX_GPUS],
    /// Where data from each rank goes; the result of a reduction to this rank's own entry.
    pub target: [u64; MAX_GPUS],
    /// Bytes of it.
    pub receive_bytes: [u64; MAX_GPUS],
    /// Bytes of each piece that one window moves: a multiple of a pack.
    pub window_bytes: u64,
    /// Bytes from the place of one rank's staged piece in the scratch to that of the next; 0 where all get the same piece.
    /// Of calls by lines: bytes of a rank's slot in a bank.
    pub slot_bytes: u64,
    /// The banks of lines of this domain, from each rank's base.
    pub banks: u64,
    /// Blocks, from the first on, that move the pieces between this rank and each.
    pub blocks: [u32; MAX_GPUS],
    /// What both ranks of a pair have made of all that they must agree on: below 2^11.
    pub seal: [u32; MAX_GPUS],
    /// The [`Operation`], for fault records.
    pub operation: u32,
    /// The operator of a reduction: its position in [`ReduceOp::ALL`].
    pub op: u32,
    /// The element type of a reduction: its position in [`Dtype::ALL`]. With counts on the device: bytes of an element.
    pub dtype: u32,
    /// Kept zero.
    pub reserved: u32,
}

/// Parameters of [`Kernel::MoveCounted`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct CountedParams {
    /// The pieces at their largest.
    pub exchange: ExchangeParams,
    /// Address of `u32[world]` on this device: elements that this rank has for each rank.
    pub counts: u64,
    /// Likewise: becomes the elements that each rank has for this one.
    pub received_counts: u64,
    /// Bytes of an element.
    pub element_bytes: u64,
}

/// In what form normed rows are stored (`kRows*` in C++).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
#[non_exhaustive]
pub enum RowFormat {
    /// In the rows' own type.
    Plain = 0,
    /// OCP e4m3, one scale for all, which is given.
    E4m3Tensor = 1,
    /// OCP e4m3, an f32 scale for each row.
    E4m3Row = 2,
    /// OCP e4m3, an f32 scale for each 128 elements of a row.
    E4m3Group = 3,
    /// i8, an f32 scale for each row.
    I8Row = 4,
    /// OCP MXFP8: e4m3, an e8m0 scale for each 32 elements of a row.
    Mxfp8 = 5,
    /// NVFP4: e2m1, two in a byte, an e4m3 scale for each 16 elements of a row, and one scale for all, which is given.
    Nvfp4 = 6,
}

impl RowFormat {
    /// All formats, by number.
    pub const ALL: [RowFormat; 7] = [
        RowFormat::Plain,
        RowFormat::E4m3Tensor,
        RowFormat::E4m3Row,
        RowFormat::E4m3Group,
        RowFormat::I8Row,
        RowFormat::Mxfp8,
        RowFormat::Nvfp4,
    ];

    /// Elements of a row that share a scale; `None` where the row does, or all rows, or there is none.
    pub const fn block_elements(self) -> Option<usize> {
        match self {
            RowFormat::E4m3Group => Some(128),
            RowFormat::Mxfp8 => Some(32),
            RowFormat::Nvfp4 => Some(16),
            _ => None,
        }
    }

    /// Scales that a row of so many elements gets.
    pub const fn row_scales(self, elements: usize) -> usize {
        match (self, self.block_elements()) {
            (_, Some(block)) => elements.div_ceil(block),
            (RowFormat::E4m3Row | RowFormat::I8Row, None) => 1,
            (_, None) => 0,
        }
    }

    /// The name used by the command line.
    pub const fn name(self) -> &'static str {
        match self {
            RowFormat::Plain => "plain",
            RowFormat::E4m3Tensor => "e4m3",
            RowFormat::E4m3Row => "e4m3-row",
            RowFormat::E4m3Group => "e4m3-group",
            RowFormat::I8Row => "i8-row",
            RowFormat::Mxfp8 => "mxfp8",
            RowFormat::Nvfp4 => "nvfp4",
        }
    }
}

/// Parameters of [`Kernel::RmsNorm`], [`Kernel::AllReduceNorm`] and those beside them: rows, one behind the other, and what becomes of each.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct NormParams {
    /// The rows that are summed, or are this rank's alone, and where the normed ones, or their codes, go. Its packs are those of all rows, each
    /// of which begins with a pack of its own.
    pub all_reduce: AllReduceParams,
    /// What is added to the sum; 0 for nothing.
    pub residual: u64,
    /// Where the result of that goes: equal to `residual` or disjoint from it.
    pub new_residual: u64,
    /// Where the sums go; 0 for nowhere.
    pub sum: u64,
    /// A weight for each element of a row.
    pub weight: u64,
    /// Bytes of a row.
    pub row_bytes: u64,
    /// Rows of all ranks.
    pub rows: u32,
    /// Packs of a row, the last one perhaps ragged.
    pub row_packs: u32,
    /// One by the elements of a row.
    pub inverse_elements: f32,
    /// Added to the mean of the squares.
    pub epsilon: f32,
    /// Added to each weight.
    pub offset: f32,
    /// The [`RowFormat`]. Here, since a call without codes then reads nothing of what is behind it: parameters come from cold memory.
    pub format: u32,
    /// Added to each element of a normed row; 0 for nothing.
    pub bias: u64,
    /// Where the scales of codes go; 0 where there are none.
    pub scales: u64,
    /// Address of the one scale of all, an f32; 0 where there is none.
    pub tensor_scale: u64,
    /// Where in this rank's memory, from its base, a block keeps what it is norming, one block's behind the other's: for each element of a row an f32.
    pub kept: u64,
    /// Of the two-stage form: where in each rank's memory, from its base, sums are gathered.
    pub sums: u64,
    /// Likewise: rows of a rank's shard.
    pub shard_rows: u32,
    /// Likewise: rows of a shard in a window.
    pub window_rows: u32,
    /// The [`Operation`], for fault records; the two-stage form does what it says.
    pub operation: u32,
    /// Elements of a row.
    pub elements: u32,
    /// 1 for LayerNorm, 0 for RMSNorm.
    pub is_layer: u32,
    /// 1 where nothing is rounded between the steps.
    pub is_fast: u32,
}

const _: () = {
    assert!(size_of::<NormParams>() == 408);
    assert!(offset_of!(NormParams, row_bytes) == 312);
    assert!(offset_of!(NormParams, bias) == 344);
    assert!(offset_of!(NormParams, is_fast) == 404);
    assert!(size_of::<GroupParams>() == 160);
    assert!(size_of::<CountedParams>() == 544);
    assert!(offset_of!(GroupParams, base) == 40);
    assert!(offset_of!(GroupParams, domain) == 156);
    assert!(size_of::<BarrierParams>() == 160);
    assert!(size_of::<BarrierProbeParams>() == 184);
    assert!(size_of::<PeerProbeParams>() == 32);
    assert!(size_of::<CheckParams>() == 296);
    assert!(size_of::<TraceRecord>() == 96);
    assert!(size_of::<TraceParams>() == 200);
    assert!(size_of::<AllReduceParams>() == 280);
    assert!(offset_of!(AllReduceParams, view) == 208);
    assert!(size_of::<ExchangeParams>() == 520);
    assert!(offset_of!(ExchangeParams, window_bytes) == 416);
};
