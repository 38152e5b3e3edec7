//! A table through which recorders pass work to workers: its definition, its spec, and the recording of a row.
//!
//! Its rows have a number, a state and a kind from closed sets, and an entity that they are about. The entity is
//! created once and then updated any number of times. One claim takes all outstanding rows of an entity.

use std::fmt;

use leasehold_claim::sqlx::{PgConnection, PgPool, query_scalar, raw_sql};
use leasehold_claim::{ClaimError, ClaimSpec, State, States, Table, Unmet};

const TABLE: &str = "
    CREATE TABLE IF NOT EXISTS request (
        id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
        status text NOT NULL DEFAULT 'new',
        kind text NOT NULL DEFAULT 'create' CONSTRAINT request_kinds CHECK (kind IN ('create', 'update')),
        entity_id bigint NOT NULL,
        document jsonb
    );
    CREATE UNIQUE INDEX IF NOT EXISTS request_one_create ON request (entity_id) WHERE kind = 'create'";

/// Inserts a row. The trigger that the migration makes wakes workers at the commit.
const RECORD: &str = "
    INSERT INTO request (kind, entity_id, document) VALUES ($1, $2, $3::jsonb)
    ON CONFLICT (entity_id) WHERE kind = 'create' DO NOTHING RETURNING id";

/// The states of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestState {
    New,
    InProgress,
    Complete,
    Error,
}

impl RequestState {
    const ALL: [Self; 4] = [Self::New, Self::InProgress, Self::Complete, Self::Error];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::InProgress => "in-progress",
            Self::Complete => "complete",
            Self::Error => "error",
        }
    }
}

impl From<RequestState> for State {
    fn from(state: RequestState) -> Self {
        state.name().into()
    }
}

impl TryFrom<&State> for RequestState {
    type Error = UnknownState;

    fn try_from(state: &State) -> Result<Self, UnknownState> {
        let known = Self::ALL.into_iter().find(|known| known.name() == state.as_str());
        known.ok_or_else(|| UnknownState(state.clone()))
    }
}

/// A state that requests do not have.
#[derive(Debug, PartialEq)]
pub(crate) struct UnknownState(State);

impl fmt::Display for UnknownState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "requests have no state {}; add it to RequestState, or correct the row", self.0)
    }
}

impl std::error::Error for UnknownState {}

pub(crate) fn spec() -> Result<ClaimSpec, ClaimError> {
    let states = States::text([RequestState::New], RequestState::Complete)
        .taken(RequestState::InProgress)
        .failed(RequestState::Error);
    ClaimSpec::builder(Table::new("request")?)
        .state("status", states)
        .kind("kind")
        .group("entity_id")
        .grouped()
        .waits("update", "create", Unmet::Block, Unmet::Block)
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .max_attempts(3)
        .error("error")
        .work(["document"])
        .build()
}

/// Makes or updates the table, and checks it.
pub(crate) async fn create(pool: &PgPool, spec: &ClaimSpec) -> Result<(), ClaimError> {
    raw_sql(TABLE).execute(pool).await.map_err(|error| ClaimError::of(error, "make the table"))?;
    spec.migration().apply(pool).await?;
    spec.ensure(pool).await
}

/// Records work and wakes workers, both at the commit of the transaction of `connection`. Returns the row's number,
/// or `None` if the entity was created already.
pub(crate) async fn record(
    connection: &mut PgConnection,
    kind: &str,
    entity: i64,
    document: Option<&str>,
) -> Result<Option<i64>, ClaimError> {
    let made = query_scalar(RECORD).bind(kind).bind(entity).bind(document);
    made.fetch_optional(connection).await.map_err(|error| ClaimError::of(error, "record a change"))
}
