//! Memory that several processes map. The driver counts who does, so a process that ends, or that frees it, pulls it from under
//! nobody. That is why `cudaIpc` is not used: its documentation leaves undefined what peers read once the exporter has freed it or died. (What
//! driver 580 does when it dies is benign: docs/verification.md.)

use std::ffi::{c_int, c_uint, c_ushort, c_void};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Mutex;

use cudarc::driver::sys::{self, CUdevice, CUmemAllocationHandleType, CUmemGenericAllocationHandle};
use signal_core::deferred::lock;
use signal_core::error::{ApiMisuse, Result, Unavailable};

use crate::device::Device;
use crate::driver::{check, unavailable};

// The parameter structs, as the driver API has them in all of its versions: bindings name their fields differently.

#[repr(C)]
pub(crate) struct Location {
    kind: c_uint,
    id: c_int,
}

impl Location {
    pub(crate) fn of(device: CUdevice) -> Location {
        Location { kind: ON_DEVICE, id: device }
    }
}

#[repr(C)]
struct Properties {
    kind: c_uint,
    handle_types: c_uint,
    location: Location,
    win32_meta_data: *mut c_void,
    compression: u8,
    rdma: u8,
    usage: c_ushort,
    reserved: [u8; 4],
}

#[repr(C)]
struct Access {
    location: Location,
    flags: c_uint,
}

const _: () = assert!(size_of::<Properties>() == size_of::<sys::CUmemAllocationProp>());
const _: () = assert!(size_of::<Access>() == size_of::<sys::CUmemAccessDesc>());

const PINNED: c_uint = 1; // CU_MEM_ALLOCATION_TYPE_PINNED
const ON_DEVICE: c_uint = 1; // CU_MEM_LOCATION_TYPE_DEVICE
pub(crate) const READ_WRITE: c_uint = 3; // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
pub(crate) const DESCRIPTORS: c_uint = 1; // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, as a bit
const DESCRIPTOR: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A reference to memory, whether it is mapped or not.
struct Handle(CUmemGenericAllocationHandle);

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: this value owns the reference. What is mapped stays.
        let _ = unsafe { sys::cuMemRelease(self.0) };
    }
}

/// What this process has mapped, and who may reach it. A context that is given access to another reaches its plain memory, but of what is
/// mapped each range has to be told.
struct Mappings {
    ranges: Vec<Range>,
    /// Devices, and those that reach their memory.
    admitted: Vec<(CUdevice, CUdevice)>,
}

#[derive(Clone, Copy)]
struct Range {
    device: CUdevice,
    address: u64,
    capacity: usize,
}

static MAPPINGS: Mutex<Mappings> = Mutex::new(Mappings { ranges: Vec::new(), admitted: Vec::new() });

impl Range {
    fn allow(self, device: CUdevice) -> Result<()> {
        let access = Access { location: Location::of(device), flags: READ_WRITE };
        // SAFETY: the range is mapped; the struct has the layout of the driver's.
        let result = unsafe { sys::cuMemSetAccess(self.address, self.capacity, (&raw const access).cast(), 1) };
        check("cuMemSetAccess", result)
    }

    /// # Safety
    /// Nothing uses the memory through this mapping any more.
    unsafe fn unmap(self) -> Result<()> {
        // SAFETY: the caller's promise; the range is one whole mapping.
        check("cuMemUnmap", unsafe { sys::cuMemUnmap(self.address, self.capacity) })?;
        // SAFETY: nothing is mapped there any more.
        check("cuMemAddressFree", unsafe { sys::cuMemAddressFree(self.address, self.capacity) })
    }
}

/// Lets `peer` reach what is mapped and will be mapped for `device`. Idempotent.
pub(crate) fn admit(device: &Device, peer: &Device) -> Result<()> {
    let pair = (device.handle(), peer.handle());
    let mut mappings = lock(&MAPPINGS);
    if mappings.admitted.contains(&pair) {
        return Ok(());
    }
    mappings.ranges.iter().filter(|range| range.device == pair.0).try_for_each(|range| range.allow(pair.1))?;
    mappings.admitted.push(pair);
    Ok(())
}

fn properties(device: &Device) -> Properties {
    Properties {
        kind: PINNED,
        handle_types: DESCRIPTORS,
        location: Location::of(device.handle()),
        win32_meta_data: std::ptr::null_mut(),
        compression: 0,
        rdma: 0,
        usage: 0,
        reserved: [0; 4],
    }
}

