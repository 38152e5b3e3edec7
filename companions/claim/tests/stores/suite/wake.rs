//! Wake-ups: they shorten waits, but are not needed for correctness.

use std::time::Duration;

use leasehold_claim::Take;
use leasehold_claim::{Pass, PassEnd};
use tokio::time::timeout;

use super::Env;
use super::bench::{bounded, ids, row};

/// Long enough for a notification in transit.
const SOON: Duration = Duration::from_millis(300);

pub async fn an_insert_wakes_a_listener(env: &Env) {
    let bench = env.plain().await;
    let mut wake = bounded(bench.client().listen()).await.unwrap();
    let waiting = tokio::spawn(async move { wake.woken().await });
    tokio::task::yield_now().await;
    bench.insert(row(1)).await;
    bounded(waiting).await.unwrap().unwrap();
    assert_eq!(bench.take(1).await.len(), 1, "what it was woken for is there");
}

pub async fn no_row_is_lost_between_listening_and_waiting(env: &Env) {
    let bench = env.plain().await;
    bench.insert(row(1)).await;
    let mut wake = bounded(bench.client().listen()).await.unwrap();
    assert_eq!(ids(&bench.take(5).await), ["1"], "what came before is found by looking");
    bench.insert(row(2)).await;
    bench.insert(row(3)).await;
    bounded(wake.woken()).await.unwrap();
    assert_eq!(ids(&bench.take(5).await), ["2", "3"]);
}

pub async fn a_wait_that_was_given_up_loses_nothing(env: &Env) {
    let bench = env.plain().await;
    let mut wake = bounded(bench.client().listen()).await.unwrap();
    assert!(timeout(Duration::from_millis(10), wake.woken()).await.is_err());
    bench.insert(row(1)).await;
    bounded(wake.woken()).await.unwrap();
}

pub async fn every_listener_hears(env: &Env) {
    let bench = env.plain().await;
    let mut one = bounded(bench.client().listen()).await.unwrap();
    let mut two = bounded(bench.client().listen()).await.unwrap();
    bench.insert(row(1)).await;
    bounded(one.woken()).await.unwrap();
    bounded(two.woken()).await.unwrap();
    drop(one);
    bench.insert(row(2)).await;
    bounded(two.woken()).await.unwrap();
}

pub async fn a_scan_finds_rows_whose_notifications_are_lost(env: &Env) {
    let bench = env.plain().await;
    bench.table.lose_wake_ups().await;
    let mut wake = bounded(bench.client().listen()).await.unwrap();
    bench.fill(3).await;
    assert!(timeout(SOON, wake.woken()).await.is_err(), "they are lost");
    let mut pass = Pass::new();
    pass.record(&bench.try_take(&Take::up_to(10).after(pass.cursor())).await.unwrap());
    assert_eq!(pass.end(bench.is_pending().await), PassEnd::Found, "looking finds them");
}

pub async fn no_news_no_wake_up(env: &Env) {
    let bench = env.plain().await;
    bench.fill(2).await;
    let mut wake = bounded(bench.client().listen()).await.unwrap();
    bench.is_pending().await;
    assert!(timeout(SOON, wake.woken()).await.is_err(), "looking is no news");
}
