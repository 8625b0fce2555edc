//! The C interface of the HIP runtime on top of another backend: see README.md. Signatures, numbers and offsets are those of AMD's
//! header, written down here once more, so that a mistake in the backend's own list does not meet itself.
#![allow(non_snake_case, missing_docs, unreachable_pub, clippy::missing_safety_doc)]

mod graph;
mod ipc;
mod memory;
mod object;
#[cfg(not(feature = "old"))]
mod user;
mod work;

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use signal_comm::Backend;

/// What it runs on.
#[cfg(not(feature = "cuda"))]
pub(crate) type Engine = signal_comm::host::Host;
#[cfg(feature = "cuda")]
pub(crate) type Engine = signal_comm::cuda::Cuda;

type Device = <Engine as Backend>::Device;

fn open() -> signal_comm::Result<Engine> {
    #[cfg(not(feature = "cuda"))]
    return signal_comm::host::open();
    #[cfg(feature = "cuda")]
    signal_comm::cuda::open()
}

pub(crate) type Code = c_uint;
pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_VALUE: Code = 1;
const NO_DEVICE: Code = 100;
const INVALID_DEVICE: Code = 101;
pub(crate) const INVALID_IMAGE: Code = 200;
pub(crate) const INVALID_HANDLE: Code = 400;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_READY: Code = 600;
const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
pub(crate) const UNKNOWN: Code = 999;

/// Threads of the engine for a block of so many: on CPU threads a wave is one.
pub(crate) fn engine_threads(threads: u32) -> u32 {
    if cfg!(feature = "cuda") { threads } else { threads.div_ceil(WAVE) }
}
const WAVE: u32 = 32;

/// The devices, once `hipInit` was called.
static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
/// Pairs for which access was enabled.
static ENABLED: Mutex<Vec<(c_int, c_int)>> = Mutex::new(Vec::new());

thread_local! {
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The number and the device that is current on this thread.
pub(crate) fn current() -> Result<&'static Device, Code> {
    device(CURRENT.get())
}

fn device(number: c_int) -> Result<&'static Device, Code> {
    let devices = DEVICES.get().ok_or(NO_DEVICE)?;
    usize::try_from(number).ok().and_then(|number| devices.get(number)).ok_or(INVALID_DEVICE)
}

/// What a function returns.
pub(crate) fn code(result: Result<(), Code>) -> Code {
    result.err().unwrap_or(SUCCESS)
}

/// An error of the host backend, which a caller who keeps to the interface does not see.
pub(crate) fn failed<T>(result: signal_comm::Result<T>) -> Result<T, Code> {
    result.map_err(|error| {
        eprintln!("hip-abi: {error}");
        UNKNOWN
    })
}

/// Writes an output.
pub(crate) unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the interface passes memory for it.
    unsafe { to.write(value) };
    Ok(())
}

