//! Measures the cost of the notification clause for a release without waiters.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench::report::{Row, Series};
use leasehold_api::{AcquireOptions, Lock, LockKey};
use leasehold_postgres::PgConfig;
use leasehold_postgres_row::RowConfig;
use leasehold_postgres_ttl::TtlConfig;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, Row as _};

const NAME: &str = "leasehold bench release";
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(800);
const GOAL: f64 = 0.95;

pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    let config = || PgConfig::from_url(url).unwrap().application_name(NAME);
    let leases = TtlConfig::new(config()).connections(1).connect().await.unwrap();
    let text = release_of(&leases, url).await;
    one(url, "lease row", "lease", "released = false, expires_at = 'infinity'", &text, rows).await;
    let mutexes = RowConfig::new(config()).connections(1).connect().await.unwrap();
    let text = release_of(&mutexes, url).await;
    one(url, "mutex row", "mutex", "acquired = true", &text, rows).await;
}

/// Returns the release statement of the store, as the server shows it.
async fn release_of(lock: &dyn Lock, url: &str) -> String {
    let key = LockKey::new("shown").unwrap();
    lock.acquire(&key, &AcquireOptions::new()).await.unwrap().release().await.unwrap();
    let mut connection = PgConnection::connect(url).await.unwrap();
    let query = sqlx::query("SELECT query FROM pg_stat_activity WHERE application_name = $1");
    let text: String = query.bind(NAME).fetch_one(&mut connection).await.unwrap().get(0);
    lock.close().await.unwrap();
    text
}

async fn one(url: &str, what: &str, table: &str, taken: &str, text: &str, rows: &mut Vec<Row>) {
    // The check for waiters is at the end of the statement, because another statement handles a release with waiters.
    let (plain, rest) = text.split_once("AND l.wake_until").expect("the release looks for waiters");
    assert!(plain.contains("UPDATE") && rest == " IS NULL", "not a release: {text}");
    let take: Arc<str> = format!("UPDATE leasehold.{table} SET {taken} WHERE key = $1").into();
    let texts: [Arc<str>; 2] = [text.into(), plain.into()];
    for connections in [1, 8] {
        let mut open = Vec::new();
        for number in 0..connections {
            open.push(Releaser::new(url, table, number, &take).await);
        }
        let mut series =
            ["as it is", "without"].map(|name| Series { name: name.to_owned(), rounds: Vec::new() });
        for _ in 0..bench::or_smoke(ROUNDS, 1) {
            let deadline = Instant::now() + bench::or_smoke(ROUND, Duration::from_millis(50));
            let tasks: Vec<_> =
                open.drain(..).map(|releaser| tokio::spawn(releaser.run(texts.clone(), deadline))).collect();
            let mut spent = [0.0; 2];
            for task in tasks {
                let (releaser, [with, without]) = task.await.unwrap();
                open.push(releaser);
                spent = [spent[0] + with, spent[1] + without];
            }
            // Releases per second and connection.
            series
                .iter_mut()
                .zip(spent)
                .for_each(|(series, spent)| series.rounds.push(f64::from(connections) / spent));
        }
        let ratio = series[0].ratio(&series[1]);
        println!(
            "release of a {what}, {connections} connections: {ratio:.3} of the same without notifications"
        );
        rows.push(Row {
            work: format!("release of a {what}, {connections} connection(s)"),
            measured: series[0].rate(),
            floor: series[1].rate(),
            ratio: format!("{ratio:.2}"),
            goal: format!("at least {GOAL}"),
            met: Some(ratio >= GOAL),
            ..Row::default()
        });
    }
}

struct Releaser {
    connection: PgConnection,
    take: Arc<str>,
    key: String,
}

impl Releaser {
    async fn new(url: &str, table: &str, number: i32, take: &Arc<str>) -> Self {
        let lock: Box<dyn Lock> = match table {
            "lease" => Box::new(TtlConfig::new(PgConfig::from_url(url).unwrap()).connect().await.unwrap()),
            _ => Box::new(RowConfig::new(PgConfig::from_url(url).unwrap()).connect().await.unwrap()),
        };
        let key = format!("released:{table}:{number}");
        let options = AcquireOptions::new();
        lock.acquire(&LockKey::new(&key).unwrap(), &options).await.unwrap().release().await.unwrap();
        lock.close().await.unwrap();
        Self { connection: PgConnection::connect(url).await.unwrap(), take: Arc::clone(take), key }
    }

    /// Runs both statements in turn. Returns the mean seconds of each.
    async fn run(mut self, texts: [Arc<str>; 2], deadline: Instant) -> (Self, [f64; 2]) {
        let query = sqlx::query(
            "SELECT holder FROM leasehold.lease WHERE key = $1
             UNION ALL SELECT holder FROM leasehold.mutex WHERE key = $1",
        );
        let holder: String = query.bind(&self.key).fetch_one(&mut self.connection).await.unwrap().get(0);
        let mut spent = [0.0; 2];
        let mut count = 0_u32;
        while Instant::now() < deadline {
            for (index, text) in texts.iter().enumerate() {
                let take = sqlx::query(AssertSqlSafe(Arc::clone(&self.take)));
                take.bind(&self.key).execute(&mut self.connection).await.unwrap();
                // Releases a used lock, because its window then stays.
                let free = sqlx::query(AssertSqlSafe(Arc::clone(text)));
                let free = free.bind(&self.key).bind(&holder).bind(false);
                let begun = Instant::now();
                let freed = free.execute(&mut self.connection).await.unwrap();
                spent[index] += begun.elapsed().as_secs_f64();
                assert_eq!(freed.rows_affected(), 1);
            }
            count += 1;
        }
        (self, spent.map(|spent| spent / f64::from(count)))
    }
}
