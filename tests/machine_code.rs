//! The AMD kernels' machine code: what the protocol needs of it is looked for in the disassembly of the image that this build embeds,
//! and each thing that is looked for is missed in builds whose `kernels/hip/platform.h` was weakened. Without an AMD GPU. It says that
//! the orderings and widths that the sources ask for are in the code, not that a GPU keeps them.
#![allow(clippy::unwrap_used, clippy::panic, reason = "clippy knows tests, but not what they call")]

#[path = "../build/hip_flags.rs"]
mod hip_flags;
mod machine_code {
    pub(crate) mod check;
    pub(crate) mod listing;
}

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use hip_flags::{FLAGS, FREESTANDING};
use machine_code::check::{Spelling, faults};
use machine_code::listing;

/// A folder of this test's own, empty.
fn folder(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    folder
}

#[test]
fn every_kernel_is_as_the_protocol_needs_it() {
    let image = signal_comm::rocm::image();
    assert!(!image.bytes.is_empty(), "no image: {}", image.missing);
    let folder = folder("machine_code_image");
    let (mut checked, mut wrong) = (0, Vec::new());
    for (arch, object) in listing::objects(image.bytes) {
        let Some(spelling) = Spelling::of(&arch) else {
            println!("{arch}: not checked, its spelling is not known here");
            continue;
        };
        let path = folder.join(format!("{}.co", arch.replace(':', "_")));
        fs::write(&path, object).unwrap();
        let kernels = listing::kernels(&path);
        for (name, kernel) in &kernels {
            wrong.extend(faults(name, kernel, spelling).into_iter().map(|fault| format!("{arch} {name}: {fault}")));
        }
        println!("{arch}: {} kernels", kernels.len());
        checked += kernels.len();
    }
    assert!(checked > 0, "nothing to check among {:?}", image.archs);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// A weakened primitive: the kernel that shows it, what is replaced by what, and what must be found.
struct Weakened {
    what: &'static str,
    kernel: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
    fault: &'static str,
    /// Only where stores show their scope.
    of_stores: bool,
}

const PLATFORM: &str = "kernels/hip/platform.h";
const BARRIER: &str = "signal_barrier";
const REDUCE: &str = "signal_all_reduce_one_stage_small_sum_f32";
const WORDS: &str = "signal_lines_move";

const fn weakened(
    what: &'static str,
    kernel: &'static str,
    from: &'static str,
    to: &'static str,
    fault: &'static str,
) -> Weakened {
    Weakened { what, kernel, file: PLATFORM, from, to, fault, of_stores: false }
}

const WEAKENED: [Weakened; 12] = [
    weakened(
        "flags without a release",
        BARRIER,
        "v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM",
        "v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM",
        "a flag is not released",
    ),
    weakened(
        "flags released to the device",
        BARRIER,
        "v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM",
        "v, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_AGENT",
        "a flag is not released",
    ),
    weakened(
        "waves that release to the block",
        BARRIER,
        "__builtin_amdgcn_fence(__ATOMIC_RELEASE, \"\")",
        "__builtin_amdgcn_fence(__ATOMIC_RELEASE, \"workgroup\")",
        "waves do not release what they wrote",
    ),
    weakened(
        "flags without an acquire",
        BARRIER,
        "__ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM",
        "__ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM",
        "a flag is not acquired",
    ),
    weakened(
        "flags acquired from the device",
        BARRIER,
        "__ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM",
        "__ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT",
        "a flag is not acquired",
    ),
    weakened(
        "flags polled in the block's caches",
        BARRIER,
        "global(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM",
        "global(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP",
        "polls are not of system scope",
    ),
    weakened(
        "lines polled in the block's caches",
        WORDS,
        "global(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM",
        "global(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP",
        "words are not polled in halves of system scope",
    ),
    Weakened {
        of_stores: true,
        ..weakened(
            "lines sent to the device",
            WORDS,
            "v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM",
            "v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT",
            "words are not sent in halves of system scope",
        )
    },
    weakened(
        "packs loaded word by word",
        REDUCE,
        "const Words w = *(const SIGNAL_GLOBAL Words*)(p);",
        "const volatile SIGNAL_GLOBAL uint32_t* q = (const volatile SIGNAL_GLOBAL uint32_t*)(p); const Words w = {q[0], q[1], q[2], q[3]};",
        "packs are not single accesses",
    ),
    weakened(
        "packs stored word by word",
        REDUCE,
        "*(SIGNAL_GLOBAL Words*)(p) = Words{v.word[0], v.word[1], v.word[2], v.word[3]};",
        "volatile SIGNAL_GLOBAL uint32_t* q = (volatile SIGNAL_GLOBAL uint32_t*)(p); q[0] = v.word[0]; q[1] = v.word[1]; q[2] = v.word[2]; q[3] = v.word[3];",
        "packs are not single accesses",
    ),
    weakened(
        "generic pointers",
        BARRIER,
        "#define SIGNAL_GLOBAL __attribute__((address_space(1)))",
        "#define SIGNAL_GLOBAL",
        "accesses are flat",
    ),
    Weakened {
        file: "kernels/hip/kernels.hip",
        ..weakened(
            "eight registers",
            REDUCE,
            "__attribute__((amdgpu_flat_work_group_size(1, platform::kMaxBlockThreads)))",
            "__attribute__((amdgpu_flat_work_group_size(1, platform::kMaxBlockThreads), amdgpu_num_vgpr(8)))",
            "registers went to scratch memory",
        )
    },
];

/// A copy of the kernels of which one alone is compiled.
fn copy_kernels(to: &Path, kernel: &str) {
    for part in ["hip", "signal"] {
        let (from, to) = (Path::new("kernels").join(part), to.join("kernels").join(part));
        fs::create_dir_all(&to).unwrap();
        for entry in fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
    }
    let catalogue = to.join("kernels/signal/kernels.def");
    let rows = fs::read_to_string(&catalogue).unwrap();
    let row = rows.lines().find(|row| row.starts_with(&format!("SIGNAL_KERNEL({kernel},"))).unwrap();
    fs::write(catalogue, format!("{row}\n")).unwrap();
}

/// What is wrong with the one kernel of the copy in `folder`.
fn compile_and_check(folder: &Path, arch: &str, spelling: Spelling) -> Vec<&'static str> {
    let clang = listing::tool("SIGNAL_CLANG", &["clang++-19", "clang++"]);
    let object = folder.join("kernels.co");
    let mut command = Command::new(clang);
    command.current_dir(folder).args(FLAGS).args(FREESTANDING).arg("-w");
    let output = command
        .arg(format!("--offload-arch={arch}"))
        .arg("kernels/hip/kernels.hip")
        .arg("-o")
        .arg(&object)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let kernels = listing::kernels(&object);
    assert_eq!(kernels.len(), 1);
    kernels.iter().flat_map(|(name, kernel)| faults(name, kernel, spelling)).collect()
}

