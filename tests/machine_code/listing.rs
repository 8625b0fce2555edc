//! Code objects and what they hold: from a bundle, and as LLVM's tools list them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// One instruction, without its address.
#[derive(Debug)]
pub(crate) struct Instruction {
    pub(crate) name: String,
    pub(crate) operands: String,
}

/// A kernel, instruction by instruction, and what its metadata says.
#[derive(Debug, Default)]
pub(crate) struct Kernel {
    pub(crate) instructions: Vec<Instruction>,
    /// Bytes of scratch memory a thread.
    pub(crate) scratch: u64,
    /// Vector registers that went there.
    pub(crate) spills: u64,
}

/// The first of some programs that runs here.
pub(crate) fn tool(variable: &str, names: &[&str]) -> PathBuf {
    let chosen = std::env::var(variable).ok().filter(|path| !path.is_empty());
    let candidates = chosen.into_iter().chain(names.iter().map(|name| (*name).to_owned()));
    let runs = |name: &String| Command::new(name).arg("--version").output().is_ok_and(|output| output.status.success());
    let found = candidates.into_iter().find(runs);
    PathBuf::from(
        found.unwrap_or_else(|| panic!("none of {names:?} runs; ci/install.sh brings them, or {variable} names one")),
    )
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|e| panic!("{command:?}: {e}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// The code objects of an offload bundle, with their architectures.
pub(crate) fn objects(bundle: &[u8]) -> Vec<(String, &[u8])> {
    const MAGIC: &[u8] = b"__CLANG_OFFLOAD_BUNDLE__";
    assert!(bundle.starts_with(MAGIC), "not a bundle");
    let mut at = MAGIC.len();
    let mut take = |bytes: usize| {
        at += bytes;
        &bundle[at - bytes..at]
    };
    let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap()) as usize;
    let mut found = Vec::new();
    for _ in 0..number(take(8)) {
        let (offset, size, length) = (number(take(8)), number(take(8)), number(take(8)));
        // The entry of the host has no architecture.
        if let Some((_, arch)) = std::str::from_utf8(take(length)).unwrap().split_once("amdhsa--") {
            found.push((arch.to_owned(), &bundle[offset..offset + size]));
        }
    }
    found
}

/// The kernels of a code object.
pub(crate) fn kernels(object: &Path) -> BTreeMap<String, Kernel> {
    let objdump = tool("LLVM_OBJDUMP", &["llvm-objdump-19", "llvm-objdump"]);
    let listing = output(Command::new(objdump).args(["-d", "--no-show-raw-insn", "--no-leading-addr"]).arg(object));
    let mut kernels: BTreeMap<String, Kernel> = BTreeMap::new();
    let mut current = None;
    for line in listing.lines() {
        if let Some(name) = line.strip_prefix('<').and_then(|rest| rest.strip_suffix(">:")) {
            current = Some(kernels.entry(name.to_owned()).or_default());
        } else if let (Some(kernel), Some(text)) = (&mut current, line.strip_prefix('\t')) {
            let text = text.split("//").next().unwrap_or_default().trim();
            let (name, operands) = text.split_once(' ').unwrap_or((text, ""));
            kernel.instructions.push(Instruction { name: name.to_owned(), operands: operands.to_owned() });
        }
    }

    let readelf = tool("LLVM_READELF", &["llvm-readelf-19", "llvm-readelf"]);
    let notes = output(Command::new(readelf).arg("--notes").arg(object));
    let (mut scratch, mut name) = (0, String::new());
    for line in notes.lines() {
        let Some((key, value)) = line.trim().trim_start_matches("- ").split_once(':') else { continue };
        let value = value.trim();
        // Keys of a kernel come in the order of the alphabet.
        match key {
            ".name" if kernels.contains_key(value) => value.clone_into(&mut name),
            ".private_segment_fixed_size" => scratch = value.parse().unwrap(),
            ".vgpr_spill_count" => {
                let kernel = kernels.get_mut(&name).unwrap_or_else(|| panic!("{name} has no code"));
                (kernel.scratch, kernel.spills) = (scratch, value.parse().unwrap());
            }
            _ => {}
        }
    }
    kernels
}
