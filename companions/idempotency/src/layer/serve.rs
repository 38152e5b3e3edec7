//! Serves one request.

use std::convert::Infallible;
use std::error::Error as _;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::BoxError;
use axum::body::{Body, HttpBody};
use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use http::request::Parts;
use http::{header::RETRY_AFTER, response};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use leasehold_api::ErrorKind;
use leasehold_tower::{Finish, Held, OnGone, OpenCommit, Reads};
use tokio::sync::oneshot;
use tokio::time::timeout;
use tower_service::Service;

use super::answer::{self, KeyRefusal};
use super::idem_tx::HandlerTransaction;
use super::{IdempotencySettings, OnReplay, header, request};
use crate::begin::Begin;
use crate::error::IdempotencyError;
use crate::ident::{Fingerprint, Ident};
use crate::postgres::Isolation;
use crate::store::IdempotencyStore;
use crate::stored::Stored;

/// Maximum time that the locks are held for an unconfirmed commit.
const FIND_OUT: Duration = Duration::from_secs(60);
/// The first and the longest pause between two checks of an unconfirmed commit.
const LOOK_AGAIN: [Duration; 2] = [Duration::from_millis(10), Duration::from_secs(1)];

/// The handler's response.
enum HandlerResponse {
    /// The response is not stored and lets the client try again, so its body is not read here.
    Passing(Response),
    Final(response::Parts, Bytes),
    NotStorable,
}

/// A key that was claimed for this request, and its transaction.
struct BegunRequest<F> {
    fresh: F,
    asked: KeyedRequest,
}

struct KeyedRequest {
    ident: Ident,
    fingerprint: Fingerprint,
}

/// Tells whether the client is still connected while its request is worked on.
struct RequestClient {
    /// Resolves with an error when the client has left.
    here: oneshot::Receiver<Infallible>,
    /// Maximum time for the work after the client has left.
    finish_within: Duration,
}

impl RequestClient {
    /// Returns the result of `work`, or `None` if the client has left and `finish_within` has passed.
    async fn wait_for<T>(self, work: impl Future<Output = T>) -> Option<T> {
        let mut work = pin!(work);
        let mut over = pin!(async {
            let _ = self.here.await;
            tokio::time::sleep(self.finish_within).await;
        });
        poll_fn(|cx| match work.as_mut().poll(cx) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => over.as_mut().poll(cx).map(|()| None),
        })
        .await
    }
}

/// The work of one request, from the begin of its transaction to the end.
struct RequestWork<S: IdempotencyStore> {
    settings: Arc<IdempotencySettings<S>>,
    asked: KeyedRequest,
    shared: HandlerTransaction<S::KeyTransaction>,
    /// The locks of lock layers inside this layer, which are held until the commit.
    open: OpenCommit,
    client: RequestClient,
}

