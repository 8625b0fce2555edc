//! Signal's backend on the CUDA driver API.
//!
//! Of this backend only the door exists: [`Cuda::open`] checks the image and the driver and names what is missing. The
//! kernels are compiled and embedded already.

use signal_core::error::{Error, Image, Result, Unavailable};

/// Names under which the driver library is looked for.
const LIBRARIES: [&str; 2] = ["libcuda.so.1", "libcuda.so"];

/// The kernel image that the build embedded.
#[derive(Clone, Copy, Debug)]
pub struct CudaImage {
    /// A fat binary; empty if the build had no compiler.
    pub bytes: &'static [u8],
    /// The architectures that it holds code for.
    pub archs: &'static [&'static str],
    /// Of sources, flags and compiler.
    pub fingerprint: u64,
    /// What the build was missing.
    pub missing: &'static str,
}

/// The opened driver.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Cuda {}

impl Cuda {
    /// Opens the driver with an image.
    ///
    /// # Errors
    /// [`Error::Image`] without an image; [`Error::Unavailable`] without libcuda, and, as yet, with it.
    pub fn open(image: CudaImage) -> Result<Self> {
        if image.bytes.is_empty() {
            return Err(Image::Missing { target: "cuda", missing: image.missing.to_owned() }.into());
        }
        let mut tried = Vec::new();
        for name in LIBRARIES {
            // SAFETY: libcuda's initialisers have no preconditions; nothing is called in it.
            match unsafe { libloading::Library::new(name) } {
                Ok(_) => {
                    let why = "this version compiles the CUDA kernels but does not drive the device yet".to_owned();
                    return Err(unavailable(Unavailable::NotSupported(why)));
                }
                Err(error) => tried.push(format!("{name} ({error})")),
            }
        }
        Err(unavailable(Unavailable::Library { tried: tried.join(", ") }))
    }
}

fn unavailable(why: Unavailable) -> Error {
    Error::Unavailable { backend: "cuda", why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_image_is_named() {
        let image = CudaImage { bytes: &[], archs: &[], fingerprint: 0, missing: "nvcc" };
        let missing = Image::Missing { target: "cuda", missing: "nvcc".to_owned() };
        assert_eq!(Cuda::open(image).unwrap_err(), missing.into());
    }

    #[test]
    fn opening_never_panics() {
        let image = CudaImage { bytes: &[1], archs: &["sm_90"], fingerprint: 0, missing: "" };
        assert!(matches!(Cuda::open(image), Err(Error::Unavailable { backend: "cuda", .. })));
    }
}
