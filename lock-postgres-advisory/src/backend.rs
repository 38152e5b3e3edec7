//! The backend: many locks on few sessions, or one transaction for each.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use futures_util::future::join_all;
use leasehold_api::{Capabilities, Error, ErrorKind, FencingToken, HolderId, LockAdmin, LossReason};
use leasehold_engine::{
    Attempt, Backend, Confirm, Events, Freed, Granted, HoldRef, Moment, Renewed, Request, Stop, Timing,
    Waiting,
};
use leasehold_postgres::session::Session;
use tokio::sync::oneshot;

use crate::registry::{Claim, Place};
use crate::seat::{Seat, Span};
use crate::seats::Seats;
use crate::shared::Shared;
use crate::trunk::{Trunk, TrunkJob, ask, interrupted};
use crate::waiting::{dated, held, wait};

/// How long the sessions may take to end when the backend is closed.
const CLOSING: Duration = Duration::from_secs(2);

/// How long a key is left to those who poll for it elsewhere: they hear of the release and ask, which is to take no
/// longer than this. Whoever asks here sooner would have it each time where the others' way is the longer one.
const COURTESY: Duration = Duration::from_millis(50);

/// The store of advisory locks, for an engine. Made by [`AdvisoryConfig`](crate::AdvisoryConfig) and
/// [`XactConfig`](crate::XactConfig).
#[derive(Debug)]
pub struct AdvisoryBackend {
    pub(crate) keeper: Arc<Keeper>,
    capabilities: Capabilities,
    names: Mutex<Option<tokio::task::JoinHandle<()>>>,
}

/// The sessions, and what is on them.
pub(crate) struct Keeper {
    pub(crate) shared: Arc<Shared>,
    pub(crate) seats: Arc<Seats>,
    span: Span,
    trunks: Mutex<Vec<Session>>,
}

impl AdvisoryBackend {
    /// Opens the sessions that are there from the start.
    pub(crate) async fn open(shared: Shared, span: Span, seats: usize) -> Result<Self, Error> {
        let shared = Arc::new(shared);
        let keeps = span == Span::Session;
        let mut trunks = Vec::new();
        for (index, lane) in shared.trunks.iter().enumerate() {
            let work = Trunk::new(&shared, index, keeps);
            // The first tells what is wrong; the others are opened when they are needed.
            let opened = match index {
                0 => Session::open(&shared.config, lane, work).await,
                _ => Ok(Session::lazy(&shared.config, lane, work)),
            };
            match opened {
                Ok(session) => trunks.push(session),
                Err(error) => {
                    shared.trunks.iter().for_each(leasehold_postgres::Lane::close);
                    return Err(error);
                }
            }
        }
        let capabilities = crate::config::capabilities(&shared, span, seats);
        let seats = Seats::new(Arc::clone(&shared), span, seats);
        let keeper = Keeper { shared, seats, span, trunks: Mutex::new(trunks) };
        let names = Mutex::new(Some(tokio::spawn(crate::names::write(Arc::clone(&keeper.shared)))));
        Ok(Self { keeper: Arc::new(keeper), capabilities, names })
    }
}

impl Keeper {
    /// Whether locks that nobody else wants are kept on shared sessions.
    pub(crate) fn keeps_on_trunk(&self) -> bool {
        self.span == Span::Session
    }

    /// The moment on the engine's clock.
    pub(crate) fn now(&self) -> Option<Moment> {
        self.shared.events().map(Events::now)
    }

    /// `seat` keeps the number from now on.
    pub(crate) fn seated(
        &self,
        number: i64,
        request: &Request,
        seat: Seat,
        token: FencingToken,
    ) -> Result<Attempt, Error> {
        let (id, place) = (seat.id, seat.place());
        self.shared.seat_keeps(id, Some(seat.pid()));
        let state = Arc::clone(&seat.state);
        // In the table first: once granted, a release may come.
        self.seats.taken().insert(id, seat);
        let granted = self.shared.registry.granted(number, request.holder, place, token);
        if granted && !state.has_ended() && self.shared.open().is_ok() {
            return Ok(Attempt::Granted(Granted::with_token(Some(token))));
        }
        // Closed, or the session ended, before there was a hold to be told of.
        let seat = self.seats.taken().remove(&id);
        drop(seat);
        self.shared.seat_keeps(id, None);
        self.shared.registry.forget(number, request.holder);
        self.shared.open()?;
        Err(interrupted())
    }

