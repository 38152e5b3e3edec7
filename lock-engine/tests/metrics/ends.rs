//! Every end of a grant lowers the gauges that its start raised.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold_api::{Lock as _, LockExt as _, LockKey, LossReason};
use leasehold_engine::ClientSetup;
use tokio::time::sleep;

use crate::scenes::store;
use crate::scrape::{Of, alone, alone_blocking, counts, scrape};

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn losses_by_reason() {
    let _alone = alone().await;
    let store = store("losses").default_ttl(30 * SECOND);
    let client = store.client_with(ClientSetup::new()).unwrap();
    let of = |class| Of { store: "memory:losses", class };
    let lock = &client.lock;

    let guard = lock.key("forced:1").acquire().await.unwrap();
    assert_eq!(of("forced").held(), 1.0);
    assert!(lock.admin().unwrap().force_release(guard.key(), guard.holder()).await.unwrap());
    assert_eq!(guard.lost().await, LossReason::ForcedRelease);
    assert_eq!(of("forced").lost(), counts(&[("forced release", 1.0)]));
    // Dropping the guard after the loss does not count as a second end.
    drop(guard);

    let guard = lock.key("long:1").max_hold(5 * SECOND).acquire().await.unwrap();
    assert_eq!(guard.lost().await, LossReason::HeldTooLong);
    assert_eq!(of("long").lost(), counts(&[("held too long", 1.0)]));
    let held = of("long").histogram("leasehold_lock_hold_time_seconds").1;
    assert!((4.9..5.2).contains(&held), "{held}");
    guard.release().await.unwrap_err();

    let guard = lock.key("session:1").acquire().await.unwrap();
    assert!(store.lose(guard.key(), LossReason::SessionLost));
    assert_eq!(of("session").lost(), counts(&[("session lost", 1.0)]));

    let guard = lock.key("gone:1").acquire().await.unwrap();
    assert!(store.purge(guard.key()));
    assert_eq!(guard.lost().await, LossReason::Gone);
    assert_eq!(of("gone").lost(), counts(&[("gone", 1.0)]));

    // These losses are not reported, so the release finds them.
    client.faults.mute(true);
    for i in 1..=2 {
        let guard = lock.key("found:1").acquire().await.unwrap();
        assert!(store.purge(guard.key()));
        if i == 1 {
            guard.release().await.unwrap_err();
        } else {
            drop(guard);
        }
        assert_eq!(of("found").lost(), counts(&[("gone", f64::from(i))]));
    }
    client.faults.mute(false);

    let guard = lock.key("expired:1").acquire().await.unwrap();
    client.faults.silence(true);
    assert_eq!(guard.lost().await, LossReason::Expired);
    client.faults.silence(false);
    assert_eq!(of("expired").lost(), counts(&[("expired", 1.0)]));

    let guard = lock.key("closed:1").acquire().await.unwrap();
    assert_eq!(of("closed").held(), 1.0);
    lock.close().await.unwrap();
    assert_eq!(of("closed").lost(), counts(&[("closed", 1.0)]));
    drop(guard);
    lock.key("closed:1").acquire().await.unwrap_err();
    assert_eq!(of("closed").attempts(), counts(&[("error", 1.0), ("granted", 1.0)]));

    for class in ["forced", "long", "session", "gone", "expired", "closed"] {
        of(class).assert_at_rest();
        assert_eq!(of(class).histogram("leasehold_lock_hold_time_seconds").0, 1.0, "{class}");
    }
}

#[test]
fn a_runtime_that_ends() {
    let _alone = alone_blocking();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let orders = Of { store: "memory:runtime", class: "order" };
    let lock = runtime.block_on(async { store("runtime").client().unwrap() });
    let guard = runtime.block_on(lock.key("order:1").acquire()).unwrap();
    assert_eq!(orders.held(), 1.0);
    drop(runtime);
    assert!(!guard.validity().is_held());
    assert_eq!(orders.lost(), counts(&[("runtime gone", 1.0)]));
    drop(guard);
    orders.assert_at_rest();
}

/// The store reports losses while grants are on their way to the caller.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn losses_that_race_with_their_grants() {
    const GRANTS: u32 = 20_000;
    let _alone = alone().await;
    let store = store("races");
    let lock = store.client().unwrap();
    let orders = Of { store: "memory:races", class: "order" };
    let key = LockKey::new("order:1").unwrap();
    let done = AtomicBool::new(false);
    let mut granted = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                store.lose(&key, LossReason::ForcedRelease);
            }
        });
        let acquiring = async {
            for _ in 0..GRANTS {
                match lock.key(&key).acquire().await {
                    Ok(guard) => {
                        granted += 1;
                        drop(guard);
                    }
                    // The grant was lost before its delivery.
                    Err(error) => assert_eq!(error.kind(), leasehold_api::ErrorKind::Lost, "{error}"),
                }
            }
            done.store(true, Ordering::Relaxed);
        };
        tokio::task::block_in_place(|| tokio::runtime::Handle::current().block_on(acquiring));
    });
    orders.assert_at_rest();
    let mut counted = vec![("error", f64::from(GRANTS - granted)), ("granted", f64::from(granted))];
    // An outcome that never occurred has no counter. On a busy machine the other thread can be late each time.
    counted.retain(|(_, count)| *count > 0.0);
    assert_eq!(orders.attempts(), counts(&counted));
    assert!(orders.histogram("leasehold_lock_wait_time_seconds").0 >= f64::from(granted));
}

/// Closing ends all attempts and grants: in the queue, at the store and delivered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grants_that_race_with_a_close() {
    let _alone = alone().await;
    let store = store("closing");
    for round in 0..200 {
        let lock = store.client().unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        let lock = std::sync::Arc::new(lock);
        for task in 0..4 {
            let lock = std::sync::Arc::clone(&lock);
            tasks.spawn(async move {
                while let Ok(guard) = lock.key(format!("order:{}", task % 2)).wait_forever().acquire().await {
                    drop(guard);
                    tokio::task::yield_now().await;
                }
            });
        }
        sleep(Duration::from_micros(round * 10)).await;
        lock.close().await.unwrap();
        while let Some(ended) = tasks.join_next().await {
            ended.unwrap();
        }
    }
    Of { store: "memory:closing", class: "order" }.assert_at_rest();
    let errors = [("store", "memory:closing"), ("outcome", "error")];
    assert_eq!(scrape().sum("leasehold_lock_attempts_total", &errors), 800.0);
}
