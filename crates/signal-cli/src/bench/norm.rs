//! `--norm`: a collective with residual and norm behind it, as a load to measure.
//!
//! The residual and the normed rows have places of their own, so that each call does the same. All that a call leaves is compared with the scalar reference: normed
//! rows, or codes and their scales, and the new residual.

use signal_comm::kernel::RowFormat;
use signal_comm::reference::Rng;
use signal_comm::{Backend, Collective, Dtype, Element, Float, ReduceOp};
use signal_conformance::rows::{Buffers, Data, Job, Where};

use super::args::{Args, Memory, Norm};
use super::measure::{self, Load, Measurement};
use super::ranks::{Ranks, Work};
use super::shape::{Shape, Size};
use crate::error::{CliError, Result};

/// The job of a size, whose larger side has so many bytes: of whole rows, one at least. Nothing where no norm is asked for.
pub(super) fn job(shape: &Shape, args: &Args, bytes: usize, dtype: Dtype) -> Option<(Job, Size)> {
    let (norm, elements) = (args.norm?, args.hidden as usize);
    let (row_bytes, parts) = (elements * dtype.bytes(), shape.parts());
    let rows = (bytes / row_bytes / parts).max(1);
    let mut job = Job::plain(Some(shape.collective), rows, elements);
    job.is_layer = norm == Norm::Layer;
    job.has_bias = job.is_layer;
    job.is_fast = args.fast;
    job.format = args.norm_output.unwrap_or(RowFormat::Plain);
    job.residual = Where::Apart;
    Some((job, Size { bytes: rows * parts * row_bytes, count: rows * elements }))
}

/// What is asked for, in words.
pub(super) fn describe(args: &Args) -> Option<String> {
    let norm = match args.norm? {
        Norm::Rms => "RMSNorm",
        Norm::Layer => "LayerNorm",
    };
    let (hidden, fast) = (args.hidden, if args.fast { "fast " } else { "" });
    let format = args.norm_output.unwrap_or(RowFormat::Plain).name();
    Some(format!("residual and {fast}{norm} of rows of {hidden} to {format}"))
}

/// Refuses what there is not.
pub(super) fn check(args: &Args) -> Result<()> {
    let refuse = |why: String| Err(CliError::Arguments(why));
    let collective = args.collective;
    if !matches!(collective, Collective::AllReduce | Collective::ReduceScatter | Collective::AllGather) {
        return refuse(format!("--norm: {collective} has none; all-reduce, reduce-scatter and all-gather have"));
    }
    if args.op.is_some_and(|op| op != ReduceOp::Sum) {
        return refuse("--norm: the norm is of sums".to_owned());
    }
    if args.sweep || args.dump.is_some() || args.memory != Memory::Symmetric {
        return refuse("--norm goes with none of --sweep, --dump and --memory: its buffers are local".to_owned());
    }
    // The others take a shorter last block.
    let whole = [RowFormat::Mxfp8, RowFormat::Nvfp4];
    if let Some(format) = args.norm_output.filter(|format| whole.contains(format)) {
        let block = format.block_elements().unwrap_or(1);
        if !(args.hidden as usize).is_multiple_of(block) {
            let (hidden, name) = (args.hidden, format.name());
            return refuse(format!("--hidden {hidden}: {name} has blocks of {block} elements, which rows hold whole"));
        }
    }
    Ok(())
}

/// Measures and checks one size.
pub(super) fn measure<B: Backend, T: Float>(ranks: &mut Ranks<B>, job: Job, args: &Args) -> Result<Measurement> {
    // The same on all ranks, and other data at each size.
    let job = Job { seed: Rng::new(ranks.seed ^ job.rows as u64).next_u64(), ..job };
    let data = job.data::<T>(ranks.world());
    let sets = (0..args.sets()).map(|_| {
        let here = ranks.here().zip(&ranks.communicators).zip(&ranks.streams);
        let buffers = here.map(|((rank, comm), stream)| Buffers::new(comm.device(), stream, &job, &data, rank, 0));
        buffers.collect::<signal_comm::Result<_>>()
    });
    let mut load = Rows { job, sets: sets.collect::<signal_comm::Result<_>>()?, data };
    measure::measure(ranks, &mut load, args)
}

struct Rows<B: Backend, T: Element> {
    job: Job,
    /// By rank of this process.
    sets: Vec<Vec<Buffers<B, T>>>,
    data: Data<T>,
}

impl<B: Backend, T: Float> Load<B> for Rows<B, T> {
    fn sets(&self) -> usize {
        self.sets.len()
    }

    fn prepare(&mut self, ranks: &Ranks<B>) -> Result<()> {
        for set in &mut self.sets {
            for (buffers, stream) in set.iter_mut().zip(&ranks.streams) {
                buffers.spoil(stream)?;
            }
        }
        Ok(())
    }

    fn enqueue(&mut self, ranks: &mut Ranks<B>, set: usize) -> Result<()> {
        let (job, set, options) = (&self.job, &mut self.sets[set], ranks.options);
        let ranks = ranks.communicators.iter_mut().zip(&ranks.streams);
        for ((communicator, stream), buffers) in ranks.zip(set) {
            buffers.launch(communicator.with(options), stream, job)?;
        }
        Ok(())
    }

    fn check(&mut self, ranks: &Ranks<B>, work: &Work<B>, found: &mut Measurement) -> Result<()> {
        let sets = self.sets.len();
        for (_, set) in self.sets.iter().enumerate().filter(|(index, _)| work.calls_of(*index, sets) > 0) {
            for ((rank, buffers), stream) in ranks.here().zip(set).zip(&ranks.streams) {
                found.wrong += buffers.wrong(stream, &self.job, &self.data, rank)?;
            }
        }
        Ok(())
    }

    fn corrupt(&mut self, ranks: &Ranks<B>, index: usize) -> Result<()> {
        Ok(self.sets[0][index].corrupt(&ranks.streams[index])?)
    }
}
