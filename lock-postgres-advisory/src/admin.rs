//! The operator's view of advisory locks, those of other programs included.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use futures_util::FutureExt as _;
use leasehold_api::{
    Error, ErrorKind, FencingToken, HoldInfo, HolderId, ListQuery, LockAdmin, LockKey, SessionInfo,
};
use leasehold_postgres::{store_error, unpack};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, Row as _};
use tokio::sync::oneshot;

use crate::admin_sql::END_SESSION;
use crate::backend::AdvisoryBackend;
use crate::names::space_of;
use crate::registry::Entry;
use crate::shared::Shared;
use crate::sql;
use crate::trunk::{TrunkJob, interrupted};

/// Of the locks that are taken for a moment when the schema is installed, and when a session makes sure
/// that tokens grow.
const OURS: [(i16, i64); 2] = [(2, (1_818_583_411 << 32) | 1), (2, (1_818_583_411 << 32) | 2)];

#[async_trait]
impl LockAdmin for AdvisoryBackend {
    async fn inspect(&self, key: &LockKey) -> Result<Option<HoldInfo>, Error> {
        let shared = &self.keeper.shared;
        let number = shared.number(key)?;
        let found = shared.look(Some(number)).await?;
        Ok(found.into_iter().next().and_then(|lock| lock.describe(shared, Some(key))))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<HoldInfo>, Error> {
        let shared = &self.keeper.shared;
        let locks = shared.look(None).await?;
        let mut holds: Vec<HoldInfo> = locks
            .into_iter()
            .filter_map(|lock| lock.describe(shared, None))
            .filter(|hold| {
                query.prefix.is_empty() || hold.named && hold.key.as_str().starts_with(&query.prefix)
            })
            .collect();
        holds.sort_by(|a, b| (!a.named, &a.key).cmp(&(!b.named, &b.key)));
        holds.truncate(query.limit.unwrap_or(usize::MAX));
        Ok(holds)
    }

    async fn force_release(&self, key: &LockKey, _holder: HolderId) -> Result<bool, Error> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "the server ends advisory locks with their session only, and all others that it keeps with it; look at them with session_of and end it with end_session (`leasehold release --force --session KEY`)",
        )
        .with_key(key))
    }

    async fn session_of(&self, key: &LockKey) -> Result<Option<SessionInfo>, Error> {
        let shared = &self.keeper.shared;
        let number = shared.number(key)?;
        let locks = shared.look(None).await?;
        let space = space_of(shared.space());
        let of_key = locks.iter().find(|lock| (lock.space, lock.number) == (space, number));
        let Some((pid, started, owner)) =
            of_key.and_then(|lock| Some((lock.pid?, lock.started?, lock.owner())))
        else {
            return Ok(None);
        };
        let holds = locks.into_iter().filter(|lock| lock.pid == Some(pid));
        let holds = holds.filter_map(|lock| lock.describe(shared, None)).collect();
        Ok(Some(SessionInfo::new(format!("{pid}-{started}"), Some(owner), holds)))
    }

    async fn end_session(&self, session: &SessionInfo) -> Result<bool, Error> {
        let parts = session.id.split_once('-');
        let parsed =
            parts.and_then(|(pid, started)| Some((pid.parse::<i32>().ok()?, started.parse::<i64>().ok()?)));
        let Some((pid, started)) = parsed else {
            let message =
                format!("{:?} is not a session of this store; look for it with session_of", session.id);
            return Err(Error::new(ErrorKind::InvalidOption, message));
        };
        self.keeper
            .shared
            .query("end a session", move |connection| {
                async move {
                    let query = sqlx::query(END_SESSION).persistent(false).bind(pid).bind(started);
                    query.fetch_one(connection).await?.try_get(0)
                }
                .boxed()
            })
            .await
    }
}

/// One lock as the server shows it.
struct Seen {
    space: i16,
    number: i64,
    pid: Option<i32>,
    /// What the dictionary says of the number, and of its holder if that is the same session.
    key: Option<String>,
    current: bool,
    holder: Option<String>,
    token: Option<i64>,
    label: Option<String>,
    since: Option<i64>,
    waiters: i64,
    address: Option<String>,
    application: Option<String>,
    username: Option<String>,
    started: Option<i64>,
}

impl Shared {
    /// The locks of this database, or the one with this number.
    async fn look(&self, number: Option<i64>) -> Result<Vec<Seen>, Error> {
        self.open()?;
        let space = number.map(|_| space_of(self.space()));
        let text = Arc::clone(&self.statements.list);
        let rows: Vec<Seen> = self
            .query("look at the locks", move |connection| {
                async move {
                    let query = sqlx::query(AssertSqlSafe(text)).persistent(false).bind(space).bind(number);
                    query.fetch_all(connection).await?.iter().map(Seen::read).collect()
                }
                .boxed()
            })
            .await?;
        Ok(rows.into_iter().filter(|seen| !OURS.contains(&(seen.space, seen.number))).collect())
    }

