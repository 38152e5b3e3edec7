//! The names of this store's keys in etcd.
//!
//! | Key | Content |
//! |---|---|
//! | `PREFIX//q/KEY\0HOLDER` | an entry: a client that holds `KEY` or waits for it, under the lease of its session. The oldest entry holds |
//! | `PREFIX//q/KEY\0s\0HOLDER` | an entry of a shared request. It holds if all older entries are shared |
//! | `PREFIX//q/KEY\0pN\0HOLDER` | an entry of a request for one of `N` permits. It holds if it has a number |
//! | `PREFIX//p/KEY\0NUMBER` | the number of a permit, under the lease of its entry, with its `HOLDER` as the value |
//! | `PREFIX//s/LEASE` | a session, under its own lease. Every grant of the session compares its revision |
//! | `PREFIX//c/KEY\0HOLDER` | the cooldown that this grant of `KEY` started, under a separate lease |
//! | `PREFIX//n/HOLDER\0KEY` | a note of an operator to this holder, under the lease of its session |
//! | `PREFIX//base` | the number that is added to revisions to make tokens |
//!
//! A prefix contains no two slashes in a row, so no name under `app` is also one under `app/q`.
//!
//! A holder begins with a hexadecimal digit. So the shared entries of a key are the last part of its range, and all others
//! are one range before them. Older libraries know no modes. For them each entry excludes all others.

use leasehold_api::{HolderId, LockKey, Mode};

/// The first byte after the key in the name of a shared entry. It is greater than each byte with which another entry
/// continues.
const SHARED: u8 = b's';

/// The first byte after the key in the name of an entry for a permit.
const PERMIT: u8 = b'p';

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

/// The parts of an entry's name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Named {
    pub(crate) key: LockKey,
    pub(crate) mode: Mode,
    pub(crate) holder: HolderId,
}

impl Span {
    /// Returns the range of one key.
    pub(crate) fn key(key: Vec<u8>) -> Self {
        Self { begin: key, end: Vec::new() }
    }
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

    /// Returns the range of the entries of `key` that exclude a shared grant.
    pub(crate) fn not_shared(&self, key: &LockKey) -> Span {
        let begin = self.queue(key).begin;
        let mut end = begin.clone();
        end.push(SHARED);
        Span { begin, end }
    }

    pub(crate) fn entry(&self, key: &LockKey, holder: HolderId, mode: Mode) -> Vec<u8> {
        let of = match mode {
            Mode::Shared => format!("{}\0", char::from(SHARED)),
            Mode::Permit { of } => format!("{}{of}\0", char::from(PERMIT)),
            _ => String::new(),
        };
        self.under('q', &[key.as_str().as_bytes(), b"\0", of.as_bytes(), holder.to_string().as_bytes()])
    }

    /// Returns the range of the numbers of the permits of `key`.
    pub(crate) fn numbers(&self, key: &LockKey) -> Span {
        span_of_key(self.under('p', &[key.as_str().as_bytes()]))
    }

    pub(crate) fn number(&self, key: &LockKey, number: u32) -> Vec<u8> {
        self.under('p', &[key.as_str().as_bytes(), b"\0", number.to_string().as_bytes()])
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

    /// Returns the range of the numbers of the permits of all keys that begin with `prefix`.
    pub(crate) fn all_numbers(&self, prefix: &str) -> Span {
        span_of_prefix(self.under('p', &[prefix.as_bytes()]))
    }

    /// Returns the parts of an entry's name. `None` for a name that this store does not write.
    pub(crate) fn parse_entry(&self, name: &[u8]) -> Option<Named> {
        let (key, rest) = self.split(name, 'q')?;
        let (mode, holder) = match rest.split_once('\0') {
            None => (Mode::Exclusive, rest),
            Some((mode, holder)) => (parse_mode(mode)?, holder),
        };
        Some(Named { key: LockKey::new(key).ok()?, mode, holder: holder.parse().ok()? })
    }

    /// Returns the key and the holder of a cooldown. `None` for a name that this store does not write.
    pub(crate) fn parse_cooldown(&self, name: &[u8]) -> Option<(LockKey, HolderId)> {
        let (key, holder) = self.split(name, 'c')?;
        Some((LockKey::new(key).ok()?, holder.parse().ok()?))
    }

    /// Returns the key and the holder of a note. `None` for a name that is not a note's.
    pub(crate) fn parse_note(&self, name: &[u8]) -> Option<(LockKey, HolderId)> {
        let (holder, key) = self.split(name, 'n')?;
        Some((LockKey::new(key).ok()?, holder.parse().ok()?))
    }

    /// Returns the key and the number of a permit. `None` for a name that is not a number's.
    pub(crate) fn parse_number(&self, name: &[u8]) -> Option<(LockKey, u32)> {
        let (key, number) = self.split(name, 'p')?;
        Some((LockKey::new(key).ok()?, number.parse().ok()?))
    }

    /// Returns the text of a name of this kind before and after its first NUL.
    fn split<'a>(&self, name: &'a [u8], kind: char) -> Option<(&'a str, &'a str)> {
        let rest = name.strip_prefix(self.under(kind, &[]).as_slice())?;
        std::str::from_utf8(rest).ok()?.split_once('\0')
    }
}

fn parse_mode(text: &str) -> Option<Mode> {
    if text.as_bytes() == [SHARED] {
        return Some(Mode::Shared);
    }
    let of = text.strip_prefix(char::from(PERMIT))?.parse().ok()?;
    Some(Mode::Permit { of })
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
mod tests;
