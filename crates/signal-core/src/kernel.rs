//! The kernel catalogue and the parameter structs, mirrored by `kernels/signal/params.h` and `kernels/signal/kernels.def`.
#![forbid(unsafe_code)]

use std::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

use crate::dtype::{Dtype, ReduceOp};
use crate::layout::MAX_GPUS;

/// How an all-reduce moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Every rank pulls every peer's input and adds all of it: one hop, n x bytes per rank.
    OneStage,
    /// Every rank pulls and adds one shard into its scratch, then gathers the shards: two hops, 2 x bytes per rank.
    TwoStage,
    /// Every rank pushes its input into the Lamport region of every peer, where the data tells that it is there: one hop
    /// and no barrier, (n - 1) x bytes per rank, up to 1 MiB a rank, on domain 0 only.
    Lamport,
}

impl Algorithm {
    /// All algorithms, in the order of the kernel catalogue.
    pub const ALL: [Algorithm; 3] = [Algorithm::OneStage, Algorithm::TwoStage, Algorithm::Lamport];

    /// The name used by `SIGNAL_ALGO` and the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::OneStage => "one-stage",
            Algorithm::TwoStage => "two-stage",
            Algorithm::Lamport => "lamport",
        }
    }

    /// The algorithm with this [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|a| a.name() == name)
    }
}

impl std::fmt::Display for Algorithm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A kernel of the catalogue. Every image holds all of them under the same entry names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Kernel {
    /// One barrier ([`BarrierParams`]).
    Barrier,
    /// Many barriers with delays and a data check between them ([`BarrierProbeParams`]).
    BarrierProbe,
    /// Stores to and loads from a peer's memory ([`PeerProbeParams`]).
    PeerProbe,
    /// The comparison of the ranks' calls in checked mode ([`CheckParams`]).
    Check,
    /// An all-reduce by a sum that has kernels of its own ([`AllReduceParams`]); with [`Algorithm::Lamport`] for more than
    /// [`SMALL_WORLD`](Self::SMALL_WORLD) ranks.
    AllReduce(Algorithm, FastSum),
    /// The one-stage all-reduce of a message that is one window of symmetric input, with few packs a thread, at most
    /// [`SMALL_WORLD`](Self::SMALL_WORLD) ranks and barriers as the platform orders them ([`AllReduceParams`]). Meets the
    /// one-stage kernel of peers whose call is not such a one.
    AllReduceSmall(FastSum),
    /// The Lamport all-reduce of at most [`SMALL_WORLD`](Self::SMALL_WORLD) ranks ([`AllReduceParams`]).
    AllReduceLamportSmall(FastSum),
    /// A one-stage all-reduce by any operator, which the parameters name ([`AllReduceParams`]).
    AllReduceOneStageAny(Dtype),
    /// A two-stage all-reduce by any operator, which the parameters name ([`AllReduceParams`]).
    AllReduceTwoStageAny(Dtype),
}

/// The sums that engines call for by far the most. They have kernels with code for each world size, and Lamport's algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FastSum {
    /// Of [`Dtype::F32`].
    F32,
    /// Of [`Dtype::F16`].
    F16,
    /// Of [`Dtype::Bf16`].
    Bf16,
}

impl FastSum {
    /// All of them, in the order of the kernel catalogue.
    pub const ALL: [FastSum; 3] = [FastSum::F32, FastSum::F16, FastSum::Bf16];

    /// Whether this reduction is one of them.
    pub const fn of(op: ReduceOp, dtype: Dtype) -> Option<Self> {
        match (op, dtype) {
            (ReduceOp::Sum, Dtype::F32) => Some(FastSum::F32),
            (ReduceOp::Sum, Dtype::F16) => Some(FastSum::F16),
            (ReduceOp::Sum, Dtype::Bf16) => Some(FastSum::Bf16),
            _ => None,
        }
    }

    /// The element type.
    pub const fn dtype(self) -> Dtype {
        match self {
            FastSum::F32 => Dtype::F32,
            FastSum::F16 => Dtype::F16,
            FastSum::Bf16 => Dtype::Bf16,
        }
    }
}

/// Entry names, indexed by [`Kernel::index`].
const NAMES: [&str; 43] = [
    "signal_barrier",
    "signal_barrier_probe",
    "signal_peer_probe",
    "signal_check",
    "signal_all_reduce_one_stage_sum_f32",
    "signal_all_reduce_one_stage_sum_f16",
    "signal_all_reduce_one_stage_sum_bf16",
    "signal_all_reduce_two_stage_sum_f32",
    "signal_all_reduce_two_stage_sum_f16",
    "signal_all_reduce_two_stage_sum_bf16",
    "signal_all_reduce_lamport_sum_f32",
    "signal_all_reduce_lamport_sum_f16",
    "signal_all_reduce_lamport_sum_bf16",
    "signal_all_reduce_one_stage_small_sum_f32",
    "signal_all_reduce_one_stage_small_sum_f16",
    "signal_all_reduce_one_stage_small_sum_bf16",
    "signal_all_reduce_lamport_small_sum_f32",
    "signal_all_reduce_lamport_small_sum_f16",
    "signal_all_reduce_lamport_small_sum_bf16",
    "signal_all_reduce_one_stage_any_f32",
    "signal_all_reduce_one_stage_any_f16",
    "signal_all_reduce_one_stage_any_bf16",
    "signal_all_reduce_one_stage_any_f64",
    "signal_all_reduce_one_stage_any_i8",
    "signal_all_reduce_one_stage_any_u8",
    "signal_all_reduce_one_stage_any_i32",
    "signal_all_reduce_one_stage_any_u32",
    "signal_all_reduce_one_stage_any_i64",
    "signal_all_reduce_one_stage_any_u64",
    "signal_all_reduce_one_stage_any_e4m3",
    "signal_all_reduce_one_stage_any_e5m2",
    "signal_all_reduce_two_stage_any_f32",
    "signal_all_reduce_two_stage_any_f16",
    "signal_all_reduce_two_stage_any_bf16",
    "signal_all_reduce_two_stage_any_f64",
    "signal_all_reduce_two_stage_any_i8",
    "signal_all_reduce_two_stage_any_u8",
    "signal_all_reduce_two_stage_any_i32",
    "signal_all_reduce_two_stage_any_u32",
    "signal_all_reduce_two_stage_any_i64",
    "signal_all_reduce_two_stage_any_u64",
    "signal_all_reduce_two_stage_any_e4m3",
    "signal_all_reduce_two_stage_any_e5m2",
];

