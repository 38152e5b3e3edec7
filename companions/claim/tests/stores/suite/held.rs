//! Claims that are held by an open transaction.

use std::time::Duration;

use leasehold_claim::{ClaimError, OrderType, Outcome, Retention, Take, Unmet};

use super::hold::Hold;

use super::bench::{Layout, bounded, ids, is_superseded, keys, retry, row, until};
use super::{Bench, Env};

async fn counted(env: &Env) -> Bench {
    env.table(Layout::new(|spec| spec.attempts("attempts_left"))).await
}

async fn hold(bench: &Bench, limit: u32) -> Box<dyn Hold> {
    try_hold(bench, limit).await.expect("there is a row to hold")
}

async fn try_hold(bench: &Bench, limit: u32) -> Option<Box<dyn Hold>> {
    bounded(bench.holder().hold(&Take::up_to(limit))).await.unwrap()
}

pub async fn held_rows_are_settled_together_by_the_commit(env: &Env) {
    let bench = counted(env).await;
    let mut rows = Vec::new();
    for id in 1..=2 {
        rows.push(bench.insert(row(id).attempts(3)).await);
    }
    let mut held = hold(&bench, 2).await;
    let claims = held.taken().claims.clone();
    assert_eq!(ids(&claims), ["1", "2"]);
    assert_ne!(claims[0].claim.owner, claims[1].claim.owner);
    for claimed in &claims {
        bounded(held.settle(&claimed.claim, &Outcome::Done)).await.unwrap();
    }
    for key in &rows {
        assert!(bench.is_home(key).await, "nobody sees it before the commit");
    }
    bounded(held.commit()).await.unwrap();
    for key in &rows {
        assert!(bench.is_done(key).await);
        assert_eq!(bench.see(key).await.attempts, Some(2));
    }
}

pub async fn a_rollback_leaves_no_trace(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1).attempts(3)).await;
    let before = bench.see(&key).await;
    let mut held = hold(&bench, 1).await;
    let claim = held.taken().claims[0].claim.clone();
    bounded(held.settle(&claim, &Outcome::Done)).await.unwrap();
    bounded(held.rollback()).await.unwrap();
    assert_eq!(bench.see(&key).await, before, "attempts and epoch included");
    let again = hold(&bench, 1).await;
    assert_eq!(again.taken().claims[0].rows[0].attempts_left, Some(2));
}

pub async fn a_dropped_hold_leaves_no_trace(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1).attempts(3)).await;
    let before = bench.see(&key).await;
    for settle in [false, true] {
        let mut held = hold(&bench, 1).await;
        let claim = held.taken().claims[0].claim.clone();
        if settle {
            bounded(held.settle(&claim, &Outcome::Done)).await.unwrap();
        }
        drop(held);
        let free = || async { try_hold(&bench, 1).await.is_some() };
        until(free).await;
        assert_eq!(bench.see(&key).await, before);
        let unlocked = || async {
            let Some(held) = try_hold(&bench, 1).await else { return false };
            held.rollback().await.is_ok()
        };
        until(unlocked).await;
    }
}

pub async fn others_take_the_next_rows_without_waiting(env: &Env) {
    let bench = counted(env).await;
    bench.fill(3).await;
    let first = hold(&bench, 1).await;
    let second = hold(&bench, 5).await;
    assert_eq!(ids(&first.taken().claims), ["1"]);
    assert_eq!(ids(&second.taken().claims), ["2", "3"], "without waiting");
    assert!(try_hold(&bench, 5).await.is_none());
    bounded(first.rollback()).await.unwrap();
    assert_eq!(ids(&hold(&bench, 5).await.taken().claims), ["1"]);
    bounded(second.rollback()).await.unwrap();
}

pub async fn what_was_not_settled_stays(env: &Env) {
    let bench = counted(env).await;
    let mut rows = Vec::new();
    for id in 1..=2 {
        rows.push(bench.insert(row(id).attempts(3)).await);
    }
    let before = bench.see(&rows[1]).await;
    let mut held = hold(&bench, 2).await;
    let claim = held.taken().claims[0].claim.clone();
    bounded(held.settle(&claim, &Outcome::Done)).await.unwrap();
    bounded(held.commit()).await.unwrap();
    assert!(bench.is_done(&rows[0]).await);
    assert_eq!(bench.see(&rows[1]).await, before);
    assert_eq!(ids(&hold(&bench, 2).await.taken().claims), ["2"]);
}

pub async fn held_claims_settle_once(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1)).await;
    let mut held = hold(&bench, 1).await;
    let claim = held.taken().claims[0].claim.clone();
    bounded(held.settle(&claim, &Outcome::Done)).await.unwrap();
    let again = bounded(held.settle(&claim, &Outcome::PutBack)).await;
    assert!(is_superseded(&again), "{again:?}");
    bounded(held.commit()).await.unwrap();
    assert!(bench.is_done(&key).await);
}

