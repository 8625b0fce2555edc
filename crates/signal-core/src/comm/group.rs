//! What the ranks of one communicator have in common.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use serde::{Deserialize, Serialize};

use crate::backend::{Backend, Link, StreamId};
use crate::error::{ApiMisuse, Result};
use crate::layout::NUM_BARRIER_DOMAINS;
use crate::plan::Topology;

use super::pace::Pace;
use super::process::Processes;
use super::recover::MeetingPoint;
use super::split::Splitting;
use super::symmetric::PendingAllocations;

/// The ranks of one communicator, as one process sees them. Alive while any of its ranks, or any symmetric buffer, is.
#[derive(Debug)]
pub(crate) struct Group<B: Backend> {
    /// Each rank's Signal, Control and scratch.
    pub(crate) memory: Vec<B::Buffer>,
    pub(crate) ranks: Ranks<B>,
    pub(crate) topology: Topology,
    pub(crate) budget: BlockBudget,
    pub(crate) pace: Pace,
    streams: Mutex<Vec<RankStreams<B>>>,
}

/// Where the ranks are, and how they meet outside kernels.
#[derive(Debug)]
pub(crate) enum Ranks<B: Backend> {
    /// All in this process.
    Here(Here<B>),
    /// One in this process.
    Apart(Processes<B>),
}

/// What the ranks of one process share.
#[derive(Debug)]
pub(crate) struct Here<B: Backend> {
    /// By rank.
    pub(crate) devices: Vec<B::Device>,
    pub(crate) meeting: MeetingPoint,
    pub(crate) splitting: Mutex<Splitting<B>>,
    pending: Mutex<PendingAllocations<B>>,
}

impl<B: Backend> Here<B> {
    pub(crate) fn new(devices: Vec<B::Device>) -> Self {
        let splitting = Mutex::new(Splitting::new(devices.len()));
        Here { devices, meeting: MeetingPoint::default(), splitting, pending: Mutex::default() }
    }

    pub(crate) fn lock_pending(&self) -> MutexGuard<'_, PendingAllocations<B>> {
        lock(&self.pending)
    }
}

/// What room there is for a grid, by the threads of a block (P4).
#[derive(Debug)]
pub(crate) struct BlockBudget {
    max_threads: u32,
    /// For blocks of up to 1, 2, 4, ... threads, as they were at first.
    rooms: Vec<Room>,
    /// How often half of what was left has been given away.
    halvings: AtomicU32,
}

/// The room for blocks of some size, of any kernel, on every rank.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Room {
    /// Blocks that can be resident at once: a grid beyond it would wait for blocks that never start.
    pub(crate) blocks: u32,
    /// Blocks of a grid beside which the stream's next kernel may start, where there are places for both.
    pub(crate) units: u32,
    /// Grids for which there are two places. See [`Room::of`].
    pub(crate) pairs: u32,
}

impl Room {
    /// The room for each of `shares` streams of calls, such as those of the ranks, on a device with `units` multiprocessors, on
    /// which `resident` blocks fit.
    ///
    /// A kernel that is launched early takes room while it waits for the one before it, which waits for peers that may
    /// still need room on this very device. So two grids of each share must fit, whatever their shapes: each
    /// multiprocessor is cut into two places a share, a block must fit a place, and a grid has at most one block for each
    /// multiprocessor. Then 2 x `shares` grids find enough places, however the device scatters them.
    pub(crate) fn of(resident: u32, units: u32, shares: u32) -> Room {
        Room { blocks: resident / shares, units, pairs: resident / units.max(1) / (2 * shares) }
    }

    pub(crate) fn min(self, other: Room) -> Room {
        Room {
            blocks: self.blocks.min(other.blocks),
            units: self.units.min(other.units),
            pairs: self.pairs.min(other.pairs),
        }
    }

