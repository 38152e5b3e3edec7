//! Permutations of the steps of concurrent sessions, run by Postgres' own program.

use std::fmt::Display;
use std::io::{Seek as _, Write as _};
use std::process::Stdio;

use test_bounds::within;
use test_setup::programs;
use tokio::process::Command;

use crate::sql::LONG;
use crate::{Database, Outcome, or_panic};

/// Seconds after which the program cancels a step. Longer than [`LONG`], because the bound of the whole run is enough.
const STEP_SECONDS: &str = "600";

/// Runs a specification by `isolationtester`: every permutation of the steps of its sessions, unless it lists some.
/// Returns the program's output.
///
/// The program waits for the earlier step of a session before it sends the next one. So a step that waits for a later
/// step of another session must be the last one of its session.
///
/// # Panics
///
/// If the program is missing (the message names the package to install), refuses the specification or a setup, or does
/// not end.
///
/// # Cancel safety
///
/// If dropped, the program is killed.
pub async fn isolationtester(database: &Database, specification: &str) -> String {
    or_panic(run(database, specification).await)
}

async fn run(database: &Database, specification: &str) -> Outcome<String> {
    let program = programs::isolationtester()?;
    let failed = |error: &dyn Display| format!("{} failed: {error}", program.display());
    let mut input = tempfile::tempfile().map_err(|error| failed(&error))?;
    let written = input.write_all(specification.as_bytes()).and_then(|()| input.rewind());
    written.map_err(|error| failed(&error))?;
    let mut command = Command::new(&program);
    command.arg(database.url()).env("PGISOLATIONTIMEOUT", STEP_SECONDS);
    command.stdin(Stdio::from(input)).kill_on_drop(true);
    let output = within(LONG, "isolationtester has not ended", command.output()).await;
    let output = output.map_err(|error| failed(&error))?;
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if output.status.success() && errors.is_empty() {
        return Ok(text.into_owned());
    }
    Err(failed(&format!("{}\n{errors}\n{text}\nof the specification:\n{specification}", output.status)))
}
