//! Spending over HTTP, with each guard and without one. The races on the middleware alone are in
//! `companions/tower/tests/http/races.rs`.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/service.rs"]
mod common;

use axum::http::StatusCode;
use common::{Browser, Gate, first, service};
use ledger::Mode;
use test_servers::fresh_database;
use tokio::task::JoinSet;

/// Starts a hundred spends of 10 at once, over `browsers` in turn.
fn hundred(browsers: &[Browser]) -> JoinSet<StatusCode> {
    let mut requests = JoinSet::new();
    for browser in browsers.iter().cycle().take(100) {
        let browser = browser.clone();
        requests.spawn(async move { browser.spend("1", 10).await });
    }
    requests
}

/// Returns the number of served requests, and of requests refused because the balance was short.
async fn served_and_refused(requests: JoinSet<StatusCode>) -> (usize, usize) {
    let statuses = requests.join_all().await;
    let count = |status| statuses.iter().filter(|is| **is == status).count();
    (count(StatusCode::OK), count(StatusCode::PAYMENT_REQUIRED))
}

async fn ten_of_a_hundred(mode: Mode) {
    let database = fresh_database().await;
    let instances =
        [service(Some(&database), mode, false).await, service(Some(&database), mode, false).await];
    let browsers = instances.each_ref().map(Browser::of);
    // Stops the first request until others wait for it, so they overlap.
    let mut gate = Gate::close(&database).await;
    let requests = hundred(&browsers);
    gate.reached(1).await;
    let many = |figures: &serde_json::Value| figures["waiting"].as_u64() >= Some(10);
    browsers[0].until("ten wait for the lock", many).await;
    gate.open().await;
    assert_eq!(served_and_refused(requests).await, (10, 90), "{mode}");
    assert_eq!(first(&browsers[0].figures().await), (0, 0), "{mode}");
    for instance in instances {
        instance.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_session_lock_ten_of_a_hundred_spends_succeed() {
    ten_of_a_hundred(Mode::Session).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_lease_ten_of_a_hundred_spends_succeed() {
    ten_of_a_hundred(Mode::Lease).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_fenced_lease_ten_of_a_hundred_spends_succeed() {
    ten_of_a_hundred(Mode::Fence).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_transaction_lock_ten_of_a_hundred_spends_succeed() {
    ten_of_a_hundred(Mode::Tx).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_transaction_of_the_layer_ten_of_a_hundred_spends_succeed() {
    ten_of_a_hundred(Mode::LayerTx).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_lock_in_memory_ten_of_a_hundred_spends_succeed() {
    let running = service(None, Mode::Memory, false).await;
    let browser = Browser::of(&running);
    assert_eq!(served_and_refused(hundred(std::slice::from_ref(&browser))).await, (10, 90));
    assert_eq!(first(&browser.figures().await), (0, 0));
    running.stop().await.unwrap();
}

/// Starts two requests for the whole balance, the second with another spelling of the account.
fn pair(browser: &Browser) -> JoinSet<StatusCode> {
    let mut requests = JoinSet::new();
    for holder in ["1", "01"] {
        let browser = browser.clone();
        requests.spawn(async move { browser.spend(holder, 100).await });
    }
    requests
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_lock_a_pair_spends_the_same_credit_twice() {
    let database = fresh_database().await;
    let running = service(Some(&database), Mode::None, false).await;
    let browser = Browser::of(&running);
    let mut gate = Gate::close(&database).await;
    let requests = pair(&browser);
    gate.reached(2).await;
    gate.open().await;
    assert_eq!(requests.join_all().await, [StatusCode::OK; 2]);
    let figures = browser.figures().await;
    assert_eq!(first(&figures), (-100, 1));
    assert_eq!(figures["double_spends"], 1);
    running.stop().await.unwrap();
}

/// Checks that the second of two requests waits for the lock between the first one's read and write, and is then refused.
async fn a_pair_spends_once(mode: Mode) {
    let database = fresh_database().await;
    let running = service(Some(&database), mode, false).await;
    let browser = Browser::of(&running);
    let mut gate = Gate::close(&database).await;
    let requests = pair(&browser);
    gate.reached(1).await;
    let another = tokio::spawn({
        let browser = browser.clone();
        async move { browser.spend("2", 100).await }
    });
    gate.reached(2).await;
    browser.until("one waits for the lock", |figures| figures["waiting"] == 1).await;
    // The request really waits for the lock: it stays, while a later request of another account reaches the gate.
    for _ in 0..50 {
        assert_eq!(browser.figures().await["waiting"], 1, "{mode}");
        assert_eq!(gate.waiting().await, 2, "{mode}: one of each account");
    }
    gate.open().await;
    let mut statuses = requests.join_all().await;
    statuses.sort();
    assert_eq!(statuses, [StatusCode::OK, StatusCode::PAYMENT_REQUIRED], "{mode}");
    assert_eq!(another.await.unwrap(), StatusCode::OK, "{mode}");
    let figures = browser.figures().await;
    assert_eq!(first(&figures), (0, 0), "{mode}");
    assert_eq!(
        (&figures["spent"], &figures["refused"], &figures["unserved"]),
        (&2.into(), &1.into(), &0.into())
    );
    running.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_session_lock_two_spellings_of_an_account_spend_once() {
    a_pair_spends_once(Mode::Session).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_lease_two_spellings_of_an_account_spend_once() {
    a_pair_spends_once(Mode::Lease).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_fenced_lease_two_spellings_of_an_account_spend_once() {
    a_pair_spends_once(Mode::Fence).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_payment_with_an_idempotency_key_is_done_once_however_often_it_is_sent() {
    let database = fresh_database().await;
    let instances =
        [service(Some(&database), Mode::Key, false).await, service(Some(&database), Mode::Key, false).await];
    let [browser, other] = instances.each_ref().map(Browser::of);
    assert_eq!(browser.spend("1", 40).await, StatusCode::BAD_REQUEST, "no key");
    let mut gate = Gate::close(&database).await;
    let first_try = tokio::spawn({
        let browser = browser.clone();
        async move { browser.spend_keyed("1", 40, "a").await }
    });
    gate.reached(1).await;
    assert_eq!(other.spend_keyed("1", 40, "a").await, StatusCode::CONFLICT, "the first one is running");
    gate.open().await;
    assert_eq!(first_try.await.unwrap(), StatusCode::OK);
    assert_eq!(other.spend_keyed("1", 40, "a").await, StatusCode::OK, "the stored answer");
    assert_eq!(first(&browser.figures().await), (60, 0));
    assert_eq!(other.spend_keyed("1", 80, "b").await, StatusCode::PAYMENT_REQUIRED);
    assert_eq!(other.spend_keyed("1", 40, "c").await, StatusCode::OK, "another key is another payment");
    assert_eq!(first(&browser.figures().await), (20, 0));
    for instance in instances {
        instance.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_transaction_lock_two_spellings_of_an_account_spend_once() {
    a_pair_spends_once(Mode::Tx).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn with_a_transaction_of_the_layer_two_spellings_of_an_account_spend_once() {
    a_pair_spends_once(Mode::LayerTx).await;
}

#[tokio::test]
async fn a_wrong_request_is_refused_the_same_with_and_without_the_layer() {
    let running = service(None, Mode::None, false).await;
    let browser = Browser::of(&running);
    for mode in ["none", "memory"] {
        assert_eq!(browser.json("/lock", &format!("{{\"lock\":\"{mode}\"}}")).await, StatusCode::NO_CONTENT);
        for body in ["amount=0", "amount=-5", "amount=ten", "amount=5000000000", ""] {
            let status = browser.form("/accounts/1/spend", body).await;
            assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY, "{mode} {body:?}");
        }
        assert_eq!(browser.form("/accounts/one/spend", "amount=1").await, StatusCode::BAD_REQUEST, "{mode}");
        assert_eq!(
            browser.form("/accounts/7/spend", "amount=1").await,
            StatusCode::PAYMENT_REQUIRED,
            "{mode}"
        );
        assert_eq!(browser.form("/accounts/7/top-up", "amount=3").await, StatusCode::NO_CONTENT, "{mode}");
        assert_eq!(browser.form("/accounts/7/spend", "amount=2").await, StatusCode::OK, "{mode}");
        let (status, _, balance) = browser.get("/accounts/7").await;
        assert_eq!((status, balance.as_str()), (StatusCode::OK, r#"{"holder":7,"balance":1}"#), "{mode}");
        assert_eq!(browser.get("/accounts/7/spend").await.0, StatusCode::METHOD_NOT_ALLOWED, "{mode}");
        assert_eq!(browser.get("/nowhere").await.0, StatusCode::NOT_FOUND, "{mode}");
    }
    running.stop().await.unwrap();
}
