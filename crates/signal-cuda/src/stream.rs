//! Streams.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUresult, CUstream, CUstream_flags};
use signal_core::StreamId;
use signal_core::deferred::Work;
use signal_core::error::{ApiMisuse, Result};

use crate::device::Device;
use crate::driver::check;
use crate::event::Event;
use crate::graph;
use crate::memory::Buffer;

/// A stream: one of ours, or an adopted one.
#[derive(Clone)]
pub struct Stream(Arc<StreamInner>);

pub(crate) struct StreamInner {
    device: Device,
    raw: CUstream,
    owned: bool,
    slot: usize,
}

// SAFETY: streams may be used from any thread; the driver serialises what must be.
unsafe impl Send for StreamInner {}
// SAFETY: as above.
unsafe impl Sync for StreamInner {}

impl Stream {
    pub(crate) fn new(device: &Device) -> Result<Stream> {
        let _current = device.enter()?;
        let mut raw: CUstream = std::ptr::null_mut();
        // Non-blocking: the NULL stream of another library must not wait for our kernels, nor they for it.
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: writes one pointer, which outlives the call.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut raw, flags) })?;
        Ok(Stream::register(device, raw, true))
    }

    /// Takes a stream of the user's into use.
    ///
    /// # Safety
    /// - `raw` is a stream of `device`'s primary context.
    /// - It is not destroyed before the result, all its clones, and the communicators that were given one are gone.
    ///
    /// # Errors
    /// [`ApiMisuse::NullStream`] for the NULL, legacy and per-thread default streams: ranks that share a device need
    /// streams that do not wait for each other.
    pub unsafe fn adopt(device: &Device, raw: CUstream) -> Result<Stream> {
        if (raw as usize) <= 2 {
            return Err(ApiMisuse::NullStream.into());
        }
        device.context()?;
        Ok(Stream::register(device, raw, false))
    }

    fn register(device: &Device, raw: CUstream, owned: bool) -> Stream {
        let slot = device.slots().next();
        let inner = Arc::new(StreamInner { device: device.clone(), raw, owned, slot });
        device.slots().add(slot, &inner);
        Stream(inner)
    }

    /// The driver's handle. Do not destroy it.
    pub fn raw(&self) -> CUstream {
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
        // SAFETY: the stream is alive.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.raw()) })
    }

    /// Keeps `buffers` until what is enqueued next has ended; with the graph, if the stream is capturing. The device's
    /// context is current.
    pub(crate) fn keep(&self, buffers: &[&Buffer]) -> Result<()> {
        if self.0.is_capturing_here()? {
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

impl StreamInner {
    /// Whether it is capturing, while the device's context is current.
    fn is_capturing_here(&self) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; the output outlives the call.
        let result = unsafe { sys::cuStreamIsCapturing(self.raw, &raw mut status) };
        check("cuStreamIsCapturing", result)?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
    }
}

impl Work for StreamInner {
    type Event = Event;

    fn record(&self) -> Result<Event> {
        Event::record(&self.device, self.raw)
    }

    fn is_capturing(&self) -> Result<bool> {
        let _current = self.device.enter()?;
        self.is_capturing_here()
    }

    fn is_idle(&self) -> Result<bool> {
        let _current = self.device.enter()?;
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuStreamQuery", result).map(|()| true),
        }
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        // What is still running there may use buffers that name this slot. Without an event there is nothing to wait for: the
        // context is broken.
        let event = self.record().ok();
        self.device.slots().end(self.slot, self, event);
        let Ok(_current) = self.device.enter() else { return };
        if self.owned {
            // SAFETY: this is the last handle. The driver finishes the work first, without waiting here.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}
