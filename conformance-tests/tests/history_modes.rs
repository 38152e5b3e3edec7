//! Tests the checker of histories on shared grants and permits.

#![allow(clippy::unwrap_used)] // A failed `unwrap` fails the test.

use std::time::Duration;

use leasehold_api::{Capabilities, Fencing, FencingToken, HolderId, LockKey, Mode, Scope};
use leasehold_conformance::history::{Event, EventKind, History, ViolationKind, check};

const TWO: Mode = Mode::Permit { of: 2 };

/// Returns the violations of a history in which all grants of one key overlap, in this order.
fn overlapping(grants: &[(Mode, u64)]) -> Vec<ViolationKind> {
    let mut has = Capabilities::new(Scope::Process);
    has.fencing = Fencing::Volatile;
    let key = LockKey::new("k").unwrap();
    let mut events = Vec::new();
    let mut write = |kind| events.push(Event::new(Duration::ZERO, 1, key.clone(), kind));
    for (call, (mode, token)) in (1..).zip(grants) {
        let (holder, token) = (HolderId::from_parts(1, call), Some(FencingToken::from_u64(*token)));
        write(EventKind::Asked { call, budget: None });
        write(EventKind::Granted { call, holder, token, mode: *mode });
    }
    let violations = check(&History::new(events, false), &has).err().unwrap_or_default();
    violations.into_iter().map(|violation| violation.kind).collect()
}

#[test]
fn readers_overlap_and_a_writer_overlaps_with_no_reader() {
    assert!(overlapping(&[(Mode::Shared, 1), (Mode::Shared, 1), (Mode::Shared, 2)]).is_empty());
    assert_eq!(overlapping(&[(Mode::Shared, 1), (Mode::Exclusive, 2)]), [ViolationKind::Overlap]);
    assert_eq!(overlapping(&[(Mode::Exclusive, 1), (Mode::Shared, 2)]), [ViolationKind::Overlap]);
    assert_eq!(overlapping(&[(Mode::Shared, 1), (TWO, 2)]), [ViolationKind::Overlap]);
    assert_eq!(overlapping(&[(Mode::Permit { of: 3 }, 1), (TWO, 2)]), [ViolationKind::Overlap]);
}

#[test]
fn permits_overlap_up_to_their_number() {
    assert!(overlapping(&[(TWO, 1), (TWO, 2)]).is_empty());
    assert_eq!(overlapping(&[(TWO, 1), (TWO, 2), (TWO, 3)]), [ViolationKind::TooManyPermits]);
}

#[test]
fn only_tokens_of_writers_order_the_grants() {
    let stale = [(Mode::Shared, 3), (Mode::Exclusive, 3)];
    assert_eq!(overlapping(&stale), [ViolationKind::Overlap, ViolationKind::TokenNotGreater]);
    let old = [(Mode::Exclusive, 3), (Mode::Shared, 3)];
    assert_eq!(overlapping(&old), [ViolationKind::Overlap, ViolationKind::TokenNotGreater]);
}
