//! Several keys in one run, and runs inside runs that wait for each other.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use support::{Beside, Store, finish, finish_refused};

const HOLD: &str = "echo begun; read line; echo ended";

/// Longer than any step takes.
const PATIENCE: Duration = Duration::from_secs(60);

const TELL: &str = r#"printf '[%s]\n' "$LEASEHOLD_KEYS" "$LEASEHOLD_TOKENS" "${LEASEHOLD_KEY-none}" "${LEASEHOLD_TOKEN-none}" "${LEASEHOLD_HOLDER-none}""#;

#[test]
fn all_keys_are_held_until_the_command_has_ended() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("b a", HOLD));
    tool.line();
    assert!(!store.is_free("a") && !store.is_free("b"));
    tool.go_on();
    assert_eq!((tool.line().as_str(), tool.code()), ("ended", 0));
    assert!(store.is_free("a") && store.is_free("b"));
}

#[test]
fn the_command_finds_all_keys_and_tokens_in_their_order() {
    let store = Store::new();
    let (_, stdout, stderr) = finish(&mut store.run("b a", TELL));
    let lines: Vec<_> = stdout.lines().collect();
    assert_eq!((lines[0], lines[1]), ("[b", "a]"), "{stderr}");
    let tokens: Vec<_> = lines[2].trim_matches(['[', ']']).split(' ').collect();
    assert!(tokens.len() == 2 && tokens.iter().all(|token| token.parse::<u64>().is_ok()), "{stdout}");
    assert_eq!(lines[3..], ["[none]"; 3], "what is of one key would be taken for that of another");
    // Also inside a run for one key.
    let inner =
        format!("{} run b a -- sh -c '{}'", env!("CARGO_BIN_EXE_leasehold"), TELL.replace('\'', "'\\''"));
    assert_eq!(finish(&mut store.run("outer", &inner)).1.lines().skip(3).collect::<Vec<_>>(), ["[none]"; 3]);
    let (_, stdout, _) = finish(&mut store.run(
        "a",
        r#"[ "$LEASEHOLD_KEY-$LEASEHOLD_TOKEN" = "$LEASEHOLD_KEYS-$LEASEHOLD_TOKENS" ] && echo same"#,
    ));
    assert_eq!(stdout, "same\n");
}

#[test]
fn the_order_of_the_keys_does_not_matter() {
    let store = Store::new();
    let script = format!("cd {}; mkdir mark || echo overlap; rmdir mark", store.path("").display());
    let mut all: Vec<_> = (0..12)
        .map(|n| Beside::start(&mut store.run(if n % 2 == 0 { "a b" } else { "b a" }, &script)))
        .collect();
    for tool in &mut all {
        assert_eq!((tool.rest_of_stdout().as_str(), tool.code()), ("", 0), "{}", tool.rest_of_stderr());
    }
}

#[test]
fn one_key_that_is_held_is_named_and_none_is_kept() {
    let store = Store::new();
    let mut holder = Beside::start(&mut store.run("b --label other", HOLD));
    holder.line();
    for options in ["-n", "-w 1.5"] {
        let (code, stdout, stderr) = finish_refused(&mut store.run(&format!("a b c {options}"), "echo ran"));
        assert_eq!((code, stdout.as_str()), (75, ""), "{stderr}");
        assert!(stderr.contains("\"b\" is locked, held by pid ") && stderr.contains("(other)"), "{stderr}");
        assert!(store.is_free("a") && store.is_free("c"));
    }
    // The note names the key that it waits for, not a key that it holds, even if both have the same label.
    let mut waiter = Beside::start(&mut store.run("c b a --label other", "echo ran"));
    let note = waiter.note();
    assert!(note.contains("waiting for \"b\" on ") && note.contains(&holder.id().to_string()), "{note}");
    holder.go_on();
    assert_eq!((waiter.line().as_str(), waiter.code()), ("ran", 0));
}

#[test]
fn one_window_that_lasts_keeps_the_command_from_running_and_spends_no_other() {
    let store = Store::new();
    assert_eq!(finish(&mut store.run("a b --once-per 1h", "echo ran")).1, "ran\n");
    for keys in ["a", "b", "c b"] {
        let (code, stdout, stderr) = finish(&mut store.run(&format!("{keys} --once-per 1h"), "echo ran"));
        assert_eq!((code, stdout.as_str()), (0, ""), "{stderr}");
        let key = keys.split(' ').next_back().unwrap();
        assert!(stderr.contains(&format!("not due: \"{key}\"")), "{stderr}");
    }
    assert_eq!(finish(&mut store.run("c --once-per 1h", "echo ran")).1, "ran\n");
}

#[test]
fn the_loss_of_one_key_ends_the_command() {
    let store = Store::new();
    let mut tool = Beside::start(&mut store.run("a b", HOLD));
    tool.line();
    std::fs::remove_dir_all(store.locks()).unwrap();
    assert_eq!(tool.code(), 76);
    let notes = tool.rest_of_stderr();
    assert!(notes.contains("lost the lock \"") && notes.contains("error: the lock \""), "{notes}");
}

