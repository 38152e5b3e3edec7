//! Taking rows: how many, which, in which order, and by whom.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use leasehold_claim::{ClaimError, IdType, OrderType, Outcome, OwnerToken, RowId, Take};
use serde_json::json;

use super::Env;
use super::bench::{Layout, bounded, ids, keys, pause, row};

pub async fn a_take_returns_no_more_than_its_limit(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(10).await;
    let taken = bench.try_take(&Take::up_to(3)).await.unwrap();
    assert_eq!(taken.claims.len(), 3);
    assert!(taken.claims.iter().all(|claimed| claimed.rows.len() == 1), "a row without a group is a claim");
    let mut in_progress = 0;
    for key in &keys {
        in_progress += usize::from(bench.is_taken(key).await);
    }
    assert_eq!(in_progress, 3, "no other row was touched");
    assert_eq!(bench.take(100).await.len(), 7);
    assert_eq!(bench.take(100).await.len(), 0);
}

pub async fn an_empty_table_gives_no_claims(env: &Env) {
    let bench = env.plain().await;
    let taken = bench.try_take(&Take::up_to(5)).await.unwrap();
    assert!(taken.claims.is_empty() && taken.skipped == 0 && taken.cursor.is_none(), "{taken:?}");
    assert!(!bench.is_pending().await);
}

pub async fn claims_come_in_order_of_the_id(env: &Env) {
    let bench = env.plain().await;
    for id in [9, 10, 2, 100, 1] {
        bench.insert(row(id)).await;
    }
    assert_eq!(bench.ids(&Take::up_to(2)).await, ["1", "2"], "as numbers, not as text");
    assert_eq!(bench.ids(&Take::up_to(10)).await, ["9", "10", "100"]);
}

pub async fn claims_come_in_order_of_a_descending_column(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.order_by_descending("priority", OrderType::Int))).await;
    for (id, priority) in [(1, 0), (2, 5), (3, 5), (4, -1), (5, 10)] {
        bench.insert(row(id).priority(priority)).await;
    }
    assert_eq!(bench.ids(&Take::up_to(10)).await, ["5", "2", "3", "1", "4"]);
}

pub async fn claims_come_in_order_of_time_with_null_last(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.order_by("due", OrderType::Time))).await;
    bench.insert(row(1)).await;
    bench.insert(row(2).due_in(Duration::from_secs(7200))).await;
    bench.insert(row(3).due_in(Duration::from_secs(60))).await;
    assert_eq!(bench.ids(&Take::up_to(10)).await, ["3", "2", "1"]);
}

pub async fn claims_come_in_order_of_text(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.order_by("label", OrderType::Text))).await;
    for (id, label) in [(1, "pear"), (2, "apple"), (3, "quince"), (4, "apple")] {
        bench.insert(row(id).label(label.to_owned())).await;
    }
    assert_eq!(bench.ids(&Take::up_to(10)).await, ["2", "4", "1", "3"]);
}

pub async fn each_claim_has_its_own_owner(env: &Env) {
    let bench = env.plain().await;
    let all = bench.fill(6).await;
    let mut owners = HashSet::new();
    for claimed in bench.take(3).await.into_iter().chain(bench.take(3).await) {
        assert!(matches!(claimed.claim.owner, OwnerToken::Uuid(_)));
        let seen = bench.see(&claimed.rows[0].key).await;
        assert_eq!(seen.owner.as_deref(), Some(claimed.claim.owner.to_string().as_str()));
        bench.settle(&claimed.claim, Outcome::PutBack).await.unwrap();
        owners.insert(claimed.claim.owner);
    }
    assert_eq!(owners.len(), all.len());
    owners.extend(bench.take(6).await.iter().map(|claimed| claimed.claim.owner));
    assert_eq!(owners.len(), 2 * all.len(), "an owner is never used again");
}

