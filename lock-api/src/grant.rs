//! The interface behind a guard, for implementations of a lock.

use std::any::{Any, TypeId};
use std::fmt::{self, Debug};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use crate::error::Error;
use crate::id::{FencingToken, HolderId};
use crate::key::LockKey;
use crate::lock::BoxFuture;
use crate::loss::Lost;
use crate::options::Mode;
use crate::portable::PortableHold;
use crate::validity::Validity;

/// The interface behind a [`LockGuard`](crate::LockGuard). Wrappers and other locks implement it. Users see
/// only the guard.
///
/// The guard shares it with watchers of the hold, so methods take an `Arc`. The guard calls
/// [`release`](Grant::release), [`release_in_batch`](Grant::release_in_batch) or [`abandon`](Grant::abandon)
/// once, or none of them after [`into_ref`](Grant::into_ref) has succeeded.
pub trait Grant: Debug + Send + Sync + 'static {
    /// Returns the key.
    fn key(&self) -> &LockKey;

    /// Returns the identity of this grant.
    fn holder(&self) -> HolderId;

    /// Returns the identity by which the store knows the hold. See
    /// [`LockGuard::stored_holder`](crate::LockGuard::stored_holder). By default the same as
    /// [`holder`](Grant::holder).
    fn stored_holder(&self) -> HolderId {
        self.holder()
    }

    /// Returns the fencing token, if the store has tokens.
    fn token(&self) -> Option<FencingToken>;

    /// Returns the mode of the grant. By default exclusive.
    fn mode(&self) -> Mode {
        Mode::Exclusive
    }

    /// Returns the number of a [permit](Mode::Permit), which no other live permit of the key has. By default `None`.
    fn permit(&self) -> Option<u32> {
        None
    }

    /// Returns the current validity, computed from the clock.
    fn validity(&self) -> Validity;

    /// Returns how much longer the grant is valid if the store confirms nothing more. The value must not be
    /// too large. `None` if it does not end by itself, zero once it is lost or ended.
    fn remaining(&self) -> Option<Duration>;

    /// Returns a future that resolves when the grant is lost.
    fn lost(&self) -> Lost;

    /// Waits until the validity differs from `seen` or the grant has ended, and returns it. Cancel safe. By default
    /// it resolves at the end only, because this crate has no timer for the moment when doubt begins.
    fn validity_changed(self: Arc<Self>, seen: Validity) -> BoxFuture<'static, Validity> {
        Box::pin(async move {
            if self.validity() == seen {
                self.lost().ended().await;
            }
            self.validity()
        })
    }

    /// Waits for a request to release. See the method of [`LockGuard`](crate::LockGuard). Cancel safe. By default it
    /// never resolves.
    fn asked(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Box::pin(std::future::pending())
    }

    /// Returns an extra of the store by its type. `None` once the grant was released. Wrappers forward this call.
    fn extension(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)>;

    /// Renews the lease now, for `ttl` or its current TTL. Cancel safe: a dropped call may still renew, and
    /// validity never claims more than the store confirmed.
    fn renew(self: Arc<Self>, ttl: Option<Duration>) -> BoxFuture<'static, Result<(), Error>>;

    /// Queries the store whether the grant is still held. See
    /// [`LockGuard::confirm`](crate::LockGuard::confirm). Cancel safe. By default
    /// [`Unsupported`](crate::ErrorKind::Unsupported).
    fn confirm(self: Arc<Self>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(std::future::ready(Err(Error::unsupported("confirmation of a grant"))))
    }

    /// Changes the label of the hold. See [`LockGuard::relabel`](crate::LockGuard::relabel), which has checked the
    /// text. Cancel safe: a dropped call may still change the label. By default
    /// [`Unsupported`](crate::ErrorKind::Unsupported).
    fn relabel(self: Arc<Self>, label: Arc<str>) -> BoxFuture<'static, Result<(), Error>> {
        let _ = label;
        Box::pin(std::future::ready(Err(Error::unsupported("label that can be changed"))))
    }

    /// Gives the hold out of this client. See [`LockGuard::into_ref`](crate::LockGuard::into_ref). `Ok` has ended the
    /// grant. In every other case, also if the call is dropped, the guard [abandons](Grant::abandon) it. By default
    /// [`Unsupported`](crate::ErrorKind::Unsupported).
    fn into_ref(self: Arc<Self>, ttl: Duration) -> BoxFuture<'static, Result<PortableHold, Error>> {
        let _ = ttl;
        Box::pin(std::future::ready(Err(Error::unsupported("hold that another process can adopt"))))
    }

    /// Releases the grant. See [`LockGuard::release`](crate::LockGuard::release). If the returned future is
    /// dropped, polled or not, the release goes on in the background.
    fn release(self: Arc<Self>) -> Release;

    /// Releases like [`release`](Grant::release), for a caller that releases several grants of one lock before
    /// it polls. A lock can then release them together. By default each grant is released separately.
    fn release_in_batch(self: Arc<Self>) -> Release {
        self.release()
    }

    /// Releases the grant of a dropped guard. Synchronous, needs no runtime, never blocks and never panics.
    fn abandon(self: Arc<Self>);
}

/// A release in progress. Resolves to the result of [`LockGuard::release`](crate::LockGuard::release), also if
/// it is polled again.
#[must_use = "the answer tells whether the lock was held until the end"]
pub struct Release(ReleaseState);

enum ReleaseState {
    Ready(Result<(), Error>),
    Pending(BoxFuture<'static, Result<(), Error>>),
}

impl Release {
    /// Makes a release with a known result, for stores without I/O. Allocates nothing.
    pub const fn ready(answer: Result<(), Error>) -> Self {
        Self(ReleaseState::Ready(answer))
    }

    /// Makes a release that resolves with `answer`.
    pub fn pending(answer: impl Future<Output = Result<(), Error>> + Send + 'static) -> Self {
        Self(ReleaseState::Pending(Box::pin(answer)))
    }

    /// Maps the error, for wrappers whose keys differ from the store's.
    pub fn map_err(self, f: impl FnOnce(Error) -> Error + Send + 'static) -> Self {
        match self.0 {
            ReleaseState::Ready(answer) => Self::ready(answer.map_err(f)),
            ReleaseState::Pending(answer) => Self::pending(async move { answer.await.map_err(f) }),
        }
    }
}

impl Future for Release {
    type Output = Result<(), Error>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let ReleaseState::Pending(answer) = &mut self.0 {
            match answer.as_mut().poll(cx) {
                Poll::Ready(answer) => self.0 = ReleaseState::Ready(answer),
                Poll::Pending => return Poll::Pending,
            }
        }
        match &self.0 {
            ReleaseState::Ready(answer) => Poll::Ready(answer.clone()),
            ReleaseState::Pending(_) => Poll::Pending,
        }
    }
}

impl Debug for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            ReleaseState::Ready(answer) => f.debug_tuple("Ready").field(answer).finish(),
            ReleaseState::Pending(_) => f.write_str("Pending"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;
    use crate::error::ErrorKind;

    #[test]
    fn an_answer_stays_what_it_was() {
        let mut cx = Context::from_waker(Waker::noop());
        for mut release in
            [Release::ready(Err(Error::closed())), Release::pending(async { Err(Error::closed()) })]
        {
            for _ in 0..2 {
                let Poll::Ready(Err(error)) = Pin::new(&mut release).poll(&mut cx) else {
                    panic!("{release:?}")
                };
                assert_eq!(error.kind(), ErrorKind::Closed);
            }
        }
    }
}
