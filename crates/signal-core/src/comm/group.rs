//! What the ranks of one communicator have in common.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};

use serde::{Deserialize, Serialize};

use crate::backend::{Backend, Link, StreamId};
use crate::error::{ApiMisuse, Result};
use crate::layout::{MAX_NUM_BLOCKS_UPPER_BOUND, NUM_BARRIER_DOMAINS};
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
    /// Streams of calls among which a device is divided: ranks on it, and open domains of each; those of the device that has most. With the next
    /// one for kernels that are not in the catalogue.
    shares: u32,
    /// How often half of what was left has been given away.
    halvings: AtomicU32,
}

/// The room for blocks of some size, of any kernel, on every rank.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
pub(crate) struct Room {
    /// Blocks that can be resident at once: a grid beyond it would wait for blocks that never start.
    pub(crate) blocks: u32,
    /// Multiprocessors of the device.
    pub(crate) units: u32,
    /// Blocks that fit one of them, of each share. See [`Room::of`].
    pub(crate) a_unit: u32,
}

impl Room {
    /// What limits nothing.
    const MOST: Room = Room { blocks: u32::MAX, units: u32::MAX, a_unit: u32::MAX };

    /// The room for each of `shares` streams of calls, such as those of the ranks, on a device with `units` multiprocessors, on
    /// which `resident` blocks fit.
    pub(crate) fn of(resident: u32, units: u32, shares: u32) -> Room {
        Room { blocks: resident / shares, units, a_unit: resident / units.max(1) / shares }
    }

    /// Blocks of the largest grid beside which the stream's next kernel may start.
    ///
    /// A kernel that is launched early takes room while it waits for the one before it, which waits for peers that may still need room on this
    /// very device. Of the calls that have not ended on all ranks take the first: some share's grid of it still lacks room. Each other
    /// share has two grids here at most, since its next kernel starts when the one before the present one has ended. Cut each multiprocessor into two
    /// places a share, and let a grid take at most as many places as there are multiprocessors, a block one or two. Where a block lacks room, on
    /// each multiprocessor all places but one are taken, or all: of n shares, 2 n - 1 places at least, more than the 2 n - 2 other grids and
    /// the rest of this one have. So there is room, however the device scatters the blocks.
    pub(crate) fn most_beside_next(self) -> u32 {
        match self.a_unit {
            0 => 0,
            1 => self.units / 2,
            _ => self.units,
        }
    }

    pub(crate) fn min(self, other: Room) -> Room {
        Room {
            blocks: self.blocks.min(other.blocks),
            units: self.units.min(other.units),
            a_unit: self.a_unit.min(other.a_unit),
        }
    }

    /// What is left of it after some halvings.
    fn halved(self, times: u32) -> Room {
        let part = |number: u32| number.checked_shr(times).unwrap_or(0);
        Room { blocks: part(self.blocks), units: self.units, a_unit: part(self.a_unit) }
    }
}

impl BlockBudget {
    /// Threads of the largest block of each class: the powers of two, up to the first that reaches `max_threads`.
    pub(crate) fn classes(max_threads: u32) -> impl Iterator<Item = u32> {
        (0..=max_threads.next_power_of_two().trailing_zeros()).map(move |class| (1 << class).min(max_threads))
    }

    /// What fits on every rank. `rooms` are each rank's, by class; `shares` are the most that divide a device.
    pub(crate) fn new(max_threads: u32, ranks: &[Vec<Room>], shares: u32) -> Self {
        let least = |class: usize| {
            let rooms = ranks.iter().map(|rooms| rooms.get(class).copied().unwrap_or_default());
            rooms.reduce(Room::min).unwrap_or_default()
        };
        let classes = Self::classes(max_threads).count();
        BlockBudget { max_threads, rooms: (0..classes).map(least).collect(), shares, halvings: AtomicU32::new(0) }
    }

