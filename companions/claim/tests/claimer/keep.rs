//! Renewals of claims and detection of their loss, in memory and with paused time.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Probe, builder, count_in, insert, paused, state, still_memory, until, within};
use leasehold_claim::api::LossReason;
use leasehold_claim::{Claim, ClaimError, Claimer, MemoryClaims, MemoryClock, MemoryRow, RowKey};
use leasehold_engine::{Clock, Moment, TokioClock};
use tokio::time::{Instant, sleep};

const LEASE: Duration = Duration::from_secs(30);

async fn take(claimer: &Claimer, count: usize) -> Vec<Claim> {
    let takers: Vec<_> = (0..count)
        .map(|_| {
            let claimer = claimer.clone();
            tokio::spawn(async move { claimer.next().await.unwrap() })
        })
        .collect();
    let mut claims = Vec::new();
    for taker in takers {
        claims.push(within("a claim", taker).await.unwrap());
    }
    claims
}

/// One statement renews all claims, whatever their number.
#[tokio::test(start_paused = true)]
async fn one_statement_renews_all_claims_of_the_process() {
    let claims = still_memory();
    insert(&claims, 1..=100);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(LEASE).ahead(0).start().unwrap();
    let held = take(&claimer, 100).await;
    sleep(LEASE * 10).await;
    let (calls, renewed) = (store.renews.load(Ordering::SeqCst), store.renewed.load(Ordering::SeqCst));
    assert!((29..=36).contains(&calls), "three a lease, with jitter: {calls} calls in ten leases");
    assert_eq!(renewed, calls * 100, "each renews all");
    assert!(held.iter().all(Claim::is_valid));
}

/// Claims taken at different times are soon renewed in one statement.
#[tokio::test(start_paused = true)]
async fn claims_of_different_age_share_statements() {
    let claims = still_memory();
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(LEASE).ahead(0).start().unwrap();
    let mut held = Vec::new();
    for id in 1..=60 {
        insert(&claims, [id]);
        held.extend(take(&claimer, 1).await);
        sleep(Duration::from_millis(500)).await;
    }
    let before = store.renews.load(Ordering::SeqCst);
    sleep(LEASE * 10).await;
    let calls = store.renews.load(Ordering::SeqCst) - before;
    assert!(calls <= 75, "at most two a renewal: {calls} calls in ten leases");
    assert!(held.iter().all(Claim::is_valid));
}

/// `Busy` is not a loss. The renewal is retried soon.
#[tokio::test(start_paused = true)]
async fn a_busy_row_is_asked_for_again_soon() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(LEASE).start().unwrap();
    let held = take(&claimer, 1).await;
    store.busy.store(true, Ordering::SeqCst);
    sleep(Duration::from_secs(15)).await;
    let calls = store.renews.load(Ordering::SeqCst);
    assert!(calls >= 3, "asked again soon: {calls} calls");
    assert!(held[0].is_valid());
    store.busy.store(false, Ordering::SeqCst);
    sleep(LEASE * 3).await;
    assert!(held[0].is_valid());
    // If the row stays busy, the claim ends with its lease.
    store.busy.store(true, Ordering::SeqCst);
    let before = Instant::now();
    assert_eq!(
        within("the loss", async { tokio::time::timeout(LEASE, held[0].lost()).await }).await.unwrap(),
        LossReason::Expired
    );
    assert!(before.elapsed() <= LEASE);
}

/// A claim whose row another worker took is lost at the next renewal, and its settlement returns `Superseded`.
#[tokio::test(start_paused = true)]
async fn lost_fires_when_somebody_else_has_taken_the_row() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(LEASE).start().unwrap();
    let claim = take(&claimer, 1).await.remove(0);
    let (lost, second) = (claim.lost(), claim.lost().clone());
    claims.expire(&RowKey::new(1)).unwrap();
    let peer = paused(&Probe::of(claims.clone())).start().unwrap();
    let theirs = take(&peer, 1).await.remove(0);
    assert_eq!(tokio::time::timeout(LEASE / 3, lost).await.expect("by the next renewal"), LossReason::Gone);
    assert_eq!(second.reason(), Some(LossReason::Gone));
    assert!(!claim.is_valid() && claim.remaining().is_zero());
    let error = claim.done().await.unwrap_err();
    assert!(
        matches!(&error, ClaimError::Superseded { epoch: 1, current_epoch: Some(now), .. } if Some(*now) == theirs.epoch()),
        "{error}"
    );
    assert_eq!(state(&claims, 1), "in-progress", "nothing was written");
    theirs.done().await.unwrap();
}

