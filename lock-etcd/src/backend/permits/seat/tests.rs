use leasehold_api::{HolderId, LockKey};

use super::*;
use crate::wire::{RangeResponse, Response, ResponseOp};

const THREE: Mode = Mode::Permit { of: 3 };

fn key() -> LockKey {
    LockKey::new("k").unwrap()
}

const fn holder(serial: u64) -> HolderId {
    HolderId::from_parts(1, serial)
}

/// The requester is holder 100.
fn at() -> At {
    At::new(&Names::new("p"), &key(), holder(100), THREE)
}

fn range(kvs: Vec<KeyValue>) -> ResponseOp {
    ResponseOp { response: Some(Response::Range(RangeResponse { kvs, ..RangeResponse::default() })) }
}

/// Returns the seat among these entries (holder, mode), in the order of their creation from revision 1 on, and these
/// numbers with their holder.
fn seat_among(entries: &[(u64, Mode)], numbers: &[(u32, u64)], own: Option<i64>) -> Seat {
    let names = Names::new("p");
    let entry = |((serial, mode), create_revision): (&(u64, Mode), i64)| KeyValue {
        key: names.entry(&key(), holder(*serial), *mode),
        create_revision,
        ..KeyValue::default()
    };
    let number = |(number, serial): &(u32, u64)| KeyValue {
        key: names.number(&key(), *number),
        value: holder(*serial).to_string().into_bytes(),
        mod_revision: 40 + i64::from(*number),
        lease: 7,
        ..KeyValue::default()
    };
    let mut responses = vec![range(Vec::new()); 4];
    responses.push(range(entries.iter().zip(1..).map(entry).collect()));
    responses.push(range(numbers.iter().map(number).collect()));
    seat(&names, &at(), 3, own, &TxnResponse { responses, ..TxnResponse::default() })
}

fn free_number(number: u32) -> Seat {
    Seat::Free(Number { number, modified: 0, own_lease: 0 })
}

#[test]
fn a_request_gets_the_smallest_free_number_until_all_are_held() {
    assert_eq!(seat_among(&[], &[], None), free_number(0));
    assert_eq!(seat_among(&[(1, THREE)], &[(0, 1)], None), free_number(1));
    assert_eq!(seat_among(&[(1, THREE), (2, THREE)], &[(1, 1), (2, 2)], None), free_number(0));
    let all = [(1, THREE), (2, THREE), (3, THREE)];
    assert_eq!(seat_among(&all, &[(0, 1), (1, 2), (2, 3)], None), Seat::Behind);
}

#[test]
fn a_request_does_not_overtake_a_waiter_that_takes_the_free_number() {
    let entries = [(1, THREE), (2, THREE), (3, THREE), (100, THREE)];
    let numbers = [(0, 1), (1, 2)];
    assert_eq!(seat_among(&entries[..3], &numbers, None), Seat::Behind);
    assert_eq!(seat_among(&entries, &numbers, Some(4)), Seat::Behind);
    // A request is not behind the entries that are newer.
    assert_eq!(seat_among(&[(1, THREE), (100, THREE), (2, THREE)], &[(0, 1)], Some(2)), free_number(1));
}

#[test]
fn older_entries_of_another_mode_exclude_a_permit() {
    for mode in [Mode::Exclusive, Mode::Shared] {
        assert_eq!(seat_among(&[(1, mode)], &[], None), Seat::Behind);
        assert_eq!(seat_among(&[(1, mode), (100, THREE)], &[], Some(2)), Seat::Behind);
        assert_eq!(seat_among(&[(100, THREE), (1, mode)], &[], Some(1)), free_number(0));
    }
}

#[test]
fn the_oldest_entry_for_a_permit_decides_how_many_there_are() {
    let two = Mode::Permit { of: 2 };
    assert_eq!(seat_among(&[(1, two)], &[(0, 1)], None), Seat::Mismatch(2));
    assert_eq!(seat_among(&[(100, THREE), (1, two)], &[], Some(1)), free_number(0));
    // The second entry leaves, or holds after the first has gone. So a third one waits for either.
    assert_eq!(seat_among(&[(1, THREE), (2, two), (100, THREE)], &[(0, 1)], Some(3)), Seat::Behind);
}

#[test]
fn a_repeated_request_finds_its_number() {
    let own = Seat::Free(Number { number: 1, modified: 41, own_lease: 7 });
    assert_eq!(seat_among(&[(1, THREE), (100, THREE)], &[(0, 1), (1, 100)], Some(2)), own);
}

#[test]
fn a_number_whose_entry_has_gone_is_free() {
    let left = Seat::Free(Number { number: 0, modified: 40, own_lease: 0 });
    assert_eq!(seat_among(&[(1, THREE)], &[(0, 9), (1, 1)], None), left);
}
