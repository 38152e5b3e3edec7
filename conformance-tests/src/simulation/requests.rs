//! The judge at the client's end of its link: which requests an engine must not send.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, HolderId, LockKey};
use leasehold_engine::{HoldRef, ReleaseReply, Request, Waiting};
use tokio::time::Instant;

/// How the store answered the requests of one client.
#[derive(Debug, Default)]
pub(super) struct Requests(Mutex<RequestLog>);

#[derive(Debug, Default)]
struct RequestLog {
    /// Requests that were turned down: the store knows nothing of them.
    refused: BTreeSet<HolderId>,
    /// Keys that were released here while others waited for them, when that was known, and when the time before.
    left: BTreeMap<LockKey, (Instant, Option<Instant>)>,
}

impl Requests {
    /// What is asked for now. What is wrong with it, if anything is.
    pub(super) fn asked(&self, requests: &[Request], waiting: Waiting) -> Option<(&'static str, String)> {
        let mut state = self.lock();
        for request in requests {
            state.refused.remove(&request.holder);
        }
        let ([request], Waiting::Poll { every }) = (requests, waiting) else { return None };
        let (left, before) = *state.left.get(&request.key)?;
        let since = left.elapsed();
        // Whoever polls has asked by then, also if the clock of this client is too fast. In the moment of the answer the
        // engine may not have seen it, and what leaves the key alone since the time before ends with that.
        let too_soon = !since.is_zero() && since < every.mul_f64(1.25);
        let at_once = before.is_none_or(|before| left - before > every * 2);
        (too_soon && at_once && !request.waits).then(|| {
            let key = &request.key;
            ("C3", format!("a try asks for {key} {since:?} after it was released here to others who wait"))
        })
    }

    /// The store has turned them down.
    pub(super) fn refused(&self, requests: &[Request]) {
        self.lock().refused.extend(requests.iter().map(|request| request.holder));
    }

    /// What is to be released now. What is wrong with it, if anything is.
    pub(super) fn releases(&self, holds: &[HoldRef]) -> Option<(&'static str, String)> {
        let state = self.lock();
        let refused = holds.iter().find(|hold| state.refused.contains(&hold.holder))?;
        let HoldRef { key, holder, .. } = refused;
        Some(("C5", format!("{holder} of {key} was turned down, and is released all the same")))
    }

    /// The store has let go of `holds`.
    pub(super) fn released(&self, holds: &[HoldRef], answers: &[Result<ReleaseReply, Error>]) {
        let mut state = self.lock();
        for (hold, answer) in holds.iter().zip(answers) {
            if answer.as_ref().is_ok_and(|freed| freed.waiters) {
                let before = state.left.get(&hold.key).map(|(left, _)| *left);
                state.left.insert(hold.key.clone(), (Instant::now(), before));
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, RequestLog> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long it takes at the most until an engine that closes has asked once more what its store did not answer, if that
/// answers now: the call that is under way, one that was abandoned, and the pauses between them.
pub(super) const ASKS_ONCE_MORE: Duration = Duration::from_millis(2_500);
