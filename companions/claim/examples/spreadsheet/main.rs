//! Recorders pass work to workers in separate processes through one table.
//!
//! First a recorder writes changes of some spreadsheets while no worker runs. A worker that starts later does all of
//! them: for each sheet first its creation, then its updates in one claim. Then two processes, A and B, follow a
//! schedule step by step. B skips the updates of a sheet that A is still creating, takes another sheet, and gets the
//! updates in one claim when A is done. The schedule runs once under leases and once in open transactions. Everything
//! is in a separate schema, which is recreated on each run.
//!
//! ```text
//! DATABASE_URL=postgres://localhost/test cargo run -p leasehold-claim --example spreadsheet
//! ```

mod hand_off;

use std::collections::VecDeque;
use std::error::Error;
use std::io;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use leasehold_claim::sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use leasehold_claim::sqlx::{PgPool, raw_sql};
use leasehold_claim::{
    Claim, ClaimError, ClaimSpec, ClaimStore as _, Claimed, ClaimedRow, Claimer, LockWait, Outcome, PgClaims,
    PgHeld, PgHold, RowKey, Take,
};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};
use tokio::task::spawn_blocking;
use tokio::time::timeout;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const SCHEMA: &str = "leasehold_spreadsheet";

/// A limit that only a broken server exceeds.
const LONG: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Result<()> {
    let url = std::env::var("DATABASE_URL").map_err(|_| "set DATABASE_URL to a database to try this in")?;
    if let Some(role) = std::env::args().nth(1) {
        return process(&role, &url).await;
    }
    let program = std::env::current_exe()?;
    let start = |role: &str| {
        let mut command = Command::new(&program);
        command.arg(role);
        command
    };
    println!("Recorded without a worker, done by one that came later:");
    hand_over(&url, start).await?.iter().for_each(|line| println!("  {line}"));
    println!("Two processes, step by step:");
    replay(&url, start).await?.iter().for_each(|line| println!("  {line}"));
    println!("In open transactions, with a sheet that was created before:");
    replay_held(&url, start).await?.iter().for_each(|line| println!("  {line}"));
    Ok(())
}

/// Runs a recorder while no worker runs, and starts a worker after the recorder has ended.
pub async fn hand_over(url: &str, start: impl Fn(&str) -> Command) -> Result<Vec<String>> {
    prepare(url).await?;
    let mut told = Vec::new();
    let mut recorder = Process::start(start("recorder"), url)?;
    for sheet in 1..=3 {
        told.push(recorder.ask(&format!("create {sheet}")).await?);
        for _ in 0..2 {
            told.push(recorder.ask(&format!("update {sheet}")).await?);
        }
    }
    // Refused by the database, because the sheet already has a creation.
    told.push(recorder.ask("create 1").await?);
    recorder.end().await?;

    let mut worker = Process::start(start("worker"), url)?;
    for _claim in 0..6 {
        told.push(worker.answer().await?);
    }
    worker.end().await?;
    Ok(told)
}

/// Runs two processes on one table. The schedule orders each step, so the result is the same each time.
pub async fn replay(url: &str, start: impl Fn(&str) -> Command) -> Result<Vec<String>> {
    prepare(url).await?;
    let changes = ["create 10", "update 10", "update 10", "create 20", "update 10"];
    let mut told = recorded(url, &start, &changes).await?;
    let schedule = [
        ("A", "take"),   // A takes row 1, the creation of 10, and starts the work.
        ("B", "take"),   // B takes row 4, because rows 2 and 3 wait for row 1.
        ("B", "settle"), // B ends row 4.
        ("B", "take"),   // B gets nothing, because row 5 waits too.
        ("B", "take"),   // Nor in the next pass, because rows 2 and 3 still wait for row 1.
        ("A", "settle"), // A ends row 1.
        ("B", "take"),   // B takes rows 2, 3 and 5 together.
        ("A", "take"),   // A gets nothing, because B has the sheet.
        ("B", "settle"), // B ends all three at once.
        ("A", "take"),   // Nothing is left.
    ];
    told.extend(steps(url, start, "stepper", &schedule).await?);
    Ok(told)
}

