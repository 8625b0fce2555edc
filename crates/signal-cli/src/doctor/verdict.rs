//! What works on a backend, and what to do about the rest.

use serde::Serialize;

use super::BackendReport;

#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Verdict {
    pub(super) feature: &'static str,
    pub(super) works: bool,
    /// Why not, and what to do about it.
    pub(super) why: Option<String>,
}

fn yes(feature: &'static str) -> Verdict {
    Verdict { feature, works: true, why: None }
}

fn no(feature: &'static str, why: &str, advice: &str) -> Verdict {
    Verdict { feature, works: false, why: Some(format!("{why}; {advice}")) }
}

/// A verdict for each feature, of what has been examined.
pub(super) fn of(report: &BackendReport) -> Vec<Verdict> {
    let mut all = Vec::new();
    if !report.usable {
        let why = report.problem.as_deref().unwrap_or("no reason is known");
        all.push(no("collectives", why, opening_advice(report)));
        return all;
    }
    all.push(yes("collectives"));
    if report.peers.len() > 1 {
        let refused = report.peers.iter().flatten().find(|peer| !peer.can);
        all.push(match refused {
            None => yes("devices read each other's memory"),
            Some(peer) => {
                let why = peer.why_not.as_deref().unwrap_or("refused");
                let advice = "ranks on such devices share pinned memory of the host, which is slow: use devices under one switch or joined by NVLink or xGMI, \
                              and in virtual machines turn ACS off or pass the whole group through";
                no("devices read each other's memory", why, advice)
            }
        });
    }
    for (feature, found, advice) in [
        (
            "ranks that are processes",
            &report.processes,
            "keep all ranks in one process, or see that processes may open sockets to each other and share memory: one user, one container, seccomp and /dev/shm as usual",
        ),
        (
            "ranks that share pinned memory of the host",
            &report.pinned,
            "raise the limit of locked memory (ulimit -l), or use devices that reach each other",
        ),
    ] {
        match found {
            Some(Ok(())) => all.push(yes(feature)),
            Some(Err(why)) => all.push(no(feature, why, advice)),
            None => {}
        }
    }
    if report.name == "cuda" {
        let early = report.devices.iter().all(|device| {
            device
                .device
                .arch
                .strip_prefix("sm_")
                .and_then(|number| number.parse().ok())
                .is_some_and(|number: u32| number >= 90)
        });
        all.push(if early {
            yes("early launch")
        } else {
            no(
                "early launch",
                "some device is older than sm_90",
                "calls are launched one behind the other there, some 2 us apart",
            )
        });
    }
    all
}

fn opening_advice(report: &BackendReport) -> &'static str {
    if !report.compiled {
        return "or use another backend";
    }
    if report.devices.iter().any(|device| device.image.is_err()) {
        return match report.name {
            "cuda" => "build it for these devices: SIGNAL_CUDA_ARCHS, with an nvcc that knows them",
            "rocm" => "build it for these devices: AMDGPU_TARGETS",
            _ => "build it with a C++17 compiler (CXX)",
        };
    }
    match report.name {
        "cuda" => "install the NVIDIA driver, start the container with --gpus all, and look at CUDA_VISIBLE_DEVICES",
        "rocm" => {
            "install ROCm, give the container /dev/kfd and /dev/dri, be in the groups render and video, and look at HIP_VISIBLE_DEVICES"
        }
        _ => "build it with a C++17 compiler (CXX)",
    }
}

#[cfg(test)]
mod tests {
    use super::super::{DeviceReport, Peer};
    use super::*;
    use crate::machine::Device;

    fn device(arch: &str, image: Result<String, String>) -> DeviceReport {
        let device = Device {
            name: "x".into(),
            uuid: "u".into(),
            pci: None,
            arch: arch.into(),
            family: "nvidia".into(),
            memory_bytes: 1,
            compute_units: 1,
            clock_hz: 1,
            max_block_threads: 1,
        };
        DeviceReport { device, image }
    }

    fn report(usable: bool, devices: Vec<DeviceReport>) -> BackendReport {
        BackendReport {
            name: "cuda",
            compiled: true,
            usable,
            problem: (!usable).then(|| "libcuda.so.1: not found".to_owned()),
            devices,
            ..BackendReport::default()
        }
    }

    fn why(report: &BackendReport, feature: &str) -> Option<String> {
        let verdicts = of(report);
        let verdict = verdicts.iter().find(|verdict| verdict.feature == feature);
        verdict.unwrap_or_else(|| panic!("{feature} in {verdicts:?}")).why.clone()
    }

    #[test]
    fn each_refusal_says_what_to_do() {
        let absent = why(&report(false, Vec::new()), "collectives").unwrap();
        assert!(absent.contains("not found") && absent.contains("--gpus all"), "{absent}");
        let other = report(false, vec![device("sm_75", Err("no code".into()))]);
        assert!(why(&other, "collectives").unwrap().contains("SIGNAL_CUDA_ARCHS"));
        let mut pair = report(true, vec![device("sm_80", Ok("x".into())), device("sm_90", Ok("x".into()))]);
        let peer = |can: bool| Peer { can, link: "Pcie".into(), why_not: (!can).then(|| "read back wrong".to_owned()) };
        pair.peers = vec![vec![peer(true), peer(false)], vec![peer(true), peer(true)]];
        pair.processes = Some(Err("rank 1: denied".into()));
        pair.pinned = Some(Ok(()));
        assert_eq!(why(&pair, "collectives"), None);
        assert!(why(&pair, "devices read each other's memory").unwrap().starts_with("read back wrong; "));
        assert!(why(&pair, "ranks that are processes").unwrap().starts_with("rank 1: denied; keep all ranks"));
        assert_eq!(why(&pair, "ranks that share pinned memory of the host"), None);
        assert!(why(&pair, "early launch").unwrap().contains("sm_90"));
    }
}
