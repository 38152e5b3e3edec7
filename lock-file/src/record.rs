//! The record of a key's current or last holder.

use std::fs;
use std::io;
use std::sync::OnceLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use leasehold_api::{Error, ErrorKind, FencingToken, HoldInfo, HolderId, LockKey, Mode};
use serde::{Deserialize, Serialize};

use crate::error::{corrupt, io_error};
use crate::files::{read, replace};
use crate::layout::KeyFiles;

/// The latest grant of a key or of one of its parts. The holder writes it before the grant is reported.
///
/// The record of a key in a [`SharedMode`] belongs to no single holder. It is written before the first grant in this
/// mode, under the exclusive lock, and stays until the mode changes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) key: String,
    pub(crate) holder: String,
    pub(crate) label: Option<String>,
    pub(crate) pid: u32,
    /// Time of the grant, in milliseconds of Unix time.
    pub(crate) since_ms: u64,
    /// Fencing token.
    pub(crate) token: u64,
    /// The first number that the next grant can use for its token.
    pub(crate) next: u64,
    /// Boot id of the machine when the record was written.
    pub(crate) boot: String,
    /// Cooldown after `since_ms`, in milliseconds.
    pub(crate) cooldown_ms: Option<u64>,
    /// The mode of the grant, or `None` if it is exclusive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mode: Option<SharedMode>,
    /// Whether the record must be on disk before the grant is reported, also without a cooldown.
    #[serde(skip)]
    pub(crate) is_flushed: bool,
}

/// A mode that several holders have at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SharedMode {
    Shared,
    /// Permits of a semaphore with this many.
    Permits(u32),
}

impl SharedMode {
    /// Returns the mode of a request, or `None` if it is exclusive.
    pub(crate) fn of(mode: Mode) -> Option<Self> {
        match mode {
            Mode::Shared => Some(Self::Shared),
            Mode::Permit { of } => Some(Self::Permits(of)),
            _ => None,
        }
    }

    pub(crate) fn mode(self) -> Mode {
        match self {
            Self::Shared => Mode::Shared,
            Self::Permits(of) => Mode::Permit { of },
        }
    }
}

/// The content of a record's file.
#[derive(Debug)]
pub(crate) enum RecordRead {
    Nothing,
    Damaged(serde_json::Error),
    Record(Record),
}

impl RecordRead {
    pub(crate) fn record(&self) -> Option<&Record> {
        match self {
            Self::Record(record) => Some(record),
            _ => None,
        }
    }
}

/// The state of the last grant's cooldown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cooldown {
    /// No cooldown, or it has passed.
    Over,
    /// The cooldown lasts for this much longer.
    Lasts(Duration),
    /// The clock shows a time before the grant, so the elapsed time is unknown. Contains the whole cooldown.
    ClockWentBack(Duration),
}

impl Record {
    /// Reads the record of any key, which contains the key's name.
    pub(crate) fn read_any(files: &KeyFiles) -> Result<RecordRead, Error> {
        let path = files.record();
        match read(&path) {
            Ok(bytes) => {
                Ok(serde_json::from_slice(&bytes).map_or_else(RecordRead::Damaged, RecordRead::Record))
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(RecordRead::Nothing),
            Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                Ok(RecordRead::Damaged(serde::de::Error::custom(e)))
            }
            Err(e) => Err(io_error(e, "read", &path)),
        }
    }

    /// Reads the record of `key`. A record of another key in its file is an error.
    pub(crate) fn read(files: &KeyFiles, key: &LockKey) -> Result<RecordRead, Error> {
        let found = Self::read_any(files)?;
        match found.record() {
            Some(record) if record.key != key.as_str() => Err(corrupt(
                &files.record(),
                format_args!("belongs to the key {:?}, not to {:?}", record.key, key.as_str()),
                "two keys have met in one file name, or files were copied: rename one of the keys, or remove that file if nothing uses the other",
            )),
            _ => Ok(found),
        }
    }

