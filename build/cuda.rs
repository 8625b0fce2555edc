//! The CUDA image: one fatbin of SASS and PTX, from nvcc alone: nothing of the CUDA runtime is linked.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cache::Key;
use crate::toolchain::{Failure, Result, compile, env, env_path, in_path, run, version, write};
use crate::{Built, Image, Request, Target, list};

const SOURCE: &str = "kernels/cuda/kernels.cu";
const FILE: &str = "kernels.fatbin";

/// Chooses other compute capabilities than [`SASS`], as `90` or `sm_90`.
const CHOICE: &str = "SIGNAL_CUDA_ARCHS";
/// Compute capabilities that get machine code where nobody chooses.
const SASS: [&str; 3] = ["80", "90", "100"];
/// And the one whose PTX serves every later device. Not a later one: only PTX for 90 and above may wait for an early
/// launch, and a driver can read no PTX that is newer than itself.
const PTX: &str = "90";

const FLAGS: [&str; 4] = ["-std=c++17", "-O3", "-fmad=false", "--fatbin"];
/// 8 MB become 0.6; from nvcc 12.4 on.
const COMPRESS: &str = "--compress-mode=size";

pub(crate) fn build(request: &Request) -> Result<Built> {
    let nvcc = match find()? {
        Ok(nvcc) => nvcc,
        Err(why) => return Ok(Built::Missing(why)),
    };
    let missing = |failure: Failure| Ok(Built::Missing(format!("{}: {}", nvcc.display(), failure.summary())));
    let chosen = chosen_archs()?;
    let found = version(&nvcc).and_then(|said| Ok((said, known_archs(&nvcc, &chosen)?)));
    let (version, (archs, unknown)) = match found {
        Ok(found) => found,
        Err(failure) => return missing(failure),
    };
    for name in unknown {
        if !chosen.is_empty() && !name.starts_with("compute") {
            return Err(format!("{CHOICE}: {} does not know {name}", nvcc.display()));
        }
        println!("cargo::warning=the cuda image goes without {name}: {} does not know it", nvcc.display());
    }
    let Some(first) = archs.first() else {
        return Ok(Built::Missing(format!("{} knows none of the wanted architectures", nvcc.display())));
    };
    let compress = match probe(request, &nvcc, first) {
        Ok(compress) => compress,
        Err(failure) => return missing(failure),
    };

    let mut flags: Vec<String> = FLAGS.map(str::to_owned).into();
    flags.extend(compress.map(str::to_owned));
    flags.extend(archs.iter().map(|arch| gencode(arch)));
    flags.extend(request.defines.iter().cloned());
    let mut key = Key::new(Target::Cuda.name());
    key.sources(&request.package, Target::Cuda.name())?;
    key.fields(&flags);
    key.field(version.as_bytes());
    // nvcc reads these by itself.
    for name in ["NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"] {
        key.field(env(name)?.as_bytes());
    }
    let fingerprint = key.fingerprint();
    if request.strict(Target::Cuda) {
        flags.extend(["--Werror".into(), "all-warnings".into()]);
        key.field(b"strict");
    }

    let image = request.out.join(FILE);
    request.cache.get(&key, &image, || {
        let mut command = Command::new(&nvcc);
        command.current_dir(&request.package).args(&flags).args(["--threads", "0", "-Ikernels", SOURCE, "-o"]);
        compile("cuda", command.arg(&image))
    })?;
    Ok(Built::Image(Image { file: Some(FILE), archs, fingerprint }))
}

/// nvcc by NVCC, CUDA_HOME, PATH and the place where NVIDIA's installer puts it; or why there is none.
fn find() -> Result<std::result::Result<PathBuf, String>> {
    if let Some(nvcc) = env_path("NVCC")? {
        return Ok(Ok(nvcc));
    }
    let home = env_path("CUDA_HOME")?.map(|home| home.join("bin/nvcc")).filter(|nvcc| nvcc.is_file());
    let usual = Some(PathBuf::from("/usr/local/cuda/bin/nvcc")).filter(|nvcc| nvcc.is_file());
    let nvcc = home.or(in_path("nvcc")?).or(usual);
    Ok(nvcc.ok_or_else(|| "no nvcc under NVCC, CUDA_HOME, PATH or /usr/local/cuda".into()))
}

/// The compute capabilities that somebody chose.
fn chosen_archs() -> Result<Vec<String>> {
    let text = env(CHOICE)?;
    let number = |word: &str| {
        let number = word.strip_prefix("sm_").unwrap_or(word);
        // `90a` is code for that device alone, which is what machine code is anyway.
        let digits = number.trim_end_matches(['a', 'f']);
        let valid = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
        valid
            .then(|| number.to_owned())
            .ok_or_else(|| format!("{CHOICE}={text}: expected a list such as 80,90, not `{word}`"))
    };
    list(&text).map(number).collect()
}

/// Of the wanted architectures those that this nvcc knows, and the others.
fn known_archs(nvcc: &Path, chosen: &[String]) -> std::result::Result<(Vec<String>, Vec<String>), Failure> {
    let codes = run(Command::new(nvcc).arg("--list-gpu-code"))?;
    let archs = run(Command::new(nvcc).arg("--list-gpu-arch"))?;
    let knows = |list: &str, name: &str| list.split_whitespace().any(|word| word == name);
    let machine: Vec<&str> =
        if chosen.is_empty() { SASS.to_vec() } else { chosen.iter().map(String::as_str).collect() };
    let wanted = machine.iter().map(|number| format!("sm_{number}")).chain([format!("compute_{PTX}")]);
    Ok(wanted.partition(|name| {
        let virtual_known = name.rsplit('_').next().is_some_and(|number| knows(&archs, &format!("compute_{number}")));
        virtual_known && (name.starts_with("compute") || knows(&codes, name))
    }))
}

fn gencode(arch: &str) -> String {
    let number = arch.rsplit('_').next().unwrap_or(arch);
    format!("-gencode=arch=compute_{number},code={arch}")
}

/// Proves that nvcc finds its own parts and a host compiler, so that a later failure is our sources'; says whether it
/// compresses.
fn probe(request: &Request, nvcc: &Path, arch: &str) -> std::result::Result<Option<&'static str>, Failure> {
    let source = request.out.join("probe.cu");
    write(&source, "extern \"C\" __global__ void signal_probe() {}\n").map_err(Failure::Start)?;
    let attempt = |compress: Option<&'static str>| {
        let mut command = Command::new(nvcc);
        command.current_dir(&request.package).args(FLAGS).args(compress).arg(gencode(arch));
        command.arg(&source).arg("-o").arg(request.out.join("probe.fatbin"));
        run(&mut command).map(|_| compress)
    };
    attempt(Some(COMPRESS)).or_else(|_| attempt(None))
}
