//! The names of this store's keys in etcd.
//!
//! | Key | Content |
//! |---|---|
//! | `PREFIX//q/KEY\0HOLDER` | an entry: a client that holds `KEY` or waits for it, under the lease of its session. The oldest entry holds |
//! | `PREFIX//s/LEASE` | a session, under its own lease. Every grant of the session compares its revision |
//! | `PREFIX//c/KEY\0HOLDER` | the cooldown that this grant of `KEY` started, under a separate lease |
//! | `PREFIX//n/HOLDER\0KEY` | a note of an operator to this holder, under the lease of its session |
//! | `PREFIX//base` | the number that is added to revisions to make tokens |
//!
//! A prefix contains no two slashes in a row, so no name under `app` is also one under `app/q`.

use leasehold_api::{HolderId, LockKey};

/// The names under one prefix.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    prefix: String,
}

/// A range of keys in etcd, from its begin to before its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) begin: Vec<u8>,
    pub(crate) end: Vec<u8>,
}

impl Names {
    pub(crate) fn new(prefix: &str) -> Self {
        Self { prefix: prefix.to_owned() }
    }

    fn under(&self, kind: char, rest: &[&[u8]]) -> Vec<u8> {
        let mut name = format!("{}//{kind}/", self.prefix).into_bytes();
        rest.iter().for_each(|part| name.extend_from_slice(part));
        name
    }

    /// Returns the range of the entries of `key`. Keys contain no NUL, so the range has only entries of this key.
    pub(crate) fn queue(&self, key: &LockKey) -> Span {
        span_of_key(self.under('q', &[key.as_str().as_bytes()]))
    }

    pub(crate) fn entry(&self, key: &LockKey, holder: HolderId) -> Vec<u8> {
        self.under('q', &[key.as_str().as_bytes(), b"\0", holder.to_string().as_bytes()])
    }

    /// Returns the range of the cooldowns of `key`.
    pub(crate) fn cooldown(&self, key: &LockKey) -> Span {
        span_of_key(self.under('c', &[key.as_str().as_bytes()]))
    }

    pub(crate) fn cooldown_of(&self, key: &LockKey, holder: HolderId) -> Vec<u8> {
        self.under('c', &[key.as_str().as_bytes(), b"\0", holder.to_string().as_bytes()])
    }

    pub(crate) fn session(&self, lease: i64) -> Vec<u8> {
        self.under('s', &[format!("{lease:016x}").as_bytes()])
    }

    pub(crate) fn note(&self, key: &LockKey, holder: HolderId) -> Vec<u8> {
        self.under('n', &[holder.to_string().as_bytes(), b"\0", key.as_str().as_bytes()])
    }

    /// Returns the range of the notes to the holders of the engine `instance`.
    pub(crate) fn notes(&self, instance: u128) -> Span {
        span_of_prefix(self.under('n', &[format!("{instance:032x}-").as_bytes()]))
    }

    pub(crate) fn base(&self) -> Vec<u8> {
        format!("{}//base", self.prefix).into_bytes()
    }

    /// Returns a key that no client ever writes, for a transaction that only checks rights.
    pub(crate) fn probe(&self) -> Vec<u8> {
        format!("{}//probe", self.prefix).into_bytes()
    }

    /// Returns the range of the entries of all keys that begin with `prefix`.
    pub(crate) fn queues(&self, prefix: &str) -> Span {
        span_of_prefix(self.under('q', &[prefix.as_bytes()]))
    }

    /// Returns the range of the cooldowns of all keys that begin with `prefix`.
    pub(crate) fn cooldowns(&self, prefix: &str) -> Span {
        span_of_prefix(self.under('c', &[prefix.as_bytes()]))
    }

    /// Returns the key and the holder of an entry or a cooldown. `None` for a name that this store does not write.
    pub(crate) fn parse(&self, name: &[u8]) -> Option<(LockKey, HolderId)> {
        let of = |kind| name.strip_prefix(self.under(kind, &[]).as_slice());
        let (key, holder) = std::str::from_utf8(of('q').or_else(|| of('c'))?).ok()?.split_once('\0')?;
        Some((LockKey::new(key).ok()?, holder.parse().ok()?))
    }

