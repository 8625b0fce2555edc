//! Operations on a [`Signal`]: preparing one, recognising one, and finding its parts.

use std::mem::{offset_of, size_of};

use bytemuck::{Pod, Zeroable};

use crate::backend::Backend;
use crate::error::{ApiMisuse, Result};
use crate::layout::{
    CONTROL_BYTES, CONTROL_MAGIC, CONTROL_OFFSET, Control, LAMPORT_REGION_BYTES, LAMPORT_SENTINEL, LAYOUT_VERSION,
    LamportState, MAX_GPUS, MAX_NUM_BLOCKS_UPPER_BOUND, NUM_BARRIER_DOMAINS, SIGNAL_ALIGN, Signal, flag_t,
};

/// Bytes that a Signal takes together with the Control block behind it.
pub const SIGNAL_BUFFER_BYTES: usize = CONTROL_OFFSET + CONTROL_BYTES;

/// The address of a Signal, as its device sees it. Methods only compute addresses: nothing is read, and no reference to
/// memory that peers write is ever formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SignalPtr {
    address: u64,
}

impl Signal {
    /// Prepares a Signal and its Control block at byte `offset` of `buffer`: zeroes all of it, fills the Lamport region
    /// with the sentinel, writes the header, and waits until that is done on the device. Meet the peers only after that:
    /// a fill that came later would erase what they have sent (P16).
    ///
    /// # Errors
    /// [`ApiMisuse::BufferTooSmall`] or [`ApiMisuse::SignalMisaligned`] before anything is written;
    /// [`ApiMisuse::WorldSize`] and [`ApiMisuse::Rank`]; errors of the driver.
    pub fn init_signal_buffer<B: Backend>(
        stream: &B::Stream,
        buffer: &B::Buffer,
        offset: usize,
        rank: usize,
        world: usize,
    ) -> Result<SignalPtr> {
        check_world(world)?;
        check_rank(rank, world)?;
        let signal = place::<B>(buffer, offset)?;
        B::fill(stream, buffer, offset, SIGNAL_BUFFER_BYTES, 0)?;
        let region = offset + offset_of!(Signal, lamport_region);
        B::fill(stream, buffer, region, LAMPORT_REGION_BYTES, LAMPORT_SENTINEL)?;
        let header = Header {
            magic: CONTROL_MAGIC,
            layout_version: LAYOUT_VERSION,
            world: world as u32,
            rank: rank as u32,
            claim: 0,
        };
        B::upload(stream, bytemuck::bytes_of(&header), buffer, offset + CONTROL_OFFSET)?;
        B::synchronize(stream)?;
        Ok(signal)
    }

    /// Recognises a Signal at byte `offset` of `buffer` by its size, its alignment and, read behind the work on
    /// `stream`, its header.
    ///
    /// # Errors
    /// [`ApiMisuse::BufferTooSmall`], [`ApiMisuse::SignalMisaligned`], [`ApiMisuse::NotASignal`]; errors of the driver.
    pub fn from_buffer<B: Backend>(stream: &B::Stream, buffer: &B::Buffer, offset: usize) -> Result<SignalPtr> {
        let signal = place::<B>(buffer, offset)?;
        let mut header = Header::zeroed();
        B::download(stream, buffer, offset + CONTROL_OFFSET, bytemuck::bytes_of_mut(&mut header))?;
        let Header { magic, layout_version: version, .. } = header;
        if magic != CONTROL_MAGIC || version != LAYOUT_VERSION {
            return Err(ApiMisuse::NotASignal { magic, version, expected: LAYOUT_VERSION }.into());
        }
        Ok(signal)
    }

    /// Takes an address at its word.
    ///
    /// # Safety
    /// - `address` is the base of a Signal that [`init_signal_buffer`](Self::init_signal_buffer) prepared, as the device
    ///   that will use it sees it.
    /// - The memory outlives every use of the result by a kernel.
    pub const unsafe fn unsafe_ptr_from(address: u64) -> SignalPtr {
        SignalPtr { address }
    }
}

impl SignalPtr {
    /// The base address.
    pub const fn address(self) -> u64 {
        self.address
    }

    /// Where this rank counts its barriers with `rank`, for one block of one domain.
    ///
    /// # Errors
    /// An index is out of range.
    pub fn self_counter_ptr(self, domain: usize, block: usize, rank: usize) -> Result<*mut flag_t> {
        let index = counter_index(domain, block, rank)?;
        Ok(self.at(offset_of!(Signal, self_counter) + index * size_of::<flag_t>()))
    }

    /// Where `rank` stores the barriers that it has begun with this rank; `set` is the counter's lowest bit.
    ///
    /// # Errors
    /// An index is out of range.
    pub fn peer_counter_ptr(self, domain: usize, set: usize, block: usize, rank: usize) -> Result<*mut flag_t> {
        let in_set = counter_index(domain, block, rank)? - domain * COUNTERS;
        let index = (domain * 2 + (set & 1)) * COUNTERS + in_set;
        Ok(self.at(offset_of!(Signal, peer_counter) + index * size_of::<flag_t>()))
    }

