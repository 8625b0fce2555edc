//! The opened backend and its devices. All devices are the one machine that the program runs on.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use signal_core::backend::{DeviceFamily, DeviceInfo};
use signal_core::error::{ApiMisuse, Error, Result, Unavailable};

use crate::canary::{Overwritten, Watch};
use crate::module::{HostImage, HostImageTable, HostKernel};
use crate::sync::{Shared, SpinLock};

/// What the backend pretends to be.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HostConfig {
    /// Devices.
    pub devices: usize,
    /// Pairs (from, to) of devices without peer access in that direction, to see refusals.
    pub blocked_peers: Vec<(usize, usize)>,
    /// Most threads that the backend keeps at a time: one a stream, and those that its largest grid took.
    ///
    /// A thread takes four of the 65,530 memory mappings that Linux allows a process by default, two for its stack
    /// and two for the standard library's signal stack; running out of them there would end the process. The default
    /// leaves a quarter of them free.
    pub max_threads: usize,
    /// Whether bytes around each buffer are watched, so that [`Host::overwritten`] tells what kernels have written outside: for
    /// tests. Costs two pages a buffer.
    pub canaries: bool,
}

/// Most devices, far above any world size: each costs a handle, so this only catches slips.
const MAX_DEVICES: usize = 1024;
/// Linux's number for "try again".
pub(crate) const EAGAIN: i32 = 11;
/// Where [`HostConfig::from_env`] looks.
const DEVICES_SETTING: &str = "SIGNAL_HOST_DEVICES";

impl Default for HostConfig {
    /// Eight devices that all reach each other.
    fn default() -> Self {
        HostConfig { devices: 8, blocked_peers: Vec::new(), max_threads: 12_288, canaries: false }
    }
}

impl HostConfig {
    /// The default, with the number of devices from `SIGNAL_HOST_DEVICES` if it is set.
    pub fn from_env() -> Result<Self> {
        match std::env::var_os(DEVICES_SETTING) {
            Some(value) => Self::with_setting(&value.to_string_lossy()),
            None => Ok(Self::default()),
        }
    }

    fn with_setting(value: &str) -> Result<Self> {
        let devices = value.trim().parse().map_err(|_| ApiMisuse::Setting {
            name: DEVICES_SETTING,
            value: value.to_string(),
            why: "not a number of devices".to_string(),
        })?;
        Ok(HostConfig { devices, ..Self::default() })
    }

    fn check(&self) -> Result<()> {
        if self.devices == 0 {
            let why = Unavailable::NoDevice(format!("0 CPU devices are configured ({DEVICES_SETTING})"));
            return Err(Error::Unavailable { backend: "host", why });
        }
        if self.devices > MAX_DEVICES {
            let (value, why) = (self.devices.to_string(), format!("more than {MAX_DEVICES} devices"));
            return Err(ApiMisuse::Setting { name: DEVICES_SETTING, value, why }.into());
        }
        for &(from, to) in &self.blocked_peers {
            let why = match from.max(to) {
                device if device >= self.devices => format!("there is no device {device}"),
                _ if from == to => "a device always reaches itself".to_string(),
                _ => continue,
            };
            return Err(ApiMisuse::Setting { name: "blocked_peers", value: format!("({from}, {to})"), why }.into());
        }
        Ok(())
    }
}

/// The backend on CPU threads: a configuration together with a kernel image.
#[derive(Clone)]
pub struct Host(Shared<HostInner>);

pub(crate) struct HostInner {
    pub(crate) config: HostConfig,
    pub(crate) table: &'static HostImageTable,
    /// In catalogue order.
    pub(crate) kernels: Arc<[HostKernel]>,
    pub(crate) fingerprint: u64,
    /// Bytes of memory of the machine, 0 where it cannot be told.
    pub(crate) memory_bytes: u64,
    /// Bytes in live buffers.
    allocated: AtomicUsize,
    /// Workers and lanes.
    threads: AtomicUsize,
    canaries: SpinLock<Watch>,
}

impl Host {
    /// Opens the backend. An error if there is no image, if it was made for another layout or lacks a kernel, or if the
    /// configuration cannot be had.
    pub fn open(image: HostImage, config: HostConfig) -> Result<Host> {
        config.check()?;
        let (table, kernels) = image.index()?;
        Ok(Host(Shared::new(HostInner {
            config,
            table,
            kernels,
            fingerprint: image.fingerprint,
            memory_bytes: memory_bytes(),
            allocated: AtomicUsize::new(0),
            threads: AtomicUsize::new(0),
            canaries: SpinLock::new(Watch::default()),
        })))
    }

    /// Bytes in the buffers that are alive on all devices of this backend, to find leaks.
    pub fn allocated_bytes(&self) -> usize {
        self.0.allocated.load(Ordering::Relaxed)
    }

    /// Threads that the backend keeps for streams and grids, to find leaks.
    pub fn threads(&self) -> usize {
        self.0.threads.load(Ordering::Relaxed)
    }

    /// What has been written outside of buffers since the backend was opened, where [`HostConfig::canaries`] are planted; else
    /// nothing. Of work that still runs, what it has written so far.
    pub fn overwritten(&self) -> Vec<Overwritten> {
        self.0.canaries.lock().overwritten()
    }

