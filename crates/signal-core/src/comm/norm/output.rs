//! Where normed rows go, and in what form.

use bytemuck::Pod;

use crate::backend::Backend;
use crate::buffer::{DeviceBuffer, Slice, SliceMut};
use crate::dtype::{E4m3, Float};
use crate::error::{ApiMisuse, Result};
use crate::kernel::RowFormat;

/// Where normed rows go: a buffer of the rows' own type, or codes of few bits and their scales. A value is its code times its scales.
///
/// Codes are rounded to nearest even and saturate. Of a row, or a block of it, that holds a NaN the scale is NaN; one of nothing but zeros has the
/// smallest scale. Every rank of a call gives an output of the same form.
#[derive(Debug)]
pub struct NormOutput<'a, B: Backend, T> {
    pub(super) format: RowFormat,
    /// The normed rows, or their codes.
    pub(super) rows: Operand<'a, B>,
    scales: Option<Operand<'a, B>>,
    /// Given.
    tensor_scale: Option<Operand<'a, B>>,
    /// `rows` in their own type.
    pub(super) plain: Option<Slice<'a, B, T>>,
}

/// What an output needs to know of a buffer, which is borrowed as long: exclusively where it is written.
#[derive(Debug)]
pub(super) struct Operand<'a, B: Backend> {
    pub(super) memory: &'a B::Buffer,
    address: u64,
    len: usize,
}

impl<'a, B: Backend> Operand<'a, B> {
    fn of<T: Pod>(slice: Slice<'a, B, T>) -> Self {
        Operand { memory: slice.memory(), address: slice.address(), len: slice.len() }
    }
}

impl<'a, B: Backend, T: Float> NormOutput<'a, B, T> {
    fn coded<C: Pod>(format: RowFormat, codes: impl Into<SliceMut<'a, B, C>>) -> Self {
        let rows = Operand::of(codes.into().into_slice());
        NormOutput { format, rows, scales: None, tensor_scale: None, plain: None }
    }

    fn scales<S: Pod>(self, scales: impl Into<SliceMut<'a, B, S>>) -> Self {
        NormOutput { scales: Some(Operand::of(scales.into().into_slice())), ..self }
    }

    fn tensor_scale(self, scale: impl Into<Slice<'a, B, f32>>) -> Self {
        NormOutput { tensor_scale: Some(Operand::of(scale.into())), ..self }
    }

    /// OCP e4m3 with one scale for all, which is given in device memory and taken for constant, as weights are.
    pub fn e4m3(codes: impl Into<SliceMut<'a, B, E4m3>>, scale: impl Into<Slice<'a, B, f32>>) -> Self {
        Self::coded(RowFormat::E4m3Tensor, codes).tensor_scale(scale)
    }

    /// OCP e4m3 with a scale for each row (token), which becomes its largest magnitude / 448.
    pub fn e4m3_per_row(codes: impl Into<SliceMut<'a, B, E4m3>>, scales: impl Into<SliceMut<'a, B, f32>>) -> Self {
        Self::coded(RowFormat::E4m3Row, codes).scales(scales)
    }

    /// OCP e4m3 with a scale for each 128 elements of a row, the last perhaps fewer, row by row, which becomes their largest magnitude / 448.
    pub fn e4m3_per_group(codes: impl Into<SliceMut<'a, B, E4m3>>, scales: impl Into<SliceMut<'a, B, f32>>) -> Self {
        Self::coded(RowFormat::E4m3Group, codes).scales(scales)
    }

    /// Integers from -127 to 127 with a scale for each row (token), which becomes its largest magnitude / 127.
    pub fn i8_per_row(codes: impl Into<SliceMut<'a, B, i8>>, scales: impl Into<SliceMut<'a, B, f32>>) -> Self {
        Self::coded(RowFormat::I8Row, codes).scales(scales)
    }

    /// OCP MXFP8 (e4m3): a scale of 2^(s - 127) for each 32 elements, row by row; `s`, which is stored, is 8 less than the exponent of their
    /// largest magnitude. Rows are of whole blocks.
    pub fn mxfp8(codes: impl Into<SliceMut<'a, B, E4m3>>, scales: impl Into<SliceMut<'a, B, u8>>) -> Self {
        Self::coded(RowFormat::Mxfp8, codes).scales(scales)
    }

    /// NVFP4: e2m1, two in a byte, the first in its low half; a scale for each 16 elements, row by row and not swizzled, which becomes e4m3 of
    /// their largest magnitude / 6 / `tensor_scale`. That is one for all, given in device memory and taken for constant; a value is code x
    /// scale x `tensor_scale`. Rows are of whole blocks.
    pub fn nvfp4(
        codes: impl Into<SliceMut<'a, B, u8>>,
        scales: impl Into<SliceMut<'a, B, E4m3>>,
        tensor_scale: impl Into<Slice<'a, B, f32>>,
    ) -> Self {
        Self::coded(RowFormat::Nvfp4, codes).scales(scales).tensor_scale(tensor_scale)
    }

    /// Addresses of the rows or codes, of the scales and of the scale of all; 0 for none.
    pub(super) fn addresses(&self) -> [u64; 3] {
        let address = |operand: &Option<Operand<'_, B>>| operand.as_ref().map_or(0, |operand| operand.address);
        [self.rows.address, address(&self.scales), address(&self.tensor_scale)]
    }

    pub(super) fn memory(&self) -> impl Iterator<Item = &'a B::Buffer> {
        [Some(&self.rows), self.scales.as_ref(), self.tensor_scale.as_ref()]
            .map(|o| o.map(|o| o.memory))
            .into_iter()
            .flatten()
    }

    /// Refuses what does not belong to so many rows of so many elements, which came from `input` elements.
    pub(super) fn check(&self, input: usize, rows: usize, elements: usize) -> Result<()> {
        let count = rows * elements;
        if self.plain.is_some() {
            let output = self.rows.len;
            return if output == count { Ok(()) } else { Err(ApiMisuse::Length { input, output }.into()) };
        }
        let whole = matches!(self.format, RowFormat::Mxfp8 | RowFormat::Nvfp4);
        if let Some(block) = self.format.block_elements().filter(|block| whole && !elements.is_multiple_of(*block)) {
            return Err(ApiMisuse::Blocks { elements, block }.into());
        }
        let all = |what, operand: &Operand<'_, B>, expected: usize| {
            let found = operand.len;
            if found == expected { Ok(()) } else { Err(ApiMisuse::Codes { what, found, expected }) }
        };
        let halves = if self.format == RowFormat::Nvfp4 { 2 } else { 1 };
        all("codes", &self.rows, count / halves)?;
        if let Some(scales) = &self.scales {
            all("scales", scales, rows * self.format.row_scales(elements))?;
        }
        if let Some(scale) = &self.tensor_scale {
            all("scale of all", scale, 1)?;
        }
        Ok(())
    }
}

impl<'a, B: Backend, T: Float> From<SliceMut<'a, B, T>> for NormOutput<'a, B, T> {
    fn from(rows: SliceMut<'a, B, T>) -> Self {
        let rows = rows.into_slice();
        let (format, plain) = (RowFormat::Plain, Some(rows));
        NormOutput { format, rows: Operand::of(rows), scales: None, tensor_scale: None, plain }
    }
}

impl<'a, B: Backend, T: Float> From<&'a mut DeviceBuffer<B, T>> for NormOutput<'a, B, T> {
    fn from(rows: &'a mut DeviceBuffer<B, T>) -> Self {
        SliceMut::from(rows).into()
    }
}
