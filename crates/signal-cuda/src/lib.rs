//! Signal's backend on the CUDA driver API.
//!
//! # What it does with a process that also uses CUDA otherwise
//! It works in each device's primary context, which cudarc and the CUDA runtime share, and makes that context current
//! only for the length of its own calls. It creates streams of its own and adopts the user's ([`Stream::adopt`]).
//!
//! # Memory
//! Peers see plain `cuMemAlloc` memory: pool memory is not reachable from peers without further steps. Neither
//! allocating nor freeing may wait for a kernel, for ranks that one thread drives would wait for each other forever; but
//! `cuMemFree` waits for the device. So what is dropped is buried first ([`signal_core::deferred`]), reused when the work that used it
//! has ended, and given back to the driver only while no stream of ours has work. Memory that other processes map too
//! (shared.rs) is never reused: they may still have it.
//!
//! # Order
//! A launch notes its stream in a bit mask of each buffer it uses: one relaxed load when the bit is set already. A
//! captured launch hands the buffers to the graph instead, by a user object that lives as long as the graph and its
//! executables, whoever began the capture.
//!
//! # Layers
//! driver.rs loads and checks the library and turns its codes into errors; every unsafe call stands in a small function
//! of the file that owns the handle.

mod device;
mod driver;
mod event;
mod foreign;
mod graph;
mod memory;
mod module;
mod peer;
mod quiet;
mod shared;
mod stream;

use std::any::Any;
use std::ffi::c_void;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::time::Duration;

use signal_core::backend::Found;
use signal_core::error::Result;
use signal_core::{Backend, DeviceInfo, Entry, Launch, MemoryKind, PeerAccess, Readers, StreamId};

/// The bindings of cudarc that this backend calls, for what it does not wrap: handles such as [`Stream::raw`].
pub use cudarc::driver::sys;

pub use self::device::{Cuda, CudaImage, Device};
pub use self::event::Event;
pub use self::graph::Graph;
pub use self::memory::Buffer;
pub use self::module::{Code, Module};
pub use self::stream::Stream;

impl Backend for Cuda {
    const NAME: &'static str = "cuda";

    type Device = Device;
    type Stream = Stream;
    type Event = Event;
    type Graph = Graph;
    type Buffer = Buffer;
    type Module = Module;
    type Image = [u8];

    fn version(&self) -> String {
        let version = self.driver_version();
        format!("CUDA driver API {}.{}", version / 1000, version % 1000 / 10)
    }

    fn devices(&self) -> Result<Vec<Device>> {
        Ok(self.all_devices())
    }

    fn describe(device: &Device) -> DeviceInfo {
        device.info().clone()
    }

    fn check_local_group(devices: &[Device]) -> Result<()> {
        device::check_local_group(devices)
    }

    fn peer_access(from: &Device, to: &Device) -> Result<PeerAccess> {
        peer::access(from, to)
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

    fn look_up(device: &Device, address: u64, bytes: usize, readers: Readers<'_, Self>) -> Result<Found> {
        foreign::look_up(device, address, bytes, readers)
    }

    fn attach(buffer: &Buffer, companion: Box<dyn Any + Send + Sync>) {
        buffer.attach(companion);
    }

    fn find(device: &Device, uuid: &str) -> Option<Device> {
        device::opened().into_iter().find(|other| other.info().uuid == uuid && other.image() == device.image())
    }

    fn keep_until(buffer: &Buffer, stream: &Stream) {
        buffer.used_on(stream);
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

    fn raw_stream(stream: &Stream) -> Option<NonNull<c_void>> {
        NonNull::new(stream.raw().cast())
    }

    fn with_current<R>(device: &Device, work: impl FnOnce() -> R) -> Result<R> {
        let _current = device.enter()?;
        Ok(work())
    }

    fn is_idle(stream: &Stream) -> Result<bool> {
        stream.is_idle()
    }

    fn is_capturing(stream: &Stream) -> Result<bool> {
        stream.is_capturing()
    }

    fn synchronize(stream: &Stream) -> Result<()> {
        stream.synchronize()
    }

    fn upload(stream: &Stream, source: &[u8], buffer: &Buffer, offset: usize) -> Result<()> {
        stream.upload(source, buffer, offset)
    }

    fn download(stream: &Stream, buffer: &Buffer, offset: usize, target: &mut [u8]) -> Result<()> {
        stream.download(buffer, offset, target)
    }

    fn fill(stream: &Stream, buffer: &Buffer, offset: usize, bytes: usize, word: u32) -> Result<()> {
        stream.fill(buffer, offset, bytes, word)
    }

    fn copy(stream: &Stream, source: (&Buffer, usize), target: (&Buffer, usize), bytes: usize) -> Result<()> {
        stream.copy(source, target, bytes)
    }

    fn record(stream: &Stream) -> Result<Event> {
        stream.record()
    }

    fn wait(stream: &Stream, event: &Event) -> Result<()> {
        event.wait_on(stream)
    }

    fn is_complete(event: &Event) -> Result<bool> {
        event.is_complete()
    }

    fn elapsed(start: &Event, end: &Event) -> Result<Duration> {
        start.elapsed(end)
    }

    fn begin_capture(stream: &Stream) -> Result<()> {
        graph::begin(stream)
    }

    fn end_capture(stream: &Stream) -> Result<Graph> {
        graph::end(stream)
    }

    fn replay(graph: &Graph, stream: &Stream) -> Result<()> {
        graph.replay(stream)
    }

    fn load(device: &Device) -> Result<Module> {
        device.module()
    }

    fn image(device: &Device) -> &'static [u8] {
        device.image().bytes
    }

    fn load_image(device: &Device, image: &[u8], names: &[&str]) -> Result<Module> {
        Module::load_user(device, image, names)
    }

    fn code(module: &Module) -> String {
        module.code().to_string()
    }

    fn fingerprint(module: &Module) -> u64 {
        module.fingerprint()
    }

    fn resident_blocks(module: &Module, kernel: Entry, threads: u32) -> Result<u32> {
        module.resident_blocks(kernel, threads)
    }

    unsafe fn launch(stream: &Stream, module: &Module, launch: &Launch<'_, Self>) -> Result<()> {
        // SAFETY: the caller's promise, passed on.
        unsafe { module.launch(stream, launch) }
    }
}
