//! The random actions of the callers of one client.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use fastrand::Rng;
use leasehold_api::{
    AcquireOptions, DEFAULT_WAIT, Error, ErrorKind, FencingToken, HolderId, Lock, LockGuard, LockKey, Mode,
    MultiGuard, OnCooldown, Validity, Wanted,
};
use tokio::time::{Instant, sleep, timeout};

use super::backends::LONGEST_TTL;
use super::client::{ClientTurns, InTurn};
use super::coverage::Situation;
use super::disturbance::Disturbance as D;
use super::judge::Judge;

/// The options of a call.
#[derive(Clone, Debug)]
pub(crate) struct CallOptions {
    /// The wait budget. `None` for an unlimited wait, zero for a try.
    pub(crate) budget: Option<Duration>,
    pub(crate) cooldown: bool,
    /// Whether the call returns `NotDue` instead of waiting for a cooldown.
    pub(crate) not_due: bool,
    pub(crate) gives_up: bool,
    pub(crate) max_hold: Option<Duration>,
    /// Whether the call is a try.
    pub(crate) tries: bool,
    /// The lease, if the store has leases.
    pub(crate) ttl: Option<Duration>,
    /// The number of keys.
    pub(crate) keys: u32,
    pub(crate) mode: Mode,
}

/// One caller, which is a task of a client.
pub(crate) struct Caller {
    pub(crate) client: u64,
    pub(crate) lock: Arc<dyn Lock>,
    pub(crate) judge: Arc<Judge>,
    pub(crate) turns: Arc<ClientTurns>,
    pub(crate) keys: Vec<LockKey>,
    pub(crate) dice: Rng,
    /// Separate, because schedules without hand-overs stay the same.
    pub(crate) hand_over_dice: Rng,
    /// Separate for the same reason.
    pub(crate) mode_dice: Rng,
    /// Whether leases can be longer than the schedule.
    pub(crate) long_leases: bool,
    /// When the caller stops starting calls.
    pub(crate) until: Instant,
}

/// A call that has not returned. Recorded as cancelled if it is dropped.
pub(super) struct PendingCall {
    pub(super) judge: Arc<Judge>,
    pub(super) calls: Vec<u64>,
}

impl PendingCall {
    pub(super) fn granted(mut self, guards: &[LockGuard]) {
        for (call, guard) in std::mem::take(&mut self.calls).into_iter().zip(guards) {
            self.judge.granted(call, guard);
        }
    }

    fn contended(mut self) {
        std::mem::take(&mut self.calls).into_iter().for_each(|call| self.judge.contended(call));
    }

    pub(super) fn failed(mut self, error: &Error) {
        std::mem::take(&mut self.calls).into_iter().for_each(|call| self.judge.failed(call, error));
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        self.calls.iter().for_each(|call| self.judge.cancelled(*call));
    }
}

/// A guard of a caller, or its release. Its drop is recorded.
pub(super) struct HeldGuard {
    pub(super) judge: Arc<Judge>,
    pub(super) holder: HolderId,
    pub(super) guard: Option<LockGuard>,
}

impl HeldGuard {
    pub(super) fn new(judge: &Arc<Judge>, guard: LockGuard) -> Self {
        Self { judge: Arc::clone(judge), holder: guard.holder(), guard: Some(guard) }
    }
}

impl Drop for HeldGuard {
    fn drop(&mut self) {
        self.judge.check_guards();
        drop(self.guard.take());
        self.judge.dropped(self.holder);
    }
}

impl Caller {
    pub(crate) async fn run(mut self) {
        let steps = self.dice.u32(1..6);
        for _ in 0..steps {
            let pause = self.ms(&[0, 30, 300, 2_000]);
            sleep(pause).await;
            if Instant::now() >= self.until {
                return;
            }
            if self.step().await.is_err() {
                // The lock is closed.
                return;
            }
        }
    }

