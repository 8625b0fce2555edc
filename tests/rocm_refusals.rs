//! What the ROCm backend refuses, and how it says so, on the library that stands for the HIP runtime (tests/hip-abi): the machine, or the
//! environment, is wrong in one thing.
#![cfg(feature = "rocm")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "clippy knows tests, but not what they call")]

use std::process::Command;

use signal_comm::error::{ApiMisuse, Error, Image};
use signal_comm::rocm::{self, Rocm};
use signal_comm::{Backend, Communicator, MemoryKind, UserKernel};

/// Runs the test `name` again, in a process of its own that has `variables`; true in that process.
fn with(name: &str, variables: &[(&str, &str)]) -> bool {
    const INSIDE: &str = "SIGNAL_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    let output = command.args(["--exact", name]).env(INSIDE, "1").envs(variables.iter().copied()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    false
}

fn two_ranks() -> Error {
    let devices = rocm::open().unwrap().devices().unwrap();
    Communicator::<Rocm>::all_local(&devices[..2]).unwrap_err()
}

#[test]
fn an_image_without_code_for_the_gpu() {
    if with("an_image_without_code_for_the_gpu", &[("SIGNAL_HIP_ABI_ARCHS", "gfx1030")]) {
        let available = rocm::image().archs.join(", ");
        assert_eq!(two_ranks(), Image::Arch { available, device: "gfx1030".to_owned() }.into());
    }
}

/// A user's image is looked at before the runtime is: whole, it is only without the mark.
#[test]
fn a_users_image_that_is_none() {
    let device = rocm::open().unwrap().devices().unwrap().swap_remove(0);
    let load = |bytes: &[u8]| UserKernel::<Rocm>::load(&device, bytes, ["signal_barrier"]).map(|_| ()).unwrap_err();
    let whole = rocm::image().bytes;
    for bytes in [&[][..], b"text", &whole[..1000], &whole[..whole.len() - 1]] {
        let found = load(bytes);
        assert!(matches!(&found, Error::Image(Image::Broken { target: "hip", .. })), "{found}");
    }
    assert!(matches!(load(whole), Error::Image(Image::Abi { .. })));
}

/// Where the image has code for one of them alone, that is what is said of the other.
#[test]
fn architectures_that_differ() {
    if with("architectures_that_differ", &[("SIGNAL_HIP_ABI_ARCHS", "gfx942,gfx90a")]) {
        match two_ranks() {
            Error::Image(Image::Arch { device, .. }) => assert_eq!(device, "gfx90a"),
            Error::Rendezvous(error) => {
                assert_eq!(error.to_string(), "rank 1 has device code=gfx90a, rank 0 has device code=gfx942")
            }
            other => panic!("{other}"),
        }
    }
}

#[test]
fn peer_access_one_way() {
    if with("peer_access_one_way", &[("SIGNAL_HIP_ABI_NO_PEER", "1>0"), ("SIGNAL_P2P", "1")]) {
        match two_ranks() {
            Error::Peer { from, to, why } => {
                assert_eq!([from.as_str(), to.as_str()], ["CPU 1 [0000:02:00.0]", "CPU 0 [0000:01:00.0]"]);
                assert!(why.contains("no peer access for this pair"), "{why}");
            }
            other => panic!("{other}"),
        }
    }
}

fn assert_setting(name: &str, found: &Error) {
    let same = matches!(found, Error::ApiMisuse(ApiMisuse::Setting { name: found, .. }) if *found == name);
    assert!(same, "{found}");
}

#[test]
fn launches_that_block() {
    if with("launches_that_block", &[("HIP_LAUNCH_BLOCKING", "1")]) {
        assert_setting("HIP_LAUNCH_BLOCKING", &two_ranks());
    }
}

#[test]
fn handles_of_the_old_kind() {
    if with("handles_of_the_old_kind", &[("HSA_ENABLE_IPC_MODE_LEGACY", "1")]) {
        let devices = rocm::open().unwrap().devices().unwrap();
        let memory = Rocm::allocate(&devices[0], 4096, MemoryKind::Shared).unwrap();
        assert_setting("HSA_ENABLE_IPC_MODE_LEGACY", &Rocm::export(&memory).unwrap_err());
    }
}
