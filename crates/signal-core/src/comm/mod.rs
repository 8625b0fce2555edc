//! Communicators: one a rank.

mod all_reduce;
mod builder;
mod call;
mod calls;
mod check;
mod collectives;
mod exchange;
mod fault;
mod group;
mod pace;
mod process;
mod recover;
mod span;
mod symmetric;
mod transfers;

use std::mem::offset_of;
use std::sync::{Arc, OnceLock, Weak};

use bytemuck::{Pod, Zeroable};

pub use self::builder::Builder;
use self::call::BufferList;
pub use self::call::{BarrierProbe, Call, CallOptions};
pub use self::fault::AbortHandle;
use self::fault::HostBlock;
use self::group::Group;
pub(crate) use self::symmetric::Symmetric;
pub use self::transfers::Transfers;

use crate::backend::{Backend, MemoryKind};
use crate::buffer::{DeviceBuffer, allocation_bytes};
use crate::collective::Collective;
use crate::dtype::{Dtype, ReduceOp};
use crate::error::{ApiMisuse, Error, Result};
use crate::kernel::{Algorithm, FLAG_ORDERED, GroupParams};
use crate::layout::{
    CONTROL_OFFSET, Control, LINE_BANKS_BYTES, LINE_COUNTER_BYTES, LINES_BYTES, LamportState, Line, LineState,
    MAX_GPUS, NUM_BARRIER_DOMAINS, SCRATCH_OFFSET, SIGNAL_START, Signal,
};
use crate::plan::{self, Load, Plan};
use crate::rendezvous::{Id, Rendezvous, UnixRendezvous};
use crate::settings::Settings;
use crate::signal::SignalPtr;

/// One rank of a group that computes collectives together: with the others in one process
/// ([`all_local`](Self::all_local)), or in a process of its own ([`connect`](Self::connect)).
///
/// Every rank makes the same calls in the same order, each on a stream of its own device. A call checks its arguments,
/// enqueues one kernel and returns; when the kernel has finished on the stream *without error*, the output is complete
/// and the input may be overwritten. Calls of one domain are in order, also across streams.
///
/// A wait that its peers do not end in [`Settings::timeout`] ends the kernel on every rank: the next call, or
/// [`status`](Self::status), returns [`Error::Timeout`] with the missing ranks, and from then on calls return
/// [`Error::Poisoned`]. Results of the failed call are unspecified, and whether peers finished it is unknown.
#[derive(Debug)]
pub struct Communicator<B: Backend> {
    group: Arc<Group<B>>,
    rank: usize,
    own: Own<B>,
    settings: Settings,
    /// Parameters that do not change from call to call.
    params: GroupParams,
    /// The stream that each domain was last used on.
    streams: [Option<B::Stream>; NUM_BARRIER_DOMAINS],
    /// Calls of `alloc` made.
    allocations: u64,
    /// Where this rank's symmetric buffers lie, for the raw layer.
    symmetric: Vec<Region<B>>,
    /// The first fault, once it has been told to the user.
    poison: OnceLock<Error>,
}

/// What a rank needs and its peers do not know.
#[derive(Debug)]
struct Own<B: Backend> {
    device: B::Device,
    module: B::Module,
    host: HostBlock<B>,
    /// For uploads that must not queue behind the user's work.
    service: B::Stream,
}

impl<B: Backend> Own<B> {
    fn new(device: &B::Device, module: B::Module, service: B::Stream) -> Result<Self> {
        Ok(Own { device: device.clone(), module, host: HostBlock::new(device)?, service })
    }

    /// Allocates a rank's Signal, Control and scratch, and prepares them.
    fn allocate(&self, kind: MemoryKind, settings: &Settings, rank: usize, world: usize) -> Result<B::Buffer> {
        let memory = B::allocate(&self.device, SCRATCH_OFFSET + settings.scratch_bytes, kind)?;
        Signal::init_signal_buffer::<B>(&self.service, &memory, SIGNAL_START, rank, world)?;
        Ok(memory)
    }
}

