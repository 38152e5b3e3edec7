//! The command receives each signal once, whether it was sent to the tool, to its group or to every process.
#![allow(clippy::unwrap_used, missing_docs)]
#![cfg(target_os = "linux")]

#[path = "support/command.rs"]
mod support;

use std::process::Command;

use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use support::{Beside, Store, is_running, pid};

const SIGNALS: [(Signal, &str); 6] = [
    (Signal::TERM, "TERM"),
    (Signal::INT, "INT"),
    (Signal::QUIT, "QUIT"),
    (Signal::HUP, "HUP"),
    (Signal::USR1, "USR1"),
    (Signal::USR2, "USR2"),
];

/// Prints the signals that it receives, and ends after reading a line. Each signal interrupts the read.
const COUNT: &str = "for s in TERM INT QUIT HUP USR1 USR2; do trap \"echo got $s\" $s; done; echo begun $$; \
    until read line; do :; done; echo ended";

/// Starts a verbose run of [`COUNT`], which notes how each signal is handled, through the command `wrapper`.
fn start(store: &Store, wrapper: &[&str]) -> Beside {
    let tool = env!("CARGO_BIN_EXE_leasehold");
    let mut words = vec!["env", "--default-signal=HUP,INT,QUIT,TERM"];
    words.extend(wrapper);
    words.extend([tool, "run", "k", "--verbose", "--", "sh", "-c", COUNT]);
    let mut command = Command::new(words[0]);
    command.args(&words[1..]).env("LEASEHOLD_URL", store.url());
    Beside::start(&mut command)
}

/// Returns the helper processes of a run, which exist before its command starts.
fn helpers(tool: &Beside) -> Vec<Pid> {
    let mut all = below(group(tool));
    all.retain(|process| {
        std::fs::read_to_string(format!("/proc/{process}/comm")).is_ok_and(|name| name == "cat\n")
    });
    all
}

/// Returns the tool's note about the next signal, printed after it handled the signal.
fn said(tool: &mut Beside) -> String {
    loop {
        let note = tool.note();
        if note.contains(" was sent to ") {
            return note;
        }
    }
}

/// Ends the command and returns the rest of its output.
fn heard(tool: &mut Beside) -> String {
    tool.go_on();
    let all = tool.rest_of_stdout();
    assert_eq!(tool.code(), 0);
    all
}

fn group(tool: &Beside) -> Pid {
    pid(&tool.id().to_string())
}

/// Returns all descendants of `parent`, parents first.
fn below(parent: Pid) -> Vec<Pid> {
    let children = format!("/proc/{parent}/task/{parent}/children");
    let children = std::fs::read_to_string(children).unwrap_or_default();
    children.split_whitespace().map(pid).flat_map(|child| [vec![child], below(child)].concat()).collect()
}

#[test]
fn a_signal_to_the_tool_alone_is_passed_on_once() {
    let store = Store::new();
    for (signal, name) in SIGNALS {
        let mut tool = start(&store, &[]);
        tool.line();
        tool.signal(signal);
        assert!(said(&mut tool).contains("passed it on"));
        assert_eq!(heard(&mut tool), format!("got {name}\nended\n"));
    }
}

#[test]
fn a_signal_to_the_group_is_not_passed_on() {
    let store = Store::new();
    for (signal, name) in SIGNALS {
        let mut tool = start(&store, &[]);
        tool.line();
        kill_process_group(group(&tool), signal).unwrap();
        assert!(said(&mut tool).contains("to the process group"));
        assert_eq!(heard(&mut tool), format!("got {name}\nended\n"));
        assert!(store.is_free("k"));
    }
}

/// timeout(1) signals its child and then its group.
#[test]
fn timeout_around_a_run_ends_the_command_by_one_signal() {
    let store = Store::new();
    let mut tool = start(&store, &["timeout", "600"]);
    tool.line();
    // A signal instead of the timeout, which might end too early on a slow machine.
    tool.signal(Signal::TERM);
    assert!(said(&mut tool).contains("to the process group"));
    tool.go_on();
    assert_eq!(tool.rest_of_stdout(), "got TERM\nended\n");
}

/// Systemd stops a unit with the default `KillMode=` like this.
#[test]
fn a_signal_to_every_process_is_not_passed_on() {
    let store = Store::new();
    for (signal, name) in SIGNALS {
        let mut tool = start(&store, &[]);
        tool.line();
        let own = group(&tool);
        // Stops the tool, because the signals must arrive together.
        kill_process(own, Signal::STOP).unwrap();
        for process in [vec![own], below(own)].concat() {
            kill_process(process, signal).unwrap();
        }
        kill_process(own, Signal::CONT).unwrap();
        assert!(said(&mut tool).contains("to every process"));
        assert_eq!(heard(&mut tool), format!("got {name}\nended\n"));
    }
}

