//! What RMSNorm behind an all-reduce costs, by one call, which is one kernel or two as the plan has it, and by two.
//!
//! `cargo bench --features cuda --bench norm`, on a machine with an NVIDIA GPU: two ranks, each on a GPU of its own where
//! there are two; bf16, with residual, in place. Microseconds by device events around graphs of 50 calls, the slower rank, medians of rounds in
//! which the graphs take turns. `benches/norm_floor.cu` has the bare kernel for the same rows.

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

mod graphs;

use half::bf16;
use signal_comm::cuda::{self, Cuda};
use signal_comm::{Algorithm, DeviceBuffer, ReduceOp, RmsNorm};

use graphs::{Reducers, Result, median};

const ROUNDS: usize = 30;
const MOST: usize = 128 * 8192;

struct Buffers {
    input: DeviceBuffer<Cuda, bf16>,
    output: DeviceBuffer<Cuda, bf16>,
    residual: DeviceBuffer<Cuda, bf16>,
    weight: DeviceBuffer<Cuda, bf16>,
}

fn main() -> Result<()> {
    let mut reducers = Reducers::open(&cuda::open()?)?;
    let mut buffers = Vec::new();
    for (communicator, stream) in reducers.ranks.communicators.iter().zip(&reducers.ranks.streams) {
        let filled = || -> signal_comm::Result<_> {
            let mut buffer = DeviceBuffer::new(communicator.device(), MOST)?;
            buffer.write(stream, &vec![bf16::from_f32(1.1); MOST])?;
            Ok(buffer)
        };
        buffers.push(Buffers { input: filled()?, output: filled()?, residual: filled()?, weight: filled()? });
    }
    println!(
        "{:>6} {:>6} {:>8} {:>10} {:>8} {:>10}",
        "hidden", "tokens", "bytes", "all-reduce", "one call", "two calls"
    );
    for elements in [2880, 4096, 5120, 7168, 8192] {
        for rows in [1, 4, 8, 16, 32, 64, 128] {
            let all = rows * elements;
            let fused = reducers.ranks.capture(|rank, _, communicator, stream| {
                let Buffers { input, output, residual, weight } = &mut buffers[rank];
                let norm = RmsNorm::new(weight.slice(..elements)?, 1e-5).residual_in_place(residual.slice_mut(..all)?);
                communicator.all_reduce_rms_norm(stream, input.slice(..all)?, output.slice_mut(..all)?, norm)
            })?;
            let apart = reducers.ranks.capture(|rank, _, communicator, stream| {
                let Buffers { input, output, residual, weight } = &mut buffers[rank];
                communicator.all_reduce(stream, input.slice(..all)?, output.slice_mut(..all)?, ReduceOp::Sum)?;
                let norm = RmsNorm::new(weight.slice(..elements)?, 1e-5).residual_in_place(residual.slice_mut(..all)?);
                communicator.rms_norm(stream, output.slice(..all)?, input.slice_mut(..all)?, norm)
            })?;
            let alone = reducers.capture(Algorithm::Lamport, &[all * 2])?;
            let mut times: [Vec<f64>; 3] = Default::default();
            for _ in 0..ROUNDS {
                for (graphs, times) in [&alone, &fused, &apart].into_iter().zip(&mut times) {
                    times.push(reducers.ranks.time(graphs)?);
                }
            }
            let [alone, fused, apart] = times.map(|mut times| median(&mut times));
            println!("{elements:>6} {rows:>6} {:>8} {alone:>10.2} {fused:>8.2} {apart:>10.2}", all * 2);
        }
    }
    Ok(())
}