/// Addresses of a symmetric buffer on this rank.
#[derive(Debug)]
struct Region<B: Backend> {
    start: u64,
    bytes: u64,
    buffer: Weak<Symmetric<B>>,
}

impl<B: Backend> Communicator<B> {
    /// One communicator for each device, rank by rank, all in this process, with settings from the environment.
    ///
    /// # Errors
    /// As [`Builder::all_local`].
    pub fn all_local(devices: &[B::Device]) -> Result<Vec<Self>> {
        Self::builder().all_local(devices)
    }

    /// This process's rank of a group whose ranks are processes, with settings from the environment.
    ///
    /// # Errors
    /// As [`Builder::connect`].
    pub fn connect(device: &B::Device, rendezvous: impl Rendezvous + 'static) -> Result<Self> {
        Self::builder().connect(device, rendezvous)
    }

    /// [`connect`](Self::connect) as users of NCCL know it: rank 0's process, or any other, makes an [`Id`] and hands its bytes to
    /// all, and each rank brings it together with a stream of its device. The stream is not kept: calls say theirs.
    ///
    /// # Errors
    /// As [`Builder::connect`].
    pub fn from_rank(stream: &B::Stream, rank: usize, world_size: usize, id: &Id) -> Result<Self> {
        let settings = Settings::from_env()?;
        let rendezvous = UnixRendezvous::from_id(id, rank, world_size, settings.timeout)?;
        Self::builder().settings(settings).connect(&B::stream_device(stream), rendezvous)
    }

    /// Options for creating communicators.
    pub fn builder() -> Builder<B> {
        Builder::new()
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Ranks in the group.
    pub fn world_size(&self) -> usize {
        self.group.world()
    }

    /// This rank's device.
    pub fn device(&self) -> &B::Device {
        &self.own.device
    }

    /// The settings that all ranks agreed on.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// This rank's Signal.
    pub fn signal(&self) -> SignalPtr {
        // SAFETY: the address is of memory that the builder has initialised and that the group keeps alive.
        unsafe { Signal::unsafe_ptr_from(self.params.base[self.rank]) }
    }

    /// Allocates `len` elements of symmetric memory, which peers read in place, with unspecified content.
    ///
    /// Collective: every rank makes the same `alloc` calls in the same order. In one process it never waits: whichever
    /// rank comes first allocates for all. Ranks that are processes meet in it, and wait for each other as long as for a
    /// call's peers ([`Settings::timeout`]).
    ///
    /// # Errors
    /// [`ApiMisuse::UnequalAlloc`], [`ApiMisuse::TooLarge`]; [`Error::Rendezvous`] with the ranks that did not come, or could
    /// not; errors of the driver.
    pub fn alloc<T: Pod>(&mut self, len: usize) -> Result<DeviceBuffer<B, T>> {
        let capacity = allocation_bytes::<T>(len)?;
        let bytes = len * size_of::<T>();
        let buffer = symmetric::allocate(self, bytes, capacity)?;
        self.allocations += 1;
        self.symmetric.retain(|region| region.buffer.strong_count() > 0);
        self.symmetric.push(Region {
            start: B::address(buffer.memory(self.rank)),
            bytes: capacity as u64,
            buffer: Arc::downgrade(&buffer),
        });
        Ok(DeviceBuffer::of_symmetric(buffer, self.rank, len))
    }

    /// A call with options of its own. Every rank must pass the same ones.
    pub fn with(&mut self, options: CallOptions) -> Call<'_, B> {
        Call::new(self, options)
    }

    /// The plan of an all-reduce of `count` elements that is called without options: the same on every rank.
    pub fn plan(&self, count: usize, dtype: Dtype, op: ReduceOp) -> Plan {
        self.plan_with(&CallOptions::default(), count, dtype, op)
    }

