//! The schema and other roles: ownership, installation and use.

use leasehold_api::ErrorKind;
use leasehold_postgres::schema::{self, Access, Stores};
use leasehold_postgres::{Identifier, PgConfig};
use sqlx::{AssertSqlSafe, raw_sql};
use test_servers::sql::{number, run};
use test_servers::{Cluster, ClusterOptions, fresh_database};

use crate::{drop_role, name, role};

/// The script works for an owner of the schema who cannot create others, and in a database that is read-only by
/// default.
#[tokio::test]
async fn the_script_needs_no_more_than_the_schema_and_is_done_as_a_whole() {
    let database = fresh_database().await;
    let mut admin = database.connect().await;
    let (owner, app) =
        (role(&mut admin, &database).await, name(&format!("App of {}", &database.name()[..20])));
    let schema = name("locks");
    run(&mut admin, format!("CREATE SCHEMA locks AUTHORIZATION {}", owner.quoted())).await;
    let mut conn = database.connect().await;
    run(&mut conn, format!("SET ROLE {}", owner.quoted())).await;
    run(&mut conn, "SET default_transaction_read_only = on").await;
    let script = schema::script(&schema, &schema::grants(&schema, &app, Stores::All));
    assert!(raw_sql(AssertSqlSafe(script.clone())).execute(&mut conn).await.is_err(), "no such role");
    run(&mut conn, "ROLLBACK").await;
    let tables = "SELECT count(*) FROM pg_class WHERE relnamespace = 'locks'::regnamespace";
    assert_eq!(number(&mut conn, tables).await, 0);
    run(&mut admin, format!("CREATE ROLE {}", app.quoted())).await;
    for _ in 0..2 {
        run(&mut conn, script.clone()).await;
    }
    run(&mut admin, format!("SET ROLE {}", app.quoted())).await;
    schema::check(&mut admin, &schema).await.unwrap();
    drop_role(&mut admin, &app).await;
    drop_role(&mut admin, &owner).await;
}

#[tokio::test]
async fn a_schema_that_is_there_is_looked_at_once() {
    let cluster = Cluster::start(ClusterOptions::new().setting("log_statement", "all"));
    let database = cluster.fresh_database().await;
    let config = PgConfig::from_url(database.url()).unwrap().install_schema(true);
    let mut conn = database.connect().await;
    for looks in [2, 3] {
        assert_eq!(config.prepare(&mut conn, Stores::Row).await.unwrap(), Access::Full);
        assert_eq!(cluster.log().matches("WITH wanted(object").count(), looks);
    }
    // Ownership is checked for superusers only.
    let asked = || cluster.log().matches("SELECT o.who").count();
    let before = asked();
    config.prepare(&mut conn, Stores::Row).await.unwrap();
    assert_eq!(asked(), before + 1);
    let grants = schema::grants(&name("leasehold"), &name("app"), Stores::Row);
    run(&mut conn, format!("CREATE ROLE app; {grants} SET ROLE app")).await;
    config.prepare(&mut conn, Stores::Row).await.unwrap();
    assert_eq!(asked(), before + 1);
}

/// Existing objects of another role are refused, as in CVE-2022-2625, because a superuser would run their triggers.
#[tokio::test]
async fn a_superuser_installs_into_nobody_else_s_schema() {
    let database = fresh_database().await;
    let mut admin = database.connect().await;
    let other = role(&mut admin, &database).await;
    run(
        &mut admin,
        format!(
            "CREATE SCHEMA theirs AUTHORIZATION {0}; CREATE SCHEMA ours; GRANT ALL ON SCHEMA ours TO {0}",
            other.quoted()
        ),
    )
    .await;
    run(&mut admin, format!("SET ROLE {}", other.quoted())).await;
    let trap =
        "CREATE FUNCTION ours.trap() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''sprung''; END'";
    run(&mut admin, format!("{trap}; {}", trap.replace("ours.", "theirs."))).await;
    run(&mut admin, "CREATE TABLE theirs.version (singleton boolean PRIMARY KEY DEFAULT true, version int, oldest_library int); \
        CREATE TRIGGER trap BEFORE INSERT ON theirs.version FOR EACH ROW EXECUTE FUNCTION theirs.trap()").await;
    run(&mut admin, "CREATE TABLE ours.mutex (n int)").await;
    run(&mut admin, "RESET ROLE").await;
    for schema in ["theirs", "ours"] {
        let refused = schema::install(&mut admin, &name(schema)).await.unwrap_err().to_string();
        assert!(
            refused.contains("belongs to the role") && refused.contains(&other.quoted()),
            "{schema}: {refused}"
        );
        let script = schema::script(&name(schema), "");
        let refused = raw_sql(AssertSqlSafe(script)).execute(&mut admin).await.unwrap_err().to_string();
        assert!(refused.contains("belongs to the role"), "{schema}: {refused}");
        run(&mut admin, "ROLLBACK").await;
    }
    // Other tables of another role in the same schema do not matter.
    run(&mut admin, format!("GRANT CREATE ON SCHEMA public TO {0}; SET ROLE {0}", other.quoted())).await;
    run(&mut admin, "CREATE TABLE public.entry (n int)").await;
    run(&mut admin, "RESET ROLE").await;
    schema::install(&mut admin, &name("public")).await.unwrap();
    drop_role(&mut admin, &other).await;
}

