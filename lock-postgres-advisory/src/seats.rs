//! The seats of one client.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::Error;
use leasehold_postgres::session::Session;
use leasehold_postgres::{Lane, Pooler};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use crate::seat::{IDLE, Seat, SeatJob, Span, State, TAKEN};
use crate::seat_work::SeatWork;
use crate::shared::Shared;
use crate::trunk::interrupted;

/// The seats of one client: bounded, opened when needed, kept for the next for a while.
pub(crate) struct Seats {
    pub(crate) shared: Arc<Shared>,
    pub(crate) span: Span,
    pub(crate) permits: Arc<Semaphore>,
    pub(crate) idle: Mutex<Vec<Seat>>,
    /// Those that keep something.
    taken: Mutex<HashMap<u64, Seat>>,
    /// All sessions that were opened and have not ended, whoever has them.
    open: Mutex<HashMap<u64, Open>>,
    next: AtomicU64,
}

/// The way to a session that somebody else may have.
struct Open {
    lane: Lane<SeatJob>,
    state: Arc<State>,
    task: AbortHandle,
}

impl Seats {
    pub(crate) fn new(shared: Arc<Shared>, span: Span, most: usize) -> Arc<Self> {
        Arc::new(Self {
            shared,
            span,
            permits: Arc::new(Semaphore::new(most)),
            idle: Mutex::default(),
            taken: Mutex::default(),
            open: Mutex::default(),
            next: AtomicU64::new(0),
        })
    }

    /// A seat, unless all are taken.
    pub(crate) async fn take(self: &Arc<Self>) -> Result<Option<Seat>, Error> {
        match Arc::clone(&self.permits).try_acquire_owned() {
            Ok(permit) => self.seat(permit).await.map(Some),
            Err(_) => Ok(None),
        }
    }

    /// The seat that a permit stands for: one that nobody has, or a new one.
    pub(crate) async fn seat(self: &Arc<Self>, permit: OwnedSemaphorePermit) -> Result<Seat, Error> {
        while let Some(mut seat) = self.pop() {
            if seat.state.go(IDLE, TAKEN) {
                seat.permit = Some(permit);
                seat.clean = false;
                return Ok(seat);
            }
        }
        let (id, lane) = (self.next.fetch_add(1, Ordering::Relaxed), Lane::new());
        let state = Arc::new(State::new());
        let work = SeatWork {
            id,
            shared: Arc::clone(&self.shared),
            seats: Arc::downgrade(self),
            span: self.span,
            state: Arc::clone(&state),
            opened: false,
            pooled: false,
        };
        // The trunk has found out about poolers.
        let pooler = if self.shared.is_pooled() { Pooler::Transaction } else { Pooler::None };
        let config = self.shared.config.clone().pooler(pooler);
        let session = Session::open(&config, &lane, work).await?;
        let open = Open { lane: lane.clone(), state: Arc::clone(&state), task: session.abort_handle() };
        self.open().insert(id, open);
        let seats = Arc::clone(self);
        let seat =
            Seat { id, lane, state, seats, session: Some(session), permit: Some(permit), clean: false };
        // Closed, or ended, while it was opened: then nobody else has seen it.
        if self.permits.is_closed() || seat.state.has_ended() {
            self.open().remove(&id);
            return Err(self.shared.open().err().unwrap_or_else(interrupted));
        }
        Ok(seat)
    }

    /// Resolves when there is a seat for the caller, of all who wait for one; never once closed.
    pub(crate) async fn vacant(&self) -> OwnedSemaphorePermit {
        match Arc::clone(&self.permits).acquire_owned().await {
            Ok(permit) => permit,
            Err(_) => std::future::pending().await,
        }
    }

    /// Ends all sessions, also those of calls that nobody polls any more. A session that ends frees what
    /// it keeps.
    pub(crate) async fn close(&self, limit: Duration) {
        self.permits.close();
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        let taken = std::mem::take(&mut *self.taken());
        let sessions = idle.into_iter().chain(taken.into_values()).filter_map(|mut seat| {
            seat.lane.close();
            seat.clean = true;
            Some(seat.session.take()?.ended(limit))
        });
        let sessions: Vec<_> = sessions.collect();
        // What is left has an owner who waits for it: the server is told, which ends the wait.
        let waiting: Vec<Open> = self.open().drain().map(|(_, open)| open).collect();
        for open in &waiting {
            open.lane.close();
            open.state.cancels.give_up();
            if open.state.phase.load(Ordering::Acquire) == TAKEN {
                self.shared.end_wait(&open.state, self.span);
            }
        }
        futures_util::future::join_all(sessions).await;
        let ended = async {
            while waiting.iter().any(|open| !open.task.is_finished()) {
                sleep(Duration::from_millis(10)).await;
            }
        };
        if timeout(limit, ended).await.is_err() {
            waiting.iter().for_each(|open| open.task.abort());
        }
    }

    /// Ends all sessions without waiting for anything.
    pub(crate) fn abort(&self) {
        self.permits.close();
        let open: Vec<Open> = self.open().drain().map(|(_, open)| open).collect();
        open.iter().for_each(|open| open.task.abort());
        drop(std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner)));
        drop(std::mem::take(&mut *self.taken()));
    }

    /// The session of that seat has ended: nobody has to be told about it any more.
    pub(crate) fn forget(&self, id: u64) {
        self.open().remove(&id);
        let seat = self.taken().remove(&id);
        let idle = self.forget_idle(id);
        // Not under the locks of the tables.
        drop((seat, idle));
    }

    fn open(&self) -> MutexGuard<'_, HashMap<u64, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn taken(&self) -> MutexGuard<'_, HashMap<u64, Seat>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_idle(&self, id: u64) -> Option<Seat> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let at = idle.iter().position(|seat| seat.id == id)?;
        Some(idle.swap_remove(at))
    }

    fn pop(&self) -> Option<Seat> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

#[cfg(test)]
mod tests {
    use leasehold_postgres::{PgConfig, RawBigint};

    use super::*;

    #[tokio::test]
    async fn a_vacant_seat_is_for_one_of_those_who_wait() {
        let config = PgConfig::from_url("postgres://app@db/x").unwrap();
        let seats = Seats::new(Arc::new(Shared::new(config, Arc::new(RawBigint), 1)), Span::Session, 1);
        let taken = seats.vacant().await;
        let (mut first, mut second) = (std::pin::pin!(seats.vacant()), std::pin::pin!(seats.vacant()));
        assert!(
            futures_util::poll!(&mut first).is_pending() && futures_util::poll!(&mut second).is_pending()
        );
        drop(taken);
        let permit = first.await;
        assert!(futures_util::poll!(&mut second).is_pending());
        drop(permit);
        drop(second.await);
    }
}
