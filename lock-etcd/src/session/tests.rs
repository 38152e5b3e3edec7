use super::*;

fn session() -> Session {
    Session::new(7, b"p/s/7".to_vec(), (4, Duration::from_secs(4)), 10, at(1))
}

const fn at(seconds: u64) -> Moment {
    Moment::from_nanos(seconds * 1_000_000_000)
}

fn read(lease: i64, mod_revision: i64) -> KeyValue {
    KeyValue { lease, mod_revision, ..KeyValue::default() }
}

#[test]
fn a_keep_alive_counts_only_if_a_later_read_is_answered_in_its_term() {
    let session = session();
    session.note_answered(at(3), 5);
    let answered = session.answered();
    session.prove(answered, 6);
    assert_eq!(session.confirmed(), at(1), "another leader answered the read");
    session.prove(answered, 5);
    assert_eq!(session.confirmed(), at(3));
    // A proof of an earlier keep-alive changes nothing.
    session.note_answered(at(2), 5);
    session.prove(session.answered(), 5);
    assert_eq!(session.confirmed(), at(3));
    session.distrust();
    session.prove(session.answered(), 5);
    assert_eq!(session.confirmed(), at(0), "nothing is proven after a restore");
}

#[test]
fn the_guard_grows_and_a_missing_or_older_key_ends_the_session() {
    let old = session();
    old.learn(Some(&read(7, 12)), 10);
    // The reply to a request from before the write changes nothing.
    old.learn(Some(&read(7, 10)), 10);
    assert_eq!((old.guard(), old.has_ended()), (12, false));
    old.learn(Some(&read(7, 9)), 10);
    assert!(old.has_ended(), "the store has gone back");
    for missing in [None, Some(read(8, 12)), Some(read(0, 12))] {
        let session = session();
        session.learn(missing.as_ref(), 10);
        assert!(session.has_ended() && !session.is_usable(), "{missing:?}");
    }
}

#[test]
fn a_sealed_session_takes_no_request_and_does_not_end_without_its_key() {
    let session = session();
    session.seal();
    session.learn(None, 10);
    assert!(!session.has_ended() && !session.is_usable());
}

#[test]
fn an_unknown_entry_is_a_ghost_at_the_second_proof_in_a_row() {
    let session = session();
    let listed = |names: &[&str]| names.iter().map(|name| name.as_bytes().to_vec()).collect::<HashSet<_>>();
    let known = |name: &[u8]| name == b"mine";
    assert!(session.ghosts(&listed(&["mine", "ghost", "p/s/7"]), known).is_empty());
    // An entry that was only on its way is known or gone at the second proof.
    assert!(session.ghosts(&listed(&["mine", "young"]), known).is_empty());
    assert_eq!(session.ghosts(&listed(&["mine", "young", "ghost"]), known), [b"young"]);
}

#[test]
fn a_listing_is_due_after_half_the_ttl_and_sooner_while_an_entry_is_strange() {
    let session = session();
    let after = |millis| at(1).after(Duration::from_millis(millis));
    assert!(session.is_listed(after(1_999)), "a new session has nothing to list");
    assert!(!session.is_listed(after(2_000)), "half the TTL of 4 s");
    session.note_listed(at(3));
    session.note_listed(at(2));
    assert!(session.is_listed(at(4)), "an older listing changes nothing");
    let ghost: HashSet<_> = [b"ghost".to_vec()].into();
    assert!(session.ghosts(&ghost, |_| false).is_empty());
    assert!(session.is_listed(after(2_600)) && !session.is_listed(after(2_700)), "a sixth of the TTL");
    assert_eq!(session.ghosts(&ghost, |_| false).len(), 1);
    assert!(!session.is_listed(at(4)), "until a listing shows that the entry is gone");
    assert!(session.ghosts(&HashSet::new(), |_| false).is_empty());
    assert!(session.is_listed(at(4)));
    session.distrust();
    assert!(!session.is_listed(at(4)), "the store has possibly gone back");
}

#[test]
fn grants_that_arrive_together_share_one_keep_alive() {
    let session = session();
    let apart = Duration::from_secs(1);
    assert!(session.note_kept(at(2), apart));
    assert!(!session.note_kept(at(2), apart));
    assert!(session.note_kept(at(3), apart));
    assert_eq!(session.kept(), at(3));
}

#[test]
fn a_full_session_and_a_sealed_one_are_not_used_for_new_requests() {
    let (sessions, session) = (Sessions::default(), Arc::new(session()));
    sessions.add(4, &session);
    assert!(sessions.current(4).is_some() && sessions.current(5).is_none());
    session.entries.store(MOST_ENTRIES, Ordering::Release);
    assert!(sessions.current(4).is_none());
    session.entries.store(0, Ordering::Release);
    session.seal();
    assert!(sessions.current(4).is_none());
    assert!(sessions.by_lease(7).is_some(), "its holds are still renewed");
    session.end();
    assert!(sessions.by_lease(7).is_none());
}

#[test]
fn a_lease_is_rounded_up_to_seconds() {
    assert_eq!(whole_seconds(Duration::from_millis(1_001)), 2);
    assert_eq!(whole_seconds(Duration::from_secs(2)), 2);
    assert_eq!(whole_seconds(Duration::from_millis(10)), 1);
}
