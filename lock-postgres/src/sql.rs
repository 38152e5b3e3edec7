//! The statements of this crate.

use std::sync::Arc;

use crate::ident::Identifier;

/// A round trip without an effect.
pub(crate) const PING: &str = "SELECT 1";

pub(crate) const BEGIN: &str = "BEGIN";
pub(crate) const ROLLBACK: &str = "ROLLBACK";

/// Returns the server's process id behind this connection.
pub(crate) const BACKEND_PID: &str = "SELECT pg_catalog.pg_backend_pid()";

/// Returns whether the server is a standby, and whether transactions are read-only by default.
pub(crate) const IS_READ_ONLY: &str = "SELECT pg_catalog.pg_is_in_recovery(), pg_catalog.current_setting('default_transaction_read_only')::pg_catalog.bool";

/// The setting that makes the server check during a statement whether its client is still connected. Not
/// every operating system supports it.
pub(crate) const CHECK_CLIENT: &str = "client_connection_check_interval";

/// Sets parameters (`$1`, names) to values (`$2`) for the session. Parameters unknown to this server version are
/// skipped.
pub(crate) const CONFIGURE: &str = "\
SELECT pg_catalog.set_config(s.name, s.value, false)
FROM unnest($1::pg_catalog.text[], $2::pg_catalog.text[]) AS s (name, value)
WHERE pg_catalog.current_setting(s.name, true) IS NOT NULL";

/// Creates a missing schema within a transaction. `CREATE SCHEMA IF NOT EXISTS` is not used because it needs the
/// privilege even if the schema exists. The name is passed in a setting because it can contain the block's delimiter.
const CREATE_SCHEMA: &str = "\
SELECT set_config('leasehold.schema', E'{schema}', true);
DO $leasehold$
DECLARE
    name CONSTANT text := current_setting('leasehold.schema');
BEGIN
    IF to_regnamespace(name) IS NULL THEN
        EXECUTE 'CREATE SCHEMA ' || name;
    END IF;
END
$leasehold$;
";

/// For a superuser: finds a role, not a superuser, that could run code with the superuser's rights through the schema
/// with the oid `{kept}`.
/// - the owner of the schema or of an object in it
/// - a role that can create triggers or foreign keys there, because foreign keys delete and update by triggers
/// - the author of a trigger with a condition, or whose function no superuser owns, or of a foreign key (as in
///   CVE-2022-2625, `docs/hazards.md` H57)
///
/// Objects of other names, for example in `public`, are not used.
///
/// The role `pg_database_owner`, which owns `public`, stands for the owner of the database.
const FOREIGN_OWNER: &str = "\
SELECT o.who FROM (
    SELECT r.rolname::text AS who FROM pg_catalog.pg_roles r
    WHERE NOT r.rolsuper AND r.oid IN (
        SELECT CASE WHEN d.rolname = 'pg_database_owner' THEN b.datdba ELSE d.oid END
        FROM (
            SELECT n.nspowner AS oid FROM pg_catalog.pg_namespace n WHERE n.oid = {kept}
            UNION ALL SELECT c.relowner FROM pg_catalog.pg_class c WHERE c.relnamespace = {kept} AND c.relname IN ({ours})
            UNION ALL SELECT t.typowner FROM pg_catalog.pg_type t WHERE t.typnamespace = {kept} AND t.typname = 'lock_key'
            UNION ALL SELECT p.proowner FROM pg_catalog.pg_proc p
                WHERE p.pronamespace = {kept} AND p.proname = 'idempotency_finished'
        ) w
        JOIN pg_catalog.pg_roles d ON d.oid = w.oid
        JOIN pg_catalog.pg_database b ON b.datname = pg_catalog.current_database())
    UNION ALL SELECT coalesce((SELECT r.rolname::text FROM pg_catalog.pg_roles r WHERE r.oid = a.grantee), 'public')
    FROM (
        SELECT c.relacl AS acl FROM pg_catalog.pg_class c WHERE c.relnamespace = {kept} AND c.relname IN ({ours})
        UNION ALL SELECT t.attacl FROM pg_catalog.pg_class c JOIN pg_catalog.pg_attribute t ON t.attrelid = c.oid
        WHERE c.relnamespace = {kept} AND c.relname IN ({ours})
    ) g, LATERAL pg_catalog.aclexplode(g.acl) a
    WHERE a.privilege_type IN ('TRIGGER', 'REFERENCES')
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.oid = a.grantee AND r.rolsuper)
    UNION ALL SELECT pg_catalog.concat('whoever made the trigger ', g.tgname) FROM pg_catalog.pg_trigger g
    JOIN pg_catalog.pg_class c ON c.oid = g.tgrelid JOIN pg_catalog.pg_proc f ON f.oid = g.tgfoid
    WHERE NOT g.tgisinternal AND c.relnamespace = {kept} AND c.relname IN ({ours})
        AND NOT (f.pronamespace = {kept} AND f.proname = 'idempotency_finished')
        AND (g.tgqual IS NOT NULL OR NOT EXISTS (
            SELECT FROM pg_catalog.pg_roles r WHERE r.oid = f.proowner AND r.rolsuper))
    UNION ALL SELECT pg_catalog.concat('whoever made the foreign key ', k.conname) FROM pg_catalog.pg_constraint k
    JOIN pg_catalog.pg_class c ON c.oid = k.confrelid JOIN pg_catalog.pg_class f ON f.oid = k.conrelid
    WHERE c.relnamespace = {kept} AND c.relname IN ({ours})
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_roles r WHERE r.oid = f.relowner AND r.rolsuper)
) o
WHERE (SELECT me.rolsuper FROM pg_catalog.pg_roles me WHERE me.rolname = current_user)
LIMIT 1";

