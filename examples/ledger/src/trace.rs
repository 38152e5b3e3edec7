//! The record of a round on the page: two requests for one account, and the time of each of their steps.

use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::domain::{Entries, Unavailable};

/// Maximum wait of a request for the other one of its round, in case the page was closed between the two.
const FOR_THE_OTHER: Duration = Duration::from_secs(10);
/// Maximum time that an instance stands still, in case the page was closed.
const LONGEST_STOP: Duration = Duration::from_secs(60);

/// One of the two instances of the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LaneName {
    A,
    B,
}

/// Requests for one account, which has been opened for them.
#[derive(Debug)]
pub(crate) struct Round {
    pub(crate) account: i64,
    /// Whether instance A stands still between reading and writing.
    pub(crate) freezes: bool,
    /// Time that a request works between reading and writing.
    work: Duration,
    begun: Instant,
    requests: Mutex<Vec<TracedRequest>>,
    arrived: watch::Sender<usize>,
    /// Cancelled when the service stops.
    stop: CancellationToken,
}

/// The steps of a request so far. Times are milliseconds since the round began.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct TracedRequest {
    lane: LaneName,
    arrived: u64,
    read: Option<Read>,
    frozen: Option<u64>,
    thawed: Option<u64>,
    wrote: Option<u64>,
    answer: Option<Answer>,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Read {
    at: u64,
    balance: i64,
}

#[derive(Clone, Copy, Debug, Serialize)]
struct Answer {
    at: u64,
    status: u16,
    /// Whether it is the stored answer to an earlier request with the same idempotency key.
    replayed: bool,
}

impl Round {
    pub(crate) fn new(account: i64, freezes: bool, work: Duration, stop: CancellationToken) -> Self {
        Self {
            account,
            freezes,
            work,
            begun: Instant::now(),
            requests: Mutex::default(),
            arrived: watch::Sender::new(0),
            stop,
        }
    }

    /// Returns the milliseconds since the round began.
    pub(crate) fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(crate) fn requests(&self) -> Vec<TracedRequest> {
        self.state().clone()
    }

    /// Records that a request has reached the instance.
    pub(crate) fn arrive(self: &Arc<Self>, lane: LaneName) -> Trace {
        let arrived = self.now();
        let request = TracedRequest {
            lane,
            arrived,
            read: None,
            frozen: None,
            thawed: None,
            wrote: None,
            answer: None,
        };
        let mut requests = self.state();
        requests.push(request);
        self.arrived.send_replace(requests.len());
        Trace(Some(RequestTrace { round: Arc::clone(self), at: requests.len() - 1, lane }))
    }

    fn state(&self) -> MutexGuard<'_, Vec<TracedRequest>> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Records a request of the page. Has no effect on other requests.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trace(Option<RequestTrace>);

#[derive(Clone, Debug)]
struct RequestTrace {
    round: Arc<Round>,
    at: usize,
    lane: LaneName,
}

impl Trace {
    /// Returns the entries, as a handler whose request is recorded sees them.
    pub(crate) fn over<'a, E>(&'a self, entries: &'a mut E) -> Traced<'a, E> {
        Traced { entries, trace: self }
    }

    pub(crate) fn answered(&self, response: &Response) {
        let replayed = response.headers().contains_key("idempotent-replayed");
        let status = response.status().as_u16();
        self.record(|request, at| request.answer = Some(Answer { at, status, replayed }));
    }

    fn record(&self, change: impl FnOnce(&mut TracedRequest, u64)) {
        if let Some(RequestTrace { round, at, .. }) = &self.0 {
            let now = round.now();
            if let Some(request) = round.state().get_mut(*at) {
                change(request, now);
            }
        }
    }

    /// Takes the time that a real handler needs between its decision and its write.
    async fn work(&self) {
        let Some(RequestTrace { round, lane, .. }) = &self.0 else { return };
        if round.freezes
            && *lane == LaneName::A
            && round.state().iter().all(|request| request.frozen.is_none())
        {
            // No await, because the write has to follow at once: a machine that goes on does not check its lock first.
            self.stand_still(round);
            return;
        }
        // Counts from the arrival of both, because browsers and busy machines might deliver one of them later.
        let mut arrived = round.arrived.subscribe();
        let both = arrived.wait_for(|count| *count > 1);
        let _ = timeout(FOR_THE_OTHER, both).await;
        sleep(round.work).await;
    }

    /// Blocks the only thread of its instance, with handlers, renewals and connections, until the other instance has
    /// answered. A suspended virtual machine does the same.
    fn stand_still(&self, round: &Round) {
        self.record(|request, at| request.frozen = Some(at));
        let begun = Instant::now();
        let other_answered =
            || round.state().iter().any(|request| request.lane == LaneName::B && request.answer.is_some());
        while begun.elapsed() < LONGEST_STOP && !round.stop.is_cancelled() {
            thread::sleep(Duration::from_millis(20));
            if begun.elapsed() > 2 * round.work && other_answered() {
                break;
            }
        }
        self.record(|request, at| request.thawed = Some(at));
    }
}

impl<S: Sync> FromRequestParts<S> for Trace {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts.extensions.get().cloned().unwrap_or_default())
    }
}

/// Entries that record each read and write.
pub(crate) struct Traced<'a, E> {
    entries: &'a mut E,
    trace: &'a Trace,
}

impl<E: Entries + Send> Entries for Traced<'_, E> {
    async fn balance(&mut self, holder: i64) -> Result<i64, Unavailable> {
        let balance = self.entries.balance(holder).await?;
        self.trace.record(|request, at| request.read = Some(Read { at, balance }));
        Ok(balance)
    }

    async fn append(&mut self, holder: i64, amount: i64) -> Result<(), Unavailable> {
        self.trace.work().await;
        self.entries.append(holder, amount).await?;
        self.trace.record(|request, at| request.wrote = Some(at));
        Ok(())
    }
}
