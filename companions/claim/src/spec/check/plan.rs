//! Checks whether the server finds claimable rows without reading all others.

use leasehold_table_schema::{IndexFacts, TableFacts, server_message};
use serde_json::Value;

use super::TableCheck;
use crate::error::ClaimError;
use crate::spec::ClaimSpec;
use crate::statements::order::RowOrder;
use crate::statements::parts::SqlParts;
use crate::statements::pick::{TakeRequest, alone};
use crate::store::Take;

/// A table with fewer rows is read quickly by any plan, so nothing is reported.
const FEW: i64 = 1_000;

impl TableCheck<'_> {
    pub(super) async fn plan(&mut self) -> Result<(), ClaimError> {
        let (spec, facts) = (self.spec, self.facts);
        // Disables other plans for EXPLAIN, because the server reads small tables completely even with a fitting index.
        let explain = format!(
            "SET LOCAL enable_seqscan = off; SET LOCAL enable_bitmapscan = off; SET LOCAL enable_sort = off; \
             SET LOCAL max_parallel_workers_per_gather = 0; EXPLAIN (FORMAT JSON) {}",
            pick(spec, facts)?
        );
        let answer = match self.reader.attempt(&explain).await? {
            Ok(rows) => rows.iter().map(|row| row.text(0)).collect::<Vec<_>>().join("\n"),
            Err(error) => {
                let said = server_message(&error);
                self.error(format!(
                    "the statement that takes rows is refused: {said}; look at the filter of the spec, and at the \
                     privileges of this role"
                ));
                return Ok(());
            }
        };
        let plan: Value = serde_json::from_str(&answer).unwrap_or_default();
        let plan = TakePlan::read(&plan[0]["Plan"]);
        self.limit().await?;
        let own = self.fitting(None).await?;
        if self.is_good(&plan).await? || facts.is_partitioned() && !plan.sorts && !plan.scans_all {
            return Ok(());
        }
        if let Some(index) = own {
            // Warns only if less than half of the rows are claimable. Otherwise another index does as well, and the
            // server might prefer it.
            if facts.rows >= FEW && plan.estimate.is_some_and(|rows| rows < facts.rows / 2) {
                self.warning(format!(
                    "the server would not use index {index} to take rows ({}); ANALYZE {}, and see EXPLAIN of the claim",
                    plan.describe(),
                    spec.table().quoted()
                ));
            }
            return Ok(());
        }
        self.warning(format!(
            "no index has just the rows that may be taken, in their order ({}), so that each claim would look at settled \
             rows too, more with each day; run the migration",
            plan.describe()
        ));
        Ok(())
    }
}

/// Builds the statement that picks rows, as a claim would run it.
fn pick(spec: &ClaimSpec, facts: &TableFacts) -> Result<String, ClaimError> {
    let is_given = |name: &str| facts.columns.iter().any(|column| column.name == name && column.is_required);
    let parts = SqlParts::leased(spec);
    if let Some(ready) = &spec.inner.ready_at {
        let _ = parts.ready_is_given.set(is_given(ready.as_str()));
    }
    let order = RowOrder::new(&parts, |name| !is_given(name));
    let take = Take::up_to(1);
    let picked = alone(&parts, &order, &TakeRequest::new(&parts, &take)?, None, true);
    Ok(picked.end("SELECT FROM picked"))
}

/// The server's plan for picking rows.
#[derive(Default)]
struct TakePlan {
    sorts: bool,
    scans_all: bool,
    /// The name and the condition of the index that the plan uses.
    index: Option<(String, String)>,
    /// The number of rows that the planner expects.
    estimate: Option<i64>,
}

impl TakePlan {
    fn read(node: &Value) -> Self {
        let mut plan = Self::default();
        plan.visit(node);
        plan
    }

    fn visit(&mut self, node: &Value) {
        let text = |key: &str| node[key].as_str().unwrap_or_default();
        // Only considers the claimed table `t` and its partitions, because the plan also reads preconditions and
        // leases.
        let is_picked = text("Alias") == "t" || text("Alias").starts_with("t_");
        match text("Node Type") {
            "Sort" => self.sorts = true,
            "Seq Scan" if is_picked => self.scans_all = true,
            _ => {}
        }
        if is_picked {
            self.estimate = node["Plan Rows"].as_i64();
            if let Some(name) = node["Index Name"].as_str() {
                self.index = Some((name.to_owned(), text("Index Cond").to_owned()));
            }
        }
        for child in node["Plans"].as_array().into_iter().flatten() {
            self.visit(child);
        }
    }

