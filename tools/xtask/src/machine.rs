//! Measures how much of the machine other programs use while tests run.
//!
//! Tests share a machine with their developer's other programs. A test that is late there proves no fault of the code,
//! so the test command must know whether other programs used the machine.

use std::collections::HashMap;
use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use sysinfo::{Pid, ProcessRefreshKind, ProcessesToUpdate, System};

use crate::step;

/// Interval between lists of the processes. A list of a thousand takes about 10 ms of one processor.
const PERIOD: Duration = Duration::from_secs(1);
/// Least share of all processors at which other programs count as the reason of a late test.
const SHARED: f64 = 0.1;
/// Least delay of a wake-up from a sleep at which the whole machine counts as stopped.
const STALL: Duration = Duration::from_secs(1);

/// Watches the machine on a thread until it is dropped.
pub(crate) struct MachineWatch {
    samples: Arc<Mutex<Vec<Sample>>>,
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// Measurements of the time since the previous sample.
#[derive(Clone, Copy, Debug)]
struct Sample {
    at: Instant,
    lasted: Duration,
    /// Processor time of other programs.
    others: Duration,
    /// Delay of the watching thread's wake-up.
    stall: Duration,
}

/// Load of the machine during one interval.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct MachineLoad {
    /// The share of all processors that other programs used, from 0 to 1.
    others: f64,
    /// Longest delay of a wake-up of the watching thread.
    stall: Duration,
    /// The load average of one minute at the end.
    load: f64,
}

impl MachineLoad {
    /// Returns whether other programs, or a stop of the machine, might have made a test late.
    pub(crate) fn is_shared(&self) -> bool {
        self.others >= SHARED || self.stall >= STALL
    }
}

impl fmt::Display for MachineLoad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "load {:.0}, other programs {:.0} % of the processors", self.load, self.others * 100.0)?;
        if self.stall >= STALL {
            write!(f, ", stood still for {:.1?}", self.stall)?;
        }
        Ok(())
    }
}

impl MachineWatch {
    pub(crate) fn start() -> Self {
        let (stop, stopped) = mpsc::channel();
        let samples = Arc::new(Mutex::new(Vec::new()));
        let kept = Arc::clone(&samples);
        let thread = thread::spawn(move || {
            let mut processes = Processes::new();
            let mut before = Instant::now();
            loop {
                let slept = Instant::now();
                if stopped.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let stall = slept.elapsed().saturating_sub(PERIOD);
                let others = processes.time_of_others();
                let at = Instant::now();
                let sample = Sample { at, lasted: at - before, others, stall };
                before = at;
                kept.lock().unwrap_or_else(PoisonError::into_inner).push(sample);
            }
        });
        Self { samples, stop: Some(stop), thread: Some(thread) }
    }

    /// Returns the load of the machine since `begun`.
    pub(crate) fn since(&self, begun: Instant) -> MachineLoad {
        let samples = self.samples.lock().unwrap_or_else(PoisonError::into_inner);
        MachineLoad { load: System::load_average().one, ..load_since(&samples, begun) }
    }
}

impl Drop for MachineWatch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn load_since(samples: &[Sample], begun: Instant) -> MachineLoad {
    let since: Vec<&Sample> = samples.iter().filter(|sample| sample.at > begun).collect();
    let lasted: Duration = since.iter().map(|sample| sample.lasted).sum();
    let others: Duration = since.iter().map(|sample| sample.others).sum();
    let processors = lasted.as_secs_f64() * step::processors() as f64;
    MachineLoad {
        others: if processors > 0.0 { others.as_secs_f64() / processors } else { 0.0 },
        stall: since.iter().map(|sample| sample.stall).max().unwrap_or_default(),
        load: 0.0,
    }
}

/// The processes of the machine, and the processor time of each when it was last listed.
struct Processes {
    system: System,
    used: HashMap<Pid, u64>,
    own: Option<Pid>,
    /// Start of this process, in seconds since 1970.
    started: u64,
}

impl Processes {
    fn new() -> Self {
        let own = sysinfo::get_current_pid().ok();
        let mut processes = Self { system: System::new(), used: HashMap::new(), own, started: 0 };
        processes.time_of_others();
        processes.started =
            own.and_then(|own| processes.system.process(own)).map_or(0, sysinfo::Process::start_time);
        processes
    }

    /// Returns the processor time that other programs used since the last call.
    fn time_of_others(&mut self) -> Duration {
        let what = ProcessRefreshKind::nothing().with_cpu();
        self.system.refresh_processes_specifics(ProcessesToUpdate::All, true, what);
        let mut used = HashMap::with_capacity(self.used.len());
        let mut others = 0;
        for (pid, process) in self.system.processes() {
            let now = process.accumulated_cpu_time();
            if let Some(before) = self.used.get(pid)
                && now > *before
                && !self.is_ours(*pid)
            {
                others += now - before;
            }
            used.insert(*pid, now);
        }
        self.used = used;
        Duration::from_millis(others)
    }

    /// Returns whether a process belongs to this run of the tests. A server that outlives its test no longer descends from
    /// this process. So any process that started in a later second counts as ours, because a wrong "shared" would
    /// excuse a fault.
    fn is_ours(&self, pid: Pid) -> bool {
        let mut eldest = pid;
        loop {
            if Some(eldest) == self.own {
                return true;
            }
            let parent = self.system.process(eldest).and_then(sysinfo::Process::parent);
            let known = parent.filter(|parent| parent.as_u32() > 1 && self.system.process(*parent).is_some());
            let Some(parent) = known else { break };
            eldest = parent;
        }
        self.system.process(eldest).is_none_or(|eldest| eldest.start_time() > self.started)
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn sample(at: Instant, others: u64, stall: u64) -> Sample {
        let ms = Duration::from_millis;
        Sample { at, lasted: PERIOD, others: ms(others), stall: ms(stall) }
    }

    #[test]
    fn a_machine_is_shared_by_others_or_by_standing_still_since_a_moment() {
        let begun = Instant::now();
        let processors = step::processors() as u64;
        let (before, after) = (begun - PERIOD, begun + PERIOD);
        assert!(!load_since(&[], begun).is_shared());
        assert!(
            !load_since(&[sample(before, 1_000, 5_000), sample(after, 90 * processors, 900)], begun)
                .is_shared()
        );
        assert!(load_since(&[sample(after, 110 * processors, 0)], begun).is_shared());
        assert!(load_since(&[sample(after, 0, 1_100)], begun).is_shared());
    }

    #[test]
    fn children_are_ours_and_what_began_before_is_not() {
        let mut child =
            Command::new("sleep").arg("600").stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
        let mut processes = Processes::new();
        let own = processes.own.unwrap();
        assert!(processes.is_ours(own) && processes.is_ours(Pid::from_u32(child.id())));
        // Times are whole seconds, and a script can start the tests in its first one.
        let first = Pid::from_u32(1);
        processes.started = processes.system.process(first).unwrap().start_time();
        assert!(!processes.is_ours(first));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
