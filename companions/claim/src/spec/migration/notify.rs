//! The trigger that announces inserted rows to listeners.

use leasehold_table_schema::sql::{dollar_tag, hash, literal, quote, regclass};
use leasehold_table_schema::{MigrationStep, Table};

use crate::spec::ClaimSpec;
use crate::statements::payload::INSERTED;

const COMMENT: &str = "Wakes workers that claim rows of the table. Made by leasehold-claim; \
                       see ClaimSpecBuilder::notify_on_insert.";

/// A statement-level INSERT trigger and its function. There is no trigger for UPDATE, because takes and settlements are
/// updates. Their statements themselves announce the rows that they put back.
pub(crate) struct NotifyTrigger {
    table: Table,
    function: Table,
    body: String,
}

impl NotifyTrigger {
    /// Returns the trigger of the spec. `None` if the spec wants no trigger, or allows only held claims, which lack
    /// listeners.
    pub(crate) fn of(spec: &ClaimSpec) -> Option<Self> {
        if !spec.inner.notify_on_insert || !spec.has_lease() {
            return None;
        }
        let channel = spec.channel();
        // The function's name contains a hash of the channel, so two specs of one table have separate functions.
        let function = spec.table().beside(&["claim_notify", &hash(channel)[..8]]);
        let body = format!(
            "\nBEGIN\n  PERFORM pg_catalog.pg_notify({}, pg_catalog.concat({}, TG_TABLE_SCHEMA));\n  RETURN NULL;\nEND\n",
            literal(channel),
            literal(INSERTED)
        );
        Some(Self { table: spec.table().clone(), function, body })
    }

    /// Builds the migration steps. A trigger that was disabled by hand stays disabled.
    pub(super) fn steps(&self) -> Vec<MigrationStep> {
        let (here, name) = (regclass(&self.table), self.function.quoted());
        let (table, trigger) = (self.table.quoted(), quote(self.function.name()));
        let owner = format!("(SELECT relowner FROM pg_catalog.pg_class WHERE oid = {here})");
        let function = format!("pg_catalog.to_regprocedure({})", literal(&format!("{name}()")));
        let is_missing = format!(
            "NOT EXISTS (SELECT FROM pg_catalog.pg_proc WHERE oid = {function} AND prosrc = {} \
             AND proowner = {owner} AND NOT prosecdef \
             AND proconfig = '{{search_path=pg_catalog}}'::pg_catalog.text[])",
            literal(&self.body)
        );
        let tag = dollar_tag(&self.body);
        let create = format!(
            "CREATE OR REPLACE FUNCTION {name}() RETURNS trigger\n      \
             LANGUAGE plpgsql SET search_path = pg_catalog AS {tag}{body}{tag};\n    \
             EXECUTE pg_catalog.format('ALTER FUNCTION %s() OWNER TO %I', {}, \
             pg_catalog.pg_get_userbyid({owner}));\n    \
             COMMENT ON FUNCTION {name}() IS {comment}",
            literal(&name),
            body = self.body,
            comment = literal(COMMENT),
        );
        let is_off = format!(
            "NOT EXISTS (SELECT FROM pg_catalog.pg_trigger WHERE tgrelid = {here} AND tgfoid = {function} \
             AND {EACH_INSERT})"
        );
        let call = format!(
            "CREATE OR REPLACE TRIGGER {trigger} AFTER INSERT ON {table}\n      \
             FOR EACH STATEMENT EXECUTE FUNCTION {name}();\n    \
             COMMENT ON TRIGGER {trigger} ON {table} IS {}",
            literal(COMMENT)
        );
        vec![
            // The owner of the table becomes the owner of the function. The function runs with the rights of the
            // inserting role, so no one else must be able to change it.
            MigrationStep::only_if(
                "Function that announces inserted rows to listeners.",
                &is_missing,
                &create,
            ),
            MigrationStep::only_if(
                "Trigger that calls the function after each inserting statement.",
                &is_off,
                &call,
            ),
        ]
    }

    /// Builds an SQL expression that is true if a trigger of any name announces inserts.
    pub(crate) fn announces(&self) -> String {
        format!("EXISTS (SELECT {} AND {FIRES})", self.found())
    }

    /// Builds the query for triggers that announce inserts, the best first. Its columns: the trigger's name, whether it
    /// fires, whether the table's owner owns the function, the function, the table's owner.
    pub(crate) fn look(&self) -> String {
        format!(
            "SELECT t.tgname::text, ({FIRES})::text, (p.proowner = c.relowner)::text, \
             p.oid::pg_catalog.regprocedure::text, pg_catalog.quote_ident(pg_catalog.pg_get_userbyid(c.relowner)) {} \
             ORDER BY 2 DESC, 3 DESC",
            self.found()
        )
    }

    fn found(&self) -> String {
        format!(
            "FROM pg_catalog.pg_trigger AS t JOIN pg_catalog.pg_class AS c ON c.oid = t.tgrelid \
             JOIN pg_catalog.pg_proc AS p ON p.oid = t.tgfoid \
             WHERE c.oid = pg_catalog.to_regclass({}) AND {EACH_INSERT} AND p.prosrc = {}",
            literal(&self.table.quoted()),
            literal(&self.body)
        )
    }
}

/// Condition on `pg_trigger`: fires after each inserting statement, and has no `WHEN` condition.
const EACH_INSERT: &str = "tgtype = 4 AND tgqual IS NULL";

/// Condition on `pg_trigger`: the trigger is neither disabled nor only for replicas.
const FIRES: &str = "t.tgenabled IN ('O', 'A')";
