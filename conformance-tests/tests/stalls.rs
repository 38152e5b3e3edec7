//! Runs the suite in real time in a process that is stopped and continued. The store must not be blamed for
//! this.
#![cfg(unix)]
#![allow(clippy::expect_used)]

use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use leasehold_api::{Error, Lock};
use leasehold_conformance::{Factory, Harness, Outcome, Time, all_cases, async_trait, pace, run_case};
use leasehold_memory::MemoryStore;
use rustix::process::{Pid, Signal, kill_process};

/// The environment variable of the process that is stopped.
const STOPPED: &str = "LEASEHOLD_CONFORMANCE_STOPPED";

/// The groups of cases that hold leases of a second, or wait.
const GROUPS: [&str; 6] = ["exclusion", "expiry", "renewal", "timeouts", "fencing", "release"];

/// A store in memory with leases by the real clock.
#[derive(Clone, Copy, Debug)]
struct Real;

#[async_trait]
impl Factory for Real {
    fn time(&self) -> Time {
        Time::Real
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        Ok(Box::new(OneStore(MemoryStore::new().default_ttl(Duration::from_secs(1) * pace()))))
    }
}

#[derive(Debug)]
struct OneStore(MemoryStore);

#[async_trait]
impl Harness for OneStore {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(self.0.client()?))
    }
}

/// Runs the cases on several threads. Returns how many passed and how many were inconclusive.
fn run() -> [usize; 2] {
    let cases: Vec<_> = all_cases().iter().filter(|case| GROUPS.contains(&case.group())).collect();
    let [next, passed, inconclusive] = [0; 3].map(AtomicUsize::new);
    thread::scope(|scope| {
        for _ in 0..16 {
            scope.spawn(|| {
                while let Some(case) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let report = run_case(case, &Real);
                    match report.outcome {
                        Outcome::Passed => _ = passed.fetch_add(1, Ordering::Relaxed),
                        Outcome::Inconclusive { .. } => _ = inconclusive.fetch_add(1, Ordering::Relaxed),
                        Outcome::Failed { .. } => panic!("{report}"),
                        _ => {}
                    }
                }
            });
        }
    });
    [passed, inconclusive].map(AtomicUsize::into_inner)
}

#[test]
fn the_cases_pass_where_the_machine_lets_them() {
    let [passed, inconclusive] = run();
    println!("{passed} passed, {inconclusive} inconclusive");
    assert!(passed > 30 || std::env::var_os(STOPPED).is_some(), "{passed}");
}

#[test]
fn a_process_that_is_stopped_accuses_nobody() {
    let mut command = Command::new(std::env::current_exe().expect("this executable"));
    command.args(["--exact", "the_cases_pass_where_the_machine_lets_them", "--nocapture"]).env(STOPPED, "1");
    let mut child = command.stdout(Stdio::piped()).spawn().expect("this executable once more");
    let pid = Pid::from_child(&child);
    let mut dice = fastrand::Rng::with_seed(18);
    while child.try_wait().expect("a child of ours").is_none() {
        for (signal, milliseconds) in [(Signal::STOP, 50..500), (Signal::CONT, 20..300)] {
            kill_process(pid, signal).expect("a child of ours, which is not waited for before");
            thread::sleep(Duration::from_millis(dice.u64(milliseconds)));
        }
    }
    let output = child.wait_with_output().expect("a child that has ended");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("INCONCLUSIVE: "), "nothing was disturbed: {said}");
    assert!(said.contains("stood still for up to "), "{said}");
}
