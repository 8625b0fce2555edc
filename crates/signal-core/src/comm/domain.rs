//! Handles of barrier domains: calls that run beside those of other domains (P11).

use std::sync::Arc;

use super::{AbortHandle, Call, CallOptions, Communicator, Member};
use crate::backend::Backend;
use crate::collective::Collective;
use crate::dtype::{Dtype, ReduceOp};
use crate::error::Result;
use crate::plan::Plan;
use crate::settings::Settings;

/// A barrier domain of one rank. Made by [`Communicator::domain`], of which it has the collectives: they run on this domain, beside
/// those of the communicator and of other handles, and may be called from another thread.
///
/// Domains share a rank's fate: a fault in one poisons all. To recover or to split, the communicator needs all handles back: they are
/// dropped, and taken again. A handle may outlive its communicator.
#[derive(Debug)]
pub struct Domain<B: Backend> {
    pub(super) member: Arc<Member<B>>,
    domain: u32,
}

impl<B: Backend> Domain<B> {
    pub(super) fn take(member: &Arc<Member<B>>, domain: u32) -> Result<Self> {
        member.take_lane(domain)?;
        Ok(Domain { member: member.clone(), domain })
    }

    /// The domain's number.
    pub fn domain(&self) -> u32 {
        self.domain
    }

    /// A call with options of its own, but for [`CallOptions::domain`]: it is on this domain whatever that says. Every rank must pass
    /// the same ones.
    pub fn with(&mut self, options: CallOptions) -> Call<'_, B> {
        Call::new(&self.member, CallOptions { domain: self.domain, ..options }, true)
    }
}

impl<B: Backend> Drop for Domain<B> {
    fn drop(&mut self) {
        self.member.return_lane(self.domain);
    }
}

/// Methods of communicators that are those of their domains' handles too.
macro_rules! callers {
    ($(#[$doc:meta])* impl<B: Backend> Communicator<B> { $($methods:tt)* }) => {
        $(#[$doc])*
        impl<B: Backend> $crate::comm::Communicator<B> { $($methods)* }
        $(#[$doc])*
        impl<B: Backend> $crate::comm::Domain<B> { $($methods)* }
    };
}
pub(super) use callers;

callers! {
impl<B: Backend> Communicator<B> {
    /// This rank.
    pub fn rank(&self) -> usize {
        self.member.rank
    }

    /// Ranks in the group.
    pub fn world_size(&self) -> usize {
        self.member.world_size()
    }

    /// This rank's device.
    pub fn device(&self) -> &B::Device {
        self.member.device()
    }

    /// The settings that all ranks agreed on.
    pub fn settings(&self) -> &Settings {
        &self.member.settings
    }

    /// The plan of an all-reduce of `count` elements that is called without options: the same on every rank.
    pub fn plan(&self, count: usize, dtype: Dtype, op: ReduceOp) -> Plan {
        self.member.plan_with(&self.plain(), count, dtype, op)
    }

    /// The plan of any other collective that moves `bytes` in equal parts and is called without options: the same on every rank. What counts are
    /// the bytes of a rank's input or of its output, whichever is more; of a send-recv those of the larger of the two messages.
    pub fn plan_of(&self, collective: Collective, bytes: u64) -> Plan {
        self.member.plan_of(&self.plain(), collective, bytes)
    }

    /// The fault that this rank's kernels have reported, if any, on whatever domain; read from host memory, without a driver call.
    ///
    /// # Errors
    /// [`Error::Timeout`](crate::Error::Timeout), [`Error::Aborted`](crate::Error::Aborted),
    /// [`Error::RankMismatch`](crate::Error::RankMismatch).
    pub fn status(&self) -> Result<()> {
        self.member.status()
    }

    /// Waits for everything enqueued on `stream`, then returns the [`status`](Self::status). Bounded: every wait inside
    /// a kernel ends at its deadline.
    ///
    /// # Errors
    /// As [`status`](Self::status); errors of the driver.
    pub fn wait(&self, stream: &B::Stream) -> Result<()> {
        B::synchronize(stream)?;
        if let Some(tracer) = &self.member.tracer {
            tracer.fetch(&self.member, false)?;
        }
        self.status()
    }

    /// A handle that ends this rank's waits from another thread.
    pub fn abort_handle(&self) -> AbortHandle<B> {
        AbortHandle { host: self.member.own.host.clone() }
    }
}
}

impl<B: Backend> Communicator<B> {
    fn plain(&self) -> CallOptions {
        CallOptions::default()
    }
}

impl<B: Backend> Domain<B> {
    fn plain(&self) -> CallOptions {
        CallOptions { domain: self.domain, ..CallOptions::default() }
    }
}
