//! The one error type. Misuse, refusals and faults are values with a reason, never panics.
#![forbid(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use crate::collective::Collective;
use crate::dtype::{Dtype, ReduceOp};
use crate::kernel::Algorithm;

/// `Result` with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Everything that can go wrong.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The caller broke a rule. Nothing was launched and nothing was written.
    #[error("{0}")]
    ApiMisuse(#[from] ApiMisuse),
    /// `from` cannot reach the memory of `to`.
    #[error("no peer access from {from} to {to}: {why}")]
    Peer {
        /// The device that wanted to read or write.
        from: String,
        /// The device that owns the memory.
        to: String,
        /// What refused it.
        why: String,
    },
    /// A wait ended without its peers, here or on the rank that reported it. Results of the call are unspecified.
    #[error("{0}")]
    Timeout(Arc<Timeout>),
    /// Ranks made different calls. Found before any data moved, on every rank, where
    /// [`Settings::check`](crate::Settings::check) is on; and without it by the two ranks of a pair that disagree in the sizes of
    /// what they pull from each other, but for one such disagreement in 2,048. All-reduces, and calls by lines, do not notice.
    #[error("rank {rank} calls {ours}, but rank {other} calls {theirs}")]
    RankMismatch {
        /// This rank; or one that found out about another one, where this rank agrees with both or is in another call.
        rank: usize,
        /// What it called.
        ours: String,
        /// The lowest rank that called something else.
        other: usize,
        /// What that was.
        theirs: String,
    },
    /// The host asked this communicator to abort.
    #[error("rank {rank}: aborted on request of rank {by}")]
    Aborted {
        /// This rank.
        rank: usize,
        /// The rank whose host asked.
        by: usize,
    },
    /// An earlier call failed; the communicator accepts no more until all ranks recover
    /// ([`Communicator::recover_all`](crate::Communicator::recover_all)).
    #[error("communicator is poisoned: {cause}")]
    Poisoned {
        /// The first failure.
        cause: Box<Error>,
    },
    /// A driver call failed.
    #[error("{call} failed: {name} ({code})")]
    Driver {
        /// The driver's code.
        code: i32,
        /// The driver's name for it.
        name: String,
        /// The call.
        call: &'static str,
    },
    /// The backend cannot be used on this machine.
    #[error("backend {backend} is not available: {why}")]
    Unavailable {
        /// The backend.
        backend: &'static str,
        /// Why, and what would help.
        why: Unavailable,
    },
    /// Ranks could not agree to form a communicator.
    #[error("{0}")]
    Rendezvous(#[from] Rendezvous),
    /// The kernel image cannot be used.
    #[error("{0}")]
    Image(#[from] Image),
}

/// Rules that a caller can break.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ApiMisuse {
    /// World sizes are 1 to 8.
    #[error("world size {0} is not between 1 and 8")]
    WorldSize(usize),
    /// Ranks are below the world size.
    #[error("rank {rank} is out of range for world size {world}")]
    Rank {
        /// The rank.
        rank: usize,
        /// The world size.
        world: usize,
    },
    /// Domains are 0 to 7.
    #[error("barrier domain {0} is not between 0 and 7")]
    Domain(u32),
    /// Domains above 0 need [`Settings::domains`](crate::Settings::domains), which divides the scratch among them.
    #[error("barrier domain {0} is used, but the communicator was created without domains")]
    DomainsClosed(u32),
    /// A domain has one handle at a time ([`Communicator::domain`](crate::Communicator::domain)). While it is alive the
    /// communicator makes no call on that domain, and neither recovers nor splits.
    #[error("barrier domain {0} has a handle, which is alive")]
    DomainTaken(u32),
    /// Where data lies that peers are told of.
    #[error("data ends at {address:#x}, and must end below {limit:#x}")]
    AddressTooHigh {
        /// Its end.
        address: u64,
        /// The limit.
        limit: u64,
    },
    /// The Lamport region has so much for each rank, see [`most_lamport_bytes`](crate::layout::most_lamport_bytes).
    #[error("the lamport algorithm takes up to {limit} bytes a rank, not {bytes}")]
    LamportTooLarge {
        /// Bytes of the call.
        bytes: u64,
        /// Bytes that fit.
        limit: usize,
    },
    /// A bank of lines has a slot for each rank.
    #[error("the ll algorithm takes up to {limit} bytes from one rank for another, not {bytes}")]
    LinesTooLarge {
        /// Bytes of the largest piece.
        bytes: u64,
        /// Bytes that fit.
        limit: u64,
    },
    /// Rows of f32, f16 and bf16 are normed.
    #[error("a norm does not take {0}")]
    NormType(Dtype),
    /// What belongs to the codes of normed rows has another length than they need.
    #[error("{expected} {what} belong to these rows, not {found}")]
    Codes {
        /// What it is.
        what: &'static str,
        /// Elements that it has.
        found: usize,
        /// Elements that it must have.
        expected: usize,
    },
    /// A format with a scale for each block of elements takes rows of whole blocks.
    #[error("rows of {elements} elements are not whole blocks of {block}")]
    Blocks {
        /// Elements of a row.
        elements: usize,
        /// Elements of a block.
        block: usize,
    },
    /// Rows are normed through the scratch, which must hold some ([`Settings::scratch_bytes`](crate::Settings::scratch_bytes)).
    #[error("the norm of such rows needs {needed} bytes of scratch, of which there are {scratch}")]
    RowTooLarge {
        /// Bytes for the smallest number of rows.
        needed: u64,
        /// Bytes of this domain's share.
        scratch: u64,
    },
    /// The Lamport algorithm adds up f32, f16 and bf16.
    #[error("the lamport algorithm does not take {op} of {dtype}")]
    LamportType {
        /// The operator.
        op: ReduceOp,
        /// The element type.
        dtype: Dtype,
    },
    /// The Lamport region is one for all domains, and its calls follow one another: they are calls of domain 0.
    #[error("the lamport algorithm works on domain 0, not on domain {0}")]
    LamportDomain(u32),
    /// 0xFFFF_FFFF is no count of Lamport calls.
    #[error("{0:#x} is never the flag of the Lamport state")]
    LamportFlag(u32),
    /// A rank's calls wait in its stream for those of a peer, and so many that the stream may soon take no more. Calls of all
    /// ranks that come from one thread must take turns.
    #[error(
        "rank {rank} is {limit} calls ahead of rank {slowest}, {}",
        if *same_thread { "whose calls come from the same thread: enqueue them in turns" } else { "which did not catch up" }
    )]
    RunAhead {
        /// The rank that is ahead.
        rank: usize,
        /// The slowest rank.
        slowest: usize,
        /// Calls that a rank may be ahead.
        limit: u64,
        /// Whether both ranks' calls come from one thread, so that there is nothing to wait for.
        same_thread: bool,
    },
    /// One thread that recovers or splits for all ranks brings all ranks of one group.
    #[error("{given} communicators are not all {world} ranks of one group: {found} of those are among them")]
    NotAllRanks {
        /// Communicators that were given.
        given: usize,
        /// Ranks of the first one's group among them.
        found: usize,
        /// The group's world size.
        world: usize,
    },
    /// One thread that splits for all ranks brings a colour and a key for each.
    #[error("{found} colours were given for {world} ranks")]
    Colors {
        /// Colours that were given.
        found: usize,
        /// The world size.
        world: usize,
    },
    /// Input and output of an all-reduce have the same length.
    #[error("input has {input} elements and output has {output}")]
    Length {
        /// Elements of the input.
        input: usize,
        /// Elements of the output.
        output: usize,
    },
    /// The other operand of a collective has a part for each rank.
    #[error("{what} has {found} elements, {expected} are needed: {parts} of {part}")]
    Parts {
        /// "input", "output" or "buffer".
        what: &'static str,
        /// Its elements.
        found: usize,
        /// The elements that it must have.
        expected: usize,
        /// Ranks that have a part.
        parts: usize,
        /// Elements of a part; the average, rounded down, where they differ.
        part: usize,
    },
    /// A ragged call takes a count for every rank.
    #[error("{found} counts were given for {world} ranks")]
    Counts {
        /// Counts that were given.
        found: usize,
        /// The world size.
        world: usize,
    },
    /// A call whose sizes are on the device has room for nothing.
    #[error("a call with counts on the device has room for no element")]
    NoRoom,
    /// The root of a collective brings an input that nobody else needs, or gets an output.
    #[error("rank {rank} is the root of a {collective} and brings no {what}")]
    NoBuffer {
        /// The collective.
        collective: Collective,
        /// The rank.
        rank: usize,
        /// "input" or "output".
        what: &'static str,
    },
    /// A collective has algorithms of its own.
    #[error("{collective} has no algorithm {algorithm}")]
    Algorithm {
        /// The collective.
        collective: Collective,
        /// The algorithm that was asked for.
        algorithm: Algorithm,
    },
    /// Sends and receives that are launched together: at most one each way between two ranks.
    #[error("a second {what} between this rank and rank {peer} in one launch")]
    SecondTransfer {
        /// "send" or "receive".
        what: &'static str,
        /// The other rank.
        peer: usize,
    },
    /// A range does not lie within a buffer.
    #[error("elements {start}..{end} do not lie within a buffer of {len}")]
    Range {
        /// First element.
        start: usize,
        /// One past the last element.
        end: usize,
        /// Elements of the buffer.
        len: usize,
    },
    /// Input and output overlap, and not in the one way in which the collective works in place.
    #[error("input at {input:#x} and output at {output:#x} overlap within {bytes} bytes, and not as in place")]
    Overlap {
        /// Address of the input.
        input: u64,
        /// Address of the output.
        output: u64,
        /// Bytes of the longer.
        bytes: u64,
    },
    /// A pointer is null though the count is not 0.
    #[error("{what} pointer is null")]
    NullPointer {
        /// "input" or "output".
        what: &'static str,
    },
    /// A pointer is not aligned to its element type.
    #[error("{what} pointer {address:#x} is not aligned for {dtype}")]
    Misaligned {
        /// "input" or "output".
        what: &'static str,
        /// The address.
        address: u64,
        /// The element type.
        dtype: Dtype,
    },
    /// An address range would wrap around the address space.
    #[error("{count} elements of {element_bytes} bytes do not fit the address space")]
    TooLarge {
        /// Elements asked for.
        count: usize,
        /// Bytes of one.
        element_bytes: usize,
    },
    /// A buffer or a stream belongs to another device than the communicator.
    #[error("{what} belongs to {found}, the communicator to {expected}")]
    WrongDevice {
        /// "input", "output" or "stream".
        what: &'static str,
        /// The device it belongs to.
        found: String,
        /// This rank's device.
        expected: String,
    },
    /// Two ranks use one stream: each would wait for a kernel queued behind its own.
    #[error("ranks {first} and {second} use the same stream; each rank needs a stream of its own")]
    SharedStream {
        /// The rank that used it first.
        first: usize,
        /// The rank that was refused.
        second: usize,
    },
    /// The NULL stream and the default streams wait for others.
    #[error("the NULL and default streams cannot be used: a rank needs a non-blocking stream of its own")]
    NullStream,
    /// A domain's last call, on another stream, has not finished, and capture forbids waiting for it.
    #[error("domain {0} has unfinished work on another stream, which a capturing stream cannot wait for")]
    BusyDomain(u32),
    /// More blocks than can be resident at once would wait for each other forever.
    #[error("a grid of {blocks} blocks was asked for, {budget} can be resident at once")]
    Grid {
        /// Blocks asked for.
        blocks: u32,
        /// Blocks that fit on every rank.
        budget: u32,
    },
    /// Threads a block are 1 to the kernel's limit.
    #[error("{threads} threads a block were asked for, the limit is {limit}")]
    Threads {
        /// Threads asked for.
        threads: u32,
        /// The limit.
        limit: u32,
    },
    /// A kernel of a user takes registers and shared memory of its own, so fewer of its blocks may fit than of the library's.
    #[error(
        "a grid of {blocks} blocks of {threads} threads was asked for of {kernel}, {budget} can be resident at once on this rank"
    )]
    KernelGrid {
        /// The kernel.
        kernel: String,
        /// Blocks asked for.
        blocks: u32,
        /// Threads of each.
        threads: u32,
        /// Blocks that fit.
        budget: u32,
    },
    /// Every rank hears from every peer in a call through the Lamport region, so it has a byte at least.
    #[error("a kernel that uses the lamport region was launched for no bytes")]
    LamportOfNothing,
    /// `alloc` is collective: call k has the same size on every rank.
    #[error("rank {rank} allocates {bytes} bytes where rank {first} allocated {expected}")]
    UnequalAlloc {
        /// The rank that was refused.
        rank: usize,
        /// Its size.
        bytes: usize,
        /// The rank that came first.
        first: usize,
        /// Its size.
        expected: usize,
    },
    /// A buffer is too small to hold what is asked of it.
    #[error("a buffer of {found} bytes is too small, {needed} are needed")]
    BufferTooSmall {
        /// Its bytes.
        found: usize,
        /// The bytes needed.
        needed: usize,
    },
    /// A Signal's address must be a multiple of 16.
    #[error("a Signal at {0:#x} is not aligned to 16 bytes")]
    SignalMisaligned(u64),
    /// The buffer was never initialised as a Signal, or by another version of this library.
    #[error("not a Signal: magic {magic:#x}, layout version {version} (this library writes {expected})")]
    NotASignal {
        /// The word found where the magic belongs.
        magic: u64,
        /// The version found.
        version: u32,
        /// [`LAYOUT_VERSION`](crate::layout::LAYOUT_VERSION).
        expected: u32,
    },
    /// The memory cannot be shared with other processes: it was not allocated, or not exported, for that.
    #[error("this memory cannot be shared with other processes")]
    NotShared,
    /// The same device stands for several ranks, which needs an explicit opt-in.
    #[error("ranks {first} and {second} share {device}; allow it with `Builder::share_devices`")]
    SharedDevice {
        /// The lower rank.
        first: usize,
        /// The higher rank.
        second: usize,
        /// The device.
        device: String,
    },
    /// What a rank gives to a gather, or passes to its peers, has a limit.
    #[error("{given} {what} are too many, the limit is {limit}")]
    TooMany {
        /// "bytes in a gather" or "file descriptors".
        what: &'static str,
        /// How many were given.
        given: usize,
        /// The limit.
        limit: usize,
    },
    /// A secret that goes over a network must be hard to guess.
    #[error("a secret of {bytes} bytes is too short, {least} are needed")]
    ShortSecret {
        /// Its bytes.
        bytes: usize,
        /// The bytes needed.
        least: usize,
    },
    /// A stream is or is not capturing where the opposite is needed.
    #[error("{call}: the stream is {state}")]
    Capture {
        /// The call.
        call: &'static str,
        /// "capturing" or "not capturing".
        state: &'static str,
    },
    /// A table of plans ([`Tuning`](crate::Tuning)) cannot be used.
    #[error("SIGNAL_TUNING: {what}: {why}")]
    Tuning {
        /// The file, or what of it.
        what: String,
        /// What is wrong with it.
        why: String,
    },
    /// A setting has a value that cannot be used.
    #[error("{name}={value}: {why}")]
    Setting {
        /// The setting, by the name of its environment variable.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it.
        why: String,
    },
}

