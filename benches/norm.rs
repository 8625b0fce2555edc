//! What a norm behind an all-reduce costs: by one call, which is one kernel or two as the plan has it, and by two; with other norms and other outputs;
//! and of many rows, by one kernel and by two.
//!
//! `cargo bench --features cuda --bench norm`, on a machine with an NVIDIA GPU: two ranks, each on a GPU of its own where
//! there are two; bf16, with residual, in place. Microseconds by device events around graphs of 50 calls, the slower rank, medians of rounds in
//! which the graphs take turns. With hidden sizes as arguments, the first table of those alone. `benches/norm_floor.cu` has the bare kernel for the same rows.

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

mod graphs;

use half::bf16;
use signal_comm::cuda::{self, Cuda};
use signal_comm::{Algorithm, CallOptions, DeviceBuffer, E4m3, LayerNorm, NormOutput, ReduceOp, RmsNorm};

use graphs::{Graphs, Ranks, Reducers, Result, median};

const ROUNDS: usize = 30;
const MOST: usize = 4096 * 4096;

struct Buffers {
    input: DeviceBuffer<Cuda, bf16>,
    output: DeviceBuffer<Cuda, bf16>,
    residual: DeviceBuffer<Cuda, bf16>,
    weight: DeviceBuffer<Cuda, bf16>,
    codes: DeviceBuffer<Cuda, E4m3>,
    bytes: DeviceBuffer<Cuda, u8>,
    scales: DeviceBuffer<Cuda, f32>,
    scale_bytes: DeviceBuffer<Cuda, u8>,
    scale_codes: DeviceBuffer<Cuda, E4m3>,
    scale: DeviceBuffer<Cuda, f32>,
    integers: DeviceBuffer<Cuda, i8>,
}

fn main() -> Result<()> {
    let mut reducers = Reducers::open(&cuda::open()?)?;
    let mut buffers = Vec::new();
    for (communicator, stream) in reducers.ranks.communicators.iter().zip(&reducers.ranks.streams) {
        let device = communicator.device();
        let filled = || -> signal_comm::Result<_> {
            let mut buffer = DeviceBuffer::new(device, MOST)?;
            buffer.write(stream, &vec![bf16::from_f32(1.1); MOST])?;
            Ok(buffer)
        };
        let mut scale = DeviceBuffer::new(device, 1)?;
        scale.write(stream, &[0.01])?;
        buffers.push(Buffers {
            input: filled()?,
            output: filled()?,
            residual: filled()?,
            weight: filled()?,
            codes: DeviceBuffer::new(device, MOST)?,
            bytes: DeviceBuffer::new(device, MOST / 2)?,
            scales: DeviceBuffer::new(device, MOST / 128)?,
            scale_bytes: DeviceBuffer::new(device, MOST / 32)?,
            scale_codes: DeviceBuffer::new(device, MOST / 16)?,
            scale,
            integers: DeviceBuffer::new(device, MOST)?,
        });
    }
    // A bench is given arguments by cargo too.
    let sizes: Vec<usize> = std::env::args().filter_map(|argument| argument.parse().ok()).collect();
    if !sizes.is_empty() {
        return by_rows(&mut reducers, &mut buffers, &sizes);
    }
    by_rows(&mut reducers, &mut buffers, &[2880, 4096, 5120, 7168, 8192])?;
    by_form(&mut reducers.ranks, &mut buffers)?;
    large(&mut reducers.ranks, &mut buffers)
}

/// Medians of graphs that take turns.
fn times<const N: usize>(ranks: &Ranks, rounds: usize, graphs: [&Graphs; N]) -> Result<[f64; N]> {
    let mut times = [const { Vec::new() }; N];
    for _ in 0..rounds {
        for (graphs, times) in graphs.into_iter().zip(&mut times) {
            times.push(ranks.time(graphs)?);
        }
    }
    Ok(times.map(|mut times| median(&mut times)))
}

/// RMSNorm behind an all-reduce, with a residual in place.
fn fused(
    ranks: &mut Ranks,
    buffers: &mut [Buffers],
    rows: usize,
    elements: usize,
    options: CallOptions,
) -> Result<Graphs> {
    let all = rows * elements;
    ranks.capture(|rank, _, communicator, stream| {
        let Buffers { input, output, residual, weight, .. } = &mut buffers[rank];
        let norm = RmsNorm::new(weight.slice(..elements)?, 1e-5).residual_in_place(residual.slice_mut(..all)?);
        let call = communicator.with(options);
        call.all_reduce_rms_norm(stream, input.slice(..all)?, output.slice_mut(..all)?, norm)
    })
}

/// The same by two calls.
fn apart(ranks: &mut Ranks, buffers: &mut [Buffers], rows: usize, elements: usize) -> Result<Graphs> {
    let all = rows * elements;
    ranks.capture(|rank, _, communicator, stream| {
        let Buffers { input, output, residual, weight, .. } = &mut buffers[rank];
        communicator.all_reduce(stream, input.slice(..all)?, output.slice_mut(..all)?, ReduceOp::Sum)?;
        let norm = RmsNorm::new(weight.slice(..elements)?, 1e-5).residual_in_place(residual.slice_mut(..all)?);
        communicator.rms_norm(stream, output.slice(..all)?, input.slice_mut(..all)?, norm)
    })
}

