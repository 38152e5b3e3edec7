//! The statements of a store, and the texts rendered from them.

use std::any::Any;
use std::sync::Arc;

use leasehold_api::{HolderId, LockKey};

use super::parts::{PartStatements, Parts};
use crate::ident::Identifier;
use crate::schema::Stores;
use crate::upkeep;

/// The statements of one store.
///
/// # Placeholders
///
/// Filled in once per schema: `{schema}` is the quoted name of the schema, `{token}` the sequence of tokens
/// and `{channel}` the name of the notifications, both as values.
///
/// # Parameters
///
/// Every store takes the same parameters and returns the same columns. The fields below name them in order,
/// with these names:
///
/// | Name | Type | Meaning |
/// |---|---|---|
/// | `key`, `holder` | text | the key and the holder; arrays if the name is plural |
/// | `ttl_us`, `cooldown_us` | bigint | the TTL and the cooldown in microseconds; no cooldown if NULL |
/// | `label`, `owner` | text | the label, or NULL; the client, for operators, and NULL while a hold is given out |
/// | `token` | bigint | the fencing token |
/// | `unused` | boolean | whether the cooldown that the grant started ends with the release |
///
/// # Tokens for hand-overs
///
/// [`grant_one`](Self::grant_one), [`retake_one`](Self::retake_one) and [`grant_free`](Self::grant_free) end with the
/// returned `l.token`. If callers wait in this client, a further column follows, which draws numbers after the row of
/// `l` was written, so under its lock.
///
/// # Locks and plans
///
/// Statements that lock several rows lock them in key order, which prevents deadlocks between them. One exception:
/// [`grant`](Self::grant) with [`free`](Self::free) locks free rows before it inserts new ones. In a deadlock there,
/// `lock_timeout` ends one statement, which is then repeated. Statements that depend on the time read
/// `clock_timestamp()` after the row is locked.
///
/// Plans are cached, possibly from a time when the table was empty. So no statement leaves the join order to the
/// planner. Rows are found by an array of keys, whose order an index scan follows, or from within a `LATERAL` subquery
/// that cannot be pulled up. Holders are compared by `(holder IN (SELECT ..)) IS TRUE`, which cannot be pulled up
/// either and is hashed.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // Only stores of this family make it, with all statements.
pub struct Dialect {
    /// The kind of store, which is part of the name of its notifications: two kinds in one schema do not
    /// share them.
    pub kind: &'static str,
    /// The stores whose objects the statements use.
    pub stores: Stores,
    /// Grants one key, if it has no row or a free one.
    ///
    /// - Parameters: `$1` key, `$2` holder, `$3` `ttl_us`, `$4` `cooldown_us`, `$5` label, `$6` owner.
    /// - Returns: `token`, or no row if not granted.
    pub grant_one: &'static str,
    /// Grants one key that has a free row, if neither this grant nor the last one has a cooldown. The
    /// statement can miss a free row, and might read the clock before the row is locked.
    ///
    /// - Parameters: `$1` key, `$2` holder, `$3` `ttl_us`, `$4` label, `$5` owner.
    /// - Returns: `token`, or no row if not granted.
    pub retake_one: &'static str,
    /// Grants the keys among `$1` that have a free row. It inserts no row, and can miss free ones.
    ///
    /// - Parameters: `$1` keys, each once and in order, `$2` holders, and common values `$3` `ttl_us`, `$4`
    ///   `cooldown_us`, `$5` label, `$6` owner.
    /// - Returns for each grant: the position in `$1`, counted from one, and `token`.
    pub grant_free: &'static str,
    /// Grants several keys, and returns for each key that was not granted the reason. `{free}` and `{among}`
    /// are empty, or the two fields below.
    ///
    /// - Parameters: arrays `$1` keys, each once, `$2` holders, `$3` `ttl_us`, `$4` `cooldown_us`, `$5` labels. `$6`
    ///   owner. `$7` the microseconds a waiter's mark must still last to count.
    /// - Returns: `key`, `token`, `live`, `live_us`, `cool_us`, `marked`, `in_parts`. Each request has a row with the
    ///   state before the statement, and each grant a further row with only `key` and `token`. `in_parts` is true if the
    ///   key has [parts](Self::parts) in use.
    pub grant: &'static str,
    /// A part of the `WITH` clause of [`grant`](Self::grant) that locks free rows and skips rows locked by another
    /// transaction. No separate parameters.
    pub free: &'static str,
    /// A condition in the `WHERE` clause of [`grant`](Self::grant), used together with [`free`](Self::free):
    /// writes only new rows, and rows that `free` has locked.
    pub among: &'static str,
    /// Renews holds that do not end soon, except those with a request to release. It fails and renews none if it
    /// cannot exclude that a hold had ended.
    ///
    /// - Parameters: `$1` keys, `$2` holders, `$3` `ttl_us` of all.
    /// - Returns: the number of holds renewed.
    pub renew_early: Option<&'static str>,
    /// Renews holds, or confirms them in a store without leases. `{skip}` is empty or ` SKIP LOCKED`.
    ///
    /// - Parameters: `$1` keys, `$2` holders, `$3` `ttl_us` of all.
    /// - Returns: `key`, `holder`, `asked` of each hold that is still held, as [`confirm`](Self::confirm).
    pub renew: &'static str,
    /// Checks whether holds are still held, without writing.
    ///
    /// - Parameters: `$1` keys, `$2` holders.
    /// - Returns: `key`, `holder`, `asked` of each hold that is still held. `asked` is true after a request to release
    ///   the hold.
    pub confirm: &'static str,
    /// Replaces the label of one hold.
    ///
    /// - Parameters: `$1` key, `$2` holder, `$3` label.
    /// - Returns: a row if that holder has the key.
    pub relabel: &'static str,
    /// Renews one hold, and marks it as given out.
    ///
    /// - Parameters: `$1` key, `$2` holder, `$3` `ttl_us`.
    /// - Returns: a row if that holder has the key.
    pub give_out: Option<&'static str>,
    /// Gives one hold that is marked as given out to another holder, with a new token, and removes the mark. If that
    /// holder has the hold already, and it is not marked, only extends its lease, and keeps its `ttl_us`.
    ///
    /// - Parameters: `$1` key, `$2` holder, `$3` `token`, `$4` the new holder, `$5` `ttl_us`, `$6` owner.
    /// - Returns: the new `token`.
    pub adopt: Option<&'static str>,
    /// Releases one hold that no client waits for. It releases nothing if the row has a waiter's mark, and
    /// may read the clock before the row is locked.
    ///
    /// - Parameters: `$1` key, `$2` holder, `$3` unused.
    /// - Returns no rows, because counting the rows written costs the server less.
    pub release_unawaited: &'static str,
    /// Releases one hold, and notifies if clients wait for the key.
    ///
    /// - Parameters: `$1` key, `$2` holder, `$3` unused.
    /// - Returns: a number, 1 if the hold was still held, plus 2 if clients wait. No row if the holder had no hold.
    pub release_one: &'static str,
    /// Releases several holds, like [`release_one`](Self::release_one).
    ///
    /// - Parameters: `$1` keys, `$2` holders, each of one key, `$3` the holders whose hold is unused.
    /// - Returns for each hold that existed: `holder` and the number.
    pub release: &'static str,
    /// Works like [`release`](Self::release), but skips rows that another transaction has locked.
    pub release_unlocked: &'static str,
    /// Notes in rows that a client waits for the key (a waiter's mark). A release of a marked row notifies.
    /// `{skip}` is empty or ` SKIP LOCKED`.
    ///
    /// - Parameters: `$1` keys, `$2` the duration in microseconds.
    /// - Returns: `key` of each held row, and another column. Notifies `w` and the key of each held row whose hold is
    ///   younger than the duration.
    pub mark: &'static str,
    /// Checks whether the row of a released hold has had another holder since, without writing.
    ///
    /// - Parameters: `$1` key, `$2` holder.
    /// - Returns: a boolean. No row if the row was removed.
    pub served: &'static str,
    /// Releases one hold by force, and notifies its holder.
    ///
    /// - Parameters: `$1` key, `$2` holder.
    /// - Returns: a row if that holder had the key.
    pub force: &'static str,
    /// Writes a request to release one hold, and notifies its holder.
    ///
    /// - Parameters: `$1` key, `$2` holder.
    /// - Returns: a row if that holder has the key.
    pub ask: &'static str,
    /// Lists a page of holds.
    ///
    /// - Parameters: `$1` the first key, `$2` the key before which the page ends, `$3` whether to list holds
    ///   that have ended, `$4` the maximum number of keys.
    /// - Returns by key: `key`, `holder`, `token`, `label`, `owner`, `since_us`, `state`, `expires_us`, `cool_us`,
    ///   `shown`, `last`, `asked`, `of`, `part`. Key number `$4` is always returned, with `last`, because more keys might
    ///   follow it. A key with several holders has a row for each. The last two columns are NULL for other keys.
    pub list: &'static str,
    /// Removes old rows of a page.
    ///
    /// - Parameters: `$1` the age in microseconds since the hold ended, `$2` the key after which the page
    ///   starts, `$3` the maximum number of rows to read.
    /// - Returns: the number of rows removed, and the key of row number `$3`, or NULL if the page has fewer rows.
    pub purge: &'static str,
    /// The statements for shared holds and permits, if the store has them.
    pub parts: Option<Parts>,
}

