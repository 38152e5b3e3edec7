//! Shows locks that the store knows only by number: locks of other programs and of other schemas.

use leasehold::postgres_advisory::Sessions;
use leasehold::{KeyInfo, ListQuery, LockAdmin, LockKey};

use crate::admin;
use crate::output::{Notes, printable};

/// Returns the text that shows the key in a list.
pub(crate) fn display(seen: &KeyInfo) -> String {
    let key = printable(seen.key.as_str());
    if seen.named { key } else { format!("number {key}") }
}

/// Prints a note if the free `key` looks like the number of a lock that is held, because lists show that lock by its
/// number.
pub(crate) async fn note_if_held(admin: &dyn LockAdmin, key: &LockKey, notes: Notes) {
    let is_number = key.as_str().chars().all(|c| c.is_ascii_digit() || "-,".contains(c));
    // Skips other stores. They know each key by name, and their lists can contain every key ever locked.
    if !is_number || notes.quiet || admin.extension::<Sessions>().is_none() {
        return;
    }
    // Ignores errors of the query, because the note is optional and the result is correct without it.
    let keys = admin.list(&ListQuery::new()).await.unwrap_or_default();
    if let Some(seen) = keys.iter().find(|seen| !seen.named && seen.key == *key) {
        notes.say(&format!(
            "the lock with the number {key} is another one{}: of another program, of another schema (`?schema=` in the URL), or of keys that are numbers (`?hash=raw`, `?hash=pair`)",
            admin::in_words(seen)
        ));
    }
}
