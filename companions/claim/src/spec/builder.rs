//! Builds specs.

use std::sync::Arc;

use leasehold_table_schema::sql::hash;
use leasehold_table_schema::{Column, Table};

use super::{ClaimSpec, Inner, Order, OrderType, Precondition, Retention, TenantLimit, Tracking, Unmet};
use crate::error::ClaimError;
use crate::spec::filter::Sql;
use crate::spec::ids::IdType;
use crate::spec::states::{StateType, States};

/// The default number of rows of a group in one claim.
const GROUP_LIMIT: u32 = 10_000;

/// The greatest number that a spec can set as the limit of rows in progress.
const MOST_AT_WORK: u32 = 10_000;

/// The largest length of a channel's name in bytes.
const LONGEST_CHANNEL: usize = 63;

/// Builds a spec. Setters never fail: [`build`](Self::build) returns the first mistake.
#[derive(Debug)]
#[must_use = "call `build`"]
pub struct ClaimSpecBuilder {
    inner: Inner,
    has_state: bool,
    mistake: Option<ClaimError>,
}

impl ClaimSpecBuilder {
    pub(super) fn new(table: Table) -> Self {
        let channel = channel_of(&table);
        let mut builder = Self {
            inner: Inner {
                id: placeholder(),
                id_type: IdType::Int,
                state: placeholder(),
                states: States::boolean(),
                order: Vec::new(),
                queue: None,
                group: None,
                grouped: false,
                group_limit: GROUP_LIMIT,
                limit: None,
                kind: None,
                preconditions: Vec::new(),
                attempts: None,
                max_attempts: None,
                tracking: Tracking::None,
                owner_sequence: None,
                epoch_sequence: None,
                taken_at: None,
                settled_at: None,
                settled_by: None,
                ready_at: None,
                timeout: None,
                error: None,
                work: Vec::new(),
                filter: None,
                retention: Retention::KeepAll,
                on_read: false,
                channel,
                notify_on_insert: true,
                table,
            },
            has_state: false,
            mistake: None,
        };
        builder = builder.id("id", IdType::Int);
        builder
    }

    /// Sets the column that identifies a row (within its queue). The default is `id`, a number. The column needs a
    /// unique index, alone or with the queue. If the table's key has further columns, the migration refuses the
    /// table, because a unique constraint on a part of the key would refuse rows of the application.
    pub fn id(mut self, column: &str, kind: IdType) -> Self {
        self.inner.id = self.column(column);
        self.inner.id_type = kind;
        self
    }

    /// Sets the column of the state, and the meaning of its states. Required.
    pub fn state(mut self, column: &str, states: States) -> Self {
        self.inner.state = self.column(column);
        self.inner.states = states;
        self.has_state = true;
        self
    }

    /// Takes rows in ascending order of this column, after the columns of earlier calls and before the id.
    pub fn order_by(self, column: &str, kind: OrderType) -> Self {
        self.ordered(column, kind, false)
    }

    /// Takes rows in descending order of this column, for example for priorities.
    pub fn order_by_descending(self, column: &str, kind: OrderType) -> Self {
        self.ordered(column, kind, true)
    }

    fn ordered(mut self, column: &str, kind: OrderType, descending: bool) -> Self {
        let column = self.column(column);
        self.inner.order.push(Order { column, kind, descending });
        self
    }

    /// Sets the `text` column of the queue. Queue and id together then identify a row.
    pub fn queue(mut self, column: &str) -> Self {
        self.inner.queue = Some(self.column(column));
        self
    }

    /// Sets the column of the entity that a row is about. A row with NULL in it belongs to no group.
    pub fn group(mut self, column: &str) -> Self {
        self.inner.group = Some(self.column(column));
        self
    }

    /// Makes one claim take the outstanding rows of an entity, up to [`group_limit`](Self::group_limit). No two
    /// claims ever have rows of the same entity.
    pub fn grouped(mut self) -> Self {
        self.inner.grouped = true;
        self
    }

    /// Sets the largest number of rows of an entity in one claim, the first in order. The default is 10,000. The rest
    /// is taken when these rows are settled. With 1, the rows of an entity are claimed and settled one after the
    /// other, but later rows overtake a row that waits for a retry.
    pub fn group_limit(mut self, rows: u32) -> Self {
        self.inner.group_limit = rows;
        self
    }

