//! Settlements of claims in Postgres.
use std::time::Duration;

use crate::common::*;
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimStore as _, Outcome, PgClaims, Retention, RowKey, States, Table, Take,
};
use sqlx::Executor as _;

const NOW: Outcome = Outcome::Retry { error: None, after: Duration::ZERO };

/// A settlement changes only the rows of its claim. If the claim does not match, it is an error and writes nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_settlement_writes_only_the_rows_of_its_claim() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.insert(5).await;
        let claims = world.claims(spec);
        let taken = take(&claims, 4).await;
        let ends = [
            Outcome::Done,
            Outcome::Failed("no\0good".into()),
            Outcome::Retry { error: Some("again".into()), after: Duration::ZERO },
            Outcome::PutBack,
        ];
        let all: Vec<_> =
            taken.claims.iter().zip(ends).map(|(claim, end)| (claim.claim.clone(), end)).collect();
        for answer in claims.settle(&all).await.unwrap() {
            assert!(answer.unwrap().exhausted.is_empty());
        }
        let states = "SELECT string_agg(status || COALESCE(':' || error, ''), ' ' ORDER BY id) FROM request";
        let settled = "complete error:no\u{fffd}good new:again new new";
        assert_eq!(world.text(states).await, settled);
        // A second time: all are settled, so no row belongs to its claim.
        for answer in claims.settle(&all).await.unwrap() {
            assert!(matches!(answer, Err(ClaimError::Superseded { epoch, .. }) if epoch > 0), "{answer:?}");
        }
        assert_eq!(world.text(states).await, settled);
        assert_eq!(world.number("SELECT count(*) FROM lease").await, 0);
        assert!(claims.settle(&[]).await.unwrap().is_empty());
    }
}

/// Only the claim's owner with its epoch can settle it, and only along the allowed transitions.
#[tokio::test(flavor = "multi_thread")]
async fn only_the_holder_sets_a_state_along_allowed_transitions() {
    let others = states().others(["parked", "lost"]).transition("in-progress", "parked");
    for side in [false, true] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.run("ALTER TABLE request DROP CONSTRAINT request_status").await;
        world.insert(2).await;
        let spec = if side { beside() } else { request() };
        let claims = world.claims(spec.state("status", others.clone()));
        let first = take_one(&claims).await;
        let second = take_one(&claims).await;
        // Another owner, another epoch.
        let mut stranger = first.claim.clone();
        stranger.owner = second.claim.owner;
        let mut late = first.claim.clone();
        late.rows = [(RowKey::new(1), first.claim.rows[0].1 - 1)].into();
        for wrong in [&stranger, &late] {
            for outcome in [Outcome::Done, Outcome::PutBack, NOW, Outcome::To("parked".into())] {
                let answer = settle(&claims, wrong, outcome.clone()).await;
                let Err(ClaimError::Superseded { row, current_epoch, state, .. }) = answer else {
                    panic!("{outcome:?}: {answer:?}")
                };
                assert_eq!(row, RowKey::new(1));
                assert_eq!(current_epoch, Some(first.claim.rows[0].1));
                assert_eq!(state.unwrap().as_str(), "in-progress");
            }
        }
        let both: Vec<_> = [&stranger, &late].map(|wrong| (wrong.clone(), Outcome::Done)).into();
        for answer in claims.settle(&both).await.unwrap() {
            assert!(matches!(answer, Err(ClaimError::Superseded { .. })), "{answer:?}");
        }
        for to in ["lost", "in-progress", "exhausted", "unheard-of"] {
            let answer = settle(&claims, &first.claim, Outcome::To(to.into())).await;
            assert!(matches!(answer, Err(ClaimError::IllegalTransition { .. })), "{to}: {answer:?}");
        }
        assert_eq!(world.number("SELECT count(*) FROM request WHERE status = 'in-progress'").await, 2);
        settle(&claims, &first.claim, Outcome::To("parked".into())).await.unwrap();
        settle(&claims, &second.claim, Outcome::To("error".into())).await.unwrap();
        assert_eq!(
            world.text("SELECT string_agg(status, ' ' ORDER BY id) FROM request").await,
            "parked error"
        );
    }
}

