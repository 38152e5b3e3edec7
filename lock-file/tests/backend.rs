//! Replies of the store to an engine's calls.

// The lint's exception for tests does not cover their helpers.
#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/backend.rs"]
mod common;

use std::fs;
use std::time::Duration;

use common::{
    LONG, attempt, contended, edit_record, file, granted, is_process, key, open, refused, release, request,
    token,
};
use leasehold_api::{ErrorKind, KeyInfo, ListQuery, LossReason, Mode};
use leasehold_engine::{Attempt, Backend as _, CancellationToken, ReleaseReply, Renewed, Waiting};
use leasehold_file::{FileConfig, HeldFile};
use test_bounds::within;
use tokio::time::timeout;

const HOUR: Duration = Duration::from_secs(3600);

#[tokio::test]
async fn clients_exclude_each_other_and_themselves() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let first = request("k");
    granted(&a, &first).await;
    contended(&a, &request("k")).await;
    contended(&b, &request("k")).await;
    granted(&b, &request("other")).await;
    assert_eq!(release(&a, &first).await, ReleaseReply::new(true));
    granted(&b, &request("k")).await;
}

#[tokio::test]
async fn the_holder_id_owns() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let first = request("k");
    let once = token(&a, &first).await;
    assert_eq!(token(&a, &first).await, once, "the same attempt sent twice is one grant");
    for stranger in [&a, &b] {
        assert_eq!(release(stranger, &request("k")).await, ReleaseReply::new(false));
    }
    assert_eq!(release(&b, &first).await, ReleaseReply::new(false), "not this client's");
    contended(&b, &request("k")).await;
    assert_eq!(release(&a, &first).await, ReleaseReply::new(true));
    let second = request("k");
    granted(&b, &second).await;
    assert_eq!(release(&a, &first).await, ReleaseReply::new(false), "late and twice");
    contended(&a, &request("k")).await;
    let renew = |backend, request: &leasehold_engine::Request| {
        let hold = request.hold();
        async move { leasehold_file::FileBackend::renew(backend, vec![hold]).await.pop().unwrap().unwrap() }
    };
    assert_eq!(renew(&b, &second).await, Renewed::Extended);
    assert_eq!(renew(&a, &first).await, Renewed::Gone(LossReason::Gone));
}

#[tokio::test]
async fn answers_are_per_request_and_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let taken = request("b");
    granted(&backend, &taken).await;
    let mut shared = request("c");
    shared.mode = Mode::Shared;
    let mut lease = request("d");
    lease.ttl = Some(HOUR);
    let answers = backend.acquire(vec![request("a"), request("b"), shared, lease, request("e")]).await;
    assert!(matches!(answers[0], Ok(Attempt::Granted(_))));
    assert!(matches!(answers[1], Ok(Attempt::Contended(_))));
    assert!(matches!(answers[2], Ok(Attempt::Granted(_))));
    let Ok(Attempt::Refused(error)) = &answers[3] else { panic!("{answers:?}") };
    assert_eq!((error.kind(), error.key().unwrap().as_str()), (ErrorKind::Unsupported, "d"));
    assert!(matches!(answers[4], Ok(Attempt::Granted(_))));
    assert_eq!(answers.len(), 5);
}

#[tokio::test]
async fn tokens_grow_whatever_happens_between() {
    let dir = tempfile::tempdir().unwrap();
    let mut last = None;
    // A new client in each round, which knows only the files on disk.
    for round in 0..6 {
        let backend = open(dir.path());
        for _ in 0..3 {
            let request = request("k");
            let token = Some(token(&backend, &request).await);
            assert!(token > last, "round {round}: {token:?} after {last:?}");
            last = token;
            assert!(release(&backend, &request).await.was_held);
        }
        match round {
            0 => edit_record(dir.path(), |r| r["boot"] = "another".into()),
            1 => fs::remove_file(file(dir.path(), "json")).unwrap(),
            2 => fs::write(file(dir.path(), "json"), "{\"key\":\"k\",").unwrap(),
            3 => fs::write(file(dir.path(), "json"), "").unwrap(),
            4 => fs::remove_file(file(dir.path(), "token")).unwrap(),
            _ => {}
        }
    }
}

