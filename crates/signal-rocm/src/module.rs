//! The kernel image, loaded on one device.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use signal_core::error::{Error, Image, Result};
use signal_core::{Entry, Kernel, Launch, image};

use crate::Rocm;
use crate::device::Device;
use crate::driver::to_u32;
use crate::quiet::launching;
use crate::stream::Stream;
use crate::sys::{self, hipFunction_t, hipModule_t};

/// An image on one device, its kernels loaded. Stays loaded for the rest of the program.
#[derive(Clone, Debug)]
pub struct Module(Arc<ModuleInner>);

#[derive(Debug)]
struct ModuleInner {
    device: Device,
    /// In the order of the names that were asked for.
    functions: Vec<hipFunction_t>,
    fingerprint: u64,
}

// SAFETY: functions may be used from any thread; the runtime serialises what must be.
unsafe impl Send for ModuleInner {}
// SAFETY: as above.
unsafe impl Sync for ModuleInner {}

impl Module {
    pub(crate) fn load(device: &Device) -> Result<Module> {
        let image = device.image();
        let unfit =
            || Error::from(Image::Arch { available: image.archs.join(", "), device: device.info().arch.clone() });
        if !image.archs.contains(&device.info().arch.as_str()) {
            return Err(unfit());
        }
        // SAFETY: the image is a whole bundle of the build script's, and lives for the rest of the program.
        unsafe { Module::load_bytes(device, image.bytes, Kernel::names(), image.fingerprint, unfit) }
    }

    /// An image of a user.
    pub(crate) fn load_user(device: &Device, bytes: &[u8], names: &[&str]) -> Result<Module> {
        image::check_hip(bytes).map_err(|why| Image::Broken { target: "hip", why })?;
        let device_arch = device.info().arch.clone();
        let unfit = || Image::Arch { available: "other architectures".to_owned(), device: device_arch }.into();
        // SAFETY: by what it says of its own length the image is whole; the copy lives for the rest of the program.
        unsafe { Module::load_bytes(device, image::keep(bytes), names, 0, unfit) }
    }

    /// # Safety
    /// The bytes are as long as they say of themselves.
    unsafe fn load_bytes(
        device: &Device,
        bytes: &'static [u8],
        names: &[&str],
        fingerprint: u64,
        unfit: impl FnOnce() -> Error,
    ) -> Result<Module> {
        let _current = device.enter()?;
        let driver = device.driver();
        let mut module: hipModule_t = std::ptr::null_mut();
        // SAFETY: the caller's promise of the bytes; the output outlives the call.
        match unsafe { (driver.hipModuleLoadData)(&raw mut module, bytes.as_ptr().cast()) } {
            sys::hipErrorNoBinaryForGpu => return Err(unfit()),
            sys::hipErrorInvalidImage => {
                return Err(Image::Broken { target: "hip", why: "the runtime does not take it".to_owned() }.into());
            }
            result => driver.check("hipModuleLoadData", result)?,
        }
        let mut functions: Vec<hipFunction_t> = vec![std::ptr::null_mut(); names.len()];
        for (function, name) in functions.iter_mut().zip(names) {
            let missing = || Error::from(Image::Kernel { target: "hip", kernel: (*name).to_owned() });
            let entry = CString::new(*name).map_err(|_| missing())?;
            // SAFETY: the module is loaded, the name ends with a null, the output outlives the call.
            match unsafe { (driver.hipModuleGetFunction)(function, module, entry.as_ptr()) } {
                sys::hipErrorNotFound => return Err(missing()),
                result => driver.check("hipModuleGetFunction", result)?,
            }
        }
        tracing::debug!(device = ?device, arch = device.info().arch, "loaded the kernel image");
        Ok(Module(Arc::new(ModuleInner { device: device.clone(), functions, fingerprint })))
    }

    /// The architecture of the code that the runtime took from the image.
    pub fn code(&self) -> String {
        self.0.device.info().arch.clone()
    }

    /// The runtime's handle of a kernel, for measurements beside the library. It is loaded, and stays so.
    pub fn function(&self, kernel: Kernel) -> hipFunction_t {
        self.0.functions[kernel.index()]
    }

    fn entry(&self, kernel: Entry) -> Result<hipFunction_t> {
        let missing = || Image::Kernel { target: "hip", kernel: format!("{kernel:?}") }.into();
        self.0.functions.get(kernel.0).copied().ok_or_else(missing)
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        self.0.fingerprint
    }

    pub(crate) fn resident_blocks(&self, kernel: Entry, threads: u32) -> Result<u32> {
        let _current = self.0.device.enter()?;
        let driver = self.0.device.driver();
        let mut blocks = 0;
        let function = self.entry(kernel)?;
        // SAFETY: the function is loaded; the output outlives the call.
        let result = unsafe {
            (driver.hipModuleOccupancyMaxActiveBlocksPerMultiprocessor)(
                &raw mut blocks,
                function,
                threads.cast_signed(),
                0,
            )
        };
        driver.check("hipModuleOccupancyMaxActiveBlocksPerMultiprocessor", result)?;
        Ok(to_u32(blocks) * self.0.device.info().compute_units)
    }

    /// # Safety
    /// As [`Backend::launch`](signal_core::Backend::launch).
    pub(crate) unsafe fn launch(&self, stream: &Stream, launch: &Launch<'_, Rocm>) -> Result<()> {
        let _current = self.0.device.enter()?;
        stream.keep(launch.uses)?;
        let driver = self.0.device.driver();
        let mut arguments = [launch.params.as_ptr().cast_mut().cast::<c_void>()];
        let function = self.entry(launch.kernel)?;
        let _launching = launching();
        // SAFETY: the function takes one struct, whose bytes the caller promises; the runtime copies it and does not write through
        // the pointer. Stream and function are alive and of one device.
        let result = unsafe {
            (driver.hipModuleLaunchKernel)(
                function,
                launch.grid,
                1,
                1,
                launch.threads,
                1,
                1,
                0,
                stream.raw(),
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        driver.check("hipModuleLaunchKernel", result)
    }
}
