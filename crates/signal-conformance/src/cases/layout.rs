//! The Signal structure as memory holds it.

use std::mem::offset_of;

use signal_core::layout::{
    CONTROL_BYTES, CONTROL_MAGIC, CONTROL_OFFSET, Control, LAMPORT_REGION_BYTES, LAMPORT_SENTINEL, LAYOUT_VERSION,
    MAX_GPUS, MAX_NUM_BLOCKS_UPPER_BOUND, NUM_BARRIER_DOMAINS, SIGNAL_BYTES,
};
use signal_core::{ApiMisuse, Backend, Error, MemoryKind, SIGNAL_BUFFER_BYTES, Signal};

use crate::cases::misuse::refused;
use crate::rig::Rig;

/// Offset of the Lamport region, from DESIGN section 3.
const REGION: usize = 786_448;

/// A buffer full of junk and a stream.
fn junk<B: Backend>(rig: &Rig<B>, bytes: usize) -> (B::Buffer, B::Stream) {
    let device = &rig.devices()[0];
    let stream = B::create_stream(device).unwrap();
    let buffer = B::allocate(device, bytes, MemoryKind::PeerVisible).unwrap();
    B::fill(&stream, &buffer, 0, bytes / 4 * 4, 0x5a5a_a5a5).unwrap();
    (buffer, stream)
}

fn words<B: Backend>(stream: &B::Stream, buffer: &B::Buffer, offset: usize, count: usize) -> Vec<u32> {
    let mut words = vec![0u32; count];
    B::download(stream, buffer, offset, bytemuck::cast_slice_mut(&mut words)).unwrap();
    words
}

/// Over junk, initialisation leaves counters zero, every word of the region "not ready", and a magic (P16, B23).
pub fn layout_init_sets_every_word<B: Backend>(rig: &Rig<B>) {
    for offset in [0, 16, 4096] {
        let (buffer, stream) = junk(rig, offset + SIGNAL_BUFFER_BYTES);
        let made = Signal::init_signal_buffer::<B>(&stream, &buffer, offset, 1, 3).unwrap();
        let found = Signal::from_buffer::<B>(&stream, &buffer, offset).unwrap();
        assert_eq!(made.address(), B::address(&buffer) + offset as u64);
        assert_eq!(found.address(), made.address());

        let head = words::<B>(&stream, &buffer, offset, REGION / 4);
        assert!(head.iter().all(|w| *w == 0), "counters or Lamport state are not zero");
        let region = words::<B>(&stream, &buffer, offset + REGION, LAMPORT_REGION_BYTES / 4);
        assert!(region.iter().all(|w| *w == LAMPORT_SENTINEL), "a word of the region is not the sentinel");
        let magic = words::<B>(&stream, &buffer, offset + CONTROL_OFFSET, 2);
        assert_eq!(u64::from(magic[1]) << 32 | u64::from(magic[0]), CONTROL_MAGIC);
        let version = words::<B>(&stream, &buffer, offset + CONTROL_OFFSET + offset_of!(Control, layout_version), 3);
        assert_eq!(version, [LAYOUT_VERSION, 3, 1], "layout version, world, rank");
        // From the claim on, every word of the control block starts as zero.
        let claim = offset_of!(Control, claim);
        let rest = words::<B>(&stream, &buffer, offset + CONTROL_OFFSET + claim, (CONTROL_BYTES - claim) / 4);
        assert!(rest.iter().all(|w| *w == 0), "the control block is not zero");
    }
}

