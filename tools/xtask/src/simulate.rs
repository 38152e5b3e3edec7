//! Schedules of the simulator, for as long as somebody wants.

use std::time::SystemTime;

use crate::metadata::Metadata;
use crate::step::{self, Outcome};

/// For how long if nobody says.
const MINUTES: &str = "1";

/// Plays schedules of the engine as `arguments` say.
pub(crate) fn run(arguments: &[&str]) -> Outcome {
    let variables = variables(arguments)?;
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    // The features of `test`, so that nothing is compiled twice.
    let features = Metadata::read()?.all_features();
    let arguments = [
        "--workspace",
        "--exclude",
        "api-snapshots",
        "--features",
        &features,
        "--test",
        "simulation",
        "--",
        "--nocapture",
        "thousands_of_schedules",
    ];
    step::tests("simulation", &arguments, &variables).map(|_| ())
}

/// What the test reads from its environment.
fn variables(arguments: &[&str]) -> Outcome<Vec<(&'static str, String)>> {
    let mut variables = Vec::new();
    for pair in arguments.chunks(2) {
        let name = match pair {
            ["--minutes", _] => "LEASEHOLD_SIMULATE_MINUTES",
            ["--seed", _] => "LEASEHOLD_SIMULATE_SEED",
            ["--without", _] => "LEASEHOLD_SIMULATE_WITHOUT",
            _ => {
                return Err(
                    "usage: cargo xtask simulate [--minutes N] [--seed S] [--without NAMES]".to_owned()
                );
            }
        };
        if name != "LEASEHOLD_SIMULATE_WITHOUT" && pair[1].parse::<u64>().is_err() {
            return Err(format!("{} takes a whole number, not {:?}", pair[0], pair[1]));
        }
        variables.push((name, pair[1].to_owned()));
    }
    let has = |wanted| variables.iter().any(|(name, _)| *name == wanted);
    if !has("LEASEHOLD_SIMULATE_SEED") {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        if !has("LEASEHOLD_SIMULATE_MINUTES") {
            variables.push(("LEASEHOLD_SIMULATE_MINUTES", MINUTES.to_owned()));
        }
        // Far enough from the seeds of any other night.
        variables.push(("LEASEHOLD_SIMULATE_SEED", since.as_micros().to_string()));
    }
    Ok(variables)
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
