//! Passes, sleep and wake-ups of the claimer, in memory.
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::common::{Probe, builder, count_in, insert, memory, paused, state, still_memory, until, within};
use leasehold_claim::{Claimer, MemoryClaims, MemoryClock, MemoryRow, Outcome, RowKey, Unmet};
use tokio::time::sleep;

const POLL: Duration = Duration::from_secs(30);

/// Waits until the claimer is idle.
async fn settle_down() {
    sleep(Duration::from_secs(3)).await;
}

/// An idle claimer sends no query between two polls.
#[tokio::test(start_paused = true)]
async fn an_idle_claimer_queries_only_at_its_polls() {
    let store = Probe::of(still_memory());
    let claimer = paused(&store).poll(POLL).start().unwrap();
    let worker = tokio::spawn(async move { claimer.next().await });
    settle_down().await;
    let before = store.claim_queries();
    assert!(before >= 2, "it looked once: a take and whether anything is pending");

    sleep(POLL / 2).await;
    assert_eq!(store.claim_queries(), before, "nothing is asked between polls");

    // Each poll is one query for pending rows, which finds none.
    sleep(POLL * 10).await;
    let asked = store.claim_queries() - before;
    assert!((9..=14).contains(&asked), "ten polls, with jitter: {asked} queries");
    worker.abort();
}

/// Without workers, no query is sent.
#[tokio::test(start_paused = true)]
async fn a_claimer_without_workers_sends_no_claim_queries() {
    let claims = still_memory();
    insert(&claims, 1..=3);
    let store = Probe::of(claims);
    let claimer = paused(&store).start().unwrap();
    sleep(POLL * 3).await;
    assert_eq!(store.claim_queries(), 0);
    drop(claimer);
}

/// With every announcement lost, work is found within the poll interval.
#[tokio::test(start_paused = true)]
async fn the_poll_finds_work_if_every_notification_is_lost() {
    let claims = still_memory();
    let store = Probe::of(claims.clone());
    store.dumb.store(true, Ordering::SeqCst);
    let claimer = paused(&store).poll(POLL).start().unwrap();
    let waiting = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.unwrap().done().await }
    });
    settle_down().await;
    for id in 1..=3 {
        let begun = tokio::time::Instant::now();
        insert(&claims, [id]);
        if id == 1 {
            sleep(POLL + Duration::from_millis(100)).await;
            assert!(waiting.is_finished(), "the poll found the first");
        } else {
            let claim = tokio::time::timeout(POLL + Duration::from_millis(100), claimer.next()).await;
            claim.expect("found within a poll").unwrap().done().await.unwrap();
        }
        assert!(begun.elapsed() <= POLL + Duration::from_millis(200));
    }
    assert_eq!(count_in(&claims, "complete"), 3);
}

/// The same if listening is refused. The claimer continues to try to listen.
#[tokio::test(start_paused = true)]
async fn a_claimer_that_cannot_listen_polls() {
    let claims = still_memory();
    let store = Probe::of(claims.clone());
    store.deaf.store(true, Ordering::SeqCst);
    let claimer = paused(&store).poll(POLL).start().unwrap();
    let worker = tokio::spawn(async move { claimer.next().await.unwrap().done().await });
    settle_down().await;
    insert(&claims, [1]);
    sleep(POLL + Duration::from_secs(1)).await;
    assert!(worker.is_finished());
    assert!(store.listens.load(Ordering::SeqCst) > 2, "listening is tried again");
}

/// Rows inserted before the start or before the first scan need no announcement.
#[tokio::test(start_paused = true)]
async fn a_claimer_listens_before_its_first_scan() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    store.dumb.store(true, Ordering::SeqCst);
    // Rows inserted during the setup of the listener are not announced to it.
    store.silence(true);
    let claimer = paused(&store).poll(POLL * 100).start().unwrap();
    let worker = tokio::spawn(async move {
        let first = claimer.next().await.unwrap();
        let second = claimer.next().await.unwrap();
        (first, second, claimer)
    });
    sleep(Duration::from_millis(100)).await;
    insert(&claims, [2]);
    store.silence(false);
    let (first, second, _claimer) = within("both rows", worker).await.unwrap();
    assert_eq!((&first.row().key, &second.row().key), (&RowKey::new(1), &RowKey::new(2)));

    let log = store.log.lock().unwrap().clone();
    let listening = log.iter().position(|what| *what == "listening").unwrap();
    let look = log.iter().position(|what| *what == "take").unwrap();
    assert!(listening < look, "first listen, then look: {log:?}");
}

