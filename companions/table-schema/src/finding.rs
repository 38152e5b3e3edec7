//! Results of a check.

/// A defect of a table, as a sentence with the fix.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// The table works, but not well.
    Warning(String),
    /// The table would not work.
    Error(String),
}

impl Finding {
    /// Returns the sentence.
    #[must_use]
    pub fn message(&self) -> &str {
        let (Self::Warning(message) | Self::Error(message)) = self;
        message
    }

    /// Returns whether the table cannot be used as it is.
    #[must_use]
    pub fn is_error(&self) -> bool {
        matches!(self, Self::Error(_))
    }
}
