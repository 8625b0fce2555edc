//! Signal's backend on CPU threads: the default where there is no GPU, and the place where the protocol is tested.
//!
//! It executes the same kernels as the GPU backends, compiled by the host's C++ compiler, on as many make-believe
//! devices as asked for. It does so with the freedoms that a GPU takes, so that what is wrong there shows up here:
//! streams run side by side, calls return before the work is done, memory goes away while work is queued.
//!
//! # Threads
//! - A stream is a queue with one worker thread ([`Stream`]). Work runs there in order.
//! - A launch of `grid * threads` threads takes that many OS threads at once, the worker being the first. None is
//!   ever scheduled behind another of its grid, nor behind another stream's: blocks of different ranks wait for each
//!   other. A waiting thread gives way to others, so this holds with fewer cores than threads; it is only slower.
//! - Idle threads are parked.
//!
//! # Memory
//! All devices share the machine's memory, so a peer's memory needs no mapping, and [`MemoryKind`] only decides
//! whether the host gets a pointer; but for [`MemoryKind::Shared`] and [`MemoryKind::SharedHost`], which other processes map ([`mapping`](signal_core::mapping)). Queued work holds handles of the buffers it uses; memory is freed, without
//! waiting for anything, by whichever thread drops the last handle. With [`HostConfig::canaries`] there are bytes around each buffer that
//! tell when a kernel writes outside ([`Host::overwritten`]).
//!
//! # Order
//! Work on a stream is ordered by the worker; the lanes of a grid hand their writes back to it when the grid ends. An
//! enqueuing call passes on what its thread wrote before (by the queue's lock), `synchronize` and `download` pass
//! back what completed (by the count of completed commands), an event carries both from stream to stream (by its
//! flag). All of this is done by atomics that are compiled with this crate, so that ThreadSanitizer, which knows
//! nothing of the uninstrumented standard library's locks, judges the protocol without false alarms and without
//! suppressions.
//!
//! # Who checks what
//! Ranges, devices, grids and capture state are checked before anything is enqueued. That a kernel's parameters are
//! right is the launcher's duty, as on every backend. That the table handed to [`Host::open`] holds the kernels that
//! it names is the duty of whoever made it ([`HostEntry::new`]).

mod canary;
mod command;
mod device;
mod event;
mod graph;
mod memory;
mod module;
mod peer;
mod pool;
mod stream;
mod sync;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::time::Duration;

use signal_core::backend::{Backend, DeviceInfo, Entry, Found, Launch, MemoryKind, PeerAccess, Readers, StreamId};
use signal_core::error::{ApiMisuse, Result};

use command::Command;

pub use canary::Overwritten;
pub use device::{Device, Host, HostConfig};
pub use event::Event;
pub use graph::Graph;
pub use memory::Buffer;
pub use module::{HOST_BLOCK_BYTES, HostEntry, HostImage, HostImageTable, HostKernel, HostThread, Module};
pub use stream::Stream;

impl Backend for Host {
    const NAME: &'static str = "host";

    type Device = Device;
    type Stream = Stream;
    type Event = Event;
    type Graph = Graph;
    type Buffer = Buffer;
    type Module = Module;
    type Image = HostImageTable;

    fn version(&self) -> String {
        "threads of this process".to_owned()
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(self.all_devices())
    }

    fn describe(device: &Device) -> DeviceInfo {
        device.describe()
    }

    fn peer_access(from: &Device, to: &Device) -> Result<PeerAccess> {
        Ok(peer::access(from, to))
    }

    fn enable_peer(from: &Device, to: &Device) -> Result<()> {
        peer::enable(from, to)
    }

    fn allocate(device: &Device, bytes: usize, kind: MemoryKind) -> Result<Buffer> {
        Buffer::allocate(device, bytes, kind)
    }

    fn address(buffer: &Buffer) -> u64 {
        buffer.address()
    }

    fn bytes(buffer: &Buffer) -> usize {
        buffer.bytes()
    }

    fn buffer_device(buffer: &Buffer) -> Device {
        buffer.device().clone()
    }

    fn host_pointer(buffer: &Buffer) -> Option<NonNull<u8>> {
        buffer.host_pointer()
    }

    fn export(buffer: &Buffer) -> Result<OwnedFd> {
        buffer.export()
    }

    fn import(device: &Device, descriptor: OwnedFd, bytes: usize, kind: MemoryKind) -> Result<Buffer> {
        Buffer::import(device, descriptor, bytes, kind)
    }

    unsafe fn borrow(device: &Device, address: u64, bytes: usize) -> Buffer {
        // SAFETY: passed on to the caller.
        unsafe { Buffer::borrow(device, address, bytes) }
    }

