//! Attempts: their count at each take, and the state of a row without attempts left.

use std::time::Duration;

use leasehold_claim::{ClaimError, Outcome, Renewal, RowKey};

use super::bench::{Layout, bounded, is_superseded, retry, row};
use super::{Bench, Env};

const HOUR: Duration = Duration::from_secs(3600);

async fn counted(env: &Env) -> Bench {
    env.table(Layout::new(|spec| spec.attempts("attempts_left"))).await
}

async fn exhausted(bench: &Bench) -> Vec<RowKey> {
    bounded(bench.client().exhausted(100)).await.unwrap()
}

pub async fn three_attempts_are_three_claims(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1).attempts(3)).await;
    for left in [2, 1, 0] {
        assert!(exhausted(&bench).await.is_empty());
        let claimed = bench.take_one().await;
        assert_eq!((claimed.rows[0].attempts_left, bench.see(&key).await.attempts), (Some(left), Some(left)));
        let settled = bench.settle(&claimed.claim, retry()).await.unwrap();
        assert_eq!(!settled.exhausted.is_empty(), left == 0);
    }
    assert_eq!(bench.take(1).await.len(), 0);
    let seen = bench.see(&key).await;
    assert_eq!((seen.state.as_str(), seen.attempts, seen.owner), (env.variant.exhausted(), Some(0), None));
    assert_eq!(exhausted(&bench).await, [key]);
}

pub async fn a_crash_uses_an_attempt(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1).attempts(2)).await;
    let swept = bench.crash(&bench.take_one().await.claim).await;
    assert_eq!((swept.returned, swept.exhausted), (vec![key.clone()], Vec::new()));
    let last = bench.take_one().await;
    let swept = bench.crash(&last.claim).await;
    assert_eq!((swept.returned, swept.exhausted), (Vec::new(), vec![key.clone()]));
    assert_eq!(bench.take(1).await.len(), 0);
    assert_eq!(bench.see(&key).await.attempts, Some(0), "never negative");
    assert_eq!(bench.state(&key).await, env.variant.exhausted());
    assert!(bench.settle(&last.claim, Outcome::Done).await.is_err(), "its worker was too late");
}

pub async fn a_claim_put_back_uses_no_attempt(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1).attempts(1)).await;
    for _ in 0..3 {
        let settled = bench.settle(&bench.take_one().await.claim, Outcome::PutBack).await.unwrap();
        assert!(settled.exhausted.is_empty());
    }
    assert_eq!(bench.see(&key).await.attempts, Some(1));
}

pub async fn a_snooze_uses_no_attempt(env: &Env) {
    let layout = Layout::new(|spec| spec.attempts("attempts_left").ready_at("ready_at"));
    let bench = env.table(layout).await;
    let key = bench.insert(row(1).attempts(1)).await;
    for _ in 0..2 {
        let settled = bench.settle(&bench.take_one().await.claim, Outcome::Snooze(Duration::ZERO)).await;
        assert!(settled.unwrap().exhausted.is_empty());
        assert_eq!(bench.see(&key).await.attempts, Some(1));
    }
    let settled = bench.settle(&bench.take_one().await.claim, Outcome::Snooze(HOUR)).await.unwrap();
    assert!(settled.exhausted.is_empty());
    assert!(bench.is_home(&key).await);
    assert_eq!(bench.see(&key).await.attempts, Some(1));
    assert_eq!(bench.take(1).await.len(), 0, "it is left alone");
    assert!(!bench.is_pending().await);

    let without = counted(env).await;
    let key = without.insert(row(1).attempts(1)).await;
    let claimed = without.take_one().await;
    let refused = without.settle(&claimed.claim, Outcome::Snooze(HOUR)).await;
    assert!(
        matches!(&refused, Err(ClaimError::Unsupported(text)) if text.contains("ready_at")),
        "{refused:?}"
    );
    assert!(without.is_taken(&key).await, "nothing was written");
}

pub async fn a_requeued_row_has_its_new_attempts(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1).attempts(1)).await;
    bench.settle(&bench.take_one().await.claim, retry()).await.unwrap();
    assert_eq!(bounded(bench.client().requeue(std::slice::from_ref(&key), 2)).await.unwrap(), 1);
    assert!(exhausted(&bench).await.is_empty());
    assert!(bench.is_home(&key).await);
    for _ in 0..2 {
        bench.settle(&bench.take_one().await.claim, retry()).await.unwrap();
    }
    assert_eq!(exhausted(&bench).await, [key]);
}

