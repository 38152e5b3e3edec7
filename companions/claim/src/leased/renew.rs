//! Renewing leases: all of a process in one statement that waits for nobody.

use std::time::Duration;

use super::PgClaims;
use crate::error::ClaimError;
use crate::spec::Tracking;
use crate::spec::states::State;
use crate::statements::expression::{checked, column};
use crate::statements::parts::{NOW, Words};
use crate::statements::query::{get, millis};
use crate::statements::row::key_of;
use crate::statements::settle::{owned, want};
use crate::statements::settled::Wanted;
use crate::store::{ClaimRef, Renewal, check_lease};

const RENEW: &str = "renew claims";

impl PgClaims {
    pub(super) async fn renew_all(
        &self,
        claims: &[ClaimRef],
        lease: Duration,
    ) -> Result<Vec<Renewal>, ClaimError> {
        self.spec().needs_lease()?;
        check_lease(lease)?;
        let mut renewals = vec![Renewal::Renewed; claims.len()];
        let mut wanted = Wanted::default();
        for (at, claim) in claims.iter().enumerate() {
            match claim.rows.first().filter(|_| !claim.fits(self.words().inner())) {
                // It is of another table.
                Some((row, _)) => {
                    renewals[at] = Renewal::Lost { row: row.clone(), current_epoch: None, state: None };
                }
                None => wanted.add(at, claim, None),
            }
        }
        if wanted.is_empty() {
            return Ok(renewals);
        }
        let sql = self.remembered("renew".to_owned(), || renew(self.words()));
        let query = wanted.bind(sql, false)?.bind(millis(lease))?;
        let rows = self.server().rows(&query).await.map_err(|fault| fault.error(RENEW))?;
        // Only rows that were not renewed are answered.
        for row in &rows {
            let claim: i64 = get(row, "claim", RENEW)?;
            let Some(renewal) = usize::try_from(claim).ok().and_then(|at| renewals.get_mut(at)) else {
                continue;
            };
            if get(row, "mine", RENEW)? {
                if *renewal == Renewal::Renewed {
                    *renewal = Renewal::Busy;
                }
            } else if !matches!(renewal, Renewal::Lost { .. }) {
                let state: Option<String> = get(row, "state", RENEW)?;
                *renewal = Renewal::Lost {
                    row: key_of(self.words(), row, RENEW)?,
                    current_epoch: get(row, "epoch", RENEW)?,
                    state: state.map(State::new),
                };
            }
        }
        Ok(renewals)
    }
}

/// The claim has lost no row. No join, which the planner takes for a small one and does by comparing each with
/// each; the same further down.
const STANDS: &str = "(l.claim IN (SELECT claim FROM standing WHERE NOT mine)) IS NOT TRUE";

/// Renews what is the claims' own and that nobody has locked; answers with the rest. A claim that has lost a
/// row is not renewed.
pub(super) fn renew(words: &Words) -> String {
    let inner = words.inner();
    let (join, mine, lock) = owned(words);
    let epoch = words.lease.as_ref().map_or("", |lease| &lease.epoch);
    let renewed = match (&inner.tracking, &words.side) {
        (Tracking::Columns { until, .. }, _) => format!(
            "UPDATE {} AS t SET {} = {} FROM locked l WHERE {} AND {STANDS} RETURNING l.n",
            words.table,
            until.quoted(),
            words.until("$6"),
            words.same_row("l"),
        ),
        (_, Some(side)) => {
            let own = if inner.timeout.is_some() { "COALESCE(l.lease, $6::bigint)" } else { "$6::bigint" };
            format!(
                "UPDATE {} AS x SET lease_until = {NOW} + {own}::float8 * interval '1 millisecond' FROM locked l \
                 WHERE {} AND {STANDS} RETURNING l.n",
                side.table,
                words.side_of(side, "l"),
            )
        }
        _ => return String::new(),
    };
    let own = match (&inner.timeout, &words.side) {
        (Some(own), Some(_)) => {
            let own = column("t", own);
            format!(", CASE WHEN {own} > 0 THEN {own}::bigint * 1000 END AS lease")
        }
        _ => String::new(),
    };
    let wanted_queue = if words.queue.is_some() { ", w.queue" } else { "" };
    format!(
        "WITH {want}, standing AS MATERIALIZED (SELECT w.n, w.claim, w.id{wanted_queue}, COALESCE({mine}, false) AS mine, {epoch}::bigint AS epoch, {state}::text AS state \
         FROM want w LEFT JOIN {join}), \
         locked AS MATERIALIZED (SELECT w.n, w.claim, {key}{own} FROM want w JOIN {joined} WHERE {checked} ORDER BY {order} FOR NO KEY UPDATE OF {lock} SKIP LOCKED), \
         renewed AS ({renewed}) \
         SELECT n.claim, {answered}, n.mine, n.epoch, n.state FROM standing n \
         WHERE (n.n IN (SELECT n FROM renewed)) IS NOT TRUE",
        key = words.key(),
        answered = words.key_of("n"),
        want = want(words, false),
        state = words.state(),
        joined = join.replace("LEFT JOIN", "JOIN"),
        checked = checked(&mine),
        order = words.lock_order(),
    )
}
