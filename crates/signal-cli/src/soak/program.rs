//! The program: rounds of random calls, each drawn from the seed and its own number alone, so that a round can be had again
//! without those before it.

use std::fmt;
use std::time::Duration;

use signal_comm::layout::most_line_bytes;
use signal_comm::reference::Rng;
use signal_comm::{Algorithm, Dtype, FastSum, ReduceOp};

use super::fault::{Fault, Kind};

/// Largest message. Lamport takes no more.
const MOST_BYTES: usize = 1 << 20;
/// First elements that leave a slice at every alignment that matters: 0 mod 16 bytes, one element off it for each type, and
/// 8 bytes off it.
const STARTS: [usize; 7] = [0, 0, 1, 2, 3, 16, 21];

/// Blocks and threads of a call; `None` leaves them to the plan.
pub(super) type Grid = (Option<u32>, Option<u32>);

const GPU: [Grid; 8] = [
    (None, None),
    (None, None),
    (None, Some(256)),
    (Some(1), Some(32)),
    (Some(3), Some(64)),
    (Some(8), Some(128)),
    (Some(16), Some(512)),
    (Some(32), Some(256)),
];
/// Each thread is one of the machine's.
const HOST: [Grid; 6] =
    [(None, None), (None, None), (None, Some(2)), (Some(1), Some(1)), (Some(3), Some(2)), (Some(4), Some(1))];

/// What all rounds of a run have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) seed: u64,
    pub(super) world: usize,
    /// Whether CPU threads run the kernels.
    pub(super) host: bool,
    pub(super) faults: bool,
}

impl Shape {
    /// The grids that calls draw from.
    pub(super) fn grids(&self) -> &'static [Grid] {
        if self.host { &HOST } else { &GPU }
    }
}

/// Calls that the ranks make without waiting for anything in between.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Round {
    pub(super) number: u64,
    pub(super) calls: Vec<Call>,
    pub(super) fault: Option<Fault>,
    /// How all ranks recover when the calls are over.
    pub(super) recovery: Option<Recovery>,
}

/// How ranks recover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recovery {
    /// One thread does it for all of them.
    Together,
    /// Each on a thread of its own.
    ByThreads,
}

/// One collective on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Call {
    Barrier { grid: Grid },
    AllReduce(AllReduce),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct AllReduce {
    pub(super) count: usize,
    pub(super) dtype: Dtype,
    pub(super) op: ReduceOp,
    pub(super) algorithm: Option<Algorithm>,
    pub(super) grid: Grid,
    /// Seed of the inputs.
    pub(super) data: u64,
    /// By rank.
    pub(super) places: Vec<Place>,
}

/// Where one rank keeps the input and the output of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) input: Memory,
    pub(super) output: Memory,
    /// First element of the input within its buffer.
    pub(super) input_start: usize,
    /// First element of the output within its buffer.
    pub(super) output_start: usize,
    /// The output is the input.
    pub(super) in_place: bool,
}

/// What a slice lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// Memory that only its own rank may touch.
    Local,
    /// The symmetric buffer with this number. Ranks may use different ones in one call.
    Symmetric(usize),
}

impl Round {
    pub(super) fn generate(shape: &Shape, number: u64) -> Self {
        // Seeds are often small numbers, and so are rounds: both are spread before they meet.
        let mut rng = Rng::new(Rng::new(shape.seed).next_u64() ^ Rng::new(!number).next_u64());
        let length = 1 + below(&mut rng, 80);
        let mut calls: Vec<Call> = (0..length).map(|_| Call::generate(shape, &mut rng)).collect();
        let draws_fault = below(&mut rng, 3) == 0;
        // The second round always has the plainest, so that short runs have had it.
        let plain = number == 1;
        let fault = (shape.faults && (draws_fault || plain)).then(|| {
            if !calls.iter().any(Call::launches) {
                calls.push(Call::Barrier { grid: (None, None) });
            }
            let fault = Fault::generate(shape.world, &calls, &mut rng);
            if plain { Fault { kind: Kind::Missing, ..fault } } else { fault }
        });
        // Now and then there is nothing to recover from, which is harmless.
        let recovers = fault.is_some() || (shape.faults && below(&mut rng, 16) == 0);
        let recovery = recovers.then(|| pick(&mut rng, &[Recovery::Together, Recovery::ByThreads]));
        Round { number, calls, fault, recovery }
    }

