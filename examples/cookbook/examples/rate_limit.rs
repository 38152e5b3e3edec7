//! Eight processes share the calls that a service allows, and two of them are killed in the middle of a call: see
//! `docs/cookbook/rate-limit.md`. The service counts the calls. The tables are in a schema that is recreated on each
//! run.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p cookbook --example rate_limit
//! ```
#![allow(clippy::print_stdout)]

use std::collections::BTreeMap;
use std::error::Error;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use cookbook::rate_limit::{Answer, Api, Called, PAGE, RateLimit, call_once, mails, slots};
use cookbook::sql;
use leasehold_claim::{Claimed, PgClaims};
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::{Child, Command};
use tokio::sync::mpsc;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const SCHEMA: &str = "rate_limit";

/// Environment variables of a child process, beside `DATABASE_URL`: its number, the address of the service, and the
/// limit.
const CHILD: [&str; 5] = ["RATE_CHILD", "RATE_SERVICE", "RATE_WINDOW", "RATE_ANSWER", "RATE_BATCH"];

/// The size of a run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The limit of the service: its window, the time for an answer, and the size of a batch.
    pub limit: RateLimit,
    /// The number of calls that the service allows in a window.
    pub allowed: u32,
    /// The number of calls to make, without repetitions.
    pub calls: u32,
    /// The number of processes that call the service.
    pub processes: usize,
    /// The number of processes that are killed in the middle of a call.
    pub killed: usize,
}

/// One call, as the service has seen it.
#[derive(Clone, Debug)]
pub struct Call {
    /// The time of the call, on this machine's clock, which the database server also uses.
    pub at: SystemTime,
    /// The number of the process that called.
    pub process: usize,
    /// The ids of the rows in the batch.
    pub rows: Vec<i64>,
    /// Whether the service answered with status 429.
    pub is_refused: bool,
}

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    if std::env::var_os(CHILD[0]).is_some() {
        return process(&url).await;
    }
    let seconds = Duration::from_secs;
    let limit = RateLimit { window: seconds(1), answer: seconds(5), batch: 5 };
    let plan = Plan { limit, allowed: 50, calls: 500, processes: 8, killed: 2 };
    let program = std::env::current_exe()?;
    let calls = limited(&url, plan, || Command::new(&program)).await?;
    let (most, window) = (most_in(&calls, limit.window), limit.window);
    println!("{} calls by {} processes, {} killed", calls.len(), plan.processes, plan.killed);
    println!("at most {most} calls in any {window:?}, {} allowed", plan.allowed);
    Ok(())
}

/// Sends all rows by processes of which some are killed. Returns the calls in the order of their arrival.
pub async fn limited(url: &str, plan: Plan, start: impl Fn() -> Command) -> Result<Vec<Call>> {
    let pool = prepare(url, plan).await?;
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let (service, mut caught) = Service::start(listener, plan);
    let mut children = BTreeMap::new();
    for number in 0..plan.processes {
        children.insert(number, child(start(), url, address, &plan.limit, number)?);
    }
    for _ in 0..plan.killed {
        // Kills a process while the service has its call and does not answer it.
        let number = caught.recv().await.ok_or("the service has ended")?;
        let mut child = children.remove(&number).ok_or("killed twice")?;
        child.kill().await?;
    }
    let left = "SELECT count(*) FROM mail WHERE state NOT IN ('sent', 'unsent')";
    while sqlx::query_scalar::<_, i64>(left).fetch_one(&pool).await? > 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for (number, mut child) in children {
        if let Some(status) = child.try_wait()? {
            return Err(format!("process {number} has ended with {status}").into());
        }
        child.kill().await?;
    }
    pool.close().await;
    Ok(service.calls())
}

/// Returns the largest number of calls in any span of this length.
pub fn most_in(calls: &[Call], window: Duration) -> usize {
    let ends = calls.iter().enumerate().map(|(at, first)| {
        let inside = |call: &&Call| call.at.duration_since(first.at).is_ok_and(|after| after < window);
        calls[at..].iter().take_while(inside).count()
    });
    ends.max().unwrap_or(0)
}

async fn prepare(url: &str, plan: Plan) -> Result<PgPool> {
    let pool = connect(url).await?;
    let fresh = format!("DROP SCHEMA IF EXISTS {SCHEMA} CASCADE; CREATE SCHEMA {SCHEMA}");
    sqlx::raw_sql(sqlx::AssertSqlSafe(fresh)).execute(&pool).await?;
    sqlx::raw_sql(sql(PAGE, "schema")).execute(&pool).await?;
    for spec in [slots()?, mails()?] {
        spec.migration().apply(&pool).await?;
        spec.ensure(&pool).await?;
    }
    sqlx::query(sql(PAGE, "allow")).bind(i32::try_from(plan.allowed)?).execute(&pool).await?;
    let mails = "INSERT INTO mail (recipient) SELECT 'r' || n FROM generate_series(1, $1) n";
    sqlx::query(mails).bind(i64::from(plan.calls * plan.limit.batch)).execute(&pool).await?;
    Ok(pool)
}

async fn connect(url: &str) -> Result<PgPool> {
    let options = url.parse::<PgConnectOptions>()?.options([("search_path", SCHEMA)]);
    Ok(PgPoolOptions::new().max_connections(2).connect_with(options).await?)
}

