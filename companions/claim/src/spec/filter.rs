//! The condition that a spec adds to its claims.

/// A piece of SQL that becomes a part of statements unchanged. **Never build one from external input**, because its
/// names are unquoted and its values unbound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sql(String);

impl Sql {
    /// Trusts `text` to be one boolean expression over the columns of the claimed table, which is named `t`:
    /// `Sql::trusted("t.region = 'eu'")`.
    pub fn trusted(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
