use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cookbook::render_once::{PAGE, RenderError, Rendered, find, render_missing, render_once};
use cookbook::sql;
use futures_util::future::join_all;
use leasehold_engine::Engine;
use leasehold_memory::MemoryStore;
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use sqlx::PgPool;
use test_bounds::within;
use test_servers::{Database, fresh_database};
use tokio::sync::mpsc;

use crate::support::*;

#[allow(dead_code, unreachable_pub)] // A program, of which a test uses parts.
#[path = "../../examples/render_once.rs"]
mod example;

const ROLE: &str = "COOKBOOK_RENDER_ONCE";
const URL: &str = "COOKBOOK_RENDER_ONCE_URL";
const MARK: &str = "outcome: ";

async fn lock(url: &str) -> Engine {
    AdvisoryConfig::new(PgConfig::from_url(url).unwrap().install_schema(true)).connect().await.unwrap()
}

async fn results() -> (Database, PgPool) {
    let db = database(sql(PAGE, "schema")).await;
    let pool = PgPool::connect(db.url()).await.unwrap();
    (db, pool)
}

/// Work that counts how often it is done.
fn counting(count: &Arc<AtomicU32>) -> impl Fn() -> Vec<u8> + Clone + Send + 'static {
    let count = Arc::clone(count);
    move || {
        count.fetch_add(1, Ordering::Relaxed);
        b"pdf".to_vec()
    }
}

/// The program of another process: this binary, with this test alone.
#[tokio::test(flavor = "multi_thread")]
async fn another_process() {
    let (Ok(role), Ok(url)) = (std::env::var(ROLE), std::env::var(URL)) else { return };
    let (pool, lock) = (PgPool::connect(&url).await.unwrap(), lock(&url).await);
    let hangs = role == "hang";
    let render = move || {
        println!("{MARK}rendering");
        if hangs {
            // Until it is killed.
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
        }
        b"pdf".to_vec()
    };
    let outcome = match render_once(&pool, &lock, "report", 1, render).await.unwrap() {
        Rendered::Made(_) => "made",
        Rendered::Stored(_) => "stored",
        _ => "busy",
    };
    println!("{MARK}{outcome}");
}

struct Process {
    child: Child,
    outcomes: mpsc::UnboundedReceiver<String>,
}

