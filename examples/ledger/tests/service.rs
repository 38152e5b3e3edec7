//! The page, the switch, the load, and the stop of the service.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "common/service.rs"]
mod common;

use axum::http::StatusCode;
use common::{Browser, Gate, LONG, first, service};
use leasehold::ListQuery;
use ledger::{Error, Mode, Options};
use serde_json::{Value, json};
use test_bounds::within;
use test_servers::{Database, fresh_database};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

#[tokio::test]
async fn the_page_is_complete_in_itself() {
    let running = service(None, Mode::Memory, false).await;
    let (status, headers, page) = Browser::of(&running).get("/").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(headers["content-type"], "text/html; charset=utf-8");
    assert!(headers["content-security-policy"].to_str().unwrap().starts_with("default-src 'none'"));
    assert!(page.starts_with("<!doctype html>") && page.contains("<html lang=\"en\">"));
    for outside in ["http://", "https://", "src=", "<link", "@import"] {
        assert!(!page.contains(outside), "the page asks for something else: {outside}");
    }
    for figure in ["double_spends", "spent", "refused", "unserved", "waiting", "accounts"] {
        assert!(page.contains(&format!("id=\"{figure}\"")), "the page does not show {figure}");
    }
    running.stop().await.unwrap();
}

#[tokio::test]
async fn the_figures_have_these_fields() {
    let running = service(None, Mode::Memory, false).await;
    let browser = Browser::of(&running);
    assert_eq!(browser.spend("2", 30).await, StatusCode::OK);
    assert_eq!(browser.spend("2", 80).await, StatusCode::PAYMENT_REQUIRED);
    let account =
        |holder: i64, balance: i64| json!({"holder": holder, "balance": balance, "double_spends": 0});
    let expected = json!({
        "store": "memory", "lock": "memory", "locks": ["none", "memory"], "load": false, "waiting": 0,
        "spent": 1, "refused": 1, "unserved": 0, "double_spends": 0,
        "accounts": [account(1, 100), account(2, 70), account(3, 100), account(4, 100), account(5, 100), account(6, 100)],
    });
    assert_eq!(browser.figures().await, expected);
    running.stop().await.unwrap();
}

