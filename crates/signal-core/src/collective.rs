//! The collectives by name.
#![forbid(unsafe_code)]

use std::fmt;

use crate::kernel::{Algorithm, Operation};

/// A collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Collective {
    /// Every rank gets the reduction of all ranks' inputs.
    AllReduce,
    /// Every rank gets its part of the reduction of all ranks' inputs.
    ReduceScatter,
    /// Every rank gets all ranks' inputs, one behind the other.
    AllGather,
    /// Every rank gets the root's data.
    Broadcast,
    /// Every rank gets its part of the root's input.
    Scatter,
    /// The root gets all ranks' inputs, one behind the other.
    Gather,
    /// The root gets the reduction of all ranks' inputs.
    Reduce,
    /// Every rank gets its part of every rank's input, one behind the other.
    AllToAll,
    /// Ranks send to and receive from ranks of their choice.
    SendRecv,
}

impl Collective {
    /// All collectives.
    pub const ALL: [Collective; 9] = {
        use Collective::{AllGather, AllReduce, AllToAll, Broadcast, Gather, Reduce, ReduceScatter, Scatter, SendRecv};
        [AllReduce, ReduceScatter, AllGather, Broadcast, Scatter, Gather, Reduce, AllToAll, SendRecv]
    };

    /// The name used by the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Collective::AllReduce => "all-reduce",
            Collective::ReduceScatter => "reduce-scatter",
            Collective::AllGather => "all-gather",
            Collective::Broadcast => "broadcast",
            Collective::Scatter => "scatter",
            Collective::Gather => "gather",
            Collective::Reduce => "reduce",
            Collective::AllToAll => "all-to-all",
            Collective::SendRecv => "send-recv",
        }
    }

    /// The collective with this [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|collective| collective.name() == name)
    }

    /// The algorithms that it has.
    pub const fn algorithms(self) -> &'static [Algorithm] {
        match self {
            Collective::AllReduce => &Algorithm::ALL_REDUCE,
            // Lines come from every peer in every call, and its ranks have no business with all of them.
            Collective::SendRecv => &[Algorithm::Pull, Algorithm::Push],
            _ => &[Algorithm::Pull, Algorithm::Push, Algorithm::Lines],
        }
    }

    /// Whether it reduces.
    pub const fn reduces(self) -> bool {
        matches!(self, Collective::AllReduce | Collective::ReduceScatter | Collective::Reduce)
    }

    /// Whether one rank is its root.
    pub const fn has_root(self) -> bool {
        matches!(self, Collective::Broadcast | Collective::Scatter | Collective::Gather | Collective::Reduce)
    }

    /// Whether an operand has a part for each rank.
    pub const fn has_parts(self) -> bool {
        use Collective::{AllGather, AllToAll, Gather, ReduceScatter, Scatter};
        matches!(self, ReduceScatter | AllGather | Scatter | Gather | AllToAll)
    }

    /// What the kernels call it that exchange pieces.
    pub(crate) const fn operation(self) -> Operation {
        match self {
            Collective::AllReduce => Operation::AllReduceLines,
            Collective::ReduceScatter => Operation::ReduceScatter,
            Collective::AllGather => Operation::AllGather,
            Collective::Broadcast => Operation::Broadcast,
            Collective::Scatter => Operation::Scatter,
            Collective::Gather => Operation::Gather,
            Collective::Reduce => Operation::Reduce,
            Collective::AllToAll => Operation::AllToAll,
            Collective::SendRecv => Operation::SendRecv,
        }
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
