//! The classes of disturbances of a schedule. Each class can be left out.

use std::fmt;
use std::str::FromStr;

use fastrand::Rng;

/// One class of disturbances.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Disturbance {
    /// Requests arrive late, possibly after later requests.
    SlowRequest,
    /// Replies arrive late.
    SlowAnswer,
    /// Requests never arrive.
    LostRequest,
    /// Requests are carried out, but their replies are lost.
    LostAnswer,
    /// Requests are carried out after the engine has given up the call.
    LateRequest,
    /// Requests are carried out twice.
    Twice,
    /// The store returns an error that leaves the outcome open.
    Failure,
    /// The store refuses requests.
    Refusal,
    /// Events of the store to its clients are lost.
    LostEvent,
    /// Events of the store to its clients arrive late.
    LateEvent,
    /// A client cannot reach the store for a while.
    Cut,
    /// A client pauses as a whole for a while, but its clock continues.
    Pause,
    /// A client dies and is replaced by a new one.
    Crash,
    /// A client is closed and replaced by a new one.
    Close,
    /// A client is dropped with its guards and replaced by a new one.
    Drop,
    /// An operator ends the hold of a key.
    Force,
    /// The clocks of clients are faster or slower than the clock of the store.
    ClockRate,
    /// Ready tasks run in another order.
    Order,
    /// Callers drop their calls before the calls return.
    Cancel,
    /// No client can reach the store for a while.
    Away,
    /// A client and its clocks stand still for a while.
    Stop,
    /// The leader of a cluster is stuck in a disk write for a while, but still replies to keep-alives.
    StuckLeader,
    /// A cluster elects a new leader.
    NewLeader,
    /// A cluster is restored from a backup, so its revisions go back.
    Restore,
}

use Disturbance as D;

impl Disturbance {
    /// All classes with their names.
    pub const ALL: [(Self, &'static str); 24] = [
        (D::SlowRequest, "slow-request"),
        (D::SlowAnswer, "slow-answer"),
        (D::LostRequest, "lost-request"),
        (D::LostAnswer, "lost-answer"),
        (D::LateRequest, "late-request"),
        (D::Twice, "twice"),
        (D::Failure, "failure"),
        (D::Refusal, "refusal"),
        (D::LostEvent, "lost-event"),
        (D::LateEvent, "late-event"),
        (D::Cut, "cut"),
        (D::Pause, "pause"),
        (D::Crash, "crash"),
        (D::Close, "close"),
        (D::Drop, "drop"),
        (D::Force, "force"),
        (D::ClockRate, "clock-rate"),
        (D::Order, "order"),
        (D::Cancel, "cancel"),
        (D::Away, "away"),
        (D::Stop, "stop"),
        (D::StuckLeader, "stuck-leader"),
        (D::NewLeader, "new-leader"),
        (D::Restore, "restore"),
    ];

    /// The classes that affect single calls.
    pub(super) const OF_CALLS: [Self; 8] = [
        D::SlowRequest,
        D::SlowAnswer,
        D::LostRequest,
        D::LostAnswer,
        D::LateRequest,
        D::Twice,
        D::Failure,
        D::Refusal,
    ];

    /// The classes that happen only in schedules of a cluster.
    pub(super) const OF_CLUSTERS: [Self; 3] = [D::StuckLeader, D::NewLeader, D::Restore];

    const fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// A set of disturbances. Its text form is a list of names, separated by commas.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Disturbances(u32);

impl Disturbances {
    /// Returns the empty set.
    #[must_use]
    pub const fn none() -> Self {
        Self(0)
    }

    /// Returns the set of all classes.
    #[must_use]
    pub const fn all() -> Self {
        Self((1 << Disturbance::ALL.len()) - 1)
    }

    /// Returns this set with `one` added.
    #[must_use]
    pub const fn with(self, one: Disturbance) -> Self {
        Self(self.0 | one.bit())
    }

    /// Returns this set with `one` removed.
    #[must_use]
    pub const fn without(self, one: Disturbance) -> Self {
        Self(self.0 & !one.bit())
    }

    /// Returns whether the set contains `one`.
    #[must_use]
    pub const fn has(self, one: Disturbance) -> bool {
        self.0 & one.bit() != 0
    }

    /// Returns the classes outside of this set.
    #[must_use]
    pub const fn others(self) -> Self {
        Self(Self::all().0 & !self.0)
    }

    /// Returns the classes in both sets.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Draws a random set, with few classes in some schedules and many in others.
    pub(super) fn draw(dice: &mut Rng) -> Self {
        let likely = [0.15, 0.4, 0.8][dice.usize(..3)];
        // These classes are drawn elsewhere, so that the schedules of known seeds stay the same.
        let apart =
            |one: &Disturbance| matches!(one, D::Away | D::Stop) || Disturbance::OF_CLUSTERS.contains(one);
        let such = Disturbance::ALL.iter().filter(|(one, _)| !apart(one) && dice.f64() < likely);
        such.fold(Self::none(), |set, (one, _)| set.with(*one))
    }

    /// Returns an iterator over the classes of the set.
    pub fn iter(self) -> impl Iterator<Item = Disturbance> {
        Disturbance::ALL.into_iter().map(|(one, _)| one).filter(move |one| self.has(*one))
    }
}

impl fmt::Display for Disturbances {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Disturbance::ALL.iter().filter(|(one, _)| self.has(*one)).map(|(_, name)| *name);
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

impl fmt::Debug for Disturbances {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{self}}}")
    }
}

impl FromStr for Disturbances {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        text.split(',').filter(|name| !name.is_empty()).try_fold(Self::none(), |set, name| {
            let known = Disturbance::ALL.iter().find(|(_, known)| *known == name);
            let (one, _) = known
                .ok_or_else(|| format!("there is no disturbance {name:?}; there are: {}", Self::all()))?;
            Ok(set.with(*one))
        })
    }
}
