//! Norms of rows and the codes of what they give: what each backend must produce, bit by bit.

use crate::dtype::{E4m3, Float};
use crate::kernel::RowFormat;

/// A norm of rows, and its operands that are the same for each of them.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a, T> {
    /// LayerNorm, not RMSNorm.
    pub is_layer: bool,
    /// A weight for each element.
    pub weight: &'a [T],
    /// Added to each element in the end.
    pub bias: Option<&'a [T]>,
    /// Added to the mean of the squares.
    pub epsilon: f32,
    /// Added to each weight.
    pub offset: f32,
    /// Rounds nothing but what is stored.
    pub is_fast: bool,
}

/// What becomes of a row.
#[derive(Clone, Debug)]
pub struct Normed<T> {
    /// The row itself.
    pub sum: Vec<T>,
    /// The row and its residual.
    pub residual: Vec<T>,
    /// Normed; unless it is fast, each a value of the type.
    pub normed: Vec<f32>,
}

/// The sums of `inputs`, one slice a rank in rank order, in f32 and not rounded.
///
/// # Panics
/// When the lengths differ.
pub fn sums<T: Float>(inputs: &[&[T]]) -> Vec<f32> {
    (0..inputs[0].len()).map(|i| inputs.iter().fold(0.0, |sum, input| sum + input[i].to_f32())).collect()
}

/// Norms one row, whose sums are not rounded yet. Everything is in f32, in one order: numbers of a row are added up over the elements of each 16 bytes,
/// then over those of one lane, of which there are 512 by turns, then over the lanes pair by pair.
///
/// # Panics
/// When the lengths differ.
pub fn norm<T: Float>(sums: &[f32], residual: Option<&[T]>, norm: &Norm<'_, T>) -> Normed<T> {
    assert_eq!(sums.len(), norm.weight.len(), "a weight for each element");
    let settled = |x: f32| if norm.is_fast { x } else { T::from_f32(x).to_f32() };
    let sum: Vec<f32> = sums.iter().map(|x| settled(*x)).collect();
    let added = |i: usize| residual.map_or(sum[i], |r| settled(sum[i] + r[i].to_f32()));
    let row: Vec<f32> = (0..sum.len()).map(added).collect();
    let over_all = 1.0 / row.len() as f32;
    let mean = if norm.is_layer { total::<T>(row.iter().copied()) * over_all } else { 0.0 };
    let squares = total::<T>(row.iter().map(|x| (x - mean) * (x - mean)));
    let scale = 1.0 / (squares * over_all + norm.epsilon).sqrt();
    let normed = |(i, x): (usize, &f32)| {
        let y = (x - mean) * scale * (norm.weight[i].to_f32() + norm.offset);
        settled(norm.bias.map_or(y, |bias| y + bias[i].to_f32()))
    };
    Normed {
        sum: sum.iter().map(|x| T::from_f32(*x)).collect(),
        residual: row.iter().map(|x| T::from_f32(*x)).collect(),
        normed: row.iter().enumerate().map(normed).collect(),
    }
}

fn total<T>(row: impl Iterator<Item = f32>) -> f32 {
    const LANES: usize = 512;
    let row: Vec<f32> = row.collect();
    let mut lanes = vec![0f32; LANES];
    for (at, pack) in row.chunks(16 / size_of::<T>()).enumerate() {
        lanes[at % LANES] += pack.iter().fold(0f32, |sum, x| sum + x);
    }
    while lanes.len() > 1 {
        lanes = lanes.chunks(2).map(|pair| pair[0] + pair[1]).collect();
    }
    lanes[0]
}

/// The codes of a normed row and its scales, both as bytes in memory; of a format that is not [`RowFormat::Plain`].
pub fn coded(format: RowFormat, normed: &[f32], tensor_scale: f32) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut scales) = (Vec::new(), Vec::new());
    for block in normed.chunks(format.block_elements().unwrap_or(normed.len())) {
        let most = block.iter().fold(0f32, |most, x| if most.is_nan() || x.abs() <= most { most } else { x.abs() });
        let by_largest = |largest: f32| {
            let scale = most / largest;
            let (scale, inverse) = match scale {
                scale if scale.is_nan() => (f32::NAN, f32::NAN),
                scale if scale < f32::MIN_POSITIVE => (f32::MIN_POSITIVE, 1.0 / f32::MIN_POSITIVE),
                scale => (scale, largest / most),
            };
            (scale.to_le_bytes().to_vec(), inverse)
        };
        let (scale, inverse) = match format {
            RowFormat::Plain | RowFormat::E4m3Tensor => (Vec::new(), 1.0 / tensor_scale),
            RowFormat::E4m3Row | RowFormat::E4m3Group => by_largest(448.0),
            RowFormat::I8Row => by_largest(127.0),
            RowFormat::Mxfp8 if !most.is_finite() => (vec![0xff], f32::NAN),
            RowFormat::Mxfp8 => {
                // What lies below 2^-126 has no exponent of its own.
                let exponent = if most < f32::MIN_POSITIVE { -127 } else { (most.to_bits() >> 23) as i32 - 127 };
                let exponent = (exponent - 8).max(-127);
                (vec![(exponent + 127) as u8], (-f64::from(exponent)).exp2() as f32)
            }
            RowFormat::Nvfp4 => {
                let scale = E4m3::from_f32(most / 6.0 / tensor_scale);
                let all = scale.to_f32() * tensor_scale;
                (vec![scale.0], if all == 0.0 { 0.0 } else { 1.0 / all })
            }
        };
        scales.extend(scale);
        let scaled = block.iter().map(|x| x * inverse);
        match format {
            RowFormat::I8Row => codes.extend(scaled.map(|x| x.clamp(-127.0, 127.0).round_ties_even() as i8 as u8)),
            RowFormat::Nvfp4 => {
                let halves: Vec<u8> = scaled.map(e2m1).collect();
                codes.extend(halves.chunks(2).map(|pair| pair[0] | pair[1] << 4));
            }
            _ => codes.extend(scaled.map(|x| E4m3::from_f32(x).0)),
        }
    }
    (codes, scales)
}

