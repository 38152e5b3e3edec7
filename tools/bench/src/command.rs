//! The command `leasehold`, which is measured beside other programs.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bench::report::{Series, millis};

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

/// Returns whether a program is installed that prints its version.
pub(crate) fn is_installed(program: &str) -> bool {
    let version = Command::new(program).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    version.is_ok_and(|status| status.success())
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

    /// Runs the command to its end. Returns its duration.
    pub(crate) fn time(&self, command: &[&str]) -> Duration {
        self.time_until(command, &[0])
    }

    /// Runs the command to its end with one of these exit codes. Returns its duration.
    pub(crate) fn time_until(&self, command: &[&str], codes: &[i32]) -> Duration {
        let begun = Instant::now();
        let status = self.start(command).wait().unwrap();
        let took = begun.elapsed();
        assert!(status.code().is_some_and(|code| codes.contains(&code)), "{} failed: {status}", self.name);
        took
    }
}

/// Runs `measured` on both tools in turn. Returns the milliseconds of each.
pub(crate) fn alternate(
    tools: &[Tool; 2],
    rounds: usize,
    measured: impl Fn(&Tool) -> Duration,
) -> [Series; 2] {
    let mut series = tools.each_ref().map(|tool| Series::new(tool.name));
    for round in 0..rounds {
        for step in 0..tools.len() {
            let at = (round + step) % tools.len();
            series[at].rounds.push(millis(measured(&tools[at])));
        }
    }
    series
}
