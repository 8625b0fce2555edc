//! One rank, as its communicator and the handles of its domains share it.

use std::mem::offset_of;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use bytemuck::Zeroable;

use super::call::{BufferList, CallOptions};
use super::fault::HostBlock;
use super::group::{Group, lock};
use super::{Symmetric, all_reduce};
use crate::backend::{Backend, MemoryKind};
use crate::collective::Collective;
use crate::dtype::{Dtype, ReduceOp};
use crate::error::{ApiMisuse, Error, Result};
use crate::kernel::{Algorithm, FLAG_ORDERED, GroupParams};
use crate::layout::{
    CONTROL_OFFSET, Control, LINE_COUNTER_BYTES, LINES_BYTES, Line, NUM_BARRIER_DOMAINS, PACK_BYTES, SCRATCH_OFFSET,
    SIGNAL_START, Signal, line_slot_bytes, most_line_bytes,
};
use crate::plan::{self, Load, Plan, Topology};
use crate::settings::Settings;
use crate::signal::check_domain;
use crate::tuning::TuningRow;

use super::trace::Tracer;

/// A rank: what its calls need, on whatever domain and thread they are made.
#[derive(Debug)]
pub(crate) struct Member<B: Backend> {
    pub(super) group: Arc<Group<B>>,
    pub(super) rank: usize,
    pub(super) own: Own<B>,
    pub(super) settings: Settings,
    /// Parameters that do not change from call to call.
    params: GroupParams,
    lanes: [Lane<B>; NUM_BARRIER_DOMAINS],
    /// Where this rank's symmetric buffers lie, for the raw layer.
    symmetric: Mutex<Vec<Region<B>>>,
    poison: Poison,
    /// Where a timeline is wanted.
    pub(super) tracer: Option<Tracer<B>>,
}

/// A domain of this rank. Its calls are made by one thread at a time: by whoever has its handle, or while there is none by whoever
/// has the communicator.
#[derive(Debug)]
struct Lane<B: Backend> {
    /// Whether there is a handle.
    taken: AtomicBool,
    /// The stream that it was last used on.
    last: Mutex<Option<B::Stream>>,
}

/// The first fault, once it has been told to the user.
#[derive(Debug, Default)]
struct Poison {
    told: AtomicBool,
    fault: Mutex<Option<Error>>,
}

/// Whether the user knows of a fault already.
enum Fault {
    New(Error),
    Told(Error),
}

/// What a rank needs and its peers do not know.
#[derive(Debug)]
pub(super) struct Own<B: Backend> {
    pub(super) device: B::Device,
    pub(super) module: B::Module,
    pub(super) host: HostBlock<B>,
    /// For uploads that must not queue behind the user's work.
    pub(super) service: B::Stream,
}

impl<B: Backend> Own<B> {
    pub(super) fn new(device: &B::Device, module: B::Module, service: B::Stream) -> Result<Self> {
        Ok(Own { device: device.clone(), module, host: HostBlock::new(device)?, service })
    }

    /// Allocates a rank's Signal, Control and scratch, and prepares them.
    pub(super) fn allocate(
        &self,
        kind: MemoryKind,
        settings: &Settings,
        rank: usize,
        world: usize,
    ) -> Result<B::Buffer> {
        let memory = B::allocate(&self.device, SCRATCH_OFFSET + settings.scratch_bytes, kind)?;
        Signal::init_signal_buffer::<B>(&self.service, &memory, SIGNAL_START, rank, world)?;
        Ok(memory)
    }
}

/// Addresses of a symmetric buffer on this rank.
#[derive(Debug)]
pub(super) struct Region<B: Backend> {
    start: u64,
    bytes: u64,
    buffer: Weak<Symmetric<B>>,
}

