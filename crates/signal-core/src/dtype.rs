//! Element types and operators.
#![forbid(unsafe_code)]

use std::fmt;

use bytemuck::{Pod, Zeroable};
use half::{bf16, f16};

/// Element type of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE 754 binary32.
    F32,
    /// IEEE 754 binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// IEEE 754 binary64.
    F64,
    /// Signed integer of 8 bits.
    I8,
    /// Unsigned integer of 8 bits.
    U8,
    /// Signed integer of 32 bits.
    I32,
    /// Unsigned integer of 32 bits.
    U32,
    /// Signed integer of 64 bits.
    I64,
    /// Unsigned integer of 64 bits.
    U64,
    /// OCP 8-bit floating point, [`E4m3`].
    E4m3,
    /// OCP 8-bit floating point, [`E5m2`].
    E5m2,
}

impl Dtype {
    /// All element types, in the order of the kernel catalogue.
    pub const ALL: [Dtype; 12] = {
        use Dtype::{Bf16, E4m3, E5m2, F16, F32, F64, I8, I32, I64, U8, U32, U64};
        [F32, F16, Bf16, F64, I8, U8, I32, U32, I64, U64, E4m3, E5m2]
    };

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F64 | Dtype::I64 | Dtype::U64 => 8,
            Dtype::F32 | Dtype::I32 | Dtype::U32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
            Dtype::I8 | Dtype::U8 | Dtype::E4m3 | Dtype::E5m2 => 1,
        }
    }

    /// The name used by the command line and in kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
            Dtype::F64 => "f64",
            Dtype::I8 => "i8",
            Dtype::U8 => "u8",
            Dtype::I32 => "i32",
            Dtype::U32 => "u32",
            Dtype::I64 => "i64",
            Dtype::U64 => "u64",
            Dtype::E4m3 => "e4m3",
            Dtype::E5m2 => "e5m2",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a reduction does with the ranks' elements: always in the order of ranks 0, 1, ..., n-1, so that the bits of a result do not
/// depend on rank, algorithm or size.
///
/// Floating-point types of at most 32 bits are widened to f32 first and the result is rounded once; f64 stays f64. A -0.0 that
/// comes in counts as +0.0, and a result that is not a number is the type's canonical quiet NaN. Integers wrap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// The sum.
    Sum,
    /// The smallest; NaN if there is one.
    Min,
    /// The largest; NaN if there is one.
    Max,
    /// The product.
    Prod,
    /// The sum, divided by the number of ranks; integers are cut off towards zero.
    Avg,
}

impl ReduceOp {
    /// All operators, by the numbers that kernels know them by.
    pub const ALL: [ReduceOp; 5] = [ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max, ReduceOp::Prod, ReduceOp::Avg];

    /// The name used by the command line and in kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Prod => "prod",
            ReduceOp::Avg => "avg",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// OCP 8-bit floating point with 4 bits of exponent and 3 of fraction: no infinity, 448 at most, and results saturate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E4m3(pub u8);

/// OCP 8-bit floating point with 5 bits of exponent and 2 of fraction: the upper half of an f16. Results saturate at 57,344.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub struct E5m2(pub u8);

/// A Rust type that has a [`Dtype`]. Sealed: the kernels know a fixed set.
pub trait Element: sealed::Sealed + Pod + Send + Sync + fmt::Debug + PartialEq {
    /// The element type on the device.
    const DTYPE: Dtype;

    /// What `op` makes of one element of each rank, in rank order: the arithmetic that every backend must match bit by bit.
    fn reduce(op: ReduceOp, values: impl Iterator<Item = Self>) -> Self;
    /// The nearest f64.
    fn to_f64(self) -> f64;
    /// The nearest element; of integers the one towards zero, within the type's range.
    fn from_f64(value: f64) -> Self;
    /// The bits, zero-extended.
    fn to_bits(self) -> u64;
    /// The element with these bits, the low ones.
    fn from_bits(bits: u64) -> Self;
    /// An element for tests from 64 random bits. Floating-point ones are finite, of both signs, of magnitudes from 2^-6 to 2 and
    /// with full fractions, so that their sums are not exact and a wrong order shows.
    #[doc(hidden)]
    fn random(bits: u64) -> Self;
}

/// An [`Element`] that kernels widen to f32.
pub trait Float: Element {
    /// The quiet NaN that every backend writes for a NaN result.
    const CANONICAL_NAN: Self;

