//! Permits of one number. The session that has them knows its locks (`shared_session/permits.rs`), so a release is one
//! request for each permit.

use leasehold_api::{Error, FencingToken, HolderId};

use super::{Location, LockEntry, Part, Registry, entry_of};

/// Returns whether a request for one of `of` permits fits the entries of its number.
///
/// # Errors
///
/// `ModeMismatch` if the number is held with another number of permits.
pub(super) fn fits(present: &[LockEntry], of: u32) -> Result<bool, Error> {
    if present.iter().all(|entry| entry.permits == Some(of)) {
        return Ok(true);
    }
    let mut held = present.iter().filter(|entry| entry.stays()).filter_map(|entry| entry.permits);
    held.find(|in_use| *in_use != of).map_or(Ok(false), |in_use| Err(Error::mode_mismatch(in_use, of)))
}

impl Registry {
    /// Records that the server granted the permit with the number `permit`. Returns `false` if the reservation is gone.
    pub(crate) fn granted_permit(
        &self,
        number: i64,
        holder: HolderId,
        location: Location,
        token: FencingToken,
        permit: u32,
    ) -> bool {
        self.record_grant(number, holder, location, token, Some(permit))
    }

    /// Begins the release of a permit, or of a request for one. Returns its location, if it exists.
    pub(crate) fn leave_permit(&self, number: i64, holder: HolderId) -> Option<Location> {
        let mut entries = self.lock();
        let entry = entry_of(&mut entries, number, holder)?;
        entry.part = Part::Leaving;
        Some(entry.location)
    }
}

#[cfg(test)]
mod tests {
    use leasehold_api::{ErrorKind, LockKey, Mode};
    use leasehold_engine::Request;

    use super::*;
    use crate::registry::Reservation;

    const SESSION: Location = Location::Shared(0);
    const TOKEN: FencingToken = FencingToken::from_u64(1024);

    fn request(mode: Mode, serial: u64) -> Request {
        let mut request = Request::new(LockKey::new("k").unwrap(), HolderId::from_parts(7, serial));
        request.mode = mode;
        request
    }

    fn reserve(registry: &Registry, request: &Request) -> Result<Reservation, Error> {
        registry.reserve(5, request, SESSION)
    }

    #[test]
    fn permits_exclude_other_modes_and_another_number_of_permits() {
        let (registry, first) = (Registry::default(), request(Mode::Permit { of: 2 }, 1));
        assert!(matches!(reserve(&registry, &first), Ok(Reservation::Ours)));
        let other = request(Mode::Permit { of: 3 }, 2);
        assert!(matches!(reserve(&registry, &other), Ok(Reservation::Busy)), "nothing is in use yet");
        assert!(registry.granted_permit(5, first.holder, SESSION, TOKEN, 1));
        let error = reserve(&registry, &other).map(drop).unwrap_err();
        assert_eq!((error.kind(), error.key()), (ErrorKind::ModeMismatch, Some(&other.key)));
        for mode in [Mode::Exclusive, Mode::Shared] {
            assert!(matches!(reserve(&registry, &request(mode, 3)), Ok(Reservation::Busy)), "{mode:?}");
        }
        let again = reserve(&registry, &first);
        assert!(matches!(again, Ok(Reservation::Again(grant)) if grant.permit == Some(1)));
        assert!(matches!(
            reserve(&registry, &request(Mode::Permit { of: 2 }, 4)),
            Ok(Reservation::Beside(TOKEN))
        ));
    }

    #[test]
    fn a_permit_that_is_being_released_excludes_no_other_permit_and_is_joined_by_none() {
        let (registry, first) = (Registry::default(), request(Mode::Permit { of: 2 }, 1));
        reserve(&registry, &first).unwrap();
        registry.granted_permit(5, first.holder, SESSION, TOKEN, 0);
        assert_eq!(registry.leave_permit(5, first.holder), Some(SESSION));
        let second = request(Mode::Permit { of: 2 }, 2);
        assert!(matches!(reserve(&registry, &second), Ok(Reservation::Ours)), "the server decides again");
        assert!(matches!(reserve(&registry, &request(Mode::Exclusive, 3)), Ok(Reservation::Busy)));
        registry.forget(5, first.holder);
        assert_eq!(registry.leave_permit(5, first.holder), None, "it is released once");
        registry.forget(5, second.holder);
        assert!(matches!(reserve(&registry, &request(Mode::Exclusive, 3)), Ok(Reservation::Ours)));
    }

    #[test]
    fn readers_and_permits_exclude_each_other() {
        let (registry, reader) = (Registry::default(), request(Mode::Shared, 1));
        reserve(&registry, &reader).unwrap();
        registry.granted(5, reader.holder, SESSION, TOKEN);
        assert!(matches!(reserve(&registry, &request(Mode::Permit { of: 2 }, 2)), Ok(Reservation::Busy)));
    }
}
