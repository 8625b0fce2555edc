//! The communicators of this process's ranks and the streams they are driven on, from one thread.

use std::env;
use std::ops::Range;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use signal_comm::{AbortHandle, Backend, CallOptions, Collective, Communicator, Dtype, Plan, Settings};

use super::args::Args;
use super::measure::Load;
use super::seat::Seat;
use super::shape::{Shape, Size};
use super::together::Together;
use crate::error::{CliError, Result};
use crate::machine::Device;

/// A bench that hangs is to end while someone still watches; SIGNAL_TIMEOUT overrides it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Processes that are started at once may come this far apart, however short a call's wait is.
const START: Duration = Duration::from_secs(30);

/// How long a rank that has failed tries to tell its peers' kernels. Two that fail at once may keep each other from waiting.
const LEAVE: Duration = Duration::from_secs(1);

/// The ranks of this process, which follow one another, among those of the world.
pub(super) struct Ranks<B: Backend> {
    pub(super) communicators: Vec<Communicator<B>>,
    pub(super) streams: Vec<B::Stream>,
    pub(super) together: Together,
    /// Of all ranks of the world.
    pub(super) devices: Vec<Device>,
    /// What they call.
    pub(super) shape: Shape,
    /// Of the data, one for all processes.
    pub(super) seed: u64,
    first: usize,
    pub(super) options: CallOptions,
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
/// Replays before the timed one, at most: in place a call may reduce the result of the one before, which the check repeats.
const MOST_LEAD: u128 = 20;

impl<B: Backend> Work<B> {
    /// Times that a batch runs all of its calls: those of graphs a few times to start with, and once timed.
    pub(super) fn runs(&self) -> u32 {
        match self {
            Work::Calls(_) => 1,
            Work::Graphs { lead, .. } => lead + 1,
        }
    }

    /// Calls on the set at `index` of so many, that a batch goes round: the first ones may have had one more.
    pub(super) fn calls_of(&self, index: usize, sets: usize) -> u32 {
        self.runs() * self.calls().saturating_sub(index as u32).div_ceil(sets as u32)
    }

