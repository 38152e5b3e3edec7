//! A watcher follows a key, and a holder follows the validity of its grant and changes its label.

use std::fmt;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::FutureExt as _;
use leasehold_api::{
    AdminCapabilities, Capabilities, Error, ErrorKind, HoldInfo, HolderId, KeyInfo, LeaseBounds, ListQuery,
    Lock, LockAdmin, LockExt as _, LockKey, LossReason, Namespaced, Operation, Scope, StoreFact, Validity,
};
use leasehold_engine::{
    Attempt, Backend, Engine, Events, Granted, HoldRef, ReleaseReply, Renewed, Request, Timing, TokioClock,
    Waiting,
};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

const SECOND: Duration = Duration::from_secs(1);

/// A store whose replies the test sets.
#[derive(Debug)]
struct Scripted {
    capabilities: Capabilities,
    shown: Mutex<Result<KeyInfo, Error>>,
    looks: AtomicUsize,
    /// The reply to a change of a label. `None` gives no reply.
    relabelled: Mutex<Option<Result<Renewed, Error>>>,
    labels: Mutex<Vec<String>>,
    renews: Mutex<bool>,
    events: OnceLock<Events>,
}

#[derive(Clone, Debug)]
struct Client(Arc<Scripted>);

fn key() -> LockKey {
    LockKey::new("leader").unwrap()
}

fn held_by(serial: u64) -> KeyInfo {
    let mut hold = HoldInfo::new();
    hold.holder = Some(HolderId::from_parts(1, serial));
    KeyInfo::with_hold(key(), hold)
}

fn scripted() -> (Arc<Scripted>, Engine) {
    let mut capabilities = Capabilities::new(Scope::Network);
    capabilities.admin = AdminCapabilities::all();
    capabilities.relabel = true;
    capabilities.lease = Some(LeaseBounds::new(None, SECOND, 3600 * SECOND));
    start(capabilities)
}

fn start(capabilities: Capabilities) -> (Arc<Scripted>, Engine) {
    let store = Arc::new(Scripted {
        capabilities,
        shown: Mutex::new(Ok(KeyInfo::free(key()))),
        looks: AtomicUsize::new(0),
        relabelled: Mutex::new(Some(Ok(Renewed::Extended))),
        labels: Mutex::default(),
        renews: Mutex::new(true),
        events: OnceLock::new(),
    });
    let engine =
        Engine::builder(Client(Arc::clone(&store))).clock(Arc::new(TokioClock::new())).start().unwrap();
    (store, engine)
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("scripted")
    }
}

#[async_trait]
impl Backend for Client {
    fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.waiting = Waiting::Poll { every: SECOND };
        timing
    }

    fn attach(&self, events: Events) {
        self.0.events.set(events).unwrap();
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        requests.iter().map(|_| Ok(Attempt::Granted(Granted::default()))).collect()
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        if !*self.0.renews.lock().unwrap() {
            pending::<()>().await;
        }
        holds.iter().map(|_| Ok(Renewed::Extended)).collect()
    }

    async fn relabel(&self, _: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        // Takes a while, because a caller must be able to drop its call before the reply.
        sleep(SECOND).await;
        self.0.labels.lock().unwrap().push(label.to_string());
        let answer = self.0.relabelled.lock().unwrap().clone();
        match answer {
            Some(answer) => answer,
            None => pending().await,
        }
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        holds.iter().map(|_| Ok(ReleaseReply::new(true))).collect()
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {}
}

#[async_trait]
impl LockAdmin for Client {
    async fn inspect(&self, _: &LockKey) -> Result<KeyInfo, Error> {
        self.0.looks.fetch_add(1, SeqCst);
        self.0.shown.lock().unwrap().clone()
    }

    async fn list(&self, _: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        Ok(Vec::new())
    }

    async fn force_release(&self, _: &LockKey, _: HolderId) -> Result<bool, Error> {
        Ok(false)
    }

    async fn facts(&self) -> Result<Vec<StoreFact>, Error> {
        Ok(vec![StoreFact::new("version", "3.4.23").advice("upgrade it")])
    }
}

impl Scripted {
    fn show(&self, shown: Result<KeyInfo, Error>) {
        *self.shown.lock().unwrap() = shown;
    }

    fn looks(&self) -> usize {
        self.looks.load(SeqCst)
    }

    fn events(&self) -> &Events {
        self.events.get().unwrap()
    }
}

