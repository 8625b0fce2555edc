//! What a collective call asks for and what must come of it, apart from how a test drives it: for the suite, the fuzz test and the soak.
//!
//! A [`Job`] is a call as far as all ranks agree on it. [`Job::data`] is what every rank's memory holds before and after it, by the
//! scalar reference; [`Job::launch`] and [`Job::launch_raw`] make the call; a [`Twist`] makes it one that nobody can mean.

mod data;
mod launch;
mod twist;

pub use data::{Operand, RankData};
pub use launch::{Operands, RawOperands};
pub use twist::{Form, Twist};

use signal_core::reference::Rng;
use signal_core::{Algorithm, Collective, Dtype, FastSum, ReduceOp};

use crate::place::{below, pick};

/// A call, as far as all ranks must agree on it. Counts are of elements.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Job {
    /// Of so many.
    AllReduce(usize, ReduceOp),
    /// With a count for each rank.
    ReduceScatter(Vec<usize>, ReduceOp),
    /// With a count for each rank.
    AllGather(Vec<usize>),
    /// From the root, the second number.
    Broadcast(usize, usize),
    /// From the root, so many to each.
    Scatter(usize, usize),
    /// To the root, so many from each.
    Gather(usize, usize),
    /// To the root.
    Reduce(usize, usize, ReduceOp),
    /// For each rank.
    AllToAll(usize),
    /// From each rank (rows) to each.
    AllToAllRagged(Vec<usize>),
    /// With room for so many from each rank to each, and as many as these counts say, which may be more (rows to columns).
    AllToAllCounted(usize, Vec<u32>),
    /// From, to, elements.
    Transfers(Vec<(usize, usize, usize)>),
}

impl Job {
    /// A job of a collective, of about `count` elements for each rank.
    pub fn draw(rng: &mut Rng, collective: Collective, ranks: usize, count: usize) -> Self {
        let root = below(rng, ranks);
        let op = pick(rng, &[ReduceOp::Sum, ReduceOp::Sum, ReduceOp::Max, ReduceOp::Avg]);
        let ragged = below(rng, 2) == 0;
        let some = |rng: &mut Rng| if below(rng, 4) == 0 { 0 } else { below(rng, 2 * count + 1) };
        match collective {
            Collective::AllReduce => Job::AllReduce(count, op),
            Collective::ReduceScatter if ragged => Job::ReduceScatter((0..ranks).map(|_| some(rng)).collect(), op),
            Collective::ReduceScatter => Job::ReduceScatter(vec![count; ranks], op),
            Collective::AllGather if ragged => Job::AllGather((0..ranks).map(|_| some(rng)).collect()),
            Collective::AllGather => Job::AllGather(vec![count; ranks]),
            Collective::Broadcast => Job::Broadcast(count, root),
            Collective::Scatter => Job::Scatter(count, root),
            Collective::Gather => Job::Gather(count, root),
            Collective::Reduce => Job::Reduce(count, root, op),
            Collective::AllToAll if ragged => Job::AllToAllRagged((0..ranks * ranks).map(|_| some(rng)).collect()),
            Collective::AllToAll => Job::AllToAll(count),
            _ => {
                let pairs = (0..ranks * ranks).filter(|_| below(rng, 2) == 0).collect::<Vec<_>>();
                Job::Transfers(pairs.into_iter().map(|pair| (pair / ranks, pair % ranks, some(rng))).collect())
            }
        }
    }

    /// A job of any collective in any of its forms, counts on the device and single sends and receives among them.
    pub fn draw_any(rng: &mut Rng, ranks: usize, count: usize) -> Self {
        let collective = pick(rng, &Collective::ALL);
        match (Job::draw(rng, collective, ranks, count), below(rng, 3)) {
            (Job::AllToAll(_) | Job::AllToAllRagged(_), 0) if count > 0 => {
                let room = count;
                let size = |rng: &mut Rng| match below(rng, 8) {
                    0 => 0,
                    1 => room as u32,
                    2 => pick(rng, &[room as u32 + 1, 2 * room as u32 + 7, u32::MAX]),
                    _ => below(rng, room + 1) as u32,
                };
                Job::AllToAllCounted(room, (0..ranks * ranks).map(|_| size(rng)).collect())
            }
            // One send and one receive, and one of both on each rank: they have calls of their own.
            (Job::Transfers(_), 0) => Job::Transfers(vec![(below(rng, ranks), below(rng, ranks), count)]),
            (Job::Transfers(_), 1) => {
                let by = below(rng, ranks);
                Job::Transfers((0..ranks).map(|rank| (rank, (rank + by) % ranks, count)).collect())
            }
            (Job::AllReduce(count, _), _) => Job::AllReduce(count, pick(rng, &ReduceOp::ALL)),
            (Job::ReduceScatter(counts, _), 0) => Job::ReduceScatter(counts, pick(rng, &ReduceOp::ALL)),
            (Job::Reduce(count, root, _), 0) => Job::Reduce(count, root, pick(rng, &ReduceOp::ALL)),
            (job, _) => job,
        }
    }

