//! A small correct lock, written against the API alone, with one fault at a time in what an engine
//! does.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    AcquireOptions, Capabilities, DEFAULT_WAIT, Error, ErrorKind, HolderId, Lock, LockAdmin, LockGuard,
    LockKey, LossReason, Mode, OnCooldown, Wait,
};
use leasehold_engine::{Attempt, Held, HoldRef, Request};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use super::backend_fault::BackendFault;
use super::link::Link;
use super::lock_fault::LockFault as Fault;
use super::mini_backend::capabilities;
use super::mini_events::{Ears, RuntimeEnd};
use super::mini_grant::{Hold, MiniGrant};
use super::mini_turns::{Turn, Turns};
use crate::harness::Op;

/// How often a waiter asks again.
const POLL: Duration = Duration::from_millis(250);
/// The longest that one call to the store may take.
pub(super) const CALL: Duration = Duration::from_secs(10);

/// One client. Dropping it and its guards ends its tasks.
#[derive(Debug)]
pub(crate) struct MiniLock(pub(super) Arc<Client>);

pub(super) struct Client {
    pub(super) fault: Fault,
    pub(super) link: Arc<Link>,
    pub(super) handle: Handle,
    capabilities: Capabilities,
    turns: Arc<Turns>,
    pub(super) holds: Mutex<BTreeMap<LockKey, Weak<Hold>>>,
    pub(super) nudges: Mutex<BTreeMap<LockKey, Arc<Notify>>>,
    pub(super) closing: watch::Sender<bool>,
    closed_once: AtomicBool,
    instance: u128,
    serial: AtomicU64,
}

/// Why there was no grant.
enum Refusal {
    Held,
    NotDue(Duration),
    Failed(Error),
}

/// What the store said to one attempt.
enum Answer {
    Granted(Fresh),
    Held(Held),
}

/// A grant on its way to the caller. Dropped on the way, it is undone.
pub(super) struct Fresh {
    client: Arc<Client>,
    pub(super) request: Request,
    pub(super) granted: leasehold_engine::Granted,
    pub(super) sent: Instant,
    taken: bool,
}

impl MiniLock {
    pub(crate) fn connect(link: &Arc<Link>, fault: Fault) -> Result<Self, Error> {
        let handle = Handle::try_current().map_err(|e| Error::closed().with_source(e))?;
        let client = Arc::new(Client {
            fault,
            link: Arc::clone(link),
            handle,
            capabilities: capabilities(BackendFault::None),
            turns: Turns::new(fault),
            holds: Mutex::default(),
            nudges: Mutex::default(),
            closing: watch::Sender::new(false),
            closed_once: AtomicBool::new(false),
            instance: u128::from(fastrand::u64(..)) << 64 | u128::from(fastrand::u64(..)),
            serial: AtomicU64::new(0),
        });
        link.listen(Arc::new(Ears(Arc::downgrade(&client))));
        let end = RuntimeEnd(Arc::downgrade(&client));
        let mut closing = client.closing.subscribe();
        client.handle.spawn(async move {
            let _end = end;
            // The sender goes with the client.
            while closing.changed().await.is_ok() {}
        });
        Ok(Self(client))
    }
}

impl Client {
    fn is_closed(&self) -> bool {
        *self.closing.borrow()
    }

    async fn closing(&self) {
        let mut closing = self.closing.subscribe();
        if self.fault == Fault::CloseLeavesWaiters || closing.wait_for(|closed| *closed).await.is_err() {
            std::future::pending::<()>().await;
        }
    }

    fn request(&self, key: &LockKey, options: &AcquireOptions) -> Result<Request, Error> {
        self.check(options).map_err(|e| self.named(e, key))?;
        let mut request = Request::new(key.clone(), self.mint());
        request.ttl = options.ttl.filter(|ttl| !ttl.is_zero());
        if let Some(bounds) = self.capabilities.lease {
            let ttl = request.ttl.or(bounds.default).map(|ttl| ttl.clamp(bounds.min, bounds.max));
            request.ttl = ttl;
        }
        request.cooldown = options.cooldown;
        request.label.clone_from(&options.label);
        Ok(request)
    }

    fn mint(&self) -> HolderId {
        let serial = match self.fault {
            Fault::HolderReused => 1,
            _ => self.serial.fetch_add(1, Ordering::Relaxed),
        };
        HolderId::from_parts(self.instance, serial)
    }

