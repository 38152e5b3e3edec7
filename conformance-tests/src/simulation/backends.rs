//! Backends of the simulation: a client of the table, and a wrapper that calls any backend over a link.

use std::fmt;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    Capabilities, Error, Fairness, Fencing, HolderId, LeaseBounds, LockAdmin, LockKey, Scope,
};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Confirm, Contended, Events, HoldRef, Op, ReleaseReply, Renewed,
    Request, Timing, Waiting,
};
use tokio::time::sleep;

use super::network::{CallFailure, NetworkLink};
use super::table::{HoldKind, SESSION, Table};

/// The lease of a request without a TTL.
pub(crate) const TTL: Duration = Duration::from_secs(3);
/// The longest lease.
pub(crate) const LONGEST_TTL: Duration = Duration::from_secs(6);
/// The limit of one call.
pub(crate) const CALL: Duration = Duration::from_secs(1);
/// The interval at which the engine looks for its leases, and confirms holds without a lease.
pub(crate) const LOOK: Duration = Duration::from_millis(500);
/// The longest chain of local grants of one grant of the store.
pub(crate) const HAND_OVER: Duration = Duration::from_millis(300);
/// The interval at which waiting callers poll.
const POLL: Duration = Duration::from_millis(100);
/// The same in a small scope, in which each poll would multiply the schedules.
const RARE_POLL: Duration = Duration::from_secs(1);
const CLOSE: Duration = Duration::from_secs(5);

/// One client of the table.
pub(crate) struct TableClient {
    table: Arc<Table>,
    client: u64,
    link: Arc<NetworkLink>,
    look: Option<Duration>,
    capabilities: Capabilities,
    events: OnceLock<Events>,
}

impl TableClient {
    pub(crate) fn new(
        table: &Arc<Table>,
        client: u64,
        link: &Arc<NetworkLink>,
        look: Option<Duration>,
    ) -> Self {
        Self {
            table: Arc::clone(table),
            client,
            link: Arc::clone(link),
            look,
            capabilities: capabilities(table.kind),
            events: OnceLock::new(),
        }
    }
}

pub(crate) fn capabilities(kind: HoldKind) -> Capabilities {
    let mut has = Capabilities::new(Scope::Network);
    has.fencing = Fencing::Durable;
    has.cooldown = true;
    has.modes.shared = true;
    has.modes.max_permits = u32::MAX;
    has.undo = Duration::from_secs(2);
    has.handover = Duration::from_secs(2);
    // Covers a hold that was confirmed just before its end, on the slowest clock.
    has.loss_detection = Duration::from_secs(3);
    match kind {
        HoldKind::Lease => {
            has.lease = Some(LeaseBounds::new(Some(TTL), Duration::from_millis(500), LONGEST_TTL));
            has.loss_detection = LONGEST_TTL;
            has.crash_release = Some(LONGEST_TTL);
        }
        HoldKind::Session => {
            has.crash_release = Some(SESSION);
            has.fairness = Fairness::Roughly;
        }
        HoldKind::Latch => {}
    }
    has
}

fn timing(kind: HoldKind) -> Timing {
    let mut timing = Timing::default();
    timing.request_timeout = CALL;
    timing.close = CLOSE;
    let confirm = Confirm::new(LOOK, Duration::from_millis(2_500));
    timing.waiting = Waiting::Poll { every: POLL };
    match kind {
        HoldKind::Lease => {}
        HoldKind::Session => {
            timing.confirm = Some(confirm);
            timing.waiting = Waiting::Store;
        }
        HoldKind::Latch => timing.confirm = Some(confirm.sticky()),
    }
    timing
}

