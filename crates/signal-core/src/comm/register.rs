//! Memory that a user has allocated by himself, as symmetric memory (P14). Unlike that, each rank brings its own or none, and where peers cannot
//! be let at it nothing is lost but time: calls stage it as before.

use std::sync::Arc;

use crate::backend::{Backend, Found, Readers};
use crate::error::Result;

use super::group::Ranks;
use super::span::check_pointer;
use super::{Communicator, Member, Symmetric};

/// Memory of this rank that its peers were asked to read in place: see [`Communicator::register`]. Dropping it ends that.
#[derive(Debug)]
#[must_use = "dropping it ends the registration"]
pub struct Registration<B: Backend> {
    registered: std::result::Result<Arc<Symmetric<B>>, String>,
}

impl<B: Backend> Registration<B> {
    /// Why peers do not read the memory in place, if they do not: it is staged then.
    pub fn refusal(&self) -> Option<&str> {
        self.registered.as_ref().err().map(String::as_str)
    }
}

impl<B: Backend> Communicator<B> {
    /// Lets peers read `bytes` at `address`, of memory that the caller has allocated on this rank's device, in place, where that is possible:
    /// calls whose operands lie in it then stage nothing. [`Registration::refusal`] says why it is not. Results are the same in both cases.
    ///
    /// | memory | ranks of one process | ranks that are processes |
    /// | --- | --- | --- |
    /// | CUDA, `cuMemAlloc` | read in place | staged: by `cudaIpc` alone could it be handed on, and it must not be freed then before all peers have closed it, which a drop cannot wait for |
    /// | CUDA, a pool (`cuMemAllocAsync`, a `CudaSlice`) | where the pool gives all ranks' devices access (`cuMemPoolSetAccess`) | staged |
    /// | CUDA, mapped (`cuMemMap`) | where the mapping gives all ranks' devices access (`cuMemSetAccess`) | where it was created for file descriptors, and the range is of one allocation |
    /// | HIP | staged: caches hold it until a kernel ends | staged |
    /// | CPU threads | read in place | staged |
    ///
    /// Collective: every rank calls it, with a range of its own or with no bytes, among the `alloc` calls in the same order. In one process it
    /// never waits.
    ///
    /// # Safety
    /// The memory stays allocated until the registration is dropped and all calls of this rank that were made with it have ended *without error*,
    /// graphs that hold such calls among them; after an error until `recover` has returned, or all ranks' communicators are gone.
    ///
    /// # Errors
    /// [`ApiMisuse::NullPointer`](crate::ApiMisuse::NullPointer); [`ApiMisuse::TooLarge`](crate::ApiMisuse::TooLarge); [`Error::Rendezvous`](crate::Error::Rendezvous) with the
    /// ranks that did not come, or could not; errors of the driver.
    pub unsafe fn register(&mut self, address: u64, bytes: usize) -> Result<Registration<B>> {
        let found = match bytes {
            0 => Ok(Err("it has no bytes".to_owned())),
            _ => self.member.look_up(address, bytes),
        };
        let registered = match &self.member.group.ranks {
            Ranks::Here(_) => found?.map(|_| {
                // SAFETY: the caller's promise; the driver knows the range.
                unsafe { Symmetric::borrowed(&self.member, address, bytes, None) }
            }),
            Ranks::Apart(processes) => {
                let (streams, patience) = (self.member.group.streams(), self.member.settings.timeout);
                let mut link = processes.lock();
                // SAFETY: the caller's promise.
                let registered = unsafe {
                    link.register(&self.member, self.allocations, (address, bytes), found, (&streams, patience))
                }?;
                self.allocations += 1;
                registered
            }
        };
        if let Ok(buffer) = &registered {
            self.member.add_symmetric(buffer, bytes);
        }
        Ok(Registration { registered })
    }

    /// Whether peers read `bytes` at `address` in place: in memory of [`alloc`](Self::alloc), or [registered](Self::register), that they reach. Else
    /// calls stage it.
    pub fn is_read_in_place(&self, address: u64, bytes: usize) -> bool {
        self.member.find_symmetric(address, bytes as u64).is_some()
    }
}

impl<B: Backend> Member<B> {
    /// The allocation that a range lies in, if this rank's peers can be let at it.
    fn look_up(&self, address: u64, bytes: usize) -> Result<Found> {
        check_pointer("registered memory", address, bytes as u64, None)?;
        if !self.group.reaches_peers() {
            return Ok(Err("ranks share memory of the host, since their devices do not reach each other".to_owned()));
        }
        match &self.group.ranks {
            Ranks::Here(here) => B::look_up(self.device(), address, bytes, Readers::Devices(&here.devices)),
            Ranks::Apart(_) => B::look_up(self.device(), address, bytes, Readers::Processes),
        }
    }
}
