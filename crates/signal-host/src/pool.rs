//! Lanes: the threads of one stream that run grids.
//!
//! All threads of a grid must be there at once, because they wait for each other and for the threads of other ranks'
//! grids. So every one is an OS thread: lane 0 is the stream's worker, the others are hired when a launch first needs
//! them, and stay until the stream goes away. Hiring happens in the thread that enqueues, so that a machine out of
//! threads is that caller's error and no grid ever starts in part.
//!
//! Lane i runs thread i mod n of block i / n, for blocks of n threads. Every lane also owns memory for one block; block
//! b uses that of lane b, as there are never fewer lanes than blocks.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle, Thread};

use signal_core::error::{Error, Result};
use signal_core::layout::MAX_NUM_BLOCKS_UPPER_BOUND;

use crate::device::HostInner;
use crate::module::{HostBlock, HostKernel, HostThread};
use crate::sync::{Idle, Patience, Shared, SpinLock};

/// Bytes of a lane's stack. Kernels keep their data in buffers and in the block's memory; a thousand lanes a rank must
/// fit the address space of a container.
const STACK_BYTES: usize = 256 << 10;
/// Most lanes of one launch: 1,024 blocks of 8 threads, within the default of
/// [`HostConfig::max_threads`](crate::HostConfig::max_threads). A larger grid could not be promised to be resident.
const MAX_LANES: u32 = 8192;

/// Blocks of `threads` threads that one launch may have.
pub(crate) fn resident_blocks(threads: u32) -> u32 {
    (MAX_LANES / threads.max(1)).clamp(1, MAX_NUM_BLOCKS_UPPER_BOUND as u32)
}

/// Starts a thread, or says what the system said.
pub(crate) fn spawn(name: &'static str, main: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_string()).stack_size(STACK_BYTES).spawn(main).map_err(|error| Error::Driver {
        code: error.raw_os_error().unwrap_or(0),
        name: error.to_string(),
        call: "pthread_create",
    })
}

/// The lanes of one stream, beside its worker.
pub(crate) struct Pool {
    host: Shared<HostInner>,
    hired: SpinLock<Vec<Hired>>,
    /// Held while hiring, which takes too long for `hired`: the worker takes that one.
    hiring: SpinLock<()>,
    /// Lanes that have not finished the current grid.
    running: Shared<AtomicUsize>,
}

struct Hired {
    lane: Shared<Lane>,
    thread: JoinHandle<()>,
}

impl Pool {
    pub(crate) fn new(host: &Shared<HostInner>) -> Self {
        let running = Shared::new(AtomicUsize::new(0));
        Pool { host: host.clone(), hired: SpinLock::new(Vec::new()), hiring: SpinLock::new(()), running }
    }

    /// Makes sure of lanes for `threads` threads, the worker counted in.
    pub(crate) fn hire(&self, threads: usize) -> Result<()> {
        let _hiring = self.hiring.lock();
        let have = self.hired.lock().len() + 1;
        let missing = threads.saturating_sub(have);
        self.host.reserve_threads(missing)?;
        for done in 0..missing {
            let lane = Shared::new(Lane::new());
            let (own, running) = (lane.clone(), self.running.clone());
            let thread = spawn("signal-lane", move || own.serve(&running)).inspect_err(|_| {
                // Those hired so far stay, for smaller grids.
                self.host.release_threads(missing - done);
            })?;
            self.hired.lock().push(Hired { lane, thread });
        }
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.hired.lock().len()
    }
}

/// The worker's side of the pool.
pub(crate) struct Crew<'a> {
    pool: &'a Pool,
    /// What the worker has seen of `pool.hired`.
    lanes: Vec<(Shared<Lane>, Thread)>,
    /// Memory of block 0.
    block: Box<HostBlock>,
}

impl<'a> Crew<'a> {
    pub(crate) fn new(pool: &'a Pool) -> Self {
        Crew { pool, lanes: Vec::new(), block: Box::new(HostBlock::new()) }
    }

    /// Runs a grid and returns when all its threads have finished. Their writes are visible then.
    ///
    /// # Safety
    /// - `run` may be called with `params`, which stay valid and unchanged meanwhile.
    /// - [`Pool::hire`] has succeeded for `grid * block` threads, both at least 1, before the launch was enqueued.
    pub(crate) unsafe fn run(&mut self, run: HostKernel, params: *const c_void, grid: u32, block: u32) {
        let others = (grid * block - 1) as usize;
        if self.lanes.len() < others {
            let hired = self.pool.hired.lock();
            self.lanes.extend(hired[self.lanes.len()..].iter().map(|h| (h.lane.clone(), h.thread.thread().clone())));
        }
        let state = |index: u32| match index {
            0 => &*self.block,
            _ => &self.lanes[index as usize - 1].0.block,
        };
        for index in 0..grid {
            // SAFETY: the last grid on this stream has finished, and only the stream's grids use its lanes' memory.
            unsafe { state(index).clear() };
        }
        let task = |lane: u32| {
            let (thread, index) = (lane % block, lane / block);
            let state = state(index).state();
            Task { run, params, thread: HostThread { thread, block: index, block_dim: block, grid_dim: grid, state } }
        };
        // Relaxed: the lanes learn of it by the release in `post`.
        self.pool.running.store(others, Ordering::Relaxed);
        for (lane, (mailbox, thread)) in (1..).zip(&self.lanes[..others]) {
            // SAFETY: the lane has no task: the last grid has finished, and nobody else posts to this stream's lanes.
            unsafe { mailbox.post(task(lane)) };
            thread.unpark();
        }
        // SAFETY: passed on from the caller.
        unsafe { task(0).run() };
        let mut patience = Patience::new();
        // Acquire: pairs with every lane's release in `serve`, so that the grid's writes come before whatever is next
        // on the stream. Relaxed would order nothing.
        while self.pool.running.load(Ordering::Acquire) != 0 {
            patience.pause();
        }
    }

