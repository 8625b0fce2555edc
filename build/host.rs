//! The host image: kernels as functions, in a static library that is linked into the program.

use std::path::Path;

use crate::cache::Key;
use crate::toolchain::{Failure, Result, run, version, write};
use crate::{Built, Image, Request, Target};

const SOURCE: &str = "kernels/host/kernels.cpp";

/// The same in every profile: a debug build of the kernels would be too slow to test with.
const FLAGS: [&str; 7] =
    ["-ffp-contract=off", "-fno-fast-math", "-fno-math-errno", "-fno-exceptions", "-fno-rtti", "-Wall", "-Wextra"];

pub(crate) fn build(request: &Request) -> Result<Built> {
    let mut build = cc::Build::new();
    build
        .cpp(true)
        .cpp_link_stdlib(None)
        .std("c++17")
        .opt_level(2)
        .debug(request.sanitize)
        .include("kernels")
        .file(SOURCE)
        .out_dir(&request.out)
        .cargo_warnings(false);
    for flag in FLAGS.iter().copied().chain(request.defines.iter().map(String::as_str)) {
        build.flag(flag);
    }
    if request.sanitize {
        build.flag("-fsanitize=thread");
    }
    let compiler = match build.try_get_compiler() {
        Ok(compiler) => compiler,
        Err(e) => return Ok(Built::Missing(format!("no C++ compiler: {e}"))),
    };
    let said = version(compiler.path()).map_err(|failure| (compiler.path(), failure));
    let version = match said.and_then(|said| probe(request, &compiler).map(|()| said)) {
        Ok(said) => said,
        Err((path, failure)) => {
            let why = failure.summary();
            return Ok(Built::Missing(format!(
                "no working C++ compiler, install one or set CXX: {}: {why}",
                path.display()
            )));
        }
    };

    let mut key = Key::new(Target::Host.name());
    key.sources(&request.package, Target::Host.name())?;
    let arguments: Vec<String> = compiler.args().iter().map(|a| a.to_string_lossy().into_owned()).collect();
    key.fields(&arguments);
    key.field(version.as_bytes());
    let fingerprint = key.fingerprint();
    // What it printed so far named the variables that it depends on. Linking is ours: there may be nothing to compile.
    build.cargo_metadata(false).cargo_warnings(true);
    if request.strict(Target::Host) {
        build.flag("-Werror");
        key.field(b"strict");
    }

    request.cache.get(&key, &request.out.join("libsignal_host.a"), || {
        build.try_compile("signal_host").map_err(|e| format!("host kernels do not compile\n{e}"))
    })?;
    println!("cargo::rustc-link-search=native={}", request.out.display());
    println!("cargo::rustc-link-lib=static=signal_host");
    Ok(Built::Image(Image { file: None, archs: vec!["host".into()], fingerprint }))
}

/// Proves that the compiler finds its own parts and the standard headers, so that a later failure is our sources'.
fn probe<'a>(request: &Request, compiler: &'a cc::Tool) -> std::result::Result<(), (&'a Path, Failure)> {
    let source = request.out.join("probe.cpp");
    write(&source, "#include <atomic>\n#include <cstdint>\nstd::atomic<std::uint32_t> signal_probe;\n")
        .map_err(|e| (compiler.path(), Failure::Start(e)))?;
    let mut command = compiler.to_command();
    command.arg("-c").arg(&source).arg("-o").arg(request.out.join("probe.o"));
    run(&mut command).map(drop).map_err(|failure| (compiler.path(), failure))
}
