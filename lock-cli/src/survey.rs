//! Lists the claimed rows of a table for operators. It reads the table itself and needs no spec.

use std::time::Duration;

use leasehold::claim::sqlx;
use leasehold::claim::{ClaimError, Table};
use leasehold::postgres::store_error;
use leasehold::{Error, ErrorKind};
use leasehold_table_schema::Column;
use leasehold_table_schema::sql::literal;
use sqlx::postgres::PgRow;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, Row as _, raw_sql};
use tokio::time::timeout;

/// Time limit of each query.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

const OPERATION: &str = "look at the claims of a table";

/// Usual names of columns, best first. They are tried for columns that the user has not named. `migration` and the
/// documentation use the first of each.
const KNOWN: [(ColumnRole, &[&str]); 10] = [
    (ColumnRole::Id, &["id"]),
    (ColumnRole::State, &["state", "status"]),
    (ColumnRole::Queue, &["queue_id", "queue"]),
    (ColumnRole::Group, &["group_id", "entity_id"]),
    (ColumnRole::Owner, &["owner", "process_id", "claimed_by"]),
    (ColumnRole::Epoch, &["epoch"]),
    (ColumnRole::Until, &["lease_until", "locked_until"]),
    (ColumnRole::TakenAt, &["taken_at", "claimed_at"]),
    (ColumnRole::Attempts, &["attempts_left", "retries_left"]),
    (ColumnRole::Error, &["error", "last_error"]),
];

/// The role of a column in a claimed table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ColumnRole {
    /// Identifies the row.
    Id,
    /// State of the row.
    State,
    /// Queue of the row.
    Queue,
    /// Entity of the row.
    Group,
    /// Current owner of the row.
    Owner,
    /// Number of times the row was taken.
    Epoch,
    /// End of the lease.
    Until,
    /// Time when the row was taken.
    TakenAt,
    /// Attempts left.
    Attempts,
    /// Message of the last failure.
    Error,
}

/// A query for the claims of a table: rows under leases, exhausted rows, and transactions that might hold rows. Finds
/// columns by their usual names unless they are named.
#[derive(Clone, Debug)]
pub(crate) struct Survey {
    table: Table,
    named: Vec<(ColumnRole, Column)>,
    side: Option<Table>,
    takeable: Vec<String>,
    exhausted: String,
    limit: u32,
    /// The full names of the table and of the side table, with their schemas, as SQL.
    places: [String; 2],
}

/// The result of a [`Survey`].
#[derive(Clone, Debug, Default)]
pub(crate) struct SurveyReport {
    /// Rows under a lease, longest-held first.
    pub(crate) taken: Vec<SurveyedRow>,
    /// Unclaimed rows without attempts left.
    pub(crate) exhausted: Vec<SurveyedRow>,
    /// Open transactions that have locked or might have locked rows of the table, for example by held claims.
    pub(crate) transactions: Vec<OpenTransaction>,
    /// Whether the table or a side table stores the owner of a row. Otherwise all claims are held by transactions, and
    /// `taken` is empty.
    pub(crate) keeps_leases: bool,
    /// Whether there are more taken or exhausted rows than requested.
    pub(crate) more: bool,
}

/// A row in an operator's view.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SurveyedRow {
    /// Queue of the row, if the table has queues.
    pub(crate) queue: Option<String>,
    /// Id of the row.
    pub(crate) id: String,
    /// Entity of the row.
    pub(crate) group: Option<String>,
    /// State of the row.
    pub(crate) state: Option<String>,
    /// Current owner of the row.
    pub(crate) owner: Option<String>,
    /// Epoch of the claim.
    pub(crate) epoch: Option<i64>,
    /// Time since the row was taken, by the server's clock.
    pub(crate) held_for: Option<Duration>,
    /// Remaining lease time, or zero if the lease has ended without a sweep.
    pub(crate) remaining: Option<Duration>,
    /// Attempts left after the current one.
    pub(crate) attempts_left: Option<i64>,
    /// Message of the last failure.
    pub(crate) error: Option<String>,
}

/// An open transaction that has the kind of table lock which row locks need.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenTransaction {
    /// The server's process id, or `None` for a prepared transaction.
    pub(crate) pid: Option<i32>,
    /// Name of a prepared transaction, by which `ROLLBACK PREPARED` ends it.
    pub(crate) prepared: Option<String>,
    /// Application name of the client.
    pub(crate) application: Option<String>,
    /// Address of the client.
    pub(crate) client: Option<String>,
    /// Activity as the server reports it: `active`, `idle in transaction`, ...
    pub(crate) activity: Option<String>,
    /// Age of the transaction.
    pub(crate) open_for: Option<Duration>,
}

