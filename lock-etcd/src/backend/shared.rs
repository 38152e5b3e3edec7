//! The state that the calls, the tasks and the operators' view of one client share.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, HolderId, LockKey, Mode};
use leasehold_engine::{Events, Moment};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::requests::Requests;
use super::statements::{At, Conditions};
use crate::cluster::Cluster;
use crate::config::EtcdConfig;
use crate::lane::{Lane, NoReply, Reply};
use crate::names::{Names, Span};
use crate::session::{Session, Sessions};
use crate::tokens::{Base, Bases};
use crate::watcher::{Watched, Watcher};
use crate::wire::RangeRequest;

/// The limit of the read of the base.
const READ_LIMIT: Duration = Duration::from_secs(8);

/// One client.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: EtcdConfig,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) names: Names,
    pub(crate) bases: Bases,
    pub(crate) sessions: Sessions,
    pub(crate) requests: Requests,
    pub(crate) lane: Lane,
    pub(crate) watcher: Watcher,
    pub(crate) events: OnceLock<Events>,
    /// The number of the engine that uses this client, known from its first request. Operators leave notes under it.
    pub(super) instance: OnceLock<u128>,
    /// The watch on the notes of operators.
    pub(super) notes: Mutex<Option<Watched>>,
    /// The shortest TTL that the server grants, read when the client connects. Not set if the cluster was full at that time.
    pub(crate) shortest: OnceLock<Duration>,
    /// The client as operators see it: `USER@HOST pid N`.
    pub(super) owner: String,
    pub(super) runtime: Handle,
    pub(crate) tasks: TaskTracker,
    pub(crate) closed: CancellationToken,
}

impl Shared {
    pub(super) fn new(config: &EtcdConfig, cluster: Arc<Cluster>, runtime: Handle) -> Self {
        let (tasks, closed) = (TaskTracker::new(), CancellationToken::new());
        let names = Names::new(&config.prefix);
        Self {
            config: config.clone(),
            bases: Bases::new(&cluster, &names),
            sessions: Sessions::default(),
            requests: Requests::default(),
            lane: Lane::start(&cluster, &tasks, closed.clone()),
            watcher: Watcher::start(&cluster, &tasks, closed.clone()),
            events: OnceLock::new(),
            instance: OnceLock::new(),
            notes: Mutex::default(),
            shortest: OnceLock::new(),
            owner: owner(),
            cluster,
            names,
            runtime,
            tasks,
            closed,
        }
    }

    /// Returns the time on the engine's clock.
    pub(crate) fn now(&self) -> Moment {
        self.events.get().map_or(Moment::from_nanos(0), Events::now)
    }

    pub(crate) fn check_open(&self) -> Result<(), Error> {
        if self.closed.is_cancelled() { Err(Error::closed()) } else { Ok(()) }
    }

    pub(crate) fn at(&self, key: &LockKey, holder: HolderId, mode: Mode) -> At {
        At::new(&self.names, key, holder, mode)
    }

    pub(super) fn ttl(&self, ttl: Option<Duration>) -> Duration {
        ttl.unwrap_or(self.config.ttl)
    }

    pub(super) fn conditions(&self, session: &Session, guard: i64, base: Base) -> Conditions {
        Conditions {
            session_key: session.key.clone(),
            base_key: self.names.base(),
            session: session.compare(guard),
            base: self.bases.compare(base),
            lease: session.lease,
        }
    }

    /// Returns the error of a request without a key.
    pub(crate) fn failed(&self, no_reply: &NoReply) -> Error {
        match no_reply {
            NoReply::Failed(failure) => failure.error(None),
            NoReply::Closed => Error::closed().with_store(Arc::clone(self.cluster.store())),
        }
    }

    /// Reads the base of the tokens without writing one.
    pub(super) async fn read_base(&self) -> Result<(), Error> {
        let read = RangeRequest::key(self.names.base());
        let answer = self.cluster.call(read, READ_LIMIT).await.map_err(|failure| failure.error(None))?;
        // Without a base no client has locked anything yet.
        self.bases.learn(answer.reply.kvs.first());
        Ok(())
    }

    /// Checks the base of the tokens. If it has changed, a backup was restored. Earlier proofs of the sessions then do
    /// not count, and the engine checks all of its holds.
    pub(crate) async fn settle(&self, limit: Duration) -> Result<(), NoReply> {
        if !self.bases.settle(limit).await? {
            self.sessions.distrust();
            if let Some(events) = self.events.get() {
                events.resync();
            }
        }
        Ok(())
    }

    /// Returns whether a grant in `reply` counts, for a request that compared `base`. Checks the base first if the reply
    /// might be from a restored backup. `wrote` is whether the request was carried out by a write.
    pub(super) async fn believes(
        &self,
        reply: &Reply,
        wrote: bool,
        base: Base,
        limit: Duration,
    ) -> Result<bool, NoReply> {
        if self.bases.is_doubted(reply.heard_before, &reply.header, wrote) {
            self.settle(limit).await?;
        }
        Ok(self.bases.known() == base)
    }

    /// Notes the engine of the first request, and starts to watch the operators' notes for it.
    pub(super) fn note_instance(self: &Arc<Self>, holder: HolderId) {
        if self.instance.set(holder.instance()).is_ok() {
            self.watch_notes(0);
        }
    }

    /// Returns the range of the notes to this client's holders. `None` before the first request.
    pub(crate) fn notes_span(&self) -> Option<Span> {
        self.instance.get().map(|instance| self.names.notes(*instance))
    }

    pub(super) fn keep_watch(&self, watched: Option<Watched>) {
        *self.notes.lock().unwrap_or_else(PoisonError::into_inner) = watched;
    }
}

/// Returns `USER@HOST pid N` for this process, because clients of one cluster run on many machines. A part that the system
/// does not know is `?`.
fn owner() -> String {
    let user = whoami::username().unwrap_or_else(|_| "?".to_owned());
    let host = whoami::hostname().unwrap_or_else(|_| "?".to_owned());
    format!("{user}@{host} pid {}", std::process::id())
}
