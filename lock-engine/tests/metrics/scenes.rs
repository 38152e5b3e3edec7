//! Grants, waits, renewals and the labels.

use std::time::Duration;

use leasehold_api::{ErrorKind, LockExt as _, LockKey, WindowOutcome};
use leasehold_engine::{ClientSetup, Engine, Fault, Op};
use leasehold_memory::MemoryStore;
use tokio::time::sleep;

use crate::scrape::{Of, alone, counts, recorder, scrape};

const SECOND: Duration = Duration::from_secs(1);

/// Returns a store with this name as the label of its metrics.
pub(crate) fn store(name: &str) -> MemoryStore {
    recorder();
    MemoryStore::named(name)
}

fn near(value: f64, expected: f64) {
    assert!((value - expected).abs() < 0.05, "{value} is not about {expected}");
}

#[tokio::test]
async fn every_series_begins_at_zero() {
    let _alone = alone().await;
    let lock = store("zero").client().unwrap();
    let of_store = [("store", "memory:zero")];
    let none = Of { store: "memory:zero", class: "none" };
    for name in ["failures", "renewals", "releases", "release_retries", "undone"] {
        assert_eq!(scrape().value(&format!("leasehold_lock_{name}_total"), &of_store), 0.0, "{name}");
    }
    for name in ["wait_time_seconds", "hold_time_seconds", "renewal_margin"] {
        assert_eq!(none.histogram(&format!("leasehold_lock_{name}")), (0.0, 0.0), "{name}");
    }
    assert_eq!((none.held(), none.waiting()), (0.0, 0.0));
    let assert_all_zero = |class| {
        let scrape = scrape();
        let labels = |label, value| [("store", "memory:zero"), ("key_class", class), (label, value)];
        for outcome in ["contended", "timeout", "not due", "error", "cancelled"] {
            let value = scrape.value("leasehold_lock_attempts_total", &labels("outcome", outcome));
            assert_eq!(value, 0.0, "{outcome}");
        }
        let reasons =
            ["expired", "forced release", "session lost", "gone", "closed", "runtime gone", "held too long"];
        for reason in reasons {
            assert_eq!(scrape.value("leasehold_lock_lost_total", &labels("reason", reason)), 0.0, "{reason}");
        }
    };
    assert_all_zero("none");
    assert_eq!(none.attempts(), []);
    // The first key of a class creates all of its series, so that its first loss is an increase.
    lock.key("order:1").acquire().await.unwrap().release().await.unwrap();
    assert_all_zero("order");
    assert_eq!(Of { class: "order", ..none }.attempts(), counts(&[("granted", 1.0)]));
}

#[tokio::test]
async fn everything_is_described_with_its_type() {
    let _alone = alone().await;
    let _lock = store("described").client().unwrap();
    let scrape = scrape();
    let ours = |(name, what): (&String, &String)| {
        let name = name.strip_prefix("leasehold_lock_")?;
        Some((name.to_owned(), what.clone()))
    };
    let types: Vec<_> = scrape.types.iter().filter_map(ours).collect();
    let expected = [
        ("attempts_total", "counter"),
        ("failures_total", "counter"),
        ("held", "gauge"),
        ("hold_time_seconds", "histogram"),
        ("lost_total", "counter"),
        ("release_retries_total", "counter"),
        ("releases_total", "counter"),
        ("renewal_margin", "histogram"),
        ("renewals_total", "counter"),
        ("undone_total", "counter"),
        ("wait_time_seconds", "histogram"),
        ("waiting", "gauge"),
    ];
    assert_eq!(types, expected.map(|(name, what)| (name.to_owned(), what.to_owned())));
    for (name, _) in types {
        let help = &scrape.help[&format!("leasehold_lock_{name}")];
        assert!(help.len() > 15 && help.ends_with('.'), "{name}: {help}");
    }
}

