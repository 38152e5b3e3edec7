//! Waiting for a number that another client holds.

mod turn;

use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, Mode};
use leasehold_engine::{Attempt, CancellationToken, Request};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::client::Client;
use crate::common::{Common, PollerEntry};
use crate::error::{interrupted, not_sent};
use crate::registry::shared::Approach;
use crate::registry::{GrantInfo, Location, Reservation, lock_mode};
use crate::reply::ask;
use crate::shared_session::job::SharedJob;
use crate::side_session::job::WaitStatus;
use crate::sql::LockMode;
use crate::try_outcome::{TryOutcome, contended, dated, granted_again};
use crate::wait_session::WaitSession;

/// Poll interval of a waiter without a wait session.
const POLL: Duration = Duration::from_millis(100);

/// Number of failed polls after which a writer keeps new readers out. Before that the holder is probably not a reader.
const POLLS_BESIDE_READERS: u32 = 10;

/// Number of checks after which a wait restarts if no other client waits for the same lock: ten minutes at intervals of
/// 3 s. The restarts are rare, because the server logs each cancelled statement.
const LOOKS: u32 = 200;

/// Pause between requests to the server to cancel a wait, and their maximum number.
const CANCEL_RETRIES: (Duration, u32) = (Duration::from_millis(100), 20);

/// Waits until granted or stopped, in the server's queue if a wait session is available, otherwise by polling.
pub(crate) async fn wait(
    client: &Client,
    request: &Request,
    stop: &CancellationToken,
) -> Result<Attempt, Error> {
    let common = &client.common;
    let number = match common.number(&request.key) {
        Ok(number) => number,
        Err(error) => return Ok(Attempt::Refused(error)),
    };
    if let Mode::Permit { .. } = request.mode {
        return turn::wait_for_permit(client, number, request, stop).await;
    }
    match reserve(client, number, request, stop).await {
        Ok(Reserved::Ours) => {}
        Ok(Reserved::Again(grant)) => return Ok(granted_again(grant)),
        Ok(Reserved::Stopped) => return Ok(contended()),
        Err(error) => return Ok(Attempt::Refused(error)),
    }
    let outcome = match client.wait_sessions.take().await {
        Ok(Some(session)) => wait_in_queue(client, number, session, request, stop).await,
        Ok(None) => wait_by_polling(client, number, request, stop).await,
        // Polls instead, because polling needs no further connection.
        Err(error) if client.keeps_on_shared_sessions() => {
            tracing::debug!(%error, "no session to wait on; asking again and again instead");
            wait_by_polling(client, number, request, stop).await
        }
        Err(error) => Ok(Attempt::Refused(error)),
    };
    // Removes the request after its end. A dropped wait stays registered, because the release that follows must find a
    // late grant. So does a request that failed on a shared session, which can have a lock of the readers that it joined.
    let location = common.registry.location_of(number, request.holder);
    let is_unsure = outcome.is_err() && matches!(location, Some(Location::Shared(_)));
    if !is_unsure && !common.registry.is_held(number, request.holder) {
        common.registry.forget(number, request.holder);
    }
    outcome
}

/// The outcome of reserving a number in this process.
enum Reserved {
    Ours,
    /// The same holder has the number already.
    Again(GrantInfo),
    Stopped,
}

/// Reserves the number in this process, after an earlier holder has finished its release.
async fn reserve(
    client: &Client,
    number: i64,
    request: &Request,
    stop: &CancellationToken,
) -> Result<Reserved, Error> {
    let common = &client.common;
    loop {
        let mut freed = std::pin::pin!(common.registry.freed.notified());
        freed.as_mut().enable();
        common.open()?;
        match common.registry.reserve(number, request, Location::Nowhere)? {
            Reservation::Ours | Reservation::Beside(_) => return Ok(Reserved::Ours),
            Reservation::Again(grant) => return Ok(Reserved::Again(grant)),
            Reservation::Leaving | Reservation::Busy => tokio::select! {
                () = stop.cancelled() => return Ok(Reserved::Stopped),
                () = freed => {}
                () = sleep(POLL) => {}
            },
        }
    }
}

