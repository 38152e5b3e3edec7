//! The backend. In session scope few sessions hold many locks, in transaction scope each lock has a
//! transaction.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use leasehold_api::{
    AdminCapabilities, Capabilities, Error, Fairness, Fencing, KeyIdentity, LockAdmin, LossReason, Scope,
};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Confirm, Events, HoldRef, ReleaseReply, Renewed, Request, Timing,
    Waiting,
};
use leasehold_postgres::session::Session;

use crate::admin::sessions::Sessions;
use crate::client::Client;
use crate::common::Common;
use crate::derived::MAX_PERMITS;
use crate::error::interrupted;
use crate::registry::names::{self, LAG};
use crate::shared_session::SharedSession;
use crate::side_session::SideSession;
use crate::wait_session::LockScope;
use crate::wait_session::pool::WaitSessions;
use crate::waiting::wait;

/// How long closing waits for the sessions to end.
const CLOSING: Duration = Duration::from_secs(2);

/// Time after a release in which this client leaves the key to remote pollers, enough for their notification and
/// attempt. Otherwise the client with the shorter round trip would win each time.
const YIELD_TO_REMOTE: Duration = Duration::from_millis(50);

/// How long callers of one client pass a hold to each other.
const HANDOVER_FOR: Duration = Duration::from_millis(2);

/// The store of advisory locks, for an engine. Created by [`AdvisoryConfig`](crate::AdvisoryConfig) and
/// [`XactConfig`](crate::XactConfig).
#[derive(Debug)]
pub struct AdvisoryBackend {
    pub(crate) client: Arc<Client>,
    pub(crate) sessions: Sessions,
    capabilities: Capabilities,
    handover_for: Duration,
    names: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

impl AdvisoryBackend {
    /// Opens the first session, and prepares the sessions opened on demand.
    pub(crate) async fn open(common: Common, scope: LockScope, wait_sessions: usize) -> Result<Self, Error> {
        let common = Arc::new(common);
        let keeps = scope == LockScope::Session;
        let mut shared_sessions = Vec::new();
        for (index, queue) in common.queues.iter().enumerate() {
            let work = SharedSession::new(&common, index, keeps);
            // Opens the first session now, to report any error. The others are opened on demand.
            let opened = match index {
                0 => Session::open(&common.config, queue, work).await,
                _ => Ok(Session::lazy(&common.config, queue, work)),
            };
            match opened {
                Ok(session) => shared_sessions.push(session),
                Err(error) => {
                    common.close_queues();
                    return Err(error);
                }
            }
        }
        let side_session = SideSession {
            statements: common.statements.clone(),
            limit: common.statement_limit(),
            spare: common.config.spare_time(),
        };
        let config = common.config_of_more();
        shared_sessions.push(Session::lazy(&config, &common.side_session, side_session));
        let capabilities = capabilities(&common, scope, wait_sessions);
        let wait_sessions = WaitSessions::new(Arc::clone(&common), scope, wait_sessions);
        let client = Client { common, wait_sessions, scope, shared_sessions: Mutex::new(shared_sessions) };
        let names = Mutex::new(Some(tokio::spawn(names::run(Arc::clone(&client.common)))));
        let sessions = Sessions::new(&client.common);
        let handover_for = Duration::ZERO;
        Ok(Self { client: Arc::new(client), sessions, capabilities, handover_for, names })
    }
}

impl AdvisoryBackend {
    /// Sets whether callers of this client pass a hold to each other.
    pub(crate) fn handover(mut self, on: bool) -> Self {
        self.handover_for = if on { HANDOVER_FOR } else { Duration::ZERO };
        self
    }