#[tokio::test]
async fn a_damaged_ceiling_grants_nothing_until_it_is_mended() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let first = request("k");
    let before = token(&backend, &first).await;
    release(&backend, &first).await;
    let path = file(dir.path(), "token");
    let whole = fs::read(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 3]).unwrap();
    for _ in 0..2 {
        let error = refused(&backend, &request("k")).await;
        assert_eq!(error.kind(), ErrorKind::Corrupt);
        assert_eq!(error.key(), Some(&key("k")));
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    }
    fs::write(&path, &whole).unwrap();
    assert!(token(&backend, &request("k")).await > before);
}

#[tokio::test]
async fn two_keys_in_one_file_are_an_error_that_names_both() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let first = request("the one");
    granted(&backend, &first).await;
    release(&backend, &first).await;
    edit_record(dir.path(), |r| r["key"] = "the other".into());
    let error = refused(&backend, &request("the one")).await;
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(
        error.to_string().contains("\"the one\"") && error.to_string().contains("\"the other\""),
        "{error}"
    );
}

#[tokio::test]
async fn a_cooldown_outlasts_its_holder() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let mut first = request("k");
    first.cooldown = Some(HOUR);
    granted(&a, &first).await;
    let while_held = contended(&b, &request("k")).await.cooling_for.unwrap();
    assert!(while_held > HOUR - LONG && while_held <= HOUR + LONG, "{while_held:?}");
    release(&a, &first).await;
    let after = contended(&b, &request("k")).await;
    assert!(after.cooling_for.unwrap() <= while_held);
    assert_eq!(after.retry_after, after.cooling_for);
    // Moves the grant into the past, so that its window has ended.
    edit_record(dir.path(), |r| {
        r["since_ms"] = (r["since_ms"].as_u64().unwrap() - 3_600_002).into();
    });
    granted(&b, &request("k")).await;
}

#[tokio::test]
async fn a_clock_that_went_back_delays_by_one_window_at_most() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let mut first = request("k");
    first.cooldown = Some(Duration::from_millis(300));
    let before = token(&backend, &first).await;
    release(&backend, &first).await;
    // Moves the grant a year into the future, as if the clock had gone back.
    edit_record(dir.path(), |r| {
        r["since_ms"] = (r["since_ms"].as_u64().unwrap() + 365 * 24 * 3_600_000).into();
    });
    assert_eq!(contended(&backend, &request("k")).await.cooling_for, Some(Duration::from_millis(300)));
    let next = request("k");
    let answer = timeout(LONG, async {
        loop {
            match attempt(&backend, &next).await.unwrap() {
                Attempt::Granted(granted) => return granted,
                Attempt::Contended(contended) => {
                    tokio::time::sleep(contended.cooling_for.unwrap()).await;
                }
                other => panic!("{other:?}"),
            }
        }
    });
    assert!(answer.await.unwrap().token > Some(before));
}

#[tokio::test]
async fn a_waiter_goes_before_a_client_that_re_acquires_in_a_loop() {
    let dir = tempfile::tempdir().unwrap();
    let (looper, waiter) = (open(dir.path()), open(dir.path()));
    assert_eq!(waiter.timing().waiting, Waiting::Store);
    let mut holding = request("k");
    granted(&looper, &holding).await;
    let wanted = request("k");
    let waiting = async { waiter.wait(wanted.clone(), CancellationToken::new()).await.unwrap() };
    let looping = async {
        // Releases and re-acquires the key without a pause until another client holds it.
        for _ in 0..1_000_000 {
            release(&looper, &holding).await;
            holding = request("k");
            if !matches!(attempt(&looper, &holding).await, Ok(Attempt::Granted(_))) {
                return;
            }
            tokio::task::yield_now().await;
        }
        panic!("the waiter starved");
    };
    let both = async { tokio::join!(waiting, looping) };
    let (granted, ()) = within(LONG, "not ended", both).await;
    assert!(matches!(granted, Attempt::Granted(_)));
    contended(&looper, &request("k")).await;
}

#[tokio::test]
async fn a_release_tells_of_a_waiter() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let first = request("k");
    granted(&a, &first).await;
    let freed = async {
        while !is_waiting(dir.path()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        release(&a, &first).await
    };
    let both = async { tokio::join!(b.wait(request("k"), CancellationToken::new()), freed) };
    let (granted, freed) = within(LONG, "not ended", both).await;
    assert!(matches!(granted, Ok(Attempt::Granted(_))));
    assert!(freed.was_held && freed.waiters, "{freed:?}");
}

