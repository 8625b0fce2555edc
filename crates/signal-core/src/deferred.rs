//! For backends of GPUs: what becomes of memory, graphs and streams whose last handle is dropped while work may still use them.
//!
//! Freeing waits for the device on both vendors, and ranks that one thread drives would wait for each other for ever. And a drop may
//! happen inside a call of the driver, when a graph lets go of its buffers. So dropping makes no driver call: it [buries](Graves::bury)
//! what is left, with the mask of the streams that used it. The next allocation records an event on each of those streams, and once the
//! events have been reached the memory is free for reuse. It goes back to the driver in a [quiet](Launches::quiet) moment.
//!
//! Nothing in here knows a driver: a backend says what its streams, its memory and its graphs can do.

use std::fmt::Debug;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, Weak};
use std::time::{Duration, Instant};

use crate::backend::MemoryKind;
use crate::error::Result;

/// How long an allocation that failed waits for a quiet moment, in which memory can be given back.
const PATIENCE: Duration = Duration::from_secs(1);

/// A point in a stream.
pub trait Reached: Debug + Send + Sync {
    /// Whether the stream has come to it.
    fn is_reached(&self) -> Result<bool>;
}

/// What the handles of one stream share.
pub trait Work: Debug + Send + Sync {
    /// Its events.
    type Event: Reached;
    /// An event behind the present work.
    fn record(&self) -> Result<Self::Event>;
    /// Whether work is recorded instead of run.
    fn is_capturing(&self) -> Result<bool>;
    /// Whether all work has ended.
    fn is_idle(&self) -> Result<bool>;
}

/// Memory that the driver gave.
pub trait Memory: Debug + Send {
    /// Bytes of it.
    fn capacity(&self) -> usize;
    /// Whether an allocation of this kind may have it next.
    fn suits(&self, kind: MemoryKind) -> bool;
    /// Gives it back to the driver.
    ///
    /// # Safety
    /// Nothing uses it any more.
    unsafe fn release(self) -> Result<()>;
}

/// A graph whose last handle is gone.
pub trait Unused: Debug + Send {
    /// Destroys it.
    ///
    /// # Safety
    /// No replay of it runs.
    unsafe fn destroy(self) -> Result<()>;
}

/// The streams of a device, by the bit that stands for them in masks. Streams beyond 64 share bits, which only keeps memory longer.
#[derive(Debug)]
pub struct Slots<W: Work> {
    next: AtomicUsize,
    entries: Mutex<[Vec<Entry<W>>; 64]>,
}

#[derive(Debug)]
enum Entry<W: Work> {
    /// Once the last handle is gone: the stream is about to end.
    Live(Weak<W>),
    /// The stream is gone; its work has ended when the event has been reached.
    Ended(Arc<W::Event>),
}

/// What the streams of some slots are doing.
struct Present<W: Work> {
    live: Vec<Arc<W>>,
    ended: Vec<Arc<W::Event>>,
    /// Whether a stream is about to end, whose work has no event yet.
    ending: bool,
}

impl<W: Work> Default for Slots<W> {
    fn default() -> Self {
        Slots { next: AtomicUsize::new(0), entries: Mutex::new([const { Vec::new() }; 64]) }
    }
}

impl<W: Work> Slots<W> {
    /// A slot for a stream that is about to be made.
    pub fn next(&self) -> usize {
        self.next.fetch_add(1, Ordering::Relaxed) % 64
    }

    /// Notes a stream.
    pub fn add(&self, slot: usize, stream: &Arc<W>) {
        lock(&self.entries)[slot].push(Entry::Live(Arc::downgrade(stream)));
    }

    /// Puts the event behind a stream's work into its place: for the drop of what its handles shared. Without an event there is nothing
    /// to wait for.
    pub fn end(&self, slot: usize, stream: &W, event: Option<W::Event>) {
        let mut entries = lock(&self.entries);
        entries[slot].retain(|entry| !matches!(entry, Entry::Live(live) if std::ptr::eq(live.as_ptr(), stream)));
        entries[slot].extend(event.map(|event| Entry::Ended(Arc::new(event))));
    }

