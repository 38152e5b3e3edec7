//! Inspection of advisory locks for operators, including locks of other programs.

mod permits;
pub(crate) mod sessions;
pub(crate) mod sql;

use std::any::{Any, TypeId};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use futures_util::FutureExt as _;
use leasehold_api::{
    Error, ErrorKind, FencingToken, HoldInfo, HolderId, KeyInfo, ListQuery, LockAdmin, LockKey, Mode,
};
use leasehold_postgres::unpack;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Row as _};

use crate::admin::permits::{DerivedLocks, SessionPermits};
use crate::admin::sessions::Sessions;
use crate::backend::AdvisoryBackend;
use crate::common::Common;
use crate::derived::PermitNumbers;
use crate::derived::other;
use crate::registry::LockEntry;
use crate::registry::names::lines::HolderLine;
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
        let held = described(found, common, Some(key)).into_iter().next();
        Ok(held.unwrap_or_else(|| KeyInfo::free(key.clone())))
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        let common = &self.client.common;
        let locks = common.look(None).await?;
        let mut keys: Vec<KeyInfo> = described(locks, common, None)
            .into_iter()
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

/// Returns the keys of `locks`, which are ordered by number, each key with the holders of all its locks.
pub(crate) fn described(locks: Vec<ObservedLock>, common: &Common, asked: Option<&LockKey>) -> Vec<KeyInfo> {
    let mut keys: Vec<KeyInfo> = Vec::new();
    let mut last = None;
    let derived = DerivedLocks::new(&locks);
    for lock in locks {
        let identity = (lock.space, lock.number);
        if asked.is_none() && derived.contains(&lock, space_of(common.space()))
            || asked.is_some() && lock.space != space_of(common.space())
        {
            continue;
        }
        let permits = derived.permits_of(&lock);
        let Some(info) = lock.describe(common, asked, permits) else { continue };
        match keys.last_mut().filter(|_| last == Some(identity)) {
            Some(key) => {
                // A holder of this process knows the name before the dictionary has it.
                if info.named && !key.named {
                    (key.key, key.named) = (info.key, true);
                }
                key.holders.extend(info.holders);
            }
            None => keys.push(info),
        }
        last = Some(identity);
    }
    keys
}

/// One lock, as the server reports it.
pub(crate) struct ObservedLock {
    pub(crate) space: i16,
    pub(crate) number: i64,
    pub(crate) pid: Option<i32>,
    /// Whether other sessions can have the lock too.
    shared: bool,
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
        let derived_space = space_of(other(self.space()));
        let block = number.map(PermitNumbers::of);
        let (first, last) = (block.map(PermitNumbers::first), block.map(PermitNumbers::last));
        let rows: Vec<ObservedLock> = self
            .query("look at the locks", move |connection| {
                async move {
                    let query = sqlx::query(AssertSqlSafe(text)).persistent(false);
                    let query = query.bind(space).bind(number).bind(derived_space).bind(first).bind(last);
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
            shared: row.try_get("shared")?,
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

    /// Returns the key and the holders that have this lock, by this process's own record if this process holds the
    /// lock, otherwise by the dictionary. `asked` is the key to which the number belongs, `permits` are the permits that
    /// the session has of it. `None` if the session only requests a permit.
    fn describe(
        self,
        common: &Common,
        asked: Option<&LockKey>,
        permits: Option<SessionPermits>,
    ) -> Option<KeyInfo> {
        let location = self.pid.and_then(|pid| common.location_of(pid));
        let location = location.filter(|_| space_of(common.space()) == self.space);
        let own = location.map(|at| common.registry.held_at(self.number, at)).unwrap_or_default();
        let key = own.first().map(|entry: &LockEntry| entry.key.clone());
        let written = || self.key.as_deref().and_then(|key| LockKey::new(key).ok());
        let known = key.or_else(written).or_else(|| asked.cloned());
        let named = known.is_some();
        let key = known.or_else(|| LockKey::new(self.number_text()).ok())?;
        let mut info = KeyInfo::free(key);
        let of = permits.as_ref().map(|permits| permits.of);
        info.holders = match permits {
            _ if !own.is_empty() => own.iter().map(hold_of).collect(),
            Some(permits) if permits.numbers.is_empty() => return None,
            Some(permits) => self.written_permits(permits),
            None => self.written_holds(),
        };
        for hold in &mut info.holders {
            hold.owner = Some(self.owner());
            hold.mode = match of {
                Some(of) => Mode::Permit { of },
                None if self.shared => Mode::Shared,
                None => Mode::Exclusive,
            };
            hold.token = hold.token.filter(|_| common.has_tokens());
        }
        info.named = named;
        info.waiters = u64::try_from(self.waiters).ok();
        Some(info)
    }

    /// Returns the lines that the dictionary has of this session.
    fn lines(&self) -> Vec<HolderLine> {
        let text = self.holder.as_deref().unwrap_or_default();
        self.pid.map(|pid| HolderLine::of(text, pid)).unwrap_or_default()
    }

    /// Returns the holders of permits, with ids by the dictionary.
    fn written_permits(&self, permits: SessionPermits) -> Vec<HoldInfo> {
        let mut lines = self.lines();
        let hold = |permit: u32| {
            let line = lines.iter().position(|line| line.permit == Some(permit));
            let line = line.map(|line| lines.swap_remove(line));
            let mut hold = line.map_or_else(HoldInfo::new, written_hold);
            hold.permit = Some(permit);
            hold
        };
        permits.numbers.into_iter().map(hold).collect()
    }

    /// Returns the holders by the dictionary, or one holder without an id.
    fn written_holds(&self) -> Vec<HoldInfo> {
        let lines = if self.shared { self.lines() } else { Vec::new() };
        if !lines.is_empty() {
            return lines.into_iter().map(written_hold).collect();
        }
        let mut hold = HoldInfo::new();
        if self.current && !self.shared {
            hold.holder = self.holder.as_deref().and_then(|holder| holder.parse().ok());
            hold.token = self.token.and_then(|token| u64::try_from(token).ok()).map(FencingToken::from_u64);
            hold.label = self.label.as_deref().map(Arc::from);
            hold.since = self.since.and_then(time);
        }
        vec![hold]
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

/// Returns a hold of this process.
fn hold_of(entry: &LockEntry) -> HoldInfo {
    let mut hold = HoldInfo::new();
    hold.holder = Some(entry.holder);
    hold.token = entry.grant.map(|grant| grant.token);
    hold.permit = entry.grant.and_then(|grant| grant.permit);
    hold.label.clone_from(&entry.label);
    hold.since = entry.grant.map(|grant| grant.since);
    hold
}

fn written_hold(line: HolderLine) -> HoldInfo {
    let mut hold = HoldInfo::new();
    hold.holder = Some(line.holder);
    hold.token = Some(line.token);
    hold.permit = line.permit;
    hold.label = line.label;
    hold.since = time(line.since);
    hold
}

fn time(micros: i64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_micros(u64::try_from(micros).ok()?))
}