/// `ALTER DEFAULT PRIVILEGES` adds grants to each new table. The installation revokes the dangerous ones.
#[tokio::test]
async fn default_privileges_keep_no_superuser_from_installing() {
    let database = fresh_database().await;
    let mut admin = database.connect().await;
    let other = role(&mut admin, &database).await;
    run(&mut admin, format!("ALTER DEFAULT PRIVILEGES GRANT ALL ON TABLES TO {}, PUBLIC", other.quoted()))
        .await;
    let (installed, printed) = (name("by install"), name("by \"script'"));
    schema::install(&mut admin, &installed).await.unwrap();
    run(&mut admin, schema::script(&printed, "")).await;
    let may = |schema: &Identifier, privilege: &str| {
        format!(
            "SELECT count(*) FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace, pg_roles r
             WHERE n.nspname = $x${}$x$ AND c.relkind = 'r' AND r.rolname = $x${}$x$
               AND has_table_privilege(r.oid, c.oid, '{privilege}')",
            schema.as_str(),
            other.as_str()
        )
    };
    for schema in [&installed, &printed] {
        schema::check(&mut admin, schema).await.unwrap();
        for (privilege, tables) in [("TRIGGER", 0), ("REFERENCES", 0), ("SELECT", 8)] {
            assert_eq!(number(&mut admin, may(schema, privilege)).await, tables, "{schema:?} {privilege}");
        }
    }
    // On an existing table the privilege might be granted on purpose, so it stays. Without superuser rights it is no
    // reason for a refusal.
    let owner = format!("GRANT CREATE ON DATABASE {} TO {1}; SET ROLE {1}", database.name(), other.quoted());
    run(&mut admin, owner).await;
    schema::install(&mut admin, &name("theirs")).await.unwrap();
    run(&mut admin, "GRANT TRIGGER ON theirs.mutex TO PUBLIC; DROP TABLE theirs.upkeep").await;
    schema::install(&mut admin, &name("theirs")).await.unwrap();
    let kept = "SELECT count(*) FROM pg_class c, aclexplode(c.relacl) a
        WHERE c.relnamespace = 'theirs'::regnamespace AND a.grantee = 0 AND a.privilege_type = 'TRIGGER'";
    assert_eq!(number(&mut admin, kept).await, 1);
    run(&mut admin, "RESET ROLE").await;
    drop_role(&mut admin, &other).await;
}

/// A role with CREATE on the schema can create objects between the check of owners and their first use.
#[tokio::test]
async fn what_another_role_creates_during_an_installation_is_not_used() {
    let database = fresh_database().await;
    let mut admin = database.connect().await;
    let other = role(&mut admin, &database).await;
    run(&mut admin, format!("CREATE SCHEMA ours; GRANT ALL ON SCHEMA ours TO {0}", other.quoted())).await;
    // Another role creates the last object just before the script does.
    let script = schema::script(&name("ours"), "");
    let theirs = format!(
        "SET LOCAL ROLE {0}; CREATE TABLE ours.upkeep (task text PRIMARY KEY, after text, begun_at timestamptz, next_at timestamptz);
         CREATE FUNCTION ours.trap() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RAISE ''sprung''; END';
         CREATE TRIGGER trap BEFORE INSERT ON ours.upkeep FOR EACH ROW EXECUTE FUNCTION ours.trap();
         RESET ROLE;\n",
        other.quoted()
    );
    let last = script.find("CREATE TABLE IF NOT EXISTS \"ours\".upkeep").unwrap();
    let raced = [&script[..last], &theirs, &script[last..]].concat();
    let refused = raw_sql(AssertSqlSafe(raced)).execute(&mut admin).await.unwrap_err().to_string();
    assert!(refused.contains("belongs to the role"), "{refused}");
    run(&mut admin, "ROLLBACK").await;
    drop_role(&mut admin, &other).await;
}

/// A dump of only the schema lacks the row with the version. Concurrent grants run one after the other.
#[tokio::test]
async fn a_lost_version_is_written_again_and_grants_may_meet() {
    let database = fresh_database().await;
    let mut admin = database.connect().await;
    let (schema, app) = (name("leasehold"), role(&mut admin, &database).await);
    schema::install(&mut admin, &schema).await.unwrap();
    run(&mut admin, "DELETE FROM leasehold.version").await;
    schema::install(&mut admin, &schema).await.unwrap();
    let grants = schema::grants(&schema, &app, Stores::All);
    let all = (0..12).map(|_| async {
        let mut conn = database.connect().await;
        schema::grant(&mut conn, &schema, &grants).await.unwrap();
    });
    futures_util::future::join_all(all).await;
    run(&mut admin, format!("SET ROLE {}", app.quoted())).await;
    schema::check(&mut admin, &schema).await.unwrap();
    // A role that can use the schema cannot grant it. The server alone would only warn and grant nothing.
    let refused = schema::grant(&mut admin, &schema, &grants).await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
    assert!(refused.message().contains("as its owner postgres"), "{refused}");
    drop_role(&mut admin, &app).await;
}

/// Rows hidden by a policy would read as free. The table's owner sees all rows, so it is not refused.
#[tokio::test]
async fn policies_that_may_hide_rows_are_refused() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let schema = name("leasehold");
    schema::install(&mut conn, &schema).await.unwrap();
    let role = role(&mut conn, &database).await;
    run(&mut conn, schema::grants_to_read(&schema, &role)).await;
    run(&mut conn, "ALTER TABLE leasehold.lease ENABLE ROW LEVEL SECURITY").await;
    schema::check(&mut conn, &schema).await.unwrap();
    run(&mut conn, format!("SET ROLE {}", role.quoted())).await;
    let error = schema::access(&mut conn, &schema, Stores::All).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(
        error.message().contains("altered lease") && error.message().contains("row-level security"),
        "{error}"
    );
    let access = schema::access(&mut conn, &schema, Stores::Row).await.unwrap();
    assert_eq!(access, Access::ReadOnly, "rows of another store");
    drop_role(&mut conn, &role).await;
}