    /// Returns the key and the holder of a note. `None` for a name that is not a note's.
    pub(crate) fn parse_note(&self, name: &[u8]) -> Option<(LockKey, HolderId)> {
        let rest = name.strip_prefix(self.under('n', &[]).as_slice())?;
        let (holder, key) = std::str::from_utf8(rest).ok()?.split_once('\0')?;
        Some((LockKey::new(key).ok()?, holder.parse().ok()?))
    }
}

fn span_of_key(name: Vec<u8>) -> Span {
    let (mut begin, mut end) = (name.clone(), name);
    begin.push(0);
    end.push(1);
    Span { begin, end }
}

fn span_of_prefix(begin: Vec<u8>) -> Span {
    let mut end = begin.clone();
    // Every name has a byte below 0xff, because the prefix of the store is text.
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            break;
        }
    }
    Span { begin, end }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(text: &str) -> LockKey {
        LockKey::new(text).unwrap()
    }

    fn within(span: &Span, name: &[u8]) -> bool {
        span.begin.as_slice() <= name && name < span.end.as_slice()
    }

    #[test]
    fn the_entries_of_a_key_are_in_its_range_and_in_no_other() {
        let (names, holder) = (Names::new("/locks"), HolderId::from_parts(7, 1));
        let all = ["a", "a\u{1}", "a/b", "ab", "b", "a "];
        for owner in all {
            for other in all {
                let entry = names.entry(&key(other), holder);
                assert_eq!(within(&names.queue(&key(owner)), &entry), owner == other, "{owner:?} {other:?}");
                let cooldown = names.cooldown_of(&key(other), holder);
                assert_eq!(within(&names.cooldown(&key(owner)), &cooldown), owner == other);
                assert!(!within(&names.queue(&key(owner)), &cooldown));
            }
        }
    }

    #[test]
    fn no_name_is_under_two_prefixes() {
        let holder = HolderId::from_parts(1, 1);
        let (outer, inner) = (Names::new("app"), Names::new("app/q"));
        let entry = inner.entry(&key("k"), holder);
        assert!(!within(&outer.queues(""), &entry));
        assert_eq!(outer.parse(&entry), None);
        assert_ne!(outer.entry(&key("/q/k"), holder), entry);
    }

    #[test]
    fn names_say_their_key_and_holder() {
        let (names, holder) = (Names::new("/locks"), HolderId::from_parts(0xabc, 17));
        let key = key("ledger:42/ü");
        assert_eq!(names.parse(&names.entry(&key, holder)), Some((key.clone(), holder)));
        assert_eq!(names.parse(&names.cooldown_of(&key, holder)), Some((key.clone(), holder)));
        assert_eq!(names.parse_note(&names.note(&key, holder)), Some((key.clone(), holder)));
        assert_eq!(names.parse(&names.note(&key, holder)), None);
        assert_eq!(names.parse(b"/other/q/a\0b"), None);
        assert_eq!(names.parse(&names.base()), None);
    }

    #[test]
    fn the_notes_of_an_engine_are_in_its_range() {
        let (names, key) = (Names::new("p"), key("k"));
        let own = names.notes(5);
        assert!(within(&own, &names.note(&key, HolderId::from_parts(5, 1))));
        assert!(within(&own, &names.note(&key, HolderId::from_parts(5, u64::MAX))));
        assert!(!within(&own, &names.note(&key, HolderId::from_parts(6, 1))));
    }

    #[test]
    fn a_list_by_prefix_has_the_keys_with_that_prefix() {
        let (names, holder) = (Names::new("p"), HolderId::from_parts(1, 1));
        let ledger = names.queues("ledger:");
        assert!(within(&ledger, &names.entry(&key("ledger:1"), holder)));
        assert!(!within(&ledger, &names.entry(&key("ledge"), holder)));
        assert!(within(&names.queues(""), &names.entry(&key("\u{10ffff}"), holder)));
    }
}
