//! Groups: one claim for all outstanding rows of an entity, and never two.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use leasehold_claim::{Outcome, Take};
use leasehold_claim::{Pass, PassEnd};

use super::bench::{Layout, bounded, ids, keys, pause, retry, row};
use super::{Bench, Env};

async fn grouped(env: &Env) -> Bench {
    env.table(Layout::new(|spec| spec.group("entity").grouped().attempts("attempts_left"))).await
}

pub async fn one_claim_has_all_rows_of_a_group(env: &Env) {
    let bench = grouped(env).await;
    let mut rows = Vec::new();
    for id in 1..=30 {
        rows.push(bench.insert(row(id).entity("order 7")).await);
    }
    let claims = bench.take(5).await;
    assert_eq!(claims.len(), 1, "one claim");
    assert_eq!(keys(&claims[0]), rows, "of all rows, in order");
    assert_eq!(claims[0].group.as_deref(), Some("order 7"));
    let owner = Some(claims[0].claim.owner.to_string());
    for key in &rows {
        assert_eq!(bench.see(key).await.owner, owner);
    }
    bench.settle(&claims[0].claim, Outcome::Done).await.unwrap();
    for key in &rows {
        assert!(bench.is_done(key).await);
    }
}

pub async fn a_group_is_never_in_two_claims(env: &Env) {
    let bench = grouped(env).await;
    bench.insert(row(1).entity("a")).await;
    let first = bench.take_one().await;
    let late = bench.insert(row(2).entity("a")).await;
    let taken = bench.try_take(&Take::up_to(5)).await.unwrap();
    assert!(taken.claims.is_empty());
    assert_eq!(taken.skipped, 1, "somebody is at the group");
    assert!(bench.is_pending().await);
    bench.settle(&first.claim, Outcome::Done).await.unwrap();
    assert_eq!(keys(&bench.take_one().await), [late]);
}

pub async fn the_limit_counts_groups(env: &Env) {
    let bench = grouped(env).await;
    for id in 1..=9 {
        bench.insert(row(id).entity(["a", "b", "c"][usize::try_from(id % 3).unwrap()])).await;
    }
    let claims = bench.take(2).await;
    assert_eq!(claims.len(), 2);
    assert!(claims.iter().all(|claimed| claimed.rows.len() == 3));
    assert_ne!(claims[0].claim.owner, claims[1].claim.owner);
    assert_eq!(bench.take(5).await.len(), 1);
}

/// With a limit of one row, each row is settled separately, and the rows of an entity are claimed in sequence.
pub async fn one_at_a_time_of_each_entity_in_order(env: &Env) {
    let layout = Layout::new(|spec| spec.group("entity").grouped().group_limit(1).attempts("attempts_left"));
    let bench = env.table(layout).await;
    for (id, entity) in [(1, "a"), (2, "b"), (3, "a"), (4, "a")] {
        bench.insert(row(id).entity(entity)).await;
    }
    let first = bench.take(5).await;
    assert_eq!((first.len(), ids(&first)), (2, vec!["1".to_owned(), "2".to_owned()]));
    assert!(bench.take(5).await.is_empty(), "the others of the entities wait");
    bench.settle(&first[0].claim, Outcome::Done).await.unwrap();
    let second = bench.take(5).await;
    assert_eq!(ids(&second), ["3"]);
    bench.settle(&second[0].claim, retry()).await.unwrap();
    assert_eq!(ids(&bench.take(5).await), ["3"], "what is tried again is before the next");
}

pub async fn groups_in_order_of_their_first_row(env: &Env) {
    let bench = grouped(env).await;
    for (id, entity) in [(4, "a"), (1, "c"), (2, "b"), (3, "c"), (5, "a")] {
        bench.insert(row(id).entity(entity)).await;
    }
    let claims = bench.take(5).await;
    let groups: Vec<_> = claims.iter().map(|claimed| claimed.group.as_deref().unwrap()).collect();
    assert_eq!(groups, ["c", "b", "a"]);
    assert_eq!(ids(&claims), ["1", "3", "2", "4", "5"]);
}

pub async fn null_is_no_group(env: &Env) {
    let bench = grouped(env).await;
    bench.fill(3).await;
    bench.insert(row(4).entity("a")).await;
    let claims = bench.take(3).await;
    assert!(claims.iter().all(|claimed| claimed.rows.len() == 1 && claimed.group.is_none()), "{claims:?}");
    assert_eq!(ids(&claims), ["1", "2", "3"]);
    bench.insert(row(5)).await;
    assert_eq!(ids(&bench.take(5).await), ["4", "5"], "rows without a group do not wait for each other");
}

