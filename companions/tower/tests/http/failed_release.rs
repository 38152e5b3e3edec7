//! A release that fails on its way to the server, on each store in Postgres.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::common::{Gate, LONG, get, layer, text};
use crate::ledger::until_number;
use http::{StatusCode, header};
use leasehold_api::{ListQuery, Lock};

use leasehold_postgres::{Liveness, PgConfig};
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_row::RowConfig;
use leasehold_postgres_ttl::TtlConfig;
use metrics_exporter_prometheus::PrometheusBuilder;
use test_bounds::within;
use test_servers::{Cluster, Database, Proxy};
use tower::{Layer as _, ServiceExt as _};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, SubscriberExt as _};

const IN_PG_LOCKS: &str = "SELECT count(*) FROM pg_locks JOIN pg_stat_activity USING (pid)
    WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()";

/// The messages of the layer's warnings.
#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl<S: Subscriber> tracing_subscriber::Layer<S> for Warnings {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let about = event.metadata();
        if about.target().starts_with("leasehold_tower") && *about.level() <= Level::WARN {
            let mut message = String::new();
            event.record(&mut |field: &tracing::field::Field, value: &dyn std::fmt::Debug| {
                if field.name() == "message" {
                    message = format!("{value:?}");
                }
            });
            self.0.lock().unwrap().push(message);
        }
    }
}

/// The server's replies are held back while the handler ends.
async fn leaves_the_response_alone(lock: Arc<dyn Lock>, proxy: &Proxy, database: &Database) {
    let recorder = PrometheusBuilder::new().with_recommended_naming(true).build_recorder();
    let scrape = recorder.handle();
    // A local recorder suffices, because the layer registers its counters on this thread.
    let _recorder = metrics::set_default_local_recorder(&recorder);
    let warnings = Warnings::default();
    let _subscriber = tracing::subscriber::set_default(tracing_subscriber::registry().with(warnings.clone()));
    let layer = layer(&lock).release_within(Duration::from_millis(20));
    let counted = |n: u64| {
        let line = format!("leasehold_tower_release_failures_total{{store=\"{lock}\"}} {n}\n");
        assert!(scrape.render().contains(&line), "no {line}in {}", scrape.render());
    };
    counted(0);
    let gate = Gate::new();
    let mut request = Box::pin(layer.layer(gate.service()).oneshot(get("/k")));
    tokio::select! {
        _ = &mut request => panic!("the handler waits at the gate"),
        () = gate.reached() => {}
    }
    proxy.stall_replies();
    gate.open();
    let response = within(LONG, "no response", request).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    assert!(!response.headers().contains_key(header::RETRY_AFTER));
    assert_eq!(text(response).await, "done");
    within(LONG, "not ended", layer.idle()).await;
    let stats = layer.stats();
    assert_eq!((stats.release_failed, stats.lost, stats.in_flight), (1, 0, 0));
    counted(1);
    let told = warnings.0.lock().unwrap().clone();
    assert!(told.len() == 1 && told[0].contains("release was not confirmed"), "{told:?}");

    proxy.restore();
    let admin = lock.admin().unwrap();
    let nothing_held = async {
        while !matches!(admin.list(&ListQuery::new()).await, Ok(held) if held.is_empty()) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    within(LONG, "a hold is left", nothing_held).await;
    // The sessions are still open.
    until_number(database, IN_PG_LOCKS, 0).await;
    within(LONG, "not closed", lock.close()).await.unwrap();
}

#[tokio::test]
async fn a_failed_release_over_the_network_is_told_and_counted_once_and_leaves_response_and_server_clean() {
    for store in ["session", "row", "lease"] {
        let database = Cluster::shared().fresh_database().await;
        let proxy = Proxy::start(Cluster::shared().address()).await;
        // The loss of a session is noticed much later than the release is given up.
        let liveness = Liveness::new(LONG / 6, LONG, LONG * 2);
        let config = PgConfig::from_url(&proxy.url(database.url())).unwrap().liveness(liveness);
        let config = config.install_schema(true).connect_timeout(LONG).statement_timeout(LONG);
        let lock: Arc<dyn Lock> = match store {
            "session" => Arc::new(AdvisoryConfig::new(config).connect().await.unwrap()),
            "row" => Arc::new(RowConfig::new(config).connect().await.unwrap()),
            _ => Arc::new(TtlConfig::new(config).connect().await.unwrap()),
        };
        leaves_the_response_alone(lock, &proxy, &database).await;
    }
}
