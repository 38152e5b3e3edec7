//! One acquisition, of one key or several, from the queue to the guards.
//!
//! ```text
//!   queue ------> yield ------> ask the store for all keys that are left, in order
//!   (permits)                     |  all granted: done
//!      ^                          |  one contended: what was granted before it is ours and is renewed,
//!      |                          |  what was granted behind it is given back
//!      |                          v
//!      |                        wait for that one, then ask for the rest
//!      |                          |
//!      +------ outage <-----------+  the store fails: what it may have begun is undone, then begin again with
//!                                    what is left, within the budget
//! ```
//!
//! Each key is an [`Entry`]. Its stage is the state of its request at the store: none (`Idle`), unknown
//! (`Asked`), granted (`Granted`), or live here (`Taken`). Dropping the acquisition at any point undoes each
//! entry according to its stage.

pub(crate) mod adoption;
mod enter;
mod finish;
mod outage;
mod undo;

use std::future::{Future, poll_fn};
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Error, ErrorKind, LockGuard, LockKey, Mode, OnCooldown};
use tokio::sync::Notify;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::acquire::budget::{Budget, Limit, Refusal};
use crate::acquire::entry::{Entry, Stage, StoreCall};
use crate::acquire::fast_path::PendingAcquire;
use crate::acquire::unconfirmed::ContentionSource;
use crate::acquire::waiting::{Paused, pause, poll_in};
use crate::clock::Moment;
use crate::core::Alive;
use crate::hold::Hold;
use crate::metrics::Event;
use crate::store::backend::{Attempt, Contended, HoldRef, Request, Waiting};
use crate::store::missing_replies_error;

use self::outage::Outage;

/// The pause between two waits in the store's queue, if the first one ended without a grant.
const UNQUEUED: Duration = Duration::from_millis(100);

/// How long a caller whose budget has ended stays while its wait leaves the store's queue.
const LEAVING: Duration = Duration::from_millis(100);

/// One acquisition. If dropped, the driver finishes its call and releases its holds.
pub(crate) struct Acquisition {
    core: Arc<Alive>,
    entries: Vec<Entry>,
    policy: OnCooldown,
    budget: Budget,
    /// The call under way.
    call: Option<StoreCall>,
    /// Stops the call, if it is a wait in the store's queue.
    stop: Option<CancellationToken>,
    /// Whether the call was ever polled.
    polled: bool,
    /// Whether the call exceeded its limit. The next waiter then calls the store without waiting for the
    /// release.
    timed_out: bool,
    /// The holders that contended replies pointed to: another client, or our own unconfirmed attempt.
    contended_by: ContentionSource,
    /// Whether a failure of the store ends the acquisition.
    gives_up: bool,
    /// The hold of another client that the acquisition takes over, instead of acquiring its key. Its request is repeated
    /// by the same id, because undoing it would end that hold.
    adopts: Option<Box<HoldRef>>,
    /// The store's failure. Set while the store fails and is retried.
    outage: Option<Box<Outage>>,
}

impl Acquisition {
    pub(crate) fn new(core: &Arc<Alive>, options: &AcquireOptions, once: bool) -> Self {
        let budget = if once { Budget::Once } else { Budget::start(options.wait) };
        Self {
            core: Arc::clone(core),
            entries: Vec::new(),
            policy: options.on_cooldown,
            budget,
            gives_up: options.give_up_on_failure || budget == Budget::Once,
            outage: None,
            adopts: None,
            call: None,
            stop: None,
            polled: false,
            timed_out: false,
            contended_by: ContentionSource::default(),
        }
    }

    /// Acquires the hold that the fast path has started, then all of `holds`, which have different keys in
    /// order.
    pub(crate) async fn run(
        mut self,
        begun: Option<PendingAcquire>,
        holds: Vec<Arc<Hold>>,
    ) -> Result<Vec<LockGuard>, Refusal> {
        let mut contended = None;
        if let Some(PendingAcquire { hold, permit, contended: said, adopts }) = begun {
            (contended, self.adopts) = (said, adopts);
            let mut entry = Entry::new(hold, Some(permit));
            if contended.is_some() {
                entry.own_contention = self.core.unconfirmed.is_any(entry.hold.key());
                self.contended_by.note(entry.own_contention);
            }
            self.entries.push(entry);
        }
        self.entries.extend(holds.into_iter().map(|hold| Entry::new(hold, None)));
        let first = self.entries.first().map(|entry| entry.hold.key().clone());
        let _waiting = match (&first, self.budget) {
            (Some(key), Budget::Until(_) | Budget::Forever) => Some(self.core.metrics.facade.waits(key)),
            _ => None,
        };
        loop {
            match self.take_all(contended.take()).await {
                Ok(()) => return self.finish(),
                Err(Refusal::Failed(error)) if self.should_retry(&error) => self.retry(error).await?,
                Err(refusal) => return Err(refusal),
            }
        }
    }

