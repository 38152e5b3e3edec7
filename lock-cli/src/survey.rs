//! What is taken on a table, for operators: without a spec, from the table itself.

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

/// How long the server has for each answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(30);

const OPERATION: &str = "look at the claims of a table";

/// Names by which columns are found that were not named, best first. `migration` and the documentation use
/// the first of each.
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

/// What a column of a claimed table is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ColumnRole {
    /// It identifies the row.
    Id,
    /// The state.
    State,
    /// The queue.
    Queue,
    /// The entity that the row is about.
    Group,
    /// Who has the row.
    Owner,
    /// How often it was taken.
    Epoch,
    /// Until when.
    Until,
    /// Since when.
    TakenAt,
    /// How often it can still be tried.
    Attempts,
    /// The message of a failure.
    Error,
}

/// A look at the claims of a table: what is taken under leases, what is exhausted, and which transactions
/// may hold rows. Finds the columns by their usual names; others can be named.
#[derive(Clone, Debug)]
pub(crate) struct Survey {
    table: Table,
    named: Vec<(ColumnRole, Column)>,
    side: Option<Table>,
    takeable: Vec<String>,
    exhausted: String,
    limit: u32,
    /// Where the table and the side table were found, as SQL.
    places: [String; 2],
}

/// What a [`Survey`] has found.
#[derive(Clone, Debug, Default)]
pub(crate) struct SurveyReport {
    /// Rows under a lease, those that were taken first before the others.
    pub(crate) taken: Vec<SurveyedRow>,
    /// Rows without an attempt left that nobody has.
    pub(crate) exhausted: Vec<SurveyedRow>,
    /// Open transactions that have locked rows of the table, or may have: held claims are such.
    pub(crate) transactions: Vec<OpenTransaction>,
    /// Whether the table, or a side table, keeps who has a row. Otherwise there are only held claims, and
    /// `taken` is empty.
    pub(crate) keeps_leases: bool,
    /// Whether more rows are taken, or exhausted, than were asked for.
    pub(crate) more: bool,
}

/// A row as an operator sees it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SurveyedRow {
    /// The queue, where there are queues.
    pub(crate) queue: Option<String>,
    /// The id.
    pub(crate) id: String,
    /// The entity that it is about.
    pub(crate) group: Option<String>,
    /// Its state.
    pub(crate) state: Option<String>,
    /// Who has it.
    pub(crate) owner: Option<String>,
    /// Under which epoch.
    pub(crate) epoch: Option<i64>,
    /// How long it has been taken, by the server's clock.
    pub(crate) held_for: Option<Duration>,
    /// How long its lease lasts; zero when it has ended and nobody has swept it.
    pub(crate) remaining: Option<Duration>,
    /// How often it can be tried after this time.
    pub(crate) attempts_left: Option<i64>,
    /// The message of its last failure.
    pub(crate) error: Option<String>,
}

/// A transaction that has a lock on the table under which rows are locked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OpenTransaction {
    /// The process on the server; none of a prepared transaction.
    pub(crate) pid: Option<i32>,
    /// The name of a prepared transaction, by which `ROLLBACK PREPARED` ends it.
    pub(crate) prepared: Option<String>,
    /// What the client calls itself.
    pub(crate) application: Option<String>,
    /// Where the client is.
    pub(crate) client: Option<String>,
    /// What it does, as the server says: `active`, `idle in transaction`, ...
    pub(crate) activity: Option<String>,
    /// How long the transaction has been open.
    pub(crate) open_for: Option<Duration>,
}

impl Survey {
    /// A look at `table`, at most a thousand rows of each sort.
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

    /// The column for `role` is `name`.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when the server could not have such a name.
    pub(crate) fn column(mut self, role: ColumnRole, name: &str) -> Result<Self, ClaimError> {
        self.named.push((role, Column::new(name)?));
        Ok(self)
    }

    /// The leases are kept in `table`.
    pub(crate) fn side_table(mut self, table: Table) -> Self {
        self.side = Some(table);
        self
    }

    /// The states from which rows are taken; by default `new`, and `false` of a boolean column. A row in one
    /// of them without an attempt left is exhausted.
    pub(crate) fn takeable<S: Into<String>>(mut self, states: impl IntoIterator<Item = S>) -> Self {
        self.takeable = states.into_iter().map(Into::into).collect();
        self
    }

    /// The state of exhausted rows; by default `exhausted`.
    pub(crate) fn exhausted_state(mut self, state: impl Into<String>) -> Self {
        self.exhausted = state.into();
        self
    }

    /// At most so many rows of each sort.
    pub(crate) fn limit(mut self, rows: u32) -> Self {
        self.limit = rows;
        self
    }

    /// Looks. Reads only, takes no locks but those of reading.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when there is no such table or column,
    /// [`Store`](ClaimError::Store) when the server refuses or does not answer within 30 s.
    ///
    /// # Cancel safety
    ///
    /// It only looks; a connection whose answer was not awaited must not be used again.
    pub(crate) async fn run(&self, connection: &mut PgConnection) -> Result<SurveyReport, ClaimError> {
        let mut transaction = within_limit(connection.begin()).await?;
        let mut found = self.clone();
        for (place, table) in found.places.iter_mut().zip([Some(&self.table), self.side.as_ref()]) {
            if let Some(table) = table {
                *place = place_of(&mut transaction, table).await?;
            }
        }
        // From here on nothing is looked up where others may have made something that fits better.
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

    /// The first rows that `sql` finds; `more` becomes true where there are others behind them.
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

    /// What there is, by name and by habit.
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
        // The table may have a column that is called so and is no queue to those who claim.
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
        // A time without end has no distance; `NULL` shows as no time at all.
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

/// Which column is for what.
#[derive(Debug)]
struct Columns(Vec<(ColumnRole, Column)>);

impl Columns {
    fn of(&self, role: ColumnRole) -> Option<&Column> {
        self.0.iter().find(|(known, _)| *known == role).map(|(_, column)| column)
    }

    /// The column of `alias`, or nothing.
    fn sql(&self, alias: &str, role: ColumnRole) -> String {
        self.of(role).map_or_else(|| "NULL".to_owned(), |column| format!("{alias}.{}", column.quoted()))
    }
}

/// The table's name with its schema. It is found as the session finds it.
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

/// For a superuser also another owner. Operators are named with their schema, as long as others' would be found.
const PLACE: &str = "\
SELECT pg_catalog.concat(pg_catalog.quote_ident(n.nspname), '.', pg_catalog.quote_ident(c.relname)),
    (SELECT r.rolname::pg_catalog.text FROM pg_catalog.pg_roles r, pg_catalog.pg_roles me
        WHERE r.oid OPERATOR(pg_catalog.=) c.relowner AND NOT r.rolsuper AND r.oid OPERATOR(pg_catalog.<>) me.oid
            AND me.rolname OPERATOR(pg_catalog.=) current_user AND me.rolsuper)
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid OPERATOR(pg_catalog.=) c.relnamespace
WHERE c.oid OPERATOR(pg_catalog.=) pg_catalog.to_regclass($1)::pg_catalog.oid";

/// The columns of a table (`$1`, quoted).
const COLUMNS: &str = "\
SELECT a.attname::text FROM pg_catalog.pg_attribute a
WHERE a.attrelid = pg_catalog.to_regclass($1) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attnum";

/// Who else has a table (`$1`, quoted) locked as `SELECT ... FOR UPDATE` and `UPDATE` do. A prepared transaction has no
/// process: it is known by the transaction id that it keeps locked as well.
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

/// A time that lies behind is none.
fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or_default()
}
