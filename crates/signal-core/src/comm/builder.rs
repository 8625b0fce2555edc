//! Creating communicators.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::backend::{Backend, DeviceInfo, Link, MemoryKind};
use crate::error::{self, ApiMisuse, Error, Result};
use crate::kernel::Kernel;
use crate::layout::{LAYOUT_VERSION, MAX_NUM_BLOCKS_UPPER_BOUND, NUM_BARRIER_DOMAINS};
use crate::peer::prove_peer_with;
use crate::plan::{self, Topology};
use crate::rendezvous::Rendezvous;
use crate::settings::Settings;
use crate::signal::check_world;
use crate::tuning::Tuning;

use super::group::{BlockBudget, Group, Here, Ranks, Room};
use super::{Communicator, Own, process};

/// Options for creating communicators.
#[derive(Clone, Debug)]
pub struct Builder<B: Backend> {
    settings: Option<Settings>,
    share_devices: bool,
    max_blocks: Option<u32>,
    tuning: Option<Arc<Tuning>>,
    backend: PhantomData<B>,
}

impl<B: Backend> Builder<B> {
    pub(crate) fn new() -> Self {
        Builder { settings: None, share_devices: false, max_blocks: None, tuning: None, backend: PhantomData }
    }

    /// The settings of every rank; without, [`Settings::from_env`].
    #[must_use]
    pub fn settings(mut self, settings: Settings) -> Self {
        self.settings = Some(settings);
        self
    }

    /// Allows one device to stand for several ranks. They divide the blocks that fit on it, and every rank needs a
    /// stream of its own.
    #[must_use]
    pub fn share_devices(mut self, share: bool) -> Self {
        self.share_devices = share;
        self
    }

    /// The most blocks of a call's grid, instead of [`Settings::max_blocks`].
    #[must_use]
    pub fn max_blocks(mut self, blocks: u32) -> Self {
        self.max_blocks = Some(blocks);
        self
    }

    /// Plans that were measured on such devices, instead of [`Settings::tuning`].
    #[must_use]
    pub fn tuning(mut self, tuning: Tuning) -> Self {
        self.tuning = Some(Arc::new(tuning));
        self
    }

    /// One communicator for each device, rank by rank, all in this process.
    ///
    /// # Errors
    /// As [`all_local_with`](Self::all_local_with), and bad `SIGNAL_*` variables.
    pub fn all_local(&self, devices: &[B::Device]) -> Result<Vec<Communicator<B>>> {
        let settings = self.effective_settings()?;
        let ranks: Vec<_> = devices.iter().map(|device| (device.clone(), settings.clone())).collect();
        self.all_local_with(&ranks)
    }

    /// One communicator for each (device, settings), as separate processes would bring them. They must agree.
    ///
    /// # Errors
    /// [`ApiMisuse::WorldSize`], [`ApiMisuse::SharedDevice`], [`ApiMisuse::Setting`], [`ApiMisuse::Grid`], [`Disagreement`](error::Rendezvous::Disagreement),
    /// [`Error::Peer`] with the pair and the reason where [`Settings::peer_to_peer`] insists, [`Error::Image`], and errors of the driver, such as out of memory.
    pub fn all_local_with(&self, ranks: &[(B::Device, Settings)]) -> Result<Vec<Communicator<B>>> {
        let world = ranks.len();
        check_world(world)?;
        let ranks: Vec<_> = ranks.iter().map(|(device, settings)| (device.clone(), self.with_own(settings))).collect();
        for (_, settings) in &ranks {
            settings.validate()?;
        }
        let devices: Vec<_> = ranks.iter().map(|(device, _)| device.clone()).collect();
        check_sharing(&devices, self.share_devices, |device| B::describe(device).label())?;
        B::check_local_group(&devices)?;
        let modules = ranks.iter().map(|(device, _)| B::load(device)).collect::<Result<Vec<_>>>()?;
        let agreements = ranks.iter().zip(&modules).map(|((_, s), m)| agreement::<B>(s, m).into_iter().unzip());
        let (names, values): (Vec<Vec<_>>, Vec<Vec<String>>) = agreements.unzip();
        compare(&names[0], &values)?;
        let settings = &ranks[0].1;

        let infos: Vec<_> = devices.iter().map(B::describe).collect();
        check_tuning(settings, &infos[0])?;
        let max_threads = infos.iter().map(|info| info.max_block_threads).min().unwrap_or(1);
        let sharing = |device: &B::Device| devices.iter().filter(|other| *other == device).count();
        let rooms = ranks.iter().zip(&modules).map(|((device, _), module)| {
            rooms::<B>(device, module, max_threads, shares(settings, sharing(device)), settings)
        });
        let most = devices.iter().map(sharing).max().unwrap_or(1);
        let budget = BlockBudget::new(max_threads, &rooms.collect::<Result<Vec<_>>>()?, shares(settings, most));
        budget.check(settings.blocks.unwrap_or(1), settings.threads.unwrap_or(1))?;

        let seats = devices.into_iter().zip(modules).map(|(device, module)| {
            let service = B::create_stream(&device)?;
            Ok(Seat { device, module, service })
        });
        let seats = seats.collect::<Result<Vec<_>>>()?;
        let link = connection(settings, &seats)?;
        let topology = Topology::new(&infos[0], link, world);
        seat(seats, settings, topology, budget)
    }

