use std::time::Duration;

use super::*;

const HOLDER: HolderId = HolderId::from_parts(1, 1);

const fn at(seconds: u64) -> Moment {
    Moment::from_nanos(seconds * 1_000_000_000)
}

fn session(lease: i64) -> Arc<Session> {
    Arc::new(Session::for_tests(lease, Duration::from_secs(4), 10))
}

fn begun() -> Requests {
    let requests = Requests::default();
    assert!(requests.begin(&Request::new(LockKey::new("k").unwrap(), HOLDER)));
    requests
}

fn suspects(requests: &Requests) -> Vec<i64> {
    requests.release(HOLDER, false, at(0)).suspects.iter().map(|session| session.lease).collect()
}

#[test]
fn a_request_whose_every_copy_was_answered_leaves_no_suspect() {
    let (requests, session) = (begun(), session(7));
    assert!(requests.is_clean(HOLDER));
    assert_eq!(requests.sending(HOLDER, &session), Some(10));
    assert!(!requests.is_clean(HOLDER), "a copy is on its way");
    requests.replied(HOLDER, &session, false);
    assert!(requests.is_clean(HOLDER));
    assert!(suspects(&requests).is_empty());
}

#[test]
fn a_call_that_was_dropped_and_a_reply_to_a_second_copy_leave_their_session_suspect() {
    let (requests, dropped, unsure, answered) = (begun(), session(7), session(8), session(9));
    requests.sending(HOLDER, &dropped);
    requests.sending(HOLDER, &unsure);
    requests.replied(HOLDER, &unsure, true);
    // A later reply does not clear the earlier copy.
    requests.sending(HOLDER, &unsure);
    requests.replied(HOLDER, &unsure, false);
    requests.sending(HOLDER, &answered);
    requests.replied(HOLDER, &answered, false);
    assert_eq!(suspects(&requests), [7, 8]);
    assert_eq!(suspects(&requests), [7, 8], "also for a release that is repeated");
}

#[test]
fn nothing_is_sent_or_granted_after_a_release_was_called() {
    let (requests, session) = (begun(), session(7));
    let _ = requests.release(HOLDER, false, at(0));
    assert_eq!(requests.sending(HOLDER, &session), None);
    assert!(!requests.queued(HOLDER, &session, 11, None));
    assert!(!requests.granted(HOLDER, 11, at(9)));
    assert!(!requests.begin(&Request::new(LockKey::new("k").unwrap(), HOLDER)));
    requests.forget(HOLDER);
    assert_eq!(requests.sending(HOLDER, &session), None, "also after it was confirmed");
}

#[test]
fn a_hold_that_is_not_renewed_ends_although_a_waiter_keeps_its_session_alive() {
    let (requests, session) = (begun(), session(7));
    let waiter = HolderId::from_parts(1, 2);
    requests.begin(&Request::new(LockKey::new("other").unwrap(), waiter));
    assert!(requests.queued(waiter, &session, 12, None));
    assert!(requests.queued(HOLDER, &session, 11, None) && requests.granted(HOLDER, 11, at(9)));
    let before = requests.work(at(8));
    assert!(before.ended.is_empty() && before.awaited.contains(&7));
    assert!(requests.extend(HOLDER, at(20)));
    assert!(requests.work(at(19)).ended.is_empty());
    assert!(requests.hold(HOLDER, at(19)).is_some() && requests.hold(HOLDER, at(20)).is_none());
    let after = requests.work(at(20));
    assert_eq!(after.ended.iter().map(|ended| ended.created).collect::<Vec<_>>(), [11]);
    assert!(after.awaited.contains(&7));
    assert!(!requests.extend(HOLDER, at(30)), "a renewal does not revive it");
    assert!(requests.work(at(21)).ended.is_empty(), "it ends once");
}

#[test]
fn a_place_lasts_while_a_wait_runs_and_for_a_time_before() {
    let (requests, session) = (begun(), session(7));
    requests.queued(HOLDER, &session, 11, Some(at(5)));
    assert_eq!(requests.place(HOLDER).unwrap().created, 11);
    let work = requests.work(at(50));
    assert!(work.ended.is_empty() && work.awaited.contains(&7));
    requests.queued(HOLDER, &session, 11, Some(at(60)));
    assert_eq!(requests.work(at(60)).ended.len(), 1, "no wait has continued it");
    assert!(requests.place(HOLDER).is_none());
}

#[test]
fn a_release_ends_every_number_that_a_copy_can_take() {
    let (requests, session, key) = (Requests::default(), session(7), LockKey::new("k").unwrap());
    let mut request = Request::new(key.clone(), HOLDER);
    request.mode = Mode::Permit { of: 3 };
    assert!(requests.begin(&request));
    for number in [0, 1, 0] {
        assert!(requests.taking(HOLDER, number));
    }
    requests.numbered(HOLDER, 1);
    assert_eq!((requests.permit(HOLDER), requests.numbers(HOLDER)), (Some(1), vec![0, 1]));
    assert!(requests.knows_number(&key, 0) && !requests.knows_number(&key, 2));
    assert!(!requests.knows_number(&LockKey::new("other").unwrap(), 0));
    assert!(requests.queued(HOLDER, &session, 11, None) && requests.granted(HOLDER, 11, at(5)));
    let [ended] = &requests.work(at(5)).ended[..] else { panic!() };
    assert_eq!((ended.mode, &ended.numbers[..]), (request.mode, &[0, 1][..]));
    assert_eq!(requests.release(HOLDER, false, at(6)).numbers, [0, 1]);
    assert!(!requests.taking(HOLDER, 2), "nothing is taken after a release was called");
    let [abandoned] = &requests.work(at(60)).abandoned[..] else { panic!() };
    assert_eq!(abandoned.mode, request.mode);
}

#[test]
fn a_session_counts_its_entries() {
    let (requests, first, second) = (begun(), session(7), session(8));
    requests.sending(HOLDER, &first);
    requests.queued(HOLDER, &first, 11, None);
    let count = |session: &Session| session.entries.load(Ordering::Acquire);
    assert_eq!((count(&first), count(&second)), (1, 0));
    requests.moved(HOLDER, &second);
    assert_eq!((count(&first), count(&second)), (0, 1));
    requests.forget(HOLDER);
    assert_eq!((count(&first), count(&second)), (0, 0));
    assert!(requests.is_empty());
}

#[test]
fn a_failed_release_that_is_not_repeated_becomes_work_once() {
    let (requests, session) = (begun(), session(7));
    assert!(requests.queued(HOLDER, &session, 11, None) && requests.granted(HOLDER, 11, at(5)));
    let _ = requests.release(HOLDER, true, at(3));
    assert!(requests.work(at(9)).abandoned.is_empty());
    let _ = requests.release(HOLDER, true, at(9));
    assert!(requests.work(at(18)).abandoned.is_empty(), "it was repeated");
    let work = requests.work(at(19));
    assert!(work.ended.is_empty());
    let [abandoned] = &work.abandoned[..] else { panic!("{work:?}") };
    assert!((abandoned.key.as_str(), abandoned.holder, abandoned.unused) == ("k", HOLDER, true));
    let _ = requests.release(HOLDER, true, at(20));
    assert!(requests.work(at(60)).abandoned.is_empty(), "one task repeats it");
}
