//! Every function of the ROCm backend's table against hip-sys, whose bindings are of ROCm 5.4: arguments and result by number, size and
//! alignment, constants by value, structs by size and offsets. What hip-sys lacks is listed, so that it is known when that changes.
#![allow(non_snake_case)]

#[path = "../../../crates/signal-rocm/src/sys.rs"]
#[allow(dead_code, missing_docs)]
mod sys;

use std::ffi::c_void;
use std::mem::{align_of, offset_of, size_of};

use hip_sys::hiprt;

/// What an argument or a result is made of, as a caller sees it.
type Layout = (usize, usize);

/// The layouts of a function's result and arguments.
trait Shape {
    fn shape(&self) -> Vec<Layout>;
}

macro_rules! shapes {
    ($(($($argument:ident),*))*) => {
        $(impl<R, $($argument),*> Shape for unsafe extern "C" fn($($argument),*) -> R {
            fn shape(&self) -> Vec<Layout> {
                vec![(size_of::<R>(), align_of::<R>()), $((size_of::<$argument>(), align_of::<$argument>())),*]
            }
        })*
    };
}

shapes! {
    (A) (A, B) (A, B, C) (A, B, C, D) (A, B, C, D, E) (A, B, C, D, E, F) (A, B, C, D, E, F, G, H, I, J, K)
}

/// Compares functions by name; gives the names.
macro_rules! same {
    ($ours:ident, $($name:ident($($argument:tt),*);)*) => {{
        $(
            let theirs = hiprt::$name as unsafe extern "C" fn($($argument),*) -> _;
            assert_eq!($ours.$name.shape(), theirs.shape(), stringify!($name));
        )*
        vec![$(stringify!($name)),*]
    }};
}

/// The same of those that may be missing.
macro_rules! same_if_there {
    ($ours:ident, $($name:ident($($argument:tt),*);)*) => {{
        $(
            let theirs = hiprt::$name as unsafe extern "C" fn($($argument),*) -> _;
            assert_eq!($ours.$name.unwrap().shape(), theirs.shape(), stringify!($name));
        )*
        vec![$(stringify!($name)),*]
    }};
}

/// Debian's library, of ROCm 5.2, has none of these yet, which hip-sys declares: so that there is something to link.
mod missing {
    #[unsafe(no_mangle)]
    extern "C" fn hipUserObjectCreate() {}
    #[unsafe(no_mangle)]
    extern "C" fn hipUserObjectRelease() {}
    #[unsafe(no_mangle)]
    extern "C" fn hipGraphRetainUserObject() {}
}

#[test]
fn functions() {
    // SAFETY: nothing of the table is called.
    let ours = unsafe { sys::Functions::resolve(|_| Some(functions as *const c_void)) }.unwrap();
    let mut compared = same! { ours,
        hipInit(_);
        hipRuntimeGetVersion(_);
        hipGetDeviceCount(_);
        hipDeviceGetAttribute(_, _, _);
        hipDeviceGetName(_, _, _);
        hipDeviceGetUuid(_, _);
        hipDeviceGetPCIBusId(_, _, _);
        hipDeviceTotalMem(_, _);
        hipSetDevice(_);
        hipGetDevice(_);
        hipDeviceCanAccessPeer(_, _, _);
        hipDeviceEnablePeerAccess(_, _);
        hipExtGetLinkTypeAndHopCount(_, _, _, _);
        hipMalloc(_, _);
        hipExtMallocWithFlags(_, _, _);
        hipFree(_);
        hipHostMalloc(_, _, _);
        hipHostFree(_);
        hipHostRegister(_, _, _);
        hipHostUnregister(_);
        hipHostGetDevicePointer(_, _, _);
        hipIpcGetMemHandle(_, _);
        hipIpcOpenMemHandle(_, _, _);
        hipIpcCloseMemHandle(_);
        hipMemcpyHtoDAsync(_, _, _, _);
        hipMemcpyDtoHAsync(_, _, _, _);
        hipMemcpyDtoDAsync(_, _, _, _);
        hipMemsetD32Async(_, _, _, _);
        hipStreamCreateWithFlags(_, _);
        hipStreamDestroy(_);
        hipStreamQuery(_);
        hipStreamSynchronize(_);
        hipStreamWaitEvent(_, _, _);
        hipStreamIsCapturing(_, _);
        hipStreamGetCaptureInfo_v2(_, _, _, _, _, _);
        hipStreamBeginCapture(_, _);
        hipStreamEndCapture(_, _);
        hipEventCreateWithFlags(_, _);
        hipEventDestroy(_);
        hipEventRecord(_, _);
        hipEventQuery(_);
        hipEventElapsedTime(_, _, _);
        hipGraphInstantiate(_, _, _, _, _);
        hipGraphLaunch(_, _);
        hipGraphDestroy(_);
        hipGraphExecDestroy(_);
        hipModuleLoadData(_, _);
        hipModuleGetFunction(_, _, _);
        hipModuleLaunchKernel(_, _, _, _, _, _, _, _, _, _, _);
        hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(_, _, _, _);
        hipGetErrorName(_);
    };
    compared.sort_unstable();
    let mut required = sys::REQUIRED.to_vec();
    required.sort_unstable();
    assert_eq!(compared, required, "all that the table must have");

    let mut compared = same_if_there! { ours,
        hipGetDeviceProperties(_, _);
        hipUserObjectCreate(_, _, _, _, _);
        hipUserObjectRelease(_, _);
        hipGraphRetainUserObject(_, _, _, _);
    };
    // Of ROCm 6.0.
    compared.push("hipGetDevicePropertiesR0600");
    compared.sort_unstable();
    let mut optional: Vec<_> = sys::OPTIONAL.iter().map(|(name, _)| *name).collect();
    optional.sort_unstable();
    assert_eq!(compared, optional, "and what it may have");
}

