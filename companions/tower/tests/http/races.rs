//! The races of a form, over HTTP, with every way to lock and with none.

use crate::common::until;
use crate::ledger::*;
use leasehold_tower::OnGone;
use tokio::task::JoinSet;

async fn spend_at_once(instances: [&Instance; 2], paths: &[&str]) -> Vec<u16> {
    let mut streams = Vec::new();
    for (n, path) in paths.iter().enumerate() {
        streams.push(instances[n % 2].send(path).await);
    }
    let answers: JoinSet<_> = streams.into_iter().map(read_status).collect();
    let mut statuses = answers.join_all().await;
    statuses.sort_unstable();
    statuses
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_lock_a_double_click_spends_twice() {
    let ledger = Ledger::new(How::Not, 10, Pace::closed()).await;
    let (a, b) = (ledger.instance().await, ledger.instance().await);
    let opening = async {
        ledger.pace.have_read(2).await;
        ledger.pace.open();
    };
    let (statuses, ()) = tokio::join!(spend_at_once([&a, &b], &["/spend/42"; 2]), opening);
    assert_eq!(statuses, [200, 200]);
    assert_eq!(ledger.balance().await, -10, "the race is there to be won");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_double_click_spends_once() {
    for how in LOCKED {
        let ledger = Ledger::new(how, 10, Pace::opened()).await;
        let (a, b) = (ledger.instance().await, ledger.instance().await);
        assert_eq!(spend_at_once([&a, &b], &["/spend/42"; 2]).await, [200, 402], "{how:?}");
        assert_eq!((ledger.balance().await, ledger.spends().await), (0, 1), "{how:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replayed_form_never_overdraws() {
    for how in LOCKED {
        let ledger = Ledger::new(how, 20, Pace::opened()).await;
        let (a, b) = (ledger.instance().await, ledger.instance().await);
        let mut statuses = Vec::new();
        for n in 0..5 {
            statuses.push([&a, &b][n % 2].status("/spend/42").await);
        }
        assert_eq!(statuses, [200, 200, 402, 402, 402], "{how:?}: the next request finds the key free");
        assert_eq!(ledger.balance().await, 0, "{how:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn other_spellings_of_a_key_do_not_bypass_the_lock() {
    for how in LOCKED {
        let ledger = Ledger::new(how, 10, Pace::opened()).await;
        let (a, b) = (ledger.instance().await, ledger.instance().await);
        let paths = ["/spend/42", "/spend/042", "/spend/+42", "/spend/%342", "/spend/0042", "/spend/%2B42"];
        assert_eq!(spend_at_once([&a, &b], &paths).await, [200, 402, 402, 402, 402, 402], "{how:?}");
        assert_eq!((ledger.balance().await, ledger.spends().await), (0, 1), "{how:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_of_a_hundred_spends_on_two_instances_succeed() {
    for how in LOCKED {
        let ledger = Ledger::new(how, 100, Pace::opened()).await;
        let (a, b) = (ledger.instance().await, ledger.instance().await);
        let statuses = spend_at_once([&a, &b], &["/spend/42"; 100]).await;
        let of = |wanted| statuses.iter().filter(|&&status| status == wanted).count();
        assert_eq!((of(200), of(402)), (10, 90), "{how:?}: {statuses:?}");
        assert_eq!((ledger.balance().await, ledger.spends().await), (0, 10), "{how:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_times_out_and_retries_spends_once() {
    for how in LOCKED {
        let ledger = Ledger::new(how, 10, Pace::closed()).await;
        let (a, b) = (ledger.instance().await, ledger.instance().await);
        let first = a.send("/spend/42").await;
        ledger.pace.have_read(1).await;
        drop(first);
        let retry = b.send("/spend/42").await;
        if b.has_layer() {
            until("the retry waits", || b.waiting() == 1).await;
        }
        ledger.pace.open();
        let status = read_status(retry).await;
        // With a layer the first request finishes although its client has left. Without one, its transaction is
        // rolled back.
        let expected: &[u16] = if a.has_layer() { &[402] } else { &[200, 402] };
        assert!(expected.contains(&status), "{how:?}: {status}");
        assert_eq!((ledger.balance().await, ledger.spends().await), (0, 1), "{how:?}");
    }
}

/// Makes commits wait at a gate until the test opens it.
const GATED: &str = "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711, 1); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON entry DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION gate()";
const COMMITTING: &str = "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database
    WHERE locktype = 'advisory' AND NOT granted AND classid = 4711 AND d.datname = current_database()";

/// The client leaves during the commit and retries.
async fn retried_during_the_commit(how: How, on_gone: OnGone) -> (u16, i64) {
    let ledger = Ledger::new(how, 10, Pace::opened()).await.on_gone(on_gone);
    let (a, b) = (ledger.instance().await, ledger.instance().await);
    let mut gate = ledger.database.connect().await;
    run(&mut gate, GATED).await;
    run(&mut gate, "SELECT pg_advisory_lock(4711, 1)").await;

    let first = a.send("/spend/42").await;
    until_number(&ledger.database, COMMITTING, 1).await;
    drop(first);
    let layer = a.layer.as_ref().unwrap();
    if on_gone == OnGone::Cancel {
        until("the lock is given up", || layer.stats().in_flight == 0).await;
    }
    let retry = b.send("/spend/42").await;
    match on_gone {
        // The retry has read the balance before the first commit.
        OnGone::Cancel => until_number(&ledger.database, COMMITTING, 2).await,
        _ => until("the retry waits", || b.waiting() == 1).await,
    }
    run(&mut gate, "SELECT pg_advisory_unlock(4711, 1)").await;
    let status = read_status(retry).await;
    layer.idle().await;
    if on_gone == OnGone::Cancel {
        // The server executes this commit although no client awaits it.
        until_number(&ledger.database, "SELECT count(*) FROM entry WHERE amount < 0", 2).await;
    }
    (status, ledger.balance().await)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_retry_during_the_commit_waits_for_it() {
    for how in [How::Session, How::Lease] {
        assert_eq!(retried_during_the_commit(how, OnGone::Finish).await, (402, 0), "{how:?}");
    }
}

/// Shows why `Finish` is the default. A lock released during a commit does not protect it.
#[tokio::test(flavor = "multi_thread")]
async fn cancelling_the_handler_lets_a_retry_overtake_its_commit() {
    for how in [How::Session, How::Lease] {
        assert_eq!(retried_during_the_commit(how, OnGone::Cancel).await, (200, -10), "{how:?}");
    }
}
