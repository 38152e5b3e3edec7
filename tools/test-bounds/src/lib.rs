//! Bounds in real time for tests.
//!
//! A test that waits for an event needs a bound, because a broken program would block it indefinitely. A busy machine
//! can exceed the same bound. Such a test therefore panics with a [`BoundPassed`], and `cargo xtask
//! test` reruns it alone if other programs used the machine at the time. Assertions about holders, tokens, order,
//! counts or data are ordinary panics and cause no rerun.

use std::fmt;
use std::future::Future;
use std::panic;
use std::time::{Duration, Instant};

/// Start of the line that a test prints when a bound has passed. `xtask` searches the output of tests for it.
pub const MARK: &str = "bound in real time passed: ";

/// The payload of the panic of a test whose bound has passed.
#[derive(Debug)]
pub struct BoundPassed {
    what: String,
    bound: Duration,
}

impl fmt::Display for BoundPassed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} within {:?}", self.what, self.bound)
    }
}

impl BoundPassed {
    /// Fails the test: prints the fault, then panics with it.
    #[track_caller]
    fn raise(self) -> ! {
        // Prints the fault here, because the message of a panic does not show a payload that is not a string.
        eprintln!("{MARK}{self}");
        panic::panic_any(self)
    }
}

/// Returns the output of `future`.
///
/// # Panics
///
/// With a [`BoundPassed`] if `future` has not ended within `bound`. `what` names the missing event, such as `"not granted"`.
///
/// # Cancel safety
///
/// If dropped, drops `future`.
pub async fn within<F: Future>(bound: Duration, what: impl fmt::Display, future: F) -> F::Output {
    match tokio::time::timeout(bound, future).await {
        Ok(output) => output,
        Err(_) => BoundPassed { what: what.to_string(), bound }.raise(),
    }
}

/// The time limit of a loop that polls a condition.
#[derive(Debug)]
pub struct Bound {
    begun: Instant,
    bound: Duration,
}

impl Bound {
    /// Starts a wait of at most `bound`.
    #[must_use]
    pub fn new(bound: Duration) -> Self {
        Self { begun: Instant::now(), bound }
    }

    /// Ends the test if the wait has lasted too long.
    ///
    /// # Panics
    ///
    /// With a [`BoundPassed`] if the bound has passed. `what` names the missing event, such as `"not granted"`.
    #[track_caller]
    pub fn check(&self, what: impl fmt::Display) {
        if self.begun.elapsed() > self.bound {
            BoundPassed { what: what.to_string(), bound: self.bound }.raise();
        }
    }

    /// Checks the bound, then blocks the thread for `pause`.
    ///
    /// # Panics
    ///
    /// As [`check`](Self::check).
    #[track_caller]
    pub fn pause(&self, pause: Duration, what: impl fmt::Display) {
        self.check(what);
        std::thread::sleep(pause);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bound_that_has_passed_is_a_panic_of_its_own_type() {
        let bound = Bound {
            begun: Instant::now().checked_sub(Duration::from_secs(2)).unwrap(),
            bound: Duration::from_secs(1),
        };
        let payload = panic::catch_unwind(|| bound.check("not granted")).unwrap_err();
        let passed = payload.downcast_ref::<BoundPassed>().unwrap();
        assert_eq!(passed.to_string(), "not granted within 1s");
        Bound::new(Duration::from_secs(600)).check("nothing has passed");
    }

    #[test]
    fn a_future_that_ends_gives_its_output_and_one_that_hangs_passes_the_bound() {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        assert_eq!(runtime.block_on(within(Duration::from_secs(1), "not ready", async { 7 })), 7);
        let hang =
            || runtime.block_on(within(Duration::from_secs(1), "not ready", std::future::pending::<()>()));
        let payload = panic::catch_unwind(panic::AssertUnwindSafe(hang)).unwrap_err();
        assert_eq!(payload.downcast_ref::<BoundPassed>().unwrap().to_string(), "not ready within 1s");
    }
}
