//! Rows written by other programs. Stores show or refuse their content, and can still acquire the keys.
#![allow(clippy::unwrap_used)]
#![cfg(all(feature = "postgres-advisory", feature = "postgres-row", feature = "postgres-ttl"))]

use std::sync::{Arc, Mutex, PoisonError};

use fuzzing::{Fuzz, parts, text};
use leasehold::postgres::sqlx::{self, PgConnection};
use leasehold::{Error, ErrorKind, HolderId, ListQuery, Lock, LockExt as _, LockKey};
use test_servers::{Database, fresh_database};

const ROWS: Fuzz<'_> = Fuzz {
    target: "rows",
    inputs: 60,
    examples: &[
        "ledger:42\u{1f}0123456789abcdef0123456789abcdef-1\u{1f}a\u{1f}ann@host\u{1f}1\u{1f}3\u{1f}5",
        "k\u{1f}nobody\u{1f}\u{1f}\u{1f}0\u{1f}0\u{1f}0",
        "é\u{1b}[31m\u{1f}ffffffffffffffffffffffffffffffff-18446744073709551615\u{1f}\n\u{1f}\t\u{1f}2\u{1f}1\u{1f}4",
        "\u{1}\u{1f}-\u{1f}x\u{1f}y\u{1f}4\u{1f}2\u{1f}1",
    ],
    words: &["\u{1f}", "\u{1f}1", "\u{1f}4", "\u{d7ff}", "\u{10ffff}", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"],
};

/// Values that no client writes but the server accepts.
const NUMBERS: [i64; 7] = [0, 1, -1, i64::MAX, i64::MIN, 9_007_199_254_740_991, 1_000_000];
const TIMES: [&str; 7] =
    ["now", "infinity", "-infinity", "4713-01-01 BC", "294276-12-31 23:59:59", "1970-01-01", "2200-01-01"];

/// Content of a row, the same for each store.
struct Row {
    key: String,
    holder: String,
    label: Option<String>,
    owner: Option<String>,
    numbers: [i64; 3],
    times: [&'static str; 3],
    is_held: bool,
}

impl Row {
    /// Creates a row from an input. `None` if the server does not accept the key.
    fn of(input: &[u8]) -> Option<Self> {
        let texts: Vec<_> = parts(input).into_iter().map(|part| text(part).replace('\0', "")).collect();
        let piece = |at: usize| texts.get(at).cloned().unwrap_or_default();
        let sum = |at: usize| piece(at).bytes().map(usize::from).sum::<usize>();
        let some = |at| Some(piece(at)).filter(|text| !text.is_empty());
        let key = piece(0);
        (1..=1024).contains(&key.len()).then(|| Self {
            key,
            holder: piece(1),
            label: some(2),
            owner: some(3),
            numbers: [4, 5, 6].map(|at| NUMBERS[sum(at) % NUMBERS.len()]),
            times: [7, 5, 4].map(|at| TIMES[(sum(at) + sum(6)) % TIMES.len()]),
            is_held: sum(6) % 2 == 0,
        })
    }

    async fn write(&self, connection: &mut PgConnection) {
        let [token, cooldown, window] = self.numbers;
        for (table, columns, values) in [
            (
                "mutex",
                "acquired, acquired_at, released_at",
                "$9, $10::text::timestamptz, $11::text::timestamptz",
            ),
            (
                "lease",
                "released, acquired_at, expires_at, ttl_us",
                "NOT $9, $10::text::timestamptz, $11::text::timestamptz, $4",
            ),
        ] {
            let statement = format!(
                "INSERT INTO leasehold.{table} (key, holder, token, cooldown_us, window_us, label, owner, wake_until, {columns})
                 SELECT $1, $2, $3, nullif($4::bigint, 0), nullif($5::bigint, 0), $6, $7, $8::text::timestamptz, {values}"
            );
            let query = sqlx::query(sqlx::AssertSqlSafe(statement)).bind(&self.key).bind(&self.holder);
            let query = query.bind(token).bind(cooldown).bind(window).bind(&self.label).bind(&self.owner);
            let query = query.bind(self.times[0]).bind(self.is_held).bind(self.times[1]).bind(self.times[2]);
            query.execute(&mut *connection).await.unwrap();
        }
        // The number of an advisory lock that this connection holds.
        let statement =
            "INSERT INTO leasehold.advisory_name (space, number, key, pid, holder, token, granted_at, label)
            SELECT 1, 4711, $1, pg_backend_pid(), $2, $3, $4::text::timestamptz, $5";
        let query = sqlx::query(statement).bind(&self.key).bind(&self.holder).bind(token);
        query.bind(self.times[1]).bind(&self.label).execute(connection).await.unwrap();
    }
}

#[test]
fn fuzz_rows() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let server = runtime.block_on(Server::start());
    // The server holds one row at a time.
    let server = Mutex::new(server);
    ROWS.check(|input| {
        let Some(row) = Row::of(input) else { return };
        let mut server = server.lock().unwrap_or_else(PoisonError::into_inner);
        runtime.block_on(server.check(&row));
    });
}

struct Server {
    _database: Database,
    connection: PgConnection,
    stores: Vec<Arc<dyn Lock>>,
}

impl Server {
    async fn start() -> Self {
        let database = fresh_database().await;
        let rest = database.url().split_once("://").unwrap().1;
        let joint = if rest.contains('?') { '&' } else { '?' };
        let mut stores = Vec::new();
        for scheme in ["postgres", "postgres+row", "postgres+ttl"] {
            stores.push(leasehold::connect(&format!("{scheme}://{rest}{joint}install=true")).await.unwrap());
        }
        let mut connection = database.connect().await;
        sqlx::query("SELECT pg_advisory_lock(4711)").execute(&mut connection).await.unwrap();
        Self { _database: database, connection, stores }
    }

    async fn check(&mut self, row: &Row) {
        sqlx::raw_sql("TRUNCATE leasehold.mutex, leasehold.lease, leasehold.advisory_name")
            .execute(&mut self.connection)
            .await
            .unwrap();
        row.write(&mut self.connection).await;
        for store in &self.stores {
            look(store, row).await;
            if let Ok(key) = LockKey::new(&row.key) {
                take(store, &key).await;
            }
        }
    }
}

async fn look(store: &Arc<dyn Lock>, row: &Row) {
    let admin = store.admin().unwrap();
    let key = LockKey::new(&row.key);
    match admin.list(&ListQuery::new().include_ended()).await {
        Ok(infos) => {
            for info in infos.iter().filter(|info| info.named) {
                assert_eq!(info.key.as_str(), row.key);
                for hold in &info.holders {
                    assert_eq!(hold.holder, row.holder.parse::<HolderId>().ok());
                    assert_eq!(hold.label.as_deref(), row.label.as_deref());
                }
            }
        }
        Err(error) => assert!(key.is_err() && error.kind() == ErrorKind::Corrupt, "{store}: {error}"),
    }
    if let Ok(key) = &key {
        let info = admin.inspect(key).await.unwrap_or_else(|error| panic!("{store}: {error}"));
        assert_eq!(info.key, *key);
    }
}

async fn take(store: &Arc<dyn Lock>, key: &LockKey) {
    let granted =
        store.key(key).try_acquire().await.unwrap_or_else(|error| panic!("{store}: {}", described(&error)));
    if let Some(guard) = granted {
        let shown = store.admin().unwrap().inspect(key).await.unwrap();
        assert!(shown.is_held() && shown.holders[0].token == guard.token(), "{shown:?}");
        guard.release().await.unwrap();
    }
}

fn described(error: &Error) -> String {
    format!("{error}: {:?}", std::error::Error::source(error))
}
