//! `leasehold elect` and `leasehold observe` with real commands.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::process::Command;
use std::time::Duration;

use rustix::process::{Signal, kill_process_group};
#[cfg(target_os = "linux")]
use support::is_running;
use support::{Beside, Store, finish, pid, read, with};
use test_bounds::{Bound, within};
use test_servers::{Cluster, Proxy};

/// Prints its process id, and ends after reading a line.
const LEAD: &str = "echo $$; read line; exit 7";

/// Returns `leasehold elect ARGUMENTS -- sh -c SCRIPT`.
fn elect(store: &Store, arguments: &str, script: &str) -> Command {
    let mut command = store.tool("elect");
    command.args(arguments.split_whitespace()).args(["--", "sh", "-c", script]);
    command
}

#[test]
fn one_replica_leads_and_the_next_one_follows_when_it_is_killed() {
    let store = Store::new();
    let mut first = Beside::start(&mut elect(&store, "k", LEAD));
    let command = pid(&first.line());
    let mut second = Beside::start(&mut elect(&store, "k", "echo leads; read line"));
    assert!(!store.is_free("k"));
    first.kill();
    assert_eq!(second.line(), "leads");
    #[cfg(target_os = "linux")]
    assert!(!is_running(command), "the next one leads before the command is gone");
    let _ = command;
    assert!(second.note().contains("leading \"k\", token "));
}

#[test]
fn a_signal_ends_command_and_tool_with_the_commands_code() {
    let store = Store::new();
    let script = "trap 'echo got; kill $!; exit 5' TERM; sleep 600 & echo begun; wait";
    let mut tool = Beside::start(&mut elect(&store, "k --restart always", script));
    assert_eq!(tool.line(), "begun");
    tool.signal(Signal::TERM);
    assert_eq!(tool.line(), "got");
    assert_eq!(tool.code(), 5);
    assert!(store.is_free("k"));
}

/// The command can end before the tool has its own copy of the signal.
#[test]
fn a_signal_to_the_group_ends_command_and_tool() {
    let store = Store::new();
    for restart in ["always", "on-failure"] {
        for _ in 0..10 {
            let mut tool = Beside::start(&mut elect(
                &store,
                &format!("k --restart {restart}"),
                "echo $$; exec sleep 600",
            ));
            tool.line();
            assert!(tool.note().contains("leading"));
            kill_process_group(pid(&tool.id().to_string()), Signal::TERM).unwrap();
            assert_eq!(tool.note_with("candidate"), None, "it goes on");
            assert_eq!(tool.code(), 143);
        }
    }
    assert!(store.is_free("k"));
}

/// Some scripts step a replica down by a signal to its group, which ends a command without a handler.
#[test]
fn a_step_down_signal_to_the_group_steps_the_replica_down() {
    let store = Store::new();
    for _ in 0..5 {
        let mut tool =
            Beside::start(&mut elect(&store, "k --step-down USR1 --rest 600s", "echo $$; exec sleep 600"));
        tool.line();
        assert!(tool.note().contains("leading"));
        kill_process_group(pid(&tool.id().to_string()), Signal::USR1).unwrap();
        let note = tool.note_with("candidate").unwrap();
        assert!(note.contains("no candidate for \"k\""), "{note}");
    }
}

#[test]
fn a_signal_ends_a_candidate_and_leaves_nothing_queued() {
    let store = Store::new();
    let mut leader = Beside::start(&mut elect(&store, "k --restart never", LEAD));
    leader.line();
    let mut candidate = Beside::start(&mut elect(&store, "k --verbose", "echo ran"));
    while !candidate.note().contains("candidate for \"k\"") {}
    candidate.signal(Signal::TERM);
    assert_eq!((candidate.code(), candidate.rest_of_stdout().as_str()), (143, ""));
    leader.go_on();
    assert_eq!(leader.code(), 7);
    assert!(store.is_free("k"));
}

#[test]
fn stepping_down_ends_the_command_and_rests_this_replica() {
    let store = Store::new();
    let script = "trap 'echo down; exit 0' TERM; echo begun; while :; do sleep 0.05; done";
    let arguments = "k --step-down USR1 --rest 2s";
    let mut a = Beside::start(&mut elect(&store, arguments, script));
    assert_eq!(a.line(), "begun");
    let mut b = Beside::start(&mut elect(&store, &arguments.replace("2s", "600s"), script));
    a.signal(Signal::USR1);
    assert_eq!(a.line(), "down");
    assert_eq!(b.line(), "begun", "the other one leads");
    b.signal(Signal::USR1);
    assert_eq!(b.line(), "down");
    assert_eq!(a.line(), "begun", "it campaigns again after its rest");
    let rests = loop {
        let note = b.note();
        if note.contains("no candidate for \"k\" for ") {
            break note;
        }
    };
    assert!(rests.contains(" 10m") || rests.contains(" 9m"), "{rests}");
    b.signal(Signal::TERM);
    assert_eq!(b.code(), 143, "a resting replica ends too");
}

