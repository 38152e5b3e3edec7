//! Shared holds of one number. All of them in one session have one shared lock of the server.
//!
//! The first one takes that lock, the last one to leave releases it. If one session took the lock
//! twice, the server would count that and hide it, and a failed statement could not be cleaned up.

use leasehold_api::{FencingToken, HolderId};

use super::{Location, LockEntry, Part, Registry, entry_of, remove, token_at};

/// How a waiting request goes on at a location. Returned by [`Registry::approach`].
pub(crate) enum Approach {
    /// It requests the lock from the server.
    Try,
    /// It joins the holders at the location, which have this token.
    Join(FencingToken),
    /// A holder there has not finished its release.
    Busy,
}

/// The next step of a release. Returned by [`Registry::leave`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leave {
    /// The holder was the last one at this location, whose lock must be released at the server.
    Last(Location),
    /// Others share the lock at this location. The holder is forgotten already.
    Left(Location),
}

impl Registry {
    /// Begins the release of the hold or request of `holder`, if it has any.
    pub(crate) fn leave(&self, number: i64, holder: HolderId) -> Option<Leave> {
        let mut entries = self.lock();
        let location = entry_of(&mut entries, number, holder)?.location;
        let shares = |entry: &LockEntry| {
            let has_part = entry.stays() || entry.part == Part::Joining;
            entry.holder != holder && entry.location == location && has_part
        };
        if entries.get(&number)?.iter().any(shares) {
            remove(&mut entries, number, holder);
            drop(entries);
            self.freed.notify_waiters();
            return Some(Leave::Left(location));
        }
        // No later request joins this holder, because its lock is being released.
        entry_of(&mut entries, number, holder)?.part = Part::Leaving;
        Some(Leave::Last(location))
    }

    /// Moves a waiting request to `location` and returns how it goes on there. `None` if the reservation is gone.
    pub(crate) fn approach(&self, number: i64, holder: HolderId, location: Location) -> Option<Approach> {
        let mut entries = self.lock();
        let present = entries.get(&number)?;
        let is_other = |entry: &LockEntry| entry.holder != holder && entry.location == location;
        let beside = token_at(present, location);
        let is_busy = beside.is_none() && present.iter().any(is_other);
        let entry = entry_of(&mut entries, number, holder).filter(|entry| entry.grant.is_none())?;
        if is_busy {
            return Some(Approach::Busy);
        }
        entry.location = location;
        entry.part = if beside.is_some() { Part::Joining } else { Part::Own };
        Some(beside.map_or(Approach::Try, Approach::Join))
    }

