//! What a guard is made of, for those who build locks.

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
use crate::validity::Validity;

/// What a [`LockGuard`](crate::LockGuard) is made of. Wrappers and locks from elsewhere build it; users see the
/// guard.
///
/// It is shared between the guard and whoever watches over the hold, hence the `Arc`. The guard calls
/// [`release`](Grant::release), [`release_in_batch`](Grant::release_in_batch) or [`abandon`](Grant::abandon),
/// once.
pub trait Grant: Debug + Send + Sync + 'static {
    /// The key.
    fn key(&self) -> &LockKey;

    /// The identity of this grant.
    fn holder(&self) -> HolderId;

    /// The fencing token, where the store gives one.
    fn token(&self) -> Option<FencingToken>;

    /// Whether the grant still holds, computed from the clock now.
    fn validity(&self) -> Validity;

    /// How much longer the grant is good without a further word from the store; never more than the
    /// truth. `None`: it does not end by itself. Zero once lost or ended.
    fn remaining(&self) -> Option<Duration>;

    /// Resolves when the grant is lost.
    fn lost(&self) -> Lost;

    /// A typed extra of the store, by type; wrappers forward it.
    fn extension(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)>;

    /// Renews the lease now, with `ttl` or the one it has. Cancel safe: a dropped call may or may not
    /// have renewed, and validity never claims more than was confirmed.
    fn renew(self: Arc<Self>, ttl: Option<Duration>) -> BoxFuture<'static, Result<(), Error>>;

    /// Asks the store whether the grant is still held; see [`LockGuard::confirm`](crate::LockGuard::confirm). Cancel
    /// safe. By default [`Unsupported`](crate::ErrorKind::Unsupported).
    fn confirm(self: Arc<Self>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(std::future::ready(Err(Error::unsupported("confirmation of a grant"))))
    }

    /// Releases; see [`LockGuard::release`](crate::LockGuard::release). Dropping the returned future, polled or
    /// not, still releases in the background.
    fn release(self: Arc<Self>) -> Release;

    /// As [`release`](Grant::release), for a caller that releases others of the same lock right after and
    /// before it polls: a lock may carry them out together. By default each for itself.
    fn release_in_batch(self: Arc<Self>) -> Release {
        self.release()
    }

    /// The path of a dropped guard: synchronous, needs no runtime, never blocks and never panics.
    fn abandon(self: Arc<Self>);
}

/// A release under way. Its answer is that of [`LockGuard::release`](crate::LockGuard::release); polled again
/// after it, it answers the same once more.
#[must_use = "the answer tells whether the lock was held until the end"]
pub struct Release(ReleaseState);

enum ReleaseState {
    Ready(Result<(), Error>),
    Pending(BoxFuture<'static, Result<(), Error>>),
}

impl Release {
    /// A release that is answered already: that of a store without I/O. It allocates nothing.
    pub const fn ready(answer: Result<(), Error>) -> Self {
        Self(ReleaseState::Ready(answer))
    }

    /// A release whose answer is still to come.
    pub fn pending(answer: impl Future<Output = Result<(), Error>> + Send + 'static) -> Self {
        Self(ReleaseState::Pending(Box::pin(answer)))
    }

    /// Changes the error, for wrappers that show their callers another key than the store's.
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
