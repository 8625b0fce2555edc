//! The moments at which memory may go back to the driver.
//!
//! `cuMemFree` waits for all work of the device, and holds up launches meanwhile. A kernel that waits for a peer whose call
//! comes from the freeing thread would never end: it was not there when the thread looked, but another thread may launch
//! it between the look and the free. So launches and frees take turns, in the whole process: peers' devices may be waited
//! for too.

use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, Weak};

use signal_core::error::Result;

use crate::device::{Device, DeviceInner};
use crate::memory::lock;

static LAUNCHES: RwLock<()> = RwLock::new(());
/// All devices of the process, of however many [`Cuda`](crate::Cuda)s.
static DEVICES: Mutex<Vec<Weak<DeviceInner>>> = Mutex::new(Vec::new());

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
    let mut devices = Vec::new(); // outside the lock: dropping the last handle of a device may take it
    devices.extend(lock(&DEVICES).iter().filter_map(Device::upgrade));
    for device in &devices {
        if !device.slots().all_idle()? {
            return Ok(None);
        }
    }
    Ok(Some(guard))
}

/// Notes a device, whose streams count from now on.
pub(crate) fn note(device: &Device) {
    let mut devices = lock(&DEVICES);
    devices.retain(|device| device.strong_count() > 0);
    devices.push(device.downgrade());
}
