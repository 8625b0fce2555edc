//! The driver library: found, checked for every symbol that is used, and its codes made into errors.

use std::ffi::{CStr, c_int, c_uint, c_void};
use std::mem::transmute_copy;

use cudarc::driver::sys::{self, CUcontext, CUevent, CUfunction, CUgraph, CUgraphNode, CUresult, CUstream};
use signal_core::error::{Error, Result, Unavailable};

/// Names under which the library is looked for; cudarc's binding looks for the same.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// What this crate calls through cudarc, whose binding panics at a missing symbol: so all are looked up first.
const SYMBOLS: &[&str] = &[
    "cuInit",
    "cuDriverGetVersion",
    "cuDeviceGet",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetUuid_v2",
    "cuDeviceGetPCIBusId",
    "cuDeviceTotalMem_v2",
    "cuDeviceGetAttribute",
    "cuDeviceCanAccessPeer",
    "cuDeviceGetP2PAttribute",
    "cuDevicePrimaryCtxRetain",
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuCtxEnablePeerAccess",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemFreeHost",
    "cuMemHostGetDevicePointer_v2",
    "cuMemCreate",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuMemAddressFree",
    "cuMemMap",
    "cuMemUnmap",
    "cuMemSetAccess",
    "cuMemGetAllocationGranularity",
    "cuMemRetainAllocationHandle",
    "cuMemExportToShareableHandle",
    "cuMemImportFromShareableHandle",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoDAsync_v2",
    "cuMemsetD32Async",
    "cuStreamCreate",
    "cuStreamDestroy_v2",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamIsCapturing",
    "cuStreamWaitEvent",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventRecord",
    "cuEventQuery",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuUserObjectCreate",
    "cuUserObjectRelease",
    "cuGraphRetainUserObject",
    "cuModuleLoadDataEx",
    "cuModuleGetFunction",
    "cuFuncGetAttribute",
    "cuLaunchKernelEx",
    "cuOccupancyMaxActiveBlocksPerMultiprocessor",
    "cuGetErrorName",
];

type CaptureInfo = unsafe extern "C" fn(
    CUstream,
    *mut sys::CUstreamCaptureStatus,
    *mut u64,
    *mut CUgraph,
    *mut *const CUgraphNode,
    *mut usize,
) -> CUresult;
type EventElapsed = unsafe extern "C" fn(*mut f32, CUevent, CUevent) -> CUresult;
type FuncLoad = unsafe extern "C" fn(CUfunction) -> CUresult;

/// The opened library. Never unloaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Driver {
    /// 13000 for CUDA 13.0.
    pub(crate) version: i32,
    // Functions that cudarc binds under other names from one CUDA version to the next; the library exports these names
    // in all of them.
    capture_info: CaptureInfo,
    event_elapsed: EventElapsed,
    /// Since CUDA 12.4. Before, getting a function loads it.
    func_load: Option<FuncLoad>,
}

impl Driver {
    pub(crate) fn open() -> Result<Driver> {
        let mut tried = Vec::new();
        for name in LIBRARIES {
            // SAFETY: libcuda's initialisers have no preconditions.
            match unsafe { libloading::Library::new(name) } {
                Ok(library) => return Driver::check(name, library),
                Err(error) => tried.push(format!("{name} ({error})")),
            }
        }
        Err(unavailable(Unavailable::Library { tried: tried.join(", ") }))
    }

