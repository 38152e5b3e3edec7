//! The statements of a store, and what becomes of them.

use std::any::Any;
use std::sync::Arc;

use leasehold_api::{HolderId, LockKey};

use crate::ident::Identifier;
use crate::schema::Stores;
use crate::upkeep;

/// The statements of one store, with `{schema}` for the quoted name of the schema, and as values `{token}` for the
/// sequence of tokens and `{channel}` for the name of the notifications. All stores take the same values and
/// answer the same columns.
///
/// Statements that lock several rows lock them in the order of their keys, so that two of them do not wait
/// for each other. One exception: a grant with [`free`](Self::free) locks free rows before it inserts new
/// ones; if it waits in a circle with another grant, `lock_timeout` ends one of them, which is sent again.
/// What reads the clock reads `clock_timestamp()`, after the row is locked.
///
/// Plans are kept, and were perhaps made when the table was empty. So no statement leaves the planner the
/// choice in which order to join: rows are looked up by an array of keys, whose order an index scan follows,
/// or from within a `LATERAL` subquery that cannot be pulled up. Who holds them is compared by an
/// `IN (SELECT ..)` that cannot be pulled up either, since it is asked whether it `IS TRUE`: it is hashed.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // Made by the stores of this family, with all statements.
pub struct Dialect {
    /// A short name for the kind of store: two kinds in one schema have their own notifications.
    pub kind: &'static str,
    /// Whose objects it uses.
    pub stores: Stores,
    /// One grant, if nobody has the key. `$1` key, `$2` holder, `$3` TTL, `$4` cooldown (both in
    /// microseconds), `$5` label, `$6` owner. Answers the token, or no row.
    pub grant_one: &'static str,
    /// The same for a key that has a row, and no cooldown: neither of this grant nor of the last one. `$1` key, `$2`
    /// holder, `$3` TTL, `$4` label, `$5` owner. Does nothing where there is no row, and need not find each that is
    /// free. May read the clock before the row is locked.
    pub retake_one: &'static str,
    /// Grants for several keys, each of them once and in their order, of which it need not find all that are
    /// free, and inserts none. As above with arrays for `$1` and `$2`; the rest is the same for all. Answers the
    /// place of each that was granted, counted from one, and its token.
    pub grant_free: &'static str,
    /// Grants for several keys, each of them once, that says of each why it was not granted. As above with
    /// arrays for `$1` to `$5`; `$7` is how many microseconds a waiter's mark must still last. Answers `(key, token, live, live_us, cool_us,
    /// marked)`: one row per request with what was there before, and one row with only key and token
    /// per grant. `{free}` and `{among}` are empty or what the two fields below say.
    pub grant: &'static str,
    /// A further part of the `WITH` of [`grant`](Self::grant): locks the free rows, and leaves out those
    /// that somebody else has locked.
    pub free: &'static str,
    /// A further condition of [`grant`](Self::grant): only rows that were locked so, and new ones.
    pub among: &'static str,
    /// Renews holds that do not end just now, which are nearly all: `$1` to `$3` as below. Answers how many
    /// it has renewed; fails, and renews none, if it cannot tell whether one had ended.
    pub renew_early: Option<&'static str>,
    /// Renews, or confirms where there is nothing to renew. `$1` keys, `$2` holders, `$3` the TTL of all in
    /// microseconds. Answers `(key, holder)` of what is still held. `{skip}` is empty or ` SKIP LOCKED`.
    pub renew: &'static str,
    /// Looks whether holds are still there. `$1` keys, `$2` holders. Answers `(key, holder)` of those that
    /// are.
    pub confirm: &'static str,
    /// One release that nobody waits for. `$1` key, `$2` holder, `$3` whether its cooldown ends with it. Frees nothing
    /// unless that holder has it and there is no mark. Answers no row, which costs the server less: rows written are
    /// counted. May read the clock before the row is locked.
    pub release_unawaited: &'static str,
    /// One release. `$1` key, `$2` holder, `$3` whether its cooldown ends with it. Answers no row if that holder had
    /// nothing, else a number: 1 if it was still held, and 2 more if somebody waits, who is notified.
    pub release_one: &'static str,
    /// Several releases: `$1` keys, `$2` holders, each of which belongs to one key, `$3` those holders whose cooldown
    /// ends with it. Answers the holder and the number of those that were there.
    pub release: &'static str,
    /// The same, which leaves out rows that somebody else has locked.
    pub release_unlocked: &'static str,
    /// Notes that somebody waits. `$1` keys, `$2` for how many microseconds. Answers the keys that are
    /// held. Has `{skip}`.
    pub mark: &'static str,
    /// A forced release. `$1` key, `$2` holder. Answers a row if that holder had it.
    pub force: &'static str,
    /// Live holds and, if `$3`, those that ended, among the first `$4` rows from `$1` to before `$2`. Answers `(key,
    /// holder, token, label, owner, since_us, state, expires_us, cool_us, shown, last)`, ordered by key. The row in
    /// place `$4` is answered in any case, as the last one: behind it there may be more.
    pub list: &'static str,
    /// Removes those of the first `$3` rows after `$2` that ended more than `$1` microseconds ago. Answers how many, and
    /// the key in place `$3`, if there are so many.
    pub purge: &'static str,
}