    /// Calls of the first `end` that run a kernel.
    pub(super) fn launches(&self, end: usize) -> usize {
        self.calls.iter().take(end).filter(|call| call.launches()).count()
    }
}

/// What goes by lines: the rounds have one domain.
const MOST_LINE_BYTES: usize = most_line_bytes(1);

impl Call {
    fn generate(shape: &Shape, rng: &mut Rng) -> Self {
        let grid = pick(rng, shape.grids());
        if below(rng, 10) == 0 {
            return Call::Barrier { grid };
        }
        // Mostly what engines call for.
        let (op, dtype) = match below(rng, 3) {
            0 => (pick(rng, &ReduceOp::ALL), pick(rng, &Dtype::ALL)),
            _ => (ReduceOp::Sum, pick(rng, &FastSum::ALL).dtype()),
        };
        let most = MOST_BYTES / dtype.bytes();
        let count = match below(rng, 40) {
            0 => 0,
            1 => 1,
            2 => most - below(rng, 9),
            3 => below(rng, most + 1),
            4..12 => below(rng, 8192),
            _ => below(rng, 300),
        };
        let takes = |algorithm: &Algorithm| match algorithm {
            Algorithm::Lamport | Algorithm::TwoShot => FastSum::of(op, dtype).is_some(),
            Algorithm::Lines => count * dtype.bytes() <= MOST_LINE_BYTES,
            _ => true,
        };
        let algorithms = Algorithm::ALL_REDUCE.into_iter().filter(takes).map(Some);
        let algorithms = std::iter::once(None).chain(algorithms).collect::<Vec<_>>();
        Call::AllReduce(AllReduce {
            count,
            dtype,
            op,
            algorithm: pick(rng, &algorithms),
            grid,
            data: rng.next_u64(),
            places: places(shape.world, rng),
        })
    }

    /// Whether it runs a kernel: an all-reduce of nothing does not.
    pub(super) fn launches(&self) -> bool {
        !matches!(self, Call::AllReduce(AllReduce { count: 0, .. }))
    }

    /// Where a rank keeps its part.
    pub(super) fn place(&self, rank: usize) -> Option<&Place> {
        match self {
            Call::Barrier { .. } => None,
            Call::AllReduce(call) => call.places.get(rank),
        }
    }

    /// In words, as far as it is the same on every rank.
    pub(super) fn describe(&self) -> String {
        match self {
            Call::Barrier { grid } => format!("barrier, {}", describe_grid(*grid)),
            Call::AllReduce(AllReduce { count, dtype, op, algorithm, grid, .. }) => {
                let algorithm = algorithm.map_or("auto", Algorithm::name);
                format!("all-reduce of {count} {dtype}, {op}, {algorithm}, {}", describe_grid(*grid))
            }
        }
    }
}

fn describe_grid((blocks, threads): Grid) -> String {
    let text = |number: Option<u32>| number.map_or_else(|| "planned".to_owned(), |number| number.to_string());
    format!("grid {} x {}", text(blocks), text(threads))
}

/// A place for each rank: mostly alike, as real programs have it, sometimes nothing alike.
fn places(world: usize, rng: &mut Rng) -> Vec<Place> {
    let mut symmetric = Place {
        input: Memory::Symmetric(0),
        output: Memory::Symmetric(0),
        input_start: 0,
        output_start: 0,
        in_place: false,
    };
    match below(rng, 5) {
        0 => vec![symmetric; world],
        1 => {
            symmetric.in_place = true;
            vec![symmetric; world]
        }
        2 => vec![Place::generate(rng); world],
        3 => {
            let mut places = vec![symmetric; world];
            places[below(rng, world)] = Place::generate(rng);
            places
        }
        _ => (0..world).map(|_| Place::generate(rng)).collect(),
    }
}

