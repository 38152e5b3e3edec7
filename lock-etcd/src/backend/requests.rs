//! The requests and holds of this client, by holder id. The table has the copies of requests that can still arrive, the
//! places in queues to keep alive, and the end of each hold.
//!
//! Several entries share one lease, so a hold that the engine stops renewing does not end with its lease. The keeper
//! deletes its entry at the end that this table has.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use leasehold_api::{HolderId, LockKey, Mode};
use leasehold_engine::{Moment, Request};
use tokio::sync::Notify;

use crate::session::Session;
use crate::watcher::Watched;

/// The time after which a failed release counts as abandoned. The engine repeats a release sooner, but only until the lease
/// of the hold is over. A shared session can keep the entry alive for longer.
const ABANDONED_AFTER: Duration = Duration::from_secs(10);

/// The table. Its mutex is locked only for the time of an update.
#[derive(Debug, Default)]
pub(crate) struct Requests {
    records: Mutex<HashMap<HolderId, Record>>,
    /// Notified when the first request arrives in an empty table.
    arrived: Notify,
}

#[derive(Debug)]
struct Record {
    key: LockKey,
    mode: Mode,
    /// The numbers of permits that copies of the request take.
    numbers: Vec<u32>,
    /// The number that the request has.
    permit: Option<u32>,
    /// The session under whose lease the entry is, or will be.
    session: Option<Arc<Session>>,
    /// The copies of the request that can still arrive, by the session with which they were sent.
    copies: Vec<Copies>,
    stage: Stage,
    /// The last call of a release. After it no further copy of the request is sent.
    released: Option<ReleaseCall>,
    /// Whether an operator has left a note for the hold.
    is_noted: bool,
    /// The watch for waiters of other clients, until the hold is released.
    watched: Option<Watched>,
}

#[derive(Clone, Copy, Debug)]
struct ReleaseCall {
    at: Moment,
    unused: bool,
    /// Whether the keeper repeats the release.
    is_repeated: bool,
}

#[derive(Debug)]
struct Copies {
    session: Arc<Session>,
    /// The number of copies without a reply. A copy of a dropped call counts too.
    pending: u32,
    /// Whether an earlier copy of a request with a reply can still arrive.
    is_unsure: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// No entry is known.
    Asked,
    /// The entry has a place in the queue. `until` is set while no wait runs for it.
    Queued {
        created: i64,
        until: Option<Moment>,
    },
    Held {
        created: i64,
        until: Moment,
    },
    /// The client has ended the hold or the place, because it was not renewed or continued in time.
    Over,
}

/// An entry in the store, as this client knows it.
#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) session: Arc<Session>,
    pub(crate) created: i64,
}

/// An entry whose hold or place has ended, for the keeper to delete.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) key: LockKey,
    pub(crate) holder: HolderId,
    pub(crate) mode: Mode,
    pub(crate) created: i64,
    pub(crate) numbers: Vec<u32>,
}

/// A release that failed and that the engine has not repeated.
#[derive(Debug)]
pub(crate) struct Abandoned {
    pub(crate) key: LockKey,
    pub(crate) holder: HolderId,
    pub(crate) mode: Mode,
    pub(crate) unused: bool,
}

/// The work of the keeper in one round.
#[derive(Debug, Default)]
pub(crate) struct Work {
    pub(crate) ended: Vec<Ended>,
    pub(crate) abandoned: Vec<Abandoned>,
    /// The leases of the sessions with places in queues.
    pub(crate) awaited: HashSet<i64>,
}

/// The work of a release beside the deletion of the entry.
#[derive(Debug)]
pub(crate) struct Departure {
    /// The sessions with which a copy can still arrive.
    pub(crate) suspects: Vec<Arc<Session>>,
    pub(crate) numbers: Vec<u32>,
    pub(crate) is_noted: bool,
}

impl Requests {
    /// Adds the request, or continues it if it is in the table. Returns `false` if it is being released.
    pub(crate) fn begin(&self, request: &Request) -> bool {
        let mut records = self.lock();
        if records.is_empty() {
            self.arrived.notify_one();
        }
        let record = records.entry(request.holder).or_insert_with(|| Record {
            key: request.key.clone(),
            mode: request.mode,
            numbers: Vec::new(),
            permit: None,
            session: None,
            copies: Vec::new(),
            stage: Stage::Asked,
            released: None,
            is_noted: false,
            watched: None,
        });
        if record.stage == Stage::Over {
            record.stage = Stage::Asked;
        }
        record.released.is_none()
    }