#[test]
fn a_candidate_that_is_told_to_step_down_rests_too() {
    let store = Store::new();
    let mut leader = Beside::start(&mut elect(&store, "k --restart never", LEAD));
    leader.line();
    let mut candidate =
        Beside::start(&mut elect(&store, "k --verbose --step-down USR1 --rest 2s", "echo ran"));
    while !candidate.note().contains("candidate for \"k\"") {}
    candidate.signal(Signal::USR1);
    leader.go_on();
    assert_eq!((leader.code(), candidate.line().as_str(), candidate.code()), (7, "ran", 0));
    let notes = candidate.rest_of_stderr();
    assert!(notes.contains("no candidate for \"k\" for "), "{notes}");
}

#[test]
fn a_leader_that_is_asked_steps_down_and_rests() {
    let store = Store::new();
    let script = "trap 'echo down; exit 0' TERM; echo begun; while :; do sleep 0.05; done";
    let mut a = Beside::start(&mut elect(&store, "k --step-down-if-asked --rest 600s", script));
    assert_eq!(a.line(), "begun");
    let mut b = Beside::start(&mut elect(&store, "k", "echo leads; read line; exit 0"));
    assert_eq!(finish(&mut store.tool("release k --ask")).0, 0);
    assert_eq!((a.line().as_str(), b.line().as_str()), ("down", "leads"));
    let rests = loop {
        let note = a.note();
        if note.contains("no candidate for \"k\" for ") {
            break note;
        }
    };
    assert!(rests.contains(" 10m") || rests.contains(" 9m"), "{rests}");
    // The other one ignores requests.
    assert_eq!(finish(&mut store.tool("release k --ask")).0, 0);
    b.go_on();
    assert_eq!(b.code(), 0);
}

#[test]
fn a_command_that_ignores_a_step_down_is_killed_after_the_grace_period() {
    let store = Store::new();
    let script = "trap '' TERM; echo begun; while :; do sleep 0.05; done";
    let mut tool = Beside::start(&mut elect(&store, "k --step-down hup --rest 0s --grace 300ms", script));
    assert_eq!(tool.line(), "begun");
    tool.signal(Signal::HUP);
    assert_eq!(tool.line(), "begun", "a second term");
    let notes: Vec<_> = (0..3).map(|_| tool.note()).collect();
    assert!(notes[1].contains("stepping down") && notes[2].contains("did not end in time"), "{notes:?}");
}

#[test]
fn the_restart_policy_decides_what_the_end_of_the_command_means() {
    let store = Store::new();
    let count = store.path("count");
    let script = |code: &str| {
        format!("echo x >> {0}; [ $(wc -l < {0}) -lt 3 ] && exit {code}; exit 9", count.display())
    };
    for (policy, ends_with, code, runs) in [
        ("never", "4", 4, 1),
        ("never", "0", 0, 1),
        ("on-failure", "0", 0, 1),
        // Runs again after each failure, so a signal ends it.
        ("on-failure", "4", 143, 3),
        ("always", "0", 143, 3),
    ] {
        std::fs::write(&count, "").unwrap();
        let mut tool =
            Beside::start(&mut elect(&store, &format!("k --restart {policy}"), &script(ends_with)));
        let bound = Bound::new(Duration::from_secs(120));
        while read(&count).lines().count() < runs {
            bound.pause(Duration::from_millis(10), "not run again");
        }
        if code == 143 {
            while !tool.note().contains("code 9") {}
            tool.signal(Signal::TERM);
        }
        assert_eq!(tool.code(), code, "{policy} {ends_with}");
        assert_eq!(read(&count).lines().count(), runs, "{policy} {ends_with}");
    }
}

#[test]
fn bad_arguments_are_named() {
    let store = Store::new();
    let long = "x".repeat(257);
    for (arguments, expected) in [
        (vec!["elect", "k"], "COMMAND"),
        (vec!["elect", "k", "--value", &long, "--", "true"], "at most 256 bytes"),
        (vec!["elect", "k", "--step-down", "TERM", "--", "true"], "HUP, USR1 or USR2"),
        (vec!["elect", "", "--", "true"], "at least one character"),
        (vec!["observe", ""], "at least one character"),
    ] {
        let (code, _, stderr) = finish(&mut with(store.tool(""), &arguments));
        assert!(code == 64 && stderr.contains(expected), "{arguments:?}: {code} {stderr}");
    }
    let (code, ..) = finish(&mut with(store.tool("elect k --"), ["no-such-command-anywhere"]));
    assert_eq!(code, 127);
}

