//! Streams: a queue, and a worker thread that takes from it.
//!
//! The worker is detached: whoever drops a stream's last handle does not wait for what is queued. Nothing that a
//! command holds leads back to a stream's handle, so a worker never drops its own. It leaves when the stream is
//! closed, the queue is empty, and the dropper has let go of the [`Core`]: by then nobody else holds anything of this
//! thread, which is what makes the free of its handle ordered in the eyes of ThreadSanitizer.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::Thread;

use signal_core::backend::{Launch, StreamId};
use signal_core::error::{ApiMisuse, Error, Result};

use crate::Host;
use crate::command::{Command, Grid, Target};
use crate::device::{Device, MAX_BLOCK_THREADS};
use crate::event::Event;
use crate::graph::Graph;
use crate::memory::Part;
use crate::module::Module;
use crate::pool::{self, Crew, Pool};
use crate::sync::{Idle, Patience, Shared, SpinLock};

/// A queue of work on one device, run by a thread of its own.
#[derive(Clone)]
pub struct Stream(Shared<Handle>);

/// What the clones of a stream share. The fields are dropped in this order: the worker waits for the last.
struct Handle {
    device: Device,
    id: StreamId,
    worker: Thread,
    core: Shared<Core>,
}

impl Stream {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let core = Shared::new(Core {
            queue: SpinLock::new(Queue { commands: VecDeque::new(), submitted: 0, capture: None }),
            completed: AtomicU64::new(0),
            closed: AtomicBool::new(false),
            pool: Pool::new(device.host()),
        });
        let host = device.host().clone();
        host.reserve_threads(1)?;
        let (own, counted) = (core.clone(), host.clone());
        let spawned = pool::spawn("signal-stream", move || {
            work(own);
            counted.release_threads(1);
        });
        let worker = spawned.inspect_err(|_| host.release_threads(1))?.thread().clone();
        Ok(Stream(Shared::new(Handle { device: device.clone(), id: StreamId(unique()), worker, core })))
    }

    pub(crate) fn id(&self) -> StreamId {
        self.0.id
    }

    pub(crate) fn device(&self) -> &Device {
        &self.0.device
    }

    pub(crate) fn is_capturing(&self) -> bool {
        self.0.core.queue.lock().capture.is_some()
    }

    pub(crate) fn is_idle(&self) -> bool {
        let submitted = self.0.core.queue.lock().submitted;
        self.0.core.has_completed(submitted)
    }

    pub(crate) fn synchronize(&self) -> Result<()> {
        let queue = self.0.core.queue.lock();
        queue.refuse_capture("synchronize")?;
        let submitted = queue.submitted;
        drop(queue);
        self.0.core.wait_for(submitted);
        Ok(())
    }

    /// Enqueues a command, or adds it to the capture.
    pub(crate) fn enqueue(&self, command: Command) {
        self.0.core.queue.lock().push(command);
        self.0.worker.unpark();
    }

    /// Copies a part out behind the work on the stream, and waits.
    pub(crate) fn download(&self, part: Part, target: &mut [u8]) -> Result<()> {
        if part.bytes() > target.len() {
            return Err(ApiMisuse::BufferTooSmall { found: target.len(), needed: part.bytes() }.into());
        }
        let mut queue = self.0.core.queue.lock();
        queue.refuse_capture("download")?;
        // SAFETY: `target` is exclusive to this call and long enough, and the call does not return before the command
        // has run: there is no way out between here and the end of the wait.
        let target = unsafe { Target::new(target.as_mut_ptr()) };
        queue.push(Command::Download(part, target));
        let submitted = queue.submitted;
        drop(queue);
        self.0.worker.unpark();
        self.0.core.wait_for(submitted);
        Ok(())
    }

    pub(crate) fn record(&self) -> Event {
        let mut queue = self.0.core.queue.lock();
        let event = Event::new(self.device(), queue.capture.as_ref().map(|capture| capture.id));
        queue.push(Command::Record(event.mark().clone()));
        drop(queue);
        self.0.worker.unpark();
        event
    }

    pub(crate) fn wait(&self, event: &Event) -> Result<()> {
        let mut queue = self.0.core.queue.lock();
        let current = queue.capture.as_ref().map(|capture| capture.id);
        match (current, event.mark().capture) {
            (None, None) => queue.push(Command::Wait(event.mark().clone())),
            // Recorded earlier in this very capture: the stream's order is the wait.
            (Some(current), Some(recorded)) if current == recorded => return Ok(()),
            // The event is of another time than the replays, or of a graph whose replays reach it again and again.
            (Some(_), _) => return Err(capture_misuse("wait", CAPTURING)),
            (None, Some(_)) => return Err(capture_misuse("wait for an event of a capture", NOT_CAPTURING)),
        }
        drop(queue);
        self.0.worker.unpark();
        Ok(())
    }

    pub(crate) fn begin_capture(&self) -> Result<()> {
        let mut queue = self.0.core.queue.lock();
        queue.refuse_capture("begin_capture")?;
        queue.capture = Some(Capture { id: unique(), commands: Vec::new() });
        Ok(())
    }

    pub(crate) fn end_capture(&self) -> Result<Graph> {
        match self.0.core.queue.lock().capture.take() {
            Some(capture) => Ok(Graph::new(self.device(), capture.commands)),
            None => Err(capture_misuse("end_capture", NOT_CAPTURING)),
        }
    }

    pub(crate) fn replay(&self, graph: &Graph) -> Result<()> {
        self.device().check("graph", graph.device())?;
        self.0.core.pool.hire(graph.recording().threads())?;
        self.enqueue(Command::Replay(graph.recording().clone()));
        Ok(())
    }

    /// # Safety
    /// As for [`Backend::launch`](signal_core::backend::Backend::launch).
    pub(crate) unsafe fn launch(&self, module: &Module, launch: &Launch<'_, Host>) -> Result<()> {
        // Streams of the host start one kernel behind the other: nothing is early.
        let &Launch { kernel, grid: blocks, threads, params, uses, early: _ } = launch;
        self.device().check("module", module.device())?;
        if threads == 0 || threads > MAX_BLOCK_THREADS {
            return Err(ApiMisuse::Threads { threads, limit: MAX_BLOCK_THREADS }.into());
        }
        let budget = pool::resident_blocks(threads);
        if blocks == 0 || blocks > budget {
            return Err(ApiMisuse::Grid { blocks, budget }.into());
        }
        // SAFETY: passed on from the caller. The table has under each name the kernel that the catalogue means.
        let grid = unsafe { Grid::new(module.kernel(kernel)?, blocks, threads, params, uses)? };
        // Here, and not in the worker: running out of threads is this caller's error, and nothing has been enqueued.
        self.0.core.pool.hire((blocks * threads) as usize)?;
        self.enqueue(Command::Launch(Box::new(grid)));
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn lanes(&self) -> usize {
        self.0.core.pool.len()
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream").field("id", &self.0.id).field("device", &self.0.device).finish_non_exhaustive()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // Release: pairs with the acquire in `work`. A worker that sees it also sees everything that was enqueued.
        self.core.closed.store(true, Ordering::Release);
        self.worker.unpark();
    }
}