    /// What is left of it after some halvings.
    fn halved(self, times: u32) -> Room {
        let part = |number: u32| number.checked_shr(times).unwrap_or(0);
        Room { blocks: part(self.blocks), units: self.units, pairs: part(self.pairs) }
    }
}

impl BlockBudget {
    /// Threads of the largest block of each class: the powers of two, up to the first that reaches `max_threads`.
    pub(crate) fn classes(max_threads: u32) -> impl Iterator<Item = u32> {
        (0..=max_threads.next_power_of_two().trailing_zeros()).map(move |class| (1 << class).min(max_threads))
    }

    /// What fits on every rank. `rooms` are each rank's, by class.
    pub(crate) fn new(max_threads: u32, ranks: &[Vec<Room>]) -> Self {
        let least = |class: usize| {
            let rooms = ranks.iter().map(|rooms| rooms.get(class).copied().unwrap_or_default());
            rooms.reduce(Room::min).unwrap_or_default()
        };
        let classes = Self::classes(max_threads).count();
        BlockBudget { max_threads, rooms: (0..classes).map(least).collect(), halvings: AtomicU32::new(0) }
    }

    /// Half of what is left.
    pub(crate) fn half(&self) -> BlockBudget {
        let halvings = AtomicU32::new(self.halvings() + 1);
        BlockBudget { max_threads: self.max_threads, rooms: self.rooms.clone(), halvings }
    }

    /// Gives half of what is left away: the [`half`](Self::half) of before is the other half. No rank is making a call.
    pub(crate) fn give_half(&self) {
        // Relaxed: what brings the ranks back from their meeting orders it before the calls to come.
        self.halvings.fetch_add(1, Ordering::Relaxed);
    }

    /// What is left, by class.
    pub(crate) fn rooms(&self) -> Vec<Room> {
        self.rooms.iter().map(|room| room.halved(self.halvings())).collect()
    }

    /// Refuses a grid that does not fit.
    pub(crate) fn check(&self, blocks: u32, threads: u32) -> Result<()> {
        let limit = self.max_threads;
        if threads == 0 || threads > limit {
            return Err(ApiMisuse::Threads { threads, limit }.into());
        }
        let budget = self.blocks(threads);
        if blocks == 0 || blocks > budget {
            return Err(ApiMisuse::Grid { blocks, budget }.into());
        }
        Ok(())
    }

    pub(crate) fn max_threads(&self) -> u32 {
        self.max_threads
    }

    /// For blocks of `threads` threads; 0 when no such block fits.
    pub(crate) fn blocks(&self, threads: u32) -> u32 {
        self.room(threads).blocks
    }

    /// `threads`, or if no `blocks` of so many fit, the half of it so often that they do.
    pub(crate) fn fitting_threads(&self, threads: u32, blocks: u32) -> u32 {
        let mut fitting = threads.min(self.max_threads);
        while fitting > 1 && self.blocks(fitting) < blocks {
            fitting /= 2;
        }
        fitting
    }

    /// Whether the stream's next kernel may start beside a grid.
    pub(crate) fn has_room_for_next(&self, blocks: u32, threads: u32) -> bool {
        let room = self.room(threads);
        room.pairs > 0 && blocks <= room.units
    }

    fn room(&self, threads: u32) -> Room {
        let class = threads.max(1).checked_next_power_of_two().map_or(usize::MAX, |n| n.trailing_zeros() as usize);
        self.rooms.get(class).copied().unwrap_or_default().halved(self.halvings())
    }

    fn halvings(&self) -> u32 {
        self.halvings.load(Ordering::Relaxed)
    }
}

/// The stream that each domain of a rank was last used on.
#[derive(Debug)]
struct RankStreams<B: Backend> {
    /// False once the rank's communicator is gone: its streams may go to other ranks, but its calls may still run.
    alive: bool,
    last: [Option<B::Stream>; NUM_BARRIER_DOMAINS],
    /// Streams that a domain has left; its calls may still be there.
    former: Vec<B::Stream>,
}

