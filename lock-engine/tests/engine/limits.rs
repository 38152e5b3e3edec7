//! The time limit of each call, the start of a renewed lease, and a store that waits for its operator.

use std::fmt;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Capabilities, Error, ErrorKind, LeaseBounds, LockExt as _, Scope, Validity};
use leasehold_engine::{
    Attempt, Backend, Engine, Events, Granted, HoldRef, ReleaseReply, Renewed, Request, Timing, TokioClock,
};
use tokio::time::{Instant, sleep};

use crate::common::{PlainNet, plain, start};

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// The limits of the calls of each kind.
#[derive(Debug, Default)]
struct Limits {
    acquires: Vec<Duration>,
    renewals: Vec<Duration>,
    looks: Vec<Duration>,
    /// The TTL of each hold of a look, with the limit of its call.
    looked: Vec<(Duration, Duration)>,
    releases: Vec<Duration>,
}

/// A store that grants everything, and notes the limits of its calls.
#[derive(Debug)]
struct Noting {
    limits: Arc<Mutex<Limits>>,
    caps: Capabilities,
    events: OnceLock<Events>,
    /// How long before its call the lease of a renewal begins.
    early: Option<Duration>,
}

impl Noting {
    fn start(limits: &Arc<Mutex<Limits>>, early: Option<Duration>) -> Engine {
        let mut caps = Capabilities::new(Scope::Network);
        caps.lease = Some(LeaseBounds::new(Some(seconds(6)), seconds(1), seconds(3600)));
        let backend = Self { limits: Arc::clone(limits), caps, events: OnceLock::new(), early };
        let mut timing = backend.timing();
        timing.request_timeout = seconds(8);
        Engine::builder(backend).timing(timing).clock(Arc::new(TokioClock::new())).start().unwrap()
    }

    fn note(&self, limits: fn(&mut Limits) -> &mut Vec<Duration>, limit: Option<Duration>) {
        limits(&mut self.limits.lock().unwrap()).extend(limit);
    }
}

impl fmt::Display for Noting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("noting")
    }
}

#[async_trait]
impl Backend for Noting {
    fn capabilities(&self) -> &Capabilities {
        &self.caps
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.look = Some(seconds(1));
        timing
    }

    fn attach(&self, events: Events) {
        self.events.set(events).unwrap();
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        self.note(|limits| &mut limits.acquires, requests.first().map(|request| request.limit));
        requests.iter().map(|_| Ok(Attempt::Granted(Granted::default()))).collect()
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.note(|limits| &mut limits.renewals, holds.first().map(|hold| hold.limit));
        let renewals = self.limits.lock().unwrap().renewals.len();
        assert!(renewals < 1_000, "the engine renews without a pause");
        let now = self.events.get().unwrap().now();
        let renewed = match self.early {
            Some(early) => Renewed::ExtendedFrom(leasehold_engine::Moment::from_nanos(
                now.as_nanos().saturating_sub(u64::try_from(early.as_nanos()).unwrap()),
            )),
            None => Renewed::Extended,
        };
        holds.iter().map(|_| Ok(renewed)).collect()
    }

    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.note(|limits| &mut limits.looks, holds.first().map(|hold| hold.limit));
        let looked = holds.iter().map(|hold| (hold.ttl.unwrap(), hold.limit));
        self.limits.lock().unwrap().looked.extend(looked);
        holds.iter().map(|_| Ok(Renewed::Extended)).collect()
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.note(|limits| &mut limits.releases, holds.first().map(|hold| hold.limit));
        holds.iter().map(|_| Ok(ReleaseReply::new(true))).collect()
    }

    async fn close(&self) {}
}

#[tokio::test(start_paused = true)]
async fn each_call_knows_its_limit() {
    let limits = Arc::default();
    let lock = Noting::start(&limits, None);
    let guard = lock.key("k").acquire().await.unwrap();
    guard.confirm().await.unwrap();
    sleep(seconds(3)).await;
    guard.release().await.unwrap();
    for ttl in [6, 60] {
        drop(lock.key("k").ttl(seconds(ttl)).acquire().await.unwrap());
        sleep(Duration::from_millis(100)).await;
    }
    let limits = limits.lock().unwrap();
    assert_eq!(limits.acquires, [seconds(6), seconds(6), seconds(8)], "at most the TTL");
    assert_eq!(limits.renewals, [seconds(2)], "a third of the TTL");
    assert!(!limits.looks.is_empty() && limits.looks.iter().all(|limit| *limit == seconds(6)), "{limits:?}");
    assert_eq!(limits.releases, [seconds(8); 3]);
}

#[tokio::test(start_paused = true)]
async fn a_short_lease_does_not_shorten_the_looks_at_long_ones() {
    let limits = Arc::default();
    let lock = Noting::start(&limits, None);
    let short = lock.key("short").ttl(seconds(1)).acquire().await.unwrap();
    let long = lock.key("long").ttl(seconds(60)).acquire().await.unwrap();
    sleep(seconds(10)).await;
    let of = |ttl| {
        let limits = limits.lock().unwrap();
        limits.looked.iter().filter(|(of, _)| *of == ttl).map(|(_, limit)| *limit).collect::<Vec<_>>()
    };
    let (at_short, at_long) = (of(seconds(1)), of(seconds(60)));
    assert!(!at_short.is_empty() && at_short.iter().all(|limit| *limit == seconds(1)), "{at_short:?}");
    assert!(!at_long.is_empty() && at_long.iter().all(|limit| *limit == seconds(8)), "{at_long:?}");
    drop((short, long));
}

/// The case of a session that is kept alive every third of its TTL and answers renewals from its last proof.
#[tokio::test(start_paused = true)]
async fn renewals_that_are_answered_from_an_old_proof_are_repeated_with_pauses() {
    let limits = Arc::default();
    let lock = Noting::start(&limits, Some(seconds(2)));
    let guard = lock.key("k").acquire().await.unwrap();
    sleep(seconds(10)).await;
    assert_eq!(guard.validity(), Validity::Valid);
    let renewals = limits.lock().unwrap().renewals.len();
    assert!((4..=45).contains(&renewals), "{renewals} renewals in ten seconds of a lease of six");
}

#[tokio::test(start_paused = true)]
async fn a_renewed_lease_counts_from_the_time_that_the_store_names() {
    let mut left = Vec::new();
    for early in [None, Some(seconds(1))] {
        let lock = Noting::start(&Arc::default(), early);
        let guard = lock.key("k").acquire().await.unwrap();
        sleep(Duration::from_millis(1_500)).await;
        guard.renew().await.unwrap();
        left.push(guard.remaining().unwrap());
    }
    assert_eq!(left[0] - left[1], seconds(1), "{left:?}");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_needs_an_operator_is_not_called_again() {
    let net = Arc::new(PlainNet::default());
    *net.refuse.lock().unwrap() = Some(ErrorKind::NeedsOperator);
    let lock = start(plain(&net));
    let begun = Instant::now();
    let error = lock.key("k").acquire().await.unwrap_err();
    assert_eq!((error.kind(), begun.elapsed()), (ErrorKind::NeedsOperator, Duration::ZERO));
    assert!(!error.is_retryable() && error.kind().can_recover());
}
