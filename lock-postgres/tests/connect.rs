//! Opening a session: final and transient errors, the choice of the host, the login.
#![allow(clippy::unwrap_used, missing_docs)]

use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind};
use leasehold_postgres::{Credentials, PgConfig};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Connection as _, PgConnection, Row as _, raw_sql};
use test_servers::{Cluster, ClusterOptions, Standby};

/// Time limit that no slow machine reaches.
const LONG: Duration = Duration::from_secs(60);

/// Starts a server that sends every client this reply. Returns its URL.
fn answering(answer: Vec<u8>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((mut client, _)) = listener.accept() {
            let mut startup = [0; 1024];
            // A client with TLS requests it first.
            let _ = client.read(&mut startup).unwrap_or(0);
            if startup[4..8] == 80_877_103_u32.to_be_bytes() {
                let _ = client.write_all(b"N");
                let _ = client.read(&mut startup);
            }
            let _ = client.write_all(&answer);
        }
    });
    format!("postgres://app:s3cret@127.0.0.1:{port}/app")
}

fn message(kind: u8, body: &[u8]) -> Vec<u8> {
    let size = u32::try_from(body.len() + 4).unwrap();
    [&[kind][..], &size.to_be_bytes(), body].concat()
}

fn refusal(state: &str, words: &[u8]) -> Vec<u8> {
    let fields = [&b"SFATAL\0VFATAL\0C"[..], state.as_bytes(), b"\0M", words, b"\0\0"].concat();
    message(b'E', &fields)
}

async fn refused(config: PgConfig) -> Error {
    match config.connect_timeout(LONG).connect().await {
        Ok(_) => panic!("the server took the session"),
        Err(error) => error,
    }
}

async fn refused_by(answer: Vec<u8>) -> Error {
    refused(PgConfig::from_url(&answering(answer)).unwrap()).await
}

#[tokio::test]
async fn only_what_may_pass_is_worth_a_retry_while_a_session_is_opened() {
    for (state, passes) in [
        ("57P01", true),
        ("57P02", true),
        ("57P03", true),
        ("53300", true),
        ("53200", true),
        ("55000", true),
        ("08006", true),
        ("08P01", true),
        ("57014", true),
        ("28P01", false),
        ("28000", false),
        ("3D000", false),
        ("42704", false),
        ("22023", false),
        ("42501", false),
        ("42601", false),
        ("0A000", false),
        ("40001", false),
        ("58030", false),
        ("XX000", false),
        ("ZZZZZ", false),
    ] {
        let error = refused_by(refusal(state, b"the words of the server")).await;
        assert_eq!(error.kind().is_transient(), passes, "{state}: {error:?}");
        assert!(error.message().contains("the words of the server"), "{error}");
        assert!(!error.message().contains("schema apply"), "{error}");
    }
}

#[tokio::test]
async fn what_the_driver_cannot_read_is_final() {
    let latin = b"authentification par mot de passe \xe9chou\xe9e pour app";
    let error = refused_by(refusal("28P01", latin)).await;
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
    assert!(error.message().contains("UTF-8") && error.message().contains("password"), "{error}");
    assert!(!error.message().contains("sqlx"), "{error}");
    let gss = message(b'R', &7_u32.to_be_bytes());
    let error = refused_by(gss).await;
    assert!(
        error.kind() == ErrorKind::InvalidOption && error.message().contains("authentication method"),
        "{error}"
    );
    assert!(!error.message().contains("sqlx"), "{error}");
    let error = refused_by(b"<html>400 Bad Request</html>".to_vec()).await;
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
}

#[tokio::test]
async fn a_refused_password_is_tried_again_only_if_it_has_changed() {
    let cluster = Cluster::start(ClusterOptions::new().password("second"));
    let fixed = PgConfig::from_url(&cluster.admin_url()).unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let asked = |answers: [&'static str; 2]| {
        let (calls, answers) = (Arc::clone(&calls), Mutex::new(answers.to_vec()));
        calls.store(0, Ordering::SeqCst);
        fixed.clone().connect_timeout(LONG).credentials(move || {
            calls.fetch_add(1, Ordering::SeqCst);
            let answer = Credentials::password(answers.lock().unwrap().remove(0));
            async move { Ok(answer) }
        })
    };
    let changed = asked(["first", "second"]);
    changed.connect().await.unwrap().close().await.unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 2);
    for (answers, expected) in [(["first", "first"], 2), (["first", "third"], 2)] {
        let error = refused(asked(answers)).await;
        assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error}");
        assert_eq!(calls.load(Ordering::SeqCst), expected, "{answers:?}");
        assert!(!format!("{error:?}").contains("first"), "{error:?}");
    }
    let other_user =
        fixed.clone().credentials(|| async { Ok(Credentials::password("second").user("nobody")) });
    assert_eq!(refused(other_user).await.kind(), ErrorKind::PermissionDenied);
    let failing = fixed.credentials(|| async { Err(Error::new(ErrorKind::Capacity, "no token today")) });
    assert_eq!(refused(failing).await.kind(), ErrorKind::Capacity);
    assert!(!format!("{:?}", Credentials::password("hunter2").user("app")).contains("hunter2"));
}