/// Without a state for claimed rows, the transition starts at the state in which the row was found.
#[tokio::test(flavor = "multi_thread")]
async fn transitions_start_at_the_state_a_row_was_found_in() {
    let world = World::new(REQUEST).await;
    world
        .run(
            "ALTER TABLE request DROP CONSTRAINT request_status;
        INSERT INTO request (status) VALUES ('a'), ('b')",
        )
        .await;
    let states = States::text(["a", "b"], "done").others(["c"]).transition("a", "c");
    let claims = world.claims(request().state("status", states));
    let taken = take(&claims, 2).await;
    let to_c = |at: usize| (taken.claims[at].claim.clone(), Outcome::To("c".into()));
    let answers = claims.settle(&[to_c(0), to_c(1)]).await.unwrap();
    assert!(answers[0].is_ok(), "{answers:?}");
    let error = answers[1].as_ref().unwrap_err();
    assert!(matches!(error, ClaimError::IllegalTransition { from, .. } if from.as_str() == "b"), "{error}");
    assert_eq!(world.text("SELECT string_agg(status, ' ' ORDER BY id) FROM request").await, "c b");
    // A single settlement gives the same error.
    let answer = claims.settle(&[to_c(1)]).await.unwrap().remove(0);
    assert!(matches!(answer, Err(ClaimError::IllegalTransition { .. })), "{answer:?}");
}

/// A failed handler settles the row with a message. A crashed handler leaves the row to the sweep.
#[tokio::test(flavor = "multi_thread")]
async fn an_error_settles_a_row_and_a_crash_leaves_it_to_the_sweep() {
    let world = World::new(REQUEST).await;
    world.insert(2).await;
    let claims = world.claims(request());
    let [failed, crashed] = [take_one(&claims).await, take_one(&claims).await];
    settle(&claims, &failed.claim, Outcome::Failed("out of paper".into())).await.unwrap();
    drop(crashed);
    world.expire().await;
    claims.sweep(9).await.unwrap();
    let rows = "SELECT string_agg(status || ':' || COALESCE(error, '-'), ' ' ORDER BY id) FROM request";
    assert_eq!(world.text(rows).await, "error:out of paper new:-");
    assert_eq!(world.number("SELECT count(*) FROM request WHERE settled_at IS NOT NULL").await, 1);
}

/// Manual changes during a claim: the row is deleted, settled, or given to another owner.
#[tokio::test(flavor = "multi_thread")]
async fn changed_by_hand_during_a_claim() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.insert(3).await;
        let claims = world.claims(spec);
        let taken = take(&claims, 3).await;
        world
            .run("DELETE FROM request WHERE id = 1; UPDATE request SET status = 'complete' WHERE id = 2")
            .await;
        let all: Vec<_> = taken.claims.iter().map(|claim| (claim.claim.clone(), Outcome::Done)).collect();
        let answers = claims.settle(&all).await.unwrap();
        assert!(
            matches!(&answers[0], Err(ClaimError::Superseded { current_epoch: None, state: None, .. })),
            "{answers:?}"
        );
        let Err(ClaimError::Superseded { state: Some(state), .. }) = &answers[1] else {
            panic!("{answers:?}")
        };
        assert_eq!(state.as_str(), "complete");
        answers[2].as_ref().unwrap();
        // The next sweep removes the remaining leases and changes no row.
        world.expire().await;
        world.run("UPDATE lease SET lease_until = '-infinity'").await;
        let swept = claims.sweep(9).await.unwrap();
        assert!(swept.returned.is_empty() && swept.exhausted.is_empty(), "{swept:?}");
        assert_eq!(world.number("SELECT count(*) FROM lease").await, 0);
        assert_eq!(world.number("SELECT count(*) FROM request WHERE status = 'complete'").await, 2);
    }
}

