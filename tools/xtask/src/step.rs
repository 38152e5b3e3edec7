//! Runs one step of a job: prints its name, runs it, and names the command that repeats it if it fails.

use std::collections::VecDeque;
use std::env;
use std::ffi::OsStr;
use std::io::{self, BufRead as _, BufReader, IsTerminal as _};
use std::process::{Command, Stdio};
use std::time::Instant;

/// A result whose error is a message for the user.
pub(crate) type Outcome<T = ()> = Result<T, String>;

/// Lines of cargo's output that the message of a failure repeats.
const SHOWN: usize = 30;

/// Returns the sum of the passed tests, or the messages of all failures.
pub(crate) fn sum<const N: usize>(outcomes: [Outcome<u64>; N]) -> Outcome<u64> {
    let (mut passed, mut failed) = (0, Vec::new());
    for outcome in outcomes {
        match outcome {
            Ok(count) => passed += count,
            Err(message) => failed.push(message),
        }
    }
    if failed.is_empty() { Ok(passed) } else { Err(failed.join("\n")) }
}

/// Runs cargo with its output shown. The message of a failure repeats the last lines, because readers of a long log start
/// at its end.
pub(crate) fn cargo(what: &str, arguments: &[&str]) -> Outcome {
    announce(what);
    let start = Instant::now();
    let mut command = command(arguments);
    if io::stderr().is_terminal() {
        command.env("CARGO_TERM_COLOR", "always");
    }
    let mut child =
        command.stderr(Stdio::piped()).spawn().map_err(|error| format!("cannot start cargo: {error}"))?;
    let mut end = VecDeque::new();
    for line in child.stderr.take().into_iter().flat_map(|stderr| BufReader::new(stderr).lines()) {
        let line = line.map_err(|error| format!("cannot read what cargo prints: {error}"))?;
        eprintln!("{line}");
        end.push_back(line);
        end.drain(..end.len().saturating_sub(SHOWN));
    }
    let status = child.wait().map_err(|error| format!("cannot wait for cargo: {error}"))?;
    if !status.success() {
        let end: String = end.iter().map(|line| format!("{line}\n")).collect();
        return Err(format!("\n{end}{}", failed(what, arguments, &[])));
    }
    println!("-- {what}: passed in {:.0?}", start.elapsed());
    Ok(())
}

/// Runs `cargo test` with the profile of the tests and prints its output. Returns the number of passed tests.
pub(crate) fn tests(what: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Outcome<u64> {
    tests_seen(what, arguments, variables, |_| {})
}

/// Runs tests like [`tests`], and also passes each line of output to `see`.
pub(crate) fn tests_seen(
    what: &str,
    arguments: &[&str],
    variables: &[(&str, &str)],
    mut see: impl FnMut(&str),
) -> Outcome<u64> {
    announce(what);
    let start = Instant::now();
    let arguments = &[&["test", "--profile", "tests"], arguments].concat();
    let mut child = command(arguments)
        .envs(variables.iter().copied())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("cannot start cargo: {error}"))?;
    let mut passed = 0;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line.map_err(|error| format!("cannot read what cargo prints: {error}"))?;
            println!("{line}");
            passed += passed_in(&line);
            see(&line);
        }
    }
    let status = child.wait().map_err(|error| format!("cannot wait for cargo: {error}"))?;
    if !status.success() {
        return Err(failed(what, arguments, variables));
    }
    println!("-- {what}: {passed} passed in {:.0?}", start.elapsed());
    Ok(passed)
}

/// Checks that a component of the toolchain is installed.
pub(crate) fn need_component(subcommand: &str, component: &str) -> Outcome {
    let found = command(&[subcommand, "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if found.is_ok_and(|status| status.success()) {
        return Ok(());
    }
    Err(format!("{component} is missing; install it with: rustup component add {component}"))
}

/// Returns the command for the running cargo, without the variables that cargo sets for this package. The build script of `ring`
/// reads them and would run again if they differ. Then TLS, the driver and the stores would be compiled again.
/// `api-snapshots` does the same.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    for (name, _) in env::vars_os().filter(|(name, _)| is_of_this_package(name)) {
        command.env_remove(name);
    }
    command
}

fn is_of_this_package(variable: &OsStr) -> bool {
    variable
        .to_str()
        .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"))
}

pub(crate) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

pub(crate) fn announce(what: &str) {
    println!("\n== {what}");
}

fn failed(what: &str, arguments: &[&str], variables: &[(&str, &str)]) -> String {
    let variables: String = variables.iter().map(|(name, value)| format!("{name}='{value}' ")).collect();
    format!("\nfailed: {what}\nrepeat it with: {variables}cargo {}", arguments.join(" "))
}

/// Returns the number in `test result: ok. 12 passed; ...`, or 0 for another line.
pub(crate) fn passed_in(line: &str) -> u64 {
    line.strip_prefix("test result: ")
        .and_then(|rest| rest.split_once(". ")?.1.split_once(" passed"))
        .and_then(|(count, _)| count.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_passed() {
        let line =
            "test result: ok. 12 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s";
        assert_eq!(passed_in(line), 12);
        assert_eq!(passed_in("test result: FAILED. 3 passed; 1 failed; 0 ignored"), 3);
        assert_eq!(passed_in("test a ... ok"), 0);
    }

    #[test]
    fn one_run_tells_all_that_failed() {
        assert_eq!(sum([Ok(2), Ok(3)]), Ok(5));
        let failed = sum([Err("a".to_owned()), Ok(3), Err("b".to_owned())]);
        assert_eq!(failed, Err("a\nb".to_owned()));
    }

    #[test]
    fn cargo_is_not_told_of_this_package() {
        let told: Vec<_> =
            env::vars_os().map(|(name, _)| name).filter(|name| is_of_this_package(name)).collect();
        assert!(told.iter().any(|name| name == "CARGO_MANIFEST_DIR"), "{told:?}");
        let command = command(&["build"]);
        let kept = told.iter().filter(|name| !command.get_envs().any(|set| set == (name, None))).count();
        assert_eq!(kept, 0, "{command:?}");
    }

    #[test]
    fn says_how_to_repeat() {
        let text = failed("documentation", &["doc", "--locked"], &[("RUSTDOCFLAGS", "-D warnings")]);
        assert!(text.ends_with("RUSTDOCFLAGS='-D warnings' cargo doc --locked"), "{text}");
    }
}
