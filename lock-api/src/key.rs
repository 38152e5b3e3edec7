//! Validated keys, their composition and namespaces.

use std::fmt::{self, Write as _};
use std::hash::{BuildHasher as _, Hash, Hasher, RandomState};
#[cfg(feature = "test-util")]
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::sync::{Arc, OnceLock};

use crate::error::{Error, ErrorKind};
use crate::id::HolderId;

/// The longest key, in bytes of UTF-8.
pub const MAX_KEY_BYTES: usize = 512;

/// The name of a lock: 1 to [`MAX_KEY_BYTES`] bytes of UTF-8 without NUL.
///
/// Case, spaces, separators and Unicode normalisation matter, and nothing is cut: `"a"`, `"A"` and `"a "` are
/// three keys. Cloning is cheap, so make a key once if you use it often.
///
/// ```
/// use leasehold_api::LockKey;
///
/// let key = LockKey::new("ledger:42")?;
/// assert_eq!(key.as_str(), "ledger:42");
///
/// // Composition is unambiguous: a separator inside a part is escaped.
/// assert_ne!(LockKey::from_parts(["a:b", "c"])?, LockKey::from_parts(["a", "b:c"])?);
/// assert_eq!(LockKey::from_parts(["ledger", "42"])?, key);
///
/// assert!(LockKey::new("").is_err());
/// # Ok::<(), leasehold_api::Error>(())
/// ```
#[derive(Clone)]
pub struct LockKey {
    text: Arc<str>,
    // The hash of `text`, computed once, because every table that holds the key needs it. The seed is random,
    // so that attackers who choose keys cannot choose collisions.
    hash: u64,
}

/// The seed of the hashes of this process, chosen when the first key is made.
static SEED: OnceLock<Seed> = OnceLock::new();

enum Seed {
    /// A seed that differs between processes, to prevent chosen keys from colliding.
    Random(RandomState),
    /// A seed that is the same in each process, to let a simulator repeat a schedule.
    #[cfg(feature = "test-util")]
    Fixed(BuildHasherDefault<DefaultHasher>),
}

impl Seed {
    fn hash(&self, text: &str) -> u64 {
        match self {
            Self::Random(seed) => seed.hash_one(text),
            #[cfg(feature = "test-util")]
            Self::Fixed(seed) => seed.hash_one(text),
        }
    }
}

impl LockKey {
    /// Fixes the seed of the hashes if called before the process makes its first key. Returns whether the seed
    /// is fixed: `false` if a key was made before the first call.
    ///
    /// For simulators, which repeat a schedule in another process. Attackers who choose keys can then choose
    /// keys that collide.
    #[cfg(feature = "test-util")]
    pub fn fix_hashes() -> bool {
        matches!(SEED.get_or_init(|| Seed::Fixed(BuildHasherDefault::new())), Seed::Fixed(_))
    }

    /// Makes a key of `text`.
    ///
    /// ```
    /// use leasehold_api::{ErrorKind, LockKey};
    /// assert_eq!(LockKey::new("Ledger 42")?.as_str(), "Ledger 42");
    /// assert_eq!(LockKey::new("").unwrap_err().kind(), ErrorKind::InvalidKey);
    /// # Ok::<(), leasehold_api::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidKey`] if `text` is empty, longer than [`MAX_KEY_BYTES`] or contains NUL.
    pub fn new(text: impl AsRef<str>) -> Result<Self, Error> {
        let text = text.as_ref();
        let reason = if text.is_empty() {
            "a key needs at least one character".to_owned()
        } else if text.len() > MAX_KEY_BYTES {
            format!(
                "a key has at most {MAX_KEY_BYTES} bytes, this one has {}: use a shorter name, or a digest of it",
                text.len()
            )
        } else if let Some(at) = text.find('\0') {
            format!("a key cannot contain NUL; there is one at byte {at}")
        } else {
            return Ok(Self::from_valid(Arc::from(text)));
        };
        Err(Error::new(ErrorKind::InvalidKey, reason))
    }

    /// Makes one key of several parts, joined by `:`. See [`key!`](crate::key!) for parts of different types.
    ///
    /// A `:` or `%` inside a part becomes `%3A` or `%25`, so different lists of parts never give the same key.
    ///
    /// ```
    /// use leasehold_api::LockKey;
    /// assert_eq!(LockKey::from_parts(["ledger", "42"])?.as_str(), "ledger:42");
    /// assert_eq!(LockKey::from_parts(["a:b", "c"])?.as_str(), "a%3Ab:c");
    /// assert!(LockKey::from_parts(["ledger", ""]).is_err());
    /// # Ok::<(), leasehold_api::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`ErrorKind::InvalidKey`] if a part is empty, because an unset variable would make all its users share
    /// one lock. Otherwise as [`LockKey::new`], for the joined text.
    pub fn from_parts<P: fmt::Display>(parts: impl IntoIterator<Item = P>) -> Result<Self, Error> {
        let mut text = String::new();
        for (i, part) in parts.into_iter().enumerate() {
            let part = part.to_string();
            if part.is_empty() {
                let message = format!("part {} of the key is empty; check where it comes from", i + 1);
                return Err(Error::new(ErrorKind::InvalidKey, message));
            }
            if i > 0 {
                text.push(':');
            }
            escape_into(&part, &mut text);
        }
        Self::new(text)
    }

