//! Where ranks keep the input and the output of a call.

use signal_core::reference::Rng;

/// What a slice lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// Memory that only its own rank may touch.
    Local,
    /// The symmetric buffer with this number. Ranks may use different ones in one call.
    Symmetric(usize),
}

/// One rank's slices.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) input: Memory,
    pub(crate) output: Memory,
    /// First element of the input within its buffer.
    pub(crate) input_start: usize,
    /// First element of the output within its buffer.
    pub(crate) output_start: usize,
    /// The output is the input.
    pub(crate) in_place: bool,
}

impl Place {
    /// Out of place at the start of a buffer.
    pub(crate) fn new(input: Memory, output: Memory) -> Self {
        Place { input, output, input_start: 0, output_start: 0, in_place: false }
    }

    /// Out of place in symmetric memory.
    pub(crate) fn symmetric() -> Self {
        Place::new(Memory::Symmetric(0), Memory::Symmetric(0))
    }

    /// Out of place in memory that only its own rank may touch.
    pub(crate) fn local() -> Self {
        Place::new(Memory::Local, Memory::Local)
    }

    pub(crate) fn in_place(mut self) -> Self {
        self.in_place = true;
        self
    }

    pub(crate) fn at(mut self, input_start: usize, output_start: usize) -> Self {
        (self.input_start, self.output_start) = (input_start, output_start);
        self
    }
}

/// How the places of the ranks of one call relate.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Mix {
    Symmetric,
    SymmetricInPlace,
    Local,
    LocalInPlace,
    LocalToSymmetric,
    SymmetricToLocal,
    OneLocal,
    OneSymmetric,
    OneInPlace,
    OneMisaligned,
    AllMisaligned,
    OffsetsDiffer,
    BuffersDiffer,
    Anything,
}

/// First elements that leave a slice at every alignment that matters: 0 mod 16 bytes, one element off it for each
/// type, and 8 bytes off it.
const STARTS: [usize; 6] = [0, 1, 2, 3, 16, 21];

impl Mix {
    pub(crate) const ALL: [Mix; 14] = [
        Mix::Symmetric,
        Mix::SymmetricInPlace,
        Mix::Local,
        Mix::LocalInPlace,
        Mix::LocalToSymmetric,
        Mix::SymmetricToLocal,
        Mix::OneLocal,
        Mix::OneSymmetric,
        Mix::OneInPlace,
        Mix::OneMisaligned,
        Mix::AllMisaligned,
        Mix::OffsetsDiffer,
        Mix::BuffersDiffer,
        Mix::Anything,
    ];

    /// A place for each rank. The rank that differs, and whatever else is open, is drawn.
    pub(crate) fn places(self, ranks: usize, rng: &mut Rng) -> Vec<Place> {
        let odd_one = below(rng, ranks);
        (0..ranks)
            .map(|rank| {
                let odd = rank == odd_one;
                match self {
                    Mix::Symmetric => Place::symmetric(),
                    Mix::SymmetricInPlace => Place::symmetric().in_place(),
                    Mix::Local => Place::local(),
                    Mix::LocalInPlace => Place::local().in_place(),
                    Mix::LocalToSymmetric => Place::new(Memory::Local, Memory::Symmetric(0)),
                    Mix::SymmetricToLocal => Place::new(Memory::Symmetric(0), Memory::Local),
                    Mix::OneLocal if odd => Place::local(),
                    Mix::OneSymmetric if !odd => Place::local(),
                    Mix::OneInPlace if odd => Place::symmetric().in_place(),
                    Mix::OneMisaligned if odd => Place::symmetric().at(1, 3),
                    Mix::OneLocal | Mix::OneSymmetric | Mix::OneInPlace | Mix::OneMisaligned => Place::symmetric(),
                    Mix::AllMisaligned => Place::symmetric().at(3, 1),
                    Mix::OffsetsDiffer => Place::symmetric().at(start(rng), start(rng)),
                    Mix::BuffersDiffer => {
                        Place::new(Memory::Symmetric(below(rng, 2)), Memory::Symmetric(below(rng, 2)))
                    }
                    Mix::Anything => Place {
                        input: memory(rng),
                        output: memory(rng),
                        input_start: start(rng),
                        output_start: start(rng),
                        in_place: below(rng, 2) == 0,
                    },
                }
            })
            .collect()
    }
}

/// A number below `n`.
pub(crate) fn below(rng: &mut Rng, n: usize) -> usize {
    rng.below(n as u64) as usize
}

/// One of `choices`.
pub(crate) fn pick<T: Copy>(rng: &mut Rng, choices: &[T]) -> T {
    choices[below(rng, choices.len())]
}

fn start(rng: &mut Rng) -> usize {
    pick(rng, &STARTS)
}

fn memory(rng: &mut Rng) -> Memory {
    pick(rng, &[Memory::Local, Memory::Symmetric(0), Memory::Symmetric(1)])
}