    fn look_up(_device: &Device, address: u64, bytes: usize, readers: Readers<'_, Self>) -> Result<Found> {
        // All memory of the process is one; what is another process's is mapped, which a user's is not.
        Ok(match readers {
            Readers::Devices(_) => Ok((address, bytes)),
            Readers::Processes => Err("it is private memory of a process".to_owned()),
        })
    }

    fn attach(buffer: &Buffer, companion: Box<dyn Any + Send + Sync>) {
        buffer.attach(companion);
    }

    fn find(device: &Device, uuid: &str) -> Option<Device> {
        device.machine().find(|device| device.describe().uuid == uuid)
    }

    fn keep_until(buffer: &Buffer, stream: &Stream) {
        stream.enqueue(Command::Keep(buffer.clone()));
    }

    fn create_stream(device: &Device) -> Result<Stream> {
        Stream::new(device)
    }

    fn stream_id(stream: &Stream) -> StreamId {
        stream.id()
    }

    fn stream_device(stream: &Stream) -> Device {
        stream.device().clone()
    }

    fn raw_stream(_: &Stream) -> Option<NonNull<c_void>> {
        None
    }

    fn with_current<R>(_: &Device, work: impl FnOnce() -> R) -> Result<R> {
        Ok(work())
    }

    fn is_idle(stream: &Stream) -> Result<bool> {
        Ok(stream.is_idle())
    }

    fn is_capturing(stream: &Stream) -> Result<bool> {
        Ok(stream.is_capturing())
    }

    fn synchronize(stream: &Stream) -> Result<()> {
        stream.synchronize()
    }

    fn upload(stream: &Stream, source: &[u8], buffer: &Buffer, offset: usize) -> Result<()> {
        let part = buffer.part(stream.device(), offset, source.len())?;
        stream.enqueue(Command::Upload(source.into(), part));
        Ok(())
    }

    fn download(stream: &Stream, buffer: &Buffer, offset: usize, target: &mut [u8]) -> Result<()> {
        let part = buffer.part(stream.device(), offset, target.len())?;
        stream.download(part, target)
    }

    fn fill(stream: &Stream, buffer: &Buffer, offset: usize, bytes: usize, word: u32) -> Result<()> {
        for (name, value) in [("fill offset", offset), ("fill bytes", bytes)] {
            if value % 4 != 0 {
                let why = "not a multiple of 4".to_string();
                return Err(ApiMisuse::Setting { name, value: value.to_string(), why }.into());
            }
        }
        stream.enqueue(Command::Fill(buffer.part(stream.device(), offset, bytes)?, word));
        Ok(())
    }

    fn copy(stream: &Stream, source: (&Buffer, usize), target: (&Buffer, usize), bytes: usize) -> Result<()> {
        let source = source.0.part(stream.device(), source.1, bytes)?;
        let target = target.0.part(stream.device(), target.1, bytes)?;
        stream.enqueue(Command::Copy(source, target));
        Ok(())
    }

    fn record(stream: &Stream) -> Result<Event> {
        Ok(stream.record())
    }

    fn wait(stream: &Stream, event: &Event) -> Result<()> {
        stream.wait(event)
    }

    fn is_complete(event: &Event) -> Result<bool> {
        Ok(event.is_complete())
    }

    fn elapsed(start: &Event, end: &Event) -> Result<Duration> {
        Event::elapsed(start, end)
    }

    fn begin_capture(stream: &Stream) -> Result<()> {
        stream.begin_capture()
    }

    fn end_capture(stream: &Stream) -> Result<Graph> {
        stream.end_capture()
    }

    fn replay(graph: &Graph, stream: &Stream) -> Result<()> {
        stream.replay(graph)
    }

    fn load(device: &Device) -> Result<Module> {
        Ok(Module::new(device))
    }

    fn image(device: &Device) -> &'static HostImageTable {
        device.host().table
    }

    fn load_image(device: &Device, image: &HostImageTable, names: &[&str]) -> Result<Module> {
        Module::of(device, image, names)
    }

    fn code(_module: &Module) -> String {
        std::env::consts::ARCH.to_owned()
    }

    fn fingerprint(module: &Module) -> u64 {
        module.fingerprint()
    }

    fn resident_blocks(_module: &Module, _kernel: Entry, threads: u32) -> Result<u32> {
        Ok(pool::resident_blocks(threads))
    }

    unsafe fn launch(stream: &Stream, module: &Module, launch: &Launch<'_, Self>) -> Result<()> {
        // SAFETY: passed on from the caller.
        unsafe { stream.launch(module, launch) }
    }
}
