//! Checks that a statement does not touch more of the server's pages as its table grows.

use std::fmt::Write as _;

use sqlx::{AssertSqlSafe, PgConnection, Row as _, raw_sql};

use crate::{Outcome, or_panic};

/// Plan modes of a prepared statement.
const PLANS: [&str; 2] = ["force_generic_plan", "force_custom_plan"];

/// Tolerated extra pages, because the index of a large table is one or two levels higher.
const SLACK: u64 = 12;

/// A statement of a store, with its values.
#[derive(Clone, Debug)]
pub struct Probe {
    /// Its name in failure messages.
    pub name: String,
    /// Its text, with the placeholders `$1` and so on.
    pub text: String,
    /// Its values as SQL.
    pub values: Vec<String>,
}

impl Probe {
    /// Creates a statement with its values.
    #[must_use]
    pub fn new(name: impl Into<String>, text: impl Into<String>, values: &[&str]) -> Self {
        Self {
            name: name.into(),
            text: text.into(),
            values: values.iter().map(|value| (*value).to_owned()).collect(),
        }
    }
}

/// Runs each statement on a small and on a large table, under generic and under custom plans. Fails with all
/// statements that touch more than twice the pages on the large table. Counts pages instead of time, because the
/// count is the same on a busy machine. Changes are rolled back.
///
/// The connection has the settings of the store. It must not be inside a transaction.
///
/// # Panics
///
/// If a statement's pages grow with its table, or the server refuses it.
///
/// # Cancel safety
///
/// If dropped, the connection might stay inside a transaction, so close it.
pub async fn assert_no_growth(conn: &mut PgConnection, small: &[Probe], large: &[Probe]) {
    assert_eq!(small.len(), large.len(), "each statement is measured on both tables");
    let (mut report, mut grown) = (String::new(), 0);
    for (one, other) in small.iter().zip(large) {
        assert_eq!(one.name, other.name);
        for plan in PLANS {
            let before = or_panic(pages(conn, plan, one).await);
            let after = or_panic(pages(conn, plan, other).await);
            let is_growth = after > before * 2 + SLACK;
            grown += u32::from(is_growth);
            let mark = if is_growth { "  <- grows with the table" } else { "" };
            let _ = writeln!(report, "{:32} {plan:19} {before:>7} {after:>9}{mark}", one.name);
        }
    }
    println!("pages touched, small and large table:\n{report}");
    assert_eq!(grown, 0, "statements that touch more of a large table:\n{report}");
}

/// Returns the pages touched by one execution, after warming up catalogs and hint bits.
async fn pages(conn: &mut PgConnection, plan: &str, probe: &Probe) -> Outcome<u64> {
    let Probe { name, text, values } = probe;
    let call = if values.is_empty() { "probe".to_owned() } else { format!("probe ({})", values.join(", ")) };
    let explain = format!("EXPLAIN (ANALYZE, BUFFERS, COSTS OFF, TIMING OFF, FORMAT JSON) EXECUTE {call}");
    let failed = |error: sqlx::Error| format!("{name}: {error}");
    run(conn, format!("BEGIN; SET LOCAL plan_cache_mode = {plan}; PREPARE probe AS {text}"))
        .await
        .map_err(failed)?;
    let mut count = 0;
    for _ in 0..2 {
        run(conn, "SAVEPOINT before".to_owned()).await.map_err(failed)?;
        let row = raw_sql(AssertSqlSafe(explain.clone())).fetch_one(&mut *conn).await.map_err(failed)?;
        let told: String = row.try_get_unchecked(0).map_err(failed)?;
        count = of_top_node(&told, "Shared Hit Blocks")? + of_top_node(&told, "Shared Read Blocks")?;
        run(conn, "ROLLBACK TO before; SELECT pg_advisory_unlock_all()".to_owned()).await.map_err(failed)?;
    }
    run(conn, "ROLLBACK; DEALLOCATE probe".to_owned()).await.map_err(failed)?;
    Ok(count)
}

async fn run(conn: &mut PgConnection, sql: String) -> Result<(), sqlx::Error> {
    raw_sql(AssertSqlSafe(sql)).execute(conn).await.map(drop)
}

/// Returns a field of the topmost node, which comes first and includes the pages of the nodes below.
fn of_top_node(plan: &str, field: &str) -> Outcome<u64> {
    let found = plan.split_once(&format!("\"{field}\":")).and_then(|(_, rest)| {
        let digits: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
        digits.parse().ok()
    });
    found.ok_or_else(|| format!("the plan has no {field:?}: {plan}"))
}
