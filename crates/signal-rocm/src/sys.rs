//! The HIP runtime's C interface: what this crate uses of it, no more.
//!
//! Enums are integers, since a library of another version may return values that this list lacks. Signatures, numbers and sizes are those of
//! hip_runtime_api.h of ROCm 5.2 and 6.0; where the two differ, both are here.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $($(#[$doc])* pub type $name = *mut c_void;)*
    };
}

handles! {
    /// A stream.
    hipStream_t,
    /// An event.
    hipEvent_t,
    /// A captured graph.
    hipGraph_t,
    /// One that can be launched.
    hipGraphExec_t,
    /// What a graph keeps alive.
    hipUserObject_t,
    /// A loaded image.
    hipModule_t,
    /// A kernel of it.
    hipFunction_t,
}

/// What each function returns.
pub type hipError_t = c_uint;
/// Success.
pub const hipSuccess: hipError_t = 0;
/// A bad argument.
pub const hipErrorInvalidValue: hipError_t = 1;
/// No memory left.
pub const hipErrorOutOfMemory: hipError_t = 2;
/// No device.
pub const hipErrorNoDevice: hipError_t = 100;
/// No such device.
pub const hipErrorInvalidDevice: hipError_t = 101;
/// The image is none.
pub const hipErrorInvalidImage: hipError_t = 200;
/// The image has no code for the device.
pub const hipErrorNoBinaryForGpu: hipError_t = 209;
/// No such symbol.
pub const hipErrorNotFound: hipError_t = 500;
/// Work has not ended.
pub const hipErrorNotReady: hipError_t = 600;
/// It has been enabled before.
pub const hipErrorPeerAccessAlreadyEnabled: hipError_t = 704;
/// Not on this system.
pub const hipErrorNotSupported: hipError_t = 801;

/// Compute units.
pub const hipDeviceAttributeMultiprocessorCount: c_uint = 63;
/// Lanes of a wave.
pub const hipDeviceAttributeWarpSize: c_uint = 87;
/// Of the counter that kernels read, in kHz: since ROCm 5.6.
pub const hipDeviceAttributeWallClockRate: c_uint = 10017;

/// Memory that no cache of the device holds.
pub const hipDeviceMallocUncached: c_uint = 3;
/// Memory that caches hold, and kernels see coherently.
pub const hipDeviceMallocFinegrained: c_uint = 1;
/// Pinned memory for all devices.
pub const hipHostMallocPortable: c_uint = 1;
/// Pinned memory that devices can address.
pub const hipHostMallocMapped: c_uint = 2;
/// Pinned memory that host and kernels see coherently while these run.
pub const hipHostMallocCoherent: c_uint = 0x4000_0000;
/// Memory of the process, pinned for all devices.
pub const hipHostRegisterPortable: c_uint = 1;
/// Memory of the process, pinned such that devices can address it.
pub const hipHostRegisterMapped: c_uint = 2;
/// A stream that does not wait for the NULL stream.
pub const hipStreamNonBlocking: c_uint = 1;
/// No restriction on other calls meanwhile.
pub const hipStreamCaptureModeRelaxed: c_uint = 2;
/// The stream is not capturing.
pub const hipStreamCaptureStatusNone: c_uint = 0;
/// The stream is capturing.
pub const hipStreamCaptureStatusActive: c_uint = 1;
/// The destructor of a user object is not waited for.
pub const hipUserObjectNoDestructorSync: c_uint = 1;
/// The graph takes over the caller's reference.
pub const hipGraphUserObjectMove: c_uint = 1;
/// What an import has to ask for since ROCm 6.0; before, it was 0. Nothing else is taken.
pub const hipIpcMemLazyEnablePeerAccess: c_uint = 1;
/// Infinity Fabric, of `hipExtGetLinkTypeAndHopCount`.
pub const HSA_AMD_LINK_INFO_TYPE_XGMI: u32 = 4;

/// A device's identity.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hipUUID {
    /// Its bytes.
    pub bytes: [c_char; 16],
}

/// A handle by which another process opens memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct hipIpcMemHandle_t {
    /// Its bytes.
    pub reserved: [c_char; 64],
}

