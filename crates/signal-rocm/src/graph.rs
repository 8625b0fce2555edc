//! Captured work.

use std::ffi::c_void;
use std::fmt;

use signal_core::deferred::{self, Remains, Uses};
use signal_core::error::{ApiMisuse, Result, Unavailable};

use crate::device::Device;
use crate::driver::{Driver, unavailable};
use crate::memory::Buffer;
use crate::quiet::launching;
use crate::stream::Stream;
use crate::sys::{self, hipGraph_t, hipGraphExec_t, hipUserObject_t};

/// A captured sequence of work, ready to be replayed.
pub struct Graph {
    device: Device,
    captured: Captured,
    /// Streams it was replayed on.
    uses: Uses,
}

/// The runtime's handles of a graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Captured {
    driver: Driver,
    graph: hipGraph_t,
    exec: hipGraphExec_t,
}

// SAFETY: a graph is not changed after it was made; the runtime serialises launches of its executable.
unsafe impl Send for Captured {}
// SAFETY: as above.
unsafe impl Sync for Captured {}

pub(crate) fn begin(stream: &Stream) -> Result<()> {
    if stream.is_capturing()? {
        return Err(ApiMisuse::Capture { call: "begin_capture", state: "capturing" }.into());
    }
    let _current = stream.device().enter()?;
    let driver = stream.device().driver();
    // Relaxed: the thread that captures one rank may allocate for another.
    // SAFETY: the stream is alive.
    let result = unsafe { (driver.hipStreamBeginCapture)(stream.raw(), sys::hipStreamCaptureModeRelaxed) };
    driver.check("hipStreamBeginCapture", result)
}

pub(crate) fn end(stream: &Stream) -> Result<Graph> {
    if !stream.is_capturing()? {
        return Err(ApiMisuse::Capture { call: "end_capture", state: "not capturing" }.into());
    }
    let device = stream.device().clone();
    let _current = device.enter()?;
    let driver = *device.driver();
    let mut graph: hipGraph_t = std::ptr::null_mut();
    // SAFETY: the stream is alive; the output outlives the call.
    driver.check("hipStreamEndCapture", unsafe { (driver.hipStreamEndCapture)(stream.raw(), &raw mut graph) })?;
    let mut exec: hipGraphExec_t = std::ptr::null_mut();
    let null = std::ptr::null_mut::<c_void>();
    // SAFETY: the graph was just made; the output outlives the call; the others may be null.
    let result = unsafe { (driver.hipGraphInstantiate)(&raw mut exec, graph, null.cast(), null.cast(), 0) };
    if let Err(error) = driver.check("hipGraphInstantiate", result) {
        // SAFETY: nobody else knows the graph.
        let _ = unsafe { (driver.hipGraphDestroy)(graph) };
        return Err(error);
    }
    Ok(Graph { device: device.clone(), captured: Captured { driver, graph, exec }, uses: Uses::default() })
}

impl Graph {
    pub(crate) fn replay(&self, stream: &Stream) -> Result<()> {
        if *stream.device() != self.device {
            let name = |device: &Device| device.info().label();
            let (found, expected) = (name(stream.device()), name(&self.device));
            return Err(ApiMisuse::WrongDevice { what: "stream", found, expected }.into());
        }
        if stream.is_capturing()? {
            return Err(ApiMisuse::Capture { call: "replay", state: "capturing" }.into());
        }
        let _current = self.device.enter()?;
        self.uses.note(stream.slot());
        let driver = self.device.driver();
        let _launching = launching();
        // SAFETY: executable and stream are alive and of one device.
        driver.check("hipGraphLaunch", unsafe { (driver.hipGraphLaunch)(self.captured.exec, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.device.graves().bury(Remains::Graph(self.captured), self.uses.mask());
    }
}

impl deferred::Unused for Captured {
    unsafe fn destroy(self) -> Result<()> {
        let driver = self.driver;
        // SAFETY: the caller's promise: no replay runs, and the handles are gone.
        driver.check("hipGraphExecDestroy", unsafe { (driver.hipGraphExecDestroy)(self.exec) })?;
        // SAFETY: as above.
        driver.check("hipGraphDestroy", unsafe { (driver.hipGraphDestroy)(self.graph) })
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph {:p} of {:?}", self.captured.graph, self.device)
    }
}

/// Hands `buffers` to the graph that `stream` is capturing into, whoever began the capture.
pub(crate) fn keep(stream: &Stream, buffers: &[&Buffer]) -> Result<()> {
    let _current = stream.device().enter()?;
    let driver = stream.device().driver();
    let (Some(create), Some(release_object), Some(retain)) =
        (driver.hipUserObjectCreate, driver.hipUserObjectRelease, driver.hipGraphRetainUserObject)
    else {
        let why = "graphs need ROCm 5.3: this runtime has no hipUserObjectCreate, which keeps their buffers alive";
        return Err(unavailable(Unavailable::NotSupported(why.to_owned())));
    };
    let Some(graph) = driver.capture_graph(stream.raw())? else {
        return Err(ApiMisuse::Capture { call: "capture", state: "in an invalidated capture" }.into());
    };
    let kept: Box<Vec<Buffer>> = Box::new(buffers.iter().map(|&buffer| buffer.clone()).collect());
    let pointer = Box::into_raw(kept).cast::<c_void>();
    let mut object: hipUserObject_t = std::ptr::null_mut();
    // SAFETY: `release` takes the box back, once, when the last reference is gone; the output outlives the call.
    let result = unsafe { create(&raw mut object, pointer, release, 1, sys::hipUserObjectNoDestructorSync) };
    if let Err(error) = driver.check("hipUserObjectCreate", result) {
        // SAFETY: the runtime did not take the box.
        unsafe { release(pointer) };
        return Err(error);
    }
    // SAFETY: graph and object are alive; the graph takes over our reference.
    let result = unsafe { retain(graph, object, 1, sys::hipGraphUserObjectMove) };
    driver.check("hipGraphRetainUserObject", result).inspect_err(|_| {
        // SAFETY: our reference was not taken over.
        let _ = unsafe { release_object(object, 1) };
    })
}

/// Called by the runtime, on a thread on which no call of it is allowed; dropping buffers makes none.
///
/// # Safety
/// `pointer` is a `Box<Vec<Buffer>>` from [`keep`], not yet taken back.
unsafe extern "C" fn release(pointer: *mut c_void) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(pointer.cast::<Vec<Buffer>>()) });
}
