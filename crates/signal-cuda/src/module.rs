//! The kernel image, loaded on one device.

use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUfunction, CUfunction_attribute as Attribute, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig,
    CUmodule, CUresult,
};
use signal_core::error::{Error, Image, Result};
use signal_core::{Entry, Kernel, Launch, image};

use crate::Cuda;
use crate::device::Device;
use crate::driver::check;
use crate::quiet::launching;
use crate::stream::Stream;

/// An image on one device, its kernels loaded. Stays loaded for the rest of the program.
#[derive(Clone, Debug)]
pub struct Module(Arc<ModuleInner>);

#[derive(Debug)]
struct ModuleInner {
    device: Device,
    /// In the order of the names that were asked for.
    functions: Vec<CUfunction>,
    code: Code,
    fingerprint: u64,
}

/// What code the driver took from the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code {
    /// Architecture of the machine code: 90 for sm_90.
    pub binary: u32,
    /// Architecture of the PTX that the source was compiled for: the machine code's own, or an older one if the driver
    /// compiled it from PTX.
    pub virtual_arch: u32,
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Code { binary, virtual_arch } = self;
        write!(f, "sm_{binary}")?;
        if binary != virtual_arch { write!(f, ", made by the driver from compute_{virtual_arch}") } else { Ok(()) }
    }
}

// SAFETY: functions may be used from any thread; the driver serialises what must be.
unsafe impl Send for ModuleInner {}
// SAFETY: as above.
unsafe impl Sync for ModuleInner {}

impl Module {
    pub(crate) fn load(device: &Device) -> Result<Module> {
        let image = device.image();
        let unfit =
            || Error::from(Image::Arch { available: image.archs.join(", "), device: device.info().arch.clone() });
        if !image.archs.iter().any(|arch| runs_on(arch, device.capability())) {
            return Err(unfit());
        }
        // SAFETY: the image is a whole fat binary of the build script's, and lives for the rest of the program.
        unsafe { Module::load_bytes(device, image.bytes, Kernel::names(), image.fingerprint, unfit) }
    }

    /// An image of a user.
    pub(crate) fn load_user(device: &Device, bytes: &[u8], names: &[&str]) -> Result<Module> {
        image::check_cuda(bytes).map_err(|why| Image::Broken { target: "cuda", why })?;
        let device_arch = device.info().arch.clone();
        let unfit = || Image::Arch { available: "other architectures".to_owned(), device: device_arch }.into();
        // SAFETY: by what it says of its own length the image is whole, and PTX ends with the zero behind it; the copy lives for the rest of
        // the program.
        unsafe { Module::load_bytes(device, image::keep(bytes), names, 0, unfit) }
    }

    /// # Safety
    /// The bytes are as long as they say of themselves, or are followed by a zero.
    unsafe fn load_bytes(
        device: &Device,
        bytes: &'static [u8],
        names: &[&str],
        fingerprint: u64,
        unfit: impl FnOnce() -> Error,
    ) -> Result<Module> {
        let _current = device.enter()?;
        let mut module: CUmodule = std::ptr::null_mut();
        let null = std::ptr::null_mut::<std::ffi::c_void>();
        // SAFETY: the caller's promise of the bytes; the output outlives the call.
        let result =
            unsafe { sys::cuModuleLoadDataEx(&raw mut module, bytes.as_ptr().cast(), 0, null.cast(), null.cast()) };
        match result {
            CUresult::CUDA_ERROR_NO_BINARY_FOR_GPU | CUresult::CUDA_ERROR_UNSUPPORTED_PTX_VERSION => {
                return Err(unfit());
            }
            CUresult::CUDA_ERROR_INVALID_IMAGE
            | CUresult::CUDA_ERROR_INVALID_SOURCE
            | CUresult::CUDA_ERROR_INVALID_PTX => {
                return Err(Image::Broken { target: "cuda", why: "the driver does not take it".to_owned() }.into());
            }
            result => check("cuModuleLoadDataEx", result)?,
        }

        let mut functions: Vec<CUfunction> = vec![std::ptr::null_mut(); names.len()];
        for (function, name) in functions.iter_mut().zip(names) {
            let missing = || Error::from(Image::Kernel { target: "cuda", kernel: (*name).to_owned() });
            let entry = CString::new(*name).map_err(|_| missing())?;
            // SAFETY: the module is loaded, the name ends with a null, the output outlives the call.
            match unsafe { sys::cuModuleGetFunction(function, module, entry.as_ptr()) } {
                CUresult::CUDA_ERROR_NOT_FOUND => return Err(missing()),
                result => check("cuModuleGetFunction", result)?,
            }
            // Now: a kernel that loaded at its first launch could wait for one that spins.
            device.driver().load_function(*function)?;
        }
        let Some(&first) = functions.first() else {
            return Err(Image::Kernel { target: "cuda", kernel: "of any name".to_owned() }.into());
        };
        let attribute = |of| attribute(first, of);
        let code = Code {
            binary: attribute(Attribute::CU_FUNC_ATTRIBUTE_BINARY_VERSION)?,
            virtual_arch: attribute(Attribute::CU_FUNC_ATTRIBUTE_PTX_VERSION)?,
        };
        tracing::debug!(device = ?device, ?code, "loaded the kernel image");
        Ok(Module(Arc::new(ModuleInner { device: device.clone(), functions, code, fingerprint })))
    }

