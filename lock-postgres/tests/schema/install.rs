//! The schema on a real server: concurrent installations, missing privileges, repeated installations.

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::Identifier;
use leasehold_postgres::schema::{self, SchemaState, Stores};
use sqlx::{AssertSqlSafe, PgConnection, Row as _, raw_sql};
use test_servers::sql::{number, run};
use test_servers::{Cluster, ClusterOptions, Standby, fresh_database};

use crate::{drop_role, name, role};

async fn refused(conn: &mut PgConnection, schema: &Identifier) -> Error {
    schema::check(conn, schema).await.unwrap_err()
}

const ODD: [&str; 10] = [
    "leasehold",
    "Upper Case",
    r#"a"; DROP TABLE precious; --"#,
    "it's \\ a $1 {schema} $x$",
    "$$; DROP TABLE precious; DO $$",
    "$user",
    "-- \n;",
    "schlüssel 🔑",
    "/* %I",
    "select",
];

#[tokio::test]
async fn any_name_is_a_name_and_nothing_else() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    run(&mut conn, "CREATE TABLE precious ()").await;
    let long = format!("{}é\"", "x".repeat(60));
    assert_eq!(long.len(), 63);
    for text in ODD.into_iter().chain([long.as_str()]) {
        let schema = name(text);
        assert_eq!(refused(&mut conn, &schema).await.kind(), ErrorKind::SchemaMissing, "{text:?}");
        schema::install(&mut conn, &schema).await.unwrap_or_else(|error| panic!("{text:?}: {error}"));
        schema::check(&mut conn, &schema).await.unwrap_or_else(|error| panic!("{text:?}: {error}"));
        let report = schema::inspect(&mut conn, &schema).await.unwrap();
        let SchemaState::Installed(version) = report.schema else { panic!("{report:?}") };
        assert_eq!((version.version, version.oldest_library), (schema::SCHEMA_VERSION, 1));
        let count = sqlx::query("SELECT count(*) FROM pg_namespace WHERE nspname = $1").bind(text);
        assert_eq!(count.fetch_one(&mut conn).await.unwrap().get::<i64, _>(0), 1, "{text:?}");
    }
    assert_eq!(number(&mut conn, "SELECT count(*) FROM precious").await, 0);
    let schemas = "SELECT count(*) FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname NOT IN ('public', 'information_schema')";
    assert_eq!(number(&mut conn, schemas).await, 11);
}

#[tokio::test]
async fn the_script_is_what_is_installed_and_runs_twice() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let (printed, installed) = (name("by \"script"), name("by install"));
    for _ in 0..2 {
        run(&mut conn, schema::script(&printed, "")).await;
        schema::install(&mut conn, &installed).await.unwrap();
    }
    schema::check(&mut conn, &printed).await.unwrap();
    let shape = |schema: &str| {
        format!(
            "SELECT count(*) FROM (SELECT c.relname, c.relkind::text, c.relpersistence::text, c.reloptions, a.attname, t.typname, t.typbasetype, a.attnotnull, a.attcollation
             FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid LEFT JOIN pg_type t ON t.oid = a.atttypid WHERE c.relnamespace = '\"{schema}\"'::regnamespace"
        )
    };
    let [a, b] = [shape("by \"\"script"), shape("by install")];
    assert!(number(&mut conn, format!("{a}) x")).await > 40);
    assert_eq!(number(&mut conn, format!("{a} EXCEPT {}) x", &b["SELECT count(*) FROM (".len()..])).await, 0);
}

/// Reads only the script, because another access method would need an extension.
#[test]
fn every_table_names_its_access_method() {
    let script = schema::script(&name("leasehold"), "");
    let tables: Vec<_> =
        script.split("\nCREATE ").filter(|part| part.contains("TABLE IF NOT EXISTS")).collect();
    assert_eq!(tables.len(), 8);
    for table in tables {
        let definition = table.split(';').next().unwrap();
        assert!(definition.contains("\n) USING heap"), "{definition}");
    }
}

#[tokio::test]
async fn installing_leaves_no_error_in_the_server_s_log() {
    let cluster = Cluster::start(ClusterOptions::new());
    let database = cluster.fresh_database().await;
    let mut conn = database.connect().await;
    run(
        &mut conn,
        "CREATE SCHEMA empty; CREATE SCHEMA closed; CREATE TABLE closed.version (singleton boolean)",
    )
    .await;
    for schema in ["leasehold", "leasehold", "empty"] {
        schema::inspect(&mut conn, &name(schema)).await.unwrap();
        schema::install(&mut conn, &name(schema)).await.unwrap();
    }
    run(&mut conn, "CREATE ROLE nobody; SET ROLE nobody").await;
    assert_eq!(schema::inspect(&mut conn, &name("closed")).await.unwrap().schema, SchemaState::Unreadable);
    // Provokes a last line of the log, so that all earlier lines are written when it is.
    assert!(raw_sql("RESET ROLE; SELECT 1/0").execute(&mut conn).await.is_err());
    let log = cluster.log();
    let errors: Vec<_> = log.lines().filter(|line| line.contains("ERROR:")).collect();
    assert!(errors.len() == 1 && errors[0].contains("division by zero"), "{log}");
}

