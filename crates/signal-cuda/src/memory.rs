//! Memory, and what becomes of it when the last handle is dropped.
//!
//! Dropping makes no driver call: it may happen inside one, when a graph lets go of its buffers. It buries the memory
//! with the mask of the streams that used it. The next allocation records an event on each of those streams, and once the
//! events have been reached the memory is free for reuse. It goes back to the driver in a [quiet](crate::quiet) moment.

use std::any::Any;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUgraph, CUgraphExec, CUresult};
use signal_core::error::{ApiMisuse, Result};
use signal_core::{Backend, MemoryKind};

use crate::Cuda;
use crate::device::Device;
use crate::driver::check;
use crate::event::Event;
use crate::quiet;
use crate::shared;
use crate::stream::Stream;

/// How long an allocation that failed waits for a quiet moment, in which memory can be given back.
const PATIENCE: Duration = Duration::from_secs(1);

/// Device memory or pinned host memory.
#[derive(Clone, Debug)]
pub struct Buffer(Arc<Allocation>);

#[derive(Debug)]
struct Allocation {
    device: Device,
    memory: Memory,
    bytes: usize,
    /// Streams with work that uses it, by [`Stream::slot`].
    uses: AtomicU64,
    companion: OnceLock<Box<dyn Any + Send + Sync>>,
}

#[derive(Clone, Copy, Debug)]
struct Memory {
    address: u64,
    source: Source,
    /// Bytes that the driver gave.
    capacity: usize,
}

/// Where memory came from, and goes.
#[derive(Clone, Copy, Debug)]
enum Source {
    Plain,
    /// With the host's view.
    Pinned(NonNull<u8>),
    /// Mapped, by other processes too.
    Shared,
}

// SAFETY: an address may be used from any thread; what is done through it is ordered by streams.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Buffer {
    pub(crate) fn allocate(device: &Device, bytes: usize, kind: MemoryKind) -> Result<Buffer> {
        let _current = device.enter()?;
        // Pinned memory serves uploads of all sizes: classes let one be reused for the next.
        let capacity = match kind {
            MemoryKind::HostMapped => bytes.next_power_of_two().max(4096),
            MemoryKind::Shared => shared::capacity(device, bytes)?,
            _ => bytes.next_multiple_of(4096),
        };
        let memory = match device.cemetery().reuse(device, capacity, kind)? {
            Some(memory) => memory,
            None => match Memory::allocate(device, capacity, kind) {
                Err(_) => {
                    // Out of memory, most likely: what waits for reuse may be what is missing.
                    device.cemetery().release_free(PATIENCE)?;
                    Memory::allocate(device, capacity, kind)?
                }
                memory => memory?,
            },
        };
        Ok(Buffer::of(device, memory, bytes))
    }

    fn of(device: &Device, memory: Memory, bytes: usize) -> Buffer {
        let (device, uses) = (device.clone(), AtomicU64::new(0));
        Buffer(Arc::new(Allocation { device, memory, bytes, uses, companion: OnceLock::new() }))
    }

    pub(crate) fn attach(&self, companion: Box<dyn Any + Send + Sync>) {
        let _ = self.0.companion.set(companion);
    }

    pub(crate) fn export(&self) -> Result<OwnedFd> {
        let Source::Shared = self.0.memory.source else { return Err(ApiMisuse::NotShared.into()) };
        let _current = self.device().enter()?;
        shared::export(self.address())
    }

    pub(crate) fn import(device: &Device, descriptor: &OwnedFd, bytes: usize) -> Result<Buffer> {
        let _current = device.enter()?;
        let capacity = shared::capacity(device, bytes)?;
        let address = shared::import(device, descriptor, capacity)?;
        Ok(Buffer::of(device, Memory { address, source: Source::Shared, capacity }, bytes))
    }

    pub(crate) fn address(&self) -> u64 {
        self.0.memory.address
    }

    pub(crate) fn bytes(&self) -> usize {
        self.0.bytes
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(crate) fn host_pointer(&self) -> Option<NonNull<u8>> {
        match self.0.memory.source {
            Source::Pinned(host) => Some(host),
            Source::Plain | Source::Shared => None,
        }
    }

    /// Keeps the memory until the work that is now on `stream` has ended.
    pub(crate) fn used_on(&self, stream: &Stream) {
        let bit = 1 << stream.slot();
        // Relaxed: the mask is read when the last handle is gone, and every handle's drop happens before that. The load
        // spares the atomic update, and the cache line's journey, when the bit is set already.
        if self.0.uses.load(Ordering::Relaxed) & bit == 0 {
            self.0.uses.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Checks that `bytes` from `offset` lie within the buffer.
    pub(crate) fn check_range(&self, offset: usize, bytes: usize) -> Result<()> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes() => Ok(()),
            end => {
                let end = end.unwrap_or(usize::MAX);
                Err(ApiMisuse::Range { start: offset, end, len: self.bytes() }.into())
            }
        }
    }
}

impl Drop for Allocation {
    fn drop(&mut self) {
        self.device.cemetery().bury(Remains::Memory(self.memory), *self.uses.get_mut());
    }
}

