//! The ROCm backend.
#![cfg(feature = "rocm")]

use signal_comm::{Error, rocm};

/// Until the backend drives devices, opening it says why it does not.
#[test]
fn opening_says_why_not() {
    match rocm::open() {
        Err(error @ (Error::Unavailable { backend: "rocm", .. } | Error::Image(_))) => {
            assert!(!error.to_string().is_empty());
        }
        other => panic!("{other:?}"),
    }
}
