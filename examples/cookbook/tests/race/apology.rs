use cookbook::apology::{PAGE, book};
use cookbook::sql;
use futures_util::future::join_all;
use sqlx::PgConnection;
use sqlx::postgres::PgPoolOptions;
use test_bounds::within;
use test_servers::Database;

use crate::support::*;

const STATES: &str = "SELECT count(*) FILTER (WHERE state = 'accepted') || ' accepted, '
    || (SELECT count(*) FROM apology) || ' apologies' FROM booking";

async fn event(capacity: i32) -> (Database, PgConnection) {
    let db = database(sql(PAGE, "schema")).await;
    let mut a = db.connect().await;
    run(&mut a, &format!("INSERT INTO event VALUES (1, {capacity})")).await;
    (db, a)
}

async fn insert(connection: &mut PgConnection) -> i64 {
    sqlx::query_scalar(sql(PAGE, "book")).bind(1_i64).fetch_one(connection).await.unwrap()
}

async fn apologise(connection: &mut PgConnection) -> Vec<i64> {
    sqlx::query_scalar(sql(PAGE, "apologise")).bind(1_i64).fetch_all(connection).await.unwrap()
}

#[tokio::test]
async fn forty_bookings_at_once_are_ten_accepted_and_thirty_apologies() {
    let (db, mut a) = event(10).await;
    let pool =
        PgPoolOptions::new().max_connections(20).acquire_timeout(LONG).connect(db.url()).await.unwrap();
    let bookings = within(LONG, "not ended", join_all((0..40).map(|_| book(&pool, 1)))).await;
    let mut apologies: Vec<i64> = bookings.into_iter().flat_map(|booked| booked.unwrap().apologies).collect();
    apologies.sort_unstable();
    assert_eq!(text(&mut a, STATES).await, "10 accepted, 30 apologies");
    let written: Vec<i64> =
        sqlx::query_scalar("SELECT booking_id FROM apology ORDER BY 1").fetch_all(&mut a).await.unwrap();
    assert_eq!(apologies, written, "each is told to one caller");
}

#[tokio::test]
async fn a_missed_check_is_made_up_by_the_next_one() {
    let (db, mut a) = event(1).await;
    let pool = PgPoolOptions::new().connect(db.url()).await.unwrap();
    insert(&mut a).await;
    let unchecked = insert(&mut a).await;
    let booked = book(&pool, 1).await.unwrap();
    assert_eq!(booked.apologies, [unchecked, booked.booking]);
    assert_eq!(apologise(&mut a).await, [0; 0], "nothing is taken back twice");
}

#[tokio::test]
async fn two_checks_at_once_apologise_once() {
    let (db, mut a) = event(1).await;
    let mut b = db.connect().await;
    let b_pid = pid(&mut b).await;
    insert(&mut a).await;
    let over = insert(&mut a).await;
    run(&mut a, "BEGIN").await;
    assert_eq!(apologise(&mut a).await, [over]);
    let (other, ()) = while_blocked(&db, b_pid, apologise(&mut b), run(&mut a, "COMMIT")).await;
    assert_eq!(other, [0; 0]);
    assert_eq!(text(&mut a, STATES).await, "1 accepted, 1 apologies");
}

#[tokio::test]
async fn wrong_a_check_in_the_same_transaction_sees_nothing() {
    let (db, mut a) = event(1).await;
    let mut b = db.connect().await;
    for session in [&mut a, &mut b] {
        run(&mut *session, "BEGIN").await;
        insert(session).await;
        assert_eq!(apologise(session).await, [0; 0]);
    }
    run(&mut a, "COMMIT").await;
    run(&mut b, "COMMIT").await;
    assert_eq!(text(&mut a, STATES).await, "2 accepted, 0 apologies", "of one place");
    assert_eq!(apologise(&mut a).await.len(), 1, "a check after the commit finds it");
}
