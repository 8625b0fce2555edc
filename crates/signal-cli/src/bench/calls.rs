//! One rank's call of each collective.

use signal_comm::{Backend, Call, Collective, DeviceBuffer, Element};

use super::shape::{Place, Shape, Size};
use crate::error::{CliError, Result};

/// A rank's buffers of one call. In place the second is the only one.
pub(super) type Buffers<'a, B, T> = (&'a DeviceBuffer<B, T>, &'a mut DeviceBuffer<B, T>);

/// Enqueues `call` as the one of `rank`.
pub(super) fn enqueue<B: Backend, T: Element>(
    call: Call<'_, B>,
    stream: &B::Stream,
    (shape, size, place): (&Shape, Size, Place),
    rank: usize,
    (input, output): Buffers<'_, B, T>,
) -> Result<()> {
    let Shape { collective, root, op, .. } = *shape;
    if place == Place::InPlace {
        match collective {
            Collective::AllReduce => call.all_reduce_in_place(stream, output, op)?,
            Collective::ReduceScatter => call.reduce_scatter_in_place(stream, output, op)?,
            Collective::AllGather => call.all_gather_in_place(stream, output)?,
            Collective::Broadcast => call.broadcast(stream, output, root)?,
            Collective::Reduce => call.reduce_in_place(stream, output, op, root)?,
            Collective::AllToAll => call.all_to_all_in_place(stream, output)?,
            other => return Err(CliError::Arguments(format!("bench has no {other} in place"))),
        }
        return Ok(());
    }
    let at_root = rank == root;
    let source = input.slice(size.elements(shape.input(rank)))?;
    let target = output.slice_mut(size.elements(shape.output(rank, place)))?;
    match collective {
        Collective::AllReduce => call.all_reduce(stream, source, target, op)?,
        Collective::ReduceScatter => call.reduce_scatter(stream, source, target, op)?,
        Collective::AllGather => call.all_gather(stream, source, target)?,
        Collective::Scatter => call.scatter(stream, at_root.then_some(source), target, root)?,
        Collective::Gather => call.gather(stream, source, at_root.then_some(target), root)?,
        Collective::Reduce => call.reduce(stream, source, at_root.then_some(target), op, root)?,
        Collective::AllToAll => call.all_to_all(stream, source, target)?,
        Collective::SendRecv => {
            let (to, from) = shape.peers(rank);
            call.transfers().send(source, to)?.receive(target, from)?.launch(stream)?;
        }
        other => return Err(CliError::Arguments(format!("bench has no {other} out of place"))),
    }
    Ok(())
}