    /// Half of what is left.
    pub(crate) fn half(&self) -> BlockBudget {
        let halvings = AtomicU32::new(self.halvings() + 1);
        BlockBudget { max_threads: self.max_threads, rooms: self.rooms.clone(), shares: self.shares, halvings }
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

    /// Those that divide what is left.
    pub(crate) fn shares(&self) -> u32 {
        self.shares.saturating_mul(1u32.checked_shl(self.halvings()).unwrap_or(u32::MAX))
    }

    /// What of `resident` blocks of a kernel that is not in the catalogue, on a device with `units` multiprocessors, is left for a grid.
    pub(crate) fn room_of(&self, resident: u32, units: u32) -> Room {
        Room::of(resident, units, self.shares()).min(Room { blocks: MAX_NUM_BLOCKS_UPPER_BOUND as u32, ..Room::MOST })
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
        blocks <= self.room(threads).most_beside_next()
    }

    /// The class of blocks of `threads` threads.
    pub(crate) fn class_of(threads: u32) -> usize {
        threads.max(1).checked_next_power_of_two().map_or(usize::MAX, |n| n.trailing_zeros() as usize)
    }

    fn room(&self, threads: u32) -> Room {
        let class = Self::class_of(threads);
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
        BlockBudget::new(max, &[BlockBudget::classes(max).map(room).collect()], 1)
    }

    #[test]
    fn the_budget_is_that_of_the_next_larger_class() {
        let odd = budget(3, |threads| Room { blocks: threads, units: 1, a_unit: 0 });
        let budget = budget(512, |threads| Room { blocks: 1024 / threads, units: 1, a_unit: 2 });
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
    fn the_next_kernel_needs_places_of_its_own() {
        // 132 multiprocessors with room for 1024 threads each.
        let room = |threads: u32, shares| Room::of(132 * (1024 / threads), 132, shares);
        assert_eq!(room(256, 2), Room { blocks: 264, units: 132, a_unit: 2 });
        assert_eq!(room(256, 2).min(room(512, 2)), Room { blocks: 132, units: 132, a_unit: 1 });
        let most = |threads, shares| room(threads, shares).most_beside_next();
        assert_eq!([most(512, 1), most(1024, 1)], [132, 66]);
        assert_eq!([most(256, 2), most(512, 2), most(1024, 2)], [132, 66, 0]);
        assert_eq!([most(128, 5), most(256, 5)], [66, 0]);
    }

    /// Where `free` a multiprocessor is left, and a block takes `size`, whether all `blocks` find room by turns on what `pick` chooses.
    fn place(free: &mut [u32], size: u32, blocks: u32, mut pick: impl FnMut(&[usize]) -> usize) -> bool {
        (0..blocks).all(|_| {
            let fits: Vec<usize> = (0..free.len()).filter(|unit| free[*unit] >= size).collect();
            if fits.is_empty() {
                return false;
            }
            free[fits[pick(&fits)]] -= size;
            true
        })
    }

    #[test]
    fn the_first_call_that_lacks_room_finds_it() {
        const UNITS: u32 = 10;
        let mut rng = crate::reference::Rng::new(1);
        let below = |rng: &mut crate::reference::Rng, n: usize| rng.below(n as u64) as usize;
        for _ in 0..20_000 {
            let shares = 1 + below(&mut rng, 4) as u32;
            let places = 2 * shares;
            let (mut free, sizes) = (vec![places; UNITS as usize], [1, 2]);
            // What `most_beside_next` gives where such a block is the largest that fits: `places / size` of all shares.
            let most = |size: u32| Room::of(places / size * UNITS, UNITS, shares).most_beside_next();
            for _ in 0..2 * shares - 2 {
                let size = sizes[below(&mut rng, 2)];
                // Crowded on few multiprocessors, spread over all, or by chance.
                let how = below(&mut rng, 3);
                let least = free.clone();
                assert!(place(&mut free, size, most(size), |fits| match how {
                    0 => 0,
                    1 => (0..fits.len()).max_by_key(|at| least[fits[*at]]).unwrap(),
                    _ => below(&mut rng, fits.len()),
                }));
            }
            let size = sizes[below(&mut rng, 2)];
            assert!(place(&mut free, size, most(size), |fits| below(&mut rng, fits.len())), "{shares} shares");
        }
        // Two shares, whose one has two grids of small blocks here: the other's of one large block more would lack room.
        let mut free = [[3; 5], [1; 5]].concat();
        assert!(place(&mut free, 2, 5, |_| 0) && !place(&mut free, 2, 1, |_| 0));
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
                // Blocks of all of them on a multiprocessor.
                let beside: u32 = given.iter().chain([&parent]).map(|budget| budget.room(threads).a_unit).sum();
                assert!(132 * beside <= whole(threads).blocks, "{beside} after {split} splits");
            }
        }
        assert_eq!(given[0].rooms(), budget(1024, |threads| whole(threads).halved(1)).rooms());
        // Of a kernel that is not in the catalogue likewise.
        assert_eq!((given[0].shares(), parent.shares()), (2, 1 << 12));
        assert_eq!(given[0].room_of(264, 132), Room { blocks: 132, units: 132, a_unit: 1 });
        // Of a child what is left of it.
        let grandchild = given[0].half();
        given[0].give_half();
        assert_eq!([&given[0], &grandchild].map(|budget| budget.blocks(512)), [66, 66]);
        // Halved twelve times nothing is left of wide blocks.
        assert_eq!((parent.blocks(1), parent.blocks(1024), parent.fitting_threads(1024, 1)), (33, 0, 32));
        assert_eq!([parent.fitting_threads(4, 1), parent.fitting_threads(4, 34)], [4, 1]);
    }
}
