//! If the tool ends a command, all processes that the command started end too.
#![allow(clippy::unwrap_used, missing_docs)]
#![cfg(target_os = "linux")]

#[path = "support/command.rs"]
mod support;

use std::time::Duration;

use rustix::process::{Signal, kill_process};
use support::{Beside, Store, is_running, pid};
use test_bounds::Bound;

/// A process in the background, a process in the foreground, and a line after its end.
const SHELL: &str = "sleep 600 & echo $!; sleep 600; echo never";

/// Longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Loses all locks by deleting their directory.
fn lose(store: &Store) {
    std::fs::remove_dir_all(store.locks()).unwrap();
}

#[test]
fn a_loss_ends_all_processes_of_the_command() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k", SHELL));
    let background = pid(&tool.line());
    lose(&store);
    assert_eq!(tool.code(), 76);
    assert!(!is_running(background));
    assert_eq!(tool.rest_of_stdout(), "", "the shell did not go on with its next line");
}

#[test]
fn a_signal_that_is_passed_on_ends_all_processes_of_the_command() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k", SHELL));
    let background = pid(&tool.line());
    tool.signal(Signal::TERM);
    assert_eq!(tool.code(), 143);
    assert!(!is_running(background));
    assert_eq!(tool.rest_of_stdout(), "");
    assert!(store.is_free("k"));
}

/// The signal ends only the first process of the command. Its children must not run beside the next holder.
#[test]
fn a_command_that_is_ended_by_sighup_takes_all_its_processes_along() {
    let store = Store::new();
    for (signal, code) in [(Signal::HUP, 129), (Signal::USR1, 138)] {
        let mut tool = Beside::start(&mut store.run("k", SHELL));
        let background = pid(&tool.line());
        tool.signal(signal);
        assert_eq!(tool.code(), code);
        assert!(!is_running(background));
        assert!(store.is_free("k"));
    }
}

#[test]
fn a_process_that_does_not_end_with_the_command_is_killed_before_the_lock_is_freed() {
    let store = Store::new();
    // The shell ends on SIGTERM, but its child ignores it.
    let script = "sh -c 'trap \"\" TERM; echo $$; exec sleep 600' & wait";
    for (is_lost, code) in [(false, 143), (true, 76)] {
        let mut tool = Beside::start(&mut store.run("k --grace 300ms", script));
        let deaf = pid(&tool.line());
        if is_lost {
            lose(&store);
        } else {
            tool.signal(Signal::TERM);
        }
        assert_eq!(tool.code(), code);
        assert!(!is_running(deaf));
        let notes = tool.rest_of_stderr();
        assert!(notes.contains("killing them"), "{notes}");
        assert!(store.is_free("k"));
    }
}

#[test]
fn a_daemon_has_left_the_work() {
    let store = Store::new();
    let script = "setsid sleep 600 > /dev/null 2>&1 & \
        until [ \"$(cut -d' ' -f6 /proc/$!/stat)\" = $! ]; do :; done; echo $!; wait";
    let mut tool = Beside::start(&mut store.run("k", script));
    let daemon = pid(&tool.line());
    lose(&store);
    assert_eq!(tool.code(), 76);
    assert!(is_running(daemon));
    kill_process(daemon, Signal::KILL).unwrap();
}

#[test]
fn a_run_inside_a_run_is_told_once() {
    let store = Store::new();
    let script = format!(
        "exec 3<&0; trap 'echo outer' TERM; {} run inner -- sh -c '\
            trap \"echo got\" TERM; echo begun; until read line; do :; done; echo ended' <&3 & echo $!; wait; wait",
        env!("CARGO_BIN_EXE_leasehold")
    );
    let mut tool = Beside::start(&mut store.run("outer", &script));
    let mut lines = [tool.line(), tool.line()];
    lines.sort();
    let inner = pid(&lines[0]);
    // The stopped inner run cannot pass signals, so its command receives the signal from the outer run.
    kill_process(inner, Signal::STOP).unwrap();
    tool.signal(Signal::TERM);
    assert_eq!(tool.line(), "outer");
    assert!(!store.is_free("inner"));
    kill_process(inner, Signal::CONT).unwrap();
    assert_eq!(tool.line(), "got");
    tool.go_on();
    assert_eq!(tool.rest_of_stdout(), "ended\n", "and not twice");
}

#[test]
fn on_loss_a_command_may_go_on() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k --on-loss warn", "echo begun; read line; echo ended"));
    assert_eq!(tool.line(), "begun");
    lose(&store);
    let note = tool.note();
    assert!(note.contains("lost the lock \"k\"") && note.contains("goes on"), "{note}");
    tool.go_on();
    assert_eq!((tool.line().as_str(), tool.code()), ("ended", 76));
    assert!(tool.rest_of_stderr().contains("at the same time"));
}

#[test]
fn orphans_that_have_ended_do_not_stay_in_the_table_of_processes() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k", "(sh -c 'echo $$' &); read line"));
    let orphan = tool.line();
    let start = Bound::new(PATIENCE);
    while std::path::Path::new(&format!("/proc/{orphan}")).exists() {
        start.check(format_args!("nobody reaps {orphan}"));
        std::thread::sleep(Duration::from_millis(5));
    }
    tool.go_on();
    assert_eq!(tool.code(), 0);
}

/// The command changes its user, like `sudo`, so only the superuser can end it.
#[test]
fn a_command_that_has_become_another_user_is_named_when_the_lock_is_lost() {
    use std::fs::{Permissions, set_permissions};
    use std::os::unix::fs::{PermissionsExt as _, chown};
    use std::os::unix::process::CommandExt as _;

    if !rustix::process::geteuid().is_root() {
        return println!("acting as another user needs the superuser");
    }
    const USER: u32 = 61_001;
    let store = Store::new();
    let become_root = store.program("become-root", "/usr/bin/setpriv".as_ref(), "4755");
    let leasehold = store.program("leasehold", env!("CARGO_BIN_EXE_leasehold").as_ref(), "755");
    set_permissions(store.path(""), Permissions::from_mode(0o755)).unwrap();
    std::fs::create_dir(store.locks()).unwrap();
    chown(store.locks(), Some(USER), Some(USER)).unwrap();
    let mut command = std::process::Command::new(leasehold);
    command.env("LEASEHOLD_URL", store.url()).args(["run", "k", "--grace", "100ms", "--"]).arg(become_root);
    command.args(["--reuid=0", "--clear-groups", "sh", "-c", "echo begun; read line; echo ended"]);
    let mut tool = Beside::start(command.uid(USER).gid(USER));
    assert_eq!(tool.line(), "begun");
    lose(&store);
    let notes = [tool.note(), tool.note()].concat();
    assert!(
        notes.contains("processes of another user") && notes.contains("go on without the lock"),
        "{notes}"
    );
    tool.go_on();
    assert_eq!((tool.line().as_str(), tool.code()), ("ended", 76));
}
