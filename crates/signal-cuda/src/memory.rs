//! Memory: of which kind for whom, and copies. What becomes of it is [`signal_core::deferred`]'s.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use cudarc::driver::sys::{self, CUresult};
use signal_core::deferred::{self, Remains, Uses};
use signal_core::error::{ApiMisuse, Result};
use signal_core::mapping::Mapping;
use signal_core::{Backend, MemoryKind};

use crate::Cuda;
use crate::device::Device;
use crate::driver::check;
use crate::quiet::quiet;
use crate::shared;
use crate::stream::Stream;

/// Device memory or pinned host memory.
#[derive(Clone, Debug)]
pub struct Buffer(Arc<Allocation>);

#[derive(Debug)]
struct Allocation {
    device: Device,
    memory: Memory,
    bytes: usize,
    uses: Uses,
    companion: OnceLock<Box<dyn Any + Send + Sync>>,
}

#[derive(Clone, Debug)]
pub(crate) struct Memory {
    address: u64,
    source: Source,
    /// Bytes that the driver gave.
    capacity: usize,
}

/// Where memory came from, and goes.
#[derive(Clone, Debug)]
enum Source {
    Plain,
    /// With the host's view.
    Pinned(NonNull<u8>),
    /// Mapped, by other processes too.
    Shared,
    /// A file in the host's memory, pinned where this process maps it.
    SharedHost(Arc<Mapping>),
    /// Others', who free it.
    Borrowed,
}

// SAFETY: an address may be used from any thread; what is done through it is ordered by streams.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Buffer {
    pub(crate) fn allocate(device: &Device, bytes: usize, kind: MemoryKind) -> Result<Buffer> {
        let _current = device.enter()?;
        // Pinned memory serves uploads of all sizes: classes let one be reused for the next.
        let capacity = match kind {
            MemoryKind::HostMapped => bytes.next_power_of_two().max(4096),
            MemoryKind::Shared => shared::capacity(device, bytes)?,
            _ => bytes.next_multiple_of(4096),
        };
        let allocate = || Memory::allocate(device, capacity, kind);
        let memory = device.graves().allocate(device.slots(), (capacity, kind), quiet, allocate)?;
        Ok(Buffer::of(device, memory, bytes))
    }

    fn of(device: &Device, memory: Memory, bytes: usize) -> Buffer {
        let (device, uses) = (device.clone(), Uses::default());
        Buffer(Arc::new(Allocation { device, memory, bytes, uses, companion: OnceLock::new() }))
    }

    pub(crate) fn attach(&self, companion: Box<dyn Any + Send + Sync>) {
        let _ = self.0.companion.set(companion);
    }

    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let _current = self.device().enter()?;
        match &self.0.memory.source {
            // The driver refuses what was not created for it.
            Source::Shared | Source::Borrowed => shared::export(self.address()),
            Source::SharedHost(mapping) => mapping.export(),
            Source::Plain | Source::Pinned(_) => Err(ApiMisuse::NotShared.into()),
        }
    }

    pub(crate) fn import(device: &Device, descriptor: OwnedFd, bytes: usize, kind: MemoryKind) -> Result<Buffer> {
        let _current = device.enter()?;
        let memory = if kind == MemoryKind::SharedHost {
            Memory::pin(Mapping::open(descriptor, bytes)?, bytes)?
        } else {
            let capacity = shared::capacity(device, bytes)?;
            Memory { address: shared::import(device, &descriptor, capacity)?, source: Source::Shared, capacity }
        };
        Ok(Buffer::of(device, memory, bytes))
    }

    /// # Safety
    /// See [`Backend::borrow`](signal_core::Backend::borrow).
    pub(crate) unsafe fn borrow(device: &Device, address: u64, bytes: usize) -> Buffer {
        Buffer::of(device, Memory { address, source: Source::Borrowed, capacity: bytes }, bytes)
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.memory.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.bytes
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(crate) fn host_pointer(&self) -> Option<NonNull<u8>> {
        match self.0.memory.source {
            Source::Pinned(host) => Some(host),
            _ => None,
        }
    }

    /// Keeps the memory until the work that is now on `stream` has ended.
    pub(crate) fn used_on(&self, stream: &Stream) {
        self.0.uses.note(stream.slot());
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.graves().bury(Remains::Memory(self.memory.clone()), self.uses.mask());
    }
}

