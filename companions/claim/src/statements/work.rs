//! The columns of the work, as the server's JSON.

use serde_json::Value;

use crate::spec::ids::RowKey;

/// What the server has made of the columns. JSON beyond what can be read (a number above 1e308, more than 128
/// levels) stays text: whoever works on the row finds it unreadable and can fail it, while the rows that were
/// taken with it are good.
pub(crate) fn read(key: &RowKey, work: Option<String>) -> Value {
    let Some(work) = work else { return Value::Null };
    serde_json::from_str(&work).unwrap_or_else(|error| {
        tracing::warn!(row = %key, %error, "the work of a row is JSON beyond what can be read");
        Value::String(work)
    })
}
