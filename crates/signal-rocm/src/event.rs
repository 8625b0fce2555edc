//! Events: points in a stream, with the time.

use std::time::Duration;

use signal_core::deferred::Reached;
use signal_core::error::Result;

use crate::device::Device;
use crate::stream::Stream;
use crate::sys::{self, hipEvent_t, hipStream_t};

/// A point in a stream, with the time.
#[derive(Debug)]
pub struct Event {
    device: Device,
    raw: hipEvent_t,
}

// SAFETY: events may be used from any thread; the runtime serialises what must be.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// On a stream of `device` that is alive.
    pub(crate) fn record(device: &Device, stream: hipStream_t) -> Result<Event> {
        let _current = device.enter()?;
        let driver = device.driver();
        let mut raw: hipEvent_t = std::ptr::null_mut();
        // SAFETY: writes one pointer, which outlives the call.
        driver.check("hipEventCreateWithFlags", unsafe { (driver.hipEventCreateWithFlags)(&raw mut raw, 0) })?;
        let event = Event { device: device.clone(), raw };
        // SAFETY: event and stream are alive and of one device.
        driver.check("hipEventRecord", unsafe { (driver.hipEventRecord)(raw, stream) })?;
        Ok(event)
    }

    pub(crate) fn wait_on(&self, stream: &Stream) -> Result<()> {
        let _current = stream.device().enter()?;
        let driver = self.device.driver();
        // SAFETY: event and stream are alive.
        driver.check("hipStreamWaitEvent", unsafe { (driver.hipStreamWaitEvent)(stream.raw(), self.raw, 0) })
    }

    pub(crate) fn is_complete(&self) -> Result<bool> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        // SAFETY: the event is alive.
        match unsafe { (driver.hipEventQuery)(self.raw) } {
            sys::hipErrorNotReady => Ok(false),
            result => driver.check("hipEventQuery", result).map(|()| true),
        }
    }

    pub(crate) fn elapsed(&self, end: &Event) -> Result<Duration> {
        let _current = self.device.enter()?;
        let driver = self.device.driver();
        let mut milliseconds = 0.0;
        // SAFETY: both events are alive; the output outlives the call.
        let result = unsafe { (driver.hipEventElapsedTime)(&raw mut milliseconds, self.raw, end.raw) };
        driver.check("hipEventElapsedTime", result)?;
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
            // SAFETY: this is the only owner. The runtime keeps what a stream still needs.
            let _ = unsafe { (self.device.driver().hipEventDestroy)(self.raw) };
        }
    }
}
