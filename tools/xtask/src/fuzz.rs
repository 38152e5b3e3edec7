//! The job `fuzz`: nearly valid inputs for all code that parses external input.

use crate::campaign::{self, Setting, Variables, is_number};
use crate::servers;
use crate::step::Outcome;

/// Variable and default value of the minutes for each target.
const MINUTES: (&str, &str) = ("LEASEHOLD_FUZZ_MINUTES", "1");
const SEED: &str = "LEASEHOLD_FUZZ_SEED";
/// Key under which `--target` is kept, to select the tests. The tests do not read such a variable.
const TARGET: &str = "LEASEHOLD_FUZZ_TARGET";

const SETTINGS: [Setting; 3] = [
    ("--minutes", MINUTES.0, is_number),
    ("--seed", SEED, is_number),
    ("--target", TARGET, |name| !name.is_empty()),
];
const USAGE: &str = "fuzz [--minutes N] [--seed S] [--target NAME]";

/// Prefix of the names of the targets, which are tests of the libraries and of `tests/fuzz`.
const PREFIX: &str = "fuzz_";
const TARGETS: [&str; 3] = ["--lib", "--test", "fuzz"];

/// Fuzzes the targets with the options in `arguments`.
pub(crate) fn run(arguments: &[&str]) -> Outcome {
    let mut variables = variables(arguments)?;
    let target = variables.iter().position(|(name, _)| *name == TARGET).map(|at| variables.remove(at).1);
    servers::ensure()?;
    let filter = format!("{PREFIX}{}", target.as_deref().unwrap_or_default());
    let mut total = 0;
    // One target at a time, because each uses all processors.
    let see = |line: &str| total += inputs_in(line);
    let targets = campaign::run_seen("fuzzing", &TARGETS, &["--test-threads=1", &filter], &variables, see)?;
    if targets == 0 {
        return Err(format!("there is no target {}", target.unwrap_or_default()));
    }
    println!("\n{total} inputs of {targets} targets");
    Ok(())
}

fn variables(arguments: &[&str]) -> Outcome<Variables> {
    campaign::read_search(arguments, &SETTINGS, USAGE, SEED, MINUTES)
}

/// Returns the number of new inputs in `fuzz: keys: 3 kept inputs and 20032 new ones in ...`. The line can start with the
/// test's name.
fn inputs_in(line: &str) -> u64 {
    let count = line.split_once("fuzz: ").and_then(|(_, rest)| rest.split_once(" kept inputs and "));
    count.and_then(|(_, rest)| rest.split_once(" new ones")?.0.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inputs_are_added_up() {
        let line =
            "test fuzz::fuzz_keys ... fuzz: keys: 3 kept inputs and 20032 new ones in 1.0s, seeds from 0 on";
        assert_eq!(inputs_in(line), 20_032);
        assert_eq!(inputs_in("test fuzz::fuzz_keys ... ok"), 0);
    }

    #[test]
    fn one_seed_is_one_input_and_without_one_it_goes_on() {
        let names = |arguments: &[&str]| -> Vec<&str> {
            variables(arguments).unwrap_or_default().iter().map(|(name, _)| *name).collect()
        };
        assert_eq!(names(&["--seed", "7", "--target", "keys"]), [SEED, TARGET]);
        assert_eq!(names(&[]), [MINUTES.0, SEED]);
        assert!(variables(&["--minutes", "long"]).is_err() && variables(&["--target"]).is_err());
    }
}
