//! The header `Idempotency-Key` in an axum app.

mod answer;
#[cfg(test)]
mod fuzz;
mod header;
mod idem_tx;

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::extract::{OriginalUri, Request};
use axum::response::Response;
use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{Method, StatusCode};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use leasehold_api::BoxFuture;
use tower_layer::Layer;
use tower_service::Service;

use self::answer::Refusal;
use self::idem_tx::Shared;
use crate::begin::Begin;
use crate::ident::{Fingerprint, Ident, fingerprint};
use crate::store::IdempotencyStore;
use crate::stored::Stored;

pub use self::idem_tx::IdemTx;

const DEFAULT_MAX_REQUEST: usize = 1024 * 1024;

/// What a client gets that repeats a finished request.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnReplay {
    /// The stored response, with `idempotent-replayed: true`.
    #[default]
    Answer,
    /// 409 without `Retry-After`: the request was carried out, and a repetition is refused. One that was rejected was
    /// not carried out: its repetition is given the stored response.
    Refuse,
}

/// Middleware that carries out each request with an `Idempotency-Key` once: its handler's effects, made through
/// [`IdemTx`], and its response are committed together, and a repetition is given the stored response.
///
/// The [crate](crate#in-an-axum-app) shows it, and has the table of answers.
pub struct IdempotencyLayer<S> {
    settings: Arc<Settings<S>>,
}

type Principal = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;

#[derive(Clone)]
struct Settings<S> {
    store: S,
    principal: Principal,
    required: bool,
    methods: Vec<Method>,
    on_replay: OnReplay,
    max_request: usize,
}

impl<S: IdempotencyStore> IdempotencyLayer<S> {
    /// For requests with the methods POST and PATCH, which must have a key. `principal` names the authenticated client,
    /// within whose scope a key is unique; a request for which it has none is answered with 500, because clients that
    /// share a scope would be given each other's responses.
    #[must_use]
    pub fn new(store: S, principal: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self {
            settings: Arc::new(Settings {
                store,
                principal: Arc::new(principal),
                required: true,
                methods: vec![Method::POST, Method::PATCH],
                on_replay: OnReplay::default(),
                max_request: DEFAULT_MAX_REQUEST,
            }),
        }
    }

    /// Whether a request without a key is refused, which is so unless set. Otherwise it goes to its handler, which
    /// cannot take [`IdemTx`] then.
    #[must_use]
    pub fn required(self, required: bool) -> Self {
        self.with(|settings| settings.required = required)
    }

    /// The methods whose requests have keys; all others pass.
    #[must_use]
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|settings| settings.methods = methods.into_iter().collect())
    }

    /// What a client gets that repeats a finished request.
    #[must_use]
    pub fn on_replay(self, policy: OnReplay) -> Self {
        self.with(|settings| settings.on_replay = policy)
    }

    /// The largest body of a request, in bytes: 1 MiB unless set. It is read before the handler begins, as part of the
    /// fingerprint.
    #[must_use]
    pub fn max_request(self, bytes: usize) -> Self {
        self.with(|settings| settings.max_request = bytes)
    }

    fn with(mut self, change: impl FnOnce(&mut Settings<S>)) -> Self {
        change(Arc::make_mut(&mut self.settings));
        self
    }
}

impl<S> Clone for IdempotencyLayer<S> {
    fn clone(&self) -> Self {
        Self { settings: Arc::clone(&self.settings) }
    }
}

impl<S: fmt::Debug> fmt::Debug for IdempotencyLayer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdempotencyLayer")
            .field("store", &self.settings.store)
            .field("required", &self.settings.required)
            .field("methods", &self.settings.methods)
            .field("on_replay", &self.settings.on_replay)
            .finish_non_exhaustive()
    }
}

impl<S, I> Layer<I> for IdempotencyLayer<S> {
    type Service = Idempotent<S, I>;

