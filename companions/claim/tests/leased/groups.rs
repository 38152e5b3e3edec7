//! Groups and preconditions in Postgres.
use crate::common::*;
use leasehold_claim::group_number;
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimSpecBuilder, ClaimStore as _, Outcome, OwnerToken, PgClaims, RowKey, Table,
    Take, Unmet,
};
use sqlx::Executor as _;
use sqlx::postgres::{PgConnectOptions, PgPoolOptions};

fn grouped(spec: ClaimSpecBuilder) -> ClaimSpecBuilder {
    spec.group("entity").kind("kind").work(["document"]).grouped()
}

/// Returns the spec without `entity` in the work, because it is already the group's column.
fn plain() -> ClaimSpecBuilder {
    ClaimSpec::builder(Table::new("request").unwrap())
        .state("status", states())
        .lease_columns("owner", "epoch", "lease_until")
        .attempts("attempts_left")
        .group("entity")
        .kind("kind")
}

/// Thirty updates of one entity are one claim with one owner, and settle together.
#[tokio::test(flavor = "multi_thread")]
async fn all_rows_of_an_entity_are_one_claim_and_settle_together() {
    for spec in [grouped(request()), grouped(beside())] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world
            .run(
                "INSERT INTO request (entity) VALUES ('x'), (NULL);
            INSERT INTO request (entity) SELECT 'e' FROM generate_series(1, 30);
            INSERT INTO request (entity) VALUES ('x'), (NULL)",
            )
            .await;
        let claims = world.claims(spec);
        let taken = take(&claims, 2).await;
        assert_eq!(ids(&taken), [vec!["1", "33"], vec!["2"]]);
        assert_eq!(taken.claims[0].group.as_deref(), Some("x"));
        assert_eq!(taken.claims[1].group, None);
        let rest = claims.take(&Take::up_to(9).after(taken.cursor.clone())).await.unwrap();
        assert_eq!(ids(&rest), [(3..=32).map(|id| id.to_string()).collect::<Vec<_>>(), vec!["34".into()]]);
        let claim = &rest.claims[0];
        assert_eq!(claim.claim.rows.len(), 30);
        assert!(matches!(claim.claim.owner, OwnerToken::Uuid(_)));
        let owners = "SELECT count(DISTINCT owner) FROM (SELECT r.id, COALESCE(r.owner, l.owner) AS owner FROM request r
            LEFT JOIN lease l ON l.id = r.id::text WHERE r.entity = 'e') o WHERE owner IS NOT NULL";
        assert_eq!(world.number(owners).await, 1);
        // One of the thirty rows is lost, so none settles.
        world.run("UPDATE request SET status = 'new' WHERE id = 17").await;
        let partly = settle(&claims, &claim.claim, Outcome::Done).await;
        assert!(
            matches!(&partly, Err(ClaimError::Superseded { row, .. }) if *row == RowKey::new(17)),
            "{partly:?}"
        );
        assert_eq!(world.number("SELECT count(*) FROM request WHERE status = 'complete'").await, 0);
        world.run("UPDATE request SET status = 'in-progress' WHERE id = 17").await;
        settle(&claims, &claim.claim, Outcome::Done).await.unwrap();
        assert_eq!(world.number("SELECT count(*) FROM request WHERE status = 'complete'").await, 30);
    }
}

