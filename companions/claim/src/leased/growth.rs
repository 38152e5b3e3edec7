//! No statement touches more pages of a large table: rows that are settled, that are for later, that are taken and that
//! are of one group, a thousand and many of each. Other people's indexes are on the table as well.

use leasehold_table_schema::{Column, Table};
use sqlx::{AssertSqlSafe, PgConnection, raw_sql};
use test_servers::fresh_database;
use test_servers::growth::{Probe, assert_no_growth};

use super::groups::{take_chosen, take_members};
use super::renew::renew;
use super::requeue::{cancel, given_up, in_state, requeue};
use super::server::BEGIN;
use super::sweep::{oldest, picked_by_key, purge, sweep, use_up};
use super::take::statement;
use super::upkeep::next_end;
use crate::held::hold;
use crate::spec::states::{State, States};
use crate::spec::{ClaimSpec, OrderType, Retention};
use crate::statements::groups::{Locked, Search, members};
use crate::statements::order::Sequence;
use crate::statements::parts::Words;
use crate::statements::pick::{Asked, alone, pending};
use crate::statements::stats::stats;
use crate::statements::tenants::{self, by_tenant, in_order};
use crate::store::Take;

const FEW: u32 = 1_000;

/// Of each kind of row, unless this variable says another number: a million of each takes minutes to make.
const MANY: (u32, &str) = (200_000, "LEASEHOLD_GROWTH_ROWS");

fn many() -> u32 {
    std::env::var(MANY.1).map_or(MANY.0, |rows| rows.parse().expect("a number of rows"))
}

/// How many rows are taken, whatever the size: work that is under way is not history.
const TAKEN: u32 = 200;

const DAY: u64 = 86_400;

fn spec(name: &str, is_grouped: bool) -> ClaimSpec {
    let table = Table::new("job").unwrap().in_schema(name).unwrap();
    let states = States::text(["new"], "done").taken("running").failed("failed").exhausted("dead");
    let spec = ClaimSpec::builder(table)
        .state("state", states)
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .settled_at("settled_at")
        .ready_at("ready_at")
        .order_by("ready_at", OrderType::Time)
        .retention(Retention::KeepFor(std::time::Duration::from_secs(30 * DAY)))
        .group("entity");
    let spec = if is_grouped { spec.grouped().group_limit(100) } else { spec };
    spec.build().unwrap()
}

async fn run(conn: &mut PgConnection, sql: impl Into<String>) {
    let sql = sql.into();
    raw_sql(AssertSqlSafe(sql.clone())).execute(conn).await.unwrap_or_else(|error| panic!("{error}: {sql}"));
}

async fn fill(conn: &mut PgConnection, pool: &sqlx::PgPool, name: &str, count: u32) {
    run(conn, format!("CREATE SCHEMA {name}; CREATE TABLE {name}.job (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, \
        entity text, payload text, state text NOT NULL DEFAULT 'new') WITH (autovacuum_enabled = false)")).await;
    for is_grouped in [false, true] {
        spec(name, is_grouped).migration().attempts(5).apply(pool).await.unwrap();
    }
    run(conn, format!("CREATE INDEX ON {name}.job (payload); CREATE INDEX ON {name}.job (entity, payload)"))
        .await;
    let columns = "(entity, payload, state, ready_at, settled_at, owner, lease_until)";
    let rows = [
        // Settled, and younger than what is purged.
        (
            count,
            "'old-' || n",
            "'done', now() - interval '2 days', now() - interval '1 day', NULL::uuid, NULL::timestamptz",
        ),
        // For later.
        (count, "'later-' || n", "'new', now() + interval '1 day', NULL, NULL, NULL"),
        // Of one group, that somebody is at.
        (count, "'hot'", "'new', now() - interval '1 hour', NULL, NULL, NULL"),
        (
            TAKEN,
            "CASE n WHEN 1 THEN 'hot' ELSE 'taken-' || n END",
            "'running', now(), NULL, md5('p' || n)::uuid, now() + interval '1 hour'",
        ),
        // Of a group that nobody is at.
        (count, "'wide'", "'new', now() - interval '1 minute', NULL, NULL, NULL"),
        // To be taken.
        (TAKEN, "'next-' || n", "'new', now() - interval '1 minute', NULL, NULL, NULL"),
        // Given up, and no more of them than what is counted or requeued at once.
        (count, "'failed-' || n", "'failed', now(), now(), NULL, NULL"),
        (count, "'dead-' || n", "'dead', now(), NULL, NULL, NULL"),
    ];
    for (count, entity, rest) in rows {
        run(conn, format!("INSERT INTO {name}.job {columns} SELECT {entity}, 'p' || n, {rest} FROM generate_series(1, {count}) n")).await;
    }
    run(conn, format!("VACUUM ANALYZE {name}.job")).await;
}

