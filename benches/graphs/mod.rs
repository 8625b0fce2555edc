//! Two ranks, each on a GPU of its own where there are two, and graphs of calls that are timed on both.

use std::error::Error;
use std::time::Duration;

use half::bf16;
use signal_comm::cuda::{Cuda, Stream};
use signal_comm::{Algorithm, Backend, CallOptions, Communicator, DeviceBuffer, ReduceOp};

pub(crate) type Result<T> = std::result::Result<T, Box<dyn Error>>;
/// One for each rank.
pub(crate) type Graphs = Vec<<Cuda as Backend>::Graph>;

/// Calls in a graph.
pub(crate) const CALLS: usize = 50;
/// Replays before a timed one: of the smallest calls this is a millisecond, longer than it takes to enqueue them.
const LEAD: usize = 15;
/// Largest message, in bytes.
const LARGEST: usize = 1 << 20;

pub(crate) struct Ranks {
    communicators: Vec<Communicator<Cuda>>,
    streams: Vec<Stream>,
    inputs: Vec<DeviceBuffer<Cuda, bf16>>,
    outputs: Vec<DeviceBuffer<Cuda, bf16>>,
}

impl Ranks {
    pub(crate) fn open(cuda: &Cuda) -> Result<Self> {
        let devices = cuda.devices()?;
        let devices = [devices[0].clone(), devices.get(1).unwrap_or(&devices[0]).clone()];
        let mut communicators = Communicator::<Cuda>::builder().share_devices(true).all_local(&devices)?;
        let streams = devices.iter().map(Cuda::create_stream).collect::<signal_comm::Result<Vec<_>>>()?;
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for communicator in &mut communicators {
            inputs.push(communicator.alloc(LARGEST / 2)?);
            outputs.push(DeviceBuffer::new(communicator.device(), LARGEST / 2)?);
        }
        for (input, stream) in inputs.iter_mut().zip(&streams) {
            input.write(stream, &vec![bf16::from_f32(1.1); LARGEST / 2])?;
        }
        Ok(Ranks { communicators, streams, inputs, outputs })
    }

    /// A graph for each rank, of calls that go round `sizes`, in bytes.
    pub(crate) fn capture(&mut self, algorithm: Algorithm, sizes: &[usize]) -> Result<Graphs> {
        let mut options = CallOptions::default();
        options.algorithm = Some(algorithm);
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

    /// Microseconds a call, on the slower rank. Replays before the timed one keep the ranks in step until that is enqueued on both.
    pub(crate) fn time(&self, graphs: &Graphs) -> Result<f64> {
        (0..LEAD).try_for_each(|_| self.replay(graphs))?;
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

    fn replay(&self, graphs: &Graphs) -> Result<()> {
        Ok(graphs.iter().zip(&self.streams).try_for_each(|(graph, stream)| Cuda::replay(graph, stream))?)
    }

    fn record(&self) -> Result<Vec<<Cuda as Backend>::Event>> {
        Ok(self.streams.iter().map(Cuda::record).collect::<signal_comm::Result<_>>()?)
    }
}

pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
