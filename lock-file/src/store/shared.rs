//! Attempts at shared grants and permits, which several holders of a key have at once.
//!
//! Each holder locks the key's lock file in shared mode and one part of the key exclusively. The key's record has the
//! mode and the token of all holders. It changes only under the exclusive lock, so it is checked under the shared one.

use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_engine::{Contended, Request};

use super::{
    Caller, FileStore, REMOVAL_TRIES, TakeResult, cooling, cooling_for, must_yield, next_grant, shows,
};
use crate::error::io_error;
use crate::gc;
use crate::hold::FileHold;
use crate::layout::KeyFiles;
use crate::locked_file::{LockedFile, lock_at, lock_shared_at};
use crate::record::{Record, SharedMode, now_ms};
use crate::token::Numbers;
use crate::waiter_lock::WaiterLock;

/// How often an attempt is repeated, with a pause, while another client might be changing the mode.
const MODE_TRIES: usize = 50;
const MODE_PAUSE: Duration = Duration::from_millis(1);

/// The largest number of shared holders of one key.
const MAX_SHARED: u32 = 1 << 16;

/// A key in the mode of a request.
struct InMode {
    main: LockedFile,
    record: Record,
}

impl FileStore {
    /// Makes one attempt at a shared grant or a permit. An error leaves no lock.
    pub(super) fn take_part(
        &self,
        files: &KeyFiles,
        request: &Request,
        mode: SharedMode,
        caller: Caller,
    ) -> TakeResult {
        match self.join(files, request, mode, caller) {
            Ok(Ok(hold)) => TakeResult::Hold(hold),
            Ok(Err(contended)) => TakeResult::Contended(contended),
            Err(error) => TakeResult::Refused(error),
        }
    }

    fn join(
        &self,
        files: &KeyFiles,
        request: &Request,
        mode: SharedMode,
        caller: Caller,
    ) -> Result<Result<FileHold, Contended>, Error> {
        if let Some(left) = cooling_for(files, &request.key)? {
            return Ok(Err(cooling(left)));
        }
        // Checks before the lock, too. Newcomers that try in a loop would otherwise overlap in the shared lock, and a
        // waiting writer would never find it free.
        if is_behind_waiter(files, caller)? {
            return Ok(Err(Contended::new()));
        }
        let InMode { main, record } = match self.enter_mode(files, request, mode, caller)? {
            Ok(entered) => entered,
            Err(contended) => return Ok(Err(contended)),
        };
        if must_yield(files, caller)? {
            return Ok(Err(Contended::new()));
        }
        let Some((locked, part)) = self.lock_part(files, mode)? else {
            return Ok(Err(Contended::new()));
        };
        let record = Record {
            holder: request.holder.to_string(),
            label: request.label.as_deref().map(str::to_owned),
            pid: std::process::id(),
            since_ms: now_ms(),
            ..record
        };
        record.write(&part)?;
        let numbers = Numbers { token: record.token(), next: record.next };
        Ok(Ok(FileHold::of_part(main, locked, part, numbers)))
    }

    /// Locks the key in shared mode while its record is in `mode`. A key without a holder gets this mode.
    fn enter_mode(
        &self,
        files: &KeyFiles,
        request: &Request,
        mode: SharedMode,
        caller: Caller,
    ) -> Result<Result<InMode, Contended>, Error> {
        let mut tries = 0;
        for _ in 0..REMOVAL_TRIES {
            if let Some(main) = self.with_dir(&files.main(), lock_shared_at)? {
                let found = Record::read(files, &request.key)?;
                let found = found.record();
                if let Some(record) = found.filter(|record| record.is_in(mode)) {
                    return Ok(Ok(InMode { main, record: record.clone() }));
                }
                // A part that shows is in the mode of the record, because this lock stops changes of the mode.
                if is_any_part_shown(files)? {
                    return excluded(found.and_then(|record| record.mode), mode);
                }
                // The lock ends here, before the exclusive one, because flock(2) would lose it in a failed upgrade.
            } else if shows(files)? {
                return Ok(Err(Contended::new()));
            }
            match self.begin_mode(files, request, caller)? {
                Ok(true) => {}
                Ok(false) => {
                    // The holder does not show. It might be a client that is changing the mode, or a removal of unused
                    // files.
                    tries += usize::from(!gc::is_under_way(&self.dir));
                    if tries == MODE_TRIES {
                        break;
                    }
                    std::thread::sleep(MODE_PAUSE);
                }
                Err(contended) => return Ok(Err(contended)),
            }
        }
        Ok(Err(Contended::new()))
    }

    /// Writes the record of the request's mode. Returns `false` if the key cannot be locked exclusively.
    fn begin_mode(
        &self,
        files: &KeyFiles,
        request: &Request,
        caller: Caller,
    ) -> Result<Result<bool, Contended>, Error> {
        let Some(_main) = self.with_dir(&files.main(), lock_at)? else { return Ok(Ok(false)) };
        if must_yield(files, caller)? {
            return Ok(Err(Contended::new()));
        }
        match next_grant(files, request)? {
            Ok((record, _)) => record.write(files).map(|()| Ok(true)),
            Err(contended) => Ok(Err(contended)),
        }
    }