    /// Limits the rows in progress with the same value in `column`, for example a tenant or a queue, to `most` across
    /// all processes. Rows with NULL in it have no limit. A full tenant does not block the rows behind it.
    ///
    /// Rows held in an open transaction count, and rows under a lease until they are settled. An ended lease counts
    /// until a sweep returns the row, or until it expires on read with [`expire_on_read`](Self::expire_on_read). All
    /// processes must use the same column and number. While two numbers are in use, the greater one applies. A spec
    /// cannot have a limit and be [`grouped`](Self::grouped).
    ///
    /// A take locks its tenants briefly. Takes that find a tenant locked skip it and come back after a pause. The
    /// migration makes two further indexes for a limit.
    ///
    /// ```
    /// use leasehold_claim::{ClaimSpec, States, Table};
    ///
    /// let spec = ClaimSpec::builder(Table::new("job")?)
    ///     .state("status", States::text(["new"], "done").taken("working").failed("failed"))
    ///     .lease_columns("owner", "epoch", "lease_until")
    ///     .limit("tenant", 5)
    ///     .build()?;
    /// assert!(spec.migration().sql().contains(r#"("tenant", "id")"#));
    /// # Ok::<(), leasehold_claim::ClaimError>(())
    /// ```
    pub fn limit(mut self, column: &str, most: u32) -> Self {
        self.inner.limit = Some(TenantLimit { column: self.column(column), most });
        self
    }

    /// Sets the `text` column of the kind of work, for [`waits`](Self::waits).
    pub fn kind(mut self, column: &str) -> Self {
        self.inner.kind = Some(self.column(column));
        self
    }

    /// Makes rows of `kind` wait until every row of kind `on` in the same group is done. `failed` decides about them
    /// if such a row has failed (or is exhausted), and `missing` if no such row exists.
    pub fn waits(mut self, kind: &str, on: &str, failed: Unmet, missing: Unmet) -> Self {
        self.inner.preconditions.push(Precondition { kind: kind.into(), on: on.into(), failed, missing });
        self
    }

    /// Sets the `integer` column of attempts left. Each claim takes one, and a row with zero is not taken.
    pub fn attempts(mut self, column: &str) -> Self {
        self.inner.attempts = Some(self.column(column));
        self
    }

    /// Sets the default number of attempts, which the migration gives to the column. Claims compute their
    /// [attempt](crate::Claim::attempt) from it.
    ///
    /// ```
    /// use leasehold_claim::{ClaimSpec, States, Table};
    ///
    /// let spec = ClaimSpec::builder(Table::new("job")?)
    ///     .state("status", States::text(["new"], "done").taken("working").failed("failed"))
    ///     .lease_columns("owner", "epoch", "lease_until")
    ///     .attempts("attempts_left")
    ///     .max_attempts(5)
    ///     .build()?;
    /// assert!(spec.migration().sql().contains("DEFAULT 5"));
    /// # Ok::<(), leasehold_claim::ClaimError>(())
    /// ```
    pub fn max_attempts(mut self, count: u32) -> Self {
        self.inner.max_attempts = Some(count);
        self
    }

    /// Sets the columns of the lease: owner (`uuid`), epoch (`bigint`) and end (`timestamptz`).
    pub fn lease_columns(mut self, owner: &str, epoch: &str, until: &str) -> Self {
        let (owner, epoch, until) = (self.column(owner), self.column(epoch), self.column(until));
        self.inner.tracking = Tracking::Columns { owner, epoch, until };
        self
    }

    /// Keeps the lease in `table` instead, if the claimed table must not get further columns.
    /// [`ClaimSpec::migration`] makes it. Any number of tables can share it, even with the same name in several
    /// schemas, because it stores schema and name. After a rename, update its column `tab` too.
    pub fn side_table(mut self, table: Table) -> Self {
        self.inner.tracking = Tracking::Side(table);
        self
    }

    /// Uses the next numbers of `sequence` as owners instead of random UUIDs. The owner's column is then a `bigint`.
    pub fn owner_sequence(mut self, sequence: Table) -> Self {
        self.inner.owner_sequence = Some(sequence);
        self
    }

    /// Uses the next numbers of `sequence` as epochs instead of a counter per row. Epochs then also grow from one row
    /// to the next, so a resource can fence by entity. Held claims have an epoch only with a sequence.
    pub fn epoch_sequence(mut self, sequence: Table) -> Self {
        self.inner.epoch_sequence = Some(sequence);
        self
    }

    /// Sets the `timestamptz` column of the time at which a row was taken.
    pub fn taken_at(mut self, column: &str) -> Self {
        self.inner.taken_at = Some(self.column(column));
        self
    }

    /// Sets the `timestamptz` column of the time at which a row was settled.
    pub fn settled_at(mut self, column: &str) -> Self {
        self.inner.settled_at = Some(self.column(column));
        self
    }

