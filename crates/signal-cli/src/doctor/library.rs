//! What was loaded, and from where.

use std::fs;

/// Names of the libraries that backends load.
const LIBRARIES: [(&str, &str); 3] = [("cuda", "libcuda.so"), ("rocm", "libamdhip64.so"), ("host", "")];

/// The file of a backend's library, if this process has it loaded; of the host's there is none: its kernels are linked in.
pub(super) fn loaded(backend: &str) -> Option<String> {
    let (_, name) = LIBRARIES.iter().find(|(of, name)| *of == backend && !name.is_empty())?;
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    file_of(&maps, name).map(str::to_owned)
}

/// The path in a list of mappings whose file begins with `name`.
fn file_of<'a>(maps: &'a str, name: &str) -> Option<&'a str> {
    let paths = maps.lines().filter_map(|line| line.find('/').map(|at| &line[at..]));
    let mut of_name = paths.filter(|path| path.rsplit('/').next().is_some_and(|file| file.starts_with(name)));
    of_name.next()
}

/// The kernel driver's version, where it says so.
pub(super) fn kernel_driver(backend: &str) -> Option<String> {
    let path = match backend {
        "cuda" => "/sys/module/nvidia/version",
        "rocm" => "/sys/module/amdgpu/version",
        _ => return None,
    };
    fs::read_to_string(path).ok().map(|version| version.trim().to_owned()).filter(|version| !version.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_by_its_file() {
        let maps = "7f00-7f01 r-xp 00000000 08:01 12 /usr/lib/libcudart.so.13\n7f02-7f03 r-xp 00000000 08:01 13 /usr/lib/x/libcuda.so.580.1\n7f04-7f05 rw-p 00000000 00:00 0\n";
        assert_eq!(file_of(maps, "libcuda.so"), Some("/usr/lib/x/libcuda.so.580.1"));
        assert_eq!(file_of(maps, "libamdhip64.so"), None);
    }
}
