//! Measures cycles beside held locks, and cycles and the command's lists beside known keys.

use std::sync::Arc;
use std::time::Duration;

use bench::record::{Axis, Chart, Group, Line};
use bench::report::{Row, millis, quantile};
use leasehold_api::{AcquireOptions, Lock, LockKey, MultiGuard};
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_row::RowConfig;
use leasehold_postgres_ttl::TtlConfig;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection};
use test_servers::Cluster;

use crate::command::{self, Tool};
use crate::contest::{Contender, Worker, compete};

const TASKS: usize = 64;
const ROUNDS: usize = 3;
const ROUND: Duration = Duration::from_millis(800);
/// Keys that one call acquires.
const AT_ONCE: usize = 500;
const LIMIT: Duration = Duration::from_millis(500);
/// The command's exit code for a free key.
const NOT_HELD: i32 = 1;

/// Measures cycles while other locks are held by the same client.
pub(crate) async fn held(cluster: &Cluster, group: &mut Group) {
    let database = super::prepared(cluster).await;
    let stores = connect(database.url()).await;
    let mut lines: Vec<Line> =
        stores.iter().map(|(name, _)| Line { name: (*name).to_owned(), points: Vec::new() }).collect();
    let mut guards: Vec<MultiGuard> = Vec::new();
    let mut count = 0;
    for wanted in bench::or_smoke([1, 1_000, 10_000, 50_000], [1, 10, 100, 1_000]) {
        println!("{TASKS} tasks beside {wanted} held locks");
        while count < wanted {
            let more = (wanted - count).min(AT_ONCE);
            let keys: Vec<_> = (count..count + more).map(|index| key(&format!("held:{index}"))).collect();
            for (_, lock) in &stores {
                guards.push(lock.acquire_all(&keys, &AcquireOptions::new()).await.unwrap());
            }
            count += more;
        }
        add_points(&stores, wanted as f64, &mut lines).await;
    }
    drop(guards);
    for (_, lock) in stores {
        lock.close().await.unwrap();
    }
    group.charts.push(chart(
        "held-locks",
        "Cost of a cycle beside held locks, 64 tasks",
        "locks held",
        lines,
    ));
}

/// Measures cycles and lists while the tables contain keys that were used once.
pub(crate) async fn known(cluster: &Cluster, group: &mut Group) {
    let database = super::prepared(cluster).await;
    let url = database.url();
    let mut connection = database.connect().await;
    let stores = connect(url).await;
    let mut lines: Vec<Line> =
        stores.iter().map(|(name, _)| Line { name: (*name).to_owned(), points: Vec::new() }).collect();
    let mut count = 0;
    for wanted in bench::or_smoke([1_000_u64, 100_000, 2_000_000], [10, 100, 1_000]) {
        println!("{TASKS} tasks beside {wanted} used keys");
        use_keys(&mut connection, count, wanted).await;
        count = wanted;
        add_points(&stores, wanted as f64, &mut lines).await;
    }
    for (_, lock) in stores {
        lock.close().await.unwrap();
    }
    connection.close().await.unwrap();
    group.charts.push(chart(
        "known-keys",
        "Cost of a cycle beside used keys, 64 tasks",
        "keys used before",
        lines,
    ));
    lists(url, count, group);
}

/// Inserts rows of released locks, as if the keys from `first` to `last` had been used.
async fn use_keys(connection: &mut PgConnection, first: u64, last: u64) {
    for (table, columns, values) in [
        ("lease", "ttl_us, expires_at, released", "30000000, now(), true"),
        ("mutex", "acquired, released_at", "false, now()"),
    ] {
        let insert = format!(
            "INSERT INTO leasehold.{table} (key, holder, token, acquired_at, {columns})
            SELECT 'known:' || n, '{HOLDER}', n + 1, now(), {values} FROM generate_series({first}, {last} - 1) n"
        );
        connection.execute(sqlx::raw_sql(AssertSqlSafe(insert))).await.unwrap();
        let vacuum = format!("VACUUM (ANALYZE) leasehold.{table}");
        connection.execute(sqlx::raw_sql(AssertSqlSafe(vacuum))).await.unwrap();
    }
    connection.execute("CHECKPOINT").await.unwrap();
}

/// As long as a holder id of the library.
const HOLDER: &str = "0123456789abcdef-0123456789abcdef";

/// Measures the command's lists of a table with `known` keys.
fn lists(url: &str, known: u64, group: &mut Group) {
    let program = command::build();
    let server = url.strip_prefix("postgres").unwrap();
    for (what, scheme) in [("lease rows", "postgres+ttl"), ("mutex rows", "postgres+row")] {
        let url = format!("{scheme}{server}");
        for arguments in [&["list"][..], &["inspect", "known:7"]] {
            let tool = Tool::new("leasehold", &program, &["--quiet", "--url", url.as_str()]);
            // The inspected key is not held.
            let run = |_| millis(tool.time_until(arguments, &[0, NOT_HELD]));
            let took: Vec<f64> = (0..bench::or_smoke(5, 1)).map(run).collect();
            let [median, most] = [0.5, 1.0].map(|share| quantile(&took, share));
            group.rows.push(Row {
                work: format!("`leasehold {}`, {what}, {known} used keys", arguments[0]),
                measured: format!("p50 {median:.0} ms, most {most:.0} ms"),
                goal: format!("at most {LIMIT:?}"),
                met: Some(median <= millis(LIMIT)),
                ..Row::default()
            });
        }
    }
}

/// A store on its default connections, with its name.
type Store = (&'static str, Arc<dyn Lock>);

/// Connects to all stores.
async fn connect(url: &str) -> Vec<Store> {
    let config = || PgConfig::from_url(url).unwrap();
    let session: Arc<dyn Lock> = Arc::new(AdvisoryConfig::new(config()).connect().await.unwrap());
    let lease: Arc<dyn Lock> = Arc::new(TtlConfig::new(config()).connect().await.unwrap());
    let mutex: Arc<dyn Lock> = Arc::new(RowConfig::new(config()).connect().await.unwrap());
    vec![("leasehold session", session), ("leasehold lease row", lease), ("leasehold mutex row", mutex)]
}

/// Measures each store and adds a point to its line.
async fn add_points(stores: &[Store], x: f64, lines: &mut [Line]) {
    let contender = |(name, lock): &Store| {
        let worker = |task| Library {
            lock: Arc::clone(lock),
            key: key(&format!("measured:{task}")),
            options: AcquireOptions::new(),
        };
        Contender::new(name, "", (0..TASKS).map(worker).collect())
    };
    let mut contenders: Vec<Contender> = stores.iter().map(contender).collect();
    let entries = compete(&mut contenders, ROUNDS, ROUND).await;
    for (line, entry) in lines.iter_mut().zip(entries) {
        let rate = entry.series.median();
        // A short round on a busy machine can be empty.
        if rate > 0.0 {
            line.points.push((x, 1e6 / rate));
        }
    }
}

fn chart(file: &str, title: &str, x: &str, lines: Vec<Line>) -> Chart {
    let (file, title) = (file.to_owned(), title.to_owned());
    Chart { file, title, x: Axis::logarithmic(x), y: Axis::linear("us per cycle"), lines }
}

fn key(text: &str) -> LockKey {
    LockKey::new(text).unwrap()
}

struct Library {
    lock: Arc<dyn Lock>,
    key: LockKey,
    options: AcquireOptions,
}

impl Worker for Library {
    async fn cycle(&mut self) {
        self.lock.acquire(&self.key, &self.options).await.unwrap().release().await.unwrap();
    }
}