/// Creates the value behind [`LockGuard::extension`](leasehold_api::LockGuard::extension) from a grant's key, holder
/// and store number, and from whether the grant has a [part](Dialect::parts).
pub type Extension = Arc<dyn Fn(&LockKey, HolderId, i64, bool) -> Box<dyn Any + Send + Sync> + Send + Sync>;

/// The statements of a store in its schema.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) kind: &'static str,
    pub(super) stores: Stores,
    pub(super) grant_one: Drawing,
    pub(super) retake_one: Drawing,
    pub(super) grant_free: Drawing,
    pub(super) grant: WaitOrSkip,
    /// The statements on holds that are the only ones of their key.
    holds: HoldStatements,
    pub(super) give_out: Option<Arc<str>>,
    pub(super) adopt: Option<Arc<str>>,
    pub(super) mark: WaitOrSkip,
    pub(super) served: Arc<str>,
    pub(super) force: Arc<str>,
    pub(super) ask: Arc<str>,
    pub(super) list: Arc<str>,
    pub(super) purge: Arc<str>,
    pub(super) claim_upkeep: Arc<str>,
    pub(super) note_upkeep: Arc<str>,
    pub(super) parts: Option<PartStatements>,
}

/// The statements on existing holds.
#[derive(Debug)]
pub(super) struct HoldStatements {
    pub(super) renew_early: Option<Arc<str>>,
    pub(super) renew: WaitOrSkip,
    pub(super) confirm: Arc<str>,
    pub(super) relabel: Arc<str>,
    pub(super) release_unawaited: Arc<str>,
    pub(super) release_one: Arc<str>,
    pub(super) release: WaitOrSkip,
}

