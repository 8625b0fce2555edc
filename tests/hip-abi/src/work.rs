//! Streams, events, images and launches.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, Mutex, Weak};

use signal_comm::kernel::{
    AllReduceParams, BarrierParams, BarrierProbeParams, CheckParams, CountedParams, ExchangeParams, Kernel, NormParams,
    PeerProbeParams, TraceParams,
};
use signal_comm::{Backend, Launch};

use crate::graph::Capture;
use crate::object::{Object, give, look, take};
use crate::{
    Code, Engine, INVALID_IMAGE, INVALID_VALUE, NOT_FOUND, NOT_READY, code, current, engine_threads, failed, lock, put,
};

/// A stream.
pub(crate) struct Stream {
    pub(crate) stream: <Engine as Backend>::Stream,
    /// What it is capturing into.
    pub(crate) capture: Mutex<Option<Capture>>,
    /// Tells `STREAMS` that the stream is there.
    _alive: Arc<()>,
}

impl Object for Stream {
    const KIND: u64 = 1;
}

/// All streams, for what waits for the device.
static STREAMS: Mutex<Vec<(Weak<()>, <Engine as Backend>::Stream)>> = Mutex::new(Vec::new());

/// Waits for all work of all devices.
pub(crate) fn wait_for_all() -> Result<(), Code> {
    let streams: Vec<<Engine as Backend>::Stream> = {
        let mut streams = lock(&STREAMS);
        streams.retain(|(alive, stream)| alive.strong_count() > 0 || !Engine::is_idle(stream).unwrap_or(true));
        streams.iter().map(|(_, stream)| stream.clone()).collect()
    };
    streams
        .iter()
        .filter(|stream| !Engine::is_capturing(stream).unwrap_or(false))
        .try_for_each(|s| failed(Engine::synchronize(s)))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreateWithFlags(to: *mut *mut c_void, flags: c_uint) -> Code {
    // That it does not wait for the NULL stream.
    if flags != 1 {
        return INVALID_VALUE;
    }
    code(current().and_then(|device| {
        let stream = failed(Engine::create_stream(device))?;
        let alive = Arc::new(());
        lock(&STREAMS).push((Arc::downgrade(&alive), stream.clone()));
        // SAFETY: the caller's output.
        unsafe { put(to, give(Stream { stream, capture: Mutex::new(None), _alive: alive })) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamDestroy(stream: *mut c_void) -> Code {
    // SAFETY: the caller of the interface passes a stream of this library's, for the last time.
    code(unsafe { take::<Stream>(stream) }.map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamQuery(stream: *mut c_void) -> Code {
    // SAFETY: the caller of the interface passes a stream of this library's.
    let idle = unsafe { look::<Stream>(stream) }.and_then(|stream| failed(Engine::is_idle(&stream.stream)));
    code(idle.and_then(|idle| if idle { Ok(()) } else { Err(NOT_READY) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamSynchronize(stream: *mut c_void) -> Code {
    // SAFETY: as above.
    code(unsafe { look::<Stream>(stream) }.and_then(|stream| failed(Engine::synchronize(&stream.stream))))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) -> Code {
    if flags != 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller of the interface passes a stream and an event of this library's.
    let (stream, event) = unsafe { (look::<Stream>(stream), look::<Event>(event)) };
    code(stream.and_then(|stream| match &*lock(&event?.0) {
        Some(event) => failed(Engine::wait(&stream.stream, event)),
        None => Ok(()),
    }))
}

/// An event; nothing before it is recorded.
struct Event(Mutex<Option<<Engine as Backend>::Event>>);

impl Object for Event {
    const KIND: u64 = 2;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventCreateWithFlags(to: *mut *mut c_void, flags: c_uint) -> Code {
    if flags != 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's output.
    code(unsafe { put(to, give(Event(Mutex::new(None)))) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventDestroy(event: *mut c_void) -> Code {
    // SAFETY: the caller of the interface passes an event of this library's, for the last time.
    code(unsafe { take::<Event>(event) }.map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventRecord(event: *mut c_void, stream: *mut c_void) -> Code {
    // SAFETY: the caller of the interface passes a stream and an event of this library's.
    let (event, stream) = unsafe { (look::<Event>(event), look::<Stream>(stream)) };
    code(event.and_then(|event| {
        *lock(&event.0) = Some(failed(Engine::record(&stream?.stream))?);
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventQuery(event: *mut c_void) -> Code {
    // SAFETY: the caller of the interface passes an event of this library's.
    code(unsafe { look::<Event>(event) }.and_then(|event| match &*lock(&event.0) {
        Some(event) if !failed(Engine::is_complete(event))? => Err(NOT_READY),
        _ => Ok(()),
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventElapsedTime(to: *mut f32, start: *mut c_void, end: *mut c_void) -> Code {
    // SAFETY: the caller of the interface passes events of this library's.
    let (start, end) = unsafe { (look::<Event>(start), look::<Event>(end)) };
    code(start.and_then(|start| {
        let (start, end) = (lock(&start.0), lock(&end?.0));
        let (Some(start), Some(end)) = (&*start, &*end) else { return Err(INVALID_VALUE) };
        let time = failed(Engine::elapsed(start, end))?;
        // SAFETY: the caller's output.
        unsafe { put(to, (time.as_secs_f64() * 1e3) as f32) }
    }))
}

/// An image on a device.
struct Module(<Engine as Backend>::Module);

impl Object for Module {
    const KIND: u64 = 3;
}

/// A kernel of it.
struct Function {
    module: <Engine as Backend>::Module,
    kernel: Kernel,
}

impl Object for Function {
    const KIND: u64 = 4;
}

/// What an offload bundle begins with.
const BUNDLE: &[u8] = b"__CLANG_OFFLOAD_BUNDLE__";

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLoadData(to: *mut *mut c_void, image: *const c_void) -> Code {
    if image.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes an image, which is longer than that.
    if unsafe { std::slice::from_raw_parts(image.cast::<u8>(), BUNDLE.len()) } != BUNDLE {
        return INVALID_IMAGE;
    }
    code(current().and_then(|device| {
        let module = failed(Engine::load(device))?;
        // SAFETY: the caller's output.
        unsafe { put(to, give(Module(module))) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleGetFunction(to: *mut *mut c_void, module: *mut c_void, name: *const c_char) -> Code {
    // SAFETY: the caller of the interface passes a module of this library's, and a name.
    let (module, name) = unsafe { (look::<Module>(module), CStr::from_ptr(name)) };
    let kernel = Kernel::all().find(|kernel| kernel.name().as_bytes() == name.to_bytes()).ok_or(NOT_FOUND);
    code(module.and_then(|module| {
        let function = Function { module: module.0.clone(), kernel: kernel? };
        // SAFETY: the caller's output.
        unsafe { put(to, give(function)) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(
    to: *mut c_int,
    function: *mut c_void,
    threads: c_int,
    shared_bytes: usize,
) -> Code {
    if threads <= 0 || shared_bytes != 0 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller of the interface passes a function of this library's.
    code(unsafe { look::<Function>(function) }.and_then(|f| {
        let threads = engine_threads(threads.cast_unsigned());
        let blocks = failed(Engine::resident_blocks(&f.module, f.kernel.into(), threads))?;
        // SAFETY: the caller's output.
        unsafe { put(to, blocks.cast_signed()) }
    }))
}

/// Bytes of a kernel's parameter struct.
fn param_bytes(kernel: Kernel) -> usize {
    match kernel {
        Kernel::Barrier => size_of::<BarrierParams>(),
        Kernel::BarrierProbe => size_of::<BarrierProbeParams>(),
        Kernel::PeerProbe => size_of::<PeerProbeParams>(),
        Kernel::Check => size_of::<CheckParams>(),
        Kernel::Trace => size_of::<TraceParams>(),
        Kernel::MoveCounted => size_of::<CountedParams>(),
        Kernel::RmsNorm(_)
        | Kernel::NormRows(_)
        | Kernel::NormNarrowRows(_)
        | Kernel::AllReduceRmsNorm(_)
        | Kernel::AllReduceRmsNormSmall(_)
        | Kernel::AllReduceRmsNormPair(_)
        | Kernel::AllReduceRmsNormE4m3(_)
        | Kernel::AllReduceRmsNormE4m3Small(_)
        | Kernel::AllReduceRmsNormE4m3Pair(_)
        | Kernel::AllReduceNorm(_)
        | Kernel::AllReduceNormSmall(_)
        | Kernel::AllReduceNormPair(_)
        | Kernel::AllReduceNormWide(_)
        | Kernel::AllReduceNormWideSmall(_)
        | Kernel::NormTwoStage(_) => size_of::<NormParams>(),
        Kernel::ReduceScatter(_)
        | Kernel::ReduceScatterAny
        | Kernel::Move
        | Kernel::LinesMove
        | Kernel::LinesReduce(_)
        | Kernel::LinesReduceAny => size_of::<ExchangeParams>(),
        _ => size_of::<AllReduceParams>(),
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipModuleLaunchKernel(
    function: *mut c_void,
    grid: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: *mut c_void,
    params: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Code {
    let plain = [grid_y, grid_z, block_y, block_z] == [1; 4] && shared_bytes == 0 && extra.is_null();
    if !plain || grid == 0 || block == 0 || params.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller of the interface passes a function and a stream of this library's.
    let (function, stream) = unsafe { (look::<Function>(function), look::<Stream>(stream)) };
    code(function.and_then(|function| {
        // SAFETY: the caller passes the address of each parameter, of which every kernel has one.
        let params = unsafe { std::slice::from_raw_parts((*params).cast::<u8>(), param_bytes(function.kernel)) };
        let launch = Launch::<Engine> {
            kernel: function.kernel.into(),
            grid,
            threads: engine_threads(block),
            params,
            early: false,
            uses: &[],
        };
        // SAFETY: the parameters are the kernel's; the caller keeps their memory until the kernel has ended, as the interface asks.
        failed(unsafe { Engine::launch(&stream?.stream, &function.module, &launch) })
    }))
}
