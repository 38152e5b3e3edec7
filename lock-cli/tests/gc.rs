//! `leasehold gc`.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use support::{Beside, Store, finish};

#[test]
fn gc_removes_what_is_unused_for_long_enough_and_keeps_what_is_held() {
    let store = Store::new();
    store.take("old");
    let mut held = Beside::start(&mut store.run("held", "echo; read line"));
    held.line();
    let (code, stdout, stderr) = finish(&mut store.tool("gc"));
    assert_eq!((code, stderr.as_str()), (0, ""));
    assert!(stdout.contains("of 0 unused keys") && stdout.contains("kept 2"), "{stdout}");
    let (code, stdout, _) = finish(&mut store.tool("gc --unused-for 0s --json"));
    let value: serde_json::Value = serde_json::from_str(&stdout).unwrap();
    assert_eq!((code, &value["removed"], &value["kept"]), (0, &1.into(), &1.into()));
    assert!(!store.is_free("held"));
    assert!(store.is_free("old"));
}

#[test]
fn gc_is_for_files_and_makes_none() {
    let store = Store::new();
    let (code, stdout, _) = finish(&mut store.tool("gc"));
    assert_eq!(code, 0);
    assert!(stdout.contains("no such directory") && !store.locks().exists(), "{stdout}");
    let (code, _, stderr) = finish(support::tool().args(["--url", "memory:", "gc"]));
    assert_eq!(code, 64);
    assert!(stderr.contains("file store"), "{stderr}");
}