/// Runs two processes whose claims are open transactions. Sheet 20 was created before, so its update does not wait.
pub async fn replay_held(url: &str, start: impl Fn(&str) -> Command) -> Result<Vec<String>> {
    prepare(url).await?;
    let changes = ["create 10", "update 10", "update 10", "create 20", "update 20"];
    let mut told = recorded(url, &start, &changes).await?;
    let pool = connect(url).await?;
    raw_sql("UPDATE request SET status = 'complete' WHERE id = 4").execute(&pool).await?;
    pool.close().await;
    let schedule = [
        ("A", "take"),   // A takes row 1, the creation of 10, and starts the work.
        ("B", "try"),    // B is refused at once, because row 1 is locked, and rolls back.
        ("B", "take"),   // B takes row 5 of sheet 20, because rows 2 and 3 wait for row 1.
        ("B", "settle"), // B ends row 5, while A is still at work.
        ("B", "take"),   // B finds nothing more in this pass.
        ("B", "take"),   // Nor in the next pass, because rows 2 and 3 wait for row 1. B rolls back.
        ("A", "settle"), // A ends row 1.
        ("B", "take"),   // B takes rows 2 and 3 together.
        ("A", "take"),   // A gets nothing, because B has the sheet.
        ("B", "settle"), // B ends both at once.
        ("A", "take"),   // Nothing is left.
    ];
    told.extend(steps(url, start, "holder", &schedule).await?);
    Ok(told)
}

/// Runs a recorder that gets `changes` one by one. Returns its answers.
async fn recorded(url: &str, start: impl Fn(&str) -> Command, changes: &[&str]) -> Result<Vec<String>> {
    let mut told = Vec::new();
    let mut recorder = Process::start(start("recorder"), url)?;
    for change in changes {
        told.push(recorder.ask(change).await?);
    }
    recorder.end().await?;
    Ok(told)
}

/// Runs two processes in this role, A and B, and passes them the orders of `schedule` step by step. Returns their
/// answers.
async fn steps(
    url: &str,
    start: impl Fn(&str) -> Command,
    role: &str,
    schedule: &[(&str, &str)],
) -> Result<Vec<String>> {
    let mut told = Vec::new();
    let (mut a, mut b) = (Process::start(start(role), url)?, Process::start(start(role), url)?);
    for (name, order) in schedule {
        let process = if *name == "A" { &mut a } else { &mut b };
        told.push(format!("{name} {}", process.ask(order).await?));
    }
    a.end().await?;
    b.end().await?;
    Ok(told)
}

async fn prepare(url: &str) -> Result<()> {
    let pool = connect(url).await?;
    raw_sql("DROP SCHEMA IF EXISTS leasehold_spreadsheet CASCADE").execute(&pool).await?;
    raw_sql("CREATE SCHEMA leasehold_spreadsheet").execute(&pool).await?;
    hand_off::create(&pool, &hand_off::spec()?).await?;
    pool.close().await;
    Ok(())
}

async fn connect(url: &str) -> Result<PgPool> {
    let options = url.parse::<PgConnectOptions>()?.options([("search_path", SCHEMA)]);
    Ok(PgPoolOptions::new().connect_with(options).await?)
}

/// Runs a process of the example, which reads orders and writes answers, one per line.
pub async fn process(role: &str, url: &str) -> Result<()> {
    let (pool, requests) = (connect(url).await?, hand_off::spec()?);
    match role {
        "recorder" => record(&pool).await,
        "worker" => work(pool, &requests).await,
        "stepper" => step(pool, &requests).await,
        "holder" => hold(pool, &requests).await,
        other => Err(format!("there is no role {other}").into()),
    }
}

/// Records each change that it reads.
async fn record(pool: &PgPool) -> Result<()> {
    for order in io::stdin().lines() {
        let order = order?;
        let (kind, sheet) = order.split_once(' ').ok_or("an order is a kind and a sheet")?;
        let mut connection = pool.acquire().await?;
        match hand_off::record(&mut connection, kind, sheet.parse()?, None).await? {
            Some(row) => say(&format!("recorded {order} as row {row}")),
            None => say(&format!("refused {order}: it exists already")),
        }
    }
    Ok(())
}

/// Takes and settles claims until the input of the process ends.
async fn work(pool: PgPool, requests: &ClaimSpec) -> Result<()> {
    let claimer = Claimer::builder(Arc::new(PgClaims::new(pool, requests.clone()))).start()?;
    let closer = claimer.clone();
    let closing = tokio::spawn(async move {
        spawn_blocking(|| io::read_to_string(io::stdin())).await??;
        closer.close().await?;
        Result::Ok(())
    });
    let handler = |claim: Claim| async move {
        // ... here the sheet would be created or updated ...
        let what = describe(claim.rows(), claim.group());
        claim.done().await?;
        say(&format!("did {what}"));
        Ok::<_, ClaimError>(())
    };
    claimer.run(1, handler).await?;
    closing.await?
}

