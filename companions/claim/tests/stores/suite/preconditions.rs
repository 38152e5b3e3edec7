//! Rows that wait for others, such as an update for the create of its entity.

use leasehold_claim::{Outcome, RowKey, Take, Unmet};

use super::bench::{Layout, bounded, ids, keys, retry, row};
use super::{Bench, Env};

async fn blocking(env: &Env) -> Bench {
    let layout = Layout::new(|spec| {
        let spec = spec.group("entity").kind("kind").attempts("attempts_left");
        spec.waits("update", "create", Unmet::Block, Unmet::Block)
    });
    env.table(layout).await
}

async fn running(env: &Env) -> Bench {
    let layout = Layout::new(|spec| {
        let spec = spec.group("entity").kind("kind").attempts("attempts_left");
        spec.waits("update", "create", Unmet::Run, Unmet::Run)
    });
    env.table(layout).await
}

async fn create(bench: &Bench, id: i64) -> RowKey {
    bench.insert(row(id).entity("a").kind("create")).await
}

async fn update(bench: &Bench, id: i64) -> RowKey {
    bench.insert(row(id).entity("a").kind("update")).await
}

async fn blocked(bench: &Bench) -> Vec<RowKey> {
    bounded(bench.client().blocked(100)).await.unwrap()
}

pub async fn an_update_waits_until_its_create_is_done(env: &Env) {
    for bench in [blocking(env).await, running(env).await] {
        let first = update(&bench, 1).await;
        let second = create(&bench, 2).await;
        let claimed = bench.take(5).await;
        assert_eq!(ids(&claimed), ["2"], "the update waits, though it comes first");
        assert_eq!(bench.take(5).await.len(), 0, "also while the create is taken");
        assert!(bench.is_pending().await, "what waits for others is left to do: nobody may idle");
        assert!(blocked(&bench).await.is_empty(), "nor blocked: it will come true");
        bench.settle(&claimed[0].claim, Outcome::PutBack).await.unwrap();
        let again = bench.take_one().await;
        assert_eq!(keys(&again), [second]);
        bench.settle(&again.claim, Outcome::Done).await.unwrap();
        assert!(bench.is_pending().await);
        assert_eq!(keys(&bench.take_one().await), [first]);
    }
}

pub async fn a_failed_create_blocks_its_update(env: &Env) {
    let Some(failed) = env.variant.failed() else { return no_failed_state(env).await };
    let bench = blocking(env).await;
    bench.insert(row(1).entity("a").kind("create").state(failed)).await;
    let waits = update(&bench, 2).await;
    let taken = bench.try_take(&Take::up_to(5)).await.unwrap();
    assert!(taken.claims.is_empty());
    assert_eq!(taken.skipped, 0, "it keeps no worker from idling");
    assert!(!bench.is_pending().await);
    assert_eq!(blocked(&bench).await, [waits]);
}

/// Without a state for failures, a failed row can only be put back or use up its attempts.
async fn no_failed_state(env: &Env) {
    let bench = blocking(env).await;
    create(&bench, 1).await;
    update(&bench, 2).await;
    let claimed = bench.take_one().await;
    assert!(bench.settle(&claimed.claim, Outcome::Failed("no".to_owned())).await.is_err());
    bench.settle(&claimed.claim, retry()).await.unwrap();
    assert_eq!(ids(&bench.take(5).await), ["1"]);
}

pub async fn a_failed_create_can_be_ignored(env: &Env) {
    let Some(failed) = env.variant.failed() else { return no_failed_state(env).await };
    let bench = running(env).await;
    bench.insert(row(1).entity("a").kind("create").state(failed)).await;
    let runs = update(&bench, 2).await;
    assert!(blocked(&bench).await.is_empty());
    assert_eq!(keys(&bench.take_one().await), [runs]);
}

