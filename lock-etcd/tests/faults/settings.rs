//! Members, prefixes and TTLs that cannot work, and servers that are no etcd.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use leasehold_api::{AcquireOptions, Error, ErrorKind, ListQuery, Lock as _, LockExt as _, MAX_KEY_BYTES};
use leasehold_etcd::{EtcdConfig, MAX_TTL, connect};
use test_servers::{Etcd, EtcdOptions, Proxy};

use crate::support::{acquired, client, client_of, config, cycle, key, queue, soon};

/// Returns the error of a client that cannot connect to these members.
async fn refused(members: Vec<String>) -> Error {
    let config = EtcdConfig::new(members, "p");
    soon("the client never gives up", config.connect()).await.unwrap_err()
}

/// Returns an address where nothing listens.
async fn closed() -> (Proxy, String) {
    let proxy = Proxy::start("127.0.0.1:1").await;
    proxy.cut();
    let address = format!("127.0.0.1:{}", proxy.port());
    (proxy, address)
}

/// Starts a server that treats each connection by `serve` on a thread.
fn server(serve: fn(TcpStream)) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        listener.incoming().flatten().for_each(|stream| drop(thread::spawn(move || serve(stream))));
    });
    address
}

#[tokio::test]
async fn members_that_do_not_exist_are_an_error() {
    let (_kept, address) = closed().await;
    let error = refused(vec![address.clone()]).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    let shown = format!("{error} {}", error.store().unwrap_or_default());
    assert!(shown.contains(&address), "the error names the member: {shown}");
    let error = refused(vec!["nowhere.invalid:2379".to_owned()]).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(std::error::Error::source(&error).is_some(), "{error:?} has no cause");
}

#[tokio::test]
async fn an_error_at_the_start_hides_the_password() {
    let (_kept, address) = closed().await;
    let error = connect(&format!("etcd://app:s3cret@{address}/p")).await.unwrap_err();
    let mut shown = format!("{error} {error:?}");
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        shown += &format!("{cause} {cause:?}");
        source = cause.source();
    }
    assert!(!shown.contains("s3cret"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn one_wrong_member_of_three_does_no_harm() {
    let (etcd, prefix) = (Etcd::start(EtcdOptions::three()), Etcd::fresh_prefix());
    let (_kept, wrong) = closed().await;
    for position in 0..3 {
        let mut members = etcd.addresses();
        members[position].clone_from(&wrong);
        let lock = client_of(members, &prefix, Duration::from_secs(30)).await;
        for _ in 0..5 {
            cycle(&lock, "k").await;
        }
    }
}

#[tokio::test]
async fn a_ttl_below_the_minimum_of_the_server_is_refused_with_the_minimum() {
    // Fifteen heartbeats are 4.5 s, which the server rounds up.
    let etcd = Etcd::start(EtcdOptions::new().heartbeat(Duration::from_millis(300)));
    let prefix = Etcd::fresh_prefix();
    let error = config(&etcd, &prefix).ttl(Duration::from_secs(1)).connect().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error:?}");
    assert!(error.to_string().contains('5'), "{error}");
    let lock = client(&etcd, &prefix).await;
    assert_eq!(lock.capabilities().lease.unwrap().min, Duration::from_secs(5));
    let options = AcquireOptions::new().ttl(Duration::from_secs(4));
    let error = lock.try_acquire(&key("k"), &options).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error:?}");
    let guard = lock.key("k").ttl(Duration::from_secs(5)).acquire().await.unwrap();
    guard.release().await.unwrap();
}

#[tokio::test]
async fn a_server_for_http_1_is_no_etcd() {
    let address = server(|mut stream| {
        let _ = stream.read(&mut [0; 4096]);
        let _ = stream.write_all(b"HTTP/1.1 505 HTTP Version Not Supported\r\ncontent-length: 0\r\n\r\n");
        while stream.read(&mut [0; 4096]).is_ok_and(|length| length > 0) {}
    });
    let error = refused(vec![address]).await;
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error:?}");
}

