//! The dictionary from numbers to names. It is written in the background, only for longer holds, so acquires never wait
//! for it. Short-lived keys leave no row. The writing session holds no locks, so it cannot delay or lose any.

pub(crate) mod lines;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, UNIX_EPOCH};

use futures_util::FutureExt as _;
use leasehold_api::Error;
use leasehold_postgres::KeySpace;
use leasehold_postgres::upkeep::{Note, Progress, Watch};
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, PgConnection, Row as _};
use tokio::time::{Instant, sleep, timeout};

use crate::common::Common;
use crate::error::interrupted;
use crate::registry::names::lines::HolderLine;
use crate::registry::{Location, LockEntry};
use crate::sql::LockMode;

/// Maximum time after a grant until other clients see its name.
pub(crate) const LAG: Duration = Duration::from_secs(2);

/// Duration after which a hold gets a row in the dictionary.
const NAMED_AFTER: Duration = Duration::from_millis(200);

/// Average interval between deletions of names unused for 30 days. One client deletes for all.
const DELETE_EVERY: Duration = Duration::from_secs(3600);

/// Number of rows that one deleting statement reads. A pause follows each statement.
const PAGE: i64 = 1000;
const BETWEEN_PAGES: Duration = Duration::from_millis(20);

/// Number of pages after which the position is stored.
const PAGES_PER_NOTE: u32 = 10;

/// The name of the deletion of old names, in the schema's table `upkeep` and in logs.
const TASK: &str = "advisory_name";

/// Maximum pause after repeated failures. After an outage of hours, names are written again soon.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Time limit of one write.
const SAVE_LIMIT: Duration = Duration::from_secs(30);

/// The tracing target, independent of the module path because operators' filters name it.
const TARGET: &str = "leasehold_postgres_advisory::names";

/// Writes and deletes names until the client is closed.
pub(crate) async fn run(common: Arc<Common>) {
    tokio::join!(write(&common), delete_names_hourly(&common));
}

async fn write(common: &Arc<Common>) {
    // The pause after a failure.
    let mut pause = NAMED_AFTER;
    while !common.closed.load(Ordering::Acquire) {
        let granted = common.registry.granted.notified();
        if common.registry.holds(|entry| !entry.written).is_empty() {
            granted.await;
        }
        sleep(NAMED_AFTER).await;
        let now = Instant::now();
        let lasting = |entry: &LockEntry| {
            !entry.written && entry.grant.is_some_and(|grant| now.duration_since(grant.at) >= NAMED_AFTER)
        };
        let holds = common.registry.holds(lasting);
        if holds.is_empty() {
            continue;
        }
        if let Err(error) = save(common, &holds).await {
            tracing::debug!(target: TARGET, %error, "the names of held locks were not written; they are listed as numbers");
            sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
            continue;
        }
        pause = NAMED_AFTER;
        common.registry.written(&holds);
    }
}

async fn save(common: &Common, holds: &[(i64, LockEntry)]) -> Result<(), Error> {
    const DOING: &str = "write the names of locks";
    let sessions = OwnSessions::of(common);
    let rows = NameRows::new(common, holds, &sessions);
    let shared = SharedRows::new(common, holds, &sessions);
    let (text, text_of_shared) =
        (Arc::clone(&common.statements.name), Arc::clone(&common.statements.name_shared));
    let saving = common.query(DOING, move |connection| {
        async move {
            if !rows.numbers.is_empty() {
                rows.write(connection, text).await?;
            }
            if !shared.numbers.is_empty() {
                shared.write(connection, text_of_shared).await?;
            }
            Ok::<_, sqlx::Error>(())
        }
        .boxed()
    });
    timeout(SAVE_LIMIT, saving).await.unwrap_or_else(|_| Err(interrupted()))
}