    pub(crate) fn all_devices(&self) -> Vec<Device> {
        Device { host: self.0.clone(), index: 0 }.machine().collect()
    }
}

impl fmt::Debug for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Host").field("config", &self.0.config).finish_non_exhaustive()
    }
}

impl HostInner {
    /// Counts memory in. Relaxed, here and below: the number guards nothing.
    pub(crate) fn count_in(&self, bytes: usize) {
        self.allocated.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn count_out(&self, bytes: usize) {
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// The canaries around buffers, if there are any.
    pub(crate) fn canaries(&self) -> Option<&SpinLock<Watch>> {
        self.config.canaries.then_some(&self.canaries)
    }

    /// Makes room for more threads, all of them or none.
    pub(crate) fn reserve_threads(&self, more: usize) -> Result<()> {
        let max = self.config.max_threads;
        let room = |alive: usize| alive.checked_add(more).filter(|&total| total <= max);
        match self.threads.fetch_update(Ordering::Relaxed, Ordering::Relaxed, room) {
            Ok(_) => Ok(()),
            Err(alive) => Err(Error::Driver {
                code: EAGAIN,
                name: format!("{more} more than the {alive} there are exceed HostConfig::max_threads = {max}"),
                call: "starting threads",
            }),
        }
    }

    pub(crate) fn release_threads(&self, gone: usize) {
        self.threads.fetch_sub(gone, Ordering::Relaxed);
    }
}

/// A CPU device. Devices with the same index are equal, also if the backend was opened twice: they are one machine.
#[derive(Clone)]
pub struct Device {
    host: Shared<HostInner>,
    index: usize,
}

impl Device {
    /// Position in the enumeration.
    pub fn index(&self) -> usize {
        self.index
    }

    /// All devices of the backend.
    pub(crate) fn machine(&self) -> impl Iterator<Item = Device> {
        let host = self.host.clone();
        (0..host.config.devices).map(move |index| Device { host: host.clone(), index })
    }

    pub(crate) fn name(&self) -> String {
        format!("CPU {}", self.index)
    }

    pub(crate) fn host(&self) -> &Shared<HostInner> {
        &self.host
    }

    /// Refuses what belongs to another device.
    pub(crate) fn check(&self, what: &'static str, found: &Device) -> Result<()> {
        if self == found {
            return Ok(());
        }
        Err(ApiMisuse::WrongDevice { what, found: found.name(), expected: self.name() }.into())
    }

    pub(crate) fn describe(&self) -> DeviceInfo {
        DeviceInfo {
            name: self.name(),
            uuid: format!("host-{}", self.index),
            pci: None,
            arch: std::env::consts::ARCH.to_string(),
            family: DeviceFamily::Host,
            memory_bytes: self.host.memory_bytes,
            compute_units: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
            // Kernels read CLOCK_MONOTONIC in nanoseconds.
            clock_hz: 1_000_000_000,
            max_block_threads: MAX_BLOCK_THREADS,
        }
    }
}

/// Most threads in one block, as on the GPUs.
pub(crate) const MAX_BLOCK_THREADS: u32 = 1024;

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.index == other.index
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name())
    }
}

/// See [`HostInner::memory_bytes`].
fn memory_bytes() -> u64 {
    let table = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib =
        table.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix("kB")?.trim().parse().ok());
    kib.map_or(0, |kib: u64| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{IMAGE, host};
    use signal_core::backend::Backend;

    #[test]
    fn the_default_is_eight_devices_of_one_machine() {
        let host = host();
        let devices = host.devices().unwrap();
        assert_eq!(devices.len(), 8);
        let info = Host::describe(&devices[3]);
        assert_eq!((info.name.as_str(), info.uuid.as_str()), ("CPU 3", "host-3"));
        assert_eq!((info.clock_hz, info.max_block_threads), (1_000_000_000, 1024));
        assert_eq!(info.arch, std::env::consts::ARCH);
        assert!(info.memory_bytes > 0 && info.compute_units > 0);
        assert_eq!(devices[3], crate::testing::host().devices().unwrap()[3]);
        assert_ne!(devices[3], devices[4]);
    }

    #[test]
    fn settings_are_refused_by_name() {
        assert_eq!(HostConfig::with_setting(" 3 ").unwrap().devices, 3);
        for bad in ["", "x", "-1", "1.5"] {
            match HostConfig::with_setting(bad) {
                Err(Error::ApiMisuse(ApiMisuse::Setting { name: DEVICES_SETTING, value, .. })) => {
                    assert_eq!(value, bad)
                }
                other => panic!("{other:?}"),
            }
        }
        let refusal = |devices, blocked_peers| {
            Host::open(IMAGE, HostConfig { devices, blocked_peers, ..HostConfig::default() }).unwrap_err()
        };
        assert!(matches!(refusal(0, vec![]), Error::Unavailable { backend: "host", why: Unavailable::NoDevice(_) }));
        assert!(matches!(refusal(1025, vec![]), Error::ApiMisuse(ApiMisuse::Setting { name: DEVICES_SETTING, .. })));
        for pair in [(0, 2), (2, 0), (1, 1)] {
            let error = refusal(2, vec![(0, 1), pair]);
            assert!(matches!(error, Error::ApiMisuse(ApiMisuse::Setting { name: "blocked_peers", .. })), "{error}");
        }
    }
}