/// Makes what [`LockGuard::extension`](leasehold_api::LockGuard::extension) finds, of a grant's key,
/// holder and store number.
pub type Extension = Arc<dyn Fn(&LockKey, HolderId, i64) -> Box<dyn Any + Send + Sync> + Send + Sync>;

/// The statements of a store in its schema.
#[derive(Debug)]
pub(super) struct Statements {
    pub(super) kind: &'static str,
    pub(super) stores: Stores,
    pub(super) grant_one: Arc<str>,
    pub(super) retake_one: Arc<str>,
    pub(super) grant_free: Arc<str>,
    pub(super) grant: Patient,
    pub(super) renew_early: Option<Arc<str>>,
    pub(super) renew: Patient,
    pub(super) confirm: Arc<str>,
    pub(super) release_unawaited: Arc<str>,
    pub(super) release_one: Arc<str>,
    pub(super) release: Patient,
    pub(super) mark: Patient,
    pub(super) force: Arc<str>,
    pub(super) list: Arc<str>,
    pub(super) purge: Arc<str>,
    pub(super) claim_upkeep: Arc<str>,
    pub(super) note_upkeep: Arc<str>,
}

/// A statement that waits for rows which somebody else has locked, and the one that leaves them out.
#[derive(Debug)]
pub(super) struct Patient {
    waits: Arc<str>,
    skips: Arc<str>,
}

impl Patient {
    pub(super) fn text(&self, skips: bool) -> &Arc<str> {
        if skips { &self.skips } else { &self.waits }
    }
}

impl Statements {
    pub(super) fn new(dialect: &Dialect, schema: &Identifier, channel: &str) -> Self {
        let name = schema.quoted();
        // The sequence's name as a literal; `standard_conforming_strings` is on in our sessions.
        let token = format!("'{}.token'::regclass", name.replace('\'', "''"));
        // A name of our own making, without anything to quote.
        let channel = format!("'{channel}'");
        let given =
            [("{schema}", name.as_str()), ("{token}", token.as_str()), ("{channel}", channel.as_str())];
        let render = |template: &str| fill(template, &given);
        let with = |template: &str, more: &[_]| fill(template, &[&given, more].concat());
        let patient = |template: &str| Patient {
            waits: with(template, &[("{skip}", "")]),
            skips: with(template, &[("{skip}", " SKIP LOCKED")]),
        };
        let (free, among) = (render(dialect.free), render(dialect.among));
        let grant = |free, among| with(dialect.grant, &[("{free}", free), ("{among}", among)]);
        Self {
            kind: dialect.kind,
            stores: dialect.stores,
            grant_one: render(dialect.grant_one),
            retake_one: render(dialect.retake_one),
            grant_free: render(dialect.grant_free),
            grant: Patient { waits: grant("", ""), skips: grant(&free, &among) },
            renew_early: dialect.renew_early.map(render),
            renew: patient(dialect.renew),
            confirm: render(dialect.confirm),
            release_unawaited: render(dialect.release_unawaited),
            release_one: render(dialect.release_one),
            release: Patient { waits: render(dialect.release), skips: render(dialect.release_unlocked) },
            mark: patient(dialect.mark),
            force: render(dialect.force),
            list: render(dialect.list),
            purge: render(dialect.purge),
            claim_upkeep: render(upkeep::TAKE),
            note_upkeep: render(upkeep::NOTE),
        }
    }
}

/// `template` with each placeholder replaced, in one pass: what a schema is called is not looked at again.
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
