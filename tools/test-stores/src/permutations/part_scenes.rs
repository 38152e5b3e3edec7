//! Scenes of shared holds and permits, of both table stores.

use super::scenes::{ENDS, GRANTS};
use super::{Op, PartOp, Scene, Start};

const fn join(of: i32, holder: &'static str) -> Op {
    Op::Part(PartOp::Join("join", of, holder))
}

const fn enter(of: i32, holder: &'static str) -> Op {
    Op::Part(PartOp::Enter(of, holder))
}

const fn convert(holder: &'static str) -> Op {
    Op::Part(PartOp::Convert("convert", holder))
}

const fn release(statement: &'static str, holder: &'static str) -> Op {
    Op::Part(PartOp::Release(statement, holder))
}

/// Requests for parts behind an open request, in both ends: 16 scenes.
#[must_use]
pub fn joined() -> Vec<Scene> {
    let mut scenes = Vec::new();
    for end in ENDS {
        for (start, of) in [(Start::SharedFree, 0), (Start::PermitsFree, 2)] {
            for others in [[join(of, "b"), join(of, "d")], [enter(of, "b"), join(of, "d")]] {
                scenes.push(Scene::new(start, join(of, "c"), &others).end(end));
            }
            let many = Op::Part(PartOp::Join("join_many", of, "b"));
            scenes.push(Scene::new(start, many, &[join(2 - of, "c"), join(of, "d")]).end(end));
        }
        for start in [Start::Nothing, Start::Free] {
            scenes.push(Scene::new(start, enter(0, "c"), &[enter(0, "b"), enter(2, "d")]).end(end));
        }
    }
    scenes
}

/// A conversion that waits with its snapshot while requests take a part, add one, or take and release one: 8 scenes.
#[must_use]
pub fn converted() -> Vec<Scene> {
    let mut scenes = Vec::new();
    for start in [Start::SharedFree, Start::PermitsFree] {
        let of = if start == Start::SharedFree { 0 } else { 2 };
        for others in
            [[join(of, "b"), convert("w")], [enter(0, "b"), convert("w")], [convert("w"), convert("v")]]
        {
            scenes.push(Scene::new(start, Op::Lock, &others));
        }
        let taken_and_released = [convert("w"), join(of, "b"), release("release_one part", "b")];
        scenes.push(Scene::new(start, Op::Lock, &taken_and_released));
    }
    scenes
}

/// A conversion behind an open request that ends in either way, or behind the mark of a writer: 10 scenes.
#[must_use]
pub fn behind_open_request() -> Vec<Scene> {
    let opened = [Op::Part(PartOp::Open), Op::Part(PartOp::MarkWriter)];
    let opens = [join(0, "b"), enter(0, "b"), convert("v")].into_iter().chain(opened);
    let scene =
        |open| ENDS.map(|end| Scene::new(Start::SharedFree, open, &[convert("w"), join(0, "d")]).end(end));
    opens.flat_map(scene).collect()
}

/// The statements for one holder, which grant no key that has parts in use: 14 scenes.
#[must_use]
pub fn beside_single_holders() -> Vec<Scene> {
    let shared = GRANTS.map(|grant| {
        let others = [Op::Grant(grant, "w"), release("release_one part", "a")];
        Scene::new(Start::Shared, Op::Lock, &others)
    });
    let converted = GRANTS.map(|grant| {
        let others = [Op::Grant(grant, "w"), convert("v")];
        Scene::new(Start::SharedFree, Op::Lock, &others)
    });
    let entered = ENDS.map(|end| {
        let others = [enter(0, "b"), enter(2, "d")];
        Scene::new(Start::Free, Op::Grant("grant_one", "w"), &others).end(end)
    });
    let granted = ENDS.map(|end| {
        let others = [Op::Grant("grant_one", "w"), Op::Grant("retake_one", "v")];
        Scene::new(Start::Free, enter(2, "b"), &others).end(end)
    });
    shared.into_iter().chain(converted).chain(entered).chain(granted).collect()
}

/// Ends of a part behind a lock of the part: 6 scenes.
#[must_use]
pub fn ended_parts() -> Vec<Scene> {
    let renew = Op::Part(PartOp::Renew("renew part"));
    let force = Op::Part(PartOp::Force);
    let pairs = [
        [release("release_unawaited part", "a"), renew],
        [release("release_one part", "a"), force],
        [release("release part", "a"), renew],
        [release("release_unlocked part", "a"), join(0, "b")],
        [force, renew],
        [release("release_one part", "a"), convert("w")],
    ];
    pairs.map(|others| Scene::new(Start::Shared, Op::Part(PartOp::Lock(0)), &others)).into()
}
