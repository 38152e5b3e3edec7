//! The check of all dependencies: licences, sources, duplicate versions.

use std::collections::BTreeMap;

use spdx::{Expression, ParseMode};

use crate::metadata::{self, Metadata};
use crate::step::Outcome;

/// Licences accepted for dependencies, because they also bind the programs of users.
const ACCEPTED: [&str; 11] = [
    "MIT",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    // Only in benchmarks: xxhash-rust, which the client of Redis needs.
    "BSL-1.0",
    // Needed for data: the list of certificate authorities (webpki-roots, only with TLS).
    "CDLA-Permissive-2.0",
    "ISC",
    "Unicode-3.0",
    "Unlicense",
    "Zlib",
];

/// Crates that may occur in several versions, each with its cause. An entry that is no longer
/// needed is an error.
const DUPLICATES: [(&str, &str); 14] = [
    ("block-buffer", "of sha2, see there"),
    ("cpufeatures", "of sha2, see there"),
    ("crypto-common", "of sha2, see there"),
    ("digest", "of sha2, see there"),
    ("getrandom", "ring, only with TLS, still uses version 0.2"),
    ("hashbrown", "sqlx still uses version 0.16"),
    ("r-efi", "of rand, see there"),
    ("rand", "metrics-exporter-prometheus, only in tests, still uses version 0.9"),
    ("rand_core", "of rand, see there"),
    ("sha2", "sqlx still uses version 0.10, for checksums of migrations"),
    ("syn", "a build-time crate; jiff, tracing and zerocopy still use version 2"),
    ("synstructure", "rcgen, only in tests, still uses version 0.13"),
    ("unicode-width", "miette of protox, only in tests, still uses version 0.1"),
    ("windows-sys", "ring, only with TLS, still uses version 0.52"),
];

pub(crate) fn check() -> Outcome {
    println!("\n== dependencies: licences, sources, duplicate versions");
    let (metadata, complete) = Metadata::read_with_dependencies()?;
    if !complete {
        println!("offline: looking only at what this machine uses");
    }
    let mut problems = Vec::new();
    let mut versions: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    let mut count = 0;
    for package in metadata.packages() {
        let name = metadata::name(package);
        let version = package["version"].as_str().unwrap_or_default();
        let licence = package["license"].as_str().unwrap_or_default();
        count += 1;
        if !is_accepted(licence) {
            problems.push(format!("{name} {version} has the licence {licence:?}, which is not on our list"));
        }
        // Our own packages have no source.
        if package["source"].as_str().is_some_and(|source| !source.starts_with("registry+")) {
            problems.push(format!("{name} {version} does not come from a registry, so we could not publish"));
        }
        versions.entry(name).or_default().push(version);
    }
    for (name, versions) in &versions {
        let known = DUPLICATES.iter().any(|(known, _)| known == name);
        if versions.len() > 1 && !known {
            problems.push(format!("{name} is there in several versions: {}", versions.join(", ")));
        }
    }
    for (name, whose) in DUPLICATES {
        if complete && versions.get(name).is_none_or(|versions| versions.len() < 2) {
            problems.push(format!("{name} is not there twice any more; strike it from the list ({whose})"));
        }
    }
    if problems.is_empty() {
        println!("-- {count} packages, all well");
        return Ok(());
    }
    Err(format!("failed: dependencies\n  {}", problems.join("\n  ")))
}

/// Returns whether accepted licences satisfy the SPDX expression. An expression that cannot be read is not accepted.
fn is_accepted(expression: &str) -> bool {
    let mode = ParseMode { allow_unknown: true, ..ParseMode::LAX };
    Expression::parse_mode(expression, mode)
        .is_ok_and(|parsed| parsed.evaluate(|required| ACCEPTED.contains(&required.to_string().as_str())))
}

#[cfg(test)]
mod tests {
    use super::is_accepted;

    #[test]
    fn licence_expressions_are_satisfied_by_accepted_licences_alone() {
        for (expression, accepted) in [
            ("MIT/Apache-2.0", true),
            ("GPL-3.0", false),
            ("GPL-3.0 OR MIT", true),
            ("(MIT OR GPL-3.0) AND Unicode-3.0", true),
            ("MIT AND (GPL-3.0 OR LGPL-2.1)", false),
            ("Apache-2.0 WITH LLVM-exception", true),
            ("Apache-2.0 WITH Other-exception OR MIT", true),
            ("Apache-2.0 WITH Other-exception", false),
            ("", false),
            ("MIT MIT", false),
        ] {
            assert_eq!(is_accepted(expression), accepted, "{expression}");
        }
    }
}
