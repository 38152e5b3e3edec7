//! No statement of the store touches more pages when its table is large (docs/hazards.md H50). A constant of `sql.rs`
//! that is not measured here does not compile.

#[deny(dead_code)]
#[path = "../src/sql.rs"]
mod sql;

use test_stores::growth::assert_no_growth_of;

#[tokio::test]
async fn no_statement_touches_more_of_a_large_table() {
    let kinds = [
        ("ended", "now() - interval '1 minute'", "false"),
        ("free", "now() + interval '1 hour'", "true"),
        ("held", "now() + interval '1 hour'", "false"),
        ("old", "now() - interval '30 days'", "true"),
    ];
    let rows = |schema: &str, count| {
        let insert = |(kind, expires, released)| {
            format!(
                "INSERT INTO {schema}.lease (key, holder, token, acquired_at, ttl_us, expires_at, released)
                SELECT '{kind}-' || i, 'holder-' || i, i, now() - interval '31 days', 1000000, {expires}, {released}
                FROM generate_series(1, {count}) i;"
            )
        };
        let parts = format!(
            "INSERT INTO {schema}.lease (key, holder, token, acquired_at, ttl_us, expires_at, released)
            SELECT 'shared-' || i, '*', i, now() - interval '31 days', 0, 'infinity', false
            FROM generate_series(1, least({count}, 100000)) i;
            INSERT INTO {schema}.lease_part
                (key, part, of, holder, token, acquired_at, ttl_us, expires_at, released)
            SELECT 'shared-' || i, n, 0, 'holder-' || i, i, now(), 1000000, now() + interval '1 hour', n > 0
            FROM generate_series(1, least({count}, 100000)) i, generate_series(0, 1) n;
            ANALYZE {schema}.lease_part;"
        );
        kinds.map(insert).concat() + &parts
    };
    assert_no_growth_of(
        &sql::LEASES,
        &[("fence", sql::FENCE), ("fence part", sql::FENCE_PART)],
        "lease",
        rows,
    )
    .await;
}