/// The names of all tables and sequences of the schema, for locks and idempotency keys, as an SQL list.
const OURS: &str = "\
'version', 'token', 'incarnation', 'mutex', 'lease', 'mutex_part', 'lease_part', 'advisory_name', 'upkeep', \
'idempotency', 'journey'";

/// Returns [`FOREIGN_OWNER`] for the schema whose oid is the expression `kept`.
pub(crate) fn foreign_owner(kept: &str) -> String {
    FOREIGN_OWNER.replace("{ours}", OURS).replace("{kept}", kept)
}

/// Refuses a superuser in a schema of another role.
const REFUSE_FOREIGN: &str = "\
DO $leasehold$
DECLARE
    name CONSTANT text := current_setting('leasehold.schema');
    owner CONSTANT text := ({foreign_owner});
BEGIN
    IF owner IS NOT NULL THEN
        RAISE EXCEPTION 'the schema %, or something in it, belongs to the role %, or that role may make triggers or foreign keys there, which would run with the rights of a superuser: install it as its owner, or revoke TRIGGER and REFERENCES', name, quote_ident(owner)
            USING ERRCODE = 'object_not_in_prerequisite_state';
    END IF;
END
$leasehold$;
";

/// Records which of the tables exist already, for [`TAKE_BACK`].
const REMEMBER: &str = "\
SELECT set_config('leasehold.tables', coalesce((
    SELECT string_agg(c.relname, ',') FROM pg_class c
    WHERE c.relnamespace = to_regnamespace(current_setting('leasehold.schema')) AND c.relname IN ({ours})), ''), true);
";

/// Revokes, on tables created since [`REMEMBER`], the privileges from `ALTER DEFAULT PRIVILEGES` that would let other
/// roles run code as the table's user. On older tables the installation is refused instead, because such a grant might
/// be intended.
const TAKE_BACK: &str = "\
DO $leasehold$
DECLARE
    made record;
BEGIN
    FOR made IN
        SELECT DISTINCT c.oid::regclass AS place,
            coalesce((SELECT quote_ident(r.rolname) FROM pg_roles r WHERE r.oid = a.grantee), 'PUBLIC') AS grantee
        FROM pg_class c, LATERAL aclexplode(c.relacl) a
        WHERE c.relnamespace = to_regnamespace(current_setting('leasehold.schema')) AND c.relname IN ({ours})
            AND c.relkind = 'r' AND c.relname <> ALL (string_to_array(current_setting('leasehold.tables'), ','))
            AND pg_get_userbyid(c.relowner) = current_user
            AND a.privilege_type IN ('TRIGGER', 'REFERENCES') AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('REVOKE TRIGGER, REFERENCES ON TABLE %s FROM %s', made.place, made.grantee);
    END LOOP;
