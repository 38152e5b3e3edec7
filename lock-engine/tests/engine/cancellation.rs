//! Every future of a lock, dropped at every poll, over a store that answers, fails, is slow or never answers. Within
//! the bound the key is free, without waiters and without renewals.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{AcquireOptions, ErrorKind, Lock, LockExt, LockGuard, LockKey};
use leasehold_engine::{Engine, Waiting};
use leasehold_memory::{Client, ClientSetup, Fault, MemoryStore, Op};

/// Behaviour of the store towards the client whose future is dropped.
#[derive(Clone, Copy, Debug)]
enum Store {
    Answers,
    Fails,
    FailsAfterDoing,
    IsSlow,
    AnswersSlowly,
    NeverHears,
    NeverAnswers,
}

const STORES: [Store; 7] = [
    Store::Answers,
    Store::Fails,
    Store::FailsAfterDoing,
    Store::IsSlow,
    Store::AnswersSlowly,
    Store::NeverHears,
    Store::NeverAnswers,
];

impl Store {
    fn fault(self) -> Fault {
        match self {
            Self::Answers => Fault::Pass,
            Self::Fails => Fault::Error(ErrorKind::Unavailable),
            Self::FailsAfterDoing => Fault::LoseReply,
            Self::IsSlow => Fault::Delay(Duration::from_secs(2)),
            Self::AnswersSlowly => Fault::DelayReply(Duration::from_secs(2)),
            Self::NeverHears => Fault::Hang,
            Self::NeverAnswers => Fault::LoseReplyHang,
        }
    }
}

/// The moments of the drop: the maximum of polls and of the time.
const DROPS: [(u32, Duration); 6] = [
    (0, Duration::ZERO),
    (1, Duration::ZERO),
    (1, Duration::from_millis(1)),
    (2, Duration::from_secs(1)),
    (3, Duration::from_secs(3)),
    (9, Duration::from_secs(40)),
];

const WAITS: [Waiting; 2] = [Waiting::Store, Waiting::Poll { every: Duration::from_millis(100) }];

/// Longer than a call's limit, its retries and the store's own bound together.
const BOUND: Duration = Duration::from_secs(60);

/// Polls `future` at most `polls` times, over at most `time`, then drops it.
async fn drop_after<F: Future>(future: F, polls: u32, time: Duration) -> Option<F::Output> {
    let mut future = pin!(future);
    let mut polled = 0;
    let polling = poll_fn(|cx| {
        if polled == polls {
            return Poll::Ready(None);
        }
        polled += 1;
        future.as_mut().poll(cx).map(Some)
    });
    tokio::time::timeout(time, polling).await.unwrap_or(None)
}

struct Scene {
    store: MemoryStore,
    client: Client,
    other: Engine,
    key: LockKey,
    what: String,
}

impl Scene {
    fn new(what: String, waiting: Waiting, ttl: Option<Duration>) -> Self {
        let mut store = MemoryStore::new().waiting(waiting);
        if let Some(ttl) = ttl {
            store = store.default_ttl(ttl);
        }
        let client = store.client_with(ClientSetup::new()).unwrap();
        let other = store.client().unwrap();
        Self { store, client, other, key: LockKey::new("k").unwrap(), what }
    }

    fn script(&self, op: Op, store: Store) {
        self.client.faults.script(op, store.fault());
    }

    /// Asserts that the key is free for both clients, without waiters and without renewals.
    async fn assert_clean(self) {
        let Self { store, client, other, key, what } = self;
        // A future that was not polled leaves its fault unused.
        client.faults.clear();
        tokio::time::sleep(BOUND).await;
        assert_eq!(client.lock.active_keys(), 0, "{what}: the engine still deals with the key");
        let renewals = client.faults.calls(Op::Renew);
        let guard = other.key(&key).try_acquire().await.unwrap();
        guard.unwrap_or_else(|| panic!("{what}: the key is not free")).release().await.unwrap();
        let guard = client.lock.key(&key).try_acquire().await.unwrap();
        guard
            .unwrap_or_else(|| panic!("{what}: the key is not free for its own client"))
            .release()
            .await
            .unwrap();
        let outside = store.occupy(&key).unwrap_or_else(|| panic!("{what}: somebody is queued"));
        tokio::time::sleep(BOUND).await;
        drop(outside);
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(store.occupy(&key).is_some(), "{what}: somebody who was dropped took the key");
        assert_eq!(client.faults.calls(Op::Renew), renewals, "{what}: something is still renewed");
    }
}

/// Runs `case` for every store behaviour and moment of dropping.
async fn each<F: Future<Output = ()>>(
    op: Op,
    waiting: Waiting,
    ttl: Option<Duration>,
    case: impl Fn(Arc<Scene>, u32, Duration) -> F,
) {
    for store in STORES {
        for (polls, time) in DROPS {
            let what = format!("{op:?} {store:?} {waiting:?} dropped after {polls} polls and {time:?}");
            let scene = Arc::new(Scene::new(what, waiting, ttl));
            scene.script(op, store);
            case(Arc::clone(&scene), polls, time).await;
            Arc::into_inner(scene).expect("the case has ended").assert_clean().await;
        }
    }
}

async fn never_kept(_guard: Option<Result<LockGuard, leasehold_api::Error>>) {}

