//! The wait sessions of one client.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::Error;
use leasehold_postgres::JobQueue;
use leasehold_postgres::session::Session;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

use crate::common::Common;
use crate::error::not_sent;
use crate::wait_session::work::WaitSessionWork;
use crate::wait_session::{IDLE, LockScope, TAKEN, WaitJob, WaitSession, WaitSessionState};

/// The wait sessions of one client: bounded, opened on demand, and reused by the next waiter for a while.
pub(crate) struct WaitSessions {
    pub(crate) common: Arc<Common>,
    pub(crate) scope: LockScope,
    pub(crate) permits: Arc<Semaphore>,
    pub(crate) idle: Mutex<Vec<WaitSession>>,
    /// Sessions that hold a lock.
    taken: Mutex<HashMap<u64, WaitSession>>,
    /// All sessions opened and not ended, including those in use.
    open: Mutex<HashMap<u64, OpenSession>>,
    next: AtomicU64,
}

/// The handles by which a session is ended that might be in use.
struct OpenSession {
    queue: JobQueue<WaitJob>,
    state: Arc<WaitSessionState>,
    task: AbortHandle,
}

impl WaitSessions {
    pub(crate) fn new(common: Arc<Common>, scope: LockScope, most: usize) -> Arc<Self> {
        Arc::new(Self {
            common,
            scope,
            permits: Arc::new(Semaphore::new(most)),
            idle: Mutex::default(),
            taken: Mutex::default(),
            open: Mutex::default(),
            next: AtomicU64::new(0),
        })
    }

    /// Returns a wait session, or `None` if all are taken.
    pub(crate) async fn take(self: &Arc<Self>) -> Result<Option<WaitSession>, Error> {
        match Arc::clone(&self.permits).try_acquire_owned() {
            Ok(permit) => self.with_permit(permit).await.map(Some),
            Err(_) => Ok(None),
        }
    }

    /// Returns the wait session for a permit: an idle one, or a new one.
    pub(crate) async fn with_permit(
        self: &Arc<Self>,
        permit: OwnedSemaphorePermit,
    ) -> Result<WaitSession, Error> {
        while let Some(mut session) = self.pop() {
            if session.state.advance(IDLE, TAKEN) {
                session.permit = Some(permit);
                session.clean = false;
                return Ok(session);
            }
        }
        let (id, queue) = (self.next.fetch_add(1, Ordering::Relaxed), JobQueue::new());
        let state = Arc::new(WaitSessionState::new());
        let work = WaitSessionWork {
            id,
            common: Arc::clone(&self.common),
            wait_sessions: Arc::downgrade(self),
            scope: self.scope,
            state: Arc::clone(&state),
            opened: false,
            pooled: false,
        };
        let config = self.common.config_of_more();
        let session = Session::open(&config, &queue, work).await?;
        let open =
            OpenSession { queue: queue.clone(), state: Arc::clone(&state), task: session.abort_handle() };
        self.open().insert(id, open);
        let wait_sessions = Arc::clone(self);
        let session = WaitSession {
            id,
            queue,
            state,
            wait_sessions,
            session: Some(session),
            permit: Some(permit),
            clean: false,
        };
        // Fails if the client was closed or the session ended while it was being opened.
        if self.permits.is_closed() || session.state.has_ended() {
            self.open().remove(&id);
            return Err(self.common.open().err().unwrap_or_else(not_sent));
        }
        Ok(session)
    }

    /// Waits, first come, first served, until a wait session can be taken, and returns the permit for it.
    /// Never returns after a close.
    pub(crate) async fn permit(&self) -> OwnedSemaphorePermit {
        match Arc::clone(&self.permits).acquire_owned().await {
            Ok(permit) => permit,
            Err(_) => std::future::pending().await,
        }
    }

    /// Ends all sessions, including the sessions of calls that are no longer polled. An ended session releases its
    /// lock.
    pub(crate) async fn close(&self, limit: Duration) {
        self.permits.close();
        let idle = std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner));
        let taken = std::mem::take(&mut *self.taken());
        let sessions = idle.into_iter().chain(taken.into_values()).filter_map(|mut session| {
            session.queue.close();
            session.clean = true;
            Some(session.session.take()?.ended(limit))
        });
        let sessions: Vec<_> = sessions.collect();
        // Ends the remaining sessions, in which callers wait, by requests to the server.
        let waiting: Vec<OpenSession> = self.open().drain().map(|(_, open)| open).collect();
        for open in &waiting {
            open.queue.close();
            open.state.cancels.give_up();
            if open.state.phase.load(Ordering::Acquire) == TAKEN {
                self.common.end_wait(&open.state, self.scope);
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

    /// Ends all sessions without waiting.
    pub(crate) fn abort(&self) {
        self.permits.close();
        let open: Vec<OpenSession> = self.open().drain().map(|(_, open)| open).collect();
        open.iter().for_each(|open| open.task.abort());
        drop(std::mem::take(&mut *self.idle.lock().unwrap_or_else(PoisonError::into_inner)));
        drop(std::mem::take(&mut *self.taken()));
    }

    /// Forgets an ended session, so a close does not notify it.
    pub(crate) fn forget(&self, id: u64) {
        self.open().remove(&id);
        let session = self.taken().remove(&id);
        let idle = self.forget_idle(id);
        // Drops the sessions outside the mutexes of the tables.
        drop((session, idle));
    }

    fn open(&self) -> MutexGuard<'_, HashMap<u64, OpenSession>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn taken(&self) -> MutexGuard<'_, HashMap<u64, WaitSession>> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn forget_idle(&self, id: u64) -> Option<WaitSession> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let at = idle.iter().position(|session| session.id == id)?;
        Some(idle.swap_remove(at))
    }

    fn pop(&self) -> Option<WaitSession> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

#[cfg(test)]
mod tests {
    use leasehold_postgres::{PgConfig, RawBigint};

    use super::*;

    #[tokio::test]
    async fn a_free_wait_session_is_for_one_of_those_who_wait() {
        let config = PgConfig::from_url("postgres://app@db/x").unwrap();
        let wait_sessions =
            WaitSessions::new(Arc::new(Common::new(config, Arc::new(RawBigint), 1)), LockScope::Session, 1);
        let taken = wait_sessions.permit().await;
        let (mut first, mut second) =
            (std::pin::pin!(wait_sessions.permit()), std::pin::pin!(wait_sessions.permit()));
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
