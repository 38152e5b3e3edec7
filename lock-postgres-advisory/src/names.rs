//! The dictionary from numbers to names: written in the background for holds that last, so that an
//! acquire never waits for it and short-lived keys leave no row behind.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, UNIX_EPOCH};

use futures_util::FutureExt as _;
use leasehold_postgres::KeySpace;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};

use crate::common::Common;
use crate::registry::{Entry, Location};
use crate::shared_job::SharedJob;
use crate::sql;

/// How long after a grant others see its name at the latest.
pub(crate) const LAG: Duration = Duration::from_secs(2);

/// A hold that is over before this time gets no row.
const LASTING: Duration = Duration::from_millis(200);

/// How often what nobody has used for a month is deleted.
const TIDY: Duration = Duration::from_secs(3600);

/// How long nothing is written after many failures: a server that was away for hours has names soon again.
const LONGEST: Duration = Duration::from_secs(60);

/// Writes until the client is closed.
pub(crate) async fn write(common: Arc<Common>) {
    let mut tidied: Option<Instant> = None;
    // After a failure; the locks come first.
    let mut pause = LASTING;
    while !common.closed.load(Ordering::Acquire) {
        let granted = common.registry.granted.notified();
        if common.registry.holds(|entry| !entry.written).is_empty() {
            granted.await;
        }
        sleep(LASTING).await;
        let now = Instant::now();
        let lasting = |entry: &Entry| {
            !entry.written && entry.grant.is_some_and(|grant| now.duration_since(grant.at) >= LASTING)
        };
        let holds = common.registry.holds(lasting);
        if holds.is_empty() {
            continue;
        }
        let tidy = tidied.is_none_or(|last| last.elapsed() > TIDY);
        if !save(&common, &holds, tidy).await {
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST);
            continue;
        }
        pause = LASTING;
        common.registry.written(&holds);
        if tidy {
            tidied = Some(now);
        }
    }
}

/// Whether the rows were written.
async fn save(common: &Arc<Common>, holds: &[(i64, Entry)], tidy: bool) -> bool {
    let (done, written) = oneshot::channel();
    let rows = Rows::new(common, holds);
    let (name, forget) = (Arc::clone(&common.statements.name), Arc::clone(&common.statements.forget));
    let Some(lane) = common.lanes.first() else { return false };
    lane.push(SharedJob::Call(Box::new(move |connection| {
        async move {
            let outcome = rows.write(connection, name, tidy.then_some(forget)).await;
            if let Err(error) = &outcome {
                tracing::debug!(%error, "the names of held locks were not written; they are listed as numbers");
            }
            let _ = done.send(outcome.is_ok());
        }
        .boxed()
    })));
    timeout(Duration::from_secs(30), written).await.is_ok_and(|answer| answer.unwrap_or(false))
}

#[derive(Default)]
struct Rows {
    space: i16,
    numbers: Vec<i64>,
    keys: Vec<String>,
    pids: Vec<i32>,
    holders: Vec<String>,
    tokens: Vec<i64>,
    since: Vec<i64>,
    labels: Vec<Option<String>>,
}

impl Rows {
    fn new(common: &Common, holds: &[(i64, Entry)]) -> Self {
        let shared_sessions = common.shared_pids();
        let wait_sessions = common.wait_pids();
        let mut rows = Self { space: space_of(common.space()), ..Self::default() };
        for (number, entry) in holds {
            let pid = match entry.location {
                Location::Shared(index) => shared_sessions.get(index).copied(),
                Location::Own(id) => wait_sessions.get(&id).copied(),
                Location::Nowhere => None,
            };
            let (Some(pid), Some(grant)) = (pid, entry.grant) else { continue };
            let since = grant.since.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
            rows.numbers.push(*number);
            rows.keys.push(entry.key.as_str().to_owned());
            rows.pids.push(pid);
            rows.holders.push(entry.holder.to_string());
            rows.tokens.push(grant.token.as_i64());
            rows.since.push(i64::try_from(since).unwrap_or(0));
            rows.labels.push(entry.label.as_deref().map(str::to_owned));
        }
        rows
    }

    /// In a transaction, because behind a pooler statements of one connection may be spread.
    async fn write(
        self,
        connection: &mut PgConnection,
        name: Arc<str>,
        forget: Option<Arc<str>>,
    ) -> Result<(), sqlx::Error> {
        let mut transaction = connection.begin().await?;
        transaction.execute(sql::BESIDE).await?;
        sqlx::query(AssertSqlSafe(name))
            .persistent(false)
            .bind(self.space)
            .bind(self.numbers)
            .bind(self.keys)
            .bind(self.pids)
            .bind(self.holders)
            .bind(self.tokens)
            .bind(self.since)
            .bind(self.labels)
            .execute(&mut *transaction)
            .await?;
        if let Some(forget) = forget {
            sqlx::query(AssertSqlSafe(forget)).persistent(false).execute(&mut *transaction).await?;
        }
        transaction.commit().await
    }
}

/// As `pg_locks.objsubid` tells the key spaces apart.
pub(crate) fn space_of(space: KeySpace) -> i16 {
    match space {
        KeySpace::Big => 1,
        KeySpace::Pair => 2,
    }
}
