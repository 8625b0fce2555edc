//! Buffers: page-aligned memory with a reference count, and checked parts of them for the copies.
//!
//! Streams, peers' kernels and the host touch the same bytes, ordered by the protocol or by the caller's streams and
//! events, so only raw pointers to them are ever formed. Where a caller orders two copies by nothing, the bytes are
//! unspecified, as on any device, and ThreadSanitizer reports it.

use std::alloc::{self, Layout};
use std::any::Any;
use std::fmt;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::OnceLock;

use signal_core::backend::MemoryKind;
use signal_core::error::{ApiMisuse, Error, Result};
use signal_core::mapping::Mapping;

use crate::canary::{self, Guarded};
use crate::device::Device;
use crate::sync::Shared;

/// Alignment of every buffer, that of a page.
const ALIGN: usize = 4096;
/// Linux's number for "cannot allocate memory".
const ENOMEM: i32 = 12;
/// Bytes a fill copies at a time: the source stays in the first-level cache.
const FILL_CHUNK: usize = 16 << 10;

/// A reference-counted allocation. Freed with the last handle, of which enqueued work holds its own.
#[derive(Clone)]
pub struct Buffer(Shared<Allocation>);

struct Allocation {
    device: Device,
    kind: MemoryKind,
    bytes: usize,
    /// First aligned byte.
    start: NonNull<u8>,
    origin: Origin,
    companion: OnceLock<Box<dyn Any + Send + Sync>>,
}

enum Origin {
    /// What the allocator returned, and how it was asked.
    Allocator {
        raw: NonNull<u8>,
        layout: Layout,
    },
    Mapping(Mapping),
    /// Others', who free it.
    Borrowed,
}

// SAFETY: the pointers stand for memory that this value owns. It is read and written through raw pointers by work whose
// order the callers establish; the fields themselves never change.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Buffer {
    pub(crate) fn allocate(device: &Device, bytes: usize, kind: MemoryKind) -> Result<Self> {
        if bytes == 0 {
            return Err(ApiMisuse::BufferTooSmall { found: 0, needed: 1 }.into());
        }
        let refused =
            || Error::Driver { code: ENOMEM, name: format!("cannot allocate {bytes} bytes"), call: "alloc_zeroed" };
        // A system that overcommits would grant it, and kill the process when it is used.
        let memory = device.host().memory_bytes;
        if memory != 0 && bytes as u64 > memory {
            return Err(refused());
        }
        if matches!(kind, MemoryKind::Shared | MemoryKind::SharedHost) {
            return Ok(Buffer::of_mapping(device, Mapping::new(bytes)?, bytes, kind));
        }
        // Zero, so that runs repeat. Asking for page alignment would make the allocator write all the zeros at once;
        // with its natural alignment large memory comes as zero pages that cost nothing until touched. So align here.
        let canaries = device.host().canaries();
        let around = if canaries.is_some() { canary::BYTES } else { 0 };
        let padded = bytes.checked_add(ALIGN - 16 + 2 * around).ok_or_else(refused)?;
        let layout = Layout::from_size_align(padded, 16).map_err(|_| refused())?;
        // SAFETY: the layout's size is not 0.
        let raw = NonNull::new(unsafe { alloc::alloc_zeroed(layout) }).ok_or_else(refused)?;
        let skip = raw.as_ptr().align_offset(ALIGN) + around;
        // SAFETY: `raw` is a multiple of 16, so the next multiple of `ALIGN` is at most `ALIGN - 16` bytes ahead,
        // which is what the allocation has beyond `bytes` and what is around them.
        let start = unsafe { raw.add(skip) };
        if let Some(canaries) = canaries {
            let buffer = Guarded { start, bytes, kind, device: device.index() };
            // SAFETY: `around` bytes are allocated on both sides, and nobody knows of them yet. They are freed with the buffer, which
            // is forgotten before.
            unsafe {
                buffer.plant();
                canaries.lock().remember(buffer);
            }
        }
        Ok(Buffer::new(device, kind, bytes, start, Origin::Allocator { raw, layout }))
    }

    fn of_mapping(device: &Device, mapping: Mapping, bytes: usize, kind: MemoryKind) -> Self {
        let start = mapping.start();
        Buffer::new(device, kind, bytes, start, Origin::Mapping(mapping))
    }

    fn new(device: &Device, kind: MemoryKind, bytes: usize, start: NonNull<u8>, origin: Origin) -> Self {
        device.host().count_in(bytes);
        let device = device.clone();
        Buffer(Shared::new(Allocation { device, kind, bytes, start, origin, companion: OnceLock::new() }))
    }

    pub(crate) fn attach(&self, companion: Box<dyn Any + Send + Sync>) {
        let _ = self.0.companion.set(companion);
    }

    pub(crate) fn export(&self) -> Result<OwnedFd> {
        match &self.0.origin {
            Origin::Mapping(mapping) => mapping.export(),
            Origin::Allocator { .. } | Origin::Borrowed => Err(ApiMisuse::NotShared.into()),
        }
    }

    pub(crate) fn import(device: &Device, descriptor: OwnedFd, bytes: usize, kind: MemoryKind) -> Result<Self> {
        Ok(Buffer::of_mapping(device, Mapping::open(descriptor, bytes)?, bytes, kind))
    }

    /// # Safety
    /// See [`Backend::borrow`](signal_core::Backend::borrow).
    pub(crate) unsafe fn borrow(device: &Device, address: u64, bytes: usize) -> Self {
        // Whoever told the address exposed the memory, as `address` does. A null address is a dangling one of this buffer, which nobody touches.
        let start = NonNull::new(ptr::with_exposed_provenance_mut(address as usize)).unwrap_or(NonNull::dangling());
        Buffer::new(device, MemoryKind::Device, bytes, start, Origin::Borrowed)
    }

    pub(crate) fn address(&self) -> u64 {
        // Kernels and peers reach the memory through this number.
        self.0.start.as_ptr().expose_provenance() as u64
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.bytes
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(crate) fn host_pointer(&self) -> Option<NonNull<u8>> {
        (self.0.kind == MemoryKind::HostMapped).then_some(self.0.start)
    }

    /// A part of a buffer of `device`, or why there is none.
    pub(crate) fn part(&self, device: &Device, offset: usize, bytes: usize) -> Result<Part> {
        device.check("buffer", self.device())?;
        ApiMisuse::check_range(offset, bytes, self.bytes())?;
        Ok(Part { buffer: self.clone(), offset, bytes })
    }
}

