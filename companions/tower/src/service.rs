//! The service with the lock around it.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use leasehold_api::{BoxFuture, ErrorKind, LockGuard, LockKey};
use tower_service::Service;
use tracing::{debug, error, warn};

use crate::commit::{CommitSlot, Reads};
use crate::finish::Finish;
use crate::held::Held;
use crate::hold::RequestHold;
use crate::key::{KeyError, KeyFor};
use crate::settings::{LayerSettings, OnGone, Until};
use crate::stats::{AdmissionOutcome, InFlightRequest};
use crate::transport::{RETRY_AFTER, Refused, Transport};

/// A service with a lock around it, made by a [`LockLayer`](crate::LockLayer).
///
/// It is always ready. The readiness of the inner service is polled after the grant, so an inner concurrency limit
/// counts running requests and not waiting ones.
pub struct Locked<S, K, T> {
    inner: S,
    settings: Arc<LayerSettings<K, T>>,
}

impl<S, K, T> Locked<S, K, T> {
    pub(crate) fn new(inner: S, settings: Arc<LayerSettings<K, T>>) -> Self {
        Self { inner, settings }
    }
}

impl<S, K, T, Req> Service<Req> for Locked<S, K, T>
where
    S: Service<Req> + Clone + Send + 'static,
    S::Future: Send,
    S::Response: Send + 'static,
    S::Error: Send + 'static,
    K: KeyFor<Req>,
    T: Transport<Req, S::Response, S::Error>,
    Req: Send + 'static,
{
    type Response = T::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<T::Response, S::Error>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Self::Future {
        Box::pin(serve(Arc::clone(&self.settings), self.inner.clone(), request))
    }
}

async fn serve<S, K, T, Req>(
    settings: Arc<LayerSettings<K, T>>,
    inner: S,
    request: Req,
) -> Result<T::Response, S::Error>
where
    S: Service<Req> + Send + 'static,
    S::Future: Send,
    S::Response: Send + 'static,
    S::Error: Send + 'static,
    K: KeyFor<Req>,
    T: Transport<Req, S::Response, S::Error>,
    Req: Send + 'static,
{
    let (mut request, key) = settings.key.key_for(request).await;
    let key = match key {
        Ok(key) => key,
        Err(error) => {
            settings.counters.count(AdmissionOutcome::NoKey);
            error.log();
            return settings.transport.refuse(Refused::NoKey(error));
        }
    };
    let outer = settings.transport.held(&request).cloned();
    let commit = CommitSlot::of(settings.transport.extensions(&request));
    if commit.as_ref().and_then(CommitSlot::reads) == Some(Reads::Snapshot) {
        settings.counters.count(AdmissionOutcome::Nested);
        error!(
            %key,
            "a lock layer is inside of a transaction that reads a snapshot from before the lock: put the lock layer outside of the layer that commits, or have that begin its transactions at READ COMMITTED"
        );
        return settings.transport.refuse(Refused::OpenTransaction);
    }
    let (guard, in_flight) = match settings.admit(key, outer.as_ref(), commit.as_ref()).await {
        Ok(admitted) => admitted,
        Err(why) => return settings.transport.refuse(why),
    };
    // If a lock layer is outside, this layer's setting is ignored, because the handler also needs the outer lock.
    let finishes = settings.on_gone == OnGone::Finish && outer.is_none();
    let held = Held::new(guard.handle(), Arc::clone(&settings.lock), outer);
    let hold =
        RequestHold::new(guard, held.clone(), settings.on_lost, settings.release_within, in_flight, commit);
    settings.transport.attach(&mut request, held);
    // Boxed before the branch, because a future that contains the work twice would be moved with every request. With
    // `Finish`, the handler survives its client.
    let work: BoxFuture<'static, _> = Box::pin(run(settings, inner, request, hold));
    if finishes { Finish::new(work).await } else { work.await }
}

/// Runs the request under the lock. The handler's values are dropped before `hold`.
async fn run<S, K, T, Req>(
    settings: Arc<LayerSettings<K, T>>,
    inner: S,
    request: Req,
    mut hold: RequestHold,
) -> Result<T::Response, S::Error>
where
    S: Service<Req>,
    T: Transport<Req, S::Response, S::Error>,
{
    let handled = hold.run(pin!(call(inner, request))).await;
    let response = match handled {
        Ok(Ok(response)) => response,
        Ok(Err(error)) => {
            hold.release().await;
            return Err(error);
        }
        Err(reason) => {
            drop(hold);
            return settings.transport.refuse(Refused::Lost(reason));
        }
    };
    let (response, hold) = match settings.until {
        Until::BodyEnd => settings.transport.pass(response, Some(hold)),
        Until::Response => (settings.transport.pass(response, None).0, Some(hold)),
    };
    if let Some(hold) = hold {
        hold.release().await;
    }
    Ok(response)
}

/// Calls a service once it is ready.
pub(crate) async fn call<S: Service<Req>, Req>(mut inner: S, request: Req) -> Result<S::Response, S::Error> {
    poll_fn(|cx| inner.poll_ready(cx)).await?;
    inner.call(request).await
}

impl<K, T> LayerSettings<K, T> {
    /// Acquires the lock, or returns the reason for the refusal.
    async fn admit(
        &self,
        key: LockKey,
        outer: Option<&Held>,
        commit: Option<&CommitSlot>,
    ) -> Result<(LockGuard, InFlightRequest), Refused> {
        if outer.is_some_and(|held| held.holds(&self.lock, &key))
            || commit.is_some_and(|commit| commit.keeps(&self.lock, &key))
        {
            self.counters.count(AdmissionOutcome::Nested);
            error!(%key, "a lock layer asks for the key that another one around it, or an open transaction, holds");
            return Err(Refused::Nested(key));
        }
        let Some(waiting) = self.counters.wait(self.max_waiters) else {
            self.counters.count(AdmissionOutcome::TooMany);
            warn!(%key, "more than {} requests wait for the lock", self.max_waiters);
            return Err(Refused::TooMany { retry_after: RETRY_AFTER });
        };
        let granted = if self.fail_fast {
            self.lock.try_acquire(&key, &self.options).await
        } else {
            self.lock.acquire(&key, &self.options).await.map(Some)
        };
        let error = match granted {
            Ok(Some(guard)) => return Ok((guard, waiting.granted())),
            Ok(None) => {
                waiting.refused(AdmissionOutcome::Contended);
                return Err(Refused::Contended { retry_after: RETRY_AFTER });
            }
            Err(error) => error,
        };
        if matches!(error.kind(), ErrorKind::Timeout | ErrorKind::NotDue) {
            waiting.refused(AdmissionOutcome::Contended);
            debug!(%key, %error, "contended");
            let retry_after = error.retry_after().unwrap_or(RETRY_AFTER);
            return Err(Refused::Contended { retry_after });
        }
        if error.kind() == ErrorKind::InvalidKey {
            waiting.refused(AdmissionOutcome::NoKey);
            let error = KeyError::from(error);
            error.log();
            return Err(Refused::NoKey(error));
        }
        waiting.refused(AdmissionOutcome::Unavailable);
        error!(%error, "the lock is not available");
        Err(Refused::Store(error))
    }
}

impl<S: Clone, K, T> Clone for Locked<S, K, T> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), settings: Arc::clone(&self.settings) }
    }
}

impl<S: fmt::Debug, K, T> fmt::Debug for Locked<S, K, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locked").field("inner", &self.inner).field("lock", &self.settings.lock).finish()
    }
}