impl ApiMisuse {
    /// Whether it is of the blocks or threads of a grid alone, so that another grid may do.
    pub const fn is_of_grid(&self) -> bool {
        matches!(self, ApiMisuse::Grid { .. } | ApiMisuse::Threads { .. })
    }

    /// Checks that `bytes` from `offset` lie within `len`.
    ///
    /// # Errors
    /// [`Range`](Self::Range).
    pub fn check_range(offset: usize, bytes: usize, len: usize) -> std::result::Result<(), Self> {
        match offset.checked_add(bytes) {
            Some(end) if end <= len => Ok(()),
            end => Err(ApiMisuse::Range { start: offset, end: end.unwrap_or(usize::MAX), len }),
        }
    }
}

/// What a rank knows about a wait that ended without its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timeout {
    /// This rank.
    pub rank: usize,
    /// The rank whose deadline passed first, as far as this rank knows; may be `rank`.
    pub reporter: usize,
    /// Ranks that `reporter` was waiting for.
    pub missing: Vec<usize>,
    /// The operation that this rank was in.
    pub operation: &'static str,
    /// Where in the operation this rank was.
    pub phase: &'static str,
    /// The reporter's number for the failed call on its domain, from 1.
    pub sequence: u32,
    /// Barrier domain.
    pub domain: u32,
    /// This rank's block that reported.
    pub block: u32,
    /// Barrier value awaited and last seen by that block, for each rank.
    pub values: Vec<(u32, u32)>,
    /// The deadline in force.
    pub deadline: Duration,
}

