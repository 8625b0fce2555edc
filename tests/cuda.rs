//! The conformance suite on CUDA. Needs a GPU: where there is none every test fails, saying so.
#![cfg(feature = "cuda")]

use signal_comm::cuda;

signal_conformance::suite!(conformance, cuda::open());