#[async_trait]
impl Backend for TableClient {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        let mut timing = timing(self.table.kind);
        timing.look = self.look;
        if self.link.hands_over() {
            timing.handover_for = HAND_OVER;
        }
        timing.share_for = self.link.share_for();
        if self.link.is_ordered() && self.table.kind != HoldKind::Session {
            timing.waiting = Waiting::Poll { every: RARE_POLL };
        }
        timing
    }

    fn attach(&self, events: Events) {
        self.table.listen(self.client, events.clone(), Arc::clone(&self.link));
        let _ = self.events.set(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        requests.iter().map(|r| Ok(self.table.acquire(self.client, r, &self.link))).collect()
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        let mut answer = match self.table.enqueue(self.client, &request, &self.link) {
            Ok(answer) => answer,
            Err(attempt) => return Ok(attempt),
        };
        loop {
            tokio::select! {
                biased;
                attempt = &mut answer => {
                    return Ok(attempt.unwrap_or_else(|_| Attempt::Contended(Contended::new())));
                }
                () = stop.cancelled() => {
                    self.table.leave(&request.key, request.holder);
                    return Ok(answer.try_recv().unwrap_or_else(|_| Attempt::Contended(Contended::new())));
                }
                // Polls, because the end of a lease or a session is no event.
                () = sleep(POLL) => self.table.serve(&request.key),
            }
        }
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        holds.iter().map(|h| Ok(self.table.renew(self.client, h, &self.link))).collect()
    }

    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        holds.iter().map(|h| Ok(self.table.look(h))).collect()
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        holds.iter().map(|h| Ok(self.table.release(self.client, h, &self.link))).collect()
    }

    async fn close(&self) {
        self.table.disconnect(self.client);
    }

    fn abort(&self) {
        self.table.disconnect(self.client);
    }
}

impl fmt::Display for TableClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "simulated {:?}", self.table.kind)
    }
}

impl fmt::Debug for TableClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TableClient").field("client", &self.client).finish_non_exhaustive()
    }
}

/// A backend that is called over a link.
#[derive(Debug)]
pub(crate) struct Remote {
    inner: Arc<dyn Backend>,
    link: Arc<NetworkLink>,
}

impl Remote {
    pub(crate) fn new(inner: Arc<dyn Backend>, link: &Arc<NetworkLink>) -> Self {
        Self { inner, link: Arc::clone(link) }
    }
}

#[async_trait]
impl Backend for Remote {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn timing(&self) -> Timing {
        self.inner.timing()
    }

    fn attach(&self, events: Events) {
        self.inner.attach(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        self.link.check_acquire(&requests, self.inner.timing().waiting);
        let (inner, asked) = (Arc::clone(&self.inner), requests.clone());
        let work = move || {
            let (inner, requests) = (Arc::clone(&inner), requests.clone());
            async move { inner.acquire(requests).await }
        };
        match self.link.send(Op::Acquire, work).await {
            Ok(answers) => answers,
            Err(failed) => {
                if failed.refused {
                    self.link.was_refused(&asked);
                }
                asked.iter().map(|_| attempt_failed(&failed)).collect()
            }
        }
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        let (inner, asked) = (Arc::clone(&self.inner), [request.clone()]);
        self.link.check_acquire(&asked, self.inner.timing().waiting);
        let work = move || {
            let (inner, request, stop) = (Arc::clone(&inner), request.clone(), stop.clone());
            async move { inner.wait(request, stop).await }
        };
        self.link.send(Op::Wait, work).await.unwrap_or_else(|failed| {
            if failed.refused {
                self.link.was_refused(&asked);
            }
            attempt_failed(&failed)
        })
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let (inner, asked) = (Arc::clone(&self.inner), holds.len());
        let work = move || {
            let (inner, holds) = (Arc::clone(&inner), holds.clone());
            async move { inner.renew(holds).await }
        };
        let answers = self.link.send(Op::Renew, work).await;
        answers.unwrap_or_else(|failed| (0..asked).map(|_| Err(failed.error())).collect())
    }

    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let (inner, asked) = (Arc::clone(&self.inner), holds.len());
        let work = move || {
            let (inner, holds) = (Arc::clone(&inner), holds.clone());
            async move { inner.look(holds).await }
        };
        let answers = self.link.send(Op::Renew, work).await;
        answers.unwrap_or_else(|failed| (0..asked).map(|_| Err(failed.error())).collect())
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.link.check_release(&holds);
        let (inner, asked) = (Arc::clone(&self.inner), holds.clone());
        let work = move || {
            let (inner, holds) = (Arc::clone(&inner), holds.clone());
            async move { inner.release(holds).await }
        };
        let answers = self.link.send(Op::Release, work).await;
        let answers: Vec<_> =
            answers.unwrap_or_else(|failed| asked.iter().map(|_| Err(failed.error())).collect());
        self.link.was_released(&asked, &answers);
        answers
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.inner.admin()
    }

    async fn close(&self) {
        self.inner.close().await;
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn release_now(&self, key: &LockKey, holder: HolderId) -> Option<Result<ReleaseReply, Error>> {
        let _ = (key, holder);
        None
    }
}

fn attempt_failed(failed: &CallFailure) -> Result<Attempt, Error> {
    if failed.refused { Ok(Attempt::Refused(failed.error())) } else { Err(failed.error()) }
}

impl fmt::Display for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
