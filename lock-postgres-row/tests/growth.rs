//! No statement of the store touches more pages when its table is large (docs/hazards.md H50). A constant of `sql.rs`
//! that is not measured here does not compile.

#[deny(dead_code)]
#[path = "../src/sql.rs"]
mod sql;

use test_stores::growth::assert_no_growth_of;

#[tokio::test]
async fn no_statement_touches_more_of_a_large_table() {
    let kinds = [
        ("cool", "now()", "false", "86400000000"),
        ("free", "now()", "false", "NULL"),
        ("held", "NULL", "true", "NULL"),
        ("old", "now() - interval '30 days'", "false", "NULL"),
    ];
    let rows = |schema: &str, count| {
        let insert = |(kind, released, acquired, cooldown)| {
            format!(
                "INSERT INTO {schema}.mutex (key, holder, token, acquired_at, released_at, acquired, cooldown_us)
                SELECT '{kind}-' || i, 'holder-' || i, i, now() - interval '31 days', {released}, {acquired}, {cooldown}
                FROM generate_series(1, {count}) i;"
            )
        };
        let parts = format!(
            "INSERT INTO {schema}.mutex (key, holder, token, acquired_at, acquired)
            SELECT 'shared-' || i, '*', i, now() - interval '31 days', true
            FROM generate_series(1, least({count}, 100000)) i;
            INSERT INTO {schema}.mutex_part (key, part, of, holder, token, acquired_at, released_at, acquired)
            SELECT 'shared-' || i, n, 0, 'holder-' || i, i, now(), CASE WHEN n > 0 THEN now() END, n = 0
            FROM generate_series(1, least({count}, 100000)) i, generate_series(0, 1) n;
            ANALYZE {schema}.mutex_part;"
        );
        kinds.map(insert).concat() + &parts
    };
    assert_no_growth_of(&sql::MUTEXES, &[], "mutex", rows).await;
}
