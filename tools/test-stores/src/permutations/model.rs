//! One key as a store promises it, and the search for an order of transactions that explains a permutation.
//!
//! A transaction takes effect at one moment between its first and its last step. A permutation is explained if its
//! transactions have an order in which each reply is right and the last row is the row that was read at the end.

mod parts;

use self::parts::Parts;
use super::output::{Permutation, Reply, Step};
use super::{End, FIRST_TOKEN, LATER, Op, Scene, Start, TTL};

/// End of a hold without a lease.
const NEVER: i64 = i64::MAX;

#[derive(Clone, Debug)]
struct Row {
    holder: &'static str,
    token: i64,
    released: bool,
    ends: i64,
    given_out: bool,
    /// Whether a purge removes the row.
    old: bool,
}

/// The key in the model.
#[derive(Clone, Debug)]
struct Key {
    row: Option<Row>,
    has_leases: bool,
    now: i64,
    /// The greatest token of all grants.
    greatest: i64,
    /// The greatest token of all exclusive grants.
    greatest_exclusive: i64,
    /// Number of transactions that are fenced by the lease.
    fences: usize,
    parts: Parts,
}

/// The transactions beside a statement.
#[derive(Clone, Copy, Debug)]
struct Beside {
    /// Whether another transaction overlapped with this one.
    overlaps: bool,
    /// Whether one of them could change the row. A grant might then miss a free key, and the store requests it again.
    changes: bool,
}

/// An event of a permutation.
#[derive(Debug)]
struct Event<'p> {
    begun: usize,
    ended: usize,
    happening: Happening<'p>,
}

#[derive(Debug)]
enum Happening<'p> {
    /// The statements of one transaction.
    Statements(Vec<(Op, &'p Reply)>, Beside),
    /// The end of a transaction that is fenced by a lease, or by a part.
    FenceEnds(Op),
}

/// Returns whether the model has an order that leads to the replies and the row of `permutation`.
pub(super) fn explains(kind: &str, scene: &Scene, permutation: &Permutation) -> bool {
    let events = events(scene, permutation);
    let left: Vec<&Event<'_>> = events.iter().collect();
    search(&left, &Key::new(kind, scene.start), permutation.row.as_deref())
}

fn search(left: &[&Event<'_>], key: &Key, row: Option<&[String]>) -> bool {
    if left.is_empty() {
        return key.shown().as_deref() == row;
    }
    left.iter().enumerate().any(|(at, event)| {
        // No event that has ended before this one began comes after it.
        if left.iter().any(|other| other.ended < event.begun) {
            return false;
        }
        let Some(key) = key.after_event(event) else { return false };
        let mut rest = left.to_vec();
        rest.remove(at);
        search(&rest, &key, row)
    })
}

/// The steps of a transaction, with the statements in them.
struct Transaction<'p> {
    begun: usize,
    ended: usize,
    statements: Vec<(Op, &'p Reply)>,
}

impl Transaction<'_> {
    fn overlaps(&self, other: &Self) -> bool {
        self.begun <= other.ended && other.begun <= self.ended
    }

    fn can_write(&self) -> bool {
        self.statements.iter().any(|(op, _)| op.can_write())
    }
}

fn events<'p>(scene: &Scene, permutation: &'p Permutation) -> Vec<Event<'p>> {
    let (open, close) = (permutation.step("open"), permutation.step("close"));
    let mut statements = replies(&[scene.open], open);
    statements.extend(replies(&scene.close, close));
    let mut transactions = vec![Transaction { begun: open.begun, ended: close.ended, statements }];
    for (at, op) in scene.others.iter().enumerate() {
        let step = permutation.step(&format!("s{}", at + 1));
        let statements = replies(&[*op], step);
        transactions.push(Transaction { begun: step.begun, ended: step.ended, statements });
    }
    let mut events = Vec::new();
    for (at, transaction) in transactions.iter().enumerate() {
        let others = transactions.iter().enumerate().filter(|(other, _)| *other != at);
        let others: Vec<_> = others.filter(|(_, other)| other.overlaps(transaction)).collect();
        let changes = others.iter().any(|(_, other)| other.can_write());
        let beside = Beside { overlaps: !others.is_empty(), changes };
        let is_open = at == 0;
        let (op, reply) = transaction.statements[0];
        let mut ended = transaction.ended;
        if op.is_fence() {
            // Its check is a moment before the end of its transaction. The fence lasts until that end.
            let end = if is_open { (close.begun, close.ended) } else { (ended, ended) };
            if is_fenced(reply) {
                events.push(Event { begun: end.0, ended: end.1, happening: Happening::FenceEnds(op) });
            }
            if is_open {
                ended = open.ended;
            }
        } else if is_open && scene.end == End::Rollback {
            continue;
        }
        let happening = Happening::Statements(transaction.statements.clone(), beside);
        events.push(Event { begun: transaction.begun, ended, happening });
    }
    events
}

