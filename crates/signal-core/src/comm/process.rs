//! Ranks that are processes: how they come together, and how they meet outside kernels.
//!
//! All that they tell each other passes through one function, [`Link::exchange`], in which every rank takes part also if it has
//! failed: so nobody waits for a rank that has an error to tell.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::backend::{Backend, Found, Link as Connection, MemoryKind};
use crate::error::{self, ApiMisuse, Error, Result};
use crate::layout::{MAX_GPUS, SCRATCH_OFFSET};
use crate::peer::{PATTERN_BYTES, read_pattern, write_pattern};
use crate::plan::Topology;
use crate::rendezvous::{Rendezvous, fds};
use crate::settings::Settings;
use crate::signal::{check_rank, check_world};

use super::builder::{agreement, check_sharing, compare, is_apart, rooms, shares, without_peers};
use super::group::{BlockBudget, Group, Ranks, lock};
use super::{Communicator, Member, Own, Symmetric};

/// This rank's way to the others.
#[derive(Debug)]
pub(crate) struct Processes<B: Backend> {
    rank: usize,
    link: Mutex<Link<B>>,
}

#[derive(Debug)]
pub(crate) struct Link<B: Backend> {
    rendezvous: Box<dyn Rendezvous>,
    /// Peers' parts of symmetric buffers. A peer may bring its part to a call for which this rank brings other memory, also by a
    /// graph, so they stay mapped until the peer has said that it has no use for its part any more; at the end for as long as
    /// this rank's graphs hold its Signal, with which they go.
    mapped: Arc<Mutex<Vec<Mapped<B>>>>,
    /// What this rank has yet to say so of.
    released: Arc<Mutex<Vec<u64>>>,
}

/// A peer's part of the symmetric buffer of one `alloc` call.
#[derive(Debug)]
struct Mapped<B: Backend> {
    owner: usize,
    call: u64,
    memory: B::Buffer,
}

/// Goes with this rank's part of a symmetric buffer.
struct Companion {
    call: u64,
    released: Arc<Mutex<Vec<u64>>>,
}

impl Drop for Companion {
    fn drop(&mut self) {
        lock(&self.released).push(self.call);
    }
}

impl<B: Backend> Processes<B> {
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Link<B>> {
        lock(&self.link)
    }
}

/// What a rank says at a meeting.
#[derive(Deserialize, Serialize)]
struct Message {
    /// What it came for.
    step: String,
    /// Of a type that the step knows; or an error as text.
    content: std::result::Result<Vec<u8>, String>,
}

/// What a rank says when it brings symmetric memory.
#[derive(Deserialize, Serialize)]
struct Bringing<T> {
    content: T,
    /// Earlier calls whose memory it has no use for any more.
    released: Vec<u64>,
}

/// Where a range that is registered begins in its allocation, and the bytes of that, or why others cannot map it.
type Place = std::result::Result<(usize, usize), String>;

impl<B: Backend> Link<B> {
    fn new(rendezvous: Box<dyn Rendezvous>) -> Self {
        Link { rendezvous, mapped: Arc::default(), released: Arc::default() }
    }

