//! Which algorithm and grid a call takes. A plan depends only on what all ranks share (P4), never on addresses.
#![forbid(unsafe_code)]

use crate::backend::{DeviceFamily, DeviceInfo, Link};
use crate::collective::Collective;
use crate::dtype::Dtype;
use crate::kernel::Algorithm;
use crate::layout::PACK_BYTES;
#[cfg(test)]
use crate::layout::most_lamport_bytes;
use crate::tuning::TuningRow;

/// Bytes of data in a line.
pub(crate) const LINE_DATA_BYTES: u64 = 8;

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

impl Plan {
    /// An algorithm with a grid.
    pub const fn new(algorithm: Algorithm, blocks: u32, threads: u32) -> Self {
        Plan { algorithm, blocks, threads }
    }
}

/// A row of the tuning table: what to do for messages up to some size.
#[derive(Clone, Copy, Debug)]
struct Row {
    family: DeviceFamily,
    /// The slowest link among the ranks; `None` for all that have no rows of their own.
    link: Option<Link>,
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
const TABLE: &[Row] = {
    use Algorithm::{Lamport, Lines, OneStage, TwoShot, TwoStage};
    use DeviceFamily::{Amd, Host, Nvidia};
    const ANY: Option<Link> = None;
    const SHARED: Option<Link> = Some(Link::SameDevice);
    const NVLINK: Option<Link> = Some(Link::NvLink);
    const PINNED: Option<Link> = Some(Link::Pinned);
    const fn row(
        key: (DeviceFamily, Option<Link>, usize),
        max_bytes: usize,
        algorithm: Algorithm,
        grid: (u32, usize, u32),
    ) -> Row {
        let (family, link, max_world) = key;
        let (threads, packs_per_thread, max_blocks) = grid;
        Row { family, link, max_world, max_bytes, algorithm, threads, packs_per_thread, max_blocks }
    }
    &[
        // Host. Measured with 2 and 4 ranks on 2 cores, 2026-11-29 (benches/NOTES.md); estimates elsewhere: a second block
        // only pays where cores are idle, which ranks of one machine seldom leave.
        row((Host, ANY, 2), 4 << 10, Lamport, (1, 4096, 1)),
        row((Host, ANY, 8), 2 << 10, Lamport, (1, 4096, 1)),
        row((Host, ANY, 2), usize::MAX, OneStage, (1, 4096, 2)),
        row((Host, ANY, 8), 64 << 10, OneStage, (1, 4096, 1)),
        row((Host, ANY, 8), usize::MAX, TwoStage, (1, 4096, 2)),
        // NVIDIA, two ranks on one device: by `signal tune` on one H200, 2026-12-01 (tuning/nvidia-sm_90.toml). At 1 MiB one-stage is faster where
        // it can read the input in place, and much slower where it cannot, which a plan may not depend on.
        row((Nvidia, SHARED, 2), 256 << 10, Lamport, (128, 1, 128)),
        row((Nvidia, SHARED, 2), 1 << 20, Lamport, (256, 1, 128)),
        // More ranks on one device: 3, 4 and 8 on one H200, 2026-11-30. There nothing is sent over a link, so two-shot does not pay: 24.7
        // and 15.2 us at 4 MiB with 3 ranks.
        row((Nvidia, SHARED, 3), 1 << 20, Lamport, (512, 1, 64)),
        row((Nvidia, SHARED, 4), 512 << 10, Lamport, (512, 1, 64)),
        row((Nvidia, SHARED, 8), 64 << 10, Lamport, (512, 1, 64)),
        // What Lamport does not take: other types, operators and domains.
        row((Nvidia, SHARED, 8), 64 << 10, Lines, (128, 1, 64)),
        row((Nvidia, SHARED, 2), 128 << 10, Lines, (256, 1, 128)),
        row((Nvidia, SHARED, 2), 2 << 10, OneStage, (64, 1, 64)),
        row((Nvidia, SHARED, 2), 8 << 10, OneStage, (256, 1, 64)),
        row((Nvidia, SHARED, 2), 64 << 10, OneStage, (64, 1, 64)),
        row((Nvidia, SHARED, 2), 128 << 10, OneStage, (128, 1, 64)),
        row((Nvidia, SHARED, 2), usize::MAX, OneStage, (256, 1, 128)),
        row((Nvidia, SHARED, 4), 1 << 20, OneStage, (512, 1, 64)),
        row((Nvidia, SHARED, 8), 512 << 10, OneStage, (512, 1, 64)),
        row((Nvidia, SHARED, 8), usize::MAX, TwoStage, (512, 1, 64)),
        // NVIDIA, two ranks over NVLink: swept on two H200s, 2026-11-29 and 30 (benches/results).
        row((Nvidia, NVLINK, 2), 4 << 10, Lamport, (128, 1, 64)),
        row((Nvidia, NVLINK, 2), 128 << 10, Lamport, (64, 1, 128)),
        row((Nvidia, NVLINK, 2), 256 << 10, Lamport, (128, 1, 128)),
        row((Nvidia, NVLINK, 2), 512 << 10, Lamport, (256, 1, 128)),
        row((Nvidia, NVLINK, 2), 4 << 20, Lamport, (512, 1, 128)),
        // Of more blocks a kernel is not launched early, which a long one has no need of.
        row((Nvidia, NVLINK, 2), 32 << 20, TwoShot, (512, 1, 256)),
        row((Nvidia, NVLINK, 2), usize::MAX, TwoShot, (512, 1, 128)),
        row((Nvidia, NVLINK, 2), 64 << 10, Lines, (128, 1, 64)),
        row((Nvidia, NVLINK, 2), 128 << 10, Lines, (256, 1, 128)),
        row((Nvidia, NVLINK, 2), 128 << 10, OneStage, (128, 1, 64)),
        row((Nvidia, NVLINK, 2), 256 << 10, OneStage, (256, 1, 64)),
        row((Nvidia, NVLINK, 2), usize::MAX, OneStage, (512, 1, 128)),
        // NVIDIA over the host's memory: measured with two ranks on two H200s, 2026-11-30 (benches/results), up to 16 KiB but for one block. Each
        // block more costs its barriers' reads over the bus, 1.8 us; a thread that polls data costs one at a time.
        row((Nvidia, PINNED, 2), 4 << 10, Lamport, (128, 1, 64)),
        row((Nvidia, PINNED, 8), 256 << 10, OneStage, (512, 4, 4)),
        row((Nvidia, PINNED, 8), 4 << 20, TwoStage, (512, 4, 4)),
        row((Nvidia, PINNED, 8), usize::MAX, TwoStage, (512, 4, 16)),
        // NVIDIA, two ranks, other links: not measured.
        row((Nvidia, ANY, 2), 8 << 10, Lamport, (64, 1, 64)),
        row((Nvidia, ANY, 2), 64 << 10, Lamport, (256, 1, 64)),
        row((Nvidia, ANY, 2), 1 << 20, Lamport, (512, 1, 64)),
        row((Nvidia, ANY, 2), 8 << 10, OneStage, (64, 1, 64)),
        row((Nvidia, ANY, 2), 512 << 10, OneStage, (256, 1, 64)),
        row((Nvidia, ANY, 2), usize::MAX, OneStage, (512, 1, 64)),
        // NVIDIA, more ranks: not measured. A push sends to each peer what a two-stage call sends once.
        row((Nvidia, ANY, 4), 512 << 10, Lamport, (512, 1, 64)),
        row((Nvidia, ANY, 8), 256 << 10, Lamport, (512, 1, 64)),
        row((Nvidia, ANY, 8), 64 << 10, Lines, (256, 1, 128)),
        row((Nvidia, ANY, 8), 256 << 10, OneStage, (512, 1, 64)),
        row((Nvidia, ANY, 8), usize::MAX, TwoStage, (512, 1, 64)),
        // AMD: never run. Of blocks the architecture has a say (`MOST_BLOCKS`).
        row((Amd, ANY, 4), 512 << 10, Lamport, (512, 1, 80)),
        row((Amd, ANY, 8), 256 << 10, Lamport, (512, 1, 80)),
        row((Amd, ANY, 8), 256 << 10, OneStage, (512, 1, 80)),
        row((Amd, ANY, 2), usize::MAX, OneStage, (512, 1, 80)),
        row((Amd, ANY, 8), usize::MAX, TwoStage, (512, 1, 80)),
    ]
};

/// Most blocks of a call on an architecture, where rows of the table would take more. None of it was measured here.
const MOST_BLOCKS: &[(&str, u32)] = &[
    // What AMD's library aiter launches at most on MI300 and MI350, of 512 threads (`kMaxBlocks` of its all-reduce). On 8 MI300X a
    // comparison has it at 367 GB/s at 96 MiB where vLLM's, of 16 blocks, stands at 231.
    ("gfx942", 80),
    ("gfx950", 80),
    // What vLLM launches on ROCm, whose all-reduce began on MI200 (`defaultBlockLimit`).
    ("gfx90a", 16),
    // Nobody says: as the smallest.
    ("gfx1100", 16),
];

/// What the ranks share that a plan depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Topology {
    pub(crate) family: DeviceFamily,
    /// The slowest among the ranks.
    pub(crate) link: Link,
    pub(crate) world: usize,
    /// Most blocks of a call.
    pub(crate) most_blocks: u32,
}