impl std::fmt::Display for Timeout {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Timeout { rank, reporter, missing, operation, phase, sequence, domain, block, deadline, .. } = self;
        write!(f, "rank {rank}: timeout, missing rank(s) {missing:?}")?;
        if reporter == rank {
            write!(f, " after {deadline:?}")?;
        } else {
            write!(f, " as reported by rank {reporter}")?;
        }
        write!(f, " (call {sequence} on domain {domain}; here block {block} of a {operation}, at the {phase}")?;
        for &peer in missing {
            if let Some((expected, seen)) = self.values.get(peer).filter(|_| peer != *rank) {
                write!(f, "; rank {peer}: expected {expected}, seen {seen}")?;
            }
        }
        write!(f, ")")
    }
}

impl std::error::Error for Timeout {}

/// Why a backend is not available.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Unavailable {
    /// Its driver library could not be loaded.
    #[error("no driver library; tried {tried}")]
    Library {
        /// The names tried and what the loader said.
        tried: String,
    },
    /// The driver reports no device.
    #[error("no device: {0}")]
    NoDevice(String),
    /// This version of the library does not drive it yet.
    #[error("{0}")]
    NotSupported(String),
}

/// Why ranks could not agree.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rendezvous {
    /// A value that all ranks must share differs.
    #[error("rank {rank} has {name}={theirs}, rank {first} has {name}={ours}")]
    Disagreement {
        /// What differs: a layout, an image, a table or a `SIGNAL_*` setting.
        name: &'static str,
        /// The rank that stands first.
        first: usize,
        /// Its value.
        ours: String,
        /// The rank that differs.
        rank: usize,
        /// Its value.
        theirs: String,
    },
    /// Ranks did not come to a meeting of all.
    #[error("rank {rank}: rank(s) {missing:?} did not come within {after:?}")]
    Absent {
        /// This rank.
        rank: usize,
        /// Those that did not come.
        missing: Vec<usize>,
        /// The patience of the rank that waited in vain first, which is this rank or one that told it.
        after: Duration,
    },
    /// A rank of another process could not do its part, and said why.
    #[error("rank {rank}: {why}")]
    Failed {
        /// The rank that failed.
        rank: usize,
        /// Its error.
        why: String,
    },
    /// Ranks have died, or left while others still met them.
    #[error("rank {rank}: rank(s) {missing:?} died or left")]
    Lost {
        /// This rank.
        rank: usize,
        /// Those that are gone.
        missing: Vec<usize>,
    },
    /// Rank 0 does not take this rank.
    #[error("rank {rank} is refused: {why}")]
    Refused {
        /// This rank.
        rank: usize,
        /// Why.
        why: Refusal,
    },
    /// A peer sent what no rank sends, or what listens at the address is no rank.
    #[error("rank {rank}: rank {peer} is not to be trusted: {why}")]
    Protocol {
        /// This rank.
        rank: usize,
        /// The peer.
        peer: usize,
        /// What it did.
        why: String,
    },
    /// The address at which ranks would meet cannot be used.
    #[error("rank {rank} cannot use {address}: {why}")]
    Address {
        /// This rank.
        rank: usize,
        /// The address.
        address: String,
        /// What is wrong with it.
        why: String,
    },
    /// File descriptors cannot be passed between two ranks.
    #[error("rank {rank} cannot exchange file descriptors with rank {peer}: {why}")]
    Unreachable {
        /// This rank.
        rank: usize,
        /// The peer.
        peer: usize,
        /// Why.
        why: String,
    },
    /// 128 bytes are not an [`Id`](crate::Id).
    #[error("not an id: {0}")]
    NotAnId(&'static str),
    /// The environment does not say which ranks there are, or where they meet.
    #[error("{0}")]
    Launch(String),
    /// The operating system refused something.
    #[error("{why}")]
    System {
        /// What, and its reason.
        why: String,
    },
}

