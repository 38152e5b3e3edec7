//! The column for the claim that settled a row: what the migration adds and the check sees.

use crate::common::*;
use leasehold_claim::{ClaimSpec, Finding};

fn spec() -> ClaimSpec {
    full("request").settled_by("settled_by").build().unwrap()
}

#[tokio::test]
async fn the_column_of_the_settling_claim_is_added_and_checked() {
    let (_db, pool) = database().await;
    legacy_table(&pool).await;
    run(&pool, "INSERT INTO request (document) VALUES ('old')").await;
    let spec = spec();
    let found = spec.check(&pool).await.unwrap();
    assert_finding(&found, Finding::Error, &["no column settled_by", "the claim that settled", "migration"]);
    for _ in 0..2 {
        spec.migration().attempts(3).apply(&pool).await.unwrap();
    }
    assert_eq!(spec.check(&pool).await.unwrap(), []);

    for (change, words) in [
        ("ALTER settled_by SET NOT NULL", &["settled_by may not be NULL", "DROP NOT NULL"][..]),
        ("ALTER settled_by TYPE varchar(35)", &["settled_by", "too little room", "TYPE text"]),
        ("ALTER settled_by TYPE uuid USING settled_by::uuid", &["settled_by", "uuid", "text"]),
        ("ADD CONSTRAINT short CHECK (length(settled_by) < 36)", &["constraint short", "be settled"]),
        (
            "DROP settled_by, ADD settled_by text GENERATED ALWAYS AS (status) STORED",
            &["computed by the server"],
        ),
    ] {
        run(&pool, "CREATE SCHEMA changed; CREATE TABLE changed.request (LIKE request INCLUDING ALL)").await;
        run(&pool, format!("ALTER TABLE changed.request {change}")).await;
        let table = spec.table().clone().in_schema("changed").unwrap();
        let changed = ClaimSpec::builder(table)
            .state("status", states())
            .lease_columns("owner", "epoch", "lease_until")
            .settled_by("settled_by")
            .build()
            .unwrap();
        assert_finding(&changed.check(&pool).await.unwrap(), Finding::Error, words);
        run(&pool, "DROP SCHEMA changed CASCADE").await;
    }
}