impl Topology {
    /// Of `world` ranks on devices of one architecture, of which `info` is one.
    pub(crate) fn new(info: &DeviceInfo, link: Link, world: usize) -> Self {
        let most = MOST_BLOCKS.iter().find(|(arch, _)| *arch == info.arch);
        Topology { family: info.family, link, world, most_blocks: most.map_or(u32::MAX, |(_, blocks)| *blocks) }
    }
}

/// What a row says, of whichever table.
#[derive(Clone, Copy, Debug)]
struct Advice {
    algorithm: Algorithm,
    threads: u32,
    units_per_thread: u64,
    max_blocks: u32,
}

impl Advice {
    /// As a plan for so many units of work, by the algorithm that is `wanted` if any is.
    fn plan(self, algorithm: Algorithm, units: u64, most_blocks: u32) -> Plan {
        let most = self.max_blocks.min(most_blocks);
        let blocks = units.div_ceil(u64::from(self.threads) * self.units_per_thread).clamp(1, most.into());
        Plan { algorithm, blocks: blocks as u32, threads: self.threads }
    }
}

impl From<&TuningRow> for Advice {
    fn from(row: &TuningRow) -> Self {
        let TuningRow { algorithm, threads, units_per_thread, max_blocks, .. } = *row;
        Advice { algorithm, threads, units_per_thread, max_blocks }
    }
}

