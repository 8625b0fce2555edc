//! Which algorithm and grid a call takes. A plan depends only on what all ranks share (P4), never on addresses.
#![forbid(unsafe_code)]

use crate::backend::DeviceFamily;
use crate::dtype::Dtype;
use crate::kernel::Algorithm;
use crate::layout::PACK_BYTES;

/// Algorithm and grid of one call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Plan {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads a block.
    pub threads: u32,
}

/// A row of the tuning table: what to do for messages up to some size.
#[derive(Clone, Copy, Debug)]
struct Row {
    family: DeviceFamily,
    /// Largest world size the row speaks of.
    max_world: usize,
    /// Largest message, in bytes.
    max_bytes: usize,
    algorithm: Algorithm,
    threads: u32,
    /// Packs that one thread should have to itself before another block is added.
    packs_per_thread: usize,
    max_blocks: u32,
}

/// First row that fits wins; the last row of each family fits everything.
const TABLE: &[Row] = &[
    // Host. Estimates: a second block only pays where cores are idle, which ranks of one machine seldom leave.
    row(DeviceFamily::Host, 2, usize::MAX, Algorithm::OneStage, 1, 4096, 2),
    row(DeviceFamily::Host, 8, 64 << 10, Algorithm::OneStage, 1, 4096, 1),
    row(DeviceFamily::Host, 8, usize::MAX, Algorithm::TwoStage, 1, 4096, 2),
    // NVIDIA, two ranks: swept on one H200 with both ranks on it, 2026-11-29 (benches/NOTES.md). Not measured over NVLink.
    row(DeviceFamily::Nvidia, 2, 8 << 10, Algorithm::OneStage, 64, 1, 64),
    row(DeviceFamily::Nvidia, 2, 512 << 10, Algorithm::OneStage, 256, 1, 64),
    row(DeviceFamily::Nvidia, 2, usize::MAX, Algorithm::OneStage, 512, 1, 64),
    // NVIDIA, more ranks, and AMD: not measured.
    row(DeviceFamily::Nvidia, 8, 256 << 10, Algorithm::OneStage, 512, 1, 64),
    row(DeviceFamily::Nvidia, 8, usize::MAX, Algorithm::TwoStage, 512, 1, 64),
    row(DeviceFamily::Amd, 2, usize::MAX, Algorithm::OneStage, 512, 1, 64),
    row(DeviceFamily::Amd, 8, 256 << 10, Algorithm::OneStage, 512, 1, 64),
    row(DeviceFamily::Amd, 8, usize::MAX, Algorithm::TwoStage, 512, 1, 64),
];

const fn row(
    family: DeviceFamily,
    max_world: usize,
    max_bytes: usize,
    algorithm: Algorithm,
    threads: u32,
    packs_per_thread: usize,
    max_blocks: u32,
) -> Row {
    Row { family, max_world, max_bytes, algorithm, threads, packs_per_thread, max_blocks }
}

/// What the table gives for an all-reduce of `count` elements. The grid may still exceed the block budget.
pub(crate) fn all_reduce(family: DeviceFamily, world: usize, count: usize, dtype: Dtype) -> Plan {
    let bytes = count.saturating_mul(dtype.bytes());
    let row = TABLE
        .iter()
        .find(|row| row.family == family && world <= row.max_world && bytes <= row.max_bytes)
        // Every family ends with a row for 8 ranks and all sizes (tested below).
        .unwrap_or(&TABLE[0]);
    let packs = match row.algorithm {
        Algorithm::OneStage => bytes.div_ceil(PACK_BYTES),
        Algorithm::TwoStage => bytes.div_ceil(PACK_BYTES).div_ceil(world),
    };
    let blocks = packs.div_ceil(row.threads as usize * row.packs_per_thread).clamp(1, row.max_blocks as usize) as u32;
    Plan { algorithm: row.algorithm, blocks, threads: row.threads }
}

/// Fingerprint of the table, compared between ranks. FNV-1a over its text.
pub(crate) fn table_fingerprint() -> u64 {
    format!("{TABLE:?}")
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_family_ends_with_a_row_for_everything() {
        for family in [DeviceFamily::Host, DeviceFamily::Nvidia, DeviceFamily::Amd] {
            let last = TABLE.iter().rfind(|row| row.family == family).unwrap();
            assert_eq!((last.max_world, last.max_bytes), (8, usize::MAX));
        }
    }

    #[test]
    fn grids_grow_with_the_message() {
        let blocks = |count| all_reduce(DeviceFamily::Nvidia, 2, count, Dtype::F32).blocks;
        assert_eq!(blocks(1), 1);
        assert_eq!(blocks(64 * 4), 1);
        assert_eq!(blocks(64 * 4 + 1), 2);
        assert_eq!(blocks(usize::MAX), 64);
    }
}