#[tokio::test]
async fn the_switch_starts_over() {
    let running = service(None, Mode::Memory, false).await;
    let browser = Browser::of(&running);
    assert_eq!(browser.spend("1", 30).await, StatusCode::OK);
    assert_eq!(browser.json("/lock", r#"{"lock":"session"}"#).await, StatusCode::BAD_REQUEST, "not there");
    assert_eq!(browser.json("/lock", r#"{"lock":"no"}"#).await, StatusCode::UNPROCESSABLE_ENTITY);
    let form = browser.form("/lock", "lock=none").await;
    assert_eq!(form, StatusCode::UNSUPPORTED_MEDIA_TYPE, "pages of others can send forms");
    let figures = browser.figures().await;
    assert_eq!((first(&figures), &figures["spent"]), ((70, 0), &json!(1)), "nothing was switched");
    assert_eq!(browser.json("/lock", r#"{"lock":"none"}"#).await, StatusCode::NO_CONTENT);
    let figures = browser.figures().await;
    assert_eq!((first(&figures), &figures["spent"], &figures["lock"]), ((100, 0), &json!(0), &json!("none")));
    running.stop().await.unwrap();
}

fn at_least(figures: &Value, name: &str, least: u64) -> bool {
    figures[name].as_u64().unwrap() >= least
}

#[tokio::test(flavor = "multi_thread")]
async fn the_load_spends_twice_without_a_lock_and_stops_when_told() {
    let running = service(None, Mode::None, false).await;
    let browser = Browser::of(&running);
    assert_eq!(browser.json("/load", r#"{"run":true}"#).await, StatusCode::NO_CONTENT);
    let figures = browser.until("spent twice", |figures| at_least(figures, "double_spends", 1)).await;
    assert_eq!(figures["load"], true);
    assert_eq!(browser.json("/load", r#"{"run":false}"#).await, StatusCode::NO_CONTENT);
    let figures = browser.figures().await;
    assert_eq!(figures["load"], false);
    assert_eq!(browser.figures().await, figures, "nobody spends any more");
    running.stop().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn no_lock_lets_credit_be_spent_twice_while_switched_under_load() {
    let database = fresh_database().await;
    let running = service(Some(&database), Mode::None, true).await;
    let browser = Browser::of(&running);
    browser.until("some spent", |figures| at_least(figures, "spent", 30)).await;
    for mode in [Mode::Lease, Mode::Tx, Mode::Session, Mode::Fence, Mode::LayerTx, Mode::Lease] {
        let lock = format!("{{\"lock\":\"{mode}\"}}");
        assert_eq!(browser.json("/lock", &lock).await, StatusCode::NO_CONTENT, "{mode}");
        let enough = |figures: &Value| at_least(figures, "spent", 60) && at_least(figures, "refused", 10);
        let figures = browser.until("many spent", enough).await;
        assert_eq!(figures["lock"], json!(mode));
        assert_eq!(figures["double_spends"], 0, "{mode}: {figures}");
        assert_eq!(figures["unserved"], 0, "{mode}: {figures}");
    }
    running.stop().await.unwrap();
    assert_nothing_is_left(&database).await;
}

/// Fails if an advisory lock, a lease or a session remains.
async fn assert_nothing_is_left(database: &Database) {
    let mut observer = database.connect().await;
    let count = async |observer: &mut sqlx::PgConnection, sql: &'static str| -> i64 {
        sqlx::query_scalar(sql).fetch_one(observer).await.unwrap()
    };
    let locks = "SELECT count(*) FROM pg_locks JOIN pg_database ON pg_database.oid = database
        WHERE locktype = 'advisory' AND datname = current_database()";
    assert_eq!(count(&mut observer, locks).await, 0, "advisory locks");
    // The server ends a session a moment after its connection.
    let sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()
        AND backend_type = 'client backend' AND pid <> pg_backend_pid()";
    let look = async {
        while count(&mut observer, sessions).await != 0 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    within(LONG, "sessions are left", look).await;
    let url = database.url().replacen("postgres", "postgres+ttl", 1);
    let lease = leasehold::connect(&url).await.unwrap();
    let held = lease.admin().unwrap().list(&ListQuery::new()).await.unwrap();
    assert!(held.is_empty(), "{held:?}");
    lease.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_waits_for_a_handler_whose_client_left() {
    for mode in [Mode::Session, Mode::Lease, Mode::Fence, Mode::Key, Mode::LayerTx] {
        let database = fresh_database().await;
        let running = service(Some(&database), mode, false).await;
        let address = running.address();
        let mut gate = Gate::close(&database).await;
        let mut client = TcpStream::connect(address).await.unwrap();
        let request = "POST /accounts/1/spend HTTP/1.1\r\nhost: ledger\r\ncontent-length: 9\r\n\
            idempotency-key: a\r\ncontent-type: application/x-www-form-urlencoded\r\n\r\namount=40";
        client.write_all(request.as_bytes()).await.unwrap();
        gate.reached(1).await;
        drop(client);
        let stopped = tokio::spawn(running.stop());
        // The server no longer listens, but the handler still runs.
        let refused = async { while TcpStream::connect(address).await.is_ok() {} };
        within(LONG, "still listens", refused).await;
        gate.open().await;
        within(LONG, "does not stop", stopped).await.unwrap().unwrap();
        let mut observer = database.connect().await;
        let sql = "SELECT sum(amount)::bigint FROM ledger_example.entry WHERE holder = 1";
        let balance: i64 = sqlx::query_scalar(sql).fetch_one(&mut observer).await.unwrap();
        assert_eq!(balance, 60, "{mode}: what was begun was done");
        drop(observer);
        assert_nothing_is_left(&database).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_does_not_wait_for_an_instance_that_stands_still() {
    let database = fresh_database().await;
    let running = service(Some(&database), Mode::Session, false).await;
    let browser = Browser::of(&running);
    let (status, begun) = browser.json_text("/rounds", r#"{"freezes":true}"#).await;
    assert_eq!(status, StatusCode::OK, "{begun}");
    let account = serde_json::from_str::<Value>(&begun).unwrap()["account"].clone();
    let spend = tokio::spawn({
        let (browser, path) = (browser.clone(), format!("/lanes/a/tx/accounts/{account}/spend"));
        async move { browser.form(&path, "amount=100").await }
    });
    let round = format!("/rounds/{account}");
    let frozen = async {
        loop {
            let progress: Value = serde_json::from_str(&browser.get(&round).await.2).unwrap();
            if progress["requests"][0]["frozen"].is_u64() {
                return progress;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    let progress = within(LONG, "does not stand still", frozen).await;
    assert_eq!(
        (&progress["balance"], &progress["requests"][0]["read"]["balance"]),
        (&json!(100), &json!(100))
    );
    running.stop().await.unwrap();
    assert_eq!(spend.await.unwrap(), StatusCode::OK, "what was begun was done");
    assert_nothing_is_left(&database).await;
}

#[tokio::test]
async fn a_mode_of_the_other_store_says_what_to_do() {
    let mut options = Options::default();
    options.mode = Some(Mode::Lease);
    let error = ledger::start(options.clone()).await.unwrap_err();
    assert!(matches!(error, Error::NeedsDatabase(Mode::Lease)), "{error}");
    assert!(error.to_string().contains("set DATABASE_URL"), "{error}");

    let database = fresh_database().await;
    options.database_url = Some(database.url().to_owned());
    options.mode = Some(Mode::Memory);
    let error = ledger::start(options.clone()).await.unwrap_err();
    assert!(matches!(error, Error::NeedsNoDatabase(Mode::Memory)), "{error}");
    assert!(!format!("{options:?}").contains(database.url()), "URLs may hold passwords");
}

#[tokio::test]
async fn entries_outlive_the_service_and_a_second_start() {
    let database = fresh_database().await;
    for left in [60, 20] {
        let running = service(Some(&database), Mode::Session, false).await;
        let browser = Browser::of(&running);
        assert_eq!(browser.spend("1", 40).await, StatusCode::OK);
        assert_eq!(first(&browser.figures().await), (left, 0));
        running.stop().await.unwrap();
    }
}
