//! Observations that do not prove a fault of the store.

use std::panic::panic_any;

use leasehold_api::{Error, ErrorKind, LockGuard, Validity};
use tokio::time::Instant;

use crate::context::Context;

/// The payload of a panic that ends a case as inconclusive, because the store is perhaps not at fault.
#[derive(Debug)]
pub(crate) struct InconclusivePanic(pub(crate) String);

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

    /// Fails the case because an undisturbed call failed. In real time `Unavailable` makes it inconclusive,
    /// because a busy server breaks no rule.
    pub(crate) fn call_failed(&self, what: &str, error: &Error) -> ! {
        if !self.is_virtual() && error.kind() == ErrorKind::Unavailable {
            panic_any(InconclusivePanic(format!("{what}, and the store did not answer: {error}")))
        }
        panic!("{what}: {error}")
    }
}

#[cfg(test)]
mod tests {
    use std::panic::AssertUnwindSafe;
    use std::sync::Arc;

    use futures_util::FutureExt as _;
    use leasehold_api::Lock;
    use leasehold_engine::Engine;
    use leasehold_memory::MemoryStore;

    use super::*;
    use crate::{Disturbed, Fault, Harness, Op, Time, async_trait};

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
        asked.map(|panic| panic.is::<InconclusivePanic>())
    }

    #[tokio::test]
    async fn a_store_that_does_not_answer_in_real_time_is_not_accused() {
        assert_eq!(doubted(Time::Real, ErrorKind::Unavailable).await, [true; 3]);
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
        assert!(!doubts(Time::Real, now + std::time::Duration::from_secs(600)).await);
        assert!(!doubts(Time::Virtual, now).await);
    }
}