pub async fn a_retry_uses_an_attempt_and_a_rollback_does_not(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1).attempts(2)).await;
    for (outcome, left) in [(retry(), 1), (Outcome::PutBack, 1), (retry(), 0)] {
        bounded(hold(&bench, 1).await.rollback()).await.unwrap();
        let mut held = hold(&bench, 1).await;
        let claim = held.taken().claims[0].claim.clone();
        let settled = bounded(held.settle(&claim, &outcome)).await.unwrap();
        assert_eq!(settled.exhausted.is_empty(), left > 0);
        bounded(held.commit()).await.unwrap();
        let seen = bench.see(&key).await;
        assert_eq!((seen.attempts, seen.owner), (Some(left), None), "after {outcome:?}");
    }
    assert_eq!(bench.state(&key).await, env.variant.exhausted());
    assert!(try_hold(&bench, 1).await.is_none());
}

pub async fn a_snooze_in_a_transaction_uses_no_attempt(env: &Env) {
    let layout = Layout::new(|spec| spec.attempts("attempts_left").ready_at("ready_at"));
    let bench = env.table(layout).await;
    let key = bench.insert(row(1).attempts(1)).await;
    let mut held = hold(&bench, 1).await;
    let claim = held.taken().claims[0].claim.clone();
    bounded(held.settle(&claim, &Outcome::Snooze(Duration::from_secs(3600)))).await.unwrap();
    bounded(held.commit()).await.unwrap();
    assert!(bench.is_home(&key).await);
    assert_eq!(bench.see(&key).await.attempts, Some(1));
    assert!(try_hold(&bench, 1).await.is_none(), "it is left alone");
}

pub async fn nothing_to_hold(env: &Env) {
    let bench = counted(env).await;
    assert!(try_hold(&bench, 5).await.is_none());
    let refused = bounded(bench.holder().hold(&Take::up_to(0))).await;
    assert!(matches!(refused, Err(ClaimError::InvalidSpec(_))));
}

pub async fn a_held_group_is_closed_to_others(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.group("entity").grouped())).await;
    let (one, two) = (bench.insert(row(1).entity("a")).await, bench.insert(row(2).entity("a")).await);
    let mut held = hold(&bench, 5).await;
    let claimed = held.taken().claims[0].clone();
    assert_eq!(keys(&claimed), [one.clone(), two.clone()]);
    bench.insert(row(3).entity("a")).await;
    assert!(try_hold(&bench, 5).await.is_none(), "not even a row that came later");
    let taken = bench.try_take(&Take::up_to(5)).await.unwrap();
    assert!(taken.claims.is_empty() && taken.skipped > 0, "{taken:?}");
    bounded(held.settle(&claimed.claim, &Outcome::Done)).await.unwrap();
    bounded(held.commit()).await.unwrap();
    assert!(bench.is_done(&one).await && bench.is_done(&two).await);
    assert_eq!(ids(&hold(&bench, 5).await.taken().claims), ["3"]);
}

pub async fn a_table_without_lease_columns_can_be_held(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec).without_lease()).await;
    let keys = bench.fill(3).await;
    let mut held = hold(&bench, 2).await;
    for claimed in held.taken().claims.clone() {
        assert_eq!(claimed.epoch(), None);
        bounded(held.settle(&claimed.claim, &Outcome::Done)).await.unwrap();
    }
    bounded(held.commit()).await.unwrap();
    assert!(bench.is_done(&keys[0]).await && bench.is_done(&keys[1]).await);
    assert_eq!(bench.state(&keys[2]).await, env.variant.home());
}

pub async fn epochs_of_a_sequence_grow_across_a_rollback(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec).without_lease().numbered_epochs()).await;
    bench.insert(row(1)).await;
    let first = hold(&bench, 1).await;
    let (epoch, key) =
        (first.taken().claims[0].epoch(), first.taken().claims[0].rows[0].dedupe_key(&bench.spec));
    bounded(first.rollback()).await.unwrap();
    let second = hold(&bench, 1).await;
    assert!(second.taken().claims[0].epoch() > epoch && epoch.is_some());
    assert_eq!(second.taken().claims[0].rows[0].dedupe_key(&bench.spec), key);
    bounded(second.rollback()).await.unwrap();
}

