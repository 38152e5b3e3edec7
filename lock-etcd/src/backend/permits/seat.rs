//! The judgement of a survey: whether a request for a permit waits, or which number it can take.

use std::collections::{HashMap, HashSet};

use leasehold_api::Mode;

use crate::backend::statements::{At, Number};
use crate::names::Names;
use crate::wire::{KeyValue, TxnResponse};

/// The place of a request for a permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Seat {
    /// The key is in use with this many permits.
    Mismatch(u32),
    /// Older entries exclude the request, or hold all permits.
    Behind,
    /// The request can take this number, or has it.
    Free(Number),
}

/// Returns the place of a request for one of `of` permits. `own` is the revision at which its entry was created. Without
/// an entry all others are older.
pub(super) fn seat(names: &Names, at: &At, of: u32, own: Option<i64>, survey: &TxnResponse) -> Seat {
    let (entries, numbers) = (survey.range(4), survey.range(5));
    let ahead = entries.iter().filter(|kv| own.is_none_or(|own| kv.create_revision < own));
    let modes: Vec<Option<Mode>> =
        ahead.map(|kv| names.parse_entry(&kv.key).map(|entry| entry.mode)).collect();
    // The oldest entry for a permit decides the number of permits. A later one with another number leaves, and the request
    // waits for that.
    let oldest = modes.iter().find_map(|mode| match mode {
        Some(Mode::Permit { of }) => Some(*of),
        _ => None,
    });
    if let Some(in_use) = oldest.filter(|in_use| *in_use != of) {
        return Seat::Mismatch(in_use);
    }
    let is_like = modes.iter().all(|mode| *mode == Some(Mode::Permit { of }));
    if !is_like || modes.len() >= usize::try_from(of).unwrap_or(usize::MAX) {
        return Seat::Behind;
    }
    free(names, at, of, entries, numbers).map_or(Seat::Behind, Seat::Free)
}

/// Returns the number of the request, or the smallest free one.
fn free(names: &Names, at: &At, of: u32, entries: &[KeyValue], numbers: &[KeyValue]) -> Option<Number> {
    if let Some(kv) = numbers.iter().find(|kv| kv.value == at.holder)
        && let Some((_, number)) = names.parse_number(&kv.key)
    {
        return Some(Number { number, modified: kv.mod_revision, own_lease: kv.lease });
    }
    let holders: HashSet<&[u8]> =
        entries.iter().filter_map(|kv| kv.key.rsplit(|byte| *byte == 0).next()).collect();
    let number_of = |kv: &KeyValue| {
        // The entry of a holder is among the oldest ones. A number without an entry was left by another program, and is free.
        let is_held = holders.contains(&kv.value[..]);
        Some((names.parse_number(&kv.key)?.1, (kv.mod_revision, is_held)))
    };
    let taken: HashMap<u32, (i64, bool)> = numbers.iter().filter_map(number_of).collect();
    (0..of).find_map(|number| match taken.get(&number) {
        None => Some(Number { number, modified: 0, own_lease: 0 }),
        Some((modified, false)) => Some(Number { number, modified: *modified, own_lease: 0 }),
        Some((_, true)) => None,
    })
}

#[cfg(test)]
mod tests;
