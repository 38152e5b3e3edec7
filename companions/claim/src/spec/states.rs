//! The states of a row.

use std::fmt;
use std::sync::Arc;

use leasehold_table_schema::Table;

use crate::error::ClaimError;

/// The name of a state, as the table has it. Of a boolean column: `true` or `false`. An application whose states are an
/// enum implements `From` for it.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct State(Arc<str>);

impl State {
    /// The state called `name`, which the spec checks when it is built.
    pub fn new(name: impl Into<Arc<str>>) -> Self {
        Self(name.into())
    }

    /// The name as it is in the table.
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
    /// `text` or `varchar`, with a CHECK if the table is well kept.
    Text,
    /// An enum type of the database.
    Enum(Table),
    /// `boolean`: `false` may be taken, `true` is done. It has no state for a row that is taken.
    Boolean,
}

/// What the states of a table mean.
///
/// Numbers that stand for states, as some frameworks store an enum, are refused by the check: a state is a name in
/// statements, constraints, errors and metrics. Change the type of the column to `text`.
///
/// ```
/// use leasehold_claim::States;
///
/// // Of a text column with a CHECK.
/// let states = States::text(["new"], "complete")
///     .taken("in-progress")
///     .failed("error")
///     .exhausted("exhausted");
/// // Of a column `processed boolean`.
/// let plain = States::boolean();
/// # let _ = (states, plain);
/// ```
#[derive(Clone, Debug)]
pub struct States {
    pub(crate) kind: StateType,
    /// The first is where rows return to.
    pub(crate) takeable: Vec<State>,
    pub(crate) taken: Option<State>,
    pub(crate) done: State,
    pub(crate) failed: Option<State>,
    pub(crate) exhausted: Option<State>,
    pub(crate) others: Vec<State>,
    /// Edges out of `taken` and between other states; empty: what the settling calls need, no more.
    pub(crate) transitions: Vec<(State, State)>,
    /// `done` may be taken again.
    pub(crate) cyclic: bool,
}

impl States {
    /// States in a `text` column: which may be taken (the first is where a row returns that is put back), and
    /// which means that the work is done.
    pub fn text<S: Into<State>>(takeable: impl IntoIterator<Item = S>, done: impl Into<State>) -> Self {
        Self::of_type(StateType::Text, takeable, done)
    }

    /// The same in a column of the enum type `name`.
    pub fn enumeration<S: Into<State>>(
        name: Table,
        takeable: impl IntoIterator<Item = S>,
        done: impl Into<State>,
    ) -> Self {
        Self::of_type(StateType::Enum(name), takeable, done)
    }

    /// A `boolean` column: `false` may be taken, `true` is done. What is taken has no state of its own, so it
    /// needs held claims, or columns or a side table for the lease.
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

    /// The state of a row while it is taken. Without one, a row keeps its state and the lease alone says that
    /// it is taken.
    #[must_use]
    pub fn taken(mut self, state: impl Into<State>) -> Self {
        self.taken = Some(state.into());
        self
    }

    /// The state of a row whose work was tried and failed for good. Without one, failing is unsupported.
    #[must_use]
    pub fn failed(mut self, state: impl Into<State>) -> Self {
        self.failed = Some(state.into());
        self
    }

    /// The state of a row that has no attempts left, also after [`OnFailure::Retry`](crate::OnFailure::Retry). Without one it
    /// keeps the state that it had, is not taken again, and is listed as exhausted.
    #[must_use]
    pub fn exhausted(mut self, state: impl Into<State>) -> Self {
        self.exhausted = Some(state.into());
        self
    }

    /// Further states that a row may be in and that mean nothing to claims.
    #[must_use]
    pub fn others<S: Into<State>>(mut self, states: impl IntoIterator<Item = S>) -> Self {
        self.others.extend(states.into_iter().map(Into::into));
        self
    }

    /// Allows a claimed row to be moved from the state `from`, usually that of taken rows, to the state `to`
    /// by [`Outcome::To`](crate::Outcome::To). Moves to `done`, to `failed` and back are always allowed.
    #[must_use]
    pub fn transition(mut self, from: impl Into<State>, to: impl Into<State>) -> Self {
        self.transitions.push((from.into(), to.into()));
        self
    }

    /// The state of done rows is one that may be taken: rows are worked on again and again, for example where
    /// `done` is also how they begin. Say with [`Take::from`](crate::Take::from) from which states a claim takes,
    /// or keep them back with [`ready_at`](crate::ClaimSpecBuilder::ready_at): whoever takes whatever there is
    /// never comes to an end.
    #[must_use]
    pub fn cyclic(mut self) -> Self {
        self.cyclic = true;
        self
    }

    /// Every state, without repetition: those to take, taken, done, failed, exhausted, others.
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

    /// Where a row returns to.
    pub(crate) fn home(&self) -> &State {
        // `validate` keeps out an empty list before anybody asks.
        self.takeable.first().unwrap_or(&self.done)
    }

    /// Whether a row may go from `from` to `to` by a settling call.
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