impl From<&Row> for Advice {
    fn from(row: &Row) -> Self {
        let Row { algorithm, threads, packs_per_thread, max_blocks, .. } = *row;
        Advice { algorithm, threads, units_per_thread: packs_per_thread as u64, max_blocks }
    }
}

impl From<&ExchangeRow> for Advice {
    fn from(row: &ExchangeRow) -> Self {
        let ExchangeRow { algorithm, threads, packs_per_thread, max_blocks, .. } = *row;
        Advice { algorithm, threads, units_per_thread: packs_per_thread, max_blocks }
    }
}

/// What threads of an all-reduce divide among each other: packs, or lines.
fn all_reduce_units(algorithm: Algorithm, world: usize, bytes: usize) -> u64 {
    let units = match algorithm {
        Algorithm::OneStage | Algorithm::Lamport | Algorithm::Pull | Algorithm::Push => bytes.div_ceil(PACK_BYTES),
        Algorithm::Lines => bytes.div_ceil(LINE_DATA_BYTES as usize),
        Algorithm::TwoShot if world == 2 => bytes.div_ceil(PACK_BYTES),
        Algorithm::TwoStage | Algorithm::TwoStagePush | Algorithm::TwoShot => {
            bytes.div_ceil(PACK_BYTES).div_ceil(world)
        }
    };
    units as u64
}

