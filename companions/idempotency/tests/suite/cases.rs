//! Cases for every store of keys. Each case is a function of a world, and the macro mounts all of them.
#![allow(unreachable_pub)]

use std::time::Duration;

use futures_util::future::join_all;
use leasehold_idempotency::{
    Begin, Fingerprint, IdempotencyError, IdempotencyStore, Ident, RequestOutcome, Stored, fingerprint,
};

/// A store, and effects in its transactions.
pub trait World: Send + Sync {
    type Store: IdempotencyStore;

    fn store(&self) -> Self::Store;
    /// Returns a store with the same keys, in which a second caller waits up to `wait` for the first.
    fn joining(&self, wait: Duration) -> Self::Store;
    /// Returns a store that keeps responses of at most `bytes` bytes.
    fn bounded(&self, bytes: usize) -> Self::Store;
    /// Adds an effect to the request's transaction.
    async fn effect(&self, fresh: &mut <Self::Store as IdempotencyStore>::KeyTransaction);
    /// Returns the number of committed effects.
    async fn effects(&self) -> u64;
    /// Makes all records expire.
    async fn expire(&self);
    /// Runs a whole request with one effect and the given end.
    async fn run(
        &self,
        ident: &Ident,
        fingerprint: &Fingerprint,
        end: Result<Stored, IdempotencyError>,
    ) -> Result<RequestOutcome, IdempotencyError>;
}

pub fn ident(key: &str) -> Ident {
    Ident::new("account:42", key).unwrap()
}

pub fn request(text: &str) -> Fingerprint {
    fingerprint([text.as_bytes()])
}

pub fn fresh<T: std::fmt::Debug>(begin: Result<Begin<T>, IdempotencyError>) -> T {
    match begin.unwrap() {
        Begin::Fresh(fresh) => fresh,
        Begin::Replay(stored) => panic!("it was done before: {stored:?}"),
        other => panic!("not fresh: {other:?}"),
    }
}

pub fn replay<T>(begin: Result<Begin<T>, IdempotencyError>) -> Stored {
    match begin.unwrap() {
        Begin::Replay(stored) => stored,
        Begin::Fresh(_) => panic!("fresh"),
        Begin::InFlight { .. } => panic!("in flight"),
        Begin::Mismatch => panic!("mismatch"),
    }
}

fn got<T>(begin: Result<Begin<T>, IdempotencyError>) -> T {
    match begin {
        Ok(Begin::Fresh(fresh)) => fresh,
        Ok(_) => panic!("not fresh"),
        Err(error) => panic!("{error}"),
    }
}

type TransactionOf<W> = <<W as World>::Store as IdempotencyStore>::KeyTransaction;

async fn finish<W: World>(fresh: TransactionOf<W>, stored: Stored) -> Result<Stored, IdempotencyError> {
    W::Store::finish(fresh, stored).await
}

/// Runs the request `x` with one effect and the response `x`.
async fn done(world: &impl World, key: &str) {
    let stored = Stored::done(200, "x");
    let outcome = world.run(&ident(key), &request("x"), Ok(stored.clone())).await.unwrap();
    assert_eq!(outcome, RequestOutcome::Done(stored));
}

pub async fn what_was_done_is_replayed_whole<W: World>(world: W) {
    let store = world.store();
    let stored = Stored::done(201, vec![0, 159, 146, 150, 255])
        .header("content-type", "application/octet-stream")
        .header("link", "<a>; rel=\"x\"")
        .header("link", "\\<b>");
    let mut fresh = got(store.begin(&ident("a"), &request("x")).await);
    world.effect(&mut fresh).await;
    assert_eq!(finish::<W>(fresh, stored.clone()).await.unwrap(), stored);
    for _ in 0..2 {
        assert_eq!(replay(store.begin(&ident("a"), &request("x")).await), stored);
    }
    assert_eq!(world.effects().await, 1);
    // An empty response is recorded as a response.
    let fresh = got(store.begin(&ident("b"), &request("x")).await);
    finish::<W>(fresh, Stored::done(204, "")).await.unwrap();
    assert_eq!(replay(store.begin(&ident("b"), &request("x")).await), Stored::done(204, ""));
}

