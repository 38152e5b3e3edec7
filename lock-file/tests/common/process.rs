//! Other processes: this test binary, run again in a role.
#![allow(dead_code)] // Each test binary uses a part of it.

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use leasehold_api::FencingToken;
use rustix::process::{Pid, Signal, WaitOptions, waitpid};

pub(crate) const ROLE: &str = "LEASEHOLD_FILE_TEST_ROLE";
pub(crate) const DIR: &str = "LEASEHOLD_FILE_TEST_DIR";

/// A child process with a role. It replies on its standard output.
pub(crate) struct Other {
    pub(crate) child: Child,
    answers: BufReader<ChildStdout>,
    orders: Option<ChildStdin>,
}

impl Other {
    pub(crate) fn start(role: &str, dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "another_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(DIR, dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        let orders = child.stdin.take();
        Self { child, answers, orders }
    }

    /// Reads the next reply. It follows a `>`, which separates it from the test harness's output.
    pub(crate) fn answer(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            assert_ne!(self.answers.read_line(&mut line).unwrap(), 0, "the other process ended");
            if let Some((_, answer)) = line.split_once('>') {
                return answer.trim().to_owned();
            }
        }
    }

    pub(crate) fn token(&mut self) -> FencingToken {
        FencingToken::from_u64(self.answer().parse().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_child(&self.child);
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Sends SIGSTOP and waits until the process is stopped.
    pub(crate) fn stop(&self) {
        self.signal(Signal::STOP);
        let pid = Pid::from_child(&self.child);
        let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped());
    }

    /// Sends SIGKILL and waits until the process has ended.
    pub(crate) fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Closes the process's standard input, which makes it exit.
    pub(crate) fn end(mut self) {
        drop(self.orders.take());
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // Kills the process, because a failed test must leave none behind.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A process whose parent was killed. It is killed when this value is dropped, even if the test fails.
pub(crate) struct Orphan(pub(crate) Pid);

impl Drop for Orphan {
    fn drop(&mut self) {
        // An error is ignored, because the process might already have ended.
        let _ = rustix::process::kill_process(self.0, Signal::KILL);
    }
}

pub(crate) fn say(answer: impl std::fmt::Display) {
    println!(">{answer}");
    std::io::stdout().flush().unwrap();
}

pub(crate) fn wait_for_the_end() {
    let mut line = String::new();
    assert_eq!(std::io::stdin().read_line(&mut line).unwrap(), 0);
}

pub(crate) fn is_waiting(dir: &Path) -> bool {
    let mut files = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path());
    files.any(|p| {
        p.extension().is_some_and(|e| e == "next")
            && std::fs::File::open(p).unwrap().try_lock_shared().is_err()
    })
}
