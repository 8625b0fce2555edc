//! Memory and copies.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::OwnedFd;
use std::sync::Mutex;

use signal_comm::{Backend, MemoryKind};

use crate::ipc;
use crate::object::look;
use crate::work::{Stream, wait_for_all};
use crate::{Code, Engine, INVALID_VALUE, UNKNOWN, code, current, failed, lock, put};

type Buffer = <Engine as Backend>::Buffer;

struct Allocation {
    buffer: Buffer,
    /// By which other processes open it; kept open for them.
    shared: Option<OwnedFd>,
    /// How it has to be freed.
    how: How,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    Free,
    HostFree,
    Unregister,
    Close,
}

/// All of it, by where it begins.
static MEMORY: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());

fn allocate(to: *mut *mut c_void, bytes: usize, kind: MemoryKind, how: How) -> Result<(), Code> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let buffer = failed(Engine::allocate(current()?, bytes, kind))?;
    add(to, buffer, how)
}

fn add(to: *mut *mut c_void, buffer: Buffer, how: How) -> Result<(), Code> {
    let address = Engine::address(&buffer);
    // SAFETY: the caller of the interface passes memory for it.
    unsafe { put(to, address as *mut c_void) }?;
    lock(&MEMORY).insert(address, Allocation { buffer, shared: None, how });
    Ok(())
}

fn free(address: *mut c_void, how: How) -> Result<(), Code> {
    if address.is_null() {
        return Ok(());
    }
    // As the real one does.
    wait_for_all()?;
    let mut memory = lock(&MEMORY);
    match memory.get(&(address as u64)) {
        Some(found) if found.how == how => {
            memory.remove(&(address as u64));
            Ok(())
        }
        _ => Err(INVALID_VALUE),
    }
}

