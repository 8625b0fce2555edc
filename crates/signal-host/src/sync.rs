//! The synchronization that carries data in this crate: a spin lock, a reference count and a patient wait.
//!
//! Everything here is built from atomics that are compiled with this crate. ThreadSanitizer sees only what was
//! compiled with it, and the standard library is not: its mutexes and channels would hide every hand-over of work and
//! memory from the tool that is to judge the protocol. Its `Arc` orders the last owner behind the others by a fence,
//! which ThreadSanitizer does not model. `thread::park` and `unpark` are used as hints to sleep and to look again,
//! never to pass data.

use std::cell::UnsafeCell;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

/// A reference-counted value: `Arc` without weak handles, whose every drop both releases and acquires.
pub(crate) struct Shared<T> {
    counted: NonNull<Counted<T>>,
    owns: PhantomData<Counted<T>>,
}

struct Counted<T> {
    handles: AtomicUsize,
    value: T,
}

// SAFETY: a handle gives `&T` to the thread that holds it (needs `T: Sync`), and any thread may turn out to drop the
// value (needs `T: Send`). The count is atomic.
unsafe impl<T: Send + Sync> Send for Shared<T> {}
// SAFETY: as above; `&Shared` can be cloned into a handle.
unsafe impl<T: Send + Sync> Sync for Shared<T> {}

impl<T> Shared<T> {
    pub(crate) fn new(value: T) -> Self {
        let counted = Box::new(Counted { handles: AtomicUsize::new(1), value });
        Shared { counted: NonNull::from(Box::leak(counted)), owns: PhantomData }
    }

    /// Handles alive now. When it is 1, what the other handles' owners did before they dropped them is visible.
    pub(crate) fn handles(&self) -> usize {
        // Acquire: pairs with the release in `drop` of the other handles. Relaxed would return the number without their
        // owners' writes.
        self.counted().handles.load(Ordering::Acquire)
    }

    fn counted(&self) -> &Counted<T> {
        // SAFETY: `new` leaked the box, and it is freed only by the drop of the last handle, which `self` is not past.
        // Only shared references are formed while handles exist.
        unsafe { self.counted.as_ref() }
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Self {
        // Relaxed: the new handle comes from one that exists, so the value cannot go away meanwhile, and nothing is
        // read through the count.
        let before = self.counted().handles.fetch_add(1, Ordering::Relaxed);
        if before > isize::MAX as usize {
            // So many handles can only have been leaked. Wrapping the count would free the value under its users.
            std::process::abort();
        }
        Shared { counted: self.counted, owns: PhantomData }
    }
}

impl<T> Drop for Shared<T> {
    fn drop(&mut self) {
        // Release: this owner's accesses come before the free by the last one. Acquire: if this is the last one, it
        // sees them all. One operation for both, where `Arc` uses a fence; see the head of this file.
        if self.counted().handles.fetch_sub(1, Ordering::AcqRel) == 1 {
            // SAFETY: the pointer came from `Box::leak` in `new`; the count says that no other handle exists, and the
            // ordering above that no other thread is still using one.
            drop(unsafe { Box::from_raw(self.counted.as_ptr()) });
        }
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.counted().value
    }
}

impl<T: fmt::Debug> fmt::Debug for Shared<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// A lock for critical sections of a few instructions. Not fair and not reentrant.
pub(crate) struct SpinLock<T> {
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the lock hands `&mut T` to one thread at a time, which is sending it back and forth.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        SpinLock { held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    pub(crate) fn lock(&self) -> SpinGuard<'_, T> {
        let mut patience = Patience::new();
        // Acquire on success: pairs with the release in the guard's drop, so that the last holder's writes are seen.
        // Relaxed on failure: nothing is read then.
        while self.held.compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            patience.pause();
        }
        SpinGuard { lock: self }
    }
}

impl<T> fmt::Debug for SpinLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The value is not shown: formatting must not wait for a holder.
        f.debug_struct("SpinLock").finish_non_exhaustive()
    }
}

pub(crate) struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        // SAFETY: the lock is held for as long as the guard lives, so nobody else has a reference to the value.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`, and `&mut self` makes this the only reference through the guard.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    fn drop(&mut self) {
        // Release: pairs with the acquire in `lock`, so that the next holder sees what this one wrote.
        self.lock.held.store(false, Ordering::Release);
    }
}

/// How to wait for something that has no waker: yield for a while, then sleep in small steps.
///
/// The threads waited for need the processor, of which there may be one. Yielding keeps the answer quick where it comes
/// soon; sleeping keeps a wait of minutes, for a kernel whose peer is missing, from taking a processor away from it.
#[derive(Debug)]
pub(crate) struct Patience {
    pauses: u32,
}

impl Patience {
    /// Some hundred microseconds on an idle machine, longer than a small collective takes.
    const YIELDS: u32 = 1000;
    /// The timer slack of a Linux thread is 50 us: asking for less gives no less.
    const NAP: Duration = Duration::from_micros(50);

    pub(crate) const fn new() -> Self {
        Patience { pauses: 0 }
    }

    pub(crate) fn pause(&mut self) {
        if self.pauses < Self::YIELDS {
            self.pauses += 1;
            thread::yield_now();
        } else {
            thread::sleep(Self::NAP);
        }
    }
}

/// How a thread that can be unparked waits for work: it yields a little, for work that follows closely, then parks.
#[derive(Debug)]
pub(crate) struct Idle {
    yields: u32,
}

impl Idle {
    /// Few, because a whole grid of lanes becomes idle at once, and each yield is a turn that the worker waits for:
    /// with 32 of them, grids of 32 and 512 threads took some four times as long on two cores as with 4.
    const YIELDS: u32 = 4;

    pub(crate) const fn new() -> Self {
        Idle { yields: 0 }
    }

    /// Returns at some time: after an unpark, or before. The caller looks for work again. No wake-up is lost, since an
    /// unpark that comes between looking and parking makes the park return at once.
    pub(crate) fn pause(&mut self) {
        if self.yields < Self::YIELDS {
            self.yields += 1;
            thread::yield_now();
        } else {
            thread::park();
        }
    }

    /// Work was found: be quick again.
    pub(crate) fn reset(&mut self) {
        self.yields = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_handle_drops_the_value_once() {
        struct Flag(Shared<AtomicUsize>);
        impl Drop for Flag {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        let drops = Shared::new(AtomicUsize::new(0));
        let value = Shared::new(Flag(drops.clone()));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let value = value.clone();
                thread::spawn(move || {
                    for _ in 0..1000 {
                        drop(value.clone());
                    }
                })
            })
            .collect();
        assert!(value.handles() >= 1);
        drop(value);
        for t in threads {
            t.join().unwrap();
        }
        assert_eq!(drops.load(Ordering::Relaxed), 1);
        assert_eq!(drops.handles(), 1);
    }

    #[test]
    fn the_lock_excludes() {
        let total = Shared::new(SpinLock::new(0u64));
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let total = total.clone();
                thread::spawn(move || {
                    for _ in 0..10_000 {
                        *total.lock() += 1;
                    }
                })
            })
            .collect();
        for t in threads {
            t.join().unwrap();
        }
        assert_eq!(*total.lock(), 40_000);
    }
}
