//! The job `torture`: disturbed processes on real stores.

use test_setup::torture::{FAULTS, STORES};

use crate::campaign::{self, Setting, Variables, has, new_seed};
use crate::metadata::{API_SNAPSHOTS, Metadata};
use crate::servers;
use crate::step::{self, Outcome};

const SEED: &str = "LEASEHOLD_TORTURE_SEED";
const MINUTES: (&str, &str) = ("LEASEHOLD_TORTURE_MINUTES", "1");
const SETTINGS: [Setting; 4] = [
    ("--minutes", MINUTES.0, is_number),
    ("--seed", SEED, is_number),
    ("--store", "LEASEHOLD_TORTURE_STORE", |value| STORES.contains(&value)),
    ("--faults", "LEASEHOLD_TORTURE_FAULTS", |value| value.split(',').all(|name| FAULTS.contains(&name))),
];

/// Tortures the stores with the options in `arguments`.
pub(crate) fn run(arguments: &[&str]) -> Outcome {
    let variables = variables(arguments)?;
    servers::ensure()?;
    // Builds the command together with the test, which depends on more, because nothing is compiled twice then.
    let features = Metadata::read()?.all_features();
    let build =
        ["build", "--profile", "tests", "--workspace", "--exclude", API_SNAPSHOTS, "--features", &features];
    step::cargo("the command", &[&build[..], &["--bin", "leasehold", "--test", "torture"]].concat())?;
    campaign::run("torture", &["--exact", "stores_keep_their_promises"], &variables)
}

fn variables(arguments: &[&str]) -> Outcome<Variables> {
    let mut variables = campaign::read(arguments, &SETTINGS, &usage())?;
    if !has(&variables, SEED) {
        variables.push((SEED, (new_seed() & 0xffff_ffff).to_string()));
    }
    if !has(&variables, MINUTES.0) {
        variables.push((MINUTES.0, MINUTES.1.to_owned()));
    }
    Ok(variables)
}

fn usage() -> String {
    format!(
        "torture [--minutes N] [--seed S] [--store {}] [--faults NAME,NAME,..]\n\
         numbers are below 2^32; faults are {}",
        STORES.join("|"),
        FAULTS.join(", ")
    )
}

fn is_number(value: &str) -> bool {
    value.parse::<u32>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_drawn_unless_one_is_named() {
        let seed = ("LEASEHOLD_TORTURE_SEED", "7".to_owned());
        let minutes = ("LEASEHOLD_TORTURE_MINUTES", "1".to_owned());
        assert_eq!(variables(&["--seed", "7"]), Ok(vec![seed, minutes]));
        let names: Vec<_> = variables(&["--store", "lease", "--minutes", "3"])
            .unwrap()
            .iter()
            .map(|(name, _)| *name)
            .collect();
        assert_eq!(names, ["LEASEHOLD_TORTURE_STORE", "LEASEHOLD_TORTURE_MINUTES", "LEASEHOLD_TORTURE_SEED"]);
        assert!(variables(&["--store", "paper"]).is_err() && variables(&["--minutes", "long"]).is_err());
        assert!(variables(&["--minutes"]).is_err());
    }

    #[test]
    fn a_fault_that_is_misspelt_is_an_error_that_lists_all() {
        let error = variables(&["--faults", "kill,flood"]).unwrap_err();
        assert!(error.contains("\"kill,flood\"") && error.contains("lose-reply, delay, promote"), "{error}");
        assert!(variables(&["--faults", "kill,lose-reply"]).is_ok());
    }
}
