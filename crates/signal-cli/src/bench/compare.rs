//! `--compare`: the vendor's library beside Signal, on the same buffers and streams, measured in the same way.
//!
//! What data it moves is compared bit by bit. Sums it adds in an order of its own, and rounds on the way; so of reductions the single calls are held against
//! exact values, to within so many roundings as there are ranks, and those in place, which reduce results again, are not checked.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::Serialize;
use signal_comm::{Backend, Collective, Dtype, Element, ReduceOp};
use signal_nccl::{Communicator, DataType, Library, Operation, UniqueId, Vendor};

use super::args::Args;
use super::check;
use super::data::Sets;
use super::measure::{self, Load, Measurement};
use super::ranks::{Ranks, Work};
use super::report::Timing;
use super::shape::Place;
use crate::backend::BackendName;
use crate::error::{CliError, Result};

/// A library to measure beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Rival {
    /// NVIDIA's NCCL (libnccl.so.2)
    Nccl,
    /// AMD's RCCL (librccl.so.1)
    Rccl,
}

impl Rival {
    fn vendor(self) -> Vendor {
        match self {
            Rival::Nccl => Vendor::Nccl,
            Rival::Rccl => Vendor::Rccl,
        }
    }

    fn backend(self) -> BackendName {
        match self {
            Rival::Nccl => BackendName::Cuda,
            Rival::Rccl => BackendName::Rocm,
        }
    }
}

/// Refuses what the command line alone shows to be impossible.
pub(super) fn check(args: &Args) -> Result<()> {
    let Some(rival) = args.compare.iter().find(|rival| rival.backend() != args.group.backend) else { return Ok(()) };
    let (vendor, needed, backend) = (rival.vendor(), rival.backend(), args.group.backend);
    Err(CliError::Arguments(format!(
        "--compare {}: {vendor} runs on the {needed} backend, and this is {backend}",
        vendor.name()
    )))
}

/// What was found of a library at one size.
#[derive(Debug, Serialize)]
pub(super) struct Contender {
    pub(super) name: &'static str,
    pub(super) version: String,
    pub(super) out_of_place: Option<Timing>,
    pub(super) in_place: Option<Timing>,
    /// Why it was not measured.
    pub(super) refusal: Option<String>,
}

/// A library's communicators, of the ranks of this process.
pub(super) struct Beside {
    library: Library,
    ranks: Vec<Communicator>,
    timeout: Duration,
}

impl Beside {
    /// Makes the communicators. Collective.
    pub(super) fn create<B: Backend>(rival: Rival, ranks: &mut Ranks<B>) -> Result<Self> {
        let opened = open(rival, ranks);
        let library = ranks.agree(opened)?;
        let id = if ranks.together.leads() { UniqueId::new(&library).map(Some) } else { Ok(None) };
        let id = ranks.agree(id.map_err(CliError::from))?;
        let ids: Vec<Option<Vec<u8>>> = ranks.together.gather(id.map(|id| id.to_bytes().to_vec()))?;
        let bytes = ids.into_iter().flatten().next().and_then(|bytes| bytes.try_into().ok());
        let id = UniqueId::from_bytes(bytes.unwrap_or([0; 128]));
        let timeout = ranks.communicators[0].settings().timeout;
        let (here, world) = (ranks.here(), ranks.world());
        let first = here.start;
        let _watchdog = Watchdog::new(library.vendor(), timeout);
        let made = Communicator::init_ranks(&library, &id, world, here, |rank, init| -> Result<()> {
            B::with_current(ranks.communicators[rank - first].device(), init)??;
            Ok(())
        });
        let made = ranks.agree(made)?;
        Ok(Beside { library, ranks: made, timeout })
    }

