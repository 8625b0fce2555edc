//! The runtime library: found, checked for every symbol that is used, and its codes made into errors.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};

use libloading::Library;
use signal_core::error::{Error, Result, Unavailable};

use crate::sys::{self, Functions, hipDeviceProp_tR0000, hipDeviceProp_tR0600, hipError_t, hipGraph_t, hipStream_t};

/// Names under which the library is looked for.
const LIBRARIES: [&str; 4] = ["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];

/// Names of directories of ROCm itself, in which the library may be although the loader does not look there.
const DIRECTORIES: [&str; 2] = ["ROCM_PATH", "HIP_PATH"];

/// The one in which ROCm installs itself.
const DEFAULT_DIRECTORY: &str = "/opt/rocm";

/// The opened library. Never unloaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Driver {
    /// Of the runtime: 60032831 for ROCm 6.0.
    pub(crate) version: i32,
    functions: &'static Functions,
}

impl std::ops::Deref for Driver {
    type Target = Functions;

    fn deref(&self) -> &Functions {
        self.functions
    }
}

impl Driver {
    pub(crate) fn open() -> Result<Driver> {
        let (library, name) = load(candidates(|name| std::env::var_os(name).map(PathBuf::from)))?;
        // Its threads and its exit handlers would outlive it.
        let library: &'static Library = Box::leak(Box::new(library));
        let find = |symbol: &'static str| {
            // SAFETY: only the address is taken; what stands behind it is `resolve`'s.
            let found = unsafe { library.get::<*const c_void>(symbol.as_bytes()) };
            found.ok().map(|symbol| *symbol).filter(|address| !address.is_null())
        };
        // SAFETY: the library is HIP's by its name, and stays loaded.
        let functions = unsafe { Functions::resolve(find) }.map_err(|missing| {
            let missing = missing.join(", ");
            unavailable(Unavailable::NotSupported(format!("{name} is too old, ROCm 5.0 is needed: it lacks {missing}")))
        })?;
        if functions.hipGetDevicePropertiesR0600.is_none() && functions.hipGetDeviceProperties.is_none() {
            let why = format!("{name} has neither hipGetDevicePropertiesR0600 nor hipGetDeviceProperties");
            return Err(unavailable(Unavailable::NotSupported(why)));
        }
        let mut driver = Driver { version: 0, functions: Box::leak(Box::new(functions)) };
        let mut version = 0;
        // SAFETY: writes one integer, which outlives the call.
        driver.check("hipRuntimeGetVersion", unsafe { (driver.hipRuntimeGetVersion)(&raw mut version) })?;
        driver.version = version;
        // SAFETY: no preconditions. It may run again in a process that has initialised HIP.
        match unsafe { (driver.hipInit)(0) } {
            // The latter is what ROCm 5.2 says where there is no GPU.
            sys::hipErrorNoDevice | sys::hipErrorInvalidDevice => Err(driver.no_device()),
            result => driver.check("hipInit", result).map(|()| driver),
        }
    }

    pub(crate) fn no_device(&self) -> Error {
        let version = shown(self.version);
        let why = format!("HIP {version} reports none; /dev/kfd and /dev/dri have to be there, and open to this user");
        unavailable(Unavailable::NoDevice(why))
    }

    /// Turns a code into an error that names the call.
    pub(crate) fn check(&self, call: &'static str, result: hipError_t) -> Result<()> {
        if result == sys::hipSuccess { Ok(()) } else { Err(self.error(call, result)) }
    }

    #[cold]
    pub(crate) fn error(&self, call: &'static str, code: hipError_t) -> Error {
        // SAFETY: no preconditions; of a code that it does not know the library says so.
        let text = unsafe { (self.hipGetErrorName)(code) };
        let name = if text.is_null() {
            "unknown HIP error".to_owned()
        } else {
            // SAFETY: the library's string constants end with a null and live as long as it.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Error::Driver { code: code as c_int, name, call }
    }

    /// A device's architecture, without the features that are switched on: gfx942.
    pub(crate) fn arch(&self, device: c_int) -> Result<String> {
        let text = |bytes: &[c_char]| {
            let bytes = bytes.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8).collect();
            let name = String::from_utf8(bytes).unwrap_or_default();
            name.split(':').next().unwrap_or_default().to_owned()
        };
        if let Some(get) = self.hipGetDevicePropertiesR0600 {
            let mut found = Box::<hipDeviceProp_tR0600>::default();
            // SAFETY: the struct is as long as the library's, and longer; it outlives the call.
            self.check("hipGetDevicePropertiesR0600", unsafe { get(&raw mut *found, device) })?;
            return Ok(text(&found.gcnArchName));
        }
        let Some(get) = self.hipGetDeviceProperties else { return Ok(String::new()) };
        let mut found = Box::<hipDeviceProp_tR0000>::default();
        // SAFETY: as above.
        self.check("hipGetDeviceProperties", unsafe { get(&raw mut *found, device) })?;
        Ok(text(&found.gcnArchName))
    }

    /// The graph that `stream` is capturing into, if it is capturing.
    pub(crate) fn capture_graph(&self, stream: hipStream_t) -> Result<Option<hipGraph_t>> {
        let (mut status, mut id) = (sys::hipStreamCaptureStatusNone, 0);
        let mut graph: hipGraph_t = std::ptr::null_mut();
        let (mut dependencies, mut count) = (std::ptr::null::<c_void>(), 0);
        // SAFETY: the stream's owner is alive; the outputs outlive the call.
        let result = unsafe {
            (self.hipStreamGetCaptureInfo_v2)(
                stream,
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                &raw mut dependencies,
                &raw mut count,
            )
        };
        self.check("hipStreamGetCaptureInfo_v2", result)?;
        Ok((status == sys::hipStreamCaptureStatusActive).then_some(graph))
    }

    /// Makes a device current for the guard's lifetime, on this thread.
    pub(crate) fn enter(&self, device: c_int) -> Result<Current> {
        let mut before = -1;
        // SAFETY: writes one integer, which outlives the call.
        self.check("hipGetDevice", unsafe { (self.hipGetDevice)(&raw mut before) })?;
        if before == device {
            return Ok(Current { driver: *self, before: None });
        }
        // SAFETY: no preconditions.
        self.check("hipSetDevice", unsafe { (self.hipSetDevice)(device) })?;
        Ok(Current { driver: *self, before: Some(before) })
    }
}

