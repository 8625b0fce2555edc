//! Devices: enumerated once.

use std::ffi::{CStr, c_char, c_int};
use std::fmt;
use std::sync::{Arc, Mutex};

use signal_core::deferred::{Graves, Slots, lock};
use signal_core::error::{ApiMisuse, Image, Result};
use signal_core::{DeviceFamily, DeviceInfo};

use crate::driver::{Current, Driver, to_u32};
use crate::graph::Captured;
use crate::memory::Memory;
use crate::module::Module;
use crate::stream::StreamInner;
use crate::sys::{self, hipUUID};

/// Most threads in a block of any kernel: `kMaxBlockThreads` in `kernels/hip/platform.h`.
const MAX_BLOCK_THREADS: u32 = 512;

/// Ticks a second of the counter that kernels read, where the runtime does not say: that of all GPUs that there is code for.
const COUNTER_HZ: u64 = 100_000_000;

/// The kernel image that the build embedded.
#[derive(Clone, Copy, Debug, Eq)]
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

impl PartialEq for RocmImage {
    /// Images are told apart by where they lie.
    fn eq(&self, other: &RocmImage) -> bool {
        std::ptr::eq(self.bytes, other.bytes)
    }
}

/// The opened runtime, with an image.
#[derive(Clone, Debug)]
pub struct Rocm {
    driver: Driver,
    image: RocmImage,
    devices: Arc<[Device]>,
}

/// What was opened, once for each image: modules stay for the rest of the program in any case, and all streams of a GPU have to be
/// known in one place (quiet.rs).
static OPENED: Mutex<Vec<Rocm>> = Mutex::new(Vec::new());

/// All devices of the process.
pub(crate) fn opened() -> Vec<Device> {
    lock(&OPENED).iter().flat_map(Rocm::all_devices).collect()
}

impl Rocm {
    /// Opens the runtime with an image. Opening it again gives the same devices.
    ///
    /// # Errors
    /// [`Error::Image`](signal_core::Error::Image) without an image;
    /// [`Error::Unavailable`](signal_core::Error::Unavailable) without libamdhip64, with one that is too old, or without a device;
    /// errors of the runtime.
    pub fn open(image: RocmImage) -> Result<Self> {
        if image.bytes.is_empty() {
            return Err(Image::Missing { target: "hip", missing: image.missing.to_owned() }.into());
        }
        let mut opened = lock(&OPENED);
        if let Some(rocm) = opened.iter().find(|rocm| rocm.image == image) {
            return Ok(rocm.clone());
        }
        let driver = Driver::open()?;
        let mut count = 0;
        // SAFETY: writes one integer, which outlives the call.
        let result = unsafe { (driver.hipGetDeviceCount)(&raw mut count) };
        if result == sys::hipErrorNoDevice || (result == sys::hipSuccess && count == 0) {
            return Err(driver.no_device());
        }
        driver.check("hipGetDeviceCount", result)?;
        let devices = (0..count).map(|number| Device::open(driver, image, number)).collect::<Result<Vec<_>>>()?;
        let rocm = Rocm { driver, image, devices: devices.into() };
        opened.push(rocm.clone());
        Ok(rocm)
    }

    /// The runtime's version, as `hipRuntimeGetVersion` gives it.
    pub fn driver_version(&self) -> i32 {
        self.driver.version
    }

    pub(crate) fn all_devices(&self) -> Vec<Device> {
        self.devices.to_vec()
    }
}

/// An AMD GPU.
#[derive(Clone)]
pub struct Device(Arc<DeviceInner>);

struct DeviceInner {
    driver: Driver,
    image: RocmImage,
    number: c_int,
    info: DeviceInfo,
    wave: u32,
    module: Mutex<Option<Module>>,
    slots: Slots<StreamInner>,
    graves: Graves<StreamInner, Memory, Captured>,
}