    /// This process's rank of a group whose ranks are processes, on a device that it drives. Collective: every rank calls it,
    /// with a rendezvous of the same group, and waits for the others as long as for a call's peers
    /// ([`Settings::timeout`]).
    ///
    /// Devices are told apart by identity and may be given in any order; each process need not see the others'. Two processes on
    /// one GPU ([`share_devices`](Self::share_devices)) take turns on it unless MPS runs: results are right, and slow.
    ///
    /// A process that ends, in whatever way, pulls no memory from under its peers: what is shared lives until the last that maps
    /// it is gone. Dropping a communicator therefore waits for nobody.
    ///
    /// # Errors
    /// [`Error::Rendezvous`] with the ranks that did not come, that failed and why, or that differ and in what;
    /// [`ApiMisuse::SharedDevice`]; [`Error::Peer`] with the pair and the reason where [`Settings::peer_to_peer`] insists; [`Error::Image`], and errors of the driver.
    pub fn connect(&self, device: &B::Device, rendezvous: impl Rendezvous + 'static) -> Result<Communicator<B>> {
        let settings = self.effective_settings();
        let patience = settings.as_ref().map_or(Settings::default().timeout, |settings| settings.timeout);
        let prepared = settings.and_then(|settings| {
            settings.validate()?;
            check_tuning(&settings, &B::describe(device))?;
            Ok((settings, B::load(device)?))
        });
        process::connect(device, prepared, self.share_devices, None, (Box::new(rendezvous), patience))
    }

    fn effective_settings(&self) -> Result<Settings> {
        self.settings.clone().map_or_else(Settings::from_env, Ok).map(|settings| self.with_own(&settings))
    }

    /// Settings with what was asked for here.
    fn with_own(&self, settings: &Settings) -> Settings {
        let tuning = self.tuning.as_ref().or(settings.tuning.as_ref()).cloned();
        Settings { max_blocks: self.max_blocks.or(settings.max_blocks), tuning, ..settings.clone() }
    }
}

/// Refuses plans that were measured elsewhere.
pub(super) fn check_tuning(settings: &Settings, device: &DeviceInfo) -> Result<()> {
    settings.tuning.as_ref().map_or(Ok(()), |tuning| tuning.check_device(device))
}

/// What a rank to be brings.
#[derive(Debug)]
pub(super) struct Seat<B: Backend> {
    pub(super) device: B::Device,
    pub(super) module: B::Module,
    pub(super) service: B::Stream,
}

/// What connects ranks of this process: the slowest way between the devices of two where each reaches each, as data proves.
pub(super) fn connection<B: Backend>(settings: &Settings, seats: &[Seat<B>]) -> Result<Link> {
    if is_apart(settings, seats.len()) {
        return Ok(Link::Pinned);
    }
    let mut link = Link::SameDevice;
    for near in seats {
        for far in seats.iter().filter(|far| far.device != near.device) {
            let (pair, kind) = ((&near.device, &far.device), MemoryKind::PeerVisible);
            match prove_peer_with::<B>(pair, kind, &near.module, &near.service, &far.service) {
                Ok(found) => link = link.max(found),
                Err(refusal @ Error::Peer { .. }) => return without_peers(settings, refusal),
                Err(error) => return Err(error),
            }
        }
    }
    Ok(link)
}

/// Whether ranks are to meet in the host's memory, whatever connects their devices.
pub(super) fn is_apart(settings: &Settings, world: usize) -> bool {
    settings.peer_to_peer == Some(false) && world > 1
}

/// What connects ranks whose devices do not reach each other, unless it is forbidden.
pub(super) fn without_peers(settings: &Settings, refusal: Error) -> Result<Link> {
    if settings.peer_to_peer == Some(true) {
        return Err(refusal);
    }
    tracing::warn!(%refusal, "ranks share memory of the host instead of their devices', which is slow");
    Ok(Link::Pinned)
}

