//! Passes: the cursor, and the condition under which a worker may idle.

use leasehold_claim::{OrderType, Outcome, Take};
use leasehold_claim::{Pass, PassEnd};

use super::bench::{Layout, bounded, ids, pause, retry, row};
use super::{Bench, Env};
use std::time::Duration;

/// Takes rows one by one along the pass and puts each back, until no row is left. Returns the ids.
async fn walk(bench: &Bench, pass: &mut Pass) -> Vec<String> {
    let mut seen = Vec::new();
    loop {
        let taken = bench.try_take(&Take::up_to(1).after(pass.cursor())).await.unwrap();
        pass.record(&taken);
        if taken.claims.is_empty() {
            return seen;
        }
        assert!(seen.len() < 50, "a pass ends: {seen:?}");
        seen.extend(ids(&taken.claims));
        bench.settle(&taken.claims[0].claim, Outcome::PutBack).await.unwrap();
    }
}

pub async fn rows_seen_in_a_pass_are_not_offered_again(env: &Env) {
    let bench = env.plain().await;
    bench.fill(3).await;
    let mut pass = Pass::new();
    assert_eq!(walk(&bench, &mut pass).await, ["1", "2", "3"], "though each is back where it was");
    assert_eq!(pass.end(true), PassEnd::Found);
    assert_eq!(walk(&bench, &mut pass).await, ["1", "2", "3"], "the next pass begins at the start");
}

pub async fn the_cursor_works_across_ties_and_descending_order(env: &Env) {
    let layout = Layout::new(|spec| {
        spec.order_by_descending("priority", OrderType::Int).order_by("label", OrderType::Text)
    });
    let bench = env.table(layout).await;
    for (id, priority, label) in [(1, 1, "b"), (2, 2, "b"), (3, 2, "a"), (4, 1, "b"), (5, 2, "a")] {
        bench.insert(row(id).priority(priority).label(label.to_owned())).await;
    }
    assert_eq!(walk(&bench, &mut Pass::new()).await, ["3", "5", "2", "1", "4"]);
}

pub async fn the_cursor_works_across_nulls(env: &Env) {
    let up = env.table(Layout::new(|spec| spec.order_by("due", OrderType::Time))).await;
    let down = env.table(Layout::new(|spec| spec.order_by_descending("due", OrderType::Time))).await;
    for bench in [&up, &down] {
        bench.insert(row(1)).await;
        bench.insert(row(2).due_in(Duration::from_secs(60))).await;
        bench.insert(row(3)).await;
        bench.insert(row(4).due_in(Duration::from_secs(120))).await;
    }
    assert_eq!(walk(&up, &mut Pass::new()).await, ["2", "4", "1", "3"]);
    assert_eq!(walk(&down, &mut Pass::new()).await, ["1", "3", "4", "2"]);
}

pub async fn the_cursor_works_across_queues(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec).queued()).await;
    for queue in ["one", "two"] {
        bench.insert(row(1).queue(queue)).await;
        bench.insert(row(2).queue(queue)).await;
    }
    let mut seen = walk(&bench, &mut Pass::new()).await;
    seen.sort();
    assert_eq!(seen, ["1", "1", "2", "2"], "the same id in two queues is two rows");
}

pub async fn a_pass_is_clean_only_if_it_found_nothing(env: &Env) {
    let bench = env.plain().await;
    bench.fill(2).await;
    let mut pass = Pass::new();
    let taken = bench.try_take(&Take::up_to(10).after(pass.cursor())).await.unwrap();
    pass.record(&taken);
    let rest = bench.try_take(&Take::up_to(10).after(pass.cursor())).await.unwrap();
    pass.record(&rest);
    assert!(rest.claims.is_empty());
    assert_eq!(pass.end(bench.is_pending().await), PassEnd::Found, "it found something: once more");
    pass.record(&bench.try_take(&Take::up_to(10).after(pass.cursor())).await.unwrap());
    assert_eq!(pass.end(bench.is_pending().await), PassEnd::Clean, "rows under a lease are not left to do");
}

pub async fn a_locked_row_keeps_the_pass_from_being_clean(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(1).await;
    let lock = bench.lock(&keys[0]).await;
    let mut pass = Pass::new();
    pass.record(&bench.try_take(&Take::up_to(10)).await.unwrap());
    assert_eq!(pass.end(bench.is_pending().await), PassEnd::Skipped);
    bench.unlock(lock).await;
    assert_eq!(bench.take(10).await.len(), 1);
}

pub async fn pending_includes_rows_before_the_cursor(env: &Env) {
    let bench = env.plain().await;
    bench.fill(2).await;
    let mut pass = Pass::new();
    walk(&bench, &mut pass).await;
    let client = bench.client();
    assert!(bounded(client.pending(&Take::up_to(1).after(pass.cursor()))).await.unwrap());
}

pub async fn rows_that_are_not_ready_are_not_pending(env: &Env) {
    let layout = Layout::new(|spec| spec.ready_at("ready_at").attempts("attempts_left"));
    let bench = env.table(layout).await;
    bench.insert(row(1).ready_in(Duration::from_secs(3600))).await;
    bench.insert(row(2).attempts(0)).await;
    bench.insert(row(3).state(env.variant.done())).await;
    assert!(!bench.is_pending().await);
    bench.insert(row(4)).await;
    assert!(bench.is_pending().await);
}

/// Several workers finish all rows with passes, retries and put-backs, and each row is done once.
pub async fn passes_of_several_workers_finish_every_row_once(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(30).await;
    let mut workers = Vec::new();
    for worker in 0..3_usize {
        let client = bench.client();
        workers.push(tokio::spawn(async move {
            let (mut pass, mut done, mut turn) = (Pass::new(), 0, worker);
            loop {
                let taken = client.take(&Take::up_to(2).after(pass.cursor())).await.unwrap();
                pass.record(&taken);
                if taken.claims.is_empty() {
                    let is_pending = client.pending(&Take::up_to(2)).await.unwrap();
                    if pass.end(is_pending) == PassEnd::Clean {
                        return done;
                    }
                    pause().await;
                }
                for claimed in taken.claims {
                    turn += 1;
                    let outcome = match turn % 5 {
                        0 => Outcome::PutBack,
                        1 => retry(),
                        _ => Outcome::Done,
                    };
                    done += usize::from(outcome == Outcome::Done);
                    let settlement = (claimed.claim, outcome);
                    for answer in client.settle(&[settlement]).await.unwrap() {
                        answer.unwrap();
                    }
                }
            }
        }));
    }
    let mut done = 0;
    for worker in workers {
        done += bounded(worker).await.unwrap();
    }
    assert_eq!(done, 30);
    for key in keys {
        assert!(bench.is_done(&key).await, "{key}");
    }
}
