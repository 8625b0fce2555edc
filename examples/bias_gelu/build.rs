//! Compiles the kernel for each backend that is on. What has no compiler is left out with a warning; `SIGNAL_REQUIRE_IMAGES` makes that an
//! error, and `SIGNAL_SKIP_IMAGES` leaves all out, as in the library's own build.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

const CUDA: &str = "src/bias_gelu.cu";
const HIP: &str = "src/bias_gelu.hip";

fn main() {
    for file in [CUDA, HIP] {
        println!("cargo::rerun-if-changed={file}");
    }
    let include = PathBuf::from(variable("DEP_SIGNAL_COMM_KERNELS_INCLUDE"));
    for folder in ["", "../kernels"] {
        println!("cargo::rerun-if-changed={}", include.join(folder).display());
    }
    let out = PathBuf::from(variable("OUT_DIR"));
    println!("cargo::rustc-check-cfg=cfg(host_kernel)");
    if on("HOST") && made("host", host(&include)) {
        println!("cargo::rustc-cfg=host_kernel");
    }
    for (feature, target, compile) in [("CUDA", "cuda", cuda as fn(&Path, &Path) -> _), ("ROCM", "hip", hip)] {
        let image = out.join(format!("bias_gelu.{target}"));
        if on(feature) && !made(target, compile(&include, &image)) {
            // Loading an empty image says that it is none.
            std::fs::write(&image, []).unwrap_or_else(|e| println!("cargo::error={}: {e}", image.display()));
        }
    }
}

/// Whether there is an image now; if not, says why.
fn made(target: &str, result: Result<(), String>) -> bool {
    let required = variable("SIGNAL_REQUIRE_IMAGES").split(',').any(|word| word.trim() == target);
    let quiet = !required && variable("SIGNAL_SKIP_IMAGES") == "1";
    for line in result.as_ref().err().iter().filter(|_| !quiet).flat_map(|why| why.lines()) {
        println!("cargo::{}=no {target} kernel: {line}", if required { "error" } else { "warning" });
    }
    result.is_ok()
}

fn host(include: &Path) -> Result<(), String> {
    skipped()?;
    let mut build = cc::Build::new();
    build.cpp(true).cpp_link_stdlib(None).std("c++17").opt_level(2).include(include).cargo_warnings(false);
    for flag in ["-ffp-contract=off", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra", "-x", "c++"] {
        build.flag(flag);
    }
    build.file(CUDA).try_compile("bias_gelu").map_err(|e| e.to_string())
}

fn cuda(include: &Path, image: &Path) -> Result<(), String> {
    skipped()?;
    let home = PathBuf::from(variable("CUDA_HOME")).join("bin/nvcc");
    let nvcc = first(&[&variable("NVCC"), &home.display().to_string(), "nvcc", "/usr/local/cuda/bin/nvcc"])?;
    let archs = variable("SIGNAL_CUDA_ARCHS");
    let archs = if archs.is_empty() { "80,90".to_owned() } else { archs };
    let mut command = Command::new(nvcc);
    command.args(["-std=c++17", "-O3", "-fmad=false", "--fatbin"]);
    for arch in archs.split(',') {
        command.arg(format!("-gencode=arch=compute_{arch},code=sm_{arch}"));
    }
    // PTX for later devices: from 90 on, since kernels from older PTX are not launched early.
    command.arg("-gencode=arch=compute_90,code=compute_90");
    run(command.arg("-I").arg(include).arg(CUDA).arg("-o").arg(image))
}

fn hip(include: &Path, image: &Path) -> Result<(), String> {
    skipped()?;
    let under = |root: &str| PathBuf::from(variable(root)).join("bin/hipcc").display().to_string();
    let hipccs =
        [variable("HIPCC"), under("ROCM_PATH"), under("HIP_PATH"), "/opt/rocm/bin/hipcc".into(), "hipcc".into()];
    let (compiler, freestanding) = match first(&hipccs.each_ref().map(String::as_str)) {
        Ok(hipcc) => (hipcc, &[][..]),
        // Without any part of ROCm: the header needs none.
        Err(_) => (
            first(&[&variable("SIGNAL_CLANG"), "clang++-19", "clang++"])?,
            &["-nogpuinc", "-nogpulib", "-DSIGNAL_FREESTANDING"][..],
        ),
    };
    let archs = variable("AMDGPU_TARGETS");
    // One code object: the example runs on the first of the targets.
    let arch = archs.split([';', ',', ' ']).find(|arch| !arch.is_empty()).unwrap_or("gfx942");
    let mut command = Command::new(compiler);
    command.env("HIP_PLATFORM", "amd").args(["-x", "hip", "--cuda-device-only", "--no-gpu-bundle-output"]);
    command.args(["-std=c++17", "-O3", "-ffp-contract=off"]).args(freestanding).arg(format!("--offload-arch={arch}"));
    run(command.arg("-I").arg(include).arg(HIP).arg("-o").arg(image))
}

fn skipped() -> Result<(), String> {
    if variable("SIGNAL_SKIP_IMAGES") == "1" { Err("built with SIGNAL_SKIP_IMAGES=1".into()) } else { Ok(()) }
}

fn on(feature: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{feature}")).is_some()
}

/// An environment variable, empty if unset; the script runs again when it changes.
fn variable(name: &str) -> String {
    println!("cargo::rerun-if-env-changed={name}");
    env::var(name).unwrap_or_default()
}

/// The first of the compilers that can be started.
fn first(names: &[&str]) -> Result<PathBuf, String> {
    let starts = |name: &&&str| !name.is_empty() && Command::new(name).arg("--version").output().is_ok();
    names.iter().find(starts).map(PathBuf::from).ok_or_else(|| format!("found none of {names:?}"))
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}
