//! Signals, kills and loss: the lock is free when, and only when, the work under it has ended.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use rustix::process::{Signal, kill_process};
#[cfg(target_os = "linux")]
use support::is_running;
use support::{Beside, Store, finish, pid};

/// Prints its process id, and ends after reading a line.
const HOLD: &str = "echo $$; read line; echo ended";

/// Returns a script that ends with code 7 on `signal`.
fn answering(signal: &str) -> String {
    format!("trap 'echo got {signal}; kill $!; exit 7' {signal}; sleep 600 & echo begun; wait")
}

#[test]
fn signals_are_passed_on_and_the_lock_is_freed_after_the_end() {
    let store = Store::new();
    for (signal, name) in [
        (Signal::TERM, "TERM"),
        (Signal::HUP, "HUP"),
        (Signal::INT, "INT"),
        (Signal::USR1, "USR1"),
        (Signal::USR2, "USR2"),
    ] {
        let mut tool = Beside::start(&mut store.run("k", &answering(name)));
        assert_eq!(tool.line(), "begun");
        tool.signal(signal);
        assert_eq!(tool.line(), format!("got {name}"));
        assert_eq!(tool.code(), 7, "the command decides how it ends");
        assert!(store.is_free("k"));
    }
}

#[test]
fn a_command_that_goes_on_keeps_the_lock() {
    let store = Store::new();
    let script = "trap '' TERM; echo begun; read line; echo ended; exit 0";
    let mut tool = Beside::start(&mut store.run("k", script));
    assert_eq!(tool.line(), "begun");
    tool.signal(Signal::TERM);
    assert!(!store.is_free("k"));
    tool.go_on();
    assert_eq!((tool.line().as_str(), tool.code()), ("ended", 0));
    assert!(store.is_free("k"));
}

#[test]
fn a_signal_ends_a_wait_and_leaves_nothing_queued() {
    let store = Store::new();
    let signals = [
        ("a", Signal::TERM, 143),
        ("b", Signal::HUP, 129),
        ("c", Signal::INT, 130),
        ("d", Signal::QUIT, 131),
    ];
    let mut pairs = signals.map(|(key, ..)| {
        let mut holder = Beside::start(&mut store.run(key, HOLD));
        holder.line();
        (holder, Beside::start(&mut store.run(key, "echo ran")))
    });
    for ((key, signal, code), (holder, waiter)) in signals.into_iter().zip(&mut pairs) {
        assert!(waiter.note().contains("waiting for"));
        waiter.signal(signal);
        assert_eq!((waiter.code(), waiter.rest_of_stdout().as_str()), (code, ""));
        assert!(!store.is_free(key), "the holder is not disturbed");
        holder.go_on();
        assert_eq!(holder.code(), 0);
        assert!(store.is_free(key), "at once");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn what_is_ignored_stays_ignored() {
    let store = Store::new();
    let nohup = format!(
        "trap '' HUP; exec {} run k -- sh -c 'kill -HUP $$ $PPID; echo alive'",
        env!("CARGO_BIN_EXE_leasehold")
    );
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &nohup]).env("LEASEHOLD_URL", store.url());
    assert_eq!(finish(&mut command), (0, "alive\n".to_owned(), String::new()));
}

#[cfg(target_os = "linux")]
#[test]
fn a_killed_tool_takes_its_command_along_and_lets_the_next_in() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k", HOLD));
    let command = pid(&tool.line());
    let mut waiter = Beside::start(&mut store.run("k", "echo ran"));
    assert!(waiter.note().contains("waiting for"));
    tool.kill();
    assert_eq!(waiter.line(), "ran");
    assert_eq!(waiter.code(), 0);
    assert_eq!(tool.rest_of_stdout(), "", "the command did not end by itself");
    assert!(!is_running(command), "the next was let in before the command was gone");
}

#[cfg(target_os = "linux")]
#[test]
fn the_lock_lasts_as_long_as_what_a_killed_tool_left_behind() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k", "sleep 600 > /dev/null 2>&1 & echo $!; wait"));
    let orphan = pid(&tool.line());
    tool.kill();
    assert_eq!(tool.rest_of_stdout(), "", "the command itself is gone");
    assert!(is_running(orphan));
    assert!(!store.is_free("k"), "a part of the work goes on");
    kill_process(orphan, Signal::KILL).unwrap();
    store.take("k");
}