pub async fn only_given_up_rows_are_requeued(env: &Env) {
    let bench = counted(env).await;
    let used = bench.insert(row(1).attempts(0)).await;
    let fresh = bench.insert(row(2).attempts(2)).await;
    let done = bench.insert(row(3).attempts(0).state(env.variant.done())).await;
    let taken = bench.insert(row(4).attempts(1)).await;
    let free = bench.take(5).await;
    assert_eq!(free.len(), 2);
    let asked = [used.clone(), fresh, done.clone(), taken.clone(), RowKey::new(99)];
    assert_eq!(bounded(bench.client().requeue(&asked, 7)).await.unwrap(), 1);
    assert_eq!(bench.see(&used).await.attempts, Some(7));
    assert_eq!(bench.see(&taken).await.attempts, Some(0), "its last attempt is under way");
    assert!(bench.is_done(&done).await);
}

/// A requeue ignores the row's pause, adds attempts, and has no effect the second time.
pub async fn failed_rows_are_requeued_at_once(env: &Env) {
    let layout =
        Layout::new(|spec| spec.attempts("attempts_left").ready_at("ready_at").settled_at("settled_at"));
    let bench = env.table(layout).await;
    let spent = bench.insert(row(1).attempts(1)).await;
    let later = Outcome::Retry { error: Some("not now".to_owned()), after: HOUR };
    let first = bench.take_one().await;
    bench.settle(&first.claim, later).await.unwrap();
    let mut given_up = vec![spent];
    if env.variant.failed().is_some() {
        for seed in [row(2).attempts(3), row(3)] {
            given_up.push(bench.insert(seed).await);
            let claimed = bench.take_one().await;
            bench.settle(&claimed.claim, Outcome::Failed("no".to_owned())).await.unwrap();
        }
    }
    let count = given_up.len() as u64;
    assert_eq!(bounded(bench.client().requeue(&given_up, 2)).await.unwrap(), count);
    assert_eq!(bounded(bench.client().requeue(&given_up, 2)).await.unwrap(), 0, "none is given up any more");
    for (key, attempts) in given_up.iter().zip([Some(2), Some(4), None]) {
        let seen = bench.see(key).await;
        assert!(bench.is_home(key).await && !seen.is_dated, "{seen:?}");
        assert_eq!(seen.attempts, attempts);
        assert!(seen.error.is_some(), "its message stays");
    }
    assert_eq!(bench.take(5).await.len() as u64, count, "at once");
    assert!(is_superseded(&bench.settle(&first.claim, Outcome::Done).await));
}

pub async fn requeue_all_of_a_state(env: &Env) {
    let bench = counted(env).await;
    let client = bench.client();
    let refused = async |state: &str| {
        let answer = bounded(client.requeue_all(&state.into(), 5, 1)).await;
        assert!(matches!(answer, Err(ClaimError::InvalidSpec(_))), "{state}: {answer:?}");
    };
    for state in [env.variant.home(), env.variant.done(), "unheard-of"] {
        refused(state).await;
    }
    let Some(failed) = env.variant.failed() else { return };
    let mut keys = Vec::new();
    for id in 1..=5 {
        let state = if id < 5 { failed } else { env.variant.exhausted() };
        keys.push(bench.insert(row(id).attempts(0).state(state)).await);
    }
    let lock = bench.lock(&keys[1]).await;
    assert_eq!(bounded(client.requeue_all(&failed.into(), 2, 1)).await.unwrap(), 2);
    assert!(bench.is_home(&keys[0]).await && bench.is_home(&keys[2]).await, "past what is locked");
    bench.unlock(lock).await;
    assert_eq!(bounded(client.requeue_all(&failed.into(), 9, 1)).await.unwrap(), 2);
    assert_eq!(bounded(client.requeue_all(&failed.into(), 9, 1)).await.unwrap(), 0);
    assert_eq!(bounded(client.requeue_all(&env.variant.exhausted().into(), 9, 3)).await.unwrap(), 1);
    assert_eq!(bench.see(&keys[4]).await.attempts, Some(3));
    let answer = bounded(client.requeue_all(&failed.into(), 9, 0)).await;
    assert!(matches!(answer, Err(ClaimError::InvalidSpec(_))), "{answer:?}");
}