pub async fn a_missing_create_blocks_its_update(env: &Env) {
    let bench = blocking(env).await;
    let waits = update(&bench, 1).await;
    let taken = bench.try_take(&Take::up_to(5)).await.unwrap();
    assert!(taken.claims.is_empty() && taken.skipped == 0 && !bench.is_pending().await);
    assert_eq!(blocked(&bench).await, std::slice::from_ref(&waits));
    bench.insert(row(2).entity("a").kind("create").state(env.variant.done())).await;
    assert!(blocked(&bench).await.is_empty());
    assert_eq!(keys(&bench.take_one().await), [waits]);
}

pub async fn a_missing_create_can_be_ignored(env: &Env) {
    let bench = running(env).await;
    let runs = update(&bench, 1).await;
    assert!(blocked(&bench).await.is_empty());
    assert_eq!(keys(&bench.take_one().await), [runs]);
}

pub async fn an_exhausted_create_counts_as_failed(env: &Env) {
    for (bench, is_blocked) in [(blocking(env).await, true), (running(env).await, false)] {
        let creates = bench.insert(row(1).entity("a").kind("create").attempts(1)).await;
        let waits = update(&bench, 2).await;
        let claimed = bench.take_one().await;
        let settled = bench.settle(&claimed.claim, retry()).await.unwrap();
        assert_eq!(settled.exhausted, std::slice::from_ref(&creates));
        if is_blocked {
            assert_eq!(blocked(&bench).await, [waits]);
            assert_eq!(bench.take(5).await.len(), 0);
            assert_eq!(bounded(bench.client().requeue(&[creates], 1)).await.unwrap(), 1);
            assert!(blocked(&bench).await.is_empty(), "it will be tried again");
        } else {
            assert_eq!(keys(&bench.take_one().await), [waits]);
        }
    }
}

pub async fn a_blocked_update_runs_once_its_create_is_done(env: &Env) {
    let bench = blocking(env).await;
    let creates = bench.insert(row(1).entity("a").kind("create").attempts(0)).await;
    let waits = update(&bench, 2).await;
    assert_eq!(bench.take(5).await.len(), 0);
    assert_eq!(blocked(&bench).await, std::slice::from_ref(&waits));
    bench.set_state(&creates, env.variant.done()).await;
    assert!(blocked(&bench).await.is_empty());
    assert_eq!(keys(&bench.take_one().await), [waits]);
}

pub async fn only_updates_of_the_same_group_wait(env: &Env) {
    let bench = blocking(env).await;
    create(&bench, 1).await;
    bench.insert(row(2).entity("b").kind("update")).await;
    bench.insert(row(3).entity("a").kind("note")).await;
    bench.insert(row(4).entity("b").kind("create").state(env.variant.done())).await;
    assert_eq!(ids(&bench.take(5).await), ["1", "2", "3"]);
}

pub async fn every_create_of_the_group_must_be_done(env: &Env) {
    let bench = running(env).await;
    bench.insert(row(1).entity("a").kind("create").state(env.variant.done())).await;
    create(&bench, 2).await;
    let waits = update(&bench, 3).await;
    let claimed = bench.take(5).await;
    assert_eq!(ids(&claimed), ["2"]);
    bench.settle(&claimed[0].claim, Outcome::Done).await.unwrap();
    assert_eq!(keys(&bench.take_one().await), [waits]);
}

pub async fn updates_of_a_grouped_claim_wait_for_its_create(env: &Env) {
    let layout = Layout::new(|spec| {
        let spec = spec.group("entity").grouped().kind("kind");
        spec.waits("update", "create", Unmet::Block, Unmet::Block)
    });
    let bench = env.table(layout).await;
    create(&bench, 1).await;
    update(&bench, 2).await;
    update(&bench, 3).await;
    let first = bench.take_one().await;
    assert_eq!(ids(std::slice::from_ref(&first)), ["1"]);
    assert_eq!(bench.take(1).await.len(), 0);
    bench.settle(&first.claim, Outcome::Done).await.unwrap();
    assert_eq!(ids(&[bench.take_one().await]), ["2", "3"]);
}

pub async fn without_preconditions_nothing_is_blocked(env: &Env) {
    let bench = env.plain().await;
    bench.fill(2).await;
    assert!(blocked(&bench).await.is_empty());
}