/// Deletes old rows about once an hour. A client that ends sooner leaves this to other clients.
async fn delete_names_hourly(common: &Common) {
    let mut watch = Watch::new(TASK);
    loop {
        sleep(DELETE_EVERY.mul_f64(0.5 + fastrand::f64())).await;
        // An idle client leaves the deletion to others, because it would open a session.
        if !common.may_only_read() && !common.is_asleep() {
            let outcome = delete_old_names(common, &mut watch).await;
            watch.ended(&common.config, &outcome);
        }
    }
}

/// Deletes old names from the last stored position on, if the run is due and no other client has claimed it.
pub(crate) async fn delete_old_names(common: &Common, watch: &mut Watch) -> Result<(), Error> {
    const DOING: &str = "delete old names of locks";
    let text = Arc::clone(&common.statements.claim_upkeep);
    let progress = common.query(DOING, move |connection| {
        let taken = sqlx::query(AssertSqlSafe(text)).persistent(false).bind(TASK);
        async move { taken.fetch_optional(connection).await?.as_ref().map(Progress::read).transpose() }
            .boxed()
    });
    let Some(progress) = progress.await? else { return Ok(()) };
    let taken = Instant::now();
    // Starts at the first row if the position is malformed, because then another program has written it.
    let mut next = Some(parse(&progress.after).unwrap_or((i16::MIN, i64::MIN)));
    let mut pages = 0;
    while let Some((space, number)) = next {
        let text = Arc::clone(&common.statements.forget);
        let page = common.query(DOING, move |connection| {
            let query = sqlx::query(AssertSqlSafe(text)).persistent(false);
            let query = query.bind(space).bind(number).bind(PAGE);
            async move { last_of(&query.fetch_one(connection).await?) }.boxed()
        });
        next = page.await?;
        pages += 1;
        if next.is_none() || pages % PAGES_PER_NOTE == 0 {
            let after = next.map(|(space, number)| format!("{space} {number}")).unwrap_or_default();
            let (text, note) =
                (Arc::clone(&common.statements.note_upkeep), Note { after, pause: DELETE_EVERY });
            let noted = common.query(DOING, move |connection| {
                let query = sqlx::query(AssertSqlSafe(text)).persistent(false).bind(TASK);
                let query = query.bind(note.after.clone()).bind(note.pause_micros());
                async move { query.execute(connection).await.map(drop) }.boxed()
            });
            noted.await?;
            watch.warn_if_overdue(&common.config, progress.running + taken.elapsed());
        }
        sleep(BETWEEN_PAGES).await;
    }
    Ok(())
}

/// Reads the position of the last row checked. `None` if no further rows are possible.
fn last_of(row: &PgRow) -> Result<Option<(i16, i64)>, sqlx::Error> {
    let (space, number): (Option<i16>, Option<i64>) = (row.try_get(1)?, row.try_get(2)?);
    Ok(space.zip(number))
}

fn parse(after: &str) -> Option<(i16, i64)> {
    let (space, number) = after.split_once(' ')?;
    Some((space.parse().ok()?, number.parse().ok()?))
}

/// The server processes of this client's sessions.
struct OwnSessions {
    shared: Vec<i32>,
    waiting: HashMap<u64, i32>,
}

impl OwnSessions {
    fn of(common: &Common) -> Self {
        Self { shared: common.shared_pids(), waiting: common.wait_pids() }
    }

    fn pid(&self, location: Location) -> Option<i32> {
        match location {
            Location::Shared(index) => self.shared.get(index).copied(),
            Location::Own(id) => self.waiting.get(&id).copied(),
            Location::Nowhere => None,
        }
    }
}

/// The names of exclusive holds.
#[derive(Default)]
struct NameRows {
    space: i16,
    numbers: Vec<i64>,
    keys: Vec<String>,
    pids: Vec<i32>,
    holders: Vec<String>,
    tokens: Vec<i64>,
    since: Vec<i64>,
    labels: Vec<Option<String>>,
}

