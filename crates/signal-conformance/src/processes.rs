//! Cases whose ranks are processes: a test starts its own executable once for each rank, and each copy, which runs the same test,
//! finds its part in the environment.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use signal_core::rendezvous::{Id, UnixRendezvous};
use signal_core::{Backend, Communicator, Result, Settings};

use crate::rig::{Rig, run, settings};

/// "rank world scenario id...", in a copy.
const VARIABLE: &str = "SIGNAL_TEST_PROCESS";
/// A copy that takes longer is ended, and its case has failed.
const PATIENCE: Duration = Duration::from_secs(120);

/// A case: what each copy does, and what the test itself does with them.
pub struct ProcessCase<B: Backend> {
    /// In a copy.
    pub(crate) member: fn(&Member<'_, B>),
    /// In the test.
    pub(crate) direct: fn(&Director<'_, B>),
}

/// The part of a test, which starts copies.
pub(crate) struct Director<'a, B: Backend> {
    pub(crate) rig: &'a Rig<B>,
    test: &'static str,
}

/// The part of a copy.
pub(crate) struct Member<'a, B: Backend> {
    pub(crate) rig: &'a Rig<B>,
    pub(crate) rank: usize,
    pub(crate) world: usize,
    /// What the director asks for.
    pub(crate) scenario: String,
    /// Of the groups that may be needed, the same in each copy.
    pub(crate) ids: [Id; 3],
}

/// A copy that was started.
pub(crate) struct Copy {
    pub(crate) rank: usize,
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
    readers: Vec<JoinHandle<()>>,
}

/// Runs a case, or in a copy its part. `path` is that of the test's function, as `module_path!` has it.
pub fn run_processes<B: Backend>(
    name: &'static str,
    path: &'static str,
    open: impl FnOnce() -> Result<B>,
    check: impl FnOnce(&B),
    case: ProcessCase<B>,
) {
    // The harness leaves the crate's name out.
    let test = path.split_once("::").map_or(path, |(_, test)| test);
    run(name, open, check, |rig| match std::env::var(VARIABLE) {
        Err(_) => (case.direct)(&Director { rig, test }),
        Ok(text) => {
            let words: Vec<&str> = text.split(' ').collect();
            let [rank, world, scenario, ids @ ..] = words.as_slice() else { panic!("{VARIABLE}={text}") };
            let (rank, world, scenario) = (rank.parse().unwrap(), world.parse().unwrap(), (*scenario).to_owned());
            let ids = [0, 1, 2].map(|at| Id::from_hex(ids[at]).unwrap());
            (case.member)(&Member { rig, rank, world, scenario, ids });
        }
    });
}

impl<B: Backend> Director<'_, B> {
    /// Starts `world` copies.
    pub(crate) fn start(&self, world: usize, scenario: &str) -> Vec<Copy> {
        let ids: Vec<String> = (0..3).map(|_| Id::new().unwrap().to_hex()).collect();
        let start = |rank| {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["--exact", self.test, "--nocapture", "--test-threads=1"])
                .env(VARIABLE, format!("{rank} {world} {scenario} {}", ids.join(" ")))
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let lines = Arc::new(Mutex::new(Vec::new()));
            let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
            let readers = vec![read(stdout, lines.clone()), read(stderr, lines.clone())];
            Copy { rank, child, lines, readers }
        };
        (0..world).map(start).collect()
    }

    /// Starts `world` copies, all of which have to succeed.
    pub(crate) fn succeed(&self, world: usize, scenario: &str) {
        succeed(self.start(world, scenario));
    }
}

/// Waits until all copies have ended; each has to have succeeded.
pub(crate) fn succeed(mut copies: Vec<Copy>) {
    let began = Instant::now();
    let mut ended = vec![None; copies.len()];
    while ended.contains(&None) && !ended.contains(&Some(false)) && began.elapsed() < PATIENCE {
        std::thread::sleep(Duration::from_millis(2));
        for (ended, copy) in ended.iter_mut().zip(&mut copies).filter(|(ended, _)| ended.is_none()) {
            *ended = copy.has_ended();
        }
    }
    let outputs = || copies.iter().map(|copy| format!("rank {}:\n{}", copy.rank, copy.output())).collect::<Vec<_>>();
    assert!(ended.iter().all(|ended| *ended == Some(true)), "{ended:?}\n{}", outputs().join("\n"));
}

impl Copy {
    /// Waits until it has printed a line that holds `text`.
    pub(crate) fn said(&mut self, text: &str) {
        let began = Instant::now();
        while !lock(&self.lines).iter().any(|line| line.contains(text)) {
            let ended = matches!(self.child.try_wait(), Ok(Some(status)) if !status.success());
            assert!(
                !ended && began.elapsed() < PATIENCE,
                "rank {} has not said {text:?}: {}",
                self.rank,
                self.output()
            );
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn send(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Ends it as a crash would, and takes it out of the way.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        self.readers.drain(..).for_each(|reader| reader.join().unwrap());
    }

    /// Whether it has succeeded, if it has ended.
    fn has_ended(&mut self) -> Option<bool> {
        let status = self.child.try_wait().unwrap()?;
        self.readers.drain(..).for_each(|reader| reader.join().unwrap());
        Some(status.success())
    }

    fn output(&self) -> String {
        lock(&self.lines).join("\n")
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        // Of a case that fails: no copy stays behind. It has ended already otherwise.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl<B: Backend> Member<'_, B> {
    /// This copy's rank in the first group.
    pub(crate) fn connect(&self, adjust: impl FnOnce(&mut Settings)) -> Result<(Communicator<B>, B::Stream)> {
        self.connect_as(0, self.rank, self.world, adjust)
    }

    /// A rank in one of the groups.
    pub(crate) fn connect_as(
        &self,
        group: usize,
        rank: usize,
        world: usize,
        adjust: impl FnOnce(&mut Settings),
    ) -> Result<(Communicator<B>, B::Stream)> {
        let mut settings = settings();
        adjust(&mut settings);
        let rendezvous = UnixRendezvous::from_id(&self.ids[group], rank, world, settings.timeout)?;
        let device = &self.rig.devices_for(self.world)[self.rank];
        let comm = Communicator::<B>::builder().settings(settings).share_devices(true).connect(device, rendezvous)?;
        Ok((comm, B::create_stream(device)?))
    }

    /// Tells the director.
    pub(crate) fn say(&self, text: &str) {
        println!("{text}");
    }
}

fn read(from: impl std::io::Read + Send + 'static, lines: Arc<Mutex<Vec<String>>>) -> JoinHandle<()> {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(std::result::Result::ok) {
            lock(&lines).push(line);
        }
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
