//! A store with a queue, in which a waiting acquire takes its place with its first call.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    Capabilities, Error, ErrorKind, HolderId, LeaseBounds, Lock as _, LockExt as _, LockKey, LossReason,
    Scope,
};
use leasehold_engine::{
    Attempt, Backend, CancellationToken, Contended, Engine, Events, Granted, HoldRef, ReleaseReply, Renewed,
    Request, Timing, TokioClock, Waiting,
};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

/// The queue of all keys. The first entry of a key holds it.
#[derive(Debug, Default)]
struct Line {
    state: Mutex<LineState>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct LineState {
    places: VecDeque<(LockKey, HolderId)>,
    calls: Vec<&'static str>,
    refuses_waits: bool,
    refuses_releases: bool,
    /// The key whose holds the store reports as gone at their next renewal.
    loses: Option<&'static str>,
    /// How long the reply to an attempt takes.
    replies_take: Duration,
}

impl LineState {
    fn is_first(&self, request: &Request) -> bool {
        let first = self.places.iter().find(|(key, _)| *key == request.key);
        first.is_none_or(|(_, holder)| *holder == request.holder)
    }

    /// Adds the request at the end. Returns whether it had no place before.
    fn enter(&mut self, request: &Request) -> bool {
        let is_new = self.places.iter().all(|(_, holder)| *holder != request.holder);
        if is_new {
            self.places.push_back((request.key.clone(), request.holder));
        }
        is_new
    }
}

impl Line {
    fn calls(&self) -> Vec<&'static str> {
        self.state.lock().unwrap().calls.clone()
    }

    fn places(&self) -> usize {
        self.state.lock().unwrap().places.len()
    }

    fn places_of(&self, key: &str) -> usize {
        self.state.lock().unwrap().places.iter().filter(|(of, _)| of.as_str() == key).count()
    }

    fn leave(&self, holder: HolderId) -> bool {
        let mut state = self.state.lock().unwrap();
        let Some(place) = state.places.iter().position(|(_, queued)| *queued == holder) else { return false };
        let (key, _) = state.places[place].clone();
        let was_first = state.places.iter().take(place).all(|(before, _)| *before != key);
        state.places.remove(place);
        drop(state);
        self.changed.notify_waiters();
        was_first
    }
}

#[derive(Debug)]
struct Queueing {
    line: Arc<Line>,
    caps: Capabilities,
}

impl fmt::Display for Queueing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("queueing")
    }
}

impl Queueing {
    /// Returns the replies to an attempt, and how long they take.
    fn attempt(&self, requests: Vec<Request>) -> (Vec<Result<Attempt, Error>>, Duration) {
        let state = &mut *self.line.state.lock().unwrap();
        let takes = state.replies_take;
        let attempt = |request: Request| {
            state.calls.push(if request.may_queue { "acquire or queue" } else { "acquire" });
            if state.is_first(&request) {
                state.enter(&request);
                return Ok(Attempt::Granted(Granted::default()));
            }
            let mut contended = Contended::new();
            contended.queued = request.may_queue && state.enter(&request);
            Ok(Attempt::Contended(contended))
        };
        (requests.into_iter().map(attempt).collect(), takes)
    }
}

#[async_trait]
impl Backend for Queueing {
    fn capabilities(&self) -> &Capabilities {
        &self.caps
    }

    fn timing(&self) -> Timing {
        let mut timing = Timing::default();
        timing.waiting = Waiting::Store;
        timing
    }

