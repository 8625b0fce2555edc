//! What a case gets to work with: an opened backend, and worlds on its devices.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use signal_core::{Backend, Communicator, DeviceFamily, Result, Settings};

use crate::world::World;

/// World sizes of the cases that try many sizes: the smallest, odd ones and the largest.
pub(crate) const WORLDS: [usize; 5] = [1, 2, 3, 5, 8];

/// Deadline of a communicator in cases where nobody is late.
const PATIENCE: Duration = Duration::from_secs(20);

/// After this, times the scale where that is above 1, a case counts as hung. Longer than the slowest case takes under a
/// sanitizer.
const WATCHDOG: Duration = Duration::from_secs(300);

/// An opened backend.
#[derive(Debug)]
pub struct Rig<B: Backend> {
    /// Kept open for as long as its devices are used.
    backend: B,
    devices: Vec<B::Device>,
}

/// Cases that watch the clock, or whose ranks do, begin so.
const BY_THE_CLOCK: [&str; 11] = [
    "abort_",
    "barrier_waits",
    "domains_",
    "exchanges_name",
    "processes_",
    "recover_",
    "split_",
    "streams_",
    "timeout_",
    "trace_names",
    "user_kernels_name",
];

/// Runs one case: alone where cases share devices, or where it watches the clock. `check` then looks at the backend, and panics if
/// something is wrong with it.
pub fn run<B: Backend>(
    name: &'static str,
    open: impl FnOnce() -> Result<B>,
    check: impl FnOnce(&B),
    case: impl FnOnce(&Rig<B>),
) {
    static TURNS: RwLock<()> = RwLock::new(());
    let backend = open().unwrap_or_else(|e| panic!("the backend does not open: {e}"));
    let devices = backend.devices().unwrap();
    let rig = Rig { backend, devices };
    let alone = !rig.is_host() || BY_THE_CLOCK.iter().any(|begin| name.starts_with(begin));
    // A case that panicked leaves nothing behind that others see.
    let _alone = alone.then(|| TURNS.write().unwrap_or_else(PoisonError::into_inner));
    let _beside_others = (!alone).then(|| TURNS.read().unwrap_or_else(PoisonError::into_inner));
    let _watchdog = Watchdog::new(name);
    let began = Instant::now();
    case(&rig);
    check(&rig.backend);
    println!("{name}: {:.2} s", began.elapsed().as_secs_f64()); // seen with --nocapture
}

/// Ends the process, with the name of the case, unless it is dropped in time.
struct Watchdog {
    over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Watchdog {
    fn new(name: &'static str) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let seen = over.clone();
        // Parked, not waiting on a channel: race detectors do not see into those of the standard library.
        let limit = WATCHDOG.mul_f64(scale().max(1.0));
        let watch = move || {
            let began = Instant::now();
            while !seen.load(Ordering::Acquire) {
                match limit.checked_sub(began.elapsed()) {
                    Some(left) => std::thread::park_timeout(left),
                    None => {
                        eprintln!("{name} hangs: still running after {limit:?}");
                        std::process::abort();
                    }
                }
            }
        };
        Watchdog { over, thread: Some(std::thread::spawn(watch)) }
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Release);
        if let Some(thread) = self.thread.take() {
            thread.thread().unpark();
            // It does not panic.
            let _ = thread.join();
        }
    }
}

/// `rounds` times SIGNAL_TEST_SCALE, at least 1.
pub(crate) fn scaled(rounds: u32) -> u32 {
    ((f64::from(rounds) * scale()) as u32).max(1)
}

/// Whether the run is scaled down, as under sanitizers, which multiply every step's time: fewer variants of the dearest cases
/// then, and more patience where a case watches the clock.
pub(crate) fn is_scaled_down() -> bool {
    scale() < 1.0
}

fn scale() -> f64 {
    let parse = |text: String| text.parse().unwrap_or_else(|e| panic!("SIGNAL_TEST_SCALE={text}: {e}"));
    std::env::var("SIGNAL_TEST_SCALE").map_or(1.0, parse)
}

/// The settings that cases start from. The environment is left out, since a case says what it needs, but for `SIGNAL_P2P`, by which the whole
/// suite runs as where devices do not reach each other.
pub(crate) fn settings() -> Settings {
    let mut settings = Settings::default();
    settings.peer_to_peer = Settings::from_env().unwrap_or_else(|error| panic!("{error}")).peer_to_peer;
    settings.timeout = PATIENCE;
    settings.scratch_bytes = 1 << 20;
    settings
}

impl<B: Backend> Rig<B> {
    /// Whether kernels run on CPU threads: they alone have test hooks, and there each rank more takes its time.
    pub(crate) fn is_host(&self) -> bool {
        B::describe(&self.devices[0]).family == DeviceFamily::Host
    }

    /// Every device once.
    pub(crate) fn devices(&self) -> &[B::Device] {
        &self.devices
    }

    /// A device for each rank; with fewer devices than ranks, they repeat.
    pub(crate) fn devices_for(&self, ranks: usize) -> Vec<B::Device> {
        self.devices.iter().cycle().take(ranks).cloned().collect()
    }

    /// Communicators for `ranks` ranks with [`settings`].
    pub(crate) fn world(&self, ranks: usize) -> World<B> {
        self.world_with(ranks, |_| ())
    }

    /// Communicators for `ranks` ranks with adjusted [`settings`].
    pub(crate) fn world_with(&self, ranks: usize, adjust: impl FnOnce(&mut Settings)) -> World<B> {
        let mut settings = settings();
        adjust(&mut settings);
        let comms = Communicator::<B>::builder()
            .settings(settings)
            .share_devices(true)
            .all_local(&self.devices_for(ranks))
            .unwrap_or_else(|e| panic!("{ranks} ranks: {e}"));
        World::new(comms)
    }
}
