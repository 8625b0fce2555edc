//! The HIP image: an offload bundle of code objects, from hipcc, or from a plain clang without any part of ROCm.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::Key;
use crate::hip_flags::{FLAGS, FREESTANDING};
use crate::toolchain::{Failure, Result, at_once, compile, env, env_path, in_path, read, run, version, write};
use crate::{Built, Image, Request, Target};

const SOURCE: &str = "kernels/hip/kernels.hip";
const FILE: &str = "kernels.hipfb";
/// The architectures that get code where nobody chooses others: MI200, MI300, RX 7900.
const ARCHS: [&str; 3] = ["gfx90a", "gfx942", "gfx1100"];
/// And MI350's, where the compiler knows it.
const NEWER_ARCHS: [&str; 1] = ["gfx950"];
/// Where others are chosen: what CMake's HIP packages and PyTorch's build read. The first that is set counts.
const CHOICES: [&str; 3] = ["AMDGPU_TARGETS", "GPU_TARGETS", "PYTORCH_ROCM_ARCH"];

/// A compiler that may do.
struct Candidate {
    path: PathBuf,
    freestanding: bool,
    /// Someone named it, so what it knows has to do.
    named: bool,
}

/// A compiler that does.
struct Compiler {
    path: PathBuf,
    flags: Vec<String>,
    version: String,
    archs: Vec<String>,
}

pub(crate) fn build(request: &Request) -> Result<Built> {
    let (mut reasons, mut found) = (Vec::new(), None);
    let chosen = chosen_archs()?;
    let (wanted, newer) =
        if chosen.is_empty() { (ARCHS.map(str::to_owned).to_vec(), &NEWER_ARCHS[..]) } else { (chosen, &[][..]) };
    for candidate in candidates()? {
        match examine(request, &candidate, &wanted, newer) {
            Ok(compiler) => {
                found = Some(compiler);
                break;
            }
            Err(why) => reasons.push(format!("{}: {why}", candidate.path.display())),
        }
    }
    let Some(Compiler { path, mut flags, version, archs }) = found else {
        if reasons.is_empty() {
            reasons.push(
                "no hipcc under HIPCC, ROCM_PATH, HIP_PATH or PATH, no clang++ under SIGNAL_CLANG or PATH".into(),
            );
        }
        return Ok(Built::Missing(reasons.join("; ")));
    };

    flags.extend(request.defines.iter().cloned());
    let mut key = Key::new(Target::Hip.name());
    key.sources(&request.package, Target::Hip.name())?;
    key.fields(&flags);
    key.fields(&archs);
    key.field(version.as_bytes());
    let fingerprint = key.fingerprint();
    if request.strict(Target::Hip) {
        flags.extend(["-Wall", "-Wextra", "-Werror"].map(str::to_owned));
        key.field(b"strict");
    }

    let image = request.out.join(FILE);
    request.cache.get(&key, &image, || {
        let objects = at_once(archs.iter(), |arch| {
            let object = request.out.join(format!("kernels.{arch}.co"));
            let mut command = compiler_command(request, &path, &flags, arch);
            compile(&format!("hip ({arch})"), command.arg(SOURCE).arg("-o").arg(&object))?;
            Ok((arch.as_str(), read(&object)?))
        })?;
        write(&image, bundle(&objects))
    })?;
    Ok(Built::Image(Image { file: Some(FILE), archs, fingerprint }))
}

fn chosen_archs() -> Result<Vec<String>> {
    let mut wanted: Vec<String> = Vec::new();
    // All are read: the script runs again when any changes.
    for text in CHOICES.map(env) {
        let text = text?;
        if wanted.is_empty() {
            wanted = text.split([';', ',', ' ']).filter(|arch| !arch.is_empty()).map(str::to_owned).collect();
        }
    }
    Ok(wanted)
}