    fn check(name: &str, library: libloading::Library) -> Result<Driver> {
        // Kept for the rest of the program: the function pointers, and cudarc's, point into it.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let address = |symbol: &str| {
            // SAFETY: only the address is taken.
            unsafe { library.get::<*const c_void>(symbol.as_bytes()) }.ok().map(|found| *found)
        };
        let missing: Vec<_> = SYMBOLS.iter().copied().filter(|symbol| address(symbol).is_none()).collect();
        let too_old = |missing: &str| {
            let why = format!("{name} is too old, CUDA 12.0 is needed: it lacks {missing}");
            unavailable(Unavailable::NotSupported(why))
        };
        if !missing.is_empty() {
            return Err(too_old(&missing.join(", ")));
        }
        let capture_info = address("cuStreamGetCaptureInfo_v2").ok_or_else(|| too_old("cuStreamGetCaptureInfo_v2"))?;
        let event_elapsed = address("cuEventElapsedTime").ok_or_else(|| too_old("cuEventElapsedTime"))?;
        let mut driver = Driver {
            version: 0,
            // SAFETY: the driver API's header gives the symbol this signature.
            capture_info: unsafe { transmute_copy::<*const c_void, CaptureInfo>(&capture_info) },
            // SAFETY: as above.
            event_elapsed: unsafe { transmute_copy::<*const c_void, EventElapsed>(&event_elapsed) },
            // SAFETY: as above.
            func_load: address("cuFuncLoad").map(|f| unsafe { transmute_copy::<*const c_void, FuncLoad>(&f) }),
        };
        // SAFETY: no preconditions. It may run again in a process that has initialised CUDA.
        let result = unsafe { sys::cuInit(0) };
        if result == CUresult::CUDA_ERROR_NO_DEVICE {
            return Err(unavailable(Unavailable::NoDevice("the driver reports none".to_owned())));
        }
        check("cuInit", result)?;
        // SAFETY: writes one integer, which outlives the call.
        check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut driver.version) })?;
        Ok(driver)
    }

    /// The graph that `stream` is capturing into, if it is capturing.
    pub(crate) fn capture_graph(&self, stream: CUstream) -> Result<Option<CUgraph>> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        let mut graph: CUgraph = std::ptr::null_mut();
        let null = std::ptr::null_mut::<c_void>();
        // SAFETY: the stream's owner is alive; the outputs outlive the call; the unwanted ones may be null.
        let result = unsafe {
            (self.capture_info)(stream, &raw mut status, null.cast(), &raw mut graph, null.cast(), null.cast())
        };
        check("cuStreamGetCaptureInfo", result)?;
        Ok((status == sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE).then_some(graph))
    }

    /// Milliseconds between two events.
    pub(crate) fn elapsed(&self, start: CUevent, end: CUevent) -> Result<f32> {
        let mut milliseconds = 0.0;
        // SAFETY: the events' owners are alive; the output outlives the call.
        check("cuEventElapsedTime", unsafe { (self.event_elapsed)(&raw mut milliseconds, start, end) })?;
        Ok(milliseconds)
    }

    /// Loads a function now, where the driver would wait for its first launch.
    pub(crate) fn load_function(&self, function: CUfunction) -> Result<()> {
        match self.func_load {
            // SAFETY: the function's module is loaded.
            Some(load) => check("cuFuncLoad", unsafe { load(function) }),
            None => Ok(()),
        }
    }
}

/// Makes a context current for its own lifetime, on this thread.
pub(crate) struct Current {
    pushed: bool,
}

impl Current {
    pub(crate) fn enter(context: CUcontext) -> Result<Current> {
        let mut now: CUcontext = std::ptr::null_mut();
        // SAFETY: writes one pointer, which outlives the call.
        check("cuCtxGetCurrent", unsafe { sys::cuCtxGetCurrent(&raw mut now) })?;
        if now == context {
            return Ok(Current { pushed: false });
        }
        // SAFETY: the context is a primary one that its device retains for the rest of the program.
        check("cuCtxPushCurrent", unsafe { sys::cuCtxPushCurrent_v2(context) })?;
        Ok(Current { pushed: true })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.pushed {
            let mut popped: CUcontext = std::ptr::null_mut();
            // SAFETY: pops what `enter` pushed: guards live on the stack of one thread and nest. A failure leaves the
            // user's context as it was, and there is nobody to tell.
            let _ = unsafe { sys::cuCtxPopCurrent_v2(&raw mut popped) };
        }
    }
}

/// Turns a code into an error that names the call.
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<()> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(error(call, result)) }
}

#[cold]
fn error(call: &'static str, result: CUresult) -> Error {
    let mut text = std::ptr::null();
    // SAFETY: writes one pointer, to a string constant of the library.
    let known = unsafe { sys::cuGetErrorName(result, &raw mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
    let name = if known {
        // SAFETY: the library's string constants end with a null and live as long as it.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        "unknown CUDA error".to_owned()
    };
    Error::Driver { code: result as c_uint as c_int, name, call }
}

pub(crate) fn unavailable(why: Unavailable) -> Error {
    Error::Unavailable { backend: "cuda", why }
}
