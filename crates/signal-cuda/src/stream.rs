//! Streams, and which of them a device has.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use cudarc::driver::sys::{self, CUresult, CUstream, CUstream_flags};
use signal_core::StreamId;
use signal_core::error::{ApiMisuse, Result};

use crate::device::Device;
use crate::driver::check;
use crate::event::Event;
use crate::graph;
use crate::memory::{Buffer, lock};

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

    /// Its bit in the masks of buffers. Streams beyond 64 share bits, which only keeps memory longer.
    pub(crate) fn slot(&self) -> usize {
        self.0.slot
    }

    pub(crate) fn id(&self) -> StreamId {
        StreamId(self.0.raw as u64)
    }

    pub(crate) fn is_idle(&self) -> Result<bool> {
        let _current = self.device().enter()?;
        // SAFETY: the stream is alive.
        match unsafe { sys::cuStreamQuery(self.raw()) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuStreamQuery", result).map(|()| true),
        }
    }

    pub(crate) fn is_capturing(&self) -> Result<bool> {
        let _current = self.device().enter()?;
        self.is_capturing_here()
    }

    /// The same while the device's context is current.
    fn is_capturing_here(&self) -> Result<bool> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; the output outlives the call.
        let result = unsafe { sys::cuStreamIsCapturing(self.raw(), &raw mut status) };
        check("cuStreamIsCapturing", result)?;
        Ok(status != sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
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
        if self.is_capturing_here()? {
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
        write!(f, "stream {:p} of {:?}", self.0.raw, self.0.device)
    }
}

impl Drop for StreamInner {
    fn drop(&mut self) {
        // What is still running there may use buffers that name this slot. Without an event there is nothing to wait for: the
        // context is broken.
        let event = Event::record_raw(&self.device, self.raw).ok();
        self.device.slots().end(self, event);
        let Ok(_current) = self.device.enter() else { return };
        if self.owned {
            // SAFETY: this is the last handle. The driver finishes the work first, without waiting here.
            let _ = unsafe { sys::cuStreamDestroy_v2(self.raw) };
        }
    }
}

/// The streams of a device, by the bit that stands for them in the masks of buffers.
#[derive(Debug)]
pub(crate) struct Slots {
    next: AtomicUsize,
    entries: Mutex<[Vec<Entry>; 64]>,
}

#[derive(Debug)]
enum Entry {
    /// Once the last handle is gone: the stream is about to end.
    Live(Weak<StreamInner>),
    /// The stream is gone; its work has ended when the event has been reached.
    Ended(Arc<Event>),
}

/// What the streams of some slots are doing.
struct Present {
    live: Vec<Stream>,
    ended: Vec<Arc<Event>>,
    /// Whether a stream is about to end, whose work has no event yet.
    ending: bool,
}

impl fmt::Debug for StreamInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stream {:p}", self.raw)
    }
}

impl Default for Slots {
    fn default() -> Self {
        Slots { next: AtomicUsize::new(0), entries: Mutex::new([const { Vec::new() }; 64]) }
    }
}

impl Slots {
    fn next(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % 64
    }

    fn add(&self, slot: usize, stream: &Arc<StreamInner>) {
        lock(&self.entries)[slot].push(Entry::Live(Arc::downgrade(stream)));
    }

    /// Puts the event behind the stream's work into its place.
    fn end(&self, stream: &StreamInner, event: Option<Event>) {
        let mut entries = lock(&self.entries);
        entries[stream.slot].retain(|entry| !matches!(entry, Entry::Live(live) if std::ptr::eq(live.as_ptr(), stream)));
        entries[stream.slot].extend(event.map(|event| Entry::Ended(Arc::new(event))));
    }

    /// Events behind the present work of the slot's streams; `None` while one of them is capturing, or about to end.
    pub(crate) fn events(&self, slot: usize) -> Result<Option<Vec<Arc<Event>>>> {
        let Present { live, ended: mut events, ending } = self.present(slot..slot + 1);
        if ending {
            return Ok(None);
        }
        for stream in live {
            if stream.is_capturing()? {
                return Ok(None);
            }
            events.push(Arc::new(Event::record(&stream)?));
        }
        Ok(Some(events))
    }

    /// True when no stream has work left.
    pub(crate) fn all_idle(&self) -> Result<bool> {
        let Present { live, ended, ending } = self.present(0..64);
        if ending || !ended.is_empty() {
            return Ok(false);
        }
        for stream in live {
            if stream.is_capturing()? || !stream.is_idle()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Forgets the streams that are gone and whose work has ended. Handles are taken out of the lock: dropping the last one of
    /// a stream takes it again.
    fn present(&self, slots: std::ops::Range<usize>) -> Present {
        let mut entries = lock(&self.entries);
        let mut present = Present { live: Vec::new(), ended: Vec::new(), ending: false };
        for slot in &mut entries[slots] {
            // An error is for the next call that can return it; until then nothing is known of the work.
            slot.retain(|entry| !matches!(entry, Entry::Ended(event) if event.is_complete().unwrap_or(false)));
            for entry in slot.iter() {
                match entry {
                    Entry::Live(stream) => match stream.upgrade() {
                        Some(stream) => present.live.push(Stream(stream)),
                        None => present.ending = true,
                    },
                    Entry::Ended(event) => present.ended.push(event.clone()),
                }
            }
        }
        present
    }
}