    /// The fault that this rank's kernels have reported, if any; read from host memory, without a driver call.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Aborted`].
    pub fn status(&self) -> Result<()> {
        if let Some(fault) = self.poison.get() {
            return Err(fault.clone());
        }
        match self.own.host.fault(self.rank, self.settings.timeout)? {
            None => Ok(()),
            Some(fault) => Err(self.poison.get_or_init(|| fault).clone()),
        }
    }

    /// Waits for everything enqueued on `stream`, then returns the [`status`](Self::status). Bounded: every wait inside
    /// a kernel ends at its deadline.
    ///
    /// # Errors
    /// [`Error::Timeout`], [`Error::Aborted`]; errors of the driver.
    pub fn wait(&self, stream: &B::Stream) -> Result<()> {
        B::synchronize(stream)?;
        self.status()
    }

    /// A handle that ends this rank's waits from another thread.
    pub fn abort_handle(&self) -> AbortHandle<B> {
        AbortHandle { host: self.own.host.clone() }
    }

    /// Presets every barrier counter, to test that their wrap is harmless. Call it on every rank with the same value,
    /// before any collective.
    ///
    /// # Errors
    /// Errors of the driver.
    #[doc(hidden)]
    pub fn preset_counters(&mut self, value: u32) -> Result<()> {
        let (memory, service) = (&self.group.memory[self.rank], &self.own.service);
        let counters = offset_of!(Signal, lamport_state);
        let control = SIGNAL_START + CONTROL_OFFSET;
        let lines = (control + offset_of!(Control, line_counter))..(control + offset_of!(Control, pad));
        B::fill(service, memory, SIGNAL_START, counters, value)?;
        B::fill(service, memory, lines.start, lines.len(), value)?;
        B::synchronize(service)
    }

    /// Presets the count of Lamport calls, to test its wrap. Call it on every rank with the same value, before any
    /// collective.
    ///
    /// # Errors
    /// [`ApiMisuse::LamportFlag`] for 0xFFFF_FFFF; errors of the driver.
    #[doc(hidden)]
    pub fn preset_lamport_flag(&mut self, value: u32) -> Result<()> {
        if value == u32::MAX {
            return Err(ApiMisuse::LamportFlag(value).into());
        }
        let service = &self.own.service;
        let flag = SIGNAL_START + offset_of!(Signal, lamport_state) + offset_of!(LamportState, flag);
        B::fill(service, &self.group.memory[self.rank], flag, 4, value)?;
        B::synchronize(service)
    }

    /// Presets the counts of calls by lines, on all domains, to test their wrap. Call it on every rank with the same value, before any
    /// collective.
    ///
    /// # Errors
    /// [`ApiMisuse::LamportFlag`] for a value that is no count; errors of the driver.
    #[doc(hidden)]
    pub fn preset_line_count(&mut self, value: u32) -> Result<()> {
        if value > 0xffff_fffd {
            return Err(ApiMisuse::LamportFlag(value).into());
        }
        let (service, memory) = (&self.own.service, &self.group.memory[self.rank]);
        let state = SIGNAL_START + CONTROL_OFFSET + offset_of!(Control, line_state);
        for domain in 0..NUM_BARRIER_DOMAINS {
            let count = state + domain * size_of::<LineState>() + offset_of!(LineState, count);
            B::fill(service, memory, count, 4, value)?;
        }
        B::synchronize(service)
    }

    fn new(group: Arc<Group<B>>, rank: usize, own: Own<B>, settings: Settings) -> Self {
        let ticks = settings.timeout.as_secs_f64() * B::describe(&own.device).clock_hz as f64;
        let mut params = GroupParams {
            host_control: B::address(own.host.memory()),
            deadline_ticks: (ticks as u64).clamp(1, i64::MAX as u64),
            rank: rank as u32,
            world: group.world() as u32,
            ..GroupParams::zeroed()
        };
        // As this rank's device sees them.
        for (base, memory) in params.base.iter_mut().zip(&group.memory) {
            *base = B::address(memory) + SIGNAL_START as u64;
        }
        params.own = params.base[rank];
        Communicator {
            group,
            rank,
            own,
            settings,
            params,
            streams: Default::default(),
            allocations: 0,
            symmetric: Vec::new(),
            poison: OnceLock::new(),
        }
    }

