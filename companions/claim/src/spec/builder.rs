//! Putting a spec together.

use std::sync::Arc;

use leasehold_table_schema::sql::hash;
use leasehold_table_schema::{Column, Table};

use super::{ClaimSpec, Inner, Order, OrderType, Precondition, Retention, TenantLimit, Tracking, Unmet};
use crate::error::ClaimError;
use crate::spec::filter::Sql;
use crate::spec::ids::IdType;
use crate::spec::states::{StateType, States};

/// The most rows of a group that one claim takes by default.
const GROUP_LIMIT: u32 = 10_000;

/// The highest limit.
const MOST_AT_WORK: u32 = 10_000;

/// The most bytes of a channel's name.
const LONGEST_CHANNEL: usize = 63;

/// A spec that is being put together. Setters never fail: [`build`](Self::build) names the first mistake.
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

    /// The column that identifies a row (within its queue). By default `id`, a number. It needs a unique index of its own,
    /// or with the queue. A table whose key has further columns is refused, because a unique constraint on a part of the
    /// key would refuse rows of the application.
    pub fn id(mut self, column: &str, kind: IdType) -> Self {
        self.inner.id = self.column(column);
        self.inner.id_type = kind;
        self
    }

    /// The column of the state, and what its states mean. Needed.
    pub fn state(mut self, column: &str, states: States) -> Self {
        self.inner.state = self.column(column);
        self.inner.states = states;
        self.has_state = true;
        self
    }

    /// Rows are taken in ascending order of this column, after those named before and before the id.
    pub fn order_by(self, column: &str, kind: OrderType) -> Self {
        self.ordered(column, kind, false)
    }

    /// The same, in descending order: for priorities.
    pub fn order_by_descending(self, column: &str, kind: OrderType) -> Self {
        self.ordered(column, kind, true)
    }

    fn ordered(mut self, column: &str, kind: OrderType, descending: bool) -> Self {
        let column = self.column(column);
        self.inner.order.push(Order { column, kind, descending });
        self
    }

    /// The `text` column of the queue. A row is then identified by queue and id.
    pub fn queue(mut self, column: &str) -> Self {
        self.inner.queue = Some(self.column(column));
        self
    }

    /// The column that says which entity a row is about. Rows without one (NULL) are each on their own.
    pub fn group(mut self, column: &str) -> Self {
        self.inner.group = Some(self.column(column));
        self
    }

    /// One claim takes the outstanding rows of an entity, up to [`group_limit`](Self::group_limit), and no two claims
    /// ever have rows of one entity.
    pub fn grouped(mut self) -> Self {
        self.inner.grouped = true;
        self
    }

    /// The most rows of an entity that one claim takes, the first in order: 10,000 unless told otherwise. With 1, the rows of
    /// an entity are claimed and settled one after the other; one that is to be tried later is overtaken meanwhile. The rest is
    /// taken when these are settled.
    pub fn group_limit(mut self, rows: u32) -> Self {
        self.inner.group_limit = rows;
        self
    }

    /// At most `most` rows with the same value in `column` are worked on at a time, across all processes: of a tenant, or of a
    /// queue. Rows without a value (NULL) have no limit. The rows of a tenant that has no room stop nobody behind them.
    ///
    /// What counts is what is held in an open transaction, and each lease until it is settled: one that has ended too, until
    /// a sweep returns its row, or until it is read with [`expire_on_read`](Self::expire_on_read). All processes have
    /// to name column and number alike; while two numbers are in use, the greater one holds. Not for rows that are
    /// [`grouped`](Self::grouped).
    ///
    /// Whoever takes locks the tenants for a moment; who finds them locked passes over them, and comes back after a
    /// pause. A table with this has two further indexes, which the migration makes.
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

    /// The `text` column of the kind of work, for [`waits`](Self::waits).
    pub fn kind(mut self, column: &str) -> Self {
        self.inner.kind = Some(self.column(column));
        self
    }

    /// Rows of `kind` wait until every row of kind `on` of the same group is done. `failed` says what becomes
    /// of them when such a row has failed (or is exhausted), `missing` what when there is none.
    pub fn waits(mut self, kind: &str, on: &str, failed: Unmet, missing: Unmet) -> Self {
        self.inner.preconditions.push(Precondition { kind: kind.into(), on: on.into(), failed, missing });
        self
    }

    /// The `integer` column of attempts left: each claim takes one, at zero a row is not taken.
    pub fn attempts(mut self, column: &str) -> Self {
        self.inner.attempts = Some(self.column(column));
        self
    }

    /// How many attempts a row has unless it is given another number: the default of the column that the migration
    /// adds. Claims know by it [which attempt](crate::Claim::attempt) they are.
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

    /// The columns of the lease: the owner (`uuid`), the epoch (`bigint`), and until when (`timestamptz`).
    pub fn lease_columns(mut self, owner: &str, epoch: &str, until: &str) -> Self {
        let (owner, epoch, until) = (self.column(owner), self.column(epoch), self.column(until));
        self.inner.tracking = Tracking::Columns { owner, epoch, until };
        self
    }

    /// The lease is kept in `table` instead, because the claimed table must not get further columns. Made by
    /// [`ClaimSpec::migration`]. Any number of tables may share it, also tables of one name in several schemas: it knows
    /// each by schema and name. After a rename, change its column `tab` too.
    pub fn side_table(mut self, table: Table) -> Self {
        self.inner.tracking = Tracking::Side(table);
        self
    }

    /// Owners are the next numbers of `sequence` instead of random UUIDs; the owner's column is a `bigint`.
    pub fn owner_sequence(mut self, sequence: Table) -> Self {
        self.inner.owner_sequence = Some(sequence);
        self
    }

    /// Epochs are the next numbers of `sequence` instead of counting up in each row: then they also grow from
    /// one row to the next, so that whoever fences by entity can compare them, and held claims have one.
    pub fn epoch_sequence(mut self, sequence: Table) -> Self {
        self.inner.epoch_sequence = Some(sequence);
        self
    }

    /// The `timestamptz` column that keeps since when a row is taken.
    pub fn taken_at(mut self, column: &str) -> Self {
        self.inner.taken_at = Some(self.column(column));
        self
    }

    /// The `timestamptz` column that keeps when a row was settled.
    pub fn settled_at(mut self, column: &str) -> Self {
        self.inner.settled_at = Some(self.column(column));
        self
    }

    /// The `timestamptz` column before which a row is not taken; NULL means at once. Needed to retry later.
    ///
    /// Each take reads the rows for later that come before those it takes. Where there may be many of them, order by this
    /// column first ([`order_by`](Self::order_by)): `NOT NULL`, as the migration makes it, it costs nothing then, however
    /// many they are. A process asks once whether it is: restart those that run before `NOT NULL` is dropped.
    pub fn ready_at(mut self, column: &str) -> Self {
        self.inner.ready_at = Some(self.column(column));
        self
    }

    /// The `integer` column with the seconds of the row's own lease; NULL means what the claim asks for.
    pub fn timeout_seconds(mut self, column: &str) -> Self {
        self.inner.timeout = Some(self.column(column));
        self
    }

    /// The `text` column for the message of a failure.
    pub fn error(mut self, column: &str) -> Self {
        self.inner.error = Some(self.column(column));
        self
    }

    /// Columns that a claim brings along, as JSON made by the server. A `numeric` is a string in it, as are the elements of
    /// an array of them, so that no digit is lost on the way through a float; numbers inside of a `json` column stay as
    /// they are, and lose theirs where they are read.
    pub fn work<'a>(mut self, columns: impl IntoIterator<Item = &'a str>) -> Self {
        for column in columns {
            let column = self.column(column);
            self.inner.work.push(column);
        }
        self
    }

    /// Only rows for which `condition` is true are ever taken.
    pub fn filter(mut self, condition: Sql) -> Self {
        self.inner.filter = Some(condition);
        self
    }

    /// How long settled rows stay; by default for ever.
    pub fn retention(mut self, retention: Retention) -> Self {
        self.inner.retention = retention;
        self
    }

    /// A lease that has ended counts as ended whenever it is read, by the claim too, so that nobody waits for
    /// a sweep. Needs the function and the index of [`ClaimSpec::migration`].
    pub fn expire_on_read(mut self) -> Self {
        self.inner.on_read = true;
        self
    }

    /// Another channel for wake-ups than the one derived from the table's name. A name that the server would
    /// cut is replaced by a hash of it.
    pub fn channel(mut self, name: &str) -> Self {
        if name.is_empty() || name.contains('\0') {
            self.note(ClaimError::spec("the name of a channel needs at least one character, and no NUL"));
        } else {
            self.inner.channel = fitting(name);
        }
        self
    }

    /// Whether [`ClaimSpec::migration`] makes a trigger that wakes workers when rows are inserted, by whomever, also by
    /// plain SQL: once for each transaction, with its commit. By default it does, where rows are taken under leases.
    ///
    /// Transactions that notify commit one after the other, on the whole server, and cannot be prepared for a commit in
    /// two phases. Leave it out where inserts are frequent and small: then polls find the rows, up to 2 seconds later,
    /// and [`PgClaims::notify`](crate::PgClaims::notify) can announce a batch. A trigger that is there stays; drop it
    /// with its function, `<table>_claim_notify_<hash of the channel>`. Rows that come by logical replication, or
    /// straight into a partition, fire no such trigger; see [`ClaimerBuilder::poll`](crate::ClaimerBuilder::poll).
    pub fn notify_on_insert(mut self, notifies: bool) -> Self {
        self.inner.notify_on_insert = notifies;
        self
    }

    /// The spec.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) naming the first mistake: a name that cannot be one, states that
    /// contradict each other, something asked for without the column that it needs.
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
        // What rows are ordered by, and bring along, may have another meaning as well.
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

    /// The column, or the mistake noted and some column.
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
    // A valid name: never reaches a statement, because the mistake keeps the spec from being built.
    Column::known("id")
}

fn channel_of(table: &Table) -> Arc<str> {
    fitting(&format!("leasehold_claim.{table}"))
}

/// The name itself where the server keeps it whole, else one with a hash.
fn fitting(name: &str) -> Arc<str> {
    if name.len() <= LONGEST_CHANNEL {
        return name.into();
    }
    format!("leasehold_claim_{}", hash(name)).into()
}
