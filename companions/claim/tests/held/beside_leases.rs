//! Held claims on tables whose rows other workers take under leases.

use crate::common::*;
use leasehold_api::ErrorKind;
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimSpecBuilder, ClaimStore as _, Outcome, PgClaims, PgHeld, Sql, States, Table,
    Take, Unmet,
};
use sqlx::postgres::PgListener;
use test_bounds::within;
use test_servers::fresh_database;

const ITEM: &str =
    "CREATE TABLE item (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'new', owner uuid, epoch bigint,
        lease_until timestamptz, entity int);
    CREATE SEQUENCE item_epoch START 100;
    CREATE TABLE lease (tab text, queue text, id text, owner uuid, epoch bigint, lease_until timestamptz,
        taken_at timestamptz, PRIMARY KEY (tab, queue, id));
    INSERT INTO item (id) VALUES (1), (2), (3)";

fn items() -> ClaimSpecBuilder {
    ClaimSpec::builder(Table::new("item").unwrap()).state("status", States::text(["new"], "complete"))
}

/// A held claim does not take a row under a lease. Its settlement increases the epoch, so a late lease holder is refused.
#[tokio::test]
async fn lease_columns_are_respected() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, ITEM).await;
    let lease = "UPDATE item SET owner = gen_random_uuid(), epoch = 4, lease_until = now()";
    run(&mut observer, &format!("{lease} + interval '1 hour' WHERE id = 1")).await;
    run(&mut observer, &format!("{lease} - interval '1 hour' WHERE id = 2")).await;
    let pool = pool(db.url(), 2).await;
    let columns = || items().lease_columns("owner", "epoch", "lease_until");
    let swept = PgHeld::new(pool.clone(), columns().build().unwrap());
    let hold = swept.begin(&Take::up_to(9)).await.unwrap().unwrap();
    assert_eq!(ids(hold.taken()), ["3"], "2 waits for a sweep");
    hold.rollback().await.unwrap();
    let sequence = columns().epoch_sequence(Table::new("item_epoch").unwrap()).expire_on_read();
    for (spec, epoch) in [(columns().expire_on_read(), "5 1"), (sequence, "100 101")] {
        let spec = spec.build().unwrap();
        // Only the function of the migration, because this table would violate its constraints.
        let statements = spec.migration().statements();
        let function = statements.iter().find(|sql| sql.contains("CREATE OR REPLACE FUNCTION")).unwrap();
        run(&mut observer, function).await;
        let read = PgHeld::new(pool.clone(), spec);
        let mut hold = read.begin(&Take::up_to(9)).await.unwrap().unwrap();
        assert_eq!(ids(hold.taken()), ["2", "3"]);
        for claimed in hold.taken().claims.clone() {
            hold.settle(&claimed.claim, &Outcome::PutBack).await.unwrap();
        }
        hold.commit().await.unwrap();
        let left = "SELECT string_agg(epoch::text, ' ' ORDER BY id) FROM item WHERE owner IS NULL AND lease_until IS NULL";
        assert_eq!(text(&mut observer, left).await, epoch);
        run(&mut observer, &format!("{lease} - interval '1 hour' WHERE id = 2")).await;
    }
}