impl Kernel {
    /// Kernels in the catalogue.
    pub const COUNT: usize = NAMES.len();
    /// Most ranks of [`AllReduceSmall`](Self::AllReduceSmall) and
    /// [`AllReduceLamportSmall`](Self::AllReduceLamportSmall): few ranks take few registers, which makes a launch shorter.
    pub const SMALL_WORLD: u32 = 4;

    /// Position in the catalogue, below [`Kernel::COUNT`].
    pub const fn index(self) -> usize {
        match self {
            Kernel::Barrier => 0,
            Kernel::BarrierProbe => 1,
            Kernel::PeerProbe => 2,
            Kernel::Check => 3,
            Kernel::AllReduce(algorithm, sum) => Self::sum_index(algorithm as usize, sum),
            Kernel::AllReduceSmall(sum) => Self::sum_index(Algorithm::ALL.len(), sum),
            Kernel::AllReduceLamportSmall(sum) => Self::sum_index(Algorithm::ALL.len() + 1, sum),
            Kernel::AllReduceOneStageAny(dtype) => Self::ANY + dtype as usize,
            Kernel::AllReduceTwoStageAny(dtype) => Self::ANY + Dtype::ALL.len() + dtype as usize,
        }
    }

    /// Position in the `form`th group of kernels of which each has one for each fast sum.
    const fn sum_index(form: usize, sum: FastSum) -> usize {
        4 + form * FastSum::ALL.len() + sum as usize
    }

    /// Where the kernels for any operator begin.
    const ANY: usize = 4 + (Algorithm::ALL.len() + 2) * FastSum::ALL.len();

    /// Every kernel, in catalogue order.
    pub fn all() -> impl Iterator<Item = Kernel> {
        let sums = |kernel: fn(FastSum) -> Kernel| FastSum::ALL.into_iter().map(kernel);
        let any = |kernel: fn(Dtype) -> Kernel| Dtype::ALL.into_iter().map(kernel);
        [Kernel::Barrier, Kernel::BarrierProbe, Kernel::PeerProbe, Kernel::Check]
            .into_iter()
            .chain(Algorithm::ALL.into_iter().flat_map(|a| FastSum::ALL.map(|sum| Kernel::AllReduce(a, sum))))
            .chain(sums(Kernel::AllReduceSmall))
            .chain(sums(Kernel::AllReduceLamportSmall))
            .chain(any(Kernel::AllReduceOneStageAny))
            .chain(any(Kernel::AllReduceTwoStageAny))
    }

    /// Entry name in every image.
    pub const fn name(self) -> &'static str {
        NAMES[self.index()]
    }

    /// Every entry name, in catalogue order.
    pub const fn names() -> &'static [&'static str; Self::COUNT] {
        &NAMES
    }
}

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
    /// What this rank is about to call; the two highest bits of each word are clear.
    pub description: [u64; 2],
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

/// Parameters of [`Kernel::AllReduce`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub struct AllReduceParams {
    /// Rank and peers.
    pub group: GroupParams,
    /// This rank's input, element-aligned.
    pub input: u64,
    /// This rank's output, element-aligned; equal to `input` or disjoint from it.
    pub output: u64,
    /// Elements.
    pub count: u64,
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
    /// Kept zero.
    pub reserved: u32,
}

const _: () = {
    assert!(size_of::<GroupParams>() == 160);
    assert!(offset_of!(GroupParams, base) == 40);
    assert!(offset_of!(GroupParams, domain) == 156);
    assert!(size_of::<BarrierParams>() == 160);
    assert!(size_of::<BarrierProbeParams>() == 184);
    assert!(size_of::<PeerProbeParams>() == 32);
    assert!(size_of::<CheckParams>() == 176);
    assert!(size_of::<AllReduceParams>() == 280);
    assert!(offset_of!(AllReduceParams, view) == 208);
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_and_name_agree_with_the_catalogue() {
        for (index, kernel) in Kernel::all().enumerate() {
            assert_eq!(kernel.index(), index);
            let (form, dtype) = match kernel {
                Kernel::AllReduce(algorithm, sum) => (format!("{algorithm}_sum"), sum.dtype()),
                Kernel::AllReduceSmall(sum) => ("one_stage_small_sum".to_owned(), sum.dtype()),
                Kernel::AllReduceLamportSmall(sum) => ("lamport_small_sum".to_owned(), sum.dtype()),
                Kernel::AllReduceOneStageAny(dtype) => ("one_stage_any".to_owned(), dtype),
                Kernel::AllReduceTwoStageAny(dtype) => ("two_stage_any".to_owned(), dtype),
                _ => continue,
            };
            assert_eq!(kernel.name(), format!("signal_all_reduce_{}_{dtype}", form.replace('-', "_")));
        }
        assert_eq!(Kernel::all().count(), Kernel::COUNT);
    }
}
