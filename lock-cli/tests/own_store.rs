//! The example of a command with a custom store. This program is both the command and its test.
#![allow(clippy::unwrap_used, missing_docs)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/own_store.rs"]
mod own_store;

use std::process::{Command, ExitCode};

/// Variable that makes this program the command.
const IS_COMMAND: &str = "LEASEHOLD_TEST_OWN_STORE";

fn main() -> ExitCode {
    if std::env::var_os(IS_COMMAND).is_some() {
        return own_store::run();
    }
    the_command_has_the_store_of_the_program_that_it_is_in();
    println!("test the_command_has_the_store_of_the_program_that_it_is_in ... ok");
    println!("test result: ok. 1 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out");
    ExitCode::SUCCESS
}

fn the_command_has_the_store_of_the_program_that_it_is_in() {
    let directory = tempfile::tempdir().unwrap();
    let url = format!("shelf://{}/locks", directory.path().display());
    let own = std::env::current_exe().unwrap();
    let run = |arguments: &[&str]| {
        let mut command = Command::new(&own);
        let done = command.env(IS_COMMAND, "").env("LEASEHOLD_URL", &url).args(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (done.status.code(), text(&done.stdout), text(&done.stderr))
    };
    // Under the lock, `inspect` sees the holder. The nested run is another process of the same program.
    let script = "\"$0\" inspect k && \"$0\" run k --no-wait -- true; echo $?";
    let (code, stdout, stderr) = run(&["run", "k", "--", "sh", "-c", script, own.to_str().unwrap()]);
    assert_eq!(code, Some(0), "{stderr}");
    assert!(stdout.contains("held") && stdout.ends_with("\n75\n"), "{stdout}{stderr}");
    assert!(directory.path().join("locks").exists());
    let (code, stdout, stderr) = run(&["list"]);
    assert!(code == Some(0) && stdout.contains("nothing is locked"), "{stdout}{stderr}");
    let (code, _, stderr) = run(&["list", "--url", "unknown://x"]);
    assert!(code == Some(64) && stderr.contains(", shelf:"), "{stderr}");
}