    /// The parameters of a call on `domain`: with its share of the scratch.
    fn group_params(&self, domain: u32) -> GroupParams {
        // A multiple of 128, the GPUs' cache line, so that shares do not meet in one.
        let share = (self.settings.scratch_bytes as u64 / self.shares()) & !127;
        let scratch_offset = (SCRATCH_OFFSET - SIGNAL_START) as u64 + share * u64::from(domain);
        let control = self.params.own + CONTROL_OFFSET as u64;
        let line_counters = control + (offset_of!(Control, line_counter) + domain as usize * LINE_COUNTER_BYTES) as u64;
        let lines = CONTROL_OFFSET + offset_of!(Control, lines) + domain as usize * LINES_BYTES;
        GroupParams {
            control,
            line_counters,
            lines: self.params.own + lines as u64,
            flags: if self.settings.ordered_barriers { FLAG_ORDERED } else { 0 },
            line_out: (lines + self.rank * size_of::<Line>()) as u32,
            domain,
            scratch_offset,
            scratch_bytes: share,
            ..self.params
        }
    }

    /// Whether a kernel of this grid is launched early, and lets the next one be. Depends on what all ranks share alone: a
    /// peer's early kernel takes room that this rank's may need.
    fn allows_early(&self, blocks: u32, threads: u32) -> bool {
        self.settings.early_launch && self.group.budget.has_room_for_next(blocks, threads)
    }

    /// Whether calls are compared with the peers' first.
    fn checks(&self) -> bool {
        self.settings.check && self.world_size() > 1
    }

    /// Counts a call with `partners` about to be launched on `stream`, or stops a rank that is far ahead of them.
    fn keep_pace(&self, stream: &B::Stream, partners: u32) -> Result<()> {
        if B::is_capturing(stream)? {
            self.group.pace.captures();
            return Ok(());
        }
        self.group.pace.step(self.rank, partners, self.settings.timeout, || self.status())
    }

