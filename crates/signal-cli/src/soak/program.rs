//! The program: rounds of random calls, each drawn from the seed and its own number alone, so that a round can be had again
//! without those before it.

use std::fmt;
use std::time::Duration;

use signal_comm::layout::NUM_BARRIER_DOMAINS;
use signal_comm::reference::Rng;
use signal_comm::{Algorithm, Dtype, FastSum, ReduceOp};
use signal_conformance::job::{Form, Job, Twist};

use super::fault::{Fault, Kind};

/// Largest message, about. Lamport takes no more.
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
    /// Whether domains are open in every round.
    pub(super) domains: bool,
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
    /// Whether the calls are of the group whose domains are open.
    pub(super) domains: bool,
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

/// One call on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Call {
    Barrier { grid: Grid, domain: u32 },
    Collective(Collective),
}

/// One collective on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Collective {
    pub(super) job: Job,
    pub(super) dtype: Dtype,
    pub(super) algorithm: Option<Algorithm>,
    pub(super) grid: Grid,
    pub(super) domain: u32,
    /// By the raw layer.
    pub(super) raw: bool,
    /// What is wrong with it, so that every rank has to refuse it.
    pub(super) twist: Option<Twist>,
    /// Seed of the data.
    pub(super) data: u64,
    /// By rank.
    pub(super) places: Vec<Place>,
}

/// Where one rank keeps the operands of a call: the first in the first memory, the second in the second, and so on in turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) memories: [Memory; 2],
    /// First elements of operands within their buffers.
    pub(super) starts: [usize; 2],
    /// The output is the input, where the call has such a form.
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
        let domains = below(&mut rng, 2) == 0 || shape.domains;
        let mut calls: Vec<Call> = (0..length).map(|_| Call::generate(shape, domains, &mut rng)).collect();
        let draws_fault = below(&mut rng, 3) == 0;
        // The second round always has the plainest, so that short runs have had it.
        let plain = number == 1;
        let fault = (shape.faults && (draws_fault || plain)).then(|| {
            if !calls.iter().any(Call::meets_all) {
                calls.push(Call::Barrier { grid: (None, None), domain: 0 });
            }
            let fault = Fault::generate(shape.world, &calls, &mut rng);
            if plain { Fault { kind: Kind::Missing, ..fault } } else { fault }
        });
        // Now and then there is nothing to recover from, which is harmless.
        let recovers = fault.is_some() || (shape.faults && below(&mut rng, 16) == 0);
        let recovery = recovers.then(|| pick(&mut rng, &[Recovery::Together, Recovery::ByThreads]));
        Round { number, domains, calls, fault, recovery }
    }

    /// Calls of the first `end` that run a kernel on a domain.
    pub(super) fn launches(&self, end: usize, domain: u32) -> usize {
        self.calls.iter().take(end).filter(|call| call.launches() && call.domain() == domain).count()
    }
}

impl Call {
    fn generate(shape: &Shape, domains: bool, rng: &mut Rng) -> Self {
        let grid = pick(rng, shape.grids());
        // Half of the calls on one domain, which alone has all algorithms.
        let domain = if domains && below(rng, 2) == 0 { below(rng, NUM_BARRIER_DOMAINS) as u32 } else { 0 };
        if below(rng, 10) == 0 {
            return Call::Barrier { grid, domain };
        }
        // Mostly what engines call for.
        let (op, dtype) = match below(rng, 3) {
            0 => (pick(rng, &ReduceOp::ALL), pick(rng, &Dtype::ALL)),
            _ => (ReduceOp::Sum, pick(rng, &FastSum::ALL).dtype()),
        };
        let most = MOST_BYTES / dtype.bytes();
        let job = match below(rng, 2) {
            0 => Job::AllReduce(count(rng, most), op),
            // Of others each rank may have a part for each, twice as large as is said.
            _ => {
                let count = count(rng, most / (2 * shape.world));
                Job::draw_any(rng, shape.world, count).for_everybody(shape.world)
            }
        };
        let shares = if domains { NUM_BARRIER_DOMAINS } else { 1 };
        let algorithms = job.algorithms(dtype, domain, shares).into_iter().map(Some);
        let algorithms = std::iter::once(None).chain(algorithms).collect::<Vec<_>>();
        let algorithm = pick(rng, &algorithms);
        let form =
            Form { raw: job.has_raw() && below(rng, 3) == 0, in_place: job.has_in_place() && below(rng, 3) == 0 };
        let twist =
            (below(rng, 12) == 0 && !job.is_empty()).then(|| Twist::draw(rng, &job, shape.world, dtype, form, domains));
        let mut places = places(shape.world, rng);
        if twist.is_some() {
            places.iter_mut().for_each(|place| place.in_place = form.in_place);
        }
        let (raw, data) = (form.raw, rng.next_u64());
        Call::Collective(Collective { job, dtype, algorithm, grid, domain, raw, twist, data, places })
    }

    /// Whether it runs a kernel, on every rank: what moves nothing does not, nor does what is refused.
    pub(super) fn launches(&self) -> bool {
        match self {
            Call::Barrier { .. } => true,
            Call::Collective(call) => call.twist.is_none() && !call.job.is_empty(),
        }
    }

    /// Whether no rank gets past it without all others.
    pub(super) fn meets_all(&self) -> bool {
        match self {
            Call::Barrier { .. } => true,
            Call::Collective(call) => call.twist.is_none() && call.job.meets_all(),
        }
    }

