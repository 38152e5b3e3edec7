//! Leases: renewals, and sweeps of ended leases.

use std::collections::HashSet;
use std::time::Duration;

use leasehold_claim::Upkeep;
use leasehold_claim::{ClaimError, Outcome, Renewal, RowKey, Swept, Take};

use super::Env;
use super::bench::{Layout, bounded, is_superseded, row, state_of};

const MINUTE: Duration = Duration::from_secs(60);

pub async fn renewed_in_time(env: &Env) {
    let bench = env.plain().await;
    bench.fill(2).await;
    let claims = bench.take(2).await;
    let refs: Vec<_> = claims.iter().map(|claimed| claimed.claim.clone()).collect();
    let client = bench.client();
    bench.expire(&claims[0].rows[0].key).await;
    let answers = bounded(client.renew(&refs, Duration::from_secs(3600))).await.unwrap();
    assert_eq!(answers, [Renewal::Renewed, Renewal::Renewed], "nobody else has had them");
    assert!(bench.sweep().await.returned.is_empty(), "its lease lasts again");
    for taken in bounded(client.taken(5)).await.unwrap() {
        assert!(taken.remaining.unwrap() > Duration::from_secs(3500), "{taken:?}");
    }
    for claim in refs {
        bench.settle(&claim, Outcome::Done).await.unwrap();
    }
}

pub async fn renewing_a_lost_claim(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(2).await;
    let claims = bench.take(2).await;
    bench.crash(&claims[0].claim).await;
    let refs: Vec<_> = claims.iter().map(|claimed| claimed.claim.clone()).collect();
    let answers = bounded(bench.client().renew(&refs, MINUTE)).await.unwrap();
    let state = state_of(env.variant.home());
    let current_epoch = bench.shown(claims[0].rows[0].epoch + 1);
    assert_eq!(answers, [Renewal::Lost { row: keys[0].clone(), current_epoch, state }, Renewal::Renewed]);
    let other = bench.take_one().await;
    let answers = bounded(bench.client().renew(&refs[..1], MINUTE)).await.unwrap();
    let state = state_of(env.variant.taken());
    let current_epoch = Some(other.rows[0].epoch);
    assert_eq!(answers, [Renewal::Lost { row: keys[0].clone(), current_epoch, state }]);
    bench.settle(&other.claim, Outcome::Done).await.unwrap();
}

pub async fn renewing_past_a_locked_row(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(2).await;
    let refs: Vec<_> = bench.take(2).await.into_iter().map(|claimed| claimed.claim).collect();
    let lock = bench.lock(&keys[0]).await;
    let answers = bounded(bench.client().renew(&refs, MINUTE)).await.unwrap();
    assert_eq!(answers, [Renewal::Busy, Renewal::Renewed], "one is not kept waiting for the other");
    bench.unlock(lock).await;
    let answers = bounded(bench.client().renew(&refs, MINUTE)).await.unwrap();
    assert_eq!(answers, [Renewal::Renewed, Renewal::Renewed]);
}

pub async fn renewing_what_is_settled_or_gone(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(3).await;
    let refs: Vec<_> = bench.take(3).await.into_iter().map(|claimed| claimed.claim).collect();
    bench.settle(&refs[0], Outcome::Done).await.unwrap();
    bench.table.delete(&keys[1]).await;
    let mut forged = refs[2].clone();
    forged.owner = refs[0].owner;
    let asked = [refs[0].clone(), refs[1].clone(), forged];
    let answers = bounded(bench.client().renew(&asked, MINUTE)).await.unwrap();
    assert!(matches!(&answers[0], Renewal::Lost { row, state, .. }
        if *row == keys[0] && *state == state_of(env.variant.done())));
    assert!(
        matches!(&answers[1], Renewal::Lost { row, state: None, current_epoch: None } if *row == keys[1])
    );
    assert!(
        matches!(&answers[2], Renewal::Lost { row, .. } if *row == keys[2]),
        "another owner: {answers:?}"
    );
    assert!(bench.is_done(&keys[0]).await);
}