    /// Tells the others what this rank has, or its error; gives what all have, by rank.
    ///
    /// # Errors
    /// The own one; [`Failed`](error::Rendezvous::Failed) with that of the first other rank that has one;
    /// [`Disagreement`](error::Rendezvous::Disagreement) where ranks came for different things; those of the rendezvous.
    pub(crate) fn exchange<T>(&mut self, step: &'static str, own: Result<T>, patience: Duration) -> Result<Vec<T>>
    where
        T: DeserializeOwned + Serialize,
    {
        let rank = self.rendezvous.rank();
        let bytes = |encoded: postcard::Result<Vec<u8>>| {
            encoded.map_err(|error| Error::from(error::Rendezvous::System { why: error.to_string() }))
        };
        let own = own.and_then(|own| bytes(postcard::to_stdvec(&own)));
        let content = own.clone().map_err(|error| error.to_string());
        let message = bytes(postcard::to_stdvec(&Message { step: step.to_owned(), content }))?;
        let gathered = self.rendezvous.gather(&message, patience);
        own?;

        let protocol = |peer, why: postcard::Error| error::Rendezvous::Protocol { rank, peer, why: why.to_string() };
        let mut messages = Vec::new();
        for (peer, bytes) in gathered?.iter().enumerate() {
            messages.push(postcard::from_bytes::<Message>(bytes).map_err(|error| protocol(peer, error))?);
        }
        let steps: Vec<_> = messages.iter().map(|message| vec![message.step.as_str()]).collect();
        compare(&["collective call"], &steps)?;
        let content = |(peer, message): (usize, Message)| {
            let bytes = message.content.map_err(|why| error::Rendezvous::Failed { rank: peer, why })?;
            Ok(postcard::from_bytes(&bytes).map_err(|error| protocol(peer, error))?)
        };
        messages.into_iter().enumerate().map(content).collect()
    }

    /// The `call`th allocation of symmetric memory, of `bytes`, for which `capacity` is taken. Gives all ranks' parts as this
    /// process sees them, and where each rank sees this one's.
    ///
    /// `streams` are those on which calls may run that use what is let go of.
    pub(crate) fn allocate(
        &mut self,
        device: &B::Device,
        call: u64,
        (bytes, capacity): (usize, usize),
        streams: &[B::Stream],
        patience: Duration,
    ) -> Result<(Vec<B::Buffer>, [u64; MAX_GPUS])> {
        let own = B::allocate(device, capacity, MemoryKind::Shared);
        let said = own.as_ref().map(|_| bytes).map_err(Error::clone);
        check_equal(&self.exchange_and_let_go("alloc", said, streams, patience)?)?;
        let (memory, seen) = self.share(device, own?, MemoryKind::Shared, patience)?;
        let rank = self.rendezvous.rank();
        B::attach(&memory[rank], Box::new(Companion { call, released: self.released.clone() }));
        let peers = memory.iter().enumerate().filter(|(owner, _)| *owner != rank);
        lock(&self.mapped).extend(peers.map(|(owner, memory)| Mapped { owner, call, memory: memory.clone() }));
        Ok((memory, seen))
    }

    /// [`exchange`](Self::exchange), in which ranks tell each other also what they have no use for any more. Lets go of that, once the calls that
    /// are now on `streams` have ended.
    fn exchange_and_let_go<T>(
        &mut self,
        step: &'static str,
        own: Result<T>,
        streams: &[B::Stream],
        patience: Duration,
    ) -> Result<Vec<T>>
    where
        T: DeserializeOwned + Serialize,
    {
        let released = std::mem::take(&mut *lock(&self.released));
        let said = own.map(|content| Bringing { content, released: released.clone() });
        let said = self.exchange(step, said, patience).inspect_err(|_| {
            // Nobody has taken note of it.
            lock(&self.released).extend(released);
        })?;
        lock(&self.mapped).retain(|mapped| {
            let goes = said.get(mapped.owner).is_some_and(|owner| owner.released.contains(&mapped.call));
            streams.iter().filter(|_| goes).for_each(|stream| B::keep_until(&mapped.memory, stream));
            !goes
        });
        Ok(said.into_iter().map(|said| said.content).collect())
    }

    /// The `call`th allocation is one of the user's of `comm`, of which a range is `found` to be for other processes, or not. Gives it as
    /// symmetric memory where all of them map it.
    ///
    /// # Safety
    /// See [`Communicator::register`].
    pub(super) unsafe fn register(
        &mut self,
        comm: &Member<B>,
        call: u64,
        (address, bytes): (u64, usize),
        found: Result<Found>,
        (streams, patience): (&[B::Stream], Duration),
    ) -> Result<std::result::Result<Arc<Symmetric<B>>, String>> {
        let (rank, device) = (comm.rank, comm.device());
        let exported = found.and_then(|found| match found {
            Ok((start, total)) => {
                // SAFETY: the driver knows the allocation, which the caller keeps; the handle goes before this returns.
                let whole = unsafe { B::borrow(device, start, total) };
                Ok((B::export(&whole)?, Ok(((address - start) as usize, total))))
            }
            // Each rank sends a descriptor, since all send equally many.
            Err(why) => {
                let nothing = File::open("/dev/null").map_err(|e| error::Rendezvous::System { why: e.to_string() })?;
                Ok((OwnedFd::from(nothing), Err(why)))
            }
        });
        let place = exported.as_ref().map(|(_, place): &(_, Place)| place.clone()).map_err(Error::clone);
        let places = self.exchange_and_let_go("register", place, streams, patience)?;
        let (descriptor, exported) = exported?;
        let descriptors = fds::exchange(&mut *self.rendezvous, &[descriptor.as_fd()], patience)?;
        // Where this rank sees each other's range, or why it does not.
        let (mut mapped, mut seen) = (Vec::new(), Vec::new());
        for (owner, (theirs, mut descriptors)) in places.into_iter().zip(descriptors).enumerate() {
            let map = |(offset, total)| {
                let descriptor = descriptors.pop().filter(|_| offset < total).ok_or("what came fits no memory")?;
                let memory = B::import(device, descriptor, total, MemoryKind::Shared).map_err(|e| e.to_string())?;
                let seen = B::address(&memory) + offset as u64;
                mapped.push(Mapped { owner, call, memory });
                Ok(seen)
            };
            seen.push(if owner == rank { theirs.map(|_| address) } else { theirs.and_then(map) });
        }
        let seen: Vec<Vec<std::result::Result<u64, String>>> = self.exchange("register: map", Ok(seen), patience)?;
        lock(&self.mapped).extend(mapped);

        let mut places = [0; MAX_GPUS];
        for (other, (place, theirs)) in places.iter_mut().zip(seen).enumerate() {
            match address_for(rank, theirs, other)? {
                Ok(seen) => *place = seen,
                Err(why) if exported.is_err() => return Ok(Err(why)),
                Err(why) => {
                    // Others may map it.
                    lock(&self.released).push(call);
                    return Ok(Err(format!("rank {other} cannot map it: {why}")));
                }
            }
        }
        // SAFETY: passed on to the caller.
        let buffer = unsafe { Symmetric::borrowed(comm, address, bytes, Some(places)) };
        B::attach(buffer.memory(rank), Box::new(Companion { call, released: self.released.clone() }));
        Ok(Ok(buffer))
    }

    /// [`allocate`](Self::allocate) where peers do not reach the memory of this rank's device: they only meet.
    pub(crate) fn allocate_own(
        &mut self,
        device: &B::Device,
        (bytes, capacity): (usize, usize),
        patience: Duration,
    ) -> Result<B::Buffer> {
        let own = B::allocate(device, capacity, MemoryKind::Device);
        let said = own.as_ref().map(|_| bytes).map_err(Error::clone);
        check_equal(&self.exchange("alloc", said, patience)?)?;
        own
    }

    /// Keeps what is mapped until the calls that are now on `streams` have ended.
    pub(crate) fn keep_until(&self, streams: &[B::Stream]) {
        for mapped in &*lock(&self.mapped) {
            streams.iter().for_each(|stream| B::keep_until(&mapped.memory, stream));
        }
    }

    /// Shares this rank's `own` memory, of a `kind` for that. Gives all ranks' as this process sees them, and where each rank sees this one's.
    fn share(
        &mut self,
        device: &B::Device,
        own: B::Buffer,
        kind: MemoryKind,
        patience: Duration,
    ) -> Result<(Vec<B::Buffer>, [u64; MAX_GPUS])> {
        let rank = self.rendezvous.rank();
        let exported = B::export(&own);
        self.exchange("export", exported.as_ref().map(drop).map_err(Error::clone), patience)?;
        let descriptors = fds::exchange(&mut *self.rendezvous, &[exported?.as_fd()], patience)?;
        let imported = import::<B>(device, rank, (own, kind), descriptors);
        let addresses = imported.as_ref().map(|all| all.iter().map(B::address).collect::<Vec<_>>());
        let addresses = self.exchange("import", addresses.map_err(Error::clone), patience)?;
        let mut seen = [0; MAX_GPUS];
        for (other, (seen, theirs)) in seen.iter_mut().zip(addresses).enumerate() {
            *seen = address_for(rank, theirs, other)?;
        }
        Ok((imported?, seen))
    }
}

/// Of the addresses that `peer` tells, one for each rank, that of this `rank`.
fn address_for<T>(rank: usize, addresses: Vec<T>, peer: usize) -> Result<T> {
    let missing = || error::Rendezvous::Protocol { rank, peer, why: "addresses are missing".to_owned() };
    Ok(addresses.into_iter().nth(rank).ok_or_else(missing)?)
}

/// Refuses the first rank that allocates more or less than rank 0, by the bytes of each.
fn check_equal(bytes: &[usize]) -> Result<()> {
    match bytes.iter().position(|other| *other != bytes[0]) {
        None => Ok(()),
        Some(rank) => Err(ApiMisuse::UnequalAlloc { rank, bytes: bytes[rank], first: 0, expected: bytes[0] }.into()),
    }
}

fn import<B: Backend>(
    device: &B::Device,
    rank: usize,
    (own, kind): (B::Buffer, MemoryKind),
    descriptors: Vec<Vec<OwnedFd>>,
) -> Result<Vec<B::Buffer>> {
    let bytes = B::bytes(&own);
    let mut memory = Vec::new();
    for (other, mut theirs) in descriptors.into_iter().enumerate() {
        let why = || "no descriptor came".to_owned();
        let missing = || error::Rendezvous::Protocol { rank, peer: other, why: why() };
        let descriptor = theirs.pop().ok_or_else(missing)?;
        memory.push(if other == rank { own.clone() } else { B::import(device, descriptor, bytes, kind)? });
    }
    Ok(memory)
}

/// What a rank says of itself first.
#[derive(Deserialize, Serialize)]
struct Hello {
    /// What all ranks must share, in the order of [`agreement`].
    agreement: Vec<String>,
    /// [`DeviceInfo::uuid`](crate::DeviceInfo::uuid).
    device: String,
    max_block_threads: u32,
}

/// See [`Builder::connect`](super::Builder::connect). A rank that is one of a larger group already brings a `budget` of blocks, and
/// all others of this group bring the same.
pub(super) fn connect<B: Backend>(
    device: &B::Device,
    prepared: Result<(Settings, B::Module)>,
    share_devices: bool,
    budget: Option<BlockBudget>,
    (rendezvous, patience): (Box<dyn Rendezvous>, Duration),
) -> Result<Communicator<B>> {
    let (rank, world) = (rendezvous.rank(), rendezvous.world_size());
    check_world(world)?;
    check_rank(rank, world)?;
    let mut link = Link::<B>::new(rendezvous);

    let info = B::describe(device);
    let mut names = Vec::new();
    let hello = prepared.as_ref().map_err(Error::clone).map(|(settings, module)| {
        let (all_names, mut agreement): (_, Vec<_>) = agreement::<B>(settings, module).into_iter().unzip();
        names = all_names;
        names.push("machine");
        agreement.push(machine());
        let max_block_threads = budget.as_ref().map_or(info.max_block_threads, BlockBudget::max_threads);
        Hello { agreement, device: info.uuid.clone(), max_block_threads }
    });
    let hellos = link.exchange("connect", hello, patience)?;
    let (settings, module) = prepared?;
    let agreements: Vec<_> = hellos.iter().map(|hello| hello.agreement.clone()).collect();
    compare(&names, &agreements)?;
    let devices: Vec<&str> = hellos.iter().map(|hello| hello.device.as_str()).collect();
    check_sharing(&devices, share_devices, |device| (*device).to_owned())?;

    // From here on ranks wait for each other's results, whatever they are.
    let max_threads = hellos.iter().map(|hello| hello.max_block_threads).min().unwrap_or(1);
    let sharing = devices.iter().filter(|other| **other == info.uuid).count();
    if sharing > 1 && B::NAME != "host" {
        tracing::warn!(device = info.label(), "several processes share a device: they take turns unless MPS runs");
    }
    let prepared = B::create_stream(device).and_then(|service| {
        let rooms = match &budget {
            Some(budget) => budget.rooms(),
            None => rooms::<B>(device, &module, max_threads, shares(&settings, sharing), &settings)?,
        };
        Ok((rooms, Own::<B>::new(device, module, service)?))
    });
    let rooms = prepared.as_ref().map(|(rooms, _)| rooms.clone()).map_err(Error::clone);
    let most = devices.iter().map(|device| devices.iter().filter(|other| *other == device).count()).max().unwrap_or(1);
    let shares = budget.as_ref().map_or(shares(&settings, most), BlockBudget::shares);
    let budget = BlockBudget::new(max_threads, &link.exchange("connect: blocks", rooms, patience)?, shares);
    budget.check(settings.blocks.unwrap_or(1), settings.threads.unwrap_or(1))?;
    let (_, own) = prepared?;

    let mut meet = |kind| meet(&own, &mut link, &settings, &devices, kind);
    let met = if is_apart(&settings, world) {
        meet(MemoryKind::SharedHost)?
    } else {
        match meet(MemoryKind::Shared)? {
            Err(refusal) => without_peers(&settings, refusal).and_then(|_| meet(MemoryKind::SharedHost))?,
            met => met,
        }
    };
    let (memory, connection) = met?;
    B::attach(&memory[rank], Box::new(link.mapped.clone()));

    let topology = Topology::new(&info, connection, world);
    let ranks = Ranks::Apart(Processes { rank, link: Mutex::new(link) });
    Communicator::new(Arc::new(Group::new(memory, ranks, topology, budget)), rank, own, settings)
}

/// Shares memory of a `kind` with the other ranks, and proves by data that all reach it. Gives all ranks' and the slowest of what connects them,
/// or the refusal if some rank does not reach another: its own, or [`Failed`](error::Rendezvous::Failed) with that of another.
fn meet<B: Backend>(
    own: &Own<B>,
    link: &mut Link<B>,
    settings: &Settings,
    devices: &[&str],
    kind: MemoryKind,
) -> Result<Result<(Vec<B::Buffer>, Connection)>> {
    let (rank, world, patience) = (link.rendezvous.rank(), devices.len(), settings.timeout);
    // A device that this process does not see: the data will show whether it is reached.
    let near = |device: &&str| B::find(&own.device, device).map_or(Ok(Connection::Pcie), |far| reach::<B>(own, &far));
    let connection = match kind {
        MemoryKind::SharedHost => Ok(Connection::Pinned),
        _ => devices.iter().map(near).try_fold(Connection::SameDevice, |slowest, link| Ok(slowest.max(link?))),
    };
    let connection = match link.exchange("connect: reach", connection, patience) {
        Ok(connection) => connection.into_iter().max().unwrap_or(Connection::SameDevice),
        Err(error) => return refusal(error).map(Err),
    };

    let memory = own.allocate(kind, settings, rank, world);
    link.exchange("connect: memory", memory.as_ref().map(drop).map_err(Error::clone), patience)?;
    let memory = memory?;
    let reached = link.share(&own.device, memory, kind, patience).and_then(|(memory, _)| {
        link.exchange("connect: write", write_to_all(own, devices, &memory, rank), patience)?;
        link.exchange("connect: read", read_from_all(own, &memory[rank], devices, rank), patience)?;
        Ok((memory, connection))
    });
    reached.map(Ok).or_else(|error| refusal(error).map(Err))
}

/// What connects this rank's device with one that it sees.
fn reach<B: Backend>(own: &Own<B>, far: &B::Device) -> Result<Connection> {
    let access = B::peer_access(&own.device, far)?;
    match access.refusal {
        None => Ok(access.link),
        Some(why) => Err(peer_error::<B>(&own.device, &B::describe(far).uuid, why)),
    }
}

/// The error of a step of [`meet`], if it may mean that some device does not reach another's memory. All ranks find the same: those that did
/// not fail themselves are told that another did.
fn refusal(error: Error) -> Result<Error> {
    match error {
        Error::Peer { .. } | Error::Driver { .. } | Error::Rendezvous(error::Rendezvous::Failed { .. }) => Ok(error),
        _ => Err(error),
    }
}

/// Writes a pattern to every other rank.
fn write_to_all<B: Backend>(own: &Own<B>, devices: &[&str], memory: &[B::Buffer], rank: usize) -> Result<()> {
    for (other, theirs) in memory.iter().enumerate().filter(|(other, _)| *other != rank) {
        let refuse = |why| peer_error::<B>(&own.device, devices[other], why);
        let offset = SCRATCH_OFFSET + rank * PATTERN_BYTES;
        write_pattern::<B>(&own.service, &own.module, theirs, offset, seed(rank, other))
            .map_err(|e| e.into_error(refuse))?;
    }
    Ok(())
}

/// Whether what the others wrote has arrived.
fn read_from_all<B: Backend>(own: &Own<B>, memory: &B::Buffer, devices: &[&str], rank: usize) -> Result<()> {
    for other in (0..devices.len()).filter(|other| *other != rank) {
        let offset = SCRATCH_OFFSET + other * PATTERN_BYTES;
        read_pattern::<B>(&own.service, memory, offset, seed(other, rank)).map_err(|failed| {
            failed.into_error(|why| peer_error::<B>(&own.device, devices[other], format!("from there {why}")))
        })?;
    }
    Ok(())
}

fn peer_error<B: Backend>(from: &B::Device, to: &str, why: String) -> Error {
    let to = B::find(from, to).map_or_else(|| to.to_owned(), |device| B::describe(&device).label());
    Error::Peer { from: B::describe(from).label(), to, why }
}

/// Of the pattern that one rank writes into another's memory.
fn seed(from: usize, to: usize) -> u32 {
    0x5eed_0100 + (from * MAX_GPUS + to) as u32
}

/// The identity of the running system: ranks on two machines have no memory to share.
fn machine() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| "unknown".to_owned(), |id| id.trim().to_owned())
}