    /// Tries each number in a transaction of its own.
    async fn try_in_transaction(&self, request: &Request) -> Result<Attempt, Error> {
        let number = self.shared.number(&request.key)?;
        let Some(seat) = self.seats.take().await? else {
            return Err(Error::new(
                ErrorKind::Capacity,
                "all sessions of this client keep locks; release some, or allow more sessions",
            ));
        };
        match self.shared.registry.claim(number, request, seat.place())? {
            Claim::Busy => return Ok(self.vacate(seat)),
            Claim::Again(token) => {
                seat.give_back();
                return Ok(Attempt::Granted(Granted::with_token(Some(token))));
            }
            Claim::Ours => {}
        }
        // Opening the session may have taken long; the question is asked now.
        let asked_at = self.now();
        let outcome = seat.acquire(number, false).await;
        match outcome {
            Ok(Some(token)) => Ok(dated(self.seated(number, request, seat, token)?, asked_at)),
            Ok(None) => {
                self.shared.registry.forget(number, request.holder);
                Ok(self.vacate(seat))
            }
            Err(error) => {
                self.shared.registry.forget(number, request.holder);
                Err(error)
            }
        }
    }

    fn vacate(&self, seat: Seat) -> Attempt {
        seat.give_back();
        held()
    }

    /// Tries all numbers in as few statements as there are sessions.
    async fn try_on_trunks(&self, requests: &[Request]) -> Vec<Result<Attempt, Error>> {
        let mut jobs: Vec<Vec<TrunkJob>> = self.shared.trunks.iter().map(|_| Vec::new()).collect();
        let asked: Vec<_> = requests.iter().map(|request| self.begin(request, &mut jobs)).collect();
        for (lane, jobs) in self.shared.trunks.iter().zip(jobs) {
            if !jobs.is_empty() {
                lane.push_all(jobs);
            }
        }
        let mut answers = Vec::with_capacity(asked.len());
        for asked in asked {
            answers.push(match asked {
                Err(answer) => answer,
                Ok(answered) => match answered.await.unwrap_or_else(|_| Err(interrupted())) {
                    Ok(Some(token)) => Ok(Attempt::Granted(Granted::with_token(Some(token)))),
                    Ok(None) => Ok(held()),
                    Err(error) => Err(error),
                },
            });
        }
        answers
    }

    /// Claims the number here and prepares the question, or answers at once.
    #[allow(clippy::type_complexity)]
    fn begin(
        &self,
        request: &Request,
        jobs: &mut [Vec<TrunkJob>],
    ) -> Result<oneshot::Receiver<Result<Option<FencingToken>, Error>>, Result<Attempt, Error>> {
        let shared = &self.shared;
        let number = shared.number(&request.key).map_err(Err)?;
        let trunk = shared.trunk(number);
        match shared.registry.claim(number, request, Place::Trunk(trunk)).map_err(Err)? {
            Claim::Busy => Err(Ok(held())),
            Claim::Again(token) => Err(Ok(Attempt::Granted(Granted::with_token(Some(token))))),
            Claim::Ours => {
                let (answer, answered) = oneshot::channel();
                let holder = request.holder;
                jobs[trunk].push(TrunkJob::Try { number, holder, waits: false, answer });
                Ok(answered)
            }
        }
    }

    async fn free(&self, hold: &HoldRef) -> Result<Freed, Error> {
        let (shared, holder) = (&self.shared, hold.holder);
        let number = shared.number(&hold.key)?;
        match shared.registry.place_of(number, holder) {
            None => Ok(Freed::new(false)),
            Some(Place::Trunk(trunk)) => {
                ask(&shared.trunks[trunk], |answer| TrunkJob::Unlock { number, holder, answer }).await
            }
            Some(Place::Seat(id)) => self.free_seat(id, number, holder).await,
            // It was waited for in vain.
            Some(Place::Nowhere) => {
                shared.registry.forget(number, holder);
                Ok(Freed::new(false))
            }
        }
    }

    async fn free_seat(&self, id: u64, number: i64, holder: HolderId) -> Result<Freed, Error> {
        let line = self.seats.taken().get(&id).map(Seat::line);
        let Some(line) = line else {
            self.shared.registry.forget(number, holder);
            return Ok(Freed::new(false));
        };
        let outcome = line.release(number).await;
        self.shared.seat_keeps(id, None);
        self.shared.registry.forget(number, holder);
        let seat = self.seats.taken().remove(&id);
        if let Some(seat) = seat {
            match &outcome {
                Ok(_) => seat.give_back(),
                // In doubt; it is ended, and the server frees what it kept.
                Err(_) => drop(seat),
            }
        }
        outcome
    }

