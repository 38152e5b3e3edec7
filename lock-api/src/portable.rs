//! A hold on its way from one process to another, as a text.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::id::{FencingToken, HolderId};
use crate::key::LockKey;

/// The first part of each text. Another layout gets another version.
const VERSION: &str = "lh1";

/// A hold that [`LockGuard::into_ref`](crate::LockGuard::into_ref) has given out of its client. Another process takes it
/// over with [`Lock::adopt`](crate::Lock::adopt), from the text that [`expose`](Self::expose) returns.
///
/// The text is a secret, because it suffices to take the lock over. It consists of letters, digits, dots and dashes,
/// and contains the key. `Debug` does not show it. Dropping this value does not end the hold, which lasts for its TTL.
///
/// ```
/// # #[tokio::main]
/// # async fn main() -> Result<(), leasehold_api::Error> {
/// use std::time::Duration;
/// use leasehold_api::{Lock, LockExt};
/// let store = leasehold_memory::MemoryStore::new();
/// let minute = Duration::from_secs(60);
///
/// // In the request: take the lock, and give it to the job.
/// let request = store.client()?;
/// let guard = request.key("report").ttl(minute).acquire().await?;
/// let portable = guard.into_ref(minute).await?;
/// let payload = portable.expose().to_owned();
/// request.close().await?;
///
/// // In the job, within a minute: take the lock over, work, and release it.
/// let job = store.client()?;
/// let guard = job.adopt(&payload).await?;
/// guard.release().await
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct PortableHold {
    text: Box<str>,
    key: LockKey,
    holder: HolderId,
    token: FencingToken,
    ttl: Duration,
}

impl PortableHold {
    /// Makes the text of a hold, for implementations of a lock. `holder` and `token` are the store's, and the hold lasts
    /// for `ttl` after each renewal. The text has whole microseconds of it.
    #[must_use]
    pub fn new(key: &LockKey, holder: HolderId, token: FencingToken, ttl: Duration) -> Self {
        let micros = u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX);
        // Ends with a dot, because a text that was cut must not be read as one with a shorter number.
        let text = format!("{VERSION}.{}.{holder}.{token}.{micros}.", hex::encode(key.as_str())).into();
        Self { text, key: key.clone(), holder, token, ttl: Duration::from_micros(micros) }
    }

    /// Returns the same hold under another key, for wrappers whose keys differ from the store's.
    #[must_use]
    pub fn of_key(&self, key: &LockKey) -> Self {
        Self::new(key, self.holder, self.token, self.ttl)
    }

    /// Returns the secret text.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.text
    }

    /// Returns the key, as the lock that gave the hold out names it.
    #[must_use]
    pub fn key(&self) -> &LockKey {
        &self.key
    }

    /// Returns the holder, as the store knows it.
    #[must_use]
    pub fn holder(&self) -> HolderId {
        self.holder
    }

    /// Returns the fencing token of the store's grant.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.token
    }

    /// Returns the TTL of the hold, which is also the TTL of the grant that adopts it.
    #[must_use]
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    fn read(text: &str) -> Option<Self> {
        let mut parts = text.split('.').skip(1);
        let key = String::from_utf8(hex::decode(parts.next()?).ok()?).ok()?;
        let holder = parts.next()?.parse().ok()?;
        let token = FencingToken::from_u64(parts.next()?.parse().ok()?);
        let ttl = Duration::from_micros(parts.next()?.parse().ok()?);
        let hold = Self::new(&LockKey::new(key).ok()?, holder, token, ttl);
        // Compares the rest too: the version, the end, and other ways to write a number.
        (*hold.text == *text).then_some(hold)
    }
}

impl FromStr for PortableHold {
    type Err = Error;

    /// Reads a text that [`expose`](Self::expose) returned. The error does not show the text.
    fn from_str(text: &str) -> Result<Self, Error> {
        Self::read(text).ok_or_else(|| {
            let message = "this is not the whole text of a portable hold; pass on what `expose` returned, and update this program if another version wrote it";
            Error::new(ErrorKind::InvalidOption, message)
        })
    }
}

impl fmt::Debug for PortableHold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Hides holder and token, because the store compares them.
        f.debug_struct("PortableHold").field("key", &self.key).field("ttl", &self.ttl).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(key: &str) -> PortableHold {
        let holder = HolderId::from_parts(0x0123_4567_89ab_cdef_fedc_ba98_7654_3210, 42);
        PortableHold::new(
            &LockKey::new(key).unwrap(),
            holder,
            FencingToken::from_u64(7168),
            Duration::from_secs(60),
        )
    }

    #[test]
    fn survives_text_of_plain_letters() {
        for key in ["report", "a.b:c d\n\u{1f512}", &"x".repeat(512)] {
            let hold = hold(key);
            let plain = |b: u8| b.is_ascii_alphanumeric() || b == b'.' || b == b'-';
            assert!(hold.expose().bytes().all(plain), "{}", hold.expose());
            assert_eq!(hold.expose().parse::<PortableHold>().unwrap(), hold);
        }
        assert_eq!(
            hold("a").expose(),
            "lh1.61.0123456789abcdeffedcba9876543210-42.7168.60000000.",
            "the layout of a version stays"
        );
    }

    #[test]
    fn a_text_that_was_cut_or_written_otherwise_is_refused_and_not_shown() {
        let hold = hold("report");
        let text = hold.expose();
        let cut = (0..text.len()).flat_map(|at| [text[..at].to_owned(), text[at + 1..].to_owned()]);
        let changed = (0..text.len()).flat_map(|at| {
            [".", "-", " ", "é"].map(|with| format!("{}{with}{}", &text[..at], &text[at + 1..]))
        });
        let other = [
            format!("{text} "),
            format!("{text}0"),
            format!("{text}."),
            text.to_uppercase(),
            text.replacen("lh1", "lh2", 1),
            text.replacen("7168", "07168", 1),
            text.replacen('f', "F", 1),
        ];
        for wrong in cut.chain(changed).chain(other).filter(|wrong| wrong != text) {
            let error = wrong.parse::<PortableHold>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidOption, "{wrong:?}");
            assert!(wrong.len() < 9 || !format!("{error} {error:?}").contains(&wrong), "{error}");
        }
    }

    #[test]
    fn debug_shows_no_part_that_the_store_compares() {
        let shown = format!("{:?}", hold("report"));
        assert!(shown.contains("report"), "{shown}");
        for secret in ["0123456789abcdef", "7168", "lh1"] {
            assert!(!shown.contains(secret), "{shown}");
        }
    }
}
