//! The statements of claims that an open transaction holds.

use super::expression::{next, owner_of_batch};
use super::order::RowOrder;
use super::parts::SqlParts;
use super::pick::TakeRequest;
use super::row::{answers, names};
use super::with::With;

const NUMBERED: &str = "SELECT p.*, pg_catalog.row_number() OVER () AS place FROM picked p";

/// Adds the taken rows, with the owners of their claims, to the setting that lists the rows which the transaction
/// holds.
const NOTED: &str = "SELECT pg_catalog.set_config('leasehold.held', \
     (SELECT held FROM guard) || pg_catalog.string_agg(' ' || mark || '=' || owner, ''), true) \
     FROM claimed HAVING pg_catalog.count(*) > 0";

/// Builds the statement that records the rows locked by `picked` in the transaction's setting `leasehold.held` and
/// returns them. `claim` is the SQL for a row's claim number in the batch.
pub(crate) fn hold(
    parts: &SqlParts,
    order: &RowOrder,
    request: &TakeRequest<'_>,
    picked: With,
    claim: &str,
) -> String {
    let epoch = parts.inner().epoch_sequence.as_ref().map_or("NULL::bigint".to_owned(), next);
    let claimed = format!(
        "SELECT n.*, {claim} AS number, {owner}::text AS owner, {epoch} AS epoch FROM numbered n",
        owner = owner_of_batch("$2::text", claim),
    );
    let with = picked.step("numbered", NUMBERED).step("claimed", &claimed).step("noted", NOTED);
    with.end(&format!(
        "SELECT g.verdict, d.set_config IS NOT NULL AS is_noted, {key}, c.owner, c.epoch, \
         c.place, c.number AS claim{found}{names} \
         FROM guard g LEFT JOIN claimed c ON true LEFT JOIN noted d ON true ORDER BY c.place",
        key = parts.key_of("c"),
        found = if request.from.len() > 1 { ", c.found" } else { "" },
        names = names(parts, order, "c"),
    ))
}

/// Builds the statement that returns which of the rows with the keys `$1` (ids) and `$2` (queues) have a lease in the
/// side table. `None` without a side table.
pub(crate) fn leased_of(parts: &SqlParts) -> Option<String> {
    parts.side.as_ref()?;
    let (key, listed) = (parts.key_text(), parts.listed("$1", "$2"));
    Some(format!("SELECT {key} FROM {listed} WHERE {}", parts.is_leased()))
}

/// Builds the statement that locks the row with the key `$1` and `$2` (id and queue) in any state. Returns nothing if
/// another transaction has locked it.
pub(crate) fn lock_row(parts: &SqlParts) -> String {
    let picked = format!(
        "SELECT {key}, COALESCE({state}::text, 'NULL') AS found{answers} FROM {listed} \
         WHERE (SELECT verdict FROM guard) = 'fine' FOR UPDATE OF t SKIP LOCKED",
        key = parts.key_text(),
        state = parts.state(),
        answers = answers(parts, ""),
        listed = parts.listed("$1", "$2"),
    );
    let with = parts.begin().step("picked", &picked);
    with.end("SELECT g.verdict, p.* FROM guard g LEFT JOIN picked p ON true")
}