    pub(crate) fn write(&self, files: &KeyFiles) -> Result<(), Error> {
        let path = files.record();
        let text = serde_json::to_vec(self).map_err(|e| {
            Error::new(ErrorKind::Unavailable, "cannot write the record as JSON").with_source(e)
        })?;
        // Flushes only a record with a cooldown, which must survive a crash of the machine, and a record that must
        // replace a mode on disk. Tokens are safe without a flush.
        let durable = self.cooldown_ms.is_some() || self.is_flushed;
        replace(&path, &text, files.mode(), durable).map_err(|e| io_error(e, "write", &path))
    }

    /// Returns the same grant without a cooldown.
    pub(crate) fn without_cooldown(self) -> Self {
        Self { cooldown_ms: None, ..self }
    }

    /// Ends the cooldown of the grant with this token, if the record still belongs to that grant. Only for the holder
    /// of the key's lock.
    pub(crate) fn end_cooldown(files: &KeyFiles, token: FencingToken) -> Result<(), Error> {
        match Self::read_any(files)? {
            RecordRead::Record(record) if record.token == token.as_u64() && record.cooldown_ms.is_some() => {
                record.without_cooldown().write(files)
            }
            _ => Ok(()),
        }
    }

    /// Replaces the label of the grant with this token. Only for the holder of the key's lock.
    pub(crate) fn relabel(files: &KeyFiles, token: FencingToken, label: &str) -> Result<(), Error> {
        match Self::read_any(files)? {
            RecordRead::Record(record) if record.token == token.as_u64() => {
                Self { label: Some(label.to_owned()), ..record }.write(files)
            }
            _ => Err(corrupt(
                &files.record(),
                "is missing, damaged or of another grant",
                "release the lock and acquire it again, which writes it",
            )),
        }
    }

    /// Returns whether grants in `mode` can share the token of this record of a key.
    ///
    /// Only a record of this boot counts. The records of later exclusive grants, with larger tokens, might be missing
    /// on disk after a crash.
    pub(crate) fn is_in(&self, mode: SharedMode) -> bool {
        self.mode == Some(mode) && (self.boot == boot_id() || !is_boot_known())
    }

    pub(crate) fn cooldown(&self, now_ms: u64) -> Cooldown {
        let Some(window) = self.cooldown_ms else {
            return Cooldown::Over;
        };
        let Some(passed) = now_ms.checked_sub(self.since_ms) else {
            return Cooldown::ClockWentBack(Duration::from_millis(window));
        };
        // Adds a millisecond, because both times were rounded down.
        let left = window.saturating_add(1).saturating_sub(passed);
        if left == 0 { Cooldown::Over } else { Cooldown::Lasts(Duration::from_millis(left)) }
    }

    /// Returns the fencing token.
    pub(crate) fn token(&self) -> FencingToken {
        FencingToken::from_u64(self.token)
    }

    /// Returns the key.
    pub(crate) fn key(&self) -> Result<LockKey, Error> {
        LockKey::new(&self.key)
    }

    /// Returns the grant's details for inspection.
    pub(crate) fn info(&self) -> HoldInfo {
        let mut info = HoldInfo::new();
        info.holder = self.holder.parse::<HolderId>().ok();
        info.token = Some(self.token());
        info.label = self.label.as_deref().map(Into::into);
        info.since = UNIX_EPOCH.checked_add(Duration::from_millis(self.since_ms));
        info.mode = self.mode.map_or(Mode::Exclusive, SharedMode::mode);
        info
    }

    /// Returns the remaining cooldown for inspection.
    pub(crate) fn cooldown_left(&self, now_ms: u64) -> Option<Duration> {
        match self.cooldown(now_ms) {
            Cooldown::Over => None,
            Cooldown::Lasts(left) | Cooldown::ClockWentBack(left) => Some(left),
        }
    }

    #[cfg(test)]
    pub(crate) fn for_tests(key: &str, next: u64, boot: &str) -> Self {
        Self {
            key: key.to_owned(),
            holder: HolderId::from_parts(1, 1).to_string(),
            label: None,
            pid: 1,
            since_ms: 1_000,
            token: 0,
            next,
            boot: boot.to_owned(),
            cooldown_ms: None,
            mode: None,
            is_flushed: false,
        }
    }
}

