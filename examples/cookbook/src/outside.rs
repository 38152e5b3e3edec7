//! Guards objects outside Postgres: `docs/cookbook/outside-postgres.md`.

use leasehold_api::{FencingToken, Lock, LockExt as _, LockKey, RunError};

/// Maximum number of tries of a conditional write.
const TRIES: usize = 10;

/// An object as it was read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Object {
    /// The version of the object.
    pub etag: String,
    /// The fencing token of its last writer, from its metadata.
    pub token: Option<FencingToken>,
    /// The content of the object.
    pub body: Vec<u8>,
}

impl Object {
    /// Creates an object.
    #[must_use]
    pub fn new(etag: impl Into<String>, token: Option<FencingToken>, body: Vec<u8>) -> Self {
        Self { etag: etag.into(), token, body }
    }
}

/// The outcome of a conditional write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // Exhaustive, because these two cases are complete.
pub enum PutOutcome {
    /// The object was written.
    Written,
    /// The object was not written (status 412), because it has changed since the read.
    Changed,
}

/// An object store with conditional writes.
pub trait ObjectStore: Sync {
    /// The store's error.
    type Error: std::error::Error;

    /// Returns the object, its `ETag` and its token, read together.
    fn get(&self, name: &str) -> impl Future<Output = Result<Option<Object>, Self::Error>> + Send;

    /// Writes body and token if the object's `ETag` is `expected` (`If-Match`). With `None`, writes if no object
    /// exists (`If-None-Match: *`).
    fn put_if(
        &self,
        name: &str,
        expected: Option<String>,
        token: FencingToken,
        body: Vec<u8>,
    ) -> impl Future<Output = Result<PutOutcome, Self::Error>> + Send;
}

/// The reason why an object was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FencedError<E: std::error::Error> {
    /// A later holder of the lock has written, so the caller has lost the lock.
    #[error("a later holder of the lock has written; drop what was done")]
    Superseded,
    /// Writers with the same or an older token changed the object at every try.
    #[error("the object changed at each of {TRIES} tries; is there a writer without the lock?")]
    Busy,
    /// The store failed.
    #[error("the object store failed")]
    Store(#[source] E),
}

/// Changes an object unless a later holder of the lock has written. `change` might be called several times.
///
/// # Errors
///
/// [`FencedError`].
///
/// # Cancel safety
///
/// If dropped, the object might have been written.
pub async fn update_fenced<S: ObjectStore>(
    store: &S,
    name: &str,
    token: FencingToken,
    change: impl Fn(Option<&[u8]>) -> Vec<u8>,
) -> Result<(), FencedError<S::Error>> {
    for _ in 0..TRIES {
        let current = store.get(name).await.map_err(FencedError::Store)?;
        let newest = current.as_ref().and_then(|object| object.token);
        if newest.is_some_and(|newest| newest > token) {
            return Err(FencedError::Superseded);
        }
        let body = change(current.as_ref().map(|object| object.body.as_slice()));
        let expected = current.map(|object| object.etag);
        match store.put_if(name, expected, token, body).await.map_err(FencedError::Store)? {
            PutOutcome::Written => return Ok(()),
            // Another client has written since the read, so read again.
            PutOutcome::Changed => {}
        }
    }
    Err(FencedError::Busy)
}

/// Runs steps outside the database one after the other, while the lock is held.
///
/// # Errors
///
/// [`RunError`]. After `Stopped` some steps might have been done.
///
/// # Cancel safety
///
/// If dropped, the running step is dropped.
pub async fn each_while_held<T>(
    lock: &dyn Lock,
    key: &LockKey,
    steps: impl IntoIterator<Item = T>,
    effect: impl AsyncFn(T, Option<FencingToken>),
) -> Result<(), RunError<()>> {
    let request = lock.key(key.clone());
    request
        .run(async |guard| {
            for step in steps {
                // Checks again, because `run` checks only before each poll and a step might take long.
                if !guard.validity().is_held() {
                    // The lock is lost. `run` ends this body at the next await.
                    std::future::pending::<()>().await;
                }
                effect(step, guard.token()).await;
            }
        })
        .await
}
