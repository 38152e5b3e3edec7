//! The proxy forwards data and breaks connections on request.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::Duration;

use sqlx::{Connection as _, PgConnection};
use test_servers::{Cluster, Database, Proxy};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, timeout};

/// Longer than any answer of a server on this machine takes, for answers that must not come.
const SILENCE: Duration = Duration::from_millis(300);

async fn database_behind_proxy() -> (Database, Proxy, String) {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let url = proxy.url(database.url());
    (database, proxy, url)
}

async fn ask(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    sqlx::raw_sql("SELECT 1").execute(connection).await.map(drop)
}

async fn count(database: &Database) -> i64 {
    let mut connection = database.connect().await;
    sqlx::query_scalar("SELECT count(*) FROM thing").fetch_one(&mut connection).await.unwrap()
}

#[tokio::test]
async fn forwards_and_counts() {
    let (_database, proxy, url) = database_behind_proxy().await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    ask(&mut connection).await.unwrap();
    let before = proxy.traffic();
    ask(&mut connection).await.unwrap();
    ask(&mut connection).await.unwrap();
    let after = proxy.traffic();
    assert_eq!(after.round_trips - before.round_trips, 2);
    assert_eq!((after.open, after.accepted), (1, 1));
    assert!(after.bytes_to_server > before.bytes_to_server);
    assert!(after.bytes_to_client > before.bytes_to_client);
}

#[tokio::test]
async fn cut_refuses_until_restored() {
    let (_database, proxy, url) = database_behind_proxy().await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    proxy.cut();
    assert_eq!(proxy.traffic().open, 0);
    ask(&mut connection).await.unwrap_err();
    let error = PgConnection::connect(&url).await.unwrap_err();
    assert!(
        matches!(&error, sqlx::Error::Io(error) if error.kind() == std::io::ErrorKind::ConnectionRefused)
    );
    proxy.restore();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    ask(&mut connection).await.unwrap();
    proxy.reset();
    ask(&mut connection).await.unwrap_err();
    PgConnection::connect(&url).await.unwrap();
}

