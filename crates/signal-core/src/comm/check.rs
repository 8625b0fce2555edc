//! Checked mode: what a call is, in two words that ranks exchange and compare before it moves data.
#![forbid(unsafe_code)]

use std::fmt;

use crate::dtype::{Dtype, ReduceOp};
use crate::kernel::Algorithm;
use crate::layout::MAX_GPUS;
use crate::plan::Plan;

/// A call, as far as all ranks must agree on it.
///
/// ```text
/// word 0: bits 0..4 collective, 4..8 dtype, 8..12 operator, 12..16 algorithm, 16..32 blocks, 32..48 threads
/// word 1: bits 0..62 elements
/// ```
/// Bits 62 and 63 of both stay clear, as the kernel asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Description([u64; 2]);

const BARRIER: u64 = 1;
const ALL_REDUCE: u64 = 2;
/// A call without elements, which launches nothing but its check.
const NOTHING: u64 = 3;

impl Description {
    pub(crate) fn barrier(blocks: u32, threads: u32) -> Self {
        Description([BARRIER | grid(blocks, threads), 0])
    }

    pub(crate) fn all_reduce(plan: &Plan, count: usize, dtype: Dtype, op: ReduceOp) -> Self {
        if count == 0 {
            return Description([NOTHING, 0]);
        }
        let kind = ALL_REDUCE | (dtype as u64) << 4 | (op as u64) << 8 | (plan.algorithm as u64) << 12;
        Description([kind | grid(plan.blocks, plan.threads), count as u64 & !(3 << 62)])
    }

    /// From a fault record: the low half of each word first.
    pub(crate) fn from_words(words: [u32; MAX_GPUS]) -> Self {
        let word = |i: usize| u64::from(words[i]) | u64::from(words[i + 1]) << 32;
        Description([word(0), word(2)])
    }

    pub(crate) fn words(self) -> [u64; 2] {
        self.0
    }

    fn bits(self, from: u32, len: u32) -> u64 {
        self.0[0] >> from & ((1 << len) - 1)
    }
}

fn grid(blocks: u32, threads: u32) -> u64 {
    u64::from(blocks & 0xffff) << 16 | u64::from(threads & 0xffff) << 32
}

impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bits(0, 4) {
            BARRIER => f.write_str("a barrier")?,
            ALL_REDUCE => {
                let name = |found: Option<&'static str>| found.unwrap_or("unknown");
                let dtype = name(Dtype::ALL.get(self.bits(4, 4) as usize).map(|dtype| dtype.name()));
                let op = name(ReduceOp::ALL.get(self.bits(8, 4) as usize).map(|op| op.name()));
                let algorithm = name(Algorithm::ALL.get(self.bits(12, 4) as usize).map(|algorithm| algorithm.name()));
                write!(f, "an all-reduce of {} {dtype} ({op}, {algorithm})", self.0[1])?;
            }
            NOTHING => return f.write_str("an all-reduce of no elements"),
            _ => return f.write_str("an unknown collective"),
        }
        write!(f, " on {} x {} threads", self.bits(16, 16), self.bits(32, 16))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_read_back() {
        let plan = Plan { algorithm: Algorithm::TwoStage, blocks: 1024, threads: 512 };
        let call = Description::all_reduce(&plan, 123_456_789_012, Dtype::Bf16, ReduceOp::Sum);
        let [a, b] = call.words();
        let words = [a as u32, (a >> 32) as u32, b as u32, (b >> 32) as u32, 0, 0, 0, 0];
        assert_eq!(Description::from_words(words), call);
        assert_eq!(call.to_string(), "an all-reduce of 123456789012 bf16 (sum, two-stage) on 1024 x 512 threads");
        assert_eq!(Description::barrier(2, 32).to_string(), "a barrier on 2 x 32 threads");
        assert_eq!(
            Description::all_reduce(&plan, 0, Dtype::F32, ReduceOp::Sum).to_string(),
            "an all-reduce of no elements"
        );
        assert_eq!(Description([0, 0]).to_string(), "an unknown collective");
    }

    #[test]
    fn the_two_highest_bits_stay_clear() {
        let plan = Plan { algorithm: Algorithm::Lamport, blocks: u32::MAX, threads: u32::MAX };
        let words = Description::all_reduce(&plan, usize::MAX, Dtype::Bf16, ReduceOp::Sum).words();
        assert!(words.iter().all(|word| word >> 62 == 0));
    }
}