/// What the handles and the worker share.
struct Core {
    queue: SpinLock<Queue>,
    /// Commands that have run and been dropped, of `Queue::submitted`.
    completed: AtomicU64,
    /// The last handle is gone.
    closed: AtomicBool,
    pool: Pool,
}

struct Queue {
    commands: VecDeque<Command>,
    /// Commands ever enqueued.
    submitted: u64,
    capture: Option<Capture>,
}

struct Capture {
    id: u64,
    commands: Vec<Command>,
}

impl Queue {
    fn push(&mut self, command: Command) {
        match &mut self.capture {
            Some(capture) => capture.commands.push(command),
            None => {
                self.commands.push_back(command);
                self.submitted += 1;
            }
        }
    }

    fn refuse_capture(&self, call: &'static str) -> Result<()> {
        match self.capture {
            Some(_) => Err(capture_misuse(call, CAPTURING)),
            None => Ok(()),
        }
    }
}

const CAPTURING: &str = "capturing";
const NOT_CAPTURING: &str = "not capturing";

fn capture_misuse(call: &'static str, state: &'static str) -> Error {
    ApiMisuse::Capture { call, state }.into()
}

impl Core {
    fn has_completed(&self, submitted: u64) -> bool {
        // Acquire: pairs with the release in `work`. What the commands wrote is visible to whoever learns here that
        // they have completed.
        self.completed.load(Ordering::Acquire) >= submitted
    }

    fn wait_for(&self, submitted: u64) {
        let mut patience = Patience::new();
        while !self.has_completed(submitted) {
            patience.pause();
        }
    }
}

/// The worker's thread.
fn work(core: Shared<Core>) {
    let mut crew = Crew::new(&core.pool);
    let mut idle = Idle::new();
    loop {
        // Looked at before the queue: nothing is enqueued after the stream was closed, so an empty queue then is the
        // end. Acquire: pairs with the release in the drop of the handle.
        let closed = core.closed.load(Ordering::Acquire);
        let next = core.queue.lock().commands.pop_front();
        if let Some(command) = next {
            command.run(&mut crew);
            // First let go of the buffers, so that who waits for the command also knows them free.
            drop(command);
            // Release: pairs with the acquire in `has_completed`, and carries what the command wrote.
            core.completed.fetch_add(1, Ordering::Release);
            idle.reset();
        } else if closed {
            break;
        } else {
            idle.pause();
        }
    }
    crew.dismiss();
    // The dropper is about to let go of its handle, if it has not yet; see the head of this file.
    let mut patience = Patience::new();
    while core.handles() > 1 {
        patience.pause();
    }
}

/// A number that no other stream or capture of this process has. Relaxed: only the number counts.
fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
