//! The header `Idempotency-Key` in an axum app.

mod answer;
#[cfg(test)]
mod fuzz;
mod header;
mod idem_tx;
mod request;
mod serve;

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::BoxError;
use axum::body::HttpBody;
use axum::extract::Request;
use axum::response::Response;
use bytes::Bytes;
use http::request::Parts;
use http::{HeaderName, Method, response};
use leasehold_api::BoxFuture;
use leasehold_tower::OnGone;
use tokio_util::task::TaskTracker;
use tower_layer::Layer;
use tower_service::Service;

use crate::ident::Fingerprint;
use crate::store::IdempotencyStore;

pub use self::idem_tx::IdemTx;

const DEFAULT_MAX_REQUEST: usize = 1024 * 1024;
const DEFAULT_FINISH_WITHIN: Duration = Duration::from_secs(300);

/// The response to a repetition of a finished request.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnReplay {
    /// The stored response, with `idempotent-replayed: true`.
    #[default]
    Answer,
    /// Status 409 without `Retry-After`, because the request was carried out. A repetition of a rejected request
    /// still gets the stored response.
    Refuse,
}

/// Middleware that carries out each request with an `Idempotency-Key` once. The handler makes its effects through
/// [`IdemTx`]. They are committed together with the response, and a repetition gets the stored response.
///
/// The [crate page](crate#in-an-axum-app) has an example and the list of responses.
pub struct IdempotencyLayer<S> {
    settings: Arc<IdempotencySettings<S>>,
}

type Principal = Arc<dyn Fn(&Parts) -> Option<String> + Send + Sync>;
type OfRequest = Arc<dyn Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync>;
type OfResponse = Arc<dyn Fn(&response::Parts) -> bool + Send + Sync>;

#[derive(Clone)]
struct IdempotencySettings<S> {
    store: S,
    principal: Principal,
    required: bool,
    methods: Vec<Method>,
    on_replay: OnReplay,
    max_request: usize,
    fingerprint: OfRequest,
    not_stored: OfResponse,
    kept_headers: Vec<HeaderName>,
    on_gone: OnGone,
    finish_within: Duration,
    /// The requests in flight.
    in_flight: TaskTracker,
}

impl<S: IdempotencyStore> IdempotencyLayer<S> {
    /// Creates a layer that requires a key for the methods POST and PATCH. `principal` returns the authenticated
    /// client, in whose scope a key is unique. If it returns `None`, the request gets status 500, because clients
    /// that share a scope would get each other's responses.
    #[must_use]
    pub fn new(store: S, principal: impl Fn(&Parts) -> Option<String> + Send + Sync + 'static) -> Self {
        Self {
            settings: Arc::new(IdempotencySettings {
                store,
                principal: Arc::new(principal),
                required: true,
                methods: vec![Method::POST, Method::PATCH],
                on_replay: OnReplay::default(),
                max_request: DEFAULT_MAX_REQUEST,
                fingerprint: Arc::new(request::fingerprint_of),
                not_stored: Arc::new(|_| false),
                kept_headers: answer::KEPT.to_vec(),
                on_gone: OnGone::default(),
                finish_within: DEFAULT_FINISH_WITHIN,
                in_flight: TaskTracker::new(),
            }),
        }
    }

    /// Sets whether a request without a key is refused, which is the default. Otherwise its handler runs without a
    /// key and cannot extract [`IdemTx`].
    #[must_use]
    pub fn required(self, required: bool) -> Self {
        self.with(|settings| settings.required = required)
    }

    /// Sets the methods whose requests have keys. Requests with other methods pass unchanged.
    #[must_use]
    pub fn methods(self, methods: impl IntoIterator<Item = Method>) -> Self {
        self.with(|settings| settings.methods = methods.into_iter().collect())
    }

    /// Sets the response to a repetition of a finished request.
    #[must_use]
    pub fn on_replay(self, policy: OnReplay) -> Self {
        self.with(|settings| settings.on_replay = policy)
    }

    /// Sets the size limit of a request's body, in bytes: 1 MiB by default. The layer reads the body before it calls
    /// the handler, because the body is part of the fingerprint.
    #[must_use]
    pub fn max_request(self, bytes: usize) -> Self {
        self.with(|settings| settings.max_request = bytes)
    }

