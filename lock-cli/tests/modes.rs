//! `run --shared` and `run --slots`: readers, numbered slots, and their list.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::collections::BTreeSet;
use std::process::Command;

use serde_json::Value;
use support::{Beside, Store, finish, finish_refused};

const HOLD: &str = "echo ${LEASEHOLD_PERMIT-none}; read line";

/// Returns `leasehold run ARGUMENTS -- sh -c SCRIPT` on a store within its process.
fn in_memory(arguments: &str, script: &str) -> Command {
    let mut command = support::tool();
    command.args(["--url", "memory:", "--quiet", "run"]).args(arguments.split_whitespace());
    command.args(["--", "sh", "-c", script]);
    command
}

#[test]
fn the_command_finds_the_number_of_its_slot() {
    let tell = "echo ${LEASEHOLD_PERMIT-none} ${LEASEHOLD_PERMITS-none} ${LEASEHOLD_TOKEN:+token}";
    for (arguments, expected) in [
        ("k", "none none token\n"),
        ("k --shared", "none none token\n"),
        ("k -s", "none none token\n"),
        ("k --slots 4", "0 0 token\n"),
        ("a b --slots 4", "none 0 0\n"),
    ] {
        // An enclosing run has set the variables.
        let mut tool = in_memory(arguments, tell);
        let (code, stdout, stderr) = finish(tool.env("LEASEHOLD_PERMIT", "7").env("LEASEHOLD_PERMITS", "7"));
        assert_eq!((code, stdout.as_str()), (0, expected), "{arguments}: {stderr}");
    }
}

#[test]
fn a_number_of_slots_that_cannot_be_is_refused() {
    for (arguments, hint) in [
        ("k --slots 0", "0 is not in 1.."),
        ("k --slots 4294967296", "4294967296 is not in"),
        ("k --slots -1", "--slots"),
        ("k --slots many", "invalid"),
        ("k --slots 2 --shared", "cannot be used with"),
        ("k --shared --cooldown 1h", "cannot be used with"),
        ("k --slots 2 --once-per 1h", "cannot be used with"),
        ("k --shared -x", "cannot be used with"),
    ] {
        let (code, stdout, stderr) = finish(&mut in_memory(arguments, "echo ran"));
        assert_eq!((code, stdout.as_str()), (64, ""), "{arguments}: {stderr}");
        assert!(stderr.contains(hint), "{arguments}: {stderr}");
    }
}

#[test]
fn readers_run_together_and_a_writer_alone() {
    let store = Store::new();
    let mut readers: Vec<_> = (0..3).map(|_| Beside::start(&mut store.run("k --shared", HOLD))).collect();
    for reader in &mut readers {
        assert_eq!(reader.line(), "none");
    }
    let (code, _, stderr) = finish_refused(&mut store.run("k --no-wait", "echo ran"));
    assert_eq!(code, 75, "{stderr}");
    assert!(stderr.contains("\"k\" is locked, held by pid ") && stderr.contains(" and 2 more"), "{stderr}");
    let mut writer = Beside::start(&mut store.run("k", HOLD));
    for reader in &mut readers {
        reader.go_on();
        assert_eq!(reader.code(), 0);
    }
    assert_eq!(writer.line(), "none");
    assert_eq!(finish_refused(&mut store.run("k --shared --no-wait", "echo ran")).0, 75);
    writer.go_on();
    assert_eq!(writer.code(), 0);
    assert!(store.is_free("k"));
}

#[test]
fn a_reader_inside_a_reader_does_not_wait_for_it() {
    let store = Store::new();
    let inner = format!("{} run k --shared -- echo inner", env!("CARGO_BIN_EXE_leasehold"));
    let (code, stdout, stderr) = finish(&mut store.run("k --shared", &inner));
    assert_eq!((code, stdout.as_str()), (0, "inner\n"), "{stderr}");
    let (code, _, stderr) = finish(&mut store.run("k", &inner));
    assert!(code == 75 && stderr.contains("you hold \"k\" already"), "{code}: {stderr}");
}

/// The inner run has the key of the outer one already, and waits for the other key alone.
#[test]
fn a_reader_inside_a_reader_waits_for_the_writer_of_another_key() {
    let store = Store::new();
    let mut writer = Beside::start(&mut store.run("b", HOLD));
    assert_eq!(writer.line(), "none");
    let inner = format!("{} run a b --shared -- echo inner", env!("CARGO_BIN_EXE_leasehold"));
    let mut outer = Beside::start(&mut store.run("a --shared", &inner));
    let note = outer.note_with("waiting for \"b\"");
    assert!(note.is_some(), "the inner run has ended");
    writer.go_on();
    assert_eq!((writer.code(), outer.line().as_str(), outer.code()), (0, "inner", 0));
}

#[test]
fn at_most_as_many_run_as_there_are_slots_and_lists_show_all_of_them() {
    let store = Store::new();
    let mut runs: Vec<_> = (0..2).map(|_| Beside::start(&mut store.run("k --slots 2", HOLD))).collect();
    let numbers: BTreeSet<_> = runs.iter_mut().map(Beside::line).collect();
    assert_eq!(numbers, ["0".to_owned(), "1".to_owned()].into());
    assert_eq!(finish_refused(&mut store.run("k --slots 2 --no-wait", "echo ran")).0, 75);
    let (code, _, stderr) = finish(&mut store.run("k --slots 3 --no-wait", "echo ran"));
    assert_eq!(code, 64, "{stderr}");
    assert!(stderr.contains("in use with 2 permits") && stderr.contains("names 3"), "{stderr}");

    let (code, listed, _) = finish(&mut store.tool("list"));
    assert_eq!(code, 0);
    let (_, inspected, _) = finish(&mut store.tool("inspect k"));
    for text in [&listed, &inspected] {
        assert!(text.contains("permit 0 of 2") && text.contains("permit 1 of 2"), "{text}");
    }
    let (_, json, _) = finish(&mut store.tool("inspect k --json"));
    let seen: Value = serde_json::from_str(&json).unwrap();
    let holders = seen["holders"].as_array().unwrap();
    let shown: BTreeSet<_> = holders.iter().map(|hold| hold["permit"].as_u64().unwrap()).collect();
    assert_eq!(shown, [0, 1].into());
    assert!(holders.iter().all(|hold| hold["mode"] == "permit" && hold["permits"] == 2), "{json}");

    let mut waiter = Beside::start(&mut store.run("k --slots 2", HOLD));
    runs[1].go_on();
    assert_eq!(runs[1].code(), 0);
    assert!(numbers.contains(&waiter.line()));
    for run in [&mut runs[0], &mut waiter] {
        run.go_on();
        assert_eq!(run.code(), 0);
    }
    assert!(store.is_free("k"));
}
