//! The scalar reference: what every backend, algorithm and size must produce, bit by bit (P12). Tests and the benchmark
//! compare with it; it is also the shortest statement of the arithmetic.
#![forbid(unsafe_code)]

pub mod rows;

use crate::dtype::{Dtype, Element, ReduceOp};

/// The result of an all-reduce of `inputs`, one slice a rank in rank order, all of one length.
///
/// # Panics
/// When there is no input, or the lengths differ.
pub fn all_reduce<T: Element>(inputs: &[&[T]], op: ReduceOp) -> Vec<T> {
    assert!(inputs.iter().all(|i| i.len() == inputs[0].len()), "inputs differ in length");
    (0..inputs[0].len()).map(|i| T::reduce(op, inputs.iter().map(|input| input[i]))).collect()
}

/// The sum of `inputs` in f64, unrounded, to judge the error of the real arithmetic.
///
/// # Panics
/// When there is no input, or the lengths differ.
pub fn all_reduce_f64<T: Element>(inputs: &[&[T]]) -> Vec<f64> {
    assert!(inputs.iter().all(|i| i.len() == inputs[0].len()), "inputs differ in length");
    (0..inputs[0].len()).map(|i| inputs.iter().map(|input| input[i].to_f64()).sum()).collect()
}

/// A small reproducible generator (splitmix64).
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Starts from a seed; any will do.
    pub fn new(seed: u64) -> Self {
        Rng(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The next 32 bits.
    pub fn next_u32(&mut self) -> u32 {
        (self.next_u64() >> 32) as u32
    }

    /// A number below `n` (0 when `n` is 0).
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }
}

/// Elements for tests. Floating-point ones are finite, of both signs and of magnitudes from 2^-6 to 2, with full fractions: their sums
/// are not exact in f32, so that a wrong order of addition shows. Integers are any.
pub fn random<T: Element>(seed: u64, len: usize) -> Vec<T> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| T::random(rng.next_u64())).collect()
}

/// Elements of each rank, for tests of reductions. In every fourth place two ranks hold large values that cancel: what is added
/// between them loses bits that are not lost outside, so that the order shows in the short types too, whose random sums would be
/// exact in f32.
pub fn random_inputs<T: Element>(ranks: usize, seed: u64, len: usize) -> Vec<Vec<T>> {
    let mut seeds = Rng::new(seed);
    let mut inputs: Vec<Vec<T>> = (0..ranks).map(|_| random(seeds.next_u64(), len)).collect();
    let exponent = match T::DTYPE {
        Dtype::F64 => 60,
        Dtype::F32 | Dtype::Bf16 => 27,
        Dtype::F16 | Dtype::E5m2 => 14,
        Dtype::E4m3 => 8,
        // Integers wrap, in whatever order.
        _ => return inputs,
    };
    let large = 2f64.powi(exponent);
    for i in (0..len).step_by(4).filter(|_| ranks >= 3) {
        let (up, down) = (i / 4 % ranks, (i / 4 + 1 + i / 4 / ranks % (ranks - 1)) % ranks);
        inputs[up][i] = T::from_f64(large);
        inputs[down][i] = T::from_f64(-large);
    }
    inputs
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn order_rounding_and_zeros_are_fixed() {
        let sum = |a: f32, b: f32, c: f32| all_reduce(&[&[a], &[b], &[c]], ReduceOp::Sum)[0];
        // In another order this would be 0.
        assert_eq!(sum(1e8, -1e8, 1.0), 1.0);
        assert_eq!(sum(1.0, 1e8, -1e8), 0.0);
        assert_eq!(sum(-0.0, -0.0, -0.0).to_bits(), 0);
        assert_eq!(all_reduce(&[&[-0.0f32]], ReduceOp::Sum)[0].to_bits(), 0);
        assert_eq!(sum(f32::from_bits(0xffc1_2345), 1.0, 2.0).to_bits(), 0x7fc0_0000);
        assert_eq!(all_reduce(&[&[f16::MAX], &[f16::MAX]], ReduceOp::Sum)[0], f16::INFINITY);
        // 256 + 0.5 + 0.5 in bf16: rounded once at the end, not after each addition.
        let bf = bf16::from_f32;
        assert_eq!(all_reduce(&[&[bf(256.0)], &[bf(0.5)], &[bf(0.75)]], ReduceOp::Sum)[0], bf(258.0));
    }

    #[test]
    fn random_sums_depend_on_the_order() {
        let ranks: Vec<Vec<f32>> = (0..5).map(|r| random(r, 1000)).collect();
        let forward: Vec<&[f32]> = ranks.iter().map(Vec::as_slice).collect();
        let backward: Vec<&[f32]> = ranks.iter().rev().map(Vec::as_slice).collect();
        assert!(ranks.iter().flatten().all(|x| x.is_finite()));
        assert_ne!(all_reduce(&forward, ReduceOp::Sum), all_reduce(&backward, ReduceOp::Sum));
    }
}
