//! Wrong statements, whose permutations the model does not explain.

use leasehold_postgres::table::Dialect;
use test_stores::permutations::{Op, Scene, Start, mutant, permute};

use crate::sql::{FENCE, LEASES};

/// Fails if the model explains every permutation of `scene`.
async fn assert_damage(damage: &str, dialect: Dialect, fence: &str, scene: Scene) {
    let verdict = permute(&dialect, &[("fence", fence)], &[scene]).await;
    assert!(!verdict.unexplained.is_empty(), "explained, although {damage}");
}

/// Returns scenes of two grants behind a lock.
fn two_grants(statement: &'static str) -> Scene {
    Scene::new(Start::Free, Op::Lock, &[Op::Grant(statement, "b"), Op::Grant(statement, "c")])
}

/// Returns a scene in which another client is granted the key before `op` can lock the row.
fn taken_over(op: Op) -> Scene {
    Scene::new(Start::Held, Op::Lock, &[op]).close_with(&[Op::Force, Op::Grant("grant_one", "b")])
}

/// Returns a scene of a fence, a release, and a grant.
fn fenced(grant: &'static str) -> Scene {
    let others = [Op::Release("release_one", "a"), Op::Grant(grant, "b")];
    Scene::new(Start::Held, Op::Fence, &others)
}

#[tokio::test]
async fn mutant_grants_that_decide_by_an_old_snapshot_are_not_explained() {
    let fast =
        mutant(LEASES.retake_one, "l.ctid = (\n    SELECT l.ctid FROM", "l.key = (\n    SELECT l.key FROM");
    let dialect = Dialect { retake_one: mutant(fast, "    FOR UPDATE\n", ""), ..LEASES };
    assert_damage("the fast grant writes by key", dialect, FENCE, two_grants("retake_one")).await;

    let ends = "WHERE (l.released OR l.expires_at";
    let grant_one = mutant(LEASES.grant_one, ends, "WHERE (true OR l.released OR l.expires_at");
    let dialect = Dialect { grant_one, ..LEASES };
    assert_damage("a grant writes any row", dialect, FENCE, two_grants("grant_one")).await;

    let unlocked = mutant(LEASES.grant_free, "        FOR UPDATE\n", "");
    let place = "l.ctid = s.at AND (l.key = s.key) IS TRUE";
    let dialect =
        Dialect { grant_free: mutant(unlocked, place, "l.key = s.key AND s.at IS NOT NULL"), ..LEASES };
    assert_damage("a grant of several keys writes by key", dialect, FENCE, two_grants("grant_free")).await;

    let adopt = mutant(LEASES.adopt.unwrap(), "    FOR UPDATE\n", "");
    let dialect = Dialect { adopt: Some(adopt), ..LEASES };
    let scene = Scene::new(Start::GivenOut, Op::Lock, &[Op::Adopt("b"), Op::Adopt("c")]);
    assert_damage("an adoption does not lock the row", dialect, FENCE, scene).await;

    let purge = mutant(LEASES.purge, "            FOR UPDATE SKIP LOCKED\n", "");
    let scene = Scene::new(Start::Old, Op::Grant("grant_one", "b"), &[Op::Purge]);
    let dialect = Dialect { purge, ..LEASES };
    assert_damage("a purge does not check the locked row", dialect, FENCE, scene).await;
}

#[tokio::test]
async fn mutant_tokens_that_are_drawn_before_the_lock_are_not_explained() {
    let drawn = mutant(LEASES.grant_one, "    token = nextval({token}),\n", "    token = excluded.token,\n");
    let passed = [Op::Grant("grant_one", "c"), Op::Release("release_one", "c")];
    let scene = Scene::new(Start::Free, Op::Lock, &[Op::Grant("grant_one", "b")]).close_with(&passed);
    assert_damage("a token is proposed", Dialect { grant_one: drawn, ..LEASES }, FENCE, scene).await;
}

#[tokio::test]
async fn mutant_statements_without_the_holder_are_not_explained() {
    let (holder, any) = ("l.holder = $2::text AND NOT l.released", "$2::text <> '' AND NOT l.released");
    let dialect = Dialect { release_one: mutant(LEASES.release_one, holder, any), ..LEASES };
    let scene = taken_over(Op::Release("release_one", "a"));
    assert_damage("a release ends any hold", dialect, FENCE, scene).await;

    let dialect = Dialect { force: mutant(LEASES.force, holder, any), ..LEASES };
    assert_damage("a forced release ends any hold", dialect, FENCE, taken_over(Op::Force)).await;
}

#[tokio::test]
async fn mutant_a_renewal_that_reads_the_clock_before_the_lock_is_not_explained() {
    let renew = mutant(LEASES.renew, "        FOR NO KEY UPDATE{skip}\n", "");
    let scene = Scene::new(Start::Held, Op::Touch, &[Op::Renew("renew"), Op::Tick]);
    assert_damage("it revives a lease", Dialect { renew, ..LEASES }, FENCE, scene).await;
}

#[tokio::test]
async fn mutant_fences_that_do_not_lock_or_compare_are_not_explained() {
    let unlocked = mutant(FENCE, "    FOR KEY SHARE OF l\n", "");
    assert_damage("a fence does not lock the row", LEASES, unlocked, fenced("grant_one")).await;

    let retake_one = mutant(LEASES.retake_one, "    FOR UPDATE\n", "    FOR NO KEY UPDATE\n");
    let dialect = Dialect { retake_one, ..LEASES };
    assert_damage("a grant walks through a fence", dialect, FENCE, fenced("retake_one")).await;

    let equal = "l.token OPERATOR(pg_catalog.=) $3";
    let older = mutant(FENCE, equal, "l.token OPERATOR(pg_catalog.>=) $3");
    let again = [Op::Release("release_one", "a"), Op::Grant("grant_one", "a")];
    let scene = Scene::new(Start::Held, Op::Lock, &[Op::Fence]).close_with(&again);
    assert_damage("a fence accepts a later lease", LEASES, older, scene).await;
}
