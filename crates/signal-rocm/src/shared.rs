//! Memory that several processes map, by `hipIpcGetMemHandle`. On Linux 6 and newer with ROCm 6 its handle stands for a dma-buf, of which
//! each process that opens it holds a reference, so that a process that ends pulls the memory from under nobody. In the old mode
//! (`HSA_ENABLE_IPC_MODE_LEGACY=1`) nothing of the sort is promised.
//!
//! The handle travels as a sealed file in memory: whoever gets the descriptor can read it and nobody can change it.

use std::ffi::{c_char, c_void};
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, SealFlags};
use signal_core::error::{ApiMisuse, Error, Result};

use crate::device::Device;
use crate::sys::{self, hipIpcMemHandle_t};

/// What such a file begins with; then come the capacity and the handle.
const MAGIC: [u8; 8] = *b"sighip01";
const FILE_BYTES: usize = 8 + 8 + size_of::<hipIpcMemHandle_t>();

/// A descriptor for memory of this process.
pub(crate) fn export(device: &Device, address: u64, capacity: usize) -> Result<OwnedFd> {
    check_mode()?;
    let driver = device.driver();
    let mut handle = hipIpcMemHandle_t { reserved: [0; 64] };
    // SAFETY: the address is that of an allocation of this device; the output outlives the call.
    let result = unsafe { (driver.hipIpcGetMemHandle)(&raw mut handle, address as *mut c_void) };
    driver.check("hipIpcGetMemHandle", result)?;
    let mut content = Vec::with_capacity(FILE_BYTES);
    content.extend(MAGIC);
    content.extend((capacity as u64).to_le_bytes());
    content.extend(handle.reserved.map(|byte| byte as u8));
    write(&content).map_err(|error| Error::Driver {
        code: error.raw_os_error().unwrap_or(0),
        name: error.to_string(),
        call: "memfd_create",
    })
}

fn write(content: &[u8]) -> std::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("signal-hip", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(file);
    file.write_all(content)?;
    rustix::fs::fcntl_add_seals(&file, SealFlags::SEAL | SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE)?;
    Ok(file.into())
}

/// Address and capacity of memory that another process has exported, of at least `bytes`.
pub(crate) fn import(device: &Device, descriptor: OwnedFd, bytes: usize) -> Result<(u64, usize)> {
    check_mode()?;
    let not_shared = || Error::from(ApiMisuse::NotShared);
    let file = File::from(descriptor);
    if file.metadata().map_err(|_| not_shared())?.len() != FILE_BYTES as u64 {
        return Err(not_shared());
    }
    let mut content = [0; FILE_BYTES];
    file.read_exact_at(&mut content, 0).map_err(|_| not_shared())?;
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| content[at + i]));
    let capacity = usize::try_from(number(8)).unwrap_or(0);
    if content[..8] != MAGIC || capacity < bytes {
        return Err(not_shared());
    }
    let handle = hipIpcMemHandle_t { reserved: std::array::from_fn(|i| content[16 + i] as c_char) };
    let driver = device.driver();
    let mut address = std::ptr::null_mut();
    let mut open = |flags| {
        // SAFETY: the runtime checks what the handle stands for; the output outlives the call.
        unsafe { (driver.hipIpcOpenMemHandle)(&raw mut address, handle, flags) }
    };
    match open(sys::hipIpcMemLazyEnablePeerAccess) {
        // The flag's value before ROCm 6.0.
        sys::hipErrorInvalidValue => driver.check("hipIpcOpenMemHandle", open(0))?,
        result => driver.check("hipIpcOpenMemHandle", result)?,
    }
    Ok((address as u64, capacity))
}

/// In the old mode memory of a process that has died is undefined, which this library promises is not so.
fn check_mode() -> Result<()> {
    let name = "HSA_ENABLE_IPC_MODE_LEGACY";
    match std::env::var(name) {
        Ok(value) if value != "0" && !value.is_empty() => {
            let why = "memory of a rank that dies has to stay until its peers have let go of it; unset it".to_owned();
            Err(ApiMisuse::Setting { name, value, why }.into())
        }
        _ => Ok(()),
    }
}