/// The same with a side table, also if the lease starts between the search for the row and its lock.
#[tokio::test]
async fn a_side_table_is_respected() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, ITEM).await;
    let hook = "CREATE FUNCTION hook(n bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN
        IF n = 3 THEN PERFORM pg_advisory_lock(1); PERFORM pg_advisory_unlock(1); END IF; RETURN true; END $$";
    run(&mut observer, hook).await;
    let lease =
        |id: i32| format!("INSERT INTO lease (tab, queue, id) VALUES ('\"public\".\"item\"', '', '{id}')");
    run(&mut observer, &lease(1)).await;
    for grouped in [false, true] {
        let spec = items().side_table(Table::new("lease").unwrap()).filter(Sql::trusted("hook(t.id)"));
        let spec = if grouped { spec.group("entity").grouped() } else { spec };
        let held = PgHeld::new(pool(db.url(), 2).await, spec.build().unwrap());
        run(&mut observer, "SELECT pg_advisory_lock(1)").await;
        let mut other = db.connect().await;
        let meanwhile = async {
            until(
                &mut other,
                "SELECT count(*) = 1 FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND objid = 1",
            )
            .await;
            run(&mut other, &lease(2)).await;
            run(&mut observer, "SELECT pg_advisory_unlock(1)").await;
        };
        let take = Take::up_to(9);
        let (hold, ()) = tokio::join!(held.begin(&take), meanwhile);
        assert_eq!(ids(hold.unwrap().unwrap().taken()), ["3"], "grouped: {grouped}");
        run(&mut observer, "DELETE FROM lease WHERE id = '2'").await;
    }
    // A row under a lease blocks its whole group.
    run(&mut observer, "UPDATE item SET entity = id % 2").await;
    let spec = items().side_table(Table::new("lease").unwrap()).group("entity").grouped().build().unwrap();
    let held = PgHeld::new(pool(db.url(), 2).await, spec);
    assert_eq!(ids(held.begin(&Take::up_to(9)).await.unwrap().unwrap().taken()), ["2"]);
}

/// Both kinds of claims find the same rows claimable, even after manual changes.
#[tokio::test]
async fn the_state_says_whether_a_row_is_free() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, ITEM).await;
    run(&mut observer, "UPDATE item SET owner = gen_random_uuid(), lease_until = now() + interval '1 hour'")
        .await;
    run(&mut observer, "UPDATE item SET status = 'running' WHERE id > 1").await;
    let states = States::text(["new"], "complete").taken("running");
    let spec = ClaimSpec::builder(Table::new("item").unwrap()).state("status", states);
    let spec = spec.lease_columns("owner", "epoch", "lease_until").build().unwrap();
    let leased = PgClaims::new(pool(db.url(), 1).await, spec.clone());
    assert!(leased.pending(&Take::up_to(1)).await.unwrap());
    let held = PgHeld::new(pool(db.url(), 1).await, spec);
    let hold = held.begin(&Take::up_to(9)).await.unwrap().unwrap();
    assert_eq!(ids(hold.taken()), ["1"]);
}

/// Rows that refer to a claimed row can be inserted during the claim, as under a lease.
#[tokio::test]
async fn a_claimed_row_may_be_referred_to() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, ITEM).await;
    run(&mut observer, "CREATE TABLE child (item bigint REFERENCES item (id))").await;
    let held = PgHeld::new(pool(db.url(), 1).await, items().build().unwrap());
    let hold = held.begin(&Take::up_to(9)).await.unwrap().unwrap();
    assert_eq!(hold.taken().claims.len(), 3);
    run(&mut observer, "SET lock_timeout = '20s'; INSERT INTO child VALUES (1), (2), (3)").await;
    hold.rollback().await.unwrap();
}

/// A row on its last attempt does not count as failed while it is claimed.
#[tokio::test]
async fn the_last_attempt_is_waited_for() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(
        &mut observer,
        "CREATE TABLE work (id bigint PRIMARY KEY, done boolean NOT NULL DEFAULT false, kind text, entity int, owner uuid,
            epoch bigint, lease_until timestamptz, attempts int);
         INSERT INTO work VALUES (1, false, 'create', 7, gen_random_uuid(), 1, now() + interval '1 hour', 0),
            (2, false, 'update', 7, NULL, 1, NULL, 3)",
    )
    .await;
    let spec = ClaimSpec::builder(Table::new("work").unwrap())
        .state("done", States::boolean())
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts")
        .kind("kind")
        .group("entity")
        .waits("update", "create", Unmet::Run, Unmet::Run)
        .build()
        .unwrap();
    let leased = PgClaims::new(pool(db.url(), 1).await, spec.clone());
    let held = PgHeld::new(pool(db.url(), 2).await, spec);
    assert!(leased.take(&Take::up_to(9)).await.unwrap().claims.is_empty());
    let mut transaction = db.connect().await;
    run(&mut transaction, "BEGIN").await;
    assert!(held.take_in(&mut transaction, &Take::up_to(9)).await.unwrap().claims.is_empty());
    run(&mut transaction, "ROLLBACK").await;
    run(&mut observer, "UPDATE work SET owner = NULL, lease_until = NULL WHERE id = 1").await;
    assert_eq!(leased.take(&Take::up_to(9)).await.unwrap().claims.len(), 1, "it is given up now");
}

