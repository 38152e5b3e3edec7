//! The job `simulate`: schedules of the simulator.

use crate::campaign::{self, Setting, Variables, is_number};
use crate::step::Outcome;

/// Variable and default value of the minutes.
const MINUTES: (&str, &str) = ("LEASEHOLD_SIMULATE_MINUTES", "1");

const SEED: &str = "LEASEHOLD_SIMULATE_SEED";
const SETTINGS: [Setting; 3] = [
    ("--minutes", MINUTES.0, is_number),
    ("--seed", SEED, is_number),
    ("--without", "LEASEHOLD_SIMULATE_WITHOUT", |_| true),
];
const SCOPES: [Setting; 1] = [("--choices", "LEASEHOLD_SIMULATE_CHOICES", |_| true)];
const USAGE: &str = "simulate [--minutes N] [--seed S] [--without NAMES] | --all | --choices SCOPE:NUMBERS";

/// Optimises the suite, because schedules run for longer than another build of the suite takes.
const OPTIMISED: &str = "profile.tests.package.leasehold-conformance.opt-level=1";

/// Plays schedules with the options in `arguments`: schedules of seeds, or all of the small scopes.
pub(crate) fn run(arguments: &[&str]) -> Outcome {
    let (target, test, variables) = match arguments {
        ["--all"] => ("scopes", "every_schedule", vec![("LEASEHOLD_SIMULATE_ALL", "1".to_owned())]),
        ["--choices", ..] => ("scopes", "every_schedule", campaign::read(arguments, &SCOPES, USAGE)?),
        _ => ("simulation", "thousands_of_schedules", variables(arguments)?),
    };
    let targets = ["--config", OPTIMISED, "--test", target];
    campaign::run_seen("simulation", &targets, &[test], &variables, |_| {}).map(drop)
}

fn variables(arguments: &[&str]) -> Outcome<Variables> {
    campaign::read_search(arguments, &SETTINGS, USAGE, SEED, MINUTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_seed_is_played_alone_and_without_one_it_goes_on() {
        let names = |arguments: &[&str]| -> Vec<&str> {
            variables(arguments).unwrap_or_default().iter().map(|(name, _)| *name).collect()
        };
        assert_eq!(names(&["--seed", "7"]), ["LEASEHOLD_SIMULATE_SEED"]);
        assert_eq!(names(&[]), ["LEASEHOLD_SIMULATE_MINUTES", "LEASEHOLD_SIMULATE_SEED"]);
        assert_eq!(names(&["--minutes", "3"]), ["LEASEHOLD_SIMULATE_MINUTES", "LEASEHOLD_SIMULATE_SEED"]);
        assert!(variables(&["--seed"]).is_err() && variables(&["--minutes", "long"]).is_err());
    }
}
