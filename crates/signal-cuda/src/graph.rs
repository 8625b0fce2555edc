//! Captured work.

use std::ffi::c_void;
use std::fmt;

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUstreamCaptureMode, CUuserObject};
use signal_core::deferred::{self, Remains, Uses};
use signal_core::error::{ApiMisuse, Result};

use crate::device::Device;
use crate::driver::check;
use crate::memory::Buffer;
use crate::quiet::launching;
use crate::stream::Stream;

/// A captured sequence of work, ready to be replayed.
pub struct Graph {
    device: Device,
    captured: Captured,
    /// Streams it was replayed on.
    uses: Uses,
}

/// The driver's handles of a graph.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Captured {
    graph: CUgraph,
    exec: CUgraphExec,
}

// SAFETY: a graph is not changed after it was made; the driver serialises launches of its executable.
unsafe impl Send for Captured {}
// SAFETY: as above.
unsafe impl Sync for Captured {}

pub(crate) fn begin(stream: &Stream) -> Result<()> {
    if stream.is_capturing()? {
        return Err(ApiMisuse::Capture { call: "begin_capture", state: "capturing" }.into());
    }
    let _current = stream.device().enter()?;
    // Relaxed: the thread that captures one rank may allocate for another.
    let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    // SAFETY: the stream is alive.
    check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) })
}

pub(crate) fn end(stream: &Stream) -> Result<Graph> {
    if !stream.is_capturing()? {
        return Err(ApiMisuse::Capture { call: "end_capture", state: "not capturing" }.into());
    }
    let device = stream.device().clone();
    let _current = device.enter()?;
    let mut graph: CUgraph = std::ptr::null_mut();
    // SAFETY: the stream is alive; the output outlives the call.
    check("cuStreamEndCapture", unsafe { sys::cuStreamEndCapture(stream.raw(), &raw mut graph) })?;
    let mut exec: CUgraphExec = std::ptr::null_mut();
    // SAFETY: the graph was just made; the output outlives the call.
    let result = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) };
    if let Err(error) = check("cuGraphInstantiate", result) {
        // SAFETY: nobody else knows the graph.
        let _ = unsafe { sys::cuGraphDestroy(graph) };
        return Err(error);
    }
    Ok(Graph { device: device.clone(), captured: Captured { graph, exec }, uses: Uses::default() })
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
        let _launching = launching();
        // SAFETY: executable and stream are alive and of one context.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.captured.exec, stream.raw()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        self.device.graves().bury(Remains::Graph(self.captured), self.uses.mask());
    }
}

impl deferred::Unused for Captured {
    unsafe fn destroy(self) -> Result<()> {
        // SAFETY: the caller's promise: no replay runs, and the handles are gone.
        check("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(self.exec) })?;
        // SAFETY: as above.
        check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(self.graph) })
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
    let Some(graph) = stream.device().driver().capture_graph(stream.raw())? else {
        return Err(ApiMisuse::Capture { call: "capture", state: "in an invalidated capture" }.into());
    };
    let kept: Box<Vec<Buffer>> = Box::new(buffers.iter().map(|&buffer| buffer.clone()).collect());
    let pointer = Box::into_raw(kept).cast::<c_void>();
    let mut object: CUuserObject = std::ptr::null_mut();
    let flags = sys::CUuserObject_flags::CU_USER_OBJECT_NO_DESTRUCTOR_SYNC as u32;
    // SAFETY: `release` takes the box back, once, when the last reference is gone; the output outlives the call.
    let result = unsafe { sys::cuUserObjectCreate(&raw mut object, pointer, Some(release), 1, flags) };
    if let Err(error) = check("cuUserObjectCreate", result) {
        // SAFETY: the driver did not take the box.
        unsafe { release(pointer) };
        return Err(error);
    }
    let flags = sys::CUuserObjectRetain_flags::CU_GRAPH_USER_OBJECT_MOVE as u32;
    // SAFETY: graph and object are alive; the graph takes over our reference.
    let result = unsafe { sys::cuGraphRetainUserObject(graph, object, 1, flags) };
    check("cuGraphRetainUserObject", result).inspect_err(|_| {
        // SAFETY: our reference was not taken over.
        let _ = unsafe { sys::cuUserObjectRelease(object, 1) };
    })
}

/// Called by the driver, on a thread on which no driver call is allowed; dropping buffers makes none.
///
/// # Safety
/// `pointer` is a `Box<Vec<Buffer>>` from [`keep`], not yet taken back.
unsafe extern "C" fn release(pointer: *mut c_void) {
    // SAFETY: the caller's promise.
    drop(unsafe { Box::from_raw(pointer.cast::<Vec<Buffer>>()) });
}