/// Takes one claim on the order `take`, and settles it on the order `settle`.
async fn step(pool: PgPool, requests: &ClaimSpec) -> Result<()> {
    let claims = PgClaims::new(pool, requests.clone());
    // The cursor of the pass over the table, which does not offer a row twice.
    let (mut cursor, mut at_work) = (None, VecDeque::<Claimed>::new());
    for order in io::stdin().lines() {
        if order? == "take" {
            let taken = claims.take(&Take::up_to(1).after(cursor.take())).await?;
            if let Some(claim) = taken.claims.first() {
                say(&format!("took {}", describe(&claim.rows, claim.group.as_deref())));
                cursor.clone_from(&taken.cursor);
            } else {
                say("took nothing");
            }
            at_work.extend(taken.claims);
        } else {
            let claimed = at_work.pop_front().ok_or("nothing was taken")?;
            let what = describe(&claimed.rows, claimed.group.as_deref());
            for settled in claims.settle(&[(claimed.claim, Outcome::Done)]).await? {
                settled?;
            }
            say(&format!("settled {what}"));
        }
    }
    Ok(())
}

/// Takes and settles in open transactions.
async fn hold(pool: PgPool, requests: &ClaimSpec) -> Result<()> {
    let held = PgHeld::new(pool, requests.clone());
    let (mut cursor, mut at_work) = (None, None::<PgHold>);
    for order in io::stdin().lines() {
        match order?.as_str() {
            "take" => match held.begin(&Take::up_to(1).after(cursor.take())).await {
                Ok(Some(hold)) => {
                    let claim = hold.taken().claims.first().ok_or("nothing was taken")?;
                    say(&format!("took {}", describe(&claim.rows, claim.group.as_deref())));
                    cursor.clone_from(&hold.taken().cursor);
                    at_work = Some(hold);
                }
                Ok(None) => say("took nothing"),
                Err(ClaimError::Busy { .. }) => {
                    say("took nothing: what is left waits for another, rolled back");
                }
                Err(error) => return Err(error.into()),
            },
            "try" => {
                let mut transaction = held.pool().begin().await?;
                let row = held.lock_row(&mut transaction, &RowKey::new(1), LockWait::NoWait).await;
                transaction.rollback().await?;
                match row {
                    Err(ClaimError::Busy { .. }) => say("was refused row 1 at once, and rolled back"),
                    other => return Err(format!("{other:?}").into()),
                }
            }
            _ => {
                let mut hold = at_work.take().ok_or("nothing was taken")?;
                let claimed = hold.taken().claims.first().cloned().ok_or("nothing was taken")?;
                hold.settle(&claimed.claim, &Outcome::Done).await?;
                hold.commit().await?;
                say(&format!("settled {}", describe(&claimed.rows, claimed.group.as_deref())));
            }
        }
    }
    Ok(())
}

/// Describes the rows of a claim. All have the same kind, because an update is not taken before the creation is done.
fn describe(rows: &[ClaimedRow], sheet: Option<&str>) -> String {
    let ids: Vec<String> = rows.iter().map(|row| row.key.id.to_string()).collect();
    let kind = rows.first().and_then(|row| row.kind.as_deref()).unwrap_or("nothing");
    format!("{kind} {} as row {}", sheet.unwrap_or("?"), ids.join("+"))
}

fn say(what: &str) {
    println!("> {what}");
}

/// Another process, which is killed if this one ends first.
struct Process {
    child: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

impl Process {
    fn start(mut command: Command, url: &str) -> Result<Self> {
        command.env("DATABASE_URL", url).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut child = command.spawn()?;
        let orders = child.stdin.take().ok_or("no input")?;
        let answers = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
        Ok(Self { child, orders, answers })
    }

    async fn ask(&mut self, order: &str) -> Result<String> {
        self.orders.write_all(format!("{order}\n").as_bytes()).await?;
        self.answer().await
    }

    async fn answer(&mut self) -> Result<String> {
        loop {
            let line = timeout(LONG, self.answers.next_line()).await??.ok_or("the process has ended")?;
            if let Some((_, answer)) = line.split_once("> ") {
                return Ok(answer.to_owned());
            }
        }
    }

    /// Closes the input of the process, and waits until the process has ended.
    async fn end(mut self) -> Result<()> {
        drop(self.orders);
        let status = timeout(LONG, self.child.wait()).await??;
        if status.success() { Ok(()) } else { Err(format!("the process ended with {status}").into()) }
    }
}
