//! Waiting for a number that somebody else holds.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, FencingToken};
use leasehold_engine::{Attempt, Granted, Held, Moment, Request, Stop};
use tokio::sync::Notify;
use tokio::time::{Instant, sleep, timeout};

use crate::backend::Keeper;
use crate::registry::{Claim, Place};
use crate::seat::Seat;
use crate::shared::Shared;
use crate::trunk::{TrunkJob, ask, interrupted};

/// How often a waiter asks that found no seat.
const POLL: Duration = Duration::from_millis(100);

/// How long a wait that was told to stop may take to say so, before the server is told again, and how
/// often it is told.
const LEAVING: (Duration, u32) = (Duration::from_millis(100), 20);

/// Waits until granted (in the server's queue while there is a seat, by asking otherwise) or stopped.
pub(crate) async fn wait(keeper: &Keeper, request: &Request, stop: &Stop) -> Result<Attempt, Error> {
    let shared = &keeper.shared;
    let number = shared.number(&request.key)?;
    match claim(keeper, number, request, stop).await? {
        Claimed::Ours => {}
        Claimed::Again(token) => return Ok(granted(token)),
        Claimed::Stopped => return Ok(held()),
    }
    let outcome = match keeper.seats.take().await {
        Ok(Some(seat)) => wait_in_queue(keeper, number, seat, request, stop).await,
        Ok(None) => wait_by_asking(keeper, number, request, stop).await,
        // Asking needs no more connections.
        Err(error) if keeper.keeps_on_trunk() => {
            tracing::debug!(%error, "no session to wait on; asking again and again instead");
            wait_by_asking(keeper, number, request, stop).await
        }
        Err(error) => Err(error),
    };
    // A wait that is dropped before keeps its place here: what it has asked for meanwhile is found, and
    // freed, by the release that follows.
    if !shared.registry.is_held(number, request.holder) {
        shared.registry.forget(number, request.holder);
    }
    outcome
}

/// What became of reserving a number here.
enum Claimed {
    Ours,
    /// The same holder has it already.
    Again(FencingToken),
    Stopped,
}

/// Reserves the number here, once an earlier holder of this process is out.
async fn claim(keeper: &Keeper, number: i64, request: &Request, stop: &Stop) -> Result<Claimed, Error> {
    let shared = &keeper.shared;
    loop {
        let mut freed = std::pin::pin!(shared.registry.freed.notified());
        freed.as_mut().enable();
        shared.open()?;
        match shared.registry.claim(number, request, Place::Nowhere)? {
            Claim::Ours => return Ok(Claimed::Ours),
            Claim::Again(token) => return Ok(Claimed::Again(token)),
            Claim::Busy => tokio::select! {
                () = stop.stopped() => return Ok(Claimed::Stopped),
                () = freed => {}
                () = sleep(POLL) => {}
            },
        }
    }
}

async fn wait_in_queue(
    keeper: &Keeper,
    number: i64,
    seat: Seat,
    request: &Request,
    stop: &Stop,
) -> Result<Attempt, Error> {
    let begun = Instant::now();
    let mut asked_at = keeper.now();
    let outcome = {
        let mut waiting = std::pin::pin!(seat.acquire(number, true));
        tokio::select! {
            biased;
            outcome = &mut waiting => outcome,
            error = seen_dead(keeper, &seat) => return Err(error),
            () = stop.stopped() => {
                let mut told = 0;
                loop {
                    // The server may not have begun to wait when it is told first.
                    seat.cancel();
                    told += 1;
                    match timeout(LEAVING.0, &mut waiting).await {
                        Ok(outcome) => break outcome,
                        // Dropped, the seat has the server end the session, and the wait with it.
                        Err(_) if told == LEAVING.1 => return Ok(held()),
                        Err(_) => {}
                    }
                }
            }
        }
    };
    match outcome {
        Ok(Some(token)) => {
            // The answer to a long wait does not say how old it is; the answer to a question now does.
            if begun.elapsed() > recently(keeper) {
                asked_at = keeper.now();
                seat.line().confirm().await?;
            }
            let granted = keeper.seated(number, request, seat, token)?;
            Ok(dated(granted, asked_at))
        }
        Ok(None) => {
            seat.give_back();
            Ok(held())
        }
        Err(error) => Err(error),
    }
}

