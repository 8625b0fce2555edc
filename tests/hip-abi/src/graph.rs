//! Captures, graphs, and what they keep alive.

use std::ffi::{c_char, c_uint, c_ulonglong, c_void};
use std::sync::{Arc, Mutex};

use signal_comm::Backend;

use crate::object::{Object, give, look, take};
use crate::work::Stream;
use crate::{Code, Engine, INVALID_VALUE, code, failed, lock, put};

/// What a stream captures into: the handle of the graph.
pub(crate) struct Capture {
    graph: usize,
    number: u64,
}

/// A graph, complete once its capture has ended.
struct Graph(Arc<Content>);

impl Object for Graph {
    const KIND: u64 = 5;
}

/// What a graph and its executables share.
#[derive(Default)]
struct Content {
    graph: Mutex<Option<<Engine as Backend>::Graph>>,
    #[cfg(not(feature = "old"))]
    kept: Mutex<Vec<Arc<crate::user::Kept>>>,
}

#[cfg(not(feature = "old"))]
/// Keeps something for as long as the graph and its executables live.
///
/// # Safety
/// The handle is one of this library's.
pub(crate) unsafe fn keep(graph: *mut c_void, kept: Arc<crate::user::Kept>) -> Result<(), Code> {
    // SAFETY: the caller's promise.
    let graph = unsafe { look::<Graph>(graph) }?;
    lock(&graph.0.kept).push(kept);
    Ok(())
}

/// A graph that can be launched.
struct Exec(Arc<Content>);

impl Object for Exec {
    const KIND: u64 = 6;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamIsCapturing(stream: *mut c_void, to: *mut c_uint) -> Code {
    // SAFETY: the caller of the interface passes a stream of this library's.
    code(unsafe { look::<Stream>(stream) }.and_then(|stream| {
        let capturing = failed(Engine::is_capturing(&stream.stream))?;
        // SAFETY: the caller's output.
        unsafe { put(to, c_uint::from(capturing)) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamGetCaptureInfo_v2(
    stream: *mut c_void,
    status: *mut c_uint,
    id: *mut c_ulonglong,
    graph: *mut *mut c_void,
    dependencies: *mut *const c_void,
    count: *mut usize,
) -> Code {
    // SAFETY: the caller of the interface passes a stream of this library's.
    code(unsafe { look::<Stream>(stream) }.and_then(|stream| {
        let capture = lock(&stream.capture);
        let (number, handle) = capture.as_ref().map_or((0, 0), |capture| (capture.number, capture.graph));
        // SAFETY: the caller's outputs.
        unsafe {
            put(status, c_uint::from(capture.is_some()))?;
            put(id, number)?;
            put(graph, handle as *mut c_void)?;
            put(dependencies, std::ptr::null())?;
            put(count, 0)
        }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamBeginCapture(stream: *mut c_void, mode: c_uint) -> Code {
    static NUMBER: Mutex<u64> = Mutex::new(0);
    // Relaxed.
    if mode != 2 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller of the interface passes a stream of this library's.
    code(unsafe { look::<Stream>(stream) }.and_then(|stream| {
        failed(Engine::begin_capture(&stream.stream))?;
        let mut number = lock(&NUMBER);
        *number += 1;
        let graph = give(Graph(Arc::default())) as usize;
        *lock(&stream.capture) = Some(Capture { graph, number: *number });
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamEndCapture(stream: *mut c_void, to: *mut *mut c_void) -> Code {
    // SAFETY: the caller of the interface passes a stream of this library's.
    code(unsafe { look::<Stream>(stream) }.and_then(|stream| {
        let captured = failed(Engine::end_capture(&stream.stream))?;
        let capture = lock(&stream.capture).take().ok_or(INVALID_VALUE)?;
        // SAFETY: the handle was made when the capture began, and nobody could destroy it.
        let graph = unsafe { look::<Graph>(capture.graph as *mut c_void) }?;
        *lock(&graph.0.graph) = Some(captured);
        // SAFETY: the caller's output.
        unsafe { put(to, capture.graph as *mut c_void) }
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphInstantiate(
    to: *mut *mut c_void,
    graph: *mut c_void,
    _error_node: *mut *mut c_void,
    _log: *mut c_char,
    _log_bytes: usize,
) -> Code {
    // SAFETY: the caller of the interface passes a graph of this library's, and an output.
    code(unsafe { look::<Graph>(graph) }.and_then(|graph| unsafe { put(to, give(Exec(graph.0.clone()))) }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphLaunch(exec: *mut c_void, stream: *mut c_void) -> Code {
    // SAFETY: the caller of the interface passes a stream and an executable of this library's.
    let (exec, stream) = unsafe { (look::<Exec>(exec), look::<Stream>(stream)) };
    code(exec.and_then(|exec| match &*lock(&exec.0.graph) {
        Some(graph) => failed(Engine::replay(graph, &stream?.stream)),
        None => Err(INVALID_VALUE),
    }))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphDestroy(graph: *mut c_void) -> Code {
    // SAFETY: the caller of the interface passes a graph of this library's, for the last time.
    code(unsafe { take::<Graph>(graph) }.map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphExecDestroy(exec: *mut c_void) -> Code {
    // SAFETY: likewise.
    code(unsafe { take::<Exec>(exec) }.map(drop))
}