    /// Locks the first free part. Returns `None` if all permits are held. The caller has the key's shared lock.
    fn lock_part(&self, files: &KeyFiles, mode: SharedMode) -> Result<Option<(LockedFile, KeyFiles)>, Error> {
        let parts = match mode {
            SharedMode::Shared => MAX_SHARED,
            SharedMode::Permits(of) => of,
        };
        for number in 0..parts {
            let part = files.part(number);
            let path = part.main();
            // Does not create the directory again, because the key's lock would be in the removed one.
            if let Some(locked) = lock_at(&path, self.mode).map_err(|e| io_error(e, "lock", &path))? {
                return Ok(Some((locked, part)));
            }
        }
        match mode {
            SharedMode::Shared => Err(Error::new(
                ErrorKind::Capacity,
                format!("the key has {MAX_SHARED} shared holders; wait until one of them has ended"),
            )),
            SharedMode::Permits(_) => Ok(None),
        }
    }
}

/// Returns whether a waiter is ahead of this caller, which has no lock of the key. Reads the heartbeat first, because a
/// check of the waiter lock can make a waiter's attempt fail.
fn is_behind_waiter(files: &KeyFiles, caller: Caller) -> Result<bool, Error> {
    let next = files.next();
    if caller == Caller::Waiter || WaiterLock::is_stopped(&next).map_err(|e| io_error(e, "look at", &next))? {
        return Ok(false);
    }
    must_yield(files, caller)
}