impl Survey {
    /// Creates a survey of `table` with at most a thousand rows of each kind.
    pub(crate) fn of(table: Table) -> Self {
        Self {
            table,
            named: Vec::new(),
            side: None,
            takeable: vec!["new".to_owned(), "false".to_owned()],
            exhausted: "exhausted".to_owned(),
            limit: 1000,
            places: Default::default(),
        }
    }

    /// Sets the column for `role` to `name`.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) if the server cannot have such a name.
    pub(crate) fn column(mut self, role: ColumnRole, name: &str) -> Result<Self, ClaimError> {
        self.named.push((role, Column::new(name)?));
        Ok(self)
    }

    /// Sets `table` as the side table of the leases.
    pub(crate) fn side_table(mut self, table: Table) -> Self {
        self.side = Some(table);
        self
    }

    /// Sets the states from which rows are taken, by default `new`, and `false` of a boolean column. A row in one of
    /// them without attempts left is exhausted.
    pub(crate) fn takeable<S: Into<String>>(mut self, states: impl IntoIterator<Item = S>) -> Self {
        self.takeable = states.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the state of exhausted rows, by default `exhausted`.
    pub(crate) fn exhausted_state(mut self, state: impl Into<String>) -> Self {
        self.exhausted = state.into();
        self
    }

    /// Sets the maximum number of rows of each kind.
    pub(crate) fn limit(mut self, rows: u32) -> Self {
        self.limit = rows;
        self
    }

    /// Runs the queries. Only reads, and takes only read locks.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) if the table or a column does not exist. [`Store`](ClaimError::Store)
    /// if the server refuses or does not answer within 30 s.
    ///
    /// # Cancel safety
    ///
    /// The call only reads. If dropped, the connection must not be used again.
    pub(crate) async fn run(&self, connection: &mut PgConnection) -> Result<SurveyReport, ClaimError> {
        let mut transaction = within_limit(connection.begin()).await?;
        let mut found = self.clone();
        for (place, table) in found.places.iter_mut().zip([Some(&self.table), self.side.as_ref()]) {
            if let Some(table) = table {
                *place = place_of(&mut transaction, table).await?;
            }
        }
        // Restricts the search path, which then excludes schemas in which other roles could have created
        // better-matching objects.
        within_limit(transaction.execute(raw_sql("SET LOCAL search_path = pg_catalog"))).await?;
        let report = found.run_on_places(&mut transaction).await;
        within_limit(transaction.rollback()).await?;
        report
    }

    async fn run_on_places(&self, connection: &mut PgConnection) -> Result<SurveyReport, ClaimError> {
        let columns = self.columns(connection).await?;
        let keeps_leases =
            self.side.is_some() || columns.of(ColumnRole::Owner).or(columns.of(ColumnRole::Until)).is_some();
        let mut report = SurveyReport { keeps_leases, ..SurveyReport::default() };
        if keeps_leases {
            report.taken = self.rows(connection, self.taken_sql(&columns), &mut report.more).await?;
        }
        if let Some(sql) = self.exhausted_sql(&columns) {
            report.exhausted = self.rows(connection, sql, &mut report.more).await?;
        }
        let query = sqlx::query(TRANSACTIONS).bind(&self.places[0]).persistent(false);
        let open = within_limit(query.fetch_all(&mut *connection)).await?;
        report.transactions =
            open.iter().map(transaction).collect::<Result<_, _>>().map_err(store_failure)?;
        Ok(report)
    }

    /// Returns the first rows of `sql`. Sets `more` if there are further rows.
    async fn rows(
        &self,
        connection: &mut PgConnection,
        sql: String,
        more: &mut bool,
    ) -> Result<Vec<SurveyedRow>, ClaimError> {
        let query = sqlx::query(AssertSqlSafe(sql)).bind(i64::from(self.limit) + 1).persistent(false);
        let mut rows = within_limit(query.fetch_all(connection)).await?;
        let limit = usize::try_from(self.limit).unwrap_or(usize::MAX);
        *more |= rows.len() > limit;
        rows.truncate(limit);
        rows.iter().map(surveyed).collect::<Result<_, _>>().map_err(store_failure)
    }

    /// Finds the columns of the roles: by the names that the user has given, or by usual names.
    async fn columns(&self, connection: &mut PgConnection) -> Result<Columns, ClaimError> {
        let query = sqlx::query_scalar::<_, String>(COLUMNS).bind(&self.places[0]).persistent(false);
        let present = within_limit(query.fetch_all(connection)).await?;
        if present.is_empty() {
            return Err(missing(&self.table));
        }
        let mut columns = Columns(self.named.clone());
        if let Some((role, missing)) =
            columns.0.iter().find(|(_, column)| !present.iter().any(|name| name == column.as_str()))
        {
            return Err(ClaimError::InvalidSpec(format!(
                "table {} has no column {missing} ({role:?}); it has {}",
                self.table,
                present.join(", ")
            )));
        }
        for (role, names) in KNOWN {
            let found = names.iter().find(|name| present.iter().any(|column| column == *name));
            if let (None, Some(name)) = (columns.of(role), found) {
                columns.0.push((role, Column::new(name)?));
            }
        }
        if columns.of(ColumnRole::Id).is_none() {
            return Err(ClaimError::InvalidSpec(format!(
                "table {} has no column id; name the one that identifies a row",
                self.table
            )));
        }
        Ok(columns)
    }

    fn taken_sql(&self, columns: &Columns) -> String {
        let own = |role| columns.sql("t", role);
        let [table, side] = &self.places;
        if self.side.is_none() {
            let owned = [columns.of(ColumnRole::Owner), columns.of(ColumnRole::Until)];
            let owned =
                owned.into_iter().flatten().map(|column| format!("t.{} IS NOT NULL", column.quoted()));
            let condition = owned.collect::<Vec<_>>().join(" OR ");
            return self.select("", own, &condition);
        }
        let in_queue = columns
            .of(ColumnRole::Queue)
            .map_or_else(|| "''".to_owned(), |column| format!("t.{}::text", column.quoted()));
        // Also accepts an empty queue, because the table might have a column with this name that the claims do not use
        // as a queue.
        let join = format!(
            "JOIN {side} s ON s.tab IN ({}, {}) AND s.queue IN ({in_queue}, '') AND s.id = {}::text",
            literal(&self.table.quoted()),
            literal(table),
            own(ColumnRole::Id),
        );
        let kept = |role| match role {
            ColumnRole::Owner => "s.owner".to_owned(),
            ColumnRole::Epoch => "s.epoch".to_owned(),
            ColumnRole::Until => "s.lease_until".to_owned(),
            ColumnRole::TakenAt => "s.taken_at".to_owned(),
            other => own(other),
        };
        self.select(&join, kept, "true")
    }

    fn exhausted_sql(&self, columns: &Columns) -> Option<String> {
        let state = columns.of(ColumnRole::State).map(|column| format!("t.{}::text", column.quoted()))?;
        let mut condition = format!("{state} = {}", literal(&self.exhausted));
        if let Some(attempts) = columns.of(ColumnRole::Attempts) {
            let takeable: Vec<_> = self.takeable.iter().map(|state| literal(state)).collect();
            if !takeable.is_empty() {
                condition +=
                    &format!(" OR (t.{} <= 0 AND {state} IN ({}))", attempts.quoted(), takeable.join(", "));
            }
        }
        Some(self.select("", |role| columns.sql("t", role), &condition))
    }

    fn select(&self, join: &str, of: impl Fn(ColumnRole) -> String, condition: &str) -> String {
        let text = |role| format!("({})::text", of(role));
        // Returns NULL for an infinite time, because its distance is infinite.
        let seconds = |role, sign| {
            let time = format!("({})::timestamptz", of(role));
            format!(
                "CASE WHEN isfinite({time}) THEN {sign}extract(epoch FROM {time} - pg_catalog.clock_timestamp())::float8 END"
            )
        };
        format!(
            "SELECT {queue}, {id}, {group}, {state}, {owner}, ({epoch})::bigint, {held}, {left}, ({attempts})::bigint, {error} \
             FROM {table} t {join} WHERE {condition} ORDER BY {since} NULLS LAST, {id} LIMIT $1",
            queue = text(ColumnRole::Queue),
            id = text(ColumnRole::Id),
            group = text(ColumnRole::Group),
            state = text(ColumnRole::State),
            owner = text(ColumnRole::Owner),
            epoch = of(ColumnRole::Epoch),
            held = seconds(ColumnRole::TakenAt, "-"),
            left = seconds(ColumnRole::Until, ""),
            attempts = of(ColumnRole::Attempts),
            error = text(ColumnRole::Error),
            table = self.places[0],
            since = format_args!("({})::timestamptz", of(ColumnRole::TakenAt)),
        )
    }
}

/// The table's columns, by role.
#[derive(Debug)]
struct Columns(Vec<(ColumnRole, Column)>);

impl Columns {
    fn of(&self, role: ColumnRole) -> Option<&Column> {
        self.0.iter().find(|(known, _)| *known == role).map(|(_, column)| column)
    }