    /// Whether a session waits for an advisory lock in that process of the server.
    pub(crate) async fn waits(&self, pid: i32) -> Result<bool, Error> {
        self.query("look at a wait", move |connection| {
            async move {
                connection.execute(sql::AS_LOGIN).await?;
                let query = sqlx::query(sql::WAITS).persistent(false).bind(pid);
                query.fetch_one(connection).await?.try_get(0)
            }
            .boxed()
        })
        .await
    }

    /// Runs statements in a transaction between those of the locks.
    async fn query<T: Send + 'static>(
        &self,
        doing: &'static str,
        statements: impl for<'c> FnOnce(
            &'c mut PgConnection,
        ) -> futures_util::future::BoxFuture<'c, Result<T, sqlx::Error>>
        + Send
        + 'static,
    ) -> Result<T, Error> {
        let (done, answered) = oneshot::channel();
        let Some(lane) = self.trunks.first() else { return Err(Error::closed()) };
        lane.push(TrunkJob::Call(Box::new(move |connection| {
            async move {
                let outcome = async {
                    let mut transaction = connection.begin().await?;
                    transaction.execute(sql::BESIDE).await?;
                    let value = statements(&mut transaction).await?;
                    transaction.commit().await?;
                    Ok(value)
                };
                let outcome: Result<T, sqlx::Error> = outcome.await;
                let _ = done.send(outcome);
            }
            .boxed()
        })));
        match answered.await {
            Ok(outcome) => outcome.map_err(|error| store_error(error, doing)),
            Err(_) => {
                self.open()?;
                Err(interrupted())
            }
        }
    }
}

impl Seen {
    fn read(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            space: row.try_get("space")?,
            number: row.try_get("number")?,
            pid: row.try_get("pid")?,
            key: row.try_get("key")?,
            current: row.try_get::<Option<bool>, _>("current")?.unwrap_or(false),
            holder: row.try_get("holder")?,
            token: row.try_get("token")?,
            label: row.try_get("label")?,
            since: row.try_get("since")?,
            waiters: row.try_get("waiters")?,
            address: row.try_get("address")?,
            application: row.try_get("application")?,
            username: row.try_get("username")?,
            started: row.try_get("started")?,
        })
    }

    /// The hold, with what this process knows for certain if it is its own. `asked`: the key whose
    /// number it is.
    fn describe(self, shared: &Shared, asked: Option<&LockKey>) -> Option<HoldInfo> {
        let own = if self.pid.is_some_and(|pid| shared.is_own(pid)) {
            shared.registry.get(self.number)
        } else {
            None
        };
        let own = own.filter(|entry| entry.grant.is_some() && space_of(shared.space()) == self.space);
        let key = own.as_ref().map(|entry: &Entry| entry.key.clone());
        let written = || self.key.as_deref().and_then(|key| LockKey::new(key).ok());
        let known = key.or_else(written).or_else(|| asked.cloned());
        let named = known.is_some();
        let key = known.or_else(|| LockKey::new(self.spelled()).ok())?;
        let mut hold = HoldInfo::new(key);
        hold.named = named;
        hold.owner = Some(self.owner());
        hold.waiters = u64::try_from(self.waiters).ok();
        if let Some((entry, grant)) = own.as_ref().and_then(|entry| Some((entry, entry.grant?))) {
            hold.holder = Some(entry.holder);
            hold.token = Some(grant.token);
            hold.label.clone_from(&entry.label);
            hold.since = Some(grant.since);
        } else if self.current {
            hold.holder = self.holder.as_deref().and_then(|holder| holder.parse().ok());
            hold.token = self.token.and_then(|token| u64::try_from(token).ok()).map(FencingToken::from_u64);
            hold.label = self.label.as_deref().map(Arc::from);
            hold.since = self.since.and_then(time);
        }
        Some(hold)
    }

    /// The bare number, as `pg_advisory_lock` takes it.
    fn spelled(&self) -> String {
        if self.space == 2 {
            let (first, second) = unpack(self.number);
            return format!("{first},{second}");
        }
        self.number.to_string()
    }

    fn owner(&self) -> String {
        let Some(pid) = self.pid else { return "a prepared transaction".to_owned() };
        let user = self.username.as_deref().unwrap_or("?");
        if self.started.is_none() {
            return format!("{user} (server process {pid}; pg_read_all_stats would show more)");
        }
        let address = self.address.as_deref().unwrap_or("local");
        match self.application.as_deref().filter(|name| !name.is_empty()) {
            Some(application) => format!("{user}@{address} {application} (server process {pid})"),
            None => format!("{user}@{address} (server process {pid})"),
        }
    }
}

fn time(micros: i64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_micros(u64::try_from(micros).ok()?))
}
