//! Memory: of which kind for whom, and copies. What becomes of it is [`signal_core::deferred`]'s.

use std::any::Any;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};

use signal_core::deferred::{self, Remains, Uses};
use signal_core::error::{ApiMisuse, Result};
use signal_core::mapping::Mapping;
use signal_core::{Backend, MemoryKind};

use crate::Rocm;
use crate::device::Device;
use crate::driver::Driver;
use crate::quiet::quiet;
use crate::shared;
use crate::stream::Stream;
use crate::sys;

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
    driver: Driver,
    address: u64,
    source: Source,
    /// Bytes that the runtime gave.
    capacity: usize,
}

/// Where memory came from, and goes.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    /// Of `hipMalloc`: coarse-grained, so for its own device alone while kernels run.
    Plain,
    /// Uncached, for peers too.
    PeerVisible,
    /// The same, of which other processes may be told.
    Shared,
    /// Another process's.
    Imported,
    /// With the host's view.
    Pinned(NonNull<u8>),
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
            _ => bytes.next_multiple_of(4096),
        };
        let allocate = || Memory::allocate(device, capacity, kind);
        let memory = device.graves().allocate(device.slots(), (capacity, kind), quiet, allocate)?;
        Ok(Buffer::of(device, memory, bytes))
    }

    fn of(device: &Device, memory: Memory, bytes: usize) -> Buffer {
        let device = device.clone();
        Buffer(Arc::new(Allocation { device, memory, bytes, uses: Uses::default(), companion: OnceLock::new() }))
    }

    pub(crate) fn attach(&self, companion: Box<dyn Any + Send + Sync>) {
        let _ = self.0.companion.set(companion);
    }

    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let _current = self.device().enter()?;
        match &self.0.memory.source {
            Source::Shared => shared::export(self.device(), self.address(), self.0.memory.capacity),
            Source::SharedHost(mapping) => mapping.export(),
            _ => Err(ApiMisuse::NotShared.into()),
        }
    }

    pub(crate) fn import(device: &Device, descriptor: OwnedFd, bytes: usize, kind: MemoryKind) -> Result<Buffer> {
        let _current = device.enter()?;
        let driver = *device.driver();
        let memory = if kind == MemoryKind::SharedHost {
            Memory::pin(driver, Mapping::open(descriptor, bytes)?, bytes)?
        } else {
            let (address, capacity) = shared::import(device, descriptor, bytes)?;
            Memory { driver, address, source: Source::Imported, capacity }
        };
        Ok(Buffer::of(device, memory, bytes))
    }

    /// # Safety
    /// See [`Backend::borrow`](signal_core::Backend::borrow).
    pub(crate) unsafe fn borrow(device: &Device, address: u64, bytes: usize) -> Buffer {
        let memory = Memory { driver: *device.driver(), address, source: Source::Borrowed, capacity: bytes };
        Buffer::of(device, memory, bytes)
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
        let driver = *device.driver();
        let of = |address: *mut c_void, source| Memory { driver, address: address as u64, source, capacity };
        match kind {
            MemoryKind::PeerVisible => Ok(of(peer_visible(device, capacity)?, Source::PeerVisible)),
            MemoryKind::Shared => Ok(of(peer_visible(device, capacity)?, Source::Shared)),
            MemoryKind::SharedHost => Memory::pin(driver, Mapping::new(capacity)?, capacity),
            MemoryKind::HostMapped => {
                let mut host = std::ptr::null_mut();
                let flags = sys::hipHostMallocPortable | sys::hipHostMallocMapped | sys::hipHostMallocCoherent;
                // SAFETY: writes one address, which outlives the call. A device is current.
                driver.check("hipHostMalloc", unsafe { (driver.hipHostMalloc)(&raw mut host, capacity, flags) })?;
                let mut address = std::ptr::null_mut();
                // SAFETY: `host` was allocated as mapped; the output outlives the call.
                let result = unsafe { (driver.hipHostGetDevicePointer)(&raw mut address, host, 0) };
                driver.check("hipHostGetDevicePointer", result)?;
                let host = NonNull::new(host.cast())
                    .ok_or_else(|| driver.error("hipHostMalloc", sys::hipErrorInvalidValue))?;
                Ok(of(address, Source::Pinned(host)))
            }
            _ => {
                let mut address = std::ptr::null_mut();
                // SAFETY: as above.
                driver.check("hipMalloc", unsafe { (driver.hipMalloc)(&raw mut address, capacity) })?;
                Ok(of(address, Source::Plain))
            }
        }
    }

    /// Pins `capacity` bytes of a file in memory for all devices. Such memory is kept coherent unless it is asked for otherwise.
    fn pin(driver: Driver, mapping: Mapping, capacity: usize) -> Result<Memory> {
        let host = mapping.start().as_ptr().cast();
        let flags = sys::hipHostRegisterPortable | sys::hipHostRegisterMapped;
        // SAFETY: the file is mapped there in that size at least, and stays until `release`. A device is current.
        driver.check("hipHostRegister", unsafe { (driver.hipHostRegister)(host, capacity, flags) })?;
        let mut address = std::ptr::null_mut();
        // SAFETY: `host` was registered as mapped; the output outlives the call.
        let result = unsafe { (driver.hipHostGetDevicePointer)(&raw mut address, host, 0) };
        let source = Source::SharedHost(Arc::new(mapping));
        let memory = Memory { driver, address: address as u64, source, capacity };
        if let Err(error) = driver.check("hipHostGetDevicePointer", result) {
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
            Source::Plain => kind == MemoryKind::Device,
            Source::Pinned(_) => kind == MemoryKind::HostMapped,
            Source::PeerVisible => kind == MemoryKind::PeerVisible,
            // Other processes may still have it.
            Source::Shared | Source::Imported | Source::SharedHost(_) | Source::Borrowed => false,
        }
    }

    unsafe fn release(self) -> Result<()> {
        let driver = self.driver;
        let address = self.address as *mut c_void;
        match self.source {
            Source::Plain | Source::PeerVisible | Source::Shared => {
                // SAFETY: the caller's promise: nothing uses the memory.
                driver.check("hipFree", unsafe { (driver.hipFree)(address) })
            }
            // SAFETY: as above.
            Source::Imported => driver.check("hipIpcCloseMemHandle", unsafe { (driver.hipIpcCloseMemHandle)(address) }),
            Source::Borrowed => Ok(()),
            Source::SharedHost(mapping) => {
                // SAFETY: as above; it was registered by its first byte. Then nothing keeps the mapping.
                let result = unsafe { (driver.hipHostUnregister)(mapping.start().as_ptr().cast()) };
                driver.check("hipHostUnregister", result)
            }
            // SAFETY: as above.
            Source::Pinned(host) => driver.check("hipHostFree", unsafe { (driver.hipHostFree)(host.as_ptr().cast()) }),
        }
    }
}