/// The same of another collective.
fn exchange_units(algorithm: Algorithm, world: usize, load: Load) -> u64 {
    match algorithm {
        // A line of each piece is read and written by a thread of its own.
        Algorithm::Lines => load.largest.div_ceil(LINE_DATA_BYTES) * world.max(2).saturating_sub(1) as u64,
        _ => load.bytes.div_ceil(PACK_BYTES as u64),
    }
}

/// Units of work of a call that moves `bytes` in equal parts among `world` ranks: what a [`TuningRow`] divides among threads.
pub(crate) fn units(collective: Collective, algorithm: Algorithm, world: usize, bytes: u64) -> u64 {
    if collective == Collective::AllReduce {
        return all_reduce_units(algorithm, world, bytes as usize);
    }
    let parts = if collective.has_parts() { world as u64 } else { 1 };
    exchange_units(algorithm, world, Load { bytes, largest: bytes.div_ceil(parts) })
}

/// What the tables give for an all-reduce of `count` elements: by the algorithm that is `wanted`, or else by one that it `takes`. Rows of `tuned`
/// come before the library's own. The grid may still exceed the block budget.
pub(crate) fn all_reduce(
    topology: Topology,
    tuned: &[TuningRow],
    count: usize,
    dtype: Dtype,
    wanted: Option<Algorithm>,
    takes: impl Fn(Algorithm) -> bool,
) -> Plan {
    let Topology { family, link, world, most_blocks } = topology;
    let bytes = count.saturating_mul(dtype.bytes());
    let fits = |row: &&Row| {
        row.family == family && row.link.is_none_or(|of| of == link) && world <= row.max_world && bytes <= row.max_bytes
    };
    let rows = tuned.iter().map(Advice::from).chain(TABLE.iter().filter(fits).map(Advice::from));
    // Every family ends with a row for 8 ranks and all sizes (tested below).
    let row = choose(rows, wanted, takes).unwrap_or_else(|| Advice::from(&TABLE[0]));
    let algorithm = wanted.unwrap_or(row.algorithm);
    row.plan(algorithm, all_reduce_units(algorithm, world, bytes), most_blocks)
}

/// The first row with the algorithm that is `wanted`; where there is none, or it is all the same, the first of one that the call `takes`.
fn choose(
    mut rows: impl Iterator<Item = Advice> + Clone,
    wanted: Option<Algorithm>,
    takes: impl Fn(Algorithm) -> bool,
) -> Option<Advice> {
    let first = wanted.and_then(|wanted| rows.clone().find(|row| row.algorithm == wanted));
    first.or_else(|| rows.find(|row| takes(row.algorithm)))
}

/// A row of the table for the other collectives.
#[derive(Clone, Copy, Debug)]
struct ExchangeRow {
    family: DeviceFamily,
    link: Option<Link>,
    /// Most that a rank takes in or gives out, in bytes.
    max_bytes: u64,
    algorithm: Algorithm,
    threads: u32,
    /// Packs, or lines, that one thread should have to itself before another block is added.
    packs_per_thread: u64,
    max_blocks: u32,
}

