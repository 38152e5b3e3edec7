//! Waiting for a number that somebody else holds.

use std::pin::Pin;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, FencingToken};
use leasehold_engine::{Attempt, CancellationToken, Request};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::client::Client;
use crate::common::Common;
use crate::error::{interrupted, not_sent};
use crate::registry::{Location, Reservation};
use crate::reply::ask;
use crate::shared_session::job::SharedJob;
use crate::side_session::job::WaitStatus;
use crate::try_outcome::{TryOutcome, contended, dated, granted};
use crate::wait_session::WaitSession;

/// How often a waiter without a wait session tries.
const POLL: Duration = Duration::from_millis(100);

/// After how many looks a wait begins anew if nobody else waits for the same: ten minutes, if they are 3 s
/// apart. Each time the server writes into its log that a statement was cancelled.
const LOOKS: u32 = 200;

/// The pause between two requests to the server to end a wait, and their maximum number.
const CANCEL_RETRIES: (Duration, u32) = (Duration::from_millis(100), 20);

/// Waits until granted or stopped: in the server's queue while there is a wait session, by asking otherwise.
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
    match reserve(client, number, request, stop).await {
        Ok(Reserved::Ours) => {}
        Ok(Reserved::Again(token)) => return Ok(granted(token)),
        Ok(Reserved::Stopped) => return Ok(contended()),
        Err(error) => return Ok(Attempt::Refused(error)),
    }
    let outcome = match client.wait_sessions.take().await {
        Ok(Some(session)) => wait_in_queue(client, number, session, request, stop).await,
        Ok(None) => wait_by_polling(client, number, request, stop).await,
        // Asking needs no more connections.
        Err(error) if client.keeps_on_shared_sessions() => {
            tracing::debug!(%error, "no session to wait on; asking again and again instead");
            wait_by_polling(client, number, request, stop).await
        }
        Err(error) => Ok(Attempt::Refused(error)),
    };
    // A wait that is dropped before stays registered here: what it has asked for meanwhile is found, and
    // freed, by the release that follows.
    if !common.registry.is_held(number, request.holder) {
        common.registry.forget(number, request.holder);
    }
    outcome
}

/// The outcome of reserving a number in this process.
enum Reserved {
    Ours,
    /// The same holder has it already.
    Again(FencingToken),
    Stopped,
}

/// Reserves the number here, once an earlier holder of this process is out.
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
            Reservation::Ours => return Ok(Reserved::Ours),
            Reservation::Again(token) => return Ok(Reserved::Again(token)),
            Reservation::Busy => tokio::select! {
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
    let outcome = loop {
        let mut waiting = std::pin::pin!(session.acquire(number, true));
        let is_over = tokio::select! {
            biased;
            outcome = &mut waiting => break outcome,
            end = watch_wait(client, &session) => match end {
                WaitVerdict::Dead(error) => return Err(error),
                WaitVerdict::Restart => false,
            },
            () = stop.cancelled() => true,
        };
        match cancel_wait(&session, waiting).await {
            // At the end of the queue, with a fresh snapshot.
            Some(Ok(TryOutcome::Contended)) if !is_over && !stop.is_cancelled() => {}
            Some(outcome) => break outcome,
            None if is_over => return Ok(contended()),
            None => return Err(interrupted()),
        }
    };
    match outcome? {
        TryOutcome::Granted(token) => {
            // The answer to a long wait does not say how old it is; the answer to a question now does.
            if begun.elapsed() > recently(client) {
                asked_at = client.now();
                session.handle().confirm().await?;
            }
            let granted = client.granted_on(number, request, session, token)?;
            Ok(dated(granted, asked_at))
        }
        // Nothing is left of the attempt, so that the next one may use the session.
        other => {
            session.give_back();
            Ok(other.into())
        }
    }
}

/// Has the server end a wait, and waits for what came of it. `None` if that takes too long: dropped, the wait
/// session is ended by the server, and the wait with it.
async fn cancel_wait(
    session: &WaitSession,
    mut waiting: Pin<&mut impl Future<Output = Result<TryOutcome, Error>>>,
) -> Option<Result<TryOutcome, Error>> {
    for _ in 0..CANCEL_RETRIES.1 {
        // The server may not have begun to wait when it is told first.
        session.cancel();
        if let Ok(outcome) = timeout(CANCEL_RETRIES.0, &mut waiting).await {
            return Some(outcome);
        }
    }
    None
}

