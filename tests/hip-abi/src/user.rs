//! User objects: what a graph keeps alive.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use crate::graph::keep;
use crate::object::{Object, give, take};
use crate::{Code, INVALID_VALUE, code, put};

type Destructor = unsafe extern "C" fn(*mut c_void);

/// What a user object stands for.
pub(crate) struct Kept {
    pointer: usize,
    destructor: Destructor,
}

impl Drop for Kept {
    fn drop(&mut self) {
        // SAFETY: who made the object promised that of its pointer, for once.
        unsafe { (self.destructor)(self.pointer as *mut c_void) };
    }
}

struct UserObject(Arc<Kept>);

impl Object for UserObject {
    const KIND: u64 = 7;
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipUserObjectCreate(
    to: *mut *mut c_void,
    pointer: *mut c_void,
    destructor: Destructor,
    references: c_uint,
    flags: c_uint,
) -> Code {
    // One reference; the destructor is not waited for.
    if references != 1 || flags != 1 {
        return INVALID_VALUE;
    }
    let kept = Kept { pointer: pointer as usize, destructor };
    // SAFETY: the caller's output.
    code(unsafe { put(to, give(UserObject(Arc::new(kept)))) })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipUserObjectRelease(object: *mut c_void, references: c_uint) -> Code {
    if references != 1 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller of the interface passes an object of this library's, for the last time.
    code(unsafe { take::<UserObject>(object) }.map(drop))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphRetainUserObject(
    graph: *mut c_void,
    object: *mut c_void,
    references: c_uint,
    flags: c_uint,
) -> Code {
    // The graph takes over the caller's only reference.
    if references != 1 || flags != 1 {
        return INVALID_VALUE;
    }
    // SAFETY: the caller of the interface passes a graph and an object of this library's, the latter for the last time.
    code(unsafe { take::<UserObject>(object).and_then(|object| keep(graph, object.0)) })
}
