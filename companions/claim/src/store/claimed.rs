//! Claims as a store hands them out.

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
    /// Who has it, and which rows under which epochs: what later calls match.
    pub claim: ClaimRef,
    /// The rows, in order.
    pub rows: Vec<ClaimedRow>,
    /// The group, where the spec names one and the row has one.
    pub group: Option<Arc<str>>,
    /// The shortest lease of its rows.
    pub lease: Duration,
    /// The shortest timeout that its rows have of their own.
    pub(crate) timeout: Option<Duration>,
}

impl Claimed {
    /// A number that grows with every claim of a row, to be passed to whatever the work changes elsewhere: who
    /// comes with a smaller one than was seen for this row is late. The greatest of its rows; `None` where
    /// the spec keeps none.
    #[must_use]
    pub fn epoch(&self) -> Option<i64> {
        self.rows.iter().map(|row| row.epoch).max().filter(|epoch| *epoch > 0)
    }
}

/// A row as it was claimed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClaimedRow {
    /// Which row.
    pub key: RowKey,
    /// The epoch of this claim; 0 where the spec keeps none.
    pub epoch: i64,
    /// The state in which it was found.
    pub found: State,
    /// The kind of work, where the spec has kinds.
    pub kind: Option<Arc<str>>,
    /// How often it can be tried after this time, where the spec counts attempts.
    pub attempts_left: Option<i32>,
    /// The columns that the spec names as work, as an object; `Null` where it names none, and their JSON as text
    /// where it cannot be read.
    pub work: Value,
}

impl ClaimedRow {
    /// Its id as a number, UUID or text, or as whatever reads such a text: `row.id::<i64>()`.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when it is not of that type, or too large for it.
    pub fn id<T: FromStr<Err: fmt::Display>>(&self) -> Result<T, ClaimError> {
        let id = self.key.id.to_string();
        id.parse().map_err(|error| {
            ClaimError::spec(format!("the id {id:?} is no {}: {error}", std::any::type_name::<T>()))
        })
    }

    /// The columns of the work as a value of your own.
    ///
    /// # Errors
    ///
    /// [`InvalidSpec`](ClaimError::InvalidSpec) when they do not fit its type.
    pub fn work<T: DeserializeOwned>(&self) -> Result<T, ClaimError> {
        T::deserialize(&self.work).map_err(|error| {
            ClaimError::spec(format!("the work of row {} is not what was expected: {error}", self.key))
        })
    }

    /// The same text each time the row is worked on, for whoever has to recognise a repetition: the table,
    /// the queue, the id. Lengths keep `a` + `bc` and `ab` + `c` apart.
    #[must_use]
    pub fn dedupe_key(&self, spec: &ClaimSpec) -> String {
        let (table, id) = (spec.table().to_string(), self.key.id.to_string());
        match &self.key.queue {
            Some(queue) => format!("{}:{table}/{}:{queue}/{id}", table.len(), queue.len()),
            None => format!("{}:{table}/{id}", table.len()),
        }
    }
}
