//! What bounded waits cost: the kernels as they are beside the same kernels with waits that never end.
//!
//! `bounded IMAGE`, on a machine with an NVIDIA GPU: two ranks, each on a GPU of its own where there are two. IMAGE is a fatbin or
//! cubin of kernels/cuda/kernels.cu compiled with -DSIGNAL_UNBOUNDED_WAITS and else as build/cuda.rs does (ci/cuda.sh pack makes
//! it). Where code and buffers happen to lie moves a call's time by 2 to 3%, and one load in a few by 9%, so each build is loaded
//! eight times, at places of its own and with buffers of its own. Graphs of 50 calls by all sixteen in turns, 200 of each. Medians
//! of the eight medians, in microseconds a call; how far the bounded one lies above the other; and how far apart the eight of each
//! build lie.
//!
//! Fails when bounded waits cost 2% or more, or more than the loads of one build differ among themselves.

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

mod graphs;

use signal_comm::cuda::{self, Cuda, CudaImage};
use signal_comm::{Algorithm, Backend};

use graphs::{Reducers, Result, median};

const ROUNDS: usize = 200;
/// Of each build.
const LOADS: usize = 8;
/// What bounded waits may not cost.
const LIMIT: f64 = 0.02;

/// The driver is opened once for each address of an image.
fn load(image: CudaImage) -> Result<Reducers> {
    Reducers::open(&Cuda::open(CudaImage { bytes: image.bytes.to_vec().leak(), ..image })?)
}

fn main() -> Result<()> {
    let path = std::env::args().nth(1).ok_or("usage: bounded IMAGE")?;
    let arch: &'static str = Cuda::describe(&cuda::open()?.devices()?[0]).arch.leak();
    let bytes = std::fs::read(path)?.leak();
    let unbounded = CudaImage { bytes, archs: vec![arch].leak(), fingerprint: 1, missing: "" };
    // One of each build in turn.
    let images = [cuda::image(), unbounded];
    let mut loads = images.into_iter().cycle().take(images.len() * LOADS).map(load).collect::<Result<Vec<_>>>()?;

    let mut failed = false;
    println!(
        "{:>10} {:>8} {:>9} {:>9} {:>7} {:>9} {:>9}",
        "algorithm", "bytes", "bounded", "unbounded", "cost", "bounded", "unbounded"
    );
    for algorithm in [Algorithm::Lamport, Algorithm::OneStage, Algorithm::TwoStage] {
        for bytes in [2 << 10, 64 << 10, 1 << 20] {
            let mut graphs = Vec::new();
            for load in &mut loads {
                graphs.push(load.capture(algorithm, &[bytes])?);
            }
            let mut times = vec![Vec::new(); loads.len()];
            for _ in 0..ROUNDS {
                for ((load, graphs), times) in loads.iter().zip(&graphs).zip(&mut times) {
                    times.push(load.ranks.time(graphs)?);
                }
            }
            let of_build =
                |build| median_and_spread(times.iter().skip(build).step_by(2).map(|times| median(&mut times.clone())));
            let [(bounded, spread), (unbounded, other_spread)] = [0, 1].map(of_build);
            let cost = bounded / unbounded - 1.0;
            println!(
                "{:>10} {bytes:>8} {bounded:>9.3} {unbounded:>9.3} {:>6.1}% {:>8.1}% {:>8.1}%",
                algorithm.name(),
                cost * 100.0,
                spread * 100.0,
                other_spread * 100.0
            );
            failed |= cost >= LIMIT.min(spread.max(other_spread));
        }
    }
    if failed { Err("bounded waits cost more than they may".into()) } else { Ok(()) }
}

/// The second relative to the first.
fn median_and_spread(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let mut values: Vec<f64> = values.collect();
    let median = median(&mut values); // sorted now
    (median, (values[values.len() - 1] - values[0]) / median)
}