#[test]
fn an_observer_prints_each_leader_and_that_nobody_leads() {
    let store = Store::new();
    let mut texts = Beside::start(&mut store.tool("observe k"));
    let mut objects = Beside::start(&mut store.tool("observe k --json"));
    assert_eq!(texts.line(), "none");
    let object = |tool: &mut Beside| serde_json::from_str::<serde_json::Value>(&tool.line()).unwrap();
    assert_eq!(object(&mut objects)["is_led"], false);
    let mut leader = Beside::start(&mut with(
        store.tool("elect k --restart never"),
        ["--value", "10.0.0.7 a", "--", "sh", "-c", "echo $LEASEHOLD_TOKEN $LEASEHOLD_HOLDER; read line"],
    ));
    let grant = leader.line();
    assert_eq!(texts.line(), format!("leader {grant} 10.0.0.7 a"));
    let seen = object(&mut objects);
    assert_eq!((&seen["value"], &seen["is_led"]), (&"10.0.0.7 a".into(), &true.into()));
    assert!(grant.starts_with(seen["token_text"].as_str().unwrap()), "{seen}");
    leader.go_on();
    assert_eq!((texts.line().as_str(), &object(&mut objects)["value"]), ("none", &serde_json::Value::Null));
}

/// After a loss the command is dead before the next replica's starts, even if it ignores SIGTERM.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_command_is_dead_before_the_lease_can_end_in_the_store() {
    const LONG: Duration = Duration::from_secs(180);
    let database = Cluster::shared().fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let url = |url: &str| {
        format!("postgres+ttl{}?install=true&ttl=5s", url.strip_prefix("postgres").unwrap_or(url))
    };
    let (cut, direct) = (url(&proxy.url(database.url())), url(database.url()));
    let tool = |url: &str, script: &str| {
        let mut tool = support::tool();
        tool.env("LEASEHOLD_URL", url).args(["elect", "k", "--grace", "60s", "--", "sh", "-c", script]);
        tool
    };
    // A command and a process below it, both deaf to SIGTERM.
    let deaf = "trap '' TERM; sleep 600 & echo $$ $!; wait; wait; sleep 600";
    let (mut first, mut second) = (tool(&cut, deaf), tool(&direct, "echo leads; read line"));
    let led = tokio::task::spawn_blocking(move || {
        let mut first = Beside::start(&mut first);
        let line = first.line();
        let pids: Vec<_> = line.split(' ').map(pid).collect();
        let mut second = Beside::start(&mut second);
        proxy.stall();
        assert_eq!(second.line(), "leads");
        for pid in pids {
            assert!(!is_running(pid), "a process of the former leader runs");
        }
        assert!(first.note().contains("leading"));
        proxy.restore();
        // It campaigns again.
        drop(second);
        first.line()
    });
    assert!(!within(LONG, "not ended", led).await.unwrap().is_empty());
}

/// A replica that was stopped for longer than its lease kills its command when it goes on, and campaigns again.
#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_was_stopped_beyond_its_lease_kills_its_command() {
    let database = Cluster::shared().fresh_database().await;
    let url = format!("postgres+ttl{}?install=true&ttl=3s", database.url().strip_prefix("postgres").unwrap());
    let run = tokio::task::spawn_blocking(move || {
        let tool = |script: &str| {
            let mut tool = support::tool();
            tool.env("LEASEHOLD_URL", &url).args(["elect", "k", "--", "sh", "-c", script]);
            Beside::start(&mut tool)
        };
        let mut first = tool("trap '' TERM; echo $$; while :; do sleep 0.05; done");
        let command = pid(&first.line());
        let mut second = tool("echo leads; read line");
        let group = pid(&first.id().to_string());
        kill_process_group(group, Signal::STOP).unwrap();
        assert_eq!(second.line(), "leads");
        kill_process_group(group, Signal::CONT).unwrap();
        let bound = Bound::new(Duration::from_secs(120));
        while is_running(command) {
            bound.pause(Duration::from_millis(5), "the command of the former leader runs");
        }
        drop(second);
        assert_ne!(pid(&first.line()), command, "it leads again");
    });
    within(Duration::from_secs(180), "not ended", run).await.unwrap();
}

/// A forced release ends the command at once, and the tool campaigns again.
#[tokio::test(flavor = "multi_thread")]
async fn a_forced_release_kills_the_command_at_once() {
    let database = Cluster::shared().fresh_database().await;
    let url = format!("postgres+ttl{}?install=true", database.url().strip_prefix("postgres").unwrap());
    let script = "trap '' TERM; echo $LEASEHOLD_HOLDER; while :; do sleep 0.05; done";
    let run = tokio::task::spawn_blocking(move || {
        let with_url = |mut command: Command| {
            command.env("LEASEHOLD_URL", &url);
            command
        };
        let arguments = ["elect", "k", "--grace", "600s", "--", "sh", "-c", script];
        let mut tool = Beside::start(&mut with(with_url(support::tool()), arguments));
        let holder = tool.line();
        let release = ["release", "k", "--force", "--holder", &holder];
        assert_eq!(finish(&mut with(with_url(support::tool()), release)).0, 0);
        let next = tool.line();
        assert_ne!(next, holder);
    });
    within(Duration::from_secs(120), "not ended", run).await.unwrap();
}