#[test]
fn a_key_that_is_given_twice_is_refused() {
    let store = Store::new();
    let (code, stdout, stderr) = finish(&mut store.run("a b a", "echo ran"));
    assert!(code == 64 && stdout.is_empty() && stderr.contains("twice"), "{code} {stderr}");
    assert_eq!(finish(&mut store.run("--key a --key=b", "echo $LEASEHOLD_KEYS")).1, "a b\n");
    assert_eq!(finish(&mut store.run("a --key b", "echo ran")).0, 64);
}

#[test]
fn a_hold_of_several_keys_has_a_line_for_each() {
    let store = Store::new();
    let mut holder = Beside::start(&mut store.tool("lock b a"));
    let lines = [holder.line(), holder.line()];
    assert!(lines[0].ends_with(" b") && lines[1].ends_with(" a"), "{lines:?}");
    assert!(!store.is_free("a") && !store.is_free("b"));
    holder.close_stdin();
    assert_eq!(holder.code(), 0);
    let mut holder = Beside::start(&mut store.tool("lock b a --json"));
    for key in ["b", "a"] {
        let value: Value = serde_json::from_str(&holder.line()).unwrap();
        assert_eq!(value["key"], key);
    }
}

/// Starts a run that holds `outer`. After reading a line, it starts a run for `inner`.
fn nested(url: &str, outer: &str, inner: &str) -> Beside {
    let tool = env!("CARGO_BIN_EXE_leasehold");
    let script = format!("echo begun; read line; exec {tool} run {inner} -- echo ran");
    let mut command: Command = support::tool();
    command.env("LEASEHOLD_URL", url).args(["run", outer, "--", "sh", "-c", &script]);
    Beside::start(&mut command)
}

/// Starts nested runs, each of which waits for the key of the next one. Checks that one run ends, so the others can run.
fn ends_a_circle(url: &str, keys: &[&str]) {
    let next = keys.iter().cycle().skip(1);
    let mut all: Vec<_> = keys.iter().zip(next).map(|(outer, inner)| nested(url, outer, inner)).collect();
    all.iter_mut().for_each(|tool| assert_eq!(tool.line(), "begun"));
    all.iter_mut().for_each(Beside::go_on);
    let mut ended = 0;
    for tool in &mut all {
        let (stdout, stderr) = (tool.rest_of_stdout(), tool.rest_of_stderr());
        match tool.code() {
            0 => assert_eq!(stdout, "ran\n", "{url}: {stderr}"),
            75 => {
                ended += 1;
                assert!(stderr.contains("error: a circle of runs"), "{url}: {stderr}");
                assert!(keys.iter().all(|key| stderr.contains(&format!("\"{key}\""))), "{url}: {stderr}");
            }
            code => panic!("{url}: {code} {stderr}"),
        }
    }
    assert_eq!(ended, 1, "{url}");
    // The hold that announces a nested wait ends with its run.
    let mut list = support::tool();
    let (_, stdout, _) = finish(list.env("LEASEHOLD_URL", url).args(["list", "leasehold:nested:"]));
    assert!(stdout.starts_with("nothing is locked"), "{url}: {stdout}");
}

/// Returns a database, and its URL without the scheme.
fn database() -> (tokio::runtime::Runtime, test_servers::Database, String) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let database = runtime.block_on(test_servers::fresh_database());
    let rest = database.url().split_once("://").unwrap().1;
    let joint = if rest.contains('?') { '&' } else { '?' };
    let rest = format!("{rest}{joint}install=true");
    (runtime, database, rest)
}

#[test]
fn of_two_runs_that_wait_for_each_other_one_ends_with_the_circle_on_files() {
    ends_a_circle(&Store::new().url(), &["a", "b"]);
}

#[test]
fn of_three_runs_that_wait_for_each_other_one_ends_with_the_circle() {
    ends_a_circle(&Store::new().url(), &["a", "b", "c"]);
}

#[test]
fn of_two_runs_that_wait_for_each_other_one_ends_with_the_circle_on_postgres() {
    let (_runtime, _database, rest) = database();
    for scheme in ["postgres", "postgres+row", "postgres+ttl"] {
        ends_a_circle(&format!("{scheme}://{rest}"), &["a", "b"]);
    }
}

/// The row store keeps holds of killed processes, so a killed waiter leaves its announcement locked.
#[test]
fn what_a_killed_run_has_said_is_replaced_by_the_next() {
    let (_runtime, _database, rest) = database();
    let url = format!("postgres+row://{rest}");
    let tool = |arguments: &[&str]| {
        let mut command = support::tool();
        command.env("LEASEHOLD_URL", &url).args(arguments);
        command
    };
    let mut holder = Beside::start(&mut tool(&["lock", "b"]));
    holder.line();
    // A hold as a killed run of another holder would leave it.
    let left = format!("{:032x}-1 waits for c", 7);
    let mut stale = Beside::start(&mut tool(&["lock", "leasehold:nested:a", "--label", &left]));
    stale.line();
    let mut waiter = nested(&url, "a", "b");
    waiter.line();
    waiter.go_on();
    let started = Instant::now();
    let says = || finish(&mut tool(&["inspect", "leasehold:nested:a", "--json"])).1;
    while !says().contains("waits for b") {
        assert!(started.elapsed() < PATIENCE, "{}", says());
    }
    holder.close_stdin();
    assert_eq!((waiter.line().as_str(), waiter.code()), ("ran", 0));
}
