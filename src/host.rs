//! The backend on CPU threads.

pub use signal_host::*;

use crate::Result;
use crate::images;

#[cfg(signal_host_image)]
unsafe extern "C" {
    /// Exported by `kernels/host/kernels.cpp`.
    safe static signal_host_image: HostImageTable;
}

/// Opens the backend with as many devices as `SIGNAL_HOST_DEVICES` says, 8 without it.
///
/// # Errors
/// [`Error::Image`](crate::Error::Image) if this build holds no host kernels;
/// [`ApiMisuse::Setting`](crate::ApiMisuse::Setting) for a bad variable.
pub fn open() -> Result<Host> {
    open_with(HostConfig::from_env()?)
}

/// Opens the backend with a configuration of its own.
///
/// # Errors
/// As [`open`].
pub fn open_with(config: HostConfig) -> Result<Host> {
    cfg_if::cfg_if! {
        if #[cfg(signal_host_image)] {
            let table = Some(&signal_host_image);
        } else {
            let table = None;
        }
    }
    let image = HostImage { table, fingerprint: images::HOST.fingerprint, missing: images::HOST.missing };
    Host::open(image, config)
}
