//! Checks the requests and releases that an engine sends over its link.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, HolderId, LockKey};
use leasehold_engine::{HoldRef, ReleaseReply, Request, Waiting};
use tokio::time::Instant;

/// The replies of the store to the requests of one client.
#[derive(Debug, Default)]
pub(super) struct Requests(Mutex<RequestLog>);

#[derive(Debug, Default)]
struct RequestLog {
    /// Refused requests, which the store does not know.
    refused: BTreeSet<HolderId>,
    /// The keys that this client released while other clients waited: the times of the last such release and
    /// of the one before.
    left: BTreeMap<LockKey, (Instant, Option<Instant>)>,
}

impl Requests {
    /// Checks the requests of a call. Returns the rule and the text of a violation.
    pub(super) fn asked(&self, requests: &[Request], waiting: Waiting) -> Option<(&'static str, String)> {
        let mut state = self.lock();
        for request in requests {
            state.refused.remove(&request.holder);
        }
        let ([request], Waiting::Poll { every }) = (requests, waiting) else { return None };
        let (left, before) = *state.left.get(&request.key)?;
        let since = left.elapsed();
        // A try must not come before every waiter has polled, which takes `every` and a margin for a fast clock. Two
        // cases are allowed: the engine might not know a reply of this instant, and the pause after an earlier release
        // might end now.
        let too_soon = !since.is_zero() && since < every.mul_f64(1.25);
        let at_once = before.is_none_or(|before| left - before > every * 2);
        (too_soon && at_once && !request.waits).then(|| {
            let key = &request.key;
            ("C3", format!("a try asks for {key} {since:?} after it was released here to others who wait"))
        })
    }

    /// Notes that the store refused these requests.
    pub(super) fn refused(&self, requests: &[Request]) {
        self.lock().refused.extend(requests.iter().map(|request| request.holder));
    }

    /// Checks the releases of a call. Returns the rule and the text of a violation.
    pub(super) fn releases(&self, holds: &[HoldRef]) -> Option<(&'static str, String)> {
        let state = self.lock();
        let refused = holds.iter().find(|hold| state.refused.contains(&hold.holder))?;
        let HoldRef { key, holder, .. } = refused;
        Some(("C5", format!("{holder} of {key} was turned down, and is released all the same")))
    }

    /// Notes which of `holds` the store released while other clients waited.
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

/// The longest time until a closing engine has repeated its unanswered releases at a store that replies
/// again. It covers the running call, an abandoned one and the pauses between them.
pub(super) const ASKS_ONCE_MORE: Duration = Duration::from_millis(2_500);