impl Memory {
    fn allocate(device: &Device, capacity: usize, kind: MemoryKind) -> Result<Memory> {
        if kind == MemoryKind::Shared {
            let address = shared::allocate(device, capacity)?;
            return Ok(Memory { address, source: Source::Shared, capacity });
        }
        let mut address = 0;
        if kind != MemoryKind::HostMapped {
            // SAFETY: writes one address, which outlives the call. A context is current.
            check("cuMemAlloc", unsafe { sys::cuMemAlloc_v2(&raw mut address, capacity) })?;
            return Ok(Memory { address, source: Source::Plain, capacity });
        }
        let mut host = std::ptr::null_mut();
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: as above.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut host, capacity, flags) })?;
        // SAFETY: `host` was allocated with DEVICEMAP in the current context.
        let result = unsafe { sys::cuMemHostGetDevicePointer_v2(&raw mut address, host, 0) };
        check("cuMemHostGetDevicePointer", result)?;
        let host = NonNull::new(host.cast()).ok_or_else(without_host_address)?;
        Ok(Memory { address, source: Source::Pinned(host), capacity })
    }

    /// Whether an allocation of this kind may have it.
    fn suits(&self, kind: MemoryKind) -> bool {
        match self.source {
            Source::Plain => !matches!(kind, MemoryKind::HostMapped | MemoryKind::Shared),
            Source::Pinned(_) => kind == MemoryKind::HostMapped,
            // Other processes may still have it.
            Source::Shared => false,
        }
    }
}

/// What a handle leaves behind.
#[derive(Debug)]
pub(crate) enum Remains {
    Graph(CUgraph, CUgraphExec),
    #[allow(private_interfaces)] // only made and opened here
    Memory(Memory),
}

// SAFETY: handles and addresses may be used from any thread; the driver serialises what must be.
unsafe impl Send for Remains {}

/// Where a device's memory and graphs wait for the work that uses them.
#[derive(Debug, Default)]
pub(crate) struct Cemetery {
    /// Buried since the last visit, with the mask of streams. Its lock is never held across a driver call: the driver
    /// itself may bury.
    fresh: Mutex<Vec<(Remains, u64)>>,
    graves: Mutex<Graves>,
}

#[derive(Debug, Default)]
struct Graves {
    waiting: Vec<(Remains, Vec<Arc<Event>>)>,
    free: Vec<Memory>,
}

impl Cemetery {
    pub(crate) fn bury(&self, remains: Remains, uses: u64) {
        lock(&self.fresh).push((remains, uses));
    }

    /// Memory of exactly this capacity and kind that nothing uses any more.
    fn reuse(&self, device: &Device, capacity: usize, kind: MemoryKind) -> Result<Option<Memory>> {
        let mut graves = lock(&self.graves);
        self.visit(device, &mut graves)?;
        let at = graves.free.iter().position(|m| m.capacity == capacity && m.suits(kind));
        Ok(at.map(|at| graves.free.swap_remove(at)))
    }

    /// Gives what nothing uses back to the driver, if a quiet moment comes within `patience`.
    fn release_free(&self, patience: Duration) -> Result<()> {
        let began = Instant::now();
        while !lock(&self.graves).release_free()? && began.elapsed() < patience {
            std::thread::sleep(Duration::from_micros(100)); // unlocked: others may have to allocate before their work ends
        }
        Ok(())
    }

    fn visit(&self, device: &Device, graves: &mut Graves) -> Result<()> {
        let fresh = std::mem::take(&mut *lock(&self.fresh));
        let mut events: [Option<Vec<Arc<Event>>>; 64] = [const { None }; 64];
        for (remains, uses) in fresh {
            let mut awaited = Vec::new();
            let mut busy = false;
            for slot in (0..64).filter(|slot| uses & 1 << slot != 0) {
                if events[slot].is_none() {
                    events[slot] = device.slots().events(slot)?;
                }
                match &events[slot] {
                    Some(events) => awaited.extend(events.iter().cloned()),
                    None => busy = true, // a stream is capturing: an event would go into its graph
                }
            }
            if busy {
                self.bury(remains, uses);
            } else {
                graves.waiting.push((remains, awaited));
            }
        }
        let mut waiting = Vec::new();
        for (remains, mut events) in graves.waiting.drain(..) {
            events.retain(|event| !event.is_complete().unwrap_or(false));
            match remains {
                _ if !events.is_empty() => waiting.push((remains, events)),
                Remains::Memory(memory) => graves.free.push(memory),
                Remains::Graph(graph, exec) => {
                    // SAFETY: the last handle is gone, and every replay has ended.
                    check("cuGraphExecDestroy", unsafe { sys::cuGraphExecDestroy(exec) })?;
                    // SAFETY: as above.
                    check("cuGraphDestroy", unsafe { sys::cuGraphDestroy(graph) })?;
                }
            }
        }
        graves.waiting = waiting;
        graves.release_free().map(drop)
    }
}

impl Graves {
    /// Gives what nothing uses back to the driver; false where that would have to wait.
    fn release_free(&mut self) -> Result<bool> {
        if self.free.is_empty() {
            return Ok(true);
        }
        let Some(_quiet) = quiet::quiet()? else { return Ok(false) };
        self.free.drain(..).try_for_each(Memory::release)?;
        Ok(true)
    }
}