/// Resolves when the server does not know of the wait any more, though its answer has not come: the
/// connection is dead, which a wait alone would not notice.
async fn seen_dead(keeper: &Keeper, seat: &Seat) -> Error {
    let liveness = keeper.shared.config.liveness_settings();
    let mut missed = 0;
    let mut last = Instant::now();
    loop {
        sleep(liveness.confirm_every).await;
        match keeper.shared.waits(seat.pid()).await {
            Ok(true) => (missed, last) = (0, Instant::now()),
            // It may have been granted this moment, or not begun to wait.
            Ok(false) if missed < 2 => missed += 1,
            Ok(false) => return interrupted(),
            Err(error) if last.elapsed() > liveness.lost_after => return error,
            Err(_) => {}
        }
    }
}

/// Asks again and again. Others see a mark and notify when they free the number; a seat that becomes
/// vacant is a place in the queue.
async fn wait_by_asking(
    keeper: &Keeper,
    number: i64,
    request: &Request,
    stop: &Stop,
) -> Result<Attempt, Error> {
    let shared = &keeper.shared;
    let poller = keeper.keeps_on_trunk().then(|| Poller::enter(shared, number));
    // Whether the server has no room for one more session.
    let mut refused = false;
    loop {
        tokio::select! {
            biased;
            () = stop.stopped() => return Ok(held()),
            permit = keeper.seats.vacant(), if !refused => match keeper.seats.seat(permit).await {
                Ok(seat) => {
                    // In the queue nobody has to be notified for it.
                    drop(poller);
                    return wait_in_queue(keeper, number, seat, request, stop).await;
                }
                Err(error) if poller.is_none() => return Err(error),
                Err(_) => refused = true,
            },
            () = pause(poller.as_ref()) => {}
        }
        if poller.is_some() {
            let (trunk, holder) = (shared.trunk(number), request.holder);
            let lane = &shared.trunks[trunk];
            // Closed, or a session ended with the claim on it.
            if !shared.registry.move_to(number, holder, Place::Trunk(trunk)) {
                shared.open()?;
                return Err(interrupted());
            }
            let asked_at = keeper.now();
            if let Some(token) =
                ask(lane, |answer| TrunkJob::Try { number, holder, waits: true, answer }).await?
            {
                return Ok(dated(granted(token), asked_at));
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
    shared: &'a Shared,
    number: i64,
    woken: Arc<Notify>,
}

impl<'a> Poller<'a> {
    fn enter(shared: &'a Shared, number: i64) -> Self {
        let woken = Arc::new(Notify::new());
        shared.pollers.lock().unwrap_or_else(PoisonError::into_inner).insert(number, Arc::clone(&woken));
        shared.trunks[shared.trunk(number)].push(TrunkJob::Mark { number, set: true });
        Self { shared, number, woken }
    }
}

impl Drop for Poller<'_> {
    fn drop(&mut self) {
        let mut pollers = self.shared.pollers.lock().unwrap_or_else(PoisonError::into_inner);
        // The next one may be there already.
        if pollers.get(&self.number).is_some_and(|woken| Arc::ptr_eq(woken, &self.woken)) {
            pollers.remove(&self.number);
        }
        drop(pollers);
        let trunk = self.shared.trunk(self.number);
        self.shared.trunks[trunk].push(TrunkJob::Mark { number: self.number, set: false });
    }
}

/// How long ago a session may have been asked last to count as there.
fn recently(keeper: &Keeper) -> Duration {
    keeper.shared.config.liveness_settings().confirm_every / 2
}

/// The grant, with the moment just before it was asked for.
pub(crate) fn dated(attempt: Attempt, asked_at: Option<Moment>) -> Attempt {
    match attempt {
        Attempt::Granted(mut granted) => {
            granted.asked_at = asked_at;
            Attempt::Granted(granted)
        }
        other => other,
    }
}

fn granted(token: FencingToken) -> Attempt {
    Attempt::Granted(Granted::with_token(Some(token)))
}

pub(crate) fn held() -> Attempt {
    Attempt::Held(Held::new())
}
