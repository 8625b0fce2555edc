//! Canaries: bytes of no meaning in front of and behind every buffer, which nobody may write. A kernel that writes outside what
//! it was given changes some; the memory that it would have hit otherwise says nothing of it.
//!
//! They are as long as a page on each side. What is written beyond them goes unseen, as does what is written within the same
//! buffer; memory that other processes map has none.

use std::collections::BTreeMap;
use std::fmt;
use std::ptr::NonNull;

use signal_core::backend::MemoryKind;

/// Bytes on each side.
pub(crate) const BYTES: usize = 4096;
/// What they hold, over and over, from the first byte of a side on. No data, no count and no sentinel of the kernels is like it.
const PATTERN: u64 = 0xc0de_5a5a_b1d5_0f0f;
/// Its bytes.
const WORD: usize = size_of::<u64>();

/// A write outside a buffer, as [`Host::overwritten`](crate::Host::overwritten) finds it.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Overwritten {
    /// The device that the buffer belongs to.
    pub device: usize,
    /// The kind of its memory.
    pub kind: MemoryKind,
    /// Its bytes.
    pub bytes: usize,
    /// The first byte that was written, counted from the buffer's first: below 0, or `bytes` and more.
    pub first: isize,
    /// Bytes that changed.
    pub count: usize,
}

impl fmt::Display for Overwritten {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Overwritten { device, kind, bytes, first, count } = self;
        write!(
            f,
            "{count} bytes were written outside a buffer of {bytes} ({kind:?}, CPU {device}), the first at {first}"
        )
    }
}

/// A buffer that has canaries around it.
#[derive(Clone, Copy)]
pub(crate) struct Guarded {
    pub(crate) start: NonNull<u8>,
    pub(crate) bytes: usize,
    pub(crate) kind: MemoryKind,
    pub(crate) device: usize,
}

// SAFETY: the pointer stands for memory that is read, through raw pointers, only while `Watch` knows the buffer, which it does for
// as long as that is allocated.
unsafe impl Send for Guarded {}

impl Guarded {
    /// Writes the canaries.
    ///
    /// # Safety
    /// [`BYTES`] bytes in front of `start` and behind the buffer are allocated, and nobody else touches them now.
    pub(crate) unsafe fn plant(&self) {
        for side in self.sides() {
            for at in (0..BYTES).step_by(WORD) {
                // SAFETY: within the bytes that the caller answers for.
                unsafe { side.add(at).cast::<u64>().write_unaligned(PATTERN) };
            }
        }
    }

    /// The first bytes of both sides.
    fn sides(&self) -> [*mut u8; 2] {
        let start = self.start.as_ptr();
        [start.wrapping_sub(BYTES), start.wrapping_add(self.bytes)]
    }

    /// What is not as it was planted.
    ///
    /// # Safety
    /// The canaries were planted and are still allocated.
    unsafe fn check(&self) -> Option<Overwritten> {
        let mut changed = Vec::new();
        for (side, from) in self.sides().into_iter().zip([-(BYTES as isize), self.bytes as isize]) {
            for at in (0..BYTES).step_by(WORD) {
                // SAFETY: planted and allocated, as the caller says. Read without a reference: whoever should not write here might.
                let wrong = unsafe { side.add(at).cast::<u64>().read_unaligned() } ^ PATTERN;
                let bytes = wrong.to_ne_bytes().into_iter().zip(from + at as isize..);
                changed.extend(bytes.filter(|(byte, _)| *byte != 0).map(|(_, at)| at));
            }
        }
        let Guarded { bytes, kind, device, .. } = *self;
        changed.first().map(|&first| Overwritten { device, kind, bytes, first, count: changed.len() })
    }
}

/// All canaries of one backend, and what became of those that are gone.
#[derive(Default)]
pub(crate) struct Watch {
    /// By address.
    live: BTreeMap<usize, Guarded>,
    found: Vec<Overwritten>,
}