#[tokio::test]
async fn an_error_in_somebody_s_event_trigger_is_not_a_fault_of_our_schema() {
    let database = Cluster::shared().fresh_database().await;
    let mut conn = database.connect().await;
    let audit = "CREATE FUNCTION public.audit() RETURNS event_trigger LANGUAGE plpgsql
                 AS 'BEGIN INSERT INTO audit_log VALUES (1); END';
         CREATE EVENT TRIGGER audit ON ddl_command_end EXECUTE FUNCTION public.audit()";
    run(&mut conn, audit).await;
    let error = schema::install(&mut conn, &name("leasehold")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let text = error.to_string();
    assert!(text.contains("audit_log") && text.contains("the function audit(), which"), "{text}");
    assert!(!text.contains("schema apply"), "{text}");
    run(&mut conn, "DROP EVENT TRIGGER audit").await;
    schema::install(&mut conn, &name("leasehold")).await.unwrap();
}

#[tokio::test]
async fn a_row_by_hand_has_a_key_that_the_library_can_read() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let schema = name("leasehold");
    schema::install(&mut conn, &schema).await.unwrap();
    let insert = |bytes: usize| {
        let columns = "(key, acquired, holder, token, acquired_at)";
        format!("INSERT INTO leasehold.mutex {columns} VALUES (repeat('k', {bytes}), true, 'me', 1, now())")
    };
    for bytes in [0, 1025] {
        let refused = raw_sql(AssertSqlSafe(insert(bytes))).execute(&mut conn).await.unwrap_err();
        let code = refused.as_database_error().and_then(sqlx::error::DatabaseError::code);
        assert_eq!(code.as_deref(), Some("23514"), "{bytes} bytes: {refused}");
    }
    for bytes in [1, 1024] {
        run(&mut conn, insert(bytes)).await;
    }
    run(&mut conn, "CREATE SCHEMA other; CREATE TYPE other.lock_key AS (id int)").await;
    let error = schema::install(&mut conn, &name("other")).await.unwrap_err();
    assert!(error.message().contains("\"other\".lock_key is not the type of keys"), "{error}");
}

#[tokio::test]
async fn many_install_at_once_also_beside_somebody_without_our_lock() {
    for round in 0..3 {
        let database = fresh_database().await;
        let schema = name("Shared");
        let barrier = std::sync::Arc::new(tokio::sync::Barrier::new(9));
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let (mut conn, schema, barrier) = (database.connect().await, schema.clone(), barrier.clone());
            tasks.spawn(async move {
                barrier.wait().await;
                schema::install(&mut conn, &schema).await
            });
        }
        let mut foreign = database.connect().await;
        barrier.wait().await;
        // The foreign statement can lose the race, but no installation can fail.
        let _ = raw_sql("CREATE SCHEMA IF NOT EXISTS \"Shared\"").execute(&mut foreign).await;
        for result in tasks.join_all().await {
            result.unwrap_or_else(|error| panic!("round {round}: {error} {error:?}"));
        }
        schema::check(&mut foreign, &schema).await.unwrap();
        assert_eq!(number(&mut foreign, "SELECT count(*) FROM \"Shared\".version").await, 1);
    }
}

#[tokio::test]
async fn losing_the_race_against_a_foreign_transaction_is_no_error() {
    let database = fresh_database().await;
    let (mut foreign, mut conn) = (database.connect().await, database.connect().await);
    run(&mut foreign, "BEGIN; CREATE SCHEMA s").await;
    let schema = name("s");
    let installing = tokio::spawn(async move { schema::install(&mut conn, &schema).await });
    // The installation waits for the foreign transaction, because its commit decides about the name.
    let mut watch = database.connect().await;
    let waiting = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'transactionid'
        AND pid IN (SELECT pid FROM pg_stat_activity WHERE datname = current_database())";
    while number(&mut watch, waiting).await == 0 {
        assert!(!installing.is_finished());
        tokio::task::yield_now().await;
    }
    run(&mut foreign, "COMMIT").await;
    installing.await.unwrap().unwrap();
}