    /// Takes all keys that are not taken yet. `contended` is the store's last answer for the first of them.
    async fn take_all(&mut self, contended: Option<Contended>) -> Result<(), Refusal> {
        self.enter().await?;
        let mut contended = contended;
        // All entries before this one are taken.
        let mut at = self.first_untaken();
        loop {
            if let Some(contended) = contended.take() {
                // The wait is boxed, because its large state is rarely needed.
                Box::pin(self.wait_at(at, contended)).await?;
                self.take(at..at + 1)?;
                at += 1;
            }
            if at == self.entries.len() {
                return Ok(());
            }
            if self.entries[at].permit.is_none() {
                self.enter().await?;
                at = self.first_untaken();
                continue;
            }
            let end = self.end_of_call(at);
            let answers = self.ask(at..end).await?;
            match answers.into_iter().enumerate().find_map(|(i, contended)| Some((i, contended?))) {
                None => {
                    self.take(at..end)?;
                    at = end;
                }
                Some((first, answer)) => {
                    self.take(at..at + first)?;
                    at += first;
                    // Releases grants of later keys, because keys are only held in order: two callers could
                    // otherwise deadlock.
                    self.release_from(at + 1);
                    contended = Some(answer);
                }
            }
        }
    }

    /// Returns the position of the first entry that is not taken yet.
    fn first_untaken(&self) -> usize {
        self.entries.iter().take_while(|entry| matches!(entry.stage, Stage::Taken(_))).count()
    }

    /// Returns the end of the entries in the next call, which starts at `at`. With a cooldown it is one entry,
    /// because a released grant starts its cooldown, and the next attempt would run into it.
    fn end_of_call(&self, at: usize) -> usize {
        let all = self.end_of_permits(at);
        let cooling = self.entries[at..].iter().any(|e| e.hold.has_cooldown());
        if cooling { all.min(at + 1) } else { all }
    }

    /// Returns the end of the entries for which the acquisition has permits at the same time, if the first one is at `at`.
    /// It is one entry if one of all is not exclusive, because a reader that waits for the next key with the permit of
    /// this one would block other readers.
    fn end_of_permits(&self, at: usize) -> usize {
        let all = self.entries.len();
        let is_exclusive = self.entries.iter().all(|entry| entry.hold.mode() == Mode::Exclusive);
        if is_exclusive { all } else { all.min(at + 1) }
    }

    /// Calls the store once for the entries of `range`. Returns for each `None` if granted, or why not.
    async fn ask(&mut self, range: Range<usize>) -> Result<Vec<Option<Contended>>, Refusal> {
        // A failed wait is repeated only without a cooldown, because a request that is still queued can start it.
        let cools = self.entries[range.start].hold.has_cooldown();
        let may_queue = range.len() == 1 && !cools && self.may_queue();
        let limit = self.call_limit(range.clone());
        let request = |entry: &Entry| Request { may_queue, limit, ..self.request(&entry.hold) };
        let requests: Vec<_> = self.entries[range.clone()].iter().map(request).collect();
        // Checked when the request is sent, because the attempt can be undone before the reply arrives.
        for entry in &mut self.entries[range.clone()] {
            entry.own_contention = self.core.unconfirmed.is_any(entry.hold.key());
        }
        let backend = Arc::clone(&self.core.backend);
        let call: StoreCall = match &self.adopts {
            Some(given) => self.adoption(requests, (**given).clone()),
            None => Box::pin(async move { backend.acquire(requests).await }),
        };
        self.finish_call(range, call, self.budget.of_call(limit)).await
    }

    /// Returns the limit of a call for the entries of `range`: at most the shortest TTL, because a lease that is granted
    /// later is over.
    fn call_limit(&self, range: Range<usize>) -> Duration {
        let ttls = self.entries[range].iter().filter_map(|entry| entry.hold.request().ttl);
        ttls.fold(self.core.timing.request_timeout, Duration::min)
    }

    /// Returns whether a wait in the store's queue follows each contended attempt.
    fn may_queue(&self) -> bool {
        let waits = self.budget != Budget::Once && self.policy == OnCooldown::Wait;
        waits && self.core.timing.waiting == Waiting::Store && self.adopts.is_none()
    }

    fn request(&self, hold: &Hold) -> Request {
        let passes_on = hold.mode() == Mode::Exclusive;
        let reserve = if passes_on { self.core.reserve(hold.key()) } else { 0 };
        Request { reserve, ..hold.request().clone() }
    }

