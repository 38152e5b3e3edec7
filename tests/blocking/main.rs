//! Locks for programs without an async runtime.

#![allow(clippy::unwrap_used)]
#![cfg(all(
    feature = "blocking",
    feature = "memory",
    feature = "file",
    feature = "postgres-advisory",
    feature = "postgres-row",
    feature = "postgres-ttl",
    feature = "etcd"
))]

mod adapter;
mod losses;
mod silence;
mod suite;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc;
use std::time::Duration;

use leasehold::blocking::{self, Lock, connect};
use leasehold::{ErrorKind, LossReason, RunError, Validity, WindowOutcome};

/// A real-time bound that only says that something ends at all.
const LIVENESS: Duration = Duration::from_secs(60);

/// Returns the URL of a store in `database`, with `parameters` such as `&ttl=1h`.
fn url_of(database: &test_servers::Database, scheme: &str, parameters: &str) -> String {
    let url = database.url().replacen("postgres", scheme, 1);
    format!("{url}{}install=true{parameters}", if url.contains('?') { '&' } else { '?' })
}

/// Two clients of one store in this process.
fn two(name: &str) -> [Lock; 2] {
    [(); 2].map(|()| connect(&format!("memory:{name}")).unwrap())
}

#[test]
fn a_thread_waits_until_another_releases() {
    let [a, b] = two("a_thread_waits");
    let guard = a.key("k").acquire().unwrap();
    assert!(b.key("k").try_acquire().unwrap().is_none());
    assert_eq!(b.key("k").wait(Duration::ZERO).acquire().unwrap_err().kind(), ErrorKind::Timeout);
    let token = guard.token();
    let waiter = std::thread::spawn(move || b.key("k").wait(LIVENESS).acquire().map(|guard| guard.token()));
    guard.release().unwrap();
    assert!(waiter.join().unwrap().unwrap() > token);
}

#[test]
fn a_dropped_guard_has_released_its_keys_when_the_drop_returns() {
    let [a, b] = two("a_dropped_guard");
    drop(a.key("k").acquire().unwrap());
    let guards = b.keys(["k", "l"]).try_acquire().unwrap().unwrap();
    assert_eq!(guards.iter().map(|guard| guard.key().as_str()).collect::<Vec<_>>(), ["k", "l"]);
    assert!(a.keys(["l", "m"]).try_acquire().unwrap().is_none());
    guards.confirm().unwrap();
    drop(guards);
    a.keys(["k", "l"]).acquire().unwrap().release().unwrap();
}

#[test]
fn every_way_out_of_a_run_releases() {
    let lock = connect("memory:").unwrap();
    assert_eq!(lock.key("k").run(|guard| guard.key().to_string()).unwrap(), "k");
    let panicked = catch_unwind(AssertUnwindSafe(|| lock.key("k").run(|_| panic!("the body fails"))));
    assert!(panicked.is_err());
    assert_eq!(lock.key("k").try_run(|_| 1).unwrap(), Some(1));
    assert_eq!(lock.keys(["k", "l"]).run(|guards| guards.len()).unwrap(), 2);
    let held = lock.key("k").acquire().unwrap();
    assert_eq!(lock.key("k").try_run(|_| 1).unwrap(), None);
    let not_run = lock.key("k").wait(Duration::ZERO).run(|_| 1).unwrap_err();
    assert!(matches!(not_run, RunError::NotRun(_)) && not_run.is_retryable());
    held.release().unwrap();
}

#[test]
fn a_run_whose_lock_was_lost_returns_its_value_with_the_error() {
    let lock = connect("memory:").unwrap();
    let outcome = lock.key("k").max_hold(Duration::from_millis(1)).run(|guard| {
        let (sender, losses) = mpsc::channel();
        guard.when_lost(move |reason| sender.send(reason).unwrap());
        losses.recv_timeout(LIVENESS).unwrap()
    });
    let Err(RunError::Unconfirmed { value, error }) = outcome else { panic!("{outcome:?}") };
    assert_eq!((value, error.kind()), (LossReason::HeldTooLong, ErrorKind::Lost));
}