    /// Adjusts the replays before the timed one to what one takes: so many times as long as they should last.
    pub(super) fn set_lead(&mut self, one: Duration, times: u32) {
        if let Work::Graphs { lead, .. } = self {
            *lead = ((LEAD * times).as_nanos() / one.as_nanos().max(1)).clamp(1, MOST_LEAD) as u32;
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
        let (first, number, device, world) = match seat.position() {
            None => {
                let world = args.world(available.len())?;
                (0, world, 0, world)
            }
            Some(position) => {
                args.check_position(&position, available.len())?;
                (position.rank, 1, position.local_rank, position.world)
            }
        };
        let shape = Shape::new(args, world)?;
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
        options.algorithm = args.algorithm()?;
        options.blocks = args.blocks;
        options.threads = args.threads;
        let seed = hellos[0].seed;
        let devices = hellos.into_iter().flat_map(|hello| hello.devices).collect();
        Ok(Ranks { communicators, streams, together, devices, shape, seed, first, options })
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

    /// Goes on if no process has failed; else all end with the same error. Collective.
    pub(super) fn agree<T>(&mut self, own: Result<T>) -> Result<T> {
        // Those two all processes have at once, and none is waiting.
        let common = matches!(own, Err(CliError::Mismatch(_) | CliError::Rank { .. }));
        if own.is_err() && !common && self.here().len() < self.world() {
            self.leave();
        }
        self.together.agree(own)
    }

    /// Lets nobody wait for ranks that make no more calls: neither to allocate with them, nor in kernels.
    fn leave(&mut self) {
        for (mut communicator, stream) in self.communicators.drain(..).zip(&self.streams) {
            let began = Instant::now();
            let mut asked = communicator.abort_handle().abort();
            // A kernel that has to wait finds the request and tells the peers, whose kernels end. One that its peers have been
            // waiting for does not look, so it takes as many barriers as the peers may be ahead. After a fault there is no
            // launch, but then the peers know of it.
            while asked.is_ok() && began.elapsed() < LEAVE {
                asked = communicator.barrier(stream).and_then(|()| communicator.wait(stream));
            }
        }
    }

    /// How a call will run: the library's plan with what the command line overrides.
    pub(super) fn plan(&self, size: Size, dtype: Dtype) -> Plan {
        let communicator = &self.communicators[0];
        let mut plan = match self.shape.collective {
            Collective::AllReduce => communicator.plan(size.count, dtype, self.shape.op),
            other => communicator.plan_of(other, size.bytes as u64),
        };
        plan.algorithm = self.options.algorithm.unwrap_or(plan.algorithm);
        plan.blocks = self.options.blocks.unwrap_or(plan.blocks);
        plan.threads = self.options.threads.unwrap_or(plan.threads);
        plan
    }

    /// Gives later calls this grid.
    pub(super) fn set_grid(&mut self, blocks: u32, threads: u32) {
        (self.options.blocks, self.options.threads) = (Some(blocks), Some(threads));
    }

    /// Gives later calls this plan.
    pub(super) fn set_plan(&mut self, plan: Plan) {
        self.options.algorithm = Some(plan.algorithm);
        self.set_grid(plan.blocks, plan.threads);
    }

    /// Leaves the plan to the library again.
    pub(super) fn leave_plan(&mut self) {
        self.options = CallOptions::default();
    }

    /// Captures graphs of `calls` calls each, as many as it takes to use every set.
    pub(super) fn capture(&mut self, load: &mut impl Load<B>, calls: u32) -> Result<Work<B>> {
        let graphs = load.sets().div_ceil(calls as usize);
        let mut by_rank: Vec<Vec<B::Graph>> = self.streams.iter().map(|_| Vec::new()).collect();
        let mut order = (0..load.sets()).cycle();
        for _ in 0..graphs {
            self.streams.iter().try_for_each(B::begin_capture)?;
            for set in order.by_ref().take(calls as usize) {
                load.enqueue(self, set)?;
            }
            for (stream, graphs) in self.streams.iter().zip(&mut by_rank) {
                graphs.push(B::end_capture(stream)?);
            }
        }
        Ok(Work::Graphs { by_rank, calls, lead: 1 })
    }

    /// Runs `work` once and returns the slowest rank's time by its device's clock, over all processes. Ends idle.
    pub(super) fn batch(&mut self, load: &mut impl Load<B>, work: &Work<B>) -> Result<Duration> {
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
                for set in (0..load.sets()).cycle().take(*calls as usize) {
                    load.enqueue(self, set)?;
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

#[cfg(all(test, feature = "host"))]
#[allow(clippy::unwrap_used, reason = "clippy knows tests, but not what they call")]
mod tests {
    use std::thread;

    use signal_comm::host::{self, Host};
    use signal_comm::{DeviceBuffer, Id, ReduceOp, UnixRendezvous};

    use super::*;

    /// One of two ranks as processes have them; here they are threads.
    fn one_of_two(rank: usize, id: &Id) -> Ranks<Host> {
        let meet = || UnixRendezvous::from_id(id, rank, 2, TIMEOUT).unwrap();
        let together = Together::of_ranks(Box::new(meet()), TIMEOUT, None);
        let device = host::open().unwrap().devices().unwrap().swap_remove(rank);
        let mut settings = Settings::default();
        settings.timeout = TIMEOUT;
        let communicators = vec![Communicator::builder().settings(settings).connect(&device, meet()).unwrap()];
        let streams = vec![Host::create_stream(&device).unwrap()];
        let options = CallOptions::default();
        let devices = vec![Device::from(Host::describe(&device)); 2];
        let shape = Shape { collective: Collective::AllReduce, world: 2, root: 0, op: ReduceOp::Sum };
        Ranks { communicators, streams, together, devices, shape, seed: 0, first: rank, options }
    }

    #[test]
    fn a_rank_that_fails_is_not_waited_for_in_kernels() {
        // With so many barriers ahead of the other rank, or behind what it still enqueues.
        for ahead in [0, 1, 5] {
            let (id, start) = (Id::new().unwrap(), Instant::now());
            let rank = |rank| {
                let mut ranks = one_of_two(rank, &id);
                let own = if rank == 1 {
                    thread::sleep(Duration::from_millis(50));
                    Err(CliError::Arguments("no disk".to_owned()))
                } else {
                    let Ranks { communicators, streams, .. } = &mut ranks;
                    (0..ahead).for_each(|_| communicators[0].barrier(&streams[0]).unwrap());
                    let data = DeviceBuffer::<Host, f32>::new(communicators[0].device(), 1 << 16).unwrap();
                    let mut output = DeviceBuffer::<Host, f32>::new(communicators[0].device(), 1 << 16).unwrap();
                    communicators[0].all_reduce(&streams[0], &data, &mut output, ReduceOp::Sum).unwrap();
                    ranks.wait()
                };
                let waited = start.elapsed();
                (ranks.agree(own).unwrap_err().to_string(), waited)
            };
            let found =
                thread::scope(|scope| [0, 1].map(|at| scope.spawn(move || rank(at))).map(|rank| rank.join().unwrap()));
            for (error, waited) in found {
                assert_eq!(error, "rank 1: no disk");
                assert!(waited < TIMEOUT / 2, "{waited:?}");
            }
        }
    }
}