#[tokio::test(start_paused = true)]
async fn waits_holds_and_how_attempts_ended() {
    let _alone = alone().await;
    let store = store("waits");
    let (a, b) = (store.client().unwrap(), store.client().unwrap());
    let order = Of { store: "memory:waits", class: "order" };
    let guard = a.key("order:1").acquire().await.unwrap();
    assert_eq!((order.held(), order.waiting()), (1.0, 0.0));
    assert!(b.key("order:1").try_acquire().await.unwrap().is_none());
    let mut timed_out = Box::pin(b.key("order:1").wait(2 * SECOND).acquire());
    let mut patient = Box::pin(b.key("order:1").wait_forever().acquire());
    tokio::select! {
        biased;
        _ = &mut timed_out => panic!("granted while held"),
        _ = &mut patient => panic!("granted while held"),
        () = sleep(SECOND) => assert_eq!((order.held(), order.waiting()), (1.0, 2.0)),
    }
    // A client that starts later does not reset the gauges.
    let _late = store.client().unwrap();
    assert_eq!((order.held(), order.waiting()), (1.0, 2.0));
    let patient = tokio::join!(async { timed_out.await.unwrap_err() }, async {
        sleep(4 * SECOND).await;
        assert_eq!(order.waiting(), 1.0);
        guard.release().await.unwrap();
        patient.await.unwrap()
    });
    assert_eq!(patient.0.kind(), ErrorKind::Timeout);
    assert_eq!((order.held(), order.waiting()), (1.0, 0.0));
    sleep(2 * SECOND).await;
    drop(patient.1);
    order.assert_at_rest();
    assert_eq!(order.attempts(), counts(&[("contended", 1.0), ("granted", 2.0), ("timeout", 1.0)]));
    assert_eq!(order.lost(), []);
    let (times, waited) = order.histogram("leasehold_lock_wait_time_seconds");
    assert_eq!(times, 2.0);
    near(waited, 5.0);
    near(order.histogram("leasehold_lock_hold_time_seconds").1, 7.0);
    assert_eq!(scrape().value("leasehold_lock_releases_total", &[("store", "memory:waits")]), 2.0);
}

#[tokio::test(start_paused = true)]
async fn what_is_not_due_and_what_fails() {
    let _alone = alone().await;
    let store = store("fails");
    let client = store.client_with(ClientSetup::new()).unwrap();
    let jobs = Of { store: "memory:fails", class: "job" };
    let once = || client.lock.key("job:1").at_most_once_per(60 * SECOND).run(async |_| ());
    assert!(matches!(once().await.unwrap(), WindowOutcome::Due(())));
    assert!(matches!(once().await.unwrap(), WindowOutcome::NotDue { .. }));
    client.faults.script(Op::Acquire, Fault::Error(ErrorKind::Unavailable));
    client.lock.key("job:2").try_acquire().await.unwrap_err();
    assert_eq!(jobs.attempts(), counts(&[("error", 1.0), ("granted", 1.0), ("not due", 1.0)]));
    let guard = client.lock.key("job:3").acquire().await.unwrap();
    client.faults.script(Op::Release, Fault::Error(ErrorKind::Unavailable));
    client.faults.script(Op::Release, Fault::Error(ErrorKind::Unavailable));
    guard.release().await.unwrap_err();
    sleep(60 * SECOND).await;
    jobs.assert_at_rest();
    let scrape = scrape();
    let value = |name| scrape.value(name, &[("store", "memory:fails")]);
    assert_eq!(value("leasehold_lock_failures_total"), 2.0);
    assert!(value("leasehold_lock_release_retries_total") >= 1.0, "{}", scrape.text);
    assert_eq!(value("leasehold_lock_releases_total"), 2.0);
}

#[tokio::test(start_paused = true)]
async fn callers_that_are_cancelled() {
    let _alone = alone().await;
    let store = store("cancelled");
    let client = store.client_with(ClientSetup::new()).unwrap();
    let orders = Of { store: "memory:cancelled", class: "order" };
    let outside = store.occupy(&LockKey::new("order:1").unwrap()).unwrap();
    // The first call waits at the store, the second behind the first.
    let mut first = Box::pin(client.lock.key("order:1").wait_forever().acquire());
    let mut second = Box::pin(client.lock.key("order:1").wait_forever().acquire());
    tokio::select! {
        biased;
        _ = &mut first => panic!("granted while held"),
        _ = &mut second => panic!("granted while held"),
        () = sleep(SECOND) => assert_eq!(orders.waiting(), 2.0),
    }
    drop(second);
    assert_eq!(orders.waiting(), 1.0);
    drop(first);
    orders.assert_at_rest();
    assert_eq!(orders.attempts(), counts(&[("cancelled", 2.0)]));
    drop(outside);
    // A call that is never polled is not counted.
    drop(client.lock.key("order:1").acquire());
    // A grant whose caller has gone is undone and never counts as held.
    client.faults.script(Op::Acquire, Fault::DelayReply(SECOND));
    tokio::time::timeout(SECOND / 2, client.lock.key("order:2").acquire()).await.unwrap_err();
    sleep(5 * SECOND).await;
    orders.assert_at_rest();
    assert_eq!(orders.attempts(), counts(&[("cancelled", 3.0)]));
    assert_eq!(orders.histogram("leasehold_lock_wait_time_seconds"), (0.0, 0.0));
    assert!(scrape().value("leasehold_lock_undone_total", &[("store", "memory:cancelled")]) >= 1.0);
}