#[test]
fn a_window_is_due_once() {
    let lock = connect("memory:").unwrap();
    let hourly = || lock.key("k").at_most_once_per(Duration::from_secs(3600));
    assert_eq!(hourly().run(|_| 1).unwrap(), WindowOutcome::Due(1));
    assert!(matches!(hourly().acquire().unwrap(), WindowOutcome::NotDue { .. }));
    assert!(matches!(hourly().try_acquire().unwrap(), Some(WindowOutcome::NotDue { .. })));
}

#[test]
fn each_guard_of_several_keys_is_told_of_its_loss() {
    let lock = connect("memory:").unwrap();
    let (sender, losses) = mpsc::channel();
    let guards: Vec<_> = lock.keys(["k", "l"]).acquire().unwrap().into_iter().collect();
    for guard in &guards {
        let (sender, key) = (sender.clone(), guard.key().to_string());
        guard.when_lost(move |reason| sender.send((key, reason)).unwrap());
    }
    lock.close().unwrap();
    let mut told = [losses.recv_timeout(LIVENESS).unwrap(), losses.recv_timeout(LIVENESS).unwrap()];
    told.sort_by(|a, b| a.0.cmp(&b.0));
    assert_eq!(told, ["k", "l"].map(|key| (key.to_owned(), LossReason::Closed)));
}

#[test]
fn a_loss_is_told_once_and_a_release_is_no_loss() {
    let lock = connect("memory:").unwrap();
    let (sender, losses) = mpsc::channel();
    let released = lock.key("released").acquire().unwrap();
    let ended = lock.key("ended").acquire().unwrap();
    for guard in [&released, &ended] {
        let (sender, key) = (sender.clone(), guard.key().to_string());
        // A callback may block, also on the lock.
        let again = lock.clone();
        guard.when_lost(move |reason| {
            sender.send((key, reason, again.key("k").acquire().map(drop).map_err(|e| e.kind()))).unwrap();
        });
    }
    drop(sender);
    released.release().unwrap();
    lock.close().unwrap();
    assert_eq!(ended.validity(), Validity::Lost);
    let told = losses.recv_timeout(LIVENESS).unwrap();
    assert_eq!(told, ("ended".to_owned(), LossReason::Closed, Err(ErrorKind::Closed)));
    // The senders of both callbacks are gone.
    assert_eq!(losses.recv_timeout(LIVENESS), Err(mpsc::RecvTimeoutError::Disconnected));
}

#[test]
fn a_guard_outlives_its_lock_and_moves_between_threads() {
    let [a, b] = two("a_guard_outlives");
    let guard = a.key("k").ttl(Duration::from_millis(300)).acquire().unwrap();
    drop(a);
    // Still renewed.
    guard.renew().unwrap();
    guard.renew_for(Duration::from_secs(30)).unwrap();
    guard.confirm().unwrap();
    assert!(b.key("k").try_acquire().unwrap().is_none());
    std::thread::spawn(move || guard.release()).join().unwrap().unwrap();
    b.key("k").try_acquire().unwrap().unwrap().release().unwrap();
}

#[test]
fn a_guard_changes_its_label_until_it_is_lost() {
    let [a, b] = two("a_guard_changes_its_label");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let shown = |guard: &blocking::LockGuard| {
        let info = runtime.block_on(b.as_async().admin().unwrap().inspect(guard.key())).unwrap();
        info.holder().and_then(|hold| hold.label.as_deref().map(str::to_owned))
    };
    let guard = a.key("k").label("first").acquire().unwrap();
    assert_eq!(shown(&guard).as_deref(), Some("first"));
    guard.relabel("second").unwrap();
    assert_eq!(shown(&guard).as_deref(), Some("second"));
    assert_eq!(guard.relabel("a\0b").unwrap_err().kind(), ErrorKind::InvalidOption);
    a.close().unwrap();
    assert_eq!(guard.relabel("late").unwrap_err().loss(), Some(LossReason::Closed));
    let next = b.key("k").label("next").acquire().unwrap();
    assert_eq!(shown(&next).as_deref(), Some("next"));
}