pub async fn another_request_under_the_key_is_a_mismatch<W: World>(world: W) {
    let store = world.store();
    done(&world, "a").await;
    assert!(matches!(store.begin(&ident("a"), &request("y")).await, Ok(Begin::Mismatch)));
    assert_eq!(replay(store.begin(&ident("a"), &request("x")).await).body(), "x");
    assert_eq!(world.effects().await, 1);
}

pub async fn scopes_do_not_meet<W: World>(world: W) {
    let store = world.store();
    let other = Ident::new("account:43", "a").unwrap();
    let first = got(store.begin(&ident("a"), &request("x")).await);
    let second = got(store.begin(&other, &request("y")).await);
    finish::<W>(second, Stored::done(200, "y")).await.unwrap();
    finish::<W>(first, Stored::done(200, "x")).await.unwrap();
    assert_eq!(replay(store.begin(&ident("a"), &request("x")).await).body(), "x");
    assert_eq!(replay(store.begin(&other, &request("y")).await).body(), "y");
}

pub async fn a_second_request_is_told_that_the_first_is_in_flight<W: World>(world: W) {
    let store = world.store();
    let first = got(store.begin(&ident("a"), &request("x")).await);
    for asked in ["x", "y"] {
        // The fingerprint of a request in flight is not compared.
        let second = store.begin(&ident("a"), &request(asked)).await;
        assert!(
            matches!(second, Ok(Begin::InFlight { retry_after }) if retry_after == Duration::from_secs(1))
        );
    }
    finish::<W>(first, Stored::done(200, "x")).await.unwrap();
    assert_eq!(replay(store.begin(&ident("a"), &request("x")).await).body(), "x");
}

pub async fn a_second_request_can_join_the_first_and_get_its_result<W: World>(world: W) {
    let (store, joining) = (world.store(), world.joining(Duration::from_secs(3600)));
    let mut first = got(store.begin(&ident("a"), &request("x")).await);
    world.effect(&mut first).await;
    let (key, [same, other]) = (ident("a"), [request("x"), request("y")]);
    let waiters = join_all((0..20).map(|_| joining.begin(&key, &same)));
    let (told, mismatch, _) = tokio::join!(waiters, joining.begin(&key, &other), async {
        finish::<W>(first, Stored::done(200, "x")).await.unwrap()
    });
    assert_eq!(told.into_iter().map(replay).collect::<Vec<_>>(), vec![Stored::done(200, "x"); 20]);
    assert!(matches!(mismatch, Ok(Begin::Mismatch)));
    assert_eq!(world.effects().await, 1);
}

pub async fn if_the_first_request_fails_one_that_joined_goes_on<W: World>(world: W) {
    let (store, joining) = (world.store(), world.joining(Duration::from_secs(3600)));
    let first = got(store.begin(&ident("a"), &request("x")).await);
    let (key, asked) = (ident("a"), request("x"));
    let waiters = (0..10).map(|_| async {
        match joining.begin(&key, &asked).await.unwrap() {
            Begin::Fresh(mut fresh) => {
                world.effect(&mut fresh).await;
                finish::<W>(fresh, Stored::done(200, "second")).await.unwrap();
                true
            }
            Begin::Replay(stored) => {
                assert_eq!(stored.body(), "second");
                false
            }
            _ => panic!("neither fresh nor a replay"),
        }
    });
    let (told, _) = tokio::join!(join_all(waiters), W::Store::rollback(first));
    assert_eq!(told.into_iter().filter(|fresh| *fresh).count(), 1);
    assert_eq!(world.effects().await, 1);
}

