//! Contenders that claim and settle rows: the library, and statements written by hand.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench::report::Series;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use leasehold_claim::{Claim, ClaimError, ClaimRef, ClaimStore, Claimer, Outcome, PgClaims, PgHeld, Take};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Connection as _, PgConnection, PgPool, Row as _};
use uuid::Uuid;

use crate::claims::table::Table;

/// Number and length of the rounds. Contenders take turns.
const ROUNDS: usize = 4;
const ROUND: Duration = Duration::from_secs(1);
/// The same for a shortened run. Each contender must take a row in it, even on a busy machine.
const SMOKE: Duration = Duration::from_millis(250);

/// One worker.
pub(crate) enum Work {
    Ours { claims: PgClaims, take: Take },
    Local { claimer: Claimer, batch: usize },
    Held { held: PgHeld },
    ByHand { connection: PgConnection, claim: Arc<str>, settle: Arc<str>, batch: i64 },
}

impl Work {
    /// Workers that claim and settle separately, through a pool with one connection each.
    pub(crate) async fn ours(url: &str, table: &Table, workers: u32, batch: u32) -> Vec<Self> {
        let claims = PgClaims::new(pool(url, workers).await, table.spec());
        (0..workers).map(|_| Self::Ours { claims: claims.clone(), take: Take::up_to(batch) }).collect()
    }

    /// Workers that share one claimer.
    pub(crate) async fn local(url: &str, table: &Table, workers: u32, batch: u32) -> Vec<Self> {
        let claims = PgClaims::new(pool(url, 8).await, table.spec());
        let claimer =
            Claimer::builder(Arc::new(claims)).batch(10 * batch).ahead(workers * batch).start().unwrap();
        (0..workers).map(|_| Self::Local { claimer: claimer.clone(), batch: batch as usize }).collect()
    }

    /// Workers that hold their row in a transaction during the work.
    pub(crate) async fn held(url: &str, table: &Table, workers: u32) -> Vec<Self> {
        let held = PgHeld::new(pool(url, workers).await, table.spec());
        (0..workers).map(|_| Self::Held { held: held.clone() }).collect()
    }

    /// Prepared statements written by hand, on one connection each.
    pub(crate) async fn by_hand(url: &str, table: &Table, workers: u32, batch: u32) -> Vec<Self> {
        let name = table.name;
        let claim: Arc<str> = format!(
            "WITH picked AS MATERIALIZED (SELECT id FROM {name} WHERE state = 'new' ORDER BY run_at, id LIMIT $2
                FOR UPDATE SKIP LOCKED)
            UPDATE {name} t SET state = 'in-progress', owner = $1::text::uuid, epoch = epoch + 1,
                lease_until = now() + interval '30 s'
            FROM picked WHERE t.id = picked.id RETURNING t.id, t.epoch"
        )
        .into();
        let settle: Arc<str> = format!(
            "UPDATE {name} SET state = 'complete', owner = NULL, lease_until = NULL
            WHERE id = ANY ($1) AND owner = $2::text::uuid AND state = 'in-progress'"
        )
        .into();
        let mut all = Vec::new();
        for _ in 0..workers {
            let connection = PgConnection::connect(url).await.unwrap();
            let (claim, settle) = (claim.clone(), settle.clone());
            all.push(Self::ByHand { connection, claim, settle, batch: batch.into() });
        }
        all
    }

    /// Claims and settles. Returns the number of rows.
    async fn cycle(&mut self) -> u64 {
        match self {
            Self::Ours { claims, take } => {
                let taken = claims.take(take).await.unwrap();
                let done: Vec<_> =
                    taken.claims.iter().map(|row| (row.claim.clone(), Outcome::Done)).collect();
                settle(claims, done).await
            }
            Self::Local { claimer, batch } => {
                // Takes up to a batch of prefetched claims, as a worker with batches does.
                let mut claims = vec![claimer.next().await.unwrap()];
                while claims.len() < *batch {
                    let Some(claim) = claimer.next().now_or_never() else { break };
                    claims.push(claim.unwrap());
                }
                let ends: Vec<_> = claims.into_iter().map(Claim::done).collect();
                let rows = ends.len() as u64;
                for settled in join_all(ends).await {
                    settled.unwrap();
                }
                rows
            }
            Self::Held { held } => {
                let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
                let claim = hold.taken().claims[0].claim.clone();
                tokio::time::sleep(Duration::from_millis(10)).await;
                hold.settle(&claim, &Outcome::Done).await.unwrap();
                hold.commit().await.unwrap();
                1
            }
            Self::ByHand { connection, claim, settle, batch } => {
                let owner = Uuid::new_v4().to_string();
                let query = sqlx::query(AssertSqlSafe(claim.clone())).bind(&owner).bind(*batch);
                let rows = query.fetch_all(&mut *connection).await.unwrap();
                let ids: Vec<i64> = rows.iter().map(|row| row.get(0)).collect();
                let query = sqlx::query(AssertSqlSafe(settle.clone())).bind(&ids).bind(&owner);
                let done = query.execute(connection).await.unwrap();
                assert_eq!(done.rows_affected(), ids.len() as u64);
                ids.len() as u64
            }
        }
    }
}

