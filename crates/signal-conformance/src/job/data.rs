//! What a job's operands hold.

use signal_core::reference::{self, Rng, random_inputs};
use signal_core::{Element, ReduceOp};

use super::{Job, start};
use crate::exchange::poison;

/// An operand's elements before and after the call.
#[derive(Clone, Debug, PartialEq)]
pub struct Operand<T> {
    /// Before; of what is only written, the same element over and over.
    pub before: Vec<T>,
    /// After.
    pub after: Vec<T>,
    /// Whether the call writes it.
    pub written: bool,
}

impl<T: Element> Operand<T> {
    fn input(data: &[T]) -> Self {
        Operand { before: data.to_vec(), after: data.to_vec(), written: false }
    }

    fn output(after: Vec<T>) -> Self {
        Operand { before: vec![poison(); after.len()], after, written: true }
    }

    fn both(before: &[T], after: Vec<T>) -> Self {
        Operand { before: before.to_vec(), after, written: true }
    }
}

/// One rank's operands.
#[derive(Clone, Debug, PartialEq)]
pub struct RankData<T> {
    /// Input and output, in this order, as far as the rank has them, and one for both in place; of sends and receives an input for each
    /// send and then an output for each receive.
    pub operands: Vec<Operand<T>>,
    /// Where counts are on the device: those that are sent, and those that are received.
    pub counts: Option<[Vec<u32>; 2]>,
}

impl Job {
    /// What every rank holds, by rank; with `in_place`, where the job has such a form.
    pub fn data<T: Element>(&self, ranks: usize, seed: u64, in_place: bool) -> Vec<RankData<T>> {
        let counts = |rank: usize| match self {
            Job::AllToAllCounted(_, counts) => {
                let received = counts.iter().skip(rank).step_by(ranks).copied().collect();
                Some([counts[rank * ranks..][..ranks].to_vec(), received])
            }
            _ => None,
        };
        let operands = self.operands(ranks, seed, in_place && self.has_in_place()).into_iter();
        operands.enumerate().map(|(rank, operands)| RankData { operands, counts: counts(rank) }).collect()
    }

