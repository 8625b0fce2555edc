//! The kernel catalogue, mirrored by `kernels/signal/kernels.def`, and the parameters of its kernels.
#![forbid(unsafe_code)]

mod params;

use crate::dtype::{Dtype, ReduceOp};

pub use self::params::*;

/// How a collective moves data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Algorithm {
    /// Of an all-reduce. Every rank pulls every peer's input and adds all of it: one hop, n x bytes per rank.
    OneStage,
    /// Of an all-reduce. Every rank pulls and adds one shard into its scratch, then gathers the shards: two hops, 2 x bytes per
    /// rank.
    TwoStage,
    /// Of an all-reduce. Every rank pushes its input into the Lamport region of every peer, where the data tells that it is there:
    /// one hop and no barrier, (n - 1) x bytes per rank, on domain 0 only, up to 4 MiB with two
    /// ranks, 2 MiB with three or four and 1 MiB with more.
    Lamport,
    /// Of an all-reduce. Every rank pushes each peer's shard there, which pushes the sums to all, both through the Lamport region, in
    /// windows: two hops and no barrier that data waits for, 2 (n - 1) / n x bytes per rank, on domain 0 only. Two ranks add all of it
    /// each: as many bytes, one hop. A message of fewer than n x 16 bytes goes by [`Lamport`](Self::Lamport).
    TwoShot,
    /// Of an all-reduce. As [`TwoStage`](Self::TwoStage), by pushing: shards to the scratch of who adds them, and the sums to all
    /// outputs, or to the scratch of ranks whose output peers cannot write.
    TwoStagePush,
    /// Of all other collectives. Every rank pulls what is for it from its peers' inputs, or from their scratch where peers cannot
    /// read those: one hop.
    Pull,
    /// Of the same. Every rank pushes what it has for its peers to their outputs, or to their scratch where peers cannot write those,
    /// and where data is added: one hop.
    Push,
    /// Of all but send-recv. Every rank pushes what it has for its peers as lines, which carry readiness beside each 4 bytes: one hop
    /// and no barrier, twice the bytes, for small pieces of any data on any domain.
    Lines,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Algorithm; 8] = [
        Algorithm::OneStage,
        Algorithm::TwoStage,
        Algorithm::Lamport,
        Algorithm::TwoShot,
        Algorithm::TwoStagePush,
        Algorithm::Pull,
        Algorithm::Push,
        Algorithm::Lines,
    ];
    /// Those of an all-reduce.
    pub const ALL_REDUCE: [Algorithm; 6] = [
        Algorithm::OneStage,
        Algorithm::TwoStage,
        Algorithm::TwoStagePush,
        Algorithm::Lamport,
        Algorithm::TwoShot,
        Algorithm::Lines,
    ];

    /// Whether data goes through the Lamport region: sums of f32, f16 and bf16, on domain 0.
    pub const fn uses_region(self) -> bool {
        matches!(self, Algorithm::Lamport | Algorithm::TwoShot)
    }

    /// The name used by `SIGNAL_ALGO` and the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Algorithm::OneStage => "one-stage",
            Algorithm::TwoStage => "two-stage",
            Algorithm::Lamport => "lamport",
            Algorithm::TwoShot => "two-shot",
            Algorithm::TwoStagePush => "two-stage-push",
            Algorithm::Pull => "pull",
            Algorithm::Push => "push",
            Algorithm::Lines => "ll",
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
    /// A one-stage all-reduce by a sum that has kernels of its own ([`AllReduceParams`]).
    AllReduceOneStage(FastSum),
    /// A two-stage all-reduce by such a sum ([`AllReduceParams`]).
    AllReduceTwoStage(FastSum),
    /// A Lamport all-reduce of more than [`SMALL_WORLD`](Self::SMALL_WORLD) ranks ([`AllReduceParams`]).
    AllReduceLamport(FastSum),
    /// The one-stage all-reduce of a message that is one window of symmetric input, with few packs a thread, at most
    /// [`SMALL_WORLD`](Self::SMALL_WORLD) ranks and barriers as the platform orders them ([`AllReduceParams`]). Meets the
    /// one-stage kernel of peers whose call is not such a one.
    AllReduceSmall(FastSum),
    /// The Lamport all-reduce of at most [`SMALL_WORLD`](Self::SMALL_WORLD) ranks ([`AllReduceParams`]).
    AllReduceLamportSmall(FastSum),
    /// A two-shot all-reduce of more than [`SMALL_WORLD`](Self::SMALL_WORLD) ranks ([`AllReduceParams`]).
    AllReduceTwoShot(FastSum),
    /// The two-shot all-reduce of at most [`SMALL_WORLD`](Self::SMALL_WORLD) ranks ([`AllReduceParams`]).
    AllReduceTwoShotSmall(FastSum),
    /// A one-stage all-reduce of any type by any operator ([`AllReduceParams`]).
    AllReduceOneStageAny,
    /// A two-stage all-reduce of any type by any operator ([`AllReduceParams`]).
    AllReduceTwoStageAny,
    /// Collectives in which each rank keeps the sum of all ranks' pieces for it ([`ExchangeParams`]).
    ReduceScatter(FastSum),
    /// The same for any type and any operator ([`ExchangeParams`]).
    ReduceScatterAny,
    /// Collectives that move data, of whatever type ([`ExchangeParams`]).
    Move,
    /// The same for pieces whose sizes are in the device's memory ([`CountedParams`]).
    MoveCounted,
    /// Collectives that move data, by lines ([`ExchangeParams`]).
    LinesMove,
    /// Collectives that sum, by lines ([`ExchangeParams`]).
    LinesReduce(FastSum),
    /// The same for any type and any operator ([`ExchangeParams`]).
    LinesReduceAny,
    /// RMSNorm of a rank's own rows, exact and in their own type or as e4m3 with one scale for all; of as many packs as two for each thread at most, with all packs of all
    /// operands whole and aligned ([`NormParams`]).
    RmsNorm(FastSum),
    /// Any norm of any rows of a rank's own, with any output ([`NormParams`]).
    NormRows(FastSum),
    /// The same of rows as [`RmsNorm`](Self::RmsNorm) takes ([`NormParams`]).
    NormNarrowRows(FastSum),
    /// A Lamport all-reduce of rows and RMSNorm of its sums, exact and in their own type, of more than [`SMALL_WORLD`](Self::SMALL_WORLD) ranks
    /// ([`NormParams`]). All packs of all operands are whole and aligned, and a row has no more of them than a block has threads.
    AllReduceRmsNorm(FastSum),
    /// The same of at most [`SMALL_WORLD`](Self::SMALL_WORLD) ranks, but not of two ([`NormParams`]).
    AllReduceRmsNormSmall(FastSum),
    /// The same of two ranks ([`NormParams`]).
    AllReduceRmsNormPair(FastSum),
    /// As [`AllReduceRmsNorm`](Self::AllReduceRmsNorm), to e4m3 with one scale for all ([`NormParams`]).
    AllReduceRmsNormE4m3(FastSum),
    /// The same of at most [`SMALL_WORLD`](Self::SMALL_WORLD) ranks, but not of two ([`NormParams`]).
    AllReduceRmsNormE4m3Small(FastSum),
    /// The same of two ranks ([`NormParams`]).
    AllReduceRmsNormE4m3Pair(FastSum),
    /// The same with any norm and any output, of more than [`SMALL_WORLD`](Self::SMALL_WORLD) ranks ([`NormParams`]).
    AllReduceNorm(FastSum),
    /// The same of at most [`SMALL_WORLD`](Self::SMALL_WORLD) ranks, but not of two ([`NormParams`]).
    AllReduceNormSmall(FastSum),
    /// The same of two ranks ([`NormParams`]).
    AllReduceNormPair(FastSum),
    /// The same of any rows, of more than [`SMALL_WORLD`](Self::SMALL_WORLD) ranks ([`NormParams`]).
    AllReduceNormWide(FastSum),
    /// The same of any rows, of at most [`SMALL_WORLD`](Self::SMALL_WORLD) ranks ([`NormParams`]).
    AllReduceNormWideSmall(FastSum),
    /// An all-reduce, a reduce-scatter or an all-gather of any number of rows, by pushing, with any norm and any output ([`NormParams`]).
    NormTwoStage(FastSum),
    /// Timestamps before and behind a call, and the meeting of its ranks ([`TraceParams`]).
    Trace,
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
const NAMES: [&str; 84] = [
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
    "signal_all_reduce_two_shot_sum_f32",
    "signal_all_reduce_two_shot_sum_f16",
    "signal_all_reduce_two_shot_sum_bf16",
    "signal_all_reduce_two_shot_small_sum_f32",
    "signal_all_reduce_two_shot_small_sum_f16",
    "signal_all_reduce_two_shot_small_sum_bf16",
    "signal_all_reduce_one_stage_any",
    "signal_all_reduce_two_stage_any",
    "signal_reduce_scatter_sum_f32",
    "signal_reduce_scatter_sum_f16",
    "signal_reduce_scatter_sum_bf16",
    "signal_reduce_scatter_any",
    "signal_move",
    "signal_move_counted",
    "signal_lines_move",
    "signal_lines_reduce_sum_f32",
    "signal_lines_reduce_sum_f16",
    "signal_lines_reduce_sum_bf16",
    "signal_lines_reduce_any",
    "signal_rms_norm_f32",
    "signal_rms_norm_f16",
    "signal_rms_norm_bf16",
    "signal_norm_rows_f32",
    "signal_norm_rows_f16",
    "signal_norm_rows_bf16",
    "signal_norm_narrow_rows_f32",
    "signal_norm_narrow_rows_f16",
    "signal_norm_narrow_rows_bf16",
    "signal_all_reduce_rms_norm_f32",
    "signal_all_reduce_rms_norm_f16",
    "signal_all_reduce_rms_norm_bf16",
    "signal_all_reduce_rms_norm_small_f32",
    "signal_all_reduce_rms_norm_small_f16",
    "signal_all_reduce_rms_norm_small_bf16",
    "signal_all_reduce_rms_norm_pair_f32",
    "signal_all_reduce_rms_norm_pair_f16",
    "signal_all_reduce_rms_norm_pair_bf16",
    "signal_all_reduce_rms_norm_e4m3_f32",
    "signal_all_reduce_rms_norm_e4m3_f16",
    "signal_all_reduce_rms_norm_e4m3_bf16",
    "signal_all_reduce_rms_norm_e4m3_small_f32",
    "signal_all_reduce_rms_norm_e4m3_small_f16",
    "signal_all_reduce_rms_norm_e4m3_small_bf16",
    "signal_all_reduce_rms_norm_e4m3_pair_f32",
    "signal_all_reduce_rms_norm_e4m3_pair_f16",
    "signal_all_reduce_rms_norm_e4m3_pair_bf16",
    "signal_all_reduce_norm_f32",
    "signal_all_reduce_norm_f16",
    "signal_all_reduce_norm_bf16",
    "signal_all_reduce_norm_small_f32",
    "signal_all_reduce_norm_small_f16",
    "signal_all_reduce_norm_small_bf16",
    "signal_all_reduce_norm_pair_f32",
    "signal_all_reduce_norm_pair_f16",
    "signal_all_reduce_norm_pair_bf16",
    "signal_all_reduce_norm_wide_f32",
    "signal_all_reduce_norm_wide_f16",
    "signal_all_reduce_norm_wide_bf16",
    "signal_all_reduce_norm_wide_small_f32",
    "signal_all_reduce_norm_wide_small_f16",
    "signal_all_reduce_norm_wide_small_bf16",
    "signal_norm_two_stage_f32",
    "signal_norm_two_stage_f16",
    "signal_norm_two_stage_bf16",
    "signal_trace",
];

