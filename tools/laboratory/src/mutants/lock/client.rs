//! One client of the small lock: attempts, waits, and the undo of abandoned attempts.

mod turn;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use leasehold_api::{
    AcquireOptions, Capabilities, DEFAULT_WAIT, Error, ErrorKind, HolderId, LockKey, Mode, OnCooldown, Wait,
};
use leasehold_engine::{Attempt, Contended, HoldRef, Request};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};

use super::super::connection::Connection;
use super::batch::Batch;
use super::baton::Baton;
use super::fault::LockFault as Fault;
use super::grant::{Hold, SmallGrant};
use super::outage::{Outage, Outages, is_passing, no_answer};
use super::permits::{Permit, Permits};
use super::undo::{AwaitedAttempt, UndeliveredGrant};
use leasehold_conformance::Op;

/// Interval between the attempts of a waiter.
const POLL: Duration = Duration::from_millis(250);
/// Timeout of one call to the store.
pub(super) const CALL: Duration = Duration::from_secs(10);

pub(super) struct SmallClient {
    pub(super) fault: Fault,
    pub(super) connection: Arc<Connection>,
    pub(super) handle: Handle,
    pub(super) capabilities: Capabilities,
    pub(super) permits: Arc<Permits>,
    pub(super) holds: Mutex<BTreeMap<LockKey, Weak<Hold>>>,
    pub(super) outages: Outages,
    pub(super) batch: Batch,
    pub(super) wakeups: Mutex<BTreeMap<LockKey, Arc<Notify>>>,
    /// Notified when a grant of this client starts a cooldown.
    pub(super) windows: Notify,
    pub(super) closing: watch::Sender<bool>,
    pub(super) closed_once: AtomicBool,
    pub(super) undoing: watch::Sender<Vec<HoldRef>>,
    pub(super) instance: u128,
    pub(super) serial: AtomicU64,
}

/// Reason why an acquire got no grant.
pub(super) enum AcquireFailure {
    Contended,
    NotDue(Duration),
    Failed(Error),
}

/// Reply of the store to one attempt.
enum AttemptReply {
    Granted(Box<UndeliveredGrant>),
    Contended(Contended),
    /// The store rejected the request before it changed any state.
    Refused(Error),
}

impl SmallClient {
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

