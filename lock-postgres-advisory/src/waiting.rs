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
use crate::trunk::{TrunkJob, ask};

/// How often a waiter asks that found no seat.
const POLL: Duration = Duration::from_millis(100);

/// How long a wait that was told to stop may take to say so, before the server is told again, and how
/// often it is told.
const LEAVING: (Duration, u32) = (Duration::from_millis(100), 20);

/// Waits until granted (in the server's queue while there is a seat, by asking otherwise) or stopped.
pub(crate) async fn wait(keeper: &Keeper, request: &Request, stop: &Stop) -> Result<Attempt, Error> {
    let shared = &keeper.shared;
    let number = shared.number(&request.key)?;
    let Some(claimed) = claim(shared, number, request, stop).await? else { return Ok(held()) };
    let claimed = match claimed {
        Ok(claimed) => claimed,
        Err(token) => return Ok(granted(token)),
    };
    let outcome = match keeper.seats.take().await? {
        Some(seat) => wait_in_queue(keeper, number, seat, request, stop).await,
        None => wait_by_asking(keeper, number, request, stop).await,
    };
    drop(claimed);
    outcome
}

/// The number's place in the registry, given up when dropped unless it was granted.
struct Claimed<'a> {
    shared: &'a Shared,
    number: i64,
    request: &'a Request,
}

impl Drop for Claimed<'_> {
    fn drop(&mut self) {
        // What was granted is freed by its release.
        if !self.shared.registry.is_held(self.number, self.request.holder) {
            self.shared.registry.forget(self.number, self.request.holder);
        }
    }
}

/// Reserves the number here, once an earlier holder of this process is out. `None`: stopped.
async fn claim<'a>(
    shared: &'a Shared,
    number: i64,
    request: &'a Request,
    stop: &Stop,
) -> Result<Option<Result<Claimed<'a>, FencingToken>>, Error> {
    let place = Place::Trunk(shared.trunk(number));
    loop {
        let mut freed = std::pin::pin!(shared.registry.freed.notified());
        freed.as_mut().enable();
        shared.open()?;
        match shared.registry.claim(number, request, place)? {
            Claim::Ours => return Ok(Some(Ok(Claimed { shared, number, request }))),
            Claim::Again(token) => return Ok(Some(Err(token))),
            Claim::Busy => tokio::select! {
                () = stop.stopped() => return Ok(None),
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
            let granted = keeper.seated(number, request, seat, token);
            Ok(dated(granted, asked_at))
        }
        Ok(None) => {
            seat.give_back();
            Ok(held())
        }
        Err(error) => Err(error),
    }
}

/// Asks again and again. Others see a mark and notify when they free the number; a seat that becomes
/// vacant is a place in the queue.
async fn wait_by_asking(keeper: &Keeper, number: i64, request: &Request, stop: &Stop) -> Result<Attempt, Error> {
    let shared = &keeper.shared;
    let poller = keeper.keeps_on_trunk().then(|| Poller::enter(shared, number));
    loop {
        tokio::select! {
            biased;
            () = stop.stopped() => return Ok(held()),
            () = keeper.seats.vacant() => {
                if let Some(seat) = keeper.seats.take().await? {
                    return wait_in_queue(keeper, number, seat, request, stop).await;
                }
            }
            () = pause(poller.as_ref()) => {}
        }
        if poller.is_some() {
            let (trunk, holder) = (shared.trunk(number), request.holder);
            let lane = &shared.trunks[trunk];
            // A try that finds it held gives the claim up.
            if shared.registry.place_of(number, holder).is_none()
                && !matches!(shared.registry.claim(number, request, Place::Trunk(trunk))?, Claim::Ours)
            {
                continue;
            }
            let asked_at = keeper.now();
            if let Some(token) = ask(lane, |answer| TrunkJob::Try { number, holder, answer }).await? {
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
        pollers.remove(&self.number);
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
fn dated(attempt: Attempt, asked_at: Option<Moment>) -> Attempt {
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