/// Returns the milliseconds of Unix time, or zero before 1970.
pub(crate) fn now_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, whole_ms)
}

/// Returns `duration` in milliseconds, rounded up.
pub(crate) fn ceil_ms(duration: Duration) -> u64 {
    let part = u64::from(!duration.subsec_nanos().is_multiple_of(1_000_000));
    whole_ms(duration).saturating_add(part)
}

fn whole_ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// Returns the id of the current boot. Data written in the same boot still exists, even if not flushed to disk.
///
/// On a system without boot ids, each process counts as a boot. This costs another disk write when a key changes
/// between processes.
pub(crate) fn boot_id() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        let kernel = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        match kernel.trim() {
            "" => format!("{NO_BOOT}{}-{:016x}", std::process::id(), fastrand::u64(..)),
            id => id.to_owned(),
        }
    })
}

/// The start of the id that stands for a boot on a system without boot ids.
const NO_BOOT: &str = "process-";

/// Returns whether the system has boot ids. Without them, the first exclusive grant after a [`SharedMode`] is flushed.
/// A crash then leaves no earlier mode on disk.
pub(crate) fn is_boot_known() -> bool {
    !boot_id().starts_with(NO_BOOT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cooling(window_ms: u64) -> Record {
        Record { cooldown_ms: Some(window_ms), ..Record::for_tests("k", 1, "b") }
    }

    #[test]
    fn a_cooldown_never_ends_early() {
        let record = cooling(500);
        assert_eq!(record.cooldown(1_000), Cooldown::Lasts(Duration::from_millis(501)));
        assert_eq!(record.cooldown(1_500), Cooldown::Lasts(Duration::from_millis(1)));
        assert_eq!(record.cooldown(1_501), Cooldown::Over);
        assert_eq!(Record::for_tests("k", 1, "b").cooldown(1_000), Cooldown::Over);
        assert_eq!(ceil_ms(Duration::from_nanos(1)), 1);
        assert_eq!(ceil_ms(Duration::from_millis(7)), 7);
    }

    #[test]
    fn a_clock_before_the_grant_counts_the_whole_window() {
        assert_eq!(cooling(500).cooldown(999), Cooldown::ClockWentBack(Duration::from_millis(500)));
    }

    #[test]
    fn a_window_without_end_does_not_overflow() {
        assert!(matches!(cooling(u64::MAX).cooldown(u64::MAX), Cooldown::Lasts(_)));
        assert_eq!(ceil_ms(Duration::MAX), u64::MAX);
    }

    #[test]
    fn a_mode_is_in_the_text_of_a_record_unless_it_is_exclusive_and_counts_in_its_boot() {
        let text = |record: &Record| serde_json::to_string(record).unwrap();
        let exclusive = Record::for_tests("k", 1, boot_id());
        assert!(!text(&exclusive).contains("mode"), "as an older version writes it");
        let modes =
            [(SharedMode::Shared, r#""mode":"shared""#), (SharedMode::Permits(8), r#""mode":{"permits":8}"#)];
        for (mode, expected) in modes {
            let record = Record { mode: Some(mode), ..exclusive.clone() };
            assert!(text(&record).contains(expected), "{}", text(&record));
            let read: Record = serde_json::from_str(&text(&record)).unwrap();
            assert!(read.is_in(mode) && !exclusive.is_in(mode) && !read.is_in(SharedMode::Permits(3)));
            let older = Record { boot: "another".into(), ..read };
            assert_eq!(older.is_in(mode), !is_boot_known());
        }
        assert_eq!(serde_json::from_str::<Record>(&text(&exclusive)).unwrap().mode, None);
    }

    #[test]
    fn the_boot_has_one_name() {
        assert!(!boot_id().is_empty());
        assert_eq!(boot_id(), boot_id());
    }
}
