use std::time::Duration;

use cookbook::transaction::begin;
use sqlx::postgres::PgPoolOptions;
use test_bounds::within;

use crate::support::*;

#[tokio::test(flavor = "multi_thread")]
async fn a_dropped_begin_leaves_no_connection_in_a_transaction() {
    let db = database("").await;
    let pool = PgPoolOptions::new().max_connections(1).connect(db.url()).await.unwrap();
    for polls in 0..300 {
        let mut begun = Box::pin(begin(&pool));
        // Drops the future at each of its awaits, and at different moments of the server's work.
        for _ in 0..polls % 8 {
            if futures_util::poll!(&mut begun).is_ready() {
                break;
            }
            tokio::time::sleep(Duration::from_micros(polls)).await;
        }
        drop(begun);
        let mut connection = within(LONG, "not ended", pool.acquire()).await.unwrap();
        let outside = attempt(&mut *connection, "SAVEPOINT inside").await;
        assert_eq!(state(&outside.unwrap_err()), "25P01", "after {polls}");
    }
}

#[tokio::test]
async fn a_transaction_of_the_recipes_is_read_committed_whatever_the_default() {
    let db = database("").await;
    let name = db.name();
    run(
        &mut db.connect().await,
        &format!("ALTER DATABASE {name} SET default_transaction_isolation = 'serializable'"),
    )
    .await;
    let pool = PgPoolOptions::new().connect(db.url()).await.unwrap();
    let mut tx = begin(&pool).await.unwrap();
    assert_eq!(text(&mut *tx, "SELECT current_setting('transaction_isolation')").await, "read committed");
}
