//! Memory that several processes map: an anonymous file, known by its descriptor alone. It has no name that a crash could
//! leave behind, and lives until the last process that maps it or holds its descriptor is gone. For backends: the host's own memory, and on
//! GPUs that which the driver pins.

use std::os::fd::OwnedFd;
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

use crate::error::{ApiMisuse, Error, Result};

/// A mapped file, and its descriptor.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u8>,
    bytes: usize,
    descriptor: OwnedFd,
}

/// No process can change the size any more: a page that is gone would kill whoever touches it.
const SIZE_IS_FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::SEAL);

impl Mapping {
    /// Zeroed memory.
    ///
    /// # Errors
    /// Those of the system.
    pub fn new(bytes: usize) -> Result<Self> {
        let descriptor =
            memfd_create("signal", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).map_err(failed("memfd_create"))?;
        ftruncate(&descriptor, bytes as u64).map_err(failed("ftruncate"))?;
        fcntl_add_seals(&descriptor, SIZE_IS_FIXED).map_err(failed("fcntl(F_ADD_SEALS)"))?;
        Self::map(descriptor, bytes)
    }

    /// Maps what another process made.
    ///
    /// # Errors
    /// [`ApiMisuse::BufferTooSmall`], [`ApiMisuse::NotShared`] for what is not such memory; those of the system.
    pub fn open(descriptor: OwnedFd, bytes: usize) -> Result<Self> {
        let found = fstat(&descriptor).map_err(failed("fstat"))?.st_size;
        let found = usize::try_from(found).unwrap_or(0);
        // Only files of memory have seals.
        let seals = fcntl_get_seals(&descriptor).map_err(failed("fcntl(F_GET_SEALS)"))?;
        if found < bytes || bytes == 0 {
            return Err(ApiMisuse::BufferTooSmall { found, needed: bytes.max(1) }.into());
        }
        if !seals.contains(SIZE_IS_FIXED) {
            return Err(ApiMisuse::NotShared.into());
        }
        Self::map(descriptor, bytes)
    }

    fn map(descriptor: OwnedFd, bytes: usize) -> Result<Self> {
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: at an address of the system's choice, so that nothing that is mapped is replaced. The file has that many bytes
        // and cannot shrink.
        let start = unsafe { mmap(std::ptr::null_mut(), bytes, access, MapFlags::SHARED, &descriptor, 0) };
        let start = NonNull::new(start.map_err(failed("mmap"))?.cast()).ok_or_else(|| failed("mmap")(Errno::NOMEM))?;
        Ok(Mapping { start, bytes, descriptor })
    }

    /// First byte, of whole pages. The memory is there until this value is dropped.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// A descriptor for another process.
    ///
    /// # Errors
    /// Those of the system.
    pub fn export(&self) -> Result<OwnedFd> {
        self.descriptor.try_clone().map_err(|error| Error::Driver {
            code: error.raw_os_error().unwrap_or(0),
            name: error.to_string(),
            call: "fcntl(F_DUPFD_CLOEXEC)",
        })
    }
}

// SAFETY: the range is this value's, whichever thread has it; what is done through its address is ordered by whoever does it.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this value mapped the range, and whoever drops it knows that nothing uses it any more.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

fn failed(call: &'static str) -> impl Fn(Errno) -> Error {
    move |errno| Error::Driver { code: errno.raw_os_error(), name: errno.to_string(), call }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_such_memory_is_refused() {
        let file = std::fs::File::open("/dev/zero").unwrap();
        assert!(matches!(Mapping::open(file.into(), 4096), Err(Error::Driver { call: "fcntl(F_GET_SEALS)", .. })));
        let small = Mapping::new(4096).unwrap().export().unwrap();
        let error = Mapping::open(small, 4097).map(drop).unwrap_err();
        assert_eq!(error, ApiMisuse::BufferTooSmall { found: 4096, needed: 4097 }.into());
        let open = memfd_create("test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&open, 8192).unwrap();
        assert_eq!(Mapping::open(open, 8192).map(drop).unwrap_err(), ApiMisuse::NotShared.into());
        assert!(Mapping::open(Mapping::new(1).unwrap().export().unwrap(), 0).is_err());
    }
}
