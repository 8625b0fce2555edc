//! What a stream can be asked to do. A command owns all it needs: it outlives the call that enqueued it, and in a graph
//! it runs many times, also at the same time on two streams, so running it changes nothing in it.

use signal_core::error::{ApiMisuse, Result};

use crate::event::Mark;
use crate::graph::Recording;
use crate::memory::{Buffer, Part};
use crate::module::HostKernel;
use crate::pool::Crew;
use crate::sync::Shared;

/// Most bytes of a kernel's parameter struct; the largest in the catalogue has 520.
const PARAM_BYTES: usize = 1024;

pub(crate) enum Command {
    /// Boxed, since it is much larger than the others.
    Launch(Box<Grid>),
    Upload(Box<[u8]>, Part),
    Download(Part, Target),
    Fill(Part, u32),
    Copy(Part, Part),
    Record(Shared<Mark>),
    Wait(Shared<Mark>),
    /// Only to be dropped in its turn.
    Keep(#[expect(dead_code, reason = "held for its drop")] Buffer),
    Replay(Shared<Recording>),
}

impl Command {
    /// Threads that running it needs, the worker counted in.
    pub(crate) fn threads(&self) -> usize {
        match self {
            Command::Launch(grid) => (grid.blocks * grid.threads) as usize,
            Command::Replay(recording) => recording.threads(),
            _ => 1,
        }
    }

    /// Runs it to the end, on the worker and its lanes.
    pub(crate) fn run(&self, crew: &mut Crew<'_>) {
        match self {
            // SAFETY: `Grid::new` had its caller vouch for kernel and parameters, which live in `self`. The lanes
            // were hired before the command was enqueued, or before the replay was that holds it.
            Command::Launch(grid) => unsafe {
                crew.run(grid.run, grid.params.0.as_ptr().cast(), grid.blocks, grid.threads);
            },
            Command::Upload(bytes, part) => part.write(bytes),
            // SAFETY: `Target::new` had its caller vouch for the memory.
            Command::Download(part, target) => unsafe { part.read(target.0) },
            Command::Fill(part, word) => part.fill(*word),
            Command::Copy(source, target) => target.copy_from(source),
            Command::Record(mark) => mark.reach(),
            Command::Wait(mark) => mark.wait(),
            Command::Keep(_) => {}
            Command::Replay(recording) => recording.commands().iter().for_each(|command| command.run(crew)),
        }
    }
}

/// One launch.
pub(crate) struct Grid {
    run: HostKernel,
    blocks: u32,
    threads: u32,
    params: Params,
    /// Only to be dropped with the launch.
    _uses: Vec<Buffer>,
}

/// Parameter bytes, aligned for any struct of numbers and addresses.
#[repr(align(16))]
struct Params([u8; PARAM_BYTES]);

impl Grid {
    /// # Safety
    /// Until the command has run for the last time, `run` may be called with these parameters by `blocks * threads`
    /// threads: see [`Backend::launch`](signal_core::backend::Backend::launch).
    pub(crate) unsafe fn new(
        run: HostKernel,
        blocks: u32,
        threads: u32,
        params: &[u8],
        uses: &[&Buffer],
    ) -> Result<Self> {
        let mut inline = Params([0; PARAM_BYTES]);
        let Some(room) = inline.0.get_mut(..params.len()) else {
            return Err(ApiMisuse::BufferTooSmall { found: PARAM_BYTES, needed: params.len() }.into());
        };
        room.copy_from_slice(params);
        let uses = uses.iter().map(|&buffer| buffer.clone()).collect();
        Ok(Grid { run, blocks, threads, params: inline, _uses: uses })
    }
}

/// Where a download goes.
pub(crate) struct Target(*mut u8);

// SAFETY: the memory is exclusive to the command until it has run, on whatever thread; see `Target::new`.
unsafe impl Send for Target {}
// SAFETY: as above; a shared reference is used only to run the command.
unsafe impl Sync for Target {}

impl Target {
    /// # Safety
    /// Until the command has run, `target` is valid for the part's bytes and nobody else touches them.
    pub(crate) unsafe fn new(target: *mut u8) -> Self {
        Target(target)
    }
}
