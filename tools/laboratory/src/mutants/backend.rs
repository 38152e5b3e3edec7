//! A small correct backend over the mutants' server, with one optional fault.

pub(crate) mod fault;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    AdminCapabilities, Capabilities, Error, ErrorKind, Fairness, Fencing, FencingToken, HolderId, KeyInfo,
    LeaseBounds, ListQuery, LockAdmin, LockKey, LossReason, OnCooldown, Scope,
};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Contended, Events, HoldRef, Moment, ReleaseReply, Renewed, Request,
    Timing, Waiting,
};
use tokio::sync::oneshot;

use self::fault::BackendFault as Fault;
use super::connection::Connection;
use super::server::fence::SmallFence;
use super::server::record::LATE_BY;
use super::server::{EventSink, FEW_HOLDS, Requester, Server};
use leasehold_conformance::Op;

/// Interval between the checks of a waiter.
const POLL: Duration = Duration::from_millis(250);
const HOUR: Duration = Duration::from_secs(3600);
/// Longest chain of local grants of one grant of the store.
pub(crate) const HAND_OVER: Duration = Duration::from_millis(300);

/// One client's backend.
#[derive(Debug)]
pub(crate) struct SmallBackend {
    connection: Arc<Connection>,
    capabilities: Capabilities,
    fault: Fault,
    queues: bool,
    events: OnceLock<Events>,
    /// The places in the queue that attempts have taken, until their waits.
    places: Mutex<BTreeMap<HolderId, Place>>,
}

/// A place in the queue.
#[derive(Debug)]
struct Place {
    answer: oneshot::Receiver<Attempt>,
    /// The time before the request.
    asked_at: Option<Moment>,
}

impl SmallBackend {
    /// Creates a backend that waits in the store's queue if `queues`, otherwise by polling.
    pub(crate) fn new(connection: Arc<Connection>, queues: bool) -> Self {
        let fault = connection.server().fault();
        let mut capabilities = capabilities(fault);
        (capabilities.relabel, capabilities.portable) = (true, true);
        if queues {
            capabilities.fairness = Fairness::Fifo;
        }
        if fault.reserves() {
            capabilities.handover_for = HAND_OVER;
        }
        Self { connection, capabilities, fault, queues, events: OnceLock::new(), places: Mutex::default() }
    }

    fn places(&self) -> MutexGuard<'_, BTreeMap<HolderId, Place>> {
        self.places.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Option<Moment> {
        self.events.get().map(Events::now)
    }

    /// Gives contended requests that may queue a place in the queue.
    fn queue(&self, requests: &[Request], answers: &mut [Result<Attempt, Error>], asked_at: Option<Moment>) {
        for (request, answer) in requests.iter().zip(answers) {
            let Ok(Attempt::Contended(contended)) = answer else { continue };
            if request.may_queue || self.fault == Fault::TryQueues {
                let server = self.connection.server();
                let answer = server.enqueue(self.connection.requester(), request.clone());
                self.places().insert(request.holder, Place { answer, asked_at });
                contended.queued = request.may_queue;
            }
        }
    }

    /// Adds the fence of the grant to a granted attempt.
    fn fenced(&self, request: &Request, attempt: Attempt) -> Attempt {
        match attempt {
            Attempt::Granted(mut granted) => {
                let token = granted.token.map_or(0, FencingToken::as_u64);
                let server = self.connection.server();
                granted.extension =
                    Some(Box::new(SmallFence::new(server, &request.key, request.holder, token)));
                Attempt::Granted(granted)
            }
            other => other,
        }
    }

    /// Runs `work` for each of `items` in one call.
    async fn each<I: Sync, T: Send>(
        &self,
        op: Op,
        items: &[I],
        work: impl Fn(&Server, Requester, &I) -> Result<T, Error> + Send,
    ) -> Vec<Result<T, Error>> {
        let done = self
            .connection
            .call(op, |server, requester| {
                items.iter().map(|item| work(server, requester, item)).collect::<Vec<_>>()
            })
            .await;
        let mut answers = match done {
            Ok(answers) => answers,
            Err(kind) => items.iter().map(|_| Err(self.error(kind))).collect(),
        };
        match self.fault {
            Fault::AnswersReversed => answers.reverse(),
            Fault::NeighbourFails if answers.iter().any(Result::is_err) => {
                answers = items.iter().map(|_| Err(self.error(ErrorKind::Unavailable))).collect();
            }
            _ => {}
        }
        answers
    }

    fn error(&self, kind: ErrorKind) -> Error {
        match self.fault {
            Fault::ErrorsAlike => Error::new(ErrorKind::Unavailable, "something went wrong"),
            _ => Error::new(kind, "the store was told to answer so"),
        }
    }
}