pub async fn a_sweep_returns_ended_leases(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(3).await;
    let claims = bench.take(2).await;
    bench.expire(&keys[1]).await;
    let swept = bench.sweep().await;
    assert_eq!((swept.returned, swept.exhausted), (vec![keys[1].clone()], Vec::new()));
    assert!(bench.is_home(&keys[1]).await);
    let epoch = claims[1].rows[0].epoch;
    assert_eq!(
        bench.see(&keys[1]).await.epoch.filter(|epoch| *epoch > 0),
        bench.shown(epoch + 1),
        "a greater epoch"
    );
    assert!(bench.is_taken(&keys[0]).await && bench.is_home(&keys[2]).await);
    assert_eq!(bench.sweep().await, Swept::default(), "nothing is left to sweep");
}

pub async fn upkeep_reports_when_the_next_lease_ends(env: &Env) {
    let bench = env.plain().await;
    let client = bench.client();
    let look = async || bounded(client.upkeep(10)).await.unwrap();
    assert_eq!(look().await, Upkeep::default());
    let keys = bench.fill(2).await;
    assert_eq!(look().await, Upkeep::default(), "nothing is taken");
    let taken = bounded(client.take(&Take::up_to(2).lease(MINUTE))).await.unwrap();
    assert_eq!(taken.claims.len(), 2);
    let is_ahead = |upkeep: &Upkeep| {
        upkeep.swept == Swept::default()
            && upkeep.next.is_some_and(|next| next > Duration::ZERO && next <= MINUTE)
    };
    let upkeep = look().await;
    assert!(is_ahead(&upkeep), "{upkeep:?}");
    bench.expire(&keys[1]).await;
    assert_eq!(look().await.swept.returned, [keys[1].clone()]);
    assert!(bench.is_taken(&keys[0]).await && bench.is_home(&keys[1]).await);
    let upkeep = look().await;
    assert!(is_ahead(&upkeep), "of the other one: {upkeep:?}");
    bench.settle(&taken.claims[0].claim, Outcome::Done).await.unwrap();
    assert_eq!(look().await, Upkeep::default());
}

pub async fn upkeep_marks_rows_without_attempts_left_as_exhausted(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.attempts("attempts_left"))).await;
    let key = bench.insert(row(1).attempts(0)).await;
    bench.insert(row(2).attempts(1)).await;
    let client = bench.client();
    bounded(client.upkeep(10)).await.unwrap();
    assert_eq!(bench.state(&key).await, env.variant.exhausted());
    assert_eq!(bounded(client.upkeep(10)).await.unwrap(), Upkeep::default(), "and is done with them");
    assert_eq!(bench.take(5).await.len(), 1);
}

pub async fn a_sweep_returns_no_more_than_its_limit(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(5).await;
    bench.take(5).await;
    for key in &keys {
        bench.expire(key).await;
    }
    let mut returned = HashSet::new();
    for expected in [2, 2, 1, 0] {
        let swept = bounded(bench.client().sweep(2)).await.unwrap();
        assert_eq!(swept.returned.len(), expected);
        returned.extend(swept.returned);
    }
    assert_eq!(returned, keys.into_iter().collect());
}

pub async fn each_row_is_swept_once_by_many_sweepers(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(20).await;
    let claims = bench.take(20).await;
    for key in &keys {
        bench.expire(key).await;
    }
    let mut sweepers = Vec::new();
    for _ in 0..4 {
        let client = bench.client();
        sweepers.push(tokio::spawn(async move { client.sweep(7).await.unwrap().returned }));
    }
    let mut returned = Vec::new();
    for sweeper in sweepers {
        returned.extend(bounded(sweeper).await.unwrap());
    }
    returned.extend(bench.sweep().await.returned);
    assert_eq!(returned.len(), 20, "each row by one of them");
    assert_eq!(returned.into_iter().collect::<HashSet<RowKey>>(), keys.iter().cloned().collect());
    for (key, claimed) in keys.iter().zip(&claims) {
        let epoch = bench.see(key).await.epoch.filter(|epoch| *epoch > 0);
        assert_eq!(epoch, bench.shown(claimed.rows[0].epoch + 1), "counted once");
    }
}

pub async fn a_sweep_never_touches_a_lease_that_lasts(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    let before = bench.see(&key).await;
    assert_eq!(bench.sweep().await, Swept::default());
    assert_eq!(bench.see(&key).await, before);
    bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
    assert_eq!(bench.sweep().await, Swept::default(), "nor what is settled");
    assert!(bench.is_done(&key).await);
}