/// A take uses the current time, not the start of the transaction, so it finds rows that became ready since then.
#[tokio::test]
async fn a_row_that_became_ready_in_the_transaction_is_taken() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, ITEM).await;
    run(&mut observer, "ALTER TABLE item ADD ready_at timestamptz DEFAULT now() + interval '1 hour'").await;
    let held = PgHeld::new(pool(db.url(), 1).await, items().ready_at("ready_at").build().unwrap());
    let mut transaction = db.connect().await;
    run(&mut transaction, "BEGIN; SELECT 1").await;
    run(&mut observer, "UPDATE item SET ready_at = clock_timestamp() WHERE id = 2").await;
    assert_eq!(ids(&held.take_in(&mut transaction, &Take::up_to(9)).await.unwrap()), ["2"]);
    run(&mut transaction, "ROLLBACK").await;
}

/// If a trigger prevents the write of a row in a group, the error does not say that the claim was taken over.
#[tokio::test]
async fn a_row_that_a_trigger_kept_from_being_written_is_told() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, ITEM).await;
    run(
        &mut observer,
        "UPDATE item SET entity = 7;
         CREATE FUNCTION swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
         CREATE TRIGGER swallow BEFORE UPDATE ON item FOR EACH ROW WHEN (OLD.id = 2) EXECUTE FUNCTION swallow()",
    )
    .await;
    let held = PgHeld::new(pool(db.url(), 1).await, items().group("entity").grouped().build().unwrap());
    let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
    let claim = hold.taken().claims[0].claim.clone();
    let error = hold.settle(&claim, &Outcome::Done).await.unwrap_err();
    assert!(matches!(&error, ClaimError::Store(error) if error.kind() == ErrorKind::Corrupt), "{error}");
    hold.rollback().await.unwrap();
    assert_eq!(text(&mut observer, "SELECT count(*) FROM item WHERE status = 'new'").await, "3");
}

/// Rows that a held claim puts back are announced only by its commit.
#[tokio::test]
async fn rows_that_a_held_claim_puts_back_are_announced() {
    let db = fresh_database().await;
    let mut observer = db.connect().await;
    run(&mut observer, ITEM).await;
    let held = PgHeld::new(pool(db.url(), 2).await, items().build().unwrap());
    let channel = held.spec().channel().to_owned();
    let mut listener = PgListener::connect(db.url()).await.unwrap();
    listener.listen(&channel).await.unwrap();
    for (commits, heard) in [(false, "marker"), (true, "returned in public")] {
        let mut hold = held.begin(&Take::up_to(1)).await.unwrap().unwrap();
        let claim = hold.taken().claims[0].claim.clone();
        hold.settle(&claim, &Outcome::PutBack).await.unwrap();
        if commits {
            hold.commit().await.unwrap();
        } else {
            hold.rollback().await.unwrap();
            // A notification of the rollback would arrive before this marker.
            run(&mut observer, &format!("NOTIFY \"{channel}\", 'marker'")).await;
        }
        let said = within(LONG, "not ended", listener.recv()).await.unwrap();
        assert_eq!(said.payload(), heard);
    }
}
