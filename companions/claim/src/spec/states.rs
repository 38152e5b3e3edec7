//! The states of a row.

use std::fmt;
use std::sync::Arc;

use leasehold_table_schema::Table;

use crate::error::ClaimError;

/// The name of a state in the table, or `true` or `false` for a boolean column. An application with an enum of states
/// can implement `From` for it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct State(Arc<str>);

impl State {
    /// Builds the state with this name, which the spec checks in its build.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }

    /// Returns the name in the table.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.0, f)
    }
}

impl From<&str> for State {
    fn from(name: &str) -> Self {
        Self::new(name)
    }
}

/// The type of the column that holds the state.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StateType {
    /// `text` or `varchar`, preferably with a CHECK.
    Text,
    /// An enum type of the database.
    Enum(Table),
    /// `boolean`: `false` is claimable, `true` is done. A taken row has no separate state.
    Boolean,
}

/// The meaning of a table's states.
///
/// The check refuses numbers for states, as some frameworks store an enum, because a state is a name in statements,
/// constraints, errors and metrics. Change the type of the column to `text`.
///
/// ```
/// use leasehold_claim::States;
///
/// // For a text column with a CHECK.
/// let states = States::text(["new"], "complete")
///     .taken("in-progress")
///     .failed("error")
///     .exhausted("exhausted");
/// // For a column `processed boolean`.
/// let plain = States::boolean();
/// # let _ = (states, plain);
/// ```
#[derive(Clone, Debug)]
pub struct States {
    pub(crate) kind: StateType,
    /// The states from which rows can be claimed. Rows that are put back get the first.
    pub(crate) takeable: Vec<State>,
    pub(crate) taken: Option<State>,
    pub(crate) done: State,
    pub(crate) failed: Option<State>,
    pub(crate) exhausted: Option<State>,
    pub(crate) others: Vec<State>,
    /// Further allowed transitions, out of `taken` or between other states.
    pub(crate) transitions: Vec<(State, State)>,
    /// Whether rows in the state `done` can be claimed again.
    pub(crate) cyclic: bool,
}

impl States {
    /// Describes a `text` column: the claimable states, of which the first is the state of a row that was put back,
    /// and the state of done rows.
    pub fn text<S: Into<State>>(takeable: impl IntoIterator<Item = S>, done: impl Into<State>) -> Self {
        Self::of_type(StateType::Text, takeable, done)
    }

    /// Describes a column of the enum type `name`. See [`text`](Self::text).
    pub fn enumeration<S: Into<State>>(
        name: Table,
        takeable: impl IntoIterator<Item = S>,
        done: impl Into<State>,
    ) -> Self {
        Self::of_type(StateType::Enum(name), takeable, done)
    }

    /// Describes a `boolean` column: `false` is claimable, `true` is done. A taken row has no separate state, so the
    /// spec needs held claims, or columns or a side table for the lease.
    #[must_use]
    pub fn boolean() -> Self {
        Self::of_type(StateType::Boolean, ["false"], "true")
    }

    fn of_type<S: Into<State>>(
        kind: StateType,
        takeable: impl IntoIterator<Item = S>,
        done: impl Into<State>,
    ) -> Self {
        Self {
            kind,
            takeable: takeable.into_iter().map(Into::into).collect(),
            taken: None,
            done: done.into(),
            failed: None,
            exhausted: None,
            others: Vec::new(),
            transitions: Vec::new(),
            cyclic: false,
        }
    }

    /// Sets the state of a taken row. Without it, a taken row keeps its state and only the lease marks it.
    #[must_use]
    pub fn taken(mut self, state: impl Into<State>) -> Self {
        self.taken = Some(state.into());
        self
    }

    /// Sets the state of a row whose work has failed for good. Without it, failing is unsupported.
    #[must_use]
    pub fn failed(mut self, state: impl Into<State>) -> Self {
        self.failed = Some(state.into());
        self
    }