    /// Notes that a copy is about to be sent with this session. Returns the guard that the copy must compare. `None` if
    /// the request was released, and the caller must not send it. A later release finds the copy and changes the guard.
    pub(crate) fn sending(&self, holder: HolderId, session: &Arc<Session>) -> Option<i64> {
        let mut records = self.lock();
        let record = records.get_mut(&holder).filter(|record| record.released.is_none())?;
        match record.copies.iter_mut().find(|copies| Arc::ptr_eq(&copies.session, session)) {
            Some(copies) => copies.pending += 1,
            None => {
                record.copies.push(Copies { session: Arc::clone(session), pending: 1, is_unsure: false });
            }
        }
        if record.session.is_none() {
            record.set_session(Some(session));
        }
        Some(session.guard())
    }

    /// Notes that the next copy takes this number of a permit. Returns `false` if the request was released.
    pub(crate) fn taking(&self, holder: HolderId, number: u32) -> bool {
        self.update(holder, |record| {
            if !record.numbers.contains(&number) {
                record.numbers.push(number);
            }
        })
    }

    /// Notes that the request has this number of a permit.
    pub(crate) fn numbered(&self, holder: HolderId, number: u32) {
        self.update(holder, |record| record.permit = Some(number));
    }

    /// Returns the number of the hold's permit.
    pub(crate) fn permit(&self, holder: HolderId) -> Option<u32> {
        self.lock().get(&holder)?.permit
    }

    /// Returns the numbers that copies of the request have taken, or can still take.
    pub(crate) fn numbers(&self, holder: HolderId) -> Vec<u32> {
        self.lock().get(&holder).map(|record| record.numbers.clone()).unwrap_or_default()
    }

    /// Notes that a copy has ended. `unsure` is whether it or an earlier copy can still arrive and be carried out.
    pub(crate) fn replied(&self, holder: HolderId, session: &Arc<Session>, unsure: bool) {
        if let Some(record) = self.lock().get_mut(&holder) {
            for copies in &mut record.copies {
                if Arc::ptr_eq(&copies.session, session) {
                    copies.pending = copies.pending.saturating_sub(1);
                    copies.is_unsure |= unsure;
                }
            }
            record.copies.retain(Copies::can_arrive);
        }
    }

    /// Notes that the entry exists. Its place lasts until `until`, or while a wait runs if that is `None`. Returns
    /// `false` if the request was released.
    pub(crate) fn queued(
        &self,
        holder: HolderId,
        session: &Arc<Session>,
        created: i64,
        until: Option<Moment>,
    ) -> bool {
        self.update(holder, |record| {
            record.set_session(Some(session));
            record.stage = Stage::Queued { created, until };
        })
    }

    /// Notes that the entry holds the key until `until`. Returns `false` if the request was released.
    pub(crate) fn granted(&self, holder: HolderId, created: i64, until: Moment) -> bool {
        self.update(holder, |record| record.stage = Stage::Held { created, until })
    }

    /// Notes that the entry no longer exists, so the place in the queue is lost.
    pub(crate) fn lost_place(&self, holder: HolderId) {
        self.update(holder, |record| {
            record.set_session(None);
            record.permit = None;
            record.stage = Stage::Asked;
        });
    }

    /// Returns the place in the queue of a request that a wait continues. The place lasts while the wait runs.
    pub(crate) fn place(&self, holder: HolderId) -> Option<Known> {
        let mut records = self.lock();
        let record = records.get_mut(&holder)?;
        let created = match &mut record.stage {
            Stage::Queued { created, until } => {
                *until = None;
                *created
            }
            Stage::Held { created, .. } => *created,
            Stage::Asked | Stage::Over => return None,
        };
        Some(Known { session: record.session.clone()?, created })
    }

    /// Notes that the wait for the place has ended. The place lasts until `end`.
    pub(crate) fn end_wait(&self, holder: HolderId, end: Moment) {
        self.update(holder, |record| {
            if let Stage::Queued { until, .. } = &mut record.stage {
                *until = Some(end);
            }
        });
    }

    /// Returns the hold, if it lasts at `now`.
    pub(crate) fn hold(&self, holder: HolderId, now: Moment) -> Option<Known> {
        let records = self.lock();
        let record = records.get(&holder)?;
        match record.stage {
            Stage::Held { created, until } if until > now => {
                Some(Known { session: record.session.clone()?, created })
            }
            _ => None,
        }
    }

    /// Sets the end of a hold after a renewal. Returns `false` if the hold has ended.
    pub(crate) fn extend(&self, holder: HolderId, until: Moment) -> bool {
        match self.lock().get_mut(&holder).map(|record| &mut record.stage) {
            Some(Stage::Held { until: end, .. }) => {
                *end = until;
                true
            }
            _ => false,
        }
    }