/// If listening succeeds only after the first scan, the claimer scans again.
#[tokio::test(start_paused = true)]
async fn a_claimer_scans_again_once_it_can_listen() {
    let claims = still_memory();
    let store = Probe::of(claims.clone());
    store.dumb.store(true, Ordering::SeqCst);
    store.deaf.store(true, Ordering::SeqCst);
    let claimer = paused(&store).poll(POLL * 100).start().unwrap();
    let worker = tokio::spawn(async move { claimer.next().await });
    // The claimer scans, finds nothing and sleeps. The pauses between its attempts to listen have become long.
    sleep(Duration::from_secs(60)).await;
    insert(&claims, [1]);
    let listens = store.listens.load(Ordering::SeqCst);
    store.deaf.store(false, Ordering::SeqCst);
    sleep(Duration::from_secs(61)).await;
    assert!(store.listens.load(Ordering::SeqCst) > listens);
    assert!(worker.is_finished(), "found by the scan after listening");
}

/// The claimer also scans after each reconnect. No row is announced, so only this scan can find the row.
#[tokio::test(start_paused = true)]
async fn a_claimer_scans_again_after_each_reconnect() {
    let claims = still_memory();
    let store = Probe::of(claims.clone());
    store.dumb.store(true, Ordering::SeqCst);
    let claimer = paused(&store).poll(POLL * 100).start().unwrap();
    let waiting = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.unwrap().done().await }
    });
    settle_down().await;
    for id in 1..=3 {
        // Inserts the row while the claimer does not listen, so only the scan after the reconnect can find it.
        store.silence(true);
        store.break_listeners();
        sleep(Duration::from_millis(1)).await;
        insert(&claims, [id]);
        store.silence(false);
        let reconnects = store.listens.load(Ordering::SeqCst);
        if id > 1 {
            let claim = tokio::time::timeout(Duration::from_secs(70), claimer.next()).await;
            claim.expect("found after the reconnect").unwrap().done().await.unwrap();
        } else {
            sleep(Duration::from_secs(70)).await;
            assert!(waiting.is_finished());
        }
        assert!(store.listens.load(Ordering::SeqCst) >= reconnects);
    }
}

/// A scan right after the loss of the listener is not enough. Another one must follow after the claimer listens again.
#[tokio::test(start_paused = true)]
async fn the_scan_comes_after_the_listener_is_back() {
    let claims = still_memory();
    let store = Probe::of(claims);
    store.dumb.store(true, Ordering::SeqCst);
    let claimer = paused(&store).poll(POLL * 100).start().unwrap();
    let worker = tokio::spawn(async move { claimer.next().await });
    settle_down().await;
    store.log.lock().unwrap().clear();
    store.break_listeners();
    sleep(Duration::from_secs(5)).await;
    let log = store.log.lock().unwrap().clone();
    let listening = log.iter().position(|what| *what == "listening").expect("it listens again");
    assert!(log[listening..].contains(&"take"), "and looks then: {log:?}");
    worker.abort();
}

/// A thousand announcements cause far fewer scans.
#[tokio::test(start_paused = true)]
async fn notifications_are_coalesced() {
    let store = Probe::of(still_memory());
    let claimer = paused(&store).poll(POLL).start().unwrap();
    let worker = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await }
    });
    settle_down().await;
    let before = store.claim_queries();
    for _ in 0..1000 {
        claimer.wake();
        tokio::task::yield_now().await;
    }
    settle_down().await;
    let asked = store.claim_queries() - before;
    assert!((2..=8).contains(&asked), "{asked} queries for a thousand announcements at once");

    // Spread over a second, they cause at most one pass per minimum pause.
    let before = store.claim_queries();
    for _ in 0..1000 {
        claimer.wake();
        sleep(Duration::from_millis(1)).await;
    }
    let asked = store.claim_queries() - before;
    assert!((2..=210).contains(&asked), "{asked} queries for a thousand announcements in a second");
    worker.abort();
}

