//! Events: points in a stream, with the time.

use std::time::Duration;

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUevent_wait_flags, CUresult, CUstream};
use signal_core::deferred::Reached;
use signal_core::error::Result;

use crate::device::Device;
use crate::driver::check;
use crate::stream::Stream;

/// A point in a stream, with the time.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: CUevent,
}

// SAFETY: events may be used from any thread; the driver serialises what must be.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// On a stream of `device` that is alive.
    pub(crate) fn record(device: &Device, stream: CUstream) -> Result<Event> {
        let _current = device.enter()?;
        let mut raw: CUevent = std::ptr::null_mut();
        // SAFETY: writes one pointer, which outlives the call.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut raw, CUevent_flags::CU_EVENT_DEFAULT as u32) })?;
        let event = Event { device: device.clone(), raw };
        // SAFETY: event and stream are alive and of one context.
        check("cuEventRecord", unsafe { sys::cuEventRecord(raw, stream) })?;
        Ok(event)
    }

    pub(crate) fn wait_on(&self, stream: &Stream) -> Result<()> {
        let _current = stream.device().enter()?;
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT as u32;
        // SAFETY: event and stream are alive.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(stream.raw(), self.raw, flags) })
    }

    pub(crate) fn is_complete(&self) -> Result<bool> {
        let _current = self.device.enter()?;
        // SAFETY: the event is alive.
        match unsafe { sys::cuEventQuery(self.raw) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => check("cuEventQuery", result).map(|()| true),
        }
    }

    pub(crate) fn elapsed(&self, end: &Event) -> Result<Duration> {
        let _current = self.device.enter()?;
        let milliseconds = self.device.driver().elapsed(self.raw, end.raw)?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Reached for Event {
    fn is_reached(&self) -> Result<bool> {
        self.is_complete()
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = self.device.enter() {
            // SAFETY: this is the only owner. The driver keeps what a stream still needs.
            let _ = unsafe { sys::cuEventDestroy_v2(self.raw) };
        }
    }
}