#[tokio::test]
async fn a_server_of_another_protocol_is_no_etcd() {
    let address = server(|mut stream| {
        let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n");
        let _ = stream.read(&mut [0; 4096]);
    });
    let error = refused(vec![address]).await;
    assert!(matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Unavailable), "{error:?}");
}

#[tokio::test]
async fn a_server_that_never_replies_is_unavailable() {
    let address = server(|mut stream| while stream.read(&mut [0; 4096]).is_ok_and(|length| length > 0) {});
    let error = refused(vec![address]).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
}

/// A server that closes each connection, as a load balancer without a backend does.
#[tokio::test]
async fn a_server_that_hangs_up_is_unavailable() {
    let error = refused(vec![server(drop)]).await;
    assert!(matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::Unavailable), "{error:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_clusters_behind_one_url_never_grant_in_both() {
    let (first, second) = (Etcd::start(EtcdOptions::new()), Etcd::start(EtcdOptions::new()));
    let prefix = Etcd::fresh_prefix();
    let members = [first.addresses(), second.addresses()].concat();
    let config = EtcdConfig::new(members, &*prefix);
    match soon("the client never gives up", config.connect()).await {
        Err(error) => {
            assert!(matches!(error.kind(), ErrorKind::Unavailable | ErrorKind::InvalidOption), "{error:?}");
        }
        Ok(lock) => {
            let held = acquired(&lock, "held").await;
            let (used, other) = if queue(&first, &prefix, "held").await.is_empty() {
                (second, first)
            } else {
                (first, second)
            };
            used.pause(0);
            let error =
                soon("an acquire never ends", lock.key("k").wait(Duration::from_secs(5)).acquire()).await;
            assert_ne!(error.unwrap_err().kind(), ErrorKind::Lost);
            assert!(other.entries(&prefix).await.is_empty(), "granted in another cluster");
            used.resume(0);
            cycle(&lock, "k").await;
            drop(held);
        }
    }
}

#[tokio::test]
async fn two_prefixes_of_one_cluster_are_apart() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let (a, b) = (client(etcd, &prefix).await, client(etcd, &format!("{prefix}/b")).await);
    let guard = acquired(&a, "k").await;
    let other = b.key("k").try_acquire().await.unwrap().unwrap();
    assert_eq!(b.admin().unwrap().list(&ListQuery::new()).await.unwrap().len(), 1);
    assert_eq!(a.admin().unwrap().list(&ListQuery::new()).await.unwrap().len(), 1);
    guard.release().await.unwrap();
    other.release().await.unwrap();
}

#[tokio::test]
async fn absurd_values_are_refused_or_work() {
    let (etcd, prefix) = (Etcd::shared(), Etcd::fresh_prefix());
    let lock = client(etcd, &prefix).await;
    let longest = "k".repeat(MAX_KEY_BYTES);
    cycle(&lock, &longest).await;
    let error = lock.key("k").ttl(Duration::MAX).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error:?}");
    let error = lock.key("k").ttl(MAX_TTL + Duration::from_secs(1)).try_acquire().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error:?}");
    let guard = lock.key("k").ttl(MAX_TTL).wait(Duration::MAX).acquire().await.unwrap();
    guard.release().await.unwrap();
    for cooldown in [Duration::MAX, Duration::from_secs(1 << 40), Duration::from_nanos(1)] {
        match lock.key("cold").cooldown(cooldown).try_acquire().await {
            Ok(guard) => drop(guard),
            Err(error) => assert!(
                matches!(error.kind(), ErrorKind::InvalidOption | ErrorKind::Unsupported | ErrorKind::NotDue),
                "{cooldown:?}: {error:?}"
            ),
        }
    }
    // Another key works as before.
    cycle(&lock, "k").await;
}
