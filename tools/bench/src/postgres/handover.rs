//! Measures the time from a release until a waiter in another process holds the lock.

use std::fmt::Debug;
use std::process::Stdio;
use std::str::FromStr;
use std::time::{Duration, Instant};

use bench::record::{Axis, Chart, Group, Line};
use bench::report::{Row, micros, quantile};
use sqlx::{Connection as _, PgConnection};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::postgres::side::{Kind, Side};

const HOPS: u32 = 300;
/// Number of hops with polling. Each takes a tenth of a second, and fewer give a stable figure.
const HOPS_POLLED: u32 = 40;
/// Time until the other side waits.
const HOLD: Duration = Duration::from_millis(8);

pub(crate) async fn measure(url: &str, group: &mut Group) {
    let mut pairs = Vec::new();
    for kind in Kind::ALL {
        pairs.push(Pair::start(url, kind).await);
    }
    let mut connection = PgConnection::connect(url).await.unwrap();
    let mut trips = Vec::new();
    let (hops, hops_polled) = bench::or_smoke((HOPS, HOPS_POLLED), (5, 2));
    for hop in 0..hops {
        for pair in &mut pairs {
            if pair.kind != Kind::Polling || hop < hops_polled {
                pair.hop(hop).await;
            }
        }
        // Pauses like the others, because a woken process has slept before.
        tokio::time::sleep(HOLD).await;
        let begun = Instant::now();
        sqlx::query("SELECT 1").execute(&mut connection).await.unwrap();
        trips.push(micros(begun.elapsed()));
    }
    let trip = quantile(&trips, 0.5);
    group.charts.push(Chart {
        file: "hand-over".to_owned(),
        title: "Hand-over between two processes".to_owned(),
        x: Axis::logarithmic("us from the release to the grant"),
        y: Axis::linear("% of the hand-overs"),
        lines: pairs.iter().map(|pair| Line::distribution(pair.kind.name(), &pair.took)).collect(),
    });
    let rows = &mut group.rows;
    let mut median = [0.0; Kind::ALL.len()];
    println!("hand-over between processes, us (a round trip after the same pause takes {trip:.0}):");
    for (pair, median) in pairs.iter().zip(&mut median) {
        *median = quantile(&pair.took, 0.5);
        let (p99, count) = (quantile(&pair.took, 0.99), pair.took.len());
        println!("    {:44} p50 {median:.0}, p99 {p99:.0}, n {count}", pair.kind.name());
    }
    for pair in pairs {
        pair.end().await;
    }
    let [advisory, blocking, lease, mutex, notified, polled] = median;
    let (ours, least) = (advisory / trip, blocking / trip);
    rows.push(Row {
        work: "hand-over, advisory, queued".to_owned(),
        measured: format!("{advisory:.0} us"),
        floor: format!("pg_advisory_lock {blocking:.0} us = {least:.1} trips of {trip:.0} us"),
        ratio: format!("{ours:.1} trips"),
        goal: "at most 4 trips".to_owned(),
        met: Some(ours <= 4.0),
        ..Row::default()
    });
    for (what, took, goal) in [("lease row", lease, Some(1.2)), ("mutex row", mutex, None)] {
        let ratio = took / notified;
        rows.push(Row {
            work: format!("hand-over, {what}"),
            measured: format!("{took:.0} us"),
            floor: format!("bare NOTIFY and try {notified:.0} us, polling {polled:.0} us"),
            ratio: format!("{ratio:.2}"),
            goal: goal.map_or(String::new(), |goal| format!("at most {goal}")),
            met: goal.map(|goal| ratio <= goal),
            ..Row::default()
        });
    }
}

/// This process holds the lock, and a child process waits for it.
struct Pair {
    kind: Kind,
    side: Side,
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    took: Vec<f64>,
}

impl Pair {
    async fn start(url: &str, kind: Kind) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let command = command.args(["child", "waiter", url, kind.name()]).kill_on_drop(true);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let orders = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        let side = Side::connect(url, kind).await;
        let mut pair = Self { kind, side, child, orders, answers, took: Vec::new() };
        // The statements are prepared and the sessions open.
        pair.hop(u32::MAX).await;
        pair.took.clear();
        pair
    }

    async fn hop(&mut self, hop: u32) {
        let key = Key::of(self.kind, hop);
        self.side.acquire(&key).await;
        self.orders.write_all(format!("{hop}\n").as_bytes()).await.unwrap();
        // Randomises the pause, because a release must meet a poller at any moment of its interval.
        let more = if self.kind == Kind::Polling { fastrand::u64(0..100) } else { fastrand::u64(0..4) };
        tokio::time::sleep(HOLD + Duration::from_millis(more)).await;
        let released = now();
        self.side.release(&key).await;
        let held: i128 = self.answers.next_line().await.unwrap().unwrap().parse().unwrap();
        assert!(held > released, "the waiter held the lock before it was released");
        self.took.push((held - released) as f64 / 1000.0);
        assert_eq!(self.answers.next_line().await.unwrap().unwrap(), "freed");
    }

    async fn end(self) {
        let Self { orders, mut child, side, .. } = self;
        drop(orders);
        child.wait().await.unwrap();
        side.close().await;
    }
}

/// The key of one hop. Each hop uses a new key, because traces of the last hop must not affect it.
pub(crate) struct Key {
    pub(crate) text: String,
    pub(crate) number: i64,
}

impl Key {
    fn of(kind: Kind, hop: u32) -> Self {
        Self { text: format!("handed:{}:{hop}", kind.name()), number: i64::from(hop) + 1_000_000 }
    }
}

/// Runs the child: for each line of its input, waits for that key, reports the time of the grant, and releases.
pub(crate) async fn child(url: &str, kind: Kind) {
    let mut side = Side::connect(url, kind).await;
    while let Some(hop) = order::<u32>().await {
        let key = Key::of(kind, hop);
        side.acquire(&key).await;
        println!("{}", now());
        side.release(&key).await;
        println!("freed");
    }
    side.close().await;
}

/// Reads the next line of the input on a blocking thread. Returns `None` at its end.
pub(crate) async fn order<T: FromStr<Err: Debug>>() -> Option<T> {
    let line = tokio::task::spawn_blocking(|| std::io::stdin().lines().next());
    Some(line.await.unwrap()?.unwrap().parse().unwrap())
}

/// Returns nanoseconds of a clock shared by all processes of this machine.
fn now() -> i128 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec)
}
