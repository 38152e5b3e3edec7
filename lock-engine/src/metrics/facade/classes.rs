//! The classes of keys that an engine has seen.

use std::collections::HashSet;
use std::panic::catch_unwind;
use std::sync::{Arc, PoisonError, RwLock};

use leasehold_api::LockKey;

use super::KeyClass;

/// The class of keys that have none: an empty label would be the same as no label.
const NONE: &str = "none";

/// The class of all keys whose class came after [`LIMIT`] others.
const OTHER: &str = "other";

/// The maximum number of classes of one engine. Each is some dozens of series at the recorder.
const LIMIT: usize = 100;

/// Puts keys into a bounded number of classes.
pub(super) struct Classes {
    class_of: KeyClass,
    known: RwLock<HashSet<Arc<str>>>,
    other: Arc<str>,
}

impl Classes {
    pub(super) fn new(class_of: KeyClass) -> Self {
        Self { class_of, known: RwLock::default(), other: OTHER.into() }
    }

    /// Calls `begin` with the class of keys without one, before the first key.
    pub(super) fn none(&self, begin: impl FnOnce(&Arc<str>)) {
        self.named(NONE, begin);
    }

    /// Returns the class of `key`. Calls `begin` first if the class is new.
    pub(super) fn of(&self, key: &LockKey, begin: impl FnOnce(&Arc<str>)) -> Arc<str> {
        // Catches panics, because guards can be dropped while a thread panics, and a second panic would end
        // the process.
        match catch_unwind(|| (self.class_of)(key)) {
            Ok("") => self.named(NONE, begin),
            Ok(name) => self.named(name, begin),
            Err(_) => self.named(OTHER, begin),
        }
    }

    fn named(&self, name: &str, begin: impl FnOnce(&Arc<str>)) -> Arc<str> {
        if let Some(known) = self.known.read().unwrap_or_else(PoisonError::into_inner).get(name) {
            return Arc::clone(known);
        }
        let mut known = self.known.write().unwrap_or_else(PoisonError::into_inner);
        let class = if known.len() < LIMIT { Arc::from(name) } else { Arc::clone(&self.other) };
        let is_new = known.insert(Arc::clone(&class));
        // Unlocks before `begin`, because the program's recorder must not be called under a lock of the
        // engine.
        drop(known);
        if is_new {
            begin(&class);
        }
        class
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(classes: &Classes, key: &str, begun: &mut Vec<String>) -> String {
        let key = LockKey::new(key).unwrap();
        classes.of(&key, |class| begun.push(class.to_string())).to_string()
    }

    #[test]
    fn a_class_begins_once_and_no_class_has_a_name() {
        let classes = Classes::new(super::super::first_part);
        let mut begun = Vec::new();
        for (key, expected) in [("a:1", "a"), ("a:2", "a"), ("b", "none"), ("c", "none"), (":d", "none")] {
            assert_eq!(class(&classes, key, &mut begun), expected, "{key}");
        }
        assert_eq!(begun, ["a", "none"]);
    }

    #[test]
    fn a_function_that_panics_gives_the_class_other() {
        let classes = Classes::new(|key| key.as_str().split(':').nth(1).expect("a key of two parts"));
        let mut begun = Vec::new();
        for (key, expected) in [("a:b", "b"), ("a", "other"), ("a", "other")] {
            assert_eq!(class(&classes, key, &mut begun), expected, "{key}");
        }
        assert_eq!(begun, ["b", "other"]);
    }

    #[test]
    fn the_number_of_classes_is_bounded() {
        let classes = Classes::new(LockKey::as_str);
        let mut begun = Vec::new();
        for i in 0..3 * LIMIT {
            let expected = if i < LIMIT { i.to_string() } else { OTHER.to_owned() };
            assert_eq!(class(&classes, &i.to_string(), &mut begun), expected);
        }
        assert_eq!(class(&classes, "7", &mut begun), "7", "a class that was there stays");
        assert_eq!(begun.len(), LIMIT + 1);
    }
}
