//! Scenes of both table stores.

use super::{End, Op, Scene, Start};

/// The statements that grant.
pub const GRANTS: [&str; 5] = ["grant_one", "retake_one", "grant_free", "grant", "grant skipping"];

/// The ends of the open transaction.
pub const ENDS: [End; 2] = [End::Commit, End::Rollback];

/// Two grants of a free key behind a lock: 15 scenes.
#[must_use]
pub fn free_key() -> Vec<Scene> {
    let mut scenes = Vec::new();
    for (at, first) in GRANTS.into_iter().enumerate() {
        for second in GRANTS.into_iter().skip(at) {
            let others = [Op::Grant(first, "b"), Op::Grant(second, "c")];
            scenes.push(Scene::new(Start::Free, Op::Lock, &others));
        }
    }
    scenes
}

/// Two grants behind a grant that ends in either way: 16 scenes.
#[must_use]
pub fn open_grant() -> Vec<Scene> {
    let others = [Op::Grant("retake_one", "b"), Op::Grant("grant", "d")];
    let inserting = ["grant_one", "grant", "grant skipping"].map(|statement| (Start::Nothing, statement));
    let granting = GRANTS.map(|statement| (Start::Free, statement));
    let granting = granting.into_iter().chain(inserting);
    let scene =
        |(start, statement)| ENDS.map(|end| Scene::new(start, Op::Grant(statement, "c"), &others).end(end));
    granting.flat_map(scene).collect()
}

/// Two grants behind a transaction in which another client is granted the key and releases it: 5 scenes.
#[must_use]
pub fn tokens() -> Vec<Scene> {
    let passed = [Op::Grant("grant_one", "c"), Op::Release("release_one", "c")];
    let scene = |statement| {
        let others = [Op::Grant(statement, "b"), Op::Grant("grant_one", "d")];
        Scene::new(Start::Free, Op::Lock, &others).close_with(&passed)
    };
    GRANTS.map(scene).into()
}

/// A statement of a holder and a grant behind a transaction in which an operator releases the hold and another client is
/// granted the key: 6 scenes, and one for each of `more`.
#[must_use]
pub fn former_holder(more: &[Op]) -> Vec<Scene> {
    let releases = ["release_unawaited", "release_one", "release", "release_unlocked"];
    let releases = releases.map(|statement| Op::Release(statement, "a"));
    let statements = releases.iter().chain(&[Op::Renew("renew"), Op::Force]).chain(more);
    let taken_over = [Op::Force, Op::Grant("grant_one", "b")];
    let scene = |op: &Op| {
        let others = [*op, Op::Grant("retake_one", "c")];
        Scene::new(Start::Held, Op::Lock, &others).close_with(&taken_over)
    };
    statements.map(scene).collect()
}

/// Two further ends of a hold behind a release that ends in either way: 6 scenes.
#[must_use]
pub fn released_twice() -> Vec<Scene> {
    let release = |statement| Op::Release(statement, "a");
    let scenes = [
        (release("release_one"), [Op::Force, Op::Renew("renew")]),
        (Op::Force, [release("release_one"), Op::Renew("renew")]),
        (release("release_unawaited"), [Op::Force, release("release_unlocked")]),
    ];
    let scene =
        |(open, others): (Op, [Op; 2])| ENDS.map(|end| Scene::new(Start::Held, open, &others).end(end));
    scenes.into_iter().flat_map(scene).collect()
}

/// A purge and grants of an old row: 7 scenes.
#[must_use]
pub fn purged() -> Vec<Scene> {
    let grant = Op::Grant;
    let purge_waits = [Op::Lock, grant("grant_one", "b"), grant("retake_one", "b")];
    let purge_waits =
        purge_waits.map(|open| Scene::new(Start::Old, open, &[Op::Purge, grant("grant_one", "c")]));
    let grants_wait = [
        [grant("grant_one", "b"), grant("retake_one", "c")],
        [grant("grant", "b"), grant("grant_free", "c")],
    ];
    let scene = |others: [Op; 2]| ENDS.map(|end| Scene::new(Start::Old, Op::Purge, &others).end(end));
    purge_waits.into_iter().chain(grants_wait.into_iter().flat_map(scene)).collect()
}

/// Three statements behind a lock: 3 scenes.
#[must_use]
pub fn three_sessions() -> Vec<Scene> {
    let grant = Op::Grant;
    vec![
        Scene::new(
            Start::Free,
            Op::Lock,
            &[grant("grant_one", "b"), grant("retake_one", "c"), grant("grant", "d")],
        ),
        Scene::new(
            Start::Held,
            Op::Lock,
            &[Op::Release("release_one", "a"), Op::Force, grant("grant_one", "b")],
        ),
        Scene::new(Start::Old, Op::Lock, &[Op::Purge, grant("grant_one", "b"), grant("retake_one", "c")]),
    ]
}