pub async fn owners_can_come_from_a_sequence(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec).numbered_owners()).await;
    bench.fill(4).await;
    let mut owners: Vec<_> = bench.take(2).await.into_iter().chain(bench.take(2).await).collect();
    owners.sort_by_key(|claimed| claimed.claim.owner);
    owners.dedup_by_key(|claimed| claimed.claim.owner);
    assert_eq!(owners.len(), 4);
    assert!(owners.iter().all(|claimed| matches!(claimed.claim.owner, OwnerToken::Number(_))));
    for claimed in owners {
        bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
        assert!(bench.is_done(&claimed.rows[0].key).await);
    }
}

pub async fn epochs_grow_with_each_claim(env: &Env) {
    let bench = env.plain().await;
    let key = bench.insert(row(1)).await;
    let mut last = 0;
    for round in 0..4 {
        let claimed = bench.take_one().await;
        assert!(claimed.rows[0].epoch > last, "epoch {} after {last}", claimed.rows[0].epoch);
        last = claimed.rows[0].epoch;
        assert_eq!(claimed.epoch(), Some(last));
        assert_eq!(bench.see(&key).await.epoch, Some(last));
        if round % 2 == 0 {
            bench.settle(&claimed.claim, Outcome::PutBack).await.unwrap();
        } else {
            bench.crash(&claimed.claim).await;
        }
    }
}

pub async fn epochs_of_a_sequence_grow_from_row_to_row(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec).numbered_epochs()).await;
    bench.fill(6).await;
    let mut last = 0;
    for _ in 0..2 {
        let batch = bench.take(3).await;
        assert!(
            batch.iter().all(|claimed| claimed.rows[0].epoch > last),
            "greater than in every earlier batch"
        );
        let distinct: HashSet<i64> = batch.iter().map(|claimed| claimed.rows[0].epoch).collect();
        assert_eq!(distinct.len(), 3);
        last = distinct.into_iter().max().unwrap();
    }
}

pub async fn a_take_returns_only_the_requested_states(env: &Env) {
    let bench = env.plain().await;
    bench.fill(2).await;
    if env.variant.is_boolean() {
        assert_eq!(bench.ids(&Take::up_to(10).from(["false"])).await, ["1", "2"]);
        return;
    }
    bench.insert(row(3).state("again")).await;
    assert_eq!(bench.ids(&Take::up_to(10).from(["again"])).await, ["3"]);
    bench.insert(row(4).state("again")).await;
    assert_eq!(bench.ids(&Take::up_to(10)).await, ["1", "2", "4"], "without a list, all that may be taken");
}

pub async fn states_that_cannot_be_taken_are_refused(env: &Env) {
    let bench = env.plain().await;
    bench.fill(1).await;
    for state in [env.variant.done(), "unheard-of"] {
        let refused = bench.try_take(&Take::up_to(1).from([state])).await;
        assert!(matches!(refused, Err(ClaimError::InvalidSpec(_))), "{refused:?}");
    }
    assert!(bench.is_pending().await);
}

pub async fn limits_and_leases_of_zero_are_refused(env: &Env) {
    let bench = env.plain().await;
    bench.fill(1).await;
    for take in [Take::up_to(0), Take::up_to(1).lease(Duration::ZERO)] {
        let refused = bench.try_take(&take).await;
        assert!(matches!(refused, Err(ClaimError::InvalidSpec(_))), "{refused:?}");
    }
    assert_eq!(bench.take(1).await.len(), 1);
}

pub async fn workers_take_disjoint_rows(env: &Env) {
    let bench = env.plain().await;
    bench.fill(60).await;
    let mut workers = Vec::new();
    for worker in 0..4 {
        let client = bench.client();
        workers.push(tokio::spawn(async move {
            let mut mine = Vec::new();
            loop {
                let taken = client.take(&Take::up_to(1 + worker)).await.unwrap();
                mine.extend(ids(&taken.claims));
                if taken.claims.is_empty() && !client.pending(&Take::up_to(1)).await.unwrap() {
                    return mine;
                }
                pause().await;
            }
        }));
    }
    let mut all = Vec::new();
    for worker in workers {
        all.extend(bounded(worker).await.unwrap());
    }
    assert_eq!(all.len(), 60, "every row once");
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), 60);
}

