//! Waiting for permits, one client after the other.
//!
//! A client waits in the server's queue for the *turn* of the key, an exclusive lock of one more number. The client with
//! the turn polls until one permit is free. If it waited for a certain permit instead, it would miss the
//! release of another one. Requests for permits without the turn are refused while another client has or awaits it. Readers
//! are refused too, because a request for a permit closes the gate with its turn.

use leasehold_api::{Error, Mode};
use leasehold_engine::{Attempt, CancellationToken, Request};

use crate::client::Client;
use crate::derived::Turn;
use crate::error::interrupted;
use crate::shared_session::job::SharedJob;
use crate::try_outcome::{TryOutcome, contended, dated};
use crate::wait_session::WaitSession;
use crate::waiting::{Poller, pause, queue};

/// Why polling has ended.
enum Polled {
    Answer(Attempt),
    /// A wait session is available, on which the request can wait for the turn.
    Session(WaitSession),
}

/// Waits for a permit until granted or stopped. Polls without a turn while all wait sessions are taken.
pub(super) async fn wait_for_permit(
    client: &Client,
    number: i64,
    request: &Request,
    stop: &CancellationToken,
) -> Result<Attempt, Error> {
    let session = match client.wait_sessions.take().await {
        Ok(session) => session,
        Err(error) => {
            tracing::debug!(%error, "no session to wait on; asking again and again instead");
            None
        }
    };
    let session = match session {
        Some(session) => session,
        None => match poll(client, number, request, None, stop).await? {
            Polled::Answer(attempt) => return Ok(attempt),
            Polled::Session(session) => session,
        },
    };
    wait_on(client, number, session, request, stop).await
}

/// Waits for the turn on `session`, then until the request is granted.
pub(super) async fn wait_on(
    client: &Client,
    number: i64,
    session: WaitSession,
    request: &Request,
    stop: &CancellationToken,
) -> Result<Attempt, Error> {
    let turn = Turn::of(number, request.mode == Mode::Shared);
    match queue(client, &session, stop, || session.take_turn(turn)).await? {
        Some(TryOutcome::Granted(())) => {}
        Some(TryOutcome::Contended) => {
            session.give_back();
            return Ok(contended());
        }
        Some(TryOutcome::Refused(error)) => {
            session.give_back();
            return Ok(Attempt::Refused(error));
        }
        None => return Ok(contended()),
    }
    let polled = poll(client, number, request, Some(&session), stop).await;
    // A session that does not answer is dropped, and ends with its turn.
    if session.end_turn(turn).await.is_ok() {
        session.give_back();
    }
    match polled? {
        Polled::Answer(attempt) => Ok(attempt),
        // Needs no session, because it had one.
        Polled::Session(session) => {
            session.give_back();
            Ok(contended())
        }
    }
}

/// Polls, on a release or after a while, with the turn that `session` has. Ends if the turn is lost. Without a session,
/// polls until one is available.
async fn poll(
    client: &Client,
    number: i64,
    request: &Request,
    session: Option<&WaitSession>,
    stop: &CancellationToken,
) -> Result<Polled, Error> {
    let poller = Poller::enter(&client.common, number);
    // Whether the server has room for another session.
    let mut may_queue = session.is_none();
    let queue = &client.common.queues[client.common.shared_session_of(number)];
    loop {
        // Any statement shows the server that this process still runs. Without one, the server ends the turn.
        if let Some(session) = session
            && session.handle().confirm().await.is_err()
        {
            return Ok(Polled::Answer(contended()));
        }
        let asked_at = client.now();
        // Sets a mark that was tested by another session just when it was to be set.
        queue.push(SharedJob::Mark(number));
        let attempt = match request.mode {
            Mode::Permit { of } => client.try_permit(request, of, session.map(WaitSession::pid)).await?,
            _ => {
                let mut tried = client.acquire(std::slice::from_ref(request)).await;
                tried.pop().unwrap_or_else(|| Err(interrupted()))?
            }
        };
        if !matches!(attempt, Attempt::Contended(_)) {
            return Ok(Polled::Answer(dated(attempt, asked_at)));
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return Ok(Polled::Answer(contended())),
            permit = client.wait_sessions.permit(), if may_queue => {
                match client.wait_sessions.with_permit(permit).await {
                    Ok(session) => return Ok(Polled::Session(session)),
                    Err(_) => may_queue = false,
                }
            }
            () = pause(Some(&poller)) => {}
        }
    }
}