END
$leasehold$;
";

/// Returns the statements that create a missing schema, `objects` in it, and then `content`, which first uses the
/// objects. Ownership is checked before the first change and again once the names are taken.
#[must_use]
pub fn installation(schema: &Identifier, objects: &str, content: &str) -> Arc<str> {
    let kept = "to_regnamespace(current_setting('leasehold.schema'))";
    let refuse = REFUSE_FOREIGN.replace("{foreign_owner}", &foreign_owner(kept));
    let (remember, take_back) = (REMEMBER.replace("{ours}", OURS), TAKE_BACK.replace("{ours}", OURS));
    let parts = [CREATE_SCHEMA, &refuse, &remember, "\n", objects, "\n", &take_back, &refuse, "\n", content];
    render(&parts.concat(), schema)
}

/// Refuses a role that does not own the schema and all of `{objects}`, because the server only warns about a GRANT
/// without ownership.
pub(crate) const MAY_GRANT: &str = "\
SELECT set_config('leasehold.schema', E'{schema}', true);
DO $leasehold$
DECLARE
    kept CONSTANT oid := to_regnamespace(current_setting('leasehold.schema'));
    what text;
    owner oid;
BEGIN
    SELECT o.what, o.owner INTO what, owner FROM (
        SELECT 'the schema' AS what, n.nspowner AS owner FROM pg_namespace n WHERE n.oid = kept
        UNION ALL SELECT c.relname, c.relowner FROM pg_class c
            WHERE c.relnamespace = kept AND c.relname IN ({objects})) o
    WHERE NOT pg_has_role(o.owner, 'USAGE') LIMIT 1;
    IF FOUND THEN
        RAISE EXCEPTION '% does not own %: grant privileges as its owner %', current_user, what, pg_get_userbyid(owner)
            USING ERRCODE = 'insufficient_privilege';
    END IF;
END
$leasehold$;
";

/// Returns `template` with each `{schema}` replaced by the quoted schema name, also at the start of a literal, as in
/// `nextval('{schema}.token')`. `E'{schema}'` has the same meaning under every server setting.
#[must_use]
pub fn render(template: &str, schema: &Identifier) -> Arc<str> {
    let quoted = schema.quoted();
    // Doubles single quotes for use inside a literal, because a single quote of the name would end the
    // literal.
    let literal = quoted.replace('\'', "''");
    let escaped = literal.replace('\\', "\\\\");
    let mut parts = template.split("{schema}");
    let mut text = parts.next().unwrap_or_default().to_owned();
    // Replaces in one pass, because the name itself may contain `{schema}`.
    for part in parts {
        text.push_str(match text.as_bytes() {
            [.., b'E', b'\''] => &escaped,
            [.., b'\''] => &literal,
            _ => &quoted,
        });
        text.push_str(part);
    }
    text.into()
}

/// Returns the channel on which the clients of one kind of store in `schema` notify each other. Channels belong to one
/// database. The schema name is hashed because it can be longer than a channel name.
#[must_use]
pub fn channel(kind: &str, schema: &Identifier) -> String {
    let mut hasher = fnv::FnvHasher::default();
    std::hash::Hasher::write(&mut hasher, schema.as_str().as_bytes());
    format!("leasehold_{kind}_{:016x}", std::hash::Hasher::finish(&hasher))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stay_inside_their_quotes() {
        let schema = Identifier::new("a\"b'c").unwrap();
        let text = render("SELECT nextval('{schema}.token') FROM {schema}.lease", &schema);
        assert_eq!(&*text, r#"SELECT nextval('"a""b''c".token') FROM "a""b'c".lease"#);
        let schema = Identifier::new("{schema}'").unwrap();
        let text = render("'{schema}.token' {schema}.lease", &schema);
        assert_eq!(&*text, r#"'"{schema}''".token' "{schema}'".lease"#);
        let schema = Identifier::new(r"a\'b").unwrap();
        assert_eq!(&*render("E'{schema}.token' {schema}", &schema), r#"E'"a\\''b".token' "a\'b""#);
    }
}
