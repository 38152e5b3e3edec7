//! Measures many processes at one lock, by the command `leasehold` on files and by flock(1) of util-linux, in turns
//! and in the same run. Linux only, because the waiters' CPU time is read from `/proc`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

/// Number of measurements per crowd. The median counts.
const ROUNDS: usize = 5;
const IDLE_WAITERS: usize = 50;
const IDLE_FOR: Duration = Duration::from_secs(20);
/// Time for the waiters to start waiting, even on a busy machine.
const SETTLE: Duration = Duration::from_secs(10);

fn main() {
    // Ignores cargo's arguments, such as `--bench`.
    let leasehold = build();
    let dir = tempfile::tempdir().unwrap();
    let tools = [
        Tool { name: "flock(1)", program: "flock".into(), before: vec![text(&dir.path().join("file"))] },
        Tool {
            name: "leasehold",
            program: leasehold,
            before: [
                "--quiet",
                "--url",
                &format!("file://{}/store", dir.path().display()),
                "run",
                "same",
                "--",
            ]
            .map(str::to_owned)
            .to_vec(),
        },
    ];
    println!("{:<34}{:>12}{:>12}", "", tools[0].name, tools[1].name);
    for count in [1, 10, 50, 100, 300, 500] {
        crowd(&tools, count);
    }
    idle(&tools);
}

/// A command that runs another one under the lock.
struct Tool {
    name: &'static str,
    program: PathBuf,
    before: Vec<String>,
}

impl Tool {
    fn start(&self, command: &[&str]) -> Child {
        Command::new(&self.program)
            .args(&self.before)
            .args(command)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {}: {error}", self.name))
    }
}

/// Starts `count` processes at once, each of which runs `true` under the lock. Measures the time until the last one
/// ends.
fn crowd(tools: &[Tool; 2], count: usize) {
    let mut times = [Vec::new(), Vec::new()];
    let mut failed = [0; 2];
    for _ in 0..ROUNDS {
        for (at, tool) in tools.iter().enumerate() {
            let started = Instant::now();
            let children: Vec<_> = (0..count).map(|_| tool.start(&["true"])).collect();
            for mut child in children {
                failed[at] += usize::from(!child.wait().unwrap().success());
            }
            times[at].push(started.elapsed());
        }
    }
    let [flock, ours] = times.map(median);
    println!("{:<34}{:>12}{:>12}", format!("{count} at once, ms"), ms(flock), ms(ours));
    if failed != [0; 2] {
        println!("  of {} processes failed: {} and {}", count * ROUNDS, failed[0], failed[1]);
    }
    if count >= 300 {
        let ratio = ours.as_secs_f64() / flock.as_secs_f64();
        goal(&format!("{count} at once within 3 times flock: {ratio:.1}"), ratio <= 3.0);
        goal(&format!("none of {} fails: {}", count * ROUNDS, failed[1]), failed[1] == 0);
    }
}

/// Measures the CPU use of processes that wait for a permanently held lock.
fn idle(tools: &[Tool; 2]) {
    let shares = tools.each_ref().map(|tool| {
        let holder = tool.start(&["sleep", "45"]);
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
    let what = format!("{IDLE_WAITERS} idle waiters, % of one core");
    println!("{what:<34}{:>12.2}{:>12.2}", shares[0], shares[1]);
    goal(&format!("{IDLE_WAITERS} idle waiters below 2 % of one core: {:.2}", shares[1]), shares[1] < 2.0);
}

/// Returns the CPU time of a process with all its threads: fields 14 and 15 of its `stat`.
fn ticks(child: &Child) -> u64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
    // Splits at the parenthesis, because the name might contain spaces.
    let fields: Vec<_> = stat.rsplit_once(')').unwrap().1.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

/// Builds the command for release and returns its path.
fn build() -> PathBuf {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let arguments =
        ["build", "--release", "--quiet", "--package", "leasehold-cli", "--message-format", "json"];
    let output = Command::new(cargo).args(arguments).stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "cannot build the command");
    let messages = String::from_utf8(output.stdout).unwrap();
    let path = messages.lines().rev().find_map(|line| {
        let (_, path) = line.split_once("\"executable\":\"")?;
        path.split_once('"').map(|(path, _)| PathBuf::from(path))
    });
    path.expect("the command's executable")
}

fn goal(what: &str, is_met: bool) {
    println!("  {what}: {}", if is_met { "met" } else { "MISSED" });
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn ms(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1000.0)
}

fn text(path: &Path) -> String {
    path.display().to_string()
}