#[tokio::test(start_paused = true)]
async fn acquire_of_a_free_key() {
    for waiting in WAITS {
        for ttl in [None, Some(Duration::from_secs(30))] {
            each(Op::Acquire, waiting, ttl, |scene, polls, time| async move {
                never_kept(drop_after(scene.client.lock.key(&scene.key).acquire(), polls, time).await).await;
            })
            .await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn try_acquire_of_a_free_key() {
    each(Op::Acquire, Waiting::Store, None, |scene, polls, time| async move {
        drop(drop_after(scene.client.lock.key(&scene.key).try_acquire(), polls, time).await);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn acquire_of_a_held_key() {
    for waiting in WAITS {
        for op in [Op::Acquire, Op::Wait] {
            each(op, waiting, Some(Duration::from_secs(30)), |scene, polls, time| async move {
                let held = scene.store.occupy(&scene.key).unwrap();
                let waiting = scene.client.lock.key(&scene.key).wait_forever().acquire();
                never_kept(drop_after(waiting, polls, time).await).await;
                drop(held);
            })
            .await;
        }
    }
}

/// The grant arrives just before the future is dropped.
#[tokio::test(start_paused = true)]
async fn acquire_that_is_granted_but_not_picked_up() {
    for waiting in WAITS {
        each(Op::Acquire, waiting, None, |scene, polls, time| async move {
            let held = scene.store.occupy(&scene.key).unwrap();
            let acquiring = scene.client.lock.key(&scene.key).wait_forever().acquire();
            let mut acquiring = Box::pin(acquiring);
            drop(drop_after(acquiring.as_mut(), polls, time).await);
            drop(held);
            tokio::task::yield_now().await;
            drop(acquiring);
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn waiting_behind_a_local_holder() {
    each(Op::Release, Waiting::Store, None, |scene, polls, time| async move {
        // The acquire has no fault, because only releases are scripted.
        let guard = scene.client.lock.key(&scene.key).acquire().await.unwrap();
        let waiting = scene.client.lock.key(&scene.key).wait_forever().acquire();
        let mut waiting = Box::pin(waiting);
        drop(drop_after(waiting.as_mut(), polls, time).await);
        drop(guard);
        tokio::task::yield_now().await;
        drop(waiting);
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn acquire_of_several_keys() {
    for waiting in WAITS {
        each(Op::Acquire, waiting, None, |scene, polls, time| async move {
            let held = scene.store.occupy(&scene.key).unwrap();
            let keys = [LockKey::new("j").unwrap(), scene.key.clone(), LockKey::new("l").unwrap()];
            let options = AcquireOptions::new().wait_forever();
            drop(drop_after(scene.client.lock.acquire_all(&keys, &options), polls, time).await);
            drop(held);
            tokio::time::sleep(BOUND).await;
            for key in keys {
                assert!(scene.store.occupy(&key).is_some(), "{}: {key} is not free", scene.what);
            }
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn release() {
    for ttl in [None, Some(Duration::from_secs(30))] {
        each(Op::Release, Waiting::Store, ttl, |scene, polls, time| async move {
            let guard = scene.client.lock.key(&scene.key).acquire().await.unwrap();
            drop(drop_after(guard.release(), polls, time).await);
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_guard() {
    each(Op::Release, Waiting::Store, None, |scene, _, _| async move {
        drop(scene.client.lock.key(&scene.key).acquire().await.unwrap());
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn renew() {
    each(Op::Renew, Waiting::Store, Some(Duration::from_secs(30)), |scene, polls, time| async move {
        let guard = scene.client.lock.key(&scene.key).acquire().await.unwrap();
        drop(drop_after(guard.renew_for(Duration::from_secs(60)), polls, time).await);
        // The dropped renewal must not cost the lease, because later renewals succeed.
        tokio::time::sleep(Duration::from_secs(90)).await;
        assert!(guard.validity().is_held(), "{}", scene.what);
        guard.release().await.unwrap();
    })
    .await;
}

#[tokio::test(start_paused = true)]
async fn confirm() {
    for ttl in [None, Some(Duration::from_secs(30))] {
        each(Op::Renew, Waiting::Store, ttl, |scene, polls, time| async move {
            let guard = scene.client.lock.key(&scene.key).acquire().await.unwrap();
            drop(drop_after(guard.confirm(), polls, time).await);
            tokio::time::sleep(Duration::from_secs(90)).await;
            // A future that was not polled leaves its fault unused.
            scene.client.faults.clear();
            guard.confirm().await.unwrap_or_else(|error| panic!("{}: {error}", scene.what));
            guard.release().await.unwrap();
        })
        .await;
    }
}

#[tokio::test(start_paused = true)]
async fn close() {
    for (op, polls) in [(Op::Acquire, 0), (Op::Acquire, 1), (Op::Release, 0), (Op::Release, 1)] {
        for store in STORES {
            let scene = Scene::new(format!("close {op:?} {store:?} {polls}"), Waiting::Store, None);
            let guard = scene.client.lock.key("held").acquire().await.unwrap();
            scene.script(op, store);
            drop(drop_after(scene.client.lock.close(), polls, Duration::ZERO).await);
            if polls > 0 {
                // A close that was polled goes on without its caller.
                tokio::time::sleep(BOUND).await;
                assert!(!guard.validity().is_held(), "{}", scene.what);
                let taken = scene.other.key("held").try_acquire().await.unwrap();
                assert!(taken.is_some(), "{}", scene.what);
            }
            // A second close waits for the first one.
            let _ = scene.client.lock.close().await;
            assert!(scene.other.key("held").try_acquire().await.unwrap().is_some(), "{}", scene.what);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn scoped_body() {
    each(Op::Acquire, Waiting::Store, None, |scene, polls, time| async move {
        let running = scene.client.lock.key(&scene.key).run(async |_| {
            tokio::time::sleep(Duration::from_secs(5)).await;
        });
        drop(drop_after(running, polls, time).await);
    })
    .await;
}