    /// Sets the state of a row without attempts left, also after [`OnFailure::Retry`](crate::OnFailure::Retry).
    /// Without it, the row keeps its state, is not taken again, and is listed as exhausted.
    #[must_use]
    pub fn exhausted(mut self, state: impl Into<State>) -> Self {
        self.exhausted = Some(state.into());
        self
    }

    /// Adds further states of rows that claims ignore.
    #[must_use]
    pub fn others<S: Into<State>>(mut self, states: impl IntoIterator<Item = S>) -> Self {
        self.others.extend(states.into_iter().map(Into::into));
        self
    }

    /// Allows [`Outcome::To`](crate::Outcome::To) to move a claimed row from state `from`, usually the state of taken
    /// rows, to state `to`. Moves to `done`, to `failed` and back are always allowed.
    #[must_use]
    pub fn transition(mut self, from: impl Into<State>, to: impl Into<State>) -> Self {
        self.transitions.push((from.into(), to.into()));
        self
    }

    /// Allows the state of done rows to be claimable, so rows are worked on again and again, for example if new rows
    /// start as `done`. Restrict the claimed states with [`Take::from`](crate::Take::from), or delay rows with
    /// [`ready_at`](crate::ClaimSpecBuilder::ready_at), because otherwise a worker never runs out of rows.
    #[must_use]
    pub fn cyclic(mut self) -> Self {
        self.cyclic = true;
        self
    }

    /// Lists all states, each once, in this order: claimable, taken, done, failed, exhausted, others.
    pub fn all(&self) -> Vec<&State> {
        let mut all: Vec<&State> = Vec::new();
        let named = self.takeable.iter().chain(&self.taken).chain(Some(&self.done)).chain(&self.failed);
        for state in named.chain(&self.exhausted).chain(&self.others) {
            if !all.contains(&state) {
                all.push(state);
            }
        }
        all
    }

    /// Returns the state of rows that are put back, the first claimable one.
    pub(crate) fn home(&self) -> &State {
        // Falls back to `done` only in theory, because the build of the spec refuses an empty list.
        self.takeable.first().unwrap_or(&self.done)
    }

    /// Returns whether [`Outcome::To`](crate::Outcome::To) can move a row from state `from` to state `to`.
    pub(crate) fn allows(&self, from: &State, to: &State) -> bool {
        let known = [Some(&self.done), self.failed.as_ref()];
        known.contains(&Some(to))
            || self.takeable.contains(to)
            || self.transitions.iter().any(|(a, b)| a == from && b == to)
    }

    pub(crate) fn validate(&self) -> Result<(), ClaimError> {
        if self.takeable.is_empty() {
            return Err(ClaimError::spec("name at least one state that may be taken"));
        }
        let special = self.taken.iter().chain(Some(&self.done)).chain(&self.failed).chain(&self.exhausted);
        let special: Vec<&State> = special.collect();
        for (at, state) in special.iter().enumerate() {
            if special[..at].contains(state) {
                return Err(ClaimError::spec(format!(
                    "the state {state} has two meanings; give each of taken, done, failed and exhausted its own, or leave \
                     one out: with retries, exhausted alone is enough"
                )));
            }
        }
        if let Some(state) = self.taken.as_ref().filter(|state| self.takeable.contains(state)) {
            return Err(ClaimError::spec(format!(
                "the state {state} is that of taken rows and may be taken; remove it from one of the two"
            )));
        }
        if self.takeable.contains(&self.done) && !self.cyclic {
            return Err(ClaimError::spec(format!(
                "the state {} means done and may be taken: rows would be worked on for ever; say `cyclic` if they shall",
                self.done
            )));
        }
        if let Some(state) = self.all().into_iter().find(|state| state.as_str().contains('\0')) {
            return Err(ClaimError::spec(format!(
                "the state {state:?} contains NUL, which no column can hold"
            )));
        }
        let all = self.all();
        let unknown =
            self.transitions.iter().flat_map(|(from, to)| [from, to]).find(|state| !all.contains(state));
        if let Some(state) = unknown {
            return Err(ClaimError::spec(format!(
                "a transition names the state {state}, which the spec does not have"
            )));
        }
        Ok(())
    }
}