impl NameRows {
    fn new(common: &Common, holds: &[(i64, LockEntry)], sessions: &OwnSessions) -> Self {
        let mut rows = Self { space: space_of(common.space()), ..Self::default() };
        for (number, entry) in holds.iter().filter(|(_, entry)| entry.mode == LockMode::Exclusive) {
            let (Some(pid), Some(grant)) = (sessions.pid(entry.location), entry.grant) else { continue };
            rows.numbers.push(*number);
            rows.keys.push(entry.key.as_str().to_owned());
            rows.pids.push(pid);
            rows.holders.push(entry.holder.to_string());
            rows.tokens.push(grant.token.as_i64());
            rows.since.push(micros_of(entry));
            rows.labels.push(entry.label.as_deref().map(str::to_owned));
        }
        rows
    }

    async fn write(self, connection: &mut PgConnection, text: Arc<str>) -> Result<(), sqlx::Error> {
        let query = sqlx::query(AssertSqlSafe(text)).persistent(false);
        let query = query.bind(self.space).bind(self.numbers).bind(self.keys).bind(self.pids);
        let query = query.bind(self.holders).bind(self.tokens).bind(self.since).bind(self.labels);
        query.execute(connection).await.map(drop)
    }
}

/// The names of shared holds, by number. Each has the lines of all holds of this client.
#[derive(Default)]
struct SharedRows {
    space: i16,
    numbers: Vec<i64>,
    keys: Vec<String>,
    lines: Vec<String>,
    /// The server processes of this client, whose earlier lines are replaced.
    pids: Vec<String>,
}

impl SharedRows {
    fn new(common: &Common, holds: &[(i64, LockEntry)], sessions: &OwnSessions) -> Self {
        let mut numbers: Vec<i64> = holds
            .iter()
            .filter(|(_, entry)| entry.mode == LockMode::Shared)
            .map(|(number, _)| *number)
            .collect();
        numbers.sort_unstable();
        numbers.dedup();
        let mut rows = Self { space: space_of(common.space()), ..Self::default() };
        if numbers.is_empty() {
            return rows;
        }
        let pids = sessions.shared.iter().chain(sessions.waiting.values());
        rows.pids = pids.map(ToString::to_string).collect();
        let mut by_number: HashMap<i64, Vec<LockEntry>> = HashMap::new();
        for (number, entry) in common.registry.holds(|entry| entry.mode == LockMode::Shared) {
            by_number.entry(number).or_default().push(entry);
        }
        for number in numbers {
            // A number whose holds have ended in the meantime is not written.
            let Some(entries) = by_number.get(&number) else { continue };
            let lines = entries.iter().filter_map(|entry| {
                Some(HolderLine {
                    pid: sessions.pid(entry.location)?,
                    holder: entry.holder,
                    token: entry.grant?.token,
                    since: micros_of(entry),
                    permit: entry.grant?.permit,
                    label: entry.label.clone(),
                })
            });
            let lines: Vec<String> = lines.map(|line| line.text()).collect();
            if let (Some(entry), false) = (entries.first(), lines.is_empty()) {
                rows.numbers.push(number);
                rows.keys.push(entry.key.as_str().to_owned());
                rows.lines.push(lines.join("\n"));
            }
        }
        rows
    }

    async fn write(self, connection: &mut PgConnection, text: Arc<str>) -> Result<(), sqlx::Error> {
        let query = sqlx::query(AssertSqlSafe(text)).persistent(false);
        let query =
            query.bind(self.space).bind(self.numbers).bind(self.keys).bind(self.lines).bind(self.pids);
        query.execute(connection).await.map(drop)
    }
}

/// Returns the time of the grant, in microseconds of Unix time.
fn micros_of(entry: &LockEntry) -> i64 {
    let since = entry.grant.map(|grant| grant.since.duration_since(UNIX_EPOCH).unwrap_or_default());
    since.map_or(0, |since| i64::try_from(since.as_micros()).unwrap_or(0))
}

/// Returns the value of `pg_locks.objsubid` for a key space.
pub(crate) fn space_of(space: KeySpace) -> i16 {
    match space {
        KeySpace::Big => 1,
        KeySpace::Pair => 2,
    }
}

#[cfg(test)]
mod tests;
