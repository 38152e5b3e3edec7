//! Finds the programs that tests start: servers and a browser.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const INSTALL_POSTGRES: &str = "no PostgreSQL server binaries (initdb, postgres) found. Install them:
  Debian, Ubuntu:  apt-get install postgresql
  Fedora, Red Hat: dnf install postgresql-server
  macOS:           brew install postgresql@17
or let LEASEHOLD_PG_BIN name the directory that has them";

const INSTALL_ISOLATIONTESTER: &str = "no isolationtester found beside the PostgreSQL server. Install it:
  Debian, Ubuntu:  apt-get install postgresql-client-NN, with the server's version, such as postgresql-client-15
  others:          the package with the directory pgxs/src/test/isolation of the server's version
or let LEASEHOLD_PG_BIN name the directory `bin` of an installation that has it";

const INSTALL_PGBOUNCER: &str = "no pgbouncer found. Install it:
  Debian, Ubuntu:  apt-get install pgbouncer
  Fedora, Red Hat: dnf install pgbouncer
  macOS:           brew install pgbouncer
or let LEASEHOLD_PGBOUNCER name the program";

const INSTALL_ETCD: &str = "no etcd or etcdctl of this machine found. Install them:
  Debian, Ubuntu:  apt-get install etcd-server etcd-client
  Fedora, Red Hat: dnf install etcd
  macOS:           brew install etcd
or let LEASEHOLD_ETCD_BIN name the directory that has them";

const INSTALL_CHROMIUM: &str = "no Chromium found. Install it:
  Debian:          apt-get install chromium-headless-shell
  Fedora:          dnf install chromium-headless
  macOS:           brew install --cask chromium
or let LEASEHOLD_CHROMIUM name the program, such as that of Google Chrome";

/// Directories with the files for extensions, seen from the directory of `postgres`.
const PGXS: [&str; 3] = ["../lib/pgxs", "../lib/postgresql/pgxs", "../lib64/pgsql/pgxs"];

/// Names of the browser's program, the smallest one first.
const CHROMIUM: [&str; 5] =
    ["chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"];

/// Returns the directory with `postgres` and `initdb`.
///
/// # Errors
///
/// A message with the package to install, if no directory has both.
pub fn postgres() -> Result<PathBuf, String> {
    let is_complete =
        |directory: &PathBuf| ["postgres", "initdb"].iter().all(|program| directory.join(program).is_file());
    if let Some(chosen) = env::var_os("LEASEHOLD_PG_BIN").map(PathBuf::from) {
        let missing = || format!("LEASEHOLD_PG_BIN names {}, which lacks the servers", chosen.display());
        return is_complete(&chosen).then(|| chosen.clone()).ok_or_else(missing);
    }
    let mut places: Vec<PathBuf> = pg_config("--bindir").into_iter().collect();
    places.extend(newest_first("/usr/lib/postgresql", "", "bin"));
    places.extend(newest_first("/opt/homebrew/opt", "postgresql@", "bin"));
    places.extend(newest_first("/usr/local/opt", "postgresql@", "bin"));
    places.extend(newest_first("/usr", "pgsql-", "bin"));
    places.extend(search_path());
    places.push("/usr/bin".into());
    places.into_iter().find(is_complete).ok_or_else(|| INSTALL_POSTGRES.to_owned())
}

/// Returns the path of Postgres' own program `isolationtester`, which runs the steps of concurrent sessions in every order.
/// It belongs to the installation of the server.
///
/// # Errors
///
/// A message with the package to install, if it is missing.
pub fn isolationtester() -> Result<PathBuf, String> {
    let servers = postgres()?;
    // The option prints a file in `pgxs/src/makefiles`.
    let configured = pg_config("--pgxs").and_then(|file| file.ancestors().nth(3).map(Path::to_owned));
    let directories = PGXS.iter().map(|place| servers.join(place)).chain(configured);
    let mut programs = directories.map(|pgxs| pgxs.join("src/test/isolation/isolationtester"));
    programs.find(|program| program.is_file()).ok_or_else(|| INSTALL_ISOLATIONTESTER.to_owned())
}