#[tokio::test]
async fn odd_defaults_of_the_database_do_no_harm() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    for setting in [
        "default_transaction_isolation = serializable",
        "default_transaction_read_only = on",
        "default_transaction_deferrable = on",
        "synchronous_commit = off",
        "search_path = nowhere",
        "standard_conforming_strings = off",
        "backslash_quote = off",
        "lock_timeout = '1ms'",
        "idle_in_transaction_session_timeout = '1ms'",
        "client_min_messages = error",
        "quote_all_identifiers = on",
    ] {
        run(&mut conn, format!("ALTER DATABASE {} SET {setting}", database.name())).await;
    }
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let mut conn = database.connect().await;
        tasks.spawn(async move { schema::install(&mut conn, &name(r"o'd\d")).await });
    }
    for result in tasks.join_all().await {
        result.unwrap();
    }
    schema::check(&mut database.connect().await, &name(r"o'd\d")).await.unwrap();
}

#[tokio::test]
async fn a_schema_of_another_version() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let schema = name("leasehold");
    schema::install(&mut conn, &schema).await.unwrap();

    // A newer version that this library can still use, for rolling deployments.
    run(&mut conn, "UPDATE leasehold.version SET version = 7, oldest_library = 1").await;
    schema::check(&mut conn, &schema).await.unwrap();
    schema::install(&mut conn, &schema).await.unwrap();
    run(&mut conn, schema::script(&schema, "")).await;
    assert_eq!(
        number(&mut conn, "SELECT version::bigint FROM leasehold.version").await,
        7,
        "never downgraded"
    );

    run(&mut conn, "UPDATE leasehold.version SET oldest_library = 5; DROP TABLE leasehold.lease").await;
    for error in [refused(&mut conn, &schema).await, schema::install(&mut conn, &schema).await.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::SchemaMissing, "{error}");
    }
    let error = schema::install(&mut conn, &schema).await.unwrap_err();
    assert!(
        error.message().contains("version 7") && error.message().contains("update this program"),
        "{error}"
    );
    let leases = "SELECT count(*) FROM pg_class WHERE relname = 'lease'";
    assert_eq!(number(&mut conn, leases).await, 0, "a newer schema is left as it is");

    run(&mut conn, "UPDATE leasehold.version SET version = 0").await;
    let error = schema::install(&mut conn, &schema).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::SchemaMissing, "{error}");

    run(&mut conn, "DELETE FROM leasehold.version").await;
    assert_eq!(refused(&mut conn, &schema).await.kind(), ErrorKind::SchemaMissing);
}

#[tokio::test]
async fn what_was_removed_is_completed_and_what_was_altered_is_named() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let schema = name("leasehold");
    schema::install(&mut conn, &schema).await.unwrap();
    for object in
        ["version", "incarnation", "mutex", "lease", "mutex_part", "lease_part", "advisory_name", "upkeep"]
    {
        run(&mut conn, format!("DROP TABLE leasehold.{object}")).await;
        let error = refused(&mut conn, &schema).await;
        assert_eq!(error.kind(), ErrorKind::SchemaMissing, "{error}");
        assert!(error.message().contains(&format!("has no {object}")), "{error}");
        schema::install(&mut conn, &schema).await.unwrap();
        schema::check(&mut conn, &schema).await.unwrap();
    }
    for (object, change, back) in [
        ("incarnation", "TABLE leasehold.incarnation SET LOGGED", "TABLE leasehold.incarnation SET UNLOGGED"),
        ("lease", "TABLE leasehold.lease SET UNLOGGED", "TABLE leasehold.lease SET LOGGED"),
        ("mutex", "TABLE leasehold.mutex SET UNLOGGED", "TABLE leasehold.mutex SET LOGGED"),
        (
            "lease",
            "TABLE leasehold.lease DROP CONSTRAINT lease_pkey",
            "TABLE leasehold.lease ADD PRIMARY KEY (key)",
        ),
        ("token", "SEQUENCE leasehold.token CACHE 20", "SEQUENCE leasehold.token CACHE 1"),
        ("token", "SEQUENCE leasehold.token CYCLE", "SEQUENCE leasehold.token NO CYCLE"),
        ("token", "SEQUENCE leasehold.token INCREMENT -1", "SEQUENCE leasehold.token INCREMENT 1"),
    ] {
        run(&mut conn, format!("ALTER {change}")).await;
        let error = refused(&mut conn, &schema).await;
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{change}: {error}");
        assert!(error.message().contains(&format!("altered {object}")), "{change}: {error}");
        assert_eq!(schema::install(&mut conn, &schema).await.unwrap_err().kind(), ErrorKind::Corrupt);
        run(&mut conn, format!("ALTER {back}")).await;
        schema::check(&mut conn, &schema).await.unwrap();
    }
}

