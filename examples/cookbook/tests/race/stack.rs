//! Thirty spends of ten from a hundred, over HTTP, through all layers.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use cookbook::sql;
use cookbook::stack::{PAGE, stack};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use leasehold_api::Lock;
use leasehold_postgres::{Identifier, PgConfig};
use leasehold_postgres_advisory::XactLocks;
use leasehold_postgres_ttl::TtlConfig;
use sqlx::postgres::PgPoolOptions;
use test_servers::Database;

use crate::support::*;

type Http = Client<hyper_util::client::legacy::connect::HttpConnector, Empty<bytes::Bytes>>;

/// Returns the number of races, which `LEASEHOLD_RACES` changes.
fn races() -> i64 {
    std::env::var("LEASEHOLD_RACES").map_or(5, |races| races.parse().expect("LEASEHOLD_RACES is a number"))
}

struct Service {
    db: Database,
    http: Http,
    base: String,
    stack: cookbook::stack::Stack,
    lock: Arc<dyn Lock>,
}

async fn serve() -> Service {
    let db = database(sql(PAGE, "schema")).await;
    // A slow commit gives the next request the chance to start too early.
    let slow = "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN PERFORM pg_sleep(0.002); RETURN NULL; END $$;
        CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON entry DEFERRABLE INITIALLY DEFERRED
        FOR EACH ROW WHEN (NEW.amount < 0) EXECUTE FUNCTION slow()";
    run(&mut db.connect().await, slow).await;
    let pool =
        PgPoolOptions::new().max_connections(12).acquire_timeout(LONG).connect(db.url()).await.unwrap();
    let config = PgConfig::from_url(db.url()).unwrap().install_schema(true);
    let lock: Arc<dyn Lock> = Arc::new(TtlConfig::new(config).connect().await.unwrap());
    let locks = XactLocks::new(Identifier::new("leasehold").unwrap());
    let stack = stack(pool, Arc::clone(&lock), locks, 11).await.unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    let router: Router = stack.router.clone();
    tokio::spawn(async move { axum::serve(listener, router).await });
    Service { db, http: Client::builder(TokioExecutor::new()).build_http(), base, stack, lock }
}

impl Service {
    async fn spend(&self, how: &str, holder: i64, key: String) -> (u16, bool) {
        let request = axum::http::Request::post(format!("{}/ledger/{holder}/{how}", self.base));
        let request = request.header("x-user", "ann").header("idempotency-key", key);
        let response = self.http.request(request.body(Empty::new()).unwrap()).await.unwrap();
        let is_replay = response.headers().contains_key("idempotent-replayed");
        let status = response.status().as_u16();
        response.into_body().collect().await.unwrap();
        (status, is_replay)
    }

    /// Sends thirty requests at once, and repeats those refused as busy with the same key. Returns the statuses.
    async fn race(&self, how: &str, holder: i64) -> Vec<u16> {
        let all = (0..30).map(async |n| {
            loop {
                match self.spend(how, holder, format!("{how}-{holder}-{n}")).await.0 {
                    409 | 503 | 504 => tokio::time::sleep(Duration::from_millis(100)).await,
                    status => return status,
                }
            }
        });
        let mut told = futures_util::future::join_all(all).await;
        told.sort_unstable();
        told
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn thirty_spends_through_all_layers_never_overdraw() {
    let it = serve().await;
    let mut connection = it.db.connect().await;
    let wanted: Vec<u16> = [[200].repeat(10), [402].repeat(20)].concat();
    for holder in 0..races() {
        for (how, holder) in [("spend", 2 * holder), ("spend-in-tx", 2 * holder + 1)] {
            run(&mut connection, &format!("INSERT INTO entry VALUES ({holder}, 100)")).await;
            assert_eq!(it.race(how, holder).await, wanted, "{how} {holder}");
            let found =
                format!("SELECT sum(amount) || ' ' || count(*) FROM entry WHERE holder_id = {holder}");
            assert_eq!(text(&mut connection, &found).await, "0 11", "{how} {holder}");
            // A repetition is a replay and spends nothing.
            let again = it.spend(how, holder, format!("{how}-{holder}-0")).await;
            assert!(again.1 && [200, 402].contains(&again.0), "{again:?}");
        }
    }
    it.stack.lock.idle().await;
    it.stack.keys.idle().await;
    it.lock.close().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_a_user_or_a_key_spends_nothing() {
    let it = serve().await;
    run(&mut it.db.connect().await, "INSERT INTO entry VALUES (1, 100)").await;
    for (user, expected) in [(None, 401), (Some("ann"), 400)] {
        let mut request = axum::http::Request::post(format!("{}/ledger/1/spend", it.base));
        if let Some(user) = user {
            request = request.header("x-user", user);
        }
        let response = it.http.request(request.body(Empty::new()).unwrap()).await.unwrap();
        assert_eq!(response.status().as_u16(), expected);
    }
    assert_eq!(text(&mut it.db.connect().await, "SELECT sum(amount) FROM entry").await, "100");
}
