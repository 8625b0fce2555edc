//! One round: prepared, run by a thread a rank, judged, recovered from.

use std::any::Any;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use signal_comm::layout::NUM_BARRIER_DOMAINS;
use signal_comm::reference::Rng;
use signal_comm::{AbortHandle, ApiMisuse, Backend, CallOptions, Communicator, DeviceFamily, Error, Result, Settings};
use signal_conformance::with_dtype;

use super::data::{Barrier, Step, Wrong, collective};
use super::fault::{Ended, Fault, Kind};
use super::program::{Call, Grid, Recovery, Round, dawdle};

/// A busy machine may be this late in noticing; still far from what a deadline for each call would take.
const SLACK: Duration = Duration::from_secs(5);

/// The ranks, between rounds.
pub(super) struct Ranks<B: Backend> {
    pub(super) comms: Vec<Communicator<B>>,
    streams: Vec<B::Stream>,
    /// Grids of the program that the devices cannot hold: such calls take the plan's.
    too_large: Vec<Grid>,
    /// Calls by domain since the devices began to count them.
    counted: [usize; NUM_BARRIER_DOMAINS],
}

/// What a round came to.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Calls that ranks have made.
    pub(super) calls: u64,
    /// Outputs compared.
    pub(super) outputs: u64,
    /// By call and rank: what was wrong with its memory.
    pub(super) wrong: Vec<(usize, usize, Wrong)>,
    /// What else was not as it has to be.
    pub(super) trouble: Vec<String>,
}

/// What a thread did for its rank.
struct Driven {
    ended: Ended,
    /// From the call that the fault comes at until the wait was over, where the rank made that call.
    waited: Option<Duration>,
}

impl<B: Backend> Ranks<B> {
    /// Ranks on `devices`, which may repeat if `share_devices` says so. `grids` are those that calls will ask for.
    pub(super) fn create(
        devices: &[B::Device],
        settings: Settings,
        share_devices: bool,
        grids: &[Grid],
    ) -> Result<Self> {
        let mut comms =
            Communicator::<B>::builder().settings(settings).share_devices(share_devices).all_local(devices)?;
        let streams = devices.iter().map(B::create_stream).collect::<Result<Vec<_>>>()?;
        let (mut too_large, mut counted) = (Vec::new(), [0; NUM_BARRIER_DOMAINS]);
        for &grid in grids {
            // Every rank answers alike: who is refused first speaks for all.
            for (comm, stream) in comms.iter_mut().zip(&streams) {
                match comm.with(options(grid)).barrier(stream) {
                    Ok(()) => counted[0] += usize::from(comm.rank() == 0),
                    Err(Error::ApiMisuse(ApiMisuse::Grid { .. } | ApiMisuse::Threads { .. })) => {
                        too_large.push(grid);
                        break;
                    }
                    Err(error) => return Err(error),
                }
            }
        }
        comms.iter().zip(&streams).try_for_each(|(comm, stream)| comm.wait(stream))?;
        Ok(Ranks { comms, streams, too_large, counted })
    }

    /// Whether CPU threads run the kernels of these devices.
    pub(super) fn on_host(devices: &[B::Device]) -> bool {
        devices.iter().any(|device| B::describe(device).family == DeviceFamily::Host)
    }

