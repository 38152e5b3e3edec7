//! The workers of one store: processes of the small worker, and of the real command.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use leasehold::Mode;
use rustix::process::{Pid, Signal, kill_process};
use test_bounds::Bound;

use crate::clock::Clock;
use crate::record;
use crate::register::KEYS;
use crate::worker::{self, CALLERS, line};

const WORKERS: usize = 4;
const RUNNERS: usize = 2;
/// Limit for the end of a process, longer than any call to a store.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time for which a fault waits for its victim to enter a section.
const AIM: Duration = Duration::from_millis(500);
/// Interval of polls.
const PAUSE: Duration = Duration::from_millis(1);

/// Settings of all workers.
#[derive(Clone, Debug)]
pub(crate) struct How {
    pub(crate) url: String,
    pub(crate) dir: PathBuf,
    pub(crate) broken: Option<worker::Broken>,
    /// The modes from which commands choose.
    pub(crate) modes: Vec<Mode>,
}

/// The processes of the small worker.
#[derive(Debug)]
pub(crate) struct Workers {
    how: How,
    /// Clock of the first worker, if it can be set.
    clock: Option<Clock>,
    processes: Vec<(u64, Child)>,
    seeds: u64,
}

impl Workers {
    pub(crate) fn start(how: How, clock: Option<Clock>, seed: u64) -> Self {
        let mut workers = Self { how, clock, processes: Vec::new(), seeds: seed << 16 };
        (0..WORKERS).for_each(|at| workers.start_worker(at));
        workers
    }

    fn start_worker(&mut self, at: usize) {
        self.seeds += 1;
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "worker::worker", "--nocapture"])
            .env(worker::SEED, self.seeds.to_string())
            .env(worker::URL, &self.how.url)
            .env(worker::DIR, &self.how.dir)
            .stdout(Stdio::null());
        if let Some(broken) = self.how.broken {
            command.env(worker::BROKEN, broken.name());
        }
        if let Some(clock) = self.clock.as_ref().filter(|_| at == 0) {
            command.envs(clock.variables());
        }
        self.processes.insert(at, (self.seeds, command.spawn().unwrap()));
    }

    /// Returns a random worker.
    pub(crate) fn victim(random: &mut fastrand::Rng) -> usize {
        random.usize(..WORKERS)
    }

    /// Waits until this worker is in a section, for at most [`AIM`].
    pub(crate) async fn aim(&self, at: usize) {
        wait_for(AIM, || self.is_in_section(at)).await;
    }

    /// Returns whether a caller of this worker has started a section and not ended it.
    pub(crate) fn is_in_section(&self, at: usize) -> bool {
        let seed = self.processes[at].0;
        (0..CALLERS).any(|number| ends_in_section(&worker::record(&self.how.dir, seed, number)))
    }

    pub(crate) fn signal(&self, at: usize, signal: Signal) {
        let pid = Pid::from_child(&self.processes[at].1);
        kill_process(pid, signal).unwrap();
    }

    /// Kills a worker and starts another. Returns whether the killed worker was in a section.
    pub(crate) fn kill(&mut self, at: usize) -> bool {
        self.signal(at, Signal::KILL);
        self.processes[at].1.wait().unwrap();
        let was_in_section = self.is_in_section(at);
        self.processes.remove(at);
        self.start_worker(at);
        was_in_section
    }

    /// Moves the wall clock of the first worker, if it can be set.
    pub(crate) fn step_clock(&mut self, seconds: i64) {
        if let Some(clock) = &mut self.clock {
            clock.step(seconds);
        }
    }

    /// Returns the length of the first worker's record of clock jumps.
    pub(crate) fn clock_jumps(&self) -> u64 {
        length(&worker::clock_record(&self.how.dir, self.processes[0].0))
    }

    /// Returns whether each worker has acquired a lock.
    pub(crate) fn have_worked(&self) -> bool {
        let of = |seed, number| length(&worker::record(&self.how.dir, seed, number));
        self.processes.iter().all(|(seed, _)| (0..CALLERS).any(|number| of(*seed, number) > 0))
    }

    /// Ends all workers gracefully and waits for them.
    pub(crate) fn end(&mut self) {
        std::fs::write(self.how.dir.join(worker::STOP), "").unwrap();
        let begun = Bound::new(PATIENCE);
        for (_, worker) in &mut self.processes {
            let status = loop {
                if let Some(status) = worker.try_wait().unwrap() {
                    break status;
                }
                begun.check("a worker does not end");
                std::thread::sleep(PAUSE);
            };
            assert!(status.success(), "a worker failed: {status}");
        }
        self.processes.clear();
        std::fs::remove_file(self.how.dir.join(worker::STOP)).unwrap();
    }

    pub(crate) fn start_all(&mut self) {
        (0..WORKERS).for_each(|at| self.start_worker(at));
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        for (_, worker) in &mut self.processes {
            // Fails for a worker that has already ended.
            let _ = worker.kill();
            let _ = worker.wait();
        }
    }
}

/// Threads that run the command `leasehold run` repeatedly.
#[derive(Debug)]
pub(crate) struct Commands {
    runners: Vec<Arc<Runner>>,
    threads: Vec<JoinHandle<()>>,
    /// Time for which a kill waits for its victim to enter a section. Each miss doubles it, because on a busy machine
    /// [`AIM`] is shorter than the start of a command, and each kill restarts the command.
    aim: Duration,
}

