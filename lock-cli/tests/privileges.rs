//! What a role needs of the server for one of the stores, on a real server.
#![allow(clippy::unwrap_used, missing_docs)]

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