/// Some supervisors send SIGHUP right after SIGTERM.
#[test]
fn two_signals_to_the_group_are_seen_once_each() {
    let store = Store::new();
    let mut tool = start(&store, &[]);
    tool.line();
    kill_process_group(group(&tool), Signal::TERM).unwrap();
    kill_process_group(group(&tool), Signal::HUP).unwrap();
    let notes = [said(&mut tool), said(&mut tool)];
    assert!(notes.iter().all(|note| note.contains("to the process group")), "{notes:?}");
    let heard = heard(&mut tool);
    let mut lines: Vec<_> = heard.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["ended", "got HUP", "got TERM"]);
}

#[test]
fn each_of_several_signals_is_judged_by_itself() {
    let store = Store::new();
    let mut tool = start(&store, &[]);
    tool.line();
    for (to_group, what) in
        [(true, "process group"), (false, "passed it on"), (true, "process group"), (false, "passed it on")]
    {
        if to_group {
            kill_process_group(group(&tool), Signal::USR1).unwrap();
        } else {
            tool.signal(Signal::USR1);
        }
        let note = said(&mut tool);
        assert!(note.contains(what), "{note}");
        assert_eq!(tool.line(), "got USR1");
    }
    assert_eq!(heard(&mut tool), "ended\n");
}

/// The tool passes the signal to a process that has left the group, as `timeout` does.
#[test]
fn a_signal_to_the_group_reaches_once_what_has_left_the_group() {
    let store = Store::new();
    let job = store.path("job");
    std::fs::write(&job, COUNT).unwrap();
    let script = format!("exec 3<&0; set -m; sh {} <&3 & trap 'echo outer' TERM; wait; wait", job.display());
    let mut run = store.tool("run k -v -- bash -c");
    let mut tool = Beside::start(run.arg(script));
    tool.line();
    kill_process_group(group(&tool), Signal::TERM).unwrap();
    assert!(said(&mut tool).contains("to the process group"));
    let mut lines = [tool.line(), tool.line()];
    lines.sort();
    assert_eq!(lines, ["got TERM", "outer"]);
    assert_eq!(heard(&mut tool), "ended\n");
}

#[test]
fn a_run_inside_a_run_passes_a_signal_to_the_group_on_to_nobody() {
    let store = Store::new();
    let tool = env!("CARGO_BIN_EXE_leasehold");
    let mut tool = start(&store, &[tool, "run", "outer", "-v", "--"]);
    tool.line();
    kill_process_group(group(&tool), Signal::TERM).unwrap();
    let notes = [said(&mut tool), said(&mut tool)];
    assert!(notes.iter().all(|note| note.contains("to the process group")), "{notes:?}");
    assert_eq!(heard(&mut tool), "got TERM\nended\n");
}

#[test]
fn a_kill_of_the_group_ends_the_command() {
    let store = Store::new();
    let mut tool = start(&store, &[]);
    let line = tool.line();
    let command = pid(line.strip_prefix("begun ").unwrap());
    let helpers = helpers(&tool);
    kill_process_group(group(&tool), Signal::KILL).unwrap();
    assert_eq!(tool.rest_of_stdout(), "");
    store.take("k");
    assert!(!is_running(command));
    // Helpers are in another group, but end with the tool too.
    while helpers.iter().any(|helper| is_running(*helper)) {
        std::thread::yield_now();
    }
}

/// Programs started by systemd compare these numbers with their own process id.
#[test]
fn the_process_that_systemd_names_is_the_command() {
    let store = Store::new();
    let names = ["LISTEN_PID", "WATCHDOG_PID", "SYSTEMD_EXEC_PID"];
    let set = names.map(|name| format!("export {name}=$$;")).concat();
    let tell = "echo $LISTEN_PID $WATCHDOG_PID $SYSTEMD_EXEC_PID $LISTEN_PIDFDID; echo $$ $$ $$";
    let run = format!(
        "{set} export LISTEN_PIDFDID=7; exec {} run k -- sh -c '{tell}'",
        env!("CARGO_BIN_EXE_leasehold")
    );
    let mut shell = Command::new("sh");
    shell.args(["-c", &run]).env("LEASEHOLD_URL", store.url());
    let (code, stdout, stderr) = support::finish(&mut shell);
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!((code, lines[0]), (0, lines[1]), "{stderr}");
    // A variable that names another process stays unchanged.
    let (_, stdout, _) = support::finish(store.run("k", "echo $LISTEN_PID").env("LISTEN_PID", "1"));
    assert_eq!(stdout, "1\n");
}