/// The buffer that `bytes` at an address lie in, and where.
fn find(address: *mut c_void, bytes: usize) -> Result<(Buffer, usize), Code> {
    let address = address as u64;
    let memory = lock(&MEMORY);
    let (start, found) = memory.range(..=address).next_back().ok_or(INVALID_VALUE)?;
    let offset = (address - start) as usize;
    let end = offset.checked_add(bytes).ok_or(INVALID_VALUE)?;
    if end > Engine::bytes(&found.buffer) { Err(INVALID_VALUE) } else { Ok((found.buffer.clone(), offset)) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMalloc(to: *mut *mut c_void, bytes: usize) -> Code {
    code(allocate(to, bytes, MemoryKind::Device, How::Free))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipExtMallocWithFlags(to: *mut *mut c_void, bytes: usize, flags: c_uint) -> Code {
    const FINE_GRAINED: c_uint = 1;
    const UNCACHED: c_uint = 3;
    match flags {
        UNCACHED if cfg!(feature = "old") => INVALID_VALUE,
        // Such that other processes can open it.
        FINE_GRAINED | UNCACHED => code(allocate(to, bytes, MemoryKind::Shared, How::Free)),
        _ => INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipFree(address: *mut c_void) -> Code {
    code(free(address, How::Free))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostMalloc(to: *mut *mut c_void, bytes: usize, flags: c_uint) -> Code {
    const PORTABLE: c_uint = 1;
    const MAPPED: c_uint = 2;
    const COHERENT: c_uint = 0x4000_0000;
    // Kernels and the host look at it while both run.
    if flags != PORTABLE | MAPPED | COHERENT {
        return INVALID_VALUE;
    }
    code(allocate(to, bytes, MemoryKind::HostMapped, How::HostFree))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostFree(address: *mut c_void) -> Code {
    code(free(address, How::HostFree))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostRegister(host: *mut c_void, bytes: usize, flags: c_uint) -> Code {
    const PORTABLE: c_uint = 1;
    const MAPPED: c_uint = 2;
    if flags != PORTABLE | MAPPED || host.is_null() || bytes == 0 || find(host, 1).is_ok() {
        return INVALID_VALUE;
    }
    code(current().and_then(|device| {
        pin::register(host, bytes)?;
        // SAFETY: the caller keeps the memory until it is unregistered, and the engine can address it now.
        let buffer = unsafe { Engine::borrow(device, host as u64, bytes) };
        lock(&MEMORY).insert(host as u64, Allocation { buffer, shared: None, how: How::Unregister });
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostUnregister(host: *mut c_void) -> Code {
    code(free(host, How::Unregister).and_then(|()| pin::unregister(host)))
}

/// What the engine's driver needs to address memory of the process.
#[cfg(not(feature = "cuda"))]
mod pin {
    use super::{Code, c_void};

    pub(super) fn register(_: *mut c_void, _: usize) -> Result<(), Code> {
        Ok(())
    }

    pub(super) fn unregister(_: *mut c_void) -> Result<(), Code> {
        Ok(())
    }
}

#[cfg(feature = "cuda")]
mod pin {
    use cudarc::driver::sys;

    use super::{Code, c_void};
    use crate::{CURRENT, UNKNOWN};

    pub(super) fn register(host: *mut c_void, bytes: usize) -> Result<(), Code> {
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: the caller of the interface passes memory of its own; a context is current.
        with_context(|| unsafe { sys::cuMemHostRegister_v2(host, bytes, flags) })
    }

    pub(super) fn unregister(host: *mut c_void) -> Result<(), Code> {
        // SAFETY: it was registered, and nothing uses it any more.
        with_context(|| unsafe { sys::cuMemHostUnregister(host) })
    }

    /// With the current device's context, which stands for all: what is registered is so for every device, as long as that context lives. So it is
    /// kept for the rest of the program, as the engine keeps those that it uses.
    fn with_context(call: impl FnOnce() -> sys::CUresult) -> Result<(), Code> {
        let mut context = std::ptr::null_mut();
        // SAFETY: the engine has opened the driver, whose devices are numbered as this library's; the output outlives the calls.
        let results = unsafe {
            let retained = sys::cuDevicePrimaryCtxRetain(&raw mut context, CURRENT.get());
            let pushed = sys::cuCtxPushCurrent_v2(context);
            [retained, pushed, call(), sys::cuCtxPopCurrent_v2(&raw mut context)]
        };
        if results.iter().all(|result| *result == sys::CUresult::CUDA_SUCCESS) { Ok(()) } else { Err(UNKNOWN) }
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostGetDevicePointer(to: *mut *mut c_void, host: *mut c_void, flags: c_uint) -> Code {
    if flags != 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's output.
    code(find(host, 1).and_then(|_| unsafe { put(to, host) }))
}

/// What travels: where it is, and whose.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct IpcHandle {
    magic: u64,
    process: u64,
    address: u64,
    bytes: u64,
    rest: [u64; 4],
}

const _: () = assert!(size_of::<IpcHandle>() == 64);
const MAGIC: u64 = 0x5349_474e_414c_4950;

/// The descriptor of memory that was exported.
fn shared(address: u64) -> Option<OwnedFd> {
    lock(&MEMORY).get(&address).and_then(|found| found.shared.as_ref()?.try_clone().ok())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipIpcGetMemHandle(to: *mut IpcHandle, address: *mut c_void) -> Code {
    if ipc::serve(shared).is_err() {
        return UNKNOWN;
    }
    let mut memory = lock(&MEMORY);
    let Some(found) = memory.get_mut(&(address as u64)).filter(|found| found.how == How::Free) else {
        return INVALID_VALUE;
    };
    if found.shared.is_none() {
        match failed(Engine::export(&found.buffer)) {
            Ok(descriptor) => found.shared = Some(descriptor),
            Err(code) => return code,
        }
    }
    let (process, bytes) = (std::process::id().into(), Engine::bytes(&found.buffer) as u64);
    let handle = IpcHandle { magic: MAGIC, process, address: address as u64, bytes, rest: [0; 4] };
    // SAFETY: the caller's output.
    code(unsafe { put(to, handle) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipIpcOpenMemHandle(to: *mut *mut c_void, handle: IpcHandle, flags: c_uint) -> Code {
    let lazy = c_uint::from(!cfg!(feature = "old"));
    // Its own process's memory a process cannot open.
    let process = u32::try_from(handle.process).unwrap_or(0);
    if flags != lazy || handle.magic != MAGIC || process == std::process::id() {
        return INVALID_VALUE;
    }
    let Ok(Some(descriptor)) = ipc::fetch(process, handle.address) else { return INVALID_VALUE };
    code(current().and_then(|device| {
        let buffer = failed(Engine::import(device, descriptor, handle.bytes as usize, MemoryKind::Shared))?;
        add(to, buffer, How::Close)
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipIpcCloseMemHandle(address: *mut c_void) -> Code {
    code(free(address, How::Close))
}

unsafe fn copy(to: *mut c_void, from: *mut c_void, bytes: usize, stream: *mut c_void) -> Result<(), Code> {
    // SAFETY: the caller of the interface passes a stream of this library's.
    let stream = unsafe { look::<Stream>(stream) }?;
    let (source, target) = (find(from, bytes)?, find(to, bytes)?);
    failed(Engine::copy(&stream.stream, (&source.0, source.1), (&target.0, target.1), bytes))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyHtoDAsync(
    to: *mut c_void,
    from: *mut c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Code {
    // SAFETY: passed on to the caller.
    code(unsafe { copy(to, from, bytes, stream) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyDtoHAsync(
    to: *mut c_void,
    from: *mut c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Code {
    // SAFETY: passed on to the caller.
    code(unsafe { copy(to, from, bytes, stream) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyDtoDAsync(
    to: *mut c_void,
    from: *mut c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Code {
    // SAFETY: passed on to the caller.
    code(unsafe { copy(to, from, bytes, stream) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemsetD32Async(to: *mut c_void, value: c_int, count: usize, stream: *mut c_void) -> Code {
    // SAFETY: the caller of the interface passes a stream of this library's.
    let stream = unsafe { look::<Stream>(stream) };
    code(stream.and_then(|stream| {
        let (buffer, offset) = find(to, count * 4)?;
        failed(Engine::fill(&stream.stream, &buffer, offset, count * 4, value.cast_unsigned()))
    }))
}