/// A row that is put back is offered again only after the rest of the pass.
#[tokio::test(start_paused = true)]
async fn a_row_put_back_is_not_offered_again_in_the_same_pass() {
    let claims = still_memory();
    insert(&claims, 1..=5);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).batch(1).ahead(0).start().unwrap();
    let mut seen = Vec::new();
    for _ in 0..5 {
        let claim = within("a claim", claimer.next()).await.unwrap();
        seen.push(claim.row().key.clone());
        claim.put_back().await.unwrap();
    }
    assert_eq!(seen, (1..=5_i64).map(RowKey::new).collect::<Vec<_>>(), "each once, in order");
    assert_eq!(count_in(&claims, "new"), 5);
    // The next pass starts at the first row again.
    let again = within("the next pass", claimer.next()).await.unwrap();
    assert_eq!(again.row().key, RowKey::new(1));
}

/// A row locked by another worker is done after that worker has ended, without an announcement.
#[tokio::test(start_paused = true)]
async fn a_row_locked_by_a_peer_is_done_once_the_peer_ends() {
    let claims = still_memory();
    insert(&claims, 1..=2);
    let locked = claims.lock(&RowKey::new(1)).unwrap();
    let store = Probe::of(claims.clone());
    store.dumb.store(true, Ordering::SeqCst);
    let claimer = paused(&store).poll(POLL * 100).start().unwrap();
    let first = within("the free row", claimer.next()).await.unwrap();
    assert_eq!(first.row().key, RowKey::new(2), "others move to the next free row");
    first.done().await.unwrap();
    let worker = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.unwrap().done().await }
    });
    sleep(Duration::from_secs(10)).await;
    assert!(!worker.is_finished());
    drop(locked);
    sleep(Duration::from_secs(3)).await;
    assert!(worker.is_finished(), "found by going back to the start, within the longest pause");
    assert_eq!(count_in(&claims, "complete"), 2);
}

/// After a pass with skipped rows, the claimer scans again with growing pauses. It idles only after a clean pass.
#[tokio::test(start_paused = true)]
async fn a_claimer_idles_only_after_a_clean_pass_from_the_start() {
    let store = Probe::of(still_memory());
    store.skips.store(20, Ordering::SeqCst);
    let claimer = paused(&store).poll(POLL * 100).start().unwrap();
    let worker = tokio::spawn(async move { claimer.next().await });
    sleep(Duration::from_millis(500)).await;
    assert!(store.takes.load(Ordering::SeqCst) > 3, "it comes back soon after a skip");
    sleep(Duration::from_secs(60)).await;
    assert_eq!(store.skips.load(Ordering::SeqCst), 0, "it came back after each skip");
    assert_eq!(store.takes.load(Ordering::SeqCst), 21, "the 21st was clean, and there is no 22nd");
    assert_eq!(store.pendings.load(Ordering::SeqCst), 1, "asked only after a pass that knew of nothing");
    assert!(store.passes.lock().unwrap().iter().all(|(from_start, ..)| *from_start));
    worker.abort();
}

/// After work was found, the pauses are short again.
#[tokio::test(start_paused = true)]
async fn pauses_are_short_again_once_work_was_found() {
    let claims = still_memory();
    let store = Probe::of(claims.clone());
    store.skips.store(1_000_000, Ordering::SeqCst);
    let claimer = paused(&store).poll(POLL * 100).ahead(0).start().unwrap();
    let worker = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await.unwrap().done().await }
    });
    sleep(Duration::from_secs(20)).await;
    insert(&claims, [1]);
    within("the row", worker).await.unwrap().unwrap();
    let before = store.takes.load(Ordering::SeqCst);
    let worker = tokio::spawn(async move { claimer.next().await });
    sleep(Duration::from_millis(200)).await;
    let takes = store.takes.load(Ordering::SeqCst) - before;
    assert!(takes >= 3, "{takes} looks in the first 200 ms");
    worker.abort();
}

