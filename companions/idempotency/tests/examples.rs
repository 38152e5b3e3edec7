//! Checks the output of the example.

#![allow(clippy::unwrap_used)]

#[allow(dead_code, unreachable_pub)] // A program, of which the test uses parts.
#[path = "../examples/payment.rs"]
mod payment;

#[tokio::test]
async fn a_payment_that_is_sent_twice_is_carried_out_once() {
    let db = test_servers::fresh_database().await;
    let expected = [
        "order-1, 10: paid 10",
        "order-1, 10: paid 10 before",
        "order-1, 99: refused, the key belongs to another payment",
        "order-2, 20: paid 20",
        "30 were paid",
    ];
    assert_eq!(payment::run(db.url()).await.unwrap(), expected);
}
