use super::*;
use crate::wire::{DeleteRangeRequest, PutRequest, Request};

const LEASE: i64 = 70;

fn at() -> At {
    At::new(&Names::new("p"), &LockKey::new("k").unwrap(), HolderId::from_parts(1, 1))
}

fn conditions() -> Conditions {
    Conditions {
        session_key: b"p/s/7".to_vec(),
        base_key: b"p/base".to_vec(),
        session: Compare::is("p/s/7", Target::Mod(10)),
        base: Compare::is("p/base", Target::Mod(3)),
        lease: LEASE,
    }
}

/// Returns the compares of the transactions that put `key`, however deep, with the lease of the put.
fn puts(txn: &TxnRequest, key: &[u8]) -> Vec<(Vec<Compare>, i64)> {
    let mut found = Vec::new();
    for op in txn.success.iter().chain(&txn.failure) {
        match &op.request {
            Some(Request::Put(PutRequest { key: name, lease, .. })) if name == key => {
                found.push((txn.compare.clone(), *lease));
            }
            Some(Request::Txn(nested)) => found.extend(puts(nested, key)),
            _ => {}
        }
    }
    found
}

fn deletes(txn: &TxnRequest) -> Vec<Vec<u8>> {
    let deleted = |op: &RequestOp| match &op.request {
        Some(Request::DeleteRange(DeleteRangeRequest { key, .. })) => Some(key.clone()),
        _ => None,
    };
    txn.success.iter().filter_map(deleted).collect()
}

#[test]
fn every_put_of_an_entry_names_a_lease_and_compares_the_guard_and_the_base() {
    let (at, conditions) = (at(), conditions());
    for (txn, count) in [
        (at.acquire(b"v", &conditions, None, false), 1),
        (at.acquire(b"v", &conditions, None, true), 2),
        (at.enter(b"v", &conditions), 1),
    ] {
        let puts = puts(&txn, &at.entry);
        assert_eq!(puts.len(), count);
        for (compares, lease) in puts {
            assert_eq!(lease, LEASE);
            assert!(compares.contains(&conditions.session), "a late copy compares an old guard");
            assert!(compares.contains(&conditions.base), "no grant with an old base");
        }
    }
}

#[test]
fn an_acquire_needs_an_empty_queue_and_no_cooldown() {
    let at = at();
    let txn = at.acquire(b"v", &conditions(), None, true);
    assert!(
        txn.compare.contains(&At::is_empty(&at.queue)) && txn.compare.contains(&At::is_empty(&at.cooldown))
    );
    // A place in the queue is taken behind others, but only by a request that has none.
    let places: Vec<_> =
        puts(&txn, &at.entry).into_iter().filter(|(c, _)| c.contains(&at.entry_is(0))).collect();
    assert_eq!(places.len(), 1);
}

#[test]
fn a_copy_of_a_move_that_arrives_after_another_change_is_refused() {
    let (at, conditions) = (at(), conditions());
    let entry =
        KeyValue { create_revision: 11, mod_revision: 12, value: b"v".to_vec(), ..KeyValue::default() };
    let [(compares, lease)] = &puts(&at.take_over(&entry, &conditions), &at.entry)[..] else { panic!() };
    assert_eq!(*lease, LEASE);
    for needed in
        [at.entry_is(11), Compare::is(at.entry.clone(), Target::Mod(12)), conditions.session.clone()]
    {
        assert!(compares.contains(&needed), "{needed:?}");
    }
}

#[test]
fn a_cooldown_is_put_under_a_separate_lease_with_its_grant_alone() {
    let (at, conditions) = (at(), conditions());
    let cooldown = || StartsCooldown { value: b"c".to_vec(), lease: 99 };
    let txn = at.acquire(b"v", &conditions, Some(cooldown()), false);
    let [(compares, 99)] = &puts(&txn, &at.own_cooldown)[..] else { panic!() };
    assert!(compares.contains(&conditions.session));
    let [(compares, 99)] = &puts(&at.start_cooldown(11, &conditions, cooldown()), &at.own_cooldown)[..]
    else {
        panic!()
    };
    assert!(compares.contains(&at.entry_is(11)), "after a release the entry is gone");
    assert!(compares.contains(&conditions.session) && compares.contains(&At::is_empty(&at.cooldown)));
}

#[test]
fn a_release_writes_only_if_a_copy_can_still_arrive() {
    let at = at();
    let key = b"p/s/7".to_vec();
    let suspect = [Guarded { key: key.clone(), lease: 7 }];
    let plain = at.release(false, None, &[], false);
    assert_eq!(deletes(&plain), std::slice::from_ref(&at.entry));
    assert!(plain.compare.is_empty() && puts(&plain, &key).is_empty(), "a server without space refuses puts");
    let guarded = at.release(true, Some(b"note".to_vec()), &suspect, false);
    assert_eq!(deletes(&guarded), [at.entry.clone(), at.own_cooldown.clone(), b"note".to_vec()]);
    let [(compares, 7)] = &puts(&guarded, &key)[..] else { panic!() };
    assert_eq!(compares[..], [Compare::is(key.clone(), Target::Lease(7))], "an ended session is not revived");
    let sealed = at.release(false, None, &suspect, true);
    assert!(puts(&sealed, &key).is_empty());
    let nested = sealed.success.iter().find_map(|op| match &op.request {
        Some(Request::Txn(nested)) => Some(deletes(nested)),
        _ => None,
    });
    assert_eq!(nested, Some(vec![key]));
}

#[test]
fn a_proof_reads_only() {
    let at = at();
    let txn = at.prove(11, &conditions());
    let is_read = |op: &RequestOp| matches!(&op.request, Some(Request::Range(_)));
    assert!(txn.success.iter().all(is_read) && txn.failure.is_empty());
    let Some(Request::Range(ahead)) = &txn.success[0].request else { panic!() };
    assert_eq!((ahead.max_create_revision, ahead.limit), (11, 2));
    assert!(!ahead.keys_only, "such a reply has no lease");
}