/// First row that fits wins; the last row of each family fits everything. A send-recv takes that one at all sizes, so that ranks agree
/// on the threads of a block that exchange pieces of several sizes in one call.
const EXCHANGES: &[ExchangeRow] = {
    use Algorithm::{Lines, Pull, Push};
    use DeviceFamily::{Amd, Host, Nvidia};
    const ANY: Option<Link> = None;
    const fn row(
        family: DeviceFamily,
        link: Option<Link>,
        max_bytes: u64,
        algorithm: Algorithm,
        grid: (u32, u64, u32),
    ) -> ExchangeRow {
        let (threads, packs_per_thread, max_blocks) = grid;
        ExchangeRow { family, link, max_bytes, algorithm, threads, packs_per_thread, max_blocks }
    }
    &[
        row(Host, ANY, 2 << 10, Lines, (1, 4096, 1)),
        row(Host, ANY, u64::MAX, Pull, (1, 4096, 2)),
        // Over the host's memory a block more costs 1.8 us, and an all-gather of 8 MiB takes 174 to 195 us whatever their number (benches/results).
        row(Nvidia, Some(Link::Pinned), 4 << 20, Pull, (512, 4, 4)),
        row(Nvidia, Some(Link::Pinned), u64::MAX, Pull, (512, 4, 8)),
        // Two ranks on one H200, a reduce-scatter of 64 KiB: 1.88 us, 1.92 with blocks of 256 threads.
        row(Nvidia, ANY, 64 << 10, Lines, (128, 1, 64)),
        row(Nvidia, ANY, 256 << 10, Lines, (256, 1, 128)),
        // There, of 512 KiB: 2.7 us, 4.3 by pulling. Over NVLink it was not tried.
        row(Nvidia, Some(Link::SameDevice), 512 << 10, Lines, (256, 1, 128)),
        // Two ranks on one H200, a reduce-scatter: 3.2 us at 2 KiB, 4.0 with blocks of 512 threads (benches/results).
        row(Nvidia, ANY, 16 << 10, Pull, (128, 1, 64)),
        row(Nvidia, ANY, 256 << 10, Pull, (256, 1, 128)),
        // Over NVLink a pull reads 331 GB/s and a push writes 363 (benches/results).
        row(Nvidia, Some(Link::NvLink), 32 << 20, Pull, (512, 1, 128)),
        row(Nvidia, Some(Link::NvLink), u64::MAX, Push, (512, 1, 128)),
        // On one device with blocks of 512 threads an all-gather of 64 MiB in place takes 39.5 us, not 38.2.
        row(Nvidia, Some(Link::SameDevice), u64::MAX, Pull, (256, 1, 128)),
        row(Nvidia, ANY, u64::MAX, Pull, (512, 1, 128)),
        // AMD: never run.
        row(Amd, ANY, 64 << 10, Lines, (256, 1, 80)),
        row(Amd, ANY, u64::MAX, Pull, (512, 1, 80)),
    ]
};

/// What a collective exchanges, as far as its plan depends on it: the same on all ranks, or of sends and receives on both of a pair.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Most that a rank takes in or gives out, in bytes.
    pub(crate) bytes: u64,
    /// The largest piece.
    pub(crate) largest: u64,
}

/// The same for a collective that exchanges pieces.
pub(crate) fn exchange(
    topology: Topology,
    tuned: &[TuningRow],
    collective: Collective,
    load: Load,
    wanted: Option<Algorithm>,
    takes: impl Fn(Algorithm) -> bool,
) -> Plan {
    let fits = |row: &&ExchangeRow| {
        row.family == topology.family
            && row.link.is_none_or(|of| of == topology.link)
            && (row.max_bytes == u64::MAX || (load.bytes <= row.max_bytes && collective != Collective::SendRecv))
    };
    // What is pushed is added behind a barrier: 125 us at 64 MiB on two H200s, where a pull takes 105. Where all move data one way, a pull is
    // no slower: a broadcast of 256 MiB takes 720 us, and 733 by pushing.
    let pulls = collective.reduces() || matches!(collective, Collective::SendRecv | Collective::Broadcast);
    let own =
        EXCHANGES.iter().filter(fits).map(Advice::from).filter(|row| !(row.algorithm == Algorithm::Push && pulls));
    let rows = tuned.iter().map(Advice::from).chain(own);
    // Every family ends with a row for everything (tested below).
    let row = choose(rows, wanted, takes).unwrap_or_else(|| Advice::from(&EXCHANGES[0]));
    let algorithm = wanted.unwrap_or(row.algorithm);
    row.plan(algorithm, exchange_units(algorithm, topology.world, load), topology.most_blocks)
}

/// Most threads that share a row, where they are not the host's.
pub(crate) const ROW_THREADS: u32 = 512;

/// Whether one kernel for rows and their all-reduce beats two. Of rows of more packs than a block has threads it does not: 6.0 us for 16 KiB on two
/// H200s, where two kernels take 4.0 (benches/NOTES.md); nor, by the same path, of rows that do not end with a pack.
pub(crate) fn fuses_rows(packs: u32, row_bytes: u64) -> bool {
    packs <= ROW_THREADS && row_bytes.is_multiple_of(PACK_BYTES as u64)
}