/// The create that the row waits for is locked by another transaction. The take does not wait and changes nothing.
pub async fn a_row_whose_create_is_locked_is_not_held(env: &Env) {
    let layout = Layout::new(|spec| {
        let spec = spec.group("entity").kind("kind").attempts("attempts_left");
        spec.waits("update", "create", Unmet::Block, Unmet::Block)
    });
    let bench = env.table(layout).await;
    let creates = bench.insert(row(1).entity("a").kind("create").state(env.variant.done())).await;
    let updates = bench.insert(row(2).entity("a").attempts(3)).await;
    let lock = bench.lock(&creates).await;
    match bounded(bench.holder().hold(&Take::up_to(5))).await {
        Ok(None) | Err(ClaimError::Busy { .. }) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(bench.see(&updates).await.attempts, Some(3), "the attempt was not used up");
    bench.unlock(lock).await;
    assert_eq!(ids(&hold(&bench, 5).await.taken().claims), ["2"]);
}

pub async fn held_rows_come_in_order_and_within_the_limit(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.order_by_descending("priority", OrderType::Int))).await;
    for (id, priority) in [(1, 0), (2, 5), (3, 9), (4, 5)] {
        bench.insert(row(id).priority(priority)).await;
    }
    let first = hold(&bench, 3).await;
    assert_eq!(ids(&first.taken().claims), ["3", "2", "4"]);
    let cursor = first.taken().cursor.clone();
    bounded(first.rollback()).await.unwrap();
    let rest = bounded(bench.holder().hold(&Take::up_to(5).after(cursor))).await.unwrap().unwrap();
    assert_eq!(ids(&rest.taken().claims), ["1"], "only what lies behind the cursor");
    bounded(rest.rollback()).await.unwrap();
}

pub async fn held_rows_are_not_taken_under_a_lease(env: &Env) {
    let bench = counted(env).await;
    bench.fill(2).await;
    let held = hold(&bench, 1).await;
    assert_eq!(bench.ids(&Take::up_to(5)).await, ["2"]);
    assert!(bench.is_pending().await, "it may come back");
    assert!(try_hold(&bench, 5).await.is_none(), "nor are leased rows held");
    bounded(held.rollback()).await.unwrap();
    assert_eq!(bench.ids(&Take::up_to(5)).await, ["1"]);
}

pub async fn a_failure_is_written_by_the_commit(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1)).await;
    let mut held = hold(&bench, 1).await;
    let claim = held.taken().claims[0].claim.clone();
    let answer = bounded(held.settle(&claim, &Outcome::Failed("no such document".to_owned()))).await;
    let Some(failed) = env.variant.failed() else {
        assert!(matches!(answer, Err(ClaimError::Unsupported(_))), "{answer:?}");
        return bounded(held.rollback()).await.unwrap();
    };
    answer.unwrap();
    bounded(held.commit()).await.unwrap();
    let seen = bench.see(&key).await;
    assert_eq!((seen.state.as_str(), seen.error.as_deref()), (failed, Some("no such document")));
}

pub async fn a_settled_row_is_deleted_by_the_commit(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.retention(Retention::DeleteOnSettle))).await;
    let key = bench.insert(row(1)).await;
    for commit in [false, true] {
        let mut held = hold(&bench, 1).await;
        let claim = held.taken().claims[0].claim.clone();
        bounded(held.settle(&claim, &Outcome::Done)).await.unwrap();
        assert!(!bench.is_gone(&key).await);
        if commit {
            bounded(held.commit()).await.unwrap();
        } else {
            bounded(held.rollback()).await.unwrap();
        }
        assert_eq!(bench.is_gone(&key).await, commit);
    }
}

pub async fn held_claims_of_others_are_not_settled(env: &Env) {
    let bench = counted(env).await;
    let keys = bench.fill(2).await;
    let mut first = hold(&bench, 1).await;
    let second = hold(&bench, 1).await;
    let foreign = second.taken().claims[0].claim.clone();
    bounded(second.rollback()).await.unwrap();
    let answer = bounded(first.settle(&foreign, &Outcome::Done)).await;
    assert!(is_superseded(&answer), "{answer:?}");
    bounded(first.rollback()).await.unwrap();
    assert!(bench.is_home(&keys[0]).await && bench.is_home(&keys[1]).await);
}

pub async fn a_hold_does_not_block_the_rest(env: &Env) {
    let bench = counted(env).await;
    let keys = bench.fill(5).await;
    let slow = hold(&bench, 1).await;
    for _ in 0..2 {
        let mut held = hold(&bench, 2).await;
        for claimed in held.taken().claims.clone() {
            bounded(held.settle(&claimed.claim, &Outcome::Done)).await.unwrap();
        }
        bounded(held.commit()).await.unwrap();
    }
    assert!(try_hold(&bench, 2).await.is_none());
    for key in &keys[1..] {
        assert!(bench.is_done(key).await, "{key}");
    }
    assert!(bench.is_home(&keys[0]).await);
    bounded(slow.rollback()).await.unwrap();
}

