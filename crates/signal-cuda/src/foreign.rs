//! What the driver knows of memory that users have allocated by themselves, and who can be let at it.

use std::ffi::{c_int, c_uint, c_void};

use cudarc::driver::sys::{self, CUpointer_attribute as Attribute};
use signal_core::Readers;
use signal_core::backend::Found;
use signal_core::error::Result;

use crate::Cuda;
use crate::device::Device;
use crate::driver::check;
use crate::shared::{DESCRIPTORS, Location, READ_WRITE};

/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u32 = 2;

/// An allocation, as the driver describes the address that lies in it.
struct Allocation {
    start: u64,
    bytes: usize,
    /// 0 for what is none.
    kind: u32,
    device: c_int,
    managed: bool,
    /// Null unless it is a pool's.
    pool: sys::CUmemoryPool,
    /// Of `cuMemAlloc` or the like, which a context that has access reaches.
    plain: bool,
    handle_types: u64,
}

impl Allocation {
    fn of(address: u64) -> Result<Allocation> {
        let mut attributes = [
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            Attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            Attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            Attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            Attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED,
            Attribute::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE,
            Attribute::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE,
            Attribute::CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES,
        ];
        // Of at most 8 bytes each, the low ones first; what is narrower leaves the rest 0.
        let mut values = [0u64; 8];
        let mut places = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
        let count = attributes.len() as c_uint;
        // SAFETY: as many attributes as places, each of 8 bytes that outlive the call. Of an address that is none of the driver's it says so.
        let result =
            unsafe { sys::cuPointerGetAttributes(count, attributes.as_mut_ptr(), places.as_mut_ptr(), address) };
        check("cuPointerGetAttributes", result)?;
        let [start, bytes, kind, device, managed, pool, plain, handle_types] = values;
        Ok(Allocation {
            start,
            bytes: bytes as usize,
            kind: kind as u32,
            device: device as c_int,
            managed: managed as u8 != 0,
            pool: pool as usize as sys::CUmemoryPool,
            plain: plain as u8 != 0,
            handle_types,
        })
    }
}

/// See [`Backend::look_up`](signal_core::Backend::look_up).
pub(crate) fn look_up(device: &Device, address: u64, bytes: usize, readers: Readers<'_, Cuda>) -> Result<Found> {
    let _current = device.enter()?;
    let allocation = Allocation::of(address)?;
    let refused = match &allocation {
        Allocation { kind: 0, .. } => Some("the driver does not know of memory there"),
        Allocation { managed: true, .. } => Some("managed memory moves between devices"),
        Allocation { kind, .. } if *kind != DEVICE => Some("it is not memory of a device"),
        Allocation { device: of, .. } if *of != device.handle() => Some("it is memory of another device"),
        Allocation { start, bytes: total, .. } if address - start + bytes as u64 > *total as u64 => {
            Some("it goes beyond the allocation that it begins in")
        }
        _ => None,
    };
    if let Some(why) = refused {
        return Ok(Err(why.to_owned()));
    }
    let refused = match readers {
        Readers::Devices(peers) => allocation.beyond(address, device, peers)?,
        Readers::Processes if allocation.plain => Some(
            "memory of cuMemAlloc can be handed on by cudaIpc alone, and must not be freed then before every peer has closed it".to_owned(),
        ),
        Readers::Processes if !allocation.pool.is_null() => Some("memory of a pool cannot be handed on".to_owned()),
        Readers::Processes if allocation.handle_types & u64::from(DESCRIPTORS) == 0 => {
            Some("it was not created for file descriptors (CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)".to_owned())
        }
        Readers::Processes => None,
    };
    Ok(refused.map_or(Ok((allocation.start, allocation.bytes)), Err))
}

impl Allocation {
    /// Which of the peers does not reach it, and what would help.
    fn beyond(&self, address: u64, device: &Device, peers: &[Device]) -> Result<Option<String>> {
        for peer in peers.iter().filter(|peer| *peer != device) {
            if !self.is_reached_by(address, peer)? {
                let remedy = if self.pool.is_null() { "cuMemSetAccess" } else { "cuMemPoolSetAccess" };
                return Ok(Some(format!("{} has no access to it, which {remedy} gives", peer.info().label())));
            }
        }
        Ok(None)
    }

    /// Whether kernels on `peer`, whose context has access to that of the memory, reach it.
    fn is_reached_by(&self, address: u64, peer: &Device) -> Result<bool> {
        let location = Location::of(peer.handle());
        if !self.pool.is_null() {
            let mut flags = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_NONE;
            // SAFETY: the driver gave the pool; the struct has the layout of the driver's; the output outlives the call.
            let result =
                unsafe { sys::cuMemPoolGetAccess(&raw mut flags, self.pool, (&raw const location).cast_mut().cast()) };
            check("cuMemPoolGetAccess", result)?;
            return Ok(flags as c_uint == READ_WRITE);
        }
        if self.plain {
            return Ok(true);
        }
        let mut flags = 0;
        // SAFETY: as above; the address is of a mapping.
        let result = unsafe { sys::cuMemGetAccess(&raw mut flags, (&raw const location).cast(), address) };
        check("cuMemGetAccess", result)?;
        Ok(flags == u64::from(READ_WRITE))
    }
}