    /// True when no stream has work left.
    ///
    /// # Errors
    /// The driver's.
    pub fn all_idle(&self) -> Result<bool> {
        let Present { live, ended, ending } = self.present(0..64);
        if ending || !ended.is_empty() {
            return Ok(false);
        }
        for stream in live {
            if stream.is_capturing()? || !stream.is_idle()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Events behind the present work of the slot's streams; `None` while one of them is capturing, or about to end.
    fn events(&self, slot: usize) -> Result<Option<Vec<Arc<W::Event>>>> {
        let Present { live, ended: mut events, ending } = self.present(slot..slot + 1);
        if ending {
            return Ok(None);
        }
        for stream in live {
            if stream.is_capturing()? {
                return Ok(None);
            }
            events.push(Arc::new(stream.record()?));
        }
        Ok(Some(events))
    }

    /// Forgets the streams that are gone and whose work has ended. Handles are taken out of the lock: dropping the last one of
    /// a stream takes it again.
    fn present(&self, slots: std::ops::Range<usize>) -> Present<W> {
        let mut entries = lock(&self.entries);
        let mut present = Present { live: Vec::new(), ended: Vec::new(), ending: false };
        for slot in &mut entries[slots] {
            // An error is for the next call that can return it; until then nothing is known of the work.
            slot.retain(|entry| !matches!(entry, Entry::Ended(event) if event.is_reached().unwrap_or(false)));
            for entry in slot.iter() {
                match entry {
                    Entry::Live(stream) => match stream.upgrade() {
                        Some(stream) => present.live.push(stream),
                        None => present.ending = true,
                    },
                    Entry::Ended(event) => present.ended.push(event.clone()),
                }
            }
        }
        present
    }
}

/// Streams with work that uses something, by their slots.
#[derive(Debug, Default)]
pub struct Uses(AtomicU64);

impl Uses {
    /// Notes a stream.
    pub fn note(&self, slot: usize) {
        let bit = 1 << slot;
        // Relaxed: the mask is read when the last handle is gone, and every handle's drop happens before that. The load
        // spares the atomic update, and the cache line's journey, when the bit is set already.
        if self.0.load(Ordering::Relaxed) & bit == 0 {
            self.0.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// The mask.
    pub fn mask(&mut self) -> u64 {
        *self.0.get_mut()
    }
}

/// What a handle leaves behind.
#[derive(Debug)]
pub enum Remains<M, G> {
    /// A graph.
    Graph(G),
    /// Memory.
    Memory(M),
}

/// Where a device's memory and graphs wait for the work that uses them.
#[derive(Debug)]
pub struct Graves<W: Work, M, G> {
    /// Buried since the last visit, with the mask of streams. Its lock is never held across a driver call: the driver
    /// itself may bury.
    fresh: Mutex<Vec<(Remains<M, G>, u64)>>,
    old: Mutex<Old<W, M, G>>,
}

/// What waits for the events of each stream that used it.
type Waiting<W, M, G> = Vec<(Remains<M, G>, Vec<Arc<<W as Work>::Event>>)>;

#[derive(Debug)]
struct Old<W: Work, M, G> {
    waiting: Waiting<W, M, G>,
    free: Vec<M>,
}

impl<W: Work, M, G> Default for Graves<W, M, G> {
    fn default() -> Self {
        Graves { fresh: Mutex::default(), old: Mutex::new(Old { waiting: Vec::new(), free: Vec::new() }) }
    }
}

/// A quiet moment, while it lasts.
pub type Quiet = RwLockWriteGuard<'static, ()>;

impl<W: Work, M: Memory, G: Unused> Graves<W, M, G> {
    /// Takes what a last handle leaves, used on the streams of the mask. Makes no driver call.
    pub fn bury(&self, remains: Remains<M, G>, uses: u64) {
        lock(&self.fresh).push((remains, uses));
    }

    /// Memory of this capacity and kind: what nothing uses any more, or what `allocate` gives. If that fails, it is tried again once memory that
    /// waits for reuse has been given back.
    ///
    /// # Errors
    /// The driver's.
    pub fn allocate(
        &self,
        slots: &Slots<W>,
        (capacity, kind): (usize, MemoryKind),
        quiet: impl Fn() -> Result<Option<Quiet>>,
        allocate: impl Fn() -> Result<M>,
    ) -> Result<M> {
        if let Some(memory) = self.reuse(slots, (capacity, kind), &quiet)? {
            return Ok(memory);
        }
        allocate().or_else(|_| {
            // Out of memory, most likely: what waits for reuse may be what is missing.
            self.release_free(PATIENCE, quiet)?;
            allocate()
        })
    }

    /// Memory of exactly this capacity and kind that nothing uses any more. Gives back to the driver what else is there, if the moment is
    /// `quiet`.
    fn reuse(
        &self,
        slots: &Slots<W>,
        (capacity, kind): (usize, MemoryKind),
        quiet: impl FnOnce() -> Result<Option<Quiet>>,
    ) -> Result<Option<M>> {
        let mut old = lock(&self.old);
        // Before events are recorded: with one to come to, no stream is idle.
        old.settle()?;
        old.release_free(quiet)?;
        self.visit(slots, &mut old)?;
        let at = old.free.iter().position(|m| m.capacity() == capacity && m.suits(kind));
        Ok(at.map(|at| old.free.swap_remove(at)))
    }

    /// Gives what nothing uses back to the driver, if a quiet moment comes within `patience`.
    fn release_free(&self, patience: Duration, quiet: impl Fn() -> Result<Option<Quiet>>) -> Result<()> {
        let began = Instant::now();
        while !lock(&self.old).release_free(&quiet)? && began.elapsed() < patience {
            std::thread::sleep(Duration::from_micros(100)); // unlocked: others may have to allocate before their work ends
        }
        Ok(())
    }

    /// Records events behind the work that uses what was buried since the last visit.
    fn visit(&self, slots: &Slots<W>, old: &mut Old<W, M, G>) -> Result<()> {
        let fresh = std::mem::take(&mut *lock(&self.fresh));
        let mut events: [Option<Vec<Arc<W::Event>>>; 64] = [const { None }; 64];
        for (remains, uses) in fresh {
            let mut awaited = Vec::new();
            let mut busy = false;
            for slot in (0..64).filter(|slot| uses & 1 << slot != 0) {
                if events[slot].is_none() {
                    events[slot] = slots.events(slot)?;
                }
                match &events[slot] {
                    Some(events) => awaited.extend(events.iter().cloned()),
                    None => busy = true, // a stream is capturing: an event would go into its graph
                }
            }
            if busy {
                self.bury(remains, uses);
            } else {
                old.waiting.push((remains, awaited));
            }
        }
        old.settle()
    }
}

impl<W: Work, M: Memory, G: Unused> Old<W, M, G> {
    /// Looks whose events have been reached.
    fn settle(&mut self) -> Result<()> {
        let mut destroyed = Ok(());
        for (remains, mut events) in std::mem::take(&mut self.waiting) {
            events.retain(|event| !event.is_reached().unwrap_or(false));
            match remains {
                _ if !events.is_empty() => self.waiting.push((remains, events)),
                Remains::Memory(memory) => self.free.push(memory),
                // SAFETY: the last handle is gone, and every replay has ended.
                Remains::Graph(graph) => destroyed = destroyed.and(unsafe { graph.destroy() }),
            }
        }
        destroyed
    }

    /// Gives what nothing uses back to the driver; false where that would have to wait.
    fn release_free(&mut self, quiet: impl FnOnce() -> Result<Option<Quiet>>) -> Result<bool> {
        if self.free.is_empty() {
            return Ok(true);
        }
        let Some(_quiet) = quiet()? else { return Ok(false) };
        // SAFETY: the last handle is gone, and all work that used it has ended.
        self.free.drain(..).try_for_each(|memory| unsafe { memory.release() })?;
        Ok(true)
    }
}

/// Launches and frees of a process take turns: a kernel that waits for a peer whose call comes from the freeing thread would never
/// end. It was not there when the thread looked, but another thread may launch it between the look and the free. Peers' devices may be
/// waited for too, so one value serves all devices of a backend.
#[derive(Debug, Default)]
pub struct Launches(RwLock<()>);

impl Launches {
    /// None so far.
    pub const fn new() -> Self {
        Launches(RwLock::new(()))
    }

    /// Held during each call that starts a kernel. Waits for a free, which waits for nothing.
    pub fn launching(&self) -> RwLockReadGuard<'_, ()> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// No work is anywhere, as `idle` finds, and none is launched while this is held. `None` while there is some: a launch is not
    /// waited for, since with a full queue it may itself wait for a peer.
    ///
    /// # Errors
    /// What `idle` says.
    pub fn quiet(&'static self, idle: impl FnOnce() -> Result<bool>) -> Result<Option<Quiet>> {
        let guard = match self.0.try_write() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Ok(None),
        };
        Ok(idle()?.then_some(guard))
    }
}

/// The lock of a mutex that guards no half-done change.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
