//! Variables of others that change what the library does.

use serde::Serialize;

/// Name, and what it does to a program that uses the library.
const KNOWN: [(&str, &str); 12] = [
    (
        "CUDA_VISIBLE_DEVICES",
        "which NVIDIA GPUs there are, and in which order; processes that each see one take their link for PCI Express",
    ),
    ("CUDA_DEVICE_ORDER", "the order of NVIDIA GPUs"),
    (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "queues of a GPU: of fewer than there are streams, ranks that share a GPU may wait for each other",
    ),
    (
        "CUDA_LAUNCH_BLOCKING",
        "1: each launch waits for its kernel, so ranks that one thread drives wait for each other until the deadline",
    ),
    ("CUDA_MODULE_LOADING", "EAGER: all kernels are loaded at the start"),
    ("CUDA_MPS_PIPE_DIRECTORY", "MPS runs: processes on one GPU run side by side instead of in turns"),
    ("HIP_VISIBLE_DEVICES", "which AMD GPUs there are, and in which order"),
    ("ROCR_VISIBLE_DEVICES", "which AMD GPUs there are, and in which order"),
    (
        "GPU_MAX_HW_QUEUES",
        "queues of an AMD GPU: of fewer than there are streams, ranks that share a GPU may wait for each other",
    ),
    (
        "AMD_SERIALIZE_KERNEL",
        "not 0: each launch waits for its kernel, so ranks that one thread drives wait for each other until the deadline",
    ),
    ("HSA_XNACK", "1: AMD GPUs take page faults, for which the library has no use"),
    (
        "HIP_LAUNCH_BLOCKING",
        "1: each launch waits for its kernel, so ranks that one thread drives wait for each other until the deadline",
    ),
];

/// One that is set.
#[derive(Debug, Serialize)]
pub(super) struct Other {
    pub(super) name: &'static str,
    pub(super) value: String,
    pub(super) effect: &'static str,
}

pub(super) fn others() -> Vec<Other> {
    let set = |(name, effect): &(&'static str, &'static str)| {
        let value = std::env::var_os(name)?.to_string_lossy().into_owned();
        Some(Other { name, value, effect })
    };
    KNOWN.iter().filter_map(set).collect()
}