#[tokio::test(start_paused = true)]
async fn an_observer_looks_once_per_poll_and_no_more_when_its_time_is_over() {
    let (store, engine) = scripted();
    let admin = engine.admin().unwrap();
    let seen = KeyInfo::free(key());
    assert_eq!(admin.changed(&seen, Duration::ZERO).await.unwrap(), None);
    assert_eq!(store.looks(), 1, "a call without time makes one look");
    let begun = Instant::now();
    assert_eq!(admin.changed(&seen, 100 * SECOND).await.unwrap(), None);
    assert_eq!(begun.elapsed(), 100 * SECOND);
    let looks = store.looks() - 1;
    // A poll is jittered by a quarter.
    assert!((80..=134).contains(&looks), "{looks} looks in a hundred intervals");
    sleep(100 * SECOND).await;
    assert_eq!(store.looks(), looks + 1, "nobody observes the key");
}

#[tokio::test(start_paused = true)]
async fn an_observer_tells_another_grant_no_grant_and_another_label_apart() {
    let (store, engine) = scripted();
    let admin = engine.admin().unwrap();
    let [free, first, second] = [KeyInfo::free(key()), held_by(1), held_by(2)];
    let mut labelled = second.clone();
    labelled.holders[0].label = Some("10.0.0.7".into());
    let mut seen = free.clone();
    for next in [first, second, labelled, free] {
        let wait = admin.changed(&seen, 100 * SECOND);
        let (changed, ()) = tokio::join!(wait, async {
            sleep(5 * SECOND).await;
            store.show(Ok(next.clone()));
        });
        assert_eq!(changed.unwrap(), Some(next.clone()));
        seen = next;
    }
    // Times, waiters and cooldowns are no change.
    let mut other = seen.clone();
    (other.waiters, other.cooldown) = (Some(7), Some(SECOND));
    store.show(Ok(other));
    assert_eq!(admin.changed(&seen, 5 * SECOND).await.unwrap(), None);
}

#[tokio::test(start_paused = true)]
async fn an_observer_looks_at_a_hint_and_when_the_shown_lease_ends() {
    let (store, engine) = scripted();
    let admin = engine.admin().unwrap();
    let seen = KeyInfo::free(key());
    for hint in [|events: &Events| events.wake(&key()), |events: &Events| events.resync()] {
        store.show(Ok(seen.clone()));
        let mut wait = Box::pin(admin.changed(&seen, 100 * SECOND));
        assert!((&mut wait).now_or_never().is_none());
        store.events().wake(&LockKey::new("another").unwrap());
        store.show(Ok(held_by(1)));
        let begun = Instant::now();
        assert!((&mut wait).now_or_never().is_none(), "a hint for another key");
        hint(store.events());
        assert_eq!(wait.await.unwrap(), Some(held_by(1)));
        assert_eq!(begun.elapsed(), Duration::ZERO);
    }
    let mut ending = held_by(2);
    ending.holders[0].expires_in = Some(SECOND / 10);
    store.show(Ok(ending.clone()));
    let begun = Instant::now();
    let wait = admin.changed(&ending, 100 * SECOND);
    let (changed, ()) = tokio::join!(wait, async {
        yield_now().await;
        store.show(Ok(seen.clone()));
    });
    assert_eq!(changed.unwrap(), Some(seen));
    assert!(begun.elapsed() <= SECOND / 5, "{:?}", begun.elapsed());
}

