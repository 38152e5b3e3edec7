//! The modes of the calls of a schedule.

use std::time::Duration;

use fastrand::Rng;
use leasehold_api::Mode;

use super::network::stream;

/// The stream that selects schedules with shared grants and permits. It leaves out the seeds that once have shown a
/// fault, to keep their schedules as they were.
const MODES: u64 = 170;

/// How long readers of one client share a hold of the store, in schedules in which they do.
const SHARE_FOR: Duration = Duration::from_millis(300);

/// The modes of a schedule that has others than exclusive.
#[derive(Clone, Debug)]
pub(crate) struct ScheduleModes {
    /// How long readers of one client share a hold of the store.
    pub(crate) share_for: Duration,
    /// The number of permits of each key.
    pub(crate) permits: u32,
}

impl ScheduleModes {
    /// Returns the modes of the schedule `seed`. `None` for most schedules, which have exclusive grants alone.
    pub(crate) fn draw(seed: u64) -> Option<Self> {
        if stream(seed, MODES, 0).u8(..3) != 0 {
            return None;
        }
        let mut dice = stream(seed, MODES, 1);
        let share_for = if dice.u8(..3) == 0 { Duration::ZERO } else { SHARE_FOR };
        Some(Self { share_for, permits: dice.u32(1..=3) })
    }

    /// Draws the mode of one call.
    pub(crate) fn of_call(&self, dice: &mut Rng) -> Mode {
        match dice.u8(..10) {
            0..=2 => Mode::Exclusive,
            3..=6 => Mode::Shared,
            // Another number of permits is refused while the key is in use with this one.
            7 => Mode::Permit { of: self.permits + 1 },
            _ => Mode::Permit { of: self.permits },
        }
    }
}

/// Returns whether two grants of one key in these modes must not exist together. Permits of one semaphore can, up to
/// their number.
pub(crate) fn exclude_each_other(one: Mode, other: Mode) -> bool {
    one != other || one == Mode::Exclusive
}
