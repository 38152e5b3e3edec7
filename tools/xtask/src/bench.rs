//! The job `bench`: the package `tools/bench` beside its peers.

use std::path::Path;

use crate::metadata::Metadata;
use crate::servers;
use crate::step::{Outcome, cargo};

const USAGE: &str = "usage: cargo xtask bench [GROUP[:SECTION]..] [--smoke] [--json FILE] [--publish]";

/// The groups that start no Postgres.
const WITHOUT_POSTGRES: [&str; 3] = ["memory", "files", "etcd"];

/// Builds the programs that measure, and runs them with the options in `arguments`.
pub(crate) fn run(arguments: &[&str]) -> Outcome {
    let options = Options::read(arguments)?;
    let needs_postgres = |word: &&str| !WITHOUT_POSTGRES.contains(&group_of(word));
    if options.groups.is_empty() || options.groups.iter().any(needs_postgres) {
        servers::ensure_postgres()?;
    }
    // A shortened run uses the profile of the tests, whose dependencies CI has built. The other one takes minutes to build.
    let profile = if options.smoke { "tests" } else { "bench" };
    let package = ["--locked", "--profile", profile, "--package", "bench"];
    cargo("the programs that measure", &[&["build"], &package[..], &["--bins"]].concat())?;
    let metadata = Metadata::read()?;
    let json = match options.json {
        Some(file) => file.to_owned(),
        None => format!("{}/bench.json", metadata.target_directory()),
    };
    let run = ["--bin", "measure", "--", "--json", json.as_str()];
    let mut program = [&["run", "--quiet"], &package[..], &run[..], &options.groups[..]].concat();
    program.extend(options.smoke.then_some("--smoke"));
    // One group after the other makes a whole page.
    let is_part = !options.groups.is_empty() && options.json.is_none();
    program.extend(is_part.then_some("--keep"));
    let documents = documents();
    if options.publish {
        program.extend(["--publish", documents.as_str()]);
    }
    cargo("benchmarks", &program)?;
    println!("the results are in {json}");
    Ok(())
}

/// Returns the folder of documents.
fn documents() -> String {
    // Goes up two folders, because this package is `tools/xtask`.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap_or(Path::new("."));
    root.join("docs").display().to_string()
}

/// The options of the job.
#[derive(Debug, Default, PartialEq, Eq)]
struct Options<'a> {
    /// Groups or sections of groups. All without one.
    groups: Vec<&'a str>,
    smoke: bool,
    json: Option<&'a str>,
    publish: bool,
}

impl<'a> Options<'a> {
    fn read(arguments: &[&'a str]) -> Outcome<Self> {
        let mut options = Self::default();
        let mut words = arguments.iter().copied();
        while let Some(word) = words.next() {
            match word {
                "--smoke" => options.smoke = true,
                "--publish" => options.publish = true,
                "--json" => options.json = Some(words.next().ok_or(USAGE)?),
                word if word.starts_with('-') => return Err(format!("unknown option {word}\n{USAGE}")),
                group => options.groups.push(group),
            }
        }
        if options.smoke && options.publish {
            return Err(format!(
                "the figures of a shortened run mean nothing, so they are not published\n{USAGE}"
            ));
        }
        Ok(options)
    }
}

fn group_of(word: &str) -> &str {
    word.split(':').next().unwrap_or(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_and_options_come_in_any_order() {
        let read = |words: &[&'static str]| Options::read(words);
        assert_eq!(read(&[]), Ok(Options::default()));
        let options =
            Options { groups: vec!["memory", "postgres:hot"], smoke: true, json: Some("f"), publish: false };
        assert_eq!(read(&["memory", "--smoke", "--json", "f", "postgres:hot"]), Ok(options));
        assert!(read(&["--json"]).is_err() && read(&["--fast"]).is_err());
        assert!(read(&["--smoke", "--publish"]).is_err(), "figures of a shortened run are not published");
        assert_eq!(group_of("postgres:hot"), "postgres");
    }
}
