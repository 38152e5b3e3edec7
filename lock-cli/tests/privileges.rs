//! What a role needs of the server for one of the stores, on a real server.
#![allow(clippy::unwrap_used, missing_docs)]

mod support;

use std::time::Duration;

use leasehold::postgres::schema::{self, Stores};
use leasehold::postgres::sqlx::{AssertSqlSafe, raw_sql};
use leasehold::postgres::{DEFAULT_SCHEMA, Identifier};
use leasehold::{ErrorKind, ListQuery, LockExt as _};
use test_servers::Cluster;

const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test(flavor = "multi_thread")]
async fn a_role_that_may_use_one_store_alone_has_all_of_that_one() {
    let locks = Identifier::new(DEFAULT_SCHEMA).unwrap();
    let all = [
        ("postgres", Stores::Advisory, "postgres+row"),
        ("postgres+advisory-xact", Stores::Advisory, "postgres+ttl"),
        ("postgres+row", Stores::Row, "postgres"),
        ("postgres+ttl", Stores::Lease, "postgres+row"),
    ];
    for (scheme, stores, other) in all {
        let database = Cluster::shared().fresh_database().await;
        let role = Identifier::new(format!("only_{}", &database.name()[5..])).unwrap();
        let mut admin = database.connect().await;
        schema::install(&mut admin, &locks).await.unwrap();
        let grants = schema::grants(&locks, &role, stores);
        let setup = format!("CREATE ROLE {} LOGIN; {grants}", role.quoted());
        raw_sql(AssertSqlSafe(setup)).execute(&mut admin).await.unwrap();
        let url = database.url().replacen("//postgres@", &format!("//{}@", role.as_str()), 1);
        let (_, rest) = url.split_once("://").unwrap();

        // With everything there, installing has nothing to do and wants no more.
        let (a, b) = (format!("{scheme}://{rest}?install=true"), format!("{scheme}://{rest}"));
        let (a, b) = (leasehold::connect(&a).await.unwrap(), leasehold::connect(&b).await.unwrap());
        let held = a.key("k").label("why").acquire().await.unwrap();
        assert!(b.key("k").try_acquire().await.unwrap().is_none(), "{scheme}");
        let everything = ListQuery::new();
        let listing = b.admin().unwrap().list(&everything).await.unwrap();
        assert_eq!(listing.len(), 1, "{scheme}: {listing:?}");
        let (waited, released) =
            tokio::join!(b.key("k").wait(PATIENCE).acquire(), async { held.release().await });
        released.unwrap();
        let waited = waited.unwrap();
        let holder = waited.holder();
        if b.capabilities().admin.force_release {
            assert!(a.admin().unwrap().force_release(waited.key(), holder).await.unwrap(), "{scheme}");
        } else {
            waited.release().await.unwrap();
        }

        let error = match leasehold::connect(&format!("{other}://{rest}")).await {
            Ok(lock) => panic!("{scheme}: {lock}"),
            Err(error) => error,
        };
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{other}: {error}");
        a.close().await.unwrap();
        b.close().await.unwrap();
    }
}

/// Whoever may create in a schema of the search path can make an operator that fits better than the server's own, and
/// would have it called with the rights of the administrator who looks.
#[tokio::test(flavor = "multi_thread")]
async fn operators_of_others_are_not_called() {
    let database = Cluster::shared().fresh_database().await;
    let mut admin = database.connect().await;
    let evil = r#"
        CREATE FUNCTION public.evil("char", text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
        CREATE FUNCTION public.evil(oid, regclass) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
        CREATE FUNCTION public.evil(float8, integer) RETURNS float8 LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
        CREATE OPERATOR public.<> (leftarg = "char", rightarg = text, function = public.evil);
        CREATE OPERATOR public.= (leftarg = oid, rightarg = regclass, function = public.evil);
        CREATE OPERATOR public.* (leftarg = float8, rightarg = integer, function = public.evil);
        CREATE TABLE request (id bigint PRIMARY KEY, status text, owner uuid, lease_until timestamptz);
        INSERT INTO request VALUES (1, 'in-progress', gen_random_uuid(), now() + interval '1 minute')"#;
    raw_sql(evil).execute(&mut admin).await.unwrap();
    let (_, rest) = database.url().split_once("://").unwrap();
    let mut open = database.connect().await;
    raw_sql("BEGIN; SELECT FROM request FOR UPDATE").execute(&mut open).await.unwrap();
    for arguments in ["schema apply", "check", "claims request"] {
        let mut tool = support::tool();
        tool.env("LEASEHOLD_URL", database.url()).args(arguments.split_whitespace());
        let (code, stdout, stderr) = support::finish(&mut tool);
        assert_eq!((code, stderr.as_str()), (0, ""), "{arguments}: {stdout}");
    }
    for store in ["postgres", "postgres+advisory-xact", "postgres+row", "postgres+ttl"] {
        let poolers: &[&str] = if store == "postgres" { &["detect"] } else { &["detect", "transaction"] };
        for pooler in poolers {
            let lock = leasehold::connect(&format!("{store}://{rest}?pooler={pooler}")).await.unwrap();
            let guard =
                lock.key("k").acquire().await.unwrap_or_else(|error| panic!("{store} {pooler}: {error}"));
            assert_eq!(
                lock.admin().unwrap().list(&ListQuery::new()).await.unwrap().len(),
                1,
                "{store} {pooler}"
            );
            guard.release().await.unwrap();
            lock.close().await.unwrap();
        }
    }
}