/// Returns the statements of a step with their replies.
fn replies<'p>(ops: &[Op], step: &'p Step) -> Vec<(Op, &'p Reply)> {
    let has_failed = matches!(step.replies.last(), Some(Reply::Failed(_)));
    assert!(has_failed || step.replies.len() == ops.len(), "{ops:?} has other replies: {step:?}");
    ops.iter().copied().zip(&step.replies).collect()
}

impl Key {
    fn new(kind: &str, start: Start) -> Self {
        let has_leases = kind == "lease";
        let row = Row {
            holder: "a",
            token: FIRST_TOKEN,
            released: start.is_released(),
            ends: if has_leases { start.ends() } else { NEVER },
            given_out: start == Start::GivenOut,
            old: start == Start::Old,
        };
        let mut row = (start != Start::Nothing).then_some(row);
        let greatest = row.as_ref().map_or(0, |row| row.token);
        let parts = Parts::new(has_leases, start);
        let mut greatest_exclusive = greatest;
        if let (Some(row), Some(gate)) = (&mut row, parts.gate()) {
            (row.holder, row.token, row.released, row.ends) = (gate, 0, false, NEVER);
            greatest_exclusive = 0;
        }
        Self { row, has_leases, now: 0, greatest, greatest_exclusive, fences: 0, parts }
    }

    /// Returns the cells of the row.
    fn shown(&self) -> Option<Vec<String>> {
        let row = self.row.as_ref()?;
        let flag = |is_set: bool| if is_set { "t".to_owned() } else { "f".to_owned() };
        let (holder, token) = (row.holder.to_owned(), row.token.to_string());
        Some(vec![holder, token, flag(row.released), flag(self.is_live(row)), self.parts.shown(self.now)])
    }

    fn is_live(&self, row: &Row) -> bool {
        !row.released && row.ends > self.now
    }

    fn is_held(&self) -> bool {
        self.row.as_ref().is_some_and(|row| self.is_live(row))
    }

    fn is_held_by(&self, holder: &str) -> bool {
        self.is_held() && self.row.as_ref().is_some_and(|row| row.holder == holder)
    }

    /// Returns the end of a lease that begins now.
    fn end_of_lease(&self) -> i64 {
        if self.has_leases { self.now + TTL } else { NEVER }
    }

    /// Returns the key after an event, or `None` if the event cannot happen to it.
    fn after_event(&self, event: &Event<'_>) -> Option<Self> {
        let mut key = self.clone();
        match &event.happening {
            Happening::FenceEnds(Op::Fence) => key.fences = key.fences.checked_sub(1)?,
            Happening::FenceEnds(_) => key.parts.fences = key.parts.fences.checked_sub(1)?,
            Happening::Statements(statements, beside) => {
                for (op, reply) in statements {
                    key.carry_out(*op, reply, *beside)?;
                }
            }
        }
        Some(key)
    }

    /// Changes the key like the statement. Returns `None` if the reply is wrong.
    fn carry_out(&mut self, op: Op, reply: &Reply, beside: Beside) -> Option<()> {
        let Reply::Rows(rows) = reply else {
            // The server stood still during the statement, so it renews nothing.
            let is_renewal = op.statement().is_some_and(|statement| statement.starts_with("renew_early"));
            return (is_renewal && beside.overlaps).then_some(());
        };
        let skips = beside.overlaps && op.statement().is_some_and(skips_locked_rows);
        let is_right = match op {
            Op::Lock | Op::Touch => true,
            Op::Tick => {
                self.now = LATER;
                true
            }
            Op::Grant(statement, holder) => match granted(statement, rows) {
                Some(token) => self.grant(holder, token),
                None => {
                    let needs_row = matches!(statement, "retake_one" | "grant_free");
                    self.is_held() || (needs_row && self.row.is_none()) || skips || beside.changes
                }
            },
            Op::Renew(statement) => {
                let is_renewed = self.is_held_by("a");
                if renewed(statement, rows) { is_renewed && self.renew() } else { !is_renewed || skips }
            }
            Op::Release(statement, holder) => self.release(statement, holder, rows, skips),
            Op::Force => {
                let is_forced = self.is_held_by("a");
                if is_forced {
                    self.end();
                }
                is_forced != rows.is_empty()
            }
            Op::GiveOut => {
                let is_given_out = self.is_held_by("a");
                if is_given_out {
                    self.renew();
                    self.row.as_mut()?.given_out = true;
                }
                is_given_out != rows.is_empty()
            }
            Op::Adopt(holder) => match granted("adopt", rows) {
                Some(token) => self.adopt(holder, token),
                None => !self.can_be_adopted(),
            },
            Op::Fence => {
                let can_fence = self.is_held_by("a") && self.row.as_ref()?.token == FIRST_TOKEN;
                self.fences += usize::from(is_fenced(reply));
                is_fenced(reply) == can_fence
            }
            Op::Purge => {
                let is_old = self.row.as_ref().is_some_and(|row| row.old);
                if cell(rows, 0) == Some("1") {
                    self.row = None;
                    is_old
                } else {
                    !is_old || skips
                }
            }
            Op::Part(op) => self.carry_out_part(op, rows, reply, beside),
        };
        is_right.then_some(())
    }