    /// Makes one call and uses its grant. `Err` after the lock is closed.
    async fn step(&mut self) -> Result<(), ()> {
        let several = self.dice.u8(..6) == 0 && self.keys.len() > 1;
        let mut keys = self.keys.clone();
        self.dice.shuffle(&mut keys);
        keys.truncate(if several { self.dice.usize(2..=keys.len()) } else { 1 });
        let tries = self.dice.u8(..4) == 0;
        let mut options = AcquireOptions::new();
        let budget = match self.dice.u8(..8) {
            _ if tries => Some(Duration::ZERO),
            0 => None,
            1 if self.dice.bool() => Some(DEFAULT_WAIT),
            1 => Some(Duration::ZERO),
            2 => Some(Duration::from_millis(200)),
            3..=5 => Some(Duration::from_secs(2)),
            _ => Some(Duration::from_secs(15)),
        };
        options = match budget {
            Some(DEFAULT_WAIT) => options,
            Some(budget) => options.wait(budget),
            None => options.wait_forever(),
        };
        let lease = self.lock.capabilities().lease;
        if lease.is_some() && self.dice.bool() {
            let longest = lease.map(|bounds| bounds.max).filter(|_| self.long_leases);
            let ttl = [800, 1_500, 5_000, 600_000][self.dice.usize(..4)];
            options = options.ttl(Duration::from_millis(ttl).min(longest.unwrap_or(LONGEST_TTL)));
        }
        let max_hold =
            (self.dice.u8(..6) == 0).then(|| self.ms(&[200, 900, 2_500]) + Duration::from_millis(1));
        if let Some(most) = max_hold {
            options = options.max_hold(most);
        }
        let cools = !several && !self.judge.cooldown.is_zero() && self.dice.u8(..3) == 0;
        let not_due = cools && self.dice.bool();
        if cools {
            options = options.cooldown(self.judge.cooldown);
            if not_due {
                options = options.on_cooldown(OnCooldown::NotDue);
            }
        }
        let gives_up = self.dice.u8(..5) == 0;
        if gives_up {
            options = options.give_up_on_failure();
        }
        let wanted = self.wanted(&keys, cools);
        let asked = CallOptions {
            budget,
            cooldown: cools,
            not_due,
            gives_up: gives_up || budget == Some(Duration::ZERO),
            max_hold,
            tries,
            ttl: lease.and_then(|lease| options.ttl.or(lease.default)),
            keys: u32::try_from(keys.len()).unwrap_or(1),
            mode: Mode::Exclusive,
        };
        let patience = (self.dice.u8(..4) == 0).then(|| self.ms(&[5, 120, 1_200]));
        let patience = patience.filter(|_| self.judge.network.happens(D::Cancel));
        let judge = Arc::clone(&self.judge);
        let ask = |Wanted { key, mode, .. }: &Wanted| {
            judge.ask(self.client, key, CallOptions { mode: *mode, ..asked.clone() }, &self.turns)
        };
        let calls = wanted.iter().map(ask).collect();
        let pending = PendingCall { judge: Arc::clone(&judge), calls };
        let lock = Arc::clone(&self.lock);
        let call = acquire(&*lock, &wanted, &options, tries);
        // Drops the call when it is woken, for example because a hold was passed to it.
        let leaves_when_woken = self.judge.network.hands_over && self.hand_over_dice.u8(..5) == 0;
        let outcome = match patience {
            _ if leaves_when_woken && self.judge.network.happens(D::Cancel) => {
                match until_woken(call, self.hand_over_dice.u8(1..=3)).await {
                    Some(outcome) => outcome,
                    None => return Ok(()),
                }
            }
            None => call.await,
            Some(patience) => match timeout(patience, call).await {
                Ok(outcome) => outcome,
                Err(_) => return Ok(()),
            },
        };
        match outcome {
            Ok(Some(guards)) => {
                pending.granted(&guards);
                if guards.len() > 1 {
                    self.judge.note(Situation::Several);
                }
                let held_guards =
                    guards.into_iter().map(|guard| HeldGuard::new(&self.judge, guard)).collect();
                self.hold(held_guards, options.ttl).await;
            }
            Ok(None) => pending.contended(),
            Err(error) => {
                pending.failed(&error);
                if error.kind() == ErrorKind::Closed {
                    return Err(());
                }
            }
        }
        Ok(())
    }

    /// Draws a mode for each key. A call with a cooldown is exclusive.
    fn wanted(&mut self, keys: &[LockKey], cools: bool) -> Vec<Wanted> {
        let network = Arc::clone(&self.judge.network);
        let mut wanted = Vec::new();
        for key in keys {
            let drawn = network.modes.as_ref().map(|modes| modes.of_call(&mut self.mode_dice));
            let mode = drawn.filter(|_| !cools).unwrap_or_default();
            wanted.push(Wanted::new(key.clone(), mode));
        }
        wanted
    }

