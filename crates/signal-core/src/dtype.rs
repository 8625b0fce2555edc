//! Element types and operators.
#![forbid(unsafe_code)]

use std::fmt;

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
}

impl Dtype {
    /// All element types, in the order of the kernel catalogue.
    pub const ALL: [Dtype; 3] = [Dtype::F32, Dtype::F16, Dtype::Bf16];

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F16 | Dtype::Bf16 => 2,
        }
    }

    /// The name used by the command line and in kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::F32 => "f32",
            Dtype::F16 => "f16",
            Dtype::Bf16 => "bf16",
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What a reduction does with the ranks' elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReduceOp {
    /// Sum in f32 from +0.0 over rank 0, 1, ..., n-1, rounded once.
    Sum,
}

impl ReduceOp {
    /// All operators, in the order of the kernel catalogue.
    pub const ALL: [ReduceOp; 1] = [ReduceOp::Sum];

    /// The name used by the command line and in kernel names.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
}

/// A Rust type that has a [`Dtype`]. Sealed: the kernels know a fixed set.
pub trait Element: sealed::Sealed + bytemuck::Pod + Send + Sync + fmt::Debug + PartialEq {
    /// The element type on the device.
    const DTYPE: Dtype;
    /// The quiet NaN that every backend writes for a NaN result.
    const CANONICAL_NAN: Self;

    /// Widens without rounding.
    fn to_f32(self) -> f32;
    /// Rounds once, to nearest even; a NaN becomes [`Self::CANONICAL_NAN`].
    fn from_f32(value: f32) -> Self;
    /// The bits, zero-extended.
    fn to_bits(self) -> u32;
    /// The element with these bits (the low ones, for the 16-bit types).
    fn from_bits(bits: u32) -> Self;
}

impl Element for f32 {
    const DTYPE: Dtype = Dtype::F32;
    const CANONICAL_NAN: Self = f32::from_bits(0x7fc0_0000);

    fn to_f32(self) -> f32 {
        self
    }
    fn from_f32(value: f32) -> Self {
        if value.is_nan() { Self::CANONICAL_NAN } else { value }
    }
    fn to_bits(self) -> u32 {
        self.to_bits()
    }
    fn from_bits(bits: u32) -> Self {
        f32::from_bits(bits)
    }
}

impl Element for f16 {
    const DTYPE: Dtype = Dtype::F16;
    const CANONICAL_NAN: Self = f16::from_bits(0x7e00);

    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    fn from_f32(value: f32) -> Self {
        if value.is_nan() { Self::CANONICAL_NAN } else { f16::from_f32(value) }
    }
    fn to_bits(self) -> u32 {
        u32::from(self.to_bits())
    }
    fn from_bits(bits: u32) -> Self {
        f16::from_bits(bits as u16)
    }
}

impl Element for bf16 {
    const DTYPE: Dtype = Dtype::Bf16;
    const CANONICAL_NAN: Self = bf16::from_bits(0x7fc0);

    fn to_f32(self) -> f32 {
        self.to_f32()
    }
    fn from_f32(value: f32) -> Self {
        if value.is_nan() { Self::CANONICAL_NAN } else { bf16::from_f32(value) }
    }
    fn to_bits(self) -> u32 {
        u32::from(self.to_bits())
    }
    fn from_bits(bits: u32) -> Self {
        bf16::from_bits(bits as u16)
    }
}
