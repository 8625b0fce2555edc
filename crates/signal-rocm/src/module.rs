//! The kernel image, loaded on one device.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use signal_core::error::{Error, Image, Result};
use signal_core::{Kernel, Launch};

use crate::Rocm;
use crate::device::Device;
use crate::driver::to_u32;
use crate::quiet::launching;
use crate::stream::Stream;
use crate::sys::{self, hipFunction_t, hipModule_t};

/// The image on one device, every kernel of it loaded. Stays loaded for the rest of the program.
#[derive(Clone, Debug)]
pub struct Module(Arc<ModuleInner>);

#[derive(Debug)]
struct ModuleInner {
    device: Device,
    functions: [hipFunction_t; Kernel::COUNT],
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
        let _current = device.enter()?;
        let driver = device.driver();
        let mut module: hipModule_t = std::ptr::null_mut();
        // SAFETY: the image is a bundle of code objects, which says where it ends; the output outlives the call.
        match unsafe { (driver.hipModuleLoadData)(&raw mut module, image.bytes.as_ptr().cast()) } {
            sys::hipErrorNoBinaryForGpu => return Err(unfit()),
            result => driver.check("hipModuleLoadData", result)?,
        }
        let mut functions: [hipFunction_t; Kernel::COUNT] = [std::ptr::null_mut(); Kernel::COUNT];
        for (function, name) in functions.iter_mut().zip(Kernel::names()) {
            let missing = || Error::from(Image::Kernel { target: "hip", kernel: (*name).to_owned() });
            let entry = CString::new(*name).map_err(|_| missing())?;
            // SAFETY: the module is loaded, the name ends with a null, the output outlives the call.
            match unsafe { (driver.hipModuleGetFunction)(function, module, entry.as_ptr()) } {
                sys::hipErrorNotFound => return Err(missing()),
                result => driver.check("hipModuleGetFunction", result)?,
            }
        }
        tracing::debug!(device = ?device, arch = device.info().arch, "loaded the kernel image");
        Ok(Module(Arc::new(ModuleInner { device: device.clone(), functions })))
    }

    /// The architecture of the code that the runtime took from the image.
    pub fn code(&self) -> String {
        self.0.device.info().arch.clone()
    }

    /// The runtime's handle of a kernel, for measurements beside the library. It is loaded, and stays so.
    pub fn function(&self, kernel: Kernel) -> hipFunction_t {
        self.0.functions[kernel.index()]
    }

    pub(crate) fn fingerprint(&self) -> u64 {
        self.0.device.image().fingerprint
    }

    pub(crate) fn resident_blocks(&self, kernel: Kernel, threads: u32) -> Result<u32> {
        let _current = self.0.device.enter()?;
        let driver = self.0.device.driver();
        let mut blocks = 0;
        let function = self.function(kernel);
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
        let function = self.function(launch.kernel);
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
