//! Common code of the jobs that search from a seed for a given time. Each job runs tests, which read their settings from
//! the environment.

use std::time::SystemTime;

use crate::metadata::{API_SNAPSHOTS, Metadata};
use crate::step::{self, Outcome};

/// An option of the job, the variable that the test reads, and the check of its value.
pub(crate) type Setting = (&'static str, &'static str, fn(&str) -> bool);

/// Variables with their values.
pub(crate) type Variables = Vec<(&'static str, String)>;

/// Runs the test target `test` with these variables, and passes `arguments` to its executable.
pub(crate) fn run(test: &str, arguments: &[&str], variables: &Variables) -> Outcome {
    run_seen(test, &["--test", test], arguments, variables, |_| {}).map(drop)
}

/// Runs these `targets` of all packages and passes each line of output to `see`. Returns the number of passed tests.
pub(crate) fn run_seen(
    what: &str,
    targets: &[&str],
    arguments: &[&str],
    variables: &Variables,
    see: impl FnMut(&str),
) -> Outcome<u64> {
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    // Uses the features of the job `test`, because others would compile everything again.
    let features = Metadata::read()?.all_features();
    let own = ["--workspace", "--exclude", API_SNAPSHOTS, "--features", &features];
    let arguments = [&own[..], targets, &["--", "--nocapture"], arguments].concat();
    step::tests_seen(what, &arguments, &variables, see)
}

/// Reads the options of a job. The error for unknown options contains `usage`.
pub(crate) fn read(arguments: &[&str], settings: &[Setting], usage: &str) -> Outcome<Variables> {
    let mut variables = Vec::new();
    for pair in arguments.chunks(2) {
        let setting = settings.iter().find(|(option, ..)| *option == pair[0]);
        let (Some((option, variable, takes)), [_, value]) = (setting, pair) else {
            return Err(format!("usage: cargo xtask {usage}"));
        };
        if !takes(value) {
            return Err(format!("{option} does not take {value:?}; usage: cargo xtask {usage}"));
        }
        variables.push((*variable, (*value).to_owned()));
    }
    Ok(variables)
}

/// Reads the options like [`read`], for a job in which one `seed` is one case. Without a seed, adds a new one and the
/// default of `minutes`, so the job continues from that seed for that time.
pub(crate) fn read_search(
    arguments: &[&str],
    settings: &[Setting],
    usage: &str,
    seed: &'static str,
    minutes: (&'static str, &str),
) -> Outcome<Variables> {
    let mut variables = read(arguments, settings, usage)?;
    if !has(&variables, seed) {
        if !has(&variables, minutes.0) {
            variables.push((minutes.0, minutes.1.to_owned()));
        }
        variables.push((seed, new_seed().to_string()));
    }
    Ok(variables)
}

/// Returns whether `value` is valid for minutes and seeds.
pub(crate) fn is_number(value: &str) -> bool {
    value.parse::<u64>().is_ok()
}

pub(crate) fn has(variables: &Variables, wanted: &str) -> bool {
    variables.iter().any(|(name, _)| *name == wanted)
}

/// Returns a seed from the clock, far from the seeds of earlier runs.
pub(crate) fn new_seed() -> u128 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros()
}