#[test]
fn constants() {
    use hiprt::{hipDeviceAttribute_t as Attribute, hipError_t as Error};
    let errors = [
        (sys::hipSuccess, Error::hipSuccess),
        (sys::hipErrorInvalidValue, Error::hipErrorInvalidValue),
        (sys::hipErrorOutOfMemory, Error::hipErrorOutOfMemory),
        (sys::hipErrorNoDevice, Error::hipErrorNoDevice),
        (sys::hipErrorInvalidDevice, Error::hipErrorInvalidDevice),
        (sys::hipErrorInvalidImage, Error::hipErrorInvalidImage),
        (sys::hipErrorNoBinaryForGpu, Error::hipErrorNoBinaryForGpu),
        (sys::hipErrorNotFound, Error::hipErrorNotFound),
        (sys::hipErrorNotReady, Error::hipErrorNotReady),
        (sys::hipErrorPeerAccessAlreadyEnabled, Error::hipErrorPeerAccessAlreadyEnabled),
        (sys::hipErrorNotSupported, Error::hipErrorNotSupported),
    ];
    errors.into_iter().for_each(|(ours, theirs)| assert_eq!(ours, theirs as u32));
    let attributes = [
        (sys::hipDeviceAttributeMultiprocessorCount, Attribute::hipDeviceAttributeMultiprocessorCount),
        (sys::hipDeviceAttributeWarpSize, Attribute::hipDeviceAttributeWarpSize),
        (sys::hipDeviceAttributeWallClockRate, Attribute::hipDeviceAttributeWallClockRate),
    ];
    attributes.into_iter().for_each(|(ours, theirs)| assert_eq!(ours, theirs as u32));
    let others = [
        (sys::hipDeviceMallocFinegrained, hiprt::hipDeviceMallocFinegrained),
        (sys::hipHostMallocPortable, hiprt::hipHostMallocPortable),
        (sys::hipHostMallocMapped, hiprt::hipHostMallocMapped),
        (sys::hipHostMallocCoherent, hiprt::hipHostMallocCoherent),
        (sys::hipHostRegisterPortable, hiprt::hipHostRegisterPortable),
        (sys::hipHostRegisterMapped, hiprt::hipHostRegisterMapped),
        (sys::hipStreamNonBlocking, hiprt::hipStreamNonBlocking),
        (sys::hipStreamCaptureModeRelaxed, hiprt::hipStreamCaptureMode::hipStreamCaptureModeRelaxed as u32),
        (sys::hipStreamCaptureStatusNone, hiprt::hipStreamCaptureStatus::hipStreamCaptureStatusNone as u32),
        (sys::hipStreamCaptureStatusActive, hiprt::hipStreamCaptureStatus::hipStreamCaptureStatusActive as u32),
        (sys::hipUserObjectNoDestructorSync, hiprt::hipUserObjectFlags::hipUserObjectNoDestructorSync as u32),
        (sys::hipGraphUserObjectMove, hiprt::hipUserObjectRetainFlags::hipGraphUserObjectMove as u32),
        // Since ROCm 6.0 it is 1; the backend tries both.
        (0, hiprt::hipIpcMemLazyEnablePeerAccess),
    ];
    others.into_iter().for_each(|(ours, theirs)| assert_eq!(ours, theirs));
    // Of what the backend uses hip-sys has no hipDeviceMallocUncached (ROCm 5.7), nothing of hsa_amd_link_info_type_t (another header), and
    // not the struct of properties of ROCm 6.0.
    let lacking = (sys::hipDeviceMallocUncached, sys::HSA_AMD_LINK_INFO_TYPE_XGMI);
    assert_eq!(lacking, (3, 4));
}

#[test]
fn structs() {
    assert_eq!(size_of::<sys::hipUUID>(), size_of::<hiprt::hipUUID>());
    assert_eq!(size_of::<sys::hipIpcMemHandle_t>(), size_of::<hiprt::hipIpcMemHandle_t>());
    assert_eq!(align_of::<sys::hipIpcMemHandle_t>(), align_of::<hiprt::hipIpcMemHandle_t>());
    type Theirs = hiprt::hipDeviceProp_t;
    assert_eq!(offset_of!(sys::hipDeviceProp_tR0000, gcnArchName), offset_of!(Theirs, gcnArchName));
    assert_eq!(offset_of!(sys::hipDeviceProp_tR0000, name), offset_of!(Theirs, name));
    // Room for all that the library writes.
    assert!(size_of::<sys::hipDeviceProp_tR0000>() >= size_of::<Theirs>());
    // The test library writes so much.
    assert_eq!(size_of::<Theirs>(), 792);
}

/// The library that hip-sys is linked to has every function that the table must have.
#[test]
fn the_library_has_them() {
    let mut version = 0;
    // SAFETY: writes one integer.
    let result = unsafe { hiprt::hipRuntimeGetVersion(&raw mut version) };
    assert_eq!(result as u32, 0);
    assert!(version >= 50_000_000, "{version}");
}