    /// Measures one size; nothing in a place that the library has not.
    pub(super) fn measure<B: Backend, T: Element>(
        &self,
        ranks: &mut Ranks<B>,
        sets: &mut Sets<B, T>,
        args: &Args,
    ) -> Result<Contender> {
        let mut timings = [None, None];
        for (timing, place) in timings.iter_mut().zip([Place::OutOfPlace, Place::InPlace]) {
            let lacks = place == Place::InPlace && ranks.shape.collective == Collective::AllToAll;
            if !ranks.shape.places().contains(&place) || lacks {
                continue;
            }
            let (bytes, shape) = (sets.size.bytes, ranks.shape);
            let _watchdog = Watchdog::new(self.library.vendor(), self.timeout.saturating_mul(2));
            let mut load = Calls { beside: self, sets, place };
            let args = Args { corrupt: None, ..args.clone() };
            let found = measure::measure(ranks, &mut load, &args)?;
            *timing = Some(Timing::new(&found, bytes, &shape));
        }
        let [out_of_place, in_place] = timings;
        let (name, version) = (self.library.vendor().name(), self.library.version().to_string());
        Ok(Contender { name, version, out_of_place, in_place, refusal: None })
    }

    /// Ends the communicators, whose calls have ended.
    pub(super) fn end(self) -> Result<()> {
        let _watchdog = Watchdog::new(self.library.vendor(), self.timeout);
        let library = self.library;
        // Each waits for the others.
        Ok(library.group(|| self.ranks.into_iter().try_for_each(Communicator::destroy))?)
    }
}

/// Loads the library, and refuses ranks that it does not take.
fn open<B: Backend>(rival: Rival, ranks: &Ranks<B>) -> Result<Library> {
    let vendor = rival.vendor();
    let refuse = |why: String| Err(CliError::Arguments(format!("--compare {}: {why}", vendor.name())));
    if ranks.world() < 2 {
        return refuse("of one rank there is nothing to compare".to_owned());
    }
    for (rank, device) in ranks.devices.iter().enumerate() {
        if let Some(other) = ranks.devices[..rank].iter().position(|other| other.uuid == device.uuid) {
            return refuse(format!("{vendor} refuses ranks that share a device, and ranks {other} and {rank} do"));
        }
    }
    Ok(Library::open(vendor)?)
}

/// Calls of the library on the buffers of a size.
struct Calls<'a, B: Backend, T: Element> {
    beside: &'a Beside,
    sets: &'a mut Sets<B, T>,
    place: Place,
}

impl<B: Backend, T: Element> Load<B> for Calls<'_, B, T> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn prepare(&mut self, ranks: &Ranks<B>) -> Result<()> {
        self.sets.prepare(ranks, self.place)
    }

    fn enqueue(&mut self, ranks: &mut Ranks<B>, set: usize) -> Result<()> {
        let set = &self.sets.sets[set];
        self.beside.library.group(|| {
            let all = self.beside.ranks.iter().zip(&ranks.communicators).zip(&ranks.streams);
            for (((comm, own), stream), (input, output)) in all.zip(set.inputs.iter().zip(&set.outputs)) {
                let output = output.address();
                let input = if self.place == Place::InPlace { output } else { input.address() };
                let called = B::with_current(own.device(), || self.call(comm, ranks, stream, (input, output)))?;
                called?;
            }
            Ok(())
        })
    }

    fn check(&mut self, ranks: &Ranks<B>, work: &Work<B>, found: &mut Measurement) -> Result<()> {
        let place = self.place;
        let reduces = ranks.shape.collective.reduces();
        for (index, set) in self.sets.sets.iter().enumerate() {
            let calls = work.calls_of(index, self.sets.len());
            if calls == 0 || (reduces && place == Place::InPlace && calls > 1) {
                continue;
            }
            for ((rank, output), stream) in ranks.here().zip(&set.outputs).zip(&ranks.streams) {
                let output = output.read(stream)?;
                if !reduces {
                    found.wrong += check::wrong_elements(&output, &set.data.after(rank, place, calls, &set.data.once));
                    continue;
                }
                let error = set.data.error_of(rank, place, &output);
                found.max_error = found.max_error.max(error);
                // Each rank may round once more, and in a type of fewer places than f32.
                let most = 4.0 * ranks.world() as f64 * set.data.error.max(f64::from(f32::EPSILON));
                found.wrong += u64::from(error > most);
            }
        }
        Ok(())
    }

    fn corrupt(&mut self, _: &Ranks<B>, _: usize) -> Result<()> {
        Ok(())
    }
}

