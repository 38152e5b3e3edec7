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

/// One entry of the table of processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Process {
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

/// Sends `signal` to `command` and all below it, parents first: a shell must not go on with its next line because
/// what it waited for has ended. What runs under another `leasehold` is left to that one, which passes signals on. Answers
/// those that take none from this user, such as a command that has become another one (sudo).
pub(crate) fn send(command: Pid, signal: Signal) -> Vec<Pid> {
    let table = table();
    let mut found = below(&table, command, &|pid| signal == Signal::KILL || !is_this_tool(pid));
    found.retain(|pid| *pid != command);
    // The command itself is meant also where the table of processes cannot be read.
    let all = std::iter::once(command).chain(found);
    // One that has ended meanwhile needs no signal.
    all.filter(|pid| kill_process(*pid, signal) == Err(Errno::PERM)).collect()
}

/// Sends `signal` to what `command`, which has ended, has left running; how many that are.
pub(crate) fn send_to_rest(command: Pid, signal: Option<Signal>) -> usize {
    let table = table();
    let found = below(&table, command, &|_| true);
    for pid in found.iter().filter(|_| signal.is_some()) {
        let _ = signal.map(|signal| kill_process(*pid, signal));
    }
    found.len()
}

/// Reaps adopted processes that have ended. `command` is reaped by the runtime.
pub(crate) fn reap_adopted(command: Pid) {
    let own = rustix::process::getpid();
    for process in table() {
        if process.has_ended && process.parent == own.as_raw_pid() && process.pid != command {
            let _ = rustix::process::waitpid(Some(process.pid), rustix::process::WaitOptions::NOHANG);
        }
    }
}

/// The processes below this tool that live in its session or in that of `command`, parents first. What is below a
/// process that is not to be `entered` is left out, and that process is not.
fn below(table: &[Process], command: Pid, entered: &dyn Fn(Pid) -> bool) -> Vec<Pid> {
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
fn table() -> Vec<Process> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    let numbers = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let stats = numbers.filter_map(|pid| {
        let stat = std::fs::read(format!("/proc/{pid}/stat")).ok()?;
        parse(pid, &String::from_utf8_lossy(&stat))
    });
    stats.collect()
}

/// Reads `PID (NAME) STATE PARENT GROUP SESSION ..`, where the name may contain anything.
fn parse(pid: i32, stat: &str) -> Option<Process> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let session = fields.nth(1)?.parse().ok()?;
    Some(Process { pid: Pid::from_raw(pid)?, parent, session, has_ended: ["Z", "X", "x"].contains(&state) })
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
        let expected = Process { pid: Pid::from_raw(7).unwrap(), parent: 12, session: 56, has_ended: false };
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
        let process =
            |number, parent, session, has_ended| Process { pid: pid(number), parent, session, has_ended };
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
