//! Every permutation of concurrent statements has an order that a model of the key explains.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "../src/sql.rs"]
mod sql;

use leasehold_postgres::table::{Dialect, Parts};
use sql::MUTEXES;
use test_stores::permutations::{Op, PartOp, Scene, Start, mutant, part_scenes, permute, scenes};

async fn assert_explained(scenes: Vec<Scene>, permutations: usize) {
    permute(&MUTEXES, &[], &scenes).await.assert_explained(permutations);
}

#[tokio::test]
async fn of_two_grants_of_a_free_row_at_most_one_is_carried_out() {
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
    assert_explained(scenes::former_holder(&[]), 72).await;
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
async fn a_part_is_taken_once() {
    assert_explained(part_scenes::joined(), 192).await;
}

#[tokio::test]
async fn a_conversion_and_a_request_for_a_part_exclude_each_other() {
    assert_explained(part_scenes::converted(), 192).await;
}

#[tokio::test]
async fn a_conversion_behind_an_open_request_follows_its_end() {
    assert_explained(part_scenes::behind_open_request(), 120).await;
}

#[tokio::test]
async fn no_statement_for_one_holder_grants_a_key_with_parts() {
    assert_explained(part_scenes::beside_single_holders(), 168).await;
}

#[tokio::test]
async fn a_part_ends_once() {
    assert_explained(part_scenes::ended_parts(), 72).await;
}

/// A part that was taken and released during the wait for the gate blocks the conversion.
#[tokio::test]
async fn mutant_a_conversion_that_does_not_find_changed_parts_is_not_explained() {
    let parts = MUTEXES.parts.unwrap();
    let unchanged = "v.ctid = p.at OFFSET 0";
    let convert = mutant(parts.convert, unchanged, "v.key = $1::text AND v.of >= 0 LIMIT 1");
    let dialect = Dialect { parts: Some(Parts { convert, ..parts }), ..MUTEXES };
    let others = [
        Op::Part(PartOp::Convert("convert", "w")),
        Op::Part(PartOp::Join("join", 2, "b")),
        Op::Part(PartOp::Release("release_one part", "b")),
    ];
    let verdict = permute(&dialect, &[], &[Scene::new(Start::PermitsFree, Op::Lock, &others)]).await;
    assert!(!verdict.unexplained.is_empty(), "explained, although a semaphore loses a part");
}

/// Each mutant does in some permutation something that no order explains.
#[tokio::test]
async fn mutant_statements_are_not_explained() {
    let grants = |statement| [Op::Grant(statement, "b"), Op::Grant(statement, "c")];
    let taken_over = [Op::Force, Op::Grant("grant_one", "b")];
    let mutants = [
        (
            "the fast grant decides by its old snapshot",
            Dialect {
                retake_one: mutant(
                    MUTEXES.retake_one,
                    "l.key = $1::text AND NOT l.acquired AND l.cooldown_us IS NULL",
                    "l.key = (SELECT o.key FROM {schema}.mutex o WHERE o.key = $1::text AND NOT o.acquired)",
                ),
                ..MUTEXES
            },
            Scene::new(Start::Free, Op::Lock, &grants("retake_one")),
        ),
        (
            "a grant does not check the row that it has waited for",
            Dialect {
                grant_one: mutant(
                    MUTEXES.grant_one,
                    "WHERE NOT l.acquired AND (",
                    "WHERE (true OR NOT l.acquired) AND (",
                ),
                ..MUTEXES
            },
            Scene::new(Start::Free, Op::Lock, &grants("grant_one")),
        ),
        (
            "a grant of several keys writes rows by key instead of by place",
            Dialect {
                grant_free: mutant(
                    mutant(MUTEXES.grant_free, "        FOR UPDATE\n", ""),
                    "l.ctid = s.at AND (l.key = s.key) IS TRUE",
                    "l.key = s.key AND s.at IS NOT NULL",
                ),
                ..MUTEXES
            },
            Scene::new(Start::Free, Op::Lock, &grants("grant_free")),
        ),
        (
            "a token is drawn before the row is locked",
            Dialect {
                grant_one: mutant(
                    MUTEXES.grant_one,
                    "    token = nextval({token}),\n",
                    "    token = excluded.token,\n",
                ),
                ..MUTEXES
            },
            Scene::new(Start::Free, Op::Lock, &[Op::Grant("grant_one", "b")])
                .close_with(&[Op::Grant("grant_one", "c"), Op::Release("release_one", "c")]),
        ),
        (
            "a release releases the hold of any holder",
            Dialect {
                release_one: mutant(
                    MUTEXES.release_one,
                    "l.holder = $2::text AND l.acquired",
                    "$2::text <> '' AND l.acquired",
                ),
                ..MUTEXES
            },
            Scene::new(Start::Held, Op::Lock, &[Op::Release("release_one", "a")]).close_with(&taken_over),
        ),
        (
            "a forced release releases the hold of any holder",
            Dialect {
                force: mutant(
                    MUTEXES.force,
                    "l.holder = $2::text AND l.acquired",
                    "$2::text <> '' AND l.acquired",
                ),
                ..MUTEXES
            },
            Scene::new(Start::Held, Op::Lock, &[Op::Force]).close_with(&taken_over),
        ),
        (
            "a purge does not check the row that it has waited for",
            Dialect { purge: mutant(MUTEXES.purge, "            FOR UPDATE SKIP LOCKED\n", ""), ..MUTEXES },
            Scene::new(Start::Old, Op::Grant("grant_one", "b"), &[Op::Purge]),
        ),
    ];
    for (damage, dialect, scene) in mutants {
        let verdict = permute(&dialect, &[], &[scene]).await;
        assert!(!verdict.unexplained.is_empty(), "explained, although {damage}");
    }
}
