//! Lists for operators.

use std::time::Duration;

use leasehold_claim::ClaimError;

use super::Env;
use super::bench::{Layout, bounded, row};

pub async fn taken_rows_the_longest_first(env: &Env) {
    let layout = Layout::new(|spec| spec.group("entity").attempts("attempts_left"));
    let bench = env.table(layout).await;
    for id in [3, 1, 2] {
        bench.insert(row(id).entity("a").attempts(2)).await;
    }
    let (first, second) = (bench.take_one().await, bench.take_one().await);
    let taken = bounded(bench.client().taken(10)).await.unwrap();
    let found: Vec<String> = taken.iter().map(|row| row.key.id.to_string()).collect();
    assert_eq!(found, ["1", "2"], "and no row that nobody has");
    assert_eq!(taken[0].owner, Some(first.claim.owner));
    assert_eq!(taken[1].epoch, Some(second.rows[0].epoch));
    assert_eq!(taken[0].state.as_str(), env.variant.taken());
    assert_eq!((taken[0].group.as_deref(), taken[0].attempts_left), (Some("a"), Some(1)));
    assert!(taken[0].held_for.is_some_and(|time| time < Duration::from_secs(60)), "{taken:?}");
    assert!(taken[0].remaining.is_some_and(|time| time <= Duration::from_secs(30)), "{taken:?}");
}

pub async fn taken_rows_no_more_than_the_limit(env: &Env) {
    let bench = env.plain().await;
    bench.fill(4).await;
    bench.take(3).await;
    assert_eq!(bounded(bench.client().taken(2)).await.unwrap().len(), 2);
    assert_eq!(bounded(bench.client().taken(9)).await.unwrap().len(), 3);
}

pub async fn what_has_ended_is_still_listed(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    bench.take_one().await;
    bench.expire(&key).await;
    let taken = bounded(bench.client().taken(5)).await.unwrap();
    assert_eq!((taken.len(), taken[0].remaining), (1, Some(Duration::ZERO)), "until somebody sweeps");
    bench.sweep().await;
    assert!(bounded(bench.client().taken(5)).await.unwrap().is_empty());
}

pub async fn nothing_is_listed_without_a_lease(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec).without_lease()).await;
    let refused = bounded(bench.client().taken(5)).await;
    assert!(matches!(refused, Err(ClaimError::Unsupported(_))), "{refused:?}");
}