impl<B: Backend> RankStreams<B> {
    fn new() -> Self {
        RankStreams { alive: true, last: Default::default(), former: Vec::new() }
    }

    /// All of them.
    fn all(&self) -> impl Iterator<Item = B::Stream> {
        self.last.iter().flatten().chain(&self.former).cloned()
    }

    /// True while another rank would queue behind this one's calls, which may be waiting for its own.
    fn holds(&self, id: StreamId) -> Result<bool> {
        if !self.alive {
            return Ok(false);
        }
        if self.last.iter().flatten().any(|stream| B::stream_id(stream) == id) {
            return Ok(true);
        }
        match self.former.iter().find(|stream| B::stream_id(stream) == id) {
            Some(stream) => Ok(!B::is_idle(stream)?),
            None => Ok(false),
        }
    }
}

impl<B: Backend> Group<B> {
    pub(crate) fn new(memory: Vec<B::Buffer>, ranks: Ranks<B>, topology: Topology, budget: BlockBudget) -> Self {
        let pace = Pace::new(memory.len());
        let mut streams: Vec<_> = memory.iter().map(|_| RankStreams::new()).collect();
        if let Ranks::Apart(processes) = &ranks {
            for other in (0..memory.len()).filter(|rank| *rank != processes.rank()) {
                streams[other].alive = false;
                pace.leave(other); // its process has launch queues of its own
            }
        }
        Group { memory, ranks, topology, budget, pace, streams: Mutex::new(streams) }
    }

    pub(crate) fn world(&self) -> usize {
        self.memory.len()
    }

    /// Whether peers reach the memory of a rank's device; else what they share lies in the host's.
    pub(crate) fn reaches_peers(&self) -> bool {
        self.topology.link != Link::Pinned
    }

    /// Threads of a block for which `threads` were asked.
    pub(crate) fn whole_wave(&self, threads: u32) -> u32 {
        // None stays none, which the budget refuses.
        if threads == 0 { 0 } else { threads.max(self.topology.family.min_block_threads()) }
    }

    /// Notes that `rank` uses `stream` for `domain` from now on.
    ///
    /// # Errors
    /// Another rank uses the stream, or has left unfinished calls there.
    pub(crate) fn use_stream(&self, rank: usize, domain: u32, stream: &B::Stream) -> Result<()> {
        let mut streams = lock(&self.streams);
        let id: StreamId = B::stream_id(stream);
        for (first, other) in streams.iter().enumerate() {
            if first != rank && other.holds(id)? {
                return Err(ApiMisuse::SharedStream { first, second: rank }.into());
            }
        }
        let mine = &mut streams[rank];
        if let Some(left) = mine.last[domain as usize].replace(stream.clone()) {
            // An error means that nothing is known of the stream: it stays.
            mine.former.retain(|former| !B::is_idle(former).unwrap_or(false) && B::stream_id(former) != id);
            mine.former.push(left);
        }
        Ok(())
    }

    /// Every stream on which a call of any rank may still run.
    pub(crate) fn streams(&self) -> Vec<B::Stream> {
        lock(&self.streams).iter().flat_map(RankStreams::all).collect()
    }

    /// Every stream on which a call of `rank` may still run.
    pub(crate) fn streams_of(&self, rank: usize) -> Vec<B::Stream> {
        lock(&self.streams)[rank].all().collect()
    }

    /// Notes that the rank's communicator is gone.
    pub(crate) fn leave(&self, rank: usize) {
        self.pace.leave(rank);
        let mut streams = lock(&self.streams);
        streams[rank].alive = false;
        let last = streams.iter().all(|rank| !rank.alive);
        drop(streams);
        match &self.ranks {
            Ranks::Here(here) if last => {
                // Allocations that some rank never made: nobody will come for them, and they hold the group.
                let abandoned = std::mem::take(&mut *here.lock_pending());
                drop(abandoned);
            }
            Ranks::Here(_) => (),
            Ranks::Apart(processes) => processes.lock().keep_until(&self.streams()),
        }
    }
}