    /// Returns whether no other holder is left at the location of a request that joins. The request then has to release
    /// their lock if it is not granted. Otherwise moves the request away from them, and keeps its reservation.
    pub(crate) fn step_back(&self, number: i64, holder: HolderId) -> bool {
        let mut entries = self.lock();
        let Some(location) = entry_of(&mut entries, number, holder).map(|entry| entry.location) else {
            return false;
        };
        let present = entries.get(&number).map(Vec::as_slice).unwrap_or_default();
        if token_at(present, location).is_none() {
            return true;
        }
        if let Some(entry) = entry_of(&mut entries, number, holder) {
            (entry.location, entry.part) = (Location::Nowhere, Part::Own);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use leasehold_api::{LockKey, Mode};
    use leasehold_engine::Request;

    use super::*;
    use crate::registry::Reservation;

    const SESSION: Location = Location::Shared(0);
    const TOKEN: FencingToken = FencingToken::from_u64(1024);

    fn reader(serial: u64) -> Request {
        let mut request = Request::new(LockKey::new("k").unwrap(), HolderId::from_parts(7, serial));
        request.mode = Mode::Shared;
        request
    }

    fn reserve(registry: &Registry, request: &Request, location: Location) -> Reservation {
        registry.reserve(5, request, location).unwrap()
    }

    /// Returns a registry whose first reader has the lock of the session, and that the second one has joined.
    fn two_readers() -> (Registry, [Request; 2]) {
        let (registry, readers) = (Registry::default(), [reader(1), reader(2)]);
        assert!(matches!(reserve(&registry, &readers[0], SESSION), Reservation::Ours));
        assert!(
            matches!(reserve(&registry, &readers[1], SESSION), Reservation::Busy),
            "one request at a time"
        );
        assert!(registry.granted(5, readers[0].holder, SESSION, TOKEN));
        assert!(matches!(reserve(&registry, &readers[1], SESSION), Reservation::Beside(TOKEN)));
        assert!(registry.granted(5, readers[1].holder, SESSION, TOKEN));
        (registry, readers)
    }

    #[test]
    fn the_last_reader_of_a_session_releases_its_lock() {
        let (registry, [first, second]) = two_readers();
        assert_eq!(registry.leave(5, first.holder), Some(Leave::Left(SESSION)));
        assert_eq!(registry.leave(5, first.holder), None, "it is released once");
        assert_eq!(registry.leave(5, second.holder), Some(Leave::Last(SESSION)));
        assert!(
            matches!(reserve(&registry, &reader(3), SESSION), Reservation::Leaving),
            "its lock is being released"
        );
        let elsewhere = reader(4);
        assert!(
            matches!(reserve(&registry, &elsewhere, Location::Own(1)), Reservation::Ours),
            "another session can have it"
        );
        registry.forget(5, elsewhere.holder);
        assert_eq!(
            registry.leave(5, second.holder),
            Some(Leave::Last(SESSION)),
            "a failed release is repeated"
        );
        registry.forget(5, second.holder);
        assert!(matches!(reserve(&registry, &reader(3), SESSION), Reservation::Ours));
    }

    #[test]
    fn the_client_decides_what_the_server_would_grant_its_session() {
        let (registry, [first, second]) = two_readers();
        let writer = Request::new(first.key.clone(), HolderId::from_parts(7, 9));
        for location in [SESSION, Location::Own(1), Location::Nowhere] {
            assert!(matches!(reserve(&registry, &writer, location), Reservation::Busy), "{location:?}");
        }
        // A reader on another session has the server's own answer.
        let third = reader(3);
        assert!(matches!(reserve(&registry, &third, Location::Own(1)), Reservation::Ours));
        assert!(registry.granted(5, third.holder, Location::Own(1), TOKEN));
        assert_eq!(registry.leave(5, third.holder), Some(Leave::Last(Location::Own(1))));
        registry.forget(5, third.holder);
        for reader in [&first, &second] {
            registry.leave(5, reader.holder);
            registry.forget(5, reader.holder);
        }
        assert!(matches!(reserve(&registry, &writer, SESSION), Reservation::Ours));
        assert!(matches!(reserve(&registry, &reader(4), Location::Own(2)), Reservation::Busy));
    }

    #[test]
    fn a_reader_that_joins_keeps_the_lock_of_those_that_leave() {
        let (registry, [first, second]) = two_readers();
        let third = reader(3);
        assert!(matches!(reserve(&registry, &third, SESSION), Reservation::Beside(TOKEN)));
        for reader in [&first, &second] {
            assert_eq!(registry.leave(5, reader.holder), Some(Leave::Left(SESSION)));
        }
        assert!(registry.step_back(5, third.holder), "it is alone and has to release the lock");
        assert_eq!(registry.leave(5, third.holder), Some(Leave::Last(SESSION)));
    }

    #[test]
    fn a_waiting_reader_tries_joins_or_waits_for_a_release() {
        let (registry, [first, second]) = two_readers();
        let waiting = reader(3);
        assert!(matches!(reserve(&registry, &waiting, Location::Nowhere), Reservation::Ours));
        let approach = || registry.approach(5, waiting.holder, SESSION);
        assert!(matches!(approach(), Some(Approach::Join(TOKEN))));
        assert!(!registry.step_back(5, waiting.holder), "others have the lock");
        registry.leave(5, first.holder);
        registry.leave(5, second.holder);
        assert!(matches!(approach(), Some(Approach::Busy)), "the lock is being released");
        registry.forget(5, second.holder);
        assert!(matches!(approach(), Some(Approach::Try)));
        registry.forget(5, waiting.holder);
        assert!(approach().is_none());
    }

    #[test]
    fn the_loss_of_a_session_ends_all_its_readers_and_no_other() {
        let (registry, readers) = two_readers();
        let third = reader(3);
        assert!(matches!(reserve(&registry, &third, Location::Own(1)), Reservation::Ours));
        assert!(registry.granted(5, third.holder, Location::Own(1), TOKEN));
        let lost: Vec<_> = registry.lost(SESSION).into_iter().map(|(_, holder)| holder).collect();
        assert_eq!(lost, readers.map(|reader| reader.holder));
        assert!(registry.is_held(5, third.holder));
    }
}
