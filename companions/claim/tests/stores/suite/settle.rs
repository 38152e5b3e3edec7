//! Settlements of claims.

use std::time::Duration;

use leasehold_claim::{ClaimError, Outcome, OwnerToken, Take};

use super::Env;
use super::bench::{Layout, bounded, is_superseded, keys, retry, row, state_of, without};

pub async fn a_settled_row_is_done_and_others_are_untouched(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.settled_at("settled_at"))).await;
    let all = bench.fill(3).await;
    let claimed = bench.take_one().await;
    let settled = bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
    assert!(settled.exhausted.is_empty());
    assert!(bench.is_done(&all[0]).await);
    assert!(bench.see(&all[0]).await.is_dated);
    for other in &all[1..] {
        assert!(bench.is_home(other).await && !bench.see(other).await.is_dated, "others are untouched");
    }
}

pub async fn a_failed_row_has_its_message(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    let answer = bench.settle(&claimed.claim, Outcome::Failed("no such document".to_owned())).await;
    match env.variant.failed() {
        Some(failed) => {
            answer.unwrap();
            let seen = bench.see(&key).await;
            assert_eq!((seen.state.as_str(), seen.error.as_deref()), (failed, Some("no such document")));
            assert!(seen.owner.is_none() && !seen.has_lease);
            assert_eq!(bench.take(1).await.len(), 0, "it is settled");
        }
        None => {
            assert!(matches!(answer, Err(ClaimError::Unsupported(_))), "{answer:?}");
            bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
        }
    }
}

pub async fn a_retried_row_is_free_at_once_and_uses_an_attempt(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.attempts("attempts_left"))).await;
    let key = bench.insert(row(1).attempts(3)).await;
    let claimed = bench.take_one().await;
    assert_eq!(bench.see(&key).await.attempts, Some(2));
    bench.settle(&claimed.claim, retry()).await.unwrap();
    assert!(bench.is_home(&key).await);
    let seen = bench.see(&key).await;
    assert_eq!(
        (seen.attempts, seen.error.as_deref()),
        (Some(2), Some("not this time")),
        "the attempt counts"
    );
    assert_eq!(bench.take(1).await.len(), 1, "at once");
}

pub async fn a_retry_can_have_a_pause(env: &Env) {
    let after = Outcome::Retry { error: None, after: Duration::from_secs(3600) };
    let bench = env.table(Layout::new(|spec| spec.ready_at("ready_at"))).await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    bench.settle(&claimed.claim, after.clone()).await.unwrap();
    assert!(bench.is_home(&key).await);
    assert_eq!(bench.take(1).await.len(), 0);
    assert!(!bench.is_pending().await);

    let without = env.plain().await;
    let key = without.insert(row(1)).await;
    let claimed = without.take_one().await;
    let refused = without.settle(&claimed.claim, after).await;
    assert!(matches!(refused, Err(ClaimError::Unsupported(_))), "{refused:?}");
    assert!(without.is_taken(&key).await, "nothing was written");
}

pub async fn put_back(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.attempts("attempts_left"))).await;
    let key = bench.insert(row(1).attempts(1)).await;
    for _ in 0..3 {
        let claimed = bench.take_one().await;
        assert_eq!(bench.see(&key).await.attempts, Some(0));
        bench.settle(&claimed.claim, Outcome::PutBack).await.unwrap();
        assert!(bench.is_home(&key).await);
        assert_eq!(bench.see(&key).await.attempts, Some(1), "the attempt does not count");
    }
}

pub async fn a_claim_can_end_along_a_transition(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    let to = if env.variant.is_boolean() { "true" } else { "paused" };
    bench.settle(&claimed.claim, Outcome::To(to.into())).await.unwrap();
    let seen = bench.see(&key).await;
    assert_eq!(seen.state, to);
    assert!(seen.owner.is_none() && !seen.has_lease);
    assert!(is_superseded(&bench.settle(&claimed.claim, Outcome::Done).await));
}

pub async fn an_illegal_transition_changes_nothing(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    let illegal = if env.variant.is_boolean() { "maybe" } else { "exhausted" };
    let answer = bench.settle(&claimed.claim, Outcome::To(illegal.into())).await;
    match answer {
        Err(ClaimError::IllegalTransition { from, to, .. }) => {
            assert_eq!((from.as_str(), to.as_str()), (env.variant.taken(), illegal));
        }
        other => panic!("{other:?}"),
    }
    assert!(bench.is_taken(&key).await, "the claim is as it was");
    bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
}