    /// Grants the key, unless it is held or fenced, or the token is not greater than all before.
    fn grant(&mut self, holder: &'static str, token: i64) -> bool {
        if self.is_held() || self.fences > 0 || token <= self.greatest {
            return false;
        }
        (self.greatest, self.greatest_exclusive) = (token, token);
        let ends = self.end_of_lease();
        self.row = Some(Row { holder, token, released: false, ends, given_out: false, old: false });
        true
    }

    fn renew(&mut self) -> bool {
        let ends = self.end_of_lease();
        if let Some(row) = &mut self.row {
            row.ends = ends;
        }
        true
    }

    fn end(&mut self) {
        if let Some(row) = &mut self.row {
            row.released = true;
        }
    }

    fn release(&mut self, statement: &str, holder: &str, rows: &[Vec<String>], skips: bool) -> bool {
        let was_held = self.is_held_by(holder);
        // The others also write the row of an ended lease.
        let is_written = match statement {
            "release_unawaited" => was_held,
            _ => self.row.as_ref().is_some_and(|row| row.holder == holder && !row.released),
        };
        match released(statement, rows) {
            Some(reply) => {
                self.end();
                is_written && reply == was_held
            }
            None => !is_written || skips,
        }
    }

    fn can_be_adopted(&self) -> bool {
        let row = self.row.as_ref();
        self.is_held_by("a") && row.is_some_and(|row| row.given_out && row.token == FIRST_TOKEN)
    }

    fn adopt(&mut self, holder: &'static str, token: i64) -> bool {
        let is_adopted = self.can_be_adopted();
        self.end();
        is_adopted && self.grant(holder, token)
    }
}

fn skips_locked_rows(statement: &str) -> bool {
    // A part that is locked is no reason to wait, because another one can be free.
    let skips = statement.ends_with(" skipping") || statement.starts_with("release_unlocked");
    skips || matches!(statement, "purge" | "join" | "join_many")
}

/// Returns a cell of the first row.
fn cell(rows: &[Vec<String>], column: usize) -> Option<&str> {
    rows.first()?.get(column).map(String::as_str)
}

/// Returns the token in the reply to a grant.
fn granted(statement: &str, rows: &[Vec<String>]) -> Option<i64> {
    let column = usize::from(!matches!(statement, "grant_one" | "retake_one" | "adopt"));
    rows.iter().find_map(|row| row.get(column)?.parse().ok())
}

/// Returns whether the reply confirms the hold of `a`.
fn renewed(statement: &str, rows: &[Vec<String>]) -> bool {
    let (column, value) = if statement.starts_with("renew_early") { (0, "1") } else { (1, "a") };
    rows.iter().any(|row| row.get(column).is_some_and(|cell| cell == value))
}

/// Returns whether the released hold was held until then. `None` if no hold was released.
fn released(statement: &str, rows: &[Vec<String>]) -> Option<bool> {
    let column = usize::from(!statement.starts_with("release_one") && !is_unawaited(statement));
    let number: i64 = cell(rows, column)?.parse().ok()?;
    if is_unawaited(statement) { (number == 1).then_some(true) } else { Some(number & 1 == 1) }
}

fn is_unawaited(statement: &str) -> bool {
    statement.starts_with("release_unawaited")
}

fn is_fenced(reply: &Reply) -> bool {
    matches!(reply, Reply::Rows(rows) if cell(rows, 1) == Some("t"))
}
