//! Running one step of a job: say what it is, run it, say how to repeat it when it fails.

use std::env;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Instant;

/// What went wrong, for people.
pub(crate) type Outcome<T = ()> = Result<T, String>;

/// Runs cargo with its output shown.
pub(crate) fn cargo(what: &str, arguments: &[&str]) -> Outcome {
    announce(what);
    let start = Instant::now();
    let status = command(arguments).status();
    match status {
        Ok(status) if status.success() => {
            println!("-- {what}: passed in {:.0?}", start.elapsed());
            Ok(())
        }
        Ok(_) => Err(failed(what, arguments, &[])),
        Err(error) => Err(format!("cannot start cargo: {error}")),
    }
}

/// Runs `cargo test` in the profile of the tests, shows its output, and counts the tests that passed.
pub(crate) fn tests(what: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Outcome<u64> {
    tests_seen(what, arguments, variables, |_| {})
}

/// The same, and `see` gets each line.
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

/// Checks that a component of the toolchain is there.
pub(crate) fn need_component(subcommand: &str, component: &str) -> Outcome {
    let found = command(&[subcommand, "--version"]).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if found.is_ok_and(|status| status.success()) {
        return Ok(());
    }
    Err(format!("{component} is missing; install it with: rustup component add {component}"))
}

/// The cargo that runs us.
pub(crate) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(arguments);
    command
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

/// The number in `test result: ok. 12 passed; ...`.
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
    fn says_how_to_repeat() {
        let text = failed("documentation", &["doc", "--locked"], &[("RUSTDOCFLAGS", "-D warnings")]);
        assert!(text.ends_with("RUSTDOCFLAGS='-D warnings' cargo doc --locked"), "{text}");
    }
}