    fn attach(&self, _: Events) {}

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        let (answers, takes) = self.attempt(requests);
        sleep(takes).await;
        answers
    }

    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        {
            let mut state = self.line.state.lock().unwrap();
            if state.refuses_waits {
                state.calls.push("refused wait");
                return Ok(Attempt::Refused(Error::new(ErrorKind::Unavailable, "the test refuses waits")));
            }
            let is_new = state.enter(&request);
            state.calls.push(if is_new { "wait at the end" } else { "wait at its place" });
        }
        loop {
            let changed = self.line.changed.notified();
            if self.line.state.lock().unwrap().is_first(&request) {
                return Ok(Attempt::Granted(Granted::default()));
            }
            tokio::select! {
                () = changed => {}
                () = stop.cancelled() => {
                    self.line.leave(request.holder);
                    return Ok(Attempt::Contended(Contended::new()));
                }
            }
        }
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        let loses = self.line.state.lock().unwrap().loses;
        let answer = |hold: &HoldRef| match loses {
            Some(key) if hold.key.as_str() == key => Renewed::Gone(LossReason::Gone),
            _ => Renewed::Extended,
        };
        holds.iter().map(|hold| Ok(answer(hold))).collect()
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        if self.line.state.lock().unwrap().refuses_releases {
            let refused = || Error::new(ErrorKind::Unavailable, "the test refuses releases");
            return holds.iter().map(|_| Err(refused())).collect();
        }
        holds.iter().map(|hold| Ok(ReleaseReply::new(self.line.leave(hold.holder)))).collect()
    }

    async fn close(&self) {}
}

/// Connects another client.
fn client(line: &Arc<Line>) -> Engine {
    start(line, None)
}

/// Connects another client, whose holds are leases of this TTL.
fn leased(line: &Arc<Line>, ttl: Duration) -> Engine {
    start(line, Some(LeaseBounds::new(Some(ttl), ms(100), ttl)))
}