/// Rows that only `pending` finds also prevent the claimer from idling.
#[tokio::test(start_paused = true)]
async fn pending_rows_keep_the_claimer_awake() {
    let claims = still_memory();
    insert(&claims, [1]);
    let locked = claims.lock(&RowKey::new(1)).unwrap();
    let store = Probe::of(claims);
    let claimer = paused(&store).poll(POLL * 100).start().unwrap();
    let worker = tokio::spawn(async move { claimer.next().await });
    sleep(Duration::from_secs(30)).await;
    let takes = store.takes.load(Ordering::SeqCst);
    assert!((20..=120).contains(&takes), "it keeps looking, about once per longest pause: {takes}");
    drop(locked);
    sleep(Duration::from_secs(3)).await;
    assert!(worker.is_finished());
}

/// A handler that puts all rows back does not cause a busy loop, with or without announcements.
#[tokio::test(start_paused = true)]
async fn putting_back_again_and_again_is_slowed_down() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).start().unwrap();
    let worker = tokio::spawn(async move {
        while let Some(claim) = claimer.next().await {
            claim.put_back().await.unwrap();
        }
    });
    sleep(Duration::from_secs(5)).await;
    let before = store.settled.load(Ordering::SeqCst);
    sleep(Duration::from_secs(20)).await;
    let rounds = store.settled.load(Ordering::SeqCst) - before;
    assert!((5..=120).contains(&rounds), "{rounds} rounds in 20 seconds");
    worker.abort();
}

/// A scan follows a local settlement that makes another row ready, without an announcement.
#[tokio::test(start_paused = true)]
async fn what_a_local_end_makes_ready_is_found_at_once() {
    let spec = builder()
        .group("entity")
        .kind("kind")
        .waits("update", "create", Unmet::Block, Unmet::Run)
        .build()
        .unwrap();
    let claims = MemoryClaims::with_clock(spec, MemoryClock::stopped()).unwrap();
    claims.insert(MemoryRow::new(1).with_group("a").with_kind("create")).unwrap();
    claims.insert(MemoryRow::new(2).with_group("a").with_kind("update")).unwrap();
    let store = Probe::of(claims.clone());
    store.dumb.store(true, Ordering::SeqCst);
    let claimer = paused(&store).poll(POLL * 100).start().unwrap();
    let create = within("the create", claimer.next()).await.unwrap();
    assert_eq!(create.row().key, RowKey::new(1));
    let update = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await }
    });
    sleep(Duration::from_millis(500)).await;
    assert!(!update.is_finished(), "it waits for the create");
    create.done().await.unwrap();
    let update = tokio::time::timeout(Duration::from_secs(2), update).await.expect("without a poll");
    assert_eq!(update.unwrap().unwrap().row().key, RowKey::new(2));
}

/// A row with a retry pause is found at the end of the pause, without poll or announcement.
#[tokio::test(start_paused = true)]
async fn a_retry_is_found_when_its_pause_is_over() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    store.dumb.store(true, Ordering::SeqCst);
    let claimer = paused(&store).poll(POLL).start().unwrap();
    let claim = within("the row", claimer.next()).await.unwrap();
    claim.retry("not yet", Duration::from_secs(5)).await.unwrap();
    let again = tokio::spawn({
        let claimer = claimer.clone();
        async move { claimer.next().await }
    });
    sleep(Duration::from_millis(4_900)).await;
    assert!(!again.is_finished());
    claims.clock().advance(Duration::from_secs(5));
    sleep(Duration::from_secs(2)).await;
    assert!(again.is_finished(), "long before the next poll");
}