fn candidates() -> Result<Vec<Candidate>> {
    let one = |path, freestanding| Ok(vec![Candidate { path, freestanding, named: true }]);
    if let Some(hipcc) = env_path("HIPCC")? {
        return one(hipcc, false);
    }
    if let Some(clang) = env_path("SIGNAL_CLANG")? {
        return one(clang, true);
    }
    let mut list = Vec::new();
    let roots = [env_path("ROCM_PATH")?, env_path("HIP_PATH")?, Some("/opt/rocm".into())];
    let installed = roots.into_iter().flatten().map(|root| root.join("bin/hipcc")).filter(|hipcc| hipcc.is_file());
    list.extend(installed.chain(in_path("hipcc")?).map(|path| (path, false)));
    for name in ["clang++-19", "clang++"] {
        list.extend(in_path(name)?.map(|path| (path, true)));
    }
    Ok(list.into_iter().map(|(path, freestanding)| Candidate { path, freestanding, named: false }).collect())
}

/// Proves that the compiler and its linker work, so that a later failure is our sources'; finds the architectures.
fn examine(
    request: &Request,
    candidate: &Candidate,
    wanted: &[String],
    newer: &[&str],
) -> std::result::Result<Compiler, String> {
    let path = &candidate.path;
    let version = version(path).map_err(|failure| failure.summary())?;
    let mut flags: Vec<String> = FLAGS.map(str::to_owned).into();
    if candidate.freestanding {
        flags.extend(FREESTANDING.map(str::to_owned));
    }
    let source = request.out.join("probe.hip");
    write(&source, "__attribute__((global)) void signal_probe() {}\n")?;
    let attempt = |arch: &str| -> std::result::Result<(), Failure> {
        let mut command = compiler_command(request, path, &flags, arch);
        run(command.arg(&source).arg("-o").arg(request.out.join(format!("probe.{arch}.co")))).map(drop)
    };
    let (mut archs, mut refused) = (Vec::new(), Vec::new());
    for arch in wanted {
        match attempt(arch) {
            Ok(()) => archs.push(arch.clone()),
            Err(failure) => refused.push(format!("{arch}: {}", failure.summary())),
        }
    }
    // A hipcc that was only found, and knows less than all, may stand beside a clang that knows more.
    if archs.is_empty() || (!refused.is_empty() && !candidate.named && !candidate.freestanding) {
        return Err(refused.join(", "));
    }
    archs.extend(newer.iter().filter(|arch| attempt(arch).is_ok()).map(|arch| (*arch).to_owned()));
    for why in refused {
        println!("cargo::warning=the hip image goes without {why}");
    }
    Ok(Compiler { path: path.clone(), flags, version, archs })
}

fn compiler_command(request: &Request, path: &Path, flags: &[String], arch: &str) -> Command {
    let mut command = Command::new(path);
    // hipcc turns to nvcc where it finds one.
    command.current_dir(&request.package).env("HIP_PLATFORM", "amd");
    command.args(flags).arg(format!("--offload-arch={arch}"));
    command
}

/// The bundle that clang makes of the same objects: a table of (offset, size, name), then the objects on page
/// boundaries. The first entry stands for the host and is empty.
fn bundle(objects: &[(&str, Vec<u8>)]) -> Vec<u8> {
    const PAGE: usize = 4096;
    let mut entries: Vec<(String, &[u8])> = vec![("host-x86_64-unknown-linux--".into(), &[])];
    entries
        .extend(objects.iter().map(|(arch, object)| (format!("hipv4-amdgcn-amd-amdhsa--{arch}"), object.as_slice())));
    let mut table = b"__CLANG_OFFLOAD_BUNDLE__".to_vec();
    table.extend((entries.len() as u64).to_le_bytes());
    let table_bytes = table.len() + entries.iter().map(|(name, _)| 24 + name.len()).sum::<usize>();
    let (mut at, mut body) = (table_bytes.next_multiple_of(PAGE), Vec::new());
    let start = at;
    for (name, object) in &entries {
        at = at.next_multiple_of(PAGE);
        for number in [at, object.len(), name.len()] {
            table.extend((number as u64).to_le_bytes());
        }
        table.extend(name.as_bytes());
        body.resize(at - start, 0);
        body.extend(*object);
        at += object.len();
    }
    table.resize(start, 0);
    table.extend(body);
    table
}
