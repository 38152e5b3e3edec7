//! Measures locks, claims and companions beside their usual alternatives, and writes the results.
//!
//! Measured tasks and the floor's tasks run on the runtime's threads.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout)]

mod claims;
mod command;
mod companions;
mod contest;
mod etcd;
mod files;
mod memory;
mod modes;
mod peers;
mod postgres;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use bench::machine::Machine;
use bench::page;
use bench::record::{Group, Record};
use clap::Parser as _;

/// The groups in the order of the page.
const GROUPS: &[&str] = &["memory", "files", "postgres", "etcd", "modes", "claims", "companions", "peers"];

/// Measures groups, prints the results, and writes them.
#[derive(Debug, clap::Parser)]
struct Options {
    /// The groups, each as GROUP or GROUP:SECTION. All without one.
    groups: Vec<String>,
    /// Shortens everything, to see whether it works. The figures mean nothing.
    #[arg(long)]
    smoke: bool,
    /// Writes the results into this file, after each group.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Keeps the results that the file already has of other groups. Then a section alone is only printed.
    #[arg(long, requires = "json")]
    keep: bool,
    /// Writes the page and its charts into this folder.
    #[arg(long, value_name = "FOLDER")]
    publish: Option<PathBuf>,
    /// Reads the results from this file instead of measuring.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["groups", "smoke", "json", "keep"])]
    read: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> ExitCode {
    // Spawned, because the main task runs beside the runtime's threads, which costs a context switch per reply.
    let outcome = tokio::spawn(async {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        match arguments[..] {
            ["child", "waiter", url, kind] => postgres::waiter(url, kind).await,
            ["child", "held", url, more] => postgres::held(url, more.parse().unwrap()).await,
            ["child", "worker", url, mode, id] => claims::worker(url, mode, id.parse().unwrap()).await,
            ["child", "readers", url, process] => modes::readers(url, process).await,
            ["child", "leader", url] => companions::leader(url).await,
            _ => return run(Options::parse()).await,
        }
        Ok(())
    });
    match outcome.await.unwrap() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

async fn run(options: Options) -> Result<(), String> {
    let record = match &options.read {
        Some(file) => read(file)?,
        None => measure(&options).await?,
    };
    match &options.publish {
        Some(folder) => page::publish(&record, folder),
        None => Ok(()),
    }
}

fn read(file: &Path) -> Result<Record, String> {
    let failed = |error: &dyn std::fmt::Display| format!("cannot read {}: {error}", file.display());
    let text = fs::read_to_string(file).map_err(|error| failed(&error))?;
    serde_json::from_str(&text).map_err(|error| failed(&error))
}

fn write(record: &Record, file: &Path) -> Result<(), String> {
    let text = serde_json::to_string_pretty(record).map_err(|error| error.to_string())?;
    fs::write(file, text).map_err(|error| format!("cannot write {}: {error}", file.display()))
}

/// Returns a record for this run, with the results that are kept.
fn earlier(options: &Options) -> Result<Record, String> {
    let file = options.json.as_ref().filter(|file| options.keep && file.exists());
    let kept = file.map(|file| read(file)).transpose()?;
    // Shortened results must not look like the others.
    let groups = kept.filter(|kept| kept.smoke == options.smoke).map(|kept| kept.groups).unwrap_or_default();
    Ok(Record { machine: Machine::this(), smoke: options.smoke, groups })
}

async fn measure(options: &Options) -> Result<Record, String> {
    if options.smoke {
        bench::only_smoke();
    }
    let (mut record, mut failed) = (earlier(options)?, Vec::new());
    for (name, sections) in chosen(&options.groups)? {
        println!("\n== {name}");
        let is_recorded = !options.keep || sections == Sections::default();
        // Runs as a task, because a panic must not end the other groups.
        let Ok(group) = tokio::spawn(measured(name, sections)).await else {
            failed.push(name);
            continue;
        };
        if is_recorded {
            replace(&mut record.groups, group);
        }
        if let Some(file) = &options.json {
            write(&record, file)?;
        }
    }
    if failed.is_empty() {
        return Ok(record);
    }
    Err(format!("failed: {}; measure these groups again", failed.join(", ")))
}

/// Measures a group and prints its results.
async fn measured(name: &'static str, sections: Sections) -> Group {
    let (begun, mut group) = (Instant::now(), Group::new(name));
    match name {
        "memory" => memory::measure(&sections, &mut group).await,
        "files" => files::measure(&sections, &mut group).await,
        "postgres" => postgres::measure(&sections, &mut group).await,
        "etcd" => etcd::measure(&sections, &mut group).await,
        "modes" => modes::measure(&sections, &mut group).await,
        "claims" => claims::measure(&sections, &mut group).await,
        "companions" => companions::measure(&sections, &mut group).await,
        _ => peers::measure(&sections, &mut group).await,
    }
    group.seconds = begun.elapsed().as_secs_f64();
    page::print(&group);
    println!("{name} took {:.0} s", group.seconds);
    group
}

/// Puts the group at its place in the order of the page, instead of earlier results.
fn replace(groups: &mut Vec<Group>, group: Group) {
    groups.retain(|other| other.name != group.name);
    groups.push(group);
    groups.sort_by_key(|group| GROUPS.iter().position(|name| *name == group.name));
}

/// The sections of a group to run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Sections(Vec<String>);

impl Sections {
    /// Returns whether to run the section.
    fn want(&self, section: &str) -> bool {
        self.0.is_empty() || self.0.iter().any(|wanted| wanted == section)
    }

    /// Returns whether to run a section that cannot be shortened to seconds.
    fn want_long(&self, section: &str) -> bool {
        self.want(section) && (!bench::is_smoke() || !self.0.is_empty())
    }
}

/// Returns the groups to measure in the page's order, each with its sections.
fn chosen(words: &[String]) -> Result<Vec<(&'static str, Sections)>, String> {
    let named: Vec<(&str, Option<&str>)> = words
        .iter()
        .map(|word| {
            word.split_once(':').map_or((word.as_str(), None), |(group, section)| (group, Some(section)))
        })
        .collect();
    if let Some((unknown, _)) = named.iter().find(|(group, _)| !GROUPS.contains(group)) {
        return Err(format!("there is no group {unknown:?}; there are: {}", GROUPS.join(", ")));
    }
    let of = |group: &'static str| {
        let sections: Vec<Option<&str>> =
            named.iter().filter(|(name, _)| *name == group).map(|(_, section)| *section).collect();
        // A group without a section means all of its sections.
        let all = sections.contains(&None);
        let names = sections.iter().flatten().filter(|_| !all).map(|&name| name.to_owned()).collect();
        (words.is_empty() || !sections.is_empty()).then_some((group, Sections(names)))
    };
    Ok(GROUPS.iter().copied().filter_map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sections(names: &[&str]) -> Sections {
        Sections(names.iter().map(|&name| name.to_owned()).collect())
    }

    #[test]
    fn groups_are_measured_in_the_order_of_the_page_with_the_sections_that_are_named() {
        let of = |words: &[&str]| chosen(&sections(words).0);
        assert_eq!(of(&[]).unwrap().len(), GROUPS.len());
        assert_eq!(
            of(&["postgres:hot", "memory", "postgres:held"]),
            Ok(vec![("memory", sections(&[])), ("postgres", sections(&["hot", "held"]))])
        );
        assert_eq!(of(&["postgres:hot", "postgres"]), Ok(vec![("postgres", sections(&[]))]));
        assert!(of(&["mysql"]).is_err_and(|error| error.contains("memory, files, postgres")));
    }

    #[test]
    fn new_results_replace_the_earlier_ones_of_their_group() {
        let mut groups = vec![Group::new("peers"), Group::new("memory")];
        replace(&mut groups, Group { seconds: 2.0, ..Group::new("peers") });
        replace(&mut groups, Group::new("files"));
        let found: Vec<_> = groups.iter().map(|group| (group.name.as_str(), group.seconds)).collect();
        assert_eq!(found, [("memory", 0.0), ("files", 0.0), ("peers", 2.0)]);
    }

    #[test]
    fn without_a_named_section_each_one_is_wanted() {
        assert!(sections(&[]).want("hot") && sections(&["hot"]).want("hot"));
        assert!(!sections(&["hot"]).want("held"));
    }
}