impl Memory {
    fn release(self) -> Result<()> {
        match self.source {
            // SAFETY: the last handle is gone, and all work that used it has ended.
            Source::Plain => check("cuMemFree", unsafe { sys::cuMemFree_v2(self.address) }),
            // SAFETY: as above.
            Source::Pinned(host) => check("cuMemFreeHost", unsafe { sys::cuMemFreeHost(host.as_ptr().cast()) }),
            // SAFETY: as above.
            Source::Shared => unsafe { shared::release(self.address, self.capacity) },
        }
    }
}

/// Copies, each behind the work on the stream.
impl Stream {
    pub(crate) fn upload(&self, source: &[u8], buffer: &Buffer, offset: usize) -> Result<()> {
        self.check(buffer, offset, source.len())?;
        if source.is_empty() {
            return Ok(());
        }
        // From pageable memory the driver may wait for the stream, whose kernel may wait for a rank that this thread has
        // yet to launch.
        let staging = Buffer::allocate(self.device(), source.len(), MemoryKind::HostMapped)?;
        let host = host_of(&staging)?;
        // SAFETY: the staging memory has this many bytes and nobody else knows it.
        unsafe { host.copy_from_nonoverlapping(NonNull::from(source).cast(), source.len()) };
        let _current = self.device().enter()?;
        self.keep(&[buffer, &staging])?;
        let target = buffer.address() + offset as u64;
        // SAFETY: both ranges lie within allocations that are kept until the copy has ended.
        let result = unsafe { sys::cuMemcpyHtoDAsync_v2(target, host.as_ptr().cast(), source.len(), self.raw()) };
        check("cuMemcpyHtoDAsync", result)
    }

    pub(crate) fn download(&self, buffer: &Buffer, offset: usize, target: &mut [u8]) -> Result<()> {
        self.check(buffer, offset, target.len())?;
        if target.is_empty() {
            return Ok(());
        }
        if self.is_capturing()? {
            return Err(ApiMisuse::Capture { call: "download", state: "capturing" }.into());
        }
        let staging = Buffer::allocate(self.device(), target.len(), MemoryKind::HostMapped)?;
        let host = host_of(&staging)?;
        let _current = self.device().enter()?;
        self.keep(&[buffer, &staging])?;
        let source = buffer.address() + offset as u64;
        // SAFETY: both ranges lie within allocations that are kept until the copy has ended.
        let result = unsafe { sys::cuMemcpyDtoHAsync_v2(host.as_ptr().cast(), source, target.len(), self.raw()) };
        check("cuMemcpyDtoHAsync", result)?;
        self.synchronize()?;
        // SAFETY: the copy has ended, and nobody else knows the staging memory.
        unsafe { host.copy_to_nonoverlapping(NonNull::from(&mut *target).cast(), target.len()) };
        Ok(())
    }

    pub(crate) fn fill(&self, buffer: &Buffer, offset: usize, bytes: usize, word: u32) -> Result<()> {
        self.check(buffer, offset, bytes)?;
        if !bytes.is_multiple_of(4) || !offset.is_multiple_of(4) {
            return Err(ApiMisuse::Range { start: offset, end: offset + bytes, len: buffer.bytes() }.into());
        }
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.device().enter()?;
        self.keep(&[buffer])?;
        let target = buffer.address() + offset as u64;
        // SAFETY: the range lies within an allocation that is kept until the fill has ended.
        check("cuMemsetD32Async", unsafe { sys::cuMemsetD32Async(target, word, bytes / 4, self.raw()) })
    }

    pub(crate) fn copy(&self, source: (&Buffer, usize), target: (&Buffer, usize), bytes: usize) -> Result<()> {
        self.check(source.0, source.1, bytes)?;
        self.check(target.0, target.1, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let _current = self.device().enter()?;
        self.keep(&[source.0, target.0])?;
        let (from, to) = (source.0.address() + source.1 as u64, target.0.address() + target.1 as u64);
        // SAFETY: both ranges lie within allocations that are kept until the copy has ended.
        check("cuMemcpyDtoDAsync", unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, self.raw()) })
    }

    fn check(&self, buffer: &Buffer, offset: usize, bytes: usize) -> Result<()> {
        if buffer.device() != self.device() {
            let name = |device| Cuda::describe(device).label();
            let (found, expected) = (name(buffer.device()), name(self.device()));
            return Err(ApiMisuse::WrongDevice { what: "buffer", found, expected }.into());
        }
        buffer.check_range(offset, bytes)
    }
}

fn host_of(staging: &Buffer) -> Result<NonNull<u8>> {
    staging.host_pointer().ok_or_else(without_host_address)
}

/// An error, should the driver ever break what it promises of pinned memory.
fn without_host_address() -> signal_core::Error {
    signal_core::Error::Driver {
        code: CUresult::CUDA_ERROR_INVALID_VALUE as i32,
        name: "pinned memory without a host address".to_owned(),
        call: "cuMemHostAlloc",
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