    /// What every kernel of the group may touch.
    fn group_memory(&self) -> BufferList<'_, B::Buffer> {
        let mut memory = BufferList::new(self.own.host.memory());
        memory.extend(&self.group.memory);
        memory
    }

    /// Fails once there is a fault: with the fault itself if the user has not been told yet, then with
    /// [`Error::Poisoned`].
    fn check_poison(&self) -> Result<()> {
        match self.poison.get() {
            Some(cause) => Err(Error::Poisoned { cause: Box::new(cause.clone()) }),
            None => self.status(),
        }
    }

    /// Makes `stream` the stream of `domain`, ordered behind the domain's last call (P11).
    fn take_stream(&mut self, domain: u32, stream: &B::Stream) -> Result<()> {
        let last = &self.streams[domain as usize];
        if last.as_ref().is_some_and(|last| B::stream_id(last) == B::stream_id(stream)) {
            return Ok(());
        }
        let device = B::stream_device(stream);
        if device != *self.device() {
            return Err(self.wrong_device("stream", &device));
        }
        if let Some(last) = last {
            if B::is_capturing(last)? {
                return Err(ApiMisuse::BusyDomain(domain).into());
            }
            if B::is_capturing(stream)? {
                if !B::is_idle(last)? {
                    return Err(ApiMisuse::BusyDomain(domain).into());
                }
                self.group.use_stream(self.rank, domain, stream)?;
            } else {
                self.group.use_stream(self.rank, domain, stream)?;
                B::wait(stream, &B::record(last)?)?;
            }
        } else {
            self.group.use_stream(self.rank, domain, stream)?;
        }
        self.streams[domain as usize] = Some(stream.clone());
        Ok(())
    }

    fn wrong_device(&self, what: &'static str, found: &B::Device) -> Error {
        let name = |device| B::describe(device).label();
        ApiMisuse::WrongDevice { what, found: name(found), expected: name(self.device()) }.into()
    }

    fn plan_with(&self, options: &CallOptions, count: usize, dtype: Dtype, op: ReduceOp) -> Plan {
        let bytes = count.saturating_mul(dtype.bytes()) as u64;
        let takes = |algorithm| match algorithm {
            Algorithm::Lamport => all_reduce::check_lamport(bytes, options.domain, dtype, op).is_ok(),
            Algorithm::Lines => bytes <= self.most_line_bytes(),
            algorithm => Algorithm::ALL_REDUCE.contains(&algorithm),
        };
        let table = plan::all_reduce(self.group.topology, count, dtype, takes);
        let setting = self.settings.algorithm.filter(|algorithm| takes(*algorithm));
        let algorithm = options.algorithm.or(setting).unwrap_or(table.algorithm);
        self.fitted(Plan { algorithm, ..table }, options)
    }

    /// The plan of any other collective that moves `bytes` in equal parts and is called without options: the same on every rank. What
    /// counts are the bytes of a rank's input or of its output, whichever is more; of a send-recv those of the larger of the two
    /// messages.
    pub fn plan_of(&self, collective: Collective, bytes: u64) -> Plan {
        let parts = if collective.has_parts() { self.world_size() as u64 } else { 1 };
        self.plan_of_with(&CallOptions::default(), collective, Load { bytes, largest: bytes.div_ceil(parts) })
    }

    fn plan_of_with(&self, options: &CallOptions, collective: Collective, load: Load) -> Plan {
        let takes = |algorithm: Algorithm| {
            let fits = algorithm != Algorithm::Lines || load.largest <= self.most_line_bytes();
            fits && collective.algorithms().contains(&algorithm)
        };
        let table = plan::exchange(self.group.topology, collective, load, takes);
        let setting = self.settings.algorithm.filter(|algorithm| takes(*algorithm));
        let algorithm = options.algorithm.or(setting).unwrap_or(table.algorithm);
        self.fitted(Plan { algorithm, ..table }, options)
    }

    /// Domains that divide what one communicator has.
    fn shares(&self) -> u64 {
        if self.settings.domains { NUM_BARRIER_DOMAINS as u64 } else { 1 }
    }

    /// Bytes of a rank's slot in a bank of lines: a domain has two banks.
    fn line_slot_bytes(&self) -> u64 {
        LINE_BANKS_BYTES as u64 / self.shares() / (2 * MAX_GPUS as u64)
    }

    /// The largest piece that goes by lines, of which half is data.
    fn most_line_bytes(&self) -> u64 {
        self.line_slot_bytes() / 2
    }

    /// What the table proposes is cut down to the budget; what the user asks for is taken or refused.
    fn fitted(&self, table: Plan, options: &CallOptions) -> Plan {
        let (settings, budget) = (&self.settings, &self.group.budget);
        let asked = options.threads.or(settings.threads);
        let threads = asked.unwrap_or(table.threads.min(budget.max_threads()));
        let asked = options.blocks.or(settings.blocks);
        let blocks = asked.unwrap_or(table.blocks.min(budget.blocks(threads).max(1)));
        Plan { blocks, threads: self.group.whole_wave(threads), ..table }
    }

    /// The symmetric buffer of this rank that holds `bytes` at `address`.
    fn find_symmetric(&self, address: u64, bytes: u64) -> Option<Arc<Symmetric<B>>> {
        self.symmetric
            .iter()
            .find(|r| address >= r.start && address - r.start <= r.bytes && bytes <= r.bytes - (address - r.start))
            .and_then(|region| region.buffer.upgrade())
    }
}

impl<B: Backend> Drop for Communicator<B> {
    fn drop(&mut self) {
        self.group.leave(self.rank);
    }
}
