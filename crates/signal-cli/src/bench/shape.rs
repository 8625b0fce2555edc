//! What a collective does, as data: how it divides buffers into parts, whose part ends up where, and how nccl-tests counts its
//! bytes. All else in the bench is the same for every collective, but for the call itself ([`calls`](super::calls)).

use std::ops::Range;

use signal_comm::{Collective, Dtype, ReduceOp};

use super::args::Args;
use crate::error::{CliError, Result};

/// Where the result goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// To a buffer of its own.
    OutOfPlace,
    /// Over the input.
    InPlace,
}

impl Place {
    pub(super) fn name(self) -> &'static str {
        match self {
            Place::OutOfPlace => "out of place",
            Place::InPlace => "in place",
        }
    }
}

/// A collective among the ranks of a world.
///
/// Every rank has buffers of the same length, as symmetric memory needs it: of one part, or of a part for each rank where any side
/// of the collective has that.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) collective: Collective,
    pub(super) world: usize,
    /// 0 where there is none.
    pub(super) root: usize,
    /// Of the collectives that reduce.
    pub(super) op: ReduceOp,
}

/// A size as nccl-tests prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Size {
    /// Bytes of the larger side of a call, which are those of a buffer.
    pub(super) bytes: usize,
    /// Elements of a part.
    pub(super) count: usize,
}

impl Size {
    /// The elements of some parts, in a buffer.
    pub(super) fn elements(self, parts: Range<usize>) -> Range<usize> {
        parts.start * self.count..parts.end * self.count
    }
}

/// What a part of a buffer holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// What no call has written, or was to write.
    Garbage,
    /// This part of this rank's random data.
    Piece { rank: usize, part: usize },
    /// The reduction of this part of what all ranks bring.
    Reduced { part: usize },
}

impl Shape {
    /// What the command line asks for, among this many ranks.
    pub(super) fn new(args: &Args, world: usize) -> Result<Self> {
        let root = args.root.unwrap_or(0);
        if root >= world {
            return Err(CliError::Arguments(format!("--root {root}: the ranks are 0 to {}", world - 1)));
        }
        Ok(Shape { collective: args.collective, world, root, op: args.op.unwrap_or(ReduceOp::Sum) })
    }

    /// Parts of a buffer.
    pub(super) fn parts(&self) -> usize {
        if self.collective.has_parts() { self.world } else { 1 }
    }

    /// The largest size of at most `bytes` whose parts are equal and of whole elements.
    pub(super) fn size(&self, bytes: usize, dtype: Dtype) -> Result<Size> {
        let (parts, element) = (self.parts(), dtype.bytes());
        match bytes / element / parts {
            0 => {
                let Shape { collective, .. } = self;
                let why =
                    format!("{bytes} bytes hold no whole {dtype} element in each of {parts} parts of {collective}");
                Err(CliError::Arguments(why))
            }
            count => Ok(Size { bytes: count * parts * element, count }),
        }
    }