/// A claimed entity is skipped, counted as skipped, and not offered again in the pass. Its new rows wait.
#[tokio::test(flavor = "multi_thread")]
async fn a_group_in_progress_is_skipped() {
    for spec in [grouped(request()), grouped(beside())] {
        let world = World::new(&[REQUEST, SIDE].concat()).await;
        world.run("INSERT INTO request (entity) VALUES ('a'), ('b')").await;
        let claims = world.claims(spec);
        let first = take_one(&claims).await;
        world.run("INSERT INTO request (entity) VALUES ('a'), ('a'), ('b')").await;
        let next = take(&claims, 1).await;
        assert_eq!((ids(&next), next.skipped), (vec![vec!["2".to_owned(), "5".to_owned()]], 0));
        let none = take(&claims, 9).await;
        assert_eq!((none.claims.len(), none.skipped), (0, 1));
        assert!(claims.pending(&Take::up_to(1)).await.unwrap());
        let behind = claims.take(&Take::up_to(9).after(none.cursor.clone())).await.unwrap();
        assert_eq!(
            (behind.claims.len(), behind.skipped, behind.cursor),
            (0, 0, None),
            "offered twice in a pass"
        );
        settle(&claims, &first.claim, Outcome::Done).await.unwrap();
        assert_eq!(ids(&take(&claims, 9).await), [["3", "4"]]);
    }
}

/// A take locks the group's key before any row. The key blocks other takes, and a take sees all rows committed before its
/// lock.
#[tokio::test(flavor = "multi_thread")]
async fn the_lock_of_a_group_is_taken_before_its_rows() {
    let world = World::new(REQUEST).await;
    world.run("INSERT INTO request (entity) VALUES ('a'), ('b')").await;
    let claims = world.claims(grouped(request()));
    let mut other = world.pool.begin().await.unwrap();
    let key = group_number(world.number("'request'::regclass::oid").await, "a");
    other.execute(sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(key)).await.unwrap();
    let taken = bounded(take(&claims, 9)).await;
    assert_eq!((ids(&taken), taken.skipped), (vec![vec!["2".to_owned()]], 1));
    other.rollback().await.unwrap();
    assert_eq!(ids(&take(&claims, 9).await), [["1"]]);
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    assert_eq!(world.number(locks).await, 0);
}

/// With owners from a sequence, each group gets one number.
#[tokio::test(flavor = "multi_thread")]
async fn one_number_for_a_group() {
    let world = World::new(REQUEST).await;
    world
        .run(
            "CREATE SEQUENCE owners; ALTER TABLE request DROP owner; ALTER TABLE request ADD owner bigint;
        INSERT INTO request (entity) VALUES ('a'), ('b'), ('a')",
        )
        .await;
    let claims = world.claims(grouped(request()).owner_sequence(Table::new("owners").unwrap()));
    let taken = take(&claims, 9).await;
    assert_eq!(ids(&taken), [vec!["1", "3"], vec!["2"]]);
    assert_ne!(taken.claims[0].claim.owner, taken.claims[1].claim.owner);
    let all: Vec<_> = taken.claims.iter().map(|claim| (claim.claim.clone(), Outcome::Done)).collect();
    for answer in claims.settle(&all).await.unwrap() {
        answer.unwrap();
    }
}

