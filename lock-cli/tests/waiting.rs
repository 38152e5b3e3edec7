//! The notes of a waiting run, and the label of a hold.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::time::{Duration, Instant};

use rustix::process::Signal;
use support::{Beside, Store, finish, with};

const HOLD: &str = "echo begun; read line";

#[test]
fn a_wait_says_for_whom_and_since_when_and_how_long_it_took() {
    let store = Store::new();
    let mut holder = Beside::start(&mut store.run("k --label nightly", HOLD));
    holder.line();
    let mut quiet = Beside::start(&mut store.run("k -q", "echo quiet"));
    let mut waiter = Beside::start(&mut store.run("k", "echo ran"));
    let note = waiter.note();
    let told = [", held by pid ", &holder.id().to_string(), " (nightly) since 2"];
    assert!(note.starts_with("leasehold: waiting for \"k\" on file:") && note.ends_with('Z'), "{note}");
    assert!(told.iter().all(|part| note.contains(part)), "{note}");
    holder.go_on();
    assert_eq!(waiter.line(), "ran");
    let rest = waiter.rest_of_stderr();
    assert!(rest.contains("granted after ") && rest.lines().count() == 1, "{rest}");
    assert_eq!((quiet.line().as_str(), quiet.code()), ("quiet", 0));
    assert_eq!(quiet.rest_of_stderr(), "");
    let (_, _, stderr) = finish(&mut store.run("k", "exit 0"));
    assert_eq!(stderr, "", "a grant at once is not worth a word");
}

#[test]
fn a_wait_says_so_when_the_holder_changes() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let database = runtime.block_on(test_servers::fresh_database());
    let rest = database.url().split_once("://").unwrap().1;
    let joint = if rest.contains('?') { '&' } else { '?' };
    let url = format!("postgres+row://{rest}{joint}install=true");
    let run = |label: &str, script: &str| {
        let mut command = support::tool();
        command.env("LEASEHOLD_URL", &url).args(["run", "k", "--label", label, "--", "sh", "-c", script]);
        command
    };
    let mut first = Beside::start(&mut run("first", HOLD));
    first.line();
    let mut waiter = Beside::start(&mut run("waiter", "echo ran"));
    let note = waiter.note();
    assert!(note.contains("(first)"), "{note}");
    let said = Instant::now();
    // While the waiter is stopped, another run gets the lock, because the row store has no order of waiters.
    waiter.signal(Signal::STOP);
    first.go_on();
    assert_eq!(first.code(), 0);
    let mut second = Beside::start(&mut run("second", HOLD));
    second.line();
    waiter.signal(Signal::CONT);
    let note = waiter.note();
    assert!(note.contains("waiting for \"k\"") && note.contains("(second)"), "{note}");
    // A minute later the note would be repeated in any case.
    assert!(said.elapsed() < Duration::from_secs(55), "{:?}", said.elapsed());
    second.go_on();
    assert_eq!((waiter.line().as_str(), waiter.code()), ("ran", 0));
    assert!(waiter.note().contains("granted after "));
}

#[test]
fn a_run_that_would_wait_for_itself_is_told() {
    let store = Store::new();
    let tool = env!("CARGO_BIN_EXE_leasehold");
    for (options, expected) in [("", 75), ("--wait 1h", 75), ("-q -E 9", 9)] {
        let (code, stdout, stderr) =
            finish(&mut store.run("a", &format!("{tool} run a {options} -- echo ran")));
        assert_eq!((code, stdout.as_str()), (expected, ""), "{stderr}");
        assert!(stderr.contains("you hold \"a\" already"), "{stderr}");
    }
    // Also through a nested run for another key.
    for (option, note) in [("", "waiting for \"a\""), ("-q", "")] {
        let inner = format!("{tool} run b -- {tool} {option} run a --wait 1h -- echo ran");
        let (code, stdout, stderr) = finish(&mut store.run("a", &inner));
        assert_eq!((code, stdout.as_str()), (75, ""), "{stderr}");
        assert!(stderr.contains("you hold \"a\" already") && stderr.contains(note), "{stderr}");
    }
    // The same name is another lock in another store.
    let elsewhere = format!("{tool} --url {} run a -- echo ran", Store::new().url());
    assert_eq!(finish(&mut store.run("a", &elsewhere)).1, "ran\n");
}

#[test]
fn a_hold_without_a_label_says_who_runs_what() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("k", HOLD));
    tool.line();
    let (_, stdout, _) = finish(&mut with(store.tool("inspect k --json"), [""; 0]));
    let value: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    let label = value["label"].as_str().unwrap();
    let (user, rest) = label.split_once('@').unwrap();
    let id = std::process::Command::new("id").arg("-un").output().unwrap().stdout;
    assert_eq!(user, String::from_utf8(id).unwrap().trim());
    assert!(rest.ends_with(&format!(" sh pid {}", tool.id())), "{label}");
}

#[test]
fn a_server_is_told_whose_the_session_is() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let database = runtime.block_on(test_servers::fresh_database());
    let rest = database.url().split_once("://").unwrap().1;
    let joint = if rest.contains('?') { '&' } else { '?' };
    let id = std::process::Command::new("id").arg("-un").output().unwrap().stdout;
    let us = format!("leasehold {}@", String::from_utf8(id).unwrap().trim());
    for (parameters, expected) in
        [("install=true", us.as_str()), ("install=true&application_name=mine", "mine pid ")]
    {
        let url = format!("postgres+row://{rest}{joint}{parameters}");
        let tool = |arguments: &str| {
            let mut command = support::tool();
            command.env("LEASEHOLD_URL", &url).env_remove("PGAPPNAME").args(arguments.split(' '));
            command
        };
        let mut holder = Beside::start(&mut tool("lock k"));
        holder.line();
        let value: serde_json::Value =
            serde_json::from_str(&finish(&mut tool("inspect k --json")).1).unwrap();
        let owner = value["owner"].as_str().unwrap();
        assert!(owner.starts_with(expected) && owner.contains(&format!("pid {}", holder.id())), "{owner}");
        holder.close_stdin();
        assert_eq!(holder.code(), 0);
    }
}

#[test]
fn nothing_that_is_shown_turns_a_line_around() {
    let store = Store::new();
    let key = "bidi\u{202e}evil";
    let mut run = with(store.tool("run --label"), ["la\u{202e}bel", key, "--", "sh", "-c", HOLD]);
    let mut tool = Beside::start(&mut run);
    tool.line();
    for command in [
        store.tool("list"),
        with(store.tool("inspect"), [key]),
        with(store.tool("run -n"), [key, "--", "true"]),
    ] {
        let mut command = command;
        let (_, stdout, stderr) = finish(&mut command);
        let shown = stdout + &stderr;
        assert!(shown.contains("bidi\\u{202e}evil") && !shown.contains('\u{202e}'), "{shown}");
    }
}

#[test]
fn every_step_is_told_to_who_asks() {
    let store = Store::new();
    let (code, _, stderr) = finish(&mut store.run("k -v", "exit 0"));
    assert_eq!(code, 0);
    let steps = [
        "connecting to the store",
        "connected to file:",
        "asking for \"k\"",
        "granted after",
        "released \"k\"",
    ];
    let at: Vec<_> = steps.iter().map(|step| stderr.find(step)).collect();
    assert!(at.iter().all(Option::is_some) && at.is_sorted(), "{stderr}");
    assert_eq!(finish(&mut store.run("k -v -q", "exit 0")).0, 64);
}
