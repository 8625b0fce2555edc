//! What a user reads who asks for a GPU backend on a machine without the vendor's driver. On a machine that has it, these
//! tests check that it opens.

#[cfg(any(feature = "cuda", feature = "rocm"))]
use signal_comm::error::{Error, Unavailable};

/// An error value that names the libraries that were tried, not a panic.
#[cfg(feature = "cuda")]
#[test]
fn cuda_without_a_driver_is_an_error_value() {
    use signal_comm::Backend;
    match signal_comm::cuda::open() {
        Ok(backend) => assert!(!backend.devices().unwrap().is_empty()),
        Err(Error::Unavailable { backend: "cuda", why: Unavailable::Library { tried } }) => {
            assert!(tried.contains("libcuda.so.1"), "{tried}");
        }
        Err(Error::Unavailable { backend: "cuda", why: Unavailable::NoDevice(_) } | Error::Image(_)) => {}
        Err(other) => panic!("{other}"),
    }
}

/// As above.
#[cfg(feature = "rocm")]
#[test]
fn rocm_without_a_driver_is_an_error_value() {
    use signal_comm::Backend;
    match signal_comm::rocm::open() {
        Ok(backend) => assert!(!backend.devices().unwrap().is_empty()),
        Err(Error::Unavailable { backend: "rocm", why: Unavailable::Library { tried } }) => {
            assert!(tried.contains("libamdhip64.so.6"), "{tried}");
        }
        Err(Error::Unavailable { backend: "rocm", why: Unavailable::NoDevice(why) }) => {
            assert!(why.contains("/dev/kfd"), "{why}");
        }
        Err(Error::Image(_)) => {}
        Err(other) => panic!("{other}"),
    }
}
