//! Checks that the statements of a queue, of groups and of tenants do not touch more pages of a large table. The large
//! table has a million archived rows, which are done, failed or without attempts left, and many rows each for later, of a
//! claimed group and of an unclaimed one. The table also has indexes of the application. The statements are from
//! `sql/*.sql`, which another test compares with the code.

#![allow(clippy::unwrap_used, clippy::panic)] // A failed `unwrap` fails the test.

use leasehold_claim::sqlx::{self, PgConnection};
use leasehold_claim::{ClaimSpec, OrderType, Retention, States, Table};
use test_servers::fresh_database;
use test_servers::growth::{Probe, assert_no_growth};
use test_servers::sql::{run, text};

const FEW: u32 = 1_000;

/// Number of rows of each unsettled kind.
const MANY: u32 = 200_000;

/// Number of archived rows for each row of an unsettled kind. Of these, one has failed, one has no attempts left, and the
/// others are done.
const ARCHIVED: u32 = 5;

/// Number of claimed rows, the same for both sizes, because current work does not grow with the history.
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
        .error("error")
        .work(["payload"])
        .retention(Retention::KeepFor(std::time::Duration::from_secs(30 * DAY)));
    let spec = if is_grouped { spec.group("entity").grouped().group_limit(100) } else { spec };
    spec.build().unwrap()
}

/// Inserts rows into an empty table without its indexes, and then builds them, because that takes less time. The table is
/// not logged, because the number of pages does not depend on that.
async fn insert(conn: &mut PgConnection, table: &str, columns: &str, rows: &[(u32, String)]) {
    let indexes = format!("FROM pg_index WHERE indrelid = '{table}'::regclass AND NOT indisprimary");
    let build = format!("SELECT string_agg(pg_get_indexdef(indexrelid), '; ') {indexes}");
    let build = text(&mut *conn, build).await;
    let drop = format!("SELECT string_agg(indexrelid::regclass::text, ', ') {indexes}");
    let drop = text(&mut *conn, drop).await;
    run(&mut *conn, format!("ALTER TABLE {table} SET UNLOGGED; DROP INDEX {drop}")).await;
    for (count, values) in rows {
        let select = format!("SELECT {values} FROM generate_series(1, {count}) n");
        run(&mut *conn, format!("INSERT INTO {table} ({columns}) {select}")).await;
    }
    run(&mut *conn, build).await;
    run(&mut *conn, format!("VACUUM ANALYZE {table}")).await;
}

async fn fill(conn: &mut PgConnection, pool: &sqlx::PgPool, name: &str, count: u32) {
    run(&mut *conn, format!("CREATE SCHEMA {name}; CREATE TABLE {name}.job (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, \
        entity text, payload text, state text NOT NULL DEFAULT 'new') WITH (autovacuum_enabled = false)")).await;
    for is_grouped in [false, true] {
        spec(name, is_grouped).migration().attempts(5).apply(pool).await.unwrap();
    }
    run(
        &mut *conn,
        format!("CREATE INDEX ON {name}.job (payload); CREATE INDEX ON {name}.job (entity, payload)"),
    )
    .await;
    let row = |count: u32, entity: &str, rest: &str| (count, format!("{entity}, 'p' || n, {rest}"));
    let rows = [
        // Settled, but too young for a purge.
        row(
            (ARCHIVED - 2) * count,
            "'old-' || n",
            "'done', now() - interval '2 days', now() - interval '1 day', NULL::uuid, NULL::timestamptz",
        ),
        // For later.
        row(count, "'later-' || n", "'new', now() + interval '1 day', NULL, NULL, NULL"),
        // Of one claimed group.
        row(count, "'hot'", "'new', now() - interval '1 hour', NULL, NULL, NULL"),
        row(
            TAKEN,
            "CASE n WHEN 1 THEN 'hot' ELSE 'taken-' || n END",
            "'running', now(), NULL, md5('p' || n)::uuid, now() + interval '1 hour'",
        ),
        // Of an unclaimed group.
        row(count, "'wide'", "'new', now() - interval '1 minute', NULL, NULL, NULL"),
        // Claimable now.
        row(TAKEN, "'next-' || n", "'new', now() - interval '1 minute', NULL, NULL, NULL"),
        row(count, "'failed-' || n", "'failed', now(), now(), NULL, NULL"),
        row(count, "'dead-' || n", "'dead', now(), NULL, NULL, NULL"),
    ];
    let columns = "entity, payload, state, ready_at, settled_at, owner, lease_until";
    insert(conn, &format!("{name}.job"), columns, &rows).await;
}

