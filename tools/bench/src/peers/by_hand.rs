//! Locks in rows by bare statements. Tasks share up to 64 connections, as with a pool that never pings.

use std::sync::Arc;

use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};
use tokio::sync::Mutex;

use super::peer::Keys;
use crate::contest::Worker;
use crate::postgres::contender::{MOST_CONNECTIONS, Statements};

const HOLDER: &str = "0123456789abcdef-0123456789abcdef";
/// The rows that `SELECT FOR UPDATE` locks. They must exist.
const ROWS: &str = "CREATE TABLE IF NOT EXISTS hand.locked (key text PRIMARY KEY)";

/// Returns tasks that write a lease into a row and remove it.
pub(crate) async fn leases(url: &str, statements: &'static Statements, tasks: usize) -> Vec<Lease> {
    let connections = connections(url, tasks).await;
    let worker =
        |task| Lease { connection: shared(&connections, task), statements, keys: Keys::of(task, tasks) };
    (0..tasks).map(worker).collect()
}

/// Returns tasks that lock a row by an open transaction.
pub(crate) async fn transactions(url: &str, tasks: usize) -> Vec<ForUpdate> {
    let connections = connections(url, tasks).await;
    connections[0].lock().await.execute(ROWS).await.unwrap();
    let worker = |task| ForUpdate { connection: shared(&connections, task), keys: Keys::of(task, tasks) };
    (0..tasks).map(worker).collect()
}

type Shared = Arc<Mutex<PgConnection>>;

async fn connections(url: &str, tasks: usize) -> Vec<Shared> {
    let mut connections = Vec::new();
    for _ in 0..tasks.min(MOST_CONNECTIONS) {
        connections.push(Arc::new(Mutex::new(PgConnection::connect(url).await.unwrap())));
    }
    connections
}

fn shared(connections: &[Shared], task: usize) -> Shared {
    Arc::clone(&connections[task % connections.len()])
}

pub(crate) struct Lease {
    connection: Shared,
    statements: &'static Statements,
    keys: Keys,
}

impl Worker for Lease {
    async fn cycle(&mut self) {
        let (mut connection, key) = (self.connection.lock().await, self.keys.next());
        let acquire = sqlx::query(self.statements.acquire).bind(&key.text).bind(HOLDER);
        let token: i64 = acquire.fetch_optional(&mut *connection).await.unwrap().unwrap().get(0);
        let release = sqlx::query(self.statements.release).bind(&key.text).bind(HOLDER);
        let released = release.execute(&mut *connection).await.unwrap();
        assert!(token > 0 && released.rows_affected() == 1);
    }
}

pub(crate) struct ForUpdate {
    connection: Shared,
    keys: Keys,
}

impl Worker for ForUpdate {
    async fn cycle(&mut self) {
        let (mut connection, key) = (self.connection.lock().await, self.keys.next());
        let mut transaction = connection.begin().await.unwrap();
        let lock = sqlx::query("SELECT 1 FROM hand.locked WHERE key = $1 FOR UPDATE").bind(&key.text);
        let found = lock.fetch_optional(&mut *transaction).await.unwrap();
        if found.is_none() {
            let insert = sqlx::query("INSERT INTO hand.locked (key) VALUES ($1)").bind(&key.text);
            insert.execute(&mut *transaction).await.unwrap();
        }
        transaction.commit().await.unwrap();
    }
}
