//! This client's locks and requests by number. Local callers must exclude each other here, because the server would
//! grant the same number to one session twice: exclusive beside its own shared lock, and shared past a waiting writer.

pub(crate) mod names;
mod permits;
pub(crate) mod shared;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use leasehold_api::{Error, ErrorKind, FencingToken, HolderId, LockKey, Mode};
use leasehold_engine::Request;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::sql::LockMode;

/// The session that holds a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Location {
    /// The shared session with this index, which holds many locks.
    Shared(usize),
    /// The wait session with this id, which holds one lock.
    Own(u64),
    /// No session yet. The request waits for a session, or in the server's queue.
    Nowhere,
}

#[derive(Debug, Default)]
pub(crate) struct Registry {
    /// The holds and requests of each number, which has at most one unless all are shared. No list is empty.
    entries: Mutex<HashMap<i64, Vec<LockEntry>>>,
    /// Notified if a number was released in this process.
    pub(crate) freed: Notify,
    /// Notified of a grant, which the dictionary might have to record.
    pub(crate) granted: Notify,
}

#[derive(Clone, Debug)]
pub(crate) struct LockEntry {
    pub(crate) key: LockKey,
    pub(crate) holder: HolderId,
    /// How the entry locks the number at the server.
    pub(crate) mode: LockMode,
    /// N, if the entry is one of N permits.
    pub(crate) permits: Option<u32>,
    pub(crate) label: Option<Arc<str>>,
    pub(crate) location: Location,
    pub(crate) grant: Option<GrantInfo>,
    /// Whether this hold was written to the dictionary of names.
    pub(crate) written: bool,
    /// How the entry uses the server's lock at its location.
    part: Part,
}

/// How an entry uses the server's lock at its location, which has one lock for all shared entries there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// It requests the lock from the server, or has it.
    Own,
    /// It joins other entries that have the lock.
    Joining,
    /// Its release unlocks the number at the server.
    Leaving,
}