pub async fn done_replayed_rejected_in_flight_and_mismatch_are_distinct<W: World>(world: W) {
    let (done, rejected) = (Stored::done(200, "spent"), Stored::rejected(402, "no funds"));
    let run = async |key, asked, end: &Stored| {
        world.run(&ident(key), &request(asked), Ok(end.clone())).await.unwrap()
    };
    assert_eq!(run("a", "x", &done).await, RequestOutcome::Done(done.clone()));
    assert_eq!(run("a", "x", &rejected).await, RequestOutcome::Replayed(done.clone()));
    assert_eq!(run("a", "y", &done).await, RequestOutcome::Mismatch);
    assert_eq!(run("b", "x", &rejected).await, RequestOutcome::Rejected(rejected.clone()));
    assert_eq!(run("b", "x", &done).await, RequestOutcome::Replayed(rejected.clone()));
    let store = world.store();
    let first = got(store.begin(&ident("c"), &request("x")).await);
    assert!(matches!(run("c", "x", &done).await, RequestOutcome::InFlight { .. }));
    W::Store::rollback(first).await.unwrap();
    assert_eq!(world.effects().await, 1, "those of a rejected request are rolled back");
}

pub async fn a_rejected_request_has_no_effects_and_is_remembered<W: World>(world: W) {
    let store = world.store();
    let mut fresh = got(store.begin(&ident("a"), &request("x")).await);
    world.effect(&mut fresh).await;
    world.effect(&mut fresh).await;
    finish::<W>(fresh, Stored::rejected(402, "no funds").header("content-type", "text/plain")).await.unwrap();
    assert_eq!(world.effects().await, 0);
    let told = replay(store.begin(&ident("a"), &request("x")).await);
    assert!(told.is_rejected() && told.status() == 402 && told.headers().len() == 1);
    // A request that has written nothing can be rejected too.
    let fresh = got(store.begin(&ident("b"), &request("x")).await);
    finish::<W>(fresh, Stored::rejected(404, "")).await.unwrap();
    assert!(replay(store.begin(&ident("b"), &request("x")).await).is_rejected());
}

pub async fn what_is_rolled_back_or_dropped_can_be_begun_again<W: World>(world: W) {
    let store = world.store();
    let begin = async || got(store.begin(&ident("a"), &request("x")).await);
    let mut fresh = begin().await;
    world.effect(&mut fresh).await;
    W::Store::rollback(fresh).await.unwrap();
    // Another fingerprint works too, because the rollback left no record.
    let mut other = got(store.begin(&ident("a"), &request("y")).await);
    world.effect(&mut other).await;
    W::Store::rollback(other).await.unwrap();
    let failed =
        world.run(&ident("a"), &request("x"), Err(IdempotencyError::InvalidIdent("mine".into()))).await;
    assert!(matches!(failed, Err(IdempotencyError::InvalidIdent(mine)) if mine == "mine"));
    assert_eq!(world.effects().await, 0);
    let mut fresh = begin().await;
    world.effect(&mut fresh).await;
    drop(fresh);
    // A drop rolls back in the background.
    let fresh = loop {
        match store.begin(&ident("a"), &request("x")).await.unwrap() {
            Begin::Fresh(fresh) => break fresh,
            Begin::InFlight { .. } => tokio::task::yield_now().await,
            _ => panic!("it was not finished"),
        }
    };
    finish::<W>(fresh, Stored::done(200, "")).await.unwrap();
    assert_eq!(world.effects().await, 0);
}

pub async fn two_replays_at_once_are_both_replays<W: World>(world: W) {
    let store = world.store();
    done(&world, "a").await;
    let (key, asked) = (ident("a"), request("x"));
    for _ in 0..20 {
        for told in join_all((0..4).map(|_| store.begin(&key, &asked))).await {
            assert_eq!(replay(told).body(), "x");
        }
    }
}

pub async fn a_response_is_bounded_exactly<W: World>(world: W) {
    let (store, bounded) = (world.store(), world.bounded(10));
    let at = Stored::done(200, "12345").header("ab", "cde");
    let mut fresh = got(bounded.begin(&ident("a"), &request("x")).await);
    world.effect(&mut fresh).await;
    let over = finish::<W>(fresh, at.clone().header("x", "")).await;
    assert!(matches!(over, Err(IdempotencyError::TooLarge { size: 11, limit: 10 })), "{over:?}");
    assert_eq!(world.effects().await, 0, "its effects are rolled back");
    let mut fresh = got(bounded.begin(&ident("a"), &request("x")).await);
    world.effect(&mut fresh).await;
    finish::<W>(fresh, at.clone()).await.unwrap();
    assert_eq!(replay(store.begin(&ident("a"), &request("x")).await), at);
    assert_eq!(world.effects().await, 1);
}

