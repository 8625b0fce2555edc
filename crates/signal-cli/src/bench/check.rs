//! Comparison of results: bit by bit with the scalar reference, and by value with what is computed in f64.

use signal_comm::{Element, ReduceOp, reference};

/// Elements whose bits differ.
pub(super) fn wrong_elements<T: Element>(found: &[T], expected: &[T]) -> u64 {
    // Almost always equal: compare as memory first.
    if bytemuck::cast_slice::<T, u8>(found) == bytemuck::cast_slice::<T, u8>(expected) {
        return 0;
    }
    let differing =
        found.iter().zip(expected).filter(|(found, expected)| found.to_bits() != expected.to_bits()).count();
    (differing + found.len().abs_diff(expected.len())) as u64
}

/// The reduction of `inputs` in f64, unrounded.
pub(super) fn exact<T: Element>(op: ReduceOp, inputs: &[&[T]]) -> Vec<f64> {
    let fold = |combine: fn(f64, f64) -> f64| {
        let mut rest = inputs.iter();
        let mut values: Vec<f64> =
            rest.next().map_or_else(Vec::new, |first| first.iter().map(|x| x.to_f64()).collect());
        for input in rest {
            values.iter_mut().zip(*input).for_each(|(value, x)| *value = combine(*value, x.to_f64()));
        }
        values
    };
    match op {
        ReduceOp::Min => fold(f64::min),
        ReduceOp::Max => fold(f64::max),
        ReduceOp::Prod => fold(|a, b| a * b),
        ReduceOp::Avg => reference::all_reduce_f64(inputs).iter().map(|sum| sum / inputs.len() as f64).collect(),
        _ => reference::all_reduce_f64(inputs),
    }
}

/// The largest absolute difference from exact values; infinite if a result is a NaN, which `max` would drop.
pub(super) fn max_error<T: Element>(found: &[T], exact: &[f64]) -> f64 {
    let errors = found.iter().zip(exact).map(|(found, exact)| (found.to_f64() - exact).abs());
    errors.map(|error| if error.is_nan() { f64::INFINITY } else { error }).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    #[test]
    fn bits_count_and_not_values() {
        let zeros = [0.0f32, -0.0, f32::NAN];
        assert_eq!(wrong_elements(&zeros, &zeros), 0);
        assert_eq!(wrong_elements(&zeros, &[0.0, 0.0, f32::from_bits(0x7fc0_0001)]), 2);
        assert_eq!(wrong_elements(&zeros[..2], &zeros), 1);
        let ones = [bf16::ONE; 3];
        assert_eq!(wrong_elements(&ones, &[bf16::ONE, bf16::from_bits(0x3f81), bf16::ONE]), 1);
    }

    #[test]
    fn exact_values_are_those_of_the_operator() {
        let inputs: [&[f32]; 3] = [&[1.0, -4.0], &[2.5, 0.5], &[-0.5, 2.0]];
        let expected = [[3.0, -1.5], [-0.5, -4.0], [2.5, 2.0], [-1.25, -4.0], [1.0, -0.5]];
        assert_eq!(ReduceOp::ALL.map(|op| exact(op, &inputs)), expected.map(Vec::from));
    }

    #[test]
    fn errors_are_absolute_and_a_nan_is_one() {
        assert_eq!(max_error(&[1.0f32, -2.0], &[1.5, -2.25]), 0.5);
        assert_eq!(max_error(&[1.0f32, f32::NAN], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(max_error::<f32>(&[], &[]), 0.0);
    }
}