#[test]
fn calls_in_an_async_task_are_refused_and_drops_there_release() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = || tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let database = runtime().block_on(test_servers::fresh_database());
    let mut urls = vec!["memory:calls_in_an_async_task".to_owned()];
    urls.push(format!("file://{}", directory.path().join("locks").display()));
    // No lease ends within the test.
    let stores = [("advisory", ""), ("advisory-xact", ""), ("row", ""), ("ttl", "&ttl=1h")];
    urls.extend(stores.map(|(store, ttl)| url_of(&database, &format!("postgres+{store}"), ttl)));
    for url in urls {
        let [a, b] = [(); 2].map(|()| connect(&url).unwrap());
        let guards = ["dropped", "released", "given"].map(|key| a.key(key).acquire().unwrap());
        let several = a.keys(["x", "y"]).acquire().unwrap();
        // Keeps the sessions and files, whose end would also free the keys.
        let kept = a.clone();
        let refused = runtime().block_on(async move {
            let [dropped, released, given] = guards;
            drop((dropped, several));
            let kinds = [
                connect("memory:").map(drop),
                a.key("k").acquire().map(drop),
                a.key("k").try_acquire().map(drop),
                a.keys(["k", "l"]).acquire().map(drop),
                released.confirm(),
                released.renew(),
                released.relabel("new"),
                released.release(),
                given.into_ref(LIVENESS).map(drop),
                a.adopt("text").map(drop),
                a.close(),
                a.key("k").run(|_| ()).map_err(leasehold::Error::from),
            ];
            drop(a);
            kinds.map(|refused| refused.unwrap_err())
        });
        for error in refused {
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
            assert!(error.to_string().contains("leasehold::connect"), "{error}");
        }
        b.keys(["dropped", "released", "given", "x", "y", "k"])
            .wait(LIVENESS)
            .acquire()
            .unwrap()
            .release()
            .unwrap();
        // Drops the last of the lock and its guards in a task.
        runtime().block_on(async move { drop(kept) });
    }
}

#[test]
fn calls_where_tokio_allows_to_block_work() {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    let token = runtime.block_on(async {
        let blocks = || connect("memory:").unwrap().key("k").run(|guard| guard.token()).unwrap();
        assert!(tokio::task::block_in_place(blocks).is_some());
        tokio::task::spawn_blocking(blocks).await.unwrap()
    });
    assert!(token.is_some());
}

#[test]
fn async_code_can_share_the_lock() {
    let lock = connect("memory:").unwrap();
    let guard = lock.key("k").acquire().unwrap();
    let shared = lock.as_async().clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let tried = runtime.block_on(async move {
        leasehold::LockExt::key(&*shared, "k").try_acquire().await.unwrap().map(drop)
    });
    assert_eq!(tried, None);
    guard.release().unwrap();
}

#[test]
fn a_failed_connection_is_an_error_without_a_password() {
    let error = connect("postgres+ttl://app:secret@127.0.0.1:1/db?connect_timeout=1s").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(!format!("{error:?}").contains("secret"));
    assert_eq!(connect("nonsense:").unwrap_err().kind(), ErrorKind::InvalidOption);
    assert_eq!(connect("memory:").unwrap().key("").acquire().unwrap_err().kind(), ErrorKind::InvalidKey);
    let error =
        blocking::connect_by(async { Err::<leasehold::engine::Engine, _>(leasehold::Error::closed()) });
    assert_eq!(error.unwrap_err().kind(), ErrorKind::Closed);
}
