//! The end of the process when a term is lost.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use leasehold_api::{GrantHandle, Validity};

/// The longest interval of checks.
const LOOK: Duration = Duration::from_millis(100);

/// Ends this process with `code` when the grant is lost, until the returned value is dropped. Checks the clock
/// in a separate thread, because the body can block every thread of the runtime.
pub(crate) fn exit_on_loss(grant: GrantHandle, code: i32) -> io::Result<mpsc::Sender<()>> {
    let (body, ended) = mpsc::channel();
    let watch = move || loop {
        if grant.validity() == Validity::Lost {
            tracing::error!(key = %grant.key(), "the term is lost; ending the process");
            std::process::exit(code);
        }
        let next = grant.remaining().unwrap_or(LOOK).clamp(Duration::from_millis(1), LOOK);
        if ended.recv_timeout(next) == Err(RecvTimeoutError::Disconnected) {
            return;
        }
    };
    thread::Builder::new().name("leasehold-election".to_owned()).spawn(watch)?;
    Ok(body)
}
