//! The moments at which memory may go back to the driver: `cuMemFree` waits for all work of the device.

use std::sync::RwLockReadGuard;

use signal_core::deferred::{Launches, Quiet};
use signal_core::error::Result;

use crate::device;

static LAUNCHES: Launches = Launches::new();

/// Held during each call that starts a kernel.
pub(crate) fn launching() -> RwLockReadGuard<'static, ()> {
    LAUNCHES.launching()
}

/// No work is anywhere, and none is launched while this is held.
pub(crate) fn quiet() -> Result<Option<Quiet>> {
    LAUNCHES.quiet(|| {
        for device in device::opened() {
            if !device.slots().all_idle()? {
                return Ok(false);
            }
        }
        Ok(true)
    })
}
