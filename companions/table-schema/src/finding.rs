//! Results of a check.

/// A way in which a table does not fit, in a sentence that says what to change.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Finding {
    /// It works, but not well.
    Warning(String),
    /// It would not work.
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
