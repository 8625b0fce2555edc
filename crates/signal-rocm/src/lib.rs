//! Signal's backend on the HIP runtime.
//!
//! Of this backend only the door exists: [`Rocm::open`] checks the image and the driver and names what is missing. The
//! kernels are compiled and embedded already.

use signal_core::error::{Error, Image, Result, Unavailable};

/// Names under which the driver library is looked for.
const LIBRARIES: [&str; 4] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];

/// The kernel image that the build embedded.
#[derive(Clone, Copy, Debug)]
pub struct RocmImage {
    /// A code object bundle; empty if the build had no compiler.
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
pub struct Rocm {}

impl Rocm {
    /// Opens the driver with an image.
    ///
    /// # Errors
    /// [`Error::Image`] without an image; [`Error::Unavailable`] without libamdhip64, and, as yet, with it.
    pub fn open(image: RocmImage) -> Result<Self> {
        if image.bytes.is_empty() {
            return Err(Image::Missing { target: "hip", missing: image.missing.to_owned() }.into());
        }
        let mut tried = Vec::new();
        for name in LIBRARIES {
            // SAFETY: libamdhip64's initialisers have no preconditions; nothing is called in it.
            match unsafe { libloading::Library::new(name) } {
                Ok(_) => {
                    let why = "this version compiles the AMD kernels but does not drive the device yet".to_owned();
                    return Err(unavailable(Unavailable::NotSupported(why)));
                }
                Err(error) => tried.push(format!("{name} ({error})")),
            }
        }
        Err(unavailable(Unavailable::Library { tried: tried.join(", ") }))
    }
}

fn unavailable(why: Unavailable) -> Error {
    Error::Unavailable { backend: "rocm", why }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_image_is_named() {
        let image = RocmImage { bytes: &[], archs: &[], fingerprint: 0, missing: "clang" };
        let missing = Image::Missing { target: "hip", missing: "clang".to_owned() };
        assert_eq!(Rocm::open(image).unwrap_err(), missing.into());
    }

    #[test]
    fn opening_never_panics() {
        let image = RocmImage { bytes: &[1], archs: &["gfx942"], fingerprint: 0, missing: "" };
        assert!(matches!(Rocm::open(image), Err(Error::Unavailable { backend: "rocm", .. })));
    }
}
