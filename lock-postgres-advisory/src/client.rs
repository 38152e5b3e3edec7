//! One client: its sessions, their requests, and the session of each lock.

mod permits;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_api::{Error, ErrorKind, FencingToken, HolderId, LossReason, Mode};
use leasehold_engine::{Attempt, Events, HoldRef, Moment, ReleaseReply, Renewed, Request};
use leasehold_postgres::session::Session;
use tokio::sync::oneshot;
use tokio::time::timeout;

use crate::common::Common;
use crate::error::{interrupted, not_sent};
use crate::registry::shared::Leave;
use crate::registry::{Location, Reservation, lock_mode};
use crate::reply::{ReplyReceiver, ask};
use crate::shared_session::job::SharedJob;
use crate::side_session::job::SideJob;
use crate::sql::LockMode;
use crate::try_outcome::{TryOutcome, contended, dated, granted, granted_again};
use crate::wait_session::pool::WaitSessions;
use crate::wait_session::{LockScope, WaitSession};

/// Time limit for the release of the last reader, before another one tries. A server that replies takes one round trip.
const RELEASE: Duration = Duration::from_secs(1);

/// The sessions of one client and their locks.
pub(crate) struct Client {
    pub(crate) common: Arc<Common>,
    pub(crate) wait_sessions: Arc<WaitSessions>,
    pub(crate) scope: LockScope,
    pub(crate) shared_sessions: Mutex<Vec<Session>>,
}

/// One release of a batch, after its request was queued.
enum StartedRelease {
    /// The release is queued on a shared session, which holds many locks.
    Asked(ReplyReceiver<ReleaseReply>),
    /// Other holders of this process share the lock, whose session is being confirmed.
    Left(ReplyReceiver<()>),
    /// The wait session (a session for one lock) with this id holds the lock.
    Own(u64, i64, HolderId, LockMode),
    Done(Result<ReleaseReply, Error>),
}

/// One attempt of a batch, after its request was queued.
enum StartedTry {
    /// The attempt is queued on a shared session.
    Asked(i64, HolderId, ReplyReceiver<TryOutcome>),
    Joining(Joining),
    /// A reader of a number whose lock the session with this index is releasing for the last reader before.
    Leaving(Box<Request>, i64, usize),
    /// One of so many permits.
    Permit(Box<Request>, u32),
    Done(Attempt),
}

/// A request that joins the holders of its number in this process.
struct Joining {
    number: i64,
    holder: HolderId,
    /// The shared session that has the lock.
    index: usize,
    token: FencingToken,
    /// Whether the session still exists.
    is_alive: ReplyReceiver<()>,
    /// Whether no session waits for the number exclusively.
    is_unclaimed: ReplyReceiver<bool>,
}

impl Client {
    /// Returns whether shared sessions hold the uncontended locks.
    pub(crate) fn keeps_on_shared_sessions(&self) -> bool {
        self.scope == LockScope::Session
    }

    /// Returns the current time on the engine's clock.
    pub(crate) fn now(&self) -> Option<Moment> {
        self.common.events().map(Events::now)
    }

    /// Makes one attempt for each of `requests`.
    pub(crate) async fn acquire(&self, requests: &[Request]) -> Vec<Result<Attempt, Error>> {
        match self.scope {
            LockScope::Session => self.try_on_shared_sessions(requests).await,
            LockScope::Transaction => join_all(requests.iter().map(|r| self.try_in_transaction(r))).await,
        }
    }

    /// Records that `session` holds the number.
    pub(crate) fn granted_on(
        &self,
        number: i64,
        request: &Request,
        session: WaitSession,
        token: FencingToken,
    ) -> Result<Attempt, Error> {
        let (id, location) = (session.id, session.location());
        self.common.wait_session_keeps(id, Some(session.pid()));
        let state = Arc::clone(&session.state);
        // Inserts the session first, because a release can follow the grant at once.
        self.wait_sessions.taken().insert(id, session);
        let is_registered = self.common.registry.granted(number, request.holder, location, token);
        if is_registered && !state.has_ended() && self.common.open().is_ok() {
            return Ok(granted(token));
        }
        // Undoes the grant: the client was closed or the session ended before the hold existed, so no loss
        // was reported.
        let session = self.wait_sessions.taken().remove(&id);
        drop(session);
        self.common.wait_session_keeps(id, None);
        self.common.registry.forget(number, request.holder);
        self.common.open()?;
        Err(interrupted())
    }

