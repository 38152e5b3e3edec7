//! Installation of the programs that the tests start: Postgres, `PgBouncer`, etcd and a browser.

use std::process::{Command, Stdio};

use test_setup::programs;

use crate::step::Outcome;

/// Checks that the servers are installed. Installs missing ones if `apt-get` can run as root without a password.
pub(crate) fn ensure() -> Outcome {
    let find = || {
        programs::postgres()?;
        programs::pgbouncer()?;
        // The newest etcd comes with a crate. The tests also use an older one.
        programs::etcd().map(drop)
    };
    ensure_found(find, &["postgresql", "pgbouncer", "etcd-server", "etcd-client"])
}

/// Checks that Postgres is installed, as [`ensure`] does.
pub(crate) fn ensure_postgres() -> Outcome {
    ensure_found(|| programs::postgres().map(drop), &["postgresql"])
}

/// Checks that a browser is installed, as [`ensure`] does.
pub(crate) fn ensure_browser() -> Outcome {
    ensure_found(|| programs::chromium().map(drop), &["chromium-headless-shell"])
}

fn ensure_found(find: impl Fn() -> Outcome, packages: &[&str]) -> Outcome {
    let Err(missing) = find() else { return Ok(()) };
    let Some(prefix) = privilege() else { return Err(missing) };
    println!("\n== installing what the tests start: {}", packages.join(", "));
    let install = [&["install", "-y", "--no-install-recommends"], packages].concat();
    // Updates the lists of packages only after a failure, because they are big.
    if apt_get(prefix, &install).is_err() {
        let updated = apt_get(prefix, &["update"]).and_then(|()| apt_get(prefix, &install));
        updated.map_err(|error| format!("{error}\n{missing}"))?;
    }
    find()
}

/// Returns the command prefix that runs `apt-get` as root. `None` without `apt-get` or a way to become root.
fn privilege() -> Option<&'static [&'static str]> {
    let succeeds = |program: &str, arguments: &[&str]| {
        let status =
            Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).status();
        status.is_ok_and(|status| status.success())
    };
    if !succeeds("apt-get", &["--version"]) {
        return None;
    }
    if succeeds("sh", &["-c", "test \"$(id -u)\" = 0"]) {
        return Some(&[]);
    }
    succeeds("sudo", &["-n", "true"]).then_some(&["sudo", "-n"])
}

fn apt_get(prefix: &[&str], arguments: &[&str]) -> Outcome {
    // Sets the variable by `env`, because sudo does not pass variables.
    let words = [prefix, &["env", "DEBIAN_FRONTEND=noninteractive", "apt-get"], arguments].concat();
    let Some((program, rest)) = words.split_first() else { return Ok(()) };
    let status = Command::new(program).args(rest).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        Ok(_) => Err(format!("failed: {}", words.join(" "))),
        Err(error) => Err(format!("cannot start {program}: {error}")),
    }
}
