//! The library: found, checked for every function that is used, and its codes made into errors.

use std::ffi::{CStr, OsString, c_int, c_void};
use std::fmt;

use crate::error::{Error, Result};
use crate::sys::{self, Functions, ncclResult_t};

/// Whose library.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Vendor {
    /// NVIDIA's: NCCL.
    Nccl,
    /// AMD's: RCCL.
    Rccl,
}

impl Vendor {
    /// Both.
    pub const ALL: [Vendor; 2] = [Vendor::Nccl, Vendor::Rccl];

    /// Name in lower case, as command lines have it.
    pub const fn name(self) -> &'static str {
        match self {
            Vendor::Nccl => "nccl",
            Vendor::Rccl => "rccl",
        }
    }

    /// The environment variable that may name the library's file, which then alone is tried.
    pub const fn variable(self) -> &'static str {
        match self {
            Vendor::Nccl => "SIGNAL_NCCL",
            Vendor::Rccl => "SIGNAL_RCCL",
        }
    }

    /// The name under which the loader is asked for it. The number is that of the interface, and has not changed.
    pub const fn file(self) -> &'static str {
        match self {
            Vendor::Nccl => "libnccl.so.2",
            Vendor::Rccl => "librccl.so.1",
        }
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Vendor::Nccl => "NCCL",
            Vendor::Rccl => "RCCL",
        })
    }
}

/// A version of the interface; RCCL counts by the NCCL that it follows.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Version {
    /// The first number.
    pub major: u32,
    /// The second.
    pub minor: u32,
    /// The third.
    pub patch: u32,
}

impl Version {
    /// The oldest that will do: the first with bfloat16 and the mean.
    pub const NEEDED: Version = Version { major: 2, minor: 10, patch: 0 };

