use super::*;
use crate::wire::{DeleteRangeRequest, PutRequest, Request};

const LEASE: i64 = 70;

fn at_in(mode: Mode) -> At {
    At::new(&Names::new("p"), &LockKey::new("k").unwrap(), HolderId::from_parts(1, 1), mode)
}

fn at() -> At {
    at_in(Mode::Exclusive)
}

const NUMBER: Number = Number { number: 2, modified: 9, own_lease: 0 };

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
        (at.acquire_permit(b"v", NUMBER, 11, &conditions), 1),
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
    let [(compares, lease)] = &puts(&at.take_over(&entry, &[], &conditions), &at.entry)[..] else { panic!() };
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
    let suspects = vec![Guarded { key: key.clone(), lease: 7 }];
    let plain = at.release(&Leaves::default(), false);
    assert_eq!(deletes(&plain), std::slice::from_ref(&at.entry));
    assert!(plain.compare.is_empty() && puts(&plain, &key).is_empty(), "a server without space refuses puts");
    let (note, numbers) = (Some(b"note".to_vec()), Vec::new());
    let guarded = at.release(&Leaves { unused: true, note, numbers, suspects: suspects.clone() }, false);
    assert_eq!(deletes(&guarded), [at.entry.clone(), at.own_cooldown.clone(), b"note".to_vec()]);
    let [(compares, 7)] = &puts(&guarded, &key)[..] else { panic!() };
    assert_eq!(compares[..], [Compare::is(key.clone(), Target::Lease(7))], "an ended session is not revived");
    let sealed = at.release(&Leaves { suspects, ..Leaves::default() }, true);
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
    let is_read = |op: &RequestOp| matches!(&op.request, Some(Request::Range(_)));
    for txn in [at.prove(11, &conditions()), at.survey(3, &conditions())] {
        assert!(txn.success.iter().all(is_read) && txn.failure.is_empty());
        let Some(Request::Range(own)) = &txn.success[0].request else { panic!() };
        assert_eq!((&own.key, own.keys_only), (&at.entry, false), "a reply to keys_only has no lease");
    }
    let proof = at.prove(11, &conditions());
    let Some(Request::Range(ahead)) = &proof.success[5].request else { panic!() };
    assert_eq!((ahead.max_create_revision, ahead.limit), (10, 1), "the newest of the older ones");
}

#[test]
fn a_shared_request_is_excluded_by_entries_that_are_not_shared_alone() {
    let at = at_in(Mode::Shared);
    let txn = at.acquire(b"v", &conditions(), None, true);
    assert!(
        txn.compare.contains(&At::is_empty(&at.rivals)) && !txn.compare.contains(&At::is_empty(&at.queue))
    );
    assert!(txn.compare.contains(&at.entry_is(0)), "a repeated request keeps its create revision");
    let proof = at.prove(11, &conditions());
    let Some(Request::Range(ahead)) = &proof.success[5].request else { panic!() };
    assert_eq!((&ahead.key, &ahead.range_end), (&at.rivals.begin, &at.rivals.end));
    let own = KeyValue { create_revision: 11, ..KeyValue::default() };
    for (rival, is_first) in [(None, true), (Some(10), false), (Some(12), true)] {
        let kvs = rival.map(|create_revision| KeyValue { create_revision, ..KeyValue::default() });
        assert_eq!(NotFree(&reply_of(kvs.into_iter().collect())).is_first(&own), is_first, "{rival:?}");
    }
}

fn reply_of(kvs: Vec<KeyValue>) -> TxnResponse {
    let range = crate::wire::RangeResponse { kvs, ..Default::default() };
    let response = Some(crate::wire::Response::Range(range));
    TxnResponse { responses: vec![crate::wire::ResponseOp { response }], ..TxnResponse::default() }
}

#[test]
fn a_number_is_put_only_if_its_key_is_unchanged_and_with_the_lease_of_its_entry() {
    let (at, conditions) = (at_in(Mode::Permit { of: 3 }), conditions());
    let name = at.number(2);
    let unchanged = Compare::is(name.clone(), Target::Mod(9));
    let direct = at.acquire_permit(b"v", NUMBER, 11, &conditions);
    for txn in [&direct, &at.take(11, NUMBER, &conditions)] {
        let [(compares, LEASE)] = &puts(txn, &name)[..] else { panic!() };
        for needed in [&unchanged, &conditions.session, &conditions.base] {
            assert!(compares.contains(needed), "{needed:?}");
        }
    }
    let [(compares, _)] = &puts(&at.take(11, NUMBER, &conditions), &name)[..] else { panic!() };
    assert!(compares.contains(&at.entry_is(11)), "after a release the entry is gone");
    assert!(compares.contains(&Compare::is(at.entry.clone(), Target::Lease(LEASE))));
    let no_newer = Compare::is(at.queue.begin.clone(), Target::Create(12)).less().up_to(at.queue.end.clone());
    assert!(direct.compare.contains(&no_newer), "nobody entered after the survey");
    assert!(direct.compare.contains(&At::is_empty(&at.cooldown)));
}

#[test]
fn only_the_holder_of_a_number_moves_or_deletes_it() {
    let (at, conditions) = (at_in(Mode::Permit { of: 3 }), conditions());
    let is_own = Compare::is(at.number(2), Target::Value(at.holder.clone()));
    let moved = at.take_over(&KeyValue::default(), &[2], &conditions);
    let [(compares, LEASE)] = &puts(&moved, &at.number(2))[..] else { panic!() };
    assert_eq!(compares[..], std::slice::from_ref(&is_own)[..]);
    let leaves = Leaves { numbers: vec![2], ..Leaves::default() };
    for txn in [at.release(&leaves, false), at.end(11, &[2])] {
        let nested: Vec<_> = txn.success.iter().filter_map(nested).collect();
        let [ends] = &nested[..] else { panic!("{txn:?}") };
        assert_eq!((&ends.compare[..], deletes(ends)), (std::slice::from_ref(&is_own), vec![at.number(2)]));
    }
}

fn nested(op: &RequestOp) -> Option<TxnRequest> {
    match &op.request {
        Some(Request::Txn(nested)) => Some(nested.clone()),
        _ => None,
    }
}
