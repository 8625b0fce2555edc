//! The communicators of this process's ranks and the streams they are driven on, from one thread.

use std::env;
use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use signal_comm::{AbortHandle, Backend, CallOptions, Communicator, Dtype, Element, Plan, ReduceOp, Settings};

use super::args::Args;
use super::data::Set;
use super::measure::Place;
use super::seat::Seat;
use super::together::Together;
use crate::error::{CliError, Result};
use crate::machine::Device;

/// A bench that hangs is to end while someone still watches; SIGNAL_TIMEOUT overrides it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Processes that are started at once may come this far apart, however short a call's wait is.
const START: Duration = Duration::from_secs(30);

/// The ranks of this process, which follow one another, among those of the world.
pub(super) struct Ranks<B: Backend> {
    pub(super) communicators: Vec<Communicator<B>>,
    pub(super) streams: Vec<B::Stream>,
    pub(super) together: Together,
    /// Of all ranks of the world.
    pub(super) devices: Vec<Device>,
    /// Of the data, one for all processes.
    pub(super) seed: u64,
    first: usize,
    options: CallOptions,
}

/// What a process says of itself first.
#[derive(Deserialize, Serialize)]
struct Hello {
    arguments: String,
    seed: u64,
    devices: Vec<Device>,
}

/// What is timed at once.
pub(super) enum Work<B: Backend> {
    /// Calls enqueued one by one.
    Calls(u32),
    /// Captured calls: graphs by rank, replayed in order; each holds `calls` calls. Replayed `lead` times before they are timed.
    Graphs { by_rank: Vec<Vec<B::Graph>>, calls: u32, lead: u32 },
}

/// How long the replays before the timed one should last: longer than it takes to enqueue all of them on all ranks. Else the
/// first rank is timed while it waits for the last one's launch.
const LEAD: Duration = Duration::from_millis(1);
/// Replays before the timed one, at most: in place each call adds to the result of the one before, which the check repeats.
const MOST_LEAD: u128 = 20;

impl<B: Backend> Work<B> {
    /// Times that a batch runs all of its calls: those of graphs a few times to start with, and once timed.
    pub(super) fn runs(&self) -> u32 {
        match self {
            Work::Calls(_) => 1,
            Work::Graphs { lead, .. } => lead + 1,
        }
    }

    /// Adjusts the replays before the timed one to what one takes.
    pub(super) fn set_lead(&mut self, one: Duration) {
        if let Work::Graphs { lead, .. } = self {
            *lead = (LEAD.as_nanos() / one.as_nanos().max(1)).clamp(1, MOST_LEAD) as u32;
        }
    }

    /// Calls of each rank that are timed in one batch.
    pub(super) fn calls(&self) -> u32 {
        match self {
            Work::Calls(calls) => *calls,
            Work::Graphs { by_rank, calls, .. } => calls * by_rank.first().map_or(0, |graphs| graphs.len() as u32),
        }
    }
}

impl<B: Backend> Ranks<B> {
    /// The ranks that `seat` gives to this process. `seed` is that of rank 0's process.
    pub(super) fn create(backend: &B, args: &Args, seat: &Seat, seed: u64) -> Result<Self> {
        let available = backend.devices()?;
        let (first, number, device) = match seat.position() {
            None => (0, args.world(available.len())?, 0),
            Some(position) => {
                args.check_position(&position, available.len())?;
                (position.rank, 1, position.local_rank)
            }
        };
        let devices: Vec<B::Device> = available.iter().cycle().skip(device).take(number).cloned().collect();
        let mut settings = Settings::from_env()?;
        if env::var_os("SIGNAL_TIMEOUT").is_none() {
            settings.timeout = TIMEOUT;
        }
        let timeout = settings.timeout;
        let patience = timeout.max(START);
        let mut together = match seat.meet(patience)? {
            None => Together::alone(),
            Some(rendezvous) => Together::of_ranks(rendezvous, timeout, seat.line().cloned()),
        };
        let infos = devices.iter().map(|device| Device::from(B::describe(device))).collect();
        let hellos = together.gather(Hello { arguments: format!("{args:?}"), seed, devices: infos })?;
        if let Some(rank) = hellos.iter().position(|hello| hello.arguments != hellos[0].arguments) {
            return Err(CliError::Arguments(format!("ranks 0 and {rank} were started with different arguments")));
        }

        let builder = Communicator::<B>::builder().settings(settings).share_devices(args.group.share_devices);
        let communicators = match seat.meet(patience)? {
            None => builder.all_local(&devices)?,
            Some(rendezvous) => vec![builder.connect(&devices[0], rendezvous)?],
        };
        if let Some(line) = seat.line() {
            let handles: Vec<AbortHandle<B>> = communicators.iter().map(Communicator::abort_handle).collect();
            line.on_stop(move || handles.iter().for_each(|handle| drop(handle.abort())));
        }
        let streams = devices.iter().map(B::create_stream).collect::<Result<_, _>>()?;
        let mut options = CallOptions::default();
        options.algorithm = args.algo.0;
        options.blocks = args.blocks;
        options.threads = args.threads;
        let seed = hellos[0].seed;
        let devices = hellos.into_iter().flat_map(|hello| hello.devices).collect();
        Ok(Ranks { communicators, streams, together, devices, seed, first, options })
    }

    pub(super) fn world(&self) -> usize {
        self.devices.len()
    }

    /// The ranks of this process.
    pub(super) fn here(&self) -> Range<usize> {
        self.first..self.first + self.streams.len()
    }

