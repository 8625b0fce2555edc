//! Rows as the kernels count them, and where they keep what they are norming.

use bytemuck::Zeroable;

use super::{NormOutput, RowNorm};
use crate::backend::Backend;
use crate::buffer::Slice;
use crate::collective::Collective;
use crate::dtype::Float;
use crate::error::{ApiMisuse, Result};
use crate::kernel::{AllReduceParams, GroupParams, NormParams, Operation, RowFormat};
use crate::layout::PACK_BYTES;

const PACK: u64 = PACK_BYTES as u64;

/// Rows of a call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rows {
    /// Of all ranks.
    pub(super) rows: u32,
    /// Of each rank's shard, of which the last one may have fewer.
    pub(super) shard: u32,
    /// Of a row.
    pub(super) elements: u32,
    pub(super) bytes: u64,
    pub(super) packs: u32,
}

/// What a call has of its ranks' rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Own,
    Collective(Collective),
}

impl Rows {
    /// Of `count` elements that this rank gives, in rows of `elements`.
    pub(super) fn of<T: Float>(count: usize, elements: usize, source: Source, world: usize) -> Result<Rows, ApiMisuse> {
        let too_large = || ApiMisuse::TooLarge { count, element_bytes: size_of::<T>() };
        if elements == 0 {
            let (found, expected) = (elements, 1);
            return Err(ApiMisuse::Parts { what: "weight", found, expected, parts: 1, part: 1 });
        }
        let parts = if source == Source::Collective(Collective::ReduceScatter) { world } else { 1 };
        let given = count / elements;
        if given * elements != count || !given.is_multiple_of(parts) {
            let (part, parts) = (elements, (given / parts + 1) * parts);
            return Err(ApiMisuse::Parts { what: "input", found: count, expected: parts * part, parts, part });
        }
        let (rows, shard) = match source {
            Source::Collective(Collective::AllGather) => (given.checked_mul(world).ok_or_else(too_large)?, given),
            _ => (given, given.div_ceil(world)),
        };
        let bytes = (elements * size_of::<T>()) as u64;
        let narrow = |number: u64| u32::try_from(number).map_err(|_| too_large());
        Ok(Rows {
            rows: narrow(rows as u64)?,
            shard: narrow(shard as u64)?,
            elements: narrow(elements as u64)?,
            bytes,
            packs: narrow(bytes.div_ceil(PACK))?,
        })
    }

    /// Rows that are normed.
    pub(super) fn normed(self, source: Source) -> usize {
        let rows = if source == Source::Collective(Collective::ReduceScatter) { self.shard } else { self.rows };
        rows as usize
    }

    /// Bytes of the rows that a collective gives, as the scratch holds them.
    pub(super) fn bytes_between(self, collective: Collective) -> u64 {
        const LINE: u64 = 128;
        (self.normed(Source::Collective(collective)) as u64 * self.bytes).next_multiple_of(LINE)
    }

    /// Packs of all of them.
    pub(super) fn all_packs(self) -> u64 {
        u64::from(self.rows) * u64::from(self.packs)
    }

    /// Bytes of the place where a block keeps a row, in f32.
    pub(super) fn kept_bytes<T>(self) -> u64 {
        u64::from(self.packs) * PACK * (4 / size_of::<T>()) as u64
    }

    /// Of `blocks`, as many as have a place in the scratch, of which they may take one part in `part`.
    pub(super) fn fitting_blocks<T>(self, blocks: u32, group: &GroupParams, part: u64) -> Result<u32, ApiMisuse> {
        let places = group.scratch_bytes / part / self.kept_bytes::<T>();
        if places == 0 {
            let needed = part * self.kept_bytes::<T>();
            return Err(ApiMisuse::RowTooLarge { needed, scratch: group.scratch_bytes });
        }
        Ok(blocks.min(u32::try_from(places).unwrap_or(u32::MAX)))
    }

    pub(super) fn params<B: Backend, T: Float>(
        self,
        group: GroupParams,
        input: u64,
        output: &NormOutput<'_, B, T>,
        norm: &RowNorm<'_, B, T>,
    ) -> NormParams {
        let [residual, new_residual] = norm.residuals().map_or([0; 2], |slices| slices.map(|slice| slice.address()));
        let [output_address, scales, tensor_scale] = output.addresses();
        let address = |slice: Option<Slice<'_, B, T>>| slice.map_or(0, |slice| slice.address());
        let packs = self.all_packs();
        let kept = group.scratch_offset;
        let all_reduce = AllReduceParams {
            group,
            input,
            output: output_address,
            bytes: u64::from(self.rows) * self.bytes,
            packs,
            whole_packs: packs,
            window_packs: packs,
            ..AllReduceParams::zeroed()
        };
        NormParams {
            all_reduce,
            residual,
            new_residual,
            sum: address(norm.sum()),
            weight: norm.weight.address(),
            row_bytes: self.bytes,
            rows: self.rows,
            row_packs: self.packs,
            inverse_elements: 1.0 / self.elements as f32,
            epsilon: norm.epsilon,
            offset: norm.offset,
            elements: self.elements,
            bias: address(norm.bias),
            scales,
            tensor_scale,
            kept,
            operation: Operation::AllReduceNorm as u32,
            format: output.format as u32,
            is_layer: u32::from(norm.is_layer),
            is_fast: u32::from(norm.is_fast),
            ..NormParams::zeroed()
        }
    }

    /// Makes parameters those of the two-stage form on a grid of `blocks`, with windows of as many rows as the scratch has room for.
    pub(super) fn divide_scratch<T>(
        self,
        collective: Collective,
        blocks: u32,
        params: &mut NormParams,
    ) -> Result<(), ApiMisuse> {
        let GroupParams { scratch_offset, scratch_bytes, world, .. } = params.all_reduce.group;
        let row = u64::from(self.packs) * PACK;
        let (operation, pushed, sums) = match collective {
            Collective::ReduceScatter => (Operation::ReduceScatterNorm, row, 0),
            Collective::AllGather => (Operation::AllGatherNorm, 0, row),
            _ => (Operation::AllReduceNorm, row, if params.is_fast == 0 { row } else { self.kept_bytes::<T>() }),
        };
        let kept = u64::from(blocks) * self.kept_bytes::<T>();
        let each = u64::from(world) * (pushed + sums);
        let window = (scratch_bytes.saturating_sub(kept) / each).min(self.shard.into());
        if window == 0 {
            return Err(ApiMisuse::RowTooLarge { needed: kept + each, scratch: scratch_bytes });
        }
        params.operation = operation as u32;
        params.shard_rows = self.shard;
        params.window_rows = window as u32;
        params.sums = scratch_offset + u64::from(world) * window * pushed;
        params.kept = params.sums + u64::from(world) * window * sums;
        Ok(())
    }
}

/// Whether all packs of all operands are whole and aligned.
pub(super) fn is_whole(p: &NormParams) -> bool {
    let output = if p.format == RowFormat::Plain as u32 { p.all_reduce.output } else { 0 };
    let all = p.all_reduce.input | output | p.residual | p.new_residual | p.sum | p.weight | p.bias | p.row_bytes;
    all.is_multiple_of(PACK)
}

/// Whether the kernels of RMSNorm alone do it: exact, and in the rows' own type or e4m3 with one scale for all.
pub(super) fn is_plain(p: &NormParams) -> bool {
    let formats = [RowFormat::Plain, RowFormat::E4m3Tensor].map(|format| format as u32);
    p.is_layer == 0 && p.is_fast == 0 && formats.contains(&p.format)
}
