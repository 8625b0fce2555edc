//! `signal doctor`: what this machine can run, and why not the rest.
//!
//! Everything is examined first, as data; the text, the JSON and the verdicts are made of that.

mod environment;
mod library;
mod matrix;
mod processes;
mod verdict;

use clap::Args as ClapArgs;
use serde::Serialize;
use signal_comm::layout::{CONTROL_BYTES, HOST_CONTROL_BYTES, SCRATCH_OFFSET, SIGNAL_BYTES};
use signal_comm::{Backend, Link, MemoryKind, Settings, prove_peer};

use self::environment::Other;
use self::matrix::Matrices;
use self::verdict::Verdict;
use crate::backend::{BackendName, WithBackend, with_backend};
use crate::error::{CliError, Result};
use crate::machine::{Device, Machine, binary_size, print, signal_variables};

#[derive(ClapArgs, Clone, Copy, Debug)]
pub(crate) struct Args {
    /// Prints JSON
    #[arg(long)]
    json: bool,

    /// Measures nothing and starts no processes
    #[arg(long)]
    quick: bool,
}

/// Prints the report. An error if nothing is usable.
pub(crate) fn run(args: &Args) -> Result<()> {
    let report = Report::examine(args.quick);
    let text = if args.json {
        serde_json::to_string_pretty(&report).map_err(std::io::Error::from)? + "\n"
    } else {
        report.text()
    };
    print(&text)?;
    // Settings that cannot be read keep every communicator from being made.
    if report.memory.is_ok() && report.backends.iter().any(|backend| backend.usable) {
        return Ok(());
    }
    Err(CliError::NothingUsable)
}

#[derive(Serialize)]
struct Report {
    machine: Machine,
    backends: Vec<BackendReport>,
    #[serde(serialize_with = "value_or_error")]
    memory: std::result::Result<Memory, String>,
    environment: Vec<(String, String)>,
    other_environment: Vec<Other>,
}

#[derive(Default, Serialize)]
struct BackendReport {
    name: &'static str,
    compiled: bool,
    /// Of the driver or runtime.
    version: Option<String>,
    /// The file that was loaded.
    library: Option<String>,
    /// Version of the driver in the operating system's kernel.
    kernel_driver: Option<String>,
    /// Compiled in, with a device that has loaded the kernel image.
    usable: bool,
    /// Why it is not usable.
    problem: Option<String>,
    devices: Vec<DeviceReport>,
    /// By reader, then owner.
    peers: Vec<Vec<Peer>>,
    /// Where the ranks of a communicator of all devices share memory.
    shared: Option<String>,
    /// Of the host backend those of two devices.
    matrices: Matrices,
    /// Whether two processes computed together; with what they share in pinned memory of the host too.
    #[serde(serialize_with = "maybe_value_or_error")]
    processes: Option<std::result::Result<(), String>>,
    #[serde(serialize_with = "maybe_value_or_error")]
    pinned: Option<std::result::Result<(), String>>,
    verdicts: Vec<Verdict>,
}

#[derive(Serialize)]
struct DeviceReport {
    #[serde(flatten)]
    device: Device,
    /// Fingerprint of the kernel image that the device has loaded, in hexadecimal.
    #[serde(serialize_with = "value_or_error")]
    image: std::result::Result<String, String>,
}

/// Whether one device can reach another's memory.
#[derive(Serialize)]
struct Peer {
    /// Data was moved and found right.
    can: bool,
    link: String,
    why_not: Option<String>,
}

/// What a communicator takes on each rank.
#[derive(Serialize)]
struct Memory {
    signal_bytes: usize,
    control_bytes: usize,
    scratch_bytes: usize,
    /// All of it, with the gaps between.
    peer_visible_bytes: usize,
    host_mapped_bytes: usize,
}

impl Report {
    fn examine(quick: bool) -> Self {
        let memory = Settings::from_env().map_err(|error| error.to_string()).map(|settings| Memory {
            signal_bytes: SIGNAL_BYTES,
            control_bytes: CONTROL_BYTES,
            scratch_bytes: settings.scratch_bytes,
            peer_visible_bytes: SCRATCH_OFFSET + settings.scratch_bytes,
            host_mapped_bytes: HOST_CONTROL_BYTES,
        });
        Report {
            machine: Machine::here(),
            backends: BackendName::ALL.map(|name| BackendReport::examine(name, quick)).into(),
            memory,
            environment: signal_variables(),
            other_environment: environment::others(),
        }
    }

