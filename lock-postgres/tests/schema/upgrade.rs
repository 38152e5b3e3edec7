//! A schema installed by an older version, roles that can only read, and comments on objects.

use leasehold_api::ErrorKind;
use leasehold_postgres::Identifier;
use leasehold_postgres::schema::{self, Access, SchemaState, Stores};
use sqlx::PgConnection;
use test_servers::fresh_database;
use test_servers::sql::{number, run};

use crate::name;

/// The exact objects of version 1. `{schema}` is the quoted name.
const VERSION_1: &str = include_str!("version_1.sql");

async fn install_version_1(conn: &mut PgConnection, schema: &Identifier) {
    let objects = VERSION_1.replace("{schema}", &schema.quoted());
    let quoted = schema.quoted();
    run(
        &mut *conn,
        format!("CREATE SCHEMA {quoted}; SET search_path = pg_catalog; {objects}; RESET search_path"),
    )
    .await;
}

async fn version(conn: &mut PgConnection, schema: &Identifier) -> (i32, i32) {
    match schema::inspect(conn, schema).await.unwrap().schema {
        SchemaState::Installed(version) => (version.version, version.oldest_library),
        other => panic!("{other:?}"),
    }
}

/// Returns a query for all objects and columns of a schema.
fn shape(schema: &str) -> String {
    format!(
        "SELECT c.relname, c.relkind::text, c.relpersistence::text, c.reloptions, a.attname, t.typname, a.attnotnull,
            a.atthasdef FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid LEFT JOIN pg_type t ON t.oid = a.atttypid
         WHERE c.relnamespace = '\"{schema}\"'::regnamespace"
    )
}

#[tokio::test]
async fn an_old_installation_is_upgraded_and_keeps_what_it_has() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    for by_script in [false, true] {
        let schema = name(if by_script { "by 'script" } else { "by install" });
        install_version_1(&mut conn, &schema).await;
        let s = schema.quoted();
        let held = "(key, holder, token, acquired_at, ttl_us, expires_at) VALUES ('k', 'me', 7, now(), 1, 'infinity')";
        run(
            &mut conn,
            format!(
                "INSERT INTO {s}.lease {held}; SELECT setval('\"{}\".token', 99)",
                schema.as_str().replace('\'', "''")
            ),
        )
        .await;
        assert_eq!(version(&mut conn, &schema).await, (1, 1));
        let error = schema::check(&mut conn, &schema).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::SchemaMissing, "{error}");
        assert!(
            error.message().contains("version 1") && error.message().contains("leasehold schema apply"),
            "{error}"
        );

        // During an open transaction of a program of the old version.
        let mut program = database.connect().await;
        run(&mut program, format!("UPDATE {s}.lease SET ttl_us = 2")).await;
        run(&mut program, format!("BEGIN; DELETE FROM {s}.advisory_name")).await;
        for _ in 0..2 {
            match by_script {
                true => run(&mut conn, schema::script(&schema, "")).await,
                false => schema::install(&mut conn, &schema).await.unwrap(),
            }
            schema::check(&mut conn, &schema).await.unwrap();
            assert_eq!(
                version(&mut conn, &schema).await,
                (schema::SCHEMA_VERSION, 1),
                "the old one may go on"
            );
        }
        run(&mut program, "COMMIT").await;
        assert_eq!(number(&mut conn, format!("SELECT ttl_us FROM {s}.lease WHERE key = 'k'")).await, 2);
        assert_eq!(number(&mut conn, format!("SELECT last_value FROM {s}.token")).await, 99);
        assert_eq!(number(&mut conn, format!("SELECT count(*) FROM {s}.upkeep")).await, 3);
    }

    // Objects of the old version are unchanged, and new ones need nothing from old programs.
    install_version_1(&mut conn, &name("old")).await;
    let (old, new) = (shape("old"), shape("by install"));
    assert!(number(&mut conn, format!("SELECT count(*) FROM ({old}) x")).await > 40);
    assert_eq!(number(&mut conn, format!("SELECT count(*) FROM ({old} EXCEPT {new}) x")).await, 0);
    // An upgraded schema equals a new one.
    schema::install(&mut conn, &name("new")).await.unwrap();
    let (upgraded, fresh) = (shape("by install"), shape("new"));
    assert_eq!(number(&mut conn, format!("SELECT count(*) FROM ({fresh} EXCEPT {upgraded}) x")).await, 0);
    assert_eq!(number(&mut conn, format!("SELECT count(*) FROM ({upgraded} EXCEPT {fresh}) x")).await, 0);
}