impl Device {
    fn open(driver: Driver, image: RocmImage, number: c_int) -> Result<Device> {
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer, which outlives the call.
            let result = unsafe { (driver.hipDeviceGetAttribute)(&raw mut value, attribute, number) };
            driver.check("hipDeviceGetAttribute", result).map(|()| to_u32(value))
        };
        let mut memory_bytes = 0usize;
        // SAFETY: writes one integer, which outlives the call.
        driver.check("hipDeviceTotalMem", unsafe { (driver.hipDeviceTotalMem)(&raw mut memory_bytes, number) })?;
        let mut uuid = hipUUID { bytes: [0; 16] };
        // SAFETY: writes one UUID, which outlives the call.
        driver.check("hipDeviceGetUuid", unsafe { (driver.hipDeviceGetUuid)(&raw mut uuid, number) })?;
        let text = |call, fill: &dyn Fn(*mut c_char, c_int) -> sys::hipError_t| -> Result<String> {
            let mut bytes = [0 as c_char; 128];
            driver.check(call, fill(bytes.as_mut_ptr(), bytes.len() as c_int - 1))?;
            // SAFETY: the last byte is null in any case.
            Ok(unsafe { CStr::from_ptr(bytes.as_ptr()) }.to_string_lossy().into_owned())
        };
        // SAFETY: the call writes at most `len` bytes, a null among them.
        let name = text("hipDeviceGetName", &|at, len| unsafe { (driver.hipDeviceGetName)(at, len, number) })?;
        // SAFETY: as above.
        let pci = text("hipDeviceGetPCIBusId", &|at, len| unsafe { (driver.hipDeviceGetPCIBusId)(at, len, number) })?;
        // The runtime gives 16 characters of its own: those of the unique id that the driver knows the GPU by.
        let unique: String = uuid.bytes.iter().map(|byte| identity(*byte as u8)).collect();
        let info = DeviceInfo {
            name,
            // Partitions of one GPU share its id, not its PCI address.
            uuid: format!("GPU-{unique}-{pci}"),
            pci: Some(pci),
            arch: driver.arch(number)?,
            family: DeviceFamily::Amd,
            memory_bytes: memory_bytes as u64,
            compute_units: attribute(sys::hipDeviceAttributeMultiprocessorCount)?,
            // In kHz; a runtime that does not know the question has an error for it.
            clock_hz: attribute(sys::hipDeviceAttributeWallClockRate)
                .ok()
                .filter(|khz| *khz > 0)
                .map_or(COUNTER_HZ, |khz| u64::from(khz) * 1000),
            max_block_threads: MAX_BLOCK_THREADS,
        };
        let wave = attribute(sys::hipDeviceAttributeWarpSize)?;
        Ok(Device(Arc::new(DeviceInner {
            driver,
            image,
            number,
            info,
            wave,
            module: Mutex::new(None),
            slots: Slots::default(),
            graves: Graves::default(),
        })))
    }

    pub(crate) fn info(&self) -> &DeviceInfo {
        &self.0.info
    }

    /// Lanes of a wave: 64 on CDNA, 32 on RDNA.
    pub fn wave_size(&self) -> u32 {
        self.0.wave
    }

    pub(crate) fn driver(&self) -> &Driver {
        &self.0.driver
    }

    pub(crate) fn image(&self) -> &RocmImage {
        &self.0.image
    }

    pub(crate) fn number(&self) -> c_int {
        self.0.number
    }

    pub(crate) fn slots(&self) -> &Slots<StreamInner> {
        &self.0.slots
    }

    pub(crate) fn graves(&self) -> &Graves<StreamInner, Memory, Captured> {
        &self.0.graves
    }

    /// Makes this device current while the guard lives.
    pub(crate) fn enter(&self) -> Result<Current> {
        self.driver().enter(self.number())
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

/// A character of an identity as it is, anything else by its number.
fn identity(byte: u8) -> String {
    if byte.is_ascii_alphanumeric() { char::from(byte).to_string() } else { format!("{byte:02x}") }
}

/// With blocking launches the first rank's kernel would wait, inside its launch, for ranks that the same thread has yet
/// to launch.
pub(crate) fn check_local_group(devices: &[Device]) -> Result<()> {
    for name in ["HIP_LAUNCH_BLOCKING", "CUDA_LAUNCH_BLOCKING", "AMD_SERIALIZE_KERNEL"] {
        let blocking = std::env::var(name).ok().filter(|value| value != "0" && !value.is_empty());
        if let Some(value) = blocking.filter(|_| devices.len() > 1) {
            let why = "several ranks of one process need launches that return at once; unset it".to_owned();
            return Err(ApiMisuse::Setting { name, value, why }.into());
        }
    }
    Ok(())
}
