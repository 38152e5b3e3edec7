#![allow(clippy::unwrap_used)]

use leasehold_postgres::session::Session;
use leasehold_postgres::{Fnv1a64, PgConfig};
use sqlx::raw_sql;
use test_servers::fresh_database;

use super::*;
use crate::side_session::SideSession;

async fn run(conn: &mut PgConnection, sql: &str) {
    raw_sql(AssertSqlSafe(sql.to_owned()))
        .execute(conn)
        .await
        .unwrap_or_else(|error| panic!("{error}: {sql}"));
}

async fn count(conn: &mut PgConnection, of: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM leasehold.advisory_name WHERE {of}");
    raw_sql(AssertSqlSafe(sql)).fetch_one(conn).await.unwrap().get(0)
}

#[tokio::test]
async fn old_names_are_deleted_page_by_page_by_whose_turn_it_is() {
    let database = fresh_database().await;
    let config = PgConfig::from_url(database.url()).unwrap();
    let mut conn = database.connect().await;
    leasehold_postgres::schema::install(&mut conn, config.schema_name()).await.unwrap();
    // Writes rows in both key spaces, with numbers around zero. Every second row is old.
    run(
        &mut conn,
        "INSERT INTO leasehold.advisory_name (space, number, key, pid, holder, token, granted_at)
         SELECT s, i, 'k' || i, 1, 'h', 1, now() - (i & 1) * interval '31 days'
         FROM generate_series(1, 2) s, generate_series(-800, 800) i",
    )
    .await;
    let common = Common::new(config, Arc::new(Fnv1a64), 1);
    let session = Session::lazy(
        &common.config,
        &common.side_session,
        SideSession {
            statements: common.statements.clone(),
            limit: Duration::from_secs(30),
            spare: Duration::from_secs(20),
        },
    );
    let mut watch = Watch::new(TASK);

    // Stores a position, as if another client had stopped there.
    run(&mut conn, "UPDATE leasehold.upkeep SET after = '2 -1'").await;
    delete_old_names(&common, &mut watch).await.unwrap();
    assert_eq!(count(&mut conn, "granted_at < now() - interval '30 days'").await, 1_600 - 400);
    assert_eq!(count(&mut conn, "space = 2 AND number >= 0 AND number & 1 = 1").await, 0);
    // The next run is not due.
    delete_old_names(&common, &mut watch).await.unwrap();
    assert_eq!(count(&mut conn, "number & 1 = 1").await, 1_200);
    // A malformed position must count as the first row.
    run(&mut conn, "UPDATE leasehold.upkeep SET after = 'nonsense', next_at = now()").await;
    delete_old_names(&common, &mut watch).await.unwrap();
    assert_eq!(count(&mut conn, "number & 1 = 1").await, 0);
    assert_eq!(count(&mut conn, "true").await, 2 * 801, "what is in use stays");
    common.close_queues();
    session.ended(Duration::from_secs(5)).await;
}
