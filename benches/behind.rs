//! What a small Lamport call costs behind a large one, whose packs it has to clear.
//!
//! `cargo bench --features cuda --bench behind`, on a machine with an NVIDIA GPU: two ranks, each on a GPU of its own where
//! there are two. Microseconds by device events around graphs of 50 calls, the slower rank, medians of rounds in which the
//! graphs take turns. "Behind" is half of a graph in which large and small calls alternate, less a large call behind a
//! large one.
//!
//! Fails when a call of 2 KiB costs more than the limit above one behind its like.

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

use std::error::Error;
use std::time::Duration;

use half::bf16;
use signal_comm::cuda::{self, Cuda, Stream};
use signal_comm::{Algorithm, Backend, CallOptions, Communicator, DeviceBuffer, ReduceOp};

const SMALL: usize = 2 << 10;
const LARGE: usize = 1 << 20;
const CALLS: usize = 50;
const ROUNDS: usize = 60;
/// Most microseconds that the small call may cost more.
const LIMIT: f64 = 0.3;

type Result<T> = std::result::Result<T, Box<dyn Error>>;
type Graph = <Cuda as Backend>::Graph;

/// Two ranks with a buffer of each size.
struct Ranks {
    communicators: Vec<Communicator<Cuda>>,
    streams: Vec<Stream>,
    inputs: Vec<DeviceBuffer<Cuda, bf16>>,
    outputs: Vec<DeviceBuffer<Cuda, bf16>>,
}

fn main() -> Result<()> {
    let mut ranks = Ranks::open()?;
    let patterns = [ranks.capture(&[SMALL])?, ranks.capture(&[LARGE])?, ranks.capture(&[LARGE, SMALL])?];
    let mut times: [Vec<f64>; 3] = Default::default();
    for _ in 0..ROUNDS {
        for (graphs, times) in patterns.iter().zip(&mut times) {
            times.push(ranks.time(graphs)?);
        }
    }
    let [small, large, both] = times.map(|mut times| median(&mut times));
    let behind = 2.0 * both - large;
    println!("2 KiB behind 2 KiB {small:.2} us, 1 MiB behind 1 MiB {large:.2} us, 2 KiB behind 1 MiB {behind:.2} us");
    println!("2 KiB behind 1 MiB costs {:+.2} us", behind - small);
    if behind - small > LIMIT { Err(format!("more than {LIMIT} us").into()) } else { Ok(()) }
}

impl Ranks {
    fn open() -> Result<Self> {
        let devices = cuda::open()?.devices()?;
        let devices = [devices[0].clone(), devices.get(1).unwrap_or(&devices[0]).clone()];
        let communicators = Communicator::<Cuda>::builder().share_devices(true).all_local(&devices)?;
        let streams = devices.iter().map(Cuda::create_stream).collect::<signal_comm::Result<Vec<_>>>()?;
        let buffers = || {
            devices.iter().map(|device| DeviceBuffer::new(device, LARGE / 2)).collect::<signal_comm::Result<Vec<_>>>()
        };
        let (mut inputs, outputs) = (buffers()?, buffers()?);
        for (input, stream) in inputs.iter_mut().zip(&streams) {
            input.write(stream, &vec![bf16::from_f32(1.1); LARGE / 2])?;
        }
        Ok(Ranks { communicators, streams, inputs, outputs })
    }

    /// A graph for each rank, of calls that go round `sizes`.
    fn capture(&mut self, sizes: &[usize]) -> Result<Vec<Graph>> {
        let mut options = CallOptions::default();
        options.algorithm = Some(Algorithm::Lamport);
        let mut graphs = Vec::new();
        for (rank, communicator) in self.communicators.iter_mut().enumerate() {
            let stream = &self.streams[rank];
            Cuda::begin_capture(stream)?;
            for bytes in sizes.iter().cycle().take(CALLS) {
                let (input, output) =
                    (self.inputs[rank].slice(..bytes / 2)?, self.outputs[rank].slice_mut(..bytes / 2)?);
                communicator.with(options).all_reduce(stream, input, output, ReduceOp::Sum)?;
            }
            graphs.push(Cuda::end_capture(stream)?);
        }
        Ok(graphs)
    }

    /// Microseconds a call. The first replay keeps the ranks in step while the timed one is enqueued.
    fn time(&mut self, graphs: &[Graph]) -> Result<f64> {
        self.replay(graphs)?;
        let starts = self.record()?;
        self.replay(graphs)?;
        let ends = self.record()?;
        let mut slowest = Duration::ZERO;
        for (rank, communicator) in self.communicators.iter().enumerate() {
            communicator.wait(&self.streams[rank])?;
            slowest = slowest.max(Cuda::elapsed(&starts[rank], &ends[rank])?);
        }
        Ok(slowest.as_secs_f64() * 1e6 / CALLS as f64)
    }

    fn replay(&self, graphs: &[Graph]) -> Result<()> {
        Ok(graphs.iter().zip(&self.streams).try_for_each(|(graph, stream)| Cuda::replay(graph, stream))?)
    }

    fn record(&self) -> Result<Vec<<Cuda as Backend>::Event>> {
        Ok(self.streams.iter().map(Cuda::record).collect::<signal_comm::Result<_>>()?)
    }
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