    /// Widens without rounding.
    fn to_f32(self) -> f32;
    /// Rounds once, to nearest even; a NaN becomes [`Self::CANONICAL_NAN`].
    fn from_f32(value: f32) -> Self;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! reduce_floats {
    ($Wide:ty, $op:expr, $values:expr) => {{
        let mut ranks: $Wide = 0.0;
        let combined = $values.inspect(|_| ranks += 1.0).reduce(|a, b| match $op {
            ReduceOp::Sum | ReduceOp::Avg => a + b,
            ReduceOp::Prod => a * b,
            ReduceOp::Min => {
                if b.is_nan() || b < a {
                    b
                } else {
                    a
                }
            }
            ReduceOp::Max => {
                if b.is_nan() || b > a {
                    b
                } else {
                    a
                }
            }
        });
        let combined = combined.unwrap_or(0.0);
        if $op == ReduceOp::Avg { combined / ranks } else { combined }
    }};
}

macro_rules! floats {
    ($($Type:ty: $dtype:ident, $Bits:ty, $nan:expr, $to_f32:expr, $from_f32:expr;)+) => {$(
        impl sealed::Sealed for $Type {}

        impl Element for $Type {
            const DTYPE: Dtype = Dtype::$dtype;

            fn reduce(op: ReduceOp, values: impl Iterator<Item = Self>) -> Self {
                // From +0.0: a -0.0 counts as +0.0, also when there is one rank.
                Self::from_f32(reduce_floats!(f32, op, values.map(|x| x.to_f32() + 0.0)))
            }
            fn to_f64(self) -> f64 {
                self.to_f32().into()
            }
            fn from_f64(value: f64) -> Self {
                Self::from_f32(value as f32)
            }
            fn to_bits(self) -> u64 {
                bytemuck::cast::<Self, $Bits>(self).into()
            }
            fn from_bits(bits: u64) -> Self {
                bytemuck::cast(bits as $Bits)
            }
            fn random(bits: u64) -> Self {
                let bits = (bits >> 32) as u32;
                let exponent = 121 + (bits >> 23 & 0xff) % 7;
                Self::from_f32(f32::from_bits(bits & 0x807f_ffff | exponent << 23))
            }
        }

        impl Float for $Type {
            const CANONICAL_NAN: Self = $nan;

            fn to_f32(self) -> f32 {
                $to_f32(self)
            }
            fn from_f32(value: f32) -> Self {
                if value.is_nan() { Self::CANONICAL_NAN } else { $from_f32(value) }
            }
        }
    )+};
}

floats! {
    f32: F32, u32, f32::from_bits(0x7fc0_0000), |x| x, |x| x;
    f16: F16, u16, f16::from_bits(0x7e00), f16::to_f32, f16::from_f32;
    bf16: Bf16, u16, bf16::from_bits(0x7fc0), bf16::to_f32, bf16::from_f32;
    E4m3: E4m3, u8, E4m3(0x7f), E4m3::widen, E4m3::round;
    E5m2: E5m2, u8, E5m2(0x7e), E5m2::widen, E5m2::round;
}

impl E4m3 {
    fn widen(self) -> f32 {
        let magnitude = u32::from(self.0 & 0x7f);
        let sign = if self.0 & 0x80 != 0 { -1.0 } else { 1.0 };
        match magnitude {
            0x7f => f32::NAN,
            0..8 => sign * magnitude as f32 * 2f32.powi(-9),
            _ => sign * f32::from_bits((magnitude << 20) + (120 << 23)),
        }
    }

