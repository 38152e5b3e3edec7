//! The condition that a spec adds to its claims.

/// A piece of SQL that enters statements as it is. **Never build one from anything that comes from outside**:
/// this is the one place where no name is quoted and no value is bound.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sql(String);

impl Sql {
    /// Trusts `text` to be one boolean expression over the columns of the claimed table, which is called `t`
    /// in it: `Sql::trusted("t.region = 'eu'")`.
    pub fn trusted(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text as it is.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
