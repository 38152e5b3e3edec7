//! Inspection of advisory locks for operators, including locks of other programs.

pub(crate) mod sessions;
pub(crate) mod sql;

use std::any::{Any, TypeId};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use futures_util::FutureExt as _;
use leasehold_api::{
    Error, ErrorKind, FencingToken, HoldInfo, HolderId, KeyInfo, ListQuery, LockAdmin, LockKey,
};
use leasehold_postgres::unpack;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row as _};

use crate::admin::sessions::Sessions;
use crate::backend::AdvisoryBackend;
use crate::common::Common;
use crate::registry::LockEntry;
use crate::registry::names::space_of;

/// The locks that leasehold itself takes briefly, which lists leave out: during a schema installation and, in
/// older versions, when a session ensured that tokens grow.
const OWN_MARKERS: [(i16, i64); 2] = [(2, (1_818_583_411 << 32) | 1), (2, (1_818_583_411 << 32) | 2)];

#[async_trait]
impl LockAdmin for AdvisoryBackend {
    async fn inspect(&self, key: &LockKey) -> Result<KeyInfo, Error> {
        let common = &self.client.common;
        let number = common.number(key)?;
        let found = common.look(Some(number)).await?;
        let held = found.into_iter().next().and_then(|lock| lock.describe(common, Some(key)));
        Ok(held.unwrap_or_else(|| KeyInfo::free(key.clone())))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        let common = &self.client.common;
        let locks = common.look(None).await?;
        let mut keys: Vec<KeyInfo> = locks
            .into_iter()
            .filter_map(|lock| lock.describe(common, None))
            .filter(|info| {
                query.prefix.is_empty() || info.named && info.key.as_str().starts_with(&query.prefix)
            })
            .collect();
        keys.sort_by(|a, b| (!a.named, &a.key).cmp(&(!b.named, &b.key)));
        keys.truncate(query.limit.unwrap_or(usize::MAX));
        Ok(keys)
    }

    async fn force_release(&self, key: &LockKey, _holder: HolderId) -> Result<bool, Error> {
        Err(Error::new(
            ErrorKind::Unsupported,
            "the server ends advisory locks with their session only, and all others that it keeps with it: `leasehold release KEY --force --session` shows them and ends it (in a program, `Sessions`)",
        )
        .with_key(key))
    }

    /// Returns [`Sessions`].
    fn extension_of(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        (id == TypeId::of::<Sessions>()).then_some(&self.sessions as _)
    }
}

/// One lock, as the server reports it.
pub(crate) struct ObservedLock {
    pub(crate) space: i16,
    pub(crate) number: i64,
    pub(crate) pid: Option<i32>,
    /// The key that the dictionary (the table of numbers and their keys) has for this number. The fields
    /// below describe the holder, if `current` confirms that the entry is of the same session.
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
    pub(crate) started: Option<i64>,
}

impl Common {
    /// Reads the locks of this database, or only the lock with this number.
    pub(crate) async fn look(&self, number: Option<i64>) -> Result<Vec<ObservedLock>, Error> {
        self.open()?;
        let space = number.map(|_| space_of(self.space()));
        let text = Arc::clone(&self.statements.list);
        let rows: Vec<ObservedLock> = self
            .query("look at the locks", move |connection| {
                async move {
                    let query = sqlx::query(AssertSqlSafe(text)).persistent(false).bind(space).bind(number);
                    query.fetch_all(connection).await?.iter().map(ObservedLock::read).collect()
                }
                .boxed()
            })
            .await?;
        Ok(rows.into_iter().filter(|lock| !OWN_MARKERS.contains(&(lock.space, lock.number))).collect())
    }
}

impl ObservedLock {
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

    /// Returns the key and its holder, by this process's own record if this process holds the lock, otherwise
    /// by the dictionary. `asked` is the key to which the number belongs.
    pub(crate) fn describe(self, common: &Common, asked: Option<&LockKey>) -> Option<KeyInfo> {
        let own = if self.pid.is_some_and(|pid| common.is_own(pid)) {
            common.registry.get(self.number)
        } else {
            None
        };
        let own = own.filter(|entry| entry.grant.is_some() && space_of(common.space()) == self.space);
        let key = own.as_ref().map(|entry: &LockEntry| entry.key.clone());
        let written = || self.key.as_deref().and_then(|key| LockKey::new(key).ok());
        let known = key.or_else(written).or_else(|| asked.cloned());
        let named = known.is_some();
        let key = known.or_else(|| LockKey::new(self.number_text()).ok())?;
        let mut hold = HoldInfo::new();
        hold.owner = Some(self.owner());
        if let Some((entry, grant)) = own.as_ref().and_then(|entry| Some((entry, entry.grant?))) {
            hold.holder = Some(entry.holder);
            hold.token = Some(grant.token).filter(|_| common.has_tokens());
            hold.label.clone_from(&entry.label);
            hold.since = Some(grant.since);
        } else if self.current {
            hold.holder = self.holder.as_deref().and_then(|holder| holder.parse().ok());
            hold.token = self.token.and_then(|token| u64::try_from(token).ok()).map(FencingToken::from_u64);
            hold.token = hold.token.filter(|_| common.has_tokens());
            hold.label = self.label.as_deref().map(Arc::from);
            hold.since = self.since.and_then(time);
        }
        let mut info = KeyInfo::with_hold(key, hold);
        info.named = named;
        info.waiters = u64::try_from(self.waiters).ok();
        Some(info)
    }

    /// Returns the number as text, as `pg_advisory_lock` takes it.
    fn number_text(&self) -> String {
        if self.space == 2 {
            let (first, second) = unpack(self.number);
            return format!("{first},{second}");
        }
        self.number.to_string()
    }

    pub(crate) fn owner(&self) -> String {
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