impl<B: Backend> Member<B> {
    pub(super) fn new(group: Arc<Group<B>>, rank: usize, own: Own<B>, settings: Settings) -> Result<Self> {
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
        let mut member = Member {
            group,
            rank,
            own,
            settings,
            params,
            lanes: std::array::from_fn(|_| Lane { taken: AtomicBool::new(false), last: Mutex::new(None) }),
            symmetric: Mutex::default(),
            poison: Poison::default(),
            tracer: None,
        };
        if let Some(path) = member.settings.trace.clone() {
            member.tracer = Some(Tracer::new(&member, &path)?);
        }
        Ok(member)
    }

    pub(super) fn world_size(&self) -> usize {
        self.group.world()
    }

    pub(super) fn device(&self) -> &B::Device {
        &self.own.device
    }

    /// Address of this rank's Signal.
    pub(super) fn base(&self) -> u64 {
        self.params.own
    }

    /// This rank's Signal, Control and scratch.
    pub(super) fn memory(&self) -> &B::Buffer {
        &self.group.memory[self.rank]
    }

    /// Refuses a domain that this rank does not have.
    fn check_open(&self, domain: u32) -> Result<()> {
        check_domain(domain)?;
        if domain > 0 && !self.settings.domains {
            return Err(ApiMisuse::DomainsClosed(domain).into());
        }
        Ok(())
    }

    /// Refuses a domain on which no call can be made: by its handle, or by the communicator.
    pub(super) fn check_lane(&self, domain: u32, by_handle: bool) -> Result<()> {
        self.check_open(domain)?;
        if by_handle { Ok(()) } else { self.check_free(domain) }
    }

    fn check_free(&self, domain: u32) -> Result<()> {
        // Acquire: the calls of a handle that is gone have been made.
        if self.lanes[domain as usize].taken.load(Ordering::Acquire) {
            return Err(ApiMisuse::DomainTaken(domain).into());
        }
        Ok(())
    }

    /// Refuses while some domain has a handle: its calls may come at any time.
    pub(super) fn check_all_free(&self) -> Result<()> {
        (0..NUM_BARRIER_DOMAINS as u32).try_for_each(|domain| self.check_free(domain))
    }

    /// Makes way for a handle.
    pub(super) fn take_lane(&self, domain: u32) -> Result<()> {
        self.check_open(domain)?;
        // Acquire: as in `check_free`.
        if self.lanes[domain as usize].taken.swap(true, Ordering::Acquire) {
            return Err(ApiMisuse::DomainTaken(domain).into());
        }
        self.group.pace.changes_thread(self.rank, domain as usize);
        Ok(())
    }

    /// The handle is gone.
    pub(super) fn return_lane(&self, domain: u32) {
        // Release: pairs with those above.
        self.lanes[domain as usize].taken.store(false, Ordering::Release);
    }

    /// See [`Communicator::status`](super::Communicator::status).
    pub(super) fn status(&self) -> Result<()> {
        match self.fault()? {
            None => Ok(()),
            Some(Fault::New(fault) | Fault::Told(fault)) => Err(fault),
        }
    }

    /// Fails once there is a fault: with the fault itself if the user has not been told yet, then with
    /// [`Error::Poisoned`].
    pub(super) fn check_poison(&self) -> Result<()> {
        match self.fault()? {
            None => Ok(()),
            Some(Fault::New(fault)) => Err(fault),
            Some(Fault::Told(cause)) => Err(Error::Poisoned { cause: Box::new(cause) }),
        }
    }

    /// The fault, which the user is told now.
    fn fault(&self) -> Result<Option<Fault>> {
        // Relaxed: the lock orders what it says. Whoever misses it looks at the host's words as the first one did.
        if !self.poison.told.load(Ordering::Relaxed) {
            let Some(found) = self.own.host.fault(self.rank, self.settings.timeout)? else { return Ok(None) };
            let mut fault = lock(&self.poison.fault);
            if fault.is_none() {
                *fault = Some(found.clone());
                self.poison.told.store(true, Ordering::Relaxed);
                return Ok(Some(Fault::New(found)));
            }
        }
        Ok(lock(&self.poison.fault).clone().map(Fault::Told))
    }