    /// Runs a round. `corrupt` names a rank whose outputs are made wrong afterwards.
    pub(super) fn run(&mut self, round: &Round, seed: u64, corrupt: Option<usize>) -> Result<Outcome> {
        let mut steps = self.prepare(round)?;
        let deadline = self.comms[0].settings().timeout;
        // The device counts from 1, after the calls that it has counted.
        let failing = round.fault.as_ref().map_or(0, |fault| {
            let domain = round.calls[fault.call].domain();
            // In checked mode it fails in the comparison, before it is counted.
            let checked = usize::from(self.comms[0].settings().check);
            self.counted[domain as usize] + round.launches(fault.call + 1, domain) - checked
        });
        let began = Instant::now();
        let driven = self.drive(round, seed, deadline, &mut steps)?;
        let mut outcome = Outcome::default();
        let mut firm = Vec::new();
        for Driven { ended, .. } in &driven {
            outcome.calls += ended.made as u64;
            match ended.judge(round.fault.as_ref(), failing as u32) {
                Ok(calls) => firm.push(calls),
                Err(what) => {
                    firm.push(0);
                    outcome.trouble.push(what);
                }
            }
        }
        if let Some(fault) = &round.fault {
            outcome.trouble.extend(check_time(fault, deadline, began.elapsed(), &driven));
        }
        if let Some(rank) = corrupt {
            steps[rank].iter_mut().try_for_each(|step| step.corrupt(&self.streams[rank]))?;
        }
        for (rank, calls) in firm.into_iter().enumerate() {
            for (index, step) in steps[rank].iter().take(calls).enumerate() {
                outcome.outputs += u64::from(matches!(round.calls[index], Call::Collective(_)));
                outcome.wrong.extend(step.check(&self.streams[rank])?.map(|wrong| (index, rank, wrong)));
            }
        }
        for (domain, counted) in (0..).zip(&mut self.counted) {
            *counted += round.launches(round.calls.len(), domain);
        }
        if let Some(recovery) = round.recovery {
            self.recover(recovery, seed ^ round.number)?;
        }
        Ok(outcome)
    }

    /// The steps of all calls, by rank.
    fn prepare(&mut self, round: &Round) -> Result<Vec<Vec<Box<dyn Step<B>>>>> {
        let mut steps: Vec<Vec<Box<dyn Step<B>>>> = self.comms.iter().map(|_| Vec::new()).collect();
        for call in &round.calls {
            let (grid, domain) = match call {
                Call::Barrier { grid, domain } => (*grid, *domain),
                Call::Collective(call) => (call.grid, call.domain),
            };
            let mut options = options(if self.too_large.contains(&grid) { (None, None) } else { grid });
            options.domain = domain;
            let Call::Collective(call) = call else {
                steps.iter_mut().for_each(|steps| steps.push(Box::new(Barrier { options })));
                continue;
            };
            options.algorithm = call.algorithm;
            let (comms, streams) = (&mut self.comms[..], &self.streams[..]);
            let lanes = with_dtype!(call.dtype, T => collective::<B, T>(comms, streams, call, options))?;
            steps.iter_mut().zip(lanes).for_each(|(steps, lane)| steps.push(lane));
        }
        Ok(steps)
    }

    /// Makes the calls, a thread a rank, and waits for all of them.
    fn drive(
        &mut self,
        round: &Round,
        seed: u64,
        deadline: Duration,
        steps: &mut [Vec<Box<dyn Step<B>>>],
    ) -> Result<Vec<Driven>> {
        let fault = round.fault.as_ref();
        let aborted = fault.and_then(|fault| Some((fault.abort_after(deadline)?, self.comms[fault.by].abort_handle())));
        let over = AtomicUsize::new(0);
        let patience = Patience { over: &over, others: self.comms.len() - 1, limit: 2 * deadline + SLACK };
        thread::scope(|scope| {
            let lanes = self.comms.iter_mut().zip(&self.streams).zip(steps);
            let threads: Vec<_> = lanes
                .map(|((comm, stream), steps)| {
                    let patience = &patience;
                    scope.spawn(move || make_calls(round, seed, comm, stream, steps, patience))
                })
                .collect();
            let aborter = aborted.map(|(after, handle)| scope.spawn(move || abort(after, &handle)));
            // Joined before anything is returned, so that no thread outlives the round.
            let driven: Vec<_> = threads.into_iter().map(|thread| joined(thread.join())).collect();
            aborter.map_or(Ok(()), |thread| joined(thread.join()))?;
            driven.into_iter().collect()
        })
    }

