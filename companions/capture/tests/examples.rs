//! Checks the output of the example.

#![allow(clippy::unwrap_used)] // A failed `unwrap` fails the test.

#[allow(dead_code, unreachable_pub)] // A program, of which tests use parts.
#[path = "../examples/orders.rs"]
mod orders;

use test_servers::fresh_database;

#[tokio::test]
async fn an_order_is_rebuilt_once_for_all_its_changes_in_three_tables() {
    let db = fresh_database().await;
    let shop = orders::Shop::set_up(db.url()).await.unwrap();
    shop.sell().await.unwrap();
    // 15 changes of the sales, two of prices and two of lines. The sale that was rolled back has none.
    assert_eq!(shop.changes().await.unwrap(), 19);
    assert_eq!(shop.rebuild(3).await.unwrap(), [5, 7, 7]);
    assert!(!shop.is_behind().await.unwrap());
    let found = [
        (1, "CUSTOMER-1 apple pear".to_owned(), 20, 1),
        (2, "CUSTOMER-2 apple pear".to_owned(), 18, 1),
        (3, "CUSTOMER-3".to_owned(), -60, 1),
    ];
    assert_eq!(shop.search().await.unwrap(), found);

    shop.clear_out().await.unwrap();
    assert_eq!(shop.rebuild(4).await.unwrap(), [1, 1, 1, 1]);
    assert!(!shop.is_behind().await.unwrap());
    let found =
        [(1, "CUSTOMER-1 apple pear".to_owned(), 80, 2), (2, "CUSTOMER-2 apple pear".to_owned(), 78, 2)];
    assert_eq!(shop.search().await.unwrap(), found);
}

#[tokio::test]
async fn settled_changes_are_purged_after_their_retention() {
    let db = fresh_database().await;
    let shop = orders::Shop::set_up(db.url()).await.unwrap();
    shop.sell().await.unwrap();
    shop.rebuild(2).await.unwrap();
    shop.let_days_pass(29).await.unwrap();
    assert_eq!(shop.purge().await.unwrap(), 0);
    shop.let_days_pass(2).await.unwrap();
    assert_eq!(shop.purge().await.unwrap(), 12);
    // Changes of the third order stay because they are not settled.
    assert_eq!(shop.changes().await.unwrap(), 7);
    assert!(shop.is_behind().await.unwrap());
}
