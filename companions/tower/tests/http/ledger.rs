//! A ledger behind HTTP, on real sockets and a real server. A negative balance shows that a request has won a race.

#![allow(clippy::unwrap_used, unreachable_pub)] // A failed `unwrap` fails the test.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::post;
use leasehold_api::{Lock, key};
use leasehold_postgres::{Identifier, PgConfig};
use leasehold_postgres_advisory::{AdvisoryConfig, XactLocks};
use leasehold_postgres_ttl::TtlConfig;
use leasehold_tower::{LockLayer, OnGone, SharedTx, Template, TxLayer};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool};
use test_bounds::within;
pub use test_servers::sql::run;
use test_servers::{Database, fresh_database, sql};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use crate::common::LONG;

/// The kind of lock around a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    Not,
    Session,
    Lease,
    OwnTransaction,
    TxLayer,
}

pub const LOCKED: [How; 4] = [How::Session, How::Lease, How::OwnTransaction, How::TxLayer];

/// Stops a handler between its read and its write.
#[derive(Clone, Debug)]
pub struct Pace {
    read: Arc<Semaphore>,
    opened: Arc<Semaphore>,
}

impl Pace {
    pub fn closed() -> Self {
        Self { read: Arc::new(Semaphore::new(0)), opened: Arc::new(Semaphore::new(0)) }
    }

    pub fn open(&self) {
        self.opened.add_permits(1 << 20);
    }

    pub fn opened() -> Self {
        let pace = Self::closed();
        pace.open();
        pace
    }

    /// Waits until `n` more requests have read.
    pub async fn have_read(&self, n: u32) {
        within(LONG, "nobody came", self.read.acquire_many(n)).await.unwrap().forget();
    }

    async fn between(&self) {
        self.read.add_permits(1);
        self.opened.acquire().await.unwrap().forget();
    }
}

/// A database with a ledger, and services that spend from it.
pub struct Ledger {
    pub database: Database,
    pub pace: Pace,
    how: How,
    on_gone: OnGone,
}

/// One instance of the service.
pub struct Instance {
    pub address: SocketAddr,
    pub layer: Option<LockLayer<Template>>,
    pub tx_layer: Option<TxLayer<Template>>,
}

#[derive(Clone)]
struct App {
    pool: PgPool,
    pace: Pace,
    locks: XactLocks,
}

impl Ledger {
    /// Creates a ledger with `balance` for holder 42.
    pub async fn new(how: How, balance: i64, pace: Pace) -> Self {
        let database = fresh_database().await;
        let mut connection = database.connect().await;
        run(
            &mut connection,
            "CREATE TABLE entry (id bigserial PRIMARY KEY, holder bigint NOT NULL, amount bigint NOT NULL)",
        )
        .await;
        run(&mut connection, &format!("INSERT INTO entry (holder, amount) VALUES (42, {balance})")).await;
        connection.close().await.unwrap();
        Self { database, pace, how, on_gone: OnGone::Finish }
    }

    pub fn on_gone(mut self, policy: OnGone) -> Self {
        self.on_gone = policy;
        self
    }

    pub async fn lock(&self) -> Arc<dyn Lock> {
        let config = PgConfig::from_url(self.database.url()).unwrap().install_schema(true);
        match self.how {
            How::Lease => Arc::new(TtlConfig::new(config).connect().await.unwrap()),
            _ => Arc::new(AdvisoryConfig::new(config).connect().await.unwrap()),
        }
    }

    pub async fn instance(&self) -> Instance {
        let pool = PgPoolOptions::new()
            .max_connections(10)
            .acquire_timeout(LONG)
            .connect(self.database.url())
            .await
            .unwrap();
        let locks = XactLocks::new(Identifier::new("leasehold").unwrap());
        let app = App { pool: pool.clone(), pace: self.pace.clone(), locks: locks.clone() };
        let template = || Template::parse("ledger:{path.holder|int}").unwrap();
        let (mut layer, mut tx_layer) = (None, None);
        let method = match self.how {
            How::Not => post(spend),
            How::Session | How::Lease => {
                let it = LockLayer::new(self.lock().await, template()).wait(LONG).on_gone(self.on_gone);
                layer = Some(it.clone());
                // The handler is the same as without a lock.
                post(spend).route_layer(it)
            }
            How::OwnTransaction => post(spend_in_own_transaction),
            How::TxLayer => {
                let it = TxLayer::new(locks, pool.clone(), template()).unwrap().wait(LONG);
                tx_layer = Some(it.clone());
                post(spend_in_shared_transaction).route_layer(it)
            }
        };
        let app = Router::new().route("/spend/{holder}", method).with_state(app);
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move { axum::serve(listener, app).await });
        Instance { address, layer, tx_layer }
    }

    pub async fn balance(&self) -> i64 {
        number(&self.database, "SELECT sum(amount)::bigint FROM entry WHERE holder = 42").await
    }

    /// Returns the number of spends.
    pub async fn spends(&self) -> i64 {
        number(&self.database, "SELECT count(*) FROM entry WHERE amount < 0").await
    }
}

