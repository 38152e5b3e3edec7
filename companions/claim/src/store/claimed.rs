//! Claims as a store returns them.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;

use super::ClaimRef;
use crate::error::ClaimError;
use crate::spec::ClaimSpec;
use crate::spec::ids::RowKey;
use crate::spec::states::State;

/// One claim: a row, or all outstanding rows of a group.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Claimed {
    /// The owner, and the rows with their epochs. Later calls match all of them.
    pub claim: ClaimRef,
    /// The rows, in order.
    pub rows: Vec<ClaimedRow>,
    /// The group, if the spec has groups and the row is in one.
    pub group: Option<Arc<str>>,
    /// The lease of the claim, which is the shortest of its rows.
    pub lease: Duration,
    /// The shortest timeout that one of the rows has in its own column. `None` if no row has one.
    pub(crate) timeout: Option<Duration>,
}

impl Claimed {
    /// Returns a number that grows with every claim of a row: the greatest epoch of the rows. Pass it to every
    /// resource that the work changes, which must refuse a smaller number than it has seen for the row. `None` if the
    /// spec has no epochs.
    #[must_use]
    pub fn epoch(&self) -> Option<i64> {
        self.rows.iter().map(|row| row.epoch).max().filter(|epoch| *epoch > 0)
    }
}

/// A row as it was claimed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClaimedRow {
    /// The key of the row.
    pub key: RowKey,
    /// The epoch of this claim, or 0 if the spec has no epochs.
    pub epoch: i64,
    /// The state of the row before the claim.
    pub found: State,
    /// The kind of work, if the spec has kinds.
    pub kind: Option<Arc<str>>,
    /// The number of attempts left after this one, if the spec counts attempts.
    pub attempts_left: Option<i32>,
    /// The work columns of the spec as an object. `Null` if the spec has none, and text if their JSON cannot be parsed.
    pub work: Value,
}

impl ClaimedRow {
    /// Returns the id as a number, UUID or text, or as any type that parses it: `row.id::<i64>()`.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) if the id is not of that type, or too large for it.
    pub fn id<T: FromStr<Err: fmt::Display>>(&self) -> Result<T, ClaimError> {
        let id = self.key.id.to_string();
        id.parse().map_err(|error| {
            ClaimError::spec(format!("the id {id:?} is no {}: {error}", std::any::type_name::<T>()))
        })
    }

    /// Deserializes the columns of the work.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) if they do not fit the type.
    pub fn work<T: DeserializeOwned>(&self) -> Result<T, ClaimError> {
        T::deserialize(&self.work).map_err(|error| {
            ClaimError::spec(format!("the work of row {} is not what was expected: {error}", self.key))
        })
    }

    /// Returns a text that is the same each time the row is worked on, so another service can recognise a repetition.
    /// It consists of the table, the queue and the id, with lengths that keep `a` + `bc` and `ab` + `c` apart.
    #[must_use]
    pub fn dedupe_key(&self, spec: &ClaimSpec) -> String {
        let (table, id) = (spec.table().to_string(), self.key.id.to_string());
        match &self.key.queue {
            Some(queue) => format!("{}:{table}/{}:{queue}/{id}", table.len(), queue.len()),
            None => format!("{}:{table}/{id}", table.len()),
        }
    }
}
