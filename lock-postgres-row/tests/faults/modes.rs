//! Shared holds and permits of the row store.

use leasehold_api::{HolderId, LockAdmin as _, LockKey, Mode};
use leasehold_engine::{Attempt, Backend as _, HoldRef, Request};
use leasehold_postgres_row::{PgConfig, RowBackend, RowConfig};
use test_servers::{Database, fresh_database};
use test_stores::parts;

use crate::sql::MUTEXES;

fn request(name: &str, serial: u64) -> Request {
    Request::new(LockKey::new(name).unwrap(), HolderId::from_parts(0xfeed, serial))
}

fn shared(serial: u64) -> Request {
    let mut request = request("k", serial);
    request.mode = Mode::Shared;
    request
}

async fn backend(database: &Database) -> RowBackend {
    RowConfig::new(PgConfig::from_url(database.url()).unwrap().install_schema(true)).backend().await.unwrap()
}

async fn granted(backend: &RowBackend, request: Request) -> HoldRef {
    let hold = request.hold();
    assert!(matches!(backend.acquire(vec![request]).await.remove(0).unwrap(), Attempt::Granted(_)));
    hold
}

#[tokio::test]
async fn a_dead_reader_blocks_writers_alone_until_it_is_released_by_force() {
    let database = fresh_database().await;
    let (dying, alive) = (backend(&database).await, backend(&database).await);
    let dead = granted(&dying, shared(1)).await;
    dying.abort();
    drop(dying);
    let reader = granted(&alive, shared(2)).await;
    assert!(alive.release(vec![reader]).await.remove(0).unwrap().was_held);
    let contended = alive.acquire(vec![request("k", 3)]).await.remove(0).unwrap();
    assert!(matches!(contended, Attempt::Contended(_)), "{contended:?}");
    let shown: Vec<_> =
        alive.inspect(&dead.key).await.unwrap().holders.iter().map(|hold| hold.holder).collect();
    assert_eq!(shown, [Some(dead.holder)]);
    assert!(alive.force_release(&dead.key, dead.holder).await.unwrap());
    let writer = granted(&alive, request("k", 4)).await;
    assert!(!alive.release(vec![dead]).await.remove(0).unwrap().was_held);
    assert!(alive.release(vec![writer]).await.remove(0).unwrap().was_held);
    alive.close().await;
}

#[tokio::test]
async fn readers_that_enter_at_once_and_skip_different_parts_each_get_one() {
    parts::readers_that_enter_at_once_and_skip_different_parts_each_get_one(&MUTEXES).await;
}

#[tokio::test]
async fn a_permit_beside_readers_ends() {
    let database = fresh_database().await;
    let backend = backend(&database).await;
    parts::a_permit_beside_readers_ends(&backend, &database, "mutex", request).await;
    backend.close().await;
}

#[tokio::test]
async fn a_row_that_an_operator_holds_is_no_gate() {
    let database = fresh_database().await;
    let backend = backend(&database).await;
    parts::a_row_that_an_operator_holds_is_no_gate(&backend, &database, "mutex", request).await;
    backend.close().await;
}

#[tokio::test]
async fn readers_of_locked_keys_do_not_all_wait() {
    let database = fresh_database().await;
    let backend = backend(&database).await;
    parts::readers_of_locked_keys_do_not_all_wait(&backend, &database, "mutex", request).await;
    backend.close().await;
}

#[tokio::test]
async fn a_purge_ends_behind_the_last_idle_key_and_the_last_old_part() {
    let database = fresh_database().await;
    let backend = backend(&database).await;
    parts::a_purge_ends_behind_the_last_idle_key_and_the_last_old_part(&backend, &database, "mutex").await;
    backend.close().await;
}

#[tokio::test]
async fn a_semaphore_with_the_parts_of_another_one_gets_its_own() {
    let database = fresh_database().await;
    let backend = backend(&database).await;
    parts::a_semaphore_with_the_parts_of_another_one_gets_its_own(&backend, &database, "mutex", request)
        .await;
    backend.close().await;
}