/// What `bytes` take: whole pages of the device, 2 MiB each on all that there are.
pub(crate) fn capacity(device: &Device, bytes: usize) -> Result<usize> {
    if !device.shares_by_descriptor() {
        let why = "the driver does not share memory between processes by file descriptors".to_owned();
        return Err(unavailable(Unavailable::NotSupported(why)));
    }
    let mut page = 0;
    let minimum = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    let properties = properties(device);
    // SAFETY: the struct has the layout of the driver's; the output outlives the call.
    let result = unsafe { sys::cuMemGetAllocationGranularity(&raw mut page, (&raw const properties).cast(), minimum) };
    check("cuMemGetAllocationGranularity", result)?;
    let too_large = ApiMisuse::TooLarge { count: bytes, element_bytes: 1 };
    Ok(bytes.checked_next_multiple_of(page.max(1)).ok_or(too_large)?)
}

/// Allocates and maps `capacity` bytes, of whole pages.
pub(crate) fn allocate(device: &Device, capacity: usize) -> Result<u64> {
    let mut handle = 0;
    let properties = properties(device);
    // SAFETY: the struct has the layout of the driver's; the output outlives the call.
    let result = unsafe { sys::cuMemCreate(&raw mut handle, capacity, (&raw const properties).cast(), 0) };
    check("cuMemCreate", result)?;
    map(device, &Handle(handle), capacity)
}

/// Maps `capacity` bytes, of whole pages, that another process has exported.
pub(crate) fn import(device: &Device, descriptor: &OwnedFd, capacity: usize) -> Result<u64> {
    let mut handle = 0;
    let number = descriptor.as_raw_fd() as usize as *mut c_void;
    // SAFETY: the driver takes the descriptor's number in place of a pointer, and checks what it stands for; the output outlives
    // the call.
    let result = unsafe { sys::cuMemImportFromShareableHandle(&raw mut handle, number, DESCRIPTOR) };
    check("cuMemImportFromShareableHandle", result)?;
    map(device, &Handle(handle), capacity)
}

/// A descriptor for the memory that is mapped at `address`.
pub(crate) fn export(address: u64) -> Result<OwnedFd> {
    let mut handle = 0;
    // SAFETY: the address is of a mapping of this module's; the output outlives the call.
    let result = unsafe { sys::cuMemRetainAllocationHandle(&raw mut handle, address as *mut c_void) };
    check("cuMemRetainAllocationHandle", result)?;
    let handle = Handle(handle);
    let mut descriptor: c_int = -1;
    // SAFETY: writes one descriptor, which outlives the call.
    let result = unsafe { sys::cuMemExportToShareableHandle((&raw mut descriptor).cast(), handle.0, DESCRIPTOR, 0) };
    check("cuMemExportToShareableHandle", result)?;
    // SAFETY: the driver has just opened it for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Undoes a mapping. The memory goes back to the device with the last one.
///
/// # Safety
/// Nothing uses the memory through this mapping any more.
pub(crate) unsafe fn release(address: u64) -> Result<()> {
    // Held until it is unmapped, so that nobody is admitted to it meanwhile.
    let mut mappings = lock(&MAPPINGS);
    let Some(at) = mappings.ranges.iter().position(|range| range.address == address) else { return Ok(()) };
    // SAFETY: the caller's promise.
    unsafe { mappings.ranges.swap_remove(at).unmap() }
}

fn map(device: &Device, handle: &Handle, capacity: usize) -> Result<u64> {
    let mut address = 0;
    // SAFETY: writes one address, which outlives the call.
    let result = unsafe { sys::cuMemAddressReserve(&raw mut address, capacity, 0, 0, 0) };
    check("cuMemAddressReserve", result)?;
    // SAFETY: the range was just reserved and holds nothing.
    let mapped = check("cuMemMap", unsafe { sys::cuMemMap(address, capacity, 0, handle.0, 0) });
    if let Err(error) = mapped {
        // SAFETY: as above.
        let _ = unsafe { sys::cuMemAddressFree(address, capacity) };
        return Err(error);
    }
    let range = Range { device: device.handle(), address, capacity };
    let mut mappings = lock(&MAPPINGS);
    let peers = mappings.admitted.iter().filter(|pair| pair.0 == range.device).map(|pair| pair.1);
    if let Err(error) = std::iter::once(range.device).chain(peers).try_for_each(|device| range.allow(device)) {
        // SAFETY: nobody knows the address yet.
        let _ = unsafe { range.unmap() };
        return Err(error);
    }
    mappings.ranges.push(range);
    Ok(address)
}
