//! Claims in Postgres.

mod around;
mod groups;
#[cfg(test)]
mod growth;
mod listen;
mod look;
mod renew;
mod requeue;
mod server;
mod settle;
mod sweep;
mod take;
mod upkeep;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use sqlx::PgPool;
use tokio::sync::OnceCell;

use self::server::Server;
use crate::error::ClaimError;
use crate::metrics::depth;
use crate::spec::ClaimSpec;
use crate::spec::ids::RowKey;
use crate::spec::states::State;
use crate::statements::order::Sequence;
use crate::statements::parts::Words;
use crate::store::{
    ClaimRef, ClaimStore, Outcome, Renewal, Sealed, Settled, Stats, Swept, Take, Taken, TakenRow, Upkeep,
    Wake,
};

/// How long the server has for a call unless told otherwise.
const ANSWER: Duration = Duration::from_secs(10);

/// Claims on a table in Postgres, under leases. Cheap to clone; clones share what they know of the table.
///
/// Each call is one statement, in a transaction of its own (three for claims of groups), and uses a connection
/// of the pool for that long. It works whatever isolation the sessions of the pool are set to.
#[derive(Clone)]
pub struct PgClaims {
    server: Server,
    shared: Arc<Shared>,
}

/// What follows from the spec and the table.
struct Shared {
    spec: ClaimSpec,
    words: Words,
    order: OnceCell<Sequence>,
    texts: Mutex<HashMap<String, Arc<str>>>,
}

impl PgClaims {
    /// Claims as `spec` says, through connections of `pool`. Nothing is sent yet.
    #[must_use]
    pub fn new(pool: PgPool, spec: ClaimSpec) -> Self {
        let shared =
            Shared { words: Words::leased(&spec), spec, order: OnceCell::new(), texts: Mutex::default() };
        Self { server: Server::new(pool, ANSWER), shared: Arc::new(shared) }
    }

    /// The pool leads to a pooler that gives each transaction another session, as PgBouncer does in
    /// transaction mode: nothing is prepared, and each call is a transaction. There is no listening then.
    #[must_use]
    pub fn behind_pooler(mut self) -> Self {
        self.server.pooled = true;
        self
    }

    /// How long the server has for each call, the wait for a connection included; 10 seconds by default. A
    /// connection whose call was given up is closed.
    #[must_use]
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.server.limit = limit;
        self
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &PgPool {
        &self.server.pool
    }

    /// What is claimed.
    #[must_use]
    pub fn spec(&self) -> &ClaimSpec {
        &self.shared.spec
    }

    /// How long the server has for a call.
    pub(crate) fn limit(&self) -> Duration {
        self.server.limit
    }

    /// Whether statements are prepared.
    pub(crate) fn prepares(&self) -> bool {
        !self.server.pooled
    }

    fn words(&self) -> &Words {
        &self.shared.words
    }

    fn server(&self) -> &Server {
        &self.server
    }

    /// The statement of that name, made when it is first used.
    fn remembered(&self, name: String, make: impl FnOnce() -> String) -> Arc<str> {
        let mut texts = self.shared.texts.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(texts.entry(name).or_insert_with(|| make().into()))
    }
}

impl Sealed for PgClaims {}

#[async_trait]
impl ClaimStore for PgClaims {
    fn spec(&self) -> &ClaimSpec {
        &self.shared.spec
    }

    async fn take(&self, take: &Take) -> Result<Taken, ClaimError> {
        self.take_rows(take).await
    }

    async fn pending(&self, take: &Take) -> Result<bool, ClaimError> {
        self.spec().needs_lease()?;
        self.is_any_pending(take).await
    }

    async fn renew(&self, claims: &[ClaimRef], lease: Duration) -> Result<Vec<Renewal>, ClaimError> {
        self.renew_all(claims, lease).await
    }

    async fn settle(
        &self,
        settlements: &[(ClaimRef, Outcome)],
    ) -> Result<Vec<Result<Settled, ClaimError>>, ClaimError> {
        self.settle_all(settlements).await
    }

    async fn sweep(&self, limit: u32) -> Result<Swept, ClaimError> {
        self.sweep_rows(limit).await
    }

    async fn upkeep(&self, limit: u32) -> Result<Upkeep, ClaimError> {
        self.keep_up(limit).await
    }

    async fn taken(&self, limit: u32) -> Result<Vec<TakenRow>, ClaimError> {
        self.list_taken(limit).await
    }

    async fn exhausted(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.list_exhausted(limit).await
    }

    async fn blocked(&self, limit: u32) -> Result<Vec<RowKey>, ClaimError> {
        self.list_blocked(limit).await
    }

    async fn stats(&self, take: &Take) -> Result<Stats, ClaimError> {
        let stats = self.count(take).await?;
        depth(self, take, &stats);
        Ok(stats)
    }

    async fn cancel(&self, rows: &[RowKey], message: &str) -> Result<u64, ClaimError> {
        self.cancel_rows(rows, message).await
    }

    async fn requeue(&self, rows: &[RowKey], attempts: u32) -> Result<u64, ClaimError> {
        self.requeue_rows(rows, attempts).await
    }

    async fn requeue_all(&self, from: &State, limit: u32, attempts: u32) -> Result<u64, ClaimError> {
        self.requeue_state(from, limit, attempts).await
    }

    async fn purge(&self, limit: u32) -> Result<u64, ClaimError> {
        self.in_turn().purge_rows(limit).await
    }

    async fn listen(&self) -> Result<Box<dyn Wake>, ClaimError> {
        self.begin_to_listen().await
    }
}

impl fmt::Debug for PgClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PgClaims").field("spec", &self.shared.spec).finish_non_exhaustive()
    }
}

impl fmt::Display for PgClaims {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared.spec.fmt(f)
    }
}