/// The nearest of the eight magnitudes that an e2m1 has, of two as near the one whose last bit is 0, with the sign; 0 for a NaN.
fn e2m1(x: f32) -> u8 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    if x.is_nan() {
        return 0;
    }
    let away = |code: &u8| (MAGNITUDES[usize::from(*code)] - x.abs().min(6.0)).abs();
    let nearest = (0..8u8).min_by(|a, b| away(a).total_cmp(&away(b)).then((a % 2).cmp(&(b % 2)))).unwrap_or(0);
    nearest | u8::from(x.is_sign_negative()) << 3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_norm_by_hand() {
        let norm_of = Norm {
            is_layer: true,
            weight: &[1f32, 1.0, 2.0, 1.0],
            bias: Some(&[0f32, 0.0, 0.0, 10.0]),
            epsilon: 0.0,
            offset: 0.0,
            is_fast: false,
        };
        let found = norm(&[1.0, 3.0, 1.0, 3.0], Some(&[1f32, 1.0, 1.0, 1.0]), &norm_of);
        assert_eq!((found.sum, found.residual), (vec![1.0, 3.0, 1.0, 3.0], vec![2.0, 4.0, 2.0, 4.0]));
        assert_eq!(found.normed, [-1.0, 1.0, -2.0, 11.0]);
    }

    #[test]
    fn codes_by_hand() {
        let mut row = vec![0f32; 32];
        row[..4].copy_from_slice(&[448.0, -224.0, 1.0, 0.0]);
        let (codes, scales) = coded(RowFormat::E4m3Row, &row, 0.0);
        assert_eq!((&codes[..4], scales), (&[0x7e, 0xf6, 0x38, 0][..], 1f32.to_le_bytes().to_vec()));
        let (codes, scales) = coded(RowFormat::E4m3Tensor, &row, 448.0);
        assert_eq!((&codes[..2], scales.len()), (&[0x38, 0xb0][..], 0));
        // 448 has the exponent 8.
        let (codes, scales) = coded(RowFormat::Mxfp8, &row, 0.0);
        assert_eq!((&codes[..3], scales), (&[0x7e, 0xf6, 0x38][..], vec![127]));
        let (codes, scales) = coded(RowFormat::I8Row, &[254.0, -127.0, 1.0], 0.0);
        assert_eq!((codes, scales), (vec![127, -64i8 as u8, 0], 2f32.to_le_bytes().to_vec()));
        let mut row = vec![0f32; 16];
        row[..6].copy_from_slice(&[6.0, -3.0, 0.25, 0.75, 2.5, 100.0].map(|x: f32| x.min(6.0)));
        let (codes, scales) = coded(RowFormat::Nvfp4, &row, 1.0);
        assert_eq!((&codes[..3], scales), (&[0xd7, 0x20, 0x74][..], vec![0x38]));
    }

    #[test]
    fn codes_of_what_is_no_number_and_of_nothing() {
        for format in RowFormat::ALL.into_iter().skip(1) {
            let (codes, scales) = coded(format, &[0.0; 256], 1.0);
            assert!(codes.iter().all(|code| *code == 0), "{format:?}");
            assert_eq!(
                scales.len(),
                format.row_scales(256) * if format.block_elements().is_some_and(|b| b < 128) { 1 } else { 4 }
            );
            let mut row = [1f32; 256];
            row[1] = f32::NAN;
            let (codes, scales) = coded(format, &row, 1.0);
            match format {
                RowFormat::E4m3Tensor => assert_eq!(codes[1], 0x7f),
                RowFormat::Mxfp8 => assert_eq!((scales[0], scales[1]), (0xff, 119)),
                RowFormat::Nvfp4 => assert_eq!(scales[0], 0x7f),
                _ => assert_eq!(scales[..4], f32::NAN.to_le_bytes()),
            }
        }
    }
}
