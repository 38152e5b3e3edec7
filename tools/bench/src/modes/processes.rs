//! Measures readers in several processes, each with its own lease because nothing is shared inside a process. All read one
//! key, against readers of as many keys.

use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use bench::report::{Row, Series, row, thousands};
use leasehold_api::{Lock, Mode};
use leasehold_engine::Engine;
use leasehold_postgres::PgConfig;
use leasehold_postgres_ttl::TtlConfig;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

use crate::contest::Until;
use crate::modes::{TASKS, callers};
use crate::postgres;

const PROCESSES: usize = 8;
/// Number of readers in each process.
const READERS: usize = TASKS / PROCESSES;
const ROUNDS: usize = 7;
/// Length of a round, milliseconds.
const ROUND: u64 = 1000;
/// The orders to a process.
const ORDERS: [&str; 2] = ["one", "own"];

pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    println!("{PROCESSES} processes with {READERS} readers each, lease");
    let mut processes: Vec<Process> = (0..PROCESSES).map(|number| Process::start(url, number)).collect();
    let mut series = [Series::new("one key"), Series::new(&format!("{TASKS} keys"))];
    // The first round prepares statements and creates rows.
    for round in 0..=bench::or_smoke(ROUNDS, 2) {
        for step in 0..ORDERS.len() {
            let at = (round + step) % ORDERS.len();
            let reached = rate(&mut processes, ORDERS[at]).await;
            if round > 0 {
                series[at].rounds.push(reached);
            }
        }
    }
    for process in processes {
        process.end().await;
    }
    for series in &series {
        let rates: Vec<_> = series.rounds.iter().map(|rate| thousands(*rate)).collect();
        println!("    {:44} {}", series.name, rates.join(" "));
    }
    let work = format!("{PROCESSES} processes, {TASKS} readers of one key, `share_for` zero, lease");
    rows.push(row(&work, &series[0], &series[1], 0.6));
}

/// Lets all processes work at the same time. Returns their cycles per second together.
async fn rate(processes: &mut [Process], order: &str) -> f64 {
    let line = format!("{order} {}\n", bench::or_smoke(ROUND, 100));
    for process in processes.iter_mut() {
        process.orders.write_all(line.as_bytes()).await.unwrap();
    }
    let mut sum = 0.0;
    for process in processes {
        let answer = process.answers.next_line().await.unwrap();
        let rate: f64 = answer.expect("the process works").parse().unwrap();
        sum += rate;
    }
    sum
}

struct Process {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(url: &str, number: usize) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        let command = command.args(["child", "readers", url, &number.to_string()]).kill_on_drop(true);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let orders = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, orders, answers }
    }

    async fn end(self) {
        let Self { mut child, orders, .. } = self;
        drop(orders);
        assert!(child.wait().await.unwrap().success());
    }
}

/// Runs the child: for each line of its input, lets its readers work for a round, and prints their cycles per second.
pub(crate) async fn child(url: &str, process: &str) {
    let backend = TtlConfig::new(PgConfig::from_url(url).unwrap()).backend().await.unwrap();
    let engine = Engine::builder(backend).share_for(Duration::ZERO).start().unwrap();
    let clients: [Arc<dyn Lock>; 1] = [Arc::new(engine)];
    let own = |reader: usize| format!("read:{process}:{reader}");
    let mut readers_of_one = callers("", &clients, Mode::Shared, (0..READERS).map(|_| "read".to_owned()));
    let mut readers_of_own = callers("", &clients, Mode::Shared, (0..READERS).map(own));
    while let Some(order) = postgres::order::<String>().await {
        let (keys, length) = order.split_once(' ').unwrap();
        let until = Until::Passed(Duration::from_millis(length.parse().unwrap()));
        let readers = if keys == ORDERS[0] { &mut readers_of_one } else { &mut readers_of_own };
        println!("{}", readers.round(until).await);
    }
    clients[0].close().await.unwrap();
}
