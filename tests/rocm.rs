//! The conformance suite on ROCm. Needs an AMD GPU, or a library that stands for the HIP runtime (tests/hip-abi): where there is none
//! every test fails, saying so.
#![cfg(feature = "rocm")]

use signal_comm::rocm;

signal_conformance::suite!(conformance, rocm::open());