    /// From the number that `ncclGetVersion` gives: 2804 for 2.8.4, and 22809 for 2.28.9, as it has been since 2.9.
    pub const fn from_code(code: u32) -> Version {
        if code < 10_000 {
            return Version { major: code / 1000, minor: code / 100 % 10, patch: code % 100 };
        }
        Version { major: code / 10_000, minor: code / 100 % 100, patch: code % 100 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// An opened library. Never unloaded, and cheap to copy.
#[derive(Clone, Copy, Debug)]
pub struct Library {
    vendor: Vendor,
    version: Version,
    functions: &'static Functions,
}

impl Library {
    /// Loads a vendor's library: by the path in [`Vendor::variable`] if there is one, else by its [name](Vendor::file), wherever the loader looks.
    ///
    /// # Errors
    /// [`Error::Absent`], [`Error::Symbols`], [`Error::TooOld`], and what `ncclGetVersion` says.
    pub fn open(vendor: Vendor) -> Result<Library> {
        let named = std::env::var_os(vendor.variable()).filter(|path| !path.is_empty());
        Library::open_file(vendor, named.unwrap_or_else(|| vendor.file().into()))
    }

    fn open_file(vendor: Vendor, file: OsString) -> Result<Library> {
        let name = file.display().to_string();
        // SAFETY: the initialisers of these libraries have no preconditions. A path in the environment is the user's own choice.
        let library = unsafe { libloading::Library::new(&file) }
            .map_err(|error| Error::Absent { vendor, tried: format!("{name} ({error})") })?;
        // Its threads and its exit handlers would outlive it.
        let library: &'static libloading::Library = Box::leak(Box::new(library));
        let find = |symbol: &'static str| {
            // SAFETY: only the address is taken; what stands behind it is `resolve`'s.
            let found = unsafe { library.get::<*const c_void>(symbol.as_bytes()) };
            found.ok().map(|symbol| *symbol).filter(|address| !address.is_null())
        };
        // SAFETY: the library is the vendor's by its name, or as the user says, and stays loaded.
        let functions = unsafe { Functions::resolve(find) }.map_err(|missing| Error::Symbols {
            vendor,
            name: name.clone(),
            missing: missing.join(", "),
        })?;
        let mut library = Library { vendor, version: Version::from_code(0), functions: Box::leak(Box::new(functions)) };
        let mut code: c_int = 0;
        // SAFETY: writes one integer, which outlives the call.
        library.check("ncclGetVersion", unsafe { (library.functions.ncclGetVersion)(&raw mut code) })?;
        library.version = Version::from_code(u32::try_from(code).unwrap_or(0));
        if library.version < Version::NEEDED {
            return Err(Error::TooOld { vendor, name, version: library.version });
        }
        Ok(library)
    }

    /// Whose it is.
    pub fn vendor(&self) -> Vendor {
        self.vendor
    }

    /// Its version.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Makes what is called in `calls` one group: it is launched together at its end, and no call of it waits for a later one. Groups
    /// within a group count as part of it.
    ///
    /// Calls of several communicators from one thread belong in a group, and so do sends and receives that wait for each other.
    ///
    /// # Errors
    /// That of `calls`, else the library's. After either nothing is known of the calls: the communicators are to be aborted.
    pub fn group<R, E: From<Error>>(&self, calls: impl FnOnce() -> Result<R, E>) -> Result<R, E> {
        // SAFETY: no preconditions. The group is this thread's.
        self.check("ncclGroupStart", unsafe { (self.functions.ncclGroupStart)() })?;
        let made = calls();
        // SAFETY: it ends the group that was started above, whatever has become of the calls.
        let ended = self.check("ncclGroupEnd", unsafe { (self.functions.ncclGroupEnd)() });
        let made = made?;
        ended?;
        Ok(made)
    }

    pub(crate) fn functions(&self) -> &'static Functions {
        self.functions
    }

    /// Turns a code into an error that names the call.
    pub(crate) fn check(&self, call: &'static str, code: ncclResult_t) -> Result<()> {
        if code == sys::ncclSuccess { Ok(()) } else { Err(self.error(call, code)) }
    }

    #[cold]
    fn error(&self, call: &'static str, code: ncclResult_t) -> Error {
        // SAFETY: no preconditions; of a code that it does not know the library says so.
        let text = unsafe { (self.functions.ncclGetErrorString)(code) };
        let text = if text.is_null() {
            "unknown error".to_owned()
        } else {
            // SAFETY: the library's string constants end with a null and live as long as it.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        Error::Call { call, code, text }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_they_were_counted() {
        let shown = [2804, 22_809, 21_003, 22_005].map(|code| Version::from_code(code).to_string());
        assert_eq!(shown, ["2.8.4", "2.28.9", "2.10.3", "2.20.5"]);
        assert!(Version::from_code(2804) < Version::NEEDED && Version::from_code(21_003) >= Version::NEEDED);
    }

    #[test]
    fn an_absent_library_is_named_with_what_to_do() {
        let absent = Library::open_file(Vendor::Nccl, "/nowhere/libnccl.so.2".into()).unwrap_err();
        let text = absent.to_string();
        assert!(text.starts_with("NCCL cannot be loaded; tried /nowhere/libnccl.so.2 ("), "{text}");
        assert!(text.ends_with("install it, or name its file in SIGNAL_NCCL"), "{text}");
    }

    #[test]
    fn another_library_is_refused_with_what_it_lacks() {
        let other = Library::open_file(Vendor::Rccl, "libc.so.6".into()).unwrap_err();
        let Error::Symbols { vendor, name, missing } = &other else { panic!("{other}") };
        assert_eq!((*vendor, name.as_str(), missing.as_str()), (Vendor::Rccl, "libc.so.6", &*sys::SYMBOLS.join(", ")));
        assert!(other.to_string().starts_with("libc.so.6 is no RCCL of 2.10.0 or later: it lacks ncclGetVersion, "));
    }

    #[test]
    fn missing_functions_are_named() {
        let all_but = |name: &str| (name != "ncclSend").then_some(all as *const c_void);
        // SAFETY: nothing is called.
        assert_eq!(unsafe { Functions::resolve(all_but) }.unwrap_err(), ["ncclSend"]);
        fn all() {}
        // SAFETY: as above.
        assert!(unsafe { Functions::resolve(|_| Some(all as *const c_void)) }.is_ok());
        assert_eq!(sys::SYMBOLS.len(), 16);
    }
}