    fn text(&self) -> String {
        let Machine { signal_version, os, arch, cpus } = self.machine;
        let mut text = format!("signal {signal_version} on {os} {arch}, {cpus} CPUs\n");
        for backend in &self.backends {
            text += &backend.text();
        }
        text += "\nmemory that a communicator takes on each rank\n";
        text += &match &self.memory {
            Ok(memory) => format!(
                "  {} peer-visible: {} Signal, {} control, {} scratch; {} bytes host-mapped\n",
                binary_size(memory.peer_visible_bytes as u64),
                binary_size(memory.signal_bytes as u64),
                binary_size(memory.control_bytes as u64),
                binary_size(memory.scratch_bytes as u64),
                memory.host_mapped_bytes,
            ),
            Err(why) => format!("  no communicator can be made: {why}\n"),
        };
        text += "\nSIGNAL_* variables\n";
        for (name, value) in &self.environment {
            text += &format!("  {name}={value}\n");
        }
        if self.environment.is_empty() {
            text += "  none is set\n";
        }
        for Other { name, value, effect } in &self.other_environment {
            text += &format!("  {name}={value}: {effect}\n");
        }
        text += "\nverdict\n";
        for backend in &self.backends {
            for Verdict { feature, works, why } in &backend.verdicts {
                let word = if *works { "yes" } else { "no" };
                let why = why.as_ref().map_or_else(String::new, |why| format!(": {why}"));
                text += &format!("  {}: {feature}: {word}{why}\n", backend.name);
            }
        }
        text
    }
}

impl BackendReport {
    fn examine(name: BackendName, quick: bool) -> Self {
        let mut report = BackendReport { name: name.name(), compiled: name.is_compiled(), ..BackendReport::default() };
        match with_backend(name, Examine { quick }) {
            Ok(found) => {
                report.version = Some(found.version);
                (report.devices, report.peers, report.matrices) = (found.devices, found.peers, found.matrices);
            }
            Err(error) => report.problem = Some(error.to_string()),
        }
        report.library = library::loaded(report.name);
        report.kernel_driver = library::kernel_driver(report.name);
        report.shared =
            where_shared(&report.peers, Settings::from_env().ok().and_then(|settings| settings.peer_to_peer));
        report.usable = report.devices.iter().any(|device| device.image.is_ok());
        if report.problem.is_none() && !report.usable {
            report.problem = Some("no device has loaded the kernel image".to_owned());
        }
        // Settings that cannot be read are told of elsewhere.
        if report.usable && !quick && Settings::from_env().is_ok() {
            report.processes = Some(processes::work_together(name, false));
            report.pinned = Some(processes::work_together(name, true));
        }
        report.verdicts = verdict::of(&report);
        report
    }

    fn text(&self) -> String {
        let state = match (self.usable, self.compiled) {
            (true, _) => "usable",
            (false, true) => "not usable",
            (false, false) => "not compiled in",
        };
        let mut text = format!("\nbackend {}: {state}\n", self.name);
        if let Some(problem) = &self.problem {
            text += &format!("  {problem}\n");
        }
        if let Some(version) = &self.version {
            let library = self.library.as_ref().map_or_else(String::new, |path| format!(", {path}"));
            let driver =
                self.kernel_driver.as_ref().map_or_else(String::new, |version| format!(", kernel driver {version}"));
            text += &format!("  {version}{library}{driver}\n");
        }
        for (index, DeviceReport { device, image }) in self.devices.iter().enumerate() {
            let Device { name, arch, compute_units, clock_hz, max_block_threads, .. } = device;
            let memory = binary_size(device.memory_bytes);
            let pci = device.pci.as_ref().map_or_else(String::new, |pci| format!(", PCI {pci}"));
            text += &format!("  {index}: {name} ({arch}), {memory}, {compute_units} units{pci}, {}\n", device.uuid);
            let image = match image {
                Ok(fingerprint) => format!("image {fingerprint} loaded"),
                Err(why) => format!("image not loaded: {why}"),
            };
            let megahertz = clock_hz / 1_000_000;
            text += &format!("     {image}; up to {max_block_threads} threads a block; kernel clock {megahertz} MHz\n");
        }
        text += &self.peer_matrix();
        if self.peers.len() > 1 {
            let links = |row: &Vec<Peer>| row.iter().map(|peer| peer.link.clone()).collect();
            text += &matrix::text("links", &self.peers.iter().map(links).collect::<Vec<_>>());
        }
        let Matrices { read_gb_s, barrier_us, refused } = &self.matrices;
        if !read_gb_s.is_empty() {
            let title = "GB/s at which the row's device reads the column's memory (the diagonal: copies its own)";
            text += &matrix::text(title, &matrix::cells(read_gb_s));
            let title = "us of a barrier between ranks on the two, in a graph (the diagonal: they share the device)";
            text += &matrix::text(title, &matrix::cells(barrier_us));
        }
        for (row, column, why) in refused {
            text += &format!("  not measured: {row} of {column}: {why}\n");
        }
        text
    }