/// With `on_read`, a row whose lease has ended can be held without a sweep, as it can be taken.
pub async fn an_ended_lease_is_free_for_held_claims_too(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.attempts("attempts_left")).on_read().columns()).await;
    let key = bench.insert(row(1).attempts(3)).await;
    let first = bench.take_one().await;
    assert!(try_hold(&bench, 1).await.is_none());
    bench.expire(&key).await;
    let mut held = hold(&bench, 1).await;
    let claimed = held.taken().claims[0].clone();
    assert_eq!(claimed.rows[0].found.as_str(), env.variant.home());
    bounded(held.settle(&claimed.claim, &Outcome::Done)).await.unwrap();
    bounded(held.commit()).await.unwrap();
    assert!(bench.is_done(&key).await);
    assert!(is_superseded(&bench.settle(&first.claim, Outcome::Done).await));
}

/// A pass of held claims continues from the cursor of leased claims, and the other way round.
pub async fn held_and_leased_claims_continue_each_others_cursor(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.order_by("due", OrderType::Time))).await;
    for (id, due) in [(1, Some(3)), (2, Some(1)), (3, None), (4, Some(2)), (5, None)] {
        let seed = row(id);
        bench
            .insert(if let Some(due) = due { seed.due_in(Duration::from_secs(60 * due)) } else { seed })
            .await;
    }
    let first = hold(&bench, 1).await;
    assert_eq!(ids(&first.taken().claims), ["2"]);
    let cursor = first.taken().cursor.clone();
    bounded(first.rollback()).await.unwrap();
    let second = bench.try_take(&Take::up_to(3).after(cursor)).await.unwrap();
    assert_eq!(ids(&second.claims), ["4", "1", "3"], "behind the cursor of a held claim");
    let rest = bounded(bench.holder().hold(&Take::up_to(5).after(second.cursor))).await.unwrap().unwrap();
    assert_eq!(ids(&rest.taken().claims), ["5"], "behind the cursor of a lease");
    bounded(rest.rollback()).await.unwrap();
}

pub async fn not_ready_for_either(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.ready_at("ready_at"))).await;
    bench.insert(row(1).ready_in(Duration::from_secs(3600))).await;
    let key = bench.insert(row(2)).await;
    let held = hold(&bench, 5).await;
    assert_eq!(ids(&held.taken().claims), ["2"]);
    bounded(held.rollback()).await.unwrap();
    assert_eq!(bench.ids(&Take::up_to(5)).await, ["2"]);
    assert!(bench.is_taken(&key).await);
    assert!(try_hold(&bench, 5).await.is_none() && !bench.is_pending().await);
}

pub async fn each_end_of_a_held_claim_names_it(env: &Env) {
    let layout =
        Layout::new(|spec| spec.settled_by("settled_by").attempts("attempts_left").ready_at("ready_at"));
    let to = if env.variant.is_boolean() { "true" } else { "paused" };
    let plain =
        [Outcome::Done, Outcome::To(to.into()), Outcome::PutBack, Outcome::Snooze(Duration::from_secs(9))];
    let failed = env.variant.failed().map(|_| Outcome::Failed("no".to_owned()));
    let ends: Vec<_> = plain.into_iter().chain([retry()]).chain(failed).map(|outcome| (outcome, 5)).collect();
    for layout in [layout.clone(), layout.without_lease()] {
        let bench = env.table(layout).await;
        for (outcome, attempts) in ends.iter().cloned().chain([(retry(), 1)]) {
            let key = bench.insert(row(1).attempts(attempts)).await;
            let mut held = hold(&bench, 1).await;
            let claim = held.taken().claims[0].claim.clone();
            let settled = bounded(held.settle(&claim, &outcome)).await.unwrap();
            assert_eq!(settled.exhausted.len(), usize::from(attempts == 1), "{outcome:?}");
            assert_eq!(bench.see(&key).await.settled_by, None, "nobody sees it before the commit");
            bounded(held.commit()).await.unwrap();
            let seen = bench.see(&key).await;
            assert_eq!(seen.settled_by, Some(claim.owner.to_string()), "{outcome:?}");
            if attempts == 1 {
                assert_eq!(seen.state, env.variant.exhausted());
            }
            bench.table.delete(&key).await;
        }
    }
}

pub async fn all_rows_of_a_held_claim_name_it(env: &Env) {
    let layout = Layout::new(|spec| spec.settled_by("settled_by").group("entity").grouped());
    for layout in [layout.clone(), layout.without_lease()] {
        let bench = env.table(layout).await;
        let mut rows = Vec::new();
        for id in 1..=3 {
            rows.push(bench.insert(row(id).entity("a")).await);
        }
        let mut held = hold(&bench, 1).await;
        let claim = held.taken().claims[0].claim.clone();
        bounded(held.settle(&claim, &Outcome::Done)).await.unwrap();
        bounded(held.commit()).await.unwrap();
        for key in &rows {
            assert_eq!(bench.see(key).await.settled_by, Some(claim.owner.to_string()));
        }
    }
}
