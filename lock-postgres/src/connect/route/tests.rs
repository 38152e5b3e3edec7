use std::net::Ipv4Addr;

use sqlx::ConnectOptions as _;
use test_servers::Cluster;
use tokio::net::TcpListener;

use super::*;

/// Longer than any step here takes on a slow machine.
const LONG: Duration = Duration::from_secs(60);

fn at(config: &PgConfig, port: u16) -> Candidate {
    let options = config.options().clone().host("db.example");
    Candidate { options, address: Some(SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port)) }
}

async fn search(config: &PgConfig, candidates: &[Candidate], limit: Duration) -> Result<Route, Error> {
    Route::search(config, candidates, Vec::new(), Instant::now() + limit).await
}

/// Resolves a name to two addresses. The first accepts connections and never answers, like a dead server.
#[tokio::test]
async fn each_address_gets_its_share_of_the_time_and_the_last_good_one_comes_first() {
    let server = Cluster::shared();
    let config = PgConfig::from_url(&server.admin_url()).unwrap();
    let silent = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let silent_port = silent.local_addr().unwrap().port();
    let mut candidates = [at(&config, silent_port), at(&config, server.port())];
    candidates[0].address = Some(SocketAddr::new(Ipv4Addr::new(127, 0, 0, 2).into(), silent_port));
    let silent = TcpListener::bind(candidates[0].address.unwrap()).await.unwrap();

    // Points the first candidate at the silent server, because the driver takes the port from its options.
    candidates[0].options = candidates[0].options.clone().port(silent_port);
    candidates[1].options = candidates[1].options.clone().port(server.port());
    let started = std::time::Instant::now();
    let limit = Duration::from_secs(4);
    assert!(search(&config, &candidates, limit).await.is_ok());
    assert!(started.elapsed() >= limit / 2, "its share, and no less");
    config.last_good.first(&mut candidates);
    assert_eq!(candidates[0].options.get_port(), server.port());
    drop(silent);
}

#[tokio::test]
async fn the_error_names_all_addresses_that_were_tried() {
    let config = PgConfig::from_url("postgres://app@127.0.0.1/x").unwrap();
    let closed = [1, 2].map(|port| Candidate {
        options: config.options().clone().port(port).host("db"),
        ..at(&config, port)
    });
    let error = search(&config, &closed, LONG).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    for place in ["db (127.0.0.1:1): Connection refused", "db (127.0.0.1:2): Connection refused"] {
        assert!(error.message().contains(place), "{error}");
    }
}

/// Checks that a relay passes on statements and large answers, and closes one side when the other ends.
#[cfg(unix)]
#[tokio::test]
async fn a_relay_passes_everything_on_and_outlives_its_listener() {
    let server = Cluster::shared();
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), server.port());
    let relay = Relay::to(address, server.port()).await.unwrap();
    let options = PgConfig::from_url(&server.admin_url()).unwrap().options().clone();
    let options = options.host("no.such.host.example").socket(relay.directory());
    let (mut first, mut second) = (options.connect().await.unwrap(), options.connect().await.unwrap());
    drop(relay);
    for connection in [&mut first, &mut second] {
        let row = connection
            .fetch_one(sqlx::raw_sql("SELECT repeat('x', 3000000), pg_backend_pid()"))
            .await
            .unwrap();
        assert_eq!(row.get::<&str, _>(0).len(), 3_000_000);
    }
    assert!(options.connect().await.is_err(), "nobody listens any more");
    let row = second.fetch_one(sqlx::raw_sql("SELECT pg_backend_pid()")).await.unwrap();
    let killed = format!("SELECT pg_terminate_backend({})", row.get::<i32, _>(0));
    first.execute(sqlx::raw_sql(sqlx::AssertSqlSafe(killed))).await.unwrap();
    assert!(second.fetch_one(sqlx::raw_sql("SELECT 1")).await.is_err());
    first.close().await.unwrap();
}
