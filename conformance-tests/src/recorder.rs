//! A lock that records the observations of its callers.

use std::any::{Any, TypeId};
use std::fmt;
use std::future::Future as _;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    AcquireOptions, BoxFuture, Capabilities, Error, FencingToken, Grant, HolderId, Lock, LockAdmin,
    LockGuard, LockKey, Lost, Mode, MultiGuard, PortableHold, Release, Validity, Wait, Wanted,
};
use tokio::time::Instant;

use crate::history::{Event, EventKind, History};

/// A record that the recorders of several clients share.
#[derive(Clone, Debug)]
pub struct Log(Arc<Record>);

#[derive(Debug)]
struct Record {
    start: Instant,
    calls: AtomicU64,
    /// Calls and guards that have not ended.
    open: AtomicU64,
    events: Mutex<Vec<Event>>,
}

impl Log {
    /// Makes an empty record that starts now.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(Record {
            start: Instant::now(),
            calls: AtomicU64::new(0),
            open: AtomicU64::new(0),
            events: Mutex::default(),
        }))
    }

    /// Returns the history so far.
    #[must_use]
    pub fn history(&self) -> History {
        let events = self.0.events.lock().unwrap_or_else(PoisonError::into_inner).clone();
        History::new(events, self.0.open.load(Ordering::Acquire) == 0)
    }

    /// Records that the store was made to end the hold of `key`.
    pub fn ended(&self, key: &LockKey) {
        self.write(0, key, EventKind::Ended);
    }

    fn write(&self, client: u32, key: &LockKey, what: EventKind) {
        let mut events = self.0.events.lock().unwrap_or_else(PoisonError::into_inner);
        events.push(Event::new(self.0.start.elapsed(), client, key.clone(), what));
    }
}

impl Default for Log {
    fn default() -> Self {
        Self::new()
    }
}

/// A lock that records all calls of another lock, as one client of the history.
///
/// Needs a tokio runtime, because a task waits for the loss of each guard.
#[derive(Clone, Debug)]
pub struct Recorder {
    inner: Arc<dyn Lock>,
    client: u32,
    log: Log,
}

impl Recorder {
    /// Makes a recorder of `inner` that writes to `log` as client number `client`.
    #[must_use]
    pub fn new(inner: Arc<dyn Lock>, client: u32, log: &Log) -> Self {
        Self { inner, client, log: log.clone() }
    }

    fn ask(&self, key: &LockKey, budget: Option<Duration>) -> RecordedCall {
        let call = self.log.0.calls.fetch_add(1, Ordering::Relaxed);
        self.log.0.open.fetch_add(1, Ordering::AcqRel);
        self.log.write(self.client, key, EventKind::Asked { call, budget });
        RecordedCall { recorder: self.clone(), key: key.clone(), call, answered: false }
    }
}

/// A call that has not returned. Recorded as cancelled if it is dropped.
struct RecordedCall {
    recorder: Recorder,
    key: LockKey,
    call: u64,
    answered: bool,
}

impl RecordedCall {
    fn granted(mut self, guard: LockGuard) -> LockGuard {
        let recorder = self.recorder.clone();
        let (holder, token, mode) = (guard.holder(), guard.token(), guard.mode());
        recorder.log.0.open.fetch_add(1, Ordering::AcqRel);
        self.answer(EventKind::Granted { call: self.call, holder, token, mode });
        let grant = guard.into_grant();
        // The task continues after the guard has ended, because a loss after a release is a violation.
        let lost = grant.lost();
        let (log, client, key) = (recorder.log.clone(), recorder.client, self.key.clone());
        let seen = Arc::new(AtomicBool::new(false));
        let noted = Arc::clone(&seen);
        tokio::spawn(async move {
            let reason = lost.await;
            if !noted.swap(true, Ordering::AcqRel) {
                log.write(client, &key, EventKind::Lost { holder, reason });
            }
        });
        LockGuard::new(Arc::new(RecordedGrant { inner: grant, recorder, seen }))
    }

    fn contended(mut self) {
        self.answer(EventKind::Contended { call: self.call });
    }

    fn failed(mut self, error: Error) -> Error {
        self.answer(EventKind::Failed { call: self.call, kind: error.kind() });
        error
    }