/// A slow row does not delay the rest, here or at other workers: claims prefetched for too long are put back.
#[tokio::test(start_paused = true)]
async fn a_slow_row_does_not_block_the_rest() {
    let claims = still_memory();
    insert(&claims, 1..=200);
    let slow = Probe::of(claims.clone());
    let claimer = paused(&slow).ahead(100).lease(Duration::from_secs(30)).start().unwrap();
    // Quick rows first, so the claimer prefetches many claims. Then the worker gets a slow row.
    for _ in 0..60 {
        within("a quick one", claimer.next()).await.unwrap().done().await.unwrap();
    }
    let stuck = within("a slow one", claimer.next()).await.unwrap();
    sleep(Duration::from_secs(7)).await;
    assert_eq!(count_in(&claims, "in-progress"), 1, "what lay ready has gone back");

    let peer = paused(&Probe::of(claims.clone())).start().unwrap();
    for _ in 61..200 {
        within("the rest", peer.next()).await.unwrap().done().await.unwrap();
    }
    assert_eq!(count_in(&claims, "complete"), 199);
    stuck.done().await.unwrap();
    let attempts = claims.rows().iter().filter_map(MemoryRow::attempts_left).count();
    assert_eq!(attempts, 0, "this table counts no attempts for its rows");
}

/// The number of prefetched claims follows the speed of the workers, up to the bound.
#[tokio::test(start_paused = true)]
async fn batches_grow_while_workers_keep_up() {
    let claims = still_memory();
    insert(&claims, 1..=2000);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).batch(100).ahead(100).start().unwrap();
    for _ in 0..2000 {
        within("a claim", claimer.next()).await.unwrap().done().await.unwrap();
    }
    let most = store.passes.lock().unwrap().iter().map(|(_, limit, _)| *limit).max().unwrap();
    let takes = store.takes.load(Ordering::SeqCst);
    assert!((50..=100).contains(&most), "the largest batch was {most}");
    assert!(takes < 120, "{takes} statements for 2000 rows");
}

/// For a slow worker, rows are claimed one at a time.
#[tokio::test(start_paused = true)]
async fn nothing_is_hoarded_for_a_slow_worker() {
    let claims = still_memory();
    insert(&claims, 1..=50);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).ahead(100).lease(Duration::from_secs(30)).start().unwrap();
    for _ in 0..10 {
        let claim = within("a claim", claimer.next()).await.unwrap();
        sleep(Duration::from_secs(10)).await;
        assert_eq!(count_in(&claims, "in-progress"), 1);
        claim.done().await.unwrap();
    }
}

/// Constant inserts after the cursor do not delay the rows before it indefinitely.
#[tokio::test(start_paused = true)]
async fn the_cursor_goes_back_also_while_the_table_is_being_filled() {
    let claims = still_memory();
    insert(&claims, 2..=3);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).batch(1).ahead(0).start().unwrap();
    let mut next = 4;
    let first = within("the first", claimer.next()).await.unwrap();
    assert_eq!(first.row().key, RowKey::new(2));
    first.done().await.unwrap();
    // The row is committed late, before the cursor.
    insert(&claims, [1]);
    let mut at = 0;
    while state(&claims, 1) == "new" {
        insert(&claims, [next]);
        next += 1;
        at += 1;
        let claim = within("a claim", claimer.next()).await.unwrap();
        sleep(Duration::from_millis(50)).await;
        claim.settle(Outcome::Done).await.unwrap();
        assert!(at < 60, "the row before the cursor starves");
    }
}

/// Errors of the store are reported and do not end the claimer.
#[tokio::test(start_paused = true)]
async fn it_outlives_a_store_that_fails() {
    let claims = memory();
    let store = Probe::of(claims.clone());
    store.down.store(true, Ordering::SeqCst);
    let errors = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = Arc::clone(&errors);
    let claimer = Claimer::builder(store.clone())
        .on_error(move |error| seen.lock().unwrap().push(error.to_string()))
        .start()
        .unwrap();
    let worker = tokio::spawn(async move { claimer.next().await.unwrap().done().await });
    sleep(Duration::from_secs(20)).await;
    assert!(errors.lock().unwrap().iter().any(|error| error.contains("it is down")));
    let takes = store.takes.load(Ordering::SeqCst);
    assert!((3..60).contains(&takes), "with growing pauses: {takes}");
    insert(&claims, [1]);
    store.down.store(false, Ordering::SeqCst);
    until("the row is done", || state(&claims, 1) == "complete").await;
    worker.await.unwrap().unwrap();
}