    fn check(&self, options: &AcquireOptions) -> Result<(), Error> {
        let mut options = options.clone();
        match self.fault {
            Fault::ZeroTtlAccepted => options.ttl = options.ttl.filter(|ttl| !ttl.is_zero()),
            Fault::LabelUnchecked => options.label = None,
            Fault::SharedAsExclusive => options.mode = Mode::Exclusive,
            _ => {}
        }
        options.check()?;
        if options.mode != Mode::Exclusive {
            return Err(Error::unsupported("shared mode"));
        }
        options.ttl.map_or(Ok(()), |ttl| self.check_ttl(ttl))
    }

    pub(super) fn check_ttl(&self, ttl: Duration) -> Result<(), Error> {
        let ok = self.capabilities.lease.is_some_and(|b| (b.min..=b.max).contains(&ttl));
        if ok || self.fault == Fault::TtlClamped {
            return Ok(());
        }
        Err(Error::new(ErrorKind::InvalidOption, "this TTL is outside of the declared bounds"))
    }

    pub(super) fn named(&self, error: Error, key: &LockKey) -> Error {
        match self.fault {
            Fault::ErrorsUnnamed => error,
            _ => error.with_key(key).with_store("mini-lock"),
        }
    }

    pub(super) fn store_error(&self, kind: ErrorKind) -> Error {
        let kind = if self.fault == Fault::KindFlattened { ErrorKind::Unavailable } else { kind };
        Error::new(kind, "the store was told to answer so")
    }

    /// When a wait that begins now ends.
    fn deadline(&self, wait: Wait) -> Option<Instant> {
        let budget = match (wait, self.fault) {
            (Wait::For(_), Fault::TimeoutIgnored) => return None,
            (Wait::Forever, Fault::ForeverEnds) => Duration::from_secs(60),
            (Wait::Forever, _) => return None,
            (Wait::For(budget), Fault::TimeoutEarly) => budget.mul_f64(0.9),
            (Wait::For(budget), Fault::TimeoutLate) => budget.saturating_add(Duration::from_secs(1)),
            (Wait::For(Duration::ZERO), Fault::ZeroWaits) => Duration::from_secs(1),
            (Wait::For(DEFAULT_WAIT), Fault::ShortDefault) => Duration::from_secs(5),
            (Wait::For(budget), _) => budget,
        };
        match self.fault {
            Fault::HugeWaitPanics => Some(Instant::now() + budget),
            _ => Instant::now().checked_add(budget),
        }
    }

    /// Gets one grant, or says why not. `once`: does not wait for another holder.
    async fn obtain(
        self: &Arc<Self>,
        key: &LockKey,
        options: &AcquireOptions,
        end: Option<Instant>,
        once: bool,
        holder: Option<HolderId>,
    ) -> Result<MiniGrant, Refusal> {
        let mut request = self.request(key, options).map_err(Refusal::Failed)?;
        request.holder = holder.unwrap_or(request.holder);
        if self.is_closed() && self.fault != Fault::WorksAfterClose {
            return Err(Refusal::Failed(self.named(Error::closed(), key)));
        }
        if let Some(hold) = self.live_hold(key).filter(|_| self.fault == Fault::Reentrant) {
            return Ok(MiniGrant(hold));
        }
        let turn = match self.turns.enter(key) {
            Ok(turn) => Some(turn),
            Err(_) if once && self.fault == Fault::TryBarges => None,
            Err(_) if once => return Err(Refusal::Held),
            Err(place) => Some(self.bounded(key, end, place.turn()).await?.ok_or(Refusal::Held)?),
        };
        let nudge = Arc::new(Notify::new());
        lock(&self.nudges).insert(key.clone(), Arc::clone(&nudge));
        loop {
            let answer = self.bounded(key, end.filter(|_| !once), self.ask(&request)).await?;
            let held = match answer.map_err(|e| Refusal::Failed(self.named(e, key)))? {
                Answer::Granted(fresh) => return self.grant(fresh, turn),
                Answer::Held(held) => held,
            };
            if let (Some(again_in), OnCooldown::NotDue) = (held.cooling_for, options.on_cooldown) {
                match self.fault {
                    Fault::NotDueWaits => {}
                    Fault::NotDueIsTimeout => return Err(Refusal::Held),
                    _ => return Err(Refusal::NotDue(again_in)),
                }
            }
            if once {
                return Err(Refusal::Held);
            }
            let poll = match self.fault {
                Fault::NoPoll => Duration::from_secs(3600),
                Fault::BusyPolls => Duration::from_millis(1),
                _ => held.retry_after.map_or(POLL, |d| d.min(POLL)).max(Duration::from_millis(1)),
            };
            let pause = timeout(poll, async {
                // Waiters that ask late are easy to barge past.
                match self.fault {
                    Fault::TryBarges => std::future::pending().await,
                    _ => nudge.notified().await,
                }
            });
            let _ = self.bounded(key, end, pause).await?;
        }
    }

