//! Comparison of results: bit by bit with the scalar reference, and by value with sums in f64.

use signal_comm::Element;

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

/// The largest absolute difference from sums in f64; infinite if a result is a NaN, which `max` would drop.
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
    fn errors_are_absolute_and_a_nan_is_one() {
        assert_eq!(max_error(&[1.0f32, -2.0], &[1.5, -2.25]), 0.5);
        assert_eq!(max_error(&[1.0f32, f32::NAN], &[1.0, 1.0]), f64::INFINITY);
        assert_eq!(max_error::<f32>(&[], &[]), 0.0);
    }
}