/// Locks by trying: a lock that waits does so inside the standard library, where ThreadSanitizer does not see that it was
/// taken. It is taken when a rank allocates or changes streams, so seldom that nobody waits for long. A panic elsewhere
/// leaves what it guards whole: that is changed only after everything that can fail.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    loop {
        match mutex.try_lock() {
            Ok(guard) => return guard,
            Err(TryLockError::Poisoned(poisoned)) => return poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => std::thread::yield_now(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(max: u32, room: impl FnMut(u32) -> Room) -> BlockBudget {
        BlockBudget::new(max, &[BlockBudget::classes(max).map(room).collect()])
    }

    #[test]
    fn the_budget_is_that_of_the_next_larger_class() {
        let odd = budget(3, |threads| Room { blocks: threads, units: 1, pairs: 0 });
        let budget = budget(512, |threads| Room { blocks: 1024 / threads, units: 1, pairs: 1 });
        assert_eq!(budget.max_threads(), 512);
        assert_eq!([1, 2, 3, 4, 511, 512].map(|t| budget.blocks(t)), [1024, 512, 256, 256, 2, 2]);
        assert_eq!([513, u32::MAX].map(|t| budget.blocks(t)), [0, 0]);
        assert_eq!([1, 2, 3, 4].map(|t| odd.blocks(t)), [1, 2, 3, 3]);
        assert!(
            budget.has_room_for_next(1, 512) && !budget.has_room_for_next(2, 512) && !budget.has_room_for_next(1, 513)
        );
        assert!(!odd.has_room_for_next(1, 1));
    }

    #[test]
    fn the_next_kernel_needs_a_place_of_its_own() {
        // 132 multiprocessors with room for 1024 threads each.
        let room = |threads: u32, shares| Room::of(132 * (1024 / threads), 132, shares);
        assert_eq!(room(512, 1), Room { blocks: 264, units: 132, pairs: 1 });
        assert_eq!(room(512, 2), Room { blocks: 132, units: 132, pairs: 0 });
        assert_eq!(room(256, 2), Room { blocks: 264, units: 132, pairs: 1 });
        assert_eq!(room(128, 5), Room { blocks: 211, units: 132, pairs: 0 });
        assert_eq!(room(256, 2).min(room(512, 2)), Room { blocks: 132, units: 132, pairs: 0 });
    }

    #[test]
    fn what_is_given_away_and_what_is_left_fit_together() {
        let whole = |threads: u32| Room::of(132 * (1024 / threads), 132, 1);
        let parent = budget(1024, whole);
        let mut given = Vec::new();
        for split in 0..12 {
            given.push(parent.half());
            parent.give_half();
            for threads in BlockBudget::classes(1024) {
                let sum: u32 = given.iter().chain([&parent]).map(|budget| budget.blocks(threads)).sum();
                assert!(sum <= whole(threads).blocks, "{sum} blocks of {threads} threads after {split} splits");
                // A grid and the one beside it, of each.
                let places: u32 = given.iter().chain([&parent]).map(|budget| 2 * budget.room(threads).pairs).sum();
                assert!(132 * places <= whole(threads).blocks, "{places} places after {split} splits");
            }
        }
        assert_eq!(given[0].rooms(), budget(1024, |threads| whole(threads).halved(1)).rooms());
        // Of a child what is left of it.
        let grandchild = given[0].half();
        given[0].give_half();
        assert_eq!([&given[0], &grandchild].map(|budget| budget.blocks(512)), [66, 66]);
        // Halved twelve times nothing is left of wide blocks.
        assert_eq!((parent.blocks(1), parent.blocks(1024), parent.fitting_threads(1024, 1)), (33, 0, 32));
        assert_eq!([parent.fitting_threads(4, 1), parent.fitting_threads(4, 34)], [4, 1]);
    }
}
