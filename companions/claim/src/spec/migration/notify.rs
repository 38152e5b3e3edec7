//! The trigger that announces inserted rows to those who listen.

use leasehold_table_schema::sql::{dollar_tag, hash, literal, quote, regclass};
use leasehold_table_schema::{MigrationStep, Table};

use crate::spec::ClaimSpec;
use crate::statements::payload::INSERTED;

const COMMENT: &str = "Wakes workers that claim rows of the table. Made by leasehold-claim; \
                       see ClaimSpecBuilder::notify_on_insert.";

/// A trigger for each statement that inserts, and the function that it calls. There is none for updates: takes and
/// settlements are updates, and what they return is announced by the statements themselves.
pub(crate) struct NotifyTrigger {
    table: Table,
    function: Table,
    body: String,
}

impl NotifyTrigger {
    /// `None` where the spec wants none, and where nobody listens because only held claims are possible.
    pub(crate) fn of(spec: &ClaimSpec) -> Option<Self> {
        if !spec.inner.notify_on_insert || !spec.has_lease() {
            return None;
        }
        let channel = spec.channel();
        // The channel is part of the name, so that two specs of one table each have theirs.
        let function = spec.table().beside(&["claim_notify", &hash(channel)[..8]]);
        let body = format!(
            "\nBEGIN\n  PERFORM pg_catalog.pg_notify({}, pg_catalog.concat({}, TG_TABLE_SCHEMA));\n  RETURN NULL;\nEND\n",
            literal(channel),
            literal(INSERTED)
        );
        Some(Self { table: spec.table().clone(), function, body })
    }

    /// What makes it. A trigger that somebody has disabled stays so.
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
            // It runs with the rights of whoever inserts, so nobody but the owner of the table is to change it.
            MigrationStep::only_if("Inserted rows are announced to those who listen,", &is_missing, &create),
            MigrationStep::only_if("once for each transaction that inserts.", &is_off, &call),
        ]
    }

    /// An expression: are inserts announced, by a trigger of whatever name?
    pub(crate) fn announces(&self) -> String {
        format!("EXISTS (SELECT {} AND {FIRES})", self.found())
    }

    /// A query for what announces inserts, the best first: the name of the trigger, whether it fires, whether its
    /// function is of the table's owner, that function, that owner.
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

/// After each statement that inserts, without a condition.
const EACH_INSERT: &str = "tgtype = 4 AND tgqual IS NULL";

/// Not disabled, nor for replicas alone.
const FIRES: &str = "t.tgenabled IN ('O', 'A')";