pub async fn twice(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(2).await;
    let claimed = bench.take_one().await;
    bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
    match bench.settle(&claimed.claim, Outcome::PutBack).await {
        Err(ClaimError::Superseded { row, state, .. }) => {
            assert_eq!((row, state), (keys[0].clone(), state_of(env.variant.done())));
        }
        other => panic!("{other:?}"),
    }
    assert!(bench.is_done(&keys[0]).await);
}

pub async fn by_another_owner(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(2).await;
    let claims = bench.take(2).await;
    let mut forged = claims[0].claim.clone();
    forged.owner = claims[1].claim.owner;
    assert!(is_superseded(&bench.settle(&forged, Outcome::Done).await));
    if let OwnerToken::Uuid(_) = forged.owner {
        forged.owner = OwnerToken::Uuid(uuid::Uuid::new_v4());
    }
    assert!(is_superseded(&bench.settle(&forged, Outcome::Done).await));
    for key in &keys {
        assert!(bench.is_taken(key).await);
    }
}

pub async fn under_another_epoch(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    for shift in [-1, 1] {
        let mut forged = claimed.claim.clone();
        forged.rows = forged.rows.iter().map(|(key, epoch)| (key.clone(), epoch + shift)).collect();
        assert!(is_superseded(&bench.settle(&forged, Outcome::Done).await));
        assert!(bench.is_taken(&key).await);
    }
    bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
}

pub async fn all_rows_of_a_claim_are_settled_or_none(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.group("entity").grouped())).await;
    let mut rows = Vec::new();
    for id in 1..=3 {
        rows.push(bench.insert(row(id).entity("a")).await);
    }
    let other = bench.insert(row(9).entity("b")).await;
    let claimed = bench.take_one().await;
    assert_eq!(keys(&claimed), rows);
    bench.crash_one(&rows[1]).await;
    match bench.settle(&claimed.claim, Outcome::Done).await {
        Err(ClaimError::Superseded { row, .. }) => assert_eq!(row, rows[1], "it names what was lost"),
        answer => panic!("{answer:?}"),
    }
    assert!(bench.is_taken(&rows[0]).await && bench.is_taken(&rows[2]).await, "none was settled");
    assert!(bench.is_home(&rows[1]).await && bench.is_home(&other).await);
    bench.crash(&without(&claimed.claim, &rows[1])).await;
    let again = bench.take_one().await;
    assert_eq!(keys(&again), rows);
    bench.settle(&again.claim, Outcome::Done).await.unwrap();
    for key in &rows {
        assert!(bench.is_done(key).await);
    }
    assert!(bench.is_home(&other).await, "no foreign row");
}

/// A frozen worker wakes after another worker has taken its row, and its settlement is refused.
pub async fn a_worker_whose_row_was_taken_again_cannot_settle(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let frozen = bench.take_one().await;
    bench.crash(&frozen.claim).await;
    let other = bench.take_one().await;
    assert_ne!(frozen.claim.owner, other.claim.owner);
    for outcome in [Outcome::Done, Outcome::PutBack, retry(), Outcome::To(env.variant.done().into())] {
        match bench.settle(&frozen.claim, outcome).await {
            Err(ClaimError::Superseded { row, epoch, current_epoch, state, .. }) => {
                assert_eq!((row, epoch), (key.clone(), frozen.rows[0].epoch));
                assert_eq!(current_epoch, Some(other.rows[0].epoch));
                assert!(current_epoch > Some(epoch));
                assert_eq!(state, state_of(env.variant.taken()));
            }
            answer => panic!("{answer:?}"),
        }
        assert_eq!(
            bench.see(&key).await.owner,
            Some(other.claim.owner.to_string()),
            "the other has it still"
        );
    }
    bench.settle(&other.claim, Outcome::Done).await.unwrap();
    assert!(bench.is_done(&key).await);
}

