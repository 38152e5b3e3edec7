//! Builds statements of several steps: `WITH first AS (...), second AS (...) SELECT ...`.

/// The steps of a statement, except for its last one.
#[derive(Debug, Default)]
pub(crate) struct With {
    steps: Vec<String>,
    is_recursive: bool,
}

impl With {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Adds a query as step `name`, whose rows later steps read. The server runs it once.
    pub(crate) fn step(self, name: &str, query: &str) -> Self {
        self.with(format!("{name} AS MATERIALIZED ({query})"))
    }

    /// Adds an INSERT, UPDATE or DELETE as step `name`.
    pub(crate) fn change(self, name: &str, change: &str) -> Self {
        self.with(format!("{name} AS ({change})"))
    }

    /// Adds a recursive query as step `name`, which reads its own rows.
    pub(crate) fn recursive(mut self, name: &str, query: &str) -> Self {
        self.is_recursive = true;
        self.with(format!("{name} AS ({query})"))
    }

    fn with(mut self, step: String) -> Self {
        self.steps.push(step);
        self
    }

    /// Returns the whole statement: the steps, and then `last`.
    pub(crate) fn end(self, last: &str) -> String {
        let recursive = if self.is_recursive { "RECURSIVE " } else { "" };
        format!("WITH {recursive}{}\n{last}", self.steps.join(",\n"))
    }
}