impl Instance {
    /// Returns the number of requests that wait for a lock in this instance.
    pub fn waiting(&self) -> usize {
        let stats = self.layer.as_ref().map(LockLayer::stats);
        stats.or(self.tx_layer.as_ref().map(TxLayer::stats)).map_or(0, |stats| stats.waiting)
    }

    pub fn has_layer(&self) -> bool {
        self.layer.is_some() || self.tx_layer.is_some()
    }

    /// Sends a request without reading its response.
    pub async fn send(&self, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).await.unwrap();
        let request =
            format!("POST {path} HTTP/1.1\r\nhost: ledger\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        stream
    }

    pub async fn status(&self, path: &str) -> u16 {
        read_status(self.send(path).await).await
    }
}

pub async fn read_status(mut stream: TcpStream) -> u16 {
    let mut answer = String::new();
    within(LONG, "no answer", stream.read_to_string(&mut answer)).await.unwrap();
    answer.split(' ').nth(1).unwrap_or_else(|| panic!("no status in {answer:?}")).parse().unwrap()
}

/// Reads, decides and appends, without regard to concurrent requests.
async fn spend_on(
    connection: &mut PgConnection,
    holder: i64,
    pace: &Pace,
) -> Result<StatusCode, sqlx::Error> {
    let sql = "SELECT coalesce(sum(amount), 0)::bigint FROM entry WHERE holder = $1";
    let balance: i64 = sqlx::query_scalar(sql).bind(holder).fetch_one(&mut *connection).await?;
    pace.between().await;
    if balance < 10 {
        return Ok(StatusCode::PAYMENT_REQUIRED);
    }
    let sql = "INSERT INTO entry (holder, amount) VALUES ($1, -10)";
    sqlx::query(sql).bind(holder).execute(&mut *connection).await?;
    Ok(StatusCode::OK)
}

fn failed(error: impl std::fmt::Display) -> (StatusCode, String) {
    (StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

type Answer = Result<StatusCode, (StatusCode, String)>;

async fn spend(State(app): State<App>, Path(holder): Path<i64>) -> Answer {
    let mut tx = app.pool.begin().await.map_err(failed)?;
    let status = spend_on(&mut tx, holder, &app.pace).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(status)
}

async fn spend_in_own_transaction(State(app): State<App>, Path(holder): Path<i64>) -> Answer {
    let key = key!["ledger", holder].map_err(failed)?;
    let mut tx = app.locks.begin(&app.pool, &key, LONG).await.map_err(failed)?;
    let status = spend_on(&mut tx, holder, &app.pace).await.map_err(failed)?;
    tx.commit().await.map_err(failed)?;
    Ok(status)
}

async fn spend_in_shared_transaction(
    State(app): State<App>,
    Path(holder): Path<i64>,
    mut tx: SharedTx,
) -> Answer {
    spend_on(&mut tx, holder, &app.pace).await.map_err(failed)
}

pub async fn number(database: &Database, query: &str) -> i64 {
    sql::number(&mut database.connect().await, query).await
}

/// Waits until the query returns `n`.
pub async fn until_number(database: &Database, sql: &str, n: i64) {
    let mut connection = database.connect().await;
    let look = async {
        loop {
            let sql = AssertSqlSafe(sql.to_owned());
            let found: i64 = sqlx::query_scalar(sql).fetch_one(&mut connection).await.unwrap();
            if found == n {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    within(LONG, format!("never {n}: {sql}"), look).await;
}
