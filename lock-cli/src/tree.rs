//! All processes of the command: those that it has started, and those that these have.
//!
//! A process group would need the terminal's foreground handed over to it and back, and would part the tool from
//! the pipeline that it is in. The tree of processes is the same whatever the groups are. To keep it whole when a
//! process in the middle ends, this tool adopts the orphans below it, so it also has to reap them.
//!
//! A process that has begun a session of its own (`setsid`, a daemon) has left the work on purpose, and is not counted.

use std::collections::VecDeque;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process};

use crate::signal_helpers::Reach;

/// One entry of the table of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProcessEntry {
    pid: Pid,
    parent: i32,
    session: i32,
    has_ended: bool,
}

/// Has orphans below this process come to it. Only Linux can; elsewhere the command is its first process alone.
pub(crate) fn adopt_orphans() {
    #[cfg(target_os = "linux")]
    // Without it, what an ended process leaves behind is not found; nothing else is lost.
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
}

/// The processes of a command.
#[derive(Debug)]
pub(crate) struct ProcessTree {
    command: Pid,
    /// Processes below this tool that are not of the command.
    helpers: Vec<Pid>,
}

impl ProcessTree {
    /// The tree of `command`, without the `helpers` of this tool.
    pub(crate) fn new(command: Pid, helpers: Vec<Pid>) -> Self {
        Self { command, helpers }
    }

    /// Names the helpers of this tool, which have changed.
    pub(crate) fn set_helpers(&mut self, helpers: Vec<Pid>) {
        self.helpers = helpers;
    }

    /// Sends `signal` to the command and all below it but those that it has `reached`, parents first: a shell must not go on
    /// with its next line because what it waited for has ended. What runs under another `leasehold` is left to that one, which
    /// passes signals on. Returns those that take none from this user, such as a command that has become another one (sudo).
    pub(crate) fn send(&self, signal: Signal, reached: Reach) -> Vec<Pid> {
        let mut found = self.below(&|pid| signal == Signal::KILL || !is_this_tool(pid));
        found.retain(|pid| *pid != self.command);
        // The command itself is meant also where the table of processes cannot be read.
        let all = std::iter::once(self.command).chain(found).filter(|pid| !has_reached(reached, *pid));
        // One that has ended meanwhile needs no signal.
        all.filter(|pid| kill_process(*pid, signal) == Err(Errno::PERM)).collect()
    }

    /// Sends `signal` to what the command, which has ended, has left running, but to those that it has `reached`.
    pub(crate) fn send_to_rest(&self, signal: Signal, reached: Reach) {
        for pid in self.below(&|_| true).into_iter().filter(|pid| !has_reached(reached, *pid)) {
            let _ = kill_process(pid, signal);
        }
    }

    /// Whether the command, which has ended, has left something running.
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

/// Whether a signal with this reach has been sent to `pid` as well.
pub(crate) fn has_reached(reached: Reach, pid: Pid) -> bool {
    match reached {
        Reach::Alone => false,
        Reach::Group => rustix::process::getpgid(Some(pid)) == Ok(rustix::process::getpgrp()),
        Reach::Everybody => true,
    }
}

/// The processes below this tool that live in its session or in that of `command`, parents first. What is below a
/// process that is not to be `entered` is left out, and that process is not.
fn below(table: &[ProcessEntry], command: Pid, entered: &dyn Fn(Pid) -> bool) -> Vec<Pid> {
    let own = rustix::process::getpid();
    let session = table.iter().find(|process| process.pid == own).map(|process| process.session);
    let mut found: Vec<Pid> = Vec::new();
    let mut parents = VecDeque::from([own]);
    while let Some(parent) = parents.pop_front() {
        for process in table.iter().filter(|process| process.parent == parent.as_raw_pid()) {
            // The table is not a snapshot: a number may turn up twice.
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

/// All processes that can be seen; none where there is no `/proc`.
fn table() -> Vec<ProcessEntry> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let stats = numbers.filter_map(|pid| {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        parse(pid, &String::from_utf8_lossy(&stat))
    });
    stats.collect()
}

/// Reads `PID (NAME) STATE PARENT GROUP SESSION ..`, where the name may contain anything.
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

/// Whether `pid` runs the same program file as this process.
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
        // Far above what the kernel gives out.
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
