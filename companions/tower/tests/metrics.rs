//! The metrics in a scrape.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/layers.rs"]
mod common;

use common::*;
use http::StatusCode;
use leasehold_api::LockExt as _;
use metrics_exporter_prometheus::PrometheusBuilder;
use tower::Layer as _;

#[tokio::test]
async fn requests_are_counted_by_outcome() {
    let recorder = PrometheusBuilder::new().build_recorder();
    let handle = recorder.handle();
    metrics::set_global_recorder(recorder).unwrap();
    let (_, lock) = memory();
    let layer = layer(&lock).fail_fast();
    let line = |outcome: &str, n: u64| {
        format!("leasehold_tower_requests{{store=\"{lock}\",outcome=\"{outcome}\"}} {n}\n")
    };
    let outcomes = ["granted", "no key", "contended", "too many", "nested", "error", "cancelled"];
    let before = handle.render();
    for outcome in outcomes {
        assert!(before.contains(&line(outcome, 0)), "{outcome} begins at zero: {before}");
    }

    let service = layer.layer(answering(StatusCode::NOT_FOUND));
    send(&service, get("/a")).await;
    send(&service, get("/b")).await;
    send(&service, get("/")).await;
    let held = lock.key("a").acquire().await.unwrap();
    send(&service, get("/a")).await;
    drop(held);
    let after = handle.render();
    for (outcome, n) in [("granted", 2), ("no key", 1), ("contended", 1), ("error", 0)] {
        assert!(after.contains(&line(outcome, n)), "{outcome}: {after}");
    }
}

/// The page describes each metric that is exported, with its labels.
#[test]
fn the_page_describes_them() {
    let page = include_str!("../../../docs/metrics.md");
    let code = include_str!("../src/metrics.rs");
    let named: Vec<&str> = code.split('"').filter(|text| text.starts_with("leasehold.tower.")).collect();
    assert_eq!(named.len(), 2, "{named:?}");
    for name in named {
        let row = page.lines().find(|line| line.starts_with(&format!("|`{name}`|")));
        assert!(row.is_some_and(|row| row.contains("`store`")), "{name} is not on the page");
    }
}