/// `hipDeviceProp_t` as of ROCm 6.0, as far as it is read.
#[repr(C)]
pub struct hipDeviceProp_tR0600 {
    /// Product name.
    pub name: [c_char; 256],
    before_arch: [u64; 113],
    /// Such as gfx942:sramecc+:xnack-.
    pub gcnArchName: [c_char; 256],
    behind_arch: [u64; 7],
    /// Room, should a later version write more.
    spare: [u64; 512],
}

/// `hipDeviceProp_t` before ROCm 6.0, likewise.
#[repr(C)]
pub struct hipDeviceProp_tR0000 {
    /// Product name.
    pub name: [c_char; 256],
    before_arch: [c_int; 35],
    /// As above.
    pub gcnArchName: [c_char; 256],
    spare: [u64; 512],
}

const _: () = assert!(std::mem::offset_of!(hipDeviceProp_tR0600, gcnArchName) == 1160);
const _: () = assert!(std::mem::offset_of!(hipDeviceProp_tR0600, spare) == 1472);
const _: () = assert!(std::mem::offset_of!(hipDeviceProp_tR0000, gcnArchName) == 396);
const _: () = assert!(size_of::<hipUUID>() == 16 && size_of::<hipIpcMemHandle_t>() == 64);

/// Called when the last reference to a user object is gone.
pub type hipHostFn_t = unsafe extern "C" fn(*mut c_void);

/// The functions: a table of their addresses, and the names of all of them.
macro_rules! functions {
    (
        required { $($name:ident($($argument:ty),* $(,)?);)* }
        optional { $($since:literal $rare:ident($($rare_argument:ty),* $(,)?);)* }
    ) => {
        /// The library's functions by their names, each as the header has it.
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> hipError_t,)*
            $(pub(crate) $rare: Option<unsafe extern "C" fn($($rare_argument),*) -> hipError_t>,)*
            pub(crate) hipGetErrorName: unsafe extern "C" fn(hipError_t) -> *const c_char,
        }

        /// What the library must have.
        pub(crate) const REQUIRED: &[&str] = &[$(stringify!($name),)* "hipGetErrorName"];

        /// What it may lack, and the ROCm version that brought it.
        #[cfg(test)]
        pub(crate) const OPTIONAL: &[(&str, &str)] = &[$((stringify!($rare), $since),)*];

        impl Functions {
            /// Takes the address of each from `find`.
            ///
            /// # Errors
            /// The names of those that it does not find.
            ///
            /// # Safety
            /// What `find` gives are the functions of this name of a HIP library, which stays loaded.
            pub(crate) unsafe fn resolve(find: impl Fn(&'static str) -> Option<*const c_void>) -> Result<Self, Vec<&'static str>> {
                let missing: Vec<_> = REQUIRED.iter().copied().filter(|name| find(name).is_none()).collect();
                let address = |name| find(name).ok_or_else(|| missing.clone());
                Ok(Functions {
                    // SAFETY: the header gives the function this signature; a function's address and a pointer to it are of one size.
                    $($name: unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($argument),*) -> hipError_t>(address(stringify!($name))?) },)*
                    // SAFETY: as above.
                    $($rare: find(stringify!($rare)).map(|f| unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($rare_argument),*) -> hipError_t>(f) }),)*
                    // SAFETY: as above.
                    hipGetErrorName: unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn(hipError_t) -> *const c_char>(address("hipGetErrorName")?) },
                })
            }
        }
    };
}