#[tokio::test]
async fn a_stall_holds_old_and_new_connections() {
    let (_database, proxy, url) = database_behind_proxy().await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let before = proxy.traffic();
    proxy.stall();
    let old = tokio::spawn(async move { ask(&mut connection).await });
    let new = tokio::spawn(async move { PgConnection::connect(&url).await.map(drop) });
    tokio::time::sleep(SILENCE).await;
    assert!(!old.is_finished() && !new.is_finished());
    let held = proxy.traffic();
    assert_eq!(held.open, 2);
    assert_eq!(held.bytes_to_server, before.bytes_to_server, "nothing may reach the server");
    assert_eq!((before.held, held.held), (0, 2), "a request and a new connection wait");
    proxy.restore();
    old.await.unwrap().unwrap();
    new.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_stall_of_open_connections_spares_later_ones_and_delivers_after_their_client_has_gone() {
    let (database, proxy, url) = database_behind_proxy().await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("CREATE TABLE thing (a int)").execute(&mut connection).await.unwrap();
    proxy.stall_open();
    let work = tokio::spawn(async move {
        sqlx::raw_sql("INSERT INTO thing VALUES (1)").execute(&mut connection).await.map(drop)
    });
    let held = async {
        while proxy.traffic().held == 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(60), held).await.expect("the request must reach the proxy");
    // Drops the connection.
    work.abort();
    let mut later = PgConnection::connect(&url).await.unwrap();
    ask(&mut later).await.unwrap();
    assert_eq!(count(&database).await, 0);
    proxy.restore();
    let delivered = async {
        while count(&database).await == 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(60), delivered).await.expect("the held request must reach the server");
}

#[tokio::test]
async fn a_connection_that_stalls_after_words_passes_them_and_holds_the_next_request() {
    let (database, proxy, url) = database_behind_proxy().await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("CREATE TABLE thing (a int)").execute(&mut connection).await.unwrap();
    proxy.stall_open_after("BEGIN");
    ask(&mut connection).await.unwrap();
    sqlx::raw_sql("BEGIN").execute(&mut connection).await.unwrap();
    assert_eq!(proxy.traffic().held, 0);
    let work = tokio::spawn(async move {
        sqlx::raw_sql("INSERT INTO thing VALUES (1); COMMIT").execute(&mut connection).await.map(drop)
    });
    let held = async {
        while proxy.traffic().held == 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(60), held).await.expect("the next request must reach the proxy");
    assert_eq!((count(&database).await, work.is_finished()), (0, false));
    proxy.restore();
    work.await.unwrap().unwrap();
    assert_eq!(count(&database).await, 1);
}

#[tokio::test]
async fn stalled_replies_come_later_but_the_work_is_done() {
    let (database, proxy, url) = database_behind_proxy().await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("CREATE TABLE thing (a int)").execute(&mut connection).await.unwrap();
    proxy.stall_replies();
    let work = tokio::spawn(async move {
        sqlx::raw_sql("INSERT INTO thing VALUES (1)").execute(&mut connection).await.map(drop)
    });
    let done = async {
        while count(&database).await == 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(30), done).await.expect("the request must reach the server");
    tokio::time::sleep(SILENCE).await;
    assert!(!work.is_finished());
    proxy.restore();
    work.await.unwrap().unwrap();
}

#[tokio::test]
async fn a_dropped_reply_leaves_the_work_done() {
    let (database, proxy, url) = database_behind_proxy().await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    sqlx::raw_sql("CREATE TABLE thing (a int)").execute(&mut connection).await.unwrap();
    proxy.drop_next_reply_with("COMMIT");
    sqlx::raw_sql("BEGIN").execute(&mut connection).await.unwrap();
    sqlx::raw_sql("INSERT INTO thing VALUES (1)").execute(&mut connection).await.unwrap();
    assert_eq!((count(&database).await, proxy.traffic().dropped_replies), (0, 0));
    sqlx::raw_sql("COMMIT").execute(&mut connection).await.unwrap_err();
    assert_eq!((count(&database).await, proxy.traffic().dropped_replies), (1, 1));
    let mut connection = PgConnection::connect(&url).await.unwrap();
    proxy.drop_next_reply();
    ask(&mut connection).await.unwrap_err();
    let mut connection = PgConnection::connect(&url).await.unwrap();
    ask(&mut connection).await.unwrap();
}

#[tokio::test]
async fn delay_counts_each_way() {
    let (_database, proxy, url) = database_behind_proxy().await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    proxy.delay(Duration::from_millis(100));
    let start = Instant::now();
    ask(&mut connection).await.unwrap();
    assert!(start.elapsed() >= Duration::from_millis(200), "{:?}", start.elapsed());
}

#[tokio::test]
async fn new_connections_go_to_the_new_target() {
    let (_database, proxy, url) = database_behind_proxy().await;
    let closed = Proxy::start("127.0.0.1:1").await;
    closed.cut();
    proxy.retarget(format!("127.0.0.1:{}", closed.port()));
    PgConnection::connect(&url).await.unwrap_err();
    proxy.retarget(Cluster::shared().address());
    PgConnection::connect(&url).await.unwrap();
}

#[tokio::test]
async fn held_pieces_can_be_delivered_with_pauses() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let proxy = Proxy::start(listener.local_addr().unwrap().to_string()).await;
    let mut client = TcpStream::connect(("127.0.0.1", proxy.port())).await.unwrap();
    let (mut server, _) = listener.accept().await.unwrap();
    proxy.stall_open();
    client.write_all(b"a").await.unwrap();
    let held = async {
        while proxy.traffic().held == 0 {
            tokio::task::yield_now().await;
        }
    };
    timeout(Duration::from_secs(60), held).await.expect("the piece must reach the proxy");
    client.write_all(b"b").await.unwrap();
    tokio::time::sleep(SILENCE).await;
    let gap = SILENCE / 3;
    proxy.restore_apart(gap);
    assert_eq!(server.read_u8().await.unwrap(), b'a');
    let first = Instant::now();
    assert_eq!(server.read_u8().await.unwrap(), b'b');
    // The time of the first read is a little later than that of its delivery.
    assert!(first.elapsed() >= gap / 2, "{:?}", first.elapsed());
}

#[tokio::test(start_paused = true)]
async fn works_beside_a_paused_clock() {
    let (_database, proxy, url) = database_behind_proxy().await;
    proxy.delay(Duration::from_millis(20));
    let mut connection = PgConnection::connect(&url).await.unwrap();
    ask(&mut connection).await.unwrap();
}
