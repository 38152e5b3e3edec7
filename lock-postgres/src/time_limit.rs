//! Time limits of real I/O, with an error that explains a paused tokio clock.

use std::time::{Duration, Instant};

use leasehold_api::{Error, ErrorKind};
use tokio::time::timeout;

/// The difference between real time and tokio's time that counts as rounding.
const ROUNDING: Duration = Duration::from_millis(10);

/// The error of an exceeded limit.
#[derive(Debug)]
pub(crate) struct Overrun {
    limit: Duration,
    real: Duration,
}

/// Returns the output of `work`, or an error after `limit`.
pub(crate) async fn limited<T>(limit: Duration, work: impl Future<Output = T>) -> Result<T, Overrun> {
    let started = Instant::now();
    timeout(limit, work).await.map_err(|_| Overrun { limit, real: started.elapsed() })
}

impl Overrun {
    /// Returns whether tokio's clock is paused, in which case real I/O cannot be awaited.
    pub(crate) fn is_paused(&self) -> bool {
        self.real + ROUNDING < self.limit
    }

    /// Returns an error with `message`, or an explanation of the paused clock.
    pub(crate) fn into_error(self, message: String) -> Error {
        if self.is_paused() {
            let Self { limit, real } = self;
            let message = format!(
                "tokio's clock is paused: a limit of {limit:?} passed in {real:?}, before the server could answer; use a real server without start_paused and tokio::time::pause, or the memory store with them"
            );
            return Error::new(ErrorKind::InvalidOption, message);
        }
        Error::new(ErrorKind::Unavailable, message)
    }
}
