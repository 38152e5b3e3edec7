//! Builds the statements that take rows under leases, and that put them back.

use leasehold_table_schema::Column;
use leasehold_table_schema::sql::literal;

use super::expression::{checked, column, next, owner_of_batch};
use super::groups::{Locked, Selection};
use super::order::RowOrder;
use super::parts::{NOW, SqlParts};
use super::pick::{TakeRequest, alone};
use super::row::{answers, names};
use super::with::With;
use crate::spec::Tracking;
use crate::spec::states::State;

/// Builds the second half of a statement that takes rows: it writes the leases of the rows `t` that the step `picked`
/// has locked.
struct TakeStatement<'a> {
    parts: &'a SqlParts,
    order: &'a RowOrder,
    /// Whether the statement takes one row only.
    single: bool,
    /// SQL for the number of a row's claim in this call.
    claim: &'a str,
    /// SQL for the owner, if each claim of several rows draws one number of a sequence. `None` if each row draws its
    /// own, or owners are UUIDs.
    sequence: Option<&'a str>,
}

impl TakeStatement<'_> {
    fn statement(&self, with: With, from: &[State]) -> String {
        let numbered = if self.single {
            "SELECT picked.*, 1::bigint AS place FROM picked"
        } else {
            "SELECT picked.*, pg_catalog.row_number() OVER () AS place FROM picked"
        };
        let found = if from.len() > 1 { ", p.found AS found" } else { "" };
        match &self.parts.inner().tracking {
            Tracking::Side(_) => self.on_side(with, numbered, found, from),
            Tracking::Columns { owner, epoch, until } => {
                let parts = self.parts;
                let mut set = self.changes();
                set.push(format!("{} = {}", owner.quoted(), self.owner()));
                set.push(format!("{} = {}", epoch.quoted(), parts.next_epoch()));
                set.push(format!("{} = {}", until.quoted(), parts.until("$3")));
                with.end(&format!(
                    "UPDATE {} AS t SET {} FROM ({numbered}) p WHERE {} AND {} \
                     RETURNING {}, {}::text AS owner, {}::bigint AS epoch, p.place AS place, {} AS claim{found}{}",
                    parts.table,
                    set.join(", "),
                    parts.same_row("p"),
                    checked(&parts.free(from)),
                    parts.key_text(),
                    column("t", owner),
                    column("t", epoch),
                    self.claim,
                    answers(parts, "") + &self.order.texts()
                ))
            }
            // Unreachable, because callers refuse such a spec before they send a statement.
            Tracking::None => String::new(),
        }
    }

    fn on_side(&self, with: With, numbered: &str, found: &str, from: &[State]) -> String {
        let parts = self.parts;
        let inner = parts.inner();
        let Some(side) = &parts.side else { return String::new() };
        let queue = if inner.queue.is_some() { "p.queue::text" } else { "''" };
        let own = if inner.timeout.is_some() { "COALESCE(p.lease, $3::bigint)" } else { "$3::bigint" };
        let noted = format!(
            "INSERT INTO {table} (tab, queue, id, owner, epoch, lease_until, taken_at) \
             SELECT {tab}, {queue}, p.id::text, {owner}, {epoch}, {NOW} + {own}::float8 * interval '1 millisecond', {NOW} \
             FROM numbered p ON CONFLICT (tab, queue, id) DO NOTHING RETURNING queue, id, owner, epoch",
            table = side.table,
            tab = side.tab,
            owner = self.owner(),
            epoch = parts.next_epoch(),
        );
        let mut with = with.step("numbered", numbered).change("noted", &noted);
        let is_noted = format!("noted.id = p.id::text AND noted.queue = {queue}");
        let changes = self.changes();
        if !changes.is_empty() {
            // Checks the state again for servers that do not lock the rows that `picked` selects (docs/hazards.md H59).
            // A row that was done since stays done.
            let changed = format!(
                "UPDATE {} AS t SET {} FROM picked p, noted WHERE {} AND {is_noted} AND {}",
                parts.table,
                changes.join(", "),
                parts.same_row("p"),
                checked(&parts.counts_as(from))
            );
            with = with.change("changed", &changed);
        }
        with.end(&format!(
            "SELECT {key}, noted.owner::text AS owner, noted.epoch::bigint AS epoch, \
             p.place AS place, {claim} AS claim{found}{answers} FROM numbered p JOIN noted ON {is_noted}",
            claim = self.claim,
            key = parts.key_of("p"),
            answers = names(parts, self.order, "p"),
        ))
    }

    /// Builds the assignments to the claimed table except for owner, epoch and end of the lease.
    fn changes(&self) -> Vec<String> {
        let inner = self.parts.inner();
        let mut set = Vec::new();
        if let Some(taken) = &inner.states.taken {
            set.push(format!("{} = {}", inner.state.quoted(), literal(taken.as_str())));
        }
        if let Some(left) = &inner.attempts {
            set.push(format!("{} = {} - 1", left.quoted(), column("t", left)));
        }
        let at: Option<&Column> = inner.taken_at.as_ref();
        set.extend(at.map(|at| format!("{} = {NOW}", at.quoted())));
        set
    }

    fn owner(&self) -> String {
        match (&self.parts.inner().owner_sequence, self.sequence) {
            (Some(_), Some(drawn)) => drawn.to_owned(),
            (Some(sequence), None) => next(sequence),
            (None, _) if self.single => "$2::text::uuid".to_owned(),
            (None, _) => owner_of_batch("$2::text", self.claim),
        }
    }
}

/// Builds the statement that takes single rows.
pub(crate) fn take_alone(
    parts: &SqlParts,
    order: &RowOrder,
    request: &TakeRequest<'_>,
    nulls: Option<&[bool]>,
    single: bool,
) -> String {
    let take = TakeStatement { parts, order, single, claim: "p.place", sequence: None };
    take.statement(alone(parts, order, request, nulls, single), request.from)
}

/// Builds the statement that takes rows of locked groups or tenants.
pub(crate) fn take_selected(selection: &Selection<'_>) -> String {
    let Selection { parts, order, request, .. } = *selection;
    let sequence = parts.inner().owner_sequence.as_ref().map(|_| "p.owner");
    let take = TakeStatement { parts, order, single: false, claim: "p.claim", sequence };
    let picked = if selection.is_limited() { selection.chosen() } else { selection.members(Locked::Skip) };
    take.statement(picked, request.from)
}

/// Builds the statement that puts back all rows that were taken by the call with the batch `$2` (a UUID), at most `$1`
/// claims. `None` if the spec has no lease.
pub(crate) fn put_back(parts: &SqlParts) -> Option<String> {
    let (inner, lease) = (parts.inner(), parts.lease.as_ref()?);
    let owners = format!(
        "SELECT $2::text::uuid UNION ALL SELECT {} FROM pg_catalog.generate_series(1, $1::bigint) n",
        owner_of_batch("$2::text", "n")
    );
    let mut set = parts.clear_lease();
    if parts.is_moved() {
        set.push(format!("{} = {}", inner.state.quoted(), parts.home()));
    }
    set.extend(inner.attempts.iter().map(|left| format!("{} = {} + 1", left.quoted(), column("t", left))));
    let due = format!(
        "SELECT {} FROM {} WHERE {} AND {} IN ({owners}) ORDER BY {} FOR UPDATE",
        parts.key(),
        parts.with_lease(),
        parts.taken("t"),
        lease.owner,
        parts.lock_order(),
    );
    Some(parts.change(&due, true, &set, "1"))
}
