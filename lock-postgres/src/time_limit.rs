//! Time limits of real I/O, which say so if tokio's clock does not run with the real one.

use std::time::{Duration, Instant};

use leasehold_api::{Error, ErrorKind};
use tokio::time::timeout;

/// Less than this, real time and tokio's differ by rounding.
const ROUNDING: Duration = Duration::from_millis(10);

/// A limit has passed.
#[derive(Debug)]
pub(crate) struct Overrun {
    limit: Duration,
    real: Duration,
}

/// What `work` comes to within `limit`.
pub(crate) async fn limited<T>(limit: Duration, work: impl Future<Output = T>) -> Result<T, Overrun> {
    let started = Instant::now();
    timeout(limit, work).await.map_err(|_| Overrun { limit, real: started.elapsed() })
}

impl Overrun {
    /// Whether nothing real can be waited for on this clock.
    pub(crate) fn is_paused(&self) -> bool {
        self.real + ROUNDING < self.limit
    }

    /// `message`, unless the clock is the cause.
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