impl Memory {
    fn allocate(device: &Device, capacity: usize, kind: MemoryKind) -> Result<Memory> {
        if kind == MemoryKind::Shared {
            let address = shared::allocate(device, capacity)?;
            return Ok(Memory { address, source: Source::Shared, capacity });
        }
        if kind == MemoryKind::SharedHost {
            return Memory::pin(Mapping::new(capacity)?, capacity);
        }
        let mut address = 0;
        if kind != MemoryKind::HostMapped {
            // SAFETY: writes one address, which outlives the call. A context is current.
            check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, capacity) })?;
            return Ok(Memory { address, source: Source::Plain, capacity });
        }
        let mut host = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: as above.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut host, capacity, flags) })?;
        // SAFETY: `host` was allocated with DEVICEMAP in the current context.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0) };
        check("cuMemHostGetDevicePointer", result)?;
        let host = NonNull::new(host.cast()).ok_or_else(without_host_address)?;
        Ok(Memory { address, source: Source::Pinned(host), capacity })
    }

    /// Pins `capacity` bytes of a file in memory for all devices.
    fn pin(mapping: Mapping, capacity: usize) -> Result<Memory> {
        let (host, flags) =
            (mapping.start().as_ptr().cast(), sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP);
        // SAFETY: the file is mapped there in that size at least, and stays until `release`. A context is current.
        check("cuMemHostRegister", unsafe { sys::cuMemHostRegister_v2(host, capacity, flags) })?;
        let mut address = 0;
        // SAFETY: `host` was registered with DEVICEMAP in the current context; the output outlives the call.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0) };
        let memory = Memory { address, source: Source::SharedHost(Arc::new(mapping)), capacity };
        if let Err(error) = check("cuMemHostGetDevicePointer", result) {
            // SAFETY: nobody knows of the memory yet.
            let _ = unsafe { deferred::Memory::release(memory) };
            return Err(error);
        }
        Ok(memory)
    }
}

impl deferred::Memory for Memory {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn suits(&self, kind: MemoryKind) -> bool {
        match self.source {
            Source::Plain => matches!(kind, MemoryKind::Device | MemoryKind::PeerVisible),
            Source::Pinned(_) => kind == MemoryKind::HostMapped,
            // Other processes may still have it.
            Source::Shared | Source::SharedHost(_) | Source::Borrowed => false,
        }
    }

    unsafe fn release(self) -> Result<()> {
        match self.source {
            // SAFETY: the caller's promise: nothing uses the memory.
            Source::Plain => check("cuMemFree", unsafe { sys::cuMemFree_v2(self.address) }),
            // SAFETY: as above.
            Source::Pinned(host) => check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(host.as_ptr().cast()) }),
            // SAFETY: as above.
            Source::Shared => unsafe { shared::release(self.address) },
            Source::Borrowed => Ok(()),
            Source::SharedHost(mapping) => {
                // SAFETY: as above; it was registered by its first byte. Then nothing keeps the mapping.
                let result = unsafe { sys::cuMemHostUnregister(mapping.start().as_ptr().cast()) };
                check("cuMemHostUnregister", result)
            }
        }
    }
}