/// A group of ranks of this process.
pub(super) fn seat<B: Backend>(
    seats: Vec<Seat<B>>,
    settings: &Settings,
    topology: Topology,
    budget: BlockBudget,
) -> Result<Vec<Communicator<B>>> {
    let world = seats.len();
    let kind = if topology.link == Link::Pinned { MemoryKind::SharedHost } else { MemoryKind::PeerVisible };
    let (mut devices, mut owns, mut memory) = (Vec::new(), Vec::new(), Vec::new());
    for (rank, Seat { device, module, service }) in seats.into_iter().enumerate() {
        let own = Own::<B>::new(&device, module, service)?;
        memory.push(own.allocate(kind, settings, rank, world)?);
        owns.push(own);
        devices.push(device);
    }
    let group = Arc::new(Group::new(memory, Ranks::Here(Here::new(devices)), topology, budget));
    let ranks = owns.into_iter().enumerate();
    ranks.map(|(rank, own)| Communicator::new(group.clone(), rank, own, settings.clone())).collect()
}

/// Refuses a device that stands for several ranks, unless `share` allows it. `name` is for the message.
pub(super) fn check_sharing<D: PartialEq>(devices: &[D], share: bool, name: impl Fn(&D) -> String) -> Result<()> {
    for (second, device) in devices.iter().enumerate().filter(|_| !share) {
        if let Some(first) = devices[..second].iter().position(|other| other == device) {
            return Err(ApiMisuse::SharedDevice { first, second, device: name(device) }.into());
        }
    }
    Ok(())
}

/// Everything that ranks must share, by name (P4).
pub(super) fn agreement<B: Backend>(settings: &Settings, module: &B::Module) -> Vec<(&'static str, String)> {
    let mut entries = vec![
        ("version", env!("CARGO_PKG_VERSION").to_owned()),
        ("layout version", LAYOUT_VERSION.to_string()),
        ("backend", B::NAME.to_owned()),
        ("kernel image", format!("{:016x}", B::fingerprint(module))),
        // Of another architecture it runs other instructions, and waves of another size.
        ("device code", B::code(module)),
        ("tuning table", format!("{:016x}", plan::table_fingerprint())),
    ];
    entries.extend(settings.entries());
    entries
}

/// Refuses the first difference from what rank 0 has.
pub(super) fn compare<V: AsRef<str>>(names: &[&'static str], ranks: &[Vec<V>]) -> Result<()> {
    for (rank, values) in ranks.iter().enumerate().skip(1) {
        for (at, &name) in names.iter().enumerate() {
            let value = |values: &Vec<V>| values.get(at).map_or("nothing", |value| value.as_ref()).to_owned();
            let (ours, theirs) = (value(&ranks[0]), value(values));
            if ours != theirs {
                return Err(Error::from(error::Rendezvous::Disagreement { name, first: 0, ours, rank, theirs }));
            }
        }
    }
    Ok(())
}

/// Streams of calls that divide a device of `sharing` ranks.
pub(super) fn shares(settings: &Settings, sharing: usize) -> u32 {
    (sharing * if settings.domains { NUM_BARRIER_DOMAINS } else { 1 }) as u32
}

/// The rooms for each class of blocks, of any kernel, on one device, which so many shares divide.
pub(super) fn rooms<B: Backend>(
    device: &B::Device,
    module: &B::Module,
    max_threads: u32,
    shares: u32,
    settings: &Settings,
) -> Result<Vec<Room>> {
    let units = B::describe(device).compute_units;
    let most = settings.max_blocks.unwrap_or(u32::MAX).min(MAX_NUM_BLOCKS_UPPER_BOUND as u32);
    BlockBudget::classes(max_threads)
        .map(|threads| {
            Kernel::all().try_fold(Room { blocks: most, units, a_unit: u32::MAX }, |room, kernel| {
                Ok(room.min(Room::of(B::resident_blocks(module, kernel.into(), threads)?, units, shares)))
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_refused_by_name() {
        let names = ["layout version", "SIGNAL_SCRATCH"];
        let ours = vec!["1", "65536"];
        let mut theirs = ours.clone();
        assert_eq!(compare(&names, &[ours.clone(), theirs.clone()]), Ok(()));
        let refused = |theirs, found: &str| {
            let expected = error::Rendezvous::Disagreement {
                name: "SIGNAL_SCRATCH",
                first: 0,
                ours: "65536".to_owned(),
                rank: 2,
                theirs: found.to_owned(),
            };
            assert_eq!(compare(&names, &[ours.clone(), ours.clone(), theirs]), Err(expected.into()));
        };
        theirs[1] = "131072";
        refused(theirs, "131072");
        refused(vec!["1"], "nothing");
    }
}