    /// Notes that the entry is under the lease of another session.
    pub(crate) fn moved(&self, holder: HolderId, session: &Arc<Session>) {
        self.update(holder, |record| record.set_session(Some(session)));
    }

    pub(crate) fn watch(&self, holder: HolderId, watched: Watched) {
        self.update(holder, |record| record.watched = Some(watched));
    }

    /// Notes that an operator has left a note for this holder. Returns the mode of its request. `None` if the holder is
    /// unknown here or is being released.
    pub(crate) fn noted(&self, holder: HolderId) -> Option<Mode> {
        let mut records = self.lock();
        let record = records.get_mut(&holder).filter(|record| record.released.is_none())?;
        record.is_noted = true;
        Some(record.mode)
    }

    /// Returns whether the entry of the request is unknown and all of its copies are done. A release then has no work.
    pub(crate) fn is_clean(&self, holder: HolderId) -> bool {
        self.lock().get(&holder).is_none_or(|record| record.copies.is_empty() && record.stage == Stage::Asked)
    }

    /// Notes that a release is called, which blocks further copies. Returns the work of that release.
    pub(crate) fn release(&self, holder: HolderId, unused: bool, now: Moment) -> Departure {
        let mut records = self.lock();
        let Some(record) = records.get_mut(&holder) else {
            return Departure { suspects: Vec::new(), numbers: Vec::new(), is_noted: false };
        };
        let is_repeated = record.released.is_some_and(|call| call.is_repeated);
        record.released = Some(ReleaseCall { at: now, unused, is_repeated });
        record.watched = None;
        let suspects = record.copies.iter().map(|copies| Arc::clone(&copies.session)).collect();
        Departure { suspects, numbers: record.numbers.clone(), is_noted: record.is_noted }
    }

    /// Removes the request from the table. Its entry must be deleted, and its copies done or refused.
    pub(crate) fn forget(&self, holder: HolderId) {
        if let Some(mut record) = self.lock().remove(&holder) {
            record.set_session(None);
        }
    }

    pub(crate) fn knows(&self, holder: HolderId) -> bool {
        self.lock().contains_key(&holder)
    }

    /// Returns whether a request for `key` has this number of a permit, or takes it.
    pub(crate) fn knows_number(&self, key: &LockKey, number: u32) -> bool {
        self.lock().values().any(|record| record.key == *key && record.numbers.contains(&number))
    }

    /// Waits until a request arrives in an empty table.
    pub(crate) async fn arrived(&self) {
        self.arrived.notified().await;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// Ends the holds and the places whose time has passed at `now`. Returns their entries to delete, and the sessions to
    /// keep alive.
    pub(crate) fn work(&self, now: Moment) -> Work {
        let mut work = Work::default();
        for (holder, record) in self.lock().iter_mut() {
            if let Some(call) = &mut record.released {
                if !call.is_repeated && now.since(call.at) >= ABANDONED_AFTER {
                    call.is_repeated = true;
                    let (key, mode, unused) = (record.key.clone(), record.mode, call.unused);
                    work.abandoned.push(Abandoned { key, holder: *holder, mode, unused });
                }
                continue;
            }
            let (created, is_over) = match record.stage {
                Stage::Queued { created, until } => (created, until.is_some_and(|until| until <= now)),
                Stage::Held { created, until } => (created, until <= now),
                Stage::Asked | Stage::Over => continue,
            };
            if is_over {
                record.stage = Stage::Over;
                let (key, mode, numbers) = (record.key.clone(), record.mode, record.numbers.clone());
                work.ended.push(Ended { key, holder: *holder, mode, created, numbers });
            } else if matches!(record.stage, Stage::Queued { .. }) {
                work.awaited.extend(record.session.as_ref().map(|session| session.lease));
            }
        }
        work
    }

    fn update(&self, holder: HolderId, change: impl FnOnce(&mut Record)) -> bool {
        let mut records = self.lock();
        let record = records.get_mut(&holder).filter(|record| record.released.is_none());
        record.map(change).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<HolderId, Record>> {
        self.records.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Record {
    fn set_session(&mut self, session: Option<&Arc<Session>>) {
        if let Some(session) = session {
            session.entries.fetch_add(1, Ordering::AcqRel);
        }
        if let Some(old) = std::mem::replace(&mut self.session, session.cloned()) {
            old.entries.fetch_sub(1, Ordering::AcqRel);
        }
    }
}

impl Copies {
    const fn can_arrive(&self) -> bool {
        self.pending > 0 || self.is_unsure
    }
}

#[cfg(test)]
mod tests;