pub async fn a_renewal_uses_the_rows_own_timeout(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.timeout_seconds("timeout_seconds"))).await;
    bench.insert(row(1).timeout(7200)).await;
    bench.insert(row(2)).await;
    let refs: Vec<_> = bench.take(2).await.into_iter().map(|claimed| claimed.claim).collect();
    bench.expire_all(&refs[0]).await;
    let client = bench.client();
    bounded(client.renew(&refs, MINUTE)).await.unwrap();
    for taken in bounded(client.taken(2)).await.unwrap() {
        let remaining = taken.remaining.unwrap();
        let own = taken.key.id.to_string() == "1";
        assert_eq!(remaining > Duration::from_secs(7000), own, "{taken:?}");
        assert!(own || remaining <= MINUTE, "{taken:?}");
    }
}

pub async fn without_a_lease_or_with_one_of_zero(env: &Env) {
    let bench = env.plain().await;
    bench.insert(row(1)).await;
    let claimed = bench.take_one().await;
    let refused = bounded(bench.client().renew(&[claimed.claim], Duration::ZERO)).await;
    assert!(matches!(refused, Err(ClaimError::InvalidSpec(_))), "{refused:?}");
    let bare = env.table(Layout::new(|spec| spec).without_lease()).await;
    let refused = bounded(bare.client().sweep(1)).await;
    assert!(matches!(refused, Err(ClaimError::Unsupported(_))), "{refused:?}");
}

pub async fn an_ended_lease_is_taken_without_a_sweep(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.attempts("attempts_left")).on_read().columns()).await;
    let key = bench.insert(row(1).attempts(2)).await;
    let first = bench.take_one().await;
    assert_eq!(bench.take(1).await.len(), 0);
    assert!(!bench.is_pending().await);
    bench.expire(&key).await;
    assert!(bench.is_pending().await, "nobody has to sweep");
    let second = bench.take_one().await;
    assert!(second.rows[0].epoch > first.rows[0].epoch);
    assert_eq!(second.rows[0].attempts_left, Some(0), "a crash counts");
    assert!(is_superseded(&bench.settle(&first.claim, Outcome::Done).await));
    bench.expire(&key).await;
    assert_eq!(bench.take(1).await.len(), 0, "no attempt is left");
    assert_eq!(bench.sweep().await.exhausted, [key]);
}

pub async fn a_sweep_passes_over_locked_rows(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(2).await;
    bench.take(2).await;
    for key in &keys {
        bench.expire(key).await;
    }
    let lock = bench.lock(&keys[0]).await;
    assert_eq!(bench.sweep().await.returned, keys[1..], "without waiting for it");
    bench.unlock(lock).await;
    assert_eq!(bench.sweep().await.returned, keys[..1]);
}

pub async fn a_swept_row_is_taken_again(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let first = bench.take_one().await;
    assert!(bench.try_take(&Take::up_to(1)).await.unwrap().claims.is_empty());
    bench.crash(&first.claim).await;
    let second = bench.take_one().await;
    bench.settle(&second.claim, Outcome::Done).await.unwrap();
    assert!(bench.is_done(&key).await);
}

/// One process can have a lost claim and the next claim of the same row at the same time.
pub async fn a_lost_claim_beside_the_next_of_the_same_row(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let old = bench.take_one().await;
    bench.crash(&old.claim).await;
    let new = bench.take_one().await;
    let both = [old.claim.clone(), new.claim.clone()];
    let backwards = [new.claim.clone(), old.claim.clone()];
    let client = bench.client();
    let answers = bounded(client.renew(&both, MINUTE)).await.unwrap();
    assert!(matches!(answers[..], [Renewal::Lost { .. }, Renewal::Renewed]), "{answers:?}");
    let answers = bounded(client.renew(&backwards, MINUTE)).await.unwrap();
    assert!(matches!(answers[..], [Renewal::Renewed, Renewal::Lost { .. }]), "{answers:?}");
    let done = both.map(|claim| (claim, Outcome::Done));
    let answers = bench.settle_all(done.to_vec()).await;
    assert!(is_superseded(&answers[0]) && answers[1].is_ok(), "{answers:?}");
    assert!(bench.is_done(&key).await);
}
