//! Random sequences of calls, of every collective by the typed layer and the raw one, with arguments that nobody would pass on purpose:
//! nothing panics or hangs, what is refused is an error value and has no effect, and calls that can be meant are right in between.
//! Raw calls are made only with memory that is there, or with what must be refused; nothing is written outside of buffers.
#![cfg(feature = "host")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "clippy knows tests, but not what they call")]

mod fuzz {
    pub(crate) mod calls;
    mod job;
    pub(crate) mod op;
    pub(crate) mod state;
}

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};
use signal_comm::{Algorithm, Backend, CallOptions, Collective, Communicator, DeviceBuffer, ReduceOp, Settings, host};

use fuzz::calls::check_sum;
use fuzz::op::{Case, case};
use fuzz::state::{Seen, State};

/// Cases of a run, times SIGNAL_TEST_SCALE.
const CASES: f64 = 100.0;
/// Cases after each of which fresh ranks have to work: they take as long as a whole case.
const FRESH_EVERY: usize = 10;
/// After this a case counts as hung. It takes some deadlines of 25 ms.
const WATCHDOG: Duration = Duration::from_secs(120);

/// Panics of other threads than the test's: those of the library's own would go unnoticed.
static PANICS: AtomicUsize = AtomicUsize::new(0);
/// The case that runs, and since when.
static RUNNING: Mutex<Option<(Instant, Case)>> = Mutex::new(None);

#[test]
fn hostile_sequences_are_survived() {
    let (report, own) = (std::panic::take_hook(), std::thread::current().id());
    std::panic::set_hook(Box::new(move |info| {
        PANICS.fetch_add(usize::from(std::thread::current().id() != own), Ordering::Relaxed);
        report(info);
    }));
    std::thread::spawn(watch);
    let scale: f64 = std::env::var("SIGNAL_TEST_SCALE").map_or(1.0, |text| text.parse().unwrap());
    let cases = (CASES * scale).max(1.0) as u32;
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 300, ..Config::default() };
    // The same cases each time, so that what fails is what has changed; a longer run tries others.
    let mut runner = match scale > 1.0 {
        true => TestRunner::new(config),
        false => TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha)),
    };
    let (done, seen) = (AtomicUsize::new(0), Mutex::new(Seen::new()));
    let result = runner.run(&case(), |case| {
        *running() = Some((Instant::now(), case.clone()));
        let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
        State::new(&case).run(&case.ops).into_iter().for_each(|(what, calls)| *seen.entry(what).or_default() += calls);
        assert_eq!(PANICS.load(Ordering::Relaxed), 0, "a thread has panicked");
        if done.fetch_add(1, Ordering::Relaxed) % FRESH_EVERY == 0 {
            fresh_ranks_work();
        }
        *running() = None;
        Ok::<_, TestCaseError>(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
    fresh_ranks_work();
    let seen = seen.into_inner().unwrap();
    println!(
        "{cases} cases, {} calls in them that had to come out right or refused: {seen:#?}",
        seen.values().sum::<usize>()
    );
    // Else the cases are not what they are said to be; few of them do not have all.
    if scale >= 1.0 {
        for (collective, layer) in Collective::ALL.into_iter().flat_map(|one| [(one, "typed"), (one, "raw")]) {
            for what in ["right", "refused"].map(|ended| format!("{layer} {collective}: {ended}")) {
                assert!(seen.contains_key(&what), "none was {what}");
            }
        }
    }
}

/// A rank takes another algorithm for the first of two calls. Its exit barrier then is what the peer's second call takes for a
/// start barrier, and finds no place there. The cases above leave such calls out.
#[test]
fn calls_that_differ_between_ranks_end_with_errors() {
    let devices = host::open().unwrap().devices().unwrap();
    let mut settings = Settings::default();
    settings.timeout = Duration::from_millis(500);
    let mut ranks = Communicator::<host::Host>::builder()
        .settings(settings)
        .share_devices(true)
        .all_local(&[devices[0].clone(), devices[0].clone()])
        .unwrap();
    let lane = |comm: &Communicator<host::Host>| {
        let buffer = DeviceBuffer::<host::Host, f32>::new(comm.device(), 1000).unwrap();
        (host::Host::create_stream(comm.device()).unwrap(), buffer)
    };
    let mut lanes: Vec<_> = ranks.iter().map(lane).collect();
    for (rank, first) in [(0, Algorithm::TwoStage), (1, Algorithm::OneStage)] {
        let (stream, buffer) = &mut lanes[rank];
        for algorithm in [first, Algorithm::OneStage] {
            let mut options = CallOptions::default();
            options.algorithm = Some(algorithm);
            ranks[rank].with(options).all_reduce_in_place(stream, &mut *buffer, ReduceOp::Sum).unwrap();
        }
    }
    let ended = ranks.iter().zip(&lanes).filter(|(comm, (stream, _))| comm.wait(stream).is_err());
    assert_ne!(ended.count(), 0, "no rank has noticed");
}

/// Whatever became of the others.
fn fresh_ranks_work() {
    let devices = host::open().unwrap().devices().unwrap();
    let mut settings = Settings::default();
    settings.scratch_bytes = Settings::MIN_SCRATCH_BYTES;
    let pair = [devices[0].clone(), devices[0].clone()];
    let comms = Communicator::builder().settings(settings).share_devices(true).all_local(&pair).unwrap();
    check_sum(comms);
}

fn running() -> MutexGuard<'static, Option<(Instant, Case)>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Ends the process when a case hangs, with the case.
fn watch() {
    loop {
        std::thread::sleep(Duration::from_secs(1));
        if let Some((_, case)) = running().as_ref().filter(|(since, _)| since.elapsed() > WATCHDOG) {
            eprintln!("hangs: still running after {WATCHDOG:?}: {case:#?}");
            std::process::abort();
        }
    }
}