/// Why rank 0 does not take a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// The secret differs. Two jobs may have come to one address.
    #[error("its secret is not that of rank 0")]
    Secret,
    /// Somebody is this rank already.
    #[error("another process is this rank already")]
    Duplicate,
}

/// Why a kernel image cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Image {
    /// The build embedded no image.
    #[error("this build holds no {target} image: {missing}")]
    Missing {
        /// "host", "cuda" or "hip".
        target: &'static str,
        /// What the build was missing.
        missing: String,
    },
    /// The image lacks a kernel.
    #[error("the {target} image has no kernel {kernel}")]
    Kernel {
        /// "host", "cuda" or "hip".
        target: &'static str,
        /// The entry name.
        kernel: String,
    },
    /// The image is not one, or not a whole one.
    #[error("the {target} image cannot be loaded: {why}")]
    Broken {
        /// "host", "cuda" or "hip".
        target: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// A user's image was compiled with another version of `signal/device.h`, or lacks its `SIGNAL_IMAGE`.
    #[error(
        "the image lacks the mark {mark}: it was compiled with another version of signal/device.h, or has no SIGNAL_IMAGE"
    )]
    Abi {
        /// The entry that marks images of this version.
        mark: &'static str,
    },
    /// The image was built for another layout.
    #[error("the {target} image has layout version {found}, the library has {expected}")]
    Layout {
        /// "host", "cuda" or "hip".
        target: &'static str,
        /// The image's version.
        found: u32,
        /// The library's version.
        expected: u32,
    },
    /// The image holds no code for this device.
    #[error("the image holds code for {available}, the device is {device}")]
    Arch {
        /// What the image holds.
        available: String,
        /// What the device is.
        device: String,
    },
}