pub async fn a_take_returns_only_rows_of_its_queue(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec).queued()).await;
    for id in 1..=6 {
        bench.insert(row(id).queue(if id % 2 == 0 { "even" } else { "odd" })).await;
    }
    let taken = bench.try_take(&Take::up_to(2).queue("even")).await.unwrap();
    assert_eq!(ids(&taken.claims), ["2", "4"], "the limit is per call");
    assert!(taken.claims.iter().all(|claimed| claimed.rows[0].key.queue.as_deref() == Some("even")));
    assert_eq!(bench.ids(&Take::up_to(9).queue("even")).await, ["6"]);
    assert_eq!(bench.ids(&Take::up_to(9).queue("no such queue")).await, [""; 0]);
    let client = bench.client();
    assert!(!client.pending(&Take::up_to(1).queue("even")).await.unwrap());
    assert_eq!(bench.ids(&Take::up_to(9)).await, ["1", "3", "5"], "without a queue, of all of them");
}

pub async fn the_same_id_in_two_queues_is_two_rows(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec).queued()).await;
    let one = bench.insert(row(1).queue("one")).await;
    let two = bench.insert(row(1).queue("two")).await;
    assert_ne!(one, two);
    let first = bench.try_take(&Take::up_to(5).queue("one")).await.unwrap().claims;
    let second = bench.try_take(&Take::up_to(5).queue("two")).await.unwrap().claims;
    assert_eq!((keys(&first[0]), keys(&second[0])), (vec![one.clone()], vec![two.clone()]));
    bench.settle(&first[0].claim, Outcome::Done).await.unwrap();
    assert!(bench.is_done(&one).await && bench.is_taken(&two).await);
    bench.crash(&second[0].claim).await;
    assert!(bench.is_done(&one).await && bench.is_home(&two).await);
}

pub async fn a_queue_where_there_is_none_is_refused(env: &Env) {
    let bench = env.plain().await;
    bench.fill(1).await;
    let refused = bench.try_take(&Take::up_to(1).queue("mail")).await;
    assert!(matches!(refused, Err(ClaimError::InvalidSpec(_) | ClaimError::Unsupported(_))), "{refused:?}");
}

pub async fn a_locked_row_is_passed_over(env: &Env) {
    let bench = env.plain().await;
    let keys = bench.fill(3).await;
    let lock = bench.lock(&keys[0]).await;
    assert_eq!(bench.ids(&Take::up_to(2)).await, ["2", "3"], "without waiting for it");
    assert_eq!(bench.take(2).await.len(), 0);
    bench.unlock(lock).await;
    assert_eq!(bench.ids(&Take::up_to(2)).await, ["1"]);
}

pub async fn not_before_it_is_ready(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.ready_at("ready_at"))).await;
    bench.insert(row(1).ready_in(Duration::from_secs(3600))).await;
    assert_eq!(bench.take(5).await.len(), 0);
    bench.insert(row(2).ready_in(Duration::ZERO)).await;
    bench.insert(row(3)).await;
    assert_eq!(bench.ids(&Take::up_to(5)).await, ["2", "3"]);
}

pub async fn work_and_dedupe_key_stay_and_the_epoch_grows(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.work(["id", "priority", "label"]))).await;
    bench.insert(row(7).priority(3).label("it's \"quoted\"".to_owned())).await;
    let first = bench.take_one().await;
    assert_eq!(first.rows[0].work, json!({"id": 7, "priority": 3, "label": "it's \"quoted\""}));
    bench.crash(&first.claim).await;
    let second = bench.take_one().await;
    assert_eq!(second.rows[0].work, first.rows[0].work);
    assert_eq!(first.rows[0].dedupe_key(&bench.spec), second.rows[0].dedupe_key(&bench.spec));
    assert!(second.rows[0].epoch > first.rows[0].epoch);
}

pub async fn settled_and_other_states_are_never_taken(env: &Env) {
    let bench = env.plain().await;
    let mut states = vec![env.variant.done()];
    if !env.variant.is_boolean() {
        states.extend(["error", "exhausted", "paused", "in-progress"]);
    }
    for (id, state) in (1..).zip(&states) {
        bench.insert(row(id).state(state)).await;
    }
    assert_eq!(bench.take(10).await.len(), 0);
    assert!(!bench.is_pending().await);
    for (id, state) in (1..).zip(&states) {
        assert_eq!(bench.state(&leasehold_claim::RowKey::new(id)).await, *state);
    }
}

