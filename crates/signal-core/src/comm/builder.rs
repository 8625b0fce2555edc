//! Creating communicators.

use std::marker::PhantomData;
use std::sync::Arc;

use crate::backend::{Backend, Link, MemoryKind};
use crate::error::{ApiMisuse, Error, Rendezvous, Result};
use crate::kernel::Kernel;
use crate::layout::{LAYOUT_VERSION, MAX_NUM_BLOCKS_UPPER_BOUND, SCRATCH_OFFSET, SIGNAL_START, Signal};
use crate::peer::prove_peer_with;
use crate::plan::{self, Topology};
use crate::settings::Settings;
use crate::signal::check_world;

use super::Communicator;
use super::fault::HostBlock;
use super::group::{BlockBudget, Group, Member, Room};

/// Options for creating communicators.
#[derive(Clone, Debug)]
pub struct Builder<B: Backend> {
    settings: Option<Settings>,
    share_devices: bool,
    backend: PhantomData<B>,
}

impl<B: Backend> Builder<B> {
    pub(crate) fn new() -> Self {
        Builder { settings: None, share_devices: false, backend: PhantomData }
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

    /// One communicator for each device, rank by rank, all in this process.
    ///
    /// # Errors
    /// As [`all_local_with`](Self::all_local_with), and bad `SIGNAL_*` variables.
    pub fn all_local(&self, devices: &[B::Device]) -> Result<Vec<Communicator<B>>> {
        let settings = match &self.settings {
            Some(settings) => settings.clone(),
            None => Settings::from_env()?,
        };
        let ranks: Vec<_> = devices.iter().map(|device| (device.clone(), settings.clone())).collect();
        self.all_local_with(&ranks)
    }

    /// One communicator for each (device, settings), as separate processes would bring them. They must agree.
    ///
    /// # Errors
    /// [`ApiMisuse::WorldSize`], [`ApiMisuse::SharedDevice`], [`ApiMisuse::Setting`], [`Rendezvous::Disagreement`],
    /// [`Error::Peer`] with the pair and the reason, [`Error::Image`], and errors of the driver, such as out of memory.
    pub fn all_local_with(&self, ranks: &[(B::Device, Settings)]) -> Result<Vec<Communicator<B>>> {
        let world = ranks.len();
        check_world(world)?;
        for (_, settings) in ranks {
            settings.validate()?;
        }
        self.check_sharing(ranks)?;
        let devices: Vec<_> = ranks.iter().map(|(device, _)| device.clone()).collect();
        B::check_local_group(&devices)?;
        let modules = ranks.iter().map(|(device, _)| B::load(device)).collect::<Result<Vec<_>>>()?;
        let agreements: Vec<_> = ranks.iter().zip(&modules).map(|((_, s), m)| agreement::<B>(s, m)).collect();
        compare(&agreements)?;
        let settings = &ranks[0].1;

        let services = ranks.iter().map(|(device, _)| B::create_stream(device)).collect::<Result<Vec<_>>>()?;
        let mut link = Link::SameDevice;
        for from in 0..world {
            for to in 0..world {
                let (near, far) = (&ranks[from].0, &ranks[to].0);
                if near != far {
                    link = link.max(prove_peer_with::<B>(near, far, &modules[from], &services[from], &services[to])?);
                }
            }
        }

        let mut members = Vec::with_capacity(world);
        for (rank, ((device, settings), service)) in ranks.iter().zip(services).enumerate() {
            let memory = B::allocate(device, SCRATCH_OFFSET + settings.scratch_bytes, MemoryKind::PeerVisible)?;
            Signal::init_signal_buffer::<B>(&service, &memory, SIGNAL_START, rank, world)?;
            members.push(Member { device: device.clone(), memory, host: HostBlock::new(device)?, service });
        }

        let infos: Vec<_> = ranks.iter().map(|(device, _)| B::describe(device)).collect();
        let max_threads = infos.iter().map(|info| info.max_block_threads).min().unwrap_or(1);
        let budget = BlockBudget::new(max_threads, |threads| room::<B>(ranks, &modules, threads))?;
        budget.check(settings.blocks.unwrap_or(1), settings.threads.unwrap_or(1))?;
        let topology = Topology { family: infos[0].family, link, world };
        let group = Arc::new(Group::new(members, topology, budget));
        let ticks = |rank: usize| {
            let ticks = settings.timeout.as_secs_f64() * infos[rank].clock_hz as f64;
            (ticks as u64).clamp(1, i64::MAX as u64)
        };
        Ok(modules
            .into_iter()
            .enumerate()
            .map(|(rank, module)| Communicator::new(group.clone(), rank, module, settings.clone(), ticks(rank)))
            .collect())
    }

    fn check_sharing(&self, ranks: &[(B::Device, Settings)]) -> Result<()> {
        if self.share_devices {
            return Ok(());
        }
        for (second, (device, _)) in ranks.iter().enumerate() {
            if let Some(first) = ranks[..second].iter().position(|(other, _)| other == device) {
                let device = B::describe(device).label();
                return Err(ApiMisuse::SharedDevice { first, second, device }.into());
            }
        }
        Ok(())
    }
}

/// Everything that ranks must share, by name (P4).
fn agreement<B: Backend>(settings: &Settings, module: &B::Module) -> Vec<(&'static str, String)> {
    let mut entries = vec![
        ("layout version", LAYOUT_VERSION.to_string()),
        ("kernel image", format!("{:016x}", B::fingerprint(module))),
        ("tuning table", format!("{:016x}", plan::table_fingerprint())),
    ];
    entries.extend(settings.entries());
    entries
}

fn compare(ranks: &[Vec<(&'static str, String)>]) -> Result<()> {
    for (rank, entries) in ranks.iter().enumerate().skip(1) {
        for ((name, ours), (_, theirs)) in ranks[0].iter().zip(entries) {
            if ours != theirs {
                let (ours, theirs) = (ours.clone(), theirs.clone());
                return Err(Error::from(Rendezvous::Disagreement { name, first: 0, ours, rank, theirs }));
            }
        }
    }
    Ok(())
}

/// The room for blocks of `threads` threads, of any kernel, on every rank. Ranks on one device divide it.
fn room<B: Backend>(ranks: &[(B::Device, Settings)], modules: &[B::Module], threads: u32) -> Result<Room> {
    let most = MAX_NUM_BLOCKS_UPPER_BOUND as u32;
    let mut room = Room { blocks: most, beside_next: most };
    for ((device, _), module) in ranks.iter().zip(modules) {
        let sharing = ranks.iter().filter(|(other, _)| other == device).count() as u32;
        let units = B::describe(device).compute_units;
        for kernel in Kernel::all() {
            room = room.min(Room::of(B::resident_blocks(module, kernel, threads)?, units, sharing));
        }
    }
    Ok(room)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_is_refused_by_name() {
        let ours = vec![("layout version", "1".to_owned()), ("SIGNAL_SCRATCH", "65536".to_owned())];
        let mut theirs = ours.clone();
        assert_eq!(compare(&[ours.clone(), theirs.clone()]), Ok(()));
        theirs[1].1 = "131072".to_owned();
        let expected = Rendezvous::Disagreement {
            name: "SIGNAL_SCRATCH",
            first: 0,
            ours: "65536".to_owned(),
            rank: 2,
            theirs: "131072".to_owned(),
        };
        assert_eq!(compare(&[ours.clone(), ours, theirs]), Err(expected.into()));
    }
}
