//! A group of ranks and what they have, and all that a case does to it but calling collectives.

use std::collections::BTreeMap;
use std::time::Duration;

use signal_comm::host::{self, Host, HostConfig};
use signal_comm::{
    ApiMisuse, Backend, BarrierProbe, Communicator, DeviceBuffer, Dtype, Error, ReduceOp, Result, Settings, Signal,
};

use super::op::{Case, Op, Who};

/// Short, because a rank that is alone waits for it. Ranks that are merely scheduled badly may miss it too.
const DEADLINE: Duration = Duration::from_millis(25);
/// Sets of buffers that a case may hold at once.
const MOST_SETS: usize = 8;

pub(super) type Comm = Communicator<Host>;
pub(super) type Stream = <Host as Backend>::Stream;
pub(super) type Buffer = DeviceBuffer<Host, f32>;

/// Calls by what they were.
pub(crate) type Seen = BTreeMap<String, usize>;

pub(crate) struct State {
    pub(super) devices: Vec<<Host as Backend>::Device>,
    pub(super) domains: bool,
    /// By rank; `None` once it has left.
    pub(super) comms: Vec<Option<Comm>>,
    /// By rank.
    pub(super) streams: Vec<[Stream; 2]>,
    /// By rank within each set; `None` where a rank could not have it.
    pub(super) sets: Vec<Vec<Option<Buffer>>>,
    pub(super) counts: Vec<DeviceBuffer<Host, u32>>,
    graphs: Vec<<Host as Backend>::Graph>,
    /// Some rank has made a call that others have not, or was asked to leave one: until they recover, only that errors are
    /// values can be said of calls.
    pub(super) diverged: bool,
    /// A rank has used another's stream, which may refuse the other its own.
    pub(super) mixed: bool,
    /// Calls of all ranks that were right, or refused without effect as they had to be, by what they were.
    pub(super) seen: Seen,
    /// Kept open for as long as its devices are used.
    backend: Host,
}

impl State {
    pub(crate) fn new(case: &Case) -> Self {
        let mut config = HostConfig::from_env().unwrap();
        config.canaries = true;
        let backend = host::open_with(config).unwrap();
        let all = backend.devices().unwrap();
        let device = |rank: usize| all[if case.shared { 0 } else { rank % all.len() }].clone();
        let devices: Vec<_> = (0..case.world).map(device).collect();
        let mut settings = Settings::default();
        (settings.timeout, settings.scratch_bytes, settings.domains) =
            (DEADLINE, Settings::MIN_SCRATCH_BYTES, case.domains);
        let comms = Comm::builder().settings(settings).share_devices(true).all_local(&devices).unwrap();
        let mut state = State {
            domains: case.domains,
            comms: comms.into_iter().map(Some).collect(),
            streams: devices
                .iter()
                .map(|d| [Host::create_stream(d).unwrap(), Host::create_stream(d).unwrap()])
                .collect(),
            sets: Vec::new(),
            counts: devices.iter().map(|d| DeviceBuffer::new(d, 3).unwrap()).collect(),
            graphs: Vec::new(),
            diverged: false,
            mixed: false,
            seen: Seen::new(),
            devices,
            backend,
        };
        // Something to begin with.
        state.apply(&Op::Alloc { who: Who::All, len: 1000 });
        state.apply(&Op::Local { len: 1000 });
        state
    }

    /// Does it all; says which calls there were that came out as they had to.
    pub(crate) fn run(mut self, ops: &[Op]) -> Seen {
        ops.iter().for_each(|op| self.apply(op));
        self.settle();
        assert_eq!(self.backend.overwritten(), [], "kernels have written outside");
        self.seen
    }

    pub(super) fn saw(&mut self, what: String) {
        *self.seen.entry(what).or_default() += 1;
    }

    pub(super) fn world(&self) -> usize {
        self.comms.len()
    }

    /// A stream for a rank: the first two are its own, the others the next rank's.
    pub(super) fn stream(&mut self, rank: usize, stream: usize) -> Stream {
        let owner = (rank + stream / 2) % self.world();
        self.mixed |= owner != rank;
        self.streams[owner][stream % 2].clone()
    }

    pub(super) fn capturing(&self) -> bool {
        self.streams.iter().flatten().any(|stream| Host::is_capturing(stream).unwrap())
    }

