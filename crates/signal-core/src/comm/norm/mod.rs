//! Norms of rows, alone or of what a collective gives: what stands behind it in a transformer. In one kernel where that is faster or nothing else has
//! a place for the sums, else in two; the bits are the same.

mod call;
mod calls;
mod output;
mod rows;

use crate::backend::Backend;
use crate::buffer::{Slice, SliceMut};
use crate::dtype::Float;

pub use self::output::NormOutput;

/// What becomes of rows, by whatever norm.
#[derive(Debug)]
struct RowNorm<'a, B: Backend, T> {
    is_layer: bool,
    weight: Slice<'a, B, T>,
    bias: Option<Slice<'a, B, T>>,
    epsilon: f32,
    offset: f32,
    residual: Residual<'a, B, T>,
    sum: Option<SliceMut<'a, B, T>>,
    is_fast: bool,
}

/// What is added to the rows first, and where that goes.
#[derive(Debug)]
enum Residual<'a, B: Backend, T> {
    None,
    InPlace(SliceMut<'a, B, T>),
    Apart(Slice<'a, B, T>, SliceMut<'a, B, T>),
}

impl<'a, B: Backend, T: Float> RowNorm<'a, B, T> {
    fn new(is_layer: bool, weight: Slice<'a, B, T>, bias: Option<Slice<'a, B, T>>, epsilon: f32) -> Self {
        let (residual, sum) = (Residual::None, None);
        RowNorm { is_layer, weight, bias, epsilon, offset: 0.0, residual, sum, is_fast: false }
    }

    /// What is added, and what becomes of it.
    fn residuals(&self) -> Option<[Slice<'_, B, T>; 2]> {
        match &self.residual {
            Residual::None => None,
            Residual::InPlace(both) => Some([both.as_slice(); 2]),
            Residual::Apart(old, new) => Some([*old, new.as_slice()]),
        }
    }

    fn sum(&self) -> Option<Slice<'_, B, T>> {
        self.sum.as_ref().map(SliceMut::as_slice)
    }

    /// Operands that are as long as the normed rows.
    fn rows(&self) -> impl Iterator<Item = Slice<'_, B, T>> {
        self.residuals().into_iter().flatten().chain(self.sum())
    }

    /// All operands.
    fn all(&self) -> impl Iterator<Item = Slice<'_, B, T>> {
        self.rows().chain([self.weight]).chain(self.bias)
    }
}

/// What all norms take.
macro_rules! operands {
    ($name:ident) => {
        impl<'a, B: Backend, T: Float> $name<'a, B, T> {
            /// Adds the residual to the rows first, and makes it what is normed then.
            #[must_use]
            pub fn residual_in_place(mut self, residual: impl Into<SliceMut<'a, B, T>>) -> Self {
                self.0.residual = Residual::InPlace(residual.into());
                self
            }

            /// Adds the residual to the rows first; `new` becomes what is normed then.
            #[must_use]
            pub fn residual(mut self, old: impl Into<Slice<'a, B, T>>, new: impl Into<SliceMut<'a, B, T>>) -> Self {
                self.0.residual = Residual::Apart(old.into(), new.into());
                self
            }

            /// Gives the rows too, summed or gathered, before the residual.
            #[must_use]
            pub fn sum(mut self, sum: impl Into<SliceMut<'a, B, T>>) -> Self {
                self.0.sum = Some(sum.into());
                self
            }

            /// Rounds nothing but what is stored: the sum, the sum with the residual and the normed row are handed on in f32. Closer to the real
            /// numbers, and other bits than those of the steps one by one.
            #[must_use]
            pub fn fast(mut self, fast: bool) -> Self {
                self.0.is_fast = fast;
                self
            }
        }
    };
}

/// RMSNorm of rows: `y = x * (1 / sqrt(mean(x^2) + epsilon)) * (weight + offset)`, where `x` is the row, or with a residual the row and that.
///
/// Every step is in f32, in an order that depends on nothing but the row's length ([`reference::rows`](crate::reference::rows)): a row has the
/// same bits on every rank, in every batch and by every algorithm. Unless it is [`fast`](Self::fast), the sum, `x` and `y` are rounded to the element type as soon as
/// they are there, which are the bits of the steps one by one.
#[derive(Debug)]
pub struct RmsNorm<'a, B: Backend, T>(RowNorm<'a, B, T>);

impl<'a, B: Backend, T: Float> RmsNorm<'a, B, T> {
    /// With a weight for each element of a row. It is taken for constant: where kernels are launched early ([`Settings`](crate::Settings)), it is read
    /// before the kernel ahead on the stream has ended. So a kernel that writes it must not be the work right ahead of the call, unless
    /// something that waits for its end, such as an event or a copy, stands between.
    pub fn new(weight: impl Into<Slice<'a, B, T>>, epsilon: f32) -> Self {
        RmsNorm(RowNorm::new(false, weight.into(), None, epsilon))
    }

    /// Adds this to each weight: 1 as Gemma has it.
    #[must_use]
    pub fn weight_offset(mut self, offset: f32) -> Self {
        self.0.offset = offset;
        self
    }
}

operands!(RmsNorm);

/// LayerNorm of rows: `y = (x - mean(x)) * (1 / sqrt(mean((x - mean(x))^2) + epsilon)) * weight + bias`, in all else as [`RmsNorm`].
#[derive(Debug)]
pub struct LayerNorm<'a, B: Backend, T>(RowNorm<'a, B, T>);

impl<'a, B: Backend, T: Float> LayerNorm<'a, B, T> {
    /// With a weight and a bias for each element of a row, which are taken for constant, as [`RmsNorm::new`] says.
    pub fn new(weight: impl Into<Slice<'a, B, T>>, bias: impl Into<Slice<'a, B, T>>, epsilon: f32) -> Self {
        LayerNorm(RowNorm::new(true, weight.into(), Some(bias.into()), epsilon))
    }

    /// Without a bias.
    pub fn without_bias(weight: impl Into<Slice<'a, B, T>>, epsilon: f32) -> Self {
        LayerNorm(RowNorm::new(true, weight.into(), None, epsilon))
    }
}

operands!(LayerNorm);