    /// Whether the sessions that keep `holds` are there, each asked once.
    async fn confirm(&self, holds: &[HoldRef]) -> Vec<Result<Renewed, Error>> {
        let place = |hold: &HoldRef| {
            let number = self.shared.number(&hold.key).ok()?;
            let held = self.shared.registry.is_held(number, hold.holder);
            held.then(|| self.shared.registry.place_of(number, hold.holder)).flatten()
        };
        let mut places: Vec<Place> = holds.iter().filter_map(place).collect();
        places.sort_unstable_by_key(|place| match place {
            Place::Trunk(trunk) => (0, *trunk as u64),
            Place::Seat(id) => (1, *id),
            Place::Nowhere => (2, 0),
        });
        places.dedup();
        let asked = join_all(places.iter().map(|place| self.confirm_place(*place))).await;
        let outcomes: HashMap<Place, Result<(), Error>> = places.into_iter().zip(asked).collect();
        let answer = |hold: &HoldRef| match place(hold).and_then(|place| outcomes.get(&place)) {
            None => Ok(Renewed::Gone(LossReason::SessionLost)),
            Some(Ok(())) => Ok(Renewed::Extended),
            Some(Err(error)) => Err(leasehold_postgres::again(error)),
        };
        holds.iter().map(answer).collect()
    }

    async fn confirm_place(&self, place: Place) -> Result<(), Error> {
        match place {
            Place::Trunk(trunk) => {
                ask(&self.shared.trunks[trunk], |answer| TrunkJob::Confirm { answer }).await
            }
            Place::Seat(id) => {
                let line = self.seats.taken().get(&id).map(Seat::line);
                match line {
                    Some(line) => line.confirm().await,
                    None => Err(interrupted()),
                }
            }
            Place::Nowhere => Err(interrupted()),
        }
    }
}

#[async_trait]
impl Backend for AdvisoryBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        let config = &self.keeper.shared.config;
        let liveness = config.liveness_settings();
        let mut timing = Timing::default();
        timing.call = config.call_limit();
        timing.waiting = Waiting::Store;
        timing.courtesy = Some(COURTESY);
        timing.confirm = Some(Confirm::new(liveness.confirm_every, liveness.lost_after));
        timing
    }

    fn attach(&self, events: Events) {
        self.keeper.shared.attach(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        if let Err(closed) = self.keeper.shared.open() {
            return requests.iter().map(|_| Err(leasehold_postgres::again(&closed))).collect();
        }
        match self.keeper.span {
            Span::Session => self.keeper.try_on_trunks(&requests).await,
            Span::Transaction => join_all(requests.iter().map(|r| self.keeper.try_in_transaction(r))).await,
        }
    }

    async fn wait(&self, request: Request, stop: Stop) -> Result<Attempt, Error> {
        self.keeper.shared.open()?;
        wait(&self.keeper, &request, &stop).await
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        if let Err(closed) = self.keeper.shared.open() {
            return holds.iter().map(|_| Err(leasehold_postgres::again(&closed))).collect();
        }
        self.keeper.confirm(&holds).await
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<Freed, Error>> {
        if let Err(closed) = self.keeper.shared.open() {
            return holds.iter().map(|_| Err(leasehold_postgres::again(&closed))).collect();
        }
        join_all(holds.iter().map(|hold| self.keeper.free(hold))).await
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    async fn close(&self) {
        let keeper = &self.keeper;
        if keeper.shared.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        if let Some(names) = self.names.lock().unwrap_or_else(PoisonError::into_inner).take() {
            names.abort();
        }
        keeper.seats.close(CLOSING).await;
        keeper.shared.trunks.iter().for_each(leasehold_postgres::Lane::close);
        let trunks = std::mem::take(&mut *keeper.trunks.lock().unwrap_or_else(PoisonError::into_inner));
        join_all(trunks.into_iter().map(|session| session.ended(CLOSING))).await;
        keeper.shared.registry.clear();
    }

    fn sever(&self) {
        let keeper = &self.keeper;
        keeper.shared.closed.store(true, Ordering::Release);
        keeper.shared.trunks.iter().for_each(leasehold_postgres::Lane::close);
        keeper.trunks.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(Session::abort);
        keeper.seats.abort();
    }
}

/// Without a close: what was opened ends all the same.
impl Drop for AdvisoryBackend {
    fn drop(&mut self) {
        if let Some(names) = self.names.lock().unwrap_or_else(PoisonError::into_inner).take() {
            names.abort();
        }
        if !self.keeper.shared.closed.swap(true, Ordering::AcqRel) {
            self.keeper.shared.trunks.iter().for_each(leasehold_postgres::Lane::close);
            self.keeper.seats.abort();
        }
    }
}

impl fmt::Display for AdvisoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scope = match self.keeper.span {
            Span::Session => "advisory locks",
            Span::Transaction => "advisory transaction locks",
        };
        write!(f, "{scope} of {}", self.keeper.shared.config)
    }
}

impl fmt::Debug for Keeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Keeper")
            .field("server", &self.shared.config)
            .field("span", &self.span)
            .field("seated", &self.seats.taken().len())
            .finish_non_exhaustive()
    }
}