fn by_rows(reducers: &mut Reducers, buffers: &mut [Buffers], sizes: &[usize]) -> Result<()> {
    println!(
        "{:>6} {:>6} {:>8} {:>10} {:>8} {:>10}",
        "hidden", "tokens", "bytes", "all-reduce", "one call", "two calls"
    );
    for &elements in sizes {
        for rows in [1, 4, 8, 16, 32, 64, 128] {
            let bytes = 2 * rows * elements;
            let alone = reducers.capture(Algorithm::Lamport, &[bytes])?;
            let ranks = &mut reducers.ranks;
            let one = fused(ranks, buffers, rows, elements, CallOptions::default())?;
            let two = apart(ranks, buffers, rows, elements)?;
            let [alone, one, two] = times(ranks, ROUNDS, [&alone, &one, &two])?;
            println!("{elements:>6} {rows:>6} {bytes:>8} {alone:>10.2} {one:>8.2} {two:>10.2}");
        }
    }
    Ok(())
}

/// Other norms and other outputs.
fn by_form(ranks: &mut Ranks, buffers: &mut [Buffers]) -> Result<()> {
    const FORMS: [&str; 9] = ["rms", "fast", "layer", "e4m3", "e4m3-row", "e4m3-group", "i8-row", "mxfp8", "nvfp4"];
    print!("\n{:>6} {:>6}", "hidden", "tokens");
    FORMS.iter().for_each(|form| print!(" {form:>10}"));
    println!();
    for elements in [2880, 4096, 8192] {
        for rows in [1, 8, 64, 128] {
            let all = rows * elements;
            let mut graphs = Vec::new();
            for form in FORMS {
                graphs.push(ranks.capture(|rank, _, communicator, stream| {
                    let Buffers {
                        input,
                        output,
                        residual,
                        weight,
                        codes,
                        bytes,
                        scales,
                        scale_bytes,
                        scale_codes,
                        scale,
                        integers,
                    } = &mut buffers[rank];
                    let (input, weight) = (input.slice(..all)?, weight.slice(..elements)?);
                    let residual = residual.slice_mut(..all)?;
                    let blocks = |of: usize| rows * elements.div_ceil(of);
                    let output: NormOutput<'_, Cuda, bf16> = match form {
                        "e4m3" => NormOutput::e4m3(codes.slice_mut(..all)?, &*scale),
                        "e4m3-row" => NormOutput::e4m3_per_row(codes.slice_mut(..all)?, scales.slice_mut(..rows)?),
                        "e4m3-group" => {
                            NormOutput::e4m3_per_group(codes.slice_mut(..all)?, scales.slice_mut(..blocks(128))?)
                        }
                        "i8-row" => NormOutput::i8_per_row(integers.slice_mut(..all)?, scales.slice_mut(..rows)?),
                        "mxfp8" => NormOutput::mxfp8(codes.slice_mut(..all)?, scale_bytes.slice_mut(..blocks(32))?),
                        "nvfp4" => NormOutput::nvfp4(
                            bytes.slice_mut(..all / 2)?,
                            scale_codes.slice_mut(..blocks(16))?,
                            &*scale,
                        ),
                        _ => output.slice_mut(..all)?.into(),
                    };
                    if form == "layer" {
                        let norm = LayerNorm::new(weight, weight, 1e-5).residual_in_place(residual);
                        return communicator.all_reduce_layer_norm(stream, input, output, norm);
                    }
                    let norm = RmsNorm::new(weight, 1e-5).residual_in_place(residual).fast(form == "fast");
                    communicator.all_reduce_rms_norm(stream, input, output, norm)
                })?);
            }
            print!("{elements:>6} {rows:>6}");
            for chunk in graphs.chunks(3) {
                let [a, b, c] = chunk else { unreachable!("three times three forms") };
                times(ranks, ROUNDS, [a, b, c])?.iter().for_each(|time| print!(" {time:>10.2}"));
            }
            println!();
        }
    }
    Ok(())
}

/// Many rows: by the plan, by two calls, and by one kernel in two stages.
fn large(ranks: &mut Ranks, buffers: &mut [Buffers]) -> Result<()> {
    const ELEMENTS: usize = 4096;
    println!(
        "\n{:>6} {:>6} {:>9} {:>8} {:>10} {:>10}",
        "hidden", "tokens", "bytes", "one call", "two calls", "two-stage"
    );
    for rows in [128, 256, 512, 1024, 2048, 4096] {
        let mut options = CallOptions::default();
        let one = fused(ranks, buffers, rows, ELEMENTS, options)?;
        options.algorithm = Some(Algorithm::TwoStagePush);
        let two_stage = fused(ranks, buffers, rows, ELEMENTS, options)?;
        let two = apart(ranks, buffers, rows, ELEMENTS)?;
        let [one, two, two_stage] = times(ranks, 5, [&one, &two, &two_stage])?;
        println!("{ELEMENTS:>6} {rows:>6} {:>9} {one:>8.2} {two:>10.2} {two_stage:>10.2}", 2 * rows * ELEMENTS);
    }
    Ok(())
}
