//! The URL's limit after which a holder without an answer loses its lock, on a real server.
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "support/command.rs"]
mod support;

use std::time::Duration;

use leasehold::{LockExt as _, Validity};
use test_bounds::within;
use test_servers::{Cluster, Proxy, fresh_database};
use tokio::time::timeout;

/// Longer than any working client needs, but less than the limit of the patient client.
const LONG: Duration = Duration::from_secs(40);

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_server_costs_the_impatient_their_locks_in_order_and_not_the_patient() {
    let database = fresh_database().await;
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let url = proxy.url(database.url());
    let (_, rest) = url.split_once("://").unwrap();
    let mut all = Vec::new();
    for (scheme, confirm) in [
        ("postgres", "&confirm_every=1s"),
        ("postgres+advisory-xact", "&confirm_every=1s"),
        ("postgres+row", ""),
    ] {
        let mut held = Vec::new();
        for seconds in [3, 12, 60] {
            let url = format!("{scheme}://{rest}?install=true&lost_after={seconds}s{confirm}");
            let lock = leasehold::connect(&url).await.unwrap();
            assert_eq!(lock.capabilities().loss_detection, Duration::from_secs(seconds), "{scheme}");
            let guard = lock.key(format!("{scheme} {seconds}")).acquire().await.unwrap();
            held.push((guard, lock));
        }
        all.push((scheme, held));
    }
    proxy.stall();
    for lost in 0..2 {
        for (scheme, held) in &all {
            let (guard, _) = &held[lost];
            assert!(timeout(LONG, guard.lost()).await.is_ok(), "{scheme}: {guard:?}");
            // Twelve seconds are more than a session has for any other statement.
            for (later, _) in &held[lost + 1..] {
                assert_ne!(later.validity(), Validity::Lost, "{scheme}, after {lost}: {later:?}");
            }
        }
    }
    proxy.restore();
    for (scheme, mut held) in all {
        let (guard, lock) = held.pop().unwrap();
        let confirmed = async {
            while guard.validity() != Validity::Valid {
                assert_ne!(guard.validity(), Validity::Lost, "{scheme}: {guard:?}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        within(LONG, "not ended", confirmed).await;
        guard.release().await.unwrap();
        lock.close().await.unwrap();
    }
}

/// Only an operator releases a mutex row whose holder is unconfirmed, so no other client can have run. A lease ends by
/// itself.
#[tokio::test(flavor = "multi_thread")]
async fn whoever_loses_a_row_unconfirmed_is_told_that_it_may_stay_shut() {
    let database = fresh_database().await;
    for (scheme, parameters, told, not_told) in [
        ("postgres+row", "lost_after=3s", "release KEY --force --holder ID", "another client might have run"),
        ("postgres+ttl", "ttl=3s", "another client might have run", "--force"),
    ] {
        let proxy = Proxy::start(Cluster::shared().address()).await;
        let url = proxy.url(database.url());
        let (_, rest) = url.split_once("://").unwrap();
        let mut tool = support::tool();
        tool.env("LEASEHOLD_URL", format!("{scheme}://{rest}?install=true&{parameters}"));
        tool.args(["run", "k", "--", "sh", "-c", "echo begun; read line"]);
        let said = tokio::task::spawn_blocking(move || {
            let mut tool = support::Beside::start(&mut tool);
            assert_eq!(tool.line(), "begun");
            proxy.stall();
            let said = tool.rest_of_stderr();
            (tool.code(), said)
        });
        let (code, said) = within(2 * LONG, "not ended", said).await.unwrap();
        let error = said.lines().find(|line| line.contains("was lost before")).unwrap_or_default();
        assert!(code == 76 && error.contains(told), "{scheme}: {code} {said}");
        assert!(!error.contains(not_told), "{scheme}: {said}");
    }
}
