//! What bounded waits cost: the kernels as they are beside the same kernels with waits that never end.
//!
//! `bounded IMAGE`, on a machine with an NVIDIA GPU: two ranks, each on a GPU of its own where there are two. IMAGE is a fatbin or
//! cubin of kernels/cuda/kernels.cu compiled with -DSIGNAL_UNBOUNDED_WAITS and else as build/cuda.rs does (ci/cuda.sh pack makes
//! it). Graphs of 50 calls by the bounded build, by the unbounded one, and by the bounded one once more on a communicator of its
//! own, in turns, 200 of each. Medians in microseconds a call; how far the mean of the two bounded ones lies above the unbounded
//! one, and how far they lie apart.
//!
//! Fails when the bounded build is slower by more than 2% and by more than it differs from itself.

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

mod graphs;

use signal_comm::cuda::{self, Cuda, CudaImage};
use signal_comm::{Algorithm, Backend};

use graphs::{Ranks, Result, median};

const ROUNDS: usize = 200;
/// Most that bounded waits may cost.
const LIMIT: f64 = 0.02;

fn main() -> Result<()> {
    let path = std::env::args().nth(1).ok_or("usage: bounded IMAGE")?;
    let bytes: &'static [u8] = std::fs::read(path)?.leak();
    let bounded = cuda::open()?;
    let arch: &'static str = Cuda::describe(&bounded.devices()?[0]).arch.leak();
    let image = CudaImage { bytes, archs: vec![arch].leak(), fingerprint: 1, missing: "" };
    let unbounded = Cuda::open(image)?;
    let mut ranks = [Ranks::open(&bounded)?, Ranks::open(&unbounded)?, Ranks::open(&bounded)?];

    let mut failed = false;
    println!(
        "{:>10} {:>8} {:>9} {:>9} {:>7} {:>9} {:>7}",
        "algorithm", "bytes", "bounded", "unbounded", "", "bounded", ""
    );
    for algorithm in [Algorithm::Lamport, Algorithm::OneStage, Algorithm::TwoStage] {
        for bytes in [2 << 10, 64 << 10, 1 << 20] {
            let mut captured = Vec::new();
            for ranks in &mut ranks {
                captured.push(ranks.capture(algorithm, &[bytes])?);
            }
            let mut times: [Vec<f64>; 3] = Default::default();
            for _ in 0..ROUNDS {
                for ((ranks, graphs), times) in ranks.iter().zip(&captured).zip(&mut times) {
                    times.push(ranks.time(graphs)?);
                }
            }
            let [first, without, again] = times.map(|mut times| median(&mut times));
            let [cost, spread] = [(first + again) / 2.0 / without - 1.0, first / again - 1.0];
            println!(
                "{:>10} {bytes:>8} {first:>9.3} {without:>9.3} {:>6.1}% {again:>9.3} {:>6.1}%",
                algorithm.name(),
                cost * 100.0,
                spread * 100.0
            );
            failed |= cost > LIMIT.max(spread.abs());
        }
    }
    if failed { Err("bounded waits cost more than they may".into()) } else { Ok(()) }
}