/// Returns the ids of the first claimed row, of the first row of the unclaimed group, and of the first row after it. The
/// ids follow the order of the inserts.
fn ids(count: u32) -> [u32; 3] {
    let done = ARCHIVED - 2;
    let taken = (done + 2) * count + 1;
    [taken, taken + TAKEN, taken + TAKEN + count]
}

/// Returns two cursors of a pass. The whole unclaimed group is behind the first one. The second one has passed all but
/// twenty of its rows, which are all ready since the same time.
async fn cursors(conn: &mut PgConnection, name: &str, count: u32) -> [[String; 2]; 2] {
    let [_, wide, next] = ids(count);
    let mut at = async |id: u32, entity: &str| {
        let row = format!("FROM {name}.job WHERE id = {id} AND entity = '{entity}'");
        [text(&mut *conn, format!("SELECT quote_literal(ready_at) {row}")).await, format!("'{id}'")]
    };
    // The rows of the claimed group are directly before the claimed rows.
    [at(wide - TAKEN - 1, "hot").await, at(next - 21, "wide").await]
}

/// Checks that the large table has as many archived rows as the tests claim.
async fn assert_archive(conn: &mut PgConnection, table: &str, states: &str) {
    let archived = format!("SELECT count(*) FROM large.{table} WHERE state IN ({states})");
    assert_eq!(text(conn, archived).await, "1000000");
}

const BATCH: &str = "'00000000-0000-0000-0000-000000000000'";
const NO_QUEUE: &str = "ARRAY[NULL]::text[]";

/// Parameters of `take` and similar statements.
const TAKE: [&str; 4] = ["20", BATCH, "30000", "NULL"];

/// The statements of one file, on the table in one schema.
struct Statements {
    text: String,
    table: &'static str,
    schema: String,
}

impl Statements {
    fn of(file: &str, table: &'static str, schema: &str) -> Self {
        let path = format!("{}/sql/{file}.sql", env!("CARGO_MANIFEST_DIR"));
        Self { text: std::fs::read_to_string(path).unwrap(), table, schema: schema.to_owned() }
    }

    /// Returns the comment lines of a statement and its text.
    fn find(&self, name: &str) -> (Vec<&str>, String) {
        let title = format!("-- {name}");
        let is_named = |block: &&str| block.lines().next() == Some(&*title);
        let block = self.text.split("\n\n").find(is_named).unwrap_or_else(|| panic!("no statement {name}"));
        let (head, sql): (Vec<_>, Vec<_>) = block.lines().partition(|line| line.starts_with("--"));
        let sql = sql.join("\n").trim().trim_end_matches(';').to_owned();
        (
            head,
            sql.replace(&format!("\"{}\"", self.table), &format!("\"{}\".\"{}\"", self.schema, self.table)),
        )
    }

    /// Returns a statement with its values, extended to reference unused parameters too.
    fn probe(&self, name: &str, values: &[&str]) -> Probe {
        let (head, sql) = self.find(name);
        let types = head.iter().filter_map(|line| line.strip_prefix("-- $")?.split_once(':'));
        let given: Vec<String> = types
            .filter_map(|(parameter, _)| parameter.split_once(' '))
            .map(|(number, kind)| format!("${number}::{kind}"))
            .collect();
        assert_eq!(given.len(), values.len(), "the parameters of {name}");
        if given.is_empty() {
            return Probe::new(name, sql, values);
        }
        let given = format!("given AS (SELECT {})", given.join(", "));
        let sql = match (sql.strip_prefix("WITH RECURSIVE "), sql.strip_prefix("WITH ")) {
            (Some(rest), _) => format!("WITH RECURSIVE {given}, {rest}"),
            (None, Some(rest)) => format!("WITH {given}, {rest}"),
            (None, None) => format!("WITH {given} {sql}"),
        };
        Probe::new(name, sql, values)
    }

