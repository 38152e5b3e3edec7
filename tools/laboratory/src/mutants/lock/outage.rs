//! Keys for which the first caller of this client finds the store failing. Callers behind it that do not wait for an
//! outage to end read them here.

use std::collections::BTreeMap;

use leasehold_api::{Error, ErrorKind, LockKey};
use tokio::sync::watch;

#[derive(Default)]
pub(super) struct Outages(watch::Sender<BTreeMap<LockKey, Error>>);

impl Outages {
    pub(super) fn of(&self, key: &LockKey) -> Option<Error> {
        self.0.borrow().get(key).cloned()
    }

    /// Waits until `key` has a failure and returns it.
    pub(super) async fn begun(&self, key: &LockKey) -> Error {
        loop {
            let mut changes = self.0.subscribe();
            if let Some(error) = self.of(key) {
                return error;
            }
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }
}

/// An outage as one caller observes it. Its drop ends the outage for the callers behind as well.
pub(super) struct Outage<'a> {
    outages: &'a Outages,
    key: &'a LockKey,
}

impl<'a> Outage<'a> {
    pub(super) fn none_yet(outages: &'a Outages, key: &'a LockKey) -> Self {
        Self { outages, key }
    }

    pub(super) fn goes_on(&self, error: Error) {
        self.outages.0.send_modify(|failing| drop(failing.insert(self.key.clone(), error)));
    }

    pub(super) fn ends(&self) {
        self.outages.0.send_if_modified(|failing| failing.remove(self.key).is_some());
    }
}

impl Drop for Outage<'_> {
    fn drop(&mut self) {
        self.ends();
    }
}

/// Returns whether a retry after the failure might succeed.
pub(super) fn is_passing(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::OutcomeUnknown | ErrorKind::Capacity)
}

pub(super) fn no_answer() -> Error {
    Error::new(ErrorKind::Unavailable, "the store did not answer in time")
}