    /// What code the driver took from the image.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// The driver's handle of a kernel, for measurements beside the library. It is loaded, and stays so.
    pub fn function(&self, kernel: Kernel) -> CUfunction {
        self.0.functions[kernel.index()]
    }

    fn entry(&self, kernel: Entry) -> Result<CUfunction> {
        let missing = || Image::Kernel { target: "cuda", kernel: format!("{kernel:?}") }.into();
        self.0.functions.get(kernel.0).copied().ok_or_else(missing)
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        self.0.fingerprint
    }

    pub(crate) fn resident_blocks(&self, kernel: Entry, threads: u32) -> Result<u32> {
        let _current = self.0.device.enter()?;
        let function = self.entry(kernel)?;
        if threads > attribute(function, Attribute::CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)? {
            return Ok(0);
        }
        let mut blocks = 0;
        // SAFETY: the function is loaded; the output outlives the call.
        let result =
            unsafe { sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&raw mut blocks, function, threads as i32, 0) };
        check("cuOccupancyMaxActiveBlocksPerMultiprocessor", result)?;
        Ok(blocks as u32 * self.0.device.info().compute_units)
    }

    /// # Safety
    /// As [`Backend::launch`](signal_core::Backend::launch).
    pub(crate) unsafe fn launch(&self, stream: &Stream, launch: &Launch<'_, Cuda>) -> Result<()> {
        let _current = self.0.device.enter()?;
        stream.keep(launch.uses)?;
        let mut arguments = [launch.params.as_ptr().cast_mut().cast::<c_void>()];
        let mut early = early_attribute();
        // Only where the code was compiled for an architecture that has the wait; machine code made by the driver from
        // older PTX has none.
        let attributes = u32::from(launch.early && self.0.code.virtual_arch >= 90);
        let config = CUlaunchConfig {
            gridDimX: launch.grid,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: stream.raw(),
            attrs: &raw mut early,
            numAttrs: attributes,
        };
        let function = self.entry(launch.kernel)?;
        let _launching = launching();
        // SAFETY: the function takes one struct, whose bytes the caller promises; the driver copies it and does not
        // write through the pointer. Stream and function are alive and of one context.
        let result =
            unsafe { sys::cuLaunchKernelEx(&raw const config, function, arguments.as_mut_ptr(), std::ptr::null_mut()) };
        check("cuLaunchKernelEx", result)
    }
}

fn attribute(function: CUfunction, attribute: Attribute) -> Result<u32> {
    let mut value = 0;
    // SAFETY: the function is loaded; the output outlives the call.
    let result = unsafe { sys::cuFuncGetAttribute(&raw mut value, attribute, function) };
    check("cuFuncGetAttribute", result).map(|()| value as u32)
}

/// Programmatic stream serialization: the launch need not wait for the end of the kernel before it.
fn early_attribute() -> CUlaunchAttribute {
    let id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    // SAFETY: all zero bytes are a value of this plain struct.
    let mut attribute: CUlaunchAttribute = unsafe { std::mem::zeroed() };
    attribute.id = id;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    attribute
}

/// Machine code runs on later minor versions of its major version, PTX on everything later.
fn runs_on(arch: &str, (major, minor): (u32, u32)) -> bool {
    let parse = |digits: &str| digits.parse().ok().map(|n: u32| (n / 10, n % 10));
    let machine = |digits| parse(digits).is_some_and(|(m, n)| m == major && n <= minor);
    let ptx = |digits| parse(digits).is_some_and(|code| code <= (major, minor));
    arch.strip_prefix("sm_").is_some_and(machine) || arch.strip_prefix("compute_").is_some_and(ptx)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_tells_what_the_driver_made() {
        assert_eq!(Code { binary: 90, virtual_arch: 90 }.to_string(), "sm_90");
        assert_eq!(Code { binary: 120, virtual_arch: 90 }.to_string(), "sm_120, made by the driver from compute_90");
    }

    #[test]
    fn code_runs_where_the_vendor_says() {
        assert!(runs_on("sm_80", (8, 6)));
        assert!(!runs_on("sm_86", (8, 0)));
        assert!(!runs_on("sm_80", (9, 0)));
        assert!(runs_on("compute_90", (10, 3)));
        assert!(runs_on("compute_90", (9, 0)));
        assert!(!runs_on("compute_90", (8, 9)));
        assert!(runs_on("sm_100", (10, 3)));
        assert!(!runs_on("gfx942", (9, 0)));
    }
}