/// Returns the capabilities that the store declares. Under some faults they are untrue.
pub(crate) fn capabilities(fault: Fault) -> Capabilities {
    let mut has = Capabilities::new(Scope::Process);
    let default = Duration::from_secs(10);
    has.lease = Some(LeaseBounds::new(Some(default), Duration::from_millis(10), 24 * HOUR));
    has.fencing = Fencing::Durable;
    has.max_holds = (fault == Fault::FewHolds).then_some(FEW_HOLDS);
    has.fairness = match fault {
        Fault::FifoIsPolled => Fairness::Fifo,
        _ => Fairness::Unordered,
    };
    has.loss_detection = Duration::from_secs(1);
    has.undo = Duration::from_secs(1);
    has.handover = Duration::from_secs(1);
    has.crash_release = Some(default);
    has.cooldown = true;
    has.ends_late_by = if fault == Fault::EndsLate { LATE_BY } else { Duration::ZERO };
    has.admin = match fault {
        Fault::ForceUndeclared => AdminCapabilities::read_only(),
        _ => AdminCapabilities::all(),
    };
    has
}

impl fmt::Display for SmallBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.fault {
            Fault::PasswordShown => f.write_str("small://app:hunter2@localhost/mutants"),
            _ => f.write_str("small://app@localhost/mutants"),
        }
    }
}

