//! Counts of rows by kind.

use std::time::Duration;

use leasehold_claim::{ClaimError, Outcome, Stats, Take, Unmet};

use super::Env;
use super::bench::{Bench, Layout, bounded, row};

const HOUR: Duration = Duration::from_secs(3600);

async fn stats(bench: &Bench, take: Take) -> Stats {
    bounded(bench.client().stats(&take)).await.unwrap()
}

/// Returns the counts of ready, later, taken, exhausted and failed rows.
fn five(stats: &Stats) -> [u64; 5] {
    [stats.ready, stats.later, stats.taken, stats.exhausted, stats.failed]
}

pub async fn each_kind_of_row_is_counted(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.attempts("attempts_left").ready_at("ready_at"))).await;
    assert_eq!(stats(&bench, Take::up_to(9)).await, Stats::default());
    for id in 1..=6 {
        bench.insert(row(id).attempts(2)).await;
    }
    bench.insert(row(7).ready_in(HOUR)).await;
    bench.insert(row(8).attempts(0)).await;
    bench.insert(row(9).state(env.variant.done())).await;
    let claims = bench.take(4).await;
    bench.settle(&claims[0].claim, Outcome::Done).await.unwrap();
    assert_eq!(five(&stats(&bench, Take::up_to(9)).await), [2, 1, 3, 1, 0]);
    // A row whose lease has ended counts as taken until the sweep.
    bench.expire(&claims[3].rows[0].key).await;
    if env.variant.failed().is_some() {
        bench.settle(&claims[1].claim, Outcome::Failed("no".to_owned())).await.unwrap();
        assert_eq!(five(&stats(&bench, Take::up_to(9)).await), [2, 1, 2, 1, 1]);
        bench.sweep().await;
        assert_eq!(five(&stats(&bench, Take::up_to(9)).await), [3, 1, 1, 1, 1], "row 8 got its state");
    }
    assert!(!stats(&bench, Take::up_to(9)).await.is_capped);
    let refused = bounded(bench.client().stats(&Take::up_to(9).queue("a"))).await;
    assert!(matches!(refused, Err(ClaimError::InvalidSpec(_))), "{refused:?}");
}

pub async fn no_more_is_counted_than_the_limit(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.attempts("attempts_left"))).await;
    bench.fill(7).await;
    bench.take(2).await;
    for id in 8..11 {
        bench.insert(row(id).attempts(0)).await;
    }
    let few = stats(&bench, Take::up_to(2)).await;
    assert_eq!((few.ready, few.taken, few.exhausted, few.is_capped), (2, 2, 2, true));
    assert!(stats(&bench, Take::up_to(5)).await.is_capped, "there may be more");
    let all = stats(&bench, Take::up_to(6)).await;
    assert_eq!((all.ready, all.is_capped), (5, false));
}

pub async fn counts_of_a_queue(env: &Env) {
    let bench =
        env.table(Layout::new(|spec| spec.attempts("attempts_left").ready_at("ready_at")).queued()).await;
    bench.insert(row(1).queue("a")).await;
    let claimed = bench.take_one().await;
    for queue in ["a", "b"] {
        bench.insert(row(2).queue(queue)).await;
        bench.insert(row(3).queue(queue).attempts(0)).await;
    }
    bench.insert(row(4).queue("b").ready_in(HOUR)).await;
    assert_eq!(five(&stats(&bench, Take::up_to(9).queue("a")).await), [1, 0, 1, 1, 0]);
    assert_eq!(five(&stats(&bench, Take::up_to(9).queue("b")).await), [1, 1, 0, 1, 0]);
    assert_eq!(five(&stats(&bench, Take::up_to(9).queue("c")).await), [0; 5]);
    assert_eq!(five(&stats(&bench, Take::up_to(9)).await), [2, 1, 1, 2, 0]);
    if env.variant.failed().is_some() {
        bench.settle(&claimed.claim, Outcome::Failed("no".to_owned())).await.unwrap();
        bench.sweep().await;
        assert_eq!(five(&stats(&bench, Take::up_to(9).queue("a")).await), [1, 0, 0, 1, 1]);
        assert_eq!(five(&stats(&bench, Take::up_to(9).queue("b")).await), [1, 1, 0, 1, 0]);
    }
}

pub async fn counts_without_a_lease(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec).without_lease()).await;
    bench.fill(3).await;
    assert_eq!(five(&stats(&bench, Take::up_to(9)).await), [3, 0, 0, 0, 0]);
}

pub async fn counts_of_what_waits(env: &Env) {
    let layout = Layout::new(|spec| {
        spec.group("entity").kind("kind").ready_at("ready_at").waits(
            "update",
            "create",
            Unmet::Block,
            Unmet::Block,
        )
    });
    let bench = env.table(layout).await;
    bench.insert(row(1).entity("a").kind("create")).await;
    bench.insert(row(2).entity("a")).await;
    bench.insert(row(3).entity("b")).await;
    bench.insert(row(4).entity("a").ready_in(HOUR)).await;
    bench.insert(row(5).entity("b").ready_in(HOUR)).await;
    let count = async || {
        let stats = stats(&bench, Take::up_to(9)).await;
        [stats.ready, stats.waiting, stats.blocked, stats.later, stats.taken]
    };
    assert_eq!(count().await, [1, 1, 2, 1, 0]);
    let create = bench.take_one().await;
    assert_eq!(count().await, [0, 1, 2, 1, 1]);
    bench.settle(&create.claim, Outcome::Done).await.unwrap();
    assert_eq!(count().await, [1, 0, 2, 1, 0]);
}

pub async fn how_long_the_first_has_been_ready(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.ready_at("ready_at"))).await;
    bench.insert(row(1).ready_in(HOUR)).await;
    bench.insert(row(2)).await;
    assert_eq!(stats(&bench, Take::up_to(9)).await.oldest, None, "of those with a time, none is ready");
    bench.insert(row(3).ready_in(Duration::ZERO)).await;
    let oldest = stats(&bench, Take::up_to(9)).await.oldest;
    assert!(oldest.is_some_and(|age| age < Duration::from_secs(60)), "{oldest:?}");
}
