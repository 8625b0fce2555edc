//! The kernel images that the build script compiled and embedded.

/// A kernel image, or the reason why there is none.
#[allow(dead_code, reason = "which fields are read depends on the features")]
#[derive(Clone, Copy, Debug)]
pub(crate) struct EmbeddedImage {
    /// What the driver loads. Empty for the host, whose kernels are linked, and where the image is missing.
    pub bytes: &'static [u8],
    /// The architectures that it holds code for, as its compiler names them.
    pub archs: &'static [&'static str],
    /// Of sources, flags and compiler.
    pub fingerprint: u64,
    /// What the build was missing; empty if nothing.
    pub missing: &'static str,
}

/// Page-aligned, as a linker would place an image.
#[allow(dead_code, reason = "only images that exist and are loaded need it")]
#[repr(C, align(4096))]
struct Aligned<T>(T);

include!(concat!(env!("OUT_DIR"), "/images.rs"));