    /// Sets the `text` column that records which claim settled a row. Every end of a claim writes its
    /// [owner](crate::Claim::owner): done, failed, another state, a retry, a snooze, a row that is put back. An end
    /// without a claim writes NULL, which is a sweep, [`cancel`](crate::ClaimStore::cancel) and
    /// [`requeue`](crate::ClaimStore::requeue). A take leaves the column as it is. Owners are unique to a claim, so
    /// log them with the name of the process.
    ///
    /// ```
    /// use leasehold_claim::{ClaimSpec, States, Table};
    ///
    /// let spec = ClaimSpec::builder(Table::new("job")?)
    ///     .state("status", States::text(["new"], "done").taken("working"))
    ///     .lease_columns("owner", "epoch", "lease_until")
    ///     .settled_by("settled_by")
    ///     .build()?;
    /// assert!(spec.migration().sql().contains(r#""settled_by" text"#));
    /// # Ok::<(), leasehold_claim::ClaimError>(())
    /// ```
    pub fn settled_by(mut self, column: &str) -> Self {
        self.inner.settled_by = Some(self.column(column));
        self
    }

    /// Sets the `timestamptz` column of the time before which a row is not taken. NULL means at once. Needed for
    /// retries with a pause.
    ///
    /// Each take reads past the rows for later that come before its own rows. If there can be many, order by this
    /// column first ([`order_by`](Self::order_by)). With `NOT NULL`, as the migration makes it, such rows then cost
    /// nothing. A process reads this property once, so restart running processes after `NOT NULL` was dropped.
    pub fn ready_at(mut self, column: &str) -> Self {
        self.inner.ready_at = Some(self.column(column));
        self
    }

    /// Sets the `integer` column with the row's own lease in seconds. NULL means the lease that the claim requests.
    pub fn timeout_seconds(mut self, column: &str) -> Self {
        self.inner.timeout = Some(self.column(column));
        self
    }

    /// Sets the `text` column for the message of a failure.
    pub fn error(mut self, column: &str) -> Self {
        self.inner.error = Some(self.column(column));
        self
    }

