//! How long a holder that gets no answer counts as holding, as the URL says it, on a real server.
#![allow(clippy::unwrap_used, missing_docs)]

use std::time::Duration;

use leasehold::{LockExt as _, Validity};
use test_servers::{Cluster, Proxy, fresh_database};
use tokio::time::timeout;

/// Only a broken client needs this long, and less than the patient one's limit.
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
            // Twelve seconds are more than a session is given for any other statement.
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
        timeout(LONG, confirmed).await.unwrap();
        guard.release().await.unwrap();
        lock.close().await.unwrap();
    }
}