    fn answer(&mut self, what: EventKind) {
        self.answered = true;
        self.recorder.log.write(self.recorder.client, &self.key, what);
        self.recorder.log.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Drop for RecordedCall {
    fn drop(&mut self) {
        if !self.answered {
            self.answer(EventKind::Cancelled { call: self.call });
        }
    }
}

#[async_trait]
#[deny(clippy::missing_trait_methods)]
impl Lock for Recorder {
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        let call = self.ask(key, Some(Duration::ZERO));
        match self.inner.try_acquire(key, options).await {
            Ok(Some(guard)) => Ok(Some(call.granted(guard))),
            Ok(None) => {
                call.contended();
                Ok(None)
            }
            Err(error) => Err(call.failed(error)),
        }
    }

    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        let call = self.ask(key, budget(options.wait));
        match self.inner.acquire(key, options).await {
            Ok(guard) => Ok(call.granted(guard)),
            Err(error) => Err(call.failed(error)),
        }
    }

    async fn try_acquire_all(
        &self,
        keys: &[LockKey],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        let calls: Vec<_> = keys.iter().map(|key| self.ask(key, Some(Duration::ZERO))).collect();
        match self.inner.try_acquire_all(keys, options).await {
            Ok(Some(guards)) => Ok(Some(all_granted(calls, guards))),
            Ok(None) => {
                calls.into_iter().for_each(RecordedCall::contended);
                Ok(None)
            }
            Err(error) => Err(all_failed(calls, error)),
        }
    }

    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        let calls: Vec<_> = keys.iter().map(|key| self.ask(key, budget(options.wait))).collect();
        match self.inner.acquire_all(keys, options).await {
            Ok(guards) => Ok(all_granted(calls, guards)),
            Err(error) => Err(all_failed(calls, error)),
        }
    }

    async fn try_acquire_wanted(
        &self,
        wanted: &[Wanted],
        options: &AcquireOptions,
    ) -> Result<Option<MultiGuard>, Error> {
        let calls: Vec<_> = wanted.iter().map(|one| self.ask(&one.key, Some(Duration::ZERO))).collect();
        match self.inner.try_acquire_wanted(wanted, options).await {
            Ok(Some(guards)) => Ok(Some(all_granted(calls, guards))),
            Ok(None) => {
                calls.into_iter().for_each(RecordedCall::contended);
                Ok(None)
            }
            Err(error) => Err(all_failed(calls, error)),
        }
    }

    async fn acquire_wanted(&self, wanted: &[Wanted], options: &AcquireOptions) -> Result<MultiGuard, Error> {
        let calls: Vec<_> = wanted.iter().map(|one| self.ask(&one.key, budget(options.wait))).collect();
        match self.inner.acquire_wanted(wanted, options).await {
            Ok(guards) => Ok(all_granted(calls, guards)),
            Err(error) => Err(all_failed(calls, error)),
        }
    }

    async fn adopt(&self, text: &str) -> Result<LockGuard, Error> {
        // An unreadable text has no key to record.
        let Ok(hold) = text.parse::<PortableHold>() else { return self.inner.adopt(text).await };
        let call = self.ask(hold.key(), None);
        match self.inner.adopt(text).await {
            Ok(guard) => Ok(call.granted(guard)),
            Err(error) => Err(call.failed(error)),
        }
    }

    async fn close(&self) -> Result<(), Error> {
        self.inner.close().await
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        self.inner.admin()
    }
}

fn all_granted(calls: Vec<RecordedCall>, guards: MultiGuard) -> MultiGuard {
    calls.into_iter().zip(guards).map(|(call, guard)| call.granted(guard)).collect()
}

fn all_failed(calls: Vec<RecordedCall>, error: Error) -> Error {
    calls.into_iter().fold(error, |error, call| call.failed(error))
}

fn budget(wait: Wait) -> Option<Duration> {
    match wait {
        Wait::For(budget) => Some(budget),
        _ => None,
    }
}

impl fmt::Display for Recorder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, recorded", self.inner)
    }
}

/// A recorded grant of a guard.
#[derive(Debug)]
struct RecordedGrant {
    inner: Arc<dyn Grant>,
    recorder: Recorder,
    /// Whether the record has the loss.
    seen: Arc<AtomicBool>,
}

impl RecordedGrant {
    fn write(&self, what: EventKind) {
        self.recorder.log.write(self.recorder.client, self.inner.key(), what);
    }

