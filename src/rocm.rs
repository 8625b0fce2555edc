//! The backend on the HIP runtime.

pub use signal_rocm::*;

use crate::Result;
use crate::images;

/// Opens the backend.
///
/// # Errors
/// [`Error::Image`](crate::Error::Image) if this build holds no AMD image;
/// [`Error::Unavailable`](crate::Error::Unavailable) if libamdhip64 cannot be loaded or reports no device.
pub fn open() -> Result<Rocm> {
    Rocm::open(image())
}

/// The image that this build embeds; without bytes if it had no compiler.
pub fn image() -> RocmImage {
    let images::EmbeddedImage { bytes, archs, fingerprint, missing } = images::HIP;
    RocmImage { bytes, archs, fingerprint, missing }
}