    /// Brings all ranks back to work.
    fn recover(&mut self, recovery: Recovery, seed: u64) -> Result<()> {
        self.counted = Default::default();
        match recovery {
            Recovery::Together => Communicator::recover_all(&mut self.comms)?,
            Recovery::ByThreads => thread::scope(|scope| {
                let threads: Vec<_> = self
                    .comms
                    .iter_mut()
                    .map(|comm| {
                        scope.spawn(move || {
                            dawdle(&mut Rng::new(seed ^ comm.rank() as u64));
                            comm.recover()
                        })
                    })
                    .collect();
                let recovered: Vec<_> = threads.into_iter().map(|thread| joined(thread.join())).collect();
                recovered.into_iter().collect::<Result<()>>()
            })?,
        }
        self.comms.iter().try_for_each(Communicator::status)
    }
}

/// How long a late rank waits for the others to have given up.
struct Patience<'a> {
    /// Ranks that have.
    over: &'a AtomicUsize,
    others: usize,
    limit: Duration,
}

impl Patience<'_> {
    fn wait(&self) {
        let began = Instant::now();
        while self.over.load(Ordering::Acquire) < self.others && began.elapsed() < self.limit {
            thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Makes one rank's calls, without waiting for any, and then waits for all.
fn make_calls<B: Backend>(
    round: &Round,
    seed: u64,
    comm: &mut Communicator<B>,
    stream: &B::Stream,
    steps: &mut [Box<dyn Step<B>>],
    patience: &Patience<'_>,
) -> Result<Driven> {
    let rank = comm.rank();
    let deadline = comm.settings().timeout;
    let mut rng = Rng::new(seed ^ round.number.rotate_left(32) ^ rank as u64);
    let mut ended = Ended { rank, made: 0, refused: Vec::new(), status: Ok(()) };
    let mut reached = None;
    for (index, step) in steps.iter_mut().enumerate() {
        if let Some(fault) = round.fault.as_ref().filter(|fault| fault.call == index) {
            if fault.keeps_away(rank) {
                break;
            }
            match fault.kind {
                Kind::Late if rank == fault.rank => patience.wait(),
                Kind::Close if rank == fault.rank => thread::sleep(fault.pause(deadline)),
                _ => {}
            }
            reached = Some(Instant::now());
        }
        dawdle(&mut rng);
        match step.launch(comm, stream) {
            Ok(()) if ended.refused.is_empty() => ended.made += 1,
            // Judged with the others: a call that moves nothing is accepted whatever happened.
            Ok(()) => {}
            Err(error) => ended.refused.push(error),
        }
    }
    ended.status = comm.wait(stream);
    let waited = reached.map(|reached: Instant| reached.elapsed());
    patience.over.fetch_add(1, Ordering::AcqRel);
    Ok(Driven { ended, waited })
}

fn abort<B: Backend>(after: Duration, handle: &AbortHandle<B>) -> Result<()> {
    thread::sleep(after);
    handle.abort()
}

/// Complains of ranks that gave up too early or too late.
fn check_time(fault: &Fault, deadline: Duration, round: Duration, driven: &[Driven]) -> Option<String> {
    let took = driven.iter().filter(|driven| driven.ended.rank != fault.rank).filter_map(|driven| driven.waited).max();
    // Whoever came first has waited for a whole deadline, less what its clock counts differently.
    let waits_out = matches!(fault.kind, Kind::Missing | Kind::Late);
    if let Some(took) = took.filter(|took| waits_out && *took < deadline.mul_f64(0.9)) {
        return Some(format!("all ranks gave up within {took:?}, before the deadline of {deadline:?}"));
    }
    let most = 2 * deadline + SLACK;
    (round > most).then(|| format!("the fault took {round:?} to end, with a deadline of {deadline:?}"))
}

fn options((blocks, threads): Grid) -> CallOptions {
    let mut options = CallOptions::default();
    (options.blocks, options.threads) = (blocks, threads);
    options
}

/// What a thread returned; its panic goes on in this one.
fn joined<T>(result: Result<T, Box<dyn Any + Send>>) -> T {
    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
