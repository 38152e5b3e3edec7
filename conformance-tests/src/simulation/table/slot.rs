//! One key of the table: its holds and its waiters.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use leasehold_api::{HolderId, Mode};
use leasehold_engine::{Attempt, Request};
use tokio::sync::oneshot;
use tokio::time::Instant;

#[derive(Default)]
pub(super) struct Slot {
    /// The holds, all in one mode, in the order of their grants.
    pub(super) holds: Vec<CurrentHold>,
    pub(super) queue: VecDeque<QueuedRequest>,
    /// The clients that wait for the key, and until when each counts as a waiter.
    pub(super) awaited: BTreeMap<u64, Instant>,
    pub(super) cools_until: Option<Instant>,
    /// Until when a refused writer that polls keeps further holders out.
    pub(super) writer_until: Option<Instant>,
}

pub(super) struct CurrentHold {
    pub(super) holder: HolderId,
    pub(super) client: u64,
    pub(super) mode: Mode,
    /// The number of a permit.
    pub(super) permit: Option<u32>,
    /// When the hold ends without a release. `None` for a latch.
    pub(super) ends: Option<Instant>,
    /// The index of its record.
    pub(super) record: usize,
}

pub(super) struct QueuedRequest {
    pub(super) client: u64,
    pub(super) request: Request,
    pub(super) reply: oneshot::Sender<Attempt>,
}

impl Slot {
    /// Returns the mode of the present holds.
    fn mode(&self) -> Option<Mode> {
        self.holds.first().map(|hold| hold.mode)
    }

    pub(super) fn hold_of(&mut self, holder: HolderId) -> Option<&mut CurrentHold> {
        self.holds.iter_mut().find(|hold| hold.holder == holder)
    }

    /// Returns whether another client than `client` has a hold of the key.
    pub(super) fn is_held_by_another(&self, client: u64) -> bool {
        self.holds.iter().any(|hold| hold.client != client)
    }

    /// Returns whether a further hold in `mode` can exist beside the present ones.
    pub(super) fn fits(&self, mode: Mode) -> bool {
        match (self.mode(), mode) {
            (None, _) | (Some(Mode::Shared), Mode::Shared) => true,
            (Some(Mode::Permit { of }), Mode::Permit { of: asked }) => {
                of == asked && u32::try_from(self.holds.len()).is_ok_and(|held| held < of)
            }
            _ => false,
        }
    }

    /// Returns the number of permits of the key and the number in `mode`, if the key is in use and they differ.
    pub(super) fn mismatch(&self, mode: Mode) -> Option<(u32, u32)> {
        match (self.mode(), mode) {
            (Some(Mode::Permit { of }), Mode::Permit { of: asked }) if of != asked => Some((of, asked)),
            _ => None,
        }
    }

    /// Returns whether a waiting writer keeps a request in `mode` out.
    pub(super) fn is_closed_to(&self, mode: Mode) -> bool {
        mode != Mode::Exclusive && !self.holds.is_empty() && self.writer_until.is_some()
    }

    /// Returns the time until a refused request in `mode` can be granted, if that is known.
    pub(super) fn retry_after(&self, mode: Mode, now: Instant) -> Option<Duration> {
        let ends = || self.holds.iter().map(|hold| hold.ends);
        let until = match (self.mode()?, mode) {
            (Mode::Shared, Mode::Shared) => self.writer_until,
            // The end of one permit is enough.
            (Mode::Permit { .. }, Mode::Permit { .. }) => self.writer_until.or(ends().flatten().min()),
            _ => ends().try_fold(now, |latest, ends| Some(latest.max(ends?))),
        };
        until.map(|until| until.saturating_duration_since(now))
    }

    /// Returns the smallest free number of a permit. `None` in another mode.
    pub(super) fn next_permit(&self, mode: Mode) -> Option<u32> {
        let is_free = |number: &u32| self.holds.iter().all(|hold| hold.permit != Some(*number));
        let Mode::Permit { of } = mode else { return None };
        (0..of).find(is_free)
    }
}