unsafe fn put_text(to: *mut c_char, len: c_int, text: &str) -> Result<(), Code> {
    if len <= 0 || to.is_null() {
        return Err(INVALID_VALUE);
    }
    let fitting = text.len().min(len as usize - 1);
    for (i, byte) in text.bytes().take(fitting).chain([0]).enumerate() {
        // SAFETY: the caller passes `len` bytes.
        unsafe { to.add(i).write(byte as c_char) };
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipInit(flags: c_uint) -> Code {
    if flags != 0 {
        return INVALID_VALUE;
    }
    if DEVICES.get().is_none() {
        match failed(open().and_then(|engine| engine.devices())) {
            Ok(devices) => drop(DEVICES.set(devices)),
            Err(code) => return code,
        }
    }
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipRuntimeGetVersion(version: *mut c_int) -> Code {
    let number = if cfg!(feature = "old") { 50_221_153 } else { 60_032_831 };
    // SAFETY: the caller's output.
    code(unsafe { put(version, number) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDeviceCount(count: *mut c_int) -> Code {
    let devices = DEVICES.get().map_or(0, Vec::len);
    // SAFETY: the caller's output.
    code(unsafe { put(count, devices as c_int) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_uint, number: c_int) -> Code {
    let found = match attribute {
        // All the blocks that fit are of one unit.
        63 => 1,
        87 => WAVE as c_int,
        // In kHz: both engines' clocks count nanoseconds.
        10_017 if !cfg!(feature = "old") => 1_000_000,
        _ => return INVALID_VALUE,
    };
    // SAFETY: the caller's output.
    code(device(number).and_then(|_| unsafe { put(value, found) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetName(name: *mut c_char, len: c_int, number: c_int) -> Code {
    // SAFETY: the caller passes `len` bytes.
    code(device(number).and_then(|device| unsafe { put_text(name, len, &Engine::describe(device).name) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetPCIBusId(id: *mut c_char, len: c_int, number: c_int) -> Code {
    // SAFETY: as above.
    code(device(number).and_then(|_| unsafe { put_text(id, len, &format!("0000:{:02x}:00.0", number + 1)) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetUuid(uuid: *mut [c_char; 16], number: c_int) -> Code {
    let text = format!("{:016x}", 0x00c0_ffee_0000 + i64::from(number));
    let bytes: [c_char; 16] = std::array::from_fn(|i| text.as_bytes().get(i).map_or(0, |byte| *byte as c_char));
    // SAFETY: the caller's output.
    code(device(number).and_then(|_| unsafe { put(uuid, bytes) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceTotalMem(bytes: *mut usize, number: c_int) -> Code {
    // SAFETY: the caller's output.
    code(device(number).and_then(|device| unsafe { put(bytes, Engine::describe(device).memory_bytes as usize) }))
}

/// Size of the struct, and where the architecture's name stands, before ROCm 6.0.
const OLD_PROPERTIES: (usize, usize) = (792, 396);
/// The same since.
#[cfg(not(feature = "old"))]
const NEW_PROPERTIES: (usize, usize) = (1472, 1160);

/// The architecture that a device says it has: `SIGNAL_HIP_ABI_ARCHS` lists them, the last for all that follow.
fn arch_of(number: c_int) -> String {
    let list = std::env::var("SIGNAL_HIP_ABI_ARCHS").unwrap_or_default();
    let archs: Vec<&str> = list.split(',').filter(|arch| !arch.is_empty()).collect();
    let arch = archs.get(number.cast_unsigned() as usize).or(archs.last()).copied().unwrap_or("gfx942");
    format!("{arch}:sramecc+:xnack-")
}

unsafe fn properties(to: *mut u8, number: c_int, (size, arch_at): (usize, usize)) -> Code {
    let Ok(device) = device(number) else { return INVALID_DEVICE };
    // SAFETY: the caller passes a struct of this size.
    unsafe { to.write_bytes(0, size) };
    // SAFETY: the name stands first, in 256 bytes; the architecture's has as many.
    let put = unsafe {
        put_text(to.cast(), 256, &Engine::describe(device).name)
            .and_then(|()| put_text(to.add(arch_at).cast(), 256, &arch_of(number)))
    };
    code(put)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDeviceProperties(to: *mut c_void, number: c_int) -> Code {
    // SAFETY: the caller passes the struct.
    unsafe { properties(to.cast(), number, OLD_PROPERTIES) }
}

#[cfg(not(feature = "old"))]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevicePropertiesR0600(to: *mut c_void, number: c_int) -> Code {
    // SAFETY: as above.
    unsafe { properties(to.cast(), number, NEW_PROPERTIES) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipSetDevice(number: c_int) -> Code {
    code(device(number).map(|_| CURRENT.set(number)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevice(number: *mut c_int) -> Code {
    // SAFETY: the caller's output.
    code(unsafe { put(number, CURRENT.get()) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceCanAccessPeer(can: *mut c_int, from: c_int, to: c_int) -> Code {
    // One pair of devices may be without, in one direction.
    let refused = std::env::var("SIGNAL_HIP_ABI_NO_PEER").is_ok_and(|pair| pair == format!("{from}>{to}"));
    // SAFETY: the caller's output.
    code(device(from).and(device(to)).and_then(|_| unsafe { put(can, c_int::from(from != to && !refused)) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceEnablePeerAccess(to: c_int, flags: c_uint) -> Code {
    let pair = (CURRENT.get(), to);
    let (Ok(from), Ok(peer)) = (current(), device(to)) else { return INVALID_VALUE };
    if flags != 0 || pair.0 == to {
        return INVALID_VALUE;
    }
    let mut enabled = lock(&ENABLED);
    if enabled.contains(&pair) {
        return PEER_ACCESS_ALREADY_ENABLED;
    }
    if let Err(code) = failed(Engine::enable_peer(from, peer)) {
        return code;
    }
    enabled.push(pair);
    SUCCESS
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipExtGetLinkTypeAndHopCount(from: c_int, to: c_int, kind: *mut u32, hops: *mut u32) -> Code {
    // Infinity Fabric, one hop.
    // SAFETY: the caller's outputs.
    code(device(from).and(device(to)).and_then(|_| unsafe { put(kind, 4).and_then(|()| put(hops, 1)) }))
}

#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(code: Code) -> *const c_char {
    let name = match code {
        SUCCESS => c"hipSuccess",
        INVALID_VALUE => c"hipErrorInvalidValue",
        NO_DEVICE => c"hipErrorNoDevice",
        INVALID_DEVICE => c"hipErrorInvalidDevice",
        INVALID_IMAGE => c"hipErrorInvalidImage",
        INVALID_HANDLE => c"hipErrorInvalidHandle",
        NOT_FOUND => c"hipErrorNotFound",
        NOT_READY => c"hipErrorNotReady",
        PEER_ACCESS_ALREADY_ENABLED => c"hipErrorPeerAccessAlreadyEnabled",
        _ => c"hipErrorUnknown",
    };
    name.as_ptr()
}
