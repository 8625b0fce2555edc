//! The C interface: what this crate uses of it, no more. Signatures and numbers are those of NCCL's documentation, from version 2.10 on;
//! RCCL has the same. Enums are integers, since a library of another version may return values that this list lacks.

#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals)]

use std::ffi::{c_char, c_int, c_uint, c_void};

/// A communicator.
pub type ncclComm_t = *mut c_void;
/// A stream of the vendor's runtime (`cudaStream_t`, `hipStream_t`), which is a stream of its driver too.
pub type Stream = *mut c_void;

/// What each function returns.
pub type ncclResult_t = c_uint;
/// Success.
pub const ncclSuccess: ncclResult_t = 0;
/// Of a communicator that does not block: not yet known.
pub const ncclInProgress: ncclResult_t = 7;

/// An element type.
pub type ncclDataType_t = c_uint;
/// Signed integer of 8 bits.
pub const ncclInt8: ncclDataType_t = 0;
/// Unsigned integer of 8 bits.
pub const ncclUint8: ncclDataType_t = 1;
/// Signed integer of 32 bits.
pub const ncclInt32: ncclDataType_t = 2;
/// Unsigned integer of 32 bits.
pub const ncclUint32: ncclDataType_t = 3;
/// Signed integer of 64 bits.
pub const ncclInt64: ncclDataType_t = 4;
/// Unsigned integer of 64 bits.
pub const ncclUint64: ncclDataType_t = 5;
/// IEEE 754 binary16.
pub const ncclFloat16: ncclDataType_t = 6;
/// IEEE 754 binary32.
pub const ncclFloat32: ncclDataType_t = 7;
/// IEEE 754 binary64.
pub const ncclFloat64: ncclDataType_t = 8;
/// bfloat16, since 2.10.
pub const ncclBfloat16: ncclDataType_t = 9;

/// An operator.
pub type ncclRedOp_t = c_uint;
/// The sum.
pub const ncclSum: ncclRedOp_t = 0;
/// The product.
pub const ncclProd: ncclRedOp_t = 1;
/// The largest.
pub const ncclMax: ncclRedOp_t = 2;
/// The smallest.
pub const ncclMin: ncclRedOp_t = 3;
/// The mean, since 2.10.
pub const ncclAvg: ncclRedOp_t = 4;

/// By which ranks find each other; passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ncclUniqueId {
    /// Its bytes.
    pub internal: [c_char; 128],
}

const _: () = assert!(size_of::<ncclUniqueId>() == 128 && align_of::<ncclUniqueId>() == 1);

/// The functions: a table of their addresses, and the names of all of them.
macro_rules! functions {
    ($($(#[$doc:meta])* $name:ident($($argument:ty),* $(,)?);)*) => {
        /// The library's functions by their names.
        #[derive(Clone, Copy, Debug)]
        pub(crate) struct Functions {
            $(pub(crate) $name: unsafe extern "C" fn($($argument),*) -> ncclResult_t,)*
            pub(crate) ncclGetErrorString: unsafe extern "C" fn(ncclResult_t) -> *const c_char,
        }

        /// What the library must have.
        pub(crate) const SYMBOLS: &[&str] = &[$(stringify!($name),)* "ncclGetErrorString"];

        impl Functions {
            /// Takes the address of each from `find`.
            ///
            /// # Errors
            /// The names of those that it does not find.
            ///
            /// # Safety
            /// What `find` gives are the functions of this name of an NCCL or RCCL library, which stays loaded.
            pub(crate) unsafe fn resolve(find: impl Fn(&'static str) -> Option<*const c_void>) -> Result<Self, Vec<&'static str>> {
                let missing: Vec<_> = SYMBOLS.iter().copied().filter(|name| find(name).is_none()).collect();
                let address = |name| find(name).ok_or_else(|| missing.clone());
                Ok(Functions {
                    // SAFETY: the documentation gives the function this signature; a function's address and a pointer to it are of one size.
                    $($name: unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn($($argument),*) -> ncclResult_t>(address(stringify!($name))?) },)*
                    // SAFETY: as above.
                    ncclGetErrorString: unsafe { std::mem::transmute::<*const c_void, unsafe extern "C" fn(ncclResult_t) -> *const c_char>(address("ncclGetErrorString")?) },
                })
            }
        }
    };
}

functions! {
    ncclGetVersion(*mut c_int);
    ncclGetUniqueId(*mut ncclUniqueId);
    ncclCommInitRank(*mut ncclComm_t, c_int, ncclUniqueId, c_int);
    ncclCommDestroy(ncclComm_t);
    ncclCommAbort(ncclComm_t);
    ncclCommGetAsyncError(ncclComm_t, *mut ncclResult_t);
    ncclGroupStart();
    ncclGroupEnd();
    // send, receive, count, type, operator, communicator, stream
    ncclAllReduce(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, Stream);
    // send, receive, elements that a rank receives, type, operator, communicator, stream
    ncclReduceScatter(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, ncclComm_t, Stream);
    // send, receive, elements that a rank sends, type, communicator, stream
    ncclAllGather(*const c_void, *mut c_void, usize, ncclDataType_t, ncclComm_t, Stream);
    // send, receive, count, type, root, communicator, stream
    ncclBroadcast(*const c_void, *mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, Stream);
    // send, receive, count, type, operator, root, communicator, stream
    ncclReduce(*const c_void, *mut c_void, usize, ncclDataType_t, ncclRedOp_t, c_int, ncclComm_t, Stream);
    // send, count, type, peer, communicator, stream
    ncclSend(*const c_void, usize, ncclDataType_t, c_int, ncclComm_t, Stream);
    // receive, count, type, peer, communicator, stream
    ncclRecv(*mut c_void, usize, ncclDataType_t, c_int, ncclComm_t, Stream);
}
