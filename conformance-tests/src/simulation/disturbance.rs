//! What may happen to the calls, the clients and the clocks of a schedule, class by class: each can be left out.

use std::fmt;
use std::str::FromStr;

use fastrand::Rng;

/// One class of what goes wrong in a schedule.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Disturbance {
    /// Requests take long to arrive, also so long that they overtake each other.
    SlowRequest,
    /// Answers take long.
    SlowAnswer,
    /// Requests never arrive.
    LostRequest,
    /// Requests are carried out and not answered.
    LostAnswer,
    /// Requests are carried out after the engine has given the call up.
    LateRequest,
    /// Requests are carried out twice.
    Twice,
    /// The store answers with an error, which leaves open what it did.
    Failure,
    /// The store turns requests down.
    Refusal,
    /// What the store tells its clients is lost.
    LostEvent,
    /// What the store tells its clients comes late.
    LateEvent,
    /// A client cannot reach the store for a while.
    Cut,
    /// A client stands still as a whole for a while.
    Pause,
    /// A client dies, and a new one comes in its place.
    Crash,
    /// A client is closed, and a new one comes in its place.
    Close,
    /// A client is dropped with its guards, and a new one comes in its place.
    Drop,
    /// An operator ends the hold of a key.
    Force,
    /// The clocks of clients run faster or slower than the store's.
    ClockRate,
    /// Tasks that are ready run in another order.
    Order,
    /// Callers drop what they wait for.
    Cancel,
    /// No client can reach the store for a while.
    Away,
    /// A client stands still for a while together with its clocks.
    Stop,
}

use Disturbance as D;

impl Disturbance {
    /// All of them, with their names.
    pub const ALL: [(Self, &'static str); 21] = [
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
    ];

    /// Those that happen to single calls.
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

    const fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// A set of them. Written as their names with commas between.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Disturbances(u32);

impl Disturbances {
    /// None of them.
    #[must_use]
    pub const fn none() -> Self {
        Self(0)
    }

    /// Every one.
    #[must_use]
    pub const fn all() -> Self {
        Self((1 << Disturbance::ALL.len()) - 1)
    }

    /// These and that one.
    #[must_use]
    pub const fn with(self, one: Disturbance) -> Self {
        Self(self.0 | one.bit())
    }

    /// These without that one.
    #[must_use]
    pub const fn without(self, one: Disturbance) -> Self {
        Self(self.0 & !one.bit())
    }

    /// Whether that one is among them.
    #[must_use]
    pub const fn has(self, one: Disturbance) -> bool {
        self.0 & one.bit() != 0
    }

    /// All that are not among them.
    #[must_use]
    pub const fn others(self) -> Self {
        Self(Self::all().0 & !self.0)
    }

    /// Those that are in both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// A part of all: few in one schedule, many in another.
    pub(super) fn draw(dice: &mut Rng) -> Self {
        let likely = [0.15, 0.4, 0.8][dice.usize(..3)];
        // Apart from the others, so that what is drawn after them stays as it was for the seeds that are known.
        let apart = |one: &Disturbance| matches!(one, D::Away | D::Stop);
        let such = Disturbance::ALL.iter().filter(|(one, _)| !apart(one) && dice.f64() < likely);
        such.fold(Self::none(), |set, (one, _)| set.with(*one))
    }

    /// Each of them.
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
