//! The command `leasehold`, which is measured beside other programs.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Builds the command for release and returns its path. A shortened run takes the command that was built with the tests, if
/// it exists.
pub(crate) fn build() -> PathBuf {
    let beside = std::env::current_exe().unwrap().with_file_name("leasehold");
    if bench::is_smoke() && beside.is_file() {
        return beside;
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let profile = bench::or_smoke("release", "tests");
    let arguments = ["build", "--profile", profile, "--quiet", "--package", "leasehold-cli"];
    let output = Command::new(cargo)
        .args(arguments)
        .args(["--message-format", "json"])
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success(), "cannot build the command");
    let messages = String::from_utf8(output.stdout).unwrap();
    let path = messages.lines().rev().find_map(|line| {
        let (_, path) = line.split_once("\"executable\":\"")?;
        path.split_once('"').map(|(path, _)| PathBuf::from(path))
    });
    path.expect("the command's executable")
}

/// A command that runs another one, or does one thing.
pub(crate) struct Tool {
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) before: Vec<String>,
}

impl Tool {
    pub(crate) fn new(name: &'static str, program: impl Into<PathBuf>, before: &[&str]) -> Self {
        let before = before.iter().map(|&word| word.to_owned()).collect();
        Self { name, program: program.into(), before }
    }

    pub(crate) fn start(&self, command: &[&str]) -> Child {
        Command::new(&self.program)
            .args(&self.before)
            .args(command)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap_or_else(|error| panic!("cannot start {}: {error}", self.name))
    }

    /// Runs the command to its end, and returns how long it took.
    pub(crate) fn time(&self, command: &[&str]) -> Duration {
        self.time_until(command, &[0])
    }

    /// Runs the command to its end with one of these exit codes, and returns how long it took.
    pub(crate) fn time_until(&self, command: &[&str], codes: &[i32]) -> Duration {
        let begun = Instant::now();
        let status = self.start(command).wait().unwrap();
        let took = begun.elapsed();
        assert!(status.code().is_some_and(|code| codes.contains(&code)), "{} failed: {status}", self.name);
        took
    }
}
