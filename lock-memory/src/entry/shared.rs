//! The holds of a key in a mode that several holders have at once: shared ones, or permits of one semaphore.

use std::time::Duration;

use leasehold_api::{Error, HolderId, KeyInfo, Mode};
use leasehold_engine::Moment;

use super::{DeferredWakeups, KeyEntry, MemoryHold, Now, PeerId};

/// The end of an exclusion: the end of the last of the holds that exclude a request, or of the first one if that is
/// enough. `None` if it does not end by itself.
pub(super) struct Exclusion {
    pub(super) until: Option<Moment>,
}

/// Holds of one mode, live or expired. Boxed in their entry, because most keys have none.
pub(crate) struct SharedHolds {
    mode: Mode,
    /// In the order of the grants, or of the permits' numbers.
    holds: Vec<SharedHold>,
}

struct SharedHold {
    permit: Option<u32>,
    hold: MemoryHold,
}

impl SharedHolds {
    fn live(&self, now: &Now<'_>) -> impl Iterator<Item = &MemoryHold> {
        self.holds.iter().map(|shared| &shared.hold).filter(move |hold| hold.is_live(now))
    }

    /// Returns the position at which the next grant is put, which is the smallest free number among permits.
    fn next_position(&self) -> usize {
        let is_taken = |(at, shared): (u32, &SharedHold)| shared.permit == Some(at);
        if matches!(self.mode, Mode::Permit { .. }) {
            (0..).zip(&self.holds).take_while(|next| is_taken(*next)).count()
        } else {
            self.holds.len()
        }
    }
}

impl KeyEntry {
    /// Puts a hold beside the live ones of its mode, and forgets all others. Returns the number of a permit. The caller
    /// has checked that there is room.
    pub(super) fn put_beside(&mut self, mode: Mode, hold: MemoryHold, now: &Now<'_>) -> Option<u32> {
        let same = self.shared.take().filter(|shared| shared.mode == mode);
        let mut shared = same.unwrap_or_else(|| Box::new(SharedHolds { mode, holds: Vec::new() }));
        shared.holds.retain(|shared| shared.hold.is_live(now));
        let at = shared.next_position();
        let permit = u32::try_from(at).ok().filter(|_| matches!(mode, Mode::Permit { .. }));
        shared.holds.insert(at, SharedHold { permit, hold });
        self.hold = None;
        self.shared = Some(shared);
        permit
    }

    /// Returns the number of the permit of `holder`.
    pub(super) fn permit_of(&self, holder: HolderId) -> Option<u32> {
        let shared = self.shared.as_ref()?;
        shared.holds.iter().find(|shared| shared.hold.holder == holder)?.permit
    }

    /// Returns the live hold of `holder`, in any mode.
    pub(crate) fn live_of(&mut self, holder: HolderId, now: &Now<'_>) -> Option<&mut MemoryHold> {
        let shared = self.shared.iter_mut().flat_map(|shared| &mut shared.holds);
        let mut holds = self.hold.iter_mut().chain(shared.map(|shared| &mut shared.hold));
        holds.find(|hold| hold.holder == holder && hold.is_live(now))
    }

    /// Returns the exclusion of a request in `mode` by live holds, if there is one.
    pub(super) fn exclusion(&self, mode: Mode, now: &Now<'_>) -> Option<Exclusion> {
        if let Some(hold) = self.hold.as_ref().filter(|hold| hold.is_live(now)) {
            return Some(Exclusion { until: hold.expires });
        }
        let mark = self.writer_until(now).filter(|_| mode != Mode::Exclusive);
        let Some(shared) = self.shared.as_ref().filter(|shared| shared.live(now).next().is_some()) else {
            // The writer polls after the last holder has left. Without the mark, a crowd would be back before it.
            return mark.map(|until| Exclusion { until: Some(until) });
        };
        let live = || shared.live(now);
        let until = match (shared.mode, mode) {
            (Mode::Shared, Mode::Shared) => Some(mark?),
            (Mode::Permit { of }, Mode::Permit { of: asked }) if of == asked => {
                if u32::try_from(live().count()).is_ok_and(|held| held < of) {
                    Some(mark?)
                } else {
                    live().filter_map(|hold| hold.expires).min()
                }
            }
            _ => live().try_fold(Moment::from_nanos(0), |latest, hold| Some(latest.max(hold.expires?))),
        };
        Some(Exclusion { until })
    }

    /// Returns the end of the time for which a polling writer keeps new holders out.
    pub(super) fn writer_until(&self, now: &Now<'_>) -> Option<Moment> {
        self.waiters.as_ref()?.writer_until.filter(|until| *until > now.get())
    }

    /// Notes that live shared holders have kept out a writer, which polls again within `polls_within`.
    pub(crate) fn note_writer(&mut self, now: &Now<'_>, polls_within: Duration) {
        if self.is_live_beside(now) {
            self.waiters().writer_until = Some(now.get().after(polls_within));
        }
    }

    /// Returns the error of a request whose key is in use with another number of permits.
    pub(crate) fn mismatch(&self, mode: Mode, now: &Now<'_>) -> Option<Error> {
        let shared = self.shared.as_ref()?;
        match (shared.mode, mode) {
            (Mode::Permit { of }, Mode::Permit { of: asked }) if of != asked => {
                shared.live(now).next().map(|_| Error::mode_mismatch(of, asked))
            }
            _ => None,
        }
    }

    /// Ends the holds that `ends` selects, and notifies the refused waiters if the key has room now. Returns the clients
    /// and ids of the ended holds, and whether other clients wait.
    pub(crate) fn end_where(
        &mut self,
        wakeups: &mut DeferredWakeups,
        ends: impl Fn(&MemoryHold) -> bool,
    ) -> (Vec<(PeerId, HolderId)>, bool) {
        let mut ended = Vec::new();
        let mut wait = false;
        if let Some(hold) = self.hold.as_ref().filter(|hold| ends(hold)) {
            ended.push((hold.peer, hold.holder));
            wait |= self.end_hold(wakeups);
        }
        let Some(shared) = &mut self.shared else { return (ended, wait) };
        let before = ended.len();
        shared.holds.retain(|shared| {
            let stays = !ends(&shared.hold);
            if !stays {
                ended.push((shared.hold.peer, shared.hold.holder));
            }
            stays
        });
        let has_room = shared.holds.is_empty() || shared.mode != Mode::Shared;
        if shared.holds.is_empty() {
            self.shared = None;
        }
        if let Some((peer, _)) = ended.get(before) {
            wait |= self.notify_waiters(Some(*peer), has_room, wakeups);
        }
        (ended, wait)
    }

    /// Returns whether the client `peer` has a hold of the key.
    pub(crate) fn is_held_by(&self, peer: PeerId) -> bool {
        let shared = self.shared.iter().flat_map(|shared| &shared.holds).map(|shared| &shared.hold);
        self.hold.iter().chain(shared).any(|hold| hold.peer == peer)
    }

    /// Returns whether the key has a live hold that is not exclusive.
    pub(super) fn is_live_beside(&self, now: &Now<'_>) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.live(now).next().is_some())
    }

    /// Adds the holds that are not exclusive, including expired ones if `ended`.
    pub(super) fn add_shared_infos(&self, info: &mut KeyInfo, now: &Now<'_>, ended: bool) {
        let Some(shared) = &self.shared else { return };
        let shown = shared.holds.iter().filter(|shared| ended || shared.hold.is_live(now));
        info.holders.extend(shown.map(|one| {
            let mut hold = one.hold.info(now);
            (hold.mode, hold.permit) = (shared.mode, one.permit);
            hold
        }));
    }
}
