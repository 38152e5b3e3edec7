//! A job that a timer starts on one machine, perhaps twice at the same time: it runs at most once per hour.
//!
//! ```text
//! cargo run -p leasehold-file --example once -- /tmp/locks
//! ```

use std::path::Path;
use std::time::Duration;

use leasehold_api::{Error, LockExt as _, WindowOutcome};

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::main]
async fn main() -> Result<(), Error> {
    let directory = match std::env::args_os().nth(1) {
        Some(directory) => directory.into(),
        None => leasehold_file::default_dir()?,
    };
    println!("{}", run(&directory).await?);
    Ok(())
}

/// Returns a description of this run. The directory records the last run for the next process.
pub async fn run(directory: &Path) -> Result<String, Error> {
    let lock = leasehold_file::connect(directory)?;
    let outcome =
        lock.key("report").label("hourly report").at_most_once_per(HOUR).run(async |_guard| 12).await?;
    Ok(match outcome {
        WindowOutcome::Due(pages) => format!("wrote {pages} pages"),
        WindowOutcome::NotDue { retry_after } => {
            format!("not due for {} minutes", retry_after.as_secs().div_ceil(60))
        }
    })
}