    /// The first rank's device.
    pub(super) fn device(&self) -> &B::Device {
        self.communicators[0].device()
    }

    /// Goes on if no process has failed. Where one has, this process's ranks are gone, and all have the same error. Collective.
    pub(super) fn agree<T>(&mut self, own: Result<T>) -> Result<T> {
        if own.is_err() && !self.together.is_alone() {
            self.leave();
        }
        self.together.agree(own)
    }

    /// Lets nobody wait for ranks that make no more calls: whose kernel waits for one of them is told by that rank's next
    /// kernel, and who waits to allocate with it by its going.
    fn leave(&mut self) {
        for (mut communicator, stream) in self.communicators.drain(..).zip(&self.streams) {
            // Best effort. After a fault nothing can be launched, but then the peers know of it.
            let left = communicator.abort_handle().abort().and_then(|()| communicator.barrier(stream));
            let _ = left.and_then(|()| B::synchronize(stream));
        }
    }

    /// How a call will run: the library's plan with what the command line overrides.
    pub(super) fn plan(&self, count: usize, dtype: Dtype) -> Plan {
        let mut plan = self.communicators[0].plan(count, dtype);
        plan.algorithm = self.options.algorithm.unwrap_or(plan.algorithm);
        plan.blocks = self.options.blocks.unwrap_or(plan.blocks);
        plan.threads = self.options.threads.unwrap_or(plan.threads);
        plan
    }

    /// Gives later calls this grid.
    pub(super) fn set_grid(&mut self, blocks: u32, threads: u32) {
        (self.options.blocks, self.options.threads) = (Some(blocks), Some(threads));
    }

    /// Enqueues one call on every rank of this process.
    pub(super) fn enqueue<T: Element>(&mut self, set: &mut Set<B, T>, place: Place) -> Result<()> {
        let ranks = self.communicators.iter_mut().zip(&self.streams);
        let buffers = set.inputs.iter().zip(&mut set.outputs);
        for ((communicator, stream), (input, output)) in ranks.zip(buffers) {
            let call = communicator.with(self.options);
            match place {
                Place::OutOfPlace => call.all_reduce(stream, input, output, ReduceOp::Sum)?,
                Place::InPlace => call.all_reduce_in_place(stream, output, ReduceOp::Sum)?,
            }
        }
        Ok(())
    }

    /// Captures graphs of `calls` calls each, as many as it takes to use every set.
    pub(super) fn capture<T: Element>(&mut self, sets: &mut [Set<B, T>], place: Place, calls: u32) -> Result<Work<B>> {
        let graphs = sets.len().div_ceil(calls as usize);
        let mut by_rank: Vec<Vec<B::Graph>> = self.streams.iter().map(|_| Vec::new()).collect();
        let mut order = (0..sets.len()).cycle();
        for _ in 0..graphs {
            self.streams.iter().try_for_each(B::begin_capture)?;
            for set in order.by_ref().take(calls as usize) {
                self.enqueue(&mut sets[set], place)?;
            }
            for (stream, graphs) in self.streams.iter().zip(&mut by_rank) {
                graphs.push(B::end_capture(stream)?);
            }
        }
        Ok(Work::Graphs { by_rank, calls, lead: 1 })
    }

    /// Runs `work` once and returns the slowest rank's time by its device's clock, over all processes. Ends idle.
    pub(super) fn batch<T: Element>(
        &mut self,
        sets: &mut [Set<B, T>],
        place: Place,
        work: &Work<B>,
    ) -> Result<Duration> {
        // The ranks start together, whatever was enqueued before: else the first would be timed while it waits for the last.
        for (communicator, stream) in self.communicators.iter_mut().zip(&self.streams) {
            communicator.barrier(stream)?;
        }
        if let Work::Graphs { by_rank, lead, .. } = work {
            // While these keep the ranks in step, the timed run is enqueued on all of them.
            (0..*lead).try_for_each(|_| self.replay(by_rank))?;
        }
        let starts = self.record()?;
        match work {
            Work::Calls(calls) => {
                for set in (0..sets.len()).cycle().take(*calls as usize) {
                    self.enqueue(&mut sets[set], place)?;
                }
            }
            Work::Graphs { by_rank, .. } => self.replay(by_rank)?,
        }
        let ends = self.record()?;
        self.wait()?;
        let mut times = starts.iter().zip(&ends).map(|(start, end)| B::elapsed(start, end));
        let slowest = times.try_fold(Duration::ZERO, |slowest, time| time.map(|time| slowest.max(time)))?;
        self.together.max(slowest)
    }

    /// Enqueues the graphs of all ranks of this process, in order.
    fn replay(&self, by_rank: &[Vec<B::Graph>]) -> Result<()> {
        let graphs = by_rank.first().map_or(0, Vec::len);
        for index in 0..graphs {
            for (stream, graphs) in self.streams.iter().zip(by_rank) {
                B::replay(&graphs[index], stream)?;
            }
        }
        Ok(())
    }

    /// Waits for every rank of this process; an error if one of them had a fault.
    pub(super) fn wait(&self) -> Result<()> {
        let mut ranks = self.communicators.iter().zip(&self.streams);
        Ok(ranks.try_for_each(|(communicator, stream)| communicator.wait(stream))?)
    }

    fn record(&self) -> Result<Vec<B::Event>> {
        Ok(self.streams.iter().map(B::record).collect::<Result<_, _>>()?)
    }
}
