//! The statements of shared leases and permits.

use leasehold_postgres::table::{Dialect, Parts};
use test_stores::permutations::{End, Op, PartOp, Scene, Start, mutant, part_scenes, permute};

use crate::sql::{FENCE_PART, LEASES};

const FENCED: &[(&str, &str)] = &[("fence part", FENCE_PART)];

async fn assert_explained(scenes: Vec<Scene>, permutations: usize) {
    permute(&LEASES, FENCED, &scenes).await.assert_explained(permutations);
}

fn parts() -> Parts {
    LEASES.parts.unwrap()
}

const JOIN: Op = Op::Part(PartOp::Join("join", 0, "b"));
const CONVERT: Op = Op::Part(PartOp::Convert("convert", "w"));
const RELEASE: Op = Op::Part(PartOp::Release("release_one part", "a"));
const FENCE: Op = Op::Part(PartOp::Fence);

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

#[tokio::test]
async fn a_part_that_ends_during_a_wait_is_not_revived() {
    let lock = Op::Part(PartOp::Lock(0));
    let renewals = ["renew_early part", "renew part"].map(|statement| Op::Part(PartOp::Renew(statement)));
    let others = [RELEASE, Op::Part(PartOp::Force), JOIN, CONVERT];
    let ticks = renewals.into_iter().chain(others).map(|op| Scene::new(Start::Shared, lock, &[op, Op::Tick]));
    let ended = renewals.map(|op| Scene::new(Start::SharedEnded, lock, &[op, CONVERT]));
    assert_explained(ticks.chain(ended).collect(), 96).await;
}

#[tokio::test]
async fn a_writer_waits_for_the_fence_of_a_part() {
    let mut scenes = vec![Scene::new(Start::Shared, FENCE, &[RELEASE, CONVERT])];
    scenes.push(Scene::new(Start::Shared, FENCE, &[RELEASE, JOIN]).end(End::Rollback));
    scenes.push(Scene::new(Start::Permits, FENCE, &[Op::Part(PartOp::Force), CONVERT]));
    assert_explained(scenes, 36).await;
}

/// Fails if the model explains every permutation of `scene`.
async fn assert_damage(damage: &str, parts: Parts, scene: Scene) {
    let dialect = Dialect { parts: Some(parts), ..LEASES };
    let verdict = permute(&dialect, FENCED, &[scene]).await;
    assert!(!verdict.unexplained.is_empty(), "explained, although {damage}");
}

const FOUND: &str = "v.ctid = g.at OFFSET 0";
const WRITES: &str = "WHERE l.ctid = g.at AND (l.key = $1::text) IS TRUE AND c.all_free";
const COUNTS: &str = "
            = (SELECT count(*) FROM {schema}.lease_part x WHERE x.key = $1::text AND x.of >= 0) AS all_free";
const UNCHANGED: &str = "v.ctid = p.at OFFSET 0";
const COUNTS_AGAIN: &str = "
    AND (SELECT count(*) FROM d) = (SELECT count(*) FROM p)";

#[tokio::test]
async fn mutant_conversions_that_decide_by_an_old_snapshot_are_not_explained() {
    let convert = mutant(parts().convert, FOUND, "v.key = $1::text OFFSET 0");
    let convert = mutant(convert, WRITES, "WHERE l.key = $1::text AND g.at IS NOT NULL AND c.all_free");
    let entering = Scene::new(Start::SharedFree, Op::Part(PartOp::Enter(0, "b")), &[CONVERT]);
    assert_damage("the gate is found by key", Parts { convert, ..parts() }, entering).await;

    let convert = mutant(parts().convert, COUNTS, " IS NOT NULL AS all_free");
    let convert = mutant(convert, COUNTS_AGAIN, "");
    let joining = Scene::new(Start::SharedFree, Op::Lock, &[CONVERT, JOIN]);
    assert_damage("no part is counted", Parts { convert, ..parts() }, joining).await;

    let released = Op::Part(PartOp::Release("release_one part", "b"));
    let taken = |start, of| {
        let join = Op::Part(PartOp::Join("join", of, "b"));
        Scene::new(start, Op::Lock, &[CONVERT, join, released])
    };
    let locked = mutant(parts().convert, UNCHANGED, "v.key = $1::text AND v.of >= 0 LIMIT 1");
    let scene = taken(Start::PermitsFree, 2);
    assert_damage("a semaphore loses a part", Parts { convert: locked, ..parts() }, scene).await;

    let convert = mutant(locked, COUNTS_AGAIN, "");
    let scene = taken(Start::SharedFree, 0);
    assert_damage("a part was taken and released", Parts { convert, ..parts() }, scene).await;

    let convert = mutant(parts().convert, FOUND, "v.key = $1::text OFFSET 0");
    let marking = Scene::new(Start::SharedFree, Op::Part(PartOp::MarkWriter), &[CONVERT]);
    assert_damage("parts are put out of use beside their gate", Parts { convert, ..parts() }, marking).await;
}

#[tokio::test]
async fn mutant_a_conversion_that_does_not_lock_the_parts_is_not_explained() {
    let unlocked = "        ORDER BY p.part\n        FOR UPDATE{skip}\n";
    let convert =
        mutant(parts().convert, unlocked, "        ORDER BY p.part\n        FOR NO KEY UPDATE{skip}\n");
    let fenced = Scene::new(Start::Shared, FENCE, &[RELEASE, CONVERT]);
    assert_damage("a writer walks through a fence", Parts { convert, ..parts() }, fenced).await;
}

#[tokio::test]
async fn mutant_joins_of_other_parts_are_not_explained() {
    let of = "p.of = $6::integer AND (p.released";
    let join = mutant(parts().join, of, "p.of <> $6::integer + 1000 AND (p.released");
    let scene = Scene::new(Start::SharedFree, Op::Lock, &[JOIN, Op::Part(PartOp::Join("join", 0, "c"))]);
    assert_damage("a part out of use is taken", Parts { join, ..parts() }, scene).await;
}

#[tokio::test]
async fn mutant_a_new_part_that_replaces_another_is_not_explained() {
    let unused = "WHERE p.of = -1\nRETURNING p.token, p.part";
    let enter_shared = mutant(parts().enter_shared, unused, "RETURNING p.token, p.part");
    let scene = Scene::new(
        Start::SharedFree,
        Op::Part(PartOp::Enter(0, "b")),
        &[Op::Part(PartOp::Enter(0, "c")), Op::Part(PartOp::Enter(0, "d"))],
    );
    assert_damage("two have one part", Parts { enter_shared, ..parts() }, scene).await;
}
