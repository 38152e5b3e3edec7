//! Guarding what is not in Postgres: `docs/cookbook/outside-postgres.md`.

use leasehold_api::{FencingToken, Lock, LockExt as _, LockKey, RunError};

/// How often a conditional write is tried.
const TRIES: usize = 10;

/// What was read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Object {
    /// Which version it is.
    pub etag: String,
    /// The token of whoever wrote it, from its metadata.
    pub token: Option<FencingToken>,
    /// The content.
    pub body: Vec<u8>,
}

impl Object {
    /// As it was read.
    #[must_use]
    pub fn new(etag: impl Into<String>, token: Option<FencingToken>, body: Vec<u8>) -> Self {
        Self { etag: etag.into(), token, body }
    }
}

/// What came of a conditional write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_enums)] // The condition held or it did not.
pub enum PutOutcome {
    /// It is written.
    Written,
    /// 412: the object is not the one that was read.
    Changed,
}

/// An object store with conditional writes.
pub trait ObjectStore: Sync {
    /// What the store answers when it does not work.
    type Error: std::error::Error;

    /// The object, its `ETag` and its token, read together.
    fn get(&self, name: &str) -> impl Future<Output = Result<Option<Object>, Self::Error>> + Send;

    /// Writes body and token if the object's `ETag` is `expected` (`If-Match`), or, with `None`, if there is no object
    /// (`If-None-Match: *`).
    fn put_if(
        &self,
        name: &str,
        expected: Option<String>,
        token: FencingToken,
        body: Vec<u8>,
    ) -> impl Future<Output = Result<PutOutcome, Self::Error>> + Send;
}

/// Why an object was not changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FencedError<E: std::error::Error> {
    /// A later holder of the lock has written. Whoever gets this has lost the lock.
    #[error("a later holder of the lock has written; drop what was done")]
    Superseded,
    /// Others of the same token, or older ones, write all the time.
    #[error("the object changed at each of {TRIES} tries; is there a writer without the lock?")]
    Busy,
    /// The store does not work.
    #[error("the object store failed")]
    Store(#[source] E),
}

/// Changes an object unless a later holder has. `change` may be called several times.
///
/// # Errors
///
/// [`FencedError`].
///
/// # Cancel safety
///
/// A dropped call may or may not have written.
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
            // Somebody wrote since: look who it was.
            PutOutcome::Changed => {}
        }
    }
    Err(FencedError::Busy)
}

/// Carries out steps outside of the database, one after the other, as long as the lock is held.
///
/// # Errors
///
/// [`RunError`]; after `Stopped` some steps may have been done.
///
/// # Cancel safety
///
/// Dropping the future drops the step under way.
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
                // `run` looks before each poll; this looks again where the step itself took long.
                if !guard.validity().is_held() {
                    // Lost: `run` ends this body at the next await.
                    std::future::pending::<()>().await;
                }
                effect(step, guard.token()).await;
            }
        })
        .await
}