/// Why a wait is ended.
enum WaitVerdict {
    /// The server does not know of it any more, though its answer has not come: the connection is dead, which
    /// a wait alone would not notice.
    Dead(Error),
    /// The wait starts again at the end of the server's queue, with a fresh snapshot. A waiting statement
    /// holds a snapshot: `CREATE INDEX CONCURRENTLY` and similar statements wait for it, indefinitely if the
    /// lock's holder awaits them, and vacuum keeps the rows that it can see. A session that waits alone loses
    /// no place in the queue, and blocks only vacuum, so that it starts again after [`LOOKS`].
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
            // That nobody can look says nothing of the wait while the server answers: with a refusal, or another session.
            Err(error) if is_refusal(&error) || server_answers(client).await => last = Instant::now(),
            Err(error) if last.elapsed() > liveness.lost_after => return WaitVerdict::Dead(error),
            Err(_) => {}
        }
    }
}

/// Whether it is the server that lets no further session in: a changed password, a role that may not log in,
/// no connection left. Sessions that are open go on.
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

/// Asks again and again. Others see a mark and notify when they free the number; as soon as a wait session is
/// free, the wait goes on in the server's queue.
async fn wait_by_polling(
    client: &Client,
    number: i64,
    request: &Request,
    stop: &CancellationToken,
) -> Result<Attempt, Error> {
    let common = &client.common;
    let poller = client.keeps_on_shared_sessions().then(|| Poller::enter(common, number));
    // Whether the server has no room for one more session.
    let mut refused = false;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(contended()),
            permit = client.wait_sessions.permit(), if !refused => match client.wait_sessions.with_permit(permit).await {
                Ok(session) => {
                    // In the queue nobody has to be notified for it.
                    drop(poller);
                    return wait_in_queue(client, number, session, request, stop).await;
                }
                Err(error) if poller.is_none() => return Ok(Attempt::Refused(error)),
                Err(_) => refused = true,
            },
            () = pause(poller.as_ref()) => {}
        }
        if poller.is_some() {
            let (index, holder) = (common.shared_session_of(number), request.holder);
            let queue = &common.queues[index];
            // Closed, or released, with no try under way.
            if !common.registry.move_to(number, holder, Location::Shared(index)) {
                return Ok(Attempt::Refused(common.open().err().unwrap_or_else(not_sent)));
            }
            let asked_at = client.now();
            match ask(queue, |answer| SharedJob::Try { number, holder, waits: true, answer }).await? {
                TryOutcome::Contended => {}
                answer => return Ok(dated(answer.into(), asked_at)),
            }
        }
    }
}

/// Until it is worth asking again.
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

/// Somebody here polls for a number: seen by others by its mark, and found by their notifications.
struct Poller<'a> {
    common: &'a Common,
    number: i64,
    woken: Arc<Notify>,
}

impl<'a> Poller<'a> {
    fn enter(common: &'a Common, number: i64) -> Self {
        let woken = Arc::new(Notify::new());
        common.pollers.lock().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::clone(&woken));
        common.queues[common.shared_session_of(number)].push(SharedJob::Mark(number));
        Self { common, number, woken }
    }
}

impl Drop for Poller<'_> {
    fn drop(&mut self) {
        let mut pollers = self.common.pollers.lock().unwrap_or_else(PoisonError::into_inner);
        // The next one may be there already.
        if pollers.get(&self.number).is_some_and(|woken| Arc::ptr_eq(woken, &self.woken)) {
            pollers.remove(&self.number);
        }
        drop(pollers);
        let index = self.common.shared_session_of(self.number);
        self.common.queues[index].push(SharedJob::Mark(self.number));
    }
}

/// How long ago a session may have been asked last to count as there.
fn recently(client: &Client) -> Duration {
    client.common.config.liveness_settings().confirm_every / 2
}