    /// All ranks have recovered. Nobody is making a call.
    pub(super) fn forget_fault(&self) {
        *lock(&self.poison.fault) = None;
        self.poison.told.store(false, Ordering::Relaxed);
    }

    /// The parameters of a call on `domain`: with its share of the scratch.
    pub(super) fn group_params(&self, domain: u32) -> GroupParams {
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
            // Over the host's memory every barrier is ordered (P2).
            flags: if self.settings.ordered_barriers || !self.group.reaches_peers() { FLAG_ORDERED } else { 0 },
            line_out: (lines + self.rank * size_of::<Line>()) as u32,
            domain,
            scratch_offset,
            scratch_bytes: share,
            ..self.params
        }
    }

    /// Whether a kernel of this grid is launched early, and lets the next one be. Depends on what all ranks share alone: a
    /// peer's early kernel takes room that this rank's may need.
    pub(super) fn allows_early(&self, blocks: u32, threads: u32) -> bool {
        self.settings.early_launch && self.group.budget.has_room_for_next(blocks, threads)
    }

    /// Whether calls are compared with the peers' first.
    pub(super) fn checks(&self) -> bool {
        self.settings.check && self.world_size() > 1
    }

    /// Counts a call with `partners` about to be launched on `stream`, or stops a rank that is far ahead of them.
    pub(super) fn keep_pace(&self, domain: u32, stream: &B::Stream, partners: u32) -> Result<()> {
        if B::is_capturing(stream)? {
            self.group.pace.captures();
            return Ok(());
        }
        let lane = (self.rank, domain as usize);
        // A call that is traced takes three launches of the stream.
        let launches = if self.tracer.is_some() { 3 } else { 1 };
        (0..launches).try_for_each(|_| self.group.pace.step(lane, partners, self.settings.timeout, || self.status()))
    }

    /// What every kernel of the group may touch.
    pub(super) fn group_memory(&self) -> BufferList<'_, B::Buffer> {
        let mut memory = BufferList::new(self.own.host.memory());
        memory.extend(&self.group.memory);
        memory
    }

    /// Makes `stream` the stream of `domain`, ordered behind the domain's last call (P11).
    pub(super) fn take_stream(&self, domain: u32, stream: &B::Stream) -> Result<()> {
        let mut lane = lock(&self.lanes[domain as usize].last);
        let last = &*lane;
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
        *lane = Some(stream.clone());
        Ok(())
    }

    pub(super) fn wrong_device(&self, what: &'static str, found: &B::Device) -> Error {
        let name = |device| B::describe(device).label();
        ApiMisuse::WrongDevice { what, found: name(found), expected: name(self.device()) }.into()
    }

    pub(super) fn plan_with(&self, options: &CallOptions, count: usize, dtype: Dtype, op: ReduceOp) -> Plan {
        let bytes = count.saturating_mul(dtype.bytes()) as u64;
        let takes = |algorithm| match algorithm {
            Algorithm::Lamport => {
                all_reduce::check_lamport(bytes, self.world_size(), options.domain, (dtype, op)).is_ok()
            }
            Algorithm::TwoShot => all_reduce::check_region(options.domain, dtype, op).is_ok(),
            Algorithm::Lines => bytes <= self.most_line_bytes(),
            algorithm => Algorithm::ALL_REDUCE.contains(&algorithm),
        };
        let setting = self.settings.algorithm.filter(|algorithm| takes(*algorithm));
        let wanted = match options.algorithm.or(setting) {
            // Each rank must hear from each other, so each has a shard.
            Some(Algorithm::TwoShot) if bytes.div_ceil(PACK_BYTES as u64) < self.world_size() as u64 => {
                Some(Algorithm::Lamport)
            }
            wanted => wanted,
        };
        let tuned = self.tuned(Collective::AllReduce, bytes);
        self.fitted(plan::all_reduce(self.group.topology, tuned, count, dtype, wanted, takes), options)
    }

    /// The plan of another collective that moves `bytes` in equal parts.
    pub(super) fn plan_of(&self, options: &CallOptions, collective: Collective, bytes: u64) -> Plan {
        let parts = if collective.has_parts() { self.world_size() as u64 } else { 1 };
        self.plan_of_with(options, collective, Load { bytes, largest: bytes.div_ceil(parts) })
    }

    pub(super) fn plan_of_with(&self, options: &CallOptions, collective: Collective, load: Load) -> Plan {
        let takes = |algorithm: Algorithm| {
            let fits = algorithm != Algorithm::Lines || load.largest <= self.most_line_bytes();
            fits && collective.algorithms().contains(&algorithm)
        };
        let setting = self.settings.algorithm.filter(|algorithm| takes(*algorithm));
        let wanted = options.algorithm.or(setting);
        let tuned = self.tuned(collective, load.bytes);
        self.fitted(plan::exchange(self.group.topology, tuned, collective, load, wanted, takes), options)
    }

    /// What was measured for such calls on such a machine.
    fn tuned(&self, collective: Collective, bytes: u64) -> &[TuningRow] {
        let Topology { link, world, .. } = self.group.topology;
        self.settings.tuning.as_ref().map_or(&[], |tuning| tuning.rows((collective, link, world), bytes))
    }

    /// Domains that divide what one communicator has.
    pub(super) fn shares(&self) -> u64 {
        if self.settings.domains { NUM_BARRIER_DOMAINS as u64 } else { 1 }
    }

    pub(super) fn line_slot_bytes(&self) -> u64 {
        line_slot_bytes(self.shares() as usize) as u64
    }

    pub(super) fn most_line_bytes(&self) -> u64 {
        most_line_bytes(self.shares() as usize) as u64
    }

    /// What the table proposes is cut down to the budget; what the user asks for is taken or refused.
    pub(super) fn fitted(&self, table: Plan, options: &CallOptions) -> Plan {
        let (settings, budget) = (&self.settings, &self.group.budget);
        let blocks = options.blocks.or(settings.blocks);
        let threads = options.threads.or(settings.threads);
        let threads = threads.unwrap_or_else(|| budget.fitting_threads(table.threads, blocks.unwrap_or(1)));
        let blocks = blocks.unwrap_or(table.blocks.min(budget.blocks(threads).max(1)));
        Plan { blocks, threads: self.group.whole_wave(threads), ..table }
    }

    /// Notes a symmetric buffer, for [`find_symmetric`](Self::find_symmetric).
    pub(super) fn add_symmetric(&self, buffer: &Arc<Symmetric<B>>, capacity: usize) {
        let start = B::address(buffer.memory(self.rank));
        let mut regions = lock(&self.symmetric);
        regions.retain(|region| region.buffer.strong_count() > 0);
        regions.push(Region { start, bytes: capacity as u64, buffer: Arc::downgrade(buffer) });
    }

    /// The symmetric buffer of this rank that holds `bytes` at `address`.
    pub(super) fn find_symmetric(&self, address: u64, bytes: u64) -> Option<Arc<Symmetric<B>>> {
        if !self.group.reaches_peers() {
            return None;
        }
        let holds = |r: &&Region<B>| {
            address >= r.start && address - r.start <= r.bytes && bytes <= r.bytes - (address - r.start)
        };
        // What is gone may have lain where there is something else now.
        lock(&self.symmetric).iter().filter(holds).find_map(|region| region.buffer.upgrade())
    }
}

impl<B: Backend> Drop for Member<B> {
    fn drop(&mut self) {
        if let Some(tracer) = &self.tracer {
            // Bounded, as all waits of kernels are. What cannot be had is left out.
            let ended = self.lanes.iter().try_for_each(|lane| lock(&lane.last).as_ref().map_or(Ok(()), B::synchronize));
            if let Err(why) = ended.and_then(|()| tracer.fetch(self, true)) {
                tracing::warn!(%why, rank = self.rank, "the end of the trace is lost");
            }
        }
        self.group.leave(self.rank);
    }
}