/// An update waits until the create of its entity is done. The spec decides about an update whose create has failed or is
/// missing. A new, unlocked create is not done.
#[tokio::test(flavor = "multi_thread")]
async fn a_leased_update_waits_for_its_create() {
    // The state of the create (`-` if there is none), its attempts, and for `failed` and `missing`: is the update
    // taken, listed as blocked, pending?
    let nothing = (false, false, false);
    let cases = [
        ("complete", "NULL", [(true, false, true); 2]),
        ("new", "NULL", [nothing; 2]),
        ("in-progress", "NULL", [(false, false, true); 2]),
        ("error", "NULL", [(true, false, true), (false, true, false)]),
        ("exhausted", "0", [(true, false, true), (false, true, false)]),
        ("new", "0", [(true, false, true), (false, true, false)]),
        ("-", "NULL", [(true, false, true), (false, true, false)]),
    ];
    for is_grouped in [false, true] {
        for (create, attempts, expected) in cases {
            for (unmet, expected) in [Unmet::Run, Unmet::Block].into_iter().zip(expected) {
                let world = World::new(REQUEST).await;
                world
                    .run("INSERT INTO request (kind, entity) VALUES ('update', 'e'), ('update', 'other')")
                    .await;
                world.run("UPDATE request SET status = 'complete' WHERE entity = 'other'").await;
                if create != "-" {
                    world
                        .run(&format!(
                            "INSERT INTO request (kind, entity, status, attempts_left, ready_at)
                        VALUES ('create', 'e', '{create}', {attempts}, 'infinity')"
                        ))
                        .await;
                }
                let spec = plain().ready_at("ready_at").waits("update", "create", unmet, unmet);
                // Not grouped while the create is claimed, because then the rule of groups would block the update.
                let claims =
                    world.claims(if is_grouped && create != "in-progress" { spec.grouped() } else { spec });
                let what = format!("create {create} with {attempts} attempts, {unmet:?}");
                let (runs, is_blocked, is_pending) = expected;
                assert_eq!(claims.pending(&Take::up_to(1)).await.unwrap(), is_pending, "{what}");
                let blocked = claims.blocked(9).await.unwrap();
                assert_eq!(!blocked.is_empty(), is_blocked, "{what}: {blocked:?}");
                let taken = take(&claims, 9).await;
                assert_eq!(taken.claims.len(), usize::from(runs), "{what}: {taken:?}");
                assert_eq!(taken.skipped, 0, "{what}");
            }
        }
    }
}

/// Updates follow as soon as their create is done. A blocked update is taken if the create is done later after all.
#[tokio::test(flavor = "multi_thread")]
async fn the_create_comes_first_and_its_updates_follow() {
    for spec in [plain(), plain().grouped()] {
        let world = World::new(REQUEST).await;
        world
            .run(
                "INSERT INTO request (kind, entity) VALUES ('update', 'e'), ('create', 'e'), ('update', 'e')",
            )
            .await;
        let claims = world.claims(spec.waits("update", "create", Unmet::Block, Unmet::Block));
        let create = take(&claims, 9).await;
        assert_eq!(flat(&create), [2]);
        assert!(take(&claims, 9).await.claims.is_empty());
        settle(&claims, &create.claims[0].claim, Outcome::Failed("no".into())).await.unwrap();
        assert!(take(&claims, 9).await.claims.is_empty());
        assert_eq!(claims.blocked(9).await.unwrap(), [RowKey::new(1), RowKey::new(3)]);
        assert!(!claims.pending(&Take::up_to(1)).await.unwrap(), "a blocked row keeps nobody from idling");
        world.run("UPDATE request SET status = 'complete' WHERE id = 2").await;
        assert_eq!(flat(&take(&claims, 9).await), [1, 3]);
    }
}

/// A statement that the planner considers expensive is not compiled (JIT) at each execution (docs/hazards.md H50).
#[tokio::test(flavor = "multi_thread")]
async fn statements_of_groups_are_not_compiled() {
    let world = World::new(REQUEST).await;
    world
        .run(
            "ALTER TABLE request ADD jit text;
        CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
            'BEGIN NEW.jit := current_setting(''jit''); RETURN NEW; END';
        CREATE TRIGGER note BEFORE UPDATE ON request FOR EACH ROW EXECUTE FUNCTION note();
        INSERT INTO request (entity) VALUES ('a'), ('b')",
        )
        .await;
    let options = world.database.url().parse::<PgConnectOptions>().unwrap().options([("jit", "on")]);
    let pool = PgPoolOptions::new().max_connections(1).connect_with(options).await.unwrap();
    let claims = PgClaims::new(pool.clone(), grouped(request()).build().unwrap());
    assert_eq!(take(&claims, 2).await.claims.len(), 2);
    assert_eq!(world.text("SELECT string_agg(jit, ',') FROM request").await, "off,off");
    // The caller's own statements keep their setting.
    let own: String = sqlx::query_scalar("SHOW jit").fetch_one(&pool).await.unwrap();
    assert_eq!(own, "on");
}
