//! The CUDA backend.
#![cfg(feature = "cuda")]

use signal_comm::{Error, cuda};

/// Until the backend drives devices, opening it says why it does not.
#[test]
fn opening_says_why_not() {
    match cuda::open() {
        Err(error @ (Error::Unavailable { backend: "cuda", .. } | Error::Image(_))) => {
            assert!(!error.to_string().is_empty());
        }
        other => panic!("{other:?}"),
    }
}
