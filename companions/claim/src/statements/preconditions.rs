//! Builds SQL for preconditions: rows of another kind in the same group must be done before a row is taken.

use leasehold_table_schema::sql::literal;

use super::expression::{column, list};
use super::parts::SqlParts;
use super::with::With;
use crate::spec::states::State;
use crate::spec::{Precondition, Unmet};

impl SqlParts {
    /// Builds the condition that `t` is claimable now.
    pub(crate) fn ready(&self, from: &[State]) -> String {
        self.open(from) + &self.met()
    }

    /// Builds the condition, with a leading ` AND`, that all preconditions of `t` are met. Empty without preconditions.
    pub(crate) fn met(&self) -> String {
        let met = self.inner().preconditions.iter().filter_map(|one| {
            let (kind, on) = self.precondition(one)?;
            let (of, is_met) = (literal(&one.kind), self.is_met(one, &on));
            Some(format!(" AND ({kind} IS DISTINCT FROM {of} OR ({is_met}))"))
        });
        met.collect()
    }

    /// Builds the condition that `t` is due but depends on an unfinished row.
    pub(crate) fn waiting(&self, from: &[State]) -> String {
        let waits = self.inner().preconditions.iter().filter_map(|one| {
            let (kind, on) = self.precondition(one)?;
            Some(format!("({kind} = {} AND NOT ({}))", literal(&one.kind), self.is_met(one, &on)))
        });
        let any = waits.collect::<Vec<_>>().join(" OR ");
        format!("{} AND {} IS NOT TRUE AND ({any})", self.open(from), self.blocked())
    }

    /// Builds the condition that `t` is claimable now, or will be when the rows that it depends on, which are in
    /// progress, are done.
    pub(crate) fn claimable_now_or_soon(&self, from: &[State]) -> String {
        let mut ready = self.open(from);
        for one in &self.inner().preconditions {
            if let Some((kind, on)) = self.precondition(one) {
                ready += &format!(
                    " AND ({kind} IS DISTINCT FROM {} OR ({}) OR EXISTS ({on} AND ({})))",
                    literal(&one.kind),
                    self.is_met(one, &on),
                    self.in_motion("s")
                );
            }
        }
        format!("{ready} AND {} IS NOT TRUE", self.blocked())
    }

    /// Builds the condition that the row `alias` is taken or claimable now.
    fn in_motion(&self, alias: &str) -> String {
        let inner = self.inner();
        let mut there = format!("{} IN ({})", column(alias, &inner.state), list(&inner.states.takeable));
        if let Some(attempts) = &inner.attempts {
            let attempts = column(alias, attempts);
            there += &format!(" AND ({attempts} IS NULL OR {attempts} > 0)");
        }
        if let Some(ready) = &inner.ready_at {
            there += &format!(" AND {}", self.is_due(&column(alias, ready)));
        }
        format!("({}) OR ({there})", self.taken(alias))
    }

    /// Builds the condition that `t` is blocked, because a row that it depends on has failed or does not exist.
    pub(crate) fn blocked(&self) -> String {
        let mut any = Vec::new();
        for one in &self.inner().preconditions {
            let Some((kind, on)) = self.precondition(one) else { continue };
            let mut reasons = Vec::new();
            if one.failed == Unmet::Block {
                reasons.push(format!("EXISTS ({on} AND ({}))", self.given_up("s")));
            }
            if one.missing == Unmet::Block {
                reasons.push(format!("NOT EXISTS ({on})"));
            }
            if !reasons.is_empty() {
                any.push(format!("({kind} = {} AND ({}))", literal(&one.kind), reasons.join(" OR ")));
            }
        }
        if any.is_empty() { "false".to_owned() } else { format!("({})", any.join(" OR ")) }
    }

