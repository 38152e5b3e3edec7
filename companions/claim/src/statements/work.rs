//! Parses the columns of the work, which the server sends as JSON.

use serde_json::Value;

use crate::spec::ids::RowKey;

/// Parses the columns of the work of a row. JSON that cannot be parsed (a number above 1e308, more than 128 levels)
/// stays text, so the worker of the row can fail it while the other rows of the call are good.
pub(crate) fn read(key: &RowKey, work: Option<String>) -> Value {
    let Some(work) = work else { return Value::Null };
    serde_json::from_str(&work).unwrap_or_else(|error| {
        tracing::warn!(row = %key, %error, "the work of a row is JSON beyond what can be read");
        Value::String(work)
    })
}
