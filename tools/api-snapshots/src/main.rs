//! Compares the public interface of the main crates with the snapshots in `docs/public-api`.
//!
//! The items come from rustdoc's JSON, whose format is not stable. If the toolchain writes another version of the
//! format than this program reads, the comparison is skipped without failure.

mod rustdoc;
mod snapshot;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use snapshot::Snapshot;

const USAGE: &str = "usage: api-snapshots check|update FEATURES TARGET_DIRECTORY (cargo xtask api runs it)";

/// The crates that users depend on. They export the stores' crates.
const PACKAGES: [&str; 3] = ["leasehold-api", "leasehold-engine", "leasehold"];

fn main() -> ExitCode {
    // This program replaces rustdoc if cargo runs it as RUSTDOC.
    if let Some(code) = rustdoc::stand_in() {
        return code;
    }
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match &arguments[..] {
        [job, features, target] if job == "check" => run(features, Path::new(target), check),
        [job, features, target] if job == "update" => run(features, Path::new(target), update),
        _ => Err(USAGE.to_owned()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("{message}");
            ExitCode::FAILURE
        }
    }
}

fn run(features: &str, target: &Path, job: fn(&[Snapshot]) -> Result<(), String>) -> Result<(), String> {
    let why_not = rustdoc::why_not();
    rustdoc::document(features, why_not.is_none())?;
    if let Some(reason) = why_not {
        println!("-- public interface: not compared, {reason}");
        return Ok(());
    }
    let snapshots: Result<Vec<_>, _> = PACKAGES
        .iter()
        .map(|package| {
            let json = target.join("doc").join(format!("{}.json", package.replace('-', "_")));
            Snapshot::read(file_of(package), &json)
        })
        .collect();
    job(&snapshots?)
}

fn check(snapshots: &[Snapshot]) -> Result<(), String> {
    let changes: String = snapshots.iter().map(Snapshot::changes).collect();
    if changes.is_empty() {
        let items: usize = snapshots.iter().map(Snapshot::len).sum();
        println!("-- public interface: {items} items of {} crates, as in docs/public-api", snapshots.len());
        return Ok(());
    }
    Err(format!(
        "failed: the public interface is not that of docs/public-api\n{changes}\
         If that is meant, see \"Change the public interface\" in CONTRIBUTING.md, then: cargo xtask api --update"
    ))
}

fn update(snapshots: &[Snapshot]) -> Result<(), String> {
    for snapshot in snapshots {
        let changes = snapshot.changes();
        print!("{changes}");
        snapshot.write()?;
    }
    println!("-- public interface: docs/public-api is up to date");
    Ok(())
}

fn file_of(package: &str) -> PathBuf {
    // Set by `cargo run`. The folder in which this program was compiled is possibly another one, or gone.
    let folder = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default();
    // Goes up two folders, because this package is `tools/api-snapshots`.
    let root = folder.ancestors().nth(2).unwrap_or(Path::new("."));
    root.join("docs/public-api").join(format!("{package}.txt"))
}