functions! {
    required {
        hipInit(c_uint);
        hipRuntimeGetVersion(*mut c_int);
        hipGetDeviceCount(*mut c_int);
        hipDeviceGetAttribute(*mut c_int, c_uint, c_int);
        hipDeviceGetName(*mut c_char, c_int, c_int);
        hipDeviceGetUuid(*mut hipUUID, c_int);
        hipDeviceGetPCIBusId(*mut c_char, c_int, c_int);
        hipDeviceTotalMem(*mut usize, c_int);
        hipSetDevice(c_int);
        hipGetDevice(*mut c_int);
        hipDeviceCanAccessPeer(*mut c_int, c_int, c_int);
        hipDeviceEnablePeerAccess(c_int, c_uint);
        hipExtGetLinkTypeAndHopCount(c_int, c_int, *mut u32, *mut u32);
        hipMalloc(*mut *mut c_void, usize);
        hipExtMallocWithFlags(*mut *mut c_void, usize, c_uint);
        hipFree(*mut c_void);
        hipHostMalloc(*mut *mut c_void, usize, c_uint);
        hipHostFree(*mut c_void);
        hipHostRegister(*mut c_void, usize, c_uint);
        hipHostUnregister(*mut c_void);
        hipHostGetDevicePointer(*mut *mut c_void, *mut c_void, c_uint);
        hipIpcGetMemHandle(*mut hipIpcMemHandle_t, *mut c_void);
        hipIpcOpenMemHandle(*mut *mut c_void, hipIpcMemHandle_t, c_uint);
        hipIpcCloseMemHandle(*mut c_void);
        hipMemcpyHtoDAsync(*mut c_void, *mut c_void, usize, hipStream_t);
        hipMemcpyDtoHAsync(*mut c_void, *mut c_void, usize, hipStream_t);
        hipMemcpyDtoDAsync(*mut c_void, *mut c_void, usize, hipStream_t);
        hipMemsetD32Async(*mut c_void, c_int, usize, hipStream_t);
        hipStreamCreateWithFlags(*mut hipStream_t, c_uint);
        hipStreamDestroy(hipStream_t);
        hipStreamQuery(hipStream_t);
        hipStreamSynchronize(hipStream_t);
        hipStreamWaitEvent(hipStream_t, hipEvent_t, c_uint);
        hipStreamIsCapturing(hipStream_t, *mut c_uint);
        hipStreamGetCaptureInfo_v2(hipStream_t, *mut c_uint, *mut c_ulonglong, *mut hipGraph_t, *mut *const c_void, *mut usize);
        hipStreamBeginCapture(hipStream_t, c_uint);
        hipStreamEndCapture(hipStream_t, *mut hipGraph_t);
        hipEventCreateWithFlags(*mut hipEvent_t, c_uint);
        hipEventDestroy(hipEvent_t);
        hipEventRecord(hipEvent_t, hipStream_t);
        hipEventQuery(hipEvent_t);
        hipEventElapsedTime(*mut f32, hipEvent_t, hipEvent_t);
        hipGraphInstantiate(*mut hipGraphExec_t, hipGraph_t, *mut *mut c_void, *mut c_char, usize);
        hipGraphLaunch(hipGraphExec_t, hipStream_t);
        hipGraphDestroy(hipGraph_t);
        hipGraphExecDestroy(hipGraphExec_t);
        hipModuleLoadData(*mut hipModule_t, *const c_void);
        hipModuleGetFunction(*mut hipFunction_t, hipModule_t, *const c_char);
        hipModuleLaunchKernel(hipFunction_t, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, hipStream_t, *mut *mut c_void, *mut *mut c_void);
        hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(*mut c_int, hipFunction_t, c_int, usize);
    }
    optional {
        // One of these two fills in a device's properties.
        "6.0" hipGetDevicePropertiesR0600(*mut hipDeviceProp_tR0600, c_int);
        "1.5" hipGetDeviceProperties(*mut hipDeviceProp_tR0000, c_int);
        // Without them nothing keeps a graph's buffers alive, and no call is captured.
        "5.3" hipUserObjectCreate(*mut hipUserObject_t, *mut c_void, hipHostFn_t, c_uint, c_uint);
        "5.3" hipUserObjectRelease(hipUserObject_t, c_uint);
        "5.3" hipGraphRetainUserObject(hipGraph_t, hipUserObject_t, c_uint, c_uint);
    }
}

impl Default for hipDeviceProp_tR0600 {
    fn default() -> Self {
        let (name, gcnArchName) = ([0; 256], [0; 256]);
        hipDeviceProp_tR0600 { name, before_arch: [0; 113], gcnArchName, behind_arch: [0; 7], spare: [0; 512] }
    }
}

impl Default for hipDeviceProp_tR0000 {
    fn default() -> Self {
        hipDeviceProp_tR0000 { name: [0; 256], before_arch: [0; 35], gcnArchName: [0; 256], spare: [0; 512] }
    }
}
