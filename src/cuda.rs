//! The backend on the CUDA driver API.

pub use signal_cuda::*;

use crate::Result;
use crate::images;

/// Opens the backend.
///
/// # Errors
/// [`Error::Image`](crate::Error::Image) if this build holds no CUDA image;
/// [`Error::Unavailable`](crate::Error::Unavailable) if libcuda cannot be loaded or reports no device.
pub fn open() -> Result<Cuda> {
    Cuda::open(image())
}

/// The image that this build embeds; without bytes if it had no compiler.
pub fn image() -> CudaImage {
    let images::EmbeddedImage { bytes, archs, fingerprint, missing } = images::CUDA;
    CudaImage { bytes, archs, fingerprint, missing }
}