/// If the store is silent, the claim is lost at its deadline, a tenth of the lease before the store's end.
#[tokio::test(start_paused = true)]
async fn lost_fires_at_the_deadline_when_the_store_is_silent() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(LEASE).start().unwrap();
    let asked = Instant::now();
    let claim = take(&claimer, 1).await.remove(0);
    store.silence(true);
    let reason = tokio::time::timeout(LEASE * 2, claim.lost()).await.expect("it is lost");
    assert_eq!(reason, LossReason::Expired);
    let after = asked.elapsed();
    assert!((Duration::from_secs(26)..=Duration::from_millis(27_100)).contains(&after), "{after:?}");
    assert!(!claim.is_valid());
    assert!(store.renews.load(Ordering::SeqCst) >= 2, "it was tried more than once");

    // The settlement succeeds, because no other worker has taken the row yet.
    store.silence(false);
    claim.done().await.unwrap();
    assert_eq!(state(&claims, 1), "complete");
}

/// The deadline counts from the request of the claim, not from the answer.
#[tokio::test(start_paused = true)]
async fn the_deadline_counts_from_the_question() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    store.hold_takes(true);
    let claimer = paused(&store).lease(LEASE).start().unwrap();
    let taker = tokio::spawn(async move { (claimer.next().await.unwrap(), claimer) });
    until("it is taken", || count_in(&claims, "in-progress") == 1).await;
    sleep(Duration::from_secs(9)).await;
    store.hold_takes(false);
    let (claim, _claimer) = within("the answer", taker).await.unwrap();
    assert!(claim.remaining() <= Duration::from_secs(18), "{:?}", claim.remaining());

    // The same for renewals: a late answer counts from the request.
    sleep(Duration::from_secs(3)).await;
    until("a renewal was answered", || claim.remaining() > Duration::from_secs(20)).await;
    store.hold_renewals(true);
    let before = store.renews.load(Ordering::SeqCst);
    until("it is asked again", || store.renews.load(Ordering::SeqCst) > before).await;
    sleep(Duration::from_secs(5)).await;
    store.hold_renewals(false);
    sleep(Duration::from_millis(5)).await;
    assert!(claim.remaining() <= Duration::from_secs(22), "{:?}", claim.remaining());
}

/// A claim that arrives after the end of its lease is not given to a worker.
#[tokio::test(start_paused = true)]
async fn a_claim_that_came_too_late_is_put_back() {
    let claims = still_memory();
    claims.insert(MemoryRow::new(1).with_attempts(3)).unwrap();
    let store = Probe::of(claims.clone());
    store.hold_takes(true);
    let claimer = paused(&store).lease(LEASE).start().unwrap();
    let taker = tokio::spawn(async move { (claimer.next().await.unwrap(), claimer) });
    until("it is taken", || count_in(&claims, "in-progress") == 1).await;
    sleep(Duration::from_secs(28)).await;
    store.hold_takes(false);
    let (claim, _claimer) = within("the answer", taker).await.unwrap();
    assert_eq!(claim.epoch(), Some(2), "the first was put back");
    assert_eq!(claim.row().attempts_left, Some(2), "and cost no attempt");
    assert!(claim.remaining() > Duration::from_secs(20));
}

/// A renewal that hangs does not delay an end.
#[tokio::test(start_paused = true)]
async fn a_renewal_in_flight_does_not_delay_an_end() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(LEASE).start().unwrap();
    let claim = take(&claimer, 1).await.remove(0);
    let lost = claim.lost();
    store.hold_renewals(true);
    until("a renewal is under way", || store.renews.load(Ordering::SeqCst) > 0).await;
    let before = Instant::now();
    claim.done().await.unwrap();
    assert!(before.elapsed() < Duration::from_millis(10));
    // The late answer that the row is gone is not a loss.
    store.hold_renewals(false);
    sleep(LEASE).await;
    assert!(lost.reason().is_none());
}

/// A pending settlement is not a loss either, whatever a concurrent renewal returns.
#[tokio::test(start_paused = true)]
async fn a_claim_that_is_being_settled_is_not_lost() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(LEASE).start().unwrap();
    let claim = take(&claimer, 1).await.remove(0);
    let lost = claim.lost();
    store.lose_answer.store(true, Ordering::SeqCst);
    claim.done().await.unwrap();
    assert!(lost.reason().is_none());
    assert_eq!(state(&claims, 1), "complete");
}

/// If the row of a pending settlement has another owner, the keeper does not renew it in a busy loop.
#[tokio::test(start_paused = true)]
async fn an_end_under_way_and_a_row_that_is_gone_cost_no_more_renewals() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(LEASE).start().unwrap();
    let claim = take(&claimer, 1).await.remove(0);
    store.hold_settles(true);
    let ending = tokio::spawn(claim.done());
    sleep(Duration::from_millis(10)).await;
    claims.expire(&RowKey::new(1)).unwrap();
    sleep(LEASE / 2).await;
    let calls = store.renews.load(Ordering::SeqCst);
    assert!((1..=20).contains(&calls), "{calls} renewals");
    store.hold_settles(false);
    assert!(matches!(within("the end", ending).await.unwrap(), Err(ClaimError::Superseded { .. })));
}

