//! Communicators: one a rank.

mod all_reduce;
mod builder;
mod call;
mod calls;
mod check;
mod collectives;
mod counted;
mod domain;
mod exchange;
mod fault;
mod group;
mod member;
mod norm;
mod pace;
mod process;
mod recover;
mod register;
mod span;
mod split;
mod symmetric;
mod trace;
mod transfers;
mod user;

use std::mem::offset_of;
use std::ops::Range;
use std::sync::Arc;

use bytemuck::Pod;

pub use self::builder::Builder;
pub use self::call::{BarrierProbe, Call, CallOptions};
pub use self::domain::Domain;
pub use self::fault::AbortHandle;
use self::group::Group;
use self::member::{Member, Own};
pub use self::norm::{LayerNorm, NormOutput, RmsNorm};
pub use self::register::Registration;
pub(crate) use self::symmetric::Symmetric;
pub use self::transfers::Transfers;
pub use self::user::{UserKernel, UserLaunch};

use crate::backend::{Backend, Link};
use crate::buffer::{DeviceBuffer, allocation_bytes};
use crate::error::{ApiMisuse, Result};
use crate::layout::{
    CONTROL_BYTES, CONTROL_OFFSET, Control, LamportState, LineState, NUM_BARRIER_DOMAINS, SCRATCH_OFFSET, SIGNAL_BYTES,
    SIGNAL_START, Signal,
};
use crate::rendezvous::{Id, Rendezvous, UnixRendezvous};
use crate::settings::Settings;
use crate::signal::SignalPtr;

/// What fills the gaps in a rank's memory where something looks for writes outside: no data, count or sentinel is like it.
const CANARY: u32 = 0xc0de_5a5a;
/// Bytes looked at on each side of a large gap.
const GAP_END: usize = 4096;
/// Between the parts of a rank's memory: in front of the Signal, behind it, behind its control block, in front of the scratch.
const GAPS: [Range<usize>; 4] = {
    let control = SIGNAL_START + CONTROL_OFFSET;
    let behind = control + CONTROL_BYTES;
    assert!(behind + 2 * GAP_END <= SCRATCH_OFFSET);
    [
        0..SIGNAL_START,
        SIGNAL_START + SIGNAL_BYTES..control,
        behind..behind + GAP_END,
        SCRATCH_OFFSET - GAP_END..SCRATCH_OFFSET,
    ]
};

/// One rank of a group that computes collectives together: with the others in one process
/// ([`all_local`](Self::all_local)), or in a process of its own ([`connect`](Self::connect)).
///
/// Every rank makes the same calls in the same order, each on a stream of its own device. A call checks its arguments,
/// enqueues one kernel and returns; when the kernel has finished on the stream *without error*, the output is complete
/// and the input may be overwritten. Calls of one domain are in order, also across streams; those of others
/// ([`domain`](Self::domain)), and of other communicators ([`split`](Self::split)), run beside them.
///
/// A wait that its peers do not end in [`Settings::timeout`] ends the kernel on every rank: the next call, or
/// [`status`](Self::status), returns [`Error::Timeout`](crate::Error::Timeout) with the missing ranks, and from then on calls return
/// [`Error::Poisoned`](crate::Error::Poisoned). Results of the failed call are unspecified, and whether peers finished it is unknown.
#[derive(Debug)]
pub struct Communicator<B: Backend> {
    member: Arc<Member<B>>,
    /// Calls of `alloc` made.
    allocations: u64,
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

    /// This rank's Signal.
    pub fn signal(&self) -> SignalPtr {
        // SAFETY: the address is of memory that the builder has initialised and that the group keeps alive.
        unsafe { Signal::unsafe_ptr_from(self.member.base()) }
    }

    /// What connects the ranks: the slowest way between two. [`Link::Pinned`] where what they share lies in the host's memory
    /// ([`Settings::peer_to_peer`]).
    pub fn link(&self) -> Link {
        self.member.group.topology.link
    }