    fn round(value: f32) -> Self {
        E4m3(to_fp8(value, -6, 3, 0x7e))
    }
}

impl E5m2 {
    fn widen(self) -> f32 {
        f16::from_bits(u16::from(self.0) << 8).to_f32()
    }

    fn round(value: f32) -> Self {
        E5m2(to_fp8(value, -14, 2, 0x7b))
    }
}

/// The nearest of an 8-bit type's values, ties to even, at most that with the bits `largest`. Exponents begin at `least`, and there are
/// `fraction` bits behind the point.
fn to_fp8(value: f32, least: i32, fraction: i32, largest: u8) -> u8 {
    let sign = if value.is_sign_negative() { 0x80 } else { 0 };
    let magnitude = f64::from(value.abs());
    // The exponent of the binade, that of the subnormals at least; in f64 all steps are exact but the rounding.
    let exponent = ((magnitude.to_bits() >> 52) as i32 - 1023).max(least);
    let steps = (magnitude / 2f64.powi(exponent - fraction)).round_ties_even();
    // The first binade's bits begin at 1 << fraction, which are as many steps.
    let bits = steps + f64::from((exponent - least) << fraction);
    sign | if bits < f64::from(largest) { bits as u8 } else { largest }
}

impl sealed::Sealed for f64 {}

impl Element for f64 {
    const DTYPE: Dtype = Dtype::F64;

