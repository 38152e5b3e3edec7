//! Disturbed processes on real stores, for as long as somebody wants.

use std::time::SystemTime;

use crate::metadata::Metadata;
use crate::servers;
use crate::step::{self, Outcome};

/// The stores that are tortured.
const STORES: [&str; 5] = ["files", "session", "transaction", "row", "lease"];

/// Tortures the stores as `arguments` say.
pub(crate) fn run(arguments: &[&str]) -> Outcome {
    let variables = variables(arguments)?;
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    servers::ensure()?;
    // The features of `test`, so that nothing is compiled twice.
    let features = Metadata::read()?.all_features();
    let arguments = [
        "--workspace",
        "--exclude",
        "api-snapshots",
        "--features",
        &features,
        "--test",
        "torture",
        "--",
        "--nocapture",
        // One after the other: a fault of one store's server must not be the slowness of another's.
        "--test-threads=1",
    ];
    step::tests("torture", &arguments, &variables).map(|_| ())
}

/// What the test reads from its environment.
fn variables(arguments: &[&str]) -> Outcome<Vec<(&'static str, String)>> {
    let mut variables = Vec::new();
    for pair in arguments.chunks(2) {
        let name = match pair {
            ["--minutes", _] => "LEASEHOLD_TORTURE_MINUTES",
            ["--seed", _] => "LEASEHOLD_TORTURE_SEED",
            ["--store", store] if STORES.contains(store) => "LEASEHOLD_TORTURE_STORE",
            _ => {
                return Err(format!(
                    "usage: cargo xtask torture [--minutes N] [--seed S] [--store {}]",
                    STORES.join("|")
                ));
            }
        };
        if name != "LEASEHOLD_TORTURE_STORE" && pair[1].parse::<u32>().is_err() {
            return Err(format!("{} takes a whole number below 2^32, not {:?}", pair[0], pair[1]));
        }
        variables.push((name, pair[1].to_owned()));
    }
    if !variables.iter().any(|(name, _)| *name == "LEASEHOLD_TORTURE_SEED") {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        variables.push(("LEASEHOLD_TORTURE_SEED", (since.as_secs() & 0xffff_ffff).to_string()));
    }
    Ok(variables)
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