/// Returns the path of the program `pgbouncer`.
///
/// # Errors
///
/// A message with the package to install, if it is missing.
pub fn pgbouncer() -> Result<PathBuf, String> {
    if let Some(chosen) = env::var_os("LEASEHOLD_PGBOUNCER").map(PathBuf::from) {
        let missing = || format!("LEASEHOLD_PGBOUNCER names {}, which is no file", chosen.display());
        return chosen.is_file().then(|| chosen.clone()).ok_or_else(missing);
    }
    let usual = ["/usr/sbin", "/usr/bin", "/opt/homebrew/bin", "/usr/local/bin"].map(PathBuf::from);
    let mut programs = search_path().into_iter().chain(usual).map(|directory| directory.join("pgbouncer"));
    programs.find(|program| program.is_file()).ok_or_else(|| INSTALL_PGBOUNCER.to_owned())
}

/// Returns the directory with the machine's own `etcd` and `etcdctl`.
///
/// # Errors
///
/// A message with the packages to install, if no directory has both.
pub fn etcd() -> Result<PathBuf, String> {
    let is_complete =
        |directory: &PathBuf| ["etcd", "etcdctl"].iter().all(|program| directory.join(program).is_file());
    if let Some(chosen) = env::var_os("LEASEHOLD_ETCD_BIN").map(PathBuf::from) {
        let missing = || format!("LEASEHOLD_ETCD_BIN names {}, which lacks the programs", chosen.display());
        return is_complete(&chosen).then(|| chosen.clone()).ok_or_else(missing);
    }
    let usual = ["/usr/bin", "/opt/homebrew/bin", "/usr/local/bin"].map(PathBuf::from);
    search_path().into_iter().chain(usual).find(is_complete).ok_or_else(|| INSTALL_ETCD.to_owned())
}

/// Returns the path of Chromium, or of a browser made from it.
///
/// # Errors
///
/// A message with the package to install, if it is missing.
pub fn chromium() -> Result<PathBuf, String> {
    if let Some(chosen) = env::var_os("LEASEHOLD_CHROMIUM").map(PathBuf::from) {
        let missing = || format!("LEASEHOLD_CHROMIUM names {}, which is no file", chosen.display());
        return chosen.is_file().then(|| chosen.clone()).ok_or_else(missing);
    }
    let directories: Vec<PathBuf> = search_path().into_iter().chain(["/usr/bin".into()]).collect();
    let on_path = CHROMIUM.iter().flat_map(|name| directories.iter().map(move |place| place.join(name)));
    let apps = ["Chromium", "Google Chrome"];
    let apps = apps.map(|name| PathBuf::from(format!("/Applications/{name}.app/Contents/MacOS/{name}")));
    on_path.chain(apps).find(|program| program.is_file()).ok_or_else(|| INSTALL_CHROMIUM.to_owned())
}

/// Returns a path of the installation that `pg_config` in the search path belongs to.
fn pg_config(option: &str) -> Option<PathBuf> {
    let output = Command::new("pg_config").arg(option).stderr(Stdio::null()).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    output.status.success().then(|| PathBuf::from(text.trim()))
}

fn search_path() -> Vec<PathBuf> {
    env::var_os("PATH").map(|path| env::split_paths(&path).collect()).unwrap_or_default()
}

/// Returns `parent/PREFIXnn/child` for all versions `nn`, newest first.
fn newest_first(parent: &str, prefix: &str, child: &str) -> Vec<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = fs::read_dir(parent)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let version = name.strip_prefix(prefix)?.split('.').next()?.parse().ok()?;
            Some((version, entry.path().join(child)))
        })
        .collect();
    found.sort();
    found.into_iter().rev().map(|(_, path)| path).collect()
}