    /// Awaits `work` until the budget ends or the client is closed.
    async fn bounded<T>(
        &self,
        key: &LockKey,
        end: Option<Instant>,
        work: impl Future<Output = T>,
    ) -> Result<T, Refusal> {
        let passed = async {
            match end {
                Some(end) => tokio::time::sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.closing(), if self.fault != Fault::WorksAfterClose => {
                Err(Refusal::Failed(self.named(Error::closed(), key)))
            }
            done = work => Ok(done),
            () = passed => Err(Refusal::Held),
        }
    }

    /// One attempt, in a task of its own: whoever drops the answer has it undone.
    async fn ask(self: &Arc<Self>, request: &Request) -> Result<Answer, Error> {
        let (reply, answer) = oneshot::channel();
        let (client, request) = (Arc::clone(self), request.clone());
        self.handle.spawn(async move {
            let sent = Instant::now();
            let hold = request.hold();
            let call = client.link.call(Op::Acquire, |server, asker| server.acquire(asker, &request));
            let said = match timeout(CALL, call).await {
                Ok(Ok(Ok(Attempt::Granted(granted)))) => {
                    let sent = if client.fault == Fault::ValidityFromAnswer { Instant::now() } else { sent };
                    let client = Arc::clone(&client);
                    Ok(Answer::Granted(Fresh { client, request, granted, sent, taken: false }))
                }
                Ok(Ok(Ok(Attempt::Held(held)))) => Ok(Answer::Held(held)),
                Ok(Ok(Ok(_))) => Ok(Answer::Held(Held::new())),
                Ok(Ok(Err(error))) => Err(error),
                Ok(Err(kind)) => Err(client.store_error(kind)),
                Err(_) => Err(Error::new(ErrorKind::Unavailable, "the store did not answer in time")),
            };
            let unknown = said.is_err();
            let _ = reply.send(said);
            if unknown {
                client.undo(hold).await;
            }
        });
        answer.await.unwrap_or_else(|_| Err(Error::closed()))
    }

    fn grant(self: &Arc<Self>, mut fresh: Fresh, turn: Option<Turn>) -> Result<MiniGrant, Refusal> {
        fresh.taken = true;
        let hold = Hold::begin(self, &mut fresh, turn);
        lock(&self.holds).insert(hold.key.clone(), Arc::downgrade(&hold));
        Ok(MiniGrant(hold))
    }

    /// Frees what may be held, again and again until the store has confirmed it or the lease is over.
    pub(super) async fn undo(&self, hold: HoldRef) {
        if self.fault == Fault::WaiterLeaksGrant {
            return;
        }
        let start = Instant::now();
        let mut pause = Duration::from_millis(50);
        loop {
            let call = self.link.call(Op::Release, |server, asker| server.release(asker, &hold));
            if let Ok(Ok(_)) = timeout(CALL, call).await {
                return;
            }
            if hold.ttl.is_some_and(|ttl| start.elapsed() > ttl) || self.fault == Fault::UndoOnlyOnce {
                return;
            }
            sleep(pause).await;
            pause = (pause * 2).min(Duration::from_secs(5));
        }
    }

    pub(super) fn live_hold(&self, key: &LockKey) -> Option<Arc<Hold>> {
        lock(&self.holds).get(key).and_then(Weak::upgrade).filter(|h| h.is_live())
    }

    pub(super) fn live_holds(&self) -> Vec<Arc<Hold>> {
        lock(&self.holds).values().filter_map(Weak::upgrade).filter(|h| h.is_live()).collect()
    }

    fn refused(&self, refusal: Refusal, key: &LockKey) -> Error {
        match refusal {
            Refusal::Held => self.named(Error::new(ErrorKind::Timeout, "the wait budget ended"), key),
            Refusal::NotDue(again_in) => self.named(Error::not_due(again_in), key),
            Refusal::Failed(error) => error,
        }
    }
}

impl Drop for Fresh {
    fn drop(&mut self) {
        if !self.taken {
            let (client, hold) = (Arc::clone(&self.client), self.request.hold());
            self.client.handle.spawn(async move { client.undo(hold).await });
        }
    }
}

#[async_trait]
impl Lock for MiniLock {
    async fn try_acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<Option<LockGuard>, Error> {
        let client = &self.0;
        let outcome = match client.fault {
            Fault::TryWaits => {
                let end = Some(Instant::now() + Duration::from_secs(1));
                client.obtain(key, options, end, false, None).await
            }
            _ => client.obtain(key, options, None, true, None).await,
        };
        match outcome {
            Ok(grant) => Ok(Some(LockGuard::new(Arc::new(grant)))),
            Err(Refusal::Held) if client.fault != Fault::HeldIsTimeout => Ok(None),
            Err(refusal) => Err(client.refused(refusal, key)),
        }
    }

