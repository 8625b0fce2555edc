//! Devices: enumerated once, their primary context retained at first use.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};

use cudarc::driver::sys::{self, CUcontext, CUdevice, CUdevice_attribute as Attribute};
use signal_core::deferred::{Graves, Slots, lock};
use signal_core::error::{ApiMisuse, Result, Unavailable};
use signal_core::{DeviceFamily, DeviceInfo};

use crate::driver::{Current, Driver, check, unavailable};
use crate::graph::Captured;
use crate::memory::Memory;
use crate::module::Module;
use crate::stream::StreamInner;

/// Most threads in a block of any kernel: `kMaxBlockThreads` in `kernels/cuda/platform.h`.
const MAX_BLOCK_THREADS: u32 = 512;

/// The kernel image that the build embedded.
#[derive(Clone, Copy, Debug, Eq)]
pub struct CudaImage {
    /// A fat binary; empty if the build had no compiler.
    pub bytes: &'static [u8],
    /// The architectures that it holds code for: `sm_90` machine code, `compute_90` PTX.
    pub archs: &'static [&'static str],
    /// Of sources, flags and compiler.
    pub fingerprint: u64,
    /// What the build was missing.
    pub missing: &'static str,
}

impl PartialEq for CudaImage {
    /// Images are told apart by where they lie.
    fn eq(&self, other: &CudaImage) -> bool {
        std::ptr::eq(self.bytes, other.bytes)
    }
}

/// The opened driver, with an image.
#[derive(Clone, Debug)]
pub struct Cuda {
    driver: Driver,
    image: CudaImage,
    devices: Arc<[Device]>,
}

/// What was opened, once for each image: contexts and modules stay for the rest of the program in any case, and all streams of
/// a GPU have to be known in one place (quiet.rs).
static OPENED: Mutex<Vec<Cuda>> = Mutex::new(Vec::new());

/// All devices of the process.
pub(crate) fn opened() -> Vec<Device> {
    lock(&OPENED).iter().flat_map(Cuda::all_devices).collect()
}

impl Cuda {
    /// Opens the driver with an image. Opening it again gives the same devices.
    ///
    /// # Errors
    /// [`Error::Image`](signal_core::Error::Image) without an image;
    /// [`Error::Unavailable`](signal_core::Error::Unavailable) without libcuda, with one that is too old, or without a
    /// device; errors of the driver.
    pub fn open(image: CudaImage) -> Result<Self> {
        if image.bytes.is_empty() {
            let missing = image.missing.to_owned();
            return Err(signal_core::error::Image::Missing { target: "cuda", missing }.into());
        }
        let mut opened = lock(&OPENED);
        if let Some(cuda) = opened.iter().find(|cuda| cuda.image == image) {
            return Ok(cuda.clone());
        }
        let driver = Driver::open()?;
        let mut count = 0;
        // SAFETY: writes one integer, which outlives the call.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        let devices = (0..count).map(|i| Device::open(driver, image, i)).collect::<Result<Vec<_>>>()?;
        if devices.is_empty() {
            return Err(unavailable(Unavailable::NoDevice("the driver reports none".to_owned())));
        }
        let cuda = Cuda { driver, image, devices: devices.into() };
        opened.push(cuda.clone());
        Ok(cuda)
    }

    /// The driver's CUDA version: 13000 for 13.0.
    pub fn driver_version(&self) -> i32 {
        self.driver.version
    }

    pub(crate) fn all_devices(&self) -> Vec<Device> {
        self.devices.to_vec()
    }
}

/// A CUDA device.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

struct DeviceInner {
    driver: Driver,
    image: CudaImage,
    handle: CUdevice,
    info: DeviceInfo,
    /// Compute capability.
    capability: (u32, u32),
    shares_by_descriptor: bool,
    context: OnceLock<Context>,
    module: Mutex<Option<Module>>,
    slots: Slots<StreamInner>,
    graves: Graves<StreamInner, Memory, Captured>,
}

/// A primary context, retained for the rest of the program: releasing it would pull memory from under other users.
#[derive(Clone, Copy)]
struct Context(CUcontext);