fn weakened_builds_are_found(arch: &str) {
    let spelling = Spelling::of(arch).unwrap();
    for kernel in [BARRIER, REDUCE, WORDS] {
        let folder = folder(&format!("machine_code_{arch}_{kernel}"));
        copy_kernels(&folder, kernel);
        assert_eq!(compile_and_check(&folder, arch, spelling), Vec::<&str>::new(), "{kernel} as it is");
    }
    for (number, case) in WEAKENED.iter().enumerate() {
        if case.of_stores && !spelling.has_scoped_stores() {
            continue;
        }
        let folder = folder(&format!("machine_code_{arch}_{number}"));
        copy_kernels(&folder, case.kernel);
        let file = folder.join(case.file);
        let text = fs::read_to_string(&file).unwrap();
        assert!(text.contains(case.from), "{}: {} is not there to be weakened", case.what, case.from);
        fs::write(&file, text.replace(case.from, case.to)).unwrap();
        let found = compile_and_check(&folder, arch, spelling);
        assert!(found.contains(&case.fault), "{arch}, {}: found {found:?}, not `{}`", case.what, case.fault);
        println!("{arch}, {}: {found:?}", case.what);
    }
}

#[test]
fn weakened_builds_are_found_on_gfx942() {
    weakened_builds_are_found("gfx942");
}

#[test]
fn weakened_builds_are_found_on_gfx90a() {
    weakened_builds_are_found("gfx90a");
}