/// The grid for rows of so many packs, of which each is one block's: a thread for each pack, as far as a block has as many.
pub(crate) fn rows(topology: Topology, algorithm: Algorithm, rows: u32, packs: u32) -> Plan {
    const WAVE: u32 = 32;
    let (threads, most) = match topology.family {
        // As in the tables: a second block only pays where cores are idle.
        DeviceFamily::Host => (1, 2),
        _ => (packs.clamp(1, ROW_THREADS).next_multiple_of(WAVE), 1024),
    };
    Plan { algorithm, blocks: rows.clamp(1, most.min(topology.most_blocks)), threads }
}

/// Fingerprint of the tables, compared between ranks.
pub(crate) fn table_fingerprint() -> u64 {
    fnv(format!("{TABLE:?}{EXCHANGES:?}{MOST_BLOCKS:?}").bytes())
}

/// FNV-1a.
pub(crate) fn fnv(bytes: impl Iterator<Item = u8>) -> u64 {
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn topology(family: DeviceFamily, link: Link, world: usize) -> Topology {
        Topology { family, link, world, most_blocks: u32::MAX }
    }

    #[test]
    fn an_architecture_limits_the_blocks() {
        let info = |arch: &str| DeviceInfo {
            name: String::new(),
            uuid: String::new(),
            pci: None,
            arch: arch.to_owned(),
            family: DeviceFamily::Amd,
            memory_bytes: 0,
            compute_units: 1,
            clock_hz: 1,
            max_block_threads: 512,
        };
        for (arch, most) in [("gfx942", 80), ("gfx90a", 16), ("gfx1100", 16), ("gfx1030", 80)] {
            let topology = Topology::new(&info(arch), Link::Xgmi, 8);
            assert_eq!(all_reduce(topology, &[], 1 << 30, Dtype::F32, None, |_| true).blocks, most, "{arch}");
            let load = Load { bytes: 1 << 30, largest: 1 << 30 };
            assert_eq!(exchange(topology, &[], Collective::AllGather, load, None, |_| true).blocks, most, "{arch}");
        }
    }

    #[test]
    fn what_was_measured_comes_first() {
        let topology = topology(DeviceFamily::Nvidia, Link::NvLink, 2);
        let row = |collective, bytes, (algorithm, blocks, threads)| {
            TuningRow::new(collective, 2, bytes, Plan { algorithm, blocks, threads }, 9.0)
        };
        let tuned = [
            row(Collective::AllReduce, 1 << 20, (Algorithm::TwoStage, 32, 1024)),
            row(Collective::AllReduce, 1 << 20, (Algorithm::OneStage, 16, 256)),
        ];
        let plan = |count, wanted, takes: fn(Algorithm) -> bool| {
            let Plan { algorithm, blocks, threads } = all_reduce(topology, &tuned, count, Dtype::F32, wanted, takes);
            (algorithm, blocks, threads)
        };
        // At the size that was measured the grid that was, and fewer blocks below.
        assert_eq!(plan(1 << 18, None, |_| true), (Algorithm::TwoStage, 32, 1024));
        assert_eq!(plan(1 << 17, None, |_| true), (Algorithm::TwoStage, 16, 1024));
        assert_eq!(plan(1 << 18, None, |a| a != Algorithm::TwoStage), (Algorithm::OneStage, 16, 256));
        assert_eq!(plan(1 << 18, Some(Algorithm::OneStage), |_| true), (Algorithm::OneStage, 16, 256));
        // What was not measured is the library's own.
        let own = all_reduce(topology, &[], 1 << 18, Dtype::F32, Some(Algorithm::Lamport), |_| true);
        assert_eq!(plan(1 << 18, Some(Algorithm::Lamport), |_| true), (own.algorithm, own.blocks, own.threads));

        let tuned = [row(Collective::Broadcast, 4096, (Algorithm::Push, 2, 128))];
        let load = Load { bytes: 4096, largest: 4096 };
        let plan = exchange(topology, &tuned, Collective::Broadcast, load, None, |_| true);
        assert_eq!((plan.algorithm, plan.blocks, plan.threads), (Algorithm::Push, 2, 128));
    }

    #[test]
    fn every_family_ends_with_a_row_for_everything() {
        for family in [DeviceFamily::Host, DeviceFamily::Nvidia, DeviceFamily::Amd] {
            let last = TABLE.iter().rfind(|row| row.family == family).unwrap();
            assert_eq!((last.link, last.max_world, last.max_bytes), (None, 8, usize::MAX));
            assert!(!matches!(last.algorithm, Algorithm::Lamport | Algorithm::Lines));
            let last = EXCHANGES.iter().rfind(|row| row.family == family).unwrap();
            assert_eq!((last.link, last.max_bytes), (None, u64::MAX));
            assert_eq!(last.algorithm, Algorithm::Pull);
        }
    }

    #[test]
    fn lamport_rows_fit_a_slot() {
        for row in TABLE.iter().filter(|row| row.algorithm == Algorithm::Lamport) {
            assert!(row.max_bytes <= most_lamport_bytes(row.max_world), "{row:?}");
        }
    }

    #[test]
    fn grids_grow_with_the_message() {
        let topology = topology(DeviceFamily::Nvidia, Link::Pcie, 2);
        let plan = |count| all_reduce(topology, &[], count, Dtype::F32, None, |_| true);
        assert_eq!(plan(1).blocks, 1);
        assert_eq!(plan(64 * 4).blocks, 1);
        assert_eq!(plan(64 * 4 + 1).blocks, 2);
        assert_eq!((plan(usize::MAX).blocks, plan(usize::MAX).algorithm), (64, Algorithm::OneStage));
    }

    #[test]
    fn sends_have_the_same_threads_at_all_sizes() {
        for family in [DeviceFamily::Host, DeviceFamily::Nvidia, DeviceFamily::Amd] {
            let topology = topology(family, Link::NvLink, 2);
            let plan =
                |bytes| exchange(topology, &[], Collective::SendRecv, Load { bytes, largest: bytes }, None, |_| true);
            for bytes in [1, 2 << 10, 100 << 10, 1 << 30] {
                let Plan { algorithm, threads, .. } = plan(bytes);
                assert_eq!((algorithm, threads), (Algorithm::Pull, plan(1).threads));
            }
        }
    }

    #[test]
    fn what_is_wanted_has_the_grid_of_its_own_rows() {
        let topology = topology(DeviceFamily::Nvidia, Link::NvLink, 2);
        let load = Load { bytes: 2048, largest: 2048 };
        for wanted in [Algorithm::Lines, Algorithm::Pull] {
            let plan = exchange(topology, &[], Collective::Reduce, load, Some(wanted), |_| true);
            let lines = if wanted == Algorithm::Lines { LINE_DATA_BYTES as usize } else { PACK_BYTES };
            assert_eq!((plan.algorithm, plan.blocks * plan.threads), (wanted, (2048 / lines) as u32));
        }
        let plan = |wanted| all_reduce(topology, &[], 512, Dtype::F32, Some(wanted), |_| true);
        assert_eq!((plan(Algorithm::Lines).algorithm, plan(Algorithm::Lines).blocks * 128), (Algorithm::Lines, 256));
        assert_eq!(plan(Algorithm::TwoStage).algorithm, Algorithm::TwoStage);
    }

    #[test]
    fn without_lamport_there_is_a_plan_too() {
        for (family, world) in [(DeviceFamily::Host, 2), (DeviceFamily::Nvidia, 8), (DeviceFamily::Amd, 4)] {
            let topology = topology(family, Link::Pcie, world);
            let plan = |without: &[Algorithm]| {
                all_reduce(topology, &[], 100, Dtype::F16, None, |a| !without.contains(&a)).algorithm
            };
            assert_eq!(plan(&[]), Algorithm::Lamport);
            let lines = if family == DeviceFamily::Nvidia { Algorithm::Lines } else { Algorithm::OneStage };
            assert_eq!(plan(&[Algorithm::Lamport]), lines);
            assert_eq!(plan(&[Algorithm::Lamport, Algorithm::Lines]), Algorithm::OneStage);
        }
    }
}
