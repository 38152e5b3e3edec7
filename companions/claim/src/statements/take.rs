//! The second half of a claim's statement.

use leasehold_table_schema::Column;
use leasehold_table_schema::sql::literal;

use crate::spec::Tracking;
use crate::spec::states::State;
use crate::statements::expression::{checked, column, next, owner_of_batch};
use crate::statements::order::Sequence;
use crate::statements::parts::{NOW, Words};
use crate::statements::row::{answers, names};

/// The second half of a claim, after `picked`, which has locked rows of `t`: writes who has them.
pub(crate) struct Tail<'a> {
    pub(crate) words: &'a Words,
    pub(crate) order: &'a Sequence,
    /// One row at most.
    pub(crate) single: bool,
    /// Which claim of the batch a row is of.
    pub(crate) claim: &'a str,
    /// Where owners come from that are numbers, if not from a sequence row by row.
    pub(crate) sequence: Option<&'a str>,
}

impl Tail<'_> {
    pub(crate) fn statement(&self, picked: &str, from: &[State]) -> String {
        let numbered = if self.single {
            "(SELECT picked.*, 1::bigint AS place FROM picked)"
        } else {
            "(SELECT picked.*, pg_catalog.row_number() OVER () AS place FROM picked)"
        };
        let found = if from.len() > 1 { ", p.found AS found" } else { "" };
        match &self.words.inner().tracking {
            Tracking::Side(_) => self.on_side(picked, numbered, found, from),
            Tracking::Columns { owner, epoch, until } => {
                let words = self.words;
                let mut set = self.changes();
                set.push(format!("{} = {}", owner.quoted(), self.owner()));
                set.push(format!("{} = {}", epoch.quoted(), words.next_epoch()));
                set.push(format!("{} = {}", until.quoted(), words.until("$3")));
                format!(
                    "{picked} UPDATE {} AS t SET {} FROM {numbered} p WHERE {} AND {} \
                     RETURNING {}, {}::text AS owner, {}::bigint AS epoch, p.place AS place, {} AS claim{found}{}",
                    words.table,
                    set.join(", "),
                    words.same_row("p"),
                    checked(&words.free(from)),
                    words.key_text(),
                    column("t", owner),
                    column("t", epoch),
                    self.claim,
                    answers(words, "") + &self.order.texts()
                )
            }
            // Refused before anything is asked for.
            Tracking::None => String::new(),
        }
    }

    fn on_side(&self, picked: &str, numbered: &str, found: &str, from: &[State]) -> String {
        let words = self.words;
        let inner = words.inner();
        let Some(side) = &words.side else { return String::new() };
        let queue = if inner.queue.is_some() { "p.queue::text" } else { "''" };
        let own = if inner.timeout.is_some() { "COALESCE(p.lease, $3::bigint)" } else { "$3::bigint" };
        let changes = self.changes();
        let changed = if changes.is_empty() {
            String::new()
        } else {
            // The state is checked once more for servers that do not lock what `picked` selects (docs/hazards.md H59):
            // a row that was done in between stays done.
            format!(
                ", changed AS (UPDATE {} AS t SET {} FROM picked p, noted WHERE {} AND noted.id = p.id::text AND noted.queue = {queue} AND {})",
                words.table,
                changes.join(", "),
                words.same_row("p"),
                checked(&words.counts_as(from))
            )
        };
        let answers = names(words, self.order, "p");
        format!(
            "{picked}, numbered AS MATERIALIZED {numbered}, noted AS (\
             INSERT INTO {table} (tab, queue, id, owner, epoch, lease_until, taken_at) \
             SELECT {tab}, {queue}, p.id::text, {owner}, {epoch}, {NOW} + {own}::float8 * interval '1 millisecond', {NOW} \
             FROM numbered p ON CONFLICT (tab, queue, id) DO NOTHING RETURNING queue, id, owner, epoch){changed} \
             SELECT {key}, noted.owner::text AS owner, noted.epoch::bigint AS epoch, \
             p.place AS place, {claim} AS claim{found}{answers} \
             FROM numbered p JOIN noted ON noted.id = p.id::text AND noted.queue = {queue}",
            table = side.table,
            tab = side.tab,
            owner = self.owner(),
            epoch = words.next_epoch(),
            claim = self.claim,
            key = words.key_of("p"),
        )
    }

    /// What changes in the claimed table, whoever has the row.
    fn changes(&self) -> Vec<String> {
        let inner = self.words.inner();
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
        match (&self.words.inner().owner_sequence, self.sequence) {
            (Some(_), Some(drawn)) => drawn.to_owned(),
            (Some(sequence), None) => next(sequence),
            (None, _) if self.single => "$2::text::uuid".to_owned(),
            (None, _) => owner_of_batch("$2::text", self.claim),
        }
    }
}