/// While a device is current.
pub(crate) struct Current {
    driver: Driver,
    before: Option<c_int>,
}

impl Drop for Current {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            // SAFETY: no preconditions. A failure leaves the thread where it is, and there is nobody to tell.
            let _ = unsafe { (self.driver.hipSetDevice)(before) };
        }
    }
}

/// Where the library may be: by its name, wherever the loader looks, then in ROCm's directories.
fn candidates(variable: impl Fn(&str) -> Option<PathBuf>) -> Vec<PathBuf> {
    let mut found: Vec<PathBuf> = LIBRARIES.iter().map(PathBuf::from).collect();
    let named = DIRECTORIES.into_iter().filter_map(&variable).filter(|path| !path.as_os_str().is_empty());
    for directory in named.chain([PathBuf::from(DEFAULT_DIRECTORY)]) {
        found.extend(LIBRARIES.iter().map(|name| directory.join("lib").join(name)));
    }
    found
}

/// The first of them that can be loaded.
fn load(candidates: Vec<PathBuf>) -> Result<(Library, String)> {
    let mut tried = Vec::new();
    for candidate in candidates {
        let name = candidate.display().to_string();
        // A path that does not exist says nothing more about itself than that; a name is looked for in places that only the
        // loader knows.
        if candidate.is_absolute() && !Path::exists(&candidate) {
            tried.push(format!("{name} (no such file)"));
            continue;
        }
        // SAFETY: the initialisers of libamdhip64 have no preconditions.
        match unsafe { Library::new(&candidate) } {
            Ok(library) => return Ok((library, name)),
            Err(error) => tried.push(format!("{name} ({error})")),
        }
    }
    Err(unavailable(Unavailable::Library { tried: tried.join(", ") }))
}

/// A version as the runtime counts it: 60032831 is 6.0.32831.
pub(crate) fn shown(version: i32) -> String {
    format!("{}.{}.{}", version / 10_000_000, version / 100_000 % 100, version % 100_000)
}

pub(crate) fn unavailable(why: Unavailable) -> Error {
    Error::Unavailable { backend: "rocm", why }
}

/// Of a number that the interface has as another type than this crate.
pub(crate) fn to_u32(value: c_int) -> c_uint {
    c_uint::try_from(value).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_of_rocm_are_looked_in() {
        let variable = |name: &str| (name == "ROCM_PATH").then(|| PathBuf::from("/somewhere/rocm"));
        let found = candidates(variable);
        assert_eq!(found[..4], LIBRARIES.map(PathBuf::from));
        assert_eq!(found[4], PathBuf::from("/somewhere/rocm/lib/libamdhip64.so.7"));
        assert!(found.contains(&PathBuf::from("/opt/rocm/lib/libamdhip64.so.6")));
        assert_eq!(candidates(|_| None).len(), 8);
    }

    #[test]
    fn versions_are_shown_as_they_are_known() {
        assert_eq!([50_221_153, 60_032_831].map(shown), ["5.2.21153", "6.0.32831"]);
    }

    #[test]
    fn what_was_tried_is_named() {
        let paths = vec![PathBuf::from("/nowhere/lib/libamdhip64.so.6"), PathBuf::from("libamdhip64-that-is-not.so")];
        match load(paths) {
            Err(Error::Unavailable { backend: "rocm", why: Unavailable::Library { tried } }) => {
                assert!(tried.contains("/nowhere/lib/libamdhip64.so.6 (no such file)"), "{tried}");
                assert!(tried.contains("libamdhip64-that-is-not.so ("), "{tried}");
            }
            other => panic!("{:?}", other.map(|(_, name)| name)),
        }
    }

    #[test]
    fn missing_symbols_are_named() {
        // SAFETY: no function is found, so none is called.
        let missing = unsafe { Functions::resolve(|_| None) }.unwrap_err();
        assert_eq!(missing, sys::REQUIRED);
        let all_but = |name: &str| (name != "hipExtMallocWithFlags").then_some(shown as *const c_void);
        // SAFETY: nothing is called.
        let missing = unsafe { Functions::resolve(all_but) }.unwrap_err();
        assert_eq!(missing, ["hipExtMallocWithFlags"]);
        // SAFETY: as above.
        let found =
            unsafe { Functions::resolve(|name| sys::REQUIRED.contains(&name).then_some(shown as *const c_void)) };
        assert!(found.unwrap().hipUserObjectCreate.is_none());
        assert_eq!(sys::OPTIONAL.len(), 5);
    }
}