fn is_any_part_shown(files: &KeyFiles) -> Result<bool, Error> {
    for part in files.parts() {
        if shows(&part)? {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the answer to a request in another mode than the holders have.
fn excluded(in_use: Option<SharedMode>, wanted: SharedMode) -> Result<Result<InMode, Contended>, Error> {
    match (in_use, wanted) {
        (Some(SharedMode::Permits(in_use)), SharedMode::Permits(wanted)) if in_use != wanted => {
            Err(Error::mode_mismatch(in_use, wanted))
        }
        _ => Ok(Err(Contended::new())),
    }
}

#[cfg(test)]
mod tests {
    use leasehold_api::{HolderId, LockKey, Mode};

    use super::*;
    use crate::files::FileMode;
    use crate::store::{EnterResult, MAX_PERMITS};

    struct Case {
        dir: tempfile::TempDir,
        store: FileStore,
        files: KeyFiles,
    }

    fn case() -> Case {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path(), None).unwrap();
        let files = KeyFiles::new(dir.path(), FileMode::PRIVATE, &LockKey::new("k").unwrap());
        Case { dir, store, files }
    }

    const THREE: Mode = Mode::Permit { of: 3 };

    fn request(mode: Mode, serial: u64) -> Request {
        let mut request = Request::new(LockKey::new("k").unwrap(), HolderId::from_parts(1, serial));
        request.mode = mode;
        request
    }

    impl Case {
        fn take(&self, mode: Mode) -> TakeResult {
            self.store.take(&request(mode, 1), Caller::Newcomer).unwrap()
        }

        fn hold(&self, mode: Mode) -> FileHold {
            match self.take(mode) {
                TakeResult::Hold(hold) => hold,
                other => panic!("{mode:?}: {other:?}"),
            }
        }

        fn is_contended(&self, mode: Mode) -> bool {
            matches!(self.take(mode), TakeResult::Contended(_))
        }

        fn number_of_files(&self) -> usize {
            std::fs::read_dir(self.dir.path()).unwrap().count()
        }
    }

    #[test]
    fn the_files_of_a_key_grow_with_its_holders_at_once_and_not_with_its_grants() {
        let case = case();
        for _ in 0..10 {
            let all = [case.hold(Mode::Shared), case.hold(Mode::Shared), case.hold(Mode::Shared)];
            assert_eq!(all.each_ref().map(FileHold::part_number), [Some(0), Some(1), Some(2)]);
        }
        // The marker, lock, record and ceiling of the key, and three files of each part.
        assert_eq!(case.number_of_files(), 4 + 3 * 3);
        for _ in 0..10 {
            let all = [case.hold(THREE), case.hold(THREE), case.hold(THREE)];
            assert!(case.is_contended(THREE));
            drop(all);
        }
        assert_eq!(case.number_of_files(), 4 + 3 * 3);
    }

    #[test]
    fn holders_of_one_phase_have_one_token_and_each_change_of_the_mode_a_larger_one() {
        let case = case();
        let mut last = None;
        for mode in [Mode::Exclusive, Mode::Shared, THREE, Mode::Shared, Mode::Exclusive, THREE] {
            let first = case.hold(mode);
            let token = Some(first.numbers().token);
            assert!(token > last, "{mode:?}");
            last = token;
            if mode != Mode::Exclusive {
                assert_eq!(Some(case.hold(mode).numbers().token), token);
                drop(first);
                assert_eq!(Some(case.hold(mode).numbers().token), token, "without a change of the mode");
                assert!(case.hold(mode).reserved().is_empty());
            }
        }
    }

    #[test]
    fn a_mode_of_an_earlier_boot_is_entered_with_a_new_token() {
        let case = case();
        let before = case.hold(Mode::Shared).numbers().token;
        let mut record = Record::read_any(&case.files).unwrap().record().unwrap().clone();
        record.boot = "another".into();
        record.write(&case.files).unwrap();
        if crate::record::is_boot_known() {
            assert!(case.hold(Mode::Shared).numbers().token > before);
        } else {
            assert_eq!(case.hold(Mode::Shared).numbers().token, before);
        }
    }

    #[test]
    fn the_mode_of_a_key_cannot_change_while_it_is_held() {
        let case = case();
        let reader = case.hold(Mode::Shared);
        // Another client has entered a mode between this one's check and its lock.
        let of_permits = Record::read_any(&case.files).unwrap().record().unwrap().clone();
        let begun = case.store.begin_mode(&case.files, &request(THREE, 2), Caller::Newcomer).unwrap();
        assert!(matches!(begun, Ok(false)), "a reader has the lock");
        let unchanged = Record::read_any(&case.files).unwrap().record().unwrap().clone();
        assert_eq!(unchanged.token, of_permits.token);
        assert!(case.is_contended(THREE) && case.is_contended(Mode::Exclusive));
        drop(reader);
        assert!(matches!(
            case.store.begin_mode(&case.files, &request(THREE, 2), Caller::Newcomer).unwrap(),
            Ok(true)
        ));
        // The mode is checked under the lock, and the readers' mode comes back although permits were entered.
        assert_eq!(case.hold(Mode::Shared).part_number(), Some(0));
    }

    #[test]
    fn a_waiter_keeps_newcomers_of_each_mode_out_and_a_mode_is_not_begun_past_it() {
        let case = case();
        let key = LockKey::new("k").unwrap();
        let reader = case.hold(Mode::Shared);
        let EnterResult::First(waiter) = case.store.enter_waiter_lock(&key).unwrap() else {
            panic!("not free")
        };
        assert!(case.is_contended(Mode::Shared));
        drop(reader);
        for mode in [Mode::Shared, THREE, Mode::Exclusive] {
            assert!(case.is_contended(mode), "{mode:?}");
        }
        let mode = Record::read_any(&case.files).unwrap().record().unwrap().mode;
        assert_eq!(mode, Some(SharedMode::Shared), "nobody got in to change it");
        let taken = case.store.take(&request(THREE, 2), Caller::Waiter).unwrap();
        assert!(matches!(taken, TakeResult::Hold(_)));
        drop(waiter);
    }

    /// Shared locks of newcomers that overlap would keep a writer out, although it waits.
    #[test]
    fn a_newcomer_behind_a_waiter_does_not_lock_the_key() {
        let case = case();
        let EnterResult::First(waiter) = case.store.enter_waiter_lock(&LockKey::new("k").unwrap()).unwrap()
        else {
            panic!("not free")
        };
        for mode in [Mode::Shared, THREE] {
            assert!(case.is_contended(mode), "{mode:?}");
            assert!(!case.files.main().exists(), "a caller that locks the file creates it: {mode:?}");
        }
        drop(waiter);
        drop(case.hold(Mode::Shared));
    }

    #[test]
    fn another_number_of_permits_is_a_mismatch_only_while_one_is_held() {
        let case = case();
        let permit = case.hold(THREE);
        let TakeResult::Refused(error) = case.take(Mode::Permit { of: 2 }) else { panic!("not refused") };
        assert_eq!(error.kind(), ErrorKind::ModeMismatch);
        assert!(case.is_contended(Mode::Shared));
        drop(permit);
        assert_eq!(case.hold(Mode::Permit { of: 2 }).part_number(), Some(0));
    }

    #[test]
    fn no_mode_is_begun_within_a_cooldown() {
        let case = case();
        let mut cooling = request(Mode::Exclusive, 1);
        cooling.cooldown = Some(Duration::from_secs(3_600));
        drop(case.store.take(&cooling, Caller::Newcomer).unwrap());
        let TakeResult::Contended(contended) = case.take(Mode::Shared) else { panic!("not contended") };
        assert!(contended.cooling_for.is_some());
        let found = Record::read_any(&case.files).unwrap();
        assert_eq!(found.record().unwrap().mode, None, "the cooldown is not lost");
    }

    #[test]
    fn a_semaphore_has_at_most_the_declared_permits() {
        let case = case();
        assert!(matches!(case.take(Mode::Permit { of: MAX_PERMITS + 1 }), TakeResult::Refused(_)));
        assert!(matches!(case.take(Mode::Permit { of: 0 }), TakeResult::Refused(_)));
        assert!(matches!(case.take(Mode::Permit { of: MAX_PERMITS }), TakeResult::Hold(_)));
    }
}