impl Place {
    fn generate(rng: &mut Rng) -> Self {
        let memories = [Memory::Local, Memory::Symmetric(0), Memory::Symmetric(1)];
        Place {
            input: pick(rng, &memories),
            output: pick(rng, &memories),
            input_start: pick(rng, &STARTS),
            output_start: pick(rng, &STARTS),
            in_place: below(rng, 2) == 0,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |memory: Memory| match memory {
            Memory::Local => "local memory".to_owned(),
            Memory::Symmetric(number) => format!("symmetric buffer {number}"),
        };
        let Place { input, output, input_start, output_start, in_place } = *self;
        match in_place {
            true => write!(f, "in place in {} from element {input_start}", name(input)),
            false => {
                write!(f, "{} from element {input_start} to {} from element {output_start}", name(input), name(output))
            }
        }
    }
}

/// Sleeps, mostly not at all: up to 1.5 ms.
pub(super) fn dawdle(rng: &mut Rng) {
    if below(rng, 8) == 0 {
        std::thread::sleep(Duration::from_micros(rng.below(1500)));
    }
}

/// A number below `n`.
pub(super) fn below(rng: &mut Rng, n: usize) -> usize {
    rng.below(n as u64) as usize
}

/// One of `choices`.
pub(super) fn pick<T: Copy>(rng: &mut Rng, choices: &[T]) -> T {
    choices[below(rng, choices.len())]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rounds(seed: u64, world: usize, faults: bool) -> Vec<Round> {
        let shape = Shape { seed, world, host: true, faults };
        (0..100).map(|number| Round::generate(&shape, number)).collect()
    }

    #[test]
    fn a_seed_gives_the_same_program() {
        let program = rounds(7, 3, true);
        assert_eq!(program, rounds(7, 3, true));
        assert_ne!(program, rounds(8, 3, true));
        // Round n of one seed is not round n - 1 of the next.
        let calls = |program: &[Round]| program.iter().map(|round| round.calls.clone()).collect::<Vec<_>>();
        assert_ne!(calls(&rounds(7, 3, false))[1..], calls(&rounds(8, 3, false))[..99]);
    }

    #[test]
    fn programs_hold_all_that_there_is() {
        let calls: Vec<Call> = rounds(1, 3, false).into_iter().flat_map(|round| round.calls).collect();
        assert!(calls.iter().any(|call| matches!(call, Call::Barrier { .. })));
        let all: Vec<&AllReduce> = calls
            .iter()
            .filter_map(|call| match call {
                Call::AllReduce(call) => Some(call),
                Call::Barrier { .. } => None,
            })
            .collect();
        for dtype in FastSum::ALL.map(FastSum::dtype) {
            for algorithm in Algorithm::ALL_REDUCE.into_iter().map(Some).chain([None]) {
                assert!(all.iter().any(|call| (call.dtype, call.algorithm) == (dtype, algorithm)));
            }
        }
        assert!(Dtype::ALL.iter().all(|dtype| all.iter().any(|call| call.dtype == *dtype)));
        assert!(ReduceOp::ALL.iter().all(|op| all.iter().any(|call| call.op == *op)));
        assert!(all.iter().any(|call| call.count == 0) && all.iter().any(|call| call.count == 1));
        assert!(all.iter().all(|call| call.count * call.dtype.bytes() <= MOST_BYTES && call.places.len() == 3));
        assert!(all.iter().any(|call| call.count * call.dtype.bytes() > MOST_BYTES - 64));
        let kinds: [fn(&Place) -> bool; 3] =
            [|place| place.in_place, |place| place.input == Memory::Local, |place| place.input_start > 0];
        for kind in kinds {
            assert!(all.iter().any(|call| call.places.iter().all(kind)));
            assert!(all.iter().any(|call| !call.places.iter().any(kind)));
        }
    }

    #[test]
    fn faults_come_at_calls_that_run_and_are_recovered_from() {
        assert!(rounds(3, 3, false).iter().all(|round| round.fault.is_none() && round.recovery.is_none()));
        for world in [2, 3, 8] {
            let program = rounds(3, world, true);
            assert_eq!(program[1].fault.map(|fault| fault.kind), Some(Kind::Missing));
            assert!(program.iter().any(|round| round.fault.is_none()));
            for kind in Kind::ALL {
                assert!(program.iter().any(|round| round.fault.is_some_and(|fault| fault.kind == kind)), "{kind:?}");
            }
            for round in &program {
                let Some(fault) = &round.fault else { continue };
                assert!(round.recovery.is_some() && round.calls[fault.call].launches(), "{round:?}");
                assert!(fault.rank < world && fault.by < world && fault.by != fault.rank, "{fault:?}");
            }
        }
    }
}