    pub(super) fn domain(&self) -> u32 {
        match self {
            Call::Barrier { domain, .. } | Call::Collective(Collective { domain, .. }) => *domain,
        }
    }

    /// Where a rank keeps its part.
    pub(super) fn place(&self, rank: usize) -> Option<&Place> {
        match self {
            Call::Barrier { .. } => None,
            Call::Collective(call) => call.places.get(rank),
        }
    }

    /// In words, as far as it is the same on every rank.
    pub(super) fn describe(&self) -> String {
        match self {
            Call::Barrier { grid, domain } => format!("barrier, {}, domain {domain}", describe_grid(*grid)),
            Call::Collective(Collective { job, dtype, algorithm, grid, domain, raw, twist, .. }) => {
                let algorithm = algorithm.map_or("auto", Algorithm::name);
                let raw = if *raw { ", raw" } else { "" };
                let twist = twist.as_ref().map_or_else(String::new, |twist| format!(", wrong on purpose: {twist:?}"));
                format!("{job:?} of {dtype}, {algorithm}, {}, domain {domain}{raw}{twist}", describe_grid(*grid))
            }
        }
    }
}

/// Elements of a call, up to `most`.
fn count(rng: &mut Rng, most: usize) -> usize {
    match below(rng, 40) {
        0 => 0,
        1 => 1,
        2 => most - below(rng, 9),
        3 => below(rng, most + 1),
        4..12 => below(rng, most.min(8192)),
        _ => below(rng, 300),
    }
}

fn describe_grid((blocks, threads): Grid) -> String {
    let text = |number: Option<u32>| number.map_or_else(|| "planned".to_owned(), |number| number.to_string());
    format!("grid {} x {}", text(blocks), text(threads))
}

/// A place for each rank: mostly alike, as real programs have it, sometimes nothing alike.
fn places(world: usize, rng: &mut Rng) -> Vec<Place> {
    let mut symmetric = Place { memories: [Memory::Symmetric(0); 2], starts: [0; 2], in_place: false };
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
            memories: [pick(rng, &memories), pick(rng, &memories)],
            starts: [pick(rng, &STARTS), pick(rng, &STARTS)],
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
        let Place { memories: [first, second], starts: [start, other], in_place } = *self;
        let (first, second) = (name(first), name(second));
        let place = if in_place { ", in place if it can be" } else { "" };
        write!(f, "operands in {first} from element {start}, {second} from element {other}, in turns{place}")
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
        let shape = Shape { seed, world, host: true, faults, domains: false };
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
        let rounds = rounds(1, 3, false);
        assert!(rounds.iter().any(|round| round.domains) && rounds.iter().any(|round| !round.domains));
        let calls: Vec<Call> = rounds.into_iter().flat_map(|round| round.calls).collect();
        assert!(calls.iter().any(|call| matches!(call, Call::Barrier { .. })));
        let all: Vec<&Collective> = calls
            .iter()
            .filter_map(|call| match call {
                Call::Collective(call) => Some(call),
                Call::Barrier { .. } => None,
            })
            .collect();
        let sums = |dtype: Dtype, algorithm| {
            let mut sums = all.iter().filter(|call| matches!(call.job, Job::AllReduce(_, ReduceOp::Sum)));
            sums.any(|call| (call.dtype, call.algorithm) == (dtype, algorithm))
        };
        for dtype in FastSum::ALL.map(FastSum::dtype) {
            assert!(Algorithm::ALL_REDUCE.into_iter().map(Some).chain([None]).all(|algorithm| sums(dtype, algorithm)));
        }
        for collective in signal_comm::Collective::ALL {
            let of = || all.iter().filter(|call| call.job.collective() == collective);
            for algorithm in collective.algorithms() {
                assert!(of().any(|call| call.algorithm == Some(*algorithm)), "{collective} by {algorithm}");
            }
            assert!(of().any(|call| call.raw) && of().any(|call| !call.raw), "{collective}");
            assert!(of().any(|call| call.twist.is_some()) && of().any(|call| call.domain > 0), "{collective}");
        }
        assert!(all.iter().any(|call| matches!(call.job, Job::AllToAllCounted(..))));
        assert!(all.iter().any(|call| matches!(call.job, Job::AllToAllRagged(_))));
        assert!(Dtype::ALL.iter().all(|dtype| all.iter().any(|call| call.dtype == *dtype)));
        assert!(ReduceOp::ALL.iter().all(|op| all.iter().any(|call| call.job.op() == Some(*op))));
        let bytes = |call: &Collective| match call.job {
            Job::AllReduce(count, _) => count * call.dtype.bytes(),
            _ => 1,
        };
        assert!(all.iter().any(|call| bytes(call) == 0) && all.iter().any(|call| bytes(call) > MOST_BYTES - 64));
        assert!(all.iter().all(|call| bytes(call) <= MOST_BYTES && call.places.len() == 3));
        let kinds: [fn(&Place) -> bool; 3] =
            [|place| place.in_place, |place| place.memories[0] == Memory::Local, |place| place.starts[0] > 0];
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
                assert!(round.recovery.is_some() && round.calls[fault.call].meets_all(), "{round:?}");
                assert!(fault.rank < world && fault.by < world && fault.by != fault.rank, "{fault:?}");
            }
        }
    }
}