    /// Sets the columns that a claim returns, as JSON that the server makes. A `numeric`, alone or in an array, becomes
    /// a string, because a float would lose digits. Numbers inside a `json` column stay numbers, and can lose digits in
    /// the reader.
    pub fn work<'a>(mut self, columns: impl IntoIterator<Item = &'a str>) -> Self {
        for column in columns {
            let column = self.column(column);
            self.inner.work.push(column);
        }
        self
    }

    /// Restricts claims to rows for which `condition` is true.
    pub fn filter(mut self, condition: Sql) -> Self {
        self.inner.filter = Some(condition);
        self
    }

    /// Sets the time for which settled rows stay. The default is indefinitely.
    pub fn retention(mut self, retention: Retention) -> Self {
        self.inner.retention = retention;
        self
    }

    /// Makes an ended lease count as ended on every read, also for claims, so no worker waits for a sweep. Needs the
    /// function and the index of [`ClaimSpec::migration`].
    pub fn expire_on_read(mut self) -> Self {
        self.inner.on_read = true;
        self
    }

    /// Sets another channel for wake-ups than the derived one. If the server would cut the name, a hash replaces it.
    pub fn channel(mut self, name: &str) -> Self {
        if name.is_empty() || name.contains('\0') {
            self.note(ClaimError::spec("the name of a channel needs at least one character, and no NUL"));
        } else {
            self.inner.channel = fitting(name);
        }
        self
    }

    /// Sets whether [`ClaimSpec::migration`] makes a trigger that wakes workers after each insert, also by plain SQL.
    /// It notifies once per transaction, at commit. The default is true if rows are taken under leases.
    ///
    /// Transactions that notify commit one after the other on the whole server, and cannot be prepared for a
    /// two-phase commit. For frequent small inserts leave the trigger out. Polls then find the rows up to 2 seconds
    /// later, and [`PgClaims::notify`](crate::PgClaims::notify) can announce a batch. An existing trigger stays: drop
    /// it with its function, `<table>_claim_notify_<hash of the channel>`. Logical replication and inserts straight
    /// into a partition do not fire it: see [`ClaimerBuilder::poll`](crate::ClaimerBuilder::poll).
    pub fn notify_on_insert(mut self, notifies: bool) -> Self {
        self.inner.notify_on_insert = notifies;
        self
    }

    /// Builds the spec.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) with the first mistake: an invalid name, contradictory states, or an
    /// option without the column that it needs.
    pub fn build(self) -> Result<ClaimSpec, ClaimError> {
        if let Some(mistake) = self.mistake {
            return Err(mistake);
        }
        let inner = self.inner;
        let wrong =
            |message: &str| Err(ClaimError::spec(format!("spec of table {}: {message}", inner.table)));
        inner.states.validate()?;
        let waits = |unmet: fn(&Precondition) -> Unmet| {
            inner.preconditions.iter().any(|one| unmet(one) == Unmet::Block)
        };
        let keeps_all = inner.retention == Retention::KeepAll;
        let keeps_for = matches!(inner.retention, Retention::KeepFor(_));
        let attempts = 1..=i32::MAX.unsigned_abs();
        let mistakes = [
            (!self.has_state, "name the column of the state"),
            (
                inner.limit.is_some() && inner.grouped,
                "a limit counts rows, and groups are taken whole; leave out one of them",
            ),
            (
                inner.limit.as_ref().is_some_and(|limit| !(1..=MOST_AT_WORK).contains(&limit.most)),
                "a limit is 1 to 10,000 rows; give another number",
            ),
            (inner.group_limit == 0, "a claim takes at least one row of a group; give a limit of 1 or more"),
            (inner.grouped && inner.group.is_none(), "rows are to be grouped; name the column of the group"),
            (
                inner.max_attempts.is_some() && inner.attempts.is_none(),
                "rows have a number of attempts; name the column of those that are left",
            ),
            (
                inner.max_attempts.is_some_and(|count| !attempts.contains(&count)),
                "a row has at least one attempt, and no more than an integer holds",
            ),
            (
                !inner.preconditions.is_empty() && (inner.group.is_none() || inner.kind.is_none()),
                "rows are to wait for others; name the columns of the group and of the kind",
            ),
            (inner.preconditions.iter().any(|row| row.kind == row.on), "a kind cannot wait for itself"),
            (
                keeps_for && inner.settled_at.is_none(),
                "settled rows are to be kept for a time; name the column of the time of settling",
            ),
            (
                !keeps_all && waits(|one| one.missing),
                "rows wait for others that have to be there, and settled rows are deleted; keep them all, or let rows run when the others are missing",
            ),
            (
                keeps_for && waits(|one| one.failed),
                "rows are blocked by others that failed, and those are deleted after a time; keep them all, or let rows run when the others failed",
            ),
            (
                inner.states.cyclic && !keeps_all,
                "rows that are worked on again and again are never old; keep them all",
            ),
            (
                inner.states.kind == StateType::Boolean && inner.states.taken.is_some(),
                "a boolean column has no third state for rows that are taken; leave `taken` out",
            ),
            (
                inner.on_read && !matches!(inner.tracking, Tracking::Columns { .. }),
                "leases that expire on read need lease columns in the table",
            ),
        ];
        if let Some((_, message)) = mistakes.into_iter().find(|(is_made, _)| *is_made) {
            return wrong(message);
        }
        // Allows a second meaning for these columns, for example in the order and as work.
        let is_free =
            |what: &str| matches!(what, "the order" | "the limit" | "work" | "the time of the next try");
        let parts = inner.parts(None).into_iter().filter(|part| !is_free(part.what));
        let columns: Vec<&Column> = parts.map(|part| part.column).chain([&inner.state]).collect();
        if let Some((_, column)) =
            columns.iter().enumerate().find(|(at, column)| columns[..*at].contains(column))
        {
            return wrong(&format!("the column {column} has two meanings; give each its own"));
        }
        Ok(ClaimSpec { inner: Arc::new(inner) })
    }

    /// Returns the column with this name. If the name is invalid, records the mistake and returns a placeholder.
    fn column(&mut self, name: &str) -> Column {
        match Column::new(name) {
            Ok(column) => column,
            Err(mistake) => {
                self.note(mistake.into());
                placeholder()
            }
        }
    }

    fn note(&mut self, mistake: ClaimError) {
        self.mistake.get_or_insert(mistake);
    }
}

fn placeholder() -> Column {
    // The placeholder is a valid name that reaches no statement, because the mistake prevents the build.
    Column::known("id")
}

fn channel_of(table: &Table) -> Arc<str> {
    fitting(&format!("leasehold_claim.{table}"))
}

/// Returns the name, or a hash of it if the server would cut the name.
fn fitting(name: &str) -> Arc<str> {
    if name.len() <= LONGEST_CHANNEL {
        return name.into();
    }
    format!("leasehold_claim_{}", hash(name)).into()
}