impl Kernel {
    /// Kernels in the catalogue.
    pub const COUNT: usize = NAMES.len();
    /// Most ranks of the kernels named small: few ranks take few registers, which makes a launch shorter.
    pub const SMALL_WORLD: u32 = 4;

    /// Position in the catalogue, below [`Kernel::COUNT`].
    pub const fn index(self) -> usize {
        match self {
            Kernel::Barrier => 0,
            Kernel::BarrierProbe => 1,
            Kernel::PeerProbe => 2,
            Kernel::Check => 3,
            Kernel::AllReduceOneStage(sum) => Self::sum_index(0, sum),
            Kernel::AllReduceTwoStage(sum) => Self::sum_index(1, sum),
            Kernel::AllReduceLamport(sum) => Self::sum_index(2, sum),
            Kernel::AllReduceSmall(sum) => Self::sum_index(3, sum),
            Kernel::AllReduceLamportSmall(sum) => Self::sum_index(4, sum),
            Kernel::AllReduceTwoShot(sum) => Self::sum_index(5, sum),
            Kernel::AllReduceTwoShotSmall(sum) => Self::sum_index(6, sum),
            Kernel::AllReduceOneStageAny => 25,
            Kernel::AllReduceTwoStageAny => 26,
            Kernel::ReduceScatter(sum) => 27 + sum as usize,
            Kernel::ReduceScatterAny => 30,
            Kernel::Move => 31,
            Kernel::MoveCounted => 32,
            Kernel::LinesMove => 33,
            Kernel::LinesReduce(sum) => 34 + sum as usize,
            Kernel::LinesReduceAny => 37,
            Kernel::RmsNorm(sum) => 38 + sum as usize,
            Kernel::NormRows(sum) => 41 + sum as usize,
            Kernel::NormNarrowRows(sum) => 44 + sum as usize,
            Kernel::AllReduceRmsNorm(sum) => 47 + sum as usize,
            Kernel::AllReduceRmsNormSmall(sum) => 50 + sum as usize,
            Kernel::AllReduceRmsNormPair(sum) => 53 + sum as usize,
            Kernel::AllReduceRmsNormE4m3(sum) => 56 + sum as usize,
            Kernel::AllReduceRmsNormE4m3Small(sum) => 59 + sum as usize,
            Kernel::AllReduceRmsNormE4m3Pair(sum) => 62 + sum as usize,
            Kernel::AllReduceNorm(sum) => 65 + sum as usize,
            Kernel::AllReduceNormSmall(sum) => 68 + sum as usize,
            Kernel::AllReduceNormPair(sum) => 71 + sum as usize,
            Kernel::AllReduceNormWide(sum) => 74 + sum as usize,
            Kernel::AllReduceNormWideSmall(sum) => 77 + sum as usize,
            Kernel::NormTwoStage(sum) => 80 + sum as usize,
            Kernel::Trace => 83,
        }
    }

