//! The program: its start by one command, and its end by Ctrl-C.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/service.rs"]
mod common;

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};

use axum::http::StatusCode;
use common::Browser;
use rustix::process::{Pid, Signal, kill_process};

fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ledger"));
    command.args(arguments).env_remove("DATABASE_URL").stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Ends the program even if the test fails.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn one_command_serves_until_it_is_told_to_stop() {
    for signal in [Signal::INT, Signal::TERM] {
        let mut program = Ended(program(&["--port", "0", "--load"]).spawn().unwrap());
        let mut output = BufReader::new(program.0.stdout.take().unwrap());
        let mut line = String::new();
        output.read_line(&mut line).unwrap();
        let address =
            line.strip_prefix("http://").and_then(|rest| rest.split('/').next()).unwrap().parse().unwrap();
        let browser = Browser::at(address);
        assert_eq!(browser.get("/").await.0, StatusCode::OK);
        let figures = browser.until("the load spends", |figures| figures["spent"].as_u64() > Some(0)).await;
        assert_eq!((&figures["lock"], &figures["double_spends"]), (&"memory".into(), &0.into()));

        kill_process(Pid::from_child(&program.0), signal).unwrap();
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert_eq!(rest, "stopped\n");
        assert!(program.0.wait().unwrap().success());
        let mut log = String::new();
        program.0.stderr.take().unwrap().read_to_string(&mut log).unwrap();
        assert_eq!(log, "", "nothing to complain about");
    }
}

#[test]
fn what_cannot_be_started_says_what_to_do() {
    let output = program(&["--lock", "session"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        message,
        "ledger: --lock session needs Postgres: set DATABASE_URL, such as postgres://user@localhost/ledger\n"
    );

    let output = program(&["--port", "0"])
        .env("DATABASE_URL", "postgres://somebody:secret@127.0.0.1:1/ledger")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.starts_with("ledger: the lock cannot be used: "), "{message}");
    assert!(!message.contains("secret"), "{message}");
}