/// The worker of a cancelled row is refused, and the row can be requeued like a failed row.
pub async fn rows_are_cancelled_even_while_claimed(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.settled_at("settled_at"))).await;
    let keys = bench.fill(3).await;
    let client = bench.client();
    let Some(failed) = env.variant.failed() else {
        let refused = bounded(client.cancel(&keys, "no more")).await;
        assert!(matches!(refused, Err(ClaimError::Unsupported(_))), "{refused:?}");
        return;
    };
    let claims = bench.take(2).await;
    bench.settle(&claims[1].claim, Outcome::Done).await.unwrap();
    let asked = [keys.clone(), vec![RowKey::new(99), keys[0].clone()]].concat();
    assert_eq!(bounded(client.cancel(&asked, "no\0more")).await.unwrap(), 2);
    assert_eq!(bounded(client.cancel(&asked, "again")).await.unwrap(), 0);
    for key in [&keys[0], &keys[2]] {
        let seen = bench.see(key).await;
        assert_eq!((seen.state.as_str(), seen.owner.as_deref(), seen.has_lease), (failed, None, false));
        assert!(seen.is_dated && seen.error.is_some_and(|error| error.ends_with("more")));
    }
    assert!(bench.is_done(&keys[1]).await);
    let renewals = bounded(client.renew(std::slice::from_ref(&claims[0].claim), HOUR)).await.unwrap();
    assert!(matches!(renewals[..], [Renewal::Lost { .. }]), "{renewals:?}");
    assert!(is_superseded(&bench.settle(&claims[0].claim, Outcome::Failed("too late".to_owned())).await));
    assert_eq!(bench.take(5).await.len(), 0);
    assert_eq!(bounded(client.requeue(&keys, 1)).await.unwrap(), 2);
    assert_eq!(bench.take(5).await.len(), 2);
    assert!(is_superseded(&bench.settle(&claims[0].claim, Outcome::Done).await));
}

pub async fn what_is_locked_is_not_cancelled(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(2).await;
    if env.variant.failed().is_none() {
        return;
    }
    let lock = bench.lock(&keys[0]).await;
    assert_eq!(bounded(bench.client().cancel(&keys, "no")).await.unwrap(), 1);
    bench.unlock(lock).await;
    assert_eq!(bounded(bench.client().cancel(&keys, "no")).await.unwrap(), 1);
}

pub async fn requeued_rows_wake(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1).attempts(0)).await;
    let client = bench.client();
    let mut wake = bounded(client.listen()).await.unwrap();
    assert_eq!(bounded(client.requeue(&[key], 1)).await.unwrap(), 1);
    bounded(wake.woken()).await.unwrap();
}

pub async fn null_attempts_are_without_limit(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1)).await;
    for _ in 0..5 {
        let claimed = bench.take_one().await;
        assert_eq!(claimed.rows[0].attempts_left, None);
        let settled = bench.settle(&claimed.claim, retry()).await.unwrap();
        assert!(settled.exhausted.is_empty());
    }
    assert!(bench.is_home(&key).await && exhausted(&bench).await.is_empty());
}

pub async fn rows_without_attempts_left_are_never_taken(env: &Env) {
    let bench = counted(env).await;
    let zero = bench.insert(row(1).attempts(0)).await;
    let less = bench.insert(row(2).attempts(-3)).await;
    assert_eq!(bench.take(5).await.len(), 0);
    assert_eq!(exhausted(&bench).await, [zero.clone(), less.clone()]);
    bench.sweep().await;
    for key in [&zero, &less] {
        assert_eq!(bench.state(key).await, env.variant.exhausted(), "a sweep gives it its state");
    }
    assert_eq!(exhausted(&bench).await, [zero, less]);
    assert_eq!(bounded(bench.client().exhausted(1)).await.unwrap().len(), 1);
}

pub async fn without_attempts_there_is_no_list(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let refused = bounded(bench.client().exhausted(5)).await;
    assert!(matches!(refused, Err(ClaimError::Unsupported(_))), "{refused:?}");
    let answer = bounded(bench.client().requeue(&[key], 0)).await;
    match env.variant.failed() {
        Some(_) => assert_eq!(answer.unwrap(), 0, "it has not failed"),
        None => assert!(matches!(answer, Err(ClaimError::Unsupported(_))), "{answer:?}"),
    }
}

pub async fn a_row_without_attempts_left_is_not_pending(env: &Env) {
    let bench = counted(env).await;
    bench.insert(row(1).attempts(0)).await;
    assert!(!bench.is_pending().await);
}

pub async fn the_last_attempt_can_be_settled(env: &Env) {
    let bench = counted(env).await;
    let key = bench.insert(row(1).attempts(1)).await;
    let claimed = bench.take_one().await;
    assert!(exhausted(&bench).await.is_empty(), "it is under way");
    assert!(bench.sweep().await.exhausted.is_empty());
    bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
    assert!(bench.is_done(&key).await && exhausted(&bench).await.is_empty());
}