#[derive(Debug)]
struct Runner {
    how: How,
    number: usize,
    is_stopped: AtomicBool,
    /// The running command and its record. After a kill, the next command has another record, because processes of the
    /// killed one might still write.
    running: Mutex<Option<(Child, PathBuf)>>,
}

impl Commands {
    pub(crate) fn start(how: &How) -> Self {
        let program = program();
        let runner = |number| {
            let (is_stopped, running) = (AtomicBool::new(false), Mutex::new(None));
            Arc::new(Runner { how: how.clone(), number, is_stopped, running })
        };
        let runners: Vec<_> = (0..RUNNERS).map(runner).collect();
        let run = |runner: &Arc<Runner>| {
            let (runner, program) = (runner.clone(), program.clone());
            std::thread::spawn(move || runner.run(&program))
        };
        let threads = runners.iter().map(run).collect();
        Self { runners, threads, aim: AIM }
    }

    /// Waits until a random command is in a section, for a limited time, then kills it. Returns whether it was in a
    /// section.
    pub(crate) async fn kill(&mut self, random: &mut fastrand::Rng) -> bool {
        let runner = &self.runners[random.usize(..RUNNERS)];
        let find = || runner.running().as_ref().is_some_and(|(_, record)| ends_in_section(record));
        wait_for(self.aim, find).await;
        let record = {
            let mut running = runner.running();
            let Some((command, record)) = running.as_mut() else { return false };
            command.kill().unwrap();
            record.clone()
        };
        // The kill also ends the child that writes the record, so the record is complete now.
        wait_for(PATIENCE, || runner.running().as_ref().is_none_or(|(_, known)| *known != record)).await;
        let was_in_section = ends_in_section(&record);
        if !was_in_section {
            self.aim = (self.aim * 2).min(PATIENCE);
        }
        was_in_section
    }

    /// Waits for the end of running commands, without starting new ones.
    pub(crate) fn end(&mut self) {
        for runner in &self.runners {
            runner.is_stopped.store(true, Ordering::SeqCst);
        }
        for thread in self.threads.drain(..) {
            assert!(thread.join().is_ok(), "a command cannot be run");
        }
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        for runner in &self.runners {
            runner.is_stopped.store(true, Ordering::SeqCst);
            if let Some((command, _)) = runner.running().as_mut() {
                let _ = command.kill();
            }
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

impl Runner {
    fn run(&self, program: &Path) {
        let mut records = 0;
        let mut random = fastrand::Rng::with_seed(self.number as u64);
        while !self.is_stopped.load(Ordering::SeqCst) {
            let record = self.how.dir.join(format!("command-{}-{records}.record", self.number));
            let key = KEYS[random.usize(..KEYS.len())];
            let before = length(&record);
            let (arguments, mode) = options(self.how.modes[random.usize(..self.how.modes.len())]);
            let command = Command::new(program)
                .args(["--quiet", "--url", &self.how.url, "run", key, "--wait", "2s", "--grace", "1s"])
                .args(arguments)
                .arg("--")
                .arg(std::env::current_exe().unwrap())
                .args(["--exact", "worker::command", "--nocapture"])
                .env(worker::RECORD, &record)
                .env(worker::DIR, &self.how.dir)
                .env(worker::MODE, mode)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            *self.running() = Some((command, record.clone()));
            let status = loop {
                let status = self.running().as_mut().and_then(|(command, _)| command.try_wait().unwrap());
                match status {
                    Some(status) => break status,
                    None => std::thread::sleep(PAUSE),
                }
            };
            if status.signal().is_some() {
                records += 1;
            } else if status.success() && length(&record) > before {
                line(&mut File::options().append(true).open(&record).unwrap(), "R");
            }
            *self.running() = None;
            // A pause, because the start of programs takes processor time from the workers.
            std::thread::sleep(Duration::from_millis(random.u64(..200)));
        }
    }

    fn running(&self) -> MutexGuard<'_, Option<(Child, PathBuf)>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the options of `leasehold run` for a mode, and its name for the record.
fn options(mode: Mode) -> (Vec<String>, &'static str) {
    match mode {
        Mode::Shared => (vec!["--shared".to_owned()], "shared"),
        Mode::Permit { of } => (vec!["--slots".to_owned(), of.to_string()], "slots"),
        _ => (Vec::new(), "exclusive"),
    }
}

/// Returns the path of the command, which cargo builds beside the tests.
fn program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests.parent().unwrap().parent().unwrap().join("leasehold");
    assert!(program.exists(), "{} is missing; `cargo xtask torture` builds it", program.display());
    program
}

fn length(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |data| data.len())
}

fn ends_in_section(path: &Path) -> bool {
    // Long enough for the last line.
    const TAIL: u64 = 512;
    let read = || {
        let record = File::open(path)?;
        let mut tail = vec![0; TAIL as usize];
        let filled = record.read_at(&mut tail, record.metadata()?.len().saturating_sub(TAIL))?;
        tail.truncate(filled);
        Ok::<_, std::io::Error>(tail)
    };
    record::is_in_section(&String::from_utf8_lossy(&read().unwrap_or_default()))
}

async fn wait_for(limit: Duration, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() && begun.elapsed() < limit {
        tokio::time::sleep(PAUSE).await;
    }
}