    fn describe(&self) -> String {
        match &self.index {
            _ if self.scans_all => "it would read the whole table".to_owned(),
            Some((name, _)) if self.sorts => format!("it would sort what index {name} finds"),
            Some((name, _)) => format!("it would go through index {name}"),
            None => "it would use none".to_owned(),
        }
    }
}

impl TableCheck<'_> {
    /// Returns whether the plan finds rows in order and without settled ones. An incremental sort does no harm,
    /// because it only sorts rows that are equal in the index.
    async fn is_good(&mut self, plan: &TakePlan) -> Result<bool, ClaimError> {
        let (spec, facts) = (self.spec, self.facts);
        let Some((name, condition)) = &plan.index else { return Ok(false) };
        let Some(index) = facts.indexes.iter().find(|index| index.name == *name) else { return Ok(false) };
        if plan.sorts || plan.scans_all {
            return Ok(false);
        }
        let number = facts.number(&spec.inner.state);
        Ok(match &index.predicate {
            Some(predicate) if index.depends.contains(&number) => {
                self.holds(predicate, &spec.inner.states.done).await? != Some(true)
            }
            _ => index.keys.first() == Some(&number) && !condition.is_empty(),
        })
    }

    /// Checks the further indexes that a limit of rows in progress needs.
    async fn limit(&mut self) -> Result<(), ClaimError> {
        let (spec, facts) = (self.spec, self.facts);
        let Some(limit) = &spec.inner.limit else { return Ok(()) };
        let tenant = facts.number(&limit.column);
        if self.fitting(Some(tenant)).await?.is_none() {
            self.warning(format!(
                "no index has the rows that may be taken of each {}, in their order, so that a claim may look at all \
                 rows of those that have no room; run the migration",
                limit.column
            ));
        }
        let Some(taken) = &spec.inner.states.taken else { return Ok(()) };
        for index in facts.indexes.iter().filter(|index| index.keys.first() == Some(&tenant)) {
            let Some(predicate) = &index.predicate else { continue };
            if self.holds(predicate, taken).await? == Some(true)
                && self.holds(predicate, &spec.inner.states.done).await? == Some(false)
            {
                return Ok(());
            }
        }
        self.warning(format!(
            "no index has the taken rows of each {}, which each claim counts; run the migration",
            limit.column
        ));
        Ok(())
    }

    /// Returns the name of an index that contains only claimable rows, in their order. With `first`, the index must
    /// have this column before the order.
    async fn fitting(&mut self, first: Option<i64>) -> Result<Option<String>, ClaimError> {
        let (spec, facts) = (self.spec, self.facts);
        let inner = &spec.inner;
        let state = facts.number(&inner.state);
        let mut order: Vec<(i64, i64)> =
            inner.order.iter().map(|by| (facts.number(&by.column), i64::from(by.descending))).collect();
        if !inner.order.iter().any(|by| by.column == inner.id) {
            order.push((facts.number(&inner.id), 0));
        }
        let queued: Vec<(i64, i64)> =
            inner.queue.iter().map(|queue| (facts.number(queue), 0)).chain(order.iter().copied()).collect();
        for index in &facts.indexes {
            let keys: Vec<(i64, i64)> =
                index.keys.iter().zip(&index.options).map(|(key, option)| (*key, option & 1)).collect();
            if let Some(first) = first {
                let rest = order.iter().filter(|(column, _)| *column != first).copied();
                let wanted: Vec<(i64, i64)> = std::iter::once((first, 0)).chain(rest).collect();
                if keys.starts_with(&wanted) && self.has_those_alone(index).await? {
                    return Ok(Some(index.name.clone()));
                }
                continue;
            }
            // An index over all rows that has the state before the order also fits, if only one state is claimable.
            let by_state = keys.first() == Some(&(state, 0)) && keys[1..].starts_with(&order);
            let is_plain =
                by_state && index.predicate.is_none() && inner.states.takeable.len() == 1 && !inner.on_read;
            let is_ordered = keys.starts_with(&order) || keys.starts_with(&queued);
            if is_plain || is_ordered && self.has_those_alone(index).await? {
                return Ok(Some(index.name.clone()));
            }
        }
        Ok(None)
    }

    async fn has_those_alone(&mut self, index: &IndexFacts) -> Result<bool, ClaimError> {
        let Some(predicate) = &index.predicate else { return Ok(false) };
        let states = &self.spec.inner.states;
        for state in &states.takeable {
            if self.holds(predicate, state).await? != Some(true) {
                return Ok(false);
            }
        }
        Ok(self.holds(predicate, &states.done).await? == Some(false))
    }
}