#[tokio::test]
async fn a_stopped_wait_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b, c) = (open(dir.path()), open(dir.path()), open(dir.path()));
    let first = request("k");
    granted(&a, &first).await;
    let (stop_b, stop_c) = (CancellationToken::new(), CancellationToken::new());
    let stop = async {
        // One waiter holds the waiter lock, the other waits for it.
        while !is_waiting(dir.path()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        stop_b.cancel();
        stop_c.cancel();
    };
    let both = async {
        tokio::join!(b.wait(request("k"), stop_b.clone()), c.wait(request("k"), stop_c.clone()), stop)
    };
    let (b_answer, c_answer, ()) = within(LONG, "not ended", both).await;
    assert!(matches!(b_answer, Ok(Attempt::Contended(_))) && matches!(c_answer, Ok(Attempt::Contended(_))));
    assert!(!release(&a, &first).await.waiters);
    granted(&a, &request("k")).await;
}

#[tokio::test]
async fn a_dropped_wait_leaves_the_waiter_lock() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let first = request("k");
    granted(&a, &first).await;
    let wanted = request("k");
    let entered = async {
        while !is_waiting(dir.path()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        answer = b.wait(wanted.clone(), CancellationToken::new()) => panic!("{answer:?}"),
        () = entered => {}
    }
    release(&a, &first).await;
    // The release ends the dropped wait, which still runs on a thread, by its holder id.
    release(&b, &wanted).await;
    granted(&a, &request("k")).await;
}

fn is_waiting(dir: &std::path::Path) -> bool {
    let waiter_lock = fs::read_dir(dir)
        .unwrap()
        .map(|e| e.unwrap().path())
        .find(|p| p.extension().is_some_and(|e| e == "next"));
    waiter_lock.is_some_and(|path| fs::File::open(path).unwrap().try_lock_shared().is_err())
}

#[tokio::test]
async fn a_wait_tells_of_a_cooldown_it_meets() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let first = request("k");
    granted(&a, &first).await;
    let waiting = b.wait(request("k"), CancellationToken::new());
    let meanwhile = async {
        while !is_waiting(dir.path()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        edit_record(dir.path(), |r| r["cooldown_ms"] = 3_600_000.into());
    };
    let (answer, ()) = within(LONG, "not ended", async { tokio::join!(waiting, meanwhile) }).await;
    let Attempt::Contended(contended) = answer.unwrap() else { panic!("granted within a cooldown") };
    assert!(contended.cooling_for.is_some());
}

#[tokio::test]
async fn aborting_releases_everything() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    granted(&a, &request("k")).await;
    granted(&a, &request("l")).await;
    a.abort();
    granted(&b, &request("k")).await;
    granted(&b, &request("l")).await;
    assert_eq!(refused(&a, &request("m")).await.kind(), ErrorKind::Closed);
    drop(b);
    granted(&open(dir.path()), &request("k")).await;
}

#[tokio::test]
async fn operators_see_who_holds_what() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    let admin = b.admin().unwrap();
    assert_eq!(admin.inspect(&key("a:1")).await.unwrap(), KeyInfo::free(key("a:1")), "never used");
    let mut first = request("a:1");
    first.label = Some("night \"shift\"".into());
    let token = token(&a, &first).await;
    let mut cooling = request("a:2");
    cooling.cooldown = Some(HOUR);
    granted(&a, &cooling).await;
    granted(&a, &request("b")).await;

    let info = admin.inspect(&key("a:1")).await.unwrap();
    assert_eq!((info.key.as_str(), info.named, info.cooldown, info.holders.len()), ("a:1", true, None, 1));
    let hold = info.holder().unwrap();
    assert_eq!((hold.holder, hold.token), (Some(first.holder), Some(token)));
    assert_eq!(hold.label.as_deref(), Some("night \"shift\""));
    assert!(is_process(hold.owner.as_deref(), std::process::id()), "{hold:?}");
    #[cfg(target_os = "linux")]
    assert!(hold.owner.as_deref().unwrap().ends_with(')'), "with its name: {hold:?}");
    assert!(hold.since.unwrap().elapsed().unwrap() < LONG);
    let while_held = admin.inspect(&key("a:2")).await.unwrap();
    assert!(while_held.is_held() && while_held.cooldown.is_some(), "{while_held:?}");

    release(&a, &cooling).await;
    let list = |query: ListQuery| async move {
        let infos = admin.list(&query).await.unwrap();
        infos.into_iter().map(|i| (i.key.as_str().to_owned(), i.is_held())).collect::<Vec<_>>()
    };
    let held = |key: &str| (key.to_owned(), true);
    assert_eq!(list(ListQuery::new()).await, [held("a:1"), held("b")]);
    assert_eq!(list(ListQuery::new().prefix("a:")).await, [held("a:1")]);
    let with_ended = list(ListQuery::new().prefix("a:").include_ended()).await;
    assert_eq!(with_ended, [held("a:1"), ("a:2".to_owned(), false)]);
    assert_eq!(list(ListQuery::new().include_ended().limit(1)).await, [held("a:1")]);
    let cooling = admin.inspect(&key("a:2")).await.unwrap();
    assert_eq!(cooling.holders, [], "its cooldown alone lasts");
    assert!(cooling.cooldown.is_some_and(|left| left > HOUR - LONG && left < HOUR + LONG));

    let error = admin.force_release(&key("a:1"), first.holder).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains(&format!("end pid {}", std::process::id())), "{error}");

    release(&a, &first).await;
    assert!(admin.inspect(&key("a:1")).await.unwrap().is_free());
}