/// A statement that takes rows, with the parameters named which it may not use.
fn taking(text: String) -> String {
    let given = "WITH given AS (SELECT $1::bigint, $2::text, $3::bigint, $4::text), ";
    text.replacen("WITH ", given, 1)
}

/// The same in an open transaction.
fn holding(spec: &ClaimSpec, order: &Sequence, asked: &Asked<'_>) -> String {
    let words = Words::held(spec);
    words.ready_is_given.set(true).unwrap();
    let picked = alone(&words, order, asked, None, false).replace("LIMIT $1", "LIMIT 20");
    taking(hold(&words, order, asked, &picked, "n.place"))
}

/// Each statement on the table in the schema `name`.
fn statements(name: &str, count: u32) -> Vec<Probe> {
    let spec = spec(name, false);
    let words = Words::leased(&spec);
    words.ready_is_given.set(true).unwrap();
    let order = Sequence::new(&words, |_| false);
    let (few, one) = (Take::up_to(20), Take::up_to(1));
    let from = &spec.inner.states.takeable;
    let asked = |take| Asked { take, from, batch: uuid::Uuid::nil() };
    let batch = "'00000000-0000-0000-0000-000000000000'";
    // In the order in which they were made.
    let row = |number: u32| format!("ARRAY['{number}']");
    let (taken, next) = (row(3 * count + 2), row(4 * count + TAKEN + 1));
    let none = "ARRAY[NULL]::text[]";
    // The number as the server plans for: for a limit that it does not know it expects a tenth of the table, so that it
    // plans anew each time.
    let take = taking(statement(&words, &order, &asked(&few), None, false)).replace("LIMIT $1", "LIMIT 20");
    // This table keeps no messages.
    let cancelling =
        cancel(&words, &State::new("failed")).replacen("WITH ", "WITH given AS (SELECT $1::text), ", 1);
    vec![
        Probe::new(
            "take one",
            taking(statement(&words, &order, &asked(&one), None, true)),
            &["1", batch, "30000", "NULL"],
        ),
        Probe::new("take", take, &["20", batch, "30000", "NULL"]),
        Probe::new("hold", holding(&spec, &order, &asked(&few)), &["20", batch, "30000", "NULL"]),
        Probe::new("pending", pending(&words, &order, &asked(&one)), &[]),
        Probe::new("stats", stats(&words, &order, &asked(&few)), &[]),
        Probe::new("cancel", cancelling, &["'no'", &taken, none]),
        Probe::new(
            "requeue",
            requeue(&words, &given_up(&words)),
            &["5", &row(4 * count + 2 * TAKEN + 1), none],
        ),
        Probe::new("requeue all", requeue(&words, &in_state(&words, &State::new("dead"), 20)), &["5"]),
        Probe::new("sweep", sweep(&words, ""), &["100"]),
        Probe::new("next end", next_end(&words), &[]),
        Probe::new("use up", use_up(&words).unwrap(), &["100"]),
        Probe::new("purge", purge(&words, &oldest(&words, &words.key())), &["1000"]),
        Probe::new("old", oldest(&words, &words.key_text()), &["1000"]),
        Probe::new("purge some", purge(&words, &picked_by_key(&words)), &["1000", &next, none]),
        Probe::new(
            "renew",
            renew(&words),
            &["ARRAY[0]", &taken, none, "ARRAY[md5('p2')]", "ARRAY[0]", "30000"],
        ),
    ]
}

