//! The values of entries and cooldowns. They are for operators and for hints, such as the rest of a cooldown. No grant
//! depends on them.

use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

/// The value of an entry.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Entry {
    /// The client as operators see it, `USER@HOST pid N`.
    #[serde(rename = "o", default)]
    pub(crate) owner: String,
    #[serde(rename = "l", default, skip_serializing_if = "Option::is_none")]
    pub(crate) label: Option<String>,
    /// The time of the request by the client's clock, in milliseconds since 1970.
    #[serde(rename = "t", default)]
    pub(crate) since: u64,
    /// Whether an operator requested that the holder releases.
    #[serde(rename = "a", default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) asked: bool,
}

/// The value of a cooldown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Cooldown {
    /// The end by the clock of the client that started the cooldown, in milliseconds since 1970.
    #[serde(rename = "u", default)]
    until: u64,
    /// The whole cooldown in milliseconds. Bounds the rest, because clocks of machines differ.
    #[serde(rename = "w", default)]
    whole: u64,
}

impl Entry {
    pub(crate) fn new(owner: &str, label: Option<&str>) -> Self {
        Self { owner: owner.to_owned(), label: label.map(str::to_owned), since: unix_millis(), asked: false }
    }

    /// Reads the value of an entry. Returns an entry without details if another program wrote the value.
    pub(crate) fn read(value: &[u8]) -> Self {
        serde_json::from_slice(value).unwrap_or_default()
    }

    pub(crate) fn write(&self) -> Vec<u8> {
        serde_json::to_vec(self).unwrap_or_default()
    }

    /// Returns the time of the request. `None` if the value does not have it.
    pub(crate) fn since(&self) -> Option<SystemTime> {
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(self.since)).filter(|_| self.since > 0)
    }
}

impl Cooldown {
    pub(crate) fn starting_now(whole: Duration) -> Self {
        let whole = millis(whole);
        Self { until: unix_millis().saturating_add(whole), whole }
    }

    pub(crate) fn write(self) -> Vec<u8> {
        serde_json::to_vec(&self).unwrap_or_default()
    }

    /// Returns the rest of the cooldown with this value. Never zero, because the key still exists.
    pub(crate) fn rest(value: &[u8]) -> Duration {
        let read: Self = serde_json::from_slice(value).unwrap_or_default();
        read.rest_at(unix_millis())
    }

    fn rest_at(self, now: u64) -> Duration {
        Duration::from_millis(self.until.saturating_sub(now).clamp(1, self.whole.max(1)))
    }
}

fn unix_millis() -> u64 {
    millis(SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default())
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_reads_as_it_was_written() {
        let entry = Entry { asked: true, ..Entry::new("app@host pid 1", Some("worker \"7\"\n")) };
        assert_eq!(Entry::read(&entry.write()), entry);
        assert_eq!(Entry::read(&Entry::default().write()).since(), None);
        assert_eq!(Entry::read(b"not ours"), Entry::default());
    }

    #[test]
    fn the_rest_of_a_cooldown_is_bounded_by_the_whole() {
        let cooldown = Cooldown { until: 10_000, whole: 3_000 };
        assert_eq!(cooldown.rest_at(8_500), Duration::from_millis(1_500));
        // The clock of the reader is behind the clock of the writer.
        assert_eq!(cooldown.rest_at(0), Duration::from_secs(3));
        assert_eq!(cooldown.rest_at(20_000), Duration::from_millis(1));
        assert_eq!(Cooldown::rest(b"not ours"), Duration::from_millis(1));
        assert!(Cooldown::rest(&Cooldown::starting_now(Duration::MAX).write()) > Duration::from_secs(3600));
    }
}