impl<S: IdempotencyStore> IdempotencySettings<S> {
    pub(super) async fn serve<I, B>(
        self: Arc<Self>,
        request: Request,
        mut inner: I,
    ) -> Result<Response, I::Error>
    where
        I: Service<Request, Response = Response<B>> + Send + 'static,
        I::Future: Send,
        I::Error: Send + 'static,
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        if !self.methods.contains(request.method()) {
            return Ok(inner.call(request).await?.map(Body::new));
        }
        let (parts, body) = request.into_parts();
        let key = match header::key(&parts.headers) {
            Ok(Some(key)) => key,
            Ok(None) if self.required => return Ok(KeyRefusal::MissingKey.into()),
            Ok(None) => return Ok(inner.call(Request::from_parts(parts, body)).await?.map(Body::new)),
            Err(why) => return Ok(KeyRefusal::BadKey(why).into()),
        };
        if OpenCommit::is_around(&parts.extensions) {
            tracing::error!(
                "an idempotency layer is inside of a layer that commits a transaction of its own: the two would not be committed together; take one of them, and lock with LockLayer or XactLocks::lock_in"
            );
            return Ok(KeyRefusal::OpenTransaction.into());
        }
        // If a lock layer is outside, that layer decides when the handler is dropped, because the handler must not
        // outlive its lock.
        let is_locked = parts.extensions.get::<Held>().is_some();
        let (BegunRequest { fresh, asked }, parts, body) = match self.begin(parts, body, &key).await {
            Ok(begun) => begun,
            Err(response) => return Ok(*response),
        };
        let mut request = Request::from_parts(parts, Body::from(body));
        let reads = match self.store.isolation() {
            Isolation::ReadCommitted => Reads::Committed,
            Isolation::RepeatableRead | Isolation::Serializable => Reads::Snapshot,
        };
        let open = OpenCommit::around(request.extensions_mut(), reads);
        let shared = HandlerTransaction::new(fresh);
        request.extensions_mut().insert(shared.clone());
        let (leaves, here) = oneshot::channel();
        let client = RequestClient { here, finish_within: self.finish_within };
        let on_gone = self.on_gone;
        let work = RequestWork { settings: self, asked, shared, open, client };
        let work = Box::pin(work.run(inner, request, !is_locked));
        let done = match on_gone {
            OnGone::Finish if !is_locked => Finish::new(work).await,
            _ => work.await,
        };
        drop(leaves);
        done
    }

    /// Begins the key and its transaction, or returns the response to the client.
    async fn begin(
        &self,
        parts: Parts,
        body: Body,
        key: &str,
    ) -> Result<(BegunRequest<S::KeyTransaction>, Parts, Bytes), Box<Response>> {
        let refuse = |refusal: KeyRefusal| Box::new(Response::from(refusal));
        let Some(scope) = (self.principal)(&parts) else {
            tracing::error!(
                "a request with an idempotency key has no principal; authenticate it before this layer"
            );
            return Err(refuse(KeyRefusal::NoPrincipal));
        };
        let ident = Ident::new(scope, key).map_err(|error| {
            tracing::error!(%error, "the principal of a request cannot be a scope");
            refuse(KeyRefusal::NoPrincipal)
        })?;
        let body = match Limited::new(body, self.max_request).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => return Err(refuse(KeyRefusal::RequestTooLarge)),
            Err(_) => return Err(refuse(KeyRefusal::BrokenRequest)),
        };
        let fingerprint = (self.fingerprint)(&parts, &body);
        match self.store.begin(&ident, &fingerprint).await {
            Ok(Begin::Fresh(fresh)) => {
                Ok((BegunRequest { fresh, asked: KeyedRequest { ident, fingerprint } }, parts, body))
            }
            Ok(Begin::Replay(stored)) => Err(Box::new(match self.on_replay {
                OnReplay::Refuse if !stored.is_rejected() => KeyRefusal::DoneBefore.into(),
                _ => answer::replay(&stored),
            })),
            Ok(Begin::InFlight { retry_after }) => Err(refuse(KeyRefusal::InFlight(retry_after))),
            Ok(Begin::Mismatch) => {
                if request::is_multipart(&parts) {
                    tracing::warn!(
                        "a multipart form was repeated with other bytes, perhaps with its boundary alone: see IdempotencyLayer::fingerprint"
                    );
                }
                Err(refuse(KeyRefusal::Mismatch))
            }
            Err(error) => {
                log(&error, "an idempotency key could not be begun");
                Err(refuse(KeyRefusal::of(&error)))
            }
        }
    }

    /// Reads the body to be stored while the locks are still held.
    async fn read<B>(&self, response: Response<B>) -> HandlerResponse
    where
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        if response.status().is_informational() {
            return HandlerResponse::NotStorable;
        }
        let (parts, body) = response.into_parts();
        if !self.is_final(&parts) {
            return HandlerResponse::Passing(Response::from_parts(parts, Body::new(body)));
        }
        match Limited::new(body, self.store.max_body()).collect().await {
            Ok(body) => HandlerResponse::Final(parts, body.to_bytes()),
            Err(error) => {
                tracing::error!(%error, "a response under an idempotency key cannot be stored; its request is rolled back");
                HandlerResponse::NotStorable
            }
        }
    }

    /// Returns whether a repetition gets the same response. Returns `false` for a response that invites the client to
    /// try again later, with other credentials or in another state.
    fn is_final(&self, parts: &response::Parts) -> bool {
        let status = parts.status;
        if status.is_success() || status.is_redirection() {
            return true;
        }
        let again = matches!(status.as_u16(), 401 | 403 | 408 | 409 | 421 | 423 | 424 | 425 | 428 | 429);
        let passes = again || status.is_server_error() || parts.headers.contains_key(RETRY_AFTER);
        !passes && !(self.not_stored)(parts)
    }
}