#[async_trait]
impl Backend for SmallBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.waiting = match self.fault {
            Fault::NoPollNoWake | Fault::NoPollAtExpiry => Waiting::Poll { every: HOUR },
            _ if self.queues => Waiting::Store,
            _ => Waiting::Poll { every: POLL },
        };
        timing.handover_for = self.capabilities.handover_for;
        timing
    }

    fn attach(&self, events: Events) {
        self.connection.listen(Arc::new(Listener(events.clone())));
        let _ = self.events.set(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        if let Some(kind) = self.connection.refusal(Op::Acquire).await {
            return requests.iter().map(|_| Ok(Attempt::Refused(self.error(kind)))).collect();
        }
        if self.connection.keeps(&requests) {
            return std::future::pending().await;
        }
        let attempt = |_: &Server, requester, request: &Request| {
            self.connection.attempt(requester, request).map(|attempt| self.fenced(request, attempt))
        };
        let ask = || self.each(Op::Acquire, &requests, attempt);
        let asked_at = self.now();
        let mut answers = ask().await;
        if self.fault.queues_at_once() {
            self.queue(&requests, &mut answers, asked_at);
        }
        if self.fault == Fault::TryWaits {
            for _ in 0..20 {
                if !answers.iter().any(|a| matches!(a, Ok(Attempt::Contended(_)))) {
                    break;
                }
                tokio::time::sleep(POLL).await;
                answers = ask().await;
            }
        }
        if self.fault == Fault::ErrorIsContended {
            for answer in answers.iter_mut().filter(|a| a.is_err()) {
                *answer = Ok(Attempt::Contended(Contended::new()));
            }
        }
        answers
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        if let Some(kind) = self.connection.refusal(Op::Wait).await {
            return Ok(Attempt::Refused(self.error(kind)));
        }
        let server = self.connection.server();
        // The lease of a grant counts from this time, not from the start of a wait that might have been long. It is read
        // before each request that can grant, because the reply to that request can be late.
        let mut asked_at = self.now();
        let enters = |server: &Server, requester| {
            let has_place = self.places().contains_key(&request.holder);
            (!has_place).then(|| server.enqueue(requester, request.clone()))
        };
        let queued = self.connection.call(Op::Wait, enters).await.map_err(|kind| self.error(kind))?;
        let place = self.places().remove(&request.holder);
        let mut answer = match (queued, place) {
            (Some(answer), _) => answer,
            (None, Some(place)) => {
                asked_at = place.asked_at;
                place.answer
            }
            (None, None) => return Err(self.error(ErrorKind::OutcomeUnknown)),
        };
        let has_it = || server.inspect(&request.key).holder().and_then(|hold| hold.holder);
        let first = has_it();
        let mut latest = first;
        loop {
            let ends = server.inspect(&request.key).holder().and_then(|hold| hold.expires_in);
            let pause = match self.fault {
                Fault::QueueSleepsToTheOldEnd => ends.unwrap_or(POLL),
                Fault::QueueWatchesTheFirstHolder if has_it() != first => HOUR,
                _ => POLL,
            };
            tokio::select! {
                biased;
                granted = &mut answer => {
                    let mut attempt = granted.map_err(|_| self.error(ErrorKind::Unavailable))?;
                    if let Attempt::Granted(granted) = &mut attempt {
                        granted.asked_at = match self.fault {
                            Fault::QueueCountsFromPickUp => self.now(),
                            _ => asked_at,
                        };
                    }
                    return Ok(self.fenced(&request, attempt));
                }
                () = stop.cancelled() => {
                    if self.fault == Fault::QueueIgnoresStop {
                        std::mem::forget(answer);
                        return Ok(Attempt::Contended(Contended::new()));
                    }
                    server.leave(self.connection.client(), &request.key, request.holder);
                    let attempt = answer.try_recv().unwrap_or_else(|_| Attempt::Contended(Contended::new()));
                    return Ok(self.fenced(&request, attempt));
                }
                // The end of a lease sends no event, so the server must be called to notice it.
                () = tokio::time::sleep(pause) => {
                    asked_at = self.now();
                    latest = has_it().or(latest);
                    let unaware = latest != first && !server.was_announced(&request.key, request.holder);
                    if unaware && self.fault == Fault::QueueTellsTheNextAlone {
                        continue;
                    }
                    server.serve(self.connection.client(), &request.key);
                    let leaves = request.on_cooldown == OnCooldown::NotDue;
                    let cooling = || server.cooling(self.connection.requester(), &request.key);
                    if let Some(held) = leaves.then(cooling).flatten() {
                        server.leave(self.connection.client(), &request.key, request.holder);
                        return Ok(Attempt::Contended(held));
                    }
                }
            }
        }
    }

    async fn renew(&self, mut holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        if self.fault == Fault::RenewalsInKeyOrder {
            holds.sort_by(|a, b| a.key.cmp(&b.key));
        }
        let mut answers =
            self.each(Op::Renew, &holds, |server, requester, hold| Ok(server.renew(requester, hold))).await;
        if self.fault == Fault::RenewFailureIsExtended {
            answers
                .iter_mut()
                .filter(|answer| answer.is_err())
                .for_each(|answer| *answer = Ok(Renewed::Extended));
        }
        let gone = answers.iter().any(|a| matches!(a, Ok(Renewed::Gone(_))));
        if gone && self.fault == Fault::NeighbourLost {
            answers = holds.iter().map(|_| Ok(Renewed::Gone(LossReason::Gone))).collect();
        }
        if gone && self.fault == Fault::NeighbourFails {
            answers = holds.iter().map(|_| Err(self.error(ErrorKind::Unavailable))).collect();
        }
        answers
    }

    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        Ok(self.connection.server().relabel(self.connection.requester(), &hold, label))
    }

    async fn give_out(&self, hold: HoldRef) -> Result<Renewed, Error> {
        let give_out = |server: &Server, requester| server.give_out(requester, &hold);
        let renewed = self.connection.call(Op::Renew, give_out).await.map_err(|kind| self.error(kind))?;
        if self.fault == Fault::OldProcessRenews {
            let (connection, hold) = (Arc::clone(&self.connection), hold.clone());
            let every = hold.ttl.unwrap_or(POLL) / 3;
            tokio::spawn(async move {
                let server = connection.server();
                while server.renew(connection.requester(), &hold) == Renewed::Extended {
                    tokio::time::sleep(every).await;
                }
            });
        }
        Ok(renewed)
    }

    async fn adopt(&self, request: Request, given: HoldRef) -> Result<Attempt, Error> {
        if let Some(kind) = self.connection.refusal(Op::Acquire).await {
            return Ok(Attempt::Refused(self.error(kind)));
        }
        let adopt = |server: &Server, requester| server.adopt(requester, &request, &given);
        let adopted = self.connection.call(Op::Acquire, adopt).await.map_err(|kind| self.error(kind))?;
        Ok(self.fenced(&request, adopted))
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        if self.fault != Fault::QueuedAcquireStays {
            holds.iter().for_each(|hold| drop(self.places().remove(&hold.holder)));
        }
        if self.fault == Fault::ReleaseIsLate {
            let (connection, late) = (Arc::clone(&self.connection), holds.clone());
            tokio::spawn(async move {
                tokio::time::sleep(Duration::from_secs(5)).await;
                let requester = connection.requester();
                for hold in late {
                    connection.server().release(requester, &hold);
                }
            });
            return holds.iter().map(|_| Ok(ReleaseReply::new(true))).collect();
        }
        let stopped = AtomicBool::new(false);
        let release = |_: &Server, requester, hold: &HoldRef| {
            if stopped.load(Ordering::Relaxed) {
                return Ok(ReleaseReply::new(false));
            }
            let freed = self.connection.release(requester, hold).map_err(|kind| self.error(kind))?;
            stopped.store(!freed.was_held && self.fault == Fault::ReleaseStopsAtGone, Ordering::Relaxed);
            Ok(freed)
        };
        self.each(Op::Release, &holds, release).await
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        if self.fault == Fault::OldProcessEnds {
            self.connection.abort();
        }
        self.connection.server().leave_all(self.connection.client());
    }

    fn abort(&self) {
        self.connection.abort();
    }
}

#[async_trait]
impl LockAdmin for SmallBackend {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        self.administer()?;
        Ok(self.connection.server().inspect(key))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        self.administer()?;
        Ok(self.connection.server().list(query))
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        self.administer()?;
        Ok(self.connection.server().end(key, Some(holder), LossReason::ForcedRelease, true))
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        self.administer()?;
        Ok(self.connection.server().ask(key, holder))
    }
}

impl SmallBackend {
    fn administer(&self) -> Result<(), Error> {
        match self.fault {
            Fault::AdminMissing => Err(Error::unsupported("inspection")),
            _ => Ok(()),
        }
    }
}

/// Passes the server's events to the engine.
#[derive(Debug)]
struct Listener(Events);

impl EventSink for Listener {
    fn lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        self.0.lost(key, holder, reason);
    }

    fn wake(&self, key: &LockKey) {
        self.0.wake(key);
    }

    fn asked(&self, key: &LockKey, holder: HolderId) {
        self.0.asked(key, holder);
    }

    fn awaited(&self, key: &LockKey) {
        self.0.awaited(key);
    }
}
