//! Byte-exact layout of the memory that ranks share.
//!
//! Each rank owns one peer-visible allocation:
//!
//! ```text
//! SIGNAL_START      + CONTROL_OFFSET       SCRATCH_OFFSET
//! | Signal          | Control              | scratch ...  |
//! ```
//!
//! [`Signal`] is the wire structure of the protocol and never changes; [`Control`] is ours. [`HostControl`] is a
//! separate host-mapped allocation through which the host and this rank's kernels talk. `kernels/signal/layout.h`
//! mirrors this file and asserts the same numbers.
//!
//! The types here are never instantiated and no reference to one is ever formed: peers write this memory at any time.
//! They exist so that offsets are computed, and checked, by the compiler.
#![forbid(unsafe_code)]

use std::mem::{offset_of, size_of};

/// Barrier domains of one Signal. Each has counters of its own, so collectives on different domains may run at once.
pub const NUM_BARRIER_DOMAINS: usize = 8;
/// Upper bound of the blocks in one grid (the second dimension of the counters).
pub const MAX_NUM_BLOCKS_UPPER_BOUND: usize = 1024;
/// Upper bound of the world size (the last dimension of the counters).
pub const MAX_GPUS: usize = 8;
/// Lamport generations: one being written, one being read by a slow peer, one being cleared.
pub const LAMPORT_GENERATIONS: usize = 3;
/// Bytes of one rank's slot in one Lamport generation.
pub const LAMPORT_SLOT_BYTES: usize = 1 << 20;
/// Bytes of the Lamport region: 3 generations x 8 rank slots x 1 MiB.
pub const LAMPORT_REGION_BYTES: usize = LAMPORT_GENERATIONS * MAX_GPUS * LAMPORT_SLOT_BYTES;
/// The largest message that goes by Lamport's algorithm among so many ranks: fewer than five have several slots each.
pub const fn most_lamport_bytes(world: usize) -> usize {
    LAMPORT_SLOT_BYTES * (MAX_GPUS / world)
}

/// Bytes of the banks of lines, which all domains share: 2 banks of 8 rank slots for each domain in use.
pub const LINE_BANKS_BYTES: usize = 8 << 20;
/// Bytes of a rank's slot in a bank of lines, where so many domains divide the banks.
pub const fn line_slot_bytes(domains: usize) -> usize {
    LINE_BANKS_BYTES / domains / (2 * MAX_GPUS)
}

/// The largest piece that goes by lines, in bytes: half of a slot is data.
pub const fn most_line_bytes(domains: usize) -> usize {
    line_slot_bytes(domains) / 2
}

/// The 32-bit word that means "not ready" in the Lamport region.
pub const LAMPORT_SENTINEL: u32 = 0x8000_0000;
/// Bytes of a pack, the unit in which kernels move data.
pub const PACK_BYTES: usize = 16;

/// The type of a barrier counter and of the Lamport flag.
#[allow(non_camel_case_types)] // the reference's name
pub type flag_t = u32;

/// State of the Lamport region. Zero is its right start.
#[repr(C)]
#[derive(Debug)]
pub struct LamportState {
    /// Counts calls; selects the generation.
    pub flag: flag_t,
    /// Extent of the previous call in packs.
    pub prev_num_packs: u32,
    /// Blocks that have arrived in the current call.
    pub arrival: u32,
    /// Kept zero.
    pub reserved: u32,
}

/// The synchronization structure, one per rank, at the base of its allocation. Never instantiated.
#[repr(C)]
#[derive(Debug)]
pub struct Signal {
    /// Barriers this rank has begun, by (domain, block, peer). Local; one writing thread per word.
    pub self_counter: [[[flag_t; MAX_GPUS]; MAX_NUM_BLOCKS_UPPER_BOUND]; NUM_BARRIER_DOMAINS],
    /// Barriers a peer has begun, by (domain, value & 1, block, peer). Written by that peer, read here.
    pub peer_counter: [[[[flag_t; MAX_GPUS]; MAX_NUM_BLOCKS_UPPER_BOUND]; 2]; NUM_BARRIER_DOMAINS],
    /// State of the Lamport region. Local.
    pub lamport_state: LamportState,
    /// By (generation, source rank): packs pushed by peers, data and readiness in one.
    pub lamport_region: [u8; LAMPORT_REGION_BYTES],
}

/// Bytes of [`Signal`].
pub const SIGNAL_BYTES: usize = size_of::<Signal>();
/// Alignment that a Signal's base address must have: packs are read with 16-byte accesses.
pub const SIGNAL_ALIGN: usize = PACK_BYTES;