    fn layer(&self, inner: I) -> Idempotent<S, I> {
        Idempotent { settings: Arc::clone(&self.settings), inner }
    }
}

/// The service that [`IdempotencyLayer`] makes of another.
pub struct Idempotent<S, I> {
    settings: Arc<Settings<S>>,
    inner: I,
}

impl<S, I: Clone> Clone for Idempotent<S, I> {
    fn clone(&self) -> Self {
        Self { settings: Arc::clone(&self.settings), inner: self.inner.clone() }
    }
}

impl<S, I> fmt::Debug for Idempotent<S, I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Idempotent").finish_non_exhaustive()
    }
}

impl<S, I> Service<Request> for Idempotent<S, I>
where
    S: IdempotencyStore,
    I: Service<Request, Response = Response> + Clone + Send + 'static,
    I::Future: Send,
{
    type Response = Response;
    type Error = I::Error;
    type Future = BoxFuture<'static, Result<Response, I::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), I::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        // The one that is ready goes, its clone stays.
        let next = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, next);
        let settings = Arc::clone(&self.settings);
        Box::pin(async move { settings.serve(request, inner).await })
    }
}

impl<S: IdempotencyStore> Settings<S> {
    async fn serve<I>(&self, request: Request, mut inner: I) -> Result<Response, I::Error>
    where
        I: Service<Request, Response = Response> + Send,
    {
        if !self.methods.contains(request.method()) {
            return inner.call(request).await;
        }
        let (parts, body) = request.into_parts();
        let key = match header::key(&parts.headers) {
            Ok(Some(key)) => key,
            Ok(None) if self.required => return Ok(Refusal::MissingKey.into()),
            Ok(None) => return inner.call(Request::from_parts(parts, body)).await,
            Err(why) => return Ok(Refusal::BadKey(why).into()),
        };
        let (fresh, parts, body) = match self.begin(parts, body, &key).await {
            Ok(begun) => begun,
            Err(response) => return Ok(*response),
        };
        let shared = Shared::new(fresh);
        let mut request = Request::from_parts(parts, Body::from(body));
        request.extensions_mut().insert(shared.clone());
        // Dropped here, by an error, a panic or a client that is gone, it is rolled back.
        let response = inner.call(request).await?;
        let Some(fresh) = shared.take() else {
            tracing::error!("a handler has kept the transaction of its idempotency key; it is rolled back");
            return Ok(Refusal::Kept.into());
        };
        Ok(self.end(fresh, response).await)
    }

