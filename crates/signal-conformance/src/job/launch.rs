//! A job as a call of the library, typed or raw.

use std::ops::Range;

use signal_core::{ApiMisuse, Backend, CallOptions, Communicator, DeviceBuffer, Dtype, Element, Error, Result};

use super::{Job, all_equal};

/// One rank's memory for a typed call, as [`RankData`](super::RankData) has it.
#[derive(Debug)]
pub struct Operands<'a, B: Backend, T: Element> {
    /// A buffer for each operand.
    pub buffers: &'a mut [DeviceBuffer<B, T>],
    /// Where in its buffer each lies.
    pub ranges: &'a [Range<usize>],
    /// Counts to send and received counts, where they are on the device.
    pub counts: Option<&'a mut [DeviceBuffer<B, u32>; 2]>,
    /// Whether there is one operand for input and output.
    pub in_place: bool,
}

/// One rank's memory for a raw call.
#[derive(Clone, Debug)]
pub struct RawOperands {
    /// Where each operand begins.
    pub addresses: Vec<u64>,
    /// Where counts to send and received counts begin, where they are on the device.
    pub counts: [u64; 2],
    /// Whether there is one operand for input and output.
    pub in_place: bool,
}

impl Job {
    /// Enqueues one rank's call.
    ///
    /// # Errors
    /// Those of the call; [`ApiMisuse::Counts`] if there are fewer operands than it takes.
    pub fn launch<B: Backend, T: Element>(
        &self,
        comm: &mut Communicator<B>,
        options: CallOptions,
        stream: &B::Stream,
        operands: Operands<'_, B, T>,
    ) -> Result<()> {
        let Operands { buffers, ranges, counts: of_counts, in_place } = operands;
        let (rank, world) = (comm.rank(), comm.world_size());
        if let Job::Transfers(transfers) = self {
            return transfer(comm, options, stream, (buffers, ranges), transfers);
        }
        let lack = || Error::from(ApiMisuse::Counts { found: ranges.len(), world: 2 });
        let (first, others) = buffers.split_first_mut().ok_or_else(lack)?;
        let range = ranges.first().cloned().ok_or_else(lack)?;
        let other = match (others.first_mut(), ranges.get(1)) {
            (Some(buffer), Some(range)) => Some(buffer.slice_mut(range.clone())?),
            _ => None,
        };
        let call = comm.with(options);
        match self {
            Job::AllReduce(_, op) if in_place => call.all_reduce_in_place(stream, first.slice_mut(range)?, *op),
            Job::AllReduce(_, op) => call.all_reduce(stream, first.slice(range)?, other.ok_or_else(lack)?, *op),
            Job::ReduceScatter(_, op) if in_place => call.reduce_scatter_in_place(stream, first.slice_mut(range)?, *op),
            Job::ReduceScatter(counts, op) if all_equal(counts) && counts.len() == world => {
                call.reduce_scatter(stream, first.slice(range)?, other.ok_or_else(lack)?, *op)
            }
            Job::ReduceScatter(counts, op) => {
                call.reduce_scatter_ragged(stream, first.slice(range)?, other.ok_or_else(lack)?, counts, *op)
            }
            Job::AllGather(_) if in_place => call.all_gather_in_place(stream, first.slice_mut(range)?),
            Job::AllGather(counts) if all_equal(counts) && counts.len() == world => {
                call.all_gather(stream, first.slice(range)?, other.ok_or_else(lack)?)
            }
            Job::AllGather(counts) => {
                call.all_gather_ragged(stream, first.slice(range)?, other.ok_or_else(lack)?, counts)
            }
            Job::Broadcast(_, root) => call.broadcast(stream, first.slice_mut(range)?, *root),
            Job::Scatter(_, root) if rank == *root => {
                call.scatter(stream, Some(first.slice(range)?), other.ok_or_else(lack)?, *root)
            }
            Job::Scatter(_, root) => call.scatter(stream, None, first.slice_mut(range)?, *root),
            Job::Gather(_, root) => call.gather(stream, first.slice(range)?, other, *root),
            Job::Reduce(_, root, op) if in_place => call.reduce_in_place(stream, first.slice_mut(range)?, *op, *root),
            Job::Reduce(_, root, op) => call.reduce(stream, first.slice(range)?, other, *op, *root),
            Job::AllToAll(_) if in_place => call.all_to_all_in_place(stream, first.slice_mut(range)?),
            Job::AllToAll(_) => call.all_to_all(stream, first.slice(range)?, other.ok_or_else(lack)?),
            Job::AllToAllRagged(counts) => {
                call.all_to_all_ragged(stream, first.slice(range)?, other.ok_or_else(lack)?, counts)
            }
            Job::AllToAllCounted(..) => {
                let [sent, received] = of_counts.ok_or_else(lack)?;
                call.all_to_all_counted(stream, first.slice(range)?, &*sent, other.ok_or_else(lack)?, received)
            }
            // Returned above.
            Job::Transfers(_) => Ok(()),
        }
    }

