//! Every permutation of concurrent statements has an order that a model of the key explains.

#![allow(clippy::unwrap_used)]

mod mutants;
mod parts;

#[allow(dead_code)]
#[path = "../../src/sql.rs"]
mod sql;

use test_stores::permutations::scenes::{ENDS, GRANTS};
use test_stores::permutations::{End, Op, Scene, Start, permute, scenes};

async fn assert_explained(scenes: Vec<Scene>, permutations: usize) {
    let verdict = permute(&sql::LEASES, &[("fence", sql::FENCE)], &scenes).await;
    verdict.assert_explained(permutations);
}

/// Returns scenes of two statements behind a lock.
fn behind_a_lock(start: Start, pairs: impl IntoIterator<Item = [Op; 2]>) -> Vec<Scene> {
    pairs.into_iter().map(|others| Scene::new(start, Op::Lock, &others)).collect()
}

#[tokio::test]
async fn of_two_grants_of_a_free_lease_at_most_one_is_carried_out() {
    assert_explained(scenes::free_key(), 180).await;
}

#[tokio::test]
async fn grants_behind_an_open_one_follow_its_end() {
    assert_explained(scenes::open_grant(), 192).await;
}

#[tokio::test]
async fn a_grant_that_waited_has_the_greatest_token() {
    assert_explained(scenes::tokens(), 60).await;
}

#[tokio::test]
async fn statements_of_a_former_holder_change_nothing() {
    assert_explained(scenes::former_holder(&[Op::Renew("renew_early"), Op::Fence]), 96).await;
}

#[tokio::test]
async fn a_hold_ends_once() {
    assert_explained(scenes::released_twice(), 72).await;
}

#[tokio::test]
async fn a_purge_removes_no_row_that_is_being_granted() {
    assert_explained(scenes::purged(), 84).await;
}

#[tokio::test]
async fn three_statements_have_an_order() {
    assert_explained(scenes::three_sessions(), 180).await;
}

#[tokio::test]
async fn an_ended_lease_is_released_or_granted_and_not_renewed() {
    let release = Op::Release("release_one", "a");
    let statements = [
        Op::Renew("renew_early"),
        Op::Renew("renew"),
        Op::Release("release_unawaited", "a"),
        release,
        Op::Force,
    ];
    let pairs = |grant| statements.map(|statement| [statement, Op::Grant(grant, "b")]);
    let others = ["grant_free", "grant", "grant skipping"].map(|grant| [release, Op::Grant(grant, "b")]);
    let pairs = ["grant_one", "retake_one"].into_iter().flat_map(pairs).chain(others);
    let mut scenes = behind_a_lock(Start::Ended, pairs);
    let three = [Op::Renew("renew"), Op::Grant("grant_one", "b"), Op::Grant("retake_one", "c")];
    scenes.push(Scene::new(Start::Ended, Op::Lock, &three));
    assert_explained(scenes, 216).await;
}

#[tokio::test]
async fn a_lease_that_ends_during_a_wait_is_not_revived() {
    let waiting = [
        Op::Renew("renew_early"),
        Op::Renew("renew"),
        Op::Release("release_unawaited", "a"),
        Op::Release("release_one", "a"),
        Op::Force,
        Op::GiveOut,
        Op::Grant("grant_one", "b"),
        Op::Grant("retake_one", "b"),
        Op::Grant("grant", "b"),
    ];
    let mut scenes = Vec::new();
    // Without a change of the row, the server checks no condition again.
    for open in [Op::Lock, Op::Touch] {
        scenes.extend(waiting.map(|op| Scene::new(Start::Held, open, &[op, Op::Tick])));
        scenes.push(Scene::new(Start::GivenOut, open, &[Op::Adopt("b"), Op::Tick]));
    }
    assert_explained(scenes, 240).await;
}

#[tokio::test]
async fn a_renewal_and_a_grant_of_an_ending_lease_have_an_order() {
    let scene = |renewal| {
        let others = [Op::Renew(renewal), Op::Grant("grant_one", "b"), Op::Tick];
        Scene::new(Start::Held, Op::Lock, &others)
    };
    assert_explained(["renew_early", "renew"].map(scene).into(), 120).await;
}

#[tokio::test]
async fn a_fence_lasts_until_its_transaction_ends_and_refuses_an_old_token() {
    let release = |statement| Op::Release(statement, "a");
    let fenced = |others: [Op; 2]| Scene::new(Start::Held, Op::Fence, &others);
    let mut scenes: Vec<Scene> =
        GRANTS.map(|grant| fenced([release("release_one"), Op::Grant(grant, "b")])).into();
    scenes.push(fenced([Op::Force, Op::Grant("grant_one", "b")]));
    scenes.push(fenced([release("release_unawaited"), Op::Grant("retake_one", "b")]).end(End::Rollback));
    scenes.push(Scene::new(Start::GivenOut, Op::Fence, &[Op::Adopt("b"), Op::Adopt("c")]));
    // The same holder has a later lease.
    let again = [release("release_one"), Op::Grant("grant_one", "a")];
    let others = [Op::Fence, Op::Grant("grant_one", "b")];
    scenes.push(Scene::new(Start::Held, Op::Lock, &others).close_with(&again));
    assert_explained(scenes, 108).await;
}

#[tokio::test]
async fn a_hold_that_is_given_out_is_adopted_once() {
    let adopt = Op::Adopt("b");
    let release = Op::Release("release_one", "a");
    let beside = [Op::Adopt("c"), Op::Renew("renew"), release, Op::Force];
    let mut scenes = behind_a_lock(Start::GivenOut, beside.map(|op| [adopt, op]));
    scenes.extend(behind_a_lock(Start::Held, [[Op::GiveOut, release], [Op::GiveOut, adopt]]));
    scenes.extend(ENDS.map(|end| Scene::new(Start::GivenOut, Op::Adopt("c"), &[adopt, Op::Force]).end(end)));
    assert_explained(scenes, 96).await;
}