impl<B: Backend, T: Element> Calls<'_, B, T> {
    /// One rank's call, on the parts of its buffers that Signal's takes.
    fn call(
        &self,
        comm: &Communicator,
        ranks: &Ranks<B>,
        stream: &B::Stream,
        (input, output): (u64, u64),
    ) -> Result<()> {
        let (shape, count, rank) = (&ranks.shape, self.sets.size.count, comm.rank());
        let part = (count * size_of::<T>()) as u64;
        let at = |base: u64, part_number: usize| base + part * part_number as u64;
        let (send, receive) = (at(input, shape.input(rank).start), at(output, shape.output(rank, self.place).start));
        let (kind, operation) = (data_type(T::DTYPE)?, operation(shape.op)?);
        let raw = B::raw_stream(stream).map_or(std::ptr::null_mut(), std::ptr::NonNull::as_ptr);
        let (root, at_root) = (shape.root, rank == shape.root);
        // SAFETY: the addresses are of this rank's buffers of the set, which hold these parts and outlive the batch, which ends idle, and the graphs, which a
        // measurement drops before the next one; the stream is the rank's, and orders the calls. All ranks make the same ones.
        unsafe {
            match shape.collective {
                Collective::AllReduce => comm.all_reduce((send, receive), count, (kind, operation), raw)?,
                Collective::ReduceScatter => comm.reduce_scatter((input, receive), count, (kind, operation), raw)?,
                Collective::AllGather => comm.all_gather((send, output), count, kind, raw)?,
                Collective::Broadcast => comm.broadcast((output, output), count, kind, root, raw)?,
                Collective::Reduce => comm.reduce((input, output), count, (kind, operation), root, raw)?,
                Collective::AllToAll => (0..comm.world()).try_for_each(|peer| {
                    comm.send(at(input, peer), count, kind, peer, raw)?;
                    comm.receive(at(output, peer), count, kind, peer, raw)
                })?,
                Collective::Scatter => {
                    if at_root {
                        (0..comm.world()).try_for_each(|peer| comm.send(at(input, peer), count, kind, peer, raw))?;
                    }
                    comm.receive(receive, count, kind, root, raw)?;
                }
                Collective::Gather => {
                    comm.send(send, count, kind, root, raw)?;
                    if at_root {
                        (0..comm.world())
                            .try_for_each(|peer| comm.receive(at(output, peer), count, kind, peer, raw))?;
                    }
                }
                Collective::SendRecv => {
                    let (to, from) = shape.peers(rank);
                    comm.send(send, count, kind, to, raw)?;
                    comm.receive(receive, count, kind, from, raw)?;
                }
                other => return Err(CliError::Arguments(format!("--compare: nothing stands for {other}"))),
            }
        }
        Ok(())
    }
}

fn data_type(dtype: Dtype) -> Result<DataType> {
    match dtype {
        Dtype::F32 => Ok(DataType::Float32),
        Dtype::F16 => Ok(DataType::Float16),
        Dtype::Bf16 => Ok(DataType::Bfloat16),
        other => Err(CliError::Arguments(format!("--compare: no data of type {other}"))),
    }
}

fn operation(op: ReduceOp) -> Result<Operation> {
    match op {
        ReduceOp::Sum => Ok(Operation::Sum),
        ReduceOp::Prod => Ok(Operation::Prod),
        ReduceOp::Max => Ok(Operation::Max),
        ReduceOp::Min => Ok(Operation::Min),
        ReduceOp::Avg => Ok(Operation::Avg),
        other => Err(CliError::Arguments(format!("--compare: no operator {other}"))),
    }
}

/// Ends the program, with a reason, unless it is dropped in time: the library's waits know no deadline.
struct Watchdog(Arc<AtomicBool>);

impl Watchdog {
    fn new(vendor: Vendor, patience: Duration) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        thread::spawn(move || {
            let began = Instant::now();
            // Relaxed: nothing else is told by it.
            while !seen.load(Ordering::Relaxed) {
                if began.elapsed() > patience {
                    eprintln!("error: {vendor} did not end within {} s, so the bench ends", patience.as_secs_f64());
                    std::process::exit(1);
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        Watchdog(over)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