impl LockEntry {
    /// Returns whether the entry has a grant that no release has begun to end.
    fn stays(&self) -> bool {
        self.grant.is_some() && self.part != Part::Leaving
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct GrantInfo {
    pub(crate) token: FencingToken,
    /// The number of the permit, if the grant is one.
    pub(crate) permit: Option<u32>,
    pub(crate) at: Instant,
    pub(crate) since: SystemTime,
}

/// The result of [`Registry::reserve`].
pub(crate) enum Reservation {
    /// The number is reserved for the caller, which can request it from the server.
    Ours,
    /// The same holder has the number already.
    Again(GrantInfo),
    /// The session at this location shares the number already, with this token. The server would grant it again past a
    /// waiting writer, so the caller checks for one on another session.
    Beside(FencingToken),
    /// The session at this location releases its shared lock for the last reader of this process. The caller tries again
    /// after that.
    Leaving,
    /// Another holder of this process excludes the request, or has not finished its release.
    Busy,
}

/// Returns the mode of a request in the server. Permits share the number of their key.
pub(crate) fn lock_mode(mode: Mode) -> Result<LockMode, Error> {
    match mode {
        Mode::Exclusive => Ok(LockMode::Exclusive),
        Mode::Shared | Mode::Permit { .. } => Ok(LockMode::Shared),
        _ => Err(Error::unsupported("such mode")),
    }
}

/// Returns N, if the mode is one of N permits.
const fn permits_of(mode: Mode) -> Option<u32> {
    match mode {
        Mode::Permit { of } => Some(of),
        _ => None,
    }
}

impl Registry {
    /// Reserves `number` for `request` at `location`.
    pub(crate) fn reserve(
        &self,
        number: i64,
        request: &Request,
        location: Location,
    ) -> Result<Reservation, Error> {
        let mode = lock_mode(request.mode).map_err(|error| error.with_key(&request.key))?;
        let mut entries = self.lock();
        let present = entries.get(&number).map(Vec::as_slice).unwrap_or_default();
        if let Some(entry) = present.iter().find(|entry| entry.key != request.key) {
            return Err(Error::new(
                ErrorKind::InvalidKey,
                format!(
                    "the keys {} and {} have the same number {number}, and this process uses the other one now; rename one of them, or choose a hash with more bits",
                    request.key, entry.key
                ),
            )
            .with_key(&request.key));
        }
        if let Some(own) = present.iter().find(|entry| entry.holder == request.holder) {
            return Ok(own.grant.map_or(Reservation::Busy, Reservation::Again));
        }
        let permits = permits_of(request.mode);
        let fits = match permits {
            Some(of) => permits::fits(present, of).map_err(|error| error.with_key(&request.key))?,
            None => {
                let is_shared = |entry: &LockEntry| entry.mode == LockMode::Shared && entry.permits.is_none();
                present.is_empty() || mode == LockMode::Shared && present.iter().all(is_shared)
            }
        };
        if !fits {
            return Ok(Reservation::Busy);
        }
        // Beside a request or a release of the same session, that session would have the lock of the server twice.
        let is_here = |entry: &&LockEntry| entry.location == location && !entry.stays();
        let mut unfinished = present.iter().filter(is_here).peekable();
        if permits.is_none() && unfinished.peek().is_some() {
            let is_leaving = unfinished.all(|entry| entry.part == Part::Leaving);
            return Ok(if is_leaving { Reservation::Leaving } else { Reservation::Busy });
        }
        let beside = token_at(present, location);
        let part = if beside.is_some() { Part::Joining } else { Part::Own };
        let (key, holder, label) = (request.key.clone(), request.holder, request.label.clone());
        let entry =
            LockEntry { key, holder, mode, permits, label, location, grant: None, written: false, part };
        entries.entry(number).or_default().push(entry);
        Ok(beside.map_or(Reservation::Ours, Reservation::Beside))
    }

    /// Records that the server granted the number. Returns `false` if the reservation is gone.
    pub(crate) fn granted(
        &self,
        number: i64,
        holder: HolderId,
        location: Location,
        token: FencingToken,
    ) -> bool {
        self.record_grant(number, holder, location, token, None)
    }

    fn record_grant(
        &self,
        number: i64,
        holder: HolderId,
        location: Location,
        token: FencingToken,
        permit: Option<u32>,
    ) -> bool {
        let mut entries = self.lock();
        let Some(entry) = entry_of(&mut entries, number, holder) else { return false };
        entry.location = location;
        if entry.part == Part::Joining {
            entry.part = Part::Own;
        }
        entry.grant = Some(GrantInfo { token, permit, at: Instant::now(), since: SystemTime::now() });
        drop(entries);
        self.granted.notify_one();
        true
    }

    /// Replaces the label of a hold, which the dictionary then has to record. Returns `false` if `holder` does not
    /// hold `number`.
    pub(crate) fn relabel(&self, number: i64, holder: HolderId, label: Arc<str>) -> bool {
        let mut entries = self.lock();
        let held = |entry: &&mut LockEntry| entry.grant.is_some();
        let Some(entry) = entry_of(&mut entries, number, holder).filter(held) else { return false };
        entry.label = Some(label);
        entry.written = false;
        drop(entries);
        self.granted.notify_one();
        true
    }

    /// Moves a request to another location. Returns `false` if the reservation is gone.
    pub(crate) fn move_to(&self, number: i64, holder: HolderId, location: Location) -> bool {
        let mut entries = self.lock();
        let entry = entry_of(&mut entries, number, holder).filter(|entry| entry.grant.is_none());
        entry.map(|entry| (entry.location, entry.part) = (location, Part::Own)).is_some()
    }

    /// Returns the location at which `holder` holds or requests `number`.
    pub(crate) fn location_of(&self, number: i64, holder: HolderId) -> Option<Location> {
        entry_of(&mut self.lock(), number, holder).map(|entry| entry.location)
    }

    /// Waits until no holder of `number` at `location` is being released.
    pub(crate) async fn left(&self, number: i64, location: Location) {
        loop {
            let mut freed = std::pin::pin!(self.freed.notified());
            freed.as_mut().enable();
            let is_leaving = |entry: &LockEntry| entry.location == location && entry.part == Part::Leaving;
            if !self.lock().get(&number).is_some_and(|present| present.iter().any(is_leaving)) {
                return;
            }
            freed.await;
        }
    }

    /// Returns whether `holder` holds `number`.
    pub(crate) fn is_held(&self, number: i64, holder: HolderId) -> bool {
        entry_of(&mut self.lock(), number, holder).is_some_and(|entry| entry.grant.is_some())
    }

    /// Removes the hold or request of `holder` for `number`.
    pub(crate) fn forget(&self, number: i64, holder: HolderId) {
        let mut entries = self.lock();
        if remove(&mut entries, number, holder) {
            drop(entries);
            self.freed.notify_waiters();
        }
    }

    /// Returns any number held at `location` that is not in `but`. `None` if there is no such number.
    pub(crate) fn one_held_at(&self, location: Location, but: &[i64]) -> Option<i64> {
        let entries = self.lock();
        let held = |entry: &LockEntry| entry.location == location && entry.grant.is_some();
        let held = entries.iter().filter(|(_, entries)| entries.iter().any(held));
        let mut numbers = held.map(|(number, _)| *number);
        numbers.find(|number| !but.contains(number))
    }

    /// Removes all holds and requests at `location`, whose session has ended. Returns the holds.
    pub(crate) fn lost(&self, location: Location) -> Vec<(LockKey, HolderId)> {
        let mut lost = Vec::new();
        self.lock().retain(|_, entries| {
            entries.retain(|entry| {
                if entry.location != location {
                    return true;
                }
                if entry.grant.is_some() {
                    lost.push((entry.key.clone(), entry.holder));
                }
                false
            });
            !entries.is_empty()
        });
        self.freed.notify_waiters();
        lost
    }

    /// Returns copies of the holds for which `wanted` is true.
    pub(crate) fn holds(&self, wanted: impl Fn(&LockEntry) -> bool) -> Vec<(i64, LockEntry)> {
        let entries = self.lock();
        let all =
            entries.iter().flat_map(|(number, entries)| entries.iter().map(move |entry| (number, entry)));
        let held = all.filter(|(_, entry)| entry.grant.is_some() && wanted(entry));
        held.map(|(number, entry)| (*number, entry.clone())).collect()
    }

    /// Records that the dictionary has these holds.
    pub(crate) fn written(&self, holds: &[(i64, LockEntry)]) {
        let mut entries = self.lock();
        for (number, written) in holds {
            // Leaves a hold that got another label in the meantime to the next write.
            let is_same = |entry: &&mut LockEntry| entry.label == written.label;
            if let Some(entry) = entry_of(&mut entries, *number, written.holder).filter(is_same) {
                entry.written = true;
            }
        }
    }

    /// Returns the holds of `number` at `location`.
    pub(crate) fn held_at(&self, number: i64, location: Location) -> Vec<LockEntry> {
        let entries = self.lock();
        let held = entries.get(&number).into_iter().flatten();
        held.filter(|entry| entry.location == location && entry.grant.is_some()).cloned().collect()
    }

    /// Returns how many numbers are held or requested.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    pub(crate) fn clear(&self) {
        self.lock().clear();
        self.freed.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i64, Vec<LockEntry>>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn entry_of(
    entries: &mut HashMap<i64, Vec<LockEntry>>,
    number: i64,
    holder: HolderId,
) -> Option<&mut LockEntry> {
    entries.get_mut(&number)?.iter_mut().find(|entry| entry.holder == holder)
}

/// Removes the entry of `holder`. Returns whether it existed.
fn remove(entries: &mut HashMap<i64, Vec<LockEntry>>, number: i64, holder: HolderId) -> bool {
    let Entry::Occupied(mut slot) = entries.entry(number) else { return false };
    let before = slot.get().len();
    slot.get_mut().retain(|entry| entry.holder != holder);
    let is_removed = slot.get().len() < before;
    if slot.get().is_empty() {
        slot.remove();
    }
    is_removed
}

/// Returns the token of a hold at `location` that stays.
fn token_at(entries: &[LockEntry], location: Location) -> Option<FencingToken> {
    let mut held = entries.iter().filter(|entry| entry.location == location && entry.stays());
    held.find_map(|entry| entry.grant).map(|grant| grant.token)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(key: &str, serial: u64) -> Request {
        Request::new(LockKey::new(key).unwrap(), HolderId::from_parts(7, serial))
    }

    #[test]
    fn a_label_that_changes_while_the_old_one_is_written_is_written_again() {
        let registry = Registry::default();
        let (request, token) = (request("a", 1), FencingToken::from_u64(1024));
        let unwritten = || registry.holds(|entry| !entry.written);
        assert!(matches!(registry.reserve(5, &request, Location::Shared(0)), Ok(Reservation::Ours)));
        assert!(!registry.relabel(5, request.holder, "early".into()), "it is not granted yet");
        assert!(registry.granted(5, request.holder, Location::Shared(0), token));
        let writing = unwritten();
        assert!(registry.relabel(5, request.holder, "new".into()));
        assert!(!registry.relabel(5, HolderId::from_parts(7, 2), "of another".into()));
        registry.written(&writing);
        let again = unwritten();
        assert_eq!(again[0].1.label.as_deref(), Some("new"));
        registry.written(&again);
        assert!(unwritten().is_empty());
    }

    #[test]
    fn one_number_has_one_holder_and_two_keys_of_it_are_told_apart() {
        let registry = Registry::default();
        let (location, token) = (Location::Shared(0), FencingToken::from_u64(1024));
        let [first, second, other] = [request("a", 1), request("a", 2), request("b", 3)];
        assert!(matches!(registry.reserve(5, &first, location), Ok(Reservation::Ours)));
        assert!(matches!(registry.reserve(5, &second, location), Ok(Reservation::Busy)));
        assert!(registry.granted(5, first.holder, location, token));
        assert!(
            matches!(registry.reserve(5, &first, location), Ok(Reservation::Again(again)) if again.token == token)
        );
        let error = registry.reserve(5, &other, location).map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidKey);
        assert!(error.to_string().contains('a') && error.to_string().contains('b'), "{error}");
        registry.forget(5, second.holder);
        assert!(registry.is_held(5, first.holder), "a stranger cannot free it");
        let third = request("c", 4);
        assert!(matches!(registry.reserve(6, &third, location), Ok(Reservation::Ours)));
        assert_eq!(registry.one_held_at(location, &[5]), None, "the other is not granted");
        assert_eq!(registry.one_held_at(location, &[6]), Some(5));
        assert_eq!(registry.one_held_at(Location::Own(1), &[]), None);
        assert_eq!(registry.lost(Location::Own(1)), []);
        assert_eq!(registry.lost(location), [(first.key.clone(), first.holder)]);
        assert!(registry.held_at(5, location).is_empty() && registry.len() == 0);
    }
}
