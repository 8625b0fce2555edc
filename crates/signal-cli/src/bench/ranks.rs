//! The communicators of all ranks and the streams they are driven on, from one thread.

use std::env;
use std::time::Duration;

use signal_comm::{Backend, CallOptions, Communicator, Dtype, Element, Plan, ReduceOp, Settings};

use super::args::Args;
use super::data::Set;
use super::measure::Place;
use crate::error::Result;

/// A bench that hangs is to end while someone still watches; SIGNAL_TIMEOUT overrides it.
const TIMEOUT: Duration = Duration::from_secs(60);

pub(super) struct Ranks<B: Backend> {
    pub(super) communicators: Vec<Communicator<B>>,
    pub(super) streams: Vec<B::Stream>,
    options: CallOptions,
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
    pub(super) fn create(backend: &B, args: &Args) -> Result<Self> {
        let available = backend.devices()?;
        let world = args.world(available.len())?;
        let devices: Vec<B::Device> = available.iter().cycle().take(world).cloned().collect();
        let mut settings = Settings::from_env()?;
        if env::var_os("SIGNAL_TIMEOUT").is_none() {
            settings.timeout = TIMEOUT;
        }
        let builder = Communicator::<B>::builder().settings(settings).share_devices(args.group.share_devices);
        let communicators = builder.all_local(&devices)?;
        let streams = devices.iter().map(B::create_stream).collect::<Result<_, _>>()?;
        let mut options = CallOptions::default();
        options.algorithm = args.algo.0;
        options.blocks = args.blocks;
        options.threads = args.threads;
        Ok(Ranks { communicators, streams, options })
    }

    pub(super) fn world(&self) -> usize {
        self.communicators.len()
    }

    pub(super) fn devices(&self) -> impl Iterator<Item = &B::Device> {
        self.communicators.iter().map(Communicator::device)
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

    /// Enqueues one call on every rank.
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

    /// Runs `work` once and returns the slowest rank's time by its device's clock. Ends idle.
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
        times.try_fold(Duration::ZERO, |slowest, time| Ok(slowest.max(time?)))
    }

    /// Enqueues the graphs of all ranks, in order.
    fn replay(&self, by_rank: &[Vec<B::Graph>]) -> Result<()> {
        let graphs = by_rank.first().map_or(0, Vec::len);
        for index in 0..graphs {
            for (stream, graphs) in self.streams.iter().zip(by_rank) {
                B::replay(&graphs[index], stream)?;
            }
        }
        Ok(())
    }

    /// Waits for every rank; an error if one of them had a fault.
    pub(super) fn wait(&self) -> Result<()> {
        let mut ranks = self.communicators.iter().zip(&self.streams);
        Ok(ranks.try_for_each(|(communicator, stream)| communicator.wait(stream))?)
    }

    fn record(&self) -> Result<Vec<B::Event>> {
        Ok(self.streams.iter().map(B::record).collect::<Result<_, _>>()?)
    }
}