/// Bytes of one domain's line counters.
pub(crate) const LINE_COUNTER_BYTES: usize = size_of::<[[flag_t; MAX_GPUS]; MAX_NUM_BLOCKS_UPPER_BOUND]>();
/// Bytes of one domain's lines.
pub(crate) const LINES_BYTES: usize = size_of::<[[[Line; MAX_GPUS]; MAX_NUM_BLOCKS_UPPER_BOUND]; 2]>();

const _: () = {
    assert!(offset_of!(Signal, self_counter) == 0);
    assert!(offset_of!(Signal, peer_counter) == 262_144);
    assert!(offset_of!(Signal, lamport_state) == 786_432);
    assert!(offset_of!(Signal, lamport_region) == 786_448);
    assert!(size_of::<LamportState>() == 16);
    assert!(LAMPORT_REGION_BYTES == 25_165_824);
    assert!(SIGNAL_BYTES == 25_952_272);
};

/// One published location: 64 bits of data in two elements, each with the barrier's epoch beside its half.
///
/// Readiness travels with the data, so 8-byte atomicity is all that a reader needs.
#[repr(C)]
#[derive(Debug)]
pub struct Line {
    /// Low half of the data (bits 0..32) and the epoch (bits 32..64).
    pub low: u64,
    /// High half of the data (bits 0..32) and the epoch (bits 32..64).
    pub high: u64,
}

/// State of one domain's banks of lines. Zero is its right start.
#[repr(C)]
#[derive(Debug)]
pub struct LineState {
    /// Counts calls by lines; selects epoch and bank.
    pub count: u32,
    /// Blocks that have arrived in the current call.
    pub arrival: u32,
}

/// What is ours and not in the Signal structure. Same allocation, so peers reach it too. Never instantiated.
#[repr(C)]
#[derive(Debug)]
pub struct Control {
    /// [`CONTROL_MAGIC`] once the buffer has been initialised.
    pub magic: u64,
    /// [`LAYOUT_VERSION`] of the writer.
    pub layout_version: u32,
    /// World size.
    pub world: u32,
    /// This rank.
    pub rank: u32,
    /// Taken (0 to 1) by the one block of this rank that writes the fault record.
    pub claim: u32,
    /// The abort word, written by this rank and by peers; see [`AbortWord`]. 0 is "not raised"; 1, for
    /// this rank alone, that a kernel has left whose fault another domain's kernel is about to raise, or has raised.
    pub abort: u64,
    /// Calls begun on each domain. Local; written by thread 0 of block 0.
    pub sequence: [u32; NUM_BARRIER_DOMAINS],
    /// State of each domain's banks of lines. Local.
    pub line_state: [LineState; NUM_BARRIER_DOMAINS],
    /// Publishing barriers this rank has begun, by (domain, block, peer). Local; one writing thread per word.
    pub line_counter: [[[flag_t; MAX_GPUS]; MAX_NUM_BLOCKS_UPPER_BOUND]; NUM_BARRIER_DOMAINS],
    /// Locations published by peers, by (domain, epoch & 1, block, peer). Written by that peer, read here.
    pub lines: [[[[Line; MAX_GPUS]; MAX_NUM_BLOCKS_UPPER_BOUND]; 2]; NUM_BARRIER_DOMAINS],
    /// Lets the banks begin where a Signal at [`SIGNAL_START`] has them on a cache line of the GPUs.
    pub pad: [u64; 2],
    /// By (domain, epoch & 1, source rank): [`Line`]s pushed by peers, data and readiness in one.
    pub line_banks: [u8; LINE_BANKS_BYTES],
}

/// "SIGNALCB" as a little-endian word.
pub const CONTROL_MAGIC: u64 = u64::from_le_bytes(*b"SIGNALCB");
/// Version of everything in this file. Ranks with different versions refuse each other.
pub const LAYOUT_VERSION: u32 = 2;
/// Offset of [`Control`] from the Signal's base: the next multiple of 4,096.
pub const CONTROL_OFFSET: usize = SIGNAL_BYTES.next_multiple_of(4096);
/// Bytes of [`Control`].
pub const CONTROL_BYTES: usize = size_of::<Control>();
/// Where in its allocation a rank's Signal lies: the Lamport region, 16 bytes behind a multiple of 128 from the Signal's
/// base, then starts on a cache line of the GPUs. 4% of a call of 1 MiB on one H200 (benches/NOTES.md).
pub const SIGNAL_START: usize = 112;
/// Offset of the scratch from the start of the allocation: the next multiple of 2 MiB, the GPUs' large page.
pub const SCRATCH_OFFSET: usize = (SIGNAL_START + CONTROL_OFFSET + CONTROL_BYTES).next_multiple_of(2 << 20);