    /// Rows read and write the memory of columns.
    fn peer_matrix(&self) -> String {
        if self.peers.len() < 2 {
            return String::new();
        }
        let mut text =
            "  peer matrix, by moving data: the row's device reaches the memory of the column's\n     ".to_owned();
        for column in 0..self.peers.len() {
            text += &format!(" {column:^6}");
        }
        text = text.trim_end().to_owned() + "\n";
        let mut reasons = String::new();
        for (from, row) in self.peers.iter().enumerate() {
            text += &format!("  {from:>2} ");
            for (to, peer) in row.iter().enumerate() {
                let word = match peer {
                    _ if from == to => "-",
                    Peer { can: true, .. } => "CAN",
                    Peer { can: false, .. } => "CANNOT",
                };
                text += &format!(" {word:^6}");
                if let Some(why) = &peer.why_not {
                    reasons += &format!("  {from} -> {to} over {}: {why}\n", peer.link);
                }
            }
            text = text.trim_end().to_owned() + "\n";
        }
        let mut links: Vec<&str> = self.peers.iter().flatten().map(|peer| peer.link.as_str()).collect();
        links.retain(|link| *link != link_name(Link::SameDevice));
        links.sort_unstable();
        links.dedup();
        text += &format!("  links: {}\n", links.join(", "));
        text + &reasons + &self.shared.as_ref().map_or_else(String::new, |shared| format!("  {shared}\n"))
    }
}

/// Looks at an open backend's devices.
struct Examine {
    quick: bool,
}

/// What was found of them.
struct Found {
    version: String,
    devices: Vec<DeviceReport>,
    peers: Vec<Vec<Peer>>,
    matrices: Matrices,
}

impl WithBackend for Examine {
    type Output = Found;

    fn run<B: Backend>(self, backend: &B) -> Result<Self::Output> {
        let devices = backend.devices()?;
        let examine = |device: &B::Device| DeviceReport {
            device: Device::from(B::describe(device)),
            image: B::load(device)
                .map(|module| format!("{:016x} ({})", B::fingerprint(&module), B::code(&module)))
                .map_err(|error| error.to_string()),
        };
        let reports = devices.iter().map(examine).collect();
        let peers = devices.iter().map(|from| devices.iter().map(|to| peer::<B>(from, to)).collect()).collect();
        let is_host = B::NAME == BackendName::Host.name();
        // All devices of the host are slices of one machine.
        let measured = &devices[..devices.len().min(if is_host { 2 } else { devices.len() })];
        let matrices = if self.quick { Matrices::default() } else { matrix::measure::<B>(measured, is_host) };
        Ok(Found { version: backend.version(), devices: reports, peers, matrices })
    }
}

/// Says where the ranks of a communicator of all these devices share memory.
fn where_shared(peers: &[Vec<Peer>], peer_to_peer: Option<bool>) -> Option<String> {
    if peers.len() < 2 {
        return None;
    }
    let refused =
        peers.iter().enumerate().flat_map(|(from, row)| row.iter().enumerate().map(move |(to, peer)| (from, to, peer)));
    let refused = refused.filter(|(_, _, peer)| !peer.can).map(|(from, to, _)| format!("{from} -> {to}")).next();
    Some(match (peer_to_peer, refused) {
        (Some(false), _) => "ranks share pinned memory of the host, which is slow: SIGNAL_P2P=0".to_owned(),
        (_, None) => "ranks share memory of their devices".to_owned(),
        (None, Some(pair)) => format!(
            "ranks of all of them share pinned memory of the host, which is slow: no access {pair}; ranks on devices that reach each other \
             share the devices' memory"
        ),
        (Some(true), Some(pair)) => {
            format!("no communicator of all of them can be made: SIGNAL_P2P=1, and no access {pair}")
        }
    })
}

/// Asks the driver, and where it agrees moves data.
fn peer<B: Backend>(from: &B::Device, to: &B::Device) -> Peer {
    let link = match B::peer_access(from, to) {
        Ok(access) if access.refusal.is_some() => {
            return Peer { can: false, link: link_name(access.link), why_not: access.refusal };
        }
        Ok(access) => access.link,
        Err(error) => return Peer { can: false, link: "unknown link".to_owned(), why_not: Some(error.to_string()) },
    };
    let why_not = if from == to { None } else { prove_peer::<B>(from, to, MemoryKind::PeerVisible).err() };
    Peer { can: why_not.is_none(), link: link_name(link), why_not: why_not.map(|error| error.to_string()) }
}

fn link_name(link: Link) -> String {
    format!("{link:?}")
}

fn value_or_error<T: Serialize, S: serde::Serializer>(
    value: &std::result::Result<T, String>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    #[serde(rename_all = "lowercase")]
    enum Outcome<'a, T> {
        Ok(&'a T),
        Error(&'a str),
    }
    match value {
        Ok(value) => Outcome::Ok(value).serialize(serializer),
        Err(error) => Outcome::<T>::Error(error).serialize(serializer),
    }
}

fn maybe_value_or_error<S: serde::Serializer>(
    value: &Option<std::result::Result<(), String>>,
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    match value {
        None => serializer.serialize_none(),
        Some(value) => value_or_error(value, serializer),
    }
}
