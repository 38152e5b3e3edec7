//! The statements of holds that several holders of a key have at once.

use std::sync::Arc;

use leasehold_api::Mode;
use sqlx::Row as _;

use super::common::Common;
use super::db::{Db, Statement, StatementFailure};
use super::dialect::{HoldStatements, WaitOrSkip};
use super::job::PurgeRequest;
use super::maintenance::{PAGE, behind, behind_prefix};

/// The statements of a store for shared holds and permits.
///
/// The key's row, its *gate*, then looks held indefinitely, by `*` or by `#N`. The statements of [`Dialect`] therefore
/// grant it to no caller. Each holder has a row in another table, a *part*. Permits of N have the parts 0 to N - 1.
///
/// The parameter `of` is an integer: 0 in shared mode, N as one of N permits. `part` is the number of a part. [`Dialect`] has
/// the other names.
///
/// [`Dialect`]: super::Dialect
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)] // Only stores of this family make it, with all statements.
pub struct Parts {
    /// Takes a free part of a key in this mode, unless a writer waits.
    ///
    /// - Parameters: `$1` key, `$2` holder, `$3` `ttl_us`, `$4` label, `$5` owner, `$6` of.
    /// - Returns: `token`, `part` if granted.
    pub join: &'static str,
    /// Works like [`join`](Self::join) for several keys.
    ///
    /// - Parameters: `$1` keys, each once and in order, `$2` holders, and common values `$3` to `$6`.
    /// - Returns for each grant: the position in `$1`, counted from one, `token`, `part`.
    pub join_many: &'static str,
    /// Extends the part that the holder has, for a request that is sent again.
    ///
    /// - Parameters: `$1` key, `$2` holder, `$3` `ttl_us`, `$4` of.
    /// - Returns: `token`, `part` if the holder has one.
    pub extend: &'static str,
    /// Turns a free key shared, or adds a part to a shared key, and grants that part.
    ///
    /// - Parameters and rows: as [`join`](Self::join). `$7` the number of parts to skip, an integer.
    pub enter_shared: &'static str,
    /// Turns a free key into a semaphore of `$6` permits, and grants its first part.
    ///
    /// - Parameters and rows: as [`join`](Self::join).
    pub enter_permits: &'static str,
    /// Reads the state of a key.
    ///
    /// - Parameters: `$1` key, `$2` the microseconds a mark must still last to count.
    /// - Returns one row: `in_parts` (the gate's holder if the key has parts in use), `live`, `live_us`, `cool_us`,
    ///   `marked`, `marked_by_writer`, `kept_out` (a writer keeps new parts out), `parts` (the number that fit the gate), `held` (the
    ///   number of held ones), `first_us`, `last_us` (the time until the first and the last hold of a part ends).
    pub look: &'static str,
    /// Puts the parts of a key out of use if none is held, and grants the key to one holder or opens it. `{skip}` is
    /// empty or ` SKIP LOCKED`.
    ///
    /// - Parameters: `$1` key, `$2` holder, `$3` `ttl_us`, `$4` label, `$5` owner, `$6` whether the key is opened, `$7`
    ///   `cooldown_us`.
    /// - Returns: `token`, or no row if a part is held or the key has changed.
    pub convert: &'static str,
    /// Notes in gates that an exclusive request waits. Keeps new parts out for the duration.
    ///
    /// - Parameters: `$1` keys, `$2` the duration in microseconds.
    /// - Returns: `key` of each key that has parts in use.
    pub mark_writer: &'static str,
    /// As the statement of [`Dialect`](super::Dialect), for parts. So are the next ones.
    pub renew_early: Option<&'static str>,
    /// See [`Dialect`](super::Dialect).
    pub renew: &'static str,
    /// See [`Dialect`](super::Dialect).
    pub confirm: &'static str,
    /// See [`Dialect`](super::Dialect).
    pub relabel: &'static str,
    /// See [`Dialect`](super::Dialect).
    pub release_unawaited: &'static str,
    /// See [`Dialect`](super::Dialect).
    pub release_one: &'static str,
    /// See [`Dialect`](super::Dialect).
    pub release: &'static str,
    /// See [`Dialect`](super::Dialect).
    pub release_unlocked: &'static str,
    /// See [`Dialect`](super::Dialect).
    pub force: &'static str,
    /// See [`Dialect`](super::Dialect).
    pub ask: &'static str,
    /// Lists keys of a page whose parts all ended long ago, at most a hundred.
    ///
    /// - Parameters: `$1` the age in microseconds, `$2` the key after which the page starts, `$3` the maximum number of
    ///   gates to read.
    /// - Returns: `key`.
    pub idle: &'static str,
    /// Removes old parts that are out of use.
    ///
    /// - Parameters: as [`idle`](Self::idle), but `$3` limits the removed parts, and `$4` is the key before which the page
    ///   ends.
    /// - Returns no rows.
    pub purge: &'static str,
}

