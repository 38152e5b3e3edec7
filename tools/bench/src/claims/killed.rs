//! Measures the time from the death of a worker until its row is claimed again.

use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bench::report::{Row, quantile};
use leasehold_claim::{
    ClaimSpec, ClaimStore, Claimer, IdType, PgClaims, PgHeld, PgHold, States, Table, Take,
};
use sqlx::{Connection as _, Executor as _, PgConnection, PgPool};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, Command};

const LEASE: Duration = Duration::from_secs(30);
/// Number of rows and of killed workers.
const WORKERS: i64 = 20;

pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    let mut connection = PgConnection::connect(url).await.unwrap();
    let table = "CREATE TABLE work (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'new', owner uuid,
        epoch bigint NOT NULL DEFAULT 0, lease_until timestamptz)";
    connection.execute(table).await.unwrap();
    println!("workers that are killed: held claims");
    held(url, &mut connection, rows).await;
    println!("workers that are killed: leases of {LEASE:?}");
    leased(url, &mut connection, rows).await;
}

/// Kills one worker after the other. For each row, another worker retries until it gets the row.
async fn held(url: &str, connection: &mut PgConnection, rows: &mut Vec<Row>) {
    let pool = PgPool::connect(url).await.unwrap();
    let held = PgHeld::new(pool, spec());
    let mut took = Vec::new();
    for id in 0..WORKERS {
        fill(connection, id).await;
        let mut child = child_that_holds(url, "held", id).await;
        child.start_kill().unwrap();
        let killed = Instant::now();
        loop {
            if let Some(hold) = held.begin(&Take::up_to(1)).await.unwrap() {
                took.push(killed.elapsed().as_secs_f64());
                hold.rollback().await.unwrap();
                break;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        child.wait().await.unwrap();
        connection.execute("TRUNCATE work").await.unwrap();
    }
    rows.push(row("killed worker's row taken again, held", &took, Duration::from_secs(1)));
}

/// Kills all workers at once, because each takeover takes a full lease.
async fn leased(url: &str, connection: &mut PgConnection, rows: &mut Vec<Row>) {
    let mut children = Vec::new();
    for id in 0..WORKERS {
        fill(connection, id).await;
        children.push(child_that_holds(url, "lease", id).await);
    }
    let claims = PgClaims::new(PgPool::connect(url).await.unwrap(), spec());
    let claimer = Claimer::builder(Arc::new(claims)).lease(LEASE).start().unwrap();
    let killed = Instant::now();
    for child in &mut children {
        child.start_kill().unwrap();
    }
    let mut took = Vec::new();
    for _ in 0..WORKERS {
        let claim = claimer.next().await.unwrap();
        took.push(killed.elapsed().as_secs_f64());
        claim.done().await.unwrap();
    }
    rows.push(row("killed worker's row taken again, lease of 30 s", &took, LEASE + Duration::from_secs(1)));
}

fn row(work: &str, took: &[f64], goal: Duration) -> Row {
    let (median, last) = (quantile(took, 0.5), quantile(took, 0.99));
    println!("    p50 {median:.3} s, p99 {last:.3} s");
    Row {
        work: work.to_owned(),
        measured: format!("p50 {median:.3} s, p99 {last:.3} s"),
        floor: "-".to_owned(),
        ratio: "-".to_owned(),
        goal: format!("within {goal:?}"),
        met: Some(last <= goal.as_secs_f64()),
        ..Row::default()
    }
}

async fn fill(connection: &mut PgConnection, id: i64) {
    sqlx::query("INSERT INTO work (id) VALUES ($1)").bind(id).execute(connection).await.unwrap();
}

fn spec() -> ClaimSpec {
    ClaimSpec::builder(Table::new("work").unwrap())
        .id("id", IdType::Int)
        .state("status", States::text(["new"], "complete").taken("in-progress"))
        .lease_columns("owner", "epoch", "lease_until")
        .build()
        .unwrap()
}

/// Starts a worker process that holds the row.
async fn child_that_holds(url: &str, mode: &str, id: i64) -> Child {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["child", "worker", url, mode, &id.to_string()])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next_line().await.unwrap().as_deref(), Some("taken"));
    child
}

/// Runs the worker: claims its row, reports it, and waits to be killed.
pub(crate) async fn child(url: &str, mode: &str, id: i64) {
    let pool = PgPool::connect(url).await.unwrap();
    let take = Take::up_to(1).lease(LEASE);
    let (hold, claims): (Option<PgHold>, _) = if mode == "held" {
        (PgHeld::new(pool, spec()).begin(&take).await.unwrap(), Vec::new())
    } else {
        (None, PgClaims::new(pool, spec()).take(&take).await.unwrap().claims)
    };
    assert!(hold.is_some() || claims.len() == 1, "no row for worker {id}");
    println!("taken");
    std::future::pending::<()>().await;
}