impl Process {
    fn start(role: &str, db: &Database) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["render_once::another_process", "--exact", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(URL, db.url())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (output, (send, outcomes)) = (child.stdout.take().unwrap(), mpsc::unbounded_channel());
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                // The harness might have begun the line with the name of the test.
                if let Some((_, outcome)) = line.split_once(MARK) {
                    let _ = send.send(outcome.to_owned());
                }
            }
        });
        Self { child, outcomes }
    }

    async fn outcome(&mut self) -> String {
        within(LONG, "the process has no outcome", self.outcomes.recv()).await.expect("the process lives")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_is_told_busy_and_renders_when_the_first_has_crashed() {
    let (db, pool) = results().await;
    let lock = lock(db.url()).await;
    let count = Arc::new(AtomicU32::new(0));
    let mut first = Process::start("hang", &db);
    assert_eq!(first.outcome().await, "rendering");

    // The first process goes on until it is killed, so a call that waited for it would never end.
    let ask = || render_once(&pool, &lock, "report", 1, counting(&count));
    assert_eq!(within(LONG, "it waits", ask()).await.unwrap(), Rendered::Busy);
    assert_eq!(Process::start("ask", &db).outcome().await, "busy");
    assert_eq!(count.load(Ordering::Relaxed), 0);

    drop(first);
    let next = async {
        loop {
            match ask().await.unwrap() {
                // Until the server has noticed that the process is gone.
                Rendered::Busy => tokio::time::sleep(Duration::from_millis(10)).await,
                outcome => return outcome,
            }
        }
    };
    let made = within(LONG, "the lock of a dead process stays", next).await;
    assert!(matches!(&made, Rendered::Made(made) if made.body == b"pdf"), "{made:?}");
    assert_eq!(Process::start("ask", &db).outcome().await, "stored");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

/// No timer ends while the first call renders, so the second call cannot wait for one.
#[tokio::test]
async fn a_call_is_told_busy_without_a_wait() {
    let (_db, pool) = results().await;
    let (lock, count) = (MemoryStore::new().client().unwrap(), Arc::new(AtomicU32::new(0)));
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let (begin, mut begun) = mpsc::unbounded_channel();
    let ended = Arc::new(Mutex::new(ended));
    let render = move || {
        begin.send(()).unwrap();
        // Returns when `end` is dropped.
        let _ = ended.lock().unwrap().recv_timeout(Duration::from_secs(60));
        b"pdf".to_vec()
    };
    let first = render_once(&pool, &lock, "report", 1, render);
    let second = async {
        begun.recv().await.unwrap();
        tokio::time::pause();
        let start = tokio::time::Instant::now();
        let answer = render_once(&pool, &lock, "report", 1, counting(&count)).await.unwrap();
        assert_eq!((answer, start.elapsed()), (Rendered::Busy, Duration::ZERO));
        tokio::time::resume();
        drop(end);
    };
    let (first, ()) = tokio::join!(first, second);
    assert!(matches!(first, Ok(Rendered::Made(_))), "{first:?}");
    assert_eq!(count.load(Ordering::Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_twenty_requests_at_once_one_renders() {
    let (_db, pool) = results().await;
    let (lock, count) = (MemoryStore::new().client().unwrap(), Arc::new(AtomicU32::new(0)));
    let ask = || render_once(&pool, &lock, "report", 1, counting(&count));
    let outcomes = within(LONG, "never ends", join_all((0..20).map(|_| ask()))).await;
    let outcomes: Vec<Rendered> = outcomes.into_iter().map(Result::unwrap).collect();
    assert_eq!(
        outcomes.iter().filter(|outcome| matches!(outcome, Rendered::Made(_))).count(),
        1,
        "{outcomes:?}"
    );
    assert_eq!(count.load(Ordering::Relaxed), 1);
    assert!(matches!(ask().await.unwrap(), Rendered::Stored(_)));
    // Another version is another document.
    let next = render_once(&pool, &lock, "report", 2, counting(&count)).await.unwrap();
    assert!(matches!(next, Rendered::Made(_)), "{next:?}");
}

#[tokio::test]
async fn a_result_stored_after_the_first_look_is_not_rendered_again() {
    let (_db, pool) = results().await;
    let (lock, count) = (MemoryStore::new().client().unwrap(), Arc::new(AtomicU32::new(0)));
    assert_eq!(find(&pool, "report", 1).await.unwrap(), None, "the first look of a slow caller");
    let Rendered::Made(made) = render_once(&pool, &lock, "report", 1, counting(&count)).await.unwrap() else {
        panic!("a fast caller renders")
    };
    let slow = render_missing(&pool, &lock, "report", 1, counting(&count)).await.unwrap();
    assert_eq!(slow, Rendered::Stored(made), "with the processor time that it took");
    assert_eq!(count.load(Ordering::Relaxed), 1);
}

#[tokio::test]
async fn work_that_panics_is_tried_again() {
    let (_db, pool) = results().await;
    let (lock, count) = (MemoryStore::new().client().unwrap(), Arc::new(AtomicU32::new(0)));
    let failed = render_once(&pool, &lock, "report", 1, || panic!("no such font")).await;
    assert!(matches!(failed, Err(RenderError::Render(_))), "{failed:?}");
    let next = render_once(&pool, &lock, "report", 1, counting(&count)).await.unwrap();
    assert!(matches!(next, Rendered::Made(_)), "{next:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_processor_time_saved_is_counted() {
    let (_db, pool) = results().await;
    let lock = MemoryStore::new().client().unwrap();
    let totals = within(LONG, "never ends", example::requests(&pool, &lock, 1)).await.unwrap();
    assert_eq!((totals.made, totals.made + totals.stored + totals.busy), (5, 100), "{totals}");
    assert!(totals.stored >= 80, "each round after the first of a document finds it: {totals}");
    assert!(totals.spent > Duration::ZERO, "{totals}");
    // Each document took some processor time, and its later requests saved as much each.
    let cpu = "SELECT sum(cpu_micros)::bigint FROM rendering";
    let micros: i64 = sqlx::query_scalar(cpu).fetch_one(&pool).await.unwrap();
    assert_eq!(totals.spent, Duration::from_micros(micros.unsigned_abs()));
    assert!(totals.saved >= totals.spent * 16, "{totals}");
}

/// The program, which runs only in another process.
#[test]
fn program() {
    if std::env::var(ROLE).is_ok_and(|role| role == "program") {
        example::main().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_program_prints_what_was_spent_and_saved() {
    let db = fresh_database().await;
    let mut program = tokio::process::Command::new(std::env::current_exe().unwrap());
    program.args(["render_once::program", "--exact", "--nocapture", "--test-threads=1"]);
    program.env(ROLE, "program").env("DATABASE_URL", db.url()).kill_on_drop(true);
    let output = within(LONG, "never ends", program.output()).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let line = said.lines().find(|line| line.contains("5 rendered in "));
    assert!(line.is_some_and(|line| line.ends_with("of processor time saved")), "{output:?}");
}