    /// The same by the raw layer. A job without [such a form](Self::has_raw) does nothing.
    ///
    /// # Safety
    /// As [`Call::all_reduce_raw`](signal_core::Call::all_reduce_raw), with operands as long as the job says, unless the call is
    /// refused.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub unsafe fn launch_raw<B: Backend>(
        &self,
        comm: &mut Communicator<B>,
        options: CallOptions,
        stream: &B::Stream,
        dtype: Dtype,
        operands: &RawOperands,
    ) -> Result<()> {
        let RawOperands { addresses, counts: [sent, received], in_place } = operands;
        let rank = comm.rank();
        let bytes = |count: usize| count.saturating_mul(dtype.bytes());
        let at = |operand: usize| addresses.get(operand).copied().unwrap_or(0);
        // Of operands in place, the part that is this rank's.
        let own = |count: usize| at(0).wrapping_add((rank as u64).wrapping_mul(bytes(count) as u64));
        let output = if *in_place { at(0) } else { at(1) };
        if let Job::Transfers(transfers) = self {
            let mut group = comm.with(options).transfers();
            for (operand, (_, to, count)) in transfers.iter().filter(|(from, ..)| *from == rank).enumerate() {
                // SAFETY: passed on to the caller.
                group = unsafe { group.send_raw(at(operand), bytes(*count), *to)? };
            }
            let sends = transfers.iter().filter(|(from, ..)| *from == rank).count();
            for (operand, (from, _, count)) in transfers.iter().filter(|(_, to, _)| *to == rank).enumerate() {
                // SAFETY: passed on to the caller.
                group = unsafe { group.receive_raw(at(sends + operand), bytes(*count), *from)? };
            }
            return group.launch(stream);
        }
        let call = comm.with(options);
        // SAFETY: passed on to the caller.
        unsafe {
            match self {
                Job::AllReduce(count, op) => call.all_reduce_raw(stream, at(0), output, *count, dtype, *op),
                Job::ReduceScatter(counts, op) if all_equal(counts) => {
                    let count = counts.first().copied().unwrap_or(0);
                    let output = if *in_place { own(count) } else { at(1) };
                    call.reduce_scatter_raw(stream, at(0), output, count, dtype, *op)
                }
                Job::AllGather(counts) if all_equal(counts) => {
                    let count = counts.first().copied().unwrap_or(0);
                    let input = if *in_place { own(count) } else { at(0) };
                    call.all_gather_raw(stream, input, output, bytes(count))
                }
                Job::Broadcast(count, root) => call.broadcast_raw(stream, at(0), bytes(*count), *root),
                // Others' input is not looked at.
                Job::Scatter(count, root) if rank == *root => {
                    call.scatter_raw(stream, at(0), at(1), bytes(*count), *root)
                }
                Job::Scatter(count, root) => call.scatter_raw(stream, 1, at(0), bytes(*count), *root),
                // Nor is others' output.
                Job::Gather(count, root) => call.gather_raw(stream, at(0), at(1), bytes(*count), *root),
                Job::Reduce(count, root, op) => call.reduce_raw(stream, at(0), output, *count, dtype, *op, *root),
                Job::AllToAll(count) => call.all_to_all_raw(stream, at(0), output, bytes(*count)),
                Job::AllToAllCounted(room, _) => {
                    call.all_to_all_counted_raw(stream, at(0), *sent, at(1), *received, *room, dtype.bytes())
                }
                _ => Ok(()),
            }
        }
    }
}

/// One rank's sends and receives. One of each, or of one of them, has a call of its own.
fn transfer<B: Backend, T: Element>(
    comm: &mut Communicator<B>,
    options: CallOptions,
    stream: &B::Stream,
    (buffers, ranges): (&mut [DeviceBuffer<B, T>], &[Range<usize>]),
    transfers: &[(usize, usize, usize)],
) -> Result<()> {
    let rank = comm.rank();
    let sends: Vec<usize> = transfers.iter().filter(|(from, ..)| *from == rank).map(|(_, to, _)| *to).collect();
    let receives: Vec<usize> = transfers.iter().filter(|(_, to, _)| *to == rank).map(|(from, ..)| *from).collect();
    if buffers.len() != sends.len() + receives.len() || ranges.len() != buffers.len() {
        return Err(ApiMisuse::Counts { found: ranges.len(), world: sends.len() + receives.len() }.into());
    }
    let (inputs, outputs) = buffers.split_at_mut(sends.len());
    let (from, to) = ranges.split_at(sends.len());
    // They take no options.
    if options == CallOptions::default() {
        match (inputs.first(), outputs.first_mut(), sends.as_slice(), receives.as_slice()) {
            (Some(input), None, [peer], []) => return comm.send(stream, input.slice(from[0].clone())?, *peer),
            (None, Some(output), [], [peer]) => return comm.receive(stream, output.slice_mut(to[0].clone())?, *peer),
            (Some(input), Some(output), [target], [source]) => {
                let (input, output) = (input.slice(from[0].clone())?, output.slice_mut(to[0].clone())?);
                return comm.send_receive(stream, (input, *target), (output, *source));
            }
            _ => {}
        }
    }
    let mut group = comm.with(options).transfers();
    for ((peer, buffer), range) in sends.iter().zip(inputs).zip(from) {
        group = group.send(buffer.slice(range.clone())?, *peer)?;
    }
    for ((peer, buffer), range) in receives.iter().zip(outputs).zip(to) {
        group = group.receive(buffer.slice_mut(range.clone())?, *peer)?;
    }
    group.launch(stream)
}
