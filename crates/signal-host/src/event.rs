//! Events. A worker that reaches one notes the time; a worker that must wait for one looks until it has been reached.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use signal_core::error::{ApiMisuse, Error, Result};

use crate::device::{Device, EAGAIN};
use crate::sync::{Patience, Shared, SpinLock};

/// A point in a stream.
///
/// An event recorded while its stream captures belongs to the graph: each replay reaches it anew and notes the time,
/// and no stream can wait for it, except within that capture, where the stream's order already does.
#[derive(Debug)]
pub struct Event {
    mark: Shared<Mark>,
    device: Device,
}

impl Event {
    pub(crate) fn new(device: &Device, capture: Option<u64>) -> Self {
        let mark = Mark { capture, reached: AtomicBool::new(false), at: SpinLock::new(None) };
        Event { mark: Shared::new(mark), device: device.clone() }
    }

    pub(crate) fn mark(&self) -> &Shared<Mark> {
        &self.mark
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.mark.is_reached()
    }

    pub(crate) fn elapsed(start: &Event, end: &Event) -> Result<Duration> {
        if start.device != end.device {
            let (found, expected) = (end.device.name(), start.device.name());
            return Err(ApiMisuse::WrongDevice { what: "event", found, expected }.into());
        }
        match (start.mark.time(), end.mark.time()) {
            (Some(start), Some(end)) => Ok(end.saturating_duration_since(start)),
            _ => Err(Error::Driver { code: EAGAIN, name: "event not reached".to_string(), call: "elapsed" }),
        }
    }
}

/// What the stream that reaches an event and those that look at it share.
#[derive(Debug)]
pub(crate) struct Mark {
    /// The capture that the event was recorded in.
    pub(crate) capture: Option<u64>,
    reached: AtomicBool,
    at: SpinLock<Option<Instant>>,
}

impl Mark {
    pub(crate) fn reach(&self) {
        *self.at.lock() = Some(Instant::now());
        // Release: pairs with the acquire in `is_reached`. What the event's stream did before comes before whatever the
        // waiting stream does next.
        self.reached.store(true, Ordering::Release);
    }

    pub(crate) fn wait(&self) {
        let mut patience = Patience::new();
        while !self.is_reached() {
            patience.pause();
        }
    }

    fn is_reached(&self) -> bool {
        // Acquire: pairs with the release in `reach`.
        self.reached.load(Ordering::Acquire)
    }

    fn time(&self) -> Option<Instant> {
        *self.at.lock()
    }
}
