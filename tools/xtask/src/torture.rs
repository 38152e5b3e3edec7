//! Disturbed processes on real stores.

use crate::campaign::{self, Setting, Variables, has, new_seed};
use crate::servers;
use crate::step::Outcome;

/// The stores that are tortured.
const STORES: [&str; 5] = ["files", "session", "transaction", "row", "lease"];

const SEED: &str = "LEASEHOLD_TORTURE_SEED";
const SETTINGS: [Setting; 3] = [
    ("--minutes", "LEASEHOLD_TORTURE_MINUTES", is_number),
    ("--seed", SEED, is_number),
    ("--store", "LEASEHOLD_TORTURE_STORE", |value| STORES.contains(&value)),
];
const USAGE: &str =
    "torture [--minutes N] [--seed S] [--store files|session|transaction|row|lease], numbers below 2^32";

/// Tortures the stores as `arguments` say.
pub(crate) fn run(arguments: &[&str]) -> Outcome {
    let variables = variables(arguments)?;
    servers::ensure()?;
    // One after the other: a fault of one store's server must not be the slowness of another's.
    campaign::run("torture", &["--test-threads=1"], &variables)
}

fn variables(arguments: &[&str]) -> Outcome<Variables> {
    let mut variables = campaign::read(arguments, &SETTINGS, USAGE)?;
    if !has(&variables, SEED) {
        variables.push((SEED, (new_seed() & 0xffff_ffff).to_string()));
    }
    Ok(variables)
}

fn is_number(value: &str) -> bool {
    value.parse::<u32>().is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_is_drawn_unless_one_is_named() {
        let given = ("LEASEHOLD_TORTURE_SEED", "7".to_owned());
        assert_eq!(variables(&["--seed", "7"]), Ok(vec![given]));
        let names: Vec<_> = variables(&["--store", "lease"]).unwrap().iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["LEASEHOLD_TORTURE_STORE", "LEASEHOLD_TORTURE_SEED"]);
        assert!(variables(&["--store", "paper"]).is_err() && variables(&["--minutes", "long"]).is_err());
        assert!(variables(&["--minutes"]).is_err());
    }
}