    /// Runs `call` until the store answers, the limit passes, or the engine closes.
    async fn finish_call(
        &mut self,
        range: Range<usize>,
        call: StoreCall,
        limit: Limit,
    ) -> Result<Vec<Option<Contended>>, Refusal> {
        let holds: Vec<_> = self.entries[range.clone()].iter().map(|e| Arc::clone(&e.hold)).collect();
        for entry in &mut self.entries[range.clone()] {
            entry.stage = Stage::Asked;
        }
        self.polled = false;
        let sent = self.core.clock.now();
        let core = Arc::clone(&self.core);
        let closed = |key: Option<&LockKey>| Refusal::from(core.name_error(Error::closed(), key));
        let (call, polled) = (self.call.insert(call), &mut self.polled);
        // Marks the requests as sent at the first poll, because a call that is never polled sends no request.
        let mut call = poll_fn(|cx| {
            if !std::mem::replace(polled, true) {
                holds.iter().for_each(|hold| hold.delivery.mark_sent());
            }
            call.as_mut().poll(cx)
        });
        let answers = tokio::select! {
            biased;
            // Checks for a close before the call, because the end of the runtime closes the engine, and no
            // call must be polled after that.
            () = core.closing.cancelled() => return Err(closed(self.first_key(range.start))),
            answers = &mut call => answers,
            () = limit.passed() => match (limit, &self.stop) {
                // Stops the wait, which leaves the store's queue, or returns the grant if it came first.
                (Limit::Budget(_), Some(stop)) => {
                    stop.cancel();
                    let left = tokio::select! {
                        biased;
                        () = core.closing.cancelled() => return Err(closed(self.first_key(range.start))),
                        left = timeout(LEAVING, &mut call) => left,
                    };
                    match left {
                        Ok(answers) => answers,
                        Err(_) => return Err(self.out_of_time(limit, range)),
                    }
                }
                _ => return Err(self.out_of_time(limit, range)),
            },
        };
        self.call = None;
        self.stop = None;
        self.settle(range, answers, sent)
    }

    /// Notes the answers to a call that was sent at `sent`. Returns for each entry `None` if granted, or why
    /// not.
    fn settle(
        &mut self,
        range: Range<usize>,
        answers: Vec<Result<Attempt, Error>>,
        sent: Moment,
    ) -> Result<Vec<Option<Contended>>, Refusal> {
        let core = Arc::clone(&self.core);
        let mut answers = answers.into_iter();
        let mut said = Vec::with_capacity(range.len());
        let mut failure = None;
        for entry in &mut self.entries[range] {
            let error = match answers.next().unwrap_or_else(|| Err(missing_replies_error())) {
                Ok(Attempt::Granted(granted)) => {
                    entry.stage = Stage::Granted(granted, sent);
                    said.push(None);
                    continue;
                }
                Ok(Attempt::Contended(contended)) => {
                    core.metrics.count(Event::Contended);
                    entry.own_contention |= core.unconfirmed.is_any(entry.hold.key());
                    self.contended_by.note(entry.own_contention);
                    entry.is_queued = contended.queued;
                    entry.answered_without_grant();
                    entry.hold.note_contended(&contended);
                    said.push(Some(contended));
                    continue;
                }
                Ok(Attempt::Refused(error)) => {
                    entry.answered_without_grant();
                    error
                }
                // The entry stays `Asked` and is released later, because the store can have granted it.
                Err(error) => error,
            };
            // An adoption whose hold has ended is no failure of the store.
            if error.kind() != ErrorKind::Lost {
                core.metrics.count(Event::Failure);
            }
            failure.get_or_insert(core.name_error(error, Some(entry.hold.key())));
        }
        match failure {
            Some(error) => Err(error.into()),
            None => {
                self.end_outage();
                Ok(said)
            }
        }
    }

    /// Waits until the store grants the contended entry at `at`, or until a taken one is lost.
    async fn wait_at(&mut self, at: usize, contended: Contended) -> Result<(), Refusal> {
        let any_lost = self.any_lost();
        tokio::select! {
            biased;
            outcome = self.wait_for_grant(at, contended) => outcome,
            error = any_lost => Err(error.into()),
        }
    }

    /// Waits until a taken key is lost.
    fn any_lost(&self) -> impl Future<Output = Error> + use<> {
        let taken = self.entries.iter().filter_map(|entry| match &entry.stage {
            Stage::Taken(guard) => Some((entry.hold.key().clone(), guard.lost())),
            _ => None,
        });
        let mut losses: Vec<_> = taken.collect();
        let core = Arc::clone(&self.core);
        poll_fn(move |cx| {
            for (key, lost) in &mut losses {
                if let Poll::Ready(reason) = Pin::new(lost).poll(cx) {
                    return Poll::Ready(core.name_error(Error::lost(reason), Some(key)));
                }
            }
            Poll::Pending
        })
    }