    fn release_by(self: Arc<Self>, begin: impl FnOnce() -> Release) -> Release {
        self.note_loss();
        self.write(EventKind::Releasing { holder: self.inner.holder() });
        let mut end = RecordedRelease { grant: self, answered: false };
        let mut release = begin();
        // Records a result that is ready at once, because the caller might never poll the release.
        match Pin::new(&mut release).poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(answer) => Release::ready(end.answer(answer)),
            Poll::Pending => Release::pending(async move { end.answer(release.await) }),
        }
    }

    /// Records a known loss before the events that follow from it.
    fn note_loss(&self) {
        if let Some(reason) = self.inner.lost().reason() {
            if !self.seen.swap(true, Ordering::AcqRel) {
                self.write(EventKind::Lost { holder: self.inner.holder(), reason });
            }
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl Grant for RecordedGrant {
    fn key(&self) -> &LockKey {
        self.inner.key()
    }

    fn holder(&self) -> HolderId {
        self.inner.holder()
    }

    fn stored_holder(&self) -> HolderId {
        self.inner.stored_holder()
    }

    fn token(&self) -> Option<FencingToken> {
        self.inner.token()
    }

    fn mode(&self) -> Mode {
        self.inner.mode()
    }

    fn permit(&self) -> Option<u32> {
        self.inner.permit()
    }

    fn validity(&self) -> Validity {
        let validity = self.inner.validity();
        self.note_loss();
        validity
    }

    fn remaining(&self) -> Option<Duration> {
        self.inner.remaining()
    }

    fn lost(&self) -> Lost {
        self.inner.lost()
    }

    fn validity_changed(self: Arc<Self>, seen: Validity) -> BoxFuture<'static, Validity> {
        Box::pin(async move {
            let validity = Arc::clone(&self.inner).validity_changed(seen).await;
            self.note_loss();
            validity
        })
    }

    fn asked(self: Arc<Self>) -> BoxFuture<'static, ()> {
        Arc::clone(&self.inner).asked()
    }

    fn extension(&self, id: TypeId) -> Option<&(dyn Any + Send + Sync)> {
        self.inner.extension(id)
    }

    fn renew(self: Arc<Self>, ttl: Option<Duration>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(async move {
            let renewed = Arc::clone(&self.inner).renew(ttl).await;
            self.note_loss();
            if renewed.is_ok() {
                self.write(EventKind::Renewed { holder: self.inner.holder() });
            }
            renewed
        })
    }

    fn confirm(self: Arc<Self>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(async move {
            let confirmed = Arc::clone(&self.inner).confirm().await;
            self.note_loss();
            confirmed
        })
    }

    fn relabel(self: Arc<Self>, label: Arc<str>) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(async move {
            let relabelled = Arc::clone(&self.inner).relabel(label).await;
            self.note_loss();
            relabelled
        })
    }

    fn into_ref(self: Arc<Self>, ttl: Duration) -> BoxFuture<'static, Result<PortableHold, Error>> {
        Box::pin(async move {
            let given_out = Arc::clone(&self.inner).into_ref(ttl).await;
            self.note_loss();
            if given_out.is_ok() {
                // After this another client can be granted the key.
                self.write(EventKind::Dropped { holder: self.inner.holder() });
                self.recorder.log.0.open.fetch_sub(1, Ordering::AcqRel);
            }
            given_out
        })
    }

    fn release(self: Arc<Self>) -> Release {
        let inner = Arc::clone(&self.inner);
        self.release_by(|| inner.release())
    }

    fn release_in_batch(self: Arc<Self>) -> Release {
        let inner = Arc::clone(&self.inner);
        self.release_by(|| inner.release_in_batch())
    }

    fn abandon(self: Arc<Self>) {
        self.note_loss();
        let holder = self.inner.holder();
        self.write(EventKind::Dropped { holder });
        self.recorder.log.0.open.fetch_sub(1, Ordering::AcqRel);
        Arc::clone(&self.inner).abandon();
    }
}

/// A release that has not returned. Recorded as a dropped guard if its future is dropped.
struct RecordedRelease {
    grant: Arc<RecordedGrant>,
    answered: bool,
}

impl RecordedRelease {
    fn answer(&mut self, answer: Result<(), Error>) -> Result<(), Error> {
        self.answered = true;
        let (holder, failed) = (self.grant.inner.holder(), answer.as_ref().err().map(Error::kind));
        self.grant.write(EventKind::Released { holder, failed });
        answer
    }
}

impl Drop for RecordedRelease {
    fn drop(&mut self) {
        if !self.answered {
            self.grant.write(EventKind::Dropped { holder: self.grant.inner.holder() });
        }
        self.grant.recorder.log.0.open.fetch_sub(1, Ordering::AcqRel);
    }
}
