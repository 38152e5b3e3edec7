//! This client's locks and requests by number. Local callers must exclude each other here, because the server would
//! grant the same number to one session twice.

pub(crate) mod names;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use leasehold_api::{Error, ErrorKind, FencingToken, HolderId, LockKey};
use leasehold_engine::Request;
use tokio::sync::Notify;
use tokio::time::Instant;

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
    entries: Mutex<HashMap<i64, LockEntry>>,
    /// Notified if a number was released in this process.
    pub(crate) freed: Notify,
    /// Notified of a grant, which the dictionary might have to record.
    pub(crate) granted: Notify,
}

#[derive(Clone, Debug)]
pub(crate) struct LockEntry {
    pub(crate) key: LockKey,
    pub(crate) holder: HolderId,
    pub(crate) label: Option<Arc<str>>,
    pub(crate) location: Location,
    pub(crate) grant: Option<GrantInfo>,
    /// Whether this hold was written to the dictionary of names.
    pub(crate) written: bool,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct GrantInfo {
    pub(crate) token: FencingToken,
    pub(crate) at: Instant,
    pub(crate) since: SystemTime,
}

/// The result of [`Registry::reserve`].
pub(crate) enum Reservation {
    /// The number is reserved for the caller, which can request it from the server.
    Ours,
    /// The same holder has the number already.
    Again(FencingToken),
    /// An earlier holder of this process has not finished its release.
    Busy,
}

impl Registry {
    /// Reserves `number` for `request` at `location`.
    pub(crate) fn reserve(
        &self,
        number: i64,
        request: &Request,
        location: Location,
    ) -> Result<Reservation, Error> {
        let mut entries = self.lock();
        match entries.entry(number) {
            Entry::Vacant(slot) => {
                slot.insert(LockEntry {
                    key: request.key.clone(),
                    holder: request.holder,
                    label: request.label.clone(),
                    location,
                    grant: None,
                    written: false,
                });
                Ok(Reservation::Ours)
            }
            Entry::Occupied(slot) => {
                let entry = slot.get();
                if entry.key != request.key {
                    return Err(Error::new(
                        ErrorKind::InvalidKey,
                        format!(
                            "the keys {} and {} have the same number {number}, and this process uses the other one now; rename one of them, or choose a hash with more bits",
                            request.key, entry.key
                        ),
                    )
                    .with_key(&request.key));
                }
                match entry.grant {
                    Some(grant) if entry.holder == request.holder => Ok(Reservation::Again(grant.token)),
                    _ => Ok(Reservation::Busy),
                }
            }
        }
    }

    /// Records that the server granted the number. Returns `false` if the reservation is gone.
    pub(crate) fn granted(
        &self,
        number: i64,
        holder: HolderId,
        location: Location,
        token: FencingToken,
    ) -> bool {
        let mut entries = self.lock();
        let Some(entry) = entries.get_mut(&number).filter(|entry| entry.holder == holder) else {
            return false;
        };
        entry.location = location;
        entry.grant = Some(GrantInfo { token, at: Instant::now(), since: SystemTime::now() });
        drop(entries);
        self.granted.notify_one();
        true
    }

    /// Replaces the label of a hold, which the dictionary then has to record. Returns `false` if `holder` does not
    /// hold `number`.
    pub(crate) fn relabel(&self, number: i64, holder: HolderId, label: Arc<str>) -> bool {
        let mut entries = self.lock();
        let held = |entry: &&mut LockEntry| entry.holder == holder && entry.grant.is_some();
        let Some(entry) = entries.get_mut(&number).filter(held) else { return false };
        entry.label = Some(label);
        entry.written = false;
        drop(entries);
        self.granted.notify_one();
        true
    }

    /// Moves a request to another location. Returns `false` if the reservation is gone.
    pub(crate) fn move_to(&self, number: i64, holder: HolderId, location: Location) -> bool {
        let mut entries = self.lock();
        let entry = entries.get_mut(&number).filter(|entry| entry.holder == holder && entry.grant.is_none());
        entry.map(|entry| entry.location = location).is_some()
    }

    /// Returns the location at which `holder` holds or requests `number`.
    pub(crate) fn location_of(&self, number: i64, holder: HolderId) -> Option<Location> {
        self.lock().get(&number).filter(|entry| entry.holder == holder).map(|entry| entry.location)
    }

    /// Returns whether `holder` holds `number`.
    pub(crate) fn is_held(&self, number: i64, holder: HolderId) -> bool {
        self.lock().get(&number).is_some_and(|entry| entry.holder == holder && entry.grant.is_some())
    }

    /// Removes the hold or request of `holder` for `number`.
    pub(crate) fn forget(&self, number: i64, holder: HolderId) {
        let mut entries = self.lock();
        if let Entry::Occupied(slot) = entries.entry(number)
            && slot.get().holder == holder
        {
            slot.remove();
            drop(entries);
            self.freed.notify_waiters();
        }
    }

    /// Returns any number held at `location` that is not in `but`. `None` if there is no such number.
    pub(crate) fn one_held_at(&self, location: Location, but: &[i64]) -> Option<i64> {
        let entries = self.lock();
        let held = |entry: &LockEntry| entry.location == location && entry.grant.is_some();
        let mut numbers = entries.iter().filter(|(_, entry)| held(entry)).map(|(number, _)| *number);
        numbers.find(|number| !but.contains(number))
    }

    /// Removes all holds and requests at `location`, whose session has ended. Returns the holds.
    pub(crate) fn lost(&self, location: Location) -> Vec<(LockKey, HolderId)> {
        let mut lost = Vec::new();
        self.lock().retain(|_, entry| {
            if entry.location != location {
                return true;
            }
            if entry.grant.is_some() {
                lost.push((entry.key.clone(), entry.holder));
            }
            false
        });
        self.freed.notify_waiters();
        lost
    }

    /// Returns copies of the holds for which `wanted` is true.
    pub(crate) fn holds(&self, wanted: impl Fn(&LockEntry) -> bool) -> Vec<(i64, LockEntry)> {
        let entries = self.lock();
        let held = entries.iter().filter(|(_, entry)| entry.grant.is_some() && wanted(entry));
        held.map(|(number, entry)| (*number, entry.clone())).collect()
    }

    /// Records that the dictionary has these holds.
    pub(crate) fn written(&self, holds: &[(i64, LockEntry)]) {
        let mut entries = self.lock();
        for (number, written) in holds {
            // Leaves a hold that got another label in the meantime to the next write.
            let is_same =
                |entry: &&mut LockEntry| entry.holder == written.holder && entry.label == written.label;
            if let Some(entry) = entries.get_mut(number).filter(is_same) {
                entry.written = true;
            }
        }
    }

    pub(crate) fn get(&self, number: i64) -> Option<LockEntry> {
        self.lock().get(&number).cloned()
    }

    /// Returns how many numbers are held or requested.
    pub(crate) fn len(&self) -> usize {
        self.lock().len()
    }

    pub(crate) fn clear(&self) {
        self.lock().clear();
        self.freed.notify_waiters();
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<i64, LockEntry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
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
            matches!(registry.reserve(5, &first, location), Ok(Reservation::Again(again)) if again == token)
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
        assert!(registry.get(5).is_none());
    }
}