    /// The state of the Lamport region.
    pub fn lamport_state_ptr(self) -> *mut LamportState {
        self.at(offset_of!(Signal, lamport_state))
    }

    /// The Lamport region, as elements of `T`.
    pub fn lamport_region_ptr<T: Pod>(self) -> *mut T {
        self.at(offset_of!(Signal, lamport_region))
    }

    /// The Control block behind the Signal.
    pub fn control_ptr(self) -> *mut Control {
        self.at(CONTROL_OFFSET)
    }

    fn at<T>(self, offset: usize) -> *mut T {
        (self.address + offset as u64) as *mut T
    }
}

/// Counters of one domain in one set.
const COUNTERS: usize = MAX_NUM_BLOCKS_UPPER_BOUND * MAX_GPUS;

/// The first words of [`Control`].
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Header {
    magic: u64,
    layout_version: u32,
    world: u32,
    rank: u32,
    claim: u32,
}

const _: () = assert!(size_of::<Header>() == offset_of!(Control, abort));

pub(crate) fn check_world(world: usize) -> Result<()> {
    if world == 0 || world > MAX_GPUS {
        return Err(ApiMisuse::WorldSize(world).into());
    }
    Ok(())
}

pub(crate) fn check_rank(rank: usize, world: usize) -> Result<()> {
    if rank >= world {
        return Err(ApiMisuse::Rank { rank, world }.into());
    }
    Ok(())
}

pub(crate) fn check_domain(domain: u32) -> Result<()> {
    if domain as usize >= NUM_BARRIER_DOMAINS {
        return Err(ApiMisuse::Domain(domain).into());
    }
    Ok(())
}

fn counter_index(domain: usize, block: usize, rank: usize) -> Result<usize> {
    check_domain(u32::try_from(domain).unwrap_or(u32::MAX))?;
    check_rank(rank, MAX_GPUS)?;
    if block >= MAX_NUM_BLOCKS_UPPER_BOUND {
        let blocks = u32::try_from(block).unwrap_or(u32::MAX).saturating_add(1);
        return Err(ApiMisuse::Grid { blocks, budget: MAX_NUM_BLOCKS_UPPER_BOUND as u32 }.into());
    }
    Ok((domain * MAX_NUM_BLOCKS_UPPER_BOUND + block) * MAX_GPUS + rank)
}

fn place<B: Backend>(buffer: &B::Buffer, offset: usize) -> Result<SignalPtr> {
    let found = B::bytes(buffer).saturating_sub(offset);
    if found < SIGNAL_BUFFER_BYTES {
        return Err(ApiMisuse::BufferTooSmall { found, needed: SIGNAL_BUFFER_BYTES }.into());
    }
    let address = B::address(buffer) + offset as u64;
    if !address.is_multiple_of(SIGNAL_ALIGN as u64) {
        return Err(ApiMisuse::SignalMisaligned(address).into());
    }
    Ok(SignalPtr { address })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_follow_the_layout() {
        // SAFETY: only addresses are computed here; nothing is read through them.
        let signal = unsafe { Signal::unsafe_ptr_from(0x10000) };
        assert_eq!(signal.self_counter_ptr(0, 0, 0).unwrap() as u64, 0x10000);
        assert_eq!(signal.self_counter_ptr(7, 1023, 7).unwrap() as u64, 0x10000 + 262_140);
        assert_eq!(signal.peer_counter_ptr(0, 0, 0, 0).unwrap() as u64, 0x10000 + 262_144);
        assert_eq!(signal.peer_counter_ptr(1, 1, 2, 3).unwrap() as u64, 0x10000 + 262_144 + (3 * 8192 + 2 * 8 + 3) * 4);
        assert_eq!(signal.peer_counter_ptr(7, 1, 1023, 7).unwrap() as u64, 0x10000 + 786_428);
        assert_eq!(signal.lamport_state_ptr() as u64, 0x10000 + 786_432);
        assert_eq!(signal.lamport_region_ptr::<f32>() as u64, 0x10000 + 786_448);
        assert_eq!(signal.control_ptr() as u64, 0x10000 + 25_956_352);
    }

    #[test]
    fn indices_out_of_range_are_refused() {
        // SAFETY: as above.
        let signal = unsafe { Signal::unsafe_ptr_from(0x10000) };
        assert_eq!(signal.self_counter_ptr(8, 0, 0), Err(ApiMisuse::Domain(8).into()));
        assert_eq!(signal.self_counter_ptr(0, 1024, 0), Err(ApiMisuse::Grid { blocks: 1025, budget: 1024 }.into()));
        assert_eq!(signal.peer_counter_ptr(0, 0, 0, 8), Err(ApiMisuse::Rank { rank: 8, world: 8 }.into()));
    }
}
