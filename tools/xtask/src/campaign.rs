//! What the jobs share that search from a seed, for as long as somebody wants: one target of the tests, which reads its
//! settings from the environment.

use std::time::SystemTime;

use crate::metadata::Metadata;
use crate::step::{self, Outcome};

/// An option of the job, the variable that the test reads, and which values it takes.
pub(crate) type Setting = (&'static str, &'static str, fn(&str) -> bool);

/// Variables with their values.
pub(crate) type Variables = Vec<(&'static str, String)>;

/// Runs the target `test` with these variables; `arguments` are for its executable.
pub(crate) fn run(test: &str, arguments: &[&str], variables: &Variables) -> Outcome {
    let variables: Vec<_> = variables.iter().map(|(name, value)| (*name, value.as_str())).collect();
    // The features of `test`, so that nothing is compiled twice.
    let features = Metadata::read()?.all_features();
    let own = [
        "--workspace",
        "--exclude",
        "api-snapshots",
        "--features",
        &features,
        "--test",
        test,
        "--",
        "--nocapture",
    ];
    step::tests(test, &[&own[..], arguments].concat(), &variables).map(drop)
}

/// Reads the options of a job; `usage` is for those who misspell them.
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

pub(crate) fn has(variables: &Variables, wanted: &str) -> bool {
    variables.iter().any(|(name, _)| *name == wanted)
}

/// Far enough from the seeds of any other night.
pub(crate) fn new_seed() -> u128 {
    SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros()
}
