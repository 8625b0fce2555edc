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
const LARGEST: usize = 2 << 20;

pub(crate) struct Ranks {
    pub(crate) communicators: Vec<Communicator<Cuda>>,
    pub(crate) streams: Vec<Stream>,
}

/// Two ranks with buffers for all-reduces of up to 2 MiB.
pub(crate) struct Reducers {
    pub(crate) ranks: Ranks,
    inputs: Vec<DeviceBuffer<Cuda, bf16>>,
    outputs: Vec<DeviceBuffer<Cuda, bf16>>,
}

impl Reducers {
    pub(crate) fn open(cuda: &Cuda) -> Result<Self> {
        let mut ranks = Ranks::open(cuda)?;
        let (mut inputs, mut outputs) = (Vec::new(), Vec::new());
        for (communicator, stream) in ranks.communicators.iter_mut().zip(&ranks.streams) {
            let mut input = communicator.alloc(LARGEST / 2)?;
            input.write(stream, &vec![bf16::from_f32(1.1); LARGEST / 2])?;
            inputs.push(input);
            outputs.push(DeviceBuffer::new(communicator.device(), LARGEST / 2)?);
        }
        Ok(Reducers { ranks, inputs, outputs })
    }

    /// A graph for each rank, of calls that go round `sizes`, in bytes.
    pub(crate) fn capture(&mut self, algorithm: Algorithm, sizes: &[usize]) -> Result<Graphs> {
        let mut options = CallOptions::default();
        options.algorithm = Some(algorithm);
        let (inputs, outputs) = (&self.inputs, &mut self.outputs);
        self.ranks.capture(|rank, call, communicator, stream| {
            let bytes = sizes[call % sizes.len()];
            let (input, output) = (inputs[rank].slice(..bytes / 2)?, outputs[rank].slice_mut(..bytes / 2)?);
            communicator.with(options).all_reduce(stream, input, output, ReduceOp::Sum)
        })
    }
}

impl Ranks {
    pub(crate) fn open(cuda: &Cuda) -> Result<Self> {
        let devices = cuda.devices()?;
        let devices = [devices[0].clone(), devices.get(1).unwrap_or(&devices[0]).clone()];
        let communicators = Communicator::<Cuda>::builder().share_devices(true).all_local(&devices)?;
        let streams = devices.iter().map(Cuda::create_stream).collect::<signal_comm::Result<Vec<_>>>()?;
        Ok(Ranks { communicators, streams })
    }

    /// A graph for each rank, of 50 calls that `enqueue` makes: it gets the rank, the call's number, and what to call with.
    pub(crate) fn capture(
        &mut self,
        mut enqueue: impl FnMut(usize, usize, &mut Communicator<Cuda>, &Stream) -> signal_comm::Result<()>,
    ) -> Result<Graphs> {
        let mut graphs = Vec::new();
        for (rank, (communicator, stream)) in self.communicators.iter_mut().zip(&self.streams).enumerate() {
            Cuda::begin_capture(stream)?;
            for call in 0..CALLS {
                enqueue(rank, call, communicator, stream)?;
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
