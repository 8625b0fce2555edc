//! GPU collectives for Rust: one synchronization protocol on CUDA, ROCm and plain CPU threads.
//!
//! ```
//! # #[cfg(feature = "host")]
//! # fn main() -> signal_comm::Result<()> {
//! use signal_comm::{Backend, Communicator, ReduceOp, host};
//!
//! // Four ranks on CPU threads; `cuda::open()` and `rocm::open()` give the same on GPUs.
//! let devices = host::open()?.devices()?;
//! # if devices.len() < 4 { return Ok(()); }
//! let mut ranks = Communicator::<host::Host>::all_local(&devices[..4])?;
//!
//! let mut calls = Vec::new();
//! for comm in &mut ranks {
//!     let stream = host::Host::create_stream(comm.device())?;
//!     let mut input = comm.alloc::<f32>(1000)?; // symmetric: peers read it in place
//!     let mut output = comm.alloc::<f32>(1000)?;
//!     input.write(&stream, &vec![comm.rank() as f32 + 1.0; 1000])?;
//!     comm.all_reduce(&stream, &input, &mut output, ReduceOp::Sum)?; // enqueues, and returns
//!     calls.push((stream, output));
//! }
//! for (comm, (stream, output)) in ranks.iter().zip(&calls) {
//!     comm.wait(stream)?;
//!     assert_eq!(output.read(stream)?, vec![10.0; 1000]);
//! }
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "host"))]
//! # fn main() {}
//! ```
//!
//! # What is promised
//! - The bits of a result are the same on every rank and do not depend on algorithm, size, grid or backend: sums run over
//!   rank 0, 1, ... in f32 and are rounded once ([`reference`](mod@reference)).
//! - A wait ends: with its peers, or at the deadline with an [`Error::Timeout`] that names the missing ranks. Then
//!   [`Communicator::recover_all`] brings all ranks back.
//! - Misuse is an [`Error`] before anything is launched; nothing panics.
//!
//! # Kernels of your own
//! `include/signal/device.h` has the protocol's primitives for a kernel of yours that does more than a collective; [`UserKernel::load`] and
//! [`Call::launch_kernel`] run it on a communicator's Signal. `examples/bias_gelu` shows all of it.
//!
//! # Features
//! `host` (default), `cuda` and `rocm`, additive. Each compiles the kernels for its target and embeds the image; none
//! needs its vendor's driver to build, and a backend whose driver or image is missing says so when it is opened.
//!
//! Supported: Linux on x86-64 and aarch64.

#[cfg(not(all(target_os = "linux", any(target_arch = "x86_64", target_arch = "aarch64"))))]
compile_error!("signal-comm supports Linux on x86-64 and aarch64");

mod images;

/// Keeps the example of the README compiling.
#[cfg(all(doctest, feature = "host"))]
#[doc = include_str!("../README.md")]
struct Readme;

pub use signal_core::*;

cfg_if::cfg_if! {
    if #[cfg(feature = "host")] {
        pub mod host;
    }
}

cfg_if::cfg_if! {
    if #[cfg(feature = "cuda")] {
        pub mod cuda;
    }
}

cfg_if::cfg_if! {
    if #[cfg(feature = "rocm")] {
        pub mod rocm;
    }
}
