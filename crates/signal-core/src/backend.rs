//! What a vendor must provide. Nothing in here knows what an all-reduce is.

use std::any::Any;
use std::ffi::c_void;
use std::fmt::Debug;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::kernel::Kernel;

/// Family of devices, the first key of the tuning table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceFamily {
    /// CPU threads.
    Host,
    /// NVIDIA GPUs.
    Nvidia,
    /// AMD GPUs.
    Amd,
}

impl DeviceFamily {
    /// The smallest block that is launched: a GPU runs whole waves, and its kernels count on as many threads as there
    /// can be ranks.
    pub const fn min_block_threads(self) -> u32 {
        match self {
            DeviceFamily::Host => 1,
            DeviceFamily::Nvidia | DeviceFamily::Amd => 32,
        }
    }
}

/// What connects two devices, the second key of the tuning table. In order: what is slower is greater.
#[derive(Clone, Copy, Debug, Deserialize, Eq, Hash, Ord, PartialEq, PartialOrd, Serialize)]
#[non_exhaustive]
pub enum Link {
    /// They are one device.
    SameDevice,
    /// The CPU's own memory.
    Host,
    /// NVLink.
    NvLink,
    /// Infinity Fabric.
    Xgmi,
    /// PCI Express.
    Pcie,
    /// None: what they share lies in the host's memory, which both map ([`MemoryKind::SharedHost`]).
    Pinned,
}

impl Link {
    const ALL: [Link; 6] = [Link::SameDevice, Link::Host, Link::NvLink, Link::Xgmi, Link::Pcie, Link::Pinned];

    /// The name used by files.
    pub const fn name(self) -> &'static str {
        match self {
            Link::SameDevice => "same-device",
            Link::Host => "host",
            Link::NvLink => "nvlink",
            Link::Xgmi => "xgmi",
            Link::Pcie => "pcie",
            Link::Pinned => "pinned",
        }
    }

    /// The link with this [`name`](Self::name).
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|link| link.name() == name)
    }
}

/// Description of a device; data, so that a refusal can name it.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Product name.
    pub name: String,
    /// Identity that does not change with enumeration order.
    pub uuid: String,
    /// PCI address, if it has one.
    pub pci: Option<String>,
    /// Code architecture, such as `sm_90` or `x86_64`.
    pub arch: String,
    /// Family, for tuning.
    pub family: DeviceFamily,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Multiprocessors, compute units or CPU cores.
    pub compute_units: u32,
    /// Ticks a second of the clock that kernels read for their deadlines.
    pub clock_hz: u64,
    /// Most threads in one block.
    pub max_block_threads: u32,
}

impl DeviceInfo {
    /// Name and PCI address, for messages: several devices of a machine have one name.
    pub fn label(&self) -> String {
        match &self.pci {
            Some(pci) => format!("{} [{pci}]", self.name),
            None => self.name.clone(),
        }
    }
}

/// Whether one device can reach another's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAccess {
    /// What connects them.
    pub link: Link,
    /// `None` when access is possible, else the reason why not.
    pub refusal: Option<String>,
}

/// Who can reach an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// This device, for a user's data.
    Device,
    /// This device and its peers, while kernels run; uncached on AMD.
    PeerVisible,
    /// Like [`PeerVisible`](Self::PeerVisible), and other processes that are handed its [export](Backend::export). The
    /// memory lives until the last process that has it is done with it, however that process ends.
    Shared,
    /// Memory of the host, for devices that do not reach each other: any device of the process, and other processes, as with
    /// [`Shared`](Self::Shared). Atomics are atomic among the kernels of one device alone.
    SharedHost,
    /// This device and the host, while kernels run. [`Backend::host_pointer`] gives the host's view.
    HostMapped,
}