#[tokio::test]
async fn the_options_of_a_pool_are_followed() {
    let cluster = Cluster::start(ClusterOptions::new().password("second"));
    let right = PgConfig::from_url(&cluster.admin_url()).unwrap().options().clone();
    let pool = PgPoolOptions::new().connect_lazy_with(right.clone().password("first"));
    let config = PgConfig::from_pool(&pool).application_name("follower").connect_timeout(LONG);
    assert_eq!(refused(config.clone()).await.kind(), ErrorKind::PermissionDenied);
    pool.set_connect_options(right);
    let mut connection = config.connect().await.unwrap();
    let row = raw_sql("SHOW application_name").fetch_one(&mut connection).await.unwrap();
    assert_eq!(row.get::<&str, _>(0), "follower");
    connection.close().await.unwrap();
}

/// Returns a configuration with several servers, given by their ports.
fn of_several(ports: &[u16], parameters: &str) -> PgConfig {
    let hosts: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
    let url = format!("postgres://postgres@{}/postgres?{parameters}", hosts.join(","));
    PgConfig::from_url(&url).unwrap().connect_timeout(LONG)
}

async fn port_of(mut connection: PgConnection) -> u16 {
    let row = raw_sql("SHOW port").fetch_one(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    row.get::<&str, _>(0).parse().unwrap()
}

#[tokio::test]
async fn a_standby_and_a_dead_host_send_on_to_the_next() {
    let primary = Cluster::start(ClusterOptions::new());
    let standby = Standby::of(&primary).await;
    let (at, behind) = (primary.port(), standby.cluster().port());
    for (ports, parameters) in [
        (vec![behind, at], ""),
        (vec![at, behind], ""),
        (vec![1, behind, at], "target_session_attrs=read-write"),
        (vec![behind, 1, at], "load_balance_hosts=random&target_session_attrs=primary"),
    ] {
        let connection = of_several(&ports, parameters).connect().await.unwrap();
        assert_eq!(port_of(connection).await, at, "{ports:?} {parameters}");
    }
    // A single host can be a standby, for inspection, unless the URL excludes it.
    assert_eq!(port_of(of_several(&[behind], "").connect().await.unwrap()).await, behind);
    let error = refused(of_several(&[behind], "target_session_attrs=read-write")).await;
    assert!(error.kind() == ErrorKind::Unavailable && error.message().contains("a standby"), "{error}");
    let error = refused(of_several(&[behind, 1], "")).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    for place in
        [format!("127.0.0.1:{behind}: the server is a standby"), "127.0.0.1:1: Connection".to_owned()]
    {
        assert!(error.message().contains(&place), "{place} is not in: {error}");
    }
}

/// A server with this default is used if there is no other, because leasehold's sessions change the default.
#[tokio::test]
async fn a_server_that_is_read_only_by_default_is_taken_last() {
    let cluster = Cluster::shared();
    let read_only = "options=-cdefault_transaction_read_only%3Don";
    let both = [cluster.port(), 1];
    assert_eq!(port_of(of_several(&both, read_only).connect().await.unwrap()).await, cluster.port());
    let strictly = format!("{read_only}&target_session_attrs=read-write");
    let error = refused(of_several(&both, &strictly)).await;
    assert!(error.message().contains("read-only by default"), "{error}");
}

/// As a load balancer does whose server is away, with and without the driver's request for TLS.
#[tokio::test]
async fn a_connection_that_is_closed_before_the_first_reply_is_worth_a_retry() {
    let closing = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = closing.local_addr().unwrap().port();
    std::thread::spawn(move || {
        while let Ok((mut client, _)) = closing.accept() {
            // Read first, because closing with unread bytes would reset the connection.
            let _ = client.read(&mut [0; 1024]);
        }
    });
    for mode in ["prefer", "disable"] {
        let config =
            PgConfig::from_url(&format!("postgres://app@127.0.0.1:{port}/app?sslmode={mode}")).unwrap();
        let error = refused(config).await;
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{mode}: {error}");
        assert!(error.is_retryable(), "{mode}: {error}");
    }
}

#[tokio::test]
async fn a_host_that_is_silent_costs_its_share_of_the_time() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let ports = [silent.local_addr().unwrap().port(), Cluster::shared().port()];
    let config = of_several(&ports, "").connect_timeout(Duration::from_secs(10));
    assert_eq!(port_of(config.connect().await.unwrap()).await, ports[1]);
    // The next session tries the host that replied first, so the silent host costs no time.
    assert_eq!(
        port_of(config.connect_timeout(Duration::from_secs(10)).connect().await.unwrap()).await,
        ports[1]
    );
}

#[tokio::test(start_paused = true)]
async fn a_paused_clock_is_named_as_the_cause() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("postgres://app@127.0.0.1:{}/x", silent.local_addr().unwrap().port());
    let error = refused(PgConfig::from_url(&url).unwrap()).await;
    assert!(error.message().contains("tokio's clock is paused"), "{error}");
    assert!(!error.kind().is_transient(), "{error}");
}
