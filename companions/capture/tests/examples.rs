//! Checks the output of the example.

#![allow(clippy::unwrap_used)] // A failed `unwrap` fails the test.

#[allow(dead_code, unreachable_pub)] // A program, of which tests use parts.
#[path = "../examples/orders.rs"]
mod orders;

use leasehold_claim::sqlx::PgConnection;
use test_servers::sql::{run, texts};
use test_servers::{Database, fresh_database};

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
    assert_eq!(shop.all().await.unwrap(), found);

    shop.clear_out().await.unwrap();
    assert_eq!(shop.rebuild(4).await.unwrap(), [1, 1, 1, 1]);
    assert!(!shop.is_behind().await.unwrap());
    let found =
        [(1, "CUSTOMER-1 apple pear".to_owned(), 80, 2), (2, "CUSTOMER-2 apple pear".to_owned(), 78, 2)];
    assert_eq!(shop.all().await.unwrap(), found);
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

/// Sells three orders, and fills both tables with so many more rows that a scan would be the wrong plan.
async fn searchable() -> (Database, orders::Shop) {
    let db = fresh_database().await;
    let shop = orders::Shop::set_up(db.url()).await.unwrap();
    shop.sell().await.unwrap();
    shop.rebuild(3).await.unwrap();
    let mut a = db.connect().await;
    run(
        &mut a,
        "SET search_path = leasehold_orders;
         INSERT INTO order_search (order_id, words, open_amount)
             SELECT n, 'customer-' || n || ' fig' || n, 0 FROM generate_series(1000, 20000) n;
         INSERT INTO change (status, order_id, source, operation, detail)
             SELECT 'done', n, 'order_line', 'INSERT', jsonb_build_object('new', jsonb_build_object('article', 'fig' || n))
             FROM generate_series(1000, 20000) n",
    )
    .await;
    run(&mut a, "VACUUM (ANALYZE) order_search, change").await;
    (db, shop)
}

/// Returns the plan that a prepared statement has for any word.
async fn plan(a: &mut PgConnection, statement: &str) -> String {
    run(
        &mut *a,
        "SET search_path = leasehold_orders; SET plan_cache_mode = force_generic_plan; DEALLOCATE ALL",
    )
    .await;
    run(&mut *a, format!("PREPARE search (text) AS {statement}")).await;
    texts(a, "EXPLAIN (COSTS OFF) EXECUTE search ('pear')").await.join("\n")
}

#[tokio::test]
async fn words_find_orders_by_an_index() {
    let (db, shop) = searchable().await;
    let numbers = async |words: &str| {
        let found = shop.search(words).await.unwrap();
        found.into_iter().map(|(order, ..)| order).collect::<Vec<_>>()
    };
    assert_eq!(numbers("pear").await, [1, 2], "the lines of the third order were deleted");
    assert_eq!(numbers("CUSTOMER-3").await, [3], "in any case");
    assert_eq!(numbers("pear apple").await, [1, 2], "all words");
    assert_eq!(numbers("pear -customer-1").await, [2], "without a word");
    assert_eq!(numbers("fig1234 or customer-3").await, [3, 1234], "either word");
    assert!(numbers("plum").await.is_empty());
    let plan = plan(&mut db.connect().await, orders::SEARCH).await;
    assert!(plan.contains("Bitmap Index Scan on order_search_document"), "{plan}");
    assert!(!plan.contains("Seq Scan"), "{plan}");
}

#[tokio::test]
async fn words_find_the_history_of_what_was_deleted_by_an_index() {
    let (db, shop) = searchable().await;
    let change =
        |order, source: &str, operation: &str| (Some(order), source.to_owned(), operation.to_owned());
    let found = shop.search_history("pear").await.unwrap();
    let expected = [
        change(3, "order_line", "DELETE"),
        change(2, "order_line", "UPDATE"),
        change(3, "order_line", "INSERT"),
        change(2, "order_line", "INSERT"),
        change(1, "order_line", "INSERT"),
    ];
    assert_eq!(found, expected, "settled, and still found");
    let named = shop.search_history("order_line").await.unwrap();
    assert!(named.is_empty(), "the name of a table is no word of a row: {named:?}");
    let plan = plan(&mut db.connect().await, orders::SEARCH_HISTORY).await;
    assert!(plan.contains("Bitmap Index Scan on change_document"), "{plan}");
    assert!(!plan.contains("Seq Scan"), "{plan}");
}