pub async fn what_has_expired_is_begun_anew<W: World>(world: W) {
    let store = world.store();
    let old = Stored::rejected(402, "old").header("a", "b");
    assert_eq!(
        world.run(&ident("a"), &request("x"), Ok(old.clone())).await.unwrap(),
        RequestOutcome::Rejected(old)
    );
    world.expire().await;
    let mut fresh = got(store.begin(&ident("a"), &request("y")).await);
    assert!(matches!(store.begin(&ident("a"), &request("y")).await, Ok(Begin::InFlight { .. })));
    world.effect(&mut fresh).await;
    finish::<W>(fresh, Stored::done(200, "new")).await.unwrap();
    assert_eq!(replay(store.begin(&ident("a"), &request("y")).await), Stored::done(200, "new"));
    assert_eq!(world.effects().await, 1);
}

pub async fn a_purge_removes_what_has_expired_and_no_more<W: World>(world: W) {
    let store = world.store();
    for n in 0..7 {
        done(&world, &n.to_string()).await;
    }
    assert_eq!(store.purge(100).await.unwrap(), 0);
    world.expire().await;
    done(&world, "young").await;
    assert_eq!(store.purge(0).await.unwrap(), 0);
    assert_eq!(store.purge(3).await.unwrap(), 3);
    assert_eq!(store.purge(100).await.unwrap(), 4);
    assert_eq!(store.purge(100).await.unwrap(), 0);
    assert_eq!(replay(store.begin(&ident("young"), &request("x")).await).body(), "x");
}

pub async fn two_hundred_equal_requests_at_once_are_one_effect<W: World>(world: W) {
    let store = world.store();
    let (key, asked) = (ident("a"), request("x"));
    let callers = (0..200).map(|_| async {
        match store.begin(&key, &asked).await.unwrap() {
            Begin::Fresh(mut fresh) => {
                world.effect(&mut fresh).await;
                finish::<W>(fresh, Stored::done(200, "x")).await.unwrap();
                "fresh"
            }
            Begin::Replay(_) => "replay",
            Begin::InFlight { .. } => "in flight",
            Begin::Mismatch => "mismatch",
        }
    });
    let told = join_all(callers).await;
    assert_eq!(told.iter().filter(|told| **told == "fresh").count(), 1, "{told:?}");
    assert!(!told.contains(&"mismatch"));
    assert_eq!(world.effects().await, 1);
}

pub async fn a_repeated_form_with_another_key_is_another_request<W: World>(world: W) {
    for key in ["first", "second"] {
        let outcome =
            world.run(&ident(key), &request("x"), Ok(Stored::done(200, key.to_owned()))).await.unwrap();
        assert!(matches!(outcome, RequestOutcome::Done(_)), "{outcome:?}");
    }
    assert_eq!(world.effects().await, 2, "keys tell requests apart; a form carries its key along");
}

/// Mounts all cases on worlds created by `$world`.
macro_rules! suite {
    ($world:expr) => {
        $crate::suite::suite!(@ $world,
            what_was_done_is_replayed_whole,
            another_request_under_the_key_is_a_mismatch,
            scopes_do_not_meet,
            a_second_request_is_told_that_the_first_is_in_flight,
            a_second_request_can_join_the_first_and_get_its_result,
            if_the_first_request_fails_one_that_joined_goes_on,
            done_replayed_rejected_in_flight_and_mismatch_are_distinct,
            a_rejected_request_has_no_effects_and_is_remembered,
            what_is_rolled_back_or_dropped_can_be_begun_again,
            two_replays_at_once_are_both_replays,
            a_response_is_bounded_exactly,
            what_has_expired_is_begun_anew,
            a_purge_removes_what_has_expired_and_no_more,
            two_hundred_equal_requests_at_once_are_one_effect,
            a_repeated_form_with_another_key_is_another_request,
        );
    };
    (@ $world:expr, $($case:ident,)+) => {
        $(#[tokio::test]
        async fn $case() {
            $crate::suite::$case($world).await;
        })+
    };
}
pub(crate) use suite;
