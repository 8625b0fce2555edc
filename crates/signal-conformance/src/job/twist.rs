//! What makes a call one that nobody can mean.

use std::ops::Range;

use signal_core::reference::Rng;
use signal_core::{Algorithm, CallOptions, Dtype};

use super::{Job, all_equal};
use crate::place::{below, pick};

/// One thing that is wrong with a call that moves something, on every rank: each must refuse it, and nothing happens.
#[derive(Clone, Debug, PartialEq)]
pub struct Twist(What);

#[derive(Clone, Debug, PartialEq)]
enum What {
    /// The last operand has so many elements more, or fewer.
    Length(isize),
    /// The first operand is not a range of its buffer.
    Range(Range<usize>),
    Root(usize),
    /// Other counts.
    Counts(Vec<usize>),
    /// More elements than there are addresses; raw.
    Huge,
    /// The first operand is nowhere; raw.
    Null,
    /// The first operand is between two elements; raw.
    Misaligned,
    /// The output begins within the input; raw.
    Overlap,
    Algorithm(Algorithm),
    Domain(u32),
    Grid(Option<u32>, Option<u32>),
}

impl Twist {
    /// A twist for a job of `ranks` ranks that moves something; `domains`: whether they are open.
    pub fn draw(rng: &mut Rng, job: &Job, ranks: usize, dtype: Dtype, form: Form, domains: bool) -> Self {
        let mut all = vec![What::Domain(pick(rng, &[8, 9, 1 << 31, u32::MAX]))];
        all.extend((!domains).then(|| What::Domain(1 + below(rng, 7) as u32)));
        let lacks = |algorithm: &Algorithm| !job.collective().algorithms().contains(algorithm);
        let others: Vec<Algorithm> = Algorithm::ALL.into_iter().filter(lacks).collect();
        all.extend((!others.is_empty()).then(|| What::Algorithm(pick(rng, &others))));
        if matches!(job, Job::AllToAllCounted(..)) {
            all.push(What::Algorithm(pick(rng, &[Algorithm::Push, Algorithm::Lines])));
        }
        // A rank with nothing to send and nothing to receive does not come to the rest.
        if !matches!(job, Job::Transfers(_)) {
            let sizes = [0, 1025, 1 << 31, u32::MAX];
            all.push(What::Grid(Some(pick(rng, &sizes)), None));
            all.push(What::Grid(None, Some(pick(rng, &sizes))));
            let of_form = if form.raw { raw(job, dtype, form) } else { typed(rng, job, ranks, form) };
            all.extend(of_form);
            if matches!(job, Job::Broadcast(..) | Job::Scatter(..) | Job::Gather(..) | Job::Reduce(..)) {
                all.push(What::Root(pick(rng, &[ranks, ranks + 1, 8, usize::MAX])));
            }
        }
        Twist(all.swap_remove(below(rng, all.len())))
    }

    /// The job that is asked for.
    pub fn job(&self, job: &Job) -> Job {
        let mut job = job.clone();
        match (&self.0, &mut job) {
            (
                What::Root(other),
                Job::Broadcast(_, root) | Job::Scatter(_, root) | Job::Gather(_, root) | Job::Reduce(_, root, _),
            ) => *root = *other,
            (
                What::Counts(other),
                Job::ReduceScatter(counts, _) | Job::AllGather(counts) | Job::AllToAllRagged(counts),
            ) => counts.clone_from(other),
            (What::Huge, Job::ReduceScatter(counts, _) | Job::AllGather(counts)) => counts.fill(usize::MAX),
            (
                What::Huge,
                Job::AllReduce(count, _)
                | Job::Broadcast(count, _)
                | Job::Scatter(count, _)
                | Job::Gather(count, _)
                | Job::Reduce(count, ..)
                | Job::AllToAll(count)
                | Job::AllToAllCounted(count, _),
            ) => *count = usize::MAX,
            _ => {}
        }
        job
    }

