//! Common parts of the tests of held claims.

#![allow(clippy::unwrap_used, unreachable_pub)] // A failed `unwrap` fails the test.

use std::time::Duration;

use leasehold_claim::{ClaimSpec, IdType, Outcome, Pass, PassEnd, PgHeld, States, Table, Take, Taken};
use sqlx::{PgConnection, Postgres, Transaction};
use test_servers::Database;
pub use test_servers::sql::{pool, run, text, until};

/// Limit of a wait that only a broken server exceeds.
pub const LONG: Duration = Duration::from_secs(120);

pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A table of another application, with an id and a boolean.
pub const PAYMENT: &str =
    "CREATE TABLE payment (id bigint PRIMARY KEY, processed boolean NOT NULL DEFAULT false);
    INSERT INTO payment SELECT n FROM generate_series(1, 5) n";

pub fn payments() -> ClaimSpec {
    ClaimSpec::builder(Table::new("payment").unwrap()).state("processed", States::boolean()).build().unwrap()
}

pub async fn payment(db: &Database) -> (PgHeld, PgConnection) {
    let mut observer = db.connect().await;
    run(&mut observer, PAYMENT).await;
    (PgHeld::new(pool(db.url(), 8).await, payments()).timeout(LONG), observer)
}

/// A table with all columns that a spec can use.
pub const REQUEST: &str = "CREATE SEQUENCE request_epoch;
    CREATE TYPE status AS ENUM ('new', 'in-progress', 'complete', 'error', 'exhausted', 'parked');
    CREATE TABLE request (id bigint, queue text NOT NULL DEFAULT 'default', status status NOT NULL DEFAULT 'new',
        kind text NOT NULL DEFAULT 'update', entity int, attempts int DEFAULT 3, message text, priority int,
        ready_at timestamptz, settled_at timestamptz, body jsonb, PRIMARY KEY (queue, id))";

pub fn states() -> States {
    States::enumeration(Table::new("status").unwrap(), ["new"], "complete")
        .taken("in-progress")
        .failed("error")
        .exhausted("exhausted")
        .others(["parked"])
        .transition("in-progress", "parked")
}

pub fn requests() -> leasehold_claim::ClaimSpecBuilder {
    ClaimSpec::builder(Table::new("request").unwrap())
        .id("id", IdType::Int)
        .queue("queue")
        .state("status", states())
        .kind("kind")
        .group("entity")
        .attempts("attempts")
        .error("message")
        .ready_at("ready_at")
        .settled_at("settled_at")
        .epoch_sequence(Table::new("request_epoch").unwrap())
        .work(["entity", "body"])
}

pub async fn request(db: &Database, spec: ClaimSpec) -> (PgHeld, PgConnection) {
    let mut observer = db.connect().await;
    run(&mut observer, REQUEST).await;
    (PgHeld::new(pool(db.url(), 8).await, spec).timeout(LONG), observer)
}

/// Returns the ids of the taken rows.
pub fn ids(taken: &Taken) -> Vec<String> {
    taken.claims.iter().flat_map(|claimed| &claimed.rows).map(|row| row.key.id.to_string()).collect()
}

/// A loop over held claims as an application might write it, with its own transactions.
pub struct Passes {
    held: PgHeld,
    take: Take,
    pass: Pass,
}

pub enum Step {
    Hold(Open),
    /// No row is left after the cursor.
    End(PassEnd),
}

pub struct Open {
    held: PgHeld,
    taken: Taken,
    transaction: Transaction<'static, Postgres>,
}

pub fn passes(held: &PgHeld, take: Take) -> Passes {
    Passes { held: held.clone(), take, pass: Pass::new() }
}

impl Passes {
    pub async fn next(&mut self) -> Step {
        let mut transaction = self.held.pool().begin().await.unwrap();
        let take = self.take.clone().after(self.pass.cursor());
        let taken = self.held.take_in(&mut transaction, &take).await.unwrap();
        self.pass.record(&taken);
        if !taken.claims.is_empty() {
            return Step::Hold(Open { held: self.held.clone(), taken, transaction });
        }
        transaction.rollback().await.unwrap();
        let pending = self.held.pending(&self.take).await.unwrap();
        Step::End(self.pass.end(pending))
    }
}

impl Open {
    pub fn taken(&self) -> &Taken {
        &self.taken
    }

    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }

    pub async fn settle_all(&mut self) {
        for claimed in self.taken.claims.clone() {
            self.held.settle_in(&mut self.transaction, &claimed.claim, &Outcome::Done).await.unwrap();
        }
    }

    pub async fn commit(self) {
        self.transaction.commit().await.unwrap();
    }

    pub async fn rollback(self) {
        self.transaction.rollback().await.unwrap();
    }
}