/// Every pointer lies where the structure of DESIGN section 3 puts it.
pub fn layout_pointers_follow_the_structure<B: Backend>(_: &Rig<B>) {
    assert_eq!((SIGNAL_BYTES, CONTROL_OFFSET), (25_952_272, 25_956_352));
    assert_eq!(SIGNAL_BUFFER_BYTES, CONTROL_OFFSET + CONTROL_BYTES);
    assert_eq!((NUM_BARRIER_DOMAINS, MAX_NUM_BLOCKS_UPPER_BOUND, MAX_GPUS), (8, 1024, 8));
    let base = 0x7000_0000_0000u64;
    // SAFETY: only addresses are computed from the pointer; nothing is dereferenced.
    let signal = unsafe { Signal::unsafe_ptr_from(base) };
    assert_eq!(signal.address(), base);
    let at = |pointer: u64| pointer - base;
    for (domain, block, rank) in [(0, 0, 0), (0, 0, 7), (0, 1, 0), (1, 0, 0), (3, 77, 5), (7, 1023, 7)] {
        let index = (domain * 1024 + block) * 8 + rank;
        assert_eq!(at(signal.self_counter_ptr(domain, block, rank).unwrap() as u64), 4 * index as u64);
        for set in [0, 1] {
            let index = ((domain * 2 + set) * 1024 + block) * 8 + rank;
            let word = signal.peer_counter_ptr(domain, set, block, rank).unwrap();
            assert_eq!(at(word as u64), 262_144 + 4 * index as u64);
        }
    }
    assert_eq!(at(signal.lamport_state_ptr() as u64), 786_432);
    assert_eq!(at(signal.lamport_region_ptr::<u32>() as u64), 786_448);
    assert_eq!(at(signal.lamport_region_ptr::<half::f16>() as u64), 786_448);
    for (domain, block, rank, expected) in [
        (8, 0, 0, ApiMisuse::Domain(8)),
        (0, 1024, 0, ApiMisuse::Grid { blocks: 1025, budget: 1024 }),
        (0, 0, 8, ApiMisuse::Rank { rank: 8, world: 8 }),
    ] {
        refused(signal.self_counter_ptr(domain, block, rank), expected.clone());
        refused(signal.peer_counter_ptr(domain, 1, block, rank), expected);
    }
}

/// Too small by one byte, and 8 bytes off the alignment.
pub fn layout_refuses_small_and_misaligned_buffers<B: Backend>(rig: &Rig<B>) {
    let refuses = |buffer: &B::Buffer, stream: &B::Stream, offset: usize, expected: ApiMisuse| {
        refused(Signal::init_signal_buffer::<B>(stream, buffer, offset, 0, 1), expected.clone());
        refused(Signal::from_buffer::<B>(stream, buffer, offset), expected);
    };
    let (short, stream) = junk(rig, SIGNAL_BUFFER_BYTES - 1);
    refuses(
        &short,
        &stream,
        0,
        ApiMisuse::BufferTooSmall { found: SIGNAL_BUFFER_BYTES - 1, needed: SIGNAL_BUFFER_BYTES },
    );
    let untouched = words::<B>(&stream, &short, 0, 1024);
    assert!(untouched.iter().all(|w| *w == 0x5a5a_a5a5), "a refused buffer was written");

    let (enough, stream) = junk(rig, SIGNAL_BUFFER_BYTES + 16);
    let found = Signal::init_signal_buffer::<B>(&stream, &enough, 32, 0, 1).unwrap_err();
    assert!(matches!(found, Error::ApiMisuse(ApiMisuse::BufferTooSmall { .. })), "{found:?}");
    for offset in [1, 4, 8] {
        let address = B::address(&enough) + offset as u64;
        refuses(&enough, &stream, offset, ApiMisuse::SignalMisaligned(address));
    }
    let init = |rank, world| Signal::init_signal_buffer::<B>(&stream, &enough, 0, rank, world);
    refused(init(0, 0), ApiMisuse::WorldSize(0));
    refused(init(0, 9), ApiMisuse::WorldSize(9));
    refused(init(3, 3), ApiMisuse::Rank { rank: 3, world: 3 });
    let untouched = words::<B>(&stream, &enough, 0, SIGNAL_BUFFER_BYTES / 4);
    assert!(untouched.iter().all(|w| *w == 0x5a5a_a5a5), "a refused buffer was written");
}

/// Junk, zeros, and a Signal of another layout version.
pub fn layout_refuses_what_is_not_a_signal<B: Backend>(rig: &Rig<B>) {
    let (buffer, stream) = junk(rig, SIGNAL_BUFFER_BYTES);
    let found = |magic: u64, version: u32| {
        let expected = ApiMisuse::NotASignal { magic, version, expected: LAYOUT_VERSION };
        refused(Signal::from_buffer::<B>(&stream, &buffer, 0), expected);
    };
    found(0x5a5a_a5a5_5a5a_a5a5, 0x5a5a_a5a5);
    B::fill(&stream, &buffer, 0, SIGNAL_BUFFER_BYTES, 0).unwrap();
    found(0, 0);

    Signal::init_signal_buffer::<B>(&stream, &buffer, 0, 0, 1).unwrap();
    let version = CONTROL_OFFSET + offset_of!(Control, layout_version);
    B::upload(&stream, &(LAYOUT_VERSION + 1).to_ne_bytes(), &buffer, version).unwrap();
    found(CONTROL_MAGIC, LAYOUT_VERSION + 1);
    B::upload(&stream, &LAYOUT_VERSION.to_ne_bytes(), &buffer, version).unwrap();
    Signal::from_buffer::<B>(&stream, &buffer, 0).unwrap();
}