impl<S: IdempotencyStore> RequestWork<S> {
    /// Calls the handler, commits or rolls back according to its response, and then releases the locks. If
    /// `finishes`, the commit and the release complete even if the client leaves.
    async fn run<I, B>(self, mut inner: I, request: Request, finishes: bool) -> Result<Response, I::Error>
    where
        I: Service<Request, Response = Response<B>> + Send,
        B: HttpBody<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let Self { settings, asked, shared, open, client } = self;
        let count = settings.in_flight.token();
        let handled = async {
            let response = open.scope(inner.call(request)).await?;
            Ok(settings.read(response).await)
        };
        // If this future is dropped here, by a panic or because the client has left, the transaction is rolled back.
        let handled = client.wait_for(handled).await;
        let (answer, failed) = match handled {
            Some(Ok(answer)) => (Some(answer), None),
            Some(Err(error)) => (None, Some(error)),
            None => {
                tracing::error!(
                    "a handler under an idempotency key was dropped, because its client has gone and it did not end in time; it is rolled back"
                );
                (None, None)
            }
        };
        let fresh = shared.take();
        let end = Box::pin(async move {
            let response = match (fresh, answer) {
                (Some(fresh), Some(answer)) => settings.end(fresh, &asked, answer, &open).await,
                (Some(fresh), None) => {
                    roll_back::<S>(fresh).await;
                    KeyRefusal::Kept.into()
                }
                (None, _) => {
                    tracing::error!(
                        "a handler has kept the transaction of its idempotency key; it is rolled back"
                    );
                    KeyRefusal::Kept.into()
                }
            };
            open.end().await;
            drop(count);
            response
        });
        let response = if finishes { Finish::new(end).await } else { end.await };
        failed.map_or(Ok(response), Err)
    }
}

impl<S: IdempotencyStore> IdempotencySettings<S> {
    /// Commits or rolls back according to the response.
    async fn end(
        &self,
        fresh: S::KeyTransaction,
        asked: &KeyedRequest,
        answer: HandlerResponse,
        open: &OpenCommit,
    ) -> Response {
        let (parts, body) = match answer {
            HandlerResponse::Final(parts, body) => (parts, body),
            HandlerResponse::Passing(response) => {
                roll_back::<S>(fresh).await;
                return response;
            }
            HandlerResponse::NotStorable => {
                roll_back::<S>(fresh).await;
                return KeyRefusal::NotStorable.into();
            }
        };
        if let Some(reason) = open.lost() {
            tracing::warn!(%reason, "a lock was lost before the work under it was committed; the work is rolled back");
            roll_back::<S>(fresh).await;
            return KeyRefusal::LockLost.into();
        }
        let stored = if parts.status.is_client_error() { Stored::rejected } else { Stored::done };
        let stored = stored(parts.status.as_u16(), body.clone());
        let Some(stored) = answer::with_headers(stored, &parts.headers, &self.kept_headers) else {
            tracing::error!("a header of a response under an idempotency key is no text; it is rolled back");
            roll_back::<S>(fresh).await;
            return KeyRefusal::NotStorable.into();
        };
        match S::finish(fresh, stored).await {
            Ok(_) => Response::from_parts(parts, Body::from(body)),
            Err(error) => {
                log(&error, "a request under an idempotency key could not be finished");
                if !matches!(&error, IdempotencyError::Store(error) if error.kind() == ErrorKind::OutcomeUnknown)
                {
                    return KeyRefusal::of(&error).into();
                }
                // Holds the locks until the outcome is known, because the commit might be carried out after their
                // release.
                match timeout(FIND_OUT, self.find_out(asked)).await {
                    Ok(response) => response,
                    Err(_) => {
                        tracing::error!(
                            "whether a request under an idempotency key was committed is not known after {FIND_OUT:?}; its locks are released"
                        );
                        KeyRefusal::of(&error).into()
                    }
                }
            }
        }
    }

    /// Begins the key repeatedly until the outcome of an unconfirmed commit is known. While the server is still
    /// committing, the key is in flight.
    async fn find_out(&self, asked: &KeyedRequest) -> Response {
        let mut pause = LOOK_AGAIN[0];
        loop {
            match self.store.begin(&asked.ident, &asked.fingerprint).await {
                Ok(Begin::Replay(stored)) => return answer::replay(&stored),
                Ok(Begin::Fresh(fresh)) => {
                    roll_back::<S>(fresh).await;
                    return KeyRefusal::Store(Some(LOOK_AGAIN[1])).into();
                }
                // Reports the mismatch. Another request has used the key since, so the commit was not carried out.
                Ok(Begin::Mismatch) => return KeyRefusal::Mismatch.into(),
                Ok(Begin::InFlight { .. }) | Err(_) => tokio::time::sleep(pause).await,
            }
            pause = LOOK_AGAIN[1].min(pause * 2);
        }
    }
}

async fn roll_back<S: IdempotencyStore>(fresh: S::KeyTransaction) {
    if let Err(error) = S::rollback(fresh).await {
        tracing::warn!(%error, "a rollback was not confirmed; the server does it when the connection ends");
    }
}

fn log(error: &IdempotencyError, what: &'static str) {
    let cause = error.source().map(tracing::field::display);
    tracing::error!(%error, cause, "{what}");
}