/// Settles, and retries rows that another session was checking, as a claimer does. Returns the number of rows.
async fn settle(claims: &PgClaims, mut settlements: Vec<(ClaimRef, Outcome)>) -> u64 {
    let all = settlements.len() as u64;
    while !settlements.is_empty() {
        let settled = claims.settle(&settlements).await.unwrap();
        let mut settled = settled.into_iter();
        settlements.retain(|_| match settled.next().unwrap() {
            Err(ClaimError::Busy { .. }) => true,
            done => {
                done.unwrap();
                false
            }
        });
    }
    all
}

/// Opens a pool without the ping before each use, because statements by hand are sent alone.
async fn pool(url: &str, connections: u32) -> PgPool {
    let options = PgPoolOptions::new().max_connections(connections).min_connections(connections);
    options.test_before_acquire(false).connect(url).await.unwrap()
}

/// A contender with one task per worker.
pub(crate) struct Contender {
    name: String,
    table: Table,
    workers: Vec<Work>,
}

impl Contender {
    pub(crate) fn new(name: &str, table: &Table, workers: Vec<Work>) -> Self {
        Self { name: name.to_owned(), table: table.clone(), workers }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Returns rows per second.
    pub(crate) async fn round(&mut self, length: Duration) -> f64 {
        let begun = Instant::now();
        let deadline = begun + length;
        let work = move |mut worker: Work| async move {
            let mut rows = 0;
            while Instant::now() < deadline {
                rows += worker.cycle().await;
            }
            (worker, rows)
        };
        let tasks: Vec<_> = self.workers.drain(..).map(|worker| tokio::spawn(work(worker))).collect();
        let mut total = 0;
        for task in tasks {
            let (worker, rows) = task.await.unwrap();
            self.workers.push(worker);
            total += rows;
        }
        assert!(total > 0, "{} took nothing", self.name);
        total as f64 / begun.elapsed().as_secs_f64()
    }
}

/// Runs all contenders in turn, round after round.
pub(crate) async fn compete(mut contenders: Vec<Contender>, url: &str) -> Vec<Series> {
    for contender in &mut contenders {
        contender.round(bench::or_smoke(Duration::from_millis(200), SMOKE)).await;
        contender.table.restore(url).await;
    }
    let mut series: Vec<Series> = contenders
        .iter()
        .map(|contender| Series { name: contender.name.clone(), rounds: Vec::new() })
        .collect();
    let (count, length) = bench::or_smoke((ROUNDS, ROUND), (2, SMOKE));
    let all = contenders.len();
    for round in 0..count {
        for at in (0..all).map(|step| (round + step) % all) {
            let rate = contenders[at].round(length).await;
            series[at].rounds.push(rate);
            // Restores the table, because one contender's changes must not burden the next.
            contenders[at].table.restore(url).await;
        }
    }
    for series in &series {
        let rounds: Vec<_> = series.rounds.iter().map(|rate| bench::report::thousands(*rate)).collect();
        println!("    {:44} {}", series.name, rounds.join(" "));
    }
    series
}
