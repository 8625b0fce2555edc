//! Ranks as processes, which can be killed and stopped. A child is this test program again, told by a variable which rank
//! of which group it is and what it does there.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::{Pid, Signal, kill_process};
use signal_core::rendezvous::fds::exchange;
use signal_core::rendezvous::from_env;
use signal_core::{Rendezvous, Result, UnixRendezvous};

use super::tools::{LONG, SLACK, assert_absent, assert_lost, each, name, within};

const CHILD: &str = "SIGNAL_TEST_CHILD";
const WORLD: usize = 3;

/// A rank in a process of its own; killed when dropped.
struct Rank(Child);

impl Rank {
    /// Rank `rank` of the group at `name`, which then does as `role` says.
    fn start(role: &str, name: &str, rank: usize) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "rendezvous::processes::child", "--nocapture"])
            .env(CHILD, format!("{role} {name} {rank}"))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        Rank(child)
    }

    /// Waits until it says that it has come to the point.
    fn is_there(&mut self) {
        let output = BufReader::new(self.0.stdout.as_mut().unwrap());
        assert!(output.lines().any(|line| line.unwrap().contains("here it is")), "the child has ended");
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the children do; nothing where it runs as a test.
#[test]
fn child() {
    let Ok(role) = std::env::var(CHILD) else { return };
    if role == "job" {
        return gather_twice();
    }
    let [role, name, rank] = role.split(' ').collect::<Vec<_>>().try_into().unwrap();
    let mut one = UnixRendezvous::new(name, b"", rank.parse().unwrap(), WORLD, LONG).unwrap();
    match role {
        "idle" => {
            println!("here it is");
            std::thread::sleep(LONG);
        }
        "gather" => loop {
            println!("here it is");
            one.gather(&vec![7; 100_000], LONG).unwrap();
        },
        // More than a socket takes in while nobody reads, so it stays in the middle of a frame.
        "large" => {
            println!("here it is");
            let _ = one.gather(&vec![7; 1 << 20], LONG);
        }
        "exchange" => {
            println!("here it is");
            let fd = memfd_create("signal-test", MemfdFlags::CLOEXEC).unwrap();
            exchange(&mut one, &[fd.as_fd()], LONG).unwrap();
        }
        other => panic!("no role {other}"),
    }
}

/// A rank as a launcher starts it: makes two groups, and says what was gathered.
fn gather_twice() {
    let mut groups: Vec<_> = (0..2).map(|_| from_env(LONG).unwrap()).collect();
    for (turn, group) in groups.iter_mut().enumerate() {
        let own = format!("{}:{}:{turn}", std::env::var("TEST_JOB").unwrap(), group.rank());
        let all = group.gather(own.as_bytes(), LONG).unwrap();
        let all: Vec<_> = all.iter().map(|part| String::from_utf8_lossy(part)).collect();
        println!("gathered {}", all.join(" "));
    }
}

/// Two jobs at once of each launcher, with the variables that it sets and nothing that says where to meet.
#[test]
fn jobs_of_every_launcher_meet_and_do_not_meet_each_other() {
    // With %r for the rank and %j for what tells the jobs apart.
    let launchers = [
        "RANK=%r WORLD_SIZE=2 LOCAL_RANK=%r LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=%j TORCHELASTIC_RUN_ID=none",
        "OMPI_COMM_WORLD_RANK=%r OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=%r OMPI_COMM_WORLD_LOCAL_SIZE=2 \
         PMIX_NAMESPACE=%j",
        "PMI_RANK=%r PMI_SIZE=2 MPI_LOCALRANKID=%r MPI_LOCALNRANKS=2 PMI_JOBID=%j",
        "SLURM_PROCID=%r SLURM_STEP_NUM_TASKS=2 SLURM_LOCALID=%r SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=2 \
         SLURM_JOB_ID=7 SLURM_STEP_ID=%j",
        "SIGNAL_RANK=%r SIGNAL_WORLD=2 SIGNAL_RENDEZVOUS=unix:%j SIGNAL_SECRET=secret",
    ];
    let mut children = Vec::new();
    for (number, launcher) in launchers.iter().enumerate() {
        for job in [2 * number, 2 * number + 1] {
            // Nobody else's, whatever else runs on this machine.
            let id = format!("{}{job:02}", std::process::id());
            for rank in ["0", "1"] {
                let mut command = Command::new(std::env::current_exe().unwrap());
                command.args(["--exact", "rendezvous::processes::child", "--nocapture"]).env_clear();
                for variable in launcher.split_whitespace() {
                    let (name, value) = variable.split_once('=').unwrap();
                    command.env(name, value.replace("%r", rank).replace("%j", &id));
                }
                let child = command.env(CHILD, "job").env("TEST_JOB", job.to_string()).stdout(Stdio::piped()).spawn();
                children.push((job, Rank(child.unwrap())));
            }
        }
    }
    for (job, mut child) in children {
        let output = std::io::read_to_string(child.0.stdout.take().unwrap()).unwrap();
        for turn in 0..2 {
            let expected = format!("gathered {job}:0:{turn} {job}:1:{turn}\n");
            assert!(output.contains(&expected), "{expected} is not in {output}");
        }
    }
}

/// The other ranks, as threads here: what `body` returns on each.
fn others<T: Send>(name: &str, doomed: usize, body: impl Fn(UnixRendezvous) -> T + Sync) -> Vec<T> {
    let ranks = (0..WORLD).filter(|rank| *rank != doomed);
    each(ranks, |rank| body(UnixRendezvous::new(name, b"", rank, WORLD, LONG).unwrap()))
}

/// Kills rank `doomed` as soon as `role` has brought it to its point and `pause` has passed, while the others gather until
/// they cannot.
fn kill(role: &str, doomed: usize, pause: Duration) {
    let name = name("killed");
    let mut child = Rank::start(role, &name, doomed);
    let killer = std::thread::spawn(move || {
        child.is_there();
        std::thread::sleep(pause);
        child.signal(Signal::KILL);
        (Instant::now(), child)
    });
    let results = others(&name, doomed, |mut one| {
        let error = loop {
            if let Err(error) = one.gather(b"and on", LONG) {
                break error;
            }
        };
        let again = one.gather(b"", LONG);
        (again, error, Instant::now())
    });
    let (killed, _child) = killer.join().unwrap();
    for (again, error, ended) in results {
        assert!(ended.saturating_duration_since(killed) < SLACK, "noticed after {:?}", ended - killed);
        assert_eq!(again, Err(error));
        assert_lost(&again, &[doomed]);
    }
    // The name is free again.
    let after = each(0..WORLD, |rank| UnixRendezvous::new(&name, b"", rank, WORLD, LONG)?.gather(b"", LONG));
    assert!(after.iter().all(Result::is_ok), "{after:?}");
}

#[test]
fn a_killed_rank_is_named_at_once() {
    for doomed in 0..WORLD {
        kill("idle", doomed, Duration::ZERO);
        kill("gather", doomed, Duration::from_micros(700 * doomed as u64));
    }
}

#[test]
fn a_rank_that_is_killed_in_the_middle_of_a_frame_is_named() {
    let name = name("half");
    let mut child = Rank::start("large", &name, 2);
    let ranks = others(&name, 2, |one| one);
    child.is_there();
    // Rank 0 does not read yet, and the socket is full by now.
    std::thread::sleep(Duration::from_millis(200));
    child.signal(Signal::KILL);
    child.0.wait().unwrap();
    let results = std::thread::scope(|scope| {
        let threads: Vec<_> = ranks
            .into_iter()
            .map(|mut one| scope.spawn(move || within(Duration::ZERO, || one.gather(b"", LONG))))
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    results.iter().for_each(|result| assert_lost(result, &[2]));
}

#[test]
fn a_stopped_rank_holds_nobody_longer_than_their_patience() {
    const SOON: Duration = Duration::from_millis(700);
    for stopped in [0, 2] {
        let name = name("stopped");
        let mut child = Rank::start("idle", &name, stopped);
        let results = others(&name, stopped, |one| one);
        child.is_there();
        child.signal(Signal::STOP);
        let results = std::thread::scope(|scope| {
            let gather = |mut one: UnixRendezvous| {
                // Larger than what the socket of a stopped rank takes.
                let own = vec![1; 1 << 20];
                move || within(SOON, || one.gather(&own, SOON))
            };
            let threads: Vec<_> = results.into_iter().map(|one| scope.spawn(gather(one))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
        });
        results.iter().for_each(|result| assert_absent(result, &[stopped]));
        child.signal(Signal::CONT);
    }
}

#[test]
fn a_rank_that_is_killed_while_it_gives_its_descriptors_is_named() {
    for round in 0..12 {
        let doomed = round % WORLD;
        let name = name("fds");
        let mut child = Rank::start("exchange", &name, doomed);
        let killer = std::thread::spawn(move || {
            child.is_there();
            std::thread::sleep(Duration::from_micros(100 * round as u64));
            child.signal(Signal::KILL);
            child
        });
        let results = others(&name, doomed, |mut one| {
            let fd = OwnedFd::from(File::open("/dev/null").unwrap());
            // It may have given them in time; then it is missed afterwards.
            let result = within(Duration::from_secs(1), || exchange(&mut one, &[fd.as_fd()], LONG).map(|_| ()));
            result.and_then(|()| one.gather(b"", LONG).map(|_| ()))
        });
        let _child = killer.join().unwrap();
        results.iter().for_each(|result| assert_lost(result, &[doomed]));
    }
}

/// Abstract names are in no file system. What there was before, other programs may change meanwhile.
#[test]
fn nothing_is_left_behind() {
    kill("gather", 1, Duration::ZERO);
    for folder in ["/tmp", "/dev/shm", "/run", "/var/tmp"] {
        let Ok(entries) = std::fs::read_dir(folder) else { continue };
        let ours = |name: &str| name.contains("signal-comm") || name.contains(&format!("{}-", std::process::id()));
        let left: Vec<_> = entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        assert!(!left.iter().any(|name| ours(name)), "{folder}: {left:?}");
    }
}