    /// The key and the transaction, or what the client is told.
    async fn begin(
        &self,
        parts: Parts,
        body: Body,
        key: &str,
    ) -> Result<(S::Fresh, Parts, Bytes), Box<Response>> {
        let refuse = |refusal: Refusal| Box::new(Response::from(refusal));
        let Some(scope) = (self.principal)(&parts) else {
            tracing::error!(
                "a request with an idempotency key has no principal; authenticate it before this layer"
            );
            return Err(refuse(Refusal::NoPrincipal));
        };
        let ident = Ident::new(scope, key).map_err(|error| {
            tracing::error!(%error, "the principal of a request cannot be a scope");
            refuse(Refusal::NoPrincipal)
        })?;
        let body = match Limited::new(body, self.max_request).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => return Err(refuse(Refusal::RequestTooLarge)),
            Err(_) => return Err(refuse(Refusal::BrokenRequest)),
        };
        let fingerprint = of_request(&parts, &body);
        match self.store.begin(&ident, &fingerprint).await {
            Ok(Begin::Fresh(fresh)) => Ok((fresh, parts, body)),
            Ok(Begin::Replay(stored)) => Err(Box::new(match self.on_replay {
                OnReplay::Refuse if !stored.is_rejected() => Refusal::DoneBefore.into(),
                _ => answer::replay(&stored),
            })),
            Ok(Begin::InFlight { retry_after }) => Err(refuse(Refusal::InFlight(retry_after))),
            Ok(Begin::Mismatch) => Err(refuse(Refusal::Mismatch)),
            Err(error) => {
                tracing::error!(%error, "an idempotency key could not be begun");
                Err(refuse(Refusal::of(&error)))
            }
        }
    }

    /// Commits or rolls back, as the response says.
    async fn end(&self, fresh: S::Fresh, response: Response) -> Response {
        let status = response.status();
        if !is_final(status) {
            roll_back::<S>(fresh).await;
            return if status.is_informational() { Refusal::NotStorable.into() } else { response };
        }
        let (parts, body) = response.into_parts();
        let body = match Limited::new(body, self.store.max_body()).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) => {
                tracing::error!(%error, "a response under an idempotency key is not to be stored; it is rolled back");
                roll_back::<S>(fresh).await;
                return Refusal::NotStorable.into();
            }
        };
        let stored = if status.is_client_error() { Stored::rejected } else { Stored::done };
        let Some(stored) = answer::with_headers(stored(status.as_u16(), body.clone()), &parts.headers) else {
            tracing::error!("a header of a response under an idempotency key is no text; it is rolled back");
            roll_back::<S>(fresh).await;
            return Refusal::NotStorable.into();
        };
        match S::finish(fresh, stored).await {
            Ok(_) => Response::from_parts(parts, Body::from(body)),
            Err(error) => {
                tracing::error!(%error, "a request under an idempotency key could not be finished");
                Refusal::of(&error).into()
            }
        }
    }
}

async fn roll_back<S: IdempotencyStore>(fresh: S::Fresh) {
    if let Err(error) = S::rollback(fresh).await {
        tracing::warn!(%error, "a rollback was not confirmed; the server does it when the connection ends");
    }
}

/// Whether a repetition should be given the same response. Not where the client is to try again: later, with other
/// credentials, or in another state.
fn is_final(status: StatusCode) -> bool {
    let again = matches!(status.as_u16(), 401 | 403 | 408 | 409 | 425 | 429);
    !(again || status.is_informational() || status.is_server_error())
}

/// Method, path, query, content type and body. Nothing that changes from one try to the next.
fn of_request(parts: &Parts, body: &Bytes) -> Fingerprint {
    let uri = parts.extensions.get::<OriginalUri>().map_or(&parts.uri, |original| &original.0);
    let (has_query, query) = uri.query().map_or(("", ""), |query| ("?", query));
    let content_type = parts.headers.get(CONTENT_TYPE).map_or(b"".as_slice(), |value| value.as_bytes());
    let text = [parts.method.as_str(), uri.path(), has_query, query].map(str::as_bytes);
    fingerprint(text.into_iter().chain([content_type, body]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprints_have_what_is_asked_for_and_nothing_else() {
        let of = |method: &str, uri: &str, content_type: &str, trace: &str, body: &'static str| {
            let request = http::Request::builder().method(method).uri(uri);
            let request = request.header("content-type", content_type).header("traceparent", trace);
            of_request(&request.body(()).unwrap().into_parts().0, &Bytes::from_static(body.as_bytes()))
        };
        let base = of("POST", "/a?b", "t/p", "1", "x");
        assert_eq!(base, of("POST", "/a?b", "t/p", "2", "x"), "not the trace");
        for other in [
            of("PATCH", "/a?b", "t/p", "1", "x"),
            of("POST", "/A?b", "t/p", "1", "x"),
            of("POST", "/a?c", "t/p", "1", "x"),
            of("POST", "/a", "t/p", "1", "x"),
            of("POST", "/a?", "t/p", "1", "x"),
            of("POST", "/a?b", "t/q", "1", "x"),
            of("POST", "/a?b", "t/p", "1", "y"),
        ] {
            assert_ne!(base, other);
        }
        assert_ne!(of("POST", "/a", "", "", ""), of("POST", "/a?", "", "", ""));
    }
}