#[tokio::test]
async fn a_column_that_has_another_name_is_noticed() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let schema = name("leasehold");
    schema::install(&mut conn, &schema).await.unwrap();
    let columns = "SELECT table_name::text, column_name::text FROM information_schema.columns
        WHERE table_schema = 'leasehold' AND column_name <> 'singleton'";
    let columns: Vec<(String, String)> = sqlx::query_as(columns).fetch_all(&mut conn).await.unwrap();
    assert!(columns.len() > 30, "{columns:?}");
    for (table, column) in columns {
        run(&mut conn, format!("ALTER TABLE leasehold.{table} RENAME {column} TO other")).await;
        let error = refused(&mut conn, &schema).await;
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{table}.{column}: {error}");
        assert!(error.message().contains(&format!("altered {table}")), "{table}.{column}: {error}");
        assert_eq!(schema::install(&mut conn, &schema).await.unwrap_err().kind(), ErrorKind::Corrupt);
        run(&mut conn, format!("ALTER TABLE leasehold.{table} RENAME other TO {column}")).await;
    }
    schema::check(&mut conn, &schema).await.unwrap();
}

#[tokio::test]
async fn a_sequence_made_again_goes_on_above_what_was_given_out() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let schema = name("leasehold");
    schema::install(&mut conn, &schema).await.unwrap();
    let first = number(&mut conn, "SELECT last_value FROM leasehold.token").await;
    schema::install(&mut conn, &schema).await.unwrap();
    assert_eq!(number(&mut conn, "SELECT last_value FROM leasehold.token").await, first);

    // Numbers ahead of the clock. The table of names stores tokens as granted, with room for local grants.
    let far = 1_i64 << 52;
    let told = (far + 7) << 10;
    run(
        &mut conn,
        format!("INSERT INTO leasehold.lease (key, holder, token, acquired_at, ttl_us, expires_at) VALUES ('k', 'h', {far}, now(), 1, now()); INSERT INTO leasehold.advisory_name (space, number, key, pid, holder, token, granted_at) VALUES (1, 1, 'k', 1, 'h', {told}, now()); DROP SEQUENCE leasehold.token"),
    )
    .await;
    schema::install(&mut conn, &schema).await.unwrap();
    assert_eq!(number(&mut conn, "SELECT nextval('leasehold.token')").await, far + 8);

    run(&mut conn, "DROP SCHEMA leasehold CASCADE").await;
    schema::install(&mut conn, &schema).await.unwrap();
    assert!(number(&mut conn, "SELECT nextval('leasehold.token')").await > first, "by the clock");
}