    /// Removes the token of a grant if the tokens of one number do not grow between grants.
    fn strip_unordered_token(&self, mut attempt: Attempt) -> Attempt {
        if let Attempt::Granted(granted) = &mut attempt
            && !self.client.common.has_tokens()
        {
            granted.token = None;
        }
        attempt
    }
}

#[async_trait]
impl Backend for AdvisoryBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        let config = &self.client.common.config;
        let liveness = config.liveness_settings();
        let mut timing = Timing::default();
        timing.request_timeout = config.call_limit();
        timing.waiting = Waiting::Store;
        timing.yield_to_remote = Some(YIELD_TO_REMOTE);
        timing.handover_for = self.handover_for;
        timing.confirm = Some(Confirm::new(liveness.confirm_every, liveness.lost_after));
        timing
    }

    fn attach(&self, events: Events) {
        self.client.common.attach(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        match self.client.common.open() {
            Ok(()) => {
                let attempts = self.client.acquire(&requests).await;
                attempts
                    .into_iter()
                    .map(|attempt| attempt.map(|attempt| self.strip_unordered_token(attempt)))
                    .collect()
            }
            Err(closed) => requests.iter().map(|_| Ok(Attempt::Refused(closed.clone()))).collect(),
        }
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        wait(&self.client, &request, &stop).await.map(|attempt| self.strip_unordered_token(attempt))
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        match self.client.common.open() {
            Ok(()) => self.client.confirm(&holds).await,
            Err(closed) => holds.iter().map(|_| Err(closed.clone())).collect(),
        }
    }

    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        let common = &self.client.common;
        common.open()?;
        let number = common.number(&hold.key)?;
        // Queries the server first, because the session has possibly ended unnoticed.
        let confirmed = self.client.confirm(std::slice::from_ref(&hold)).await.pop();
        match confirmed.unwrap_or_else(|| Err(interrupted()))? {
            Renewed::Extended if !common.registry.relabel(number, hold.holder, label) => {
                Ok(Renewed::Gone(LossReason::Gone))
            }
            confirmed => Ok(confirmed),
        }
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        match self.client.common.open() {
            Ok(()) => self.client.release(&holds).await,
            Err(closed) => holds.iter().map(|_| Err(closed.clone())).collect(),
        }
    }

    /// Reports success, because the sessions end with the runtime of their tasks and the server releases their locks.
    async fn release_on_new_runtime(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        holds.iter().map(|_| Ok(ReleaseReply::new(true))).collect()
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        let client = &self.client;
        if client.common.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(names) = self.names.lock().unwrap_or_else(PoisonError::into_inner).take() {
            names.abort();
        }
        client.wait_sessions.close(CLOSING).await;
        client.common.close_queues();
        let shared_sessions =
            std::mem::take(&mut *client.shared_sessions.lock().unwrap_or_else(PoisonError::into_inner));
        join_all(shared_sessions.into_iter().map(|session| session.ended(CLOSING))).await;
        client.common.registry.clear();
    }

    fn abort(&self) {
        let client = &self.client;
        client.common.closed.store(true, Ordering::Release);
        client.common.close_queues();
        client.shared_sessions.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(Session::abort);
        client.wait_sessions.abort();
    }
}

/// Ends the sessions even without a call of `close`.
impl Drop for AdvisoryBackend {
    fn drop(&mut self) {
        if let Some(names) = self.names.lock().unwrap_or_else(PoisonError::into_inner).take() {
            names.abort();
        }
        if !self.client.common.closed.swap(true, Ordering::AcqRel) {
            self.client.common.close_queues();
            self.client.wait_sessions.abort();
        }
    }
}

impl fmt::Display for AdvisoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scope = match self.client.scope {
            LockScope::Session => "advisory locks",
            LockScope::Transaction => "advisory transaction locks",
        };
        write!(f, "{scope} of {}", self.client.common.config)
    }
}

/// Returns the capabilities under these settings.
fn capabilities(common: &Common, scope: LockScope, wait_sessions: usize) -> Capabilities {
    let liveness = common.config.liveness_settings();
    let mut has = Capabilities::new(Scope::Network);
    has.fencing = if common.has_tokens() { Fencing::Durable } else { Fencing::None };
    has.fairness = Fairness::Roughly;
    has.loss_detection = liveness.lost_after;
    has.undo = Duration::from_secs(5);
    has.handover = Duration::from_secs(1);
    // Adds three seconds, because the server's keepalive probes have a granularity of a second.
    has.crash_release = Some(liveness.server_gives_up + Duration::from_secs(3));
    has.keys = match common.hasher.exact() {
        true => KeyIdentity::Exact,
        false => KeyIdentity::Hashed { bits: common.hasher.bits() },
    };
    has.max_holds = match scope {
        LockScope::Session => common.capacity(),
        LockScope::Transaction => Some(wait_sessions as u64),
    };
    has.modes.shared = true;
    // A transaction cannot end its turn before itself, so its permit would keep the turn from all waiters.
    has.modes.max_permits = match scope {
        LockScope::Session => MAX_PERMITS,
        LockScope::Transaction => 0,
    };
    has.relabel = true;
    has.admin = AdminCapabilities::read_only();
    has.admin.lag = LAG;
    has
}