    /// Tries the number in a separate transaction.
    async fn try_in_transaction(&self, request: &Request) -> Result<Attempt, Error> {
        let (number, session) = match self.reserve(request).await {
            Ok(reserved) => reserved,
            Err(attempt) => return Ok(attempt),
        };
        // Reads the clock only now, because opening the session might have taken long.
        let asked_at = self.now();
        let outcome = session.acquire(number, lock_mode(request.mode)?, false).await;
        if let Ok(TryOutcome::Granted(token)) = outcome {
            return Ok(dated(self.granted_on(number, request, session, token)?, asked_at));
        }
        self.common.registry.forget(number, request.holder);
        // After an unknown outcome the session is dropped here, which ends it at the server.
        let tried = outcome?;
        session.give_back();
        Ok(tried.into())
    }

    /// Reserves the number in this process, and takes a session for it. If that fails, returns the result of
    /// the attempt as an error. Does not query the server's lock table.
    async fn reserve(&self, request: &Request) -> Result<(i64, WaitSession), Attempt> {
        let number = self.common.number(&request.key).map_err(Attempt::Refused)?;
        let Some(session) = self.wait_sessions.take().await.map_err(Attempt::Refused)? else {
            return Err(Attempt::Refused(Error::new(
                ErrorKind::Capacity,
                "all sessions of this client keep locks; release some, or allow more sessions",
            )));
        };
        let answer = match self.common.registry.reserve(number, request, session.location()) {
            // No other holder has its lock on this session, so the server decides.
            Ok(Reservation::Ours | Reservation::Beside(_)) => return Ok((number, session)),
            Ok(Reservation::Again(grant)) => granted_again(grant),
            Ok(Reservation::Leaving | Reservation::Busy) => contended(),
            Err(error) => Attempt::Refused(error),
        };
        session.give_back();
        Err(answer)
    }

    /// Tries all numbers with one statement per session.
    async fn try_on_shared_sessions(&self, requests: &[Request]) -> Vec<Result<Attempt, Error>> {
        let mut jobs = self.no_jobs();
        let start = |request| self.start_try(request, &mut jobs).unwrap_or_else(StartedTry::Done);
        let asked: Vec<_> = requests.iter().map(start).collect();
        self.push(jobs);
        let mut answers = Vec::with_capacity(asked.len());
        for asked in asked {
            let asked = match asked {
                StartedTry::Leaving(request, number, index) => {
                    self.start_after_release(&request, number, index).await
                }
                other => other,
            };
            let (number, holder, answered) = match asked {
                StartedTry::Asked(number, holder, answered) => (number, holder, answered),
                StartedTry::Joining(joining) => {
                    answers.push(self.finish_join(joining, false).await.map(Attempt::from));
                    continue;
                }
                StartedTry::Permit(request, of) => {
                    answers.push(self.try_permit(&request, of, None).await);
                    continue;
                }
                // Yet another reader is being released.
                StartedTry::Leaving(..) => {
                    answers.push(Ok(Attempt::Refused(not_sent())));
                    continue;
                }
                StartedTry::Done(attempt) => {
                    answers.push(Ok(attempt));
                    continue;
                }
            };
            let outcome = answered.await.unwrap_or_else(|_| Err(interrupted()));
            if let Ok(TryOutcome::Refused(_)) = outcome {
                // Frees the number, because a skipped attempt leaves it reserved in this process.
                self.common.registry.forget(number, holder);
            }
            answers.push(outcome.map(Attempt::from));
        }
        answers
    }

    /// Waits for the release of the earlier readers and queues the attempt of a reader, because no other holder excludes the
    /// reader.
    async fn start_after_release(&self, request: &Request, number: i64, index: usize) -> StartedTry {
        let left = self.common.registry.left(number, Location::Shared(index));
        if timeout(RELEASE, left).await.is_err() {
            return StartedTry::Done(Attempt::Refused(not_sent()));
        }
        let mut jobs = self.no_jobs();
        let started = self.start_try(request, &mut jobs).unwrap_or_else(StartedTry::Done);
        self.push(jobs);
        started
    }

    /// Reserves the number in this process and queues the attempt. If that fails, returns the result of the
    /// attempt as an error.
    fn start_try(&self, request: &Request, jobs: &mut [Vec<SharedJob>]) -> Result<StartedTry, Attempt> {
        let (common, holder) = (&self.common, request.holder);
        if let Mode::Permit { of } = request.mode {
            return Ok(StartedTry::Permit(Box::new(request.clone()), of));
        }
        let number = common.number(&request.key).map_err(Attempt::Refused)?;
        let mode = lock_mode(request.mode).map_err(Attempt::Refused)?;
        let index = common.shared_session_of(number);
        match common.registry.reserve(number, request, Location::Shared(index)).map_err(Attempt::Refused)? {
            Reservation::Leaving => Ok(StartedTry::Leaving(Box::new(request.clone()), number, index)),
            Reservation::Busy => Err(contended()),
            Reservation::Again(grant) => Err(granted_again(grant)),
            Reservation::Ours => {
                let (answer, answered) = oneshot::channel();
                jobs[index].push(SharedJob::Try { number, holder, mode, waits: false, answer });
                Ok(StartedTry::Asked(number, holder, answered))
            }
            Reservation::Beside(token) => {
                let (answer, is_alive) = oneshot::channel();
                jobs[index].push(SharedJob::Confirm { answer });
                let is_unclaimed = self.probe(number, true);
                let joining = Joining { number, holder, index, token, is_alive, is_unclaimed };
                Ok(StartedTry::Joining(joining))
            }
        }
    }