    /// Returns the statement with a literal limit. For a parameter as limit, the planner expects a tenth of the table and
    /// plans again at each execution.
    fn limited(&self, name: &str, values: &[&str]) -> Probe {
        let mut probe = self.probe(name, values);
        probe.text = probe.text.replace("LIMIT $1", "LIMIT 20").replace("LIMIT $5", "LIMIT 84");
        probe
    }

    /// Returns the settings of the transactions of leased takes.
    fn settings(&self) -> String {
        let (_, begin) = self.find("begin");
        begin.replace("SET LOCAL", "SET").split_once(';').unwrap().1.to_owned()
    }
}

/// Returns the statements of a queue on the table in the schema `name`.
fn statements(name: &str, count: u32, cursors: &[[String; 2]; 2]) -> Vec<Probe> {
    let (queue, held) = (Statements::of("queue", "job", name), Statements::of("held", "job", name));
    let [taken, _, next] = ids(count);
    let [taken, next, failed] = [taken + 1, next, next + TAKEN].map(|number| format!("ARRAY['{number}']"));
    let behind = [&TAKE[..], &cursors[1].each_ref().map(String::as_str)].concat();
    vec![
        queue.probe("take one", &["1", BATCH, "30000", "NULL"]),
        queue.limited("take", &TAKE),
        queue.limited("take behind", &behind),
        queue.limited("first", &TAKE),
        held.limited("hold", &TAKE),
        held.limited("hold behind", &behind),
        queue.probe("pending", &TAKE),
        queue.probe("stats", &TAKE),
        queue.probe("cancel", &["'no'", &taken, NO_QUEUE]),
        queue.probe("requeue", &["5", &failed, NO_QUEUE]),
        queue.probe("requeue all", &["5"]),
        queue.probe("sweep", &["100"]),
        queue.probe("next end", &[]),
        queue.probe("use up", &["100"]),
        queue.probe("purge", &["1000"]),
        queue.probe("purge oldest", &["1000"]),
        queue.probe("purge keys", &["1000", &next, NO_QUEUE]),
        queue.probe("renew", &["ARRAY[0]", &taken, NO_QUEUE, "ARRAY[md5('p2')]", "ARRAY[0]", "30000"]),
    ]
}

/// Returns the statements that find and lock groups, and that take the rows of a small and of a large group, with leased
/// and held claims.
fn of_groups(name: &str, count: u32, cursors: &[[String; 2]; 2]) -> Vec<Probe> {
    let groups = Statements::of("groups", "job", name);
    let probe = |how: &str, entity: &str, first: u32| {
        let (first, entity) = (format!("ARRAY['{first}']"), format!("ARRAY['{entity}']"));
        let found = [first.as_str(), NO_QUEUE, &entity, "ARRAY[1]"];
        let mut probe = groups.probe(how, &[&TAKE[..], &found].concat());
        probe.name = format!("{how} of {entity}");
        probe
    };
    let [_, wide, next] = ids(count);
    let (wide, next) = (("wide", wide), ("next-1", next));
    let look = [&TAKE[..], &["84", "ARRAY[]::text[]"]].concat();
    let mut all = vec![groups.limited("look", &look), groups.probe("lock", &["ARRAY[1, 2]"])];
    for (cursor, at) in cursors.iter().zip(["before a group", "in a group"]) {
        let behind = [&look[..], &cursor.each_ref().map(String::as_str)].concat();
        let mut probe = groups.limited("look behind", &behind);
        probe.name = format!("look behind a row {at}");
        all.push(probe);
    }
    for how in ["take members", "hold members"] {
        all.extend([wide, next].map(|(entity, at)| probe(how, entity, at)));
    }
    all
}

fn limited(name: &str) -> ClaimSpec {
    let table = Table::new("work").unwrap().in_schema(name).unwrap();
    let states = States::text(["new"], "done").taken("running");
    let spec =
        ClaimSpec::builder(table).state("state", states).lease_columns("owner", "epoch", "lease_until");
    spec.limit("tenant", 5).build().unwrap()
}