fn start(line: &Arc<Line>, lease: Option<LeaseBounds>) -> Engine {
    let mut caps = Capabilities::new(Scope::Network);
    (caps.cooldown, caps.lease) = (true, lease);
    let backend = Queueing { line: Arc::clone(line), caps };
    Engine::builder(backend).clock(Arc::new(TokioClock::new())).start().unwrap()
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[tokio::test(start_paused = true)]
async fn a_waiting_acquire_takes_its_place_with_its_first_call_and_waits_there() {
    let line = Arc::default();
    let (a, b) = (client(&line), client(&line));
    let held = a.key("k").acquire().await.unwrap();
    let waiting = tokio::spawn(async move { b.key("k").acquire().await });
    sleep(ms(1)).await;
    assert_eq!(line.calls(), ["acquire or queue", "acquire or queue", "wait at its place"]);
    held.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();
    assert_eq!((line.calls().len(), line.places()), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn only_a_caller_that_certainly_waits_for_one_key_takes_a_place() {
    let line = Arc::default();
    let (a, b) = (client(&line), client(&line));
    let held = a.key("k").try_acquire().await.unwrap().unwrap();
    assert!(b.key("k").try_acquire().await.unwrap().is_none());
    let error = b.key("k").wait(Duration::ZERO).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    let error = b.keys(["k", "l"]).wait(ms(50)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    // The queued request of this caller could start its cooldown after a failed wait.
    let cools = b.key("k").cooldown(ms(1)).wait(ms(50)).acquire().await.unwrap_err();
    assert_eq!(cools.kind(), ErrorKind::Timeout);
    // This caller leaves if the wait finds a cooldown.
    let window = b.key("k").at_most_once_per(Duration::from_secs(3600)).wait(ms(50));
    assert_eq!(window.acquire().await.unwrap_err().kind(), ErrorKind::Timeout);
    let calls = line.calls();
    assert!(calls.contains(&"wait at the end") && !calls.contains(&"acquire or queue"), "{calls:?}");
    held.release().await.unwrap();
    sleep(ms(1)).await;
    assert_eq!(line.places(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_place_is_given_up_with_its_caller() {
    let line: Arc<Line> = Arc::default();
    let (a, b) = (client(&line), client(&line));
    let held = a.key("k").acquire().await.unwrap();
    line.state.lock().unwrap().refuses_waits = true;
    let error = b.key("k").give_up_on_failure().acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    sleep(ms(1)).await;
    assert_eq!((line.calls().pop(), line.places()), (Some("refused wait"), 1), "after a failed wait");
    line.state.lock().unwrap().refuses_waits = false;
    timeout(ms(10), b.key("k").acquire()).await.unwrap_err();
    sleep(ms(1)).await;
    assert_eq!(line.places(), 1, "after a dropped acquire");
    let error = b.key("k").wait(ms(10)).acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout);
    sleep(ms(1)).await;
    assert_eq!(line.places(), 1, "at the end of the budget");
    line.state.lock().unwrap().replies_take = ms(20);
    timeout(ms(10), b.key("k").acquire()).await.unwrap_err();
    assert_eq!(line.places(), 2);
    sleep(ms(20)).await;
    assert_eq!(line.places(), 1, "after a call whose reply nobody awaited");
    line.state.lock().unwrap().replies_take = Duration::ZERO;
    let b = Arc::new(b);
    let waiting = tokio::spawn({
        let b = Arc::clone(&b);
        async move { b.key("k").acquire().await }
    });
    sleep(ms(1)).await;
    assert_eq!(line.places(), 2);
    b.close().await.unwrap();
    assert_eq!(waiting.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(line.places(), 1, "after the end of its client");
    held.release().await.unwrap();
}

/// A place in the queue does not end with a lease, so its release is repeated until the store has carried it out.
#[tokio::test(start_paused = true)]
async fn a_place_is_given_up_however_long_its_release_fails() {
    for leaves_before_the_reply in [false, true] {
        let line: Arc<Line> = Arc::default();
        let (a, b) = (client(&line), leased(&line, Duration::from_secs(1)));
        let held = a.key("k").acquire().await.unwrap();
        {
            let mut state = line.state.lock().unwrap();
            (state.refuses_waits, state.refuses_releases) = (true, true);
            state.replies_take = if leaves_before_the_reply { ms(20) } else { Duration::ZERO };
        }
        let left = timeout(ms(10), b.key("k").give_up_on_failure().acquire()).await;
        assert_eq!(left.is_err(), leaves_before_the_reply, "{left:?}");
        sleep(Duration::from_secs(60)).await;
        assert_eq!(line.places(), 2, "left before the reply: {leaves_before_the_reply}");
        line.state.lock().unwrap().refuses_releases = false;
        // The longest pause between two retries, with its jitter.
        sleep(Duration::from_secs(11)).await;
        assert_eq!(line.places(), 1, "left before the reply: {leaves_before_the_reply}");
        held.release().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn a_place_is_given_up_when_an_earlier_key_is_lost() {
    let line: Arc<Line> = Arc::default();
    let (a, b) = (client(&line), leased(&line, Duration::from_secs(2)));
    let first = a.key("k").acquire().await.unwrap();
    let held = a.key("l").acquire().await.unwrap();
    let waiting = tokio::spawn(async move { b.keys(["k", "l"]).acquire().await.map(drop) });
    sleep(ms(1)).await;
    first.release().await.unwrap();
    sleep(ms(1)).await;
    assert_eq!((line.calls().pop(), line.places_of("l")), (Some("wait at its place"), 2));
    line.state.lock().unwrap().loses = Some("k");
    let error = timeout(Duration::from_secs(10), waiting).await.unwrap().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    sleep(ms(1)).await;
    assert_eq!(line.places_of("l"), 1);
    held.release().await.unwrap();
}

/// The engine releases on another runtime then, for a second of real time. A turn in which a busy machine takes longer is
/// repeated.
#[test]
fn a_place_is_given_up_at_the_end_of_its_runtime() {
    let given_up = (0..5).any(|_| is_given_up_with_its_runtime());
    assert!(given_up, "the place stays");
}

fn is_given_up_with_its_runtime() -> bool {
    let line: Arc<Line> = Arc::default();
    let runtime =
        || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (ours, theirs) = (runtime(), runtime());
    let (a, held) = ours.block_on(async {
        let a = client(&line);
        let held = a.key("k").acquire().await.unwrap();
        (a, held)
    });
    let b = theirs.block_on(async { client(&line) });
    theirs.spawn(async move { b.key("k").acquire().await.map(drop) });
    let comes = |limit: Duration, is_so: &dyn Fn() -> bool| {
        let begun = std::time::Instant::now();
        while !is_so() && begun.elapsed() < limit {
            std::thread::sleep(ms(1));
        }
        is_so()
    };
    assert!(comes(Duration::from_secs(60), &|| line.calls().pop() == Some("wait at its place")));
    assert_eq!(line.places(), 2);
    theirs.shutdown_background();
    let is_given_up = comes(Duration::from_secs(10), &|| line.places() == 1);
    ours.block_on(async {
        held.release().await.unwrap();
        a.close().await.unwrap();
    });
    is_given_up
}
