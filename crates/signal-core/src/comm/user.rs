//! Kernels of a user, launched on a communicator's Signal with the checks that the library's own calls have.

use std::sync::Arc;

use bytemuck::{Pod, bytes_of};

use crate::backend::{Backend, Entry, Launch};
use crate::dtype::{Dtype, ReduceOp};
use crate::error::{ApiMisuse, Error, Image, Result};
use crate::kernel::{FLAG_ALLOW_NEXT, GroupParams};
use crate::layout::MAX_GPUS;

use super::Member;
use super::all_reduce::check_lamport;
use super::call::{ALL_RANKS, Call};
use super::check::Description;
use super::domain::callers;
use super::group::{BlockBudget, Room};

/// The entry that marks an image of this version of `include/signal/device.h`: `SIGNAL_DEVICE_ABI` there.
const DEVICE_ABI: &str = "signal_device_abi_1";

/// A kernel of a user, loaded on one device: compiled with `signal/device.h`, which says how to write one. Launched by
/// [`Call::launch_kernel`].
#[derive(Clone, Debug)]
pub struct UserKernel<B: Backend> {
    name: Arc<str>,
    device: B::Device,
    module: B::Module,
    entry: Entry,
    /// Blocks that can be resident on the device, for blocks of up to 1, 2, 4, ... threads.
    resident: Arc<[u32]>,
    units: u32,
}

impl<B: Backend> UserKernel<B> {
    /// Loads an image of a user on a device, and those of its kernels that have these names.
    ///
    /// An image is what the driver loads: a fat binary, a cubin or PTX for CUDA; a code object or a bundle of them for ROCm; the table that
    /// `SIGNAL_IMAGE` makes for the backend on CPU threads. It stays loaded for the rest of the program, so load it once a device. Load it before
    /// calls are under way: a driver may wait for running kernels meanwhile, and these for kernels that have yet to be launched.
    ///
    /// # Errors
    /// [`Image::Kernel`] for a name that it lacks, [`Image::Abi`], [`Image::Broken`], [`Image::Arch`]; errors of the driver.
    pub fn load<const N: usize>(device: &B::Device, image: &B::Image, names: [&str; N]) -> Result<[Self; N]> {
        let unmarked = |error| match error {
            Error::Image(Image::Kernel { kernel, .. }) if kernel == DEVICE_ABI => {
                Image::Abi { mark: DEVICE_ABI }.into()
            }
            error => error,
        };
        Self::load_with(device, image, names, &[DEVICE_ABI]).map_err(unmarked)
    }

    /// Without asking for the mark, for tests that launch the library's own kernels.
    #[doc(hidden)]
    pub fn load_unmarked<const N: usize>(device: &B::Device, image: &B::Image, names: [&str; N]) -> Result<[Self; N]> {
        Self::load_with(device, image, names, &[])
    }

    fn load_with<const N: usize>(
        device: &B::Device,
        image: &B::Image,
        names: [&str; N],
        marks: &[&str],
    ) -> Result<[Self; N]> {
        let module = B::load_image(device, image, &[&names, marks].concat())?;
        let info = B::describe(device);
        let resident = |entry| -> Result<Arc<[u32]>> {
            let classes = BlockBudget::classes(info.max_block_threads);
            classes.map(|threads| B::resident_blocks(&module, Entry(entry), threads)).collect()
        };
        let resident = (0..N).map(resident).collect::<Result<Vec<_>>>()?;
        Ok(std::array::from_fn(|entry| UserKernel {
            name: names[entry].into(),
            device: device.clone(),
            module: module.clone(),
            entry: Entry(entry),
            resident: resident[entry].clone(),
            units: info.compute_units,
        }))
    }

    /// Its entry name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What code the device took from the image.
    pub fn code(&self) -> String {
        B::code(&self.module)
    }
}

/// How a user's kernel is launched. Every rank passes the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct UserLaunch {
    /// Blocks of the grid.
    pub blocks: u32,
    /// Threads of each; of fewer than a GPU's wave has, it becomes a wave.
    pub threads: u32,
    /// The bytes that the kernel gives `LamportAllReduce`, so that they are checked; `None` if it does not use it.
    pub lamport_bytes: Option<u64>,
    /// What else ranks must agree on, such as a count or a hash of one: compared in checked mode, but for its three highest bits.
    pub description: u64,
}

impl UserLaunch {
    /// A grid.
    pub const fn new(blocks: u32, threads: u32) -> Self {
        UserLaunch { blocks, threads, lamport_bytes: None, description: 0 }
    }

    /// For a kernel that gives so many bytes to `LamportAllReduce`. They are the description too, if there is none.
    #[must_use]
    pub const fn lamport(self, bytes: u64) -> Self {
        let description = if self.description == 0 { bytes } else { self.description };
        UserLaunch { lamport_bytes: Some(bytes), description, ..self }
    }