// SAFETY: contexts may be used from any thread; the driver serialises what must be.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Device {
    fn open(driver: Driver, image: CudaImage, ordinal: c_int) -> Result<Device> {
        let mut handle = 0;
        // SAFETY: writes one integer, which outlives the call.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut handle, ordinal) })?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer, which outlives the call.
            let result = unsafe { sys::cuDeviceGetAttribute(&raw mut value, attribute, handle) };
            check("cuDeviceGetAttribute", result).map(|()| value as u32)
        };
        let mut memory_bytes = 0usize;
        // SAFETY: writes one integer, which outlives the call.
        check("cuDeviceTotalMem", unsafe { sys::cuDeviceTotalMem_v2(&raw mut memory_bytes, handle) })?;
        let mut uuid = sys::CUuuid { bytes: [0; 16] };
        // SAFETY: writes one UUID, which outlives the call.
        check("cuDeviceGetUuid", unsafe { sys::cuDeviceGetUuid_v2(&raw mut uuid, handle) })?;
        let hex: Vec<String> = uuid.bytes.iter().map(|&b| format!("{:02x}", b as u8)).collect();
        let part = |range: std::ops::Range<usize>| hex[range].concat();
        let uuid = format!("GPU-{}-{}-{}-{}-{}", part(0..4), part(4..6), part(6..8), part(8..10), part(10..16));

        let capability = (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let info = DeviceInfo {
            // SAFETY: the call writes at most `len` bytes, a null among them.
            name: text("cuDeviceGetName", |at, len| unsafe { sys::cuDeviceGetName(at, len, handle) })?,
            uuid,
            // SAFETY: as above.
            pci: Some(text("cuDeviceGetPCIBusId", |at, len| unsafe { sys::cuDeviceGetPCIBusId(at, len, handle) })?),
            arch: format!("sm_{}{}", capability.0, capability.1),
            family: DeviceFamily::Nvidia,
            memory_bytes: memory_bytes as u64,
            compute_units: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            clock_hz: 1_000_000_000, // %globaltimer counts nanoseconds
            max_block_threads: MAX_BLOCK_THREADS,
        };
        Ok(Device(Arc::new(DeviceInner {
            driver,
            image,
            handle,
            info,
            capability,
            shares_by_descriptor: attribute(
                Attribute::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
            )? != 0,
            context: OnceLock::new(),
            module: Mutex::new(None),
            slots: Slots::default(),
            graves: Graves::default(),
        })))
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    pub(crate) fn driver(&self) -> &Driver {
        &self.0.driver
    }

    pub(crate) fn image(&self) -> &CudaImage {
        &self.0.image
    }

    pub(crate) fn handle(&self) -> CUdevice {
        self.0.handle
    }

    pub(crate) fn capability(&self) -> (u32, u32) {
        self.0.capability
    }

    /// Whether memory of this device can be handed to other processes.
    pub(crate) fn shares_by_descriptor(&self) -> bool {
        self.0.shares_by_descriptor
    }

    pub(crate) fn slots(&self) -> &Slots<StreamInner> {
        &self.0.slots
    }

    pub(crate) fn graves(&self) -> &Graves<StreamInner, Memory, Captured> {
        &self.0.graves
    }

    pub(crate) fn context(&self) -> Result<CUcontext> {
        if let Some(context) = self.0.context.get() {
            return Ok(context.0);
        }
        let mut context: CUcontext = std::ptr::null_mut();
        // SAFETY: writes one pointer, which outlives the call. Two threads may both retain: one count too many of a
        // context that is never released.
        let result = unsafe { sys::cuDevicePrimaryCtxRetain(&raw mut context, self.0.handle) };
        check("cuDevicePrimaryCtxRetain", result)?;
        Ok(self.0.context.get_or_init(|| Context(context)).0)
    }

    /// Makes this device's context current while the guard lives.
    pub(crate) fn enter(&self) -> Result<Current> {
        Current::enter(self.context()?)
    }

    /// The image on this device, loaded once.
    pub(crate) fn module(&self) -> Result<Module> {
        let mut module = lock(&self.0.module);
        if let Some(module) = &*module {
            return Ok(module.clone());
        }
        Ok(module.insert(Module::load(self)?).clone())
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Device) -> bool {
        Arc::ptr_eq(&self.0, &other.0) || self.0.info.uuid == other.0.info.uuid
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.0.info.name, self.0.info.uuid)
    }
}

/// With blocking launches the first rank's kernel would wait, inside its launch, for ranks that the same thread has yet
/// to launch.
pub(crate) fn check_local_group(devices: &[Device]) -> Result<()> {
    let blocking = std::env::var("CUDA_LAUNCH_BLOCKING").ok().filter(|v| v != "0" && !v.is_empty());
    match blocking {
        Some(value) if devices.len() > 1 => {
            let why = "several ranks of one process need launches that return at once; unset it".to_owned();
            Err(ApiMisuse::Setting { name: "CUDA_LAUNCH_BLOCKING", value, why }.into())
        }
        _ => Ok(()),
    }
}

fn text(call: &'static str, fill: impl FnOnce(*mut std::ffi::c_char, c_int) -> sys::CUresult) -> Result<String> {
    let mut bytes = [0 as std::ffi::c_char; 128];
    check(call, fill(bytes.as_mut_ptr(), bytes.len() as c_int - 1))?;
    // SAFETY: the last byte is null in any case.
    Ok(unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_string_lossy().into_owned())
}