async fn wait_in_queue(
    client: &Client,
    number: i64,
    session: WaitSession,
    request: &Request,
    stop: &CancellationToken,
) -> Result<Attempt, Error> {
    let begun = Instant::now();
    let mut asked_at = client.now();
    let mode = lock_mode(request.mode)?;
    let queued = queue(client, &session, stop, || session.acquire(number, mode, true)).await?;
    match queued {
        Some(TryOutcome::Granted(token)) => {
            // Confirms the session by a new round trip after a long wait, because the reply to the wait can
            // be old.
            if begun.elapsed() > recently(client) {
                asked_at = client.now();
                session.handle().confirm().await?;
            }
            let granted = client.granted_on(number, request, session, token)?;
            Ok(dated(granted, asked_at))
        }
        // The gate is closed to this reader, so it waits in turn with the requests for permits.
        Some(TryOutcome::Contended)
            if mode == LockMode::Shared && !stop.is_cancelled() && client.keeps_on_shared_sessions() =>
        {
            client.common.registry.forget(number, request.holder);
            turn::wait_on(client, number, session, request, stop).await
        }
        // Returns the session to the pool, because the attempt left no lock.
        Some(other) => {
            session.give_back();
            Ok(other.into())
        }
        None => Ok(contended()),
    }
}

/// Waits on `session` in the server's queue until granted or stopped. `None` after a stop that the server did not answer
/// in time. The session must then be dropped.
async fn queue<T, F: Future<Output = Result<TryOutcome<T>, Error>>>(
    client: &Client,
    session: &WaitSession,
    stop: &CancellationToken,
    start: impl Fn() -> F,
) -> Result<Option<TryOutcome<T>>, Error> {
    loop {
        let mut waiting = std::pin::pin!(start());
        let is_over = tokio::select! {
            biased;
            outcome = &mut waiting => return outcome.map(Some),
            end = watch_wait(client, session) => match end {
                WaitVerdict::Dead(error) => return Err(error),
                WaitVerdict::Restart => false,
            },
            () = stop.cancelled() => true,
        };
        match cancel_wait(session, waiting).await {
            // Starts the wait again at the end of the queue, with a fresh snapshot.
            Some(Ok(TryOutcome::Contended)) if !is_over && !stop.is_cancelled() => {}
            Some(outcome) => return outcome.map(Some),
            None if is_over => return Ok(None),
            None => return Err(interrupted()),
        }
    }
}

/// Requests the server to cancel a wait, and returns its result. `None` if that takes too long. The session must then
/// be dropped, so the server ends it with the wait.
async fn cancel_wait<T>(
    session: &WaitSession,
    mut waiting: Pin<&mut impl Future<Output = Result<TryOutcome<T>, Error>>>,
) -> Option<Result<TryOutcome<T>, Error>> {
    for _ in 0..CANCEL_RETRIES.1 {
        // Repeats the request, because the server might not have started to wait at the first one.
        session.cancel();
        if let Ok(outcome) = timeout(CANCEL_RETRIES.0, &mut waiting).await {
            return Some(outcome);
        }
    }
    None
}

/// The reason to end a wait.
enum WaitVerdict {
    /// The server no longer has this wait, but its reply was lost. The connection is dead, which the wait alone cannot
    /// detect.
    Dead(Error),
    /// The wait restarts at the end of the server's queue with a fresh snapshot, because a waiting statement
    /// holds a snapshot. `CREATE INDEX CONCURRENTLY` and similar statements wait for the snapshot's end,
    /// indefinitely if the lock's holder awaits them, and vacuum keeps the rows visible to it. A session that
    /// waits alone loses no place and blocks only vacuum, so it restarts after [`LOOKS`] checks.
    Restart,
}

/// Checks a wait until there is a reason to end it.
async fn watch_wait(client: &Client, session: &WaitSession) -> WaitVerdict {
    let liveness = client.common.config.liveness_settings();
    let mut missed = 0;
    let begun = Instant::now();
    let mut last = begun;
    loop {
        sleep_until(client.common.next_look(liveness.confirm_every)).await;
        match client.common.wait_status(session.pid()).await {
            Ok(WaitStatus::BlocksOthers) => return WaitVerdict::Restart,
            Ok(WaitStatus::WaitingAlone) if begun.elapsed() > liveness.confirm_every * LOOKS => {
                return WaitVerdict::Restart;
            }
            Ok(WaitStatus::Waiting | WaitStatus::WaitingAlone) => (missed, last) = (0, Instant::now()),
            Ok(WaitStatus::NotFound) if missed < 2 => missed += 1,
            Ok(WaitStatus::NotFound) => return WaitVerdict::Dead(interrupted()),
            // Ignores a failed check if the server still answers, by a refusal or on another session.
            Err(error) if is_refusal(&error) || server_answers(client).await => last = Instant::now(),
            Err(error) if last.elapsed() > liveness.lost_after => return WaitVerdict::Dead(error),
            Err(_) => {}
        }
    }
}

/// Returns whether the server only refuses further sessions: a changed password, a role without login, no free
/// connection. Open sessions continue.
fn is_refusal(error: &Error) -> bool {
    matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::Capacity)
}

