//! `leasehold lock`: held until standard input is closed.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use rustix::process::Signal;
use serde_json::Value;
use support::{Beside, Store, finish, finish_refused};

#[test]
fn the_lock_is_held_until_standard_input_is_closed() {
    let store = Store::new();
    let mut holder =
        Beside::start(support::tool().env("LEASEHOLD_URL", store.url()).args(["lock", "two words"]));
    let line = holder.line();
    let (token, rest) = line.split_once(' ').unwrap();
    let (id, key) = rest.split_once(' ').unwrap();
    assert_eq!(key, "two words");
    assert!(token.parse::<u64>().unwrap() > 0);
    let inspect = |json: &str| {
        let mut command = support::tool();
        finish(command.env("LEASEHOLD_URL", store.url()).args(["inspect", "two words", json]))
    };
    let seen: Value = serde_json::from_str(&inspect("--json").1).unwrap();
    assert_eq!((&seen["holder"], &seen["token_text"]), (&Value::from(id), &Value::from(token)));
    // The text on standard input does not matter.
    holder.go_on();
    holder.close_stdin();
    assert_eq!((holder.code(), holder.rest_of_stdout().as_str()), (0, ""));
    assert_eq!(inspect("--json").0, 1, "free");
}

#[test]
fn machines_get_one_line_of_json() {
    let store = Store::new();
    let mut holder = Beside::start(&mut store.tool("lock k --json"));
    let value: Value = serde_json::from_str(&holder.line()).unwrap();
    let names: Vec<_> = value.as_object().unwrap().keys().map(String::as_str).collect();
    assert_eq!(names, ["holder", "key", "permit", "token", "token_text"]);
    assert_eq!(
        (&value["key"], value["token"].to_string()),
        (&"k".into(), value["token_text"].as_str().unwrap().into())
    );
}

#[test]
fn a_signal_releases_it() {
    let store = Store::new();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT] {
        let mut holder = Beside::start(&mut store.tool("lock k"));
        holder.line();
        let mut waiter = Beside::start(&mut store.tool("lock k"));
        assert!(waiter.note().contains("waiting for \"k\""));
        waiter.signal(signal);
        assert_eq!(waiter.code(), 128 + signal.as_raw(), "the wait is ended as that of a run");
        holder.signal(signal);
        assert_eq!((holder.code(), holder.rest_of_stderr().as_str()), (0, ""));
        assert!(store.is_free("k"));
    }
}

#[test]
fn a_loss_ends_it() {
    let store = Store::new();
    let mut holder = Beside::start(&mut store.tool("lock k --max-hold 100ms"));
    holder.line();
    assert_eq!(holder.code(), 76);
    let said = holder.rest_of_stderr();
    assert!(
        said.contains("lost the lock \"k\"") && said.contains("error: the lock \"k\" was lost"),
        "{said}"
    );
}

#[test]
fn it_is_asked_for_as_by_run() {
    let store = Store::new();
    let mut holder = Beside::start(&mut store.tool("lock k --label mine"));
    holder.line();
    for (options, expected) in [("--no-wait", 75), ("-n -E 3", 3), ("-w 1.5", 75), ("--wait 1500ms", 75)] {
        let (code, stdout, stderr) = finish_refused(&mut store.tool(&format!("lock k {options}")));
        assert_eq!((code, stdout.as_str()), (expected, ""), "{options}: {stderr}");
        assert!(stderr.contains("(mine)"), "{stderr}");
    }
    let (code, stdout, _) = finish(&mut store.tool("lock other --once-per 1h"));
    assert!(code == 0 && !stdout.is_empty(), "closed input releases at once");
    for (code_for_it, expected) in [("", 75), ("--not-due-exit-code 9", 9)] {
        let not_due = format!("lock other --once-per 1h {code_for_it}");
        let (code, stdout, stderr) = finish(&mut store.tool(&not_due));
        assert_eq!((code, stdout.as_str()), (expected, ""), "{stderr}");
    }
}

/// The caller could not learn of the grant and its token.
#[cfg(target_os = "linux")]
#[test]
fn a_grant_that_cannot_be_told_is_released() {
    let store = Store::new();
    for script in ["exec \"$0\" lock k > /dev/full", "{ \"$0\" lock k; echo $? >&2; } | true"] {
        let (input, stays_open) = std::io::pipe().unwrap();
        let mut shell = std::process::Command::new("sh");
        shell
            .args(["-c", script, env!("CARGO_BIN_EXE_leasehold")])
            .env("LEASEHOLD_URL", store.url())
            .stdin(input);
        let ended = shell.output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr);
        assert!(said.contains("so it is released"), "{script}: {said}");
        assert!(ended.status.code() == Some(74) || said.ends_with("74\n"), "{script}: {said}");
        assert!(store.is_free("k"));
        drop(stays_open);
    }
}

/// For example, a command with `&` in a script has such an input. The command would report the lock and release it at once.
#[test]
fn a_standard_input_that_keeps_nothing_is_refused() {
    let store = Store::new();
    for line in ["\"$0\" lock k < /dev/null", "\"$0\" lock k <&-", "\"$0\" lock k & wait $!"] {
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", line, env!("CARGO_BIN_EXE_leasehold")]).env("LEASEHOLD_URL", store.url());
        let (code, stdout, stderr) = finish(&mut shell);
        assert!(
            code == 64 && stdout.is_empty() && stderr.contains("keep a pipe open"),
            "{line}: {code} {stderr}"
        );
    }
    let (code, stdout, _) = finish(&mut store.tool("lock k"));
    assert!(code == 0 && stdout.ends_with(" k\n"), "a pipe that is closed: {stdout}");
}
