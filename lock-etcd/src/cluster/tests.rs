use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use test_bounds::within;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::*;
use crate::config::EtcdCredentials;
use crate::wire::{AuthenticateResponse, RangeRequest};

/// A liveness bound.
const MINUTE: Duration = Duration::from_secs(60);

/// Starts a server that sends `reply` after the first bytes of each connection, and closes it.
async fn server(reply: &'static [u8]) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let mut bytes = [0; 1024];
            let _ = socket.read(&mut bytes).await;
            let _ = socket.write_all(reply).await;
        }
    });
    address
}

/// Returns an address at which no server listens.
async fn nowhere() -> SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

fn config(members: &[SocketAddr]) -> EtcdConfig {
    EtcdConfig::new(members.iter().map(ToString::to_string), "p").credentials("me", "secret")
}

fn without_user(members: &[SocketAddr]) -> EtcdConfig {
    EtcdConfig::new(members.iter().map(ToString::to_string), "p")
}

#[tokio::test]
async fn a_server_of_http_1_is_told_apart() {
    let http_1 = server(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n").await;
    let error = within(MINUTE, "connecting", Cluster::connect(&without_user(&[http_1]))).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
    assert!(error.message().contains("HTTP/1"), "{error}");
}

#[tokio::test]
async fn members_that_do_not_exist_are_unavailable() {
    let members = [nowhere().await, nowhere().await];
    for config in [config(&members), without_user(&members)] {
        let error = within(MINUTE, "connecting", Cluster::connect(&config)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
        assert!(error.store().is_some_and(|store| store.ends_with("/p")), "{error}");
        assert!(!format!("{error:?}").contains("secret"), "{error:?}");
    }
}

#[tokio::test]
async fn a_name_that_does_not_resolve_is_unavailable() {
    let config = EtcdConfig::new(["etcd.invalid"], "p");
    let error = within(MINUTE, "connecting", Cluster::connect(&config)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
}

#[test]
fn there_is_an_error_outside_of_a_runtime() {
    let error = pollster::block_on(Cluster::connect(&EtcdConfig::new(["h"], "p"))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NoRuntime);
}

#[tokio::test]
async fn a_request_counts_as_sent_once_there_was_a_connection() {
    let read = RangeRequest::key("k");
    let limit = Duration::from_millis(300);
    let cluster = Cluster::new(&without_user(&[nowhere().await])).await.unwrap();
    let failure = cluster.call(read.clone(), limit).await.unwrap_err();
    assert_eq!((failure.class(), failure.sent(), cluster.heard().connects), (Class::Unreachable, false, 0));

    let cluster = Cluster::new(&without_user(&[server(b"").await])).await.unwrap();
    let failure = cluster.call_once(read, limit).await.unwrap_err();
    assert!(failure.sent() && cluster.heard().connects > 0, "{failure:?}");
}

#[tokio::test]
async fn one_task_asks_for_a_token_for_all() {
    let login = Login::new(Some(EtcdCredentials::new("me", "secret")));
    let asked = AtomicUsize::new(0);
    let authenticate = |_| async {
        let number = asked.fetch_add(1, Ordering::SeqCst);
        tokio::task::yield_now().await;
        Ok(AuthenticateResponse { header: None, token: format!("t{number}") })
    };
    let none = login.current();
    assert!(none.is_missing());
    let tokens = join_all((0..8).map(|_| login.renewed(&none, authenticate))).await;
    let values: Vec<_> = tokens.into_iter().map(|token| token.unwrap().value.unwrap()).collect();
    assert_eq!((asked.load(Ordering::SeqCst), values), (1, vec!["t0".parse().unwrap(); 8]));
    let ended = login.current();
    let next = login.renewed(&ended, authenticate).await.unwrap();
    assert_eq!(next.value.unwrap(), "t1");
    let last = login.renewed(&ended, authenticate).await.unwrap();
    assert_eq!(last.value.unwrap(), "t1", "newer than the one that has ended");
}

#[tokio::test]
async fn a_failed_login_has_sent_nothing_and_can_be_repeated() {
    let login = Login::new(Some(EtcdCredentials::new("me", "secret")));
    let none = login.current();
    let failed = login.renewed(&none, |_| async { Err(Failure::maybe_sent(Class::Lost)) }).await;
    assert!(!failed.err().unwrap().sent(), "the request that needs the token was not sent");
    let off = login.renewed(&none, |_| async { Err(Failure::unsent(Class::AuthOff)) }).await.unwrap();
    assert!(off.value.is_none() && !off.is_missing(), "without authentication no token is needed");
}

#[cfg(not(any(
    feature = "tls-rustls-aws-lc-rs",
    feature = "tls-rustls-ring-webpki",
    feature = "tls-rustls-ring-native-roots"
)))]
#[tokio::test]
async fn tls_without_its_feature_is_an_error_that_names_the_features() {
    let error = Cluster::connect(&EtcdConfig::from_url("etcds://h/p").unwrap()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.message().contains("tls-rustls-ring-webpki"), "{error}");
}