impl Watch {
    /// Knows a buffer from now on.
    ///
    /// # Safety
    /// Its canaries are planted, and stay allocated until [`forget`](Self::forget).
    pub(crate) unsafe fn remember(&mut self, buffer: Guarded) {
        self.live.insert(buffer.start.as_ptr().addr(), buffer);
    }

    /// Checks a buffer for the last time, if it has canaries.
    pub(crate) fn forget(&mut self, start: NonNull<u8>) {
        let gone = self.live.remove(&start.as_ptr().addr());
        // SAFETY: it was known until now, so its canaries are planted and allocated.
        self.found.extend(gone.and_then(|buffer| unsafe { buffer.check() }));
    }

    /// Everything that was written, around buffers that are gone and those that are there.
    pub(crate) fn overwritten(&self) -> Vec<Overwritten> {
        // SAFETY: what is known has canaries that are planted and allocated.
        let live = self.live.values().filter_map(|buffer| unsafe { buffer.check() });
        self.found.iter().cloned().chain(live).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{BUMP, Bench, IMAGE};
    use crate::{Host, HostConfig};
    use signal_core::backend::Backend;

    fn guarded() -> Bench {
        Bench::on(Host::open(IMAGE, HostConfig { canaries: true, ..HostConfig::default() }).unwrap())
    }

    /// A kernel adds 1 to each word from byte `first` of a buffer on.
    fn bump(bench: &Bench, bytes: usize, first: isize, words: u32) -> Vec<Overwritten> {
        let buffer = bench.buffer(bytes);
        let at = Host::address(&buffer).wrapping_add_signed(first as i64);
        bench.launch(&bench.stream, BUMP, (words, 1), &[at], &[&buffer]);
        Host::synchronize(&bench.stream).unwrap();
        bench.host.overwritten()
    }

    #[test]
    fn kernels_that_stay_within_are_not_blamed() {
        let bench = guarded();
        for bytes in [8, 64, 4096, 100_000] {
            assert_eq!(bump(&bench, bytes, 0, (bytes / 8).min(64) as u32), []);
            assert_eq!(bump(&bench, bytes, bytes as isize - 8, 1), []);
        }
    }

    #[test]
    fn a_word_outside_is_found_while_the_buffer_lives_and_when_it_is_gone() {
        for (bytes, first, outside) in [(64, -8, -8), (64, 64, 64), (60, 64, 64), (64, -4096, -4096), (64, 4152, 4152)]
        {
            let bench = guarded();
            let seen = bump(&bench, bytes, first, 1);
            assert_eq!(seen.len(), 1, "{bytes} bytes, at {first}");
            assert_eq!((seen[0].bytes, seen[0].kind, seen[0].device), (bytes, MemoryKind::HostMapped, 0));
            assert_eq!((seen[0].first, seen[0].count), (outside, 1), "{seen:?}");
            // By now the buffer is gone, or soon: the stream's worker lets go of it when it likes.
            let began = std::time::Instant::now();
            while bench.host.allocated_bytes() > 0 {
                assert!(began.elapsed().as_secs() < 10, "nothing frees it");
                std::thread::yield_now();
            }
            assert_eq!(bench.host.overwritten(), seen);
            assert!(seen[0].to_string().contains(&format!("1 bytes were written outside a buffer of {bytes}")));
        }
    }

    #[test]
    fn buffers_with_canaries_are_aligned_and_zero() {
        let bench = guarded();
        for bytes in [1, 4096, 100_001] {
            let buffer = Host::allocate(&bench.device, bytes, MemoryKind::Device).unwrap();
            assert_eq!((Host::address(&buffer) % 4096, Host::bytes(&buffer)), (0, bytes));
            let mut seen = vec![1; bytes];
            Host::download(&bench.stream, &buffer, 0, &mut seen).unwrap();
            assert!(seen.iter().all(|byte| *byte == 0));
        }
        assert!(Host::allocate(&bench.device, usize::MAX - 8192, MemoryKind::Device).is_err());
    }

    #[test]
    fn without_the_setting_nothing_is_watched() {
        assert_eq!(bump(&Bench::new(), 64, 0, 8), []);
    }
}
