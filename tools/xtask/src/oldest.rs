//! Checks the oldest Rust version that each published package declares (`rust-version`). No dependency may need a newer one.
//! If a toolchain of that version is installed, the packages must build with it.

use std::collections::BTreeMap;
use std::process::Command;

use crate::metadata::{self, Metadata, name};
use crate::step::{Outcome, announce, command};

pub(crate) fn check() -> Outcome {
    announce("the oldest Rust of each package");
    let ours = Metadata::read()?;
    let (all, _) = Metadata::read_with_dependencies()?;
    let needs: BTreeMap<String, Version> = all
        .packages()
        .filter_map(|package| {
            let called = format!("{} v{}", name(package), package["version"].as_str()?);
            Some((called, version(package["rust_version"].as_str()?)?))
        })
        .collect();
    let this = metadata::toolchain("release: ")?;
    let (mut declared, mut wrong) = (BTreeMap::<Version, Vec<String>>::new(), Vec::new());
    for package in ours.published() {
        let package_name = name(package);
        let Some(oldest) = package["rust_version"].as_str().and_then(version) else {
            wrong.push(format!("{package_name} declares no rust-version"));
            continue;
        };
        if version(&this).is_some_and(|this| oldest > this) {
            wrong.push(format!("{package_name} declares Rust {}, and this is {this}", written(oldest)));
        }
        for dependency in dependencies(&package_name)? {
            if let Some(needed) = needs.get(&dependency).filter(|needed| **needed > oldest) {
                let (oldest, needed) = (written(oldest), written(*needed));
                wrong.push(format!("{package_name} declares Rust {oldest}, and {dependency} needs {needed}"));
            }
        }
        declared.entry(oldest).or_default().push(package_name);
    }
    if !wrong.is_empty() {
        return Err(format!("failed: the oldest Rust\n  {}", wrong.join("\n  ")));
    }
    let installed = installed();
    for (oldest, packages) in declared {
        let (version, list) = (written(oldest), packages.join(", "));
        match installed.iter().find(|toolchain| is_of(toolchain, &version)) {
            Some(toolchain) => build(toolchain, &packages, &ours)?,
            None => println!(
                "-- not built with Rust {version}, because that toolchain is missing (rustup toolchain install {version}); \
                 no dependency needs a newer one: {list}"
            ),
        }
    }
    Ok(())
}

type Version = (u32, u32, u32);

/// Parses `1.85` or `1.85.1`.
fn version(text: &str) -> Option<Version> {
    let mut numbers = text.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??, numbers.next().unwrap_or(Some(0))?))
}

fn written((major, minor, patch): Version) -> String {
    if patch == 0 { format!("{major}.{minor}") } else { format!("{major}.{minor}.{patch}") }
}

/// Returns the dependencies of a package with its default features, as `NAME vVERSION`.
fn dependencies(package: &str) -> Outcome<Vec<String>> {
    let tree = [
        "tree",
        "--locked",
        "--offline",
        "--edges",
        "normal,build",
        "--prefix",
        "none",
        "--package",
        package,
    ];
    let output = command(&tree).output().map_err(|error| format!("cannot start cargo: {error}"))?;
    if !output.status.success() {
        return Err(format!("cargo {}:\n{}", tree.join(" "), String::from_utf8_lossy(&output.stderr)));
    }
    let of = |line: &str| line.split(' ').take(2).collect::<Vec<_>>().join(" ");
    Ok(String::from_utf8_lossy(&output.stdout).lines().map(of).collect())
}

/// Returns the names of the toolchains installed by rustup.
fn installed() -> Vec<String> {
    let output = Command::new("rustup").args(["toolchain", "list"]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    text.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect()
}

/// Returns whether a toolchain, such as `1.85.1-x86_64-unknown-linux-gnu`, has a version, such as `1.85`.
fn is_of(toolchain: &str, version: &str) -> bool {
    toolchain.strip_prefix(version).is_some_and(|rest| rest.starts_with('-') || rest.starts_with('.'))
}

fn build(toolchain: &str, packages: &[String], metadata: &Metadata) -> Outcome {
    let target = format!("{}/oldest", metadata.target_directory());
    let arguments = ["run", toolchain, "cargo", "check", "--quiet", "--locked", "--target-dir", &target];
    let packages = packages.iter().flat_map(|package| ["--package", package]);
    let arguments: Vec<&str> = arguments.into_iter().chain(packages).collect();
    let status = Command::new("rustup").args(&arguments).env_remove("CARGO").env_remove("RUSTC").status();
    if !status.is_ok_and(|status| status.success()) {
        return Err(format!("failed: the oldest Rust\nrepeat it with: rustup {}", arguments.join(" ")));
    }
    println!("-- built with {toolchain}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_number() {
        assert_eq!(version("1.85"), Some((1, 85, 0)));
        assert!(version("1.100") > version("1.99.1"));
        assert_eq!((version("1"), version("nightly")), (None, None));
        assert_eq!((written((1, 85, 0)), written((1, 85, 1))), ("1.85".to_owned(), "1.85.1".to_owned()));
    }

    #[test]
    fn toolchains_are_of_their_version() {
        for (toolchain, is_it) in
            [("1.85-x86_64", true), ("1.85.1-x86_64", true), ("1.850-x", false), ("stable-x", false)]
        {
            assert_eq!(is_of(toolchain, "1.85"), is_it, "{toolchain}");
        }
    }
}
