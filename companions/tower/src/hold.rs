//! The lock of one request, from the grant to the release.

use std::fmt;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use leasehold_api::{ErrorKind, Lock, LockGuard, LockKey, LossReason, Lost, Validity};
use tracing::warn;

use crate::commit::CommitSlot;
use crate::held::Held;
use crate::settings::OnLost;
use crate::stats::InFlightRequest;

/// The lock of one request, for implementors of [`Transport`](crate::Transport). If dropped, it is released, or
/// passed to the [`OpenCommit`](crate::OpenCommit) around the request.
pub struct RequestHold {
    /// The granted lock. `None` once it was passed to the transaction or released.
    granted: Option<GrantedLock>,
    /// The transaction outside the lock layer, which gets the lock if it is still open.
    commit: Option<CommitSlot>,
}

struct GrantedLock {
    // The guard of the lock. Dropped before the count, because all locks must be released when no request is in flight.
    guard: LockGuard,
    held: Held,
    lost: Lost,
    on_lost: OnLost,
    release_within: Duration,
    in_flight: InFlightRequest,
}

impl RequestHold {
    pub(crate) fn new(
        guard: LockGuard,
        held: Held,
        on_lost: OnLost,
        release_within: Duration,
        in_flight: InFlightRequest,
        commit: Option<CommitSlot>,
    ) -> Self {
        let lost = guard.lost();
        Self { granted: Some(GrantedLock { guard, held, lost, on_lost, release_within, in_flight }), commit }
    }

    /// Sets the transaction that the lock must outlast.
    pub(crate) fn pass_to(&mut self, commit: Option<CommitSlot>) {
        self.commit = commit;
    }

    /// Returns whether this hold, or one of a lock layer outside of it, is `key` of `lock`.
    pub(crate) fn is_of(&self, lock: &Arc<dyn Lock>, key: &LockKey) -> bool {
        self.granted.as_ref().is_some_and(|granted| granted.held.holds(lock, key))
    }

    /// Polls `work` until it is done or, with [`OnLost::Cancel`], until the lock is lost.
    pub(crate) async fn run<T>(
        &mut self,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> Result<T, LossReason> {
        poll_fn(|cx| {
            if let Some(reason) = self.stopped() {
                return Poll::Ready(Err(reason));
            }
            match work.as_mut().poll(cx) {
                Poll::Ready(done) => Poll::Ready(Ok(done)),
                Poll::Pending => self.poll_stopped(cx).map(Err),
            }
        })
        .await
    }

    /// Returns the reason if the lock was lost and [`OnLost::Cancel`] stops its work. Checks the clock too, because a
    /// process that was suspended must not run one more step.
    pub(crate) fn stopped(&self) -> Option<LossReason> {
        let granted = self.granted.as_ref()?;
        if granted.on_lost == OnLost::Tell || granted.guard.validity() != Validity::Lost {
            return None;
        }
        Some(granted.count_lost(granted.lost.reason().unwrap_or(LossReason::Expired)))
    }

    /// Polls for the reason of a stop (see [`stopped`](Self::stopped)), and registers the task for it. Work that
    /// completes at its first poll registers no waker.
    pub(crate) fn poll_stopped(&mut self, cx: &mut Context<'_>) -> Poll<LossReason> {
        let Some(granted) = self.granted.as_mut().filter(|granted| granted.on_lost != OnLost::Tell) else {
            return Poll::Pending;
        };
        Pin::new(&mut granted.lost).poll(cx).map(|reason| granted.count_lost(reason))
    }

    /// Releases the lock, unless a transaction around the request is still open.
    pub(crate) async fn release(mut self) {
        if let Some(granted) = self.take() {
            granted.release().await;
        }
    }

    /// Takes the lock to release now. Returns `None` if the open transaction keeps it.
    fn take(&mut self) -> Option<GrantedLock> {
        let granted = self.granted.take()?;
        let Some(commit) = self.commit.take() else { return Some(granted) };
        commit.keep(Self { granted: Some(granted), commit: None })?.granted.take()
    }
}

impl Drop for RequestHold {
    fn drop(&mut self) {
        drop(self.take());
    }
}

impl GrantedLock {
    /// Releases the lock and waits at most `release_within` for the confirmation. A failure is only counted and
    /// logged, because the response is already fixed.
    async fn release(self) {
        let Self { guard, lost, release_within, in_flight, .. } = self;
        // Drops the watch first, because the end of the hold wakes all watchers.
        drop(lost);
        let key = guard.key().clone();
        let mut release = pin!(guard.release());
        // Polls the release once before it starts a timer, because a store in memory completes at once.
        let answer = match poll_fn(|cx| Poll::Ready(release.as_mut().poll(cx))).await {
            Poll::Ready(answer) => Ok(answer),
            Poll::Pending => tokio::time::timeout(release_within, release).await,
        };
        match answer {
            Ok(Ok(())) => {}
            Ok(Err(error)) if error.kind() == ErrorKind::Lost => {
                in_flight.stats().count_lost();
                warn!(%key, %error, "the lock was lost before its request had ended");
            }
            Ok(Err(error)) => {
                in_flight.stats().count_release_failed();
                warn!(%key, %error, "a release failed and goes on in the background");
            }
            Err(_) => {
                in_flight.stats().count_release_failed();
                warn!(%key, "a release was not confirmed within {release_within:?} and goes on in the background");
            }
        }
        drop(in_flight);
    }

    fn count_lost(&self, reason: LossReason) -> LossReason {
        self.in_flight.stats().count_lost();
        warn!(key = %self.guard.key(), %reason, "the lock was lost, and the work under it is stopped");
        reason
    }
}

impl fmt::Debug for RequestHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let guard = self.granted.as_ref().map(|granted| &granted.guard);
        f.debug_struct("RequestHold").field("guard", &guard).finish_non_exhaustive()
    }
}