#[cfg(target_os = "linux")]
#[test]
fn what_a_command_leaves_behind_does_not_keep_the_lock() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k", "sleep 600 > /dev/null 2>&1 & echo $!"));
    let daemon = pid(&tool.line());
    assert_eq!(tool.code(), 0);
    assert!(is_running(daemon));
    assert!(store.is_free("k"));
    kill_process(daemon, Signal::KILL).unwrap();
}

#[test]
fn a_killed_waiter_leaves_nothing() {
    let store = Store::new();
    let mut holder = Beside::start(&mut store.run("k", HOLD));
    holder.line();
    let mut waiter = Beside::start(&mut store.run("k", "echo ran"));
    assert!(waiter.note().contains("waiting for"));
    waiter.kill();
    assert!(!store.is_free("k"));
    holder.go_on();
    assert_eq!(holder.code(), 0);
    assert!(store.is_free("k"), "at once");
}

#[test]
fn a_stopped_tool_keeps_its_lock() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k", HOLD));
    tool.line();
    tool.signal(Signal::STOP);
    assert!(!store.is_free("k"));
    tool.signal(Signal::CONT);
    tool.go_on();
    assert_eq!((tool.line().as_str(), tool.code()), ("ended", 0));
}

#[test]
fn a_lost_lock_ends_the_command() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k", &answering("TERM")));
    assert_eq!(tool.line(), "begun");
    // Deletes the whole directory of locks.
    std::fs::remove_dir_all(store.locks()).unwrap();
    assert_eq!(tool.line(), "got TERM");
    assert_eq!(tool.code(), 76);
    let notes = tool.rest_of_stderr();
    assert!(notes.contains("lost the lock \"k\"") && notes.contains("at the same time"), "{notes}");
}

#[test]
fn a_command_that_does_not_end_after_a_loss_is_killed() {
    let store = Store::new();
    let script =
        format!("trap '' TERM; echo begun; read line; echo ended > {}", store.path("ended").display());
    let mut tool = Beside::start(&mut store.run("k --grace 10ms", &script));
    assert_eq!(tool.line(), "begun");
    std::fs::remove_dir_all(store.locks()).unwrap();
    assert_eq!(tool.code(), 76);
    assert_eq!(tool.rest_of_stdout(), "");
    assert!(!store.path("ended").exists());
    let notes = tool.rest_of_stderr();
    assert!(notes.contains("killing it"), "{notes}");
}

#[test]
fn a_maximum_hold_ends_the_command_and_lets_the_next_in() {
    let store = Store::new();
    // With `--quiet`, the reason for the end is still printed.
    for quiet in ["", "--quiet"] {
        let mut tool = Beside::start(&mut store.run(&format!("k --max-hold 200ms {quiet}"), HOLD));
        assert_eq!(tool.code(), 76);
        assert!(!tool.rest_of_stdout().contains("ended"), "the command is gone, and not by itself");
        let said = tool.rest_of_stderr();
        assert_eq!(said.contains("; ending the command"), quiet.is_empty(), "{said}");
        let error = said.lines().last().unwrap();
        assert!(error.contains("lost before the command ended"), "{said}");
        assert!(error.contains("held for longer than its maximum hold"), "{said}");
        store.take("k");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn past_its_maximum_hold_a_command_that_goes_on_keeps_nobody_out() {
    let store = Store::new();
    // The tool ignores SIGTERM from its start.
    let deaf = format!(
        "trap '' TERM; exec {} run k --max-hold 200ms --grace 1h -- sh -c 'echo begun; read line; echo ended'",
        env!("CARGO_BIN_EXE_leasehold")
    );
    let mut command = std::process::Command::new("sh");
    command.args(["-c", &deaf]).env("LEASEHOLD_URL", store.url());
    let mut tool = Beside::start(&mut command);
    assert_eq!(tool.line(), "begun");
    store.take("k");
    tool.go_on();
    assert_eq!((tool.line().as_str(), tool.code()), ("ended", 76), "it had not ended before");
}