#[tokio::test]
async fn a_damaged_record_hides_no_hold_from_inspection() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    granted(&backend, &request("k")).await;
    fs::write(file(dir.path(), "json"), "{").unwrap();
    let admin = backend.admin().unwrap();
    let info = admin.inspect(&key("k")).await.unwrap();
    assert_eq!(info.holder().unwrap().holder, None);
    granted(&backend, &request("l")).await;
    let listed = admin.list(&ListQuery::new()).await.unwrap();
    let named: Vec<_> = listed.iter().map(|info| (info.named, info.is_held())).collect();
    assert_eq!(
        (named.len(), named.contains(&(true, true)), named.contains(&(false, true))),
        (2, true, true),
        "{listed:?}"
    );
}

#[tokio::test]
async fn looking_makes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let before = fs::read_dir(dir.path()).unwrap().count();
    let admin = backend.admin().unwrap();
    assert!(admin.inspect(&key("k")).await.unwrap().is_free());
    assert_eq!(admin.list(&ListQuery::new().include_ended()).await.unwrap(), []);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), before);
}

#[tokio::test]
async fn the_guard_carries_its_file() {
    let dir = tempfile::tempdir().unwrap();
    let backend = open(dir.path());
    let first = request("k");
    let granted = granted(&backend, &first).await;
    let file = granted.extension.unwrap().downcast::<HeldFile>().unwrap();
    let duplicate = file.inheritable().unwrap();
    release(&backend, &first).await;
    assert!(file.inheritable().is_err());
    common::granted(&backend, &request("k")).await;
    drop(duplicate);
}

#[tokio::test]
async fn any_key_has_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let backend = FileConfig::new(dir.path()).backend().unwrap();
    let long = "x".repeat(512);
    let odd = [
        "..",
        ".",
        "/etc/passwd",
        "a/b",
        "A",
        "a",
        "a ",
        "a.",
        "%2F",
        "é",
        "e\u{301}",
        "🔑",
        &long,
        "con",
        "\\",
    ];
    for text in odd {
        granted(&backend, &request(text)).await;
    }
    for text in odd {
        contended(&backend, &request(text)).await;
    }
    let listed = backend.admin().unwrap().list(&ListQuery::new()).await.unwrap();
    assert_eq!(listed.len(), odd.len());
}

#[tokio::test]
async fn a_release_ends_the_cooldown_of_what_was_unused_and_no_other() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (open(dir.path()), open(dir.path()));
    for unused in [false, true] {
        let mut first = request(if unused { "unused" } else { "used" });
        first.cooldown = Some(Duration::from_secs(3_600));
        granted(&a, &first).await;
        let mut hold = first.hold();
        hold.unused = unused;
        assert!(a.release(vec![hold]).await.remove(0).unwrap().was_held);
        let next = request(first.key.as_str());
        match b.acquire(vec![next]).await.remove(0).unwrap() {
            Attempt::Granted(_) => assert!(unused, "a second run in one window"),
            Attempt::Contended(contended) => assert!(!unused && contended.cooling_for.is_some()),
            other => panic!("{other:?}"),
        }
    }
}
