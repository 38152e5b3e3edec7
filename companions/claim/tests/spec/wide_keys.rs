//! Tables whose keys have more columns than the id.

use crate::common::*;
use leasehold_claim::sqlx::PgPool;
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimSpecBuilder, ClaimStore as _, Finding, PgClaims, Table, Take,
};

fn job() -> ClaimSpecBuilder {
    ClaimSpec::builder(Table::new("job").unwrap()).state("status", states()).lease_columns(
        "owner",
        "epoch",
        "lease_until",
    )
}

/// A unique constraint that current rows satisfy by chance could refuse later rows of the application.
#[tokio::test]
async fn no_migration_makes_a_part_of_a_wider_key_unique() {
    let cases = [
        ("PRIMARY KEY (tenant, id)", job(), "tenant, id"),
        ("UNIQUE (id, tenant)", job(), "tenant, id"),
        ("PRIMARY KEY (tenant, id)", job().queue("region"), "tenant, id"),
        ("PRIMARY KEY (tenant, region, id)", job().queue("region"), "tenant, id, region"),
        ("PRIMARY KEY (tenant, id)", job().queue("later"), "tenant, id"),
    ];
    for (key, spec, columns) in cases {
        let (_db, pool) = database().await;
        run(&pool, &format!("CREATE TABLE job (tenant int, id int, region text NOT NULL DEFAULT 'eu', status text NOT NULL \
            DEFAULT 'new', {key}); INSERT INTO job VALUES (1, 1), (2, 2)")).await;
        let spec = spec.build().unwrap();
        let before = (indexes(&pool, "job").await, constraints(&pool, "job").await);
        let error = spec.migration().apply(&pool).await.unwrap_err();
        assert!(
            matches!(&error, ClaimError::InvalidSpec(text) if text.contains(columns) && text.contains("queue")),
            "{key}: {error}"
        );
        assert_eq!((indexes(&pool, "job").await, constraints(&pool, "job").await), before, "{key}");
        assert_eq!(
            text(
                &pool,
                "SELECT count(*)::text FROM pg_attribute WHERE attrelid = 'job'::regclass AND attnum > 0"
            )
            .await,
            "4",
            "{key}: nothing was added to a table that is refused"
        );
        run(&pool, "INSERT INTO job VALUES (3, 1)").await;
        let found = spec.check(&pool).await.unwrap();
        assert_finding(&found, Finding::Error, &["identified by", "queue"]);
        // The printed script also fails there.
        let script = spec.migration().statements();
        assert_eq!(refused(&pool, &script[0]).await, "42P16");
    }
}

/// A unique id suffices, even if a wider index exists, for example for foreign keys.
#[tokio::test]
async fn a_wider_index_beside_a_unique_id_is_no_wider_key() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE TABLE job (id int PRIMARY KEY, tenant int, status text NOT NULL DEFAULT 'new', UNIQUE (tenant, id))").await;
    let spec = job().build().unwrap();
    spec.migration().apply(&pool).await.unwrap();
    assert!(spec.check(&pool).await.unwrap().is_empty());
}

/// For a key of a number and an id, a generated text of the number serves as the queue, as the refusals advise.
#[tokio::test]
async fn a_generated_text_of_the_other_column_serves_as_the_queue() {
    let (_db, pool) = database().await;
    run(
        &pool,
        "CREATE TABLE job (tenant int, id int, status text NOT NULL DEFAULT 'new', PRIMARY KEY (tenant, id))",
    )
    .await;
    let error = job().queue("tenant").build().unwrap().migration().apply(&pool).await.unwrap_err();
    let ClaimError::InvalidSpec(said) = &error else { panic!("{error}") };
    let (_, advice) = said.split_once("ALTER TABLE").unwrap_or_else(|| panic!("{error}"));
    let (advice, _) = advice.split_once(" (which").unwrap();
    run(&pool, &format!("ALTER TABLE{advice}; CREATE UNIQUE INDEX ON job (queue, id)")).await;
    let spec = job().queue("queue").build().unwrap();
    spec.migration().apply(&pool).await.unwrap();
    assert!(spec.check(&pool).await.unwrap().is_empty());
    run(&pool, "INSERT INTO job (tenant, id) VALUES (1, 1), (2, 1)").await;
    let claims = PgClaims::new(pool.clone(), spec);
    let taken = claims.take(&Take::up_to(9)).await.unwrap();
    let keys: Vec<_> = taken.claims.iter().map(|claimed| claimed.rows[0].key.to_string()).collect();
    assert_eq!(keys.len(), 2, "{keys:?}");
    assert_ne!(keys[0], keys[1]);
    for claimed in taken.claims {
        claims.settle_one(&claimed.claim, leasehold_claim::Outcome::Done).await.unwrap();
    }
}

/// A table partitioned by time cannot have a unique index on the id alone, so this is only a warning and claims work.
#[tokio::test]
async fn a_table_partitioned_by_time_is_warned_of_and_works() {
    let (_db, pool) = database().await;
    run(&pool, "CREATE TABLE job (id bigint GENERATED ALWAYS AS IDENTITY, created_at timestamptz NOT NULL DEFAULT now(), \
        status text NOT NULL DEFAULT 'new', owner uuid, epoch bigint NOT NULL DEFAULT 0, lease_until timestamptz, \
        PRIMARY KEY (id, created_at)) PARTITION BY RANGE (created_at); \
        CREATE TABLE job_now PARTITION OF job DEFAULT; INSERT INTO job (status) VALUES ('new'), ('new')").await;
    let spec = job().notify_on_insert(false).build().unwrap();
    let found = spec.check(&pool).await.unwrap();
    assert_finding(&found, Finding::Warning, &["partitioned", "id, created_at", "IDENTITY"]);
    assert!(found.iter().all(|finding| !finding.message().contains("CREATE UNIQUE INDEX")), "{found:#?}");
    spec.ensure(&pool).await.unwrap();
    let claims = PgClaims::new(pool.clone(), spec);
    let taken = claims.take(&Take::up_to(9)).await.unwrap().claims;
    assert_eq!(taken.len(), 2);
    for claimed in taken {
        claims.settle_one(&claimed.claim, leasehold_claim::Outcome::Done).await.unwrap();
    }
    assert_eq!(text(&pool, "SELECT string_agg(status, ' ') FROM job").await, "complete complete");
}

/// The setting `quote_all_identifiers` changes the server's spelling of type names.
#[tokio::test]
async fn a_role_with_quote_all_identifiers_sees_the_table_as_it_is() {
    let (db, pool) = database().await;
    legacy_table(&pool).await;
    run(&pool, &format!("ALTER DATABASE {} SET quote_all_identifiers = on", db.name())).await;
    let fresh = PgPool::connect(db.url()).await.unwrap();
    let spec = full("request").build().unwrap();
    for _ in 0..2 {
        spec.migration().attempts(3).apply(&fresh).await.unwrap();
        let found = spec.check(&fresh).await.unwrap();
        assert!(found.is_empty(), "{found:#?}");
    }
}