#[tokio::test]
async fn a_change_that_has_to_wait_holds_up_nobody_for_long_and_is_tried_again() {
    let database = fresh_database().await;
    let (mut conn, mut program) = (database.connect().await, database.connect().await);
    let schema = name("leasehold");
    install_version_1(&mut conn, &schema).await;
    // A row of the table is written, so the installation's new column waits.
    run(&mut program, "BEGIN; UPDATE leasehold.lease SET ttl_us = 2").await;
    let mut other = database.connect().await;
    let installing = tokio::spawn(async move { schema::install(&mut other, &name("leasehold")).await });
    let refused =
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'leasehold.lease'::regclass";
    // The installation waits, gives up, and waits again.
    for waiting in [1, 0, 1] {
        while number(&mut conn, refused).await != waiting {
            assert!(!installing.is_finished());
            tokio::task::yield_now().await;
        }
    }
    run(&mut program, "COMMIT").await;
    installing.await.unwrap().unwrap();
    schema::check(&mut conn, &schema).await.unwrap();
}

#[tokio::test]
async fn every_object_says_what_it_is() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    schema::install(&mut conn, &name("it's mine")).await.unwrap();
    let objects = "SELECT count(*) FROM pg_class c WHERE c.relnamespace = '\"it''s mine\"'::regnamespace
        AND c.relkind IN ('r', 'S', 'i')";
    assert!(number(&mut conn, objects).await >= 17);
    let silent =
        format!("{objects} AND coalesce(obj_description(c.oid, 'pg_class'), '') NOT LIKE 'leasehold: %'");
    assert_eq!(number(&mut conn, silent).await, 0);
    let domain = "SELECT count(*) FROM pg_type t WHERE t.typname = 'lock_key' AND obj_description(t.oid, 'pg_type') LIKE 'leasehold: %'";
    assert_eq!(number(&mut conn, domain).await, 1);
}

#[tokio::test]
async fn who_may_look_is_told_apart_from_who_lacks_something() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let schema = name("leasehold");
    schema::install(&mut conn, &schema).await.unwrap();
    let role = name(&format!("reader of {}", &database.name()[..20]));
    let grants = schema::grants_to_read(&schema, &role);
    assert!(
        !grants.contains("UPDATE") && !grants.contains("INSERT") && !grants.contains("DELETE"),
        "{grants}"
    );
    run(&mut conn, format!("CREATE ROLE {0}; {grants}; SET ROLE {0}", role.quoted())).await;
    for stores in [Stores::All, Stores::Advisory, Stores::Row, Stores::Lease] {
        assert_eq!(schema::access(&mut conn, &schema, stores).await.unwrap(), Access::ReadOnly, "{stores:?}");
    }
    let error = schema::check(&mut conn, &schema).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "it cannot take locks: {error}");
    // One privilege more or less is an error, and not read-only access.
    for (change, back) in [
        ("GRANT UPDATE ON leasehold.lease TO", "REVOKE UPDATE ON leasehold.lease FROM"),
        ("REVOKE SELECT ON leasehold.lease FROM", "GRANT SELECT ON leasehold.lease TO"),
    ] {
        run(&mut conn, format!("RESET ROLE; {change} {0}; SET ROLE {0}", role.quoted())).await;
        let error = schema::access(&mut conn, &schema, Stores::Lease).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{change}: {error}");
        run(&mut conn, format!("RESET ROLE; {back} {0}; SET ROLE {0}", role.quoted())).await;
    }
    assert_eq!(schema::access(&mut conn, &schema, Stores::All).await.unwrap(), Access::ReadOnly);
    run(&mut conn, format!("RESET ROLE; DROP OWNED BY {0}; DROP ROLE {0}", role.quoted())).await;
}

#[tokio::test]
async fn a_store_needs_the_privileges_of_its_own_objects_and_no_others() {
    let database = fresh_database().await;
    let mut conn = database.connect().await;
    let schema = name("leasehold");
    schema::install(&mut conn, &schema).await.unwrap();
    let role = name(&format!("user of {}", &database.name()[..20]));
    run(&mut conn, format!("CREATE ROLE {}", role.quoted())).await;
    let tables = [(Stores::Advisory, "advisory_name"), (Stores::Row, "mutex"), (Stores::Lease, "lease")];
    for (stores, table) in tables {
        let grants = schema::grants(&schema, &role, stores);
        for (_, object) in tables {
            assert_eq!(grants.contains(&format!(".{object} ")), object == table, "{stores:?}: {grants}");
        }
        run(&mut conn, format!("{grants} SET ROLE {}", role.quoted())).await;
        assert_eq!(schema::access(&mut conn, &schema, stores).await.unwrap(), Access::Full, "{stores:?}");
        for (other, object) in tables.into_iter().filter(|(other, _)| *other != stores) {
            let error = schema::access(&mut conn, &schema, other).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{stores:?} as {other:?}: {error}");
            let names = |object: &str| error.message().contains(&format!(".{object} "));
            assert!(names(object) && !names(table), "{error}");
        }
        let error = schema::check(&mut conn, &schema).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{stores:?}: {error}");
        run(&mut conn, format!("RESET ROLE; DROP OWNED BY {}", role.quoted())).await;
    }
    run(&mut conn, format!("DROP ROLE {}", role.quoted())).await;
}
