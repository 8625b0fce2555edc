//! Communicators, and the calls on them.

use std::ffi::{c_char, c_int, c_void};
use std::fmt;

use crate::error::{Error, Result};
use crate::library::Library;
use crate::sys::{self, Stream, ncclComm_t, ncclUniqueId};

/// An element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum DataType {
    /// Signed integer of 8 bits.
    Int8 = sys::ncclInt8,
    /// Unsigned integer of 8 bits.
    Uint8 = sys::ncclUint8,
    /// Signed integer of 32 bits.
    Int32 = sys::ncclInt32,
    /// Unsigned integer of 32 bits.
    Uint32 = sys::ncclUint32,
    /// Signed integer of 64 bits.
    Int64 = sys::ncclInt64,
    /// Unsigned integer of 64 bits.
    Uint64 = sys::ncclUint64,
    /// IEEE 754 binary16.
    Float16 = sys::ncclFloat16,
    /// IEEE 754 binary32.
    Float32 = sys::ncclFloat32,
    /// IEEE 754 binary64.
    Float64 = sys::ncclFloat64,
    /// bfloat16.
    Bfloat16 = sys::ncclBfloat16,
}

/// An operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Operation {
    /// The sum.
    Sum = sys::ncclSum,
    /// The product.
    Prod = sys::ncclProd,
    /// The largest.
    Max = sys::ncclMax,
    /// The smallest.
    Min = sys::ncclMin,
    /// The mean.
    Avg = sys::ncclAvg,
}

/// By which the ranks of one communicator find each other: one process makes it, and hands its bytes to all.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId([u8; 128]);

impl UniqueId {
    /// Makes one. The library listens for ranks from then on, so the process that made it has one of the ranks.
    ///
    /// # Errors
    /// The library's.
    pub fn new(library: &Library) -> Result<UniqueId> {
        let mut id = ncclUniqueId { internal: [0; 128] };
        // SAFETY: writes one id, which outlives the call.
        library.check("ncclGetUniqueId", unsafe { (library.functions().ncclGetUniqueId)(&raw mut id) })?;
        Ok(UniqueId(id.internal.map(|byte| byte as u8)))
    }

    /// That of these bytes, which another process has made.
    pub const fn from_bytes(bytes: [u8; 128]) -> UniqueId {
        UniqueId(bytes)
    }

    /// Its bytes.
    pub const fn to_bytes(&self) -> [u8; 128] {
        self.0
    }
}

impl fmt::Debug for UniqueId {
    /// Whoever has the bytes can join.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId(not shown)")
    }
}

/// One rank of a communicator. Dropped, it is left as it is: [`destroy`](Self::destroy) or [`abort`](Self::abort) ends it.
///
/// # Safety of its calls
/// A call that names memory is enqueued on a stream and reads and writes later. Its caller answers for this:
/// - Addresses are of memory that the rank's device reaches, of as many elements as the call says, aligned to the element's size.
///   The memory is there until the call has completed on its stream, and where a graph captured the call, as long as the graph is.
/// - From the call to its completion nothing else writes what it reads, nor touches what it writes.
/// - `stream` is a stream of the rank's device, alive until then.
/// - Ranks make the same calls in the same order, with the same counts, types, operators and roots.
///
/// A communicator is destroyed after the graphs that captured its calls.
pub struct Communicator {
    library: Library,
    handle: ncclComm_t,
    rank: usize,
    world: usize,
}

// SAFETY: the library lets any thread use a communicator, one at a time: so it may move, and is not `Sync`.
unsafe impl Send for Communicator {}