async fn server_answers(client: &Client) -> bool {
    let queue = client.common.queues.first().filter(|_| client.keeps_on_shared_sessions());
    match queue {
        Some(queue) => ask(queue, |answer| SharedJob::Confirm { answer }).await.is_ok(),
        None => false,
    }
}

/// Polls for the number. A mark on the server makes other clients notify when they release the number. Once a
/// wait session is available, continues in the server's queue.
async fn wait_by_polling(
    client: &Client,
    number: i64,
    request: &Request,
    stop: &CancellationToken,
) -> Result<Attempt, Error> {
    let common = &client.common;
    let poller = client.keeps_on_shared_sessions().then(|| Poller::enter(common, number));
    // Whether the server has no room for another session.
    let mut refused = false;
    let mut polls = 0;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(contended()),
            permit = client.wait_sessions.permit(), if !refused => match client.wait_sessions.with_permit(permit).await {
                Ok(session) => {
                    // Removes the mark, because in the server's queue no notification is needed.
                    drop(poller);
                    return wait_in_queue(client, number, session, request, stop).await;
                }
                Err(error) if poller.is_none() => return Ok(Attempt::Refused(error)),
                Err(_) => refused = true,
            },
            () = pause(poller.as_ref()) => {}
        }
        if let Some(poller) = &poller {
            polls += 1;
            if polls > POLLS_BESIDE_READERS && request.mode == Mode::Exclusive {
                poller.close_gate();
            }
            let (index, holder) = (common.shared_session_of(number), request.holder);
            let queue = &common.queues[index];
            let asked_at = client.now();
            let mode = lock_mode(request.mode)?;
            let outcome = match common.registry.approach(number, holder, Location::Shared(index)) {
                Some(Approach::Try) => {
                    ask(queue, |answer| SharedJob::Try { number, holder, mode, waits: true, answer }).await?
                }
                Some(Approach::Join(token)) => client.join(number, holder, index, token).await?,
                Some(Approach::Busy) => TryOutcome::Contended,
                // Stops if the client was closed or the request was released while no attempt was under way.
                None => return Ok(Attempt::Refused(common.open().err().unwrap_or_else(not_sent))),
            };
            match outcome {
                // The request was not granted, and released a lock that it had joined. It is reserved again by the next
                // wait.
                TryOutcome::Contended if common.registry.location_of(number, holder).is_none() => {
                    return Ok(contended());
                }
                TryOutcome::Contended => {}
                answer => return Ok(dated(answer.into(), asked_at)),
            }
        }
    }
}

/// Waits until the next attempt.
async fn pause(poller: Option<&Poller<'_>>) {
    let nap = sleep(POLL.mul_f64(0.75 + fastrand::f64() / 2.0));
    match poller {
        Some(poller) => tokio::select! {
            () = poller.woken.notified() => {}
            () = nap => {}
        },
        None => nap.await,
    }
}

/// A poller of this process for a number. Its mark makes other clients notify it.
struct Poller<'a> {
    common: &'a Common,
    number: i64,
    woken: Arc<Notify>,
}

impl<'a> Poller<'a> {
    fn enter(common: &'a Common, number: i64) -> Self {
        let woken = Arc::new(Notify::new());
        let entry = PollerEntry { woken: Arc::clone(&woken), closes_gate: false };
        common.pollers.lock().unwrap_or_else(PoisonError::into_inner).insert(number, entry);
        common.queues[common.shared_session_of(number)].push(SharedJob::Mark(number));
        Self { common, number, woken }
    }

    /// Keeps readers of other clients out from the next poll on.
    fn close_gate(&self) {
        let mut pollers = self.common.pollers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(entry) = pollers.get_mut(&self.number).filter(|entry| self.is_own(entry)) {
            entry.closes_gate = true;
        }
    }

    fn is_own(&self, entry: &PollerEntry) -> bool {
        Arc::ptr_eq(&entry.woken, &self.woken)
    }
}

impl Drop for Poller<'_> {
    fn drop(&mut self) {
        let mut pollers = self.common.pollers.lock().unwrap_or_else(PoisonError::into_inner);
        // Removes only its own entry, because the next poller might be registered already.
        if pollers.get(&self.number).is_some_and(|entry| self.is_own(entry)) {
            pollers.remove(&self.number);
        }
        drop(pollers);
        let index = self.common.shared_session_of(self.number);
        self.common.queues[index].push(SharedJob::Mark(self.number));
    }
}

/// Returns the age up to which a reply of the session counts as a confirmation.
fn recently(client: &Client) -> Duration {
    client.common.config.liveness_settings().confirm_every / 2
}
