//! Retention of settled rows.

use std::time::Duration;

use leasehold_claim::{ClaimError, Outcome, Retention};

use super::Env;
use super::bench::{Layout, bounded, is_superseded, row};

const DAY: Duration = Duration::from_secs(86_400);

pub async fn settled_rows_are_kept_by_default(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    bench.settle(&bench.take_one().await.claim, Outcome::Done).await.unwrap();
    let refused = bounded(bench.client().purge(10)).await;
    assert!(matches!(refused, Err(ClaimError::Unsupported(_))), "{refused:?}");
    assert!(bench.is_done(&key).await);
}

pub async fn settled_rows_are_purged_after_their_time(env: &Env) {
    let layout = Layout::new(|spec| spec.settled_at("settled_at").retention(Retention::KeepFor(DAY)));
    let bench = env.table(layout).await;
    let keys = bench.fill(5).await;
    for key in &keys[..3] {
        bench.settle(&bench.take_one().await.claim, Outcome::Done).await.unwrap();
        if *key != keys[2] {
            bench.table.settled_earlier(key, DAY + Duration::from_secs(1)).await;
        }
    }
    bench.take_one().await;
    let client = bench.client();
    assert_eq!(bounded(client.purge(1)).await.unwrap(), 1, "no more than it was asked for");
    assert_eq!(bounded(client.purge(10)).await.unwrap(), 1);
    assert_eq!(bounded(client.purge(10)).await.unwrap(), 0);
    assert!(bench.is_gone(&keys[0]).await && bench.is_gone(&keys[1]).await);
    assert!(bench.is_done(&keys[2]).await, "settled not long ago");
    assert!(bench.is_taken(&keys[3]).await && bench.is_home(&keys[4]).await);
}

pub async fn settled_rows_can_be_deleted_at_once(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.retention(Retention::DeleteOnSettle))).await;
    let keys = bench.fill(3).await;
    let claims = bench.take(3).await;
    bench.settle(&claims[0].claim, Outcome::Done).await.unwrap();
    assert!(bench.is_gone(&keys[0]).await);
    assert!(is_superseded(&bench.settle(&claims[0].claim, Outcome::Done).await));
    bench.settle(&claims[1].claim, Outcome::PutBack).await.unwrap();
    assert!(bench.is_home(&keys[1]).await);
    if let Some(failed) = env.variant.failed() {
        bench.settle(&claims[2].claim, Outcome::Failed("no".to_owned())).await.unwrap();
        assert_eq!(bench.state(&keys[2]).await, failed, "rows that failed stay");
    }
}

pub async fn a_purge_passes_over_locked_rows(env: &Env) {
    let layout = Layout::new(|spec| spec.settled_at("settled_at").retention(Retention::KeepFor(DAY)));
    let bench = env.table(layout).await;
    let keys = bench.fill(2).await;
    for key in &keys {
        bench.settle(&bench.take_one().await.claim, Outcome::Done).await.unwrap();
        bench.table.settled_earlier(key, 2 * DAY).await;
    }
    let lock = bench.lock(&keys[0]).await;
    assert_eq!(bounded(bench.client().purge(10)).await.unwrap(), 1, "without waiting for it");
    assert!(bench.is_gone(&keys[1]).await);
    bench.unlock(lock).await;
    assert_eq!(bounded(bench.client().purge(10)).await.unwrap(), 1);
}

pub async fn a_claim_is_deleted_as_a_whole(env: &Env) {
    let layout = Layout::new(|spec| spec.group("entity").grouped().retention(Retention::DeleteOnSettle));
    let bench = env.table(layout).await;
    let (one, two) = (bench.insert(row(1).entity("a")).await, bench.insert(row(2).entity("a")).await);
    let claimed = bench.take_one().await;
    bench.crash_one(&two).await;
    assert!(is_superseded(&bench.settle(&claimed.claim, Outcome::Done).await));
    assert!(bench.is_taken(&one).await && bench.is_home(&two).await, "nothing was deleted");
    bench.crash_one(&one).await;
    bench.settle(&bench.take_one().await.claim, Outcome::Done).await.unwrap();
    assert!(bench.is_gone(&one).await && bench.is_gone(&two).await);
}