/// Who is to read memory that a user has allocated.
#[derive(Clone, Copy, Debug)]
pub enum Readers<'a, B: Backend> {
    /// Kernels of this process on these devices, to which access is enabled ([`Backend::enable_peer`]).
    Devices(&'a [B::Device]),
    /// Other processes, by [`Backend::export`] and [`Backend::import`] as [`MemoryKind::Shared`].
    Processes,
}

/// First byte and bytes of an allocation, or why it is not for those who asked.
pub type Found = std::result::Result<(u64, usize), String>;

/// Identity of a stream, unique among the live streams of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamId(pub u64);

/// A kernel of a module: its position among the names that the module was loaded with. Of the embedded image these are the catalogue's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Entry(pub usize);

impl From<Kernel> for Entry {
    fn from(kernel: Kernel) -> Self {
        Entry(kernel.index())
    }
}

/// One launch of one kernel with one plain parameter struct.
#[derive(Debug)]
pub struct Launch<'a, B: Backend> {
    /// The kernel, of the module that it is launched from.
    pub kernel: Entry,
    /// Blocks.
    pub grid: u32,
    /// Threads a block.
    pub threads: u32,
    /// The bytes of the kernel's parameter struct.
    pub params: &'a [u8],
    /// Whether the kernel may be launched while the stream's last kernel still runs, where the device can do that: every
    /// kernel waits itself for what the stream did before it (P9).
    pub early: bool,
    /// Memory that the kernel may touch: the backend keeps it alive until the kernel has finished, and, when the
    /// stream is capturing, for as long as the graph lives.
    pub uses: &'a [&'a B::Buffer],
}

