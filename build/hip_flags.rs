//! How AMD kernels are compiled: for the image, and by tests/machine_code.rs for its weakened builds.

/// One code object a run: clang joins several with a tool that distributions package apart.
pub(crate) const FLAGS: [&str; 8] = [
    "-x",
    "hip",
    "--cuda-device-only",
    "--no-gpu-bundle-output",
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-Ikernels",
];
/// Without HIP's headers and device libraries; the kernels use builtins only.
pub(crate) const FREESTANDING: [&str; 3] = ["-nogpuinc", "-nogpulib", "-DSIGNAL_FREESTANDING"];