    /// Returns this key inside the namespace `name`: `name`, escaped as in [`LockKey::from_parts`], then `:`,
    /// then the key.
    ///
    /// ```
    /// use leasehold_api::LockKey;
    /// let key = LockKey::new("42")?.in_namespace("ledger")?;
    /// assert_eq!(key.as_str(), "ledger:42");
    /// # Ok::<(), leasehold_api::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`LockKey::new`], because the joined text can be too long.
    pub fn in_namespace(&self, name: &str) -> Result<Self, Error> {
        Self::new(namespace_prefix(name) + self.as_str())
    }

    /// Returns the text of the key.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Makes a name of `holder` that no key has, because it begins with NUL. For tables with keys and other entries.
    #[doc(hidden)]
    #[must_use]
    pub fn outside_of_keys(holder: HolderId) -> Self {
        Self::from_valid(format!("\0{holder}").into())
    }

    pub(crate) fn from_valid(text: Arc<str>) -> Self {
        let hash = SEED.get_or_init(|| Seed::Random(RandomState::new())).hash(&text);
        Self { text, hash }
    }
}

/// Returns the prefix of every key in the namespace `name`.
pub(crate) fn namespace_prefix(name: &str) -> String {
    let mut text = String::with_capacity(name.len() + 1);
    escape_into(name, &mut text);
    text.push(':');
    text
}

fn escape_into(part: &str, out: &mut String) {
    for c in part.chars() {
        match c {
            ':' => out.push_str("%3A"),
            '%' => out.push_str("%25"),
            c => out.push(c),
        }
    }
}

/// Makes a [`LockKey`](crate::LockKey) of parts of any type with `Display`, joined by `:`. Each part is escaped
/// and must not be empty. See [`LockKey::from_parts`](crate::LockKey::from_parts).
///
/// ```
/// let holder = 42;
/// assert_eq!(leasehold_api::key!["ledger", holder]?.as_str(), "ledger:42");
/// assert!(leasehold_api::key!["ledger", ""].is_err());
/// # Ok::<(), leasehold_api::Error>(())
/// ```
#[macro_export]
macro_rules! key {
    [$($part:expr),+ $(,)?] => {
        $crate::LockKey::from_parts([$(&$part as &dyn ::core::fmt::Display),+])
    };
}

impl PartialEq for LockKey {
    fn eq(&self, other: &Self) -> bool {
        // Compares the pointers first, because most comparisons are of a key with its clone.
        Arc::ptr_eq(&self.text, &other.text) || (self.hash == other.hash && self.text == other.text)
    }
}

impl Eq for LockKey {}

impl Hash for LockKey {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

impl PartialOrd for LockKey {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// Orders keys by the bytes of their text. Several keys are taken in this order.
impl Ord for LockKey {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.text.cmp(&other.text)
    }
}

impl fmt::Display for LockKey {
    /// Writes the key with control characters escaped, so that it is safe on a terminal and in a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for c in self.text.chars() {
            if c.is_control() {
                write!(f, "{}", c.escape_default())?;
            } else {
                f.write_char(c)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for LockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.text, f)
    }
}

impl TryFrom<&str> for LockKey {
    type Error = Error;

    fn try_from(text: &str) -> Result<Self, Error> {
        Self::new(text)
    }
}

impl TryFrom<String> for LockKey {
    type Error = Error;

    fn try_from(text: String) -> Result<Self, Error> {
        Self::new(text)
    }
}

impl TryFrom<&String> for LockKey {
    type Error = Error;

    fn try_from(text: &String) -> Result<Self, Error> {
        Self::new(text)
    }
}

impl From<&LockKey> for LockKey {
    fn from(key: &LockKey) -> Self {
        key.clone()
    }
}

impl std::str::FromStr for LockKey {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self, Error> {
        Self::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_exact() {
        assert!(LockKey::new("a".repeat(MAX_KEY_BYTES)).is_ok());
        for bad in [String::new(), "a".repeat(MAX_KEY_BYTES + 1), "a\0b".into()] {
            let error = LockKey::new(&bad).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidKey, "{bad:?}");
        }
    }

    #[test]
    fn length_counts_bytes_not_characters() {
        assert!(LockKey::new("é".repeat(256)).is_ok());
        assert!(LockKey::new("é".repeat(257)).is_err());
    }

    #[test]
    fn composition_is_injective() {
        let lists: &[&[&str]] =
            &[&["a:b", "c"], &["a", "b:c"], &["a", "b", "c"], &["a%3Ab", "c"], &["ab", "c"], &["a", "bc"]];
        let keys: std::collections::BTreeSet<_> =
            lists.iter().map(|l| LockKey::from_parts(*l).unwrap()).collect();
        assert_eq!(keys.len(), lists.len(), "{keys:?}");
    }

    #[test]
    fn empty_parts_are_refused() {
        for bad in [&["a", ""][..], &["", "a"], &[""], &[]] {
            assert_eq!(LockKey::from_parts(bad).unwrap_err().kind(), ErrorKind::InvalidKey, "{bad:?}");
        }
        assert_eq!(crate::key!["a:b", 7, 'c'].unwrap().as_str(), "a%3Ab:7:c");
    }

    #[test]
    fn namespaces_do_not_meet() {
        let of = |ns: &str, key: &str| LockKey::new(key).unwrap().in_namespace(ns).unwrap();
        assert_ne!(of("a", "bc"), of("ab", "c"));
        assert_ne!(of("a", "b:c"), of("a:b", "c"));
    }

    #[test]
    fn display_is_safe_on_a_terminal() {
        let key = LockKey::new("a\x1b[31m\nb").unwrap();
        assert_eq!(key.to_string(), "a\\u{1b}[31m\\nb");
    }
}