    async fn acquire(&self, key: &LockKey, options: &AcquireOptions) -> Result<LockGuard, Error> {
        let client = &self.0;
        let zero = options.wait == Wait::For(Duration::ZERO);
        if zero && client.fault == Fault::ZeroNeverAsks {
            return Err(client.refused(Refusal::Held, key));
        }
        let end = client.deadline(options.wait);
        let once = zero && client.fault != Fault::ZeroWaits;
        match client.obtain(key, options, end, once, None).await {
            Ok(grant) => Ok(LockGuard::new(Arc::new(grant))),
            Err(refusal) => Err(client.refused(refusal, key)),
        }
    }

    async fn acquire_all(&self, keys: &[LockKey], options: &AcquireOptions) -> Result<Vec<LockGuard>, Error> {
        let client = &self.0;
        let mut order: Vec<usize> = (0..keys.len()).collect();
        if client.fault != Fault::AllUnordered {
            order.sort_by_key(|i| &keys[*i]);
        }
        let twice = (0..keys.len()).find(|i| keys[..*i].contains(&keys[*i]));
        match (twice, client.fault) {
            (Some(_), Fault::AllKeepsDuplicates) => order.dedup_by_key(|i| &keys[*i]),
            (Some(i), _) => {
                let message = "the same key is given twice; it would wait for itself";
                return Err(client.named(Error::new(ErrorKind::InvalidOption, message), &keys[i]));
            }
            (None, _) => {}
        }
        let mut end = client.deadline(options.wait);
        let once = options.wait == Wait::For(Duration::ZERO);
        let holder = (client.fault == Fault::AllInOneHolder).then(|| client.mint());
        let mut guards = Vec::new();
        for i in order {
            if client.fault == Fault::BudgetPerKey {
                end = client.deadline(options.wait);
            }
            match client.obtain(&keys[i], options, end, once, holder).await {
                Ok(grant) => guards.push((i, LockGuard::new(Arc::new(grant)))),
                Err(refusal) => {
                    if client.fault == Fault::AllNotUndone {
                        guards.into_iter().for_each(std::mem::forget);
                    } else {
                        // What the store answers to this changes nothing: the caller has no lock.
                        let _ = leasehold_api::release_all(guards.into_iter().map(|(_, g)| g)).await;
                    }
                    return Err(client.refused(refusal, &keys[i]));
                }
            }
        }
        // Some may have been lost while others were waited for.
        let lost = guards.iter().find_map(|(i, g)| Some((keys[*i].clone(), g.lost().reason()?)));
        if let Some((key, reason)) = lost {
            let _ = leasehold_api::release_all(guards.into_iter().map(|(_, g)| g)).await;
            return Err(client.named(Error::lost(reason), &key));
        }
        if client.fault != Fault::AllWrongOrder {
            guards.sort_by_key(|(i, _)| *i);
        }
        Ok(guards.into_iter().map(|(_, guard)| guard).collect())
    }

    async fn release(&self, guard: LockGuard) -> Result<(), Error> {
        guard.release().await
    }

    async fn close(&self) -> Result<(), Error> {
        let client = Arc::clone(&self.0);
        let twice = client.closed_once.swap(true, Ordering::AcqRel);
        if twice && client.fault == Fault::CloseTwiceFails {
            return Err(Error::closed());
        }
        client.closing.send_replace(true);
        client.link.server().leave_all(client.link.client());
        let mut freeing = Vec::new();
        for hold in client.live_holds() {
            if client.fault == Fault::CloseIsSilent {
                hold.end_silently();
            } else {
                hold.lose(LossReason::Closed);
            }
            if client.fault != Fault::CloseLeavesHolds {
                let (client, reference) = (Arc::clone(&client), hold.reference());
                freeing.push(self.0.handle.spawn(async move { client.undo(reference).await }));
            }
        }
        let work = async {
            for task in freeing {
                let _ = task.await;
            }
        };
        match timeout(CALL, work).await {
            Ok(()) => Ok(()),
            Err(_) if client.fault == Fault::CloseHangs => std::future::pending().await,
            Err(_) => Err(Error::new(ErrorKind::OutcomeUnknown, "the store did not confirm every release")),
        }
    }

    fn capabilities(&self) -> &Capabilities {
        &self.0.capabilities
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }
}

impl fmt::Display for MiniLock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("mini-lock")
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("fault", &self.fault).finish_non_exhaustive()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
