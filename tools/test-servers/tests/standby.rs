//! A standby follows its primary, can be cut off, and can be promoted.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use sqlx::{Connection as _, PgConnection};
use test_servers::{Cluster, ClusterOptions, Standby, StopMode};

async fn count(url: &str) -> i64 {
    let mut connection = PgConnection::connect(url).await.unwrap();
    sqlx::query_scalar("SELECT count(*) FROM thing").fetch_one(&mut connection).await.unwrap()
}

#[tokio::test]
async fn follows_is_cut_off_and_promoted() {
    let primary = Cluster::start(ClusterOptions::new());
    let standby = Standby::of(&primary).await;
    primary.run_sql("postgres", "CREATE TABLE thing (a int); INSERT INTO thing VALUES (1)").await;
    standby.wait_for_replay(&primary).await;
    assert_eq!(count(&standby.url("postgres")).await, 1);
    let mut connection = PgConnection::connect(&standby.url("postgres")).await.unwrap();
    let error = sqlx::query("INSERT INTO thing VALUES (0)").execute(&mut connection).await.unwrap_err();
    assert_eq!(error.as_database_error().unwrap().code().unwrap(), "25006", "a standby takes no writes");

    standby.cut().await;
    primary.run_sql("postgres", "INSERT INTO thing VALUES (2)").await;
    primary.stop(StopMode::Immediate).await;
    standby.promote().await;
    assert_eq!(count(&standby.url("postgres")).await, 1, "what came after the cut must be missing");
    standby.cluster().run_sql("postgres", "INSERT INTO thing VALUES (3), (4)").await;
    assert_eq!(count(&standby.url("postgres")).await, 3);
    let cluster = standby.into_cluster();
    assert_eq!(cluster.number("postgres", "SELECT count(*) FROM thing").await, 3);
}

#[tokio::test]
async fn follows_a_primary_with_a_password() {
    let primary = Cluster::start(ClusterOptions::new().password("pass word"));
    let standby = Standby::of(&primary).await;
    primary.run_sql("postgres", "CREATE TABLE thing (a int)").await;
    standby.wait_for_replay(&primary).await;
    assert_eq!(count(&standby.url("postgres")).await, 0);
}
