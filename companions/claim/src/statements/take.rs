//! The statements that take rows under leases, and that put them back.

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

/// The second half of a claim, after `picked`, which has locked rows of `t`: writes who has them.
struct TakeStatement<'a> {
    parts: &'a SqlParts,
    order: &'a RowOrder,
    /// One row at most.
    single: bool,
    /// Which claim of the batch a row is of.
    claim: &'a str,
    /// Where owners come from that are numbers, if not from a sequence row by row.
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
            // Refused before anything is asked for.
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
            // The state is checked once more for servers that do not lock what `picked` selects (docs/hazards.md H59):
            // a row that was done in between stays done.
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

    /// What changes in the claimed table, whoever has the row.
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

/// The statement that takes rows, each on its own.
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

/// The statement that takes rows of groups or tenants that are locked.
pub(crate) fn take_selected(selection: &Selection<'_>) -> String {
    let Selection { parts, order, request, .. } = *selection;
    let sequence = parts.inner().owner_sequence.as_ref().map(|_| "p.owner");
    let take = TakeStatement { parts, order, single: false, claim: "p.claim", sequence };
    let picked = if selection.is_limited() { selection.chosen() } else { selection.members(Locked::Skip) };
    take.statement(picked, request.from)
}

/// The statement that puts back everything that the batch `$2` of at most `$1` claims has taken. `None` where the spec
/// keeps no lease.
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