    /// Sets the fingerprint, instead of method, path, query, content type and body. Include everything that the
    /// handler reads.
    ///
    /// Forms with files need this. A client draws a new boundary for each `multipart/form-data` request, so a
    /// repetition has other bytes and gets status 422.
    ///
    /// ```
    /// use leasehold_idempotency::{IdempotencyLayer, MemoryIdempotency, fingerprint};
    ///
    /// // The client names the digest of its file, and the handler compares it.
    /// let keys = IdempotencyLayer::new(MemoryIdempotency::new(), |_| Some("all".to_owned())).fingerprint(|parts, _body| {
    ///     let digest = parts.headers.get("x-content-sha256").map_or(b"".as_slice(), |value| value.as_bytes());
    ///     fingerprint([parts.method.as_str().as_bytes(), parts.uri.path().as_bytes(), digest])
    /// });
    /// # let _ = keys;
    /// ```
    #[must_use]
    pub fn fingerprint(self, of: impl Fn(&Parts, &Bytes) -> Fingerprint + Send + Sync + 'static) -> Self {
        self.with(|settings| settings.fingerprint = Arc::new(of))
    }

    /// Excludes further responses from being stored, so a repetition is carried out: each 4xx for which `is_passing`
    /// returns `true`. It is not called for 2xx and 3xx, which are always stored because their effects are committed.
    #[must_use]
    pub fn not_stored(self, is_passing: impl Fn(&response::Parts) -> bool + Send + Sync + 'static) -> Self {
        self.with(|settings| settings.not_stored = Arc::new(is_passing))
    }

    /// Stores and replays further response headers, beside those in the [list](crate#in-an-axum-app). Headers of the
    /// connection, such as `content-length`, are never stored.
    #[must_use]
    pub fn keep_headers(self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.with(|settings| {
            for name in names.into_iter().filter(answer::is_of_the_response) {
                if !settings.kept_headers.contains(&name) {
                    settings.kept_headers.push(name);
                }
            }
        })
    }

    /// Sets the handling of a client that leaves while the handler runs. If a lock layer is around this layer, its
    /// setting applies instead.
    ///
    /// With [`OnGone::Finish`], the default, the handler runs to its end and is committed. A repetition gets *in
    /// flight* until then, and the response afterwards. With [`OnGone::Cancel`] the handler is dropped at its next
    /// await and rolled back. A client with less patience than the handler then never succeeds.
    #[must_use]
    pub fn on_gone(self, policy: OnGone) -> Self {
        self.with(|settings| settings.on_gone = policy)
    }

    /// Sets how long a handler can run after its client has left: 5 minutes by default. It is then dropped and rolled
    /// back.
    #[must_use]
    pub fn finish_within(self, limit: Duration) -> Self {
        self.with(|settings| settings.finish_within = limit)
    }

    /// Resolves when no request is in flight, including requests whose clients have left. Await it after the server's
    /// shutdown, which does not wait for them, and close the pool afterwards. If the process ends earlier, the
    /// server rolls back the requests in flight, and a repetition carries them out.
    ///
    /// # Cancel safety
    ///
    /// Safe, because it only waits.
    pub async fn idle(&self) {
        // Closes the tracker, because only a closed one can be awaited. It still counts new requests.
        self.settings.in_flight.close();
        self.settings.in_flight.wait().await;
    }

    fn with(mut self, change: impl FnOnce(&mut IdempotencySettings<S>)) -> Self {
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

/// A service wrapped by [`IdempotencyLayer`].
pub struct Idempotent<S, I> {
    settings: Arc<IdempotencySettings<S>>,
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

impl<S, I, B> Service<Request> for Idempotent<S, I>
where
    S: IdempotencyStore,
    I: Service<Request, Response = Response<B>> + Clone + Send + 'static,
    I::Future: Send,
    I::Error: Send + 'static,
    B: HttpBody<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    type Response = Response;
    type Error = I::Error;
    type Future = BoxFuture<'static, Result<Response, I::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), I::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        // Calls the clone that was polled ready, and keeps a fresh clone.
        let next = self.inner.clone();
        let inner = std::mem::replace(&mut self.inner, next);
        let settings = Arc::clone(&self.settings);
        Box::pin(async move { settings.serve(request, inner).await })
    }
}