/// The statements that take the rows of a group, of a small and of a large one: under leases, and in an open transaction.
fn of_groups(name: &str, count: u32) -> Vec<Probe> {
    let spec = spec(name, true);
    let words = Words::leased(&spec);
    words.ready_is_given.set(true).unwrap();
    let order = Sequence::new(&words, |_| false);
    let take = Take::up_to(20);
    let from = &spec.inner.states.takeable;
    let asked = Asked { take: &take, from, batch: uuid::Uuid::nil() };
    let group = Column::known("entity");
    let leased = taking(take_members(&words, &order, &asked, &group));
    let words = Words::held(&spec);
    words.ready_is_given.set(true).unwrap();
    let order = Sequence::new(&words, |_| false);
    let members = members(&words, &order, &asked, &group, Locked::Refuse);
    let held = taking(hold(&words, &order, &asked, &members, "n.claim"));
    let probe = |how: &str, sql: &str, entity: &str, first: u32| {
        let (first, entity) = (format!("ARRAY['{first}']"), format!("ARRAY['{entity}']"));
        let batch = "'00000000-0000-0000-0000-000000000000'";
        let values = ["20", batch, "30000", "NULL", &first, "ARRAY[NULL]::text[]", &entity, "ARRAY[1]"];
        Probe::new(format!("{how} members of {entity}"), sql.to_owned(), &values)
    };
    let (wide, next) = (("wide", 3 * count + TAKEN + 1), ("next-1", 4 * count + TAKEN + 1));
    let both = [("leased", &leased), ("held", &held)];
    both.iter().flat_map(|(how, sql)| [wide, next].map(|(entity, at)| probe(how, sql, entity, at))).collect()
}

fn limited(name: &str) -> ClaimSpec {
    let table = Table::new("work").unwrap().in_schema(name).unwrap();
    let states = States::text(["new"], "done").taken("running");
    let spec =
        ClaimSpec::builder(table).state("state", states).lease_columns("owner", "epoch", "lease_until");
    spec.limit("tenant", 5).build().unwrap()
}

/// A tenant that has no room and all rows in front, twenty behind it, and rows of none.
async fn fill_limited(conn: &mut PgConnection, pool: &sqlx::PgPool, name: &str, count: u32) {
    run(
        conn,
        format!(
            "CREATE TABLE {name}.work (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant text, \
        payload text, state text NOT NULL DEFAULT 'new') WITH (autovacuum_enabled = false)"
        ),
    )
    .await;
    limited(name).migration().apply(pool).await.unwrap();
    run(
        conn,
        format!("CREATE INDEX ON {name}.work (payload); CREATE INDEX ON {name}.work (tenant, payload)"),
    )
    .await;
    let rows = [
        (5, "'full'", "'running'"),
        (count, "'full'", "'new'"),
        (count, "'full'", "'done'"),
        (TAKEN, "'taken-' || n", "'running'"),
        (TAKEN, "'next-' || n % 20", "'new'"),
        (TAKEN, "NULL", "'new'"),
    ];
    for (count, tenant, state) in rows {
        run(conn, format!("INSERT INTO {name}.work (tenant, state, payload) SELECT {tenant}, {state}, 'p' || n FROM generate_series(1, {count}) n")).await;
    }
    run(conn, format!("VACUUM ANALYZE {name}.work")).await;
}

