//! All processes of the command: its children and their descendants.
//!
//! A process group would need the terminal's foreground passed to it and back, and would separate the tool from its
//! pipeline. The tree of processes does not depend on groups. To keep the tree complete when an inner process ends,
//! this tool adopts the orphans below it, so it must also reap them.
//!
//! A process with its own session (`setsid`, a daemon) has left the work on purpose, and does not count.

use std::collections::VecDeque;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::signal_helpers::Reach;

/// One entry of the process table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessEntry {
    pid: Pid,
    parent: i32,
    session: i32,
    has_ended: bool,
}

/// Makes this process adopt orphans below it. Only Linux supports this. On other systems, the command is only its first
/// process.
pub(crate) fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    // Ignores a failure. Processes left by an ended process are then not found, but everything else works.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
}

/// The processes of a command.
#[derive(Debug)]
pub(crate) struct ProcessTree {
    command: Pid,
    /// Processes below this tool that do not belong to the command.
    helpers: Vec<Pid>,
}

impl ProcessTree {
    /// Creates the tree of `command`, without the `helpers` of this tool.
    pub(crate) fn new(command: Pid, helpers: Vec<Pid>) -> Self {
        Self { command, helpers }
    }

    /// Replaces the helpers of this tool.
    pub(crate) fn set_helpers(&mut self, helpers: Vec<Pid>) {
        self.helpers = helpers;
    }

    /// Sends `signal` to the command and all processes below it, except those it has `reached`. Parents come first,
    /// because a shell must not continue with its next line when its child ends. Processes below another `leasehold`
    /// are left to it, because it passes signals on. Returns the processes that this user cannot signal, such as a
    /// command that switched users (sudo).
    pub(crate) fn send(&self, signal: Signal, reached: Reach) -> Vec<Pid> {
        let mut found = self.below(&|pid| signal == Signal::KILL || !is_this_tool(pid));
        found.retain(|pid| *pid != self.command);
        // Includes the command even if the process table cannot be read.
        let all = std::iter::once(self.command).chain(found).filter(|pid| !has_reached(reached, *pid));
        // Ignores processes that have ended, because they need no signal.
        all.filter(|pid| kill_process(*pid, signal) == Err(Errno::PERM)).collect()
    }

    /// Sends `signal` to processes left by the ended command, except those it has `reached`.
    pub(crate) fn send_to_rest(&self, signal: Signal, reached: Reach) {
        for pid in self.below(&|_| true).into_iter().filter(|pid| !has_reached(reached, *pid)) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Returns whether the ended command has left a running process.
    pub(crate) fn has_rest(&self) -> bool {
        !self.below(&|_| true).is_empty()
    }

    /// Reaps adopted processes that have ended. The runtime reaps the command and the helpers.
    pub(crate) fn reap_adopted(&self) {
        let own = rustix::process::getpid();
        let is_ours = |pid| pid == self.command || self.helpers.contains(&pid);
        for process in table() {
            if process.has_ended && process.parent == own.as_raw_pid() && !is_ours(process.pid) {
                let _ = rustix::process::waitpid(Some(process.pid), rustix::process::WaitOptions::NOHANG);
            }
        }
    }

    fn below(&self, entered: &dyn Fn(Pid) -> bool) -> Vec<Pid> {
        let mut found = below(&table(), self.command, entered);
        found.retain(|pid| !self.helpers.contains(pid));
        found
    }
}

/// Returns whether a signal with this reach was also sent to `pid`.
pub(crate) fn has_reached(reached: Reach, pid: Pid) -> bool {
    match reached {
        Reach::Alone => false,
        Reach::Group => rustix::process::getpgid(Some(pid)) == Ok(rustix::process::getpgrp()),
        Reach::Everybody => true,
    }
}

/// Returns the processes below this tool in its session or in the session of `command`, parents first. A process for
/// which `entered` is false is included, but its descendants are not.
fn below(table: &[ProcessEntry], command: Pid, entered: &dyn Fn(Pid) -> bool) -> Vec<Pid> {
    let own = rustix::process::getpid();
    let session = table.iter().find(|process| process.pid == own).map(|process| process.session);
    let mut found: Vec<Pid> = Vec::new();
    let mut parents = VecDeque::from([own]);
    while let Some(parent) = parents.pop_front() {
        for process in table.iter().filter(|process| process.parent == parent.as_raw_pid()) {
            // Skips ids that were already found, because the process table is not a snapshot and an id can occur twice.
            if found.contains(&process.pid) || process.pid == own {
                continue;
            }
            let is_of_the_work = Some(process.session) == session || process.session == command.as_raw_pid();
            if is_of_the_work && !process.has_ended {
                found.push(process.pid);
                if entered(process.pid) {
                    parents.push_back(process.pid);
                }
            }
        }
    }
    found
}

/// Returns all visible processes. Empty if `/proc` is missing.
fn table() -> Vec<ProcessEntry> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let stats = numbers.filter_map(|pid| {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        parse(pid, &String::from_utf8_lossy(&stat))
    });
    stats.collect()
}

/// Parses `PID (NAME) STATE PARENT GROUP SESSION ..`, in which NAME can contain any character.
fn parse(pid: i32, stat: &str) -> Option<ProcessEntry> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let session = fields.nth(1)?.parse().ok()?;
    Some(ProcessEntry {
        pid: Pid::from_raw(pid)?,
        parent,
        session,
        has_ended: ["Z", "X", "x"].contains(&state),
    })
}

/// Returns whether `pid` runs the same program file as this process.
fn is_this_tool(pid: Pid) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    let file = |process: &str| {
        let metadata = std::fs::metadata(format!("/proc/{process}/exe")).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    let own = file("self");
    own.is_some() && own == file(&pid.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_may_look_like_the_fields_behind_it() {
        let process = parse(7, "7 (a) Z 1 (b) S 12 34 56 0 -1 4194560").unwrap();
        let expected =
            ProcessEntry { pid: Pid::from_raw(7).unwrap(), parent: 12, session: 56, has_ended: false };
        assert_eq!(process, expected);
        assert!(parse(7, "7 (a) Z 1 2 3").unwrap().has_ended);
        for bad in ["", "7 (a", "7 (a) S", "7 (a) S x 1 2"] {
            assert_eq!(parse(7, bad), None, "{bad}");
        }
    }

    #[test]
    fn a_daemon_and_what_has_ended_are_left_out_and_parents_come_first() {
        let own = rustix::process::getpid();
        let pid = |number| Pid::from_raw(number).unwrap();
        let process = |number, parent, session, has_ended| ProcessEntry {
            pid: pid(number),
            parent,
            session,
            has_ended,
        };
        // Process ids far above the kernel's, so none of them exists.
        let base = 1 << 30;
        let (me, command) = (own.as_raw_pid(), base + 9);
        let table = [
            process(base + 1, command, 5, false),
            process(base + 2, base + 1, 5, false),
            process(base + 3, command, base + 3, false),
            process(base + 4, base + 3, base + 3, false),
            process(base + 5, me, 5, true),
            process(base + 6, me, command, false),
            process(base + 7, 1, 5, false),
            process(command, me, 5, false),
            process(me, 1, 5, false),
        ];
        let found = below(&table, pid(command), &|_| true);
        assert_eq!(found, [base + 6, command, base + 1, base + 2].map(pid));
        let found = below(&table, pid(command), &|entered| entered != pid(base + 1));
        assert_eq!(found, [base + 6, command, base + 1].map(pid));
    }
}
