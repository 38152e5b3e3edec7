//! Advisory locks of other programs, as operators see them, on a real server.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::process::Command;
use std::time::Duration;

use leasehold::postgres::sqlx::{AssertSqlSafe, Connection as _, raw_sql};
use leasehold::postgres::{DEFAULT_SCHEMA, Identifier, schema};
use leasehold::postgres_advisory::XactLocks;
use support::finish;
use test_servers::{Cluster, Database};

const PATIENCE: Duration = Duration::from_secs(60);

fn tool(database: &Database, arguments: &str) -> Command {
    let mut command = support::tool();
    command.env("LEASEHOLD_URL", database.url()).args(arguments.split_whitespace());
    command
}

/// A key that is spelled like a listed number is another lock, and the command says so.
#[tokio::test(flavor = "multi_thread")]
async fn a_number_without_a_name_is_told_from_the_key_that_is_spelled_like_it() {
    let database = Cluster::shared().fresh_database().await;
    let (mut admin, mut other) = (database.connect().await, database.connect().await);
    schema::install(&mut admin, &Identifier::new(DEFAULT_SCHEMA).unwrap()).await.unwrap();
    raw_sql("SELECT pg_advisory_lock(77, 88)").execute(&mut other).await.unwrap();
    let (code, stdout, stderr) = finish(&mut tool(&database, "list"));
    assert!(code == 0 && stdout.contains("number 77,88 "), "{code}: {stdout}{stderr}");
    for (command, is_told) in [
        ("inspect 77,88", true),
        ("release 77,88 --force --session", true),
        ("inspect 77,88 -q", false),
        ("inspect 77,89", false),
    ] {
        let (code, _, stderr) = finish(&mut tool(&database, command));
        let told = stderr.contains("the lock with the number 77,88 is another one, held by ");
        assert!(code == 1 && told == is_told, "{command}: {code}: {stderr}");
    }
    other.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prepared_transaction_has_no_session_to_be_ended() {
    let database = Cluster::shared().fresh_database().await;
    let (mut admin, mut user) = (database.connect().await, database.connect().await);
    schema::install(&mut admin, &Identifier::new(DEFAULT_SCHEMA).unwrap()).await.unwrap();
    let locks = XactLocks::new(Identifier::new(DEFAULT_SCHEMA).unwrap());
    let mut tx = user.begin().await.unwrap();
    locks.lock_in(&mut tx, &"k".parse().unwrap(), PATIENCE).await.unwrap();
    let prepare = format!("PREPARE TRANSACTION '{}'", database.name());
    raw_sql(AssertSqlSafe(prepare)).execute(&mut *tx).await.unwrap();
    let (code, _, stderr) = finish(&mut tool(&database, "release k --force --session"));
    assert!(code == 64 && stderr.contains("ROLLBACK PREPARED"), "{code} {stderr}");
    assert!(!stderr.contains("pg_signal_backend"), "no privilege helps: {stderr}");
    let rollback = format!("ROLLBACK PREPARED '{}'", database.name());
    raw_sql(AssertSqlSafe(rollback)).execute(&mut admin).await.unwrap();
}