    /// The collective that it is of.
    pub fn collective(&self) -> Collective {
        match self {
            Job::AllReduce(..) => Collective::AllReduce,
            Job::ReduceScatter(..) => Collective::ReduceScatter,
            Job::AllGather(_) => Collective::AllGather,
            Job::Broadcast(..) => Collective::Broadcast,
            Job::Scatter(..) => Collective::Scatter,
            Job::Gather(..) => Collective::Gather,
            Job::Reduce(..) => Collective::Reduce,
            Job::AllToAll(_) | Job::AllToAllRagged(_) | Job::AllToAllCounted(..) => Collective::AllToAll,
            Job::Transfers(_) => Collective::SendRecv,
        }
    }

    /// Its operator, if it reduces.
    pub fn op(&self) -> Option<ReduceOp> {
        match self {
            Job::AllReduce(_, op) | Job::ReduceScatter(_, op) | Job::Reduce(_, _, op) => Some(*op),
            _ => None,
        }
    }

    /// The algorithms that take it, with elements of `dtype`, on a domain that has a `shares`th of what there is.
    pub fn algorithms(&self, dtype: Dtype, domain: u32, shares: usize) -> Vec<Algorithm> {
        let lines = signal_core::layout::most_line_bytes(shares);
        let takes = |algorithm: &Algorithm| match algorithm {
            Algorithm::Lines if matches!(self, Job::AllToAllCounted(..)) => false,
            Algorithm::Push if matches!(self, Job::AllToAllCounted(..)) => false,
            Algorithm::Lines => self.largest() * dtype.bytes() <= lines,
            _ if algorithm.uses_region() => domain == 0 && self.op().is_some_and(|op| FastSum::of(op, dtype).is_some()),
            _ => true,
        };
        self.collective().algorithms().iter().copied().filter(takes).collect()
    }

    /// Elements of the largest piece, where it can go by lines.
    pub fn lines(&self) -> Option<usize> {
        (!matches!(self, Job::Transfers(_) | Job::AllToAllCounted(..))).then(|| self.largest())
    }

    /// Elements of the largest piece.
    fn largest(&self) -> usize {
        match self {
            Job::ReduceScatter(counts, _) | Job::AllGather(counts) | Job::AllToAllRagged(counts) => {
                counts.iter().max().copied().unwrap_or(0)
            }
            Job::AllReduce(count, _) | Job::Broadcast(count, _) | Job::Scatter(count, _) => *count,
            Job::Gather(count, _) | Job::Reduce(count, ..) | Job::AllToAll(count) => *count,
            Job::AllToAllCounted(room, _) => *room,
            Job::Transfers(transfers) => transfers.iter().map(|(.., count)| *count).max().unwrap_or(0),
        }
    }

    /// Whether it moves nothing, so that nothing is launched.
    pub fn is_empty(&self) -> bool {
        self.largest() == 0
    }

    /// Whether every rank has something for every other, so that none gets past it alone.
    pub fn meets_all(&self) -> bool {
        match self {
            Job::ReduceScatter(counts, _) | Job::AllGather(counts) => counts.iter().all(|count| *count > 0),
            Job::AllReduce(count, _) | Job::AllToAll(count) | Job::AllToAllCounted(count, _) => *count > 0,
            _ => false,
        }
    }

    /// Whether it has a typed form in place.
    pub fn has_in_place(&self) -> bool {
        match self {
            Job::ReduceScatter(counts, _) | Job::AllGather(counts) => all_equal(counts),
            Job::AllReduce(..) | Job::AllToAll(_) | Job::Reduce(..) => true,
            _ => false,
        }
    }

    /// Whether it has a raw form.
    pub fn has_raw(&self) -> bool {
        match self {
            Job::ReduceScatter(counts, _) | Job::AllGather(counts) => all_equal(counts),
            Job::AllToAllRagged(_) => false,
            _ => true,
        }
    }

    /// The same, but that each rank has something to send or to receive: then each launches a kernel, or none.
    pub fn for_everybody(mut self, ranks: usize) -> Self {
        if let Job::Transfers(transfers) = &mut self {
            for rank in 0..ranks {
                let busy = |(from, to, count): &(usize, usize, usize)| (*from == rank || *to == rank) && *count > 0;
                if !transfers.iter().any(busy) {
                    transfers.retain(|(from, to, _)| (*from, *to) != (rank, rank));
                    transfers.push((rank, rank, rank + 1));
                }
            }
        }
        self
    }
}

fn all_equal(counts: &[usize]) -> bool {
    counts.iter().all(|count| *count == counts[0])
}

/// Where the part of `rank` begins.
fn start(counts: &[usize], rank: usize) -> usize {
    counts.iter().take(rank).sum()
}

