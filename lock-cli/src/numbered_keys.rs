//! Locks of which the store knows the number alone: those of other programs and of other schemas.

use leasehold::postgres_advisory::Sessions;
use leasehold::{KeyInfo, ListQuery, LockAdmin, LockKey};

use crate::admin;
use crate::output::{Notes, printable};

/// The key as people see it in a list.
pub(crate) fn display(seen: &KeyInfo) -> String {
    let key = printable(seen.key.as_str());
    if seen.named { key } else { format!("number {key}") }
}

/// Says so if `key`, which nobody holds, is spelled like a number that somebody holds: a list shows that one, too.
pub(crate) async fn note_if_held(admin: &dyn LockAdmin, key: &LockKey, notes: Notes) {
    let is_number = key.as_str().chars().all(|c| c.is_ascii_digit() || "-,".contains(c));
    // Other stores know each key by its name, and their lists are of all that was ever locked.
    if !is_number || notes.quiet || admin.extension::<Sessions>().is_none() {
        return;
    }
    // It is a note beside an answer: without it that is as true.
    let keys = admin.list(&ListQuery::new()).await.unwrap_or_default();
    if let Some(seen) = keys.iter().find(|seen| !seen.named && seen.key == *key) {
        notes.say(&format!(
            "the lock with the number {key} is another one{}: of another program, of another schema (`?schema=` in the URL), or of keys that are numbers (`?hash=raw`, `?hash=pair`)",
            admin::in_words(seen)
        ));
    }
}