    fn reduce(op: ReduceOp, values: impl Iterator<Item = Self>) -> Self {
        let reduced = reduce_floats!(f64, op, values.map(|x| x + 0.0));
        if reduced.is_nan() { f64::from_bits(0x7ff8_0000_0000_0000) } else { reduced }
    }
    fn to_f64(self) -> f64 {
        self
    }
    fn from_f64(value: f64) -> Self {
        value
    }
    fn to_bits(self) -> u64 {
        self.to_bits()
    }
    fn from_bits(bits: u64) -> Self {
        f64::from_bits(bits)
    }
    fn random(bits: u64) -> Self {
        let exponent = 1017 + (bits >> 52 & 0x7ff) % 7;
        f64::from_bits(bits & 0x800f_ffff_ffff_ffff | exponent << 52)
    }
}

macro_rules! integers {
    ($($Type:ty: $dtype:ident, $Unsigned:ty;)+) => {$(
        impl sealed::Sealed for $Type {}

        impl Element for $Type {
            const DTYPE: Dtype = Dtype::$dtype;

            fn reduce(op: ReduceOp, values: impl Iterator<Item = Self>) -> Self {
                let mut ranks: $Type = 0;
                let combined = values.inspect(|_| ranks += 1).reduce(|a, b| match op {
                    ReduceOp::Sum | ReduceOp::Avg => a.wrapping_add(b),
                    ReduceOp::Prod => a.wrapping_mul(b),
                    ReduceOp::Min => a.min(b),
                    ReduceOp::Max => a.max(b),
                });
                let combined = combined.unwrap_or(0);
                if op == ReduceOp::Avg { combined / ranks.max(1) } else { combined }
            }
            fn to_f64(self) -> f64 {
                self as f64
            }
            fn from_f64(value: f64) -> Self {
                value as Self
            }
            fn to_bits(self) -> u64 {
                (self as $Unsigned).into()
            }
            fn from_bits(bits: u64) -> Self {
                bits as Self
            }
            fn random(bits: u64) -> Self {
                bits as Self
            }
        }
    )+};
}

integers! {
    i8: I8, u8;
    u8: U8, u8;
    i32: I32, u32;
    u32: U32, u32;
    i64: I64, u64;
    u64: U64, u64;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every value of an 8-bit type is its own nearest, and halfway between two neighbours lies the even one.
    fn check_fp8<T: Float>(largest: u64) {
        for bits in 0..=0xff {
            let value = T::from_bits(bits);
            if value.to_f32().is_nan() {
                assert_eq!(T::from_f32(value.to_f32()), T::CANONICAL_NAN);
            } else if value.to_f32().is_finite() {
                assert_eq!(T::from_f32(value.to_f32()).to_bits(), bits);
            }
        }
        for bits in 0..largest {
            let (low, high) = (T::from_bits(bits).to_f32(), T::from_bits(bits + 1).to_f32());
            assert!(low < high);
            let even = if bits % 2 == 0 { bits } else { bits + 1 };
            let middle = (low + high) / 2.0;
            assert_eq!(T::from_f32(middle).to_bits(), even, "between {low} and {high}");
            assert_eq!(T::from_f32(f32::from_bits(middle.to_bits() + 1)).to_bits(), bits + 1);
            assert_eq!(T::from_f32(-f32::from_bits(middle.to_bits() - 1)).to_bits(), bits | 0x80);
        }
        for huge in [T::from_bits(largest).to_f32() * 1.5, f32::MAX, f32::INFINITY] {
            assert_eq!(T::from_f32(huge).to_bits(), largest);
            assert_eq!(T::from_f32(-huge).to_bits(), largest | 0x80);
        }
    }

    #[test]
    fn fp8_rounds_and_saturates() {
        check_fp8::<E4m3>(0x7e);
        check_fp8::<E5m2>(0x7b);
        assert_eq!((E4m3(0x7e).to_f32(), E4m3(0x01).to_f32(), E4m3(0x38).to_f32()), (448.0, 2f32.powi(-9), 1.0));
        assert_eq!((E5m2(0x7b).to_f32(), E5m2(0x01).to_f32(), E5m2(0x3c).to_f32()), (57344.0, 2f32.powi(-16), 1.0));
    }

    #[test]
    fn operators_keep_what_is_promised() {
        use ReduceOp::{Avg, Max, Min, Prod, Sum};
        let f = |op, values: &[f32]| f32::reduce(op, values.iter().copied()).to_bits();
        let nan = 0x7fc0_0000;
        for op in [Min, Max] {
            assert_eq!(f(op, &[1.0, f32::NAN, 2.0]), nan);
            assert_eq!(f(op, &[f32::from_bits(0xffff_ffff), 2.0]), nan);
            assert_eq!(f(op, &[-0.0]), 0);
            assert_eq!(f(op, &[-0.0, 0.0]), 0);
        }
        assert_eq!(f(Min, &[3.0, -1.5, 2.0]), (-1.5f32).to_bits());
        assert_eq!(f(Max, &[3.0, -1.5, f32::INFINITY]), f32::INFINITY.to_bits());
        assert_eq!(f(Prod, &[0.5, -3.0]), (-1.5f32).to_bits());
        assert_eq!(f(Avg, &[1.0, 2.0, 4.0]), (7.0f32 / 3.0).to_bits());
        assert_eq!(bf16::reduce(Avg, [bf16::ONE, bf16::ZERO].into_iter()), bf16::from_f32(0.5));
        assert_eq!(E4m3::reduce(Sum, [E4m3(0x7e), E4m3(0x7e)].into_iter()), E4m3(0x7e));

        assert_eq!(i8::reduce(Sum, [100, 100].into_iter()), -56);
        assert_eq!(i8::reduce(Avg, [100, 100].into_iter()), -28); // of the sum as it is
        assert_eq!(i32::reduce(Avg, [-3, -4].into_iter()), -3);
        assert_eq!(u64::reduce(Prod, [1 << 40, 1 << 40].into_iter()), 0);
        assert_eq!(i64::reduce(Min, [5, -7, 0].into_iter()), -7);
        assert_eq!(u8::reduce(Max, [5, 250, 0].into_iter()), 250);
        assert_eq!(f64::reduce(Sum, [1e300, -1e300, 1.0].into_iter()), 1.0);
    }
}