    async fn hold(&mut self, held_guards: Vec<HeldGuard>, ttl: Option<Duration>) {
        for mut held_guard in held_guards {
            let Some(guard) = held_guard.guard.take() else { continue };
            let (key, token) = (guard.key().clone(), guard.token());
            let read = self.judge.read(&guard);
            let first = self.ms(&[0, 20, 400, 3_000]);
            held_guard.guard = Some(guard);
            sleep(first).await;
            let Some(guard) = &held_guard.guard else { continue };
            if self.dice.u8(..3) == 0 {
                let another = ttl.filter(|_| self.dice.bool());
                let another = another.map(|_| Duration::from_millis(self.dice.u64(600..6_000)));
                let asked = Instant::now();
                let outcome = match another {
                    Some(another) => {
                        self.judge.renews_for_another(guard);
                        guard.renew_for(another).await
                    }
                    None => {
                        self.judge.renews(guard);
                        guard.renew().await
                    }
                };
                if outcome.is_ok() {
                    self.judge.renewed(guard);
                    if let Some(another) = another {
                        self.judge.renewed_for(guard, another, asked);
                    }
                }
            }
            if guard.mode() == Mode::Exclusive && guard.validity() == Validity::Valid {
                // The write travels for a while and cannot be recalled.
                let (judge, number) = (Arc::clone(&self.judge), token.map_or(0, FencingToken::as_u64));
                let way = self.ms(&[1, 1, 50, 5_000]);
                tokio::spawn(async move {
                    sleep(way).await;
                    judge.write(&key, number, read);
                });
            }
            if self.dice.u8(..5) == 0 {
                // Waits until the guard is lost, for at most 8 s.
                let lost = timeout(Duration::from_secs(8), guard.lost()).await.is_ok();
                if lost && guard.validity().is_held() {
                    self.judge.violation("C9", "lost() has fired and the guard reads held");
                }
            } else {
                let second = self.ms(&[0, 0, 500]);
                sleep(second).await;
            }
            if guard.token() != token {
                self.judge.violation("C8", format!("the token of {} changed while it was held", guard.key()));
            }
            if guard.validity() == Validity::Lost {
                // A guard that reads lost must complete `lost()`.
                if timeout(Duration::from_secs(2), guard.lost()).await.is_err() {
                    self.judge
                        .violation("C9", format!("{} reads lost, and lost() does not fire", guard.key()));
                }
            }
            self.end_hold(held_guard).await;
        }
    }

    async fn end_hold(&mut self, mut held_guard: HeldGuard) {
        let how = self.dice.u8(..10);
        let Some(guard) = held_guard.guard.take() else { return };
        if how == 0 {
            held_guard.guard = Some(guard);
            return;
        }
        if how == 3 && self.judge.network.happens(D::Cancel) {
            // Starts a release and never polls it.
            drop(guard.into_grant().release());
            return;
        }
        let holder = guard.holder();
        self.judge.releasing(&guard.handle());
        let release = guard.release();
        if how <= 2 && self.judge.network.happens(D::Cancel) {
            let patience = self.ms(&[0, 2, 200]);
            if let Ok(answer) = timeout(patience, release).await {
                self.judge.released(holder, &answer);
            }
            return;
        }
        let answer = release.await;
        self.judge.released(holder, &answer);
        if self.judge.is_in_flight(self.client, holder) && self.hand_over_dice.u8(..4) == 0 {
            self.close().await;
        }
    }

    /// Closes the lock while a hold of it is on its way to another caller.
    async fn close(&self) {
        if !self.judge.network.happens(D::Close) {
            return;
        }
        self.judge.note(Situation::ClosedInAHandOver);
        self.judge.client_gone(self.client);
        let lock = Arc::clone(&self.lock);
        let mut closing = Box::pin(async move { lock.close().await });
        // Begins to close at once, before the other caller runs.
        let closed = poll_fn(|cx| Poll::Ready(closing.as_mut().poll(cx))).await;
        if closed.is_pending() {
            tokio::spawn(InTurn::new(&self.turns, closing));
        }
    }

    /// Draws a time up to one of these numbers of milliseconds.
    pub(super) fn ms(&mut self, most: &[u64]) -> Duration {
        let most = most[self.dice.usize(..most.len())];
        Duration::from_millis(self.dice.u64(..=most))
    }
}

/// Takes the wanted keys. Returns `None` if a try finds one of them held.
async fn acquire(
    lock: &dyn Lock,
    wanted: &[Wanted],
    options: &AcquireOptions,
    tries: bool,
) -> Result<Option<Vec<LockGuard>>, Error> {
    if let [Wanted { key, mode, .. }] = wanted {
        let options = options.clone().mode(*mode);
        return if tries {
            lock.try_acquire(key, &options).await.map(|guard| guard.map(|guard| vec![guard]))
        } else {
            lock.acquire(key, &options).await.map(|guard| Some(vec![guard]))
        };
    }
    let all_of = |guards: MultiGuard| guards.into_iter().collect();
    let keys: Vec<_> = wanted.iter().map(|wanted| wanted.key.clone()).collect();
    let is_mixed = wanted.iter().any(|wanted| wanted.mode != Mode::Exclusive);
    match (is_mixed, tries) {
        (true, true) => lock.try_acquire_wanted(wanted, options).await.map(|guards| guards.map(all_of)),
        (true, false) => lock.acquire_wanted(wanted, options).await.map(all_of).map(Some),
        (false, true) => lock.try_acquire_all(&keys, options).await.map(|guards| guards.map(all_of)),
        (false, false) => lock.acquire_all(&keys, options).await.map(all_of).map(Some),
    }
}

/// Polls `call` until it was woken `times` times. Returns `None` if it is not ready.
async fn until_woken<F: Future>(call: F, times: u8) -> Option<F::Output> {
    let (mut call, mut polls) = (pin!(call), 0);
    poll_fn(|cx| {
        if polls == times {
            return Poll::Ready(None);
        }
        polls += 1;
        call.as_mut().poll(cx).map(Some)
    })
    .await
}
