use leasehold_api::{Capabilities, Scope};
use leasehold_engine::{Backend as _, Timing};
use sqlx::{AssertSqlSafe, PgConnection, Row as _, raw_sql};
use test_servers::fresh_database;

use super::*;
use crate::config::PgConfig;
use crate::table::{Dialect, TableBackend, TableSettings};
use crate::upkeep::Watch;

/// The statements of a store that can only purge, and then removes the whole page.
const PURGES: Dialect = Dialect {
    kind: "lease",
    stores: crate::schema::Stores::Lease,
    grant_one: "",
    retake_one: "",
    grant_free: "",
    grant: "",
    free: "",
    among: "",
    renew_early: None,
    renew: "",
    confirm: "",
    relabel: "",
    give_out: None,
    adopt: None,
    ask: "",
    release_unawaited: "",
    release_one: "",
    release: "",
    release_unlocked: "",
    mark: "",
    served: "",
    force: "",
    list: "",
    purge: "
WITH page AS MATERIALIZED (
    SELECT p.key, row_number() OVER () AS n FROM (
        SELECT l.key FROM {schema}.lease l WHERE l.key > $2::text AND $1::bigint > 0 ORDER BY l.key LIMIT $3::bigint) p
), gone AS (DELETE FROM {schema}.lease d WHERE d.key IN (SELECT p.key FROM page p) RETURNING 1)
SELECT (SELECT count(*) FROM gone), (SELECT p.key::text FROM page p WHERE p.n = $3::bigint)",
    parts: None,
};

async fn backend(config: &PgConfig) -> TableBackend {
    let settings = TableSettings {
        capabilities: Capabilities::new(Scope::Network),
        timing: Timing::default(),
        poll: Duration::from_secs(1),
        connections: 1,
        purge_after: None,
        extension: None,
    };
    TableBackend::connect(config, &PURGES, settings).await.unwrap()
}

fn upkeep(backend: &TableBackend) -> Upkeep {
    Upkeep {
        common: Arc::clone(&backend.common),
        queue: backend.queue.clone(),
        closed: CancellationToken::new(),
        purge_after: None,
    }
}

async fn run(conn: &mut PgConnection, sql: &str) {
    raw_sql(AssertSqlSafe(sql.to_owned()))
        .execute(conn)
        .await
        .unwrap_or_else(|error| panic!("{error}: {sql}"));
}

async fn number(conn: &mut PgConnection, sql: &str) -> i64 {
    raw_sql(AssertSqlSafe(sql.to_owned())).fetch_one(conn).await.unwrap().get(0)
}

const ROWS: &str = "SELECT count(*) FROM leasehold.lease";
const FILL: &str = "INSERT INTO leasehold.lease (key, holder, token, acquired_at, ttl_us, expires_at)
    SELECT lpad(i::text, 6, '0'), 'h', 1, now(), 1, now() FROM generate_series(1, 2500) i";

#[tokio::test]
async fn one_client_removes_old_rows_for_all_and_another_goes_on_where_it_stopped() {
    let database = fresh_database().await;
    let config = PgConfig::from_url(database.url()).unwrap().install_schema(true);
    let (a, b) = (backend(&config).await, backend(&config).await);
    let mut conn = database.connect().await;
    run(&mut conn, FILL).await;
    let mut watch = Watch::new("lease");
    let age = Duration::from_secs(3600);

    // Writes the claim of another client, which lasts for a minute from its last note.
    run(
        &mut conn,
        "UPDATE leasehold.upkeep SET next_at = clock_timestamp() + interval '1 minute', after = '001000'",
    )
    .await;
    upkeep(&a).round(age, &mut watch).await.unwrap();
    assert_eq!(number(&mut conn, ROWS).await, 2500);
    // Makes the upkeep due again, as if the other client had ended without finishing it.
    run(&mut conn, "UPDATE leasehold.upkeep SET next_at = clock_timestamp()").await;
    upkeep(&b).round(age, &mut watch).await.unwrap();
    assert_eq!(number(&mut conn, ROWS).await, 1000, "it began behind what was done");
    // The run is over, and the next one is not due yet.
    upkeep(&a).round(age, &mut watch).await.unwrap();
    assert_eq!(number(&mut conn, ROWS).await, 1000);
    let over = "SELECT count(*) FROM leasehold.upkeep WHERE task = 'lease' AND after = ''
        AND next_at > clock_timestamp() + interval '5 minutes'";
    assert_eq!(number(&mut conn, over).await, 1);
    // A due time far ahead, written by another clock, must not block the run indefinitely.
    run(&mut conn, "UPDATE leasehold.upkeep SET next_at = clock_timestamp() + interval '2 days'").await;
    upkeep(&a).round(age, &mut watch).await.unwrap();
    assert_eq!(number(&mut conn, ROWS).await, 0);
    a.close().await;
    b.close().await;
}

#[test]
fn a_walk_that_takes_hours_is_told_of_once() {
    let config = PgConfig::from_url("postgres://app@db/app").unwrap();
    let mut watch = Watch::new("lease");
    let minutes = |minutes: u64| Duration::from_secs(minutes * 60);
    let told: Vec<bool> = [1, 59, 61, 120, 5, 61].map(|n| watch.warn_if_overdue(&config, minutes(n))).into();
    assert_eq!(told, [false, false, true, false, false, true]);
}