    async fn wait_for_grant(&mut self, at: usize, contended: Contended) -> Result<(), Refusal> {
        let mut contended = contended;
        let wakeup = Arc::new(Notify::new());
        let key = self.entries[at].hold.key().clone();
        // Registers for hints before the next attempt, because a hint between the two would be missed.
        self.core.queues.with(&key, |owner| owner.wakeup = Some(Arc::clone(&wakeup)));
        if self.entries[at].hold.mode() != Mode::Exclusive {
            // A try does not wait for a holder behind this caller.
            self.core.queues.wake_tries(&key);
        }
        tracing::debug!(%key, store = %self.core.name, "waiting");
        let mut asked_again = false;
        loop {
            if let (OnCooldown::NotDue, Some(retry_after)) = (self.policy, contended.cooling_for) {
                // Does not report `NotDue` if the cooldown can come from an unconfirmed attempt of this
                // client.
                if self.entries[at].own_contention {
                    return Err(self.own_attempt(&key));
                }
                return Err(self.core.name_error(Error::not_due(retry_after), Some(&key)).into());
            }
            if self.budget == Budget::Once {
                return Err(self.out_of_budget());
            }
            let waiting = self.core.timing.waiting;
            // Does not pause before the first retry, because a hint from before the registration was missed.
            if std::mem::replace(&mut asked_again, true) {
                // Also pauses after a wait in the store's queue that ended without a grant.
                let every = if let Waiting::Poll { every } = waiting { every } else { UNQUEUED };
                let pause_for = poll_in(every, &contended);
                match pause(&self.core, &key, &wakeup, pause_for, self.budget.of_wait()).await? {
                    Paused::Over => {}
                    Paused::OutOfBudget => return Err(self.out_of_budget()),
                }
            }
            let answers = match waiting {
                Waiting::Poll { .. } => self.ask(at..at + 1).await?,
                Waiting::Store => {
                    let (backend, stop) = (Arc::clone(&self.core.backend), CancellationToken::new());
                    let request = Request { limit: Duration::MAX, ..self.request(&self.entries[at].hold) };
                    self.stop = Some(stop.clone());
                    // The reply at the end of the wait is about the holder at that time.
                    self.entries[at].own_contention = false;
                    let call: StoreCall = Box::pin(async move { vec![backend.wait(request, stop).await] });
                    self.finish_call(at..at + 1, call, self.budget.of_wait()).await?
                }
            };
            match answers.into_iter().next().flatten() {
                None => return Ok(()),
                Some(answer) => contended = answer,
            }
        }
    }

    /// Makes guards of the grants in `range`.
    fn take(&mut self, range: Range<usize>) -> Result<(), Error> {
        for entry in &mut self.entries[range] {
            if let Stage::Granted(granted, sent) = std::mem::replace(&mut entry.stage, Stage::Idle) {
                // If `granted` fails, it has passed the grant and its permit to the driver for release.
                let guard = Arc::clone(&entry.hold).granted(granted, sent, entry.permit.take())?;
                entry.stage = Stage::Taken(guard);
            }
        }
        Ok(())
    }

    fn out_of_time(&mut self, limit: Limit, range: Range<usize>) -> Refusal {
        match limit {
            Limit::Budget(_) | Limit::None => self.out_of_budget(),
            Limit::Call(_) => {
                self.timed_out = true;
                self.core.metrics.count(Event::Failure);
                let (at, limit) = (range.start, self.call_limit(range));
                let message = format!(
                    "the store did not answer within {limit:?}; whatever it does with the request is undone"
                );
                let error = Error::new(ErrorKind::Unavailable, message);
                self.core.name_error(error, self.first_key(at)).into()
            }
        }
    }

    fn out_of_budget(&self) -> Refusal {
        match (&self.outage, self.first_key(self.first_untaken())) {
            (_, key) if self.contended_by.others => Refusal::Contended(key.cloned()),
            (Some(outage), _) => Refusal::Failed(outage.error.clone()),
            (None, Some(key)) if self.contended_by.own => self.own_attempt(key),
            (None, key) => {
                let message = "the wait budget ended before the store answered, so it is not known whether anybody holds the lock; wait longer, or see whether the store can be reached";
                self.core.name_error(Error::new(ErrorKind::Unavailable, message), key).into()
            }
        }
    }

    fn own_attempt(&self, key: &LockKey) -> Refusal {
        let message = "an earlier attempt of this client was not answered, and the store has not confirmed that it is undone, so it is not known whether anybody else holds the lock; try again, and see whether the store, or its commits, are slow";
        self.core.name_error(Error::new(ErrorKind::Unavailable, message), Some(key)).into()
    }

    fn first_key(&self, at: usize) -> Option<&LockKey> {
        self.entries.get(at).map(|e| e.hold.key())
    }
}