pub async fn without_a_lease_nothing_is_taken(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec).without_lease()).await;
    let keys = bench.fill(1).await;
    let refused = bench.try_take(&Take::up_to(1)).await;
    assert!(matches!(refused, Err(ClaimError::Unsupported(_))), "{refused:?}");
    assert_eq!(bench.state(&keys[0]).await, env.variant.home());
}

pub async fn ids_of_every_type(env: &Env) {
    let uuids = ["b7f0b0a0-0000-4000-8000-000000000002", "a7f0b0a0-0000-4000-8000-000000000001"];
    let texts = ["a'b\"c\\d,{}", "Zoë 🚀"];
    for (kind, two) in [(IdType::Uuid, uuids), (IdType::Text, texts)] {
        let bench = env.table(Layout::new(|spec| spec).id(kind)).await;
        for id in two {
            bench.insert(row(RowId::parse(kind, id).unwrap())).await;
        }
        let claims = bench.take(5).await;
        let found: HashSet<String> = ids(&claims).into_iter().collect();
        assert_eq!(found, two.map(str::to_owned).into());
        for claimed in claims {
            let text: String = claimed.rows[0].id().unwrap();
            assert_eq!(RowId::parse(kind, &text).unwrap(), claimed.rows[0].key.id);
            assert_eq!(claimed.rows[0].id::<uuid::Uuid>().is_ok(), kind == IdType::Uuid);
            assert!(matches!(claimed.rows[0].id::<i64>(), Err(ClaimError::InvalidSpec(_))));
            bench.settle(&claimed.claim, Outcome::Done).await.unwrap();
            assert!(bench.is_done(&claimed.rows[0].key).await);
        }
    }
    let bench = env.plain().await;
    bench.insert(row(i64::from(i32::MAX) + 1)).await;
    let claimed = bench.take_one().await;
    assert_eq!(claimed.rows[0].id::<i64>().unwrap(), 2_147_483_648);
    let refused = claimed.rows[0].id::<i32>().unwrap_err();
    assert!(matches!(&refused, ClaimError::InvalidSpec(text) if text.contains("2147483648")), "{refused}");
}

pub async fn each_row_can_have_its_own_timeout(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.timeout_seconds("timeout_seconds"))).await;
    bench.insert(row(1).timeout(3600)).await;
    bench.insert(row(2)).await;
    let claims = bench.try_take(&Take::up_to(2).lease(Duration::from_secs(60))).await.unwrap().claims;
    assert_eq!(claims[0].lease, Duration::from_secs(3600));
    assert_eq!(claims[1].lease, Duration::from_secs(60), "without one, what the claim asks for");
    let client: Arc<_> = bench.client();
    let taken = bounded(client.taken(5)).await.unwrap();
    let remaining =
        |id: &str| taken.iter().find(|row| row.key.id.to_string() == id).unwrap().remaining.unwrap();
    assert!(remaining("1") > Duration::from_secs(3500), "{:?}", remaining("1"));
    assert!(remaining("2") <= Duration::from_secs(60), "{:?}", remaining("2"));
}

pub async fn a_claim_reports_the_row_that_it_found(env: &Env) {
    let layout = Layout::new(|spec| spec.group("entity").kind("kind").attempts("attempts_left"));
    let bench = env.table(layout).await;
    bench.insert(row(1).entity("order 7").kind("create").attempts(3)).await;
    let claimed = bench.take_one().await;
    let first = &claimed.rows[0];
    assert_eq!(claimed.group.as_deref(), Some("order 7"));
    assert_eq!(first.kind.as_deref(), Some("create"));
    assert_eq!(first.attempts_left, Some(2));
    assert_eq!(first.found.as_str(), env.variant.home());
    assert_eq!(claimed.claim.rows[0], (first.key.clone(), first.epoch));
}
