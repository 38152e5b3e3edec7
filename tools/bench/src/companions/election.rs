//! Measures the time from the end of a leader in another process until the next one leads, on each store.

use std::future::{pending, ready};
use std::process::Stdio;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bench::report::{Row, quantile};
use leasehold::Lock;
use leasehold::election::{Election, ElectionHandle, Next};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

const KEY: &str = "leader";
/// Number of leaders that end in each way.
const ROUNDS: usize = 6;
/// Time until the other candidate waits.
const SETTLE: Duration = Duration::from_millis(500);
/// The rest of a leader after its term, longer than a round.
const REST: Duration = Duration::from_secs(3600);

pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    let dir = tempfile::tempdir().unwrap();
    let server = url.strip_prefix("postgres").unwrap();
    let stores = [
        ("memory", "memory:elections".to_owned()),
        ("file", format!("file://{}", dir.path().display())),
        ("session", url.to_owned()),
        ("row", format!("postgres+row{server}")),
        ("lease", format!("postgres+ttl{server}?ttl=3s")),
    ];
    for (store, url) in stores {
        let lock = leasehold::connect(&url).await.unwrap();
        let declared = lock.capabilities();
        let (handover, crash_release) = (declared.handover, declared.crash_release);
        let took = terms(&lock, &url, How::StepsDown).await;
        rows.push(row(store, "steps down", &took, Some(handover)));
        // A memory store has no other process.
        if store != "memory" {
            let took =
                if crash_release.is_some() { terms(&lock, &url, How::Killed).await } else { Vec::new() };
            rows.push(row(store, "is killed", &took, crash_release));
        }
        lock.close().await.unwrap();
    }
}

fn row(store: &str, how: &str, took: &[f64], declared: Option<Duration>) -> Row {
    let [p50, most] = [0.5, 1.0].map(|share| quantile(took, share));
    Row {
        work: format!("next leader, {store}, the leader {how}"),
        measured: if took.is_empty() {
            "none before an operator's release".to_owned()
        } else {
            format!("p50 {p50:.1} ms, most {most:.1} ms")
        },
        floor: String::new(),
        ratio: String::new(),
        goal: declared.map_or(String::new(), |most| format!("declared: {most:?}")),
        met: None,
        ..Row::default()
    }
}

/// The end of a leader.
#[derive(Clone, Copy, PartialEq, Eq)]
enum How {
    StepsDown,
    Killed,
}

/// Ends one leader after the other. Returns the times until this process leads, in milliseconds.
async fn terms(lock: &Arc<dyn Lock>, url: &str, how: How) -> Vec<f64> {
    let mut took = Vec::new();
    for _ in 0..ROUNDS {
        let mut leader = Leader::start(url).await;
        let (election, led) = (Election::new(Arc::clone(lock), KEY), OnceLock::new());
        let follows = election.lead_boxed(|_| {
            led.get_or_init(now);
            Box::pin(ready(Ok(Next::Done)))
        });
        let ends = async {
            tokio::time::sleep(SETTLE).await;
            leader.end(how).await
        };
        let (followed, ended) = tokio::join!(follows, ends);
        followed.unwrap();
        took.push((led.get().unwrap() - ended) as f64 / 1e6);
        leader.forget().await;
    }
    took
}

/// A leader in another process, or for a memory store in this one.
enum Leader {
    Process { child: Box<Child>, orders: ChildStdin, answers: Lines<BufReader<ChildStdout>> },
    Here(ElectionHandle, Arc<dyn Lock>),
}

impl Leader {
    async fn start(url: &str) -> Self {
        if url.starts_with("memory:") {
            let lock = leasehold::connect(url).await.unwrap();
            return Self::Here(lead(Arc::clone(&lock)).await, lock);
        }
        let mut command = Command::new(std::env::current_exe().unwrap());
        let command = command.args(["child", "leader", url]).kill_on_drop(true);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let orders = child.stdin.take().unwrap();
        let mut answers = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(answers.next_line().await.unwrap().unwrap(), "leads");
        Self::Process { child: Box::new(child), orders, answers }
    }

    /// Ends the leader, and returns when.
    async fn end(&mut self, how: How) -> i128 {
        match self {
            Self::Here(handle, _) => step_down(handle),
            Self::Process { child, .. } if how == How::Killed => {
                let ended = now();
                child.start_kill().unwrap();
                ended
            }
            Self::Process { orders, answers, .. } => {
                orders.write_all(b"\n").await.unwrap();
                answers.next_line().await.unwrap().unwrap().parse().unwrap()
            }
        }
    }

    async fn forget(self) {
        match self {
            Self::Here(_, lock) => lock.close().await.unwrap(),
            Self::Process { mut child, .. } => child.kill().await.unwrap(),
        }
    }
}

/// Runs the child: leads, steps down at a line of its input, and rests until it is killed.
pub(crate) async fn child(url: &str) {
    let handle = lead(leasehold::connect(url).await.unwrap()).await;
    println!("leads");
    tokio::task::spawn_blocking(|| std::io::stdin().lines().next()).await.unwrap();
    println!("{}", step_down(&handle));
    pending::<()>().await;
}

/// Starts a campaign whose term lasts until it is ended, and waits until it leads.
async fn lead(lock: Arc<dyn Lock>) -> ElectionHandle {
    let election = Election::new(lock, KEY);
    let mut handle = election.handle();
    tokio::spawn(async move { election.lead_boxed(|_| Box::pin(pending())).await });
    while !handle.changed().await.is_leading() {}
    handle
}

fn step_down(handle: &ElectionHandle) -> i128 {
    let ended = now();
    handle.step_down(REST);
    ended
}

/// Returns nanoseconds of a clock shared by all processes of this machine.
fn now() -> i128 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
}