fn child(
    mut command: Command,
    url: &str,
    service: SocketAddr,
    limit: &RateLimit,
    number: usize,
) -> Result<Child> {
    let millis = |time: Duration| time.as_millis().to_string();
    let (window, answer) = (millis(limit.window), millis(limit.answer));
    let values = [number.to_string(), service.to_string(), window, answer, limit.batch.to_string()];
    command.env("DATABASE_URL", url).envs(CHILD.into_iter().zip(values)).kill_on_drop(true);
    Ok(command.spawn()?)
}

/// Calls the service until it is killed.
pub async fn process(url: &str) -> Result<()> {
    let [number, address, window, answer, batch] = CHILD.map(std::env::var);
    let millis = |text: String| text.parse().map(Duration::from_millis);
    let limit = RateLimit { window: millis(window?)?, answer: millis(answer?)?, batch: batch?.parse()? };
    let api = Remote { number: number?.parse()?, address: address?.parse()? };
    let pool = connect(url).await?;
    let (slots, mails) = (PgClaims::new(pool.clone(), slots()?), PgClaims::new(pool, mails()?));
    loop {
        if !matches!(call_once(&slots, &mails, &limit, &api).await?, Called::Batch(_)) {
            tokio::time::sleep(limit.window / 20).await;
        }
    }
}

/// The service from the view of a process. A call is a line with the number of the process and the rows, and the answer
/// is a line.
struct Remote {
    number: usize,
    address: SocketAddr,
}

impl Api for Remote {
    async fn call(&self, batch: &[Claimed]) -> Answer {
        match self.send(batch).await {
            Ok(answer) if answer == "done" => Answer::Done,
            Ok(answer) => match answer.strip_prefix("too many ").and_then(|millis| millis.parse().ok()) {
                Some(millis) => Answer::TooMany(Duration::from_millis(millis)),
                None => Answer::Failed(answer),
            },
            Err(error) => Answer::Failed(error.to_string()),
        }
    }
}

impl Remote {
    async fn send(&self, batch: &[Claimed]) -> Result<String> {
        let ids: Vec<String> =
            batch.iter().flat_map(|claimed| &claimed.rows).map(|row| row.key.id.to_string()).collect();
        let mut stream = BufReader::new(TcpStream::connect(self.address).await?);
        stream.write_all(format!("{} {}\n", self.number, ids.join(" ")).as_bytes()).await?;
        let mut answer = String::new();
        stream.read_line(&mut answer).await?;
        Ok(answer.trim().to_owned())
    }
}

/// The answer to a call.
enum Reply {
    Done,
    TooMany,
    /// No answer, because the calling process is about to be killed.
    Never,
}

/// The service, which counts calls and answers 429 beyond the limit.
#[derive(Clone)]
struct Service {
    plan: Plan,
    calls: Arc<Mutex<Vec<Call>>>,
    caught: mpsc::UnboundedSender<usize>,
}

impl Service {
    /// Starts the service. Also returns the numbers of processes to kill. Each has made a call that the service has
    /// counted and never answers.
    fn start(listener: TcpListener, plan: Plan) -> (Self, mpsc::UnboundedReceiver<usize>) {
        let (caught, processes) = mpsc::unbounded_channel();
        let service = Self { plan, calls: Arc::default(), caught };
        let serving = service.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serving.clone().serve(stream));
            }
        });
        (service, processes)
    }

    async fn serve(self, stream: TcpStream) -> Result<()> {
        let (mut stream, mut line) = (BufReader::new(stream), String::new());
        stream.read_line(&mut line).await?;
        let mut numbers = line.split_whitespace().map(str::parse::<i64>);
        let process = usize::try_from(numbers.next().ok_or("no process")??)?;
        let rows = numbers.collect::<std::result::Result<Vec<_>, _>>()?;
        match self.count(process, rows) {
            Reply::Done => stream.write_all(b"done\n").await?,
            Reply::TooMany => {
                let pause = self.plan.limit.window.as_millis();
                stream.write_all(format!("too many {pause}\n").as_bytes()).await?;
            }
            // Waits for the end of the process, which ends the connection.
            Reply::Never => drop(stream.read_line(&mut line).await?),
        }
        Ok(())
    }

    /// Counts a call.
    fn count(&self, process: usize, rows: Vec<i64>) -> Reply {
        let (mut calls, at) = (self.calls.lock().unwrap_or_else(PoisonError::into_inner), SystemTime::now());
        let is_recent =
            |call: &&Call| at.duration_since(call.at).is_ok_and(|age| age < self.plan.limit.window);
        let recent = calls.iter().rev().take_while(is_recent).filter(|call| !call.is_refused).count();
        let is_refused = recent >= self.plan.allowed as usize;
        let before = calls.len();
        calls.push(Call { at, process, rows, is_refused });
        // The first process is killed after a quarter of the calls, and the others before the half.
        let quarter = self.plan.calls as usize / 4;
        let is_due = (0..self.plan.killed).any(|n| before == quarter + n * quarter / self.plan.killed);
        if is_due && self.caught.send(process).is_ok() {
            Reply::Never
        } else if is_refused {
            Reply::TooMany
        } else {
            Reply::Done
        }
    }

    fn calls(&self) -> Vec<Call> {
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner).clone();
        calls.sort_by_key(|call| call.at);
        calls
    }
}