/// The numbers that a grant draws beyond its own, if callers wait in this client. Together they have tokens for a chain of
/// 10 ms in which one caller per microsecond takes over.
const FURTHER: &str = ", ARRAY(SELECT nextval({token}) FROM generate_series(1, 9 + 0 * l.token))";

/// A granting statement in two variants: one draws a number for each grant, the other also draws further ones.
#[derive(Debug)]
pub(super) struct Drawing {
    one: Arc<str>,
    more: Arc<str>,
}

impl Drawing {
    pub(super) fn text(&self, draws_more: bool) -> &Arc<str> {
        if draws_more { &self.more } else { &self.one }
    }
}

/// A statement in two variants: one waits for rows that another transaction has locked, the other skips them.
#[derive(Debug)]
pub(super) struct WaitOrSkip {
    waits: Arc<str>,
    skips: Arc<str>,
}

impl WaitOrSkip {
    pub(super) fn new(waits: Arc<str>, skips: Arc<str>) -> Self {
        Self { waits, skips }
    }

    pub(super) fn text(&self, skips: bool) -> &Arc<str> {
        if skips { &self.skips } else { &self.waits }
    }
}

impl Statements {
    pub(super) fn new(dialect: &Dialect, schema: &Identifier, channel: &str) -> Self {
        let name = schema.quoted();
        // Writes the sequence's name as a literal. A backslash in it is safe, because
        // `standard_conforming_strings` is on in the store's sessions.
        let token = format!("'{}.token'::regclass", name.replace('\'', "''"));
        // Needs no quoting, because the channel's name is generated.
        let channel = format!("'{channel}'");
        let given =
            [("{schema}", name.as_str()), ("{token}", token.as_str()), ("{channel}", channel.as_str())];
        let render = |template: &str| fill(template, &given);
        let with = |template: &str, more: &[_]| fill(template, &[&given, more].concat());
        let drawing =
            |template: &str| Drawing { one: render(template), more: render(&format!("{template}{FURTHER}")) };
        let wait_or_skip = |template: &str| WaitOrSkip {
            waits: with(template, &[("{skip}", "")]),
            skips: with(template, &[("{skip}", " SKIP LOCKED")]),
        };
        let (free, among) = (render(dialect.free), render(dialect.among));
        let grant = |free, among| with(dialect.grant, &[("{free}", free), ("{among}", among)]);
        Self {
            kind: dialect.kind,
            stores: dialect.stores,
            grant_one: drawing(dialect.grant_one),
            retake_one: drawing(dialect.retake_one),
            grant_free: drawing(dialect.grant_free),
            grant: WaitOrSkip { waits: grant("", ""), skips: grant(&free, &among) },
            holds: HoldStatements {
                renew_early: dialect.renew_early.map(render),
                renew: wait_or_skip(dialect.renew),
                confirm: render(dialect.confirm),
                relabel: render(dialect.relabel),
                release_unawaited: render(dialect.release_unawaited),
                release_one: render(dialect.release_one),
                release: WaitOrSkip::new(render(dialect.release), render(dialect.release_unlocked)),
            },
            give_out: dialect.give_out.map(render),
            adopt: dialect.adopt.map(render),
            mark: wait_or_skip(dialect.mark),
            served: render(dialect.served),
            force: render(dialect.force),
            ask: render(dialect.ask),
            list: render(dialect.list),
            purge: render(dialect.purge),
            claim_upkeep: render(upkeep::TAKE),
            note_upkeep: render(upkeep::NOTE),
            parts: dialect.parts.as_ref().map(|parts| PartStatements::new(parts, &render, &wait_or_skip)),
        }
    }

    /// Returns the statements on holds that have a part, or on holds without others beside them.
    pub(super) fn of_holds(&self, in_parts: bool) -> &HoldStatements {
        self.parts.as_ref().filter(|_| in_parts).map_or(&self.holds, |parts| &parts.holds)
    }
}

/// Returns `template` with each placeholder replaced, in one pass, because a schema's name can contain a placeholder.
fn fill(template: &str, values: &[(&str, &str)]) -> Arc<str> {
    let mut text = String::with_capacity(template.len() * 2);
    let mut rest = template;
    while let Some(at) = rest.find('{') {
        let (before, from) = rest.split_at(at);
        text += before;
        let known = values.iter().find(|(name, _)| from.starts_with(name));
        let (name, value) = known.copied().unwrap_or(("{", "{"));
        text += value;
        rest = &from[name.len()..];
    }
    text += rest;
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_filled_in_is_not_filled_again() {
        let values = [("{schema}", "\"{token}{schema}\""), ("{token}", "'t'")];
        let text = fill("SELECT {token} FROM {schema}.x WHERE y = '{z}'", &values);
        assert_eq!(&*text, "SELECT 't' FROM \"{token}{schema}\".x WHERE y = '{z}'");
    }
}