/// A vendor: enumerates and describes devices, allocates, copies, orders streams, captures graphs, loads the kernel
/// image and launches from it.
///
/// A value of the implementing type is an opened driver together with a kernel image. Handles are cheap to clone and
/// reference-counted. Static dispatch: code generic over vendors takes `B: Backend`.
///
/// # Contract
/// - Work on one stream runs in order. Streams of one device run side by side: a kernel that spins on one stream never
///   keeps another stream's kernel from starting, up to [`resident_blocks`](Self::resident_blocks).
/// - The memory of a buffer is released only after the last handle is gone *and* every launch, copy and
///   [`keep_until`](Self::keep_until) that used it has completed. Neither allocating nor releasing waits for a kernel.
/// - Whatever completed on a stream before [`synchronize`](Self::synchronize) or [`download`](Self::download) returns
///   is visible to the calling thread, and what the calling thread wrote before an enqueuing call is visible to it.
pub trait Backend: Clone + Debug + Send + Sync + Sized + 'static {
    /// The name used by the command line: "host", "cuda" or "rocm".
    const NAME: &'static str;

    /// A device.
    type Device: Clone + Debug + PartialEq + Send + Sync;
    /// A queue of work on one device.
    type Stream: Clone + Debug + Send + Sync;
    /// A point in a stream.
    type Event: Debug + Send + Sync;
    /// A captured sequence of work.
    type Graph: Debug + Send + Sync;
    /// A reference-counted allocation.
    type Buffer: Clone + Debug + Send + Sync;
    /// A kernel image, loaded on one device.
    type Module: Clone + Debug + Send + Sync;
    /// A kernel image as it is handed over: the bytes that the driver loads, or a table of functions.
    type Image: ?Sized + 'static;

    /// The version of what it drives, for reports.
    fn version(&self) -> String;
    /// Enumerates the devices, in the driver's order. An error if there is none.
    fn devices(&self) -> Result<Vec<Self::Device>>;
    /// Describes a device.
    fn describe(device: &Self::Device) -> DeviceInfo;
    /// Says whether one process may drive these devices as one group, device by rank.
    fn check_local_group(devices: &[Self::Device]) -> Result<()> {
        let _ = devices;
        Ok(())
    }
    /// Says whether `from` can read and write memory of `to` (one direction).
    fn peer_access(from: &Self::Device, to: &Self::Device) -> Result<PeerAccess>;
    /// Makes memory of `to` that [peers](MemoryKind::PeerVisible) may see reachable from `from`, whenever it was or will be allocated.
    /// Idempotent.
    fn enable_peer(from: &Self::Device, to: &Self::Device) -> Result<()>;

    /// Allocates `bytes` (more than 0), aligned to 256 at least. The content is unspecified.
    fn allocate(device: &Self::Device, bytes: usize, kind: MemoryKind) -> Result<Self::Buffer>;
    /// Address of the first byte as kernels on the buffer's device see it.
    fn address(buffer: &Self::Buffer) -> u64;
    /// Bytes of the buffer.
    fn bytes(buffer: &Self::Buffer) -> usize;
    /// The device that the buffer was allocated on.
    fn buffer_device(buffer: &Self::Buffer) -> Self::Device;
    /// The host's view of a [`MemoryKind::HostMapped`] buffer, `None` for other kinds.
    fn host_pointer(buffer: &Self::Buffer) -> Option<NonNull<u8>>;
    /// A descriptor by which another process may [import](Self::import) a [`MemoryKind::Shared`] or [`MemoryKind::SharedHost`] buffer.
    fn export(buffer: &Self::Buffer) -> Result<OwnedFd>;
    /// Makes memory that another process has exported, of at least `bytes` and that `kind`, reachable from `device`. Nothing is believed of
    /// the descriptor: an error unless it is such memory.
    fn import(device: &Self::Device, descriptor: OwnedFd, bytes: usize, kind: MemoryKind) -> Result<Self::Buffer>;
    /// A handle of memory that others have allocated. [`export`](Self::export) takes it if it is what [`look_up`](Self::look_up) has found for
    /// [`Readers::Processes`].
    ///
    /// # Safety
    /// Kernels on `device` reach all `bytes` (more than 0) at `address`, until the last handle is gone and all work on the memory has ended.
    unsafe fn borrow(device: &Self::Device, address: u64, bytes: usize) -> Self::Buffer;
    /// Start and bytes of the allocation of others in which `bytes` (more than 0) at `address` lie, if `readers` can be let at it while kernels
    /// run; else why not. Nothing is believed of the address, and nothing is changed.
    fn look_up(device: &Self::Device, address: u64, bytes: usize, readers: Readers<'_, Self>) -> Result<Found>;
    /// Drops `companion` with the buffer's last handle, those that graphs have included. Work on the memory may still run then. At
    /// most once for a buffer.
    fn attach(buffer: &Self::Buffer, companion: Box<dyn Any + Send + Sync>);
    /// The device with this [identity](DeviceInfo::uuid), if this process sees it through the driver of `device`.
    fn find(device: &Self::Device, uuid: &str) -> Option<Self::Device>;
    /// Keeps `buffer` alive until the work that is now on `stream` has completed.
    fn keep_until(buffer: &Self::Buffer, stream: &Self::Stream);

    /// Creates a stream that waits for no other.
    fn create_stream(device: &Self::Device) -> Result<Self::Stream>;
    /// Identity of the stream.
    fn stream_id(stream: &Self::Stream) -> StreamId;
    /// Device of the stream.
    fn stream_device(stream: &Self::Stream) -> Self::Device;
    /// The driver's handle of the stream, for calls of other libraries on the same driver; `None` where there is no driver. It is not to be
    /// destroyed, and lives as long as the stream.
    fn raw_stream(stream: &Self::Stream) -> Option<NonNull<c_void>>;
    /// Runs `work` while the device is the current one of this thread, where other libraries on the same driver look for it. Where
    /// there is no driver, it just runs.
    fn with_current<R>(device: &Self::Device, work: impl FnOnce() -> R) -> Result<R>;
    /// True when everything enqueued on the stream has completed.
    fn is_idle(stream: &Self::Stream) -> Result<bool>;
    /// True between [`begin_capture`](Self::begin_capture) and [`end_capture`](Self::end_capture).
    fn is_capturing(stream: &Self::Stream) -> Result<bool>;
    /// Waits for everything enqueued on the stream.
    fn synchronize(stream: &Self::Stream) -> Result<()>;

    /// Enqueues a copy of `source` into `buffer` at byte `offset`. `source` may be reused at once.
    fn upload(stream: &Self::Stream, source: &[u8], buffer: &Self::Buffer, offset: usize) -> Result<()>;
    /// Copies from byte `offset` of `buffer` into `target` behind the work on `stream`, and waits for it.
    fn download(stream: &Self::Stream, buffer: &Self::Buffer, offset: usize, target: &mut [u8]) -> Result<()>;
    /// Enqueues a fill of `bytes` (a multiple of 4) from byte `offset` (a multiple of 4) with `word`.
    fn fill(stream: &Self::Stream, buffer: &Self::Buffer, offset: usize, bytes: usize, word: u32) -> Result<()>;
    /// Enqueues a copy between two buffers of the stream's device, each given with a byte offset.
    fn copy(
        stream: &Self::Stream,
        source: (&Self::Buffer, usize),
        target: (&Self::Buffer, usize),
        bytes: usize,
    ) -> Result<()>;

    /// Enqueues an event that notes the time.
    fn record(stream: &Self::Stream) -> Result<Self::Event>;
    /// Makes later work on `stream` wait for `event`.
    fn wait(stream: &Self::Stream, event: &Self::Event) -> Result<()>;
    /// True when the event has been reached.
    fn is_complete(event: &Self::Event) -> Result<bool>;
    /// Time between two completed events of one device.
    fn elapsed(start: &Self::Event, end: &Self::Event) -> Result<Duration>;

    /// Starts capturing: work is recorded instead of run.
    fn begin_capture(stream: &Self::Stream) -> Result<()>;
    /// Ends capturing.
    fn end_capture(stream: &Self::Stream) -> Result<Self::Graph>;
    /// Enqueues one replay of a graph on a stream of the device it was captured on.
    fn replay(graph: &Self::Graph, stream: &Self::Stream) -> Result<()>;

    /// Loads every kernel of the catalogue, now: a kernel that loaded lazily while a peer spins could deadlock.
    fn load(device: &Self::Device) -> Result<Self::Module>;
    /// The image that the backend was opened with, which [`load`](Self::load) loads.
    fn image(device: &Self::Device) -> &'static Self::Image;
    /// Loads an image that a user brings, and those of its kernels that have these names, now. It stays loaded for the rest of the program.
    ///
    /// Nothing is believed of the image's size or form, but its code is trusted.
    fn load_image(device: &Self::Device, image: &Self::Image, names: &[&str]) -> Result<Self::Module>;
    /// What code the device took from the image, for `doctor`: such as "sm_90", or "sm_120, from compute_90".
    fn code(module: &Self::Module) -> String;
    /// Fingerprint of the image's sources, flags and compiler. Ranks of one communicator must agree on it.
    fn fingerprint(module: &Self::Module) -> u64;
    /// Blocks of `threads` threads of `kernel` that can be resident on the device at once; 0 if it takes no such block.
    fn resident_blocks(module: &Self::Module, kernel: Entry, threads: u32) -> Result<u32>;
    /// Enqueues a kernel. `grid` and `threads` are at least 1 and within the device's limits.
    ///
    /// # Safety
    /// - `launch.kernel` is a kernel of `module`, and `launch.params` holds its parameter struct.
    /// - Every address in it stays valid until the kernel has finished: `launch.uses` keeps memory of this process
    ///   alive, for other memory the caller answers.
    /// - Nothing else writes memory that the kernel reads, nor touches what it writes, except as the protocol orders.
    unsafe fn launch(stream: &Self::Stream, module: &Self::Module, launch: &Launch<'_, Self>) -> Result<()>;
}