    /// Allocates `len` elements of symmetric memory, which peers read in place where they reach it, with unspecified content.
    ///
    /// Collective: every rank makes the same `alloc` calls in the same order. In one process it never waits: whichever
    /// rank comes first allocates for all. Ranks that are processes meet in it, and wait for each other as long as for a
    /// call's peers ([`Settings::timeout`]).
    ///
    /// # Errors
    /// [`ApiMisuse::UnequalAlloc`], [`ApiMisuse::TooLarge`]; [`Error::Rendezvous`](crate::Error::Rendezvous) with the ranks that did
    /// not come, or could not; errors of the driver.
    pub fn alloc<T: Pod>(&mut self, len: usize) -> Result<DeviceBuffer<B, T>> {
        let capacity = allocation_bytes::<T>(len)?;
        let bytes = len * size_of::<T>();
        let buffer = symmetric::allocate(&self.member, self.allocations, bytes, capacity)?;
        self.allocations += 1;
        self.member.add_symmetric(&buffer, capacity);
        Ok(DeviceBuffer::of_symmetric(buffer, self.member.rank, len))
    }

    /// A call with options of its own. Every rank must pass the same ones.
    pub fn with(&mut self, options: CallOptions) -> Call<'_, B> {
        Call::new(&self.member, options, false)
    }

    /// The handle of a barrier domain, 0 to 7: with counters and a share of the scratch of its own, so that its calls run beside those
    /// of other domains, also from another thread. Those of domain 0 are the communicator's own, unless they
    /// [say](CallOptions::domain) otherwise; while a domain's handle is alive they cannot go there.
    ///
    /// Every rank calls on the handle what the others call on theirs of the same domain, in the same order. A domain's calls stay in
    /// order when its handle is dropped and taken again.
    ///
    /// # Errors
    /// [`ApiMisuse::Domain`]; [`ApiMisuse::DomainsClosed`] above 0 without [`Settings::domains`]; [`ApiMisuse::DomainTaken`] while there
    /// is one.
    pub fn domain(&mut self, domain: u32) -> Result<Domain<B>> {
        Domain::take(&self.member, domain)
    }

    /// Presets every barrier counter, to test that their wrap is harmless. Call it on every rank with the same value,
    /// before any collective.
    ///
    /// # Errors
    /// Errors of the driver.
    #[doc(hidden)]
    pub fn preset_counters(&mut self, value: u32) -> Result<()> {
        let (memory, service) = (self.member.memory(), &self.member.own.service);
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
        let service = &self.member.own.service;
        let flag = SIGNAL_START + offset_of!(Signal, lamport_state) + offset_of!(LamportState, flag);
        B::fill(service, self.member.memory(), flag, 4, value)?;
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
        let (service, memory) = (&self.member.own.service, self.member.memory());
        let state = SIGNAL_START + CONTROL_OFFSET + offset_of!(Control, line_state);
        for domain in 0..NUM_BARRIER_DOMAINS {
            let count = state + domain * size_of::<LineState>() + offset_of!(LineState, count);
            B::fill(service, memory, count, 4, value)?;
        }
        B::synchronize(service)
    }

    /// Fills what lies between the parts of this rank's memory, around the Signal, its control block and the scratch, with canaries, to
    /// find out what writes outside of them: see [`overwritten`](Self::overwritten).
    ///
    /// # Errors
    /// Errors of the driver.
    #[doc(hidden)]
    pub fn plant_canaries(&mut self) -> Result<()> {
        let (service, memory) = (&self.member.own.service, self.member.memory());
        for gap in GAPS {
            B::fill(service, memory, gap.start, gap.len(), CANARY)?;
        }
        B::synchronize(service)
    }

    /// The first byte of this rank's memory, if any, at which something has written over the canaries.
    ///
    /// # Errors
    /// Errors of the driver.
    #[doc(hidden)]
    pub fn overwritten(&self) -> Result<Option<usize>> {
        for gap in GAPS {
            let mut found = vec![0; gap.len()];
            B::download(&self.member.own.service, self.member.memory(), gap.start, &mut found)?;
            // Recovery makes the gap between Signal and control block zero, with both of them.
            let planted = if found.iter().all(|byte| *byte == 0) { 0 } else { CANARY };
            let wrong =
                found.iter().zip(planted.to_ne_bytes().iter().cycle()).position(|(byte, planted)| byte != planted);
            if let Some(at) = wrong {
                return Ok(Some(gap.start + at));
            }
        }
        Ok(None)
    }

    fn new(group: Arc<Group<B>>, rank: usize, own: Own<B>, settings: Settings) -> Result<Self> {
        Ok(Communicator { member: Arc::new(Member::new(group, rank, own, settings)?), allocations: 0 })
    }
}