    /// The forms that it has: some write over their only buffer, some have no such form.
    pub(super) fn places(&self) -> &'static [Place] {
        match self.collective {
            Collective::Broadcast => &[Place::InPlace],
            Collective::Scatter | Collective::Gather | Collective::SendRecv => &[Place::OutOfPlace],
            _ => &[Place::OutOfPlace, Place::InPlace],
        }
    }

    /// Bus bandwidth by algorithm bandwidth, as nccl-tests has it: what a link carries if each byte crosses it as often as it
    /// has to, which is comparable between world sizes.
    pub(super) fn bus_factor(&self) -> f64 {
        let world = self.world as f64;
        match self.collective {
            Collective::AllReduce => 2.0 * (world - 1.0) / world,
            divided if divided.has_parts() => (world - 1.0) / world,
            _ => 1.0,
        }
    }

    /// The operator's name in tables.
    pub(super) fn op_name(&self) -> &'static str {
        if self.collective.reduces() { self.op.name() } else { "none" }
    }

    /// The root in tables: -1 where there is none.
    pub(super) fn root_number(&self) -> i64 {
        if self.collective.has_root() { self.root as i64 } else { -1 }
    }

    /// The parts that a rank brings.
    pub(super) fn input(&self, rank: usize) -> Range<usize> {
        let brings = rank == self.root || !matches!(self.collective, Collective::Broadcast | Collective::Scatter);
        match self.collective {
            _ if !brings => 0..0,
            // At its place among the others, so that the same bytes serve in place.
            Collective::AllGather => rank..rank + 1,
            Collective::ReduceScatter | Collective::Scatter | Collective::AllToAll => 0..self.world,
            _ => 0..1,
        }
    }

    /// The parts that a rank's result takes.
    pub(super) fn output(&self, rank: usize, place: Place) -> Range<usize> {
        let gets = rank == self.root || !matches!(self.collective, Collective::Gather | Collective::Reduce);
        match self.collective {
            _ if !gets => 0..0,
            Collective::AllGather | Collective::Gather | Collective::AllToAll => 0..self.world,
            Collective::ReduceScatter if place == Place::InPlace => rank..rank + 1,
            _ => 0..1,
        }
    }

    /// What a rank's buffer holds before a call that reads it.
    pub(super) fn before(&self, rank: usize) -> Vec<Content> {
        let input = self.input(rank);
        let content = |part| if input.contains(&part) { Content::Piece { rank, part } } else { Content::Garbage };
        (0..self.parts()).map(content).collect()
    }

    /// What a rank's buffer holds after so many calls. What they have reduced lies in the same parts after each.
    pub(super) fn after(&self, rank: usize, place: Place, calls: u32) -> Vec<Content> {
        let mut parts = match place {
            Place::OutOfPlace => vec![Content::Garbage; self.parts()],
            Place::InPlace => self.before(rank),
        };
        // Parts that change places in place are back after every second call.
        let back = place == Place::InPlace && calls.is_multiple_of(2);
        for part in self.output(rank, place) {
            parts[part] = match self.collective {
                Collective::AllReduce | Collective::Reduce => Content::Reduced { part: 0 },
                Collective::ReduceScatter => Content::Reduced { part: rank },
                Collective::AllGather => Content::Piece { rank: part, part },
                Collective::Broadcast => Content::Piece { rank: self.root, part: 0 },
                Collective::Scatter => Content::Piece { rank: self.root, part: rank },
                Collective::Gather => Content::Piece { rank: part, part: 0 },
                Collective::AllToAll if back => Content::Piece { rank, part },
                Collective::AllToAll => Content::Piece { rank: part, part: rank },
                Collective::SendRecv => Content::Piece { rank: self.peers(rank).1, part: 0 },
                // Its call is refused.
                _ => Content::Garbage,
            };
        }
        parts
    }

    /// Whether what a rank brings to this part is overwritten by the result in place, and so what it brings to the next call.
    pub(super) fn replaces(&self, rank: usize, part: usize) -> bool {
        self.output(rank, Place::InPlace).contains(&part)
    }

    /// Of a send-recv: whom a rank sends to, and whom it receives from.
    pub(super) fn peers(&self, rank: usize) -> (usize, usize) {
        ((rank + 1) % self.world, (rank + self.world - 1) % self.world)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(collective: Collective, world: usize) -> Shape {
        Shape { collective, world, root: world - 1, op: ReduceOp::Sum }
    }

    #[test]
    fn bus_factors_are_those_of_nccl_tests() {
        let factor = |collective, world| shape(collective, world).bus_factor();
        for world in 1..=8 {
            let n = world as f64;
            assert_eq!(factor(Collective::AllReduce, world), 2.0 * (n - 1.0) / n);
            for collective in [
                Collective::ReduceScatter,
                Collective::AllGather,
                Collective::AllToAll,
                Collective::Scatter,
                Collective::Gather,
            ] {
                assert_eq!(factor(collective, world), (n - 1.0) / n, "{collective}");
            }
            for collective in [Collective::Broadcast, Collective::Reduce, Collective::SendRecv] {
                assert_eq!(factor(collective, world), 1.0, "{collective}");
            }
        }
    }

    #[test]
    fn sizes_round_down_to_equal_parts_of_whole_elements() {
        let size =
            |collective, bytes, dtype| shape(collective, 3).size(bytes, dtype).map(|size| (size.bytes, size.count));
        assert_eq!(size(Collective::AllReduce, 1001, Dtype::F32).unwrap(), (1000, 250));
        assert_eq!(size(Collective::AllGather, 1001, Dtype::F32).unwrap(), (996, 83));
        assert_eq!(size(Collective::AllToAll, 6, Dtype::F16).unwrap(), (6, 1));
        let refused = size(Collective::Gather, 5, Dtype::F16).unwrap_err().to_string();
        assert!(refused.contains("no whole f16 element in each of 3 parts of gather"), "{refused}");
    }

    #[test]
    fn contents_are_those_of_the_definitions() {
        let piece = |rank, part| Content::Piece { rank, part };
        let (reduced, garbage) = (|part| Content::Reduced { part }, Content::Garbage);
        let after = |collective, rank, place, calls| shape(collective, 3).after(rank, place, calls);
        use Place::{InPlace, OutOfPlace};
        assert_eq!(after(Collective::AllReduce, 1, InPlace, 1), [reduced(0)]);
        assert_eq!(after(Collective::ReduceScatter, 1, OutOfPlace, 1), [reduced(1), garbage, garbage]);
        assert_eq!(after(Collective::ReduceScatter, 1, InPlace, 1), [piece(1, 0), reduced(1), piece(1, 2)]);
        assert_eq!(after(Collective::AllGather, 0, OutOfPlace, 1), [piece(0, 0), piece(1, 1), piece(2, 2)]);
        assert_eq!(after(Collective::Broadcast, 0, InPlace, 1), [piece(2, 0)]);
        assert_eq!(after(Collective::Scatter, 1, OutOfPlace, 1), [piece(2, 1), garbage, garbage]);
        assert_eq!(after(Collective::Gather, 2, OutOfPlace, 1), [piece(0, 0), piece(1, 0), piece(2, 0)]);
        assert_eq!(after(Collective::Gather, 0, OutOfPlace, 1), [garbage; 3]);
        assert_eq!(after(Collective::Reduce, 2, OutOfPlace, 1), [reduced(0)]);
        assert_eq!(after(Collective::Reduce, 0, InPlace, 1), [piece(0, 0)]);
        assert_eq!(after(Collective::AllToAll, 1, InPlace, 3), [piece(0, 1), piece(1, 1), piece(2, 1)]);
        assert_eq!(after(Collective::AllToAll, 1, InPlace, 2), [piece(1, 0), piece(1, 1), piece(1, 2)]);
        assert_eq!(after(Collective::AllToAll, 1, OutOfPlace, 2), [piece(0, 1), piece(1, 1), piece(2, 1)]);
        assert_eq!(after(Collective::SendRecv, 0, OutOfPlace, 1), [piece(2, 0)]);
        assert_eq!(shape(Collective::SendRecv, 1).peers(0), (0, 0));
    }

    #[test]
    fn results_lie_within_buffers_and_come_from_what_ranks_bring() {
        for collective in Collective::ALL {
            for world in 1..=8 {
                let shape = shape(collective, world);
                for (rank, place) in (0..world).flat_map(|rank| shape.places().iter().map(move |place| (rank, *place)))
                {
                    for content in shape.after(rank, place, 1) {
                        if let Content::Piece { rank: source, part } = content {
                            assert!(shape.input(source).contains(&part), "{shape:?} {rank} {place:?} {content:?}");
                        }
                    }
                }
            }
        }
    }
}
