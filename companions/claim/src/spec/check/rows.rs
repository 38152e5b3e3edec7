//! Reports rows that no claim would ever take.

use leasehold_table_schema::sql::{literal, regclass};

use super::TableCheck;
use crate::error::ClaimError;
use crate::spec::Tracking;
use crate::spec::migration::names::state_list;
use crate::spec::states::StateType;

impl TableCheck<'_> {
    pub(super) async fn rows(&mut self) -> Result<(), ClaimError> {
        let (spec, facts) = (self.spec, self.facts);
        let (inner, table) = (&spec.inner, spec.table().quoted());
        let Some(fact) = facts.column(&inner.state) else { return Ok(()) };
        let (state, home) = (inner.state.quoted(), literal(inner.states.home().as_str()));
        if !fact.is_required {
            let condition = format!("{state} IS NULL");
            let fix = format!("UPDATE {table} SET {state} = {home} WHERE {condition}");
            self.count(&condition, "have no state, and are never taken", &fix).await?;
        }
        if inner.states.kind != StateType::Boolean {
            let known = state_list(inner.states.all());
            // Compares as text, because an enum can lack some of the states.
            let condition = format!("{state}::pg_catalog.text NOT IN ({known})");
            let fix = "name it in the spec with `others`, or correct the rows";
            self.count(&condition, "are in a state that the spec does not have", fix).await?;
        }
        if let (Some(taken), Tracking::Columns { until, .. }) = (&inner.states.taken, &inner.tracking)
            && facts.column(until).is_some()
            && (!fact.is_enum || !self.has_errors())
        {
            let until = until.quoted();
            let condition = format!("{state} = {} AND {until} IS NULL", literal(taken.as_str()));
            let what = "are taken without a lease, which never ends";
            let fix = format!(
                "if no worker has claimed them, UPDATE {table} SET {until} = pg_catalog.clock_timestamp() WHERE {condition}"
            );
            self.count(&condition, what, &fix).await?;
        }
        self.unvalidated().await
    }

    /// Reports rows that break a `NOT VALID` constraint, because they can be read but not written.
    async fn unvalidated(&mut self) -> Result<(), ClaimError> {
        let (inner, table) = (&self.spec.inner, self.spec.table());
        let sql = format!(
            "SELECT conname::text, pg_catalog.pg_get_expr(conbin, conrelid) FROM pg_catalog.pg_constraint \
             WHERE conrelid = {} AND contype = 'c' AND NOT convalidated ORDER BY conname",
            regclass(table)
        );
        let unsettled = state_list(inner.states.takeable.iter().chain(&inner.states.taken));
        for row in self.reader.rows(&sql).await? {
            let (name, check) = (row.text(0), row.text(1));
            let condition =
                format!("{}::pg_catalog.text IN ({unsettled}) AND NOT ({check})", inner.state.quoted());
            let what = format!("break constraint {name}, which is NOT VALID, and cannot be claimed");
            let fix = format!("correct them (SELECT * FROM {} WHERE {condition})", table.quoted());
            self.count(&condition, &what, &fix).await?;
        }
        Ok(())
    }

    async fn count(&mut self, condition: &str, what: &str, fix: &str) -> Result<(), ClaimError> {
        let table = self.spec.table().quoted();
        let counting = format!("SELECT pg_catalog.count(*)::pg_catalog.text FROM {table} WHERE {condition}");
        let answer = self.reader.attempt(&format!("SET LOCAL statement_timeout = '5s'; {counting}")).await?;
        match answer.ok().and_then(|rows| rows.first().map(|row| row.number(0))) {
            Some(0) => {}
            Some(rows) => self.warning(format!("{rows} rows {what}: {fix}")),
            None => self.warning(format!(
                "whether rows {what} could not be seen in 5 s; look for yourself: {counting}"
            )),
        }
        Ok(())
    }
}
