//! The statements for shared holds and permits, as steps of a session.

use super::{FIRST_TOKEN, Start, TTL};

/// A statement on the parts of a key. The numbers are 0 for shared holds and N for one of N permits. The texts name a
/// statement of the store, and a holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartOp {
    /// Locks a part, as an operator can.
    Lock(i32),
    /// Takes a free part.
    Join(&'static str, i32, &'static str),
    /// Puts the key into a mode with parts, or adds a part, and takes it.
    Enter(i32, &'static str),
    /// Grants a key without held parts to one holder.
    Convert(&'static str, &'static str),
    /// Opens a key without held parts.
    Open,
    /// Notes that a writer waits, which writes the gate.
    MarkWriter,
    /// Renews or confirms the part of `a`.
    Renew(&'static str),
    /// Releases a part.
    Release(&'static str, &'static str),
    /// Releases the part of `a` by force.
    Force,
    /// Fences the transaction with the first part of `a`.
    Fence,
}

impl PartOp {
    pub(super) fn statement(self) -> Option<&'static str> {
        match self {
            Self::Lock(_) => None,
            Self::Join(statement, ..)
            | Self::Convert(statement, _)
            | Self::Renew(statement)
            | Self::Release(statement, _) => Some(statement),
            Self::Enter(0, _) => Some("enter_shared"),
            Self::Enter(..) => Some("enter_permits"),
            Self::Open => Some("convert"),
            Self::MarkWriter => Some("mark_writer"),
            Self::Force => Some("force part"),
            Self::Fence => Some("fence part"),
        }
    }

    pub(super) fn can_write(self) -> bool {
        !matches!(self, Self::Lock(_) | Self::Fence)
    }
}

/// Returns the call of a statement, prepared under this number.
pub(super) fn call(table: &str, op: PartOp, prepared: usize) -> String {
    let ttl = TTL * 1_000_000;
    let parameters = match op {
        PartOp::Lock(part) => {
            return format!(
                "SELECT 1 AS locked FROM leasehold.{table}_part WHERE key = 'k' AND part = {part} FOR UPDATE"
            );
        }
        PartOp::Join("join_many", of, holder) => {
            format!("ARRAY['k'], ARRAY['{holder}'], {ttl}, NULL, 'owner', {of}")
        }
        PartOp::Enter(0, holder) => format!("'k', '{holder}', {ttl}, NULL, 'owner', 0, 0"),
        PartOp::Join(_, of, holder) | PartOp::Enter(of, holder) => {
            format!("'k', '{holder}', {ttl}, NULL, 'owner', {of}")
        }
        PartOp::Convert(_, holder) => format!("'k', '{holder}', {ttl}, NULL, 'owner', false, NULL"),
        PartOp::Open => "'k', '', 0, NULL, NULL, true, NULL".to_owned(),
        PartOp::MarkWriter => "ARRAY['k'], 0".to_owned(),
        PartOp::Renew(_) => format!("ARRAY['k'], ARRAY['a'], {ttl}"),
        PartOp::Release("release_unawaited part", holder) => {
            // Counts the written rows, because the statement returns none.
            return format!(
                "EXECUTE q{prepared} ('k', '{holder}', false); SELECT count(*) AS written FROM \
                 leasehold.{table}_part WHERE xmin = pg_current_xact_id_if_assigned()::xid"
            );
        }
        PartOp::Release("release_one part", holder) => format!("'k', '{holder}', false"),
        PartOp::Release(_, holder) => format!("ARRAY['k'], ARRAY['{holder}'], ARRAY[]::text[]"),
        PartOp::Force => "'k', 'a'".to_owned(),
        PartOp::Fence => format!("'k', 'a', {FIRST_TOKEN}"),
    };
    format!("EXECUTE q{prepared} ({parameters})")
}

/// A part when a permutation starts: its mode, and whether it was released.
pub(super) struct StartPart {
    pub(super) of: i32,
    pub(super) is_released: bool,
}

impl Start {
    /// Returns the holder that the gate shows, and the parts of a key that has parts in use. Their holder is `a`.
    pub(super) fn parts(self) -> Option<(&'static str, [StartPart; 2])> {
        let part = |of, is_released| StartPart { of, is_released };
        match self {
            Self::Shared => Some(("*", [part(0, false), part(0, true)])),
            Self::SharedEnded => Some(("*", [part(0, false), part(-1, true)])),
            Self::SharedFree => Some(("*", [part(0, true), part(-1, true)])),
            Self::Permits => Some(("#2", [part(2, false), part(2, true)])),
            Self::PermitsFree => Some(("#2", [part(2, true), part(2, true)])),
            _ => None,
        }
    }

    /// Returns the second at which the leases of the parts end.
    pub(super) fn parts_end(self) -> i64 {
        if self == Self::SharedEnded { -1 } else { TTL }
    }
}

/// Returns the statements that insert a gate and its parts, if the key has parts in use.
pub(super) fn setup(table: &str, start: Start) -> Option<String> {
    let (gate, parts) = start.parts()?;
    let time = |seconds: i64| format!("clock.clock_timestamp() + interval '{seconds} seconds'");
    let (began, ends) = (time(-3600), time(start.parts_end()));
    let has_leases = table == "lease";
    let mut text = if has_leases {
        format!(
            "INSERT INTO leasehold.lease (key, holder, token, acquired_at, ttl_us, expires_at, released) \
             VALUES ('k', '{gate}', 1, {began}, 0, 'infinity', false)"
        )
    } else {
        format!(
            "INSERT INTO leasehold.mutex (key, holder, token, acquired_at, acquired) \
             VALUES ('k', '{gate}', 1, {began}, true)"
        )
    };
    for (at, StartPart { of, is_released }) in parts.into_iter().enumerate() {
        let (columns, values) = if has_leases {
            ("ttl_us, expires_at, released", format!("{TTL}000000, {ends}, {is_released}"))
        } else {
            ("acquired", (!is_released).to_string())
        };
        text += &format!(
            "; INSERT INTO leasehold.{table}_part (key, part, \"of\", holder, token, acquired_at, owner, {columns}) \
             VALUES ('k', {at}, {of}, 'a', {FIRST_TOKEN}, {began}, 'owner', {values})"
        );
    }
    Some(text)
}
