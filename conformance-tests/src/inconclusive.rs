//! Observations that do not prove a fault of the store.

use std::any::Any;
use std::fmt::Debug;
use std::panic::{Location, panic_any};
use std::time::Duration;

use leasehold_api::{Error, LockGuard, LockKey, LossReason, Validity};
use tokio::time::Instant;

use crate::case::Outcome;
use crate::context::{Context, NO_ANSWER};
use crate::harness::Time;
use crate::runner::panic_text;

/// The payload of a panic that ends a case as inconclusive, because the store is perhaps not at fault.
#[derive(Debug)]
pub(crate) struct InconclusivePanic(pub(crate) String);

/// The payload of a panic that ends a case because of the error of an undisturbed call.
#[derive(Debug)]
pub(crate) struct CallFailedPanic {
    message: String,
    error: Error,
}

/// Returns the outcome of a case that panicked.
pub(crate) fn outcome_of(panic: Box<dyn Any + Send>, time: Time) -> Outcome {
    let panic = match panic.downcast::<InconclusivePanic>() {
        Ok(doubt) => return Outcome::Inconclusive { message: doubt.0 },
        Err(panic) => panic,
    };
    match panic.downcast::<CallFailedPanic>() {
        Ok(failed) => after_error(failed.message, &failed.error, time),
        Err(panic) => Outcome::Failed { message: panic_text(&*panic) },
    }
}

/// Returns the outcome of a case that the error of an undisturbed call has ended. In real time a late
/// answer or a late renewal makes it inconclusive, because a busy server breaks no rule.
pub(crate) fn after_error(message: String, error: &Error, time: Time) -> Outcome {
    let is_late = NO_ANSWER.contains(&error.kind()) || error.loss() == Some(LossReason::Expired);
    match time {
        Time::Real if is_late => Outcome::Inconclusive { message },
        _ => Outcome::Failed { message },
    }
}

/// Outcomes of calls that no case disturbs.
pub(crate) trait Answered<T> {
    /// Returns the value. Ends the case with a [`CallFailedPanic`] after an error.
    fn answered(self, expected: &str) -> T;
}

impl<T> Answered<T> for Result<T, Error> {
    #[track_caller]
    fn answered(self, expected: &str) -> T {
        self.unwrap_or_else(|error| call_failed(expected, &error))
    }
}

/// Ends the case with a [`CallFailedPanic`].
#[track_caller]
pub(crate) fn call_failed(what: &str, error: &Error) -> ! {
    let at = Location::caller();
    panic_any(CallFailedPanic { message: format!("{what}: {error} ({at})"), error: error.clone() })
}

impl Context {
    /// Ends the case after another client was granted a key that the case holds. Inconclusive if the earlier
    /// hold is lost, because late renewals can end a hold in real time. Otherwise the case fails.
    pub(crate) fn granted_again(&self, guard: &LockGuard) -> ! {
        let key = guard.key();
        let before = self.grants().get(key).cloned();
        match before.map(|before| (before.validity(), before.lost().reason())) {
            Some((Validity::Lost, reason)) => panic_any(InconclusivePanic(format!(
                "the hold of {key:?} was lost, so that another got it as it should: {reason:?}"
            ))),
            Some((validity, _)) if validity.is_held() => {
                panic!("{key:?} is held, its holder reads {validity:?}, yet it was granted again: {guard:?}")
            }
            _ => panic!("{key:?} is held, yet it was granted again: {guard:?}"),
        }
    }

    /// Ends the case as inconclusive if `end` has passed in real time, because the observation counts only
    /// before `end`. A slow server can cause this even if this process never stood still.
    pub(crate) fn inconclusive_after(&self, end: Instant, otherwise: &str) {
        if !self.is_virtual() && Instant::now() >= end {
            panic_any(InconclusivePanic(format!("it took so long that {otherwise}")))
        }
    }

    /// Drops `call` when `gives_up` ends. The store replies after `slow` at the earliest, so an earlier reply fails
    /// the case. A later one is inconclusive in real time.
    pub(crate) async fn drop_before_reply<T: Debug>(
        &self,
        call: impl Future<Output = T>,
        gives_up: impl Future<Output = ()>,
        slow: Duration,
    ) {
        let begun = Instant::now();
        tokio::select! {
            biased;
            reply = call => {
                self.inconclusive_after(begun + slow, "the reply came before the caller gave up");
                panic!("answered at once: {reply:?}");
            }
            () = gives_up => {}
        }
    }

    /// Asserts that an undisturbed hold reads valid. Inconclusive in real time if the hold has expired or is in
    /// doubt, because a slow store can answer its renewals too late.
    #[track_caller]
    pub(crate) fn assert_valid(&self, guard: &LockGuard) {
        let validity = guard.validity();
        if !self.is_virtual() && validity == Validity::InDoubt {
            panic_any(InconclusivePanic(format!("a renewal of {:?} is late", guard.key())));
        }
        self.inconclusive_if_expired(guard.key(), guard.lost().reason());
        assert_eq!(validity, Validity::Valid, "the hold of {:?}", guard.key());
    }