pub async fn a_worker_whose_row_was_swept_cannot_settle(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    bench.crash(&claimed.claim).await;
    match bench.settle(&claimed.claim, Outcome::Done).await {
        Err(ClaimError::Superseded { current_epoch, state, epoch, .. }) => {
            assert_eq!(current_epoch, bench.shown(epoch + 1));
            assert_eq!(state, state_of(env.variant.home()));
        }
        answer => panic!("{answer:?}"),
    }
    assert!(bench.is_home(&key).await);
}

pub async fn after_the_row_was_deleted(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    bench.table.delete(&key).await;
    match bench.settle(&claimed.claim, Outcome::Done).await {
        Err(ClaimError::Superseded { row, state: None, .. }) => assert_eq!(row, key),
        answer => panic!("{answer:?}"),
    }
    assert!(bench.is_gone(&key).await);
}

pub async fn after_the_state_was_changed_by_hand(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    let by_hand = if env.variant.is_boolean() { "true" } else { "paused" };
    bench.set_state(&key, by_hand).await;
    match bench.settle(&claimed.claim, Outcome::PutBack).await {
        Err(ClaimError::Superseded { state, .. }) => assert_eq!(state, state_of(by_hand)),
        answer => panic!("{answer:?}"),
    }
    assert_eq!(bench.state(&key).await, by_hand);
}

pub async fn each_claim_for_itself(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.attempts("attempts_left"))).await;
    let keys = bench.fill(5).await;
    let claims = bench.take(5).await;
    bench.crash(&claims[1].claim).await;
    let to = if env.variant.is_boolean() { "maybe" } else { "exhausted" };
    let outcomes = [Outcome::Done, Outcome::Done, retry(), Outcome::To(to.into()), Outcome::PutBack];
    let settlements = claims.iter().zip(outcomes).map(|(claimed, outcome)| (claimed.claim.clone(), outcome));
    let answers = bench.settle_all(settlements.collect()).await;
    assert_eq!(answers.len(), 5);
    assert!(answers[0].is_ok() && answers[2].is_ok() && answers[4].is_ok(), "{answers:?}");
    assert!(is_superseded(&answers[1]), "{answers:?}");
    assert!(matches!(answers[3], Err(ClaimError::IllegalTransition { .. })), "{answers:?}");
    assert!(bench.is_done(&keys[0]).await && bench.is_home(&keys[2]).await && bench.is_home(&keys[4]).await);
    assert!(bench.is_home(&keys[1]).await && bench.is_taken(&keys[3]).await);
}

pub async fn of_nothing(env: &Env) {
    let bench = env.plain().await;
    assert!(bench.settle_all(Vec::new()).await.is_empty());
    assert!(bounded(bench.client().renew(&[], Duration::from_secs(1))).await.unwrap().is_empty());
}

pub async fn while_somebody_has_the_row_locked(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    let lock = bench.lock(&key).await;
    let client = bench.client();
    let settlement = (claimed.claim.clone(), Outcome::Done);
    let settling = tokio::spawn(async move { client.settle(&[settlement]).await.unwrap().remove(0) });
    tokio::task::yield_now().await;
    bench.unlock(lock).await;
    match bounded(settling).await.unwrap() {
        Ok(_) => {}
        Err(ClaimError::Busy { .. }) => {
            bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
        }
        answer => panic!("{answer:?}"),
    }
    assert!(bench.is_done(&key).await);
}

pub async fn an_ended_lease_that_was_not_swept_can_be_settled(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    bench.expire(&key).await;
    bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
    assert!(bench.is_done(&key).await, "row, owner, epoch and state were still the claim's");
}

pub async fn a_put_back_row_goes_to_the_next(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let first = bench.take_one().await;
    bench.settle(&first.claim, Outcome::PutBack).await.unwrap();
    let second = bench.take_one().await;
    assert!(is_superseded(&bench.settle(&first.claim, Outcome::Done).await));
    assert!(bench.is_taken(&key).await);
    let third = bench.try_take(&Take::up_to(1)).await.unwrap();
    assert!(third.claims.is_empty());
    bench.settle(&second.claim, Outcome::Done).await.unwrap();
}

pub async fn what_is_lost_is_not_waited_for(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    bench.crash(&claimed.claim).await;
    let lock = bench.lock(&key).await;
    assert!(is_superseded(&bench.settle(&claimed.claim, Outcome::Done).await), "whoever has it locked now");
    bench.unlock(lock).await;
    assert!(bench.is_home(&key).await);
}

