//! Measures many processes at one lock, by the command `leasehold` on files and by flock(1) of util-linux, in turns
//! and in the same run. Linux only, because the waiters' CPU time is read from `/proc`. Inside one process it compares the
//! store with crates that lock files.

use std::fs::{self, File};
use std::path::Path;
use std::process::Child;
use std::thread::sleep;
use std::time::{Duration, Instant};

use bench::record::{Contest, Group};
use bench::report::{Row, times};
use leasehold_api::{AcquireOptions, Lock, LockKey};

use crate::Sections;
use crate::command::{self, Tool, alternate};
use crate::contest::{Contender, Worker, compete};

/// Number of measurements per crowd. The median counts.
const ROUNDS: usize = 3;
/// Number of measurements of a single process, which is short.
const STARTS: usize = 61;
const IDLE_WAITERS: usize = 50;
const IDLE_FOR: Duration = Duration::from_secs(10);
/// Time for the waiters to start waiting, even on a busy machine.
const SETTLE: Duration = Duration::from_secs(10);

const OURS: &str =
    "exclusion between processes; timeouts, fencing, labels, inspection, ends with its process";
const BARE: &str =
    "exclusion between processes, ends with its process; one file per key; lacks timeouts and fencing";

pub(crate) async fn measure(sections: &Sections, group: &mut Group) {
    let dir = tempfile::tempdir().unwrap();
    if sections.want("cycles") {
        cycles(dir.path(), group).await;
    }
    if !["start", "crowd", "idle"].iter().any(|section| sections.want(section)) {
        return;
    }
    if !command::is_installed("flock") {
        group.note(
            "The rows beside `flock(1)` are missing, because `flock` of util-linux is not installed here.",
        );
        return;
    }
    let (file, store) = (text(&dir.path().join("file")), format!("file://{}/store", dir.path().display()));
    let ours = ["--quiet", "--url", store.as_str(), "run", "same", "--"];
    let tools =
        [Tool::new("flock(1)", "flock", &[file.as_str()]), Tool::new("leasehold", command::build(), &ours)];
    if sections.want("start") {
        let [flock, ours] = alternate(&tools, bench::or_smoke(STARTS, 3), |tool| tool.time(&["true"]));
        group.rows.push(times("`leasehold run`, files, from start to end", &ours, &flock, 2.0));
    }
    if sections.want("crowd") {
        for count in bench::or_smoke([10, 50, 100, 300, 500], [2, 3, 4, 5, 10]) {
            crowd(&tools, count, group);
        }
    }
    if sections.want_long("idle") {
        idle(&tools, group);
    }
}

/// Compares cycles inside one process. The crates block the thread, so each cycle is a try that succeeds.
async fn cycles(dir: &Path, group: &mut Group) {
    println!("uncontended cycles on a file, one task");
    let open = |name: &str| {
        let path = dir.join(name);
        File::options().create(true).truncate(false).write(true).open(path).unwrap()
    };
    let lock = leasehold_file::connect(dir.join("cycles")).unwrap();
    let ours = Library { lock, key: LockKey::new("ledger").unwrap(), options: AcquireOptions::new() };
    let mut contenders = [
        Contender::new("fs4", BARE, vec![Fs4(open("fs4"))]),
        Contender::new("fd-lock", BARE, vec![FdLock(fd_lock::RwLock::new(open("fd-lock")))]),
        Contender::new("std::fs::File::lock", BARE, vec![Std(open("std"))]),
        Contender::new("leasehold", OURS, vec![ours]),
    ];
    let entries = compete(&mut contenders, 15, Duration::from_millis(200)).await;
    let title = "Uncontended, one task, one open file".to_owned();
    group.contests.push(Contest { title, baseline: "fs4".to_owned(), entries });
}

struct Fs4(File);

impl Worker for Fs4 {
    async fn cycle(&mut self) {
        fs4::FileExt::try_lock(&self.0).unwrap();
        fs4::FileExt::unlock(&self.0).unwrap();
    }
}

struct FdLock(fd_lock::RwLock<File>);

impl Worker for FdLock {
    async fn cycle(&mut self) {
        drop(self.0.try_write().unwrap());
    }
}

struct Std(File);

impl Worker for Std {
    async fn cycle(&mut self) {
        self.0.try_lock().unwrap();
        self.0.unlock().unwrap();
    }
}

struct Library<L> {
    lock: L,
    key: LockKey,
    options: AcquireOptions,
}

impl<L: Lock + 'static> Worker for Library<L> {
    async fn cycle(&mut self) {
        self.lock.acquire(&self.key, &self.options).await.unwrap().release().await.unwrap();
    }
}

/// Starts `count` processes at once, each of which runs `true` under the lock. Measures the time until the last one
/// ends.
fn crowd(tools: &[Tool; 2], count: usize, group: &mut Group) {
    println!("{count} processes at once");
    let failed = std::cell::Cell::new(0);
    let [flock, ours] = alternate(tools, bench::or_smoke(ROUNDS, 1), |tool| {
        let started = Instant::now();
        let children: Vec<_> = (0..count).map(|_| tool.start(&["true"])).collect();
        for mut child in children {
            failed.set(failed.get() + usize::from(!child.wait().unwrap().success()));
        }
        started.elapsed()
    });
    let goal = (count >= 300).then_some(3.0);
    group.rows.push(times(&format!("{count} processes at one lock"), &ours, &flock, goal));
    assert_eq!(failed.get(), 0, "processes of a crowd of {count} failed");
}

/// Measures the CPU use of processes that wait for a permanently held lock.
fn idle(tools: &[Tool; 2], group: &mut Group) {
    println!("{IDLE_WAITERS} idle waiters");
    let shares = tools.each_ref().map(|tool| {
        let holder = tool.start(&["sleep", "35"]);
        sleep(Duration::from_secs(1));
        let waiters: Vec<_> = (0..IDLE_WAITERS).map(|_| tool.start(&["true"])).collect();
        sleep(SETTLE);
        let before: u64 = waiters.iter().map(ticks).sum();
        sleep(IDLE_FOR);
        let after: u64 = waiters.iter().map(ticks).sum();
        for mut child in waiters.into_iter().chain([holder]) {
            // Ignores errors, because the child might have ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
        // Linux counts a hundred ticks per second in `/proc`.
        (after - before) as f64 / IDLE_FOR.as_secs_f64()
    });
    group.rows.push(Row {
        work: format!("{IDLE_WAITERS} idle waiters, processor time"),
        measured: format!("{:.2} % of one core", shares[1]),
        floor: format!("flock(1) {:.2} %", shares[0]),
        goal: "below 2 %".to_owned(),
        met: Some(shares[1] < 2.0),
        ..Row::default()
    });
}

/// Returns the CPU time of a process with all its threads: fields 14 and 15 of its `stat`.
fn ticks(child: &Child) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    // Splits at the parenthesis, because the name might contain spaces.
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