    /// Asserts that each of several undisturbed holds reads valid, like [`assert_valid`](Self::assert_valid).
    #[track_caller]
    pub(crate) fn assert_all_valid<'a>(&self, guards: impl IntoIterator<Item = &'a LockGuard>) {
        for guard in guards {
            self.assert_valid(guard);
        }
    }

    /// Ends the case as inconclusive in real time if a hold was lost because its renewals came too late.
    pub(crate) fn inconclusive_if_expired(&self, key: &LockKey, loss: Option<LossReason>) {
        if !self.is_virtual() && loss == Some(LossReason::Expired) {
            panic_any(InconclusivePanic(format!("the renewals of {key:?} came too late")));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;
    use std::sync::Arc;

    use futures_util::FutureExt as _;
    use leasehold_api::{ErrorKind, Lock};
    use leasehold_engine::{Engine, TokioClock};
    use leasehold_memory::MemoryStore;

    use super::*;
    use crate::{Disturbed, Fault, Harness, Op, async_trait};

    #[derive(Debug)]
    struct Fails(ErrorKind);

    #[async_trait]
    impl Harness for Fails {
        async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
            let backend = Disturbed::new(MemoryStore::new().backend());
            backend.faults().script(Op::Acquire, Fault::Error(self.0));
            Ok(Arc::new(Engine::start(backend)?))
        }
    }

    /// Returns for three kinds of acquire whether an error of `kind` makes the case inconclusive.
    async fn doubted(time: Time, kind: ErrorKind) -> [bool; 3] {
        let cx = Context::new(Box::new(Fails(kind)), time, None).await.unwrap();
        let (a, b, c, key) = (cx.client().await, cx.client().await, cx.client().await, cx.key());
        let asked = [
            AssertUnwindSafe(cx.take(&a, &key)).catch_unwind().await.unwrap_err(),
            AssertUnwindSafe(cx.free_within(&b, &key, cx.slack())).catch_unwind().await.unwrap_err(),
            AssertUnwindSafe(cx.held(&c, &key)).catch_unwind().await.unwrap_err(),
        ];
        asked.map(|panic| matches!(outcome_of(panic, time), Outcome::Inconclusive { .. }))
    }

    #[tokio::test]
    async fn a_store_that_does_not_answer_in_real_time_is_not_accused() {
        assert_eq!(doubted(Time::Real, ErrorKind::Unavailable).await, [true; 3]);
        assert_eq!(doubted(Time::Real, ErrorKind::OutcomeUnknown).await, [true; 3]);
        assert_eq!(doubted(Time::Real, ErrorKind::Corrupt).await, [false; 3]);
        assert_eq!(doubted(Time::Virtual, ErrorKind::Unavailable).await, [false; 3]);
    }

    #[tokio::test]
    async fn what_was_seen_too_late_shows_nothing_in_real_time() {
        let doubts = async |time, end| {
            let cx = Context::new(Box::new(Fails(ErrorKind::Corrupt)), time, None).await.unwrap();
            let seen = AssertUnwindSafe(async { cx.inconclusive_after(end, "it is over") });
            seen.catch_unwind().await.is_err_and(|panic| panic.is::<InconclusivePanic>())
        };
        let now = Instant::now();
        assert!(doubts(Time::Real, now).await);
        assert!(!doubts(Time::Real, now + Duration::from_secs(600)).await);
        assert!(!doubts(Time::Virtual, now).await);
    }

    #[derive(Debug)]
    struct NeverRenews;

    #[async_trait]
    impl Harness for NeverRenews {
        async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
            let backend = Disturbed::new(MemoryStore::new().backend());
            (0..1000).for_each(|_| backend.faults().script(Op::Renew, Fault::Error(ErrorKind::Unavailable)));
            Ok(Arc::new(Engine::builder(backend).clock(Arc::new(TokioClock::new())).start()?))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_hold_that_expires_in_real_time_does_not_accuse_the_store() {
        // Returns whether a check fails, and then whether it makes the case inconclusive.
        let checks = async |time, is_expired, is_forced| {
            let cx = Context::new(Box::new(NeverRenews), time, None).await.unwrap();
            let lock = cx.client().await;
            let guard = cx.take_with(&lock, &cx.key(), &cx.leased()).await;
            if is_expired {
                guard.lost().await;
            }
            if is_forced {
                let admin = lock.admin().expect("a store in memory can be inspected");
                assert!(admin.force_release(guard.key(), guard.holder()).await.unwrap());
                guard.lost().await;
            }
            let valid = std::panic::catch_unwind(AssertUnwindSafe(|| cx.assert_valid(&guard)));
            let given = AssertUnwindSafe(cx.give(guard)).catch_unwind().await;
            [valid.err(), given.err()].map(|panic| {
                panic.map(|panic| matches!(outcome_of(panic, time), Outcome::Inconclusive { .. }))
            })
        };
        assert_eq!(checks(Time::Real, false, false).await, [None; 2]);
        assert_eq!(checks(Time::Real, true, false).await, [Some(true); 2]);
        assert_eq!(checks(Time::Virtual, true, false).await, [Some(false); 2]);
        assert_eq!(checks(Time::Real, false, true).await, [Some(false); 2]);
    }
}
