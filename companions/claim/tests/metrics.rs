//! The exported metrics of claims, which `docs/metrics.md` describes.
#![allow(clippy::unwrap_used)]

#[path = "claimer/common.rs"]
mod common;

use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Probe, builder, insert, paused, with_attempts, within};
use leasehold_claim::{ClaimStore as _, Claimer, MemoryClaims, MemoryClock, Outcome, Retention, Take};
use metrics_exporter_prometheus::PrometheusBuilder;
use tokio::time::sleep;

#[tokio::test(start_paused = true)]
async fn what_becomes_of_claims_is_counted() {
    let recorder = PrometheusBuilder::new().with_recommended_naming(true).build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).unwrap();
    let claims = MemoryClaims::with_clock(builder().build().unwrap(), MemoryClock::stopped()).unwrap();
    insert(&claims, 1..=6);
    let store = Probe::of(claims.clone());
    let claimer: Claimer = paused(&store).start().unwrap();
    let label = store.to_string();
    let see = |series: &str, more: &str, value: &str| {
        let line = format!("leasehold_claim_{series}{{store=\"{label}\"{more}}} {value}\n");
        let all = handle.render();
        assert!(all.contains(&line), "no {line}in {all}");
    };
    for outcome in ["done", "failed", "retry", "put back", "snooze", "other state"] {
        see("ended_total", &format!(",outcome=\"{outcome}\""), "0");
    }
    see("lost_total", ",reason=\"expired\"", "0");
    see("purged_total", "", "0");

    let one = within("a claim", claimer.next()).await.unwrap();
    let two = within("a claim", claimer.next()).await.unwrap();
    see("taken_total", "", "2");
    see("at_work", "", "2");
    see("ahead", "", "0");
    sleep(Duration::from_secs(3)).await;
    one.done().await.unwrap();
    see("ended_total", ",outcome=\"done\"", "1");
    see("work_time_seconds_count", "", "1");
    let sum = format!("leasehold_claim_work_time_seconds_sum{{store=\"{label}\"}} 3");
    assert!(handle.render().contains(&sum), "{}", handle.render());
    two.settle(Outcome::Failed("no".into())).await.unwrap();
    see("ended_total", ",outcome=\"failed\"", "1");
    see("at_work", "", "0");

    // The row of a worker's claim is settled by hand.
    let three = within("a claim", claimer.next()).await.unwrap();
    let key = three.row().key.clone();
    claims.update(&key, "status", "complete".into()).unwrap();
    three.done().await.unwrap_err();
    see("lost_total", ",reason=\"gone\"", "1");
    see("ended_total", ",outcome=\"done\"", "1");
    within("the end", claimer.close()).await.unwrap();
    see("at_work", "", "0");
    see("ahead", "", "0");

    // Row counts are exported when a client calls `stats`.
    claims.stats(&Take::up_to(100)).await.unwrap();
    let rows = |condition: &str, value: &str| {
        let line = format!(
            "leasehold_claim_rows{{store=\"{claims}\",queue=\"all\",condition=\"{condition}\"}} {value}\n"
        );
        assert!(handle.render().contains(&line), "no {line}in {}", handle.render());
    };
    rows("ready", "3");
    rows("failed", "1");
}

/// Counts of the other ends of a claim, and of background work.
#[tokio::test(start_paused = true)]
async fn what_nobody_waits_for_is_counted_too() {
    const DAY: Duration = Duration::from_secs(86_400);
    let recorder = PrometheusBuilder::new().with_recommended_naming(true).build_recorder();
    let handle = recorder.handle();
    // A local recorder suffices, because everything runs on this thread.
    let _recorder = metrics::set_default_local_recorder(&recorder);
    let spec = builder().settled_at("settled_at").retention(Retention::KeepFor(DAY)).build().unwrap();
    let claims = MemoryClaims::with_clock(spec, MemoryClock::stopped()).unwrap();
    insert(&claims, 1..=3);
    let store = Probe::of(claims.clone());
    let claimer: Claimer = paused(&store).start().unwrap();
    let see = |series: &str, more: &str, value: &str| {
        let line = format!("leasehold_claim_{series}{{store=\"{store}\"{more}}} {value}\n");
        let all = handle.render();
        assert!(all.contains(&line), "no {line}in {all}");
    };
    let hour = Duration::from_secs(3_600);
    within("a claim", claimer.next()).await.unwrap().retry("again", hour).await.unwrap();
    see("ended_total", ",outcome=\"retry\"", "1");
    within("a claim", claimer.next()).await.unwrap().snooze(hour).await.unwrap();
    see("ended_total", ",outcome=\"snooze\"", "1");
    within("a claim", claimer.next()).await.unwrap().put_back().await.unwrap();
    see("ended_total", ",outcome=\"put back\"", "1");
    within("a claim", claimer.next()).await.unwrap().done().await.unwrap();
    see("taken_total", "", "4");

    // Two leases of another worker end, and one of the rows has no attempt left.
    insert(&claims, [7]);
    with_attempts(&claims, 8, 1);
    let lease = Duration::from_secs(10);
    assert_eq!(claims.take(&Take::up_to(2).lease(lease)).await.unwrap().claims.len(), 2);
    claims.clock().advance(lease);
    sleep(hour).await;
    see("swept_total", ",outcome=\"returned\"", "1");
    see("swept_total", ",outcome=\"exhausted\"", "1");

    see("purged_total", "", "0");
    claims.clock().advance(DAY);
    sleep(hour * 2).await;
    see("purged_total", "", "1");

    see("failures_total", "", "0");
    store.down.store(true, Ordering::SeqCst);
    sleep(hour).await;
    let none = format!("leasehold_claim_failures_total{{store=\"{store}\"}} 0\n");
    assert!(!handle.render().contains(&none), "{}", handle.render());
    store.down.store(false, Ordering::SeqCst);
    within("the end", claimer.close()).await.unwrap();
}

/// The page describes each metric that is exported, with its labels.
#[test]
fn the_page_describes_them() {
    let page = include_str!("../../../docs/metrics.md");
    let code = include_str!("../src/metrics.rs");
    let named: Vec<&str> = code.split('"').filter(|text| text.starts_with("leasehold.claim.")).collect();
    assert!(named.len() >= 11, "{named:?}");
    for name in named {
        let row = page.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
        assert!(row.is_some_and(|row| row.contains("`store`")), "{name} is not on the page");
    }
}