#[tokio::test(start_paused = true)]
async fn several_keys_are_one_attempt_and_as_many_holds() {
    let _alone = alone().await;
    let store = store("several");
    let (lock, other) = (store.client().unwrap(), store.client().unwrap());
    let of = |class| Of { store: "memory:several", class };
    let outside = other.key("y:1").acquire().await.unwrap();
    let keys = ["z:1", "y:1", "x:1"].map(|key| LockKey::new(key).unwrap());
    let (guards, ()) = tokio::join!(lock.keys(&keys).wait_forever().acquire(), async {
        sleep(3 * SECOND).await;
        // The keys before the awaited one are held.
        let sum = |name| scrape().sum(name, &[("store", "memory:several")]);
        assert_eq!((of("x").held(), of("y").held(), sum("leasehold_lock_held")), (1.0, 1.0, 2.0));
        assert_eq!((of("x").waiting(), sum("leasehold_lock_waiting")), (1.0, 1.0));
        outside.release().await.unwrap();
    });
    assert_eq!((of("x").held(), of("y").held(), of("z").held()), (1.0, 1.0, 1.0));
    assert_eq!(of("x").attempts(), counts(&[("granted", 1.0)]));
    assert_eq!(of("z").attempts(), []);
    near(of("x").histogram("leasehold_lock_wait_time_seconds").1, 0.0);
    near(of("y").histogram("leasehold_lock_wait_time_seconds").1, 3.0);
    // `z` was granted at first and released again. Its wait time still counts from the request.
    assert_eq!(of("z").histogram("leasehold_lock_wait_time_seconds").0, 1.0);
    near(of("z").histogram("leasehold_lock_wait_time_seconds").1, 3.0);
    guards.unwrap().release().await.unwrap();
    ["x", "y", "z"].iter().for_each(|class| of(class).assert_at_rest());
}

#[tokio::test(start_paused = true)]
async fn the_margin_of_renewals_says_how_near_a_loss_was() {
    let _alone = alone().await;
    let store = store("margin").default_ttl(30 * SECOND);
    let client = store.client_with(ClientSetup::new()).unwrap();
    let leader = Of { store: "memory:margin", class: "leader" };
    let guard = client.lock.key("leader:1").acquire().await.unwrap();
    sleep(35 * SECOND).await;
    let (times, sum) = leader.histogram("leasehold_lock_renewal_margin");
    assert_eq!(times, 3.0);
    // A tenth of the lease is kept for clock differences. A third of it, or up to a tenth less, has passed.
    let mean = sum / times;
    assert!((0.56..=0.61).contains(&mean), "{mean}");
    assert_eq!(scrape().value("leasehold_lock_renewals_total", &[("store", "memory:margin")]), 3.0);
    // The store is silent for half of the lease.
    client.faults.silence(true);
    sleep(15 * SECOND).await;
    client.faults.silence(false);
    // Long enough for the repeated renewal, and too short for the next one.
    sleep(5 * SECOND).await;
    assert!(guard.validity().is_held());
    let (more, low) = leader.histogram("leasehold_lock_renewal_margin");
    assert_eq!(more, 4.0);
    assert!((0.0..0.3).contains(&(low - sum)), "{}", low - sum);
    let low_bucket = |le| {
        let labels = [("store", leader.store), ("key_class", leader.class), ("le", le)];
        scrape().value("leasehold_lock_renewal_margin_bucket", &labels)
    };
    assert_eq!((low_bucket("0.3"), low_bucket("+Inf")), (1.0, 4.0));
    guard.release().await.unwrap();
    leader.assert_at_rest();
}

#[tokio::test]
async fn no_label_is_a_key() {
    let _alone = alone().await;
    let store = store("labels");
    let lock = store.client().unwrap();
    for key in ["5b1f4a62", "5b1f4a63"] {
        lock.key(key).acquire().await.unwrap().release().await.unwrap();
    }
    lock.key("invoice:5b1f4a64").acquire().await.unwrap().release().await.unwrap();
    let by_tenant: fn(&LockKey) -> &str = |key| key.as_str().split(':').nth(1).unwrap_or_default();
    let other = Engine::builder(store.backend()).key_class(by_tenant).start().unwrap();
    other.key("app:orders:5b1f4a65").acquire().await.unwrap().release().await.unwrap();
    assert!(!scrape().text.contains("5b1f4a6"), "{}", scrape().text);
    let of = |class| Of { store: "memory:labels", class };
    assert_eq!(of("none").attempts(), counts(&[("granted", 2.0)]));
    assert_eq!(of("invoice").attempts(), counts(&[("granted", 1.0)]));
    assert_eq!(of("orders").attempts(), counts(&[("granted", 1.0)]));
    ["none", "invoice", "orders"].iter().for_each(|class| of(class).assert_at_rest());
}
