//! The public items of one crate, and its snapshot.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

/// Internal traits of the compiler. Stable code cannot name them, and they differ between compiler versions.
const INTERNAL: [&str; 3] =
    ["core::marker::Freeze", "core::marker::UnsafeUnpin", "core::marker::StructuralPartialEq"];

#[derive(Debug)]
pub(crate) struct Snapshot {
    file: PathBuf,
    /// Content of the file, or empty if no file exists.
    before: String,
    now: String,
}

impl Snapshot {
    /// Reads the items from rustdoc's JSON, and the snapshot from `file`.
    pub(crate) fn read(file: PathBuf, json: &Path) -> Result<Self, String> {
        // Blanket impls are the same for every type.
        let items = public_api::Builder::from_rustdoc_json(json)
            .omit_blanket_impls(true)
            .build()
            .map_err(|error| format!("cannot read {}: {error}", json.display()))?;
        let items = items.items().map(ToString::to_string);
        let now = items.filter(|item| !is_internal(item)).map(|item| item + "\n").collect();
        let before = fs::read_to_string(&file).unwrap_or_default();
        Ok(Self { file, before, now })
    }

    /// Returns the removed and the added items, one per line. Empty if nothing changed.
    pub(crate) fn changes(&self) -> String {
        let [before, now]: [BTreeSet<&str>; 2] = [&self.before, &self.now].map(|text| text.lines().collect());
        let gone = before.difference(&now).map(|item| ('-', item));
        let come = now.difference(&before).map(|item| ('+', item));
        let mut changes = String::new();
        for (sign, item) in gone.chain(come) {
            let _ = writeln!(changes, "  {sign} {item}");
        }
        if !changes.is_empty() {
            changes.insert_str(0, &format!("{}:\n", self.file.display()));
        }
        changes
    }

    pub(crate) fn len(&self) -> usize {
        self.now.lines().count()
    }

    pub(crate) fn write(&self) -> Result<(), String> {
        let write = || {
            self.file.parent().map_or(Ok(()), fs::create_dir_all)?;
            fs::write(&self.file, &self.now)
        };
        write().map_err(|error: std::io::Error| format!("cannot write {}: {error}", self.file.display()))
    }
}

fn is_internal(item: &str) -> bool {
    INTERNAL
        .iter()
        .any(|name| item.strip_prefix("impl").is_some_and(|item| item.contains(&format!("{name} for "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(before: &str, now: &str) -> Snapshot {
        Snapshot { file: "a.txt".into(), before: before.to_owned(), now: now.to_owned() }
    }

    #[test]
    fn changes_name_what_has_gone_and_what_has_come() {
        let changed = snapshot("pub fn a()\npub fn b()\n", "pub fn a()\npub fn b(u8)\n");
        assert_eq!(changed.changes(), "a.txt:\n  - pub fn b()\n  + pub fn b(u8)\n");
    }

    #[test]
    fn the_same_items_are_no_change() {
        assert_eq!(snapshot("pub fn a()\npub fn b()\n", "pub fn b()\npub fn a()\n").changes(), "");
    }

    #[test]
    fn internal_traits_are_left_out_and_names_like_theirs_are_not() {
        assert!(is_internal("impl<T> core::marker::Freeze for a::B<T> where T: core::marker::Freeze"));
        assert!(!is_internal("impl core::marker::Send for a::B"));
        assert!(!is_internal("pub fn a::B::f<T: core::marker::Freeze>()"));
    }
}
