//! The first steps: connect by a URL, acquire, release, and run a closure under a lock.
//!
//! ```text
//! cargo run -p leasehold --example quickstart
//! cargo run -p leasehold --example quickstart --features file -- file:///tmp/locks
//! ```

use std::time::Duration;

use leasehold::{Error, LockExt as _};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "memory:".to_owned());
    for line in run(&url).await? {
        println!("{line}");
    }
    Ok(())
}

/// Runs the steps on the store at `url`. Returns one line per step.
///
/// # Cancel safety
///
/// If dropped, the current step stops, and its lock is released.
pub async fn run(url: &str) -> Result<Vec<String>, Error> {
    let lock = leasehold::connect(url).await?; // Arc<dyn Lock>
    let mut steps = Vec::new();

    // Waits for up to five seconds while another caller holds the key.
    let guard = lock.key("report").wait(Duration::from_secs(5)).acquire().await?;
    steps.push(format!("acquired {}", guard.key()));

    // `None`: the key is held. A try does not wait.
    let second = lock.key("report").try_acquire().await?;
    steps.push(format!("a second caller {}", if second.is_some() { "acquired it" } else { "was refused" }));

    // `Ok`: the key was held until now. If a guard is dropped instead, the release runs in the background.
    guard.release().await?;
    steps.push("released".to_owned());

    // Released on success, on error and on panic. If the lock is lost, the closure is stopped.
    let pages = lock.key("report").run(async |_guard| 12).await?;
    steps.push(format!("wrote a report of {pages} pages"));

    lock.close().await?;
    Ok(steps)
}
