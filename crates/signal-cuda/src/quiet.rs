//! The moments at which memory may go back to the driver.
//!
//! `cuMemFree` waits for all work of the device, and holds up launches meanwhile. A kernel that waits for a peer whose call
//! comes from the freeing thread would never end: it was not there when the thread looked, but another thread may launch
//! it between the look and the free. So launches and frees take turns, in the whole process: peers' devices may be waited
//! for too.

use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use signal_core::error::Result;

use crate::device;

static LAUNCHES: RwLock<()> = RwLock::new(());

/// Held during each call that starts a kernel. Waits for a free, which waits for nothing.
pub(crate) fn launching() -> RwLockReadGuard<'static, ()> {
    LAUNCHES.read().unwrap_or_else(PoisonError::into_inner)
}

/// No work is anywhere, and none is launched while this is held. `None` while there is some: a launch is not waited for,
/// since with a full queue it may itself wait for a peer.
pub(crate) fn quiet() -> Result<Option<RwLockWriteGuard<'static, ()>>> {
    let guard = match LAUNCHES.try_write() {
        Ok(guard) => guard,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return Ok(None),
    };
    for device in device::opened() {
        if !device.slots().all_idle()? {
            return Ok(None);
        }
    }
    Ok(Some(guard))
}
