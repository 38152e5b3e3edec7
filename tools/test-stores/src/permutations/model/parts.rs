//! The parts of the key in the model.

use std::collections::BTreeMap;

use super::super::output::Reply;
use super::super::parts::PartOp;
use super::super::{FIRST_TOKEN, Start};
use super::{Beside, Key, NEVER, Row, is_fenced, is_unawaited, released, renewed, skips_locked_rows};

/// The parts, by number.
#[derive(Clone, Debug, Default)]
pub(super) struct Parts {
    parts: BTreeMap<i32, Part>,
    gate: Option<&'static str>,
    /// Number of transactions that are fenced by the part of `a`.
    pub(super) fences: usize,
}

#[derive(Clone, Debug)]
struct Part {
    /// 0 in shared mode, N as one of N permits, -1 out of use.
    of: i32,
    holder: &'static str,
    token: i64,
    released: bool,
    ends: i64,
}

impl Part {
    fn is_live(&self, now: i64) -> bool {
        self.of >= 0 && !self.released && self.ends > now
    }
}

impl Parts {
    pub(super) fn new(has_leases: bool, start: Start) -> Self {
        let Some((gate, parts)) = start.parts() else { return Self::default() };
        let ends = if has_leases { start.parts_end() } else { NEVER };
        let part = |part: super::super::parts::StartPart| Part {
            of: part.of,
            holder: "a",
            token: FIRST_TOKEN,
            released: part.is_released,
            ends,
        };
        Self { parts: (0..).zip(parts.map(part)).collect(), gate: Some(gate), fences: 0 }
    }

    /// Returns the holder that the gate shows at the start.
    pub(super) fn gate(&self) -> Option<&'static str> {
        self.gate
    }

    pub(super) fn shown(&self, now: i64) -> String {
        let shown = |(number, part): (&i32, &Part)| {
            let held = if part.is_live(now) {
                format!(" held by {} {}", part.holder, part.token)
            } else {
                String::new()
            };
            format!("{number} of {}{held}", part.of)
        };
        self.parts.iter().map(shown).collect::<Vec<_>>().join(", ")
    }

    fn any_live(&self, now: i64) -> bool {
        self.parts.values().any(|part| part.is_live(now))
    }

    fn of_holder(&mut self, holder: &str) -> Vec<&mut Part> {
        self.parts
            .values_mut()
            .filter(|part| part.of >= 0 && part.holder == holder && !part.released)
            .collect()
    }
}

impl Key {
    /// Returns the mode of the parts in use: 0 if shared, N for N permits.
    fn mode(&self) -> Option<i32> {
        let row = self.row.as_ref().filter(|row| self.is_live(row))?;
        match row.holder.strip_prefix('#') {
            Some(of) => of.parse().ok(),
            None => (row.holder == "*").then_some(0),
        }
    }

    /// Changes the key like the statement. Returns whether the reply is right.
    pub(super) fn carry_out_part(
        &mut self,
        op: PartOp,
        rows: &[Vec<String>],
        reply: &Reply,
        beside: Beside,
    ) -> bool {
        let skips = beside.overlaps && op.statement().is_some_and(skips_locked_rows);
        match op {
            PartOp::Lock(_) | PartOp::MarkWriter => true,
            PartOp::Join(statement, of, holder) => match taken(statement, rows) {
                Some((token, part)) => self.join(of, holder, token, part),
                None => self.free_part(of).is_none() || skips || beside.changes,
            },
            PartOp::Enter(of, holder) => match taken("enter", rows) {
                Some((token, part)) => self.enter(of, holder, token, part),
                None => self.is_held() && !(of == 0 && self.mode() == Some(0)) || beside.changes,
            },
            PartOp::Convert(_, holder) => match rows.first().and_then(|row| row.first()?.parse().ok()) {
                Some(token) => self.convert(holder, token, false),
                None => !self.can_be_converted() || skips || beside.changes,
            },
            PartOp::Open => match rows.first().and_then(|row| row.first()?.parse().ok()) {
                Some(token) => self.convert("", token, true),
                None => !self.can_be_converted() || beside.changes,
            },
            PartOp::Renew(statement) => {
                let (now, ends) = (self.now, self.end_of_lease());
                let is_open = self.mode().is_none();
                let mut parts = self.parts.of_holder("a");
                parts.retain(|part| part.is_live(now) && !is_open);
                let is_right = renewed(statement, rows) != parts.is_empty() || (skips && rows.is_empty());
                if renewed(statement, rows) && !statement.starts_with("confirm") {
                    parts.into_iter().for_each(|part| part.ends = ends);
                }
                is_right
            }
            PartOp::Release(statement, holder) => self.release_part(statement, holder, rows, skips),
            PartOp::Force => {
                let now = self.now;
                let mut parts = self.parts.of_holder("a");
                parts.retain(|part| part.is_live(now));
                let is_forced = !parts.is_empty();
                parts.into_iter().for_each(|part| part.released = true);
                is_forced != rows.is_empty()
            }
            PartOp::Fence => {
                let now = self.now;
                let parts = self.parts.of_holder("a");
                let can_fence = parts.iter().any(|part| part.is_live(now) && part.token == FIRST_TOKEN);
                self.parts.fences += usize::from(is_fenced(reply));
                is_fenced(reply) == can_fence
            }
        }
    }