#[tokio::test]
async fn least_privileges_are_enough_and_each_that_is_missing_is_named() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let schema = name("Locks\"");
    let role = role(&mut conn, &database).await;
    schema::install(&mut conn, &schema).await.unwrap();
    let grants = schema::grants(&schema, &role, Stores::All);
    let as_role = format!("SET ROLE {}", role.quoted());

    run(&mut conn, as_role.clone()).await;
    let report = schema::inspect(&mut conn, &schema).await.unwrap();
    assert_eq!((report.role.as_str(), report.schema), (role.as_str(), SchemaState::Unreadable));
    let error = refused(&mut conn, &schema).await;
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert_eq!(schema::install(&mut conn, &schema).await.unwrap_err().kind(), ErrorKind::PermissionDenied);
    // The statements in the report are exactly the missing grants.
    let said = report.missing_grants(&schema).join("\n");
    run(&mut conn, format!("RESET ROLE; {said}; {as_role}")).await;
    schema::check(&mut conn, &schema).await.unwrap();

    run(
        &mut conn,
        format!("RESET ROLE; {}; {as_role}", said.replace("GRANT", "REVOKE").replace(" TO ", " FROM ")),
    )
    .await;
    assert_eq!(refused(&mut conn, &schema).await.kind(), ErrorKind::PermissionDenied);
    run(&mut conn, format!("RESET ROLE; {grants} {as_role}")).await;
    schema::check(&mut conn, &schema).await.unwrap();
    schema::install(&mut conn, &schema).await.expect("nothing to create");
    leasehold_postgres::token::mark_incarnation(&mut conn, &schema).await.unwrap();
    let s = schema.quoted();
    for sql in [
        format!("SELECT nextval(t.tableoid::regclass) FROM {s}.token t"),
        format!(
            "INSERT INTO {s}.lease (key, holder, token, acquired_at, ttl_us, expires_at) VALUES ('k', 'h', 1, now(), 1, now()) ON CONFLICT (key) DO UPDATE SET key = excluded.key"
        ),
        format!("SELECT 1 FROM {s}.lease WHERE key = 'k' FOR KEY SHARE"),
        format!("DELETE FROM {s}.lease WHERE key IN (SELECT key FROM {s}.lease FOR UPDATE SKIP LOCKED)"),
        format!(
            "INSERT INTO {s}.mutex (key, acquired, holder, token, acquired_at) VALUES ('k', true, 'h', 1, now()) ON CONFLICT (key) DO UPDATE SET acquired = true"
        ),
        format!("UPDATE {s}.mutex SET acquired = false WHERE key = 'k'"),
        format!("DELETE FROM {s}.mutex"),
        format!(
            "INSERT INTO {s}.advisory_name (number, space, key, pid, holder, token, granted_at) VALUES (1, 1, 'k', 1, 'h', 1, now()) ON CONFLICT (space, number) DO UPDATE SET pid = 2"
        ),
        format!("DELETE FROM {s}.advisory_name WHERE number = (SELECT number FROM {s}.advisory_name)"),
    ] {
        run(&mut conn, sql).await;
    }

    for grant in said.lines() {
        let revoke = grant.replacen("GRANT", "REVOKE", 1).replacen(" TO ", " FROM ", 1);
        run(&mut conn, format!("RESET ROLE; {revoke}; {as_role}")).await;
        for error in
            [refused(&mut conn, &schema).await, schema::install(&mut conn, &schema).await.unwrap_err()]
        {
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{grant}: {error}");
            assert!(error.message().contains(grant), "{grant}: {error}");
        }
        run(&mut conn, format!("RESET ROLE; {grant}; {as_role}")).await;
    }
    assert_eq!(said.lines().count(), 29);
    drop_role(&mut conn, &role).await;
}

#[tokio::test]
async fn who_may_not_create_is_told_so() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let role = role(&mut conn, &database).await;
    let schema = name("mine");
    run(&mut conn, format!("SET ROLE {}", role.quoted())).await;
    let error = schema::install(&mut conn, &schema).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    // The error's source has the server's message without its line of source code.
    let source = std::error::Error::source(&error).unwrap();
    assert!(source.to_string().starts_with("permission denied for database "), "{source}");
    assert!(!source.to_string().contains(" at line ") && source.source().is_none(), "{source:?}");
    let driver = source.downcast_ref::<leasehold_postgres::DriverError>().unwrap().get();
    assert_eq!(leasehold_postgres::sqlstate(driver).as_deref(), Some("42501"));
    // The connection is unchanged, and a schema created by an administrator suffices.
    run(&mut conn, format!("RESET ROLE; CREATE SCHEMA mine AUTHORIZATION {0}; SET ROLE {0}", role.quoted()))
        .await;
    schema::install(&mut conn, &schema).await.unwrap();
    schema::check(&mut conn, &schema).await.unwrap();
    drop_role(&mut conn, &role).await;
}

#[tokio::test]
async fn only_utf8_will_do() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let latin = format!("{}_latin", database.name());
    run(
        &mut conn,
        format!("CREATE DATABASE {latin} ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0"),
    )
    .await;
    let options: sqlx::postgres::PgConnectOptions = database.url().parse().unwrap();
    let mut other = sqlx::ConnectOptions::connect(&options.database(&latin)).await.unwrap();
    let schema = name("leasehold");
    for error in [
        schema::install(&mut other, &schema).await.unwrap_err(),
        schema::check(&mut other, &schema).await.unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
        assert!(error.message().contains("LATIN1") && error.message().contains("UTF8"), "{error}");
    }
    sqlx::Connection::close(other).await.unwrap();
    run(&mut conn, format!("DROP DATABASE {latin}")).await;
}

/// `docs/hazards.md` H10.
#[tokio::test]
async fn a_standby_is_refused() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let schema = name("leasehold");
    schema::install(&mut database.connect().await, &schema).await.unwrap();
    let standby = Standby::of(cluster).await;
    standby.wait_for_replay(cluster).await;
    let url = standby.url(database.name());
    let mut conn = <PgConnection as sqlx::Connection>::connect(&url).await.unwrap();
    let report = schema::inspect(&mut conn, &schema).await.unwrap();
    assert!(report.in_recovery && report.missing_privileges.is_empty(), "{report:?}");
    for error in [refused(&mut conn, &schema).await, schema::install(&mut conn, &schema).await.unwrap_err()] {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert!(error.message().contains("connect to the primary"), "{error}");
    }
}