    /// Queries, on the side session, whether another session could share the number at once.
    fn probe(&self, number: i64, reads: bool) -> ReplyReceiver<bool> {
        let (answer, answered) = oneshot::channel();
        self.common.side_session.push(SideJob::Probe { number, reads, answer });
        answered
    }

    /// Returns the reply to a probe. If the side session has none, the session `index` reads the server's lock table. It
    /// cannot probe itself, because the server would grant it the number again.
    async fn or_by_lock_table(
        &self,
        probed: ReplyReceiver<bool>,
        number: i64,
        index: usize,
    ) -> Result<bool, Error> {
        match probed.await {
            Ok(Ok(is_unclaimed)) => Ok(is_unclaimed),
            Ok(Err(_)) | Err(_) => {
                ask(&self.common.queues[index], |answer| SharedJob::IsUnclaimed { number, answer }).await
            }
        }
    }

    /// Joins the holders that this process has on the shared session `index`, for a request that waits and stays
    /// reserved.
    pub(crate) async fn join(
        &self,
        number: i64,
        holder: HolderId,
        index: usize,
        token: FencingToken,
    ) -> Result<TryOutcome, Error> {
        let (answer, is_alive) = oneshot::channel();
        self.common.queues[index].push(SharedJob::Confirm { answer });
        let is_unclaimed = self.probe(number, true);
        self.finish_join(Joining { number, holder, index, token, is_alive, is_unclaimed }, true).await
    }

    /// Grants a request that joins others if its session exists and no session waits for the number exclusively.
    /// Without a grant, a request that `waits` stays reserved.
    async fn finish_join(&self, joining: Joining, waits: bool) -> Result<TryOutcome, Error> {
        let Joining { number, holder, index, token, is_alive, is_unclaimed } = joining;
        let registry = &self.common.registry;
        // An error of the session leaves the outcome unknown. The release that follows forgets the request.
        is_alive.await.unwrap_or_else(|_| Err(interrupted()))?;
        let outcome = match self.or_by_lock_table(is_unclaimed, number, index).await {
            Ok(true) if registry.granted(number, holder, Location::Shared(index), token) => {
                return Ok(TryOutcome::Granted(token));
            }
            Ok(true) => return Err(interrupted()),
            Ok(false) => TryOutcome::Contended,
            Err(error) => TryOutcome::Refused(error),
        };
        if waits && !registry.step_back(number, holder) {
            return Ok(outcome);
        }
        // Releases the lock of the others if they have left in the meantime.
        if let Some(Leave::Last(Location::Shared(index))) = registry.leave(number, holder) {
            let mode = LockMode::Shared;
            let unlocked =
                ask(&self.common.queues[index], |answer| SharedJob::Unlock { number, holder, mode, answer });
            unlocked.await?;
        }
        Ok(outcome)
    }

    /// Releases each of `holds`, with one statement per session.
    pub(crate) async fn release(&self, holds: &[HoldRef]) -> Vec<Result<ReleaseReply, Error>> {
        let mut jobs = self.no_jobs();
        let started: Vec<_> = holds.iter().map(|hold| self.start_release(hold, &mut jobs)).collect();
        self.push(jobs);
        if started.iter().any(|started| matches!(started, StartedRelease::Own(..))) {
            return join_all(started.into_iter().map(|started| self.finish_release(started))).await;
        }
        // Awaits the replies in order, so it wakes once. All requests are queued, so no reply depends on a poll.
        let mut answers = Vec::with_capacity(started.len());
        for started in started {
            answers.push(self.finish_release(started).await);
        }
        answers
    }

