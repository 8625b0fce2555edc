//! What a small Lamport call costs behind a large one, whose packs it has to clear.
//!
//! `cargo bench --features cuda --bench behind`, on a machine with an NVIDIA GPU: two ranks, each on a GPU of its own where
//! there are two. Microseconds by device events around graphs of 50 calls, the slower rank, medians of rounds in which the
//! graphs take turns. "Behind" is twice a call of a graph in which large and small ones alternate, less a large call behind
//! a large one.
//!
//! Fails when a call of 2 KiB costs more than the limit above one behind its like.

#![allow(clippy::print_stdout, reason = "its output is what it is for")]

mod graphs;

use signal_comm::{Algorithm, cuda};

use graphs::{Reducers, Result, median};

const SMALL: usize = 2 << 10;
const LARGE: usize = 1 << 20;
const ROUNDS: usize = 60;
/// Most microseconds that the small call may cost more.
const LIMIT: f64 = 0.3;

fn main() -> Result<()> {
    let mut reducers = Reducers::open(&cuda::open()?)?;
    let mut capture = |sizes: &[usize]| reducers.capture(Algorithm::Lamport, sizes);
    let patterns = [capture(&[SMALL])?, capture(&[LARGE])?, capture(&[LARGE, SMALL])?];
    let mut times: [Vec<f64>; 3] = Default::default();
    for _ in 0..ROUNDS {
        for (graphs, times) in patterns.iter().zip(&mut times) {
            times.push(reducers.ranks.time(graphs)?);
        }
    }
    let [small, large, both] = times.map(|mut times| median(&mut times));
    let behind = 2.0 * both - large;
    println!("2 KiB behind 2 KiB {small:.2} us, 1 MiB behind 1 MiB {large:.2} us, 2 KiB behind 1 MiB {behind:.2} us");
    println!("2 KiB behind 1 MiB costs {:+.2} us", behind - small);
    if behind - small > LIMIT { Err(format!("more than {LIMIT} us").into()) } else { Ok(()) }
}
