//! Observes the leader of a key without being a candidate.

use std::ops::Deref;
use std::time::Duration;

use leasehold_api::{Error, HoldInfo, KeyInfo, Lock, LockKey};
use tokio::time::{Instant, sleep_until};

use crate::pauses::{Pauses, after};

/// The longest wait of one query. Then the next one starts.
const AT_MOST: Duration = Duration::from_secs(3600);

/// Observes the leader of a key by queries, which need the right to inspect and take no lock. `P` points to the
/// lock: a reference ([`ElectExt::observe`](crate::ElectExt::observe)) or an `Arc`.
#[derive(Debug)]
pub struct Observer<P> {
    lock: P,
    key: Result<LockKey, Error>,
    /// The state that the last call returned.
    seen: Option<KeyInfo>,
    pauses: Pauses,
    /// Set after a failed query.
    next_try: Option<Instant>,
}

impl<P: Deref<Target: Lock>> Observer<P> {
    /// Makes an observer of `key`. An unusable key is an error of the first call.
    pub fn new<K>(lock: P, key: K) -> Self
    where
        K: TryInto<LockKey>,
        K::Error: Into<Error>,
    {
        let pauses = Pauses::new(Duration::from_millis(100), Duration::from_secs(10));
        Self { lock, key: key.try_into().map_err(Into::into), seen: None, pauses, next_try: None }
    }

    /// Returns the leader at the first call, and afterwards waits for the next change. `None` means that no client
    /// leads. The label is the leader's value. Changes that last only briefly can be skipped.
    ///
    /// # Errors
    ///
    /// [`Unsupported`](leasehold_api::ErrorKind::Unsupported) on a store without inspection, else the error of
    /// the query, such as [`PermissionDenied`](leasehold_api::ErrorKind::PermissionDenied) for a user without
    /// the right to inspect. The next call queries again, after a pause that grows.
    ///
    /// # Cancel safety
    ///
    /// If dropped, the next call returns the change.
    pub async fn changed(&mut self) -> Result<Option<HoldInfo>, Error> {
        let key = self.key.clone()?;
        if let Some(next_try) = self.next_try {
            sleep_until(next_try).await;
        }
        loop {
            match query(&*self.lock, &key, self.seen.as_ref()).await {
                Err(error) => {
                    self.next_try = Some(after(self.pauses.next()));
                    return Err(error);
                }
                Ok(changed) => {
                    self.next_try = None;
                    self.pauses.reset();
                    if let Some(now) = changed {
                        let leader = now.holder().cloned();
                        self.seen = Some(now);
                        return Ok(leader);
                    }
                }
            }
        }
    }
}

/// Returns the present state at the first query, and afterwards waits for a change.
async fn query(
    lock: &(impl Lock + ?Sized),
    key: &LockKey,
    seen: Option<&KeyInfo>,
) -> Result<Option<KeyInfo>, Error> {
    let admin = lock.admin().ok_or_else(|| Error::unsupported("inspection"))?;
    match seen {
        Some(seen) => admin.changed(seen, AT_MOST).await,
        None => admin.inspect(key).await.map(Some),
    }
}
