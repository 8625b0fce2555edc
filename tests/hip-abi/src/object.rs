//! Handles: pointers to boxed values, each with the kind it is of, so that a wrong one is an error and not a crash.

use std::ffi::c_void;

use crate::{Code, INVALID_HANDLE};

/// A value that a handle stands for.
pub(crate) trait Object: Sized + Send + Sync + 'static {
    /// Tells the kinds apart.
    const KIND: u64;
}

#[repr(C)]
struct Boxed<T> {
    kind: u64,
    value: T,
}

/// A new handle.
pub(crate) fn give<T: Object>(value: T) -> *mut c_void {
    Box::into_raw(Box::new(Boxed { kind: T::KIND, value })).cast()
}

/// What a handle stands for.
///
/// # Safety
/// The handle is one of this library's that has not been taken back, or null.
pub(crate) unsafe fn look<'a, T: Object>(handle: *mut c_void) -> Result<&'a T, Code> {
    let boxed = handle.cast::<Boxed<T>>();
    // SAFETY: every handle points at a `Boxed`, which begins with its kind.
    if handle.is_null() || unsafe { (*boxed).kind } != T::KIND {
        return Err(INVALID_HANDLE);
    }
    // SAFETY: the kind tells that the value is a `T`.
    Ok(unsafe { &(*boxed).value })
}

/// Takes a handle back.
///
/// # Safety
/// As for [`look`]; nobody uses the handle again.
pub(crate) unsafe fn take<T: Object>(handle: *mut c_void) -> Result<T, Code> {
    // SAFETY: the caller's promise.
    unsafe { look::<T>(handle) }?;
    // SAFETY: as above; it came from a box.
    Ok(unsafe { Box::from_raw(handle.cast::<Boxed<T>>()) }.value)
}