/// A put-back row would violate a unique index. The other rows are settled, this row stays unchanged, and a sweep returns
/// all other rows.
#[tokio::test(flavor = "multi_thread")]
async fn a_unique_index_in_the_way_of_a_return() {
    let world = World::new(REQUEST).await;
    world
        .run(
            "CREATE UNIQUE INDEX one_new ON request (entity) WHERE status = 'new';
        INSERT INTO request (entity) VALUES ('a'), ('b'), ('c')",
        )
        .await;
    let claims = world.claims(request());
    let taken = take(&claims, 3).await;
    world.run("INSERT INTO request (entity) VALUES ('b')").await;
    for outcome in [Outcome::PutBack, NOW] {
        let all: Vec<_> = taken.claims.iter().map(|claim| (claim.claim.clone(), outcome.clone())).collect();
        let answers = claims.settle(&all).await.unwrap();
        let Err(ClaimError::Duplicate { constraint, .. }) = &answers[1] else { panic!("{answers:?}") };
        assert_eq!(&**constraint, "one_new");
        let alone = settle(&claims, &taken.claims[1].claim, outcome.clone()).await;
        assert!(matches!(alone, Err(ClaimError::Duplicate { .. })), "{alone:?}");
        assert_eq!(world.number("SELECT count(*) FROM request WHERE status = 'in-progress'").await, 1);
    }
    // Two more rows, after the refused one.
    let more = claims.take(&Take::up_to(2)).await.unwrap();
    assert_eq!(flat(&more), [1, 3]);
    world.expire().await;
    let swept = claims.sweep(9).await.unwrap();
    assert_eq!(swept.returned.len(), 2, "{swept:?}");
    // A failed sweep must release the row before it returns. Otherwise the next sweep would skip the locked row.
    for _ in 0..200 {
        let error = claims.sweep(9).await.unwrap_err();
        let ClaimError::Row { source, .. } = &error else { panic!("{error}") };
        assert!(matches!(**source, ClaimError::Duplicate { .. }), "{error}");
    }
    // The owner of the claim can still settle the row as done.
    settle(&claims, &taken.claims[1].claim, Outcome::Done).await.unwrap();
}

/// The settlement takes effect with the transaction of the work. During the transaction, no sweep returns the row, and
/// renewals of other claims do not wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_claim_is_settled_in_the_transaction_of_its_work() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE, "CREATE TABLE effect (n int);"].concat()).await;
        world.insert(2).await;
        let claims = world.claims(spec);
        let [mine, other] = [take_one(&claims).await, take_one(&claims).await];
        for commits in [false, true] {
            let mut work = world.pool.begin().await.unwrap();
            claims.settle_in(&mut work, &mine.claim, &Outcome::Done).await.unwrap();
            work.execute("INSERT INTO effect VALUES (1)").await.unwrap();
            world.run("UPDATE lease SET lease_until = '-infinity' WHERE id = '2'").await;
            let mut renewals =
                bounded(claims.renew(&[mine.claim.clone(), other.claim.clone()], LONG)).await.unwrap();
            assert_eq!(renewals.remove(0), leasehold_claim::Renewal::Busy);
            assert_eq!(renewals.remove(0), leasehold_claim::Renewal::Renewed);
            assert!(bounded(claims.sweep(9)).await.unwrap().returned.is_empty());
            if commits { work.commit().await } else { work.rollback().await }.unwrap();
            let done = i64::from(commits);
            assert_eq!(world.number("SELECT count(*) FROM request WHERE status = 'complete'").await, done);
            assert_eq!(world.number("SELECT count(*) FROM effect").await, done);
        }
        let mut work = world.pool.begin().await.unwrap();
        let late = claims.settle_in(&mut work, &mine.claim, &Outcome::Done).await;
        assert!(matches!(late, Err(ClaimError::Superseded { .. })), "{late:?}");
        work.execute("INSERT INTO effect VALUES (2)").await.unwrap();
        work.rollback().await.unwrap();
    }
}

/// An earlier settlement wins over a sweep, even if the lease has ended.
#[tokio::test(flavor = "multi_thread")]
async fn of_a_sweep_and_a_settlement_the_first_wins() {
    for spec in [request(), beside()] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.insert(1).await;
        let claims = world.claims(spec);
        let mine = take_one(&claims).await;
        world.expire().await;
        world.run("UPDATE lease SET lease_until = '-infinity'").await;
        let mut work = world.pool.begin().await.unwrap();
        claims.settle_in(&mut work, &mine.claim, &Outcome::Done).await.unwrap();
        assert!(bounded(claims.sweep(9)).await.unwrap().returned.is_empty());
        work.commit().await.unwrap();
        assert!(claims.sweep(9).await.unwrap().returned.is_empty());
        assert_eq!(world.text("SELECT status FROM request").await, "complete");
        // The other way round: the sweep has locked the row. The settlement waits and is then refused.
        world.run("UPDATE request SET status = 'new'").await;
        let mine = take_one(&claims).await;
        world.expire().await;
        world.run("UPDATE lease SET lease_until = '-infinity'").await;
        let mut sweep = world.pool.begin().await.unwrap();
        sweep
            .execute("UPDATE request SET status = 'new', owner = NULL, lease_until = NULL, epoch = epoch + 1")
            .await
            .unwrap();
        sweep.execute("DELETE FROM lease").await.unwrap();
        let settling = tokio::spawn({
            let (claims, claim) = (claims.clone(), mine.claim.clone());
            async move { settle(&claims, &claim, Outcome::Done).await }
        });
        until_waiting(&world, 1).await;
        sweep.commit().await.unwrap();
        let late = bounded(settling).await.unwrap();
        assert!(matches!(late, Err(ClaimError::Superseded { .. })), "{late:?}");
        assert_eq!(world.text("SELECT status FROM request").await, "new");
    }
}

