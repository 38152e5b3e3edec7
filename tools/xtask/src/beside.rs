//! A job that works beside another one, in a process of its own.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::{env, io};

use crate::metadata::Metadata;
use crate::step::Outcome;

/// A job of ours, whose output is shown once it has ended.
pub(crate) struct Beside {
    job: &'static str,
    child: Child,
    output: PathBuf,
}

impl Beside {
    pub(crate) fn start(job: &'static str) -> Outcome<Self> {
        let output = PathBuf::from(Metadata::read()?.target_directory()).join(format!("{job}.log"));
        let start = || {
            let file = File::create(&output)?;
            Command::new(env::current_exe()?).arg(job).stdout(file.try_clone()?).stderr(file).spawn()
        };
        let child = start().map_err(|error: io::Error| format!("cannot start the job {job}: {error}"))?;
        Ok(Self { job, child, output })
    }

    /// Waits for its end, and shows all that it printed.
    pub(crate) fn finish(self) -> Outcome {
        let Self { job, mut child, output } = self;
        let status = child.wait().map_err(|error| format!("cannot wait for the job {job}: {error}"))?;
        let printed = fs::read_to_string(&output).unwrap_or_else(|error| error.to_string());
        println!("\n== {job}, which worked beside what is above\n{printed}");
        if status.success() { Ok(()) } else { Err(format!("\nfailed: {job}, see above")) }
    }
}