/// Copies, each behind the work on the stream.
impl Stream {
    pub(crate) fn upload(&self, source: &[u8], buffer: &Buffer, offset: usize) -> Result<()> {
        self.check(buffer, offset, source.len())?;
        if source.is_empty() {
            return Ok(());
        }
        // From pageable memory the driver may wait for the stream, whose kernel may wait for a rank that this thread has
        // yet to launch.
        let staging = Buffer::allocate(self.device(), source.len(), MemoryKind::HostMapped)?;
        let host = host_of(&staging)?;
        // SAFETY: the staging memory has this many bytes and nobody else knows it.
        unsafe { host.copy_from_nonoverlapping(NonNull::from(source).cast(), source.len()) };
        let _current = self.device().enter()?;
        self.keep(&[buffer, &staging])?;
        let target = buffer.address() + offset as u64;
        // SAFETY: both ranges lie within allocations that are kept until the copy has ended.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(target, host.as_ptr().cast(), source.len(), self.raw()) };
        check("cuMemcpyHtoDAsync", result)
    }

    pub(crate) fn download(&self, buffer: &Buffer, offset: usize, target: &mut [u8]) -> Result<()> {
        self.check(buffer, offset, target.len())?;
        if target.is_empty() {
            return Ok(());
        }
        if self.is_capturing()? {
            return Err(ApiMisuse::Capture { call: "download", state: "capturing" }.into());
        }
        let staging = Buffer::allocate(self.device(), target.len(), MemoryKind::HostMapped)?;
        let host = host_of(&staging)?;
        let _current = self.device().enter()?;
        self.keep(&[buffer, &staging])?;
        let source = buffer.address() + offset as u64;
        // SAFETY: both ranges lie within allocations that are kept until the copy has ended.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(host.as_ptr().cast(), source, target.len(), self.raw()) };
        check("cuMemcpyDtoHAsync", result)?;
        self.synchronize()?;
        // SAFETY: the copy has ended, and nobody else knows the staging memory.
        unsafe { host.copy_to_nonoverlapping(NonNull::from(&mut *target).cast(), target.len()) };
        Ok(())
    }

    pub(crate) fn fill(&self, buffer: &Buffer, offset: usize, bytes: usize, word: u32) -> Result<()> {
        self.check(buffer, offset, bytes)?;
        if !bytes.is_multiple_of(4) || !offset.is_multiple_of(4) {
            return Err(ApiMisuse::Range { start: offset, end: offset + bytes, len: buffer.bytes() }.into());
        }
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.device().enter()?;
        self.keep(&[buffer])?;
        let target = buffer.address() + offset as u64;
        // SAFETY: the range lies within an allocation that is kept until the fill has ended.
        check("cuMemsetD32Async", unsafe { sys::cuMemsetD32Async(target, word, bytes / 4, self.raw()) })
    }

    pub(crate) fn copy(&self, source: (&Buffer, usize), target: (&Buffer, usize), bytes: usize) -> Result<()> {
        self.check(source.0, source.1, bytes)?;
        self.check(target.0, target.1, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.device().enter()?;
        self.keep(&[source.0, target.0])?;
        let (from, to) = (source.0.address() + source.1 as u64, target.0.address() + target.1 as u64);
        // SAFETY: both ranges lie within allocations that are kept until the copy has ended.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw()) })
    }

    fn check(&self, buffer: &Buffer, offset: usize, bytes: usize) -> Result<()> {
        if buffer.device() != self.device() {
            let name = |device| Cuda::describe(device).label();
            let (found, expected) = (name(buffer.device()), name(self.device()));
            return Err(ApiMisuse::WrongDevice { what: "buffer", found, expected }.into());
        }
        Ok(ApiMisuse::check_range(offset, bytes, buffer.bytes())?)
    }
}

fn host_of(staging: &Buffer) -> Result<NonNull<u8>> {
    staging.host_pointer().ok_or_else(without_host_address)
}

/// An error, should the driver ever break what it promises of pinned memory.
fn without_host_address() -> signal_core::Error {
    signal_core::Error::Driver {
        code: CUresult::CUDA_ERROR_INVALID_VALUE as i32,
        name: "pinned memory without a host address".to_owned(),
        call: "cuMemHostAlloc",
    }
}