/// Runs a block with `$T` as the element type of a [`Dtype`].
#[doc(hidden)]
#[macro_export]
macro_rules! with_dtype {
    (@ $dtype:expr, $T:ident => $body:expr; $($Name:ident = $Type:ty),+) => {
        match $dtype {
            $($crate::element::Dtype::$Name => {
                type $T = $Type;
                $body
            })+
            // The one that is left.
            _ => {
                type $T = f32;
                $body
            }
        }
    };
    ($dtype:expr, $T:ident => $body:expr) => {
        $crate::with_dtype!(@ $dtype, $T => $body;
            F16 = $crate::element::f16, Bf16 = $crate::element::bf16, F64 = f64, I8 = i8, U8 = u8, I32 = i32, U32 = u32, I64 = i64,
            U64 = u64, E4m3 = $crate::element::E4m3, E5m2 = $crate::element::E5m2)
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(ranks: usize) -> impl Iterator<Item = Job> {
        let mut rng = Rng::new(ranks as u64);
        (0..600).map(move |_| Job::draw_any(&mut rng, ranks, 7))
    }

    #[test]
    fn data_is_that_of_the_definitions() {
        let after = |job: &Job, rank: usize, operand: usize| -> Vec<u32> {
            let data = job.data::<u32>(2, 5, false);
            data[rank].operands[operand].after.clone()
        };
        let before =
            |job: &Job, rank: usize| -> Vec<u32> { job.data::<u32>(2, 5, false)[rank].operands[0].before.clone() };
        let sum = Job::AllReduce(3, ReduceOp::Sum);
        let added: Vec<u32> = (0..3).map(|i| before(&sum, 0)[i].wrapping_add(before(&sum, 1)[i])).collect();
        assert_eq!((after(&sum, 0, 1), after(&sum, 1, 1)), (added.clone(), added.clone()));
        let scattered = Job::ReduceScatter(vec![1, 2], ReduceOp::Sum);
        assert_eq!((after(&scattered, 0, 1), after(&scattered, 1, 1)), (added[..1].to_vec(), added[1..].to_vec()));
        let ragged = Job::AllToAllRagged(vec![1, 2, 3, 0]);
        let (first, second) = (before(&ragged, 0), before(&ragged, 1));
        assert_eq!(after(&ragged, 0, 1), [&first[..1], &second[..]].concat());
        assert_eq!(after(&ragged, 1, 1), first[1..]);
        let counted = Job::AllToAllCounted(2, vec![0, 1, 9, 2]);
        let (first, second) = (before(&counted, 0), before(&counted, 1));
        assert_eq!(after(&counted, 0, 1)[2..], second[..2], "more than the room is cut off");
        assert_eq!((after(&counted, 1, 1)[0], &after(&counted, 1, 1)[2..]), (first[2], &second[2..]));
        let counts = counted.data::<u32>(2, 5, false)[1].counts.clone();
        assert_eq!(counts, Some([vec![9, 2], vec![1, 2]]));
        let sent = Job::Transfers(vec![(1, 0, 2), (1, 1, 1)]);
        assert_eq!((after(&sent, 0, 0), after(&sent, 1, 2)), (before(&sent, 1), after(&sent, 1, 1)));
    }

    #[test]
    fn only_what_is_written_changes_and_all_kinds_are_drawn() {
        for ranks in 1..4 {
            for job in drawn(ranks) {
                for in_place in [false, true] {
                    let data = job.data::<u8>(ranks, 1, in_place);
                    assert_eq!(data.len(), ranks);
                    for operand in data.iter().flat_map(|rank| &rank.operands) {
                        assert!(operand.written || operand.before == operand.after, "{job:?}");
                        assert_eq!(operand.before.len(), operand.after.len(), "{job:?}");
                    }
                }
            }
            for collective in Collective::ALL {
                assert!(drawn(ranks).any(|job| job.collective() == collective), "{collective}");
            }
            assert!(drawn(ranks).any(|job| matches!(job, Job::AllToAllCounted(..))));
            assert!(drawn(ranks).any(|job| matches!(job, Job::AllToAllRagged(_))));
        }
    }

    #[test]
    fn everybody_has_something_to_do() {
        for job in drawn(3).map(|job| job.for_everybody(3)) {
            if let Job::Transfers(transfers) = &job {
                for rank in 0..3 {
                    let busy = |(from, to, count): &(usize, usize, usize)| (*from == rank || *to == rank) && *count > 0;
                    assert!(transfers.iter().any(busy), "{job:?}");
                }
                // None twice.
                let mut pairs: Vec<_> = transfers.iter().map(|(from, to, _)| (from, to)).collect();
                pairs.sort_unstable();
                pairs.dedup();
                assert_eq!(pairs.len(), transfers.len(), "{job:?}");
            }
        }
    }
}
