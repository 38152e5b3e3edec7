//! Builds the statement that renews leases.

use super::expression::{checked, column};
use super::parts::{NOW, SqlParts};
use super::settle::{owned, want};
use super::with::With;
use crate::spec::Tracking;

/// Condition: the claim of `l` has lost no row. Not a join, because the planner would expect few rows and compare each
/// row with each claim.
const STANDS: &str = "(l.claim IN (SELECT claim FROM standing WHERE NOT mine)) IS NOT TRUE";

/// Builds the statement that renews the leases of claims. It skips rows that another transaction has locked, and claims
/// that have lost a row. It returns the rows that were not renewed.
pub(crate) fn renew(parts: &SqlParts) -> String {
    let inner = parts.inner();
    let (join, mine, lock) = owned(parts);
    let epoch = parts.lease.as_ref().map_or("", |lease| &lease.epoch);
    let renewed = match (&inner.tracking, &parts.side) {
        (Tracking::Columns { until, .. }, _) => format!(
            "UPDATE {} AS t SET {} = {} FROM locked l WHERE {} AND {STANDS} RETURNING l.n",
            parts.table,
            until.quoted(),
            parts.until("$6"),
            parts.same_row("l"),
        ),
        (_, Some(side)) => {
            let own = if inner.timeout.is_some() { "COALESCE(l.lease, $6::bigint)" } else { "$6::bigint" };
            format!(
                "UPDATE {} AS x SET lease_until = {NOW} + {own}::float8 * interval '1 millisecond' FROM locked l \
                 WHERE {} AND {STANDS} RETURNING l.n",
                side.table,
                parts.side_of(side, "l"),
            )
        }
        _ => return String::new(),
    };
    let own = match (&inner.timeout, &parts.side) {
        (Some(own), Some(_)) => {
            let own = column("t", own);
            format!(", CASE WHEN {own} > 0 THEN {own}::bigint * 1000 END AS lease")
        }
        _ => String::new(),
    };
    let wanted_queue = if parts.queue.is_some() { ", w.queue" } else { "" };
    let standing = format!(
        "SELECT w.n, w.claim, w.id{wanted_queue}, COALESCE({mine}, false) AS mine, {epoch}::bigint AS epoch, \
         {state}::text AS state FROM want w LEFT JOIN {join}",
        state = parts.state(),
    );
    let locked = format!(
        "SELECT w.n, w.claim, {key}{own} FROM want w JOIN {joined} WHERE {checked} ORDER BY {order} \
         FOR NO KEY UPDATE OF {lock} SKIP LOCKED",
        key = parts.key(),
        joined = join.replace("LEFT JOIN", "JOIN"),
        checked = checked(&mine),
        order = parts.lock_order(),
    );
    let with = With::new().step("want", &want(parts, false)).step("standing", &standing);
    with.step("locked", &locked).change("renewed", &renewed).end(&format!(
        "SELECT n.claim, {}, n.mine, n.epoch, n.state FROM standing n \
         WHERE (n.n IN (SELECT n FROM renewed)) IS NOT TRUE",
        parts.key_of("n"),
    ))
}
