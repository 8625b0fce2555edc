//! Matrices over pairs of devices, as p2pBandwidthLatencyTest prints them: rows work, columns hold the memory.

use std::time::Duration;

use serde::Serialize;
use signal_comm::{Backend, CallOptions, Communicator, DeviceBuffer, Settings};

/// Bytes that are moved to measure a bandwidth.
const BYTES: usize = 32 << 20;
const BYTES_HOST: usize = 4 << 20;
/// Barriers in a graph, and replays of it, of which the middle one counts.
const BARRIERS: usize = 50;
const REPLAYS: usize = 5;
/// Whoever does not come in this time does not come.
const TIMEOUT: Duration = Duration::from_secs(5);

/// What was measured of each pair, or why not.
#[derive(Debug, Default, Serialize)]
pub(super) struct Matrices {
    /// GB/s at which the row's device reads the column's memory by a pulled broadcast; on the diagonal, at which it copies its own.
    pub(super) read_gb_s: Vec<Vec<Option<f64>>>,
    /// Microseconds of a barrier between two ranks on the devices, in a graph: one store and its arrival. On the diagonal two ranks share the device.
    pub(super) barrier_us: Vec<Vec<Option<f64>>>,
    /// Row, column, reason.
    pub(super) refused: Vec<(usize, usize, String)>,
}

/// Measures all pairs.
pub(super) fn measure<B: Backend>(devices: &[B::Device], is_host: bool) -> Matrices {
    let bytes = if is_host { BYTES_HOST } else { BYTES };
    let mut found = Matrices::default();
    for (row, reader) in devices.iter().enumerate() {
        let (mut reads, mut barriers) = (Vec::new(), Vec::new());
        for (column, owner) in devices.iter().enumerate() {
            let pair = pair::<B>(owner, reader, bytes);
            if let Err(why) = &pair {
                found.refused.push((row, column, why.to_string()));
            }
            let (read, barrier) = pair.map_or((None, None), |(read, barrier)| (Some(read), Some(barrier)));
            reads.push(read);
            barriers.push(barrier);
        }
        found.read_gb_s.push(reads);
        found.barrier_us.push(barriers);
    }
    found
}

/// GB/s and microseconds between two ranks, of which the first one's memory is read.
fn pair<B: Backend>(owner: &B::Device, reader: &B::Device, bytes: usize) -> signal_comm::Result<(f64, f64)> {
    let mut settings = Settings::from_env()?;
    settings.timeout = TIMEOUT;
    settings.trace = None;
    let builder = Communicator::<B>::builder().settings(settings).share_devices(true);
    let mut comms = builder.all_local(&[owner.clone(), reader.clone()])?;
    let streams = comms.iter().map(|comm| B::create_stream(comm.device())).collect::<signal_comm::Result<Vec<_>>>()?;

    let mut graphs = Vec::new();
    for (comm, stream) in comms.iter_mut().zip(&streams) {
        B::begin_capture(stream)?;
        (0..BARRIERS).try_for_each(|_| comm.barrier(stream))?;
        graphs.push(B::end_capture(stream)?);
    }
    let once = timed::<B>(&streams, &mut || (0..2).try_for_each(|rank| B::replay(&graphs[rank], &streams[rank])))?;
    let barrier = once.as_secs_f64() * 1e6 / BARRIERS as f64;

    let read = if owner == reader {
        let [from, to] = [(); 2].map(|()| DeviceBuffer::<B, u8>::new(owner, bytes));
        let (from, mut to) = (from?, to?);
        timed::<B>(&streams[..1], &mut || to.copy_from(&streams[0], &from))?
    } else {
        let mut buffers =
            comms.iter_mut().map(|comm| comm.alloc::<u8>(bytes)).collect::<signal_comm::Result<Vec<_>>>()?;
        let mut options = CallOptions::default();
        options.algorithm = Some(signal_comm::Algorithm::Pull);
        timed::<B>(&streams, &mut || {
            let ranks = comms.iter_mut().zip(&streams).zip(&mut buffers);
            ranks.into_iter().try_for_each(|((comm, stream), buffer)| comm.with(options).broadcast(stream, buffer, 0))
        })?
    };
    comms.iter().zip(&streams).try_for_each(|(comm, stream)| comm.wait(stream))?;
    Ok((bytes as f64 / read.as_secs_f64() / 1e9, barrier))
}

/// How long the work takes on the last stream: the middle of a few times.
fn timed<B: Backend>(
    streams: &[B::Stream],
    work: &mut dyn FnMut() -> signal_comm::Result<()>,
) -> signal_comm::Result<Duration> {
    let last = &streams[streams.len() - 1];
    let mut times = Vec::new();
    for _ in 0..REPLAYS {
        work()?; // so that the timed one is enqueued while this runs
        let begin = B::record(last)?;
        work()?;
        let end = B::record(last)?;
        streams.iter().try_for_each(B::synchronize)?;
        times.push(B::elapsed(&begin, &end)?);
    }
    times.sort_unstable();
    Ok(times[REPLAYS / 2].max(Duration::from_nanos(1)))
}

/// A matrix as text.
pub(super) fn text(title: &str, rows: &[Vec<String>]) -> String {
    let width = rows.iter().flatten().map(String::len).max().unwrap_or(0).max(4);
    let mut text = format!("  {title}\n  {:>4}", "D\\D");
    for column in 0..rows.len() {
        text += &format!(" {column:>width$}");
    }
    text += "\n";
    for (number, row) in rows.iter().enumerate() {
        text += &format!("  {number:>4}");
        for cell in row {
            text += &format!(" {cell:>width$}");
        }
        text += "\n";
    }
    text
}

/// Numbers as cells.
pub(super) fn cells(matrix: &[Vec<Option<f64>>]) -> Vec<Vec<String>> {
    let cell = |value: &Option<f64>| value.map_or_else(|| "-".to_owned(), |value| format!("{value:.2}"));
    matrix.iter().map(|row| row.iter().map(cell).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_stand_below_each_other() {
        let found = text("GB/s", &cells(&[vec![Some(1.0), None], vec![Some(12345.678), Some(2.5)]]));
        assert_eq!(found, "  GB/s\n   D\\D        0        1\n     0     1.00        -\n     1 12345.68     2.50\n");
    }
}
