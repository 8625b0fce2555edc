//! The data of a set on the host: what ranks bring, and what calls must make of it. All of it comes from one seed, so that each
//! process can make the part of any rank, and none has to keep more than what takes long to make.

use std::ops::Range;
use std::thread;

use signal_comm::reference::{self, Rng};
use signal_comm::{Element, ReduceOp};

use super::check;
use super::shape::{Content, Place, Shape, Size};

/// What buffers hold before a call writes them, by 32 bits: a NaN in every type, which no reduction of finite values is.
pub(super) const GARBAGE: u32 = u32::MAX;
/// Elements below which a second thread is not worth its start.
const PARALLEL_FROM: usize = 1 << 15;

/// The data of one set.
pub(super) struct Data<T> {
    shape: Shape,
    size: Size,
    seed: u64,
    /// What one call must give, for the ranks of this process.
    pub(super) once: Vec<Reduced<T>>,
    /// The largest error of that against the exact values.
    pub(super) error: f64,
}

/// The reduction of one part.
pub(super) struct Reduced<T> {
    part: usize,
    values: Vec<T>,
}

impl<T: Element> Data<T> {
    pub(super) fn new(shape: Shape, size: Size, seed: u64, here: Range<usize>) -> Self {
        let mut data = Data { shape, size, seed, once: Vec::new(), error: 0.0 };
        for part in data.reduced_parts(here) {
            let (values, error) = reduction(shape.op, &data.pieces(part));
            data.once.push(Reduced { part, values });
            data.error = data.error.max(error);
        }
        data
    }

    /// What a rank's buffer holds before a call that reads it.
    pub(super) fn before(&self, rank: usize) -> Vec<T> {
        self.filled(&self.shape.before(rank), &[])
    }

    /// What a rank brings.
    pub(super) fn input(&self, rank: usize) -> Vec<T> {
        let pieces: Vec<Content> = self.shape.input(rank).map(|part| Content::Piece { rank, part }).collect();
        self.filled(&pieces, &[])
    }

    /// What a rank's buffer must hold after so many calls, given what they have reduced.
    pub(super) fn after(&self, rank: usize, place: Place, calls: u32, reduced: &[Reduced<T>]) -> Vec<T> {
        self.filled(&self.shape.after(rank, place, calls), reduced)
    }

    /// The reductions that so many calls in place leave, each of which takes in the result of the one before.
    pub(super) fn again(&self, calls: u32) -> Vec<Reduced<T>> {
        let again = |once: &Reduced<T>| {
            let part = once.part;
            let ranks: Vec<usize> = (0..self.shape.world).collect();
            let kept = parallel(self.size.count, &ranks, |&rank| {
                (!self.shape.replaces(rank, part)).then(|| self.piece(rank, part))
            });
            Reduced { part, values: repeated(self.shape.op, &once.values, &kept, calls) }
        };
        self.once.iter().map(again).collect()
    }

    /// The largest error of what one call has left in a rank's buffer, where it was to write.
    pub(super) fn error_of(&self, rank: usize, place: Place, found: &[T]) -> f64 {
        let mut worst = 0.0f64;
        for (part, content) in self.shape.after(rank, place, 1).into_iter().enumerate() {
            let exact = match content {
                Content::Garbage => continue,
                Content::Piece { rank, part } => self.piece(rank, part).iter().map(|value| value.to_f64()).collect(),
                Content::Reduced { part } => check::exact(self.shape.op, &slices(&self.pieces(part))),
            };
            let found = found.get(self.size.elements(part..part + 1)).unwrap_or_default();
            worst = worst.max(check::max_error(found, &exact));
        }
        worst
    }

    /// The parts whose reduction the ranks of this process get.
    fn reduced_parts(&self, here: Range<usize>) -> Vec<usize> {
        let place = self.shape.places().first().copied().unwrap_or(Place::OutOfPlace);
        let contents = here.flat_map(|rank| self.shape.after(rank, place, 1));
        let mut parts: Vec<usize> = contents
            .filter_map(|content| match content {
                Content::Reduced { part } => Some(part),
                _ => None,
            })
            .collect();
        parts.sort_unstable();
        parts.dedup();
        parts
    }

    /// A part of what a rank brings.
    fn piece(&self, rank: usize, part: usize) -> Vec<T> {
        let number = (rank * self.shape.parts() + part) as u64;
        reference::random(Rng::new(self.seed ^ number).next_u64(), self.size.count)
    }

    /// A part of what every rank brings.
    fn pieces(&self, part: usize) -> Vec<Vec<T>> {
        let ranks: Vec<usize> = (0..self.shape.world).collect();
        parallel(self.size.count, &ranks, |&rank| self.piece(rank, part))
    }

    fn filled(&self, contents: &[Content], reduced: &[Reduced<T>]) -> Vec<T> {
        let garbage = || vec![T::from_bits(u64::MAX); self.size.count];
        let parts = parallel(self.size.count, contents, |content| match *content {
            Content::Garbage => garbage(),
            Content::Piece { rank, part } => self.piece(rank, part),
            Content::Reduced { part } => {
                let found = reduced.iter().find(|reduced| reduced.part == part);
                found.map_or_else(garbage, |reduced| reduced.values.clone())
            }
        });
        parts.concat()
    }
}