/// The statements that take rows of tenants.
fn of_tenants(name: &str, count: u32) -> Vec<Probe> {
    let spec = limited(name);
    let words = Words::leased(&spec);
    let order = Sequence::new(&words, |_| false);
    let take = Take::up_to(20);
    let asked = Asked { take: &take, from: &spec.inner.states.takeable, batch: uuid::Uuid::nil() };
    let search = Search::new(&words, &order, &asked, None, 20).unwrap();
    let batch = "'00000000-0000-0000-0000-000000000000'";
    let looking = |name: &str, sql: String| {
        let given = "given AS (SELECT $1::bigint, $2::text, $3::bigint, $4::text, $6::text[]), ";
        let sql = sql.replacen("found AS", &format!("{given}found AS"), 1).replace("LIMIT $5", "LIMIT 84");
        let sql = sql.replace("LIMIT $1)", "LIMIT 20)").replace("$6::text[])", "$5::text[])");
        Probe::new(name, sql, &["20", batch, "30000", "NULL", "ARRAY[]::text[]"])
    };
    let first = |at: u32| format!("ARRAY['{at}']");
    let chosen = |name: &str, sql: String, tenant: &str, at: u32| {
        let (at, tenant, none) = (first(at), format!("ARRAY['{tenant}']"), "ARRAY[NULL]::text[]");
        let values = ["20", batch, "30000", "NULL", &at, none, &tenant, "ARRAY[1]", "ARRAY[7]"];
        Probe::new(name, taking(sql), &values)
    };
    let leased = || take_chosen(&words, &order, &asked, &search);
    let words_of_held = Words::held(&spec);
    let order_of_held = Sequence::new(&words_of_held, |_| false);
    let held = || {
        let (words, order) = (&words_of_held, &order_of_held);
        let search = Search::new(words, order, &asked, None, 20).unwrap();
        let sql = hold(words, order, &asked, &tenants::chosen(words, order, &asked, &search), "n.claim");
        // Places were taken before.
        sql.replacen("WITH ", "WITH places AS (SELECT $9::int4[]), ", 1)
    };
    let (full, next) = (6, 5 + 2 * count + TAKEN + 1);
    vec![
        looking("rows in order", in_order(&search, None)),
        looking("rows by tenant", by_tenant(&search, None)),
        chosen("leased of a full tenant", leased(), "full", full),
        chosen("leased of another", leased(), "next-1", next),
        chosen("held of a full tenant", held(), "full", full),
        chosen("held of another", held(), "next-1", next),
    ]
}

#[tokio::test]
async fn nor_does_one_of_tenants_with_a_limit() {
    let database = fresh_database().await;
    let pool = sqlx::PgPool::connect(database.url()).await.unwrap();
    let mut conn = database.connect().await;
    run(&mut conn, "SET synchronous_commit = off; CREATE SCHEMA small; CREATE SCHEMA large").await;
    let many = many();
    fill_limited(&mut conn, &pool, "small", FEW).await;
    fill_limited(&mut conn, &pool, "large", many).await;
    run(&mut conn, BEGIN.replace("SET LOCAL", "SET").split_once(';').unwrap().1).await;
    assert_no_growth(&mut conn, &of_tenants("small", FEW), &of_tenants("large", many)).await;
}

#[tokio::test]
async fn no_statement_touches_more_of_a_large_table() {
    let database = fresh_database().await;
    let pool = sqlx::PgPool::connect(database.url()).await.unwrap();
    let mut conn = database.connect().await;
    run(&mut conn, "SET synchronous_commit = off").await;
    let many = many();
    fill(&mut conn, &pool, "small", FEW).await;
    fill(&mut conn, &pool, "large", many).await;
    run(&mut conn, "SET synchronize_seqscans = off").await;
    assert_no_growth(&mut conn, &statements("small", FEW), &statements("large", many)).await;
    run(&mut conn, BEGIN.replace("SET LOCAL", "SET").split_once(';').unwrap().1).await;
    assert_no_growth(&mut conn, &of_groups("small", FEW), &of_groups("large", many)).await;
}
