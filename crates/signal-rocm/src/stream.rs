//! Streams.

use std::fmt;
use std::sync::Arc;

use signal_core::StreamId;
use signal_core::deferred::Work;
use signal_core::error::{ApiMisuse, Result};

use crate::device::Device;
use crate::event::Event;
use crate::graph;
use crate::memory::Buffer;
use crate::sys::{self, hipStream_t};

/// A stream: one of ours, or an adopted one.
#[derive(Clone)]
pub struct Stream(Arc<StreamInner>);

pub(crate) struct StreamInner {
    device: Device,
    raw: hipStream_t,
    owned: bool,
    slot: usize,
}

// SAFETY: streams may be used from any thread; the runtime serialises what must be.
unsafe impl Send for StreamInner {}
// SAFETY: as above.
unsafe impl Sync for StreamInner {}

impl Stream {
    pub(crate) fn new(device: &Device) -> Result<Stream> {
        let _current = device.enter()?;
        let driver = device.driver();
        let mut raw: hipStream_t = std::ptr::null_mut();
        // Non-blocking: the NULL stream of another library must not wait for our kernels, nor they for it.
        // SAFETY: writes one pointer, which outlives the call.
        let result = unsafe { (driver.hipStreamCreateWithFlags)(&raw mut raw, sys::hipStreamNonBlocking) };
        driver.check("hipStreamCreateWithFlags", result)?;
        Ok(Stream::register(device, raw, true))
    }

    /// Takes a stream of the user's into use.
    ///
    /// # Safety
    /// - `raw` is a stream of `device`.
    /// - It is not destroyed before the result, all its clones, and the communicators that were given one are gone.
    ///
    /// # Errors
    /// [`ApiMisuse::NullStream`] for the NULL, legacy and per-thread default streams: ranks that share a device need
    /// streams that do not wait for each other.
    pub unsafe fn adopt(device: &Device, raw: hipStream_t) -> Result<Stream> {
        if (raw as usize) <= 2 {
            return Err(ApiMisuse::NullStream.into());
        }
        Ok(Stream::register(device, raw, false))
    }

    fn register(device: &Device, raw: hipStream_t, owned: bool) -> Stream {
        let slot = device.slots().next();
        let inner = Arc::new(StreamInner { device: device.clone(), raw, owned, slot });
        device.slots().add(slot, &inner);
        Stream(inner)
    }

    /// The runtime's handle. Do not destroy it.
    pub fn raw(&self) -> hipStream_t {
        self.0.raw
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    /// Its bit in the masks of buffers.
    pub(crate) fn slot(&self) -> usize {
        self.0.slot
    }

    pub(crate) fn id(&self) -> StreamId {
        StreamId(self.0.raw as u64)
    }

    pub(crate) fn is_idle(&self) -> Result<bool> {
        self.0.is_idle()
    }

    pub(crate) fn is_capturing(&self) -> Result<bool> {
        self.0.is_capturing()
    }

    pub(crate) fn record(&self) -> Result<Event> {
        self.0.record()
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        if self.is_capturing()? {
            return Err(ApiMisuse::Capture { call: "synchronize", state: "capturing" }.into());
        }
        let _current = self.device().enter()?;
        let driver = self.device().driver();
        // SAFETY: the stream is alive.
        driver.check("hipStreamSynchronize", unsafe { (driver.hipStreamSynchronize)(self.raw()) })
    }

    /// Keeps `buffers` until what is enqueued next has ended; with the graph, if the stream is capturing.
    pub(crate) fn keep(&self, buffers: &[&Buffer]) -> Result<()> {
        if self.is_capturing()? {
            return graph::keep(self, buffers);
        }
        for buffer in buffers {
            buffer.used_on(self);
        }
        Ok(())
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of {:?}", self.0, self.0.device)
    }
}

impl fmt::Debug for StreamInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {:p}", self.raw)
    }
}

impl Work for StreamInner {
    type Event = Event;

    fn record(&self) -> Result<Event> {
        Event::record(&self.device, self.raw)
    }

    fn is_capturing(&self) -> Result<bool> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        let mut status = sys::hipStreamCaptureStatusNone;
        // SAFETY: the stream is alive; the output outlives the call.
        let result = unsafe { (driver.hipStreamIsCapturing)(self.raw, &raw mut status) };
        driver.check("hipStreamIsCapturing", result)?;
        Ok(status != sys::hipStreamCaptureStatusNone)
    }

    fn is_idle(&self) -> Result<bool> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        // SAFETY: the stream is alive.
        match unsafe { (driver.hipStreamQuery)(self.raw) } {
            sys::hipErrorNotReady => Ok(false),
            result => driver.check("hipStreamQuery", result).map(|()| true),
        }
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        // What is still running there may use buffers that name this slot. Without an event there is nothing to wait for: the
        // device is broken.
        let event = self.record().ok();
        self.device.slots().end(self.slot, self, event);
        let Ok(_current) = self.device.enter() else { return };
        if self.owned {
            // SAFETY: this is the last handle. The runtime finishes the work first.
            let _ = unsafe { (self.device.driver().hipStreamDestroy)(self.raw) };
        }
    }
}
