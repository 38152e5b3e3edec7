//! A program of which one process works at a time. Start it in two terminals:
//!
//! ```text
//! cargo run -p leasehold-file --example one_at_a_time -- file:///tmp/locks
//! ```

use std::io::{self, BufRead, Write};
use std::process::ExitCode;

use leasehold::Error;
use leasehold::blocking::{LockGuard, connect};

/// The exit code for a failure that passes, `EX_TEMPFAIL` of `sysexits.h`.
pub const HELD: u8 = 75;

fn main() -> Result<ExitCode, Error> {
    let url = std::env::args().nth(1).unwrap_or_else(|| "file:///tmp/locks".to_owned());
    Ok(if run(&url)? { ExitCode::SUCCESS } else { ExitCode::from(HELD) })
}

/// Works unless another process does. Returns whether it worked.
pub fn run(url: &str) -> Result<bool, Error> {
    let lock = connect(url)?;
    let Some(guard) = lock.key("nightly-report").try_acquire()? else {
        eprintln!("another process writes the report");
        return Ok(false);
    };
    guard.when_lost(|reason| eprintln!("stop, because the lock is lost: {reason}"));
    work(&guard);
    guard.release()?; // `Ok`: no other process worked until now
    println!("released");
    Ok(true)
}

/// Stands for the work, and lasts until the next line of the input.
fn work(guard: &LockGuard) {
    println!("writing {} with token {:?}. Press Enter to end.", guard.key(), guard.token());
    let _ = io::stdout().flush();
    let _ = io::stdin().lock().read_line(&mut String::new());
}