/// Creates a tenant at its limit with the first rows, twenty tenants after it, and rows without a tenant.
async fn fill_limited(conn: &mut PgConnection, pool: &sqlx::PgPool, name: &str, count: u32) {
    run(
        &mut *conn,
        format!(
            "CREATE TABLE {name}.work (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, tenant text, \
        payload text, state text NOT NULL DEFAULT 'new') WITH (autovacuum_enabled = false)"
        ),
    )
    .await;
    limited(name).migration().apply(pool).await.unwrap();
    run(
        &mut *conn,
        format!("CREATE INDEX ON {name}.work (payload); CREATE INDEX ON {name}.work (tenant, payload)"),
    )
    .await;
    let row = |count: u32, values: &str| (count, format!("{values}, 'p' || n"));
    let rows = [
        row(5, "'full', 'running'"),
        row(count, "'full', 'new'"),
        row(ARCHIVED * count, "'full', 'done'"),
        row(TAKEN, "'taken-' || n, 'running'"),
        row(TAKEN, "'next-' || n % 20, 'new'"),
        row(TAKEN, "NULL, 'new'"),
    ];
    insert(conn, &format!("{name}.work"), "tenant, state, payload", &rows).await;
}

/// Returns the statements that take rows of tenants.
fn of_tenants(name: &str, count: u32) -> Vec<Probe> {
    let tenants = Statements::of("tenants", "work", name);
    let look = [&TAKE[..], &["84", "ARRAY[]::text[]"]].concat();
    let chosen = |how: &str, tenant: &str, at: u32| {
        let (at, found) = (format!("ARRAY['{at}']"), format!("ARRAY['{tenant}']"));
        let rows = [at.as_str(), NO_QUEUE, &found, "ARRAY[1]", "ARRAY[7]"];
        let mut probe = tenants.probe(how, &[&TAKE[..], &rows].concat());
        probe.name = format!("{how} of {tenant}");
        probe
    };
    let (full, next) = (6, 5 + (1 + ARCHIVED) * count + TAKEN + 1);
    // Behind this row are twenty rows of the tenant at its limit, and all rows of the others.
    let cursor = format!("'{}'", 5 + count - 20);
    let behind = [&look[..], &[cursor.as_str()]].concat();
    vec![
        tenants.limited("look in order", &look),
        tenants.limited("look by tenant", &look),
        tenants.limited("look in order behind", &behind),
        tenants.limited("look by tenant behind", &behind),
        tenants.probe("count", &[&format!("ARRAY['{next}']"), NO_QUEUE]),
        chosen("take chosen", "full", full),
        chosen("take chosen", "next-1", next),
        chosen("hold chosen", "full", full),
        chosen("hold chosen", "next-1", next),
    ]
}

#[tokio::test]
async fn nor_does_one_of_tenants_with_a_limit() {
    let database = fresh_database().await;
    let pool = sqlx::PgPool::connect(database.url()).await.unwrap();
    let mut conn = database.connect().await;
    run(&mut conn, "SET synchronous_commit = off; CREATE SCHEMA small; CREATE SCHEMA large").await;
    fill_limited(&mut conn, &pool, "small", FEW).await;
    fill_limited(&mut conn, &pool, "large", MANY).await;
    assert_archive(&mut conn, "work", "'done'").await;
    run(&mut conn, Statements::of("groups", "job", "").settings()).await;
    assert_no_growth(&mut conn, &of_tenants("small", FEW), &of_tenants("large", MANY)).await;
}

#[tokio::test]
async fn no_statement_touches_more_of_a_large_table() {
    let database = fresh_database().await;
    let pool = sqlx::PgPool::connect(database.url()).await.unwrap();
    let mut conn = database.connect().await;
    run(&mut conn, "SET synchronous_commit = off").await;
    fill(&mut conn, &pool, "small", FEW).await;
    fill(&mut conn, &pool, "large", MANY).await;
    assert_archive(&mut conn, "job", "'done', 'failed', 'dead'").await;
    let few = cursors(&mut conn, "small", FEW).await;
    let many = cursors(&mut conn, "large", MANY).await;
    run(&mut conn, "SET synchronize_seqscans = off").await;
    assert_no_growth(&mut conn, &statements("small", FEW, &few), &statements("large", MANY, &many)).await;
    run(&mut conn, Statements::of("groups", "job", "").settings()).await;
    assert_no_growth(&mut conn, &of_groups("small", FEW, &few), &of_groups("large", MANY, &many)).await;
}