    pub(super) fn mint(&self) -> HolderId {
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
            Fault::MaxHoldZeroAccepted => options.max_hold = options.max_hold.filter(|d| !d.is_zero()),
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
            _ => error.with_key(key).with_store("small-lock"),
        }
    }

    pub(super) fn store_error(&self, kind: ErrorKind) -> Error {
        let kind = if self.fault == Fault::KindFlattened { ErrorKind::Unavailable } else { kind };
        Error::new(kind, "the store was told to answer so")
    }

    /// Returns the deadline of a wait that starts now. `None` if it has no limit.
    pub(super) fn deadline(&self, wait: Wait) -> Option<Instant> {
        let budget = match (wait, self.fault) {
            (Wait::For(_), Fault::TimeoutIgnored) => return None,
            (Wait::Forever, Fault::ForeverEnds) => Duration::from_secs(60),
            (Wait::Forever, _) => return None,
            (Wait::For(budget), Fault::TimeoutEarly) => budget.mul_f64(0.9),
            (Wait::For(budget), Fault::TimeoutLate) => budget.saturating_add(Duration::from_secs(1)),
            (Wait::For(Duration::ZERO), Fault::ZeroWaits) => Duration::from_secs(1),
            (Wait::For(DEFAULT_WAIT), Fault::ShortDefault) => Duration::from_secs(5),
            (Wait::For(budget), _) => budget,
            _ => return None,
        };
        match self.fault {
            Fault::HugeWaitPanics => Some(Instant::now() + budget),
            _ => Instant::now().checked_add(budget),
        }
    }

    /// Acquires one grant. Does not wait for another holder if `once`.
    pub(super) async fn obtain(
        self: &Arc<Self>,
        key: &LockKey,
        options: &AcquireOptions,
        end: Option<Instant>,
        once: bool,
        holder: Option<HolderId>,
        queued: Option<Permit>,
    ) -> Result<SmallGrant, AcquireFailure> {
        let asked = Instant::now();
        let mut request = self.request(key, options).map_err(AcquireFailure::Failed)?;
        request.waits = !once;
        request.holder = holder.unwrap_or(request.holder);
        if self.is_closed() && self.fault != Fault::WorksAfterClose {
            return Err(AcquireFailure::Failed(self.named(Error::closed(), key)));
        }
        if let Some(hold) = self.live_hold(key).filter(|_| self.fault == Fault::Reentrant) {
            return Ok(SmallGrant(hold));
        }
        let entered = match queued {
            Some(permit) => Ok(permit),
            None => self.permits.enter(&request),
        };
        let permit = match entered {
            Ok(permit) => Some(permit),
            Err(_) if once && self.fault == Fault::TryBarges => None,
            Err(waiter) => {
                let jumps = once && self.fault == Fault::TryJumpsTheChain;
                if let Some(baton) = jumps.then(|| self.permits.take_baton(key)).flatten() {
                    return Ok(self.adopt(&request, *baton, None, options.max_hold));
                }
                Some(self.permit(key, options, end, once, waiter).await?)
            }
        };
        if let Some(baton) = permit.as_ref().and_then(Permit::baton) {
            if baton.is_valid() {
                return Ok(self.adopt(&request, *baton, permit, options.max_hold));
            }
            baton.release(None);
        }
        let wakeup = Arc::new(Notify::new());
        lock(&self.wakeups).insert(key.clone(), Arc::clone(&wakeup));
        let outage = Outage::none_yet(&self.outages, key);
        let (mut end, mut failed, mut was_contended) = (end, None, false);
        if self.fault == Fault::BudgetFromTurn {
            end = self.deadline(options.wait);
        }
        loop {
            let answer = self.bounded(key, end.filter(|_| !once), self.ask(&request)).await;
            let answer = answer.map_err(|refusal| self.at_end(refusal, failed.take(), was_contended, key))?;
            let answer = match answer {
                // The drop undoes the late grant, and the loop retries.
                Ok(AttemptReply::Granted(mut fresh)) if self.is_late(&fresh) => {
                    let error =
                        Error::new(ErrorKind::Unavailable, "the lease had ended when the grant arrived");
                    if self.fault == Fault::LateGrantIsKept {
                        fresh.taken = true;
                        return Err(AcquireFailure::Failed(self.named(error, key)));
                    }
                    Err(error)
                }
                answer => answer,
            };
            let failure = match &answer {
                Ok(AttemptReply::Refused(error)) => Some((error, false)),
                Err(error) => Some((error, options.cooldown.is_some())),
                Ok(_) => None,
            };
            if let Some((error, may_cool)) = failure {
                if is_passing(error) && self.asks_again(options, once, may_cool) {
                    let error = self.named(error.clone(), key);
                    outage.goes_on(error.clone());
                    failed = Some(error);
                    // A new holder id, because the undo of the failed attempt releases the old id.
                    request.holder = holder.unwrap_or_else(|| self.mint());
                    let pause = if self.fault == Fault::RetriesWithoutPause { Duration::ZERO } else { POLL };
                    let paused = self.bounded(key, end, sleep(pause)).await;
                    paused.map_err(|refusal| self.at_end(refusal, failed.clone(), was_contended, key))?;
                    if self.fault == Fault::FailureRestartsBudget {
                        end = self.deadline(options.wait);
                    }
                    continue;
                }
            }
            if self.fault != Fault::OutageIsRemembered {
                outage.ends();
            }
            let held = match answer.map_err(|e| AcquireFailure::Failed(self.named(e, key)))? {
                AttemptReply::Granted(fresh) => {
                    let waited = match self.fault {
                        Fault::MaxHoldFromRequest => asked.elapsed(),
                        _ => Duration::ZERO,
                    };
                    let forgotten = self.fault == Fault::MaxHoldOfFirstAttempt && failed.is_some();
                    let max_hold =
                        options.max_hold.filter(|_| !forgotten).map(|limit| limit.saturating_sub(waited));
                    return Ok(self.grant(*fresh, permit, max_hold));
                }
                AttemptReply::Contended(held) => {
                    let is_own = self.undoing.borrow().iter().any(|left| left.key == *key);
                    was_contended |= !is_own || self.fault == Fault::OwnAttemptBlamesHolder;
                    held
                }
                AttemptReply::Refused(error) => return Err(AcquireFailure::Failed(self.named(error, key))),
            };
            if let (Some(retry_after), OnCooldown::NotDue) = (held.cooling_for, options.on_cooldown) {
                match self.fault {
                    Fault::NotDueWaits => {}
                    Fault::NotDueIsTimeout => return Err(AcquireFailure::Contended),
                    _ => return Err(AcquireFailure::NotDue(retry_after)),
                }
            }
            if once {
                return Err(self.at_end(AcquireFailure::Contended, None, was_contended, key));
            }
            let poll = match self.fault {
                Fault::NoPoll => Duration::from_secs(3600),
                Fault::BusyPolls => Duration::from_millis(1),
                _ => held.retry_after.map_or(POLL, |d| d.min(POLL)).max(Duration::from_millis(1)),
            };
            let pause = timeout(poll, async {
                // Ignores the wake-up, because a waiter that retries late is easy to overtake.
                match self.fault {
                    Fault::TryBarges => std::future::pending().await,
                    _ => wakeup.notified().await,
                }
            });
            let woken = self.bounded(key, end, pause).await;
            let woken = woken.map_err(|refusal| self.at_end(refusal, None, was_contended, key))?.is_ok();
            if woken && self.fault == Fault::BudgetFromWakeUp {
                end = self.deadline(options.wait);
            }
        }
    }

    /// Returns the failure that the caller gets when its budget ends. The failure is *contended* only if the store
    /// has reported another holder.
    fn at_end(
        &self,
        refusal: AcquireFailure,
        failed: Option<Error>,
        was_contended: bool,
        key: &LockKey,
    ) -> AcquireFailure {
        let was_contended = was_contended && (self.fault != Fault::OutageBlamesStore || failed.is_none());
        match refusal {
            AcquireFailure::Contended if !was_contended && self.fault != Fault::TimeoutBlamesHolder => {
                AcquireFailure::Failed(failed.unwrap_or_else(|| self.named(no_answer(), key)))
            }
            other => other,
        }
    }

    /// Returns whether to retry after a passing failure. Does not retry if `may_cool`, because an unconfirmed grant
    /// might have started a cooldown that the retry would run into.
    fn asks_again(&self, options: &AcquireOptions, once: bool, may_cool: bool) -> bool {
        let may_cool = may_cool && self.fault != Fault::RetriesIntoCooldown;
        match self.fault {
            Fault::FailureEndsWait => false,
            Fault::GiveUpIgnored => !once && !may_cool,
            Fault::TryAsksAgain => !may_cool,
            _ => !once && !options.give_up_on_failure && !may_cool,
        }
    }

    /// Awaits `work` until `end` or until the client is closed.
    async fn bounded<T>(
        &self,
        key: &LockKey,
        end: Option<Instant>,
        work: impl Future<Output = T>,
    ) -> Result<T, AcquireFailure> {
        let passed = async {
            match end {
                Some(end) => tokio::time::sleep_until(end).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = self.closing(), if self.fault != Fault::WorksAfterClose => {
                Err(AcquireFailure::Failed(self.named(Error::closed(), key)))
            }
            done = work => Ok(done),
            () = passed => Err(AcquireFailure::Contended),
        }
    }

    /// Makes one attempt in a separate task. If the returned future is dropped, the attempt is undone.
    async fn ask(self: &Arc<Self>, request: &Request) -> Result<AttemptReply, Error> {
        let (reply, answer) = oneshot::channel();
        let (client, request) = (Arc::clone(self), request.clone());
        let mut hold = request.hold();
        hold.unused = true;
        let over = Arc::new(AtomicBool::new(false));
        let _awaited =
            AwaitedAttempt { client: Arc::clone(self), hold: hold.clone(), over: Arc::clone(&over) };
        self.handle.spawn(async move {
            let sent = Instant::now();
            if let Some(kind) = client.connection.refusal(Op::Acquire).await {
                over.store(true, Ordering::Release);
                let _ = reply.send(Ok(AttemptReply::Refused(client.store_error(kind))));
                if client.fault == Fault::RefusalIsUndone {
                    client.undo(hold).await;
                } else {
                    client.end_undo(&hold);
                }
                return;
            }
            let call = client
                .connection
                .call(Op::Acquire, |_, requester| client.connection.attempt(requester, &request));
            let said = match timeout(CALL, call).await {
                Ok(Ok(Ok(Attempt::Granted(granted)))) => {
                    let sent = if client.fault == Fault::ValidityFromAnswer { Instant::now() } else { sent };
                    let client = Arc::clone(&client);
                    Ok(AttemptReply::Granted(Box::new(UndeliveredGrant {
                        client,
                        request,
                        granted,
                        sent,
                        taken: false,
                    })))
                }
                Ok(Ok(Ok(Attempt::Contended(held)))) => Ok(AttemptReply::Contended(held)),
                Ok(Ok(Ok(Attempt::Refused(error)))) => Ok(AttemptReply::Refused(error)),
                Ok(Ok(Ok(_))) => Ok(AttemptReply::Contended(Contended::new())),
                Ok(Ok(Err(error))) => Err(error),
                Ok(Err(kind)) => Err(client.store_error(kind)),
                Err(_) => Err(no_answer()),
            };
            over.store(true, Ordering::Release);
            let (unknown, granted) = (said.is_err(), matches!(said, Ok(AttemptReply::Granted(_))));
            let _ = reply.send(said);
            if unknown {
                client.undo(hold).await;
            } else if !granted {
                client.end_undo(&hold);
            }
        });
        answer.await.unwrap_or_else(|_| Err(Error::closed()))
    }

    fn grant(
        self: &Arc<Self>,
        mut fresh: UndeliveredGrant,
        permit: Option<Permit>,
        max_hold: Option<Duration>,
    ) -> SmallGrant {
        fresh.taken = true;
        let hold = Hold::begin(self, &mut fresh, permit, max_hold);
        lock(&self.holds).insert(hold.key.clone(), Arc::downgrade(&hold));
        if fresh.request.cooldown.is_some() {
            self.windows.notify_waiters();
        }
        SmallGrant(hold)
    }

    /// Makes the grant of a caller to whom a hold of this client was passed.
    fn adopt(
        self: &Arc<Self>,
        request: &Request,
        baton: Baton,
        permit: Option<Permit>,
        max_hold: Option<Duration>,
    ) -> SmallGrant {
        let hold = Hold::adopt(self, request, baton, permit, max_hold);
        lock(&self.holds).insert(hold.key.clone(), Arc::downgrade(&hold));
        SmallGrant(hold)
    }

    /// Returns whether the lease had ended when the grant arrived.
    fn is_late(&self, fresh: &UndeliveredGrant) -> bool {
        self.fault != Fault::LateGrantIsValid && fresh.ttl().mul_f64(0.9) <= fresh.sent.elapsed()
    }

    pub(super) fn live_hold(&self, key: &LockKey) -> Option<Arc<Hold>> {
        lock(&self.holds).get(key).and_then(Weak::upgrade).filter(|h| h.is_live())
    }

    pub(super) fn live_holds(&self) -> Vec<Arc<Hold>> {
        lock(&self.holds).values().filter_map(Weak::upgrade).filter(|h| h.is_live()).collect()
    }

    pub(super) fn refused(&self, refusal: AcquireFailure, key: &LockKey) -> Error {
        match refusal {
            AcquireFailure::Contended => {
                self.named(Error::new(ErrorKind::Timeout, "the wait budget ended"), key)
            }
            AcquireFailure::NotDue(retry_after) => self.named(Error::not_due(retry_after), key),
            AcquireFailure::Failed(error) => error,
        }
    }
}

impl fmt::Debug for SmallClient {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("fault", &self.fault).finish_non_exhaustive()
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
