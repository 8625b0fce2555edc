//! What the host learns of a fault, and how it asks for one: the [`HostControl`] block.

use std::mem::offset_of;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytemuck::Zeroable;

use super::check::Description;
use crate::backend::{Backend, MemoryKind};
use crate::error::{Error, Result, Timeout};
use crate::kernel::{Operation, Phase};
use crate::layout::{AbortWord, FaultRecord, FaultStatus, HOST_CONTROL_BYTES, HostControl, MAX_GPUS, ranks_of};

/// A rank's HostControl, in host-mapped memory.
#[derive(Debug)]
pub(crate) struct HostBlock<B: Backend> {
    memory: B::Buffer,
}

impl<B: Backend> Clone for HostBlock<B> {
    fn clone(&self) -> Self {
        HostBlock { memory: self.memory.clone() }
    }
}

impl<B: Backend> HostBlock<B> {
    pub(crate) fn new(device: &B::Device) -> Result<Self> {
        let block = HostBlock { memory: B::allocate(device, HOST_CONTROL_BYTES, MemoryKind::HostMapped)? };
        let base = block.base()?;
        // SAFETY: `base` points at HOST_CONTROL_BYTES that `memory` keeps alive; no kernel knows the address yet, so
        // this thread is alone with them.
        unsafe { base.write_bytes(0, HOST_CONTROL_BYTES) };
        Ok(block)
    }

    pub(crate) fn memory(&self) -> &B::Buffer {
        &self.memory
    }

    fn base(&self) -> Result<NonNull<u8>> {
        B::host_pointer(&self.memory).ok_or_else(|| Error::Driver {
            code: 0,
            name: "host-mapped memory without a host address".to_owned(),
            call: "Backend::host_pointer",
        })
    }

    fn word32(&self, offset: usize) -> Result<&AtomicU32> {
        debug_assert!(offset.is_multiple_of(4) && offset + 4 <= HOST_CONTROL_BYTES);
        // SAFETY: the word lies within the allocation, which `self` keeps alive and which is aligned to 256; kernels
        // and hosts access it by atomics alone.
        Ok(unsafe { AtomicU32::from_ptr(self.base()?.as_ptr().add(offset).cast()) })
    }

    /// Asks this rank's kernels to leave.
    fn request_abort(&self) -> Result<()> {
        // SAFETY: as in `word32`; the offset is a multiple of 8.
        let word =
            unsafe { AtomicU64::from_ptr(self.base()?.as_ptr().add(offset_of!(HostControl, abort_request)).cast()) };
        // Relaxed: the kernels that poll it read nothing behind it.
        word.store(1, Ordering::Relaxed);
        Ok(())
    }

    /// Forgets a fault and a request to abort. No kernel of the rank is running.
    pub(crate) fn reset(&self) -> Result<()> {
        // Relaxed: launches order it before the kernels that come, and nobody else looks meanwhile.
        for offset in (0..HOST_CONTROL_BYTES).step_by(4) {
            self.word32(offset)?.store(0, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The fault that `rank`'s kernels have reported, if any.
    pub(crate) fn fault(&self, rank: usize, deadline: Duration) -> Result<Option<Error>> {
        // Acquire: pairs with the kernel's release of the status, behind which the record is complete.
        let status = || -> Result<u32> { Ok(self.word32(offset_of!(HostControl, status))?.load(Ordering::Acquire)) };
        // Relaxed: whoever asks about a kernel asks behind its end.
        let leaving = self.word32(offset_of!(HostControl, leaving))?.load(Ordering::Relaxed) != 0;
        let mut found = status()?;
        let began = Instant::now();
        while leaving && found == FaultStatus::Running as u32 {
            // A kernel has left its call undone, and one of another domain, which is still running, is writing why.
            if began.elapsed() > deadline {
                return Ok(Some(Error::Aborted { rank, by: rank }));
            }
            std::thread::yield_now();
            found = status()?;
        }
        if found == FaultStatus::Running as u32 {
            return Ok(None);
        }
        let mut record = FaultRecord::zeroed();
        let words: &mut [u32] = bytemuck::cast_slice_mut(std::slice::from_mut(&mut record));
        for (i, word) in words.iter_mut().enumerate() {
            *word = self.word32(offset_of!(HostControl, record) + 4 * i)?.load(Ordering::Relaxed);
        }
        let abort = AbortWord(record.abort);
        let looked = found == FaultStatus::Mismatch as u32;
        if looked || record.abort & AbortWord::MISMATCH != 0 {
            let differ = ranks_of(abort.missing());
            let first = differ.first().copied().unwrap_or(rank);
            // Who was told by the rank that found it, before it had looked, is one of the two that differ, or neither.
            let (rank, other) = match abort.reporter() {
                _ if looked => (rank, first),
                reporter if differ.contains(&rank) => (rank, reporter),
                reporter => (reporter, first),
            };
            let both = [record.expected, record.seen];
            let [ours, theirs] = if !looked || both == [[0; MAX_GPUS]; 2] {
                // By the seal of a piece, which tells no more.
                let operation = Operation::name_of(record.operation);
                [format!("{operation} of some sizes"), "something else, or with other sizes".to_owned()]
            } else {
                both.map(|words| Description::from_words(words).to_string())
            };
            return Ok(Some(Error::RankMismatch { rank, ours, other, theirs }));
        }
        if record.missing == 0 {
            return Ok(Some(Error::Aborted { rank, by: abort.reporter() }));
        }
        Ok(Some(Error::Timeout(Arc::new(Timeout {
            rank,
            reporter: abort.reporter(),
            missing: ranks_of(record.missing),
            operation: Operation::name_of(record.operation),
            phase: Phase::name_of(record.phase),
            sequence: abort.sequence(),
            domain: abort.domain(),
            block: record.block,
            values: record.expected.into_iter().zip(record.seen).collect(),
            deadline,
        }))))
    }
}

/// Ends a rank's waits from any thread, while its communicator is in use elsewhere.
#[derive(Debug)]
pub struct AbortHandle<B: Backend> {
    pub(crate) host: HostBlock<B>,
}

impl<B: Backend> Clone for AbortHandle<B> {
    fn clone(&self) -> Self {
        AbortHandle { host: self.host.clone() }
    }
}

impl<B: Backend> AbortHandle<B> {
    /// Asks the rank's kernels, running or still to come, to leave where they would wait. They tell the peers, so every rank
    /// that waits ends with [`Error::Aborted`]. The communicator accepts no more calls once a kernel has followed. One whose
    /// peers are there already does not look, and succeeds.
    ///
    /// # Errors
    /// The backend gives no host address.
    pub fn abort(&self) -> Result<()> {
        self.host.request_abort()
    }
}