/// Many workers work on one entity, never two at once, and all rows are done in the end.
pub async fn many_workers_finish_one_hot_group_one_at_a_time(env: &Env) {
    let bench = grouped(env).await;
    let mut rows = Vec::new();
    for id in 1..=10 {
        rows.push(bench.insert(row(id).entity("hot")).await);
    }
    let (inside, most, claimed_rows) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)), 10);
    let mut workers = Vec::new();
    for worker in 0..8 {
        let (client, inside, most) = (bench.client(), inside.clone(), most.clone());
        workers.push(tokio::spawn(async move {
            let (mut pass, mut done) = (Pass::new(), 0);
            loop {
                let taken = client.take(&Take::up_to(1).after(pass.cursor())).await.unwrap();
                pass.record(&taken);
                for claimed in &taken.claims {
                    most.fetch_max(inside.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                    tokio::task::yield_now().await;
                    inside.fetch_sub(1, Ordering::SeqCst);
                    // Each worker puts its first claim back, so the group passes between workers.
                    let outcome = if done == 0 && worker < 4 { Outcome::PutBack } else { Outcome::Done };
                    done += claimed.rows.len();
                    let settlement = (claimed.claim.clone(), outcome);
                    for answer in client.settle(&[settlement]).await.unwrap() {
                        answer.unwrap();
                    }
                }
                if taken.claims.is_empty()
                    && pass.end(client.pending(&Take::up_to(1)).await.unwrap()) == PassEnd::Clean
                {
                    return;
                }
                pause().await;
            }
        }));
    }
    for worker in workers {
        bounded(worker).await.unwrap();
    }
    // All workers might have ended before the last put-back, so this client finishes the rest.
    for claimed in bench.take(1).await {
        bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
    }
    assert_eq!(most.load(Ordering::SeqCst), 1, "two workers were at one entity");
    assert_eq!(rows.len(), claimed_rows);
    for key in &rows {
        assert!(bench.is_done(key).await);
    }
}

pub async fn attempts_count_for_each_row_of_a_group(env: &Env) {
    let bench = grouped(env).await;
    let (one, two) = (
        bench.insert(row(1).entity("a").attempts(1)).await,
        bench.insert(row(2).entity("a").attempts(5)).await,
    );
    let claimed = bench.take_one().await;
    assert_eq!(claimed.rows.len(), 2);
    let settled = bench.settle(&claimed.claim, retry()).await.unwrap();
    assert_eq!(settled.exhausted, std::slice::from_ref(&one));
    assert_eq!(bench.state(&one).await, env.variant.exhausted());
    assert_eq!(bench.see(&two).await.attempts, Some(4));
    assert_eq!(keys(&bench.take_one().await), [two], "what is used up does not keep the others");
}

pub async fn the_cursor_passes_a_taken_group(env: &Env) {
    let bench = grouped(env).await;
    for (id, entity) in [(1, "a"), (2, "a"), (3, "b")] {
        bench.insert(row(id).entity(entity)).await;
    }
    let first = bench.take_one().await;
    bench.insert(row(4).entity("a")).await;
    bench.settle(&first.claim, Outcome::PutBack).await.unwrap();
    let first = bench.take_one().await;
    assert_eq!(ids(&[first]), ["1", "2", "4"]);
    bench.insert(row(0).entity("a")).await;
    let (mut pass, mut found) = (Pass::new(), Vec::new());
    loop {
        let taken = bench.try_take(&Take::up_to(1).after(pass.cursor())).await.unwrap();
        let before = pass.cursor();
        pass.record(&taken);
        found.extend(ids(&taken.claims));
        if taken.claims.is_empty() && (taken.cursor.is_none() || pass.cursor() == before) {
            break;
        }
    }
    assert_eq!(found, ["3"], "the group in front does not keep the pass");
    assert_eq!(pass.end(bench.is_pending().await), PassEnd::Found);
}

pub async fn a_group_is_taken_again_once_all_its_rows_are_swept(env: &Env) {
    let bench = grouped(env).await;
    let (one, two) = (bench.insert(row(1).entity("a")).await, bench.insert(row(2).entity("a")).await);
    let first = bench.take_one().await;
    bench.crash_one(&one).await;
    assert_eq!(bench.take(1).await.len(), 0, "the other row is still in the first claim");
    bench.crash_one(&two).await;
    let second = bench.take_one().await;
    assert_eq!(keys(&second), [one, two]);
    assert!(bench.settle(&first.claim, Outcome::Done).await.is_err());
    bench.settle(&second.claim, Outcome::Done).await.unwrap();
}

pub async fn only_ready_rows_of_a_group_are_taken(env: &Env) {
    let layout =
        Layout::new(|spec| spec.group("entity").grouped().ready_at("ready_at").attempts("attempts_left"));
    let bench = env.table(layout).await;
    bench.insert(row(1).entity("a").ready_in(std::time::Duration::from_secs(3600))).await;
    bench.insert(row(2).entity("a").attempts(0)).await;
    let done = bench.insert(row(3).entity("a").state(env.variant.done())).await;
    bench.insert(row(4).entity("a")).await;
    assert_eq!(ids(&bench.take(5).await), ["4"]);
    assert!(bench.is_done(&done).await);
}