/// Failed renewals are retried until the deadline, and stop after one succeeds.
#[tokio::test(start_paused = true)]
async fn failing_renewals_are_tried_again() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(LEASE).start().unwrap();
    let claim = take(&claimer, 1).await.remove(0);
    store.down.store(true, Ordering::SeqCst);
    sleep(Duration::from_secs(24)).await;
    assert!(claim.is_valid());
    let calls = store.renews.load(Ordering::SeqCst);
    assert!((3..=40).contains(&calls), "{calls} calls");
    store.down.store(false, Ordering::SeqCst);
    sleep(LEASE * 3).await;
    assert!(claim.is_valid());
}

/// Rows with their own timeout are renewed at their own interval.
#[tokio::test(start_paused = true)]
async fn rows_with_a_shorter_timeout_are_renewed_in_time() {
    let spec = builder().timeout_seconds("timeout").build().unwrap();
    let claims = MemoryClaims::with_clock(spec, MemoryClock::stopped()).unwrap();
    claims.insert(MemoryRow::new(1).with_timeout_seconds(3)).unwrap();
    let store = Probe::of(claims.clone());
    let claimer = paused(&store).lease(LEASE).start().unwrap();
    let claim = take(&claimer, 1).await.remove(0);
    for _ in 0..60 {
        sleep(Duration::from_millis(500)).await;
        assert!(claim.is_valid());
        assert!(claim.remaining() <= Duration::from_millis(2_700));
    }
    assert!(matches!(store.renews.load(Ordering::SeqCst), 29..=40));
}

/// A clock that a test can move forward, as after a suspension of the machine.
#[derive(Debug)]
struct Leaping {
    base: TokioClock,
    leapt: AtomicU64,
}

impl Clock for Leaping {
    fn now(&self) -> Moment {
        self.base.now().after(Duration::from_secs(self.leapt.load(Ordering::SeqCst)))
    }
}

/// After a suspension of the machine, a claim reads lost at the first check, before any task has run.
#[tokio::test(start_paused = true)]
async fn a_suspended_machine_knows_at_the_first_look() {
    let claims = still_memory();
    insert(&claims, [1]);
    let clock = Arc::new(Leaping { base: TokioClock::new(), leapt: AtomicU64::new(0) });
    let claimer = Claimer::builder(Probe::of(claims)).lease(LEASE).clock(clock.clone()).start().unwrap();
    let claim = take(&claimer, 1).await.remove(0);
    assert!(claim.is_valid());
    clock.leapt.store(28, Ordering::SeqCst);
    assert!(!claim.is_valid() && claim.remaining().is_zero());
    let reason = tokio::time::timeout(Duration::from_millis(1_100), claim.lost()).await;
    assert_eq!(reason.expect("told soon"), LossReason::Expired);
}

/// The end of the runtime ends renewals, so the claims are reported as lost.
#[test]
fn the_end_of_the_runtime_is_a_loss() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let claims = still_memory();
    insert(&claims, [1]);
    let (claimer, claim) = runtime.block_on(async {
        let claimer = Claimer::builder(Probe::of(claims)).start().unwrap();
        let claim = claimer.next().await.unwrap();
        (claimer, claim)
    });
    let lost = claim.lost();
    drop(runtime);
    assert_eq!(lost.reason(), Some(LossReason::RuntimeGone));
    assert!(!claim.is_valid());
    let other = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    other.block_on(async {
        assert!(matches!(within("an answer", claim.done()).await, Err(ClaimError::Store(_))));
        assert!(within("the end", claimer.next()).await.is_none());
        let _ = within("closing", claimer.close()).await;
    });
}

/// A sweep returns the row of a dead process, and a worker gets it at once.
#[tokio::test(start_paused = true)]
async fn rows_of_a_dead_process_come_back_soon_after_their_lease() {
    let claims = still_memory();
    insert(&claims, [1]);
    let store = Probe::of(claims.clone());
    store.dumb.store(true, Ordering::SeqCst);
    // The claim of a dead process is never settled or renewed.
    let taken =
        leasehold_claim::ClaimStore::take(&claims, &leasehold_claim::Take::up_to(1).lease(LEASE)).await;
    assert_eq!(taken.unwrap().claims.len(), 1);
    let claimer = paused(&store).lease(LEASE).poll(LEASE * 100).start().unwrap();
    let waiting = tokio::spawn(async move { (claimer.next().await.unwrap(), claimer) });
    sleep(LEASE - Duration::from_secs(1)).await;
    assert!(!waiting.is_finished());
    claims.clock().advance(LEASE);
    let (claim, _claimer) =
        tokio::time::timeout(Duration::from_secs(2), waiting).await.expect("a second after its end").unwrap();
    assert!(claim.epoch() > Some(1));
}
