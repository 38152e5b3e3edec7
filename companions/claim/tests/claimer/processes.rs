//! Workers in separate processes that are frozen and killed.
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::within;
use crate::pg::{COMPLETE, insert, number, pool, prepare, spec};
use leasehold_claim::sqlx::query_scalar;
use leasehold_claim::{ClaimError, Claimer, PgClaims};
use test_servers::fresh_database;
use tokio::sync::mpsc;
use tokio::time::sleep;

/// Variable of a child process, with the URL of its database.
const CHILD: &str = "LEASEHOLD_CLAIMER_CHILD";
const CHILD_LEASE: &str = "LEASEHOLD_CLAIMER_LEASE_MS";
const MARK: &str = "@claim ";

/// Acts as a worker if the environment variable is set: claims a row and reports it. The first line of input makes it check
/// the claim, and the second one makes it settle the claim.
#[test]
fn child_entry() {
    let Ok(url) = std::env::var(CHILD) else { return };
    let lease = Duration::from_millis(std::env::var(CHILD_LEASE).unwrap().parse().unwrap());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (line, mut lines) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for read in std::io::stdin().lines().map_while(Result::ok) {
            if line.send(read).is_err() {
                return;
            }
        }
        // The input ends with the parent.
        std::process::exit(0);
    });
    runtime.block_on(async {
        let store = PgClaims::new(pool(&url, 2).await, spec().build().unwrap());
        let claimer = Claimer::builder(Arc::new(store)).lease(lease).ahead(0).start().unwrap();
        let claim = claimer.next().await.unwrap();
        println!("{MARK}claimed {}", claim.epoch().unwrap());
        lines.recv().await.unwrap();
        println!("{MARK}valid {}", claim.is_valid());
        lines.recv().await.unwrap();
        match claim.done().await {
            Ok(_) => println!("{MARK}settled"),
            Err(ClaimError::Superseded { epoch, current_epoch, state, .. }) => {
                println!("{MARK}superseded {epoch} {current_epoch:?} {state:?}");
            }
            Err(error) => println!("{MARK}error {error}"),
        }
    });
    std::process::exit(0);
}

struct Worker {
    child: Child,
    input: ChildStdin,
    answers: mpsc::UnboundedReceiver<String>,
}

impl Worker {
    fn start(url: &str, lease: Duration) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["processes::child_entry", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, url)
            .env(CHILD_LEASE, lease.as_millis().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (answer, answers) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The test harness might print the name of the test at the start of the line.
                if let Some(at) = line.find(MARK) {
                    let _ = answer.send(line[at + MARK.len()..].to_owned());
                }
            }
        });
        Self { child, input, answers }
    }

    async fn answer(&mut self) -> String {
        within("the child's answer", self.answers.recv()).await.expect("the child lives")
    }

    fn tell(&mut self) {
        self.input.write_all(b"go on\n").unwrap();
        self.input.flush().unwrap();
    }

    fn signal(&self, name: &str) {
        let sent = Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A worker that is stopped, overtaken and continued writes nothing, and gets an error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_worker_that_comes_back_changes_nothing() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    insert(&admin, 1).await;
    let mut frozen = Worker::start(database.url(), Duration::from_secs(1));
    assert_eq!(frozen.answer().await, "claimed 1");
    frozen.signal("-STOP");

    let store = PgClaims::new(pool(database.url(), 2).await, spec().build().unwrap());
    let claimer = Claimer::builder(Arc::new(store)).start().unwrap();
    let claim = within("the row after its lease", claimer.next()).await.unwrap();
    let epoch = claim.epoch().unwrap();
    assert!(epoch > 1);
    claim.done().await.unwrap();
    let row = async || -> String {
        query_scalar(
            "SELECT (to_jsonb(r) || jsonb_build_object('at', r.ctid, 'by', r.xmin))::text FROM request r",
        )
        .fetch_one(&admin)
        .await
        .unwrap()
    };
    let before = row().await;

    frozen.tell();
    frozen.signal("-CONT");
    assert_eq!(frozen.answer().await, "valid false", "it knows at the first look");
    frozen.tell();
    assert_eq!(frozen.answer().await, format!("superseded 1 Some({epoch}) Some(\"complete\")"));
    assert_eq!(row().await, before, "nothing was written, not even the same again");
}

/// The same before the other worker has settled, when only the epoch differs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_worker_does_not_settle_for_the_one_that_came_after() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    insert(&admin, 1).await;
    let mut frozen = Worker::start(database.url(), Duration::from_secs(1));
    assert_eq!(frozen.answer().await, "claimed 1");
    frozen.signal("-STOP");
    let store = PgClaims::new(pool(database.url(), 2).await, spec().build().unwrap());
    let claimer = Claimer::builder(Arc::new(store)).start().unwrap();
    let claim = within("the row after its lease", claimer.next()).await.unwrap();
    let epoch = claim.epoch().unwrap();
    frozen.tell();
    frozen.tell();
    frozen.signal("-CONT");
    assert_eq!(frozen.answer().await, "valid false");
    assert_eq!(frozen.answer().await, format!("superseded 1 Some({epoch}) Some(\"in-progress\")"));
    assert_eq!(number(&admin, COMPLETE).await, 0);
    assert!(claim.is_valid());
    claim.done().await.unwrap();
    assert_eq!(number(&admin, COMPLETE).await, 1);
}

/// After a kill -9 of a worker, its row is taken again when its lease ends, long before the next poll.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_workers_row_is_taken_again_when_its_lease_is_over() {
    let database = fresh_database().await;
    let admin = prepare(database.url()).await;
    insert(&admin, 1).await;
    let lease = Duration::from_secs(2);
    let mut worker = Worker::start(database.url(), lease);
    assert_eq!(worker.answer().await, "claimed 1");
    let store = PgClaims::new(pool(database.url(), 2).await, spec().build().unwrap());
    let claimer = Claimer::builder(Arc::new(store)).poll(Duration::from_secs(600)).start().unwrap();
    let waiting = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.unwrap() }
    });
    // The worker renews, so it keeps the row for longer than one lease.
    sleep(lease + Duration::from_millis(700)).await;
    assert!(!waiting.is_finished());
    worker.signal("-KILL");
    let claim = within("the row", waiting).await.unwrap();
    assert!(claim.epoch() > Some(1));
    claim.done().await.unwrap();
}