const _: () = {
    assert!(CONTROL_OFFSET == 25_956_352);
    assert!((SIGNAL_START + offset_of!(Signal, lamport_region)).is_multiple_of(128));
    assert!(SIGNAL_START.is_multiple_of(SIGNAL_ALIGN));
    assert!(offset_of!(Control, abort) == 24);
    assert!(offset_of!(Control, sequence) == 32);
    assert!(offset_of!(Control, line_counter) == 128);
    assert!(offset_of!(Control, lines) == 262_272);
    assert!(offset_of!(Control, line_state) == 64);
    assert!(offset_of!(Control, line_banks) == 2_359_440);
    assert!((SIGNAL_START + CONTROL_OFFSET + offset_of!(Control, line_banks)).is_multiple_of(128));
    assert!(CONTROL_BYTES == 10_748_048);
    assert!(SCRATCH_OFFSET == 37_748_736);
};

/// Host-mapped: the host writes `abort_request`, this rank's kernels write the rest, once, before `status`.
#[repr(C)]
#[derive(Debug)]
pub struct HostControl {
    /// Non-zero asks this rank's kernels to leave. Written by the host.
    pub abort_request: u64,
    /// A [`FaultStatus`]; written last, with release, by the block that holds [`Control::claim`].
    pub status: u32,
    /// Not 0 once a kernel has left whose fault another one's record tells, which may still be on its way.
    pub leaving: u32,
    /// What happened; valid once `status` is non-zero.
    pub record: FaultRecord,
}

/// What a kernel reports when it leaves without having finished.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub struct FaultRecord {
    /// The abort word that was raised or found.
    pub abort: u64,
    /// A [`crate::kernel::Operation`].
    pub operation: u32,
    /// Call number on the domain, from 1, wrapping.
    pub sequence: u32,
    /// Barrier domain.
    pub domain: u32,
    /// Block that reported.
    pub block: u32,
    /// A [`crate::kernel::Phase`].
    pub phase: u32,
    /// Bit r is set when rank r's value had not arrived.
    pub missing: u32,
    /// Barrier value this block waited for, by peer.
    pub expected: [u32; MAX_GPUS],
    /// Barrier value that this block last saw, by peer.
    pub seen: [u32; MAX_GPUS],
}

/// Bytes of [`HostControl`].
pub const HOST_CONTROL_BYTES: usize = size_of::<HostControl>();

const _: () = {
    assert!(offset_of!(HostControl, status) == 8);
    assert!(offset_of!(HostControl, leaving) == 12);
    assert!(offset_of!(HostControl, record) == 16);
    assert!(size_of::<FaultRecord>() == 96);
    assert!(HOST_CONTROL_BYTES == 112);
};

/// Values of [`HostControl::status`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum FaultStatus {
    /// No fault.
    Running = 0,
    /// This rank's own deadline passed.
    Expired = 1,
    /// Another rank, or an earlier kernel of this one, had raised the abort word.
    Woken = 2,
    /// The host asked for it.
    Requested = 3,
    /// In checked mode: a rank made another call. `expected` and `seen` hold both descriptions, two words of 64 bits each.
    Mismatch = 4,
}

/// The 64-bit abort word: who raised it, whom it misses, in which call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AbortWord(pub u64);

impl AbortWord {
    /// Set in every raised word.
    pub const RAISED: u64 = 1 << 63;
    /// Set, with the ranks that make another call than the reporter as the missing ones, if nobody is late.
    pub const MISMATCH: u64 = 1 << 62;

    /// The rank that raised it.
    pub fn reporter(self) -> usize {
        ((self.0 >> 48) & 0xff) as usize
    }

    /// Bit r is set when rank r is missing; 0 when the host asked for the abort.
    pub fn missing(self) -> u32 {
        ((self.0 >> 40) & 0xff) as u32
    }

    /// Domain of the call.
    pub fn domain(self) -> u32 {
        ((self.0 >> 32) & 0xff) as u32
    }

    /// Sequence number of the call on its domain.
    pub fn sequence(self) -> u32 {
        self.0 as u32
    }
}

/// Ranks whose bit is set in `mask`.
pub fn ranks_of(mask: u32) -> Vec<usize> {
    (0..MAX_GPUS).filter(|r| mask & (1 << r) != 0).collect()
}