    /// Sends the lanes home and waits until they are gone.
    pub(crate) fn dismiss(self) {
        let hired = std::mem::take(&mut *self.pool.hired.lock());
        for h in &hired {
            // Release: pairs with the acquire in `serve`; what this thread did with the lane comes before its end.
            h.lane.order.store(LEAVE, Ordering::Release);
            h.thread.thread().unpark();
        }
        let gone = hired.len();
        for h in hired {
            // A lane does not unwind: kernels are `extern "C"`, and nothing else in it panics.
            let _ = h.thread.join();
        }
        self.pool.host.release_threads(gone);
    }
}

/// What a lane does in one grid.
#[derive(Clone, Copy)]
struct Task {
    run: HostKernel,
    params: *const c_void,
    thread: HostThread,
}

impl Task {
    /// # Safety
    /// `run` may be called with `params`.
    unsafe fn run(&self) {
        // SAFETY: by the caller. The thread description is ours and its state is 4,096 bytes of a lane's memory.
        unsafe { (self.run)(self.params, &self.thread) };
    }
}

/// One lane's mailbox and block memory.
struct Lane {
    /// `NONE`, `RUN` or `LEAVE`.
    order: AtomicU32,
    /// Written by the worker while `order` is `NONE`, read by the lane once it is `RUN`.
    task: UnsafeCell<Option<Task>>,
    block: HostBlock,
}

const NONE: u32 = 0;
const RUN: u32 = 1;
const LEAVE: u32 = 2;

// SAFETY: `order` says which of the two threads may touch `task`. The pointers in a task are only handed to the kernel,
// whose launcher answers for them.
unsafe impl Sync for Lane {}
// SAFETY: as above.
unsafe impl Send for Lane {}

impl Lane {
    fn new() -> Self {
        Lane { order: AtomicU32::new(NONE), task: UnsafeCell::new(None), block: HostBlock::new() }
    }

    /// # Safety
    /// Called by the worker only, while the lane has no task.
    unsafe fn post(&self, task: Task) {
        // SAFETY: the lane reads the cell only between `RUN` and its report, so the worker has it for itself.
        unsafe { *self.task.get() = Some(task) };
        // Release: pairs with the acquire in `serve`, and carries the task, the cleared block memory, the count of
        // running lanes, and all that came before on the stream.
        self.order.store(RUN, Ordering::Release);
    }

    /// The lane's thread.
    fn serve(&self, running: &AtomicUsize) {
        let mut idle = Idle::new();
        loop {
            // Acquire: pairs with the release in `post` and in `dismiss`. Relaxed would not show the task.
            match self.order.load(Ordering::Acquire) {
                RUN => {
                    // SAFETY: the worker wrote the cell before `RUN` and does not touch it before the report below.
                    if let Some(task) = unsafe { *self.task.get() } {
                        // SAFETY: `Crew::run` posts what its caller vouched for.
                        unsafe { task.run() };
                    }
                    // Relaxed: the worker stores `RUN` or `LEAVE` only after the report, which comes behind this.
                    self.order.store(NONE, Ordering::Relaxed);
                    // Release: pairs with the acquire in `Crew::run`, and carries what this thread of the grid wrote.
                    // The other lanes' decrements continue its release sequence.
                    running.fetch_sub(1, Ordering::Release);
                    idle.reset();
                }
                LEAVE => return,
                _ => idle.pause(),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::host;
    use signal_core::backend::Backend;

    #[test]
    fn the_pool_bounds_what_it_promises() {
        let budgets = [1, 8, 9, 64, 1024].map(resident_blocks);
        assert_eq!(budgets, [1024, 1024, 910, 128, 8]);
    }

    #[test]
    fn lanes_are_hired_once_and_dismissed() {
        let host = host();
        let pool = Pool::new(host.devices().unwrap()[0].host());
        for (threads, lanes) in [(1, 0), (5, 4), (3, 4), (6, 5)] {
            pool.hire(threads).unwrap();
            assert_eq!((pool.len(), host.threads()), (lanes, lanes));
        }
        Crew::new(&pool).dismiss();
        assert_eq!((pool.len(), host.threads()), (0, 0));
    }
}