    fn operands<T: Element>(&self, ranks: usize, seed: u64, in_place: bool) -> Vec<Vec<Operand<T>>> {
        let of_ranks = |len: &dyn Fn(usize) -> usize| -> Vec<Vec<T>> {
            (0..ranks).map(|rank| bits(seed ^ (rank as u64 + 1) << 40, len(rank))).collect()
        };
        match self {
            Job::AllReduce(count, op) => {
                let inputs = random_inputs::<T>(ranks, seed, *count);
                let result = reduced(&inputs, *op);
                let operands = |input: &Vec<T>| match in_place {
                    true => vec![Operand::both(input, result.clone())],
                    false => vec![Operand::input(input), Operand::output(result.clone())],
                };
                inputs.iter().map(operands).collect()
            }
            Job::ReduceScatter(counts, op) => {
                let inputs = random_inputs::<T>(ranks, seed, counts.iter().sum());
                let result = reduced(&inputs, *op);
                let part = |rank: usize| start(counts, rank)..start(counts, rank + 1);
                let operands = |rank: usize| {
                    if !in_place {
                        return vec![Operand::input(&inputs[rank]), Operand::output(result[part(rank)].to_vec())];
                    }
                    let mut after = inputs[rank].clone();
                    after[part(rank)].copy_from_slice(&result[part(rank)]);
                    vec![Operand::both(&inputs[rank], after)]
                };
                (0..ranks).map(operands).collect()
            }
            Job::AllGather(counts) => {
                let inputs = of_ranks(&|rank| counts[rank]);
                let result = inputs.concat();
                let operands = |rank: usize| {
                    if !in_place {
                        return vec![Operand::input(&inputs[rank]), Operand::output(result.clone())];
                    }
                    let mut before = vec![poison(); result.len()];
                    before[start(counts, rank)..start(counts, rank + 1)].copy_from_slice(&inputs[rank]);
                    vec![Operand::both(&before, result.clone())]
                };
                (0..ranks).map(operands).collect()
            }
            Job::Broadcast(count, root) => {
                let data = bits(seed, *count);
                let operand = |rank| if rank == *root { Operand::input(&data) } else { Operand::output(data.clone()) };
                (0..ranks).map(|rank| vec![operand(rank)]).collect()
            }
            Job::Scatter(count, root) => {
                let data = bits(seed, count * ranks);
                let part = |rank: usize| Operand::output(data[rank * count..][..*count].to_vec());
                let operands =
                    |rank| if rank == *root { vec![Operand::input(&data), part(rank)] } else { vec![part(rank)] };
                (0..ranks).map(operands).collect()
            }
            Job::Gather(count, root) => {
                let inputs = of_ranks(&|_| *count);
                let operands = |rank: usize| {
                    let mut operands = vec![Operand::input(&inputs[rank])];
                    operands.extend((rank == *root).then(|| Operand::output(inputs.concat())));
                    operands
                };
                (0..ranks).map(operands).collect()
            }
            Job::Reduce(count, root, op) => {
                let inputs = random_inputs::<T>(ranks, seed, *count);
                let result = reduced(&inputs, *op);
                let operands = |rank: usize| match (rank == *root, in_place) {
                    (false, _) => vec![Operand::input(&inputs[rank])],
                    (true, false) => vec![Operand::input(&inputs[rank]), Operand::output(result.clone())],
                    (true, true) => vec![Operand::both(&inputs[rank], result.clone())],
                };
                (0..ranks).map(operands).collect()
            }
            Job::AllToAll(count) => {
                let moved = all_to_all(&of_ranks(&|_| count * ranks), &vec![*count; ranks * ranks]);
                let operands = moved.into_iter().map(|[before, after]| match in_place {
                    true => vec![Operand::both(&before, after)],
                    false => vec![Operand::input(&before), Operand::output(after)],
                });
                operands.collect()
            }
            Job::AllToAllRagged(counts) => {
                let inputs = of_ranks(&|rank| counts[rank * ranks..][..ranks].iter().sum());
                let moved = all_to_all(&inputs, counts).into_iter();
                moved.map(|[before, after]| vec![Operand::input(&before), Operand::output(after)]).collect()
            }
            Job::AllToAllCounted(room, counts) => {
                let inputs = of_ranks(&|_| room * ranks);
                let operands = |rank: usize| {
                    // Of each room only as much is written as came.
                    let mut output = Operand::output(vec![poison(); room * ranks]);
                    for (from, input) in inputs.iter().enumerate() {
                        let moved = (*room).min(counts[from * ranks + rank] as usize);
                        output.after[from * room..][..moved].copy_from_slice(&input[rank * room..][..moved]);
                    }
                    vec![Operand::input(&inputs[rank]), output]
                };
                (0..ranks).map(operands).collect()
            }
            Job::Transfers(transfers) => {
                let numbered = transfers.iter().enumerate();
                let data: Vec<Vec<T>> = numbered.map(|(at, (_, _, count))| bits(seed + at as u64, *count)).collect();
                let operands = |rank: usize| {
                    let sent = transfers.iter().zip(&data).filter(|((from, ..), _)| *from == rank);
                    let received = transfers.iter().zip(&data).filter(|((_, to, _), _)| *to == rank);
                    let sent = sent.map(|(_, data)| Operand::input(data));
                    sent.chain(received.map(|(_, data)| Operand::output(data.clone()))).collect()
                };
                (0..ranks).map(operands).collect()
            }
        }
    }
}

/// Elements of any bits.
fn bits<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| T::from_bits(rng.next_u64())).collect()
}

fn reduced<T: Element>(inputs: &[Vec<T>], op: ReduceOp) -> Vec<T> {
    reference::all_reduce(&inputs.iter().map(Vec::as_slice).collect::<Vec<_>>(), op)
}

/// What each rank sends, and what it gets.
fn all_to_all<T: Copy>(inputs: &[Vec<T>], counts: &[usize]) -> Vec<[Vec<T>; 2]> {
    let ranks = inputs.len();
    let part = |from: usize, to: usize| {
        let row = &counts[from * ranks..][..ranks];
        &inputs[from][start(row, to)..start(row, to + 1)]
    };
    let received = |to: usize| (0..ranks).flat_map(|from| part(from, to).to_vec()).collect::<Vec<_>>();
    (0..ranks).map(|rank| [inputs[rank].clone(), received(rank)]).collect()
}
