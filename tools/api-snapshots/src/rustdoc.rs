//! Rustdoc's JSON from a stable toolchain.

use std::env;
use std::ffi::OsString;
use std::process::{Command, ExitCode, Stdio};

use serde_json::Value;

/// Variable with the path of the real rustdoc, set if this program replaces rustdoc.
const REAL: &str = "API_SNAPSHOTS_RUSTDOC";
const JSON: [&str; 4] = ["-Z", "unstable-options", "--output-format", "json"];
/// The flag that docs.rs sets. It switches on the marks for features, which need unstable rustdoc too.
const DOCS_RS: [&str; 2] = ["--cfg", "docsrs"];

/// Runs the real rustdoc with unstable options allowed, if cargo runs this program in its place.
///
/// `RUSTC_BOOTSTRAP` is set only for rustdoc, because build scripts of dependencies watch it. If it were set for cargo,
/// these and their dependents would be built again, now and in the next ordinary build.
pub(crate) fn stand_in() -> Option<ExitCode> {
    let real = env::var_os(REAL)?;
    let status = unstable(real).args(env::args_os().skip(1)).status();
    let code = status.ok().and_then(|status| u8::try_from(status.code()?).ok());
    Some(code.map_or(ExitCode::FAILURE, ExitCode::from))
}

/// Returns the reason why this toolchain's JSON cannot be read. `None` if it can.
pub(crate) fn why_not() -> Option<String> {
    let ours = rustdoc_types::FORMAT_VERSION;
    let probe = unstable(real())
        .args(["-", "--crate-name", "probe", "-o", "-"])
        .args(JSON)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let json = probe.ok().and_then(|output| serde_json::from_slice::<Value>(&output.stdout).ok());
    let Some(theirs) = json.and_then(|json| json["format_version"].as_u64()) else {
        return Some("because this rustdoc writes no JSON".to_owned());
    };
    (theirs != u64::from(ours)).then(|| {
        format!("because this rustdoc writes version {theirs} of its JSON, and api-snapshots reads {ours}")
    })
}

/// Documents the workspace, as JSON if `in_json`, and denies warnings. Uses the features and the profile of the other jobs,
/// because the dependencies are already built with them.
pub(crate) fn document(features: &str, in_json: bool) -> Result<(), String> {
    let this = env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .args(["doc", "--locked", "--profile", "tests", "--workspace", "--no-deps"])
        .args(["--features", features]);
    // Removes cargo's variables of this package, because some build scripts would run again and their dependents would be compiled.
    for (name, _) in env::vars_os() {
        if name
            .to_str()
            .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"))
        {
            command.env_remove(name);
        }
    }
    let deny = "-D warnings";
    if in_json {
        command
            .env("RUSTDOC", this)
            .env(REAL, real())
            .env("RUSTDOCFLAGS", [&JSON[..], &DOCS_RS, &[deny]].concat().join(" "));
    } else {
        command.env("RUSTDOCFLAGS", deny);
    }
    let status = command.status().map_err(|error| format!("cannot start cargo: {error}"))?;
    if status.success() { Ok(()) } else { Err("failed: the documentation of the workspace".to_owned()) }
}

fn real() -> OsString {
    env::var_os("RUSTDOC").unwrap_or_else(|| "rustdoc".into())
}

fn unstable(rustdoc: OsString) -> Command {
    let mut command = Command::new(rustdoc);
    command.env("RUSTC_BOOTSTRAP", "1").env_remove(REAL);
    command
}