#[tokio::test(start_paused = true)]
async fn an_observer_gets_the_error_of_a_look_and_of_a_closed_lock() {
    let (store, engine) = scripted();
    let admin = engine.admin().unwrap();
    let seen = KeyInfo::free(key());
    store.show(Err(Error::new(ErrorKind::PermissionDenied, "no rights")));
    let error = admin.changed(&seen, 100 * SECOND).await.unwrap_err();
    assert_eq!(
        (error.kind(), error.key(), error.store()),
        (ErrorKind::PermissionDenied, Some(&key()), Some("scripted"))
    );
    store.show(Ok(seen.clone()));
    let (changed, closed) = tokio::join!(admin.changed(&seen, Duration::MAX), engine.close());
    closed.unwrap();
    assert_eq!(changed.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(admin.changed(&seen, Duration::ZERO).await.unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn an_observer_polled_after_the_end_of_the_runtime_gets_closed() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (_store, engine) = runtime.block_on(async { scripted() });
    let seen = KeyInfo::free(key());
    let mut wait = engine.admin().unwrap().changed(&seen, Duration::MAX);
    assert!((&mut wait).now_or_never().is_none());
    drop(runtime);
    assert_eq!(wait.now_or_never().unwrap().unwrap_err().kind(), ErrorKind::Closed);
}

#[tokio::test(start_paused = true)]
async fn a_holder_learns_when_doubt_begins_when_it_ends_and_when_it_ends_in_a_loss() {
    let (store, engine) = scripted();
    let guard = engine.key("leader").ttl(30 * SECOND).acquire().await.unwrap();
    let granted = Instant::now();
    *store.renews.lock().unwrap() = false;
    let handle = guard.handle();
    assert_eq!(handle.validity_changed(Validity::Lost).await, Validity::Valid, "it differs already");
    assert_eq!(handle.validity_changed(Validity::Valid).await, Validity::InDoubt);
    let doubted = granted.elapsed();
    assert!(
        doubted >= 20 * SECOND && doubted < 20 * SECOND + SECOND / 10,
        "two thirds of the TTL, but {doubted:?}"
    );
    let watch =
        tokio::spawn(
            async move { (handle.validity_changed(Validity::InDoubt).await, Instant::now(), handle) },
        );
    *store.renews.lock().unwrap() = true;
    guard.renew().await.unwrap();
    let confirmed = Instant::now();
    let (now, at, handle) = watch.await.unwrap();
    assert_eq!((now, at), (Validity::Valid, confirmed), "as soon as the store has answered");
    *store.renews.lock().unwrap() = false;
    assert_eq!(guard.validity_changed(Validity::Valid).await, Validity::InDoubt);
    assert_eq!(handle.validity_changed(Validity::InDoubt).await, Validity::Lost);
    assert_eq!(handle.validity_changed(Validity::Lost).await, Validity::Lost, "no change follows");
}

#[tokio::test(start_paused = true)]
async fn a_shorter_ttl_brings_doubt_nearer_for_a_watcher_too() {
    let (store, engine) = scripted();
    let guard = engine.key("leader").ttl(3000 * SECOND).acquire().await.unwrap();
    let sent = Instant::now();
    *store.renews.lock().unwrap() = false;
    let watch = async { (guard.validity_changed(Validity::Valid).await, sent.elapsed()) };
    let ((now, after), renewed) = tokio::join!(watch, guard.renew_for(SECOND * 6 / 5));
    assert_eq!((now, renewed.unwrap_err().kind()), (Validity::InDoubt, ErrorKind::OutcomeUnknown));
    let doubt = SECOND * 4 / 5;
    assert!(after >= doubt && after < doubt + SECOND / 10, "two thirds of the new TTL, but {after:?}");
}

#[tokio::test(start_paused = true)]
async fn a_watcher_of_a_validity_learns_the_end_by_release_and_by_force() {
    let (store, engine) = scripted();
    for released in [true, false] {
        let guard = engine.key("leader").acquire().await.unwrap();
        let handle = guard.handle();
        let mut watch = Box::pin(handle.validity_changed(Validity::Valid));
        assert!((&mut watch).now_or_never().is_none());
        if released {
            guard.release().await.unwrap();
            assert_eq!(watch.now_or_never(), Some(Validity::Ended));
        } else {
            store.events().lost(guard.key(), guard.holder(), LossReason::ForcedRelease);
            assert_eq!(watch.now_or_never(), Some(Validity::Lost));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_to_release_reaches_the_holder_that_was_asked_and_no_other() {
    let (store, engine) = scripted();
    let guard = engine.key("leader").acquire().await.unwrap();
    let (handle, other) = (guard.handle(), engine.key("other").acquire().await.unwrap());
    let mut asked = Box::pin(handle.asked());
    store.events().asked(guard.key(), other.holder());
    store.events().asked(other.key(), guard.holder());
    assert!((&mut asked).now_or_never().is_none() && other.asked().now_or_never().is_none());
    store.events().asked(guard.key(), guard.holder());
    store.events().asked(guard.key(), guard.holder());
    assert!(asked.now_or_never().is_some() && guard.asked().now_or_never().is_some());
    assert!(other.asked().now_or_never().is_none());
    assert_eq!(guard.validity(), Validity::Valid);
    let old = guard.holder();
    guard.release().await.unwrap();
    let next = engine.key("leader").acquire().await.unwrap();
    store.events().asked(next.key(), old);
    assert!(next.asked().now_or_never().is_none(), "a late report");
    let refused = engine.admin().unwrap().ask(next.key(), next.holder()).await.unwrap_err();
    assert_eq!((refused.kind(), refused.key()), (ErrorKind::Unsupported, Some(next.key())));
}

#[test]
fn a_watcher_of_a_validity_polled_after_the_end_of_the_runtime_reads_lost() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let guard = runtime.block_on(async {
        let (_, engine) = scripted();
        engine.key("leader").ttl(30 * SECOND).acquire().await.unwrap()
    });
    let mut watch = Box::pin(guard.validity_changed(Validity::Valid));
    assert!((&mut watch).now_or_never().is_none());
    drop(runtime);
    assert_eq!(watch.now_or_never(), Some(Validity::Lost));
}

#[tokio::test(start_paused = true)]
async fn a_label_is_changed_at_the_store_also_if_the_caller_gives_up() {
    let (store, engine) = scripted();
    let guard = engine.key("leader").acquire().await.unwrap();
    guard.relabel("one").await.unwrap();
    assert!(guard.relabel("two").now_or_never().is_none());
    sleep(5 * SECOND).await;
    assert_eq!(*store.labels.lock().unwrap(), ["one", "two"]);
    let error = guard.relabel("x".repeat(257)).await.unwrap_err();
    assert_eq!((error.kind(), error.operation()), (ErrorKind::InvalidOption, Some(Operation::Relabel)));
    guard.relabel("x".repeat(256)).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_failed_change_of_a_label_is_no_loss_and_a_missing_hold_is_one() {
    let (store, engine) = scripted();
    let guard = engine.key("leader").acquire().await.unwrap();
    let answers = [
        (Some(Err(Error::new(ErrorKind::Unavailable, "down"))), ErrorKind::Unavailable),
        (None, ErrorKind::OutcomeUnknown),
        (Some(Ok(Renewed::Gone(LossReason::Gone))), ErrorKind::Lost),
    ];
    for (answer, kind) in answers {
        assert_eq!(guard.validity(), Validity::Valid);
        *store.relabelled.lock().unwrap() = answer;
        let error = guard.relabel("new").await.unwrap_err();
        assert_eq!(
            (error.kind(), error.operation(), error.key()),
            (kind, Some(Operation::Relabel), Some(&key()))
        );
    }
    assert_eq!(guard.validity(), Validity::Lost);
    let calls = store.labels.lock().unwrap().len();
    assert_eq!(guard.relabel("new").await.unwrap_err().loss(), Some(LossReason::Gone));
    assert_eq!(store.labels.lock().unwrap().len(), calls, "a lost grant does not call the store");
}

#[tokio::test(start_paused = true)]
async fn a_loss_ends_the_change_of_a_label_under_way() {
    let (store, engine) = scripted();
    let guard = engine.key("leader").acquire().await.unwrap();
    let (relabelled, ()) = tokio::join!(guard.relabel("new"), async {
        store.events().lost(guard.key(), guard.holder(), LossReason::SessionLost);
    });
    assert_eq!(relabelled.unwrap_err().loss(), Some(LossReason::SessionLost));
}

#[tokio::test(start_paused = true)]
async fn a_store_without_changeable_labels_is_not_called() {
    let (store, engine) = start(Capabilities::new(Scope::Network));
    let guard = engine.key("leader").acquire().await.unwrap();
    assert_eq!(guard.relabel("new").await.unwrap_err().kind(), ErrorKind::Unsupported);
    assert!(store.labels.lock().unwrap().is_empty());
}

#[tokio::test]
async fn the_facts_of_a_store_pass_through_its_engine_and_a_namespace() {
    let (_store, engine) = scripted();
    let engine: Arc<dyn Lock> = Arc::new(engine);
    let named = Namespaced::new(Arc::clone(&engine), "part").unwrap();
    for admin in [engine.admin().unwrap(), named.admin().unwrap()] {
        let facts = admin.facts().await.unwrap();
        let [fact] = &facts[..] else { panic!("{facts:?}") };
        assert_eq!(
            (&*fact.name, &*fact.value, fact.advice.as_deref()),
            ("version", "3.4.23", Some("upgrade it"))
        );
    }
}