    /// Position in the `form`th group of kernels of which each has one for each fast sum.
    const fn sum_index(form: usize, sum: FastSum) -> usize {
        4 + form * FastSum::ALL.len() + sum as usize
    }

    /// Every kernel, in catalogue order.
    pub fn all() -> impl Iterator<Item = Kernel> {
        let sums = |kernel: fn(FastSum) -> Kernel| FastSum::ALL.into_iter().map(kernel);
        [Kernel::Barrier, Kernel::BarrierProbe, Kernel::PeerProbe, Kernel::Check]
            .into_iter()
            .chain(sums(Kernel::AllReduceOneStage))
            .chain(sums(Kernel::AllReduceTwoStage))
            .chain(sums(Kernel::AllReduceLamport))
            .chain(sums(Kernel::AllReduceSmall))
            .chain(sums(Kernel::AllReduceLamportSmall))
            .chain(sums(Kernel::AllReduceTwoShot))
            .chain(sums(Kernel::AllReduceTwoShotSmall))
            .chain([Kernel::AllReduceOneStageAny, Kernel::AllReduceTwoStageAny])
            .chain(sums(Kernel::ReduceScatter))
            .chain([Kernel::ReduceScatterAny, Kernel::Move, Kernel::MoveCounted, Kernel::LinesMove])
            .chain(sums(Kernel::LinesReduce))
            .chain([Kernel::LinesReduceAny])
            .chain(sums(Kernel::RmsNorm))
            .chain(sums(Kernel::NormRows))
            .chain(sums(Kernel::NormNarrowRows))
            .chain(sums(Kernel::AllReduceRmsNorm))
            .chain(sums(Kernel::AllReduceRmsNormSmall))
            .chain(sums(Kernel::AllReduceRmsNormPair))
            .chain(sums(Kernel::AllReduceRmsNormE4m3))
            .chain(sums(Kernel::AllReduceRmsNormE4m3Small))
            .chain(sums(Kernel::AllReduceRmsNormE4m3Pair))
            .chain(sums(Kernel::AllReduceNorm))
            .chain(sums(Kernel::AllReduceNormSmall))
            .chain(sums(Kernel::AllReduceNormPair))
            .chain(sums(Kernel::AllReduceNormWide))
            .chain(sums(Kernel::AllReduceNormWideSmall))
            .chain(sums(Kernel::NormTwoStage))
            .chain([Kernel::Trace])
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn index_and_name_agree_with_the_catalogue() {
        for (index, kernel) in Kernel::all().enumerate() {
            assert_eq!(kernel.index(), index);
            let name = match kernel {
                Kernel::AllReduceOneStage(sum) => format!("all_reduce_one_stage_sum_{}", sum.dtype()),
                Kernel::AllReduceTwoStage(sum) => format!("all_reduce_two_stage_sum_{}", sum.dtype()),
                Kernel::AllReduceLamport(sum) => format!("all_reduce_lamport_sum_{}", sum.dtype()),
                Kernel::AllReduceSmall(sum) => format!("all_reduce_one_stage_small_sum_{}", sum.dtype()),
                Kernel::AllReduceLamportSmall(sum) => format!("all_reduce_lamport_small_sum_{}", sum.dtype()),
                Kernel::AllReduceTwoShot(sum) => format!("all_reduce_two_shot_sum_{}", sum.dtype()),
                Kernel::AllReduceTwoShotSmall(sum) => format!("all_reduce_two_shot_small_sum_{}", sum.dtype()),
                Kernel::ReduceScatter(sum) => format!("reduce_scatter_sum_{}", sum.dtype()),
                Kernel::LinesReduce(sum) => format!("lines_reduce_sum_{}", sum.dtype()),
                Kernel::RmsNorm(sum) => format!("rms_norm_{}", sum.dtype()),
                Kernel::NormRows(sum) => format!("norm_rows_{}", sum.dtype()),
                Kernel::NormNarrowRows(sum) => format!("norm_narrow_rows_{}", sum.dtype()),
                Kernel::AllReduceRmsNorm(sum) => format!("all_reduce_rms_norm_{}", sum.dtype()),
                Kernel::AllReduceRmsNormSmall(sum) => format!("all_reduce_rms_norm_small_{}", sum.dtype()),
                Kernel::AllReduceRmsNormPair(sum) => format!("all_reduce_rms_norm_pair_{}", sum.dtype()),
                Kernel::AllReduceRmsNormE4m3(sum) => format!("all_reduce_rms_norm_e4m3_{}", sum.dtype()),
                Kernel::AllReduceRmsNormE4m3Small(sum) => format!("all_reduce_rms_norm_e4m3_small_{}", sum.dtype()),
                Kernel::AllReduceRmsNormE4m3Pair(sum) => format!("all_reduce_rms_norm_e4m3_pair_{}", sum.dtype()),
                Kernel::AllReduceNorm(sum) => format!("all_reduce_norm_{}", sum.dtype()),
                Kernel::AllReduceNormSmall(sum) => format!("all_reduce_norm_small_{}", sum.dtype()),
                Kernel::AllReduceNormPair(sum) => format!("all_reduce_norm_pair_{}", sum.dtype()),
                Kernel::AllReduceNormWide(sum) => format!("all_reduce_norm_wide_{}", sum.dtype()),
                Kernel::AllReduceNormWideSmall(sum) => format!("all_reduce_norm_wide_small_{}", sum.dtype()),
                Kernel::NormTwoStage(sum) => format!("norm_two_stage_{}", sum.dtype()),
                _ => continue,
            };
            assert_eq!(kernel.name(), format!("signal_{name}"));
        }
        assert_eq!(Kernel::all().count(), Kernel::COUNT);
        assert_eq!(
            (Kernel::Move.name(), Kernel::ReduceScatterAny.name()),
            ("signal_move", "signal_reduce_scatter_any")
        );
        assert_eq!(Kernel::AllReduceTwoStageAny.name(), "signal_all_reduce_two_stage_any");
        assert_eq!(Kernel::LinesReduceAny.name(), "signal_lines_reduce_any");
    }
}
