//! Limits of the rows per tenant or queue that are claimed at a time.

use leasehold_claim::{Outcome, Take};
use leasehold_claim::{Pass, PassEnd};

use super::bench::{Layout, bounded, ids, retry, row};
use super::{Bench, Env};

async fn limited(env: &Env) -> Bench {
    env.table(Layout::new(|spec| spec.group("entity").limit("entity", 2).attempts("attempts_left"))).await
}

/// Inserts rows 1 to 4 of one tenant, 5 of another, and 6 and 7 without a tenant.
async fn fill(bench: &Bench) {
    for id in 1..=7 {
        let seed = row(id);
        let seed = match id {
            1..=4 => seed.entity("a"),
            5 => seed.entity("b"),
            _ => seed,
        };
        bench.insert(seed).await;
    }
}

pub async fn no_more_of_a_tenant_than_its_limit(env: &Env) {
    let bench = limited(env).await;
    fill(&bench).await;
    let first = bench.take(9).await;
    assert_eq!(ids(&first), ["1", "2", "5", "6", "7"], "in order, and those of no tenant without a limit");
    let none = bench.try_take(&Take::up_to(9)).await.unwrap();
    assert!(none.claims.is_empty() && none.skipped > 0, "{none:?}");
    assert!(bench.is_pending().await, "they can be taken but for those who are at others");
    bench.settle(&first[1].claim, Outcome::Done).await.unwrap();
    assert_eq!(ids(&bench.take(9).await), ["3"]);
    bench.settle(&first[0].claim, retry()).await.unwrap();
    assert_eq!(ids(&bench.take(9).await), ["1"], "what is tried again is before the next");
}

/// The tenant has many rows, and takes are of one row or of many.
pub async fn a_tenant_without_room_stops_nobody(env: &Env) {
    let bench = limited(env).await;
    for id in 1..=150 {
        bench.insert(row(id).entity("a")).await;
    }
    for id in 151..=154 {
        bench.insert(row(id).entity("b")).await;
    }
    bench.insert(row(155)).await;
    assert_eq!(ids(&bench.take(2).await), ["1", "2"]);
    assert_eq!(ids(&bench.take(1).await), ["151"]);
    assert_eq!(ids(&bench.take(9).await), ["152", "155"]);
    assert!(bench.take(9).await.is_empty());
}

pub async fn the_cursor_passes_a_tenant_without_room(env: &Env) {
    let bench = limited(env).await;
    fill(&bench).await;
    let mut pass = Pass::new();
    let mut seen = Vec::new();
    loop {
        let taken = bench.try_take(&Take::up_to(2).after(pass.cursor())).await.unwrap();
        pass.record(&taken);
        if taken.claims.is_empty() {
            break;
        }
        seen.extend(ids(&taken.claims));
    }
    assert_eq!(seen, ["1", "2", "5", "6", "7"]);
    assert_eq!(pass.end(false), PassEnd::Found);
    pass.record(&bench.try_take(&Take::up_to(2)).await.unwrap());
    assert_eq!(pass.end(false), PassEnd::Skipped, "nobody idles while rows wait for room");
}

/// An ended lease counts until its row is returned.
pub async fn an_ended_lease_counts_towards_the_limit_until_the_sweep(env: &Env) {
    let bench = limited(env).await;
    fill(&bench).await;
    let first = bench.take(2).await;
    bench.expire_all(&first[0].claim).await;
    assert_eq!(ids(&bench.take(2).await), ["5", "6"]);
    bench.sweep().await;
    assert_eq!(ids(&bench.take(9).await), ["1", "7"]);
}

pub async fn a_locked_row_takes_no_room(env: &Env) {
    let bench = limited(env).await;
    fill(&bench).await;
    let lock = bench.lock(&leasehold_claim::RowKey::new(1)).await;
    let mut pass = Pass::new();
    let mut seen = Vec::new();
    for _ in 0..4 {
        let taken = bench.try_take(&Take::up_to(2).after(pass.cursor())).await.unwrap();
        pass.record(&taken);
        seen.extend(ids(&taken.claims));
    }
    seen.sort();
    assert_eq!(seen, ["2", "3", "5", "6", "7"]);
    bench.unlock(lock).await;
}

pub async fn queues_have_limits(env: &Env) {
    let bench = env.table(Layout::new(|spec| spec.limit("queue", 2)).queued()).await;
    for id in 1..=8 {
        bench.insert(row(id).queue(if id <= 4 { "mail" } else { "report" })).await;
    }
    assert_eq!(ids(&bench.take(3).await), ["1", "2", "5"]);
    assert!(bench.ids(&Take::up_to(9).queue("mail")).await.is_empty());
    assert_eq!(bench.ids(&Take::up_to(9).queue("report")).await, ["6"]);
}

/// Claims of open transactions and leases count together, until the transaction ends.
pub async fn held_and_leased_claims_share_the_limit(env: &Env) {
    let bench = limited(env).await;
    for id in 1..=4 {
        bench.insert(row(id).entity("a")).await;
    }
    let hold = async |limit| bounded(bench.holder().hold(&Take::up_to(limit))).await.unwrap();
    let mut held = hold(1).await.unwrap();
    assert_eq!(ids(&held.taken().claims), ["1"]);
    let second = bench.take(2).await;
    assert_eq!(ids(&second), ["2"], "the row that is held takes no room twice");
    bench.insert(row(5).entity("b")).await;
    bench.insert(row(6)).await;
    let others = hold(9).await.unwrap();
    assert_eq!(ids(&others.taken().claims), ["5", "6"]);
    assert!(hold(1).await.is_none());
    assert!(bench.take(1).await.is_empty());
    let claim = held.taken().claims[0].claim.clone();
    bounded(held.settle(&claim, &Outcome::Done)).await.unwrap();
    assert!(bench.take(1).await.is_empty(), "it is not committed");
    bounded(held.commit()).await.unwrap();
    let third = hold(9).await.unwrap();
    assert_eq!(ids(&third.taken().claims), ["3"]);
    assert!(bench.take(9).await.is_empty());
    bounded(third.rollback()).await.unwrap();
    bench.settle(&second[0].claim, Outcome::Done).await.unwrap();
    assert_eq!(ids(&bench.take(9).await), ["3", "4"]);
    assert!(hold(9).await.is_none());
    bounded(others.rollback()).await.unwrap();
    assert_eq!(ids(&hold(9).await.unwrap().taken().claims), ["5", "6"]);
}