    fn is_met(&self, one: &Precondition, on: &str) -> String {
        let done = format!(
            "{} IS DISTINCT FROM {}",
            column("s", &self.inner().state),
            literal(self.inner().states.done.as_str())
        );
        let mut met = match one.failed {
            Unmet::Block => format!("NOT EXISTS ({on} AND {done})"),
            Unmet::Run => {
                format!("NOT EXISTS ({on} AND {done} AND ({}) IS NOT TRUE)", self.given_up("s"))
            }
        };
        if one.missing == Unmet::Block {
            met += &format!(" AND EXISTS ({on})");
        }
        met
    }

    /// Builds the statement that locks the rows on which the rows with the keys `$1` (ids) and `$2` (queues) depend. It
    /// returns whether all of them are finished.
    pub(crate) fn lock_preconditions(&self, one: &Precondition) -> Option<String> {
        let listed = self.listed("$1", "$2");
        let (group, kind) = (self.inner().group.as_ref()?, self.inner().kind.as_ref()?);
        let done =
            format!("{} = {}", column("s", &self.inner().state), literal(self.inner().states.done.as_str()));
        let finished = match one.failed {
            Unmet::Block => done,
            Unmet::Run => format!("({done} OR {})", self.given_up("s")),
        };
        let waited = format!(
            "SELECT ({finished}) IS TRUE AS is_finished FROM {table} s WHERE {kind} = {on} \
             AND {group} IN (SELECT {of} FROM {listed}) ORDER BY {id} FOR SHARE OF s NOWAIT",
            table = self.table,
            kind = column("s", kind),
            on = literal(&one.on),
            group = column("s", group),
            of = column("t", group),
            id = column("s", &self.inner().id),
        );
        let met = "SELECT NOT EXISTS (SELECT FROM waited WHERE NOT is_finished) AS is_met";
        Some(With::new().step("waited", &waited).end(met))
    }

    /// Builds two pieces of SQL: the column of the kind of `t`, and the start of a query for the rows `s` on which `t`
    /// depends.
    fn precondition(&self, one: &Precondition) -> Option<(String, String)> {
        let (group, kind) = (self.inner().group.as_ref()?, self.inner().kind.as_ref()?);
        let on = format!(
            "SELECT FROM {} s WHERE {} = {} AND {} = {}",
            self.table,
            column("s", group),
            column("t", group),
            column("s", kind),
            literal(&one.on)
        );
        Some((column("t", kind), on))
    }

    /// Builds the condition that the row `alias` has failed or is exhausted.
    pub(crate) fn given_up(&self, alias: &str) -> String {
        let failed =
            self.inner().states.failed.as_ref().map(|failed| {
                format!("{} = {}", column(alias, &self.inner().state), literal(failed.as_str()))
            });
        let exhausted = self.exhausted(alias);
        let either: Vec<String> = failed.into_iter().chain(exhausted).collect();
        if either.is_empty() { "false".to_owned() } else { either.join(" OR ") }
    }

    /// Builds the condition that the row `alias` is exhausted: by its state, or claimable without attempts left. `None`
    /// if the spec knows no exhausted rows.
    pub(crate) fn exhausted(&self, alias: &str) -> Option<String> {
        let (states, state) = (&self.inner().states, column(alias, &self.inner().state));
        let named = states.exhausted.as_ref().map(|name| format!("{state} = {}", literal(name.as_str())));
        let either: Vec<String> = named.into_iter().chain(self.spent(alias)).collect();
        (!either.is_empty()).then(|| format!("({})", either.join(" OR ")))
    }

    /// Builds the condition that the row `alias` is in a claimable state without attempts left. `None` if the spec
    /// counts no attempts.
    pub(crate) fn spent(&self, alias: &str) -> Option<String> {
        let states = &self.inner().states;
        let attempts = column(alias, self.inner().attempts.as_ref()?);
        let free = match states.taken {
            Some(_) => String::new(),
            None => format!(" AND ({}) IS NOT TRUE", self.taken(alias)),
        };
        let state = column(alias, &self.inner().state);
        Some(format!("({state} IN ({}) AND {attempts} <= 0{free})", list(&states.takeable)))
    }
}