    /// Returns the first free part of the key in this mode.
    fn free_part(&self, of: i32) -> Option<i32> {
        if self.mode() != Some(of) {
            return None;
        }
        let mut parts = self.parts.parts.iter();
        parts.find(|(_, part)| part.of == of && !part.is_live(self.now)).map(|(number, _)| *number)
    }

    fn join(&mut self, of: i32, holder: &'static str, token: i64, number: i32) -> bool {
        let (now, ends) = (self.now, self.end_of_lease());
        let has_mode = self.mode() == Some(of);
        let Some(part) = self.parts.parts.get_mut(&number) else { return false };
        let is_free = has_mode && part.of == of && !part.is_live(now);
        *part = Part { of, holder, token, released: false, ends };
        let is_after = token > self.greatest_exclusive;
        self.greatest = self.greatest.max(token);
        is_free && is_after
    }

    fn enter(&mut self, of: i32, holder: &'static str, token: i64, number: i32) -> bool {
        let adds = of == 0 && self.mode() == Some(0);
        let is_free = adds || (!self.is_held() && self.fences == 0);
        let is_out_of_use = self.parts.parts.get(&number).is_none_or(|part| part.of == -1);
        let (is_after, ends) = (token > self.greatest_exclusive, self.end_of_lease());
        self.greatest = self.greatest.max(token);
        for other in 0..of {
            let part = Part { of, holder, token, released: true, ends };
            self.parts.parts.insert(other, part);
        }
        self.parts.parts.insert(number, Part { of, holder, token, released: false, ends });
        if !adds {
            let gate: &'static str = if of == 0 { "*" } else { format!("#{of}").leak() };
            self.row = Some(Row::gate(gate));
        }
        is_free && is_out_of_use && is_after && (of == 0 || number == 0)
    }

    fn can_be_converted(&self) -> bool {
        self.mode().is_some() && !self.parts.any_live(self.now) && self.parts.fences == 0
    }

    fn convert(&mut self, holder: &'static str, token: i64, opens: bool) -> bool {
        let can_be_converted = self.can_be_converted();
        for part in self.parts.parts.values_mut() {
            (part.of, part.released) = (-1, true);
        }
        self.end();
        let is_granted = self.grant(holder, token);
        if opens {
            self.end();
        }
        can_be_converted && is_granted
    }

    fn release_part(&mut self, statement: &str, holder: &str, rows: &[Vec<String>], skips: bool) -> bool {
        let now = self.now;
        let mut parts = self.parts.of_holder(holder);
        let was_held = parts.iter().any(|part| part.is_live(now));
        if is_unawaited(statement) {
            parts.retain(|part| part.is_live(now));
        }
        match released(statement, rows) {
            Some(reply) => {
                let is_written = !parts.is_empty();
                parts.into_iter().for_each(|part| part.released = true);
                is_written && reply == was_held
            }
            None => parts.is_empty() || skips,
        }
    }
}

impl Row {
    fn gate(holder: &'static str) -> Self {
        Self { holder, token: 0, released: false, ends: NEVER, given_out: false, old: false }
    }
}

/// Returns the token and the number of the part in a reply.
fn taken(statement: &str, rows: &[Vec<String>]) -> Option<(i64, i32)> {
    let row = rows.first()?;
    let at = usize::from(statement == "join_many");
    Some((row.get(at)?.parse().ok()?, row.get(at + 1)?.parse().ok()?))
}