    /// Returns the column with this role, qualified with `alias`, as SQL. `NULL` if the table has none.
    fn sql(&self, alias: &str, role: ColumnRole) -> String {
        self.of(role).map_or_else(|| "NULL".to_owned(), |column| format!("{alias}.{}", column.quoted()))
    }
}

/// Returns the table's name with its schema, resolved by the session's search path.
async fn place_of(connection: &mut PgConnection, table: &Table) -> Result<String, ClaimError> {
    let query = sqlx::query_as::<_, (String, Option<String>)>(PLACE).bind(table.quoted()).persistent(false);
    match within_limit(query.fetch_optional(connection)).await? {
        None => Err(missing(table)),
        Some((place, None)) => Ok(place),
        Some((place, Some(owner))) => Err(Error::new(
            ErrorKind::PermissionDenied,
            format!(
                "{place} belongs to the role {owner:?}, whose views and casts would run with the rights of a superuser; connect as that role, or as one that may SELECT from it (docs/hazards.md H57)"
            ),
        )
        .into()),
    }
}

fn missing(table: &Table) -> ClaimError {
    ClaimError::InvalidSpec(format!(
        "there is no table {table}; name it with its schema, and look at the database of the URL"
    ))
}

/// Query for a table's full name. It also returns an owner other than this role, for a superuser. Operators are
/// schema-qualified, because the search path still includes other schemas.
const PLACE: &str = "\
SELECT pg_catalog.concat(pg_catalog.quote_ident(n.nspname), '.', pg_catalog.quote_ident(c.relname)),
    (SELECT r.rolname::pg_catalog.text FROM pg_catalog.pg_roles r, pg_catalog.pg_roles me
        WHERE r.oid OPERATOR(pg_catalog.=) c.relowner AND NOT r.rolsuper AND r.oid OPERATOR(pg_catalog.<>) me.oid
            AND me.rolname OPERATOR(pg_catalog.=) current_user AND me.rolsuper)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($1)::pg_catalog.oid";

/// Query for the columns of a table (`$1`, quoted).
const COLUMNS: &str = "\
SELECT a.attname::text FROM pg_catalog.pg_attribute a
WHERE a.attrelid = pg_catalog.to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum";

/// Query for other transactions that have the table lock (`$1`, quoted) of `SELECT ... FOR UPDATE` and `UPDATE`. A
/// prepared transaction has no process, and is found by its locked transaction id.
const TRANSACTIONS: &str = "\
SELECT DISTINCT ON (l.pid, l.virtualtransaction) l.pid, p.gid, nullif(a.application_name, ''), a.client_addr::text, a.state,
       extract(epoch FROM pg_catalog.clock_timestamp() - coalesce(a.xact_start, p.prepared))::float8
FROM pg_catalog.pg_locks l LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
  LEFT JOIN (pg_catalog.pg_locks x JOIN pg_catalog.pg_prepared_xacts p ON p.transaction = x.transactionid)
    ON l.pid IS NULL AND x.pid IS NULL AND x.locktype = 'transactionid' AND x.virtualtransaction = l.virtualtransaction
WHERE l.locktype = 'relation' AND l.relation = pg_catalog.to_regclass($1) AND l.granted
  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database())
  AND l.mode IN ('RowShareLock', 'RowExclusiveLock') AND l.pid IS DISTINCT FROM pg_catalog.pg_backend_pid()