    fn start_release(&self, hold: &HoldRef, jobs: &mut [Vec<SharedJob>]) -> StartedRelease {
        let (common, holder) = (&self.common, hold.holder);
        let number = match common.number(&hold.key) {
            Ok(number) => number,
            Err(error) => return StartedRelease::Done(Err(error)),
        };
        let mode = match lock_mode(hold.mode) {
            Ok(mode) => mode,
            Err(error) => return StartedRelease::Done(Err(error)),
        };
        if let Mode::Permit { .. } = hold.mode {
            return self.start_permit_release(number, holder, jobs);
        }
        let was_held = common.registry.is_held(number, holder);
        match common.registry.leave(number, holder) {
            Some(Leave::Left(Location::Shared(index))) if was_held => {
                // Confirms the session, because the hold possibly ended with it unnoticed.
                let (answer, answered) = oneshot::channel();
                jobs[index].push(SharedJob::Confirm { answer });
                StartedRelease::Left(answered)
            }
            None | Some(Leave::Left(_)) => StartedRelease::Done(Ok(ReleaseReply::new(false))),
            Some(Leave::Last(Location::Shared(index))) => {
                let (answer, answered) = oneshot::channel();
                jobs[index].push(SharedJob::Unlock { number, holder, mode, answer });
                StartedRelease::Asked(answered)
            }
            Some(Leave::Last(Location::Own(id))) => StartedRelease::Own(id, number, holder, mode),
            // Nothing to release, because the wait ended without a grant.
            Some(Leave::Last(Location::Nowhere)) => {
                common.registry.forget(number, holder);
                StartedRelease::Done(Ok(ReleaseReply::new(false)))
            }
        }
    }

    async fn finish_release(&self, started: StartedRelease) -> Result<ReleaseReply, Error> {
        match started {
            StartedRelease::Asked(answered) => answered.await.unwrap_or_else(|_| Err(interrupted())),
            StartedRelease::Left(answered) => {
                let confirmed = answered.await.unwrap_or_else(|_| Err(interrupted()));
                confirmed.map(|()| ReleaseReply::new(true))
            }
            StartedRelease::Own(id, number, holder, mode) => {
                self.release_on_wait_session(id, number, holder, mode).await
            }
            StartedRelease::Done(outcome) => outcome,
        }
    }

    async fn release_on_wait_session(
        &self,
        id: u64,
        number: i64,
        holder: HolderId,
        mode: LockMode,
    ) -> Result<ReleaseReply, Error> {
        let handle = self.wait_sessions.taken().get(&id).map(WaitSession::handle);
        let Some(handle) = handle else {
            self.common.registry.forget(number, holder);
            return Ok(ReleaseReply::new(false));
        };
        let outcome = handle.release(number, mode).await;
        self.common.wait_session_keeps(id, None);
        self.common.registry.forget(number, holder);
        let session = self.wait_sessions.taken().remove(&id);
        if let Some(session) = session {
            match &outcome {
                Ok(_) => session.give_back(),
                // Drops the session, which is in doubt. This ends it, and the server releases its lock.
                Err(_) => drop(session),
            }
        }
        outcome
    }

    /// Confirms the sessions of `holds`, each by one request.
    pub(crate) async fn confirm(&self, holds: &[HoldRef]) -> Vec<Result<Renewed, Error>> {
        let location = |hold: &HoldRef| {
            let number = self.common.number(&hold.key).ok()?;
            let held = self.common.registry.is_held(number, hold.holder);
            held.then(|| self.common.registry.location_of(number, hold.holder)).flatten()
        };
        let mut locations: Vec<Location> = holds.iter().filter_map(location).collect();
        locations.sort_unstable_by_key(|location| match location {
            Location::Shared(index) => (0, *index as u64),
            Location::Own(id) => (1, *id),
            Location::Nowhere => (2, 0),
        });
        locations.dedup();
        let asked = join_all(locations.iter().map(|location| self.confirm_session(*location))).await;
        let outcomes: HashMap<Location, Result<(), Error>> = locations.into_iter().zip(asked).collect();
        let answer = |hold: &HoldRef| match location(hold).and_then(|location| outcomes.get(&location)) {
            None => Ok(Renewed::Gone(LossReason::SessionLost)),
            Some(Ok(())) => Ok(Renewed::Extended),
            Some(Err(error)) => Err(error.clone()),
        };
        holds.iter().map(answer).collect()
    }

    async fn confirm_session(&self, location: Location) -> Result<(), Error> {
        match location {
            Location::Shared(index) => {
                ask(&self.common.queues[index], |answer| SharedJob::Confirm { answer }).await
            }
            Location::Own(id) => {
                let handle = self.wait_sessions.taken().get(&id).map(WaitSession::handle);
                match handle {
                    Some(handle) => handle.confirm().await,
                    None => Err(interrupted()),
                }
            }
            Location::Nowhere => Err(interrupted()),
        }
    }

    /// Creates an empty job list for each shared session.
    fn no_jobs(&self) -> Vec<Vec<SharedJob>> {
        self.common.queues.iter().map(|_| Vec::new()).collect()
    }

    /// Queues the jobs on the shared sessions, all jobs of a session at once.
    fn push(&self, jobs: Vec<Vec<SharedJob>>) {
        for (queue, jobs) in self.common.queues.iter().zip(jobs) {
            if !jobs.is_empty() {
                queue.push_all(jobs);
            }
        }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("server", &self.common.config)
            .field("scope", &self.scope)
            .field("kept on sessions of their own", &self.wait_sessions.taken().len())
            .finish_non_exhaustive()
    }
}