/// [`Parts`] in a schema.
#[derive(Debug)]
pub(super) struct PartStatements {
    pub(super) join: Arc<str>,
    pub(super) join_many: Arc<str>,
    pub(super) extend: Arc<str>,
    pub(super) enter_shared: Arc<str>,
    pub(super) enter_permits: Arc<str>,
    pub(super) look: Arc<str>,
    pub(super) convert: WaitOrSkip,
    pub(super) mark_writer: Arc<str>,
    pub(super) holds: HoldStatements,
    pub(super) force: Arc<str>,
    pub(super) ask: Arc<str>,
    pub(super) idle: Arc<str>,
    pub(super) purge: Arc<str>,
}

impl PartStatements {
    pub(super) fn new(
        parts: &Parts,
        render: &dyn Fn(&str) -> Arc<str>,
        wait_or_skip: &dyn Fn(&str) -> WaitOrSkip,
    ) -> Self {
        Self {
            join: render(parts.join),
            join_many: render(parts.join_many),
            extend: render(parts.extend),
            enter_shared: render(parts.enter_shared),
            enter_permits: render(parts.enter_permits),
            look: render(parts.look),
            convert: wait_or_skip(parts.convert),
            mark_writer: render(parts.mark_writer),
            holds: HoldStatements {
                renew_early: parts.renew_early.map(render),
                renew: wait_or_skip(parts.renew),
                confirm: render(parts.confirm),
                release_unawaited: render(parts.release_unawaited),
                release_one: render(parts.release_one),
                release: WaitOrSkip::new(render(parts.release), render(parts.release_unlocked)),
                relabel: render(parts.relabel),
            },
            force: render(parts.force),
            ask: render(parts.ask),
            idle: render(parts.idle),
            purge: render(parts.purge),
        }
    }
}

/// Returns the parameter `of` of a mode. `None` if the mode has no parts.
pub(super) fn of(mode: Mode) -> Option<i32> {
    match mode {
        Mode::Shared => Some(0),
        // The engine has checked the number against the capabilities, so it fits.
        Mode::Permit { of } => Some(i32::try_from(of).unwrap_or(i32::MAX)),
        _ => None,
    }
}

/// Returns the mode of a part with this `of`, and the number of its permit.
pub(super) fn mode(of: i32, part: i32) -> (Mode, Option<u32>) {
    match u32::try_from(of) {
        Ok(of) if of > 0 => (Mode::Permit { of }, u32::try_from(part).ok()),
        _ => (Mode::Shared, None),
    }
}

/// Binds the values of [`Parts::convert`] that open a key.
pub(super) fn bind_opening(query: Statement, key: &str) -> Statement {
    let query = query.bind(key).bind("").bind(0_i64).bind(None::<&str>).bind(None::<&str>);
    query.bind(true).bind(None::<i64>)
}

const REMOVE: &str = "remove old parts";

/// The number of keys that one job opens, with a commit each. The other jobs of the session wait for it.
const MOST_OPENED: u32 = 32;

/// Opens keys of a page whose parts all ended long ago. A later purge then removes the key's row and its parts, and a
/// library that knows no parts is granted the key. Returns whether the page has more of them.
pub(super) async fn open_idle(
    db: &mut Db<'_>,
    common: &Common,
    statements: &PartStatements,
    purge: &PurgeRequest,
) -> Result<bool, StatementFailure> {
    let bind = |query: Statement| query.bind(purge.age).bind(purge.after.as_str()).bind(PAGE);
    let rows = db.rows(REMOVE, &statements.idle, &bind).await?;
    let keys: Vec<String> = rows.iter().filter_map(|row| row.try_get(0).ok()).collect();
    let mut opened = 0;
    for key in keys {
        if opened >= MOST_OPENED {
            return Ok(true);
        }
        let bind = |query: Statement| bind_opening(query, &key);
        let text = statements.convert.text(true);
        match db.row_drawing_token(REMOVE, text, &common.config.schema, &bind).await {
            Ok(Some(_)) => opened += 1,
            // Leaves a locked key to a later run.
            Ok(None) | Err(StatementFailure::Locked { .. }) => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(false)
}

/// Removes old parts of the keys of a page that are out of use, even if a key has no row. Returns their number, and
/// whether there might be more. `last` is the last key of the page, or `None` if the page is the last one.
pub(super) async fn purge(
    db: &mut Db<'_>,
    statements: &PartStatements,
    purge: &PurgeRequest,
    last: Option<&str>,
) -> Result<(u64, bool), StatementFailure> {
    let end = last.map_or_else(|| behind_prefix(""), behind);
    let bind =
        |query: Statement| query.bind(purge.age).bind(purge.after.as_str()).bind(PAGE).bind(end.as_str());
    let removed = db.execute(REMOVE, &statements.purge, &bind).await?;
    Ok((removed, removed >= PAGE.unsigned_abs()))
}