impl Communicator {
    /// The communicators of this process's `ranks` among `world`, made in one group. Collective, and it waits for all ranks.
    ///
    /// `on_device` is called for each rank, with the call to make while that rank's device is current on this thread: the library takes
    /// the current device. Each rank has a device of its own.
    ///
    /// # Errors
    /// The library's, and those of `on_device`. What the library has made by then is left to it.
    pub fn init_ranks<E: From<Error>>(
        library: &Library,
        id: &UniqueId,
        world: usize,
        ranks: impl IntoIterator<Item = usize>,
        mut on_device: impl FnMut(usize, &mut dyn FnMut() -> Result<()>) -> Result<(), E>,
    ) -> Result<Vec<Communicator>, E> {
        let ranks: Vec<usize> = ranks.into_iter().collect();
        // Where the library writes, at the latest when the group ends; if it fails, nobody knows whether a thread of its own still will.
        let handles: &'static mut [ncclComm_t] = Vec::leak(vec![std::ptr::null_mut(); ranks.len()]);
        let id = ncclUniqueId { internal: id.0.map(|byte| byte as c_char) };
        let total = int("world", world)?;
        library.group(|| {
            ranks.iter().zip(&mut *handles).try_for_each(|(&rank, handle)| {
                let number = int("rank", rank)?;
                on_device(rank, &mut || {
                    // SAFETY: the handle's place stays for the rest of the program. The id is an argument by value.
                    let result = unsafe { (library.functions().ncclCommInitRank)(&raw mut *handle, total, id, number) };
                    library.check("ncclCommInitRank", result)
                })
            })
        })?;
        let made = ranks.into_iter().zip(&*handles).map(|(rank, &handle)| {
            if handle.is_null() {
                return Err(Error::NoCommunicator { rank }.into());
            }
            Ok(Communicator { library: *library, handle, rank, world })
        });
        made.collect()
    }

    /// The library.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Whether something has gone wrong since, in a kernel or in what connects the ranks. Does not wait.
    ///
    /// # Errors
    /// What has gone wrong. The communicator is then to be aborted.
    pub fn async_error(&self) -> Result<()> {
        let mut code = sys::ncclSuccess;
        // SAFETY: the communicator is alive: `destroy` and `abort` consume it. The output outlives the call.
        let result = unsafe { (self.library.functions().ncclCommGetAsyncError)(self.handle, &raw mut code) };
        self.library.check("ncclCommGetAsyncError", result)?;
        if code == sys::ncclInProgress { Ok(()) } else { self.library.check("a call on the device", code) }
    }

    /// Ends it, after what it has under way. May wait for peers, and for graphs that hold its calls.
    ///
    /// # Errors
    /// The library's.
    pub fn destroy(self) -> Result<()> {
        // SAFETY: the communicator is alive, and this consumes it.
        let result = unsafe { (self.library.functions().ncclCommDestroy)(self.handle) };
        self.library.check("ncclCommDestroy", result)
    }

    /// Ends it and what it has under way: kernels that wait for peers end, and what they were to write is unspecified.
    ///
    /// # Errors
    /// The library's.
    pub fn abort(self) -> Result<()> {
        // SAFETY: the communicator is alive, and this consumes it.
        let result = unsafe { (self.library.functions().ncclCommAbort)(self.handle) };
        self.library.check("ncclCommAbort", result)
    }

    /// Every rank receives the reduction of `count` elements of each. In place where both addresses are one.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// See [above](Self#safety-of-its-calls).
    pub unsafe fn all_reduce(
        &self,
        (send, receive): (u64, u64),
        count: usize,
        (data_type, operation): (DataType, Operation),
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: the communicator is alive; the rest is the caller's promise.
        let result = unsafe {
            let call = self.library.functions().ncclAllReduce;
            call(read(send), write(receive), count, data_type as u32, operation as u32, self.handle, stream)
        };
        self.library.check("ncclAllReduce", result)
    }

    /// Rank r receives part r of the reduction: `count` elements, and each rank sends as many for each rank. In place where
    /// `receive` is part r of what is sent.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// See [above](Self#safety-of-its-calls).
    pub unsafe fn reduce_scatter(
        &self,
        (send, receive): (u64, u64),
        count: usize,
        (data_type, operation): (DataType, Operation),
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: as above.
        let result = unsafe {
            let call = self.library.functions().ncclReduceScatter;
            call(read(send), write(receive), count, data_type as u32, operation as u32, self.handle, stream)
        };
        self.library.check("ncclReduceScatter", result)
    }

    /// Every rank receives `count` elements of each, in the order of the ranks. In place where `send` is part r of what rank r receives.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// See [above](Self#safety-of-its-calls).
    pub unsafe fn all_gather(
        &self,
        (send, receive): (u64, u64),
        count: usize,
        data_type: DataType,
        stream: Stream,
    ) -> Result<()> {
        // SAFETY: as above.
        let result = unsafe {
            let call = self.library.functions().ncclAllGather;
            call(read(send), write(receive), count, data_type as u32, self.handle, stream)
        };
        self.library.check("ncclAllGather", result)
    }