impl fmt::Debug for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("device", &self.0.device)
            .field("kind", &self.0.kind)
            .field("bytes", &self.0.bytes)
            .field("address", &self.0.start)
            .finish()
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.host().count_out(self.bytes);
        if let Origin::Allocator { raw, layout } = self.origin {
            if let Some(canaries) = self.device.host().canaries() {
                canaries.lock().forget(self.start);
            }
            // SAFETY: `raw` and `layout` are those of the allocation. The last handle is gone, `Shared` ordered this behind
            // all uses through other handles, and work holds a handle until it has completed.
            unsafe { alloc::dealloc(raw.as_ptr(), layout) };
        }
    }
}

/// Bytes that are known to lie within a buffer, which it keeps alive.
#[derive(Debug)]
pub(crate) struct Part {
    buffer: Buffer,
    offset: usize,
    bytes: usize,
}

impl Part {
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: `Buffer::part` checked that the offset lies within the allocation.
        unsafe { self.buffer.0.start.as_ptr().add(self.offset) }
    }

    /// Writes as much of `source` as fits.
    pub(crate) fn write(&self, source: &[u8]) {
        // SAFETY: `bytes` lie behind `start` in a live allocation; a Rust slice never overlaps memory to which no
        // reference is formed. The caller of the copy orders other accesses (see the head of this file).
        unsafe { ptr::copy_nonoverlapping(source.as_ptr(), self.start(), source.len().min(self.bytes)) };
    }

    /// Copies the part out.
    ///
    /// # Safety
    /// `target` has room for [`bytes`](Self::bytes) and nobody else touches it meanwhile.
    pub(crate) unsafe fn read(&self, target: *mut u8) {
        // SAFETY: `bytes` lie behind `start` in a live allocation, the caller answers for `target`, and the two cannot
        // overlap, as the target is exclusive to the caller.
        unsafe { ptr::copy_nonoverlapping(self.start(), target, self.bytes) };
    }

    /// Copies from another part, which may overlap, as much as fits.
    pub(crate) fn copy_from(&self, source: &Part) {
        // SAFETY: both lie within live allocations, and `copy` allows overlap.
        unsafe { ptr::copy(source.start(), self.start(), source.bytes.min(self.bytes)) };
    }

    /// Fills with a word, starting with its first byte.
    pub(crate) fn fill(&self, word: u32) {
        let (start, bytes) = (self.start(), self.bytes);
        let mut done = bytes.min(4);
        self.write(&word.to_ne_bytes());
        while done < bytes {
            // What is done is a multiple of the word, so its beginning continues the pattern.
            let more = done.min(bytes - done).min(FILL_CHUNK);
            // SAFETY: `done + more` stays within `bytes` behind `start`, in a live allocation; the source ends at
            // `more`, at or before `done`, where the target begins.
            unsafe { ptr::copy_nonoverlapping(start, start.add(done), more) };
            done += more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Host;
    use crate::testing::{first_device, host};
    use signal_core::backend::Backend;

    #[test]
    fn buffers_are_aligned_zero_and_counted() {
        let host = host();
        let device = host.devices().unwrap().remove(0);
        for bytes in [1, 15, 4096, 100_001, 3 << 20] {
            let buffer = Host::allocate(&device, bytes, MemoryKind::HostMapped).unwrap();
            assert_eq!(Host::address(&buffer) % 4096, 0);
            assert_eq!(Host::bytes(&buffer), bytes);
            assert_eq!(host.allocated_bytes(), bytes);
            let first = Host::host_pointer(&buffer).unwrap();
            assert_eq!(first.as_ptr() as u64, Host::address(&buffer));
            let all = buffer.part(&device, 0, bytes).unwrap();
            let mut seen = vec![1; bytes];
            // SAFETY: the vector has that length.
            unsafe { all.read(seen.as_mut_ptr()) };
            assert!(seen.iter().all(|b| *b == 0));
            all.write(&vec![7; bytes]);
        }
        assert_eq!(host.allocated_bytes(), 0);
        for kind in [MemoryKind::Device, MemoryKind::PeerVisible] {
            assert_eq!(Host::host_pointer(&Host::allocate(&device, 8, kind).unwrap()), None);
        }
    }

    #[test]
    fn shared_memory_is_one_under_two_addresses() {
        let device = first_device();
        let buffer = Host::allocate(&device, 10_000, MemoryKind::Shared).unwrap();
        buffer.part(&device, 9_000, 1_000).unwrap().fill(0x0102_0304);
        let again = Host::import(&device, Host::export(&buffer).unwrap(), 10_000, MemoryKind::Shared).unwrap();
        assert_ne!(Host::address(&buffer), Host::address(&again));
        drop(buffer);
        let mut seen = vec![0u32; 250];
        // SAFETY: the vector has that length.
        unsafe { again.part(&device, 9_000, 1_000).unwrap().read(seen.as_mut_ptr().cast()) };
        assert!(seen.iter().all(|word| *word == 0x0102_0304));
        let private = Host::allocate(&device, 8, MemoryKind::PeerVisible).unwrap();
        assert_eq!(Host::export(&private).unwrap_err(), ApiMisuse::NotShared.into());
    }

    #[test]
    fn impossible_sizes_are_errors() {
        let allocate = |bytes| Host::allocate(&first_device(), bytes, MemoryKind::Device).unwrap_err();
        assert_eq!(allocate(0), Error::ApiMisuse(ApiMisuse::BufferTooSmall { found: 0, needed: 1 }));
        for bytes in [usize::MAX, isize::MAX as usize, 1 << 60] {
            assert!(matches!(allocate(bytes), Error::Driver { code: ENOMEM, .. }));
        }
    }

    #[test]
    fn fill_repeats_the_word() {
        let device = first_device();
        for words in [0, 1, 2, 3, 1000, FILL_CHUNK / 4 + 1, FILL_CHUNK + 3] {
            let buffer = Buffer::allocate(&device, words * 4 + 8, MemoryKind::Device).unwrap();
            buffer.part(&device, 4, words * 4).unwrap().fill(0x8000_0001);
            let mut seen = vec![0; words + 2];
            // SAFETY: the vector has that length.
            unsafe { buffer.part(&device, 0, words * 4 + 8).unwrap().read(seen.as_mut_ptr().cast()) };
            let mut expected = vec![0x8000_0001u32; words + 2];
            (expected[0], expected[words + 1]) = (0, 0);
            assert_eq!(seen, expected);
        }
    }
}
