//! Kinds of work, and the states of a hand-off.

use crate::state::StateName;

/// Kinds of work as an enum of the application: a kind that the table does not have cannot be written down.
///
/// ```
/// use leasehold_claim::KindName;
///
/// #[derive(Clone, Copy, PartialEq)]
/// enum Order { Open, Change, Close }
///
/// impl KindName for Order {
///     const ALL: &'static [Self] = &[Self::Open, Self::Change, Self::Close];
///
///     fn name(self) -> &'static str {
///         match self {
///             Self::Open => "open",
///             Self::Change => "change",
///             Self::Close => "close",
///         }
///     }
///
///     fn is_once_per_entity(self) -> bool {
///         self != Self::Change
///     }
///
///     fn waits_for(self) -> Option<Self> {
///         (self != Self::Open).then_some(Self::Open)
///     }
/// }
///
/// assert!(Order::from_name("close").is_some_and(|kind| kind == Order::Close));
/// ```
pub trait KindName: Copy + 'static {
    /// Every kind. The first is that of rows that name none.
    const ALL: &'static [Self];

    /// The kind's name in the table.
    fn name(self) -> &'static str;

    /// Whether an entity has at most one row of this kind, ever.
    #[must_use]
    fn is_once_per_entity(self) -> bool {
        false
    }

    /// The kind that has to be done first, for the same entity.
    #[must_use]
    fn waits_for(self) -> Option<Self> {
        None
    }

    /// The kind with this name, if there is one.
    #[must_use]
    fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }
}

/// The usual kinds: an entity is created once, and then updated any number of times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)] // For other kinds there is the trait.
pub enum RequestKind {
    /// The entity is new. Once per entity.
    Create,
    /// It has changed. Waits for its creation.
    Update,
}

impl KindName for RequestKind {
    const ALL: &'static [Self] = &[Self::Create, Self::Update];

    fn name(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
        }
    }

    fn is_once_per_entity(self) -> bool {
        self == Self::Create
    }

    fn waits_for(self) -> Option<Self> {
        (self == Self::Update).then_some(Self::Create)
    }
}

/// The states of a row of a hand-off table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)] // The set is closed.
pub enum RequestState {
    /// Nobody has it.
    New,
    /// Somebody is at it.
    InProgress,
    /// It is done.
    Complete,
    /// It was tried and failed.
    Error,
}

impl StateName for RequestState {
    const ALL: &'static [Self] = &[Self::New, Self::InProgress, Self::Complete, Self::Error];

    fn name(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::InProgress => "in-progress",
            Self::Complete => "complete",
            Self::Error => "error",
        }
    }
}
