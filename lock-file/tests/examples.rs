//! Checks the example with two processes. This test binary runs itself as each of them.

#![allow(clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/one_at_a_time.rs"]
mod one_at_a_time;

/// Variable of a process: the URL of its store.
const URL: &str = "LEASEHOLD_EXAMPLE_URL";

#[test]
fn process() {
    let Ok(url) = std::env::var(URL) else { return };
    let worked = one_at_a_time::run(&url).unwrap();
    std::process::exit(if worked { 0 } else { one_at_a_time::HELD.into() });
}

fn start(url: &str) -> Command {
    let mut process = Command::new(std::env::current_exe().unwrap());
    process.args(["--exact", "process", "--nocapture"]).env(URL, url);
    process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    process
}

#[test]
fn of_two_processes_one_works_and_the_other_is_told_so() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("file://{}", directory.path().join("locks").display());
    let mut first = start(&url).spawn().unwrap();
    let mut said = BufReader::new(first.stdout.take().unwrap()).lines();
    said.find(|line| line.as_ref().unwrap().contains("writing nightly-report with token Some"))
        .unwrap()
        .unwrap();

    let second = start(&url).output().unwrap();
    assert_eq!(second.status.code(), Some(75));
    assert_eq!(String::from_utf8_lossy(&second.stderr).trim(), "another process writes the report");

    first.stdin.take().unwrap().write_all(b"\n").unwrap();
    assert_eq!(said.next().unwrap().unwrap(), "released");
    assert!(first.wait().unwrap().success());

    let mut third = start(&url).stdin(Stdio::null()).spawn().unwrap();
    assert!(third.wait().unwrap().success(), "the key is free");
}