/// A bench whose spec has a column for the claim that settled a row, and all that an end can write beside it.
fn recorded() -> Layout {
    Layout::new(|spec| spec.settled_by("settled_by").attempts("attempts_left").ready_at("ready_at"))
}

/// One by one and in a batch.
pub async fn each_end_names_its_claim(env: &Env) {
    let bench = env.table(recorded()).await;
    let to = if env.variant.is_boolean() { "true" } else { "paused" };
    let failed = env.variant.failed().map(|_| Outcome::Failed("no".to_owned()));
    let plain =
        [Outcome::Done, Outcome::To(to.into()), Outcome::PutBack, Outcome::Snooze(Duration::from_secs(9))];
    let ends = plain.into_iter().chain([retry()]).chain(failed).collect::<Vec<_>>();
    for is_batch in [false, true] {
        let mut settlements = Vec::new();
        for outcome in &ends {
            for _ in 0..2 {
                bench.insert(row(i64::from(is_batch) * 100 + settlements.len() as i64).attempts(5)).await;
                settlements.push((bench.take_one().await.claim, outcome.clone()));
            }
        }
        for (claim, _) in &settlements {
            assert_eq!(bench.see(&claim.rows[0].0).await.settled_by, None, "a take names none");
        }
        if is_batch {
            for answer in bench.settle_all(settlements.clone()).await {
                answer.unwrap();
            }
        } else {
            for (claim, outcome) in &settlements {
                bench.settle(claim, outcome.clone()).await.unwrap();
            }
        }
        for (claim, outcome) in &settlements {
            let by = bench.see(&claim.rows[0].0).await.settled_by;
            assert_eq!(by, Some(claim.owner.to_string()), "{outcome:?}");
            // Out of the way of the next.
            bench.table.delete(&claim.rows[0].0).await;
        }
    }
    let key = bench.insert(row(999).attempts(1)).await;
    let last = bench.take_one().await.claim;
    assert_eq!(bench.settle(&last, retry()).await.unwrap().exhausted, std::slice::from_ref(&key));
    let seen = bench.see(&key).await;
    assert_eq!(
        (seen.state.as_str(), seen.settled_by),
        (env.variant.exhausted(), Some(last.owner.to_string()))
    );
}

pub async fn all_rows_of_a_claim_name_it(env: &Env) {
    let layout = Layout::new(|spec| spec.settled_by("settled_by").group("entity").grouped());
    let bench = env.table(layout).await;
    let mut rows = Vec::new();
    for id in 1..=3 {
        rows.push(bench.insert(row(id).entity("a")).await);
    }
    let claim = bench.take_one().await.claim;
    bench.settle(&claim, Outcome::Done).await.unwrap();
    for key in &rows {
        assert_eq!(bench.see(key).await.settled_by, Some(claim.owner.to_string()));
    }
}

/// A retry names its claim. A sweep, which is no claim, clears the name. A worker that is too late writes none.
pub async fn an_end_without_a_claim_names_none(env: &Env) {
    let bench = env.table(recorded()).await;
    let key = bench.insert(row(1).attempts(5)).await;
    let by = async || bench.see(&key).await.settled_by;
    let first = bench.take_one().await.claim;
    bench.settle(&first, retry()).await.unwrap();
    let second = bench.take_one().await.claim;
    assert_eq!(by().await, Some(first.owner.to_string()), "until the next end");
    bench.crash(&second).await;
    assert_eq!(by().await, None);
    assert!(is_superseded(&bench.settle(&second, Outcome::Done).await));
    assert_eq!(by().await, None);
    if env.variant.failed().is_none() {
        return;
    }
    let third = bench.take_one().await.claim;
    bench.settle(&third, Outcome::Failed("no".to_owned())).await.unwrap();
    let client = bench.client();
    assert_eq!(bounded(client.requeue(std::slice::from_ref(&key), 1)).await.unwrap(), 1);
    assert_eq!(by().await, None, "after it was requeued");
    bench.settle(&bench.take_one().await.claim, Outcome::PutBack).await.unwrap();
    assert!(by().await.is_some());
    assert_eq!(bounded(client.cancel(std::slice::from_ref(&key), "no more")).await.unwrap(), 1);
    assert_eq!(by().await, None, "after it was cancelled");
}
