//! Cyclic states, in which `done` is also the initial state. Postgres and memory behave the same.
use leasehold_claim::{
    ClaimError, ClaimSpec, ClaimStore, MemoryClaims, MemoryRow, Outcome, PgClaims, Retention, State, States,
    Table, Take,
};
use sqlx::{Executor as _, PgPool};

fn states() -> States {
    States::text(["failed", "done"], "done").taken("in_progress").others(["paused"])
}

fn spec(states: States) -> Result<ClaimSpec, ClaimError> {
    ClaimSpec::builder(Table::new("task")?)
        .state("status", states)
        .lease_columns("owner", "epoch", "lease_until")
        .build()
}

/// Takes rows from `done` and returns them to `done` several times. A take uses only the requested states.
async fn goes_round(store: &dyn ClaimStore) {
    let take = |from: &[&str]| Take::up_to(5).from(from.iter().map(|name| State::new(*name)));
    assert!(store.take(&take(&["failed"])).await.unwrap().claims.is_empty());
    for round in 1..=3 {
        let taken = store.take(&take(&["done"])).await.unwrap().claims;
        assert_eq!((taken.len(), taken[0].epoch()), (1, Some(round)));
        assert!(store.take(&take(&["done", "failed"])).await.unwrap().claims.is_empty(), "it is in progress");
        let paused = store.settle_one(&taken[0].claim, Outcome::To(State::new("paused"))).await;
        assert!(matches!(paused, Err(ClaimError::IllegalTransition { .. })), "{paused:?}");
        store.settle_one(&taken[0].claim, Outcome::Done).await.unwrap();
    }
    let taken = store.take(&take(&["done"])).await.unwrap().claims;
    store.settle_one(&taken[0].claim, Outcome::To(State::new("failed"))).await.unwrap();
    assert!(store.take(&take(&["done"])).await.unwrap().claims.is_empty());
    assert_eq!(store.take(&take(&["failed"])).await.unwrap().claims.len(), 1);
}

#[tokio::test]
async fn done_can_be_the_first_state_on_the_server() {
    let database = test_servers::fresh_database().await;
    let pool = PgPool::connect(database.url()).await.unwrap();
    let table = "CREATE TABLE task (id bigint PRIMARY KEY, status text NOT NULL DEFAULT 'done', owner uuid,
        epoch bigint NOT NULL DEFAULT 0, lease_until timestamptz); INSERT INTO task (id) VALUES (1)";
    pool.execute(sqlx::raw_sql(table)).await.unwrap();
    goes_round(&PgClaims::new(pool, spec(states().cyclic()).unwrap())).await;
}

#[tokio::test]
async fn done_can_be_the_first_state_in_memory() {
    let claims = MemoryClaims::new(spec(states().cyclic()).unwrap()).unwrap();
    claims.insert(MemoryRow::new(1).with_state("done")).unwrap();
    goes_round(&claims).await;
}

#[test]
fn a_circle_must_be_meant_and_is_never_old() {
    let unsaid = spec(states()).unwrap_err().to_string();
    assert!(unsaid.contains("for ever") && unsaid.contains("cyclic"), "{unsaid}");
    let aged = ClaimSpec::builder(Table::new("task").unwrap())
        .state("status", states().cyclic())
        .retention(Retention::DeleteOnSettle)
        .build();
    assert!(aged.unwrap_err().to_string().contains("keep them all"));
}