/// Settled rows are kept, kept for a time, or deleted at once. Purges neither wait nor block.
#[tokio::test(flavor = "multi_thread")]
async fn settled_rows_are_kept_purged_or_deleted_as_configured() {
    let world = World::new(REQUEST).await;
    world.insert(6).await;
    let claims = world.claims(request());
    for claim in take(&claims, 4).await.claims {
        settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
    }
    assert!(matches!(claims.purge(9).await, Err(ClaimError::Unsupported(_))));
    let hour = Retention::KeepFor(Duration::from_secs(3600));
    let claims = world.claims(request().retention(hour));
    assert_eq!(claims.purge(9).await.unwrap(), 0);
    world.run("UPDATE request SET settled_at = clock_timestamp() - interval '1 hour 1 second' WHERE id IN (1, 2, 3)").await;
    let mut reader = world.pool.begin().await.unwrap();
    reader.execute("SELECT FROM request WHERE id = 1 FOR UPDATE").await.unwrap();
    assert_eq!(bounded(claims.purge(1)).await.unwrap(), 1);
    assert_eq!(bounded(claims.purge(9)).await.unwrap(), 1);
    reader.rollback().await.unwrap();
    assert_eq!(claims.purge(9).await.unwrap(), 1);
    assert_eq!(world.text("SELECT string_agg(id::text, ' ' ORDER BY id) FROM request").await, "4 5 6");

    for spec in [request(), beside()] {
        world
            .run(
                &["TRUNCATE request; DROP TABLE IF EXISTS lease; DROP SEQUENCE IF EXISTS lease_epoch;", SIDE]
                    .concat(),
            )
            .await;
        world.insert(4).await;
        let claims = world.claims(spec.retention(Retention::DeleteOnSettle));
        let taken = take(&claims, 4).await;
        let ends = [Outcome::Done, Outcome::Done, Outcome::Failed("x".into()), Outcome::PutBack];
        let all: Vec<_> =
            taken.claims.iter().zip(ends).map(|(claim, end)| (claim.claim.clone(), end)).collect();
        for answer in claims.settle(&all).await.unwrap() {
            answer.unwrap();
        }
        assert_eq!(world.text("SELECT string_agg(status, ' ' ORDER BY id) FROM request").await, "error new");
        let last = take_one(&claims).await;
        settle(&claims, &last.claim, Outcome::Done).await.unwrap();
        assert_eq!(world.text("SELECT string_agg(status, ' ' ORDER BY id) FROM request").await, "error");
        assert_eq!(world.number("SELECT count(*) FROM lease").await, 0);
    }
}

/// Outcomes without a state or column in the spec are refused.
#[tokio::test(flavor = "multi_thread")]
async fn unsupported_outcomes() {
    let world = World::new(REQUEST).await;
    world.insert(1).await;
    let spec = ClaimSpec::builder(Table::new("request").unwrap())
        .state("status", States::text(["new"], "complete").taken("in-progress"))
        .lease_columns("owner", "epoch", "lease_until");
    let claims: PgClaims = world.claims(spec);
    let claim = take_one(&claims).await.claim;
    let later = Outcome::Retry { error: None, after: Duration::from_secs(1) };
    for outcome in [Outcome::Failed("x".into()), later] {
        assert!(matches!(settle(&claims, &claim, outcome).await, Err(ClaimError::Unsupported(_))));
    }
    assert!(matches!(claims.exhausted(1).await, Err(ClaimError::Unsupported(_))));
    assert!(matches!(claims.requeue(&[RowKey::new(1)], 1).await, Err(ClaimError::Unsupported(_))));
    settle(&claims, &claim, NOW).await.unwrap();
}