    /// The options of the call.
    pub fn options(&self, mut options: CallOptions) -> CallOptions {
        match self.0 {
            What::Algorithm(algorithm) => options.algorithm = Some(algorithm),
            What::Domain(domain) => options.domain = domain,
            What::Grid(blocks, threads) => {
                options.blocks = blocks.or(options.blocks);
                options.threads = threads.or(options.threads);
            }
            _ => {}
        }
        options
    }

    /// Where the operands of a typed call lie.
    pub fn ranges(&self, ranges: &mut [Range<usize>]) {
        match &self.0 {
            What::Length(by) => {
                if let Some(last) = ranges.last_mut() {
                    // No shorter than nothing.
                    let longer = last.end.checked_add_signed(*by).filter(|end| *end >= last.start);
                    last.end = longer.unwrap_or(last.end + by.unsigned_abs());
                }
            }
            What::Range(other) => ranges.iter_mut().take(1).for_each(|range| *range = other.clone()),
            _ => {}
        }
    }

    /// Where the operands of a raw call begin.
    pub fn addresses(&self, rank: usize, job: &Job, dtype: Dtype, addresses: &mut [u64]) {
        let element = dtype.bytes() as u64;
        match (&self.0, addresses) {
            (What::Null, [first, ..]) => *first = 0,
            (What::Misaligned, [first, ..]) => *first += 1,
            (What::Overlap, [input, output]) => {
                // Where it would lie in place, and one element on.
                let own = |counts: &[usize]| rank as u64 * counts.first().map_or(0, |count| *count as u64 * element);
                match job {
                    Job::ReduceScatter(counts, _) => *output = *input + own(counts) + element,
                    Job::AllGather(counts) => *input = *output + own(counts) + element,
                    _ => *output = *input + element,
                }
            }
            _ => {}
        }
    }
}

/// How a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Form {
    /// By the raw layer.
    pub raw: bool,
    /// With one operand for input and output.
    pub in_place: bool,
}

fn typed(rng: &mut Rng, job: &Job, ranks: usize, form: Form) -> Vec<What> {
    let by = pick(rng, &[1, -1, 2, 7]);
    let range = pick(rng, &[(0, usize::MAX), (5, 4), (usize::MAX, usize::MAX), (usize::MAX, 0), (0, usize::MAX / 8)]);
    let mut all = vec![What::Range(range.0..range.1)];
    match job {
        // Any length can be meant.
        Job::AllReduce(..) if form.in_place => {}
        // One more element cannot be divided.
        Job::ReduceScatter(..) | Job::AllGather(_) | Job::AllToAll(_) if form.in_place => {
            all.extend((ranks > 1).then_some(What::Length(1)));
        }
        Job::AllReduce(..) | Job::ReduceScatter(..) | Job::AllGather(_) => all.push(What::Length(by)),
        Job::AllToAll(_) | Job::AllToAllRagged(_) | Job::AllToAllCounted(..) => all.push(What::Length(by)),
        // Only the root can tell.
        _ => {}
    }
    if let (Job::ReduceScatter(counts, _) | Job::AllGather(counts) | Job::AllToAllRagged(counts), false) =
        (job, form.in_place)
    {
        let mut others = counts.clone();
        match below(rng, 4) {
            0 => others.push(1),
            1 => others.truncate(others.len() - 1),
            2 => others.clear(),
            // One rank's count is that of the plain form, where it is not looked at.
            _ if ranks == 1 => others.push(0),
            _ => {
                let at = below(rng, others.len());
                others[at] = usize::MAX;
            }
        }
        all.push(What::Counts(others));
    }
    all
}

fn raw(job: &Job, dtype: Dtype, form: Form) -> Vec<What> {
    let mut all = vec![What::Huge, What::Null];
    all.extend((job.op().is_some() && dtype.bytes() > 1).then_some(What::Misaligned));
    let two = match job {
        Job::AllReduce(count, _) | Job::AllToAll(count) | Job::AllToAllCounted(count, _) => *count > 1,
        Job::ReduceScatter(counts, _) | Job::AllGather(counts) => all_equal(counts) && counts[0] > 1,
        _ => false,
    };
    all.extend((two && !form.in_place).then_some(What::Overlap));
    all
}