    fn buffer(&mut self, rank: usize, set: usize) -> Option<&mut Buffer> {
        let sets = self.sets.len().max(1);
        self.sets.get_mut(set % sets)?[rank].as_mut()
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::AllReduce { who, stream, input, output, options } => {
                self.all_reduce(who, stream, input, output, options);
            }
            Op::Collective { who, stream, ref draw } => self.collective(who, stream, draw),
            Op::Barrier { who, stream, options } => {
                self.each(who, stream, |comm, stream, _| comm.with(options).barrier(stream));
            }
            Op::Probe { who, stream, options, rounds } => {
                let mut probe = BarrierProbe::default();
                probe.rounds = rounds;
                self.each(who, stream, |comm, stream, counts| comm.with(options).barrier_probe(stream, &probe, counts));
            }
            Op::Alloc { who, len } => {
                let allocate = |(rank, comm): (usize, &mut Option<Comm>)| match who {
                    Who::One(one) if one % self.devices.len() != rank => None,
                    _ => comm.as_mut().and_then(|comm| refusable(comm.alloc(len))),
                };
                let set = self.comms.iter_mut().enumerate().map(allocate).collect();
                self.keep(set);
            }
            Op::Local { len } => {
                let set = self.devices.iter().map(|device| refusable(DeviceBuffer::new(device, len))).collect();
                self.keep(set);
            }
            Op::DropSet(set) if !self.sets.is_empty() => drop(self.sets.swap_remove(set % self.sets.len())),
            Op::DropSet(_) => {}
            Op::Create { ranks, share, timeout_ms, scratch, blocks, threads } => {
                let mut settings = Settings::default();
                settings.timeout = Duration::from_millis(timeout_ms);
                (settings.scratch_bytes, settings.blocks, settings.threads) = (scratch, blocks, threads);
                let devices: Vec<_> = self.devices.iter().cycle().take(ranks).cloned().collect();
                let made = Comm::builder().settings(settings).share_devices(share).all_local(&devices);
                assert!(made.is_err() || ((1..=8).contains(&ranks) && timeout_ms == 1000), "{op:?}");
            }
            Op::RecoverAll { first, ranks } => self.recover_all(first, ranks),
            _ => self.one_rank(op),
        }
    }

    /// What concerns one rank alone.
    fn one_rank(&mut self, op: &Op) {
        let world = self.world();
        match *op {
            Op::Write { rank, set, stream, len } => {
                let stream = self.stream(rank % world, stream);
                let Some(buffer) = self.buffer(rank % world, set) else { return };
                let (len, fits) = (len.min(30_000), len == buffer.len());
                let written = buffer.write(&stream, &vec![1.0; len]);
                assert!(fits || written.is_err(), "{op:?}");
            }
            Op::Copy { rank, from, to, stream } => {
                let stream = self.stream(rank % world, stream);
                let Some(mut target) = self.sets.get_mut(to).and_then(|set| set[rank % world].take()) else { return };
                if let Some(source) = self.buffer(rank % world, from) {
                    let copied = target.copy_from(&stream, source);
                    assert!(target.len() == source.len() || copied.is_err(), "{op:?}");
                }
                self.sets[to][rank % world] = Some(target);
            }
            Op::Read { rank, set, stream } => {
                let stream = self.stream(rank % world, stream);
                let Some(buffer) = self.buffer(rank % world, set) else { return };
                let len = buffer.len();
                match buffer.read(&stream) {
                    Ok(values) => assert_eq!(values.len(), len),
                    Err(error) => {
                        let elsewhere = Host::stream_device(&stream) != Host::buffer_device(buffer.memory());
                        assert!(elsewhere || Host::is_capturing(&stream).unwrap(), "{op:?}: {error}");
                    }
                }
            }
            Op::Bytes { rank, set, stream, offset, bytes } => {
                let stream = self.stream(rank % world, stream);
                let Some(buffer) = self.buffer(rank % world, set) else { return };
                let memory = buffer.memory().clone();
                let fits = offset.checked_add(bytes).is_some_and(|end| end <= Host::bytes(&memory));
                let filled = Host::fill(&stream, &memory, offset, bytes, 7);
                let copied = Host::copy(&stream, (&memory, offset), (&memory, 0), bytes);
                assert!(fits || (filled.is_err() && copied.is_err()), "{op:?}");
                let mut image = vec![0; bytes.min(64)];
                let fits = offset.checked_add(image.len()).is_some_and(|end| end <= Host::bytes(&memory));
                let uploaded = Host::upload(&stream, &image, &memory, offset);
                let downloaded = Host::download(&stream, &memory, offset, &mut image);
                assert!(fits || (uploaded.is_err() && downloaded.is_err()), "{op:?}");
            }
            Op::FromBuffer { rank, set, stream, offset } => {
                let stream = self.stream(rank % world, stream);
                let Some(buffer) = self.buffer(rank % world, set) else { return };
                // None is as large as a Signal.
                assert!(Signal::from_buffer::<Host>(&stream, buffer.memory(), offset).is_err(), "{op:?}");
            }
            Op::BeginCapture { rank, stream } => {
                let stream = self.stream(rank % world, stream);
                let before = Host::is_capturing(&stream).unwrap();
                assert_eq!(Host::begin_capture(&stream).is_err(), before);
            }
            Op::EndCapture { rank, stream } => {
                let stream = self.stream(rank % world, stream);
                let before = Host::is_capturing(&stream).unwrap();
                let graph = Host::end_capture(&stream);
                assert_eq!(graph.is_ok(), before);
                self.graphs.extend(graph.ok());
            }
            Op::Replay { rank, graph, stream } if !self.graphs.is_empty() => {
                let stream = self.stream(rank % world, stream);
                self.diverged = true;
                // Behind whatever runs: that replays of one domain do not overlap is the caller's duty.
                self.settle();
                let _ = refusable(Host::replay(&self.graphs[graph % self.graphs.len()], &stream));
                self.settle();
            }
            Op::Order { rank, from, to } => {
                let (from, to) = (self.stream(rank % world, from), self.stream(rank % world, to));
                let event = Host::record(&from).unwrap();
                let _ = refusable(Host::wait(&to, &event));
            }
            Op::Wait { rank, stream } => {
                let stream = self.stream(rank % world, stream);
                if let Some(comm) = &self.comms[rank % world] {
                    let _ = refusable(comm.wait(&stream));
                }
            }
            Op::Plan { rank, count } => {
                if let Some(comm) = &self.comms[rank % world] {
                    for dtype in Dtype::ALL {
                        ReduceOp::ALL.into_iter().for_each(|op| assert!(comm.plan(count, dtype, op).blocks > 0));
                    }
                }
            }
            Op::Abort(rank) => {
                if let Some(comm) = &self.comms[rank % world] {
                    comm.abort_handle().abort().unwrap();
                    self.diverged = true;
                }
            }
            Op::Recover(rank) => {
                if let Some(comm) = &mut self.comms[rank % world] {
                    let recovered = comm.recover();
                    assert!(recovered.is_err() || world == 1, "{op:?} without the others");
                    self.diverged |= world == 1 && recovered.is_err();
                }
            }
            Op::Leave(rank) => {
                self.comms[rank % world] = None;
                self.diverged = true;
            }
            _ => {}
        }
    }

    fn keep(&mut self, set: Vec<Option<Buffer>>) {
        if self.sets.len() < MOST_SETS {
            self.sets.push(set);
        }
    }

    /// Waits for every stream that can be waited for.
    pub(super) fn settle(&self) {
        for stream in self.streams.iter().flatten() {
            let _ = refusable(Host::synchronize(stream));
        }
    }

    pub(super) fn recover_all(&mut self, first: usize, ranks: usize) {
        let world = self.world();
        let mut some: Vec<Comm> = self.comms.iter_mut().filter_map(Option::take).collect();
        if !some.is_empty() {
            let first = first % some.len();
            some.rotate_left(first);
        }
        let chosen = ranks.min(some.len());
        let recovered = Comm::recover_all(&mut some[..chosen]);
        match recovered {
            Ok(()) => {
                assert_eq!(chosen, world);
                some.iter().for_each(|comm| comm.status().unwrap());
                self.diverged = self.capturing();
            }
            Err(Error::ApiMisuse(ApiMisuse::NotAllRanks { .. })) => assert_ne!(chosen, world),
            Err(error) => assert!(self.capturing(), "{error}"),
        }
        for comm in some {
            let rank = comm.rank();
            self.comms[rank] = Some(comm);
        }
    }
}

/// What a call gave, if anything. An error is fine, as long as it says something.
pub(super) fn refusable<T>(result: Result<T>) -> Option<T> {
    result.inspect_err(|error| assert!(error.to_string().len() > 5, "{error:?}")).ok()
}