fn slices<T>(inputs: &[Vec<T>]) -> Vec<&[T]> {
    inputs.iter().map(Vec::as_slice).collect()
}

/// The reduction in rank order, and its largest error.
fn reduction<T: Element>(op: ReduceOp, inputs: &[Vec<T>]) -> (Vec<T>, f64) {
    let count = inputs.first().map_or(0, Vec::len);
    let chunk = |range: &Range<usize>| {
        let inputs: Vec<&[T]> = inputs.iter().map(|input| &input[range.clone()]).collect();
        let values = reference::all_reduce(&inputs, op);
        let error = check::max_error(&values, &check::exact(op, &inputs));
        (values, error)
    };
    let mut all = Vec::with_capacity(count);
    let mut error = 0.0f64;
    for (values, worst) in parallel(count, &chunks(count), chunk) {
        all.extend(values);
        error = error.max(worst);
    }
    (all, error)
}

/// The result of `calls` in place, the first of which gave `once`: by rank, what it brings to each, or none where that is the last
/// result.
fn repeated<T: Element>(op: ReduceOp, once: &[T], kept: &[Option<Vec<T>>], calls: u32) -> Vec<T> {
    let chunk = |range: &Range<usize>| {
        let mut values = once[range.clone()].to_vec();
        for _ in 1..calls {
            let brings = kept.iter().map(|kept| match kept {
                Some(kept) => &kept[range.clone()],
                None => &values,
            });
            let inputs: Vec<&[T]> = brings.collect();
            values = reference::all_reduce(&inputs, op);
        }
        values
    };
    parallel(once.len(), &chunks(once.len()), chunk).concat()
}

/// Equal parts of `0..count`, one for each CPU.
fn chunks(count: usize) -> Vec<Range<usize>> {
    let cpus = if count < PARALLEL_FROM { 1 } else { thread::available_parallelism().map_or(1, usize::from) };
    (0..cpus).map(|part| part * count / cpus..(part + 1) * count / cpus).collect()
}

/// `work` on every item, in order, each on a thread of its own where they are of enough elements.
fn parallel<I: Sync, O: Send>(elements: usize, items: &[I], work: impl Fn(&I) -> O + Sync) -> Vec<O> {
    if items.len() == 1 || elements < PARALLEL_FROM {
        return items.iter().map(work).collect();
    }
    thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> = items.iter().map(|item| scope.spawn(move || work(item))).collect();
        let join = |thread: thread::ScopedJoinHandle<'_, O>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        threads.into_iter().map(join).collect()
    })
}

#[cfg(test)]
mod tests {
    use half::f16;
    use signal_comm::Collective;

    use super::*;

    #[test]
    fn a_reference_does_not_depend_on_how_it_is_cut() {
        let count = PARALLEL_FROM + 3;
        let inputs: Vec<Vec<f16>> = (0..3).map(|seed| reference::random(seed, count)).collect();
        for op in ReduceOp::ALL {
            let (values, error) = reduction(op, &inputs);
            assert_eq!(values, reference::all_reduce(&slices(&inputs), op));
            assert_eq!(error, check::max_error(&values, &check::exact(op, &slices(&inputs))));
        }
    }

    #[test]
    fn calls_in_place_overflow_like_the_kernel() {
        let (once, none) = ([f16::from_f32(60000.0), f16::from_f32(-1.5)], [None, None]);
        assert_eq!(repeated(ReduceOp::Sum, &once, &none, 1), once);
        assert_eq!(repeated(ReduceOp::Sum, &once, &none, 3), [f16::INFINITY, f16::from_f32(-6.0)]);
    }

    #[test]
    fn only_what_a_call_replaced_is_added_again() {
        let shape = |collective| Shape { collective, world: 3, root: 1, op: ReduceOp::Sum };
        let size = Size { bytes: 0, count: 5 };
        for (collective, owner) in [(Collective::ReduceScatter, 2), (Collective::Reduce, 1)] {
            let data = Data::<f32>::new(shape(collective), size, 7, 0..3);
            let Some(once) = data.once.last() else { panic!("nothing is reduced") };
            let mut brought = data.pieces(once.part);
            brought[owner].clone_from(&once.values);
            let again = data.again(2);
            assert_eq!(again.last().map(|again| &again.values), Some(&reduction(ReduceOp::Sum, &brought).0));
        }
    }

    #[test]
    fn a_process_keeps_the_reductions_of_its_ranks() {
        let kept = |collective, here| {
            let shape = Shape { collective, world: 3, root: 1, op: ReduceOp::Sum };
            let data = Data::<f32>::new(shape, Size { bytes: 0, count: 1 }, 7, here);
            data.once.iter().map(|reduced| reduced.part).collect::<Vec<_>>()
        };
        assert_eq!(kept(Collective::ReduceScatter, 0..3), [0, 1, 2]);
        assert_eq!(kept(Collective::ReduceScatter, 2..3), [2]);
        assert_eq!(kept(Collective::Reduce, 2..3), [0; 0]);
        assert_eq!(kept(Collective::AllReduce, 2..3), [0]);
        assert_eq!(kept(Collective::AllToAll, 0..3), [0; 0]);
    }
}