ORDER BY l.pid, l.virtualtransaction";

async fn within_limit<T>(work: impl Future<Output = Result<T, sqlx::Error>>) -> Result<T, ClaimError> {
    match timeout(ANSWER_LIMIT, work).await {
        Ok(answer) => answer.map_err(store_failure),
        Err(_) => Err(ClaimError::Store(Error::new(
            ErrorKind::Unavailable,
            "the server did not answer in time; check its load and who has locked the table, then try again",
        ))),
    }
}

fn store_failure(error: sqlx::Error) -> ClaimError {
    ClaimError::Store(store_error(error, OPERATION))
}

fn surveyed(row: &PgRow) -> Result<SurveyedRow, sqlx::Error> {
    Ok(SurveyedRow {
        queue: row.try_get(0)?,
        id: row.try_get(1)?,
        group: row.try_get(2)?,
        state: row.try_get(3)?,
        owner: row.try_get(4)?,
        epoch: row.try_get(5)?,
        held_for: row.try_get::<Option<f64>, _>(6)?.map(seconds),
        remaining: row.try_get::<Option<f64>, _>(7)?.map(seconds),
        attempts_left: row.try_get(8)?,
        error: row.try_get(9)?,
    })
}

fn transaction(row: &PgRow) -> Result<OpenTransaction, sqlx::Error> {
    Ok(OpenTransaction {
        pid: row.try_get(0)?,
        prepared: row.try_get(1)?,
        application: row.try_get(2)?,
        client: row.try_get(3)?,
        activity: row.try_get(4)?,
        open_for: row.try_get::<Option<f64>, _>(5)?.map(seconds),
    })
}

/// Converts seconds to a duration. Negative seconds become zero.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