    /// Every rank receives the root's `count` elements; `send` is read at the root alone. In place where both addresses are one.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// See [above](Self#safety-of-its-calls).
    pub unsafe fn broadcast(
        &self,
        (send, receive): (u64, u64),
        count: usize,
        data_type: DataType,
        root: usize,
        stream: Stream,
    ) -> Result<()> {
        let root = int("root", root)?;
        // SAFETY: as above.
        let result = unsafe {
            let call = self.library.functions().ncclBroadcast;
            call(read(send), write(receive), count, data_type as u32, root, self.handle, stream)
        };
        self.library.check("ncclBroadcast", result)
    }

    /// The root receives the reduction of `count` elements of each rank; `receive` is written at the root alone. In place where both addresses
    /// are one.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// See [above](Self#safety-of-its-calls).
    pub unsafe fn reduce(
        &self,
        (send, receive): (u64, u64),
        count: usize,
        (data_type, operation): (DataType, Operation),
        root: usize,
        stream: Stream,
    ) -> Result<()> {
        let root = int("root", root)?;
        // SAFETY: as above.
        let result = unsafe {
            let call = self.library.functions().ncclReduce;
            call(read(send), write(receive), count, data_type as u32, operation as u32, root, self.handle, stream)
        };
        self.library.check("ncclReduce", result)
    }

    /// Sends `count` elements to a peer, which receives as many. In a [group](Library::group) with whatever has to come with it.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// See [above](Self#safety-of-its-calls).
    pub unsafe fn send(&self, send: u64, count: usize, data_type: DataType, peer: usize, stream: Stream) -> Result<()> {
        let peer = int("peer", peer)?;
        // SAFETY: as above.
        let result = unsafe {
            let call = self.library.functions().ncclSend;
            call(read(send), count, data_type as u32, peer, self.handle, stream)
        };
        self.library.check("ncclSend", result)
    }

    /// Receives `count` elements from a peer, which sends as many.
    ///
    /// # Errors
    /// The library's.
    ///
    /// # Safety
    /// See [above](Self#safety-of-its-calls).
    pub unsafe fn receive(
        &self,
        receive: u64,
        count: usize,
        data_type: DataType,
        peer: usize,
        stream: Stream,
    ) -> Result<()> {
        let peer = int("peer", peer)?;
        // SAFETY: as above.
        let result = unsafe {
            let call = self.library.functions().ncclRecv;
            call(write(receive), count, data_type as u32, peer, self.handle, stream)
        };
        self.library.check("ncclRecv", result)
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} of {} of {}", self.rank, self.world, self.library.vendor())
    }
}

fn int(what: &'static str, number: usize) -> Result<c_int> {
    c_int::try_from(number).map_err(|_| Error::Number { what, number })
}

/// A device's address as the interface has it.
fn read(address: u64) -> *const c_void {
    address as usize as *const c_void
}

fn write(address: u64) -> *mut c_void {
    address as usize as *mut c_void
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_documentation() {
        use DataType::{Bfloat16, Float16, Float32, Float64, Int8, Int32, Int64, Uint8, Uint32, Uint64};
        let types = [Int8, Uint8, Int32, Uint32, Int64, Uint64, Float16, Float32, Float64, Bfloat16];
        assert_eq!(types.map(|data_type| data_type as u32), [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        use Operation::{Avg, Max, Min, Prod, Sum};
        assert_eq!([Sum, Prod, Max, Min, Avg].map(|operation| operation as u32), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn an_id_is_its_bytes_and_is_not_shown() {
        let bytes = std::array::from_fn(|i| i as u8);
        let id = UniqueId::from_bytes(bytes);
        assert_eq!(id.to_bytes(), bytes);
        assert_eq!(format!("{id:?}"), "UniqueId(not shown)");
    }

    #[test]
    fn ranks_that_are_no_int_are_refused() {
        assert_eq!(int("rank", 7), Ok(7));
        assert_eq!(int("rank", usize::MAX), Err(Error::Number { what: "rank", number: usize::MAX }));
    }
}