    /// With a description.
    #[must_use]
    pub const fn describe(self, description: u64) -> Self {
        UserLaunch { description, ..self }
    }
}

impl<B: Backend> Call<'_, B> {
    /// Enqueues a kernel of a user. `params` makes its parameter struct, given what all kernels need of the group; `uses` are the buffers of
    /// this rank that it touches, which are kept alive until it has finished, and with a graph that is being captured.
    ///
    /// All is checked that is checked of the library's own calls: domain, device, stream, pace, poison, whether the grid can be resident (by what
    /// this kernel takes of this device, and by what the library's take of every rank's), whether it may be launched early, and in checked mode
    /// kernel, grid and description against the peers'. A refusal is this rank's alone: where devices differ, ranks agree on a grid by the
    /// least of their [`most_blocks`](crate::Communicator::most_blocks). Of the [`CallOptions`](crate::CallOptions) the domain
    /// counts.
    ///
    /// A kernel that waits in vain ends as a call does, and the error names the operation "user's kernel".
    ///
    /// # Safety
    /// - The kernel takes one parameter, a struct that `P` mirrors byte by byte.
    /// - It keeps to the rules at the head of `signal/device.h`, and every rank launches it with the same grid in the same place among its calls.
    ///   Its `LamportAllReduce`, if it has one, is given `lamport_bytes`.
    /// - It touches, besides the group's memory by the header's functions, only memory in `uses`, or such that stays allocated until it has
    ///   finished on `stream`; nothing else writes what it reads, or touches what it writes, until then.
    ///
    /// # Errors
    /// As [`Communicator::all_reduce`](crate::Communicator::all_reduce), [`ApiMisuse::KernelGrid`], [`ApiMisuse::LamportTooLarge`],
    /// [`ApiMisuse::LamportDomain`], [`ApiMisuse::LamportOfNothing`].
    pub unsafe fn launch_kernel<'a, P: Pod>(
        self,
        stream: &B::Stream,
        kernel: &UserKernel<B>,
        launch: UserLaunch,
        params: impl FnOnce(GroupParams) -> P,
        uses: impl IntoIterator<Item = &'a B::Buffer>,
    ) -> Result<()>
    where
        B: 'a,
    {
        let UserLaunch { blocks: grid, lamport_bytes, description, .. } = launch;
        let comm = self.comm;
        let mut group = self.begin_apart()?;
        if kernel.device != *comm.device() {
            return Err(comm.wrong_device("kernel", &kernel.device));
        }
        let threads = comm.group.whole_wave(launch.threads);
        comm.group.budget.check(grid, threads)?;
        let room = comm.room_for(kernel, threads);
        if grid > room.blocks {
            let (kernel, budget) = (kernel.name().to_owned(), room.blocks);
            return Err(ApiMisuse::KernelGrid { kernel, blocks: grid, threads, budget }.into());
        }
        match lamport_bytes {
            Some(0) => return Err(ApiMisuse::LamportOfNothing.into()),
            // For a type that the region takes: which one the kernel has, the host does not know.
            Some(bytes) => check_lamport(bytes, comm.world_size(), group.domain, (Dtype::F32, ReduceOp::Sum))?,
            None => {}
        }
        // Beside this kernel's own blocks too.
        let early = comm.allows_early(grid, threads) && grid <= room.most_beside_next();
        if early {
            group.flags |= FLAG_ALLOW_NEXT;
        }
        let mut all = comm.group_memory();
        for buffer in uses {
            self.check_device("buffer", buffer)?;
            all.extend([buffer]); // one by one: borrowed for as long as this list, not for 'a
        }
        let params = params(group);
        let described = [Description::user(kernel.name(), grid, threads, description); MAX_GPUS];
        let (entry, params) = (kernel.entry, bytes_of(&params));
        let launch = Launch { kernel: entry, grid, threads, params, early, uses: all.as_slice() };
        // SAFETY: the kernel is of its module; parameters and memory are the caller's promise; the group's memory is in the list.
        unsafe { self.launch_from(stream, &kernel.module, &launch, ALL_RANKS, Some(&described)) }
    }
}

impl<B: Backend> Member<B> {
    /// The room for a kernel on this rank.
    fn room_for(&self, kernel: &UserKernel<B>, threads: u32) -> Room {
        let resident = kernel.resident.get(BlockBudget::class_of(threads)).copied().unwrap_or(0);
        self.group.budget.room_of(resident, kernel.units)
    }
}

callers! {
impl<B: Backend> Communicator<B> {
    /// The largest grid of a user's kernel, in blocks of so many threads, that this rank takes now.
    pub fn most_blocks(&self, kernel: &UserKernel<B>, threads: u32) -> u32 {
        let threads = self.member.group.whole_wave(threads);
        self.member.group.budget.blocks(threads).min(self.member.room_for(kernel, threads).blocks)
    }
}
}