/// Memory that peers read and write while kernels run. No cache may hold it, or a peer's store would go unseen; where the runtime
/// refuses that, as before ROCm 5.7, memory that is kept coherent.
fn peer_visible(device: &Device, capacity: usize) -> Result<*mut c_void> {
    let driver = device.driver();
    let mut address = std::ptr::null_mut();
    let mut allocate = |flags| {
        // SAFETY: writes one address, which outlives the call. A device is current.
        unsafe { (driver.hipExtMallocWithFlags)(&raw mut address, capacity, flags) }
    };
    match allocate(sys::hipDeviceMallocUncached) {
        sys::hipErrorInvalidValue | sys::hipErrorNotSupported => {
            tracing::warn!(device = ?device, "the HIP runtime refuses uncached memory; fine-grained memory is slower");
            driver.check("hipExtMallocWithFlags", allocate(sys::hipDeviceMallocFinegrained))?;
        }
        result => driver.check("hipExtMallocWithFlags", result)?,
    }
    Ok(address)
}

/// Copies, each behind the work on the stream.
impl Stream {
    pub(crate) fn upload(&self, source: &[u8], buffer: &Buffer, offset: usize) -> Result<()> {
        self.check(buffer, offset, source.len())?;
        if source.is_empty() {
            return Ok(());
        }
        // From pageable memory the runtime may wait for the stream, whose kernel may wait for a rank that this thread has
        // yet to launch.
        let staging = Buffer::allocate(self.device(), source.len(), MemoryKind::HostMapped)?;
        let host = self.host_of(&staging)?;
        // SAFETY: the staging memory has this many bytes and nobody else knows it.
        unsafe { host.copy_from_nonoverlapping(NonNull::from(source).cast(), source.len()) };
        let _current = self.device().enter()?;
        self.keep(&[buffer, &staging])?;
        let driver = self.device().driver();
        let target = (buffer.address() + offset as u64) as *mut c_void;
        // SAFETY: both ranges lie within allocations that are kept until the copy has ended.
        let result = unsafe { (driver.hipMemcpyHtoDAsync)(target, host.as_ptr().cast(), source.len(), self.raw()) };
        driver.check("hipMemcpyHtoDAsync", result)
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
        let host = self.host_of(&staging)?;
        let _current = self.device().enter()?;
        self.keep(&[buffer, &staging])?;
        let driver = self.device().driver();
        let source = (buffer.address() + offset as u64) as *mut c_void;
        // SAFETY: both ranges lie within allocations that are kept until the copy has ended.
        let result = unsafe { (driver.hipMemcpyDtoHAsync)(host.as_ptr().cast(), source, target.len(), self.raw()) };
        driver.check("hipMemcpyDtoHAsync", result)?;
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
        let driver = self.device().driver();
        let target = (buffer.address() + offset as u64) as *mut c_void;
        // SAFETY: the range lies within an allocation that is kept until the fill has ended.
        let result = unsafe { (driver.hipMemsetD32Async)(target, word.cast_signed(), bytes / 4, self.raw()) };
        driver.check("hipMemsetD32Async", result)
    }

    pub(crate) fn copy(&self, source: (&Buffer, usize), target: (&Buffer, usize), bytes: usize) -> Result<()> {
        self.check(source.0, source.1, bytes)?;
        self.check(target.0, target.1, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.device().enter()?;
        self.keep(&[source.0, target.0])?;
        let driver = self.device().driver();
        let [from, to] = [source, target].map(|(buffer, offset)| (buffer.address() + offset as u64) as *mut c_void);
        // SAFETY: both ranges lie within allocations that are kept until the copy has ended.
        let result = unsafe { (driver.hipMemcpyDtoDAsync)(to, from, bytes, self.raw()) };
        driver.check("hipMemcpyDtoDAsync", result)
    }

    fn check(&self, buffer: &Buffer, offset: usize, bytes: usize) -> Result<()> {
        if buffer.device() != self.device() {
            let name = |device| Rocm::describe(device).label();
            let (found, expected) = (name(buffer.device()), name(self.device()));
            return Err(ApiMisuse::WrongDevice { what: "buffer", found, expected }.into());
        }
        Ok(ApiMisuse::check_range(offset, bytes, buffer.bytes())?)
    }

    /// The host's view of pinned memory; an error, should the runtime ever break what it promises of it.
    fn host_of(&self, staging: &Buffer) -> Result<NonNull<u8>> {
        staging.host_pointer().ok_or_else(|| self.device().driver().error("hipHostMalloc", sys::hipErrorInvalidValue))
    }
}
