//! Private etcd clusters start, break on request, and end.

#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::future::Future;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use test_bounds::Bound;
use test_servers::{Certificates, Counter, Etcd, EtcdOptions, EtcdProgram, EtcdUser, Loss, Proxy, Relay};
use tokio::net::TcpStream;

/// Bound of events that etcd itself brings about.
const SOON: Duration = Duration::from_secs(60);

async fn until<F: Future<Output = bool>>(what: &str, mut is_true: impl FnMut() -> F) {
    let bound = Bound::new(SOON);
    while !is_true().await {
        bound.check(what);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn runs(pid: u32) -> bool {
    // A zombie has ended.
    let state = Command::new("ps").args(["-o", "stat=", "-p", &pid.to_string()]).output().unwrap().stdout;
    !state.is_empty() && !state.starts_with(b"Z")
}

#[tokio::test]
async fn both_programs_start_as_another_user_than_root() {
    for (program, version) in [(EtcdProgram::Vendored, "3.7."), (EtcdProgram::Installed, "3.")] {
        let etcd = Etcd::start(EtcdOptions::new().program(program));
        let status = etcd.status(0).await.unwrap();
        assert!(status.version.starts_with(version), "{status:?}");
        assert_eq!(status.leader, status.member);
        let pid = etcd.pid(0).unwrap().to_string();
        let user = Command::new("ps").args(["-o", "uid=", "-p", &pid]).output().unwrap().stdout;
        assert_ne!(String::from_utf8(user).unwrap().trim(), "0");
    }
}

#[tokio::test]
async fn keys_and_leases_are_seen() {
    let etcd = Etcd::shared();
    let prefix = format!("{}/", Etcd::fresh_prefix());
    let first = etcd.put(format!("{prefix}b"), "1").await.unwrap();
    etcd.put(format!("{prefix}a"), "2").await.unwrap();
    etcd.put(format!("{prefix}b"), "3").await.unwrap();
    let entries = etcd.entries(&prefix).await;
    let values: Vec<_> = entries.iter().map(|entry| entry.value.as_slice()).collect();
    assert_eq!(values, [b"3", b"2"], "the oldest key is first");
    assert_eq!(entries[0].created, first);
    assert!(entries[0].modified > entries[1].modified && entries[0].lease == 0);
    assert!(etcd.revision().await >= entries[0].modified);
    assert!(!etcd.revoke(17).await);
    assert_eq!(etcd.delete(&prefix).await, 2);
    assert!(etcd.entries(&prefix).await.is_empty());
}

#[tokio::test]
async fn three_members_survive_the_leader_and_take_it_back() {
    let etcd = Etcd::start(EtcdOptions::three());
    etcd.put("kept", "1").await.unwrap();
    let first = etcd.leader().await;
    let term = etcd.status(first).await.unwrap().term;
    etcd.kill(first).await;
    assert_eq!(etcd.pid(first), None);
    let second = etcd.leader().await;
    assert_ne!(first, second);
    assert!(etcd.status(second).await.unwrap().term > term);
    assert_eq!(etcd.entries("kept").await.len(), 1);
    etcd.start_again(first).await;
    etcd.ready().await;
    assert!(etcd.status(first).await.is_ok());
    let moved = etcd.move_leader().await.unwrap();
    assert_eq!(etcd.leader().await, moved);
    etcd.make_leader(first).await;
    assert_eq!(etcd.leader().await, first);
}

#[tokio::test]
async fn a_frozen_leader_is_replaced_and_follows_once_it_goes_on() {
    let etcd = Etcd::start(EtcdOptions::three());
    let first = etcd.leader().await;
    etcd.pause(first);
    until("another leader", || async { etcd.leader().await != first }).await;
    assert_eq!(etcd.status(first).await.unwrap_err().code, None, "a frozen member does not reply");
    etcd.resume(first);
    let second = etcd.leader().await;
    let id = etcd.status(second).await.unwrap().member;
    until("the member follows", || async {
        etcd.status(first).await.is_ok_and(|status| status.leader == id)
    })
    .await;
}

#[tokio::test]
async fn an_isolated_leader_is_replaced_while_clients_reach_it() {
    let etcd = Etcd::start(EtcdOptions::three());
    let first = etcd.leader().await;
    etcd.isolate(first);
    until("another leader", || async { etcd.leader().await != first }).await;
    until("the isolated member gives up", || async {
        etcd.status(first).await.is_ok_and(|status| status.leader == 0)
    })
    .await;
    etcd.put("written by the others", "1").await.unwrap();
    let behind = etcd.status(first).await.unwrap();
    etcd.rejoin();
    until("the member catches up", || async {
        etcd.status(first).await.is_ok_and(|now| now.leader != 0 && now.revision > behind.revision)
    })
    .await;
    let terms = (etcd.status(0).await.unwrap().term, etcd.status(1).await.unwrap().term);
    assert_eq!(terms.0, terms.1);
}

#[tokio::test]
async fn a_crash_keeps_the_data() {
    for options in [EtcdOptions::new(), EtcdOptions::three()] {
        let etcd = Etcd::start(options);
        let before = etcd.put("kept", "1").await.unwrap();
        etcd.crash().await;
        assert_eq!(etcd.entries("kept").await[0].created, before);
        assert!(etcd.put("more", "1").await.unwrap() > before);
    }
}

#[tokio::test]
async fn a_restore_takes_the_revision_back() {
    let with_log = (EtcdOptions::three().program(EtcdProgram::Installed), Loss::Log);
    for (options, loss) in
        [(EtcdOptions::new(), Loss::Nothing), (EtcdOptions::three(), Loss::Nothing), with_log]
    {
        let etcd = Etcd::start(options);
        for number in 0..20 {
            etcd.put("old", number.to_string()).await.unwrap();
        }
        let before = etcd.status(0).await.unwrap();
        let backup = etcd.backup(loss).await;
        let lost = etcd.put("lost", "1").await.unwrap();
        for _ in 0..2 {
            etcd.restore(&backup).await;
            let after = etcd.status(0).await.unwrap();
            assert_eq!((after.cluster, after.member), (before.cluster, before.member), "{loss:?}");
            assert_eq!(etcd.entries("old").await.len(), 1, "{loss:?}");
            assert!(etcd.entries("lost").await.is_empty(), "{loss:?}");
            assert_eq!(after.index < after.revision, loss == Loss::Log, "{loss:?}: {after:?}");
            assert_eq!(etcd.put("again", "1").await.unwrap(), lost, "{loss:?}: a number is given twice");
        }
    }
}

#[tokio::test]
async fn a_full_database_refuses_writes_until_there_is_room() {
    let etcd = Etcd::start(EtcdOptions::new().quota(4 << 20));
    let refusal = etcd.fill().await;
    assert!(refusal.message.contains("space exceeded"), "{refusal}");
    assert!(etcd.is_full().await);
    etcd.put("refused", "1").await.unwrap_err();
    etcd.make_room().await;
    assert!(!etcd.is_full().await);
    etcd.put("accepted", "1").await.unwrap();
}

#[tokio::test]
async fn users_have_the_right_to_their_prefix_only() {
    let etcd = Etcd::start(EtcdOptions::new().token_ttl(3));
    etcd.put("kept/before", "1").await.unwrap();
    let user = EtcdUser::new("app", "s3cret/@", "locks/");
    etcd.require_users(std::slice::from_ref(&user)).await;
    // The calls of the tests are those of root.
    etcd.put("kept/after", "1").await.unwrap();
    etcd.change_password("app", "another").await;
    etcd.withdraw_right(&user).await;
    etcd.crash().await;
    assert_eq!(etcd.entries("kept/").await.len(), 2);
}

#[tokio::test]
async fn counters_grow_with_writes() {
    let etcd = Etcd::start(EtcdOptions::new());
    let before = (etcd.counter(0, Counter::Proposals).await, etcd.counter(0, Counter::Reads).await);
    etcd.put("a", "1").await.unwrap();
    etcd.entries("a").await;
    let after = (etcd.counter(0, Counter::Proposals).await, etcd.counter(0, Counter::Reads).await);
    assert_eq!((after.0 - before.0, after.1 - before.1), (1, 1));
}

#[tokio::test]
async fn encrypted_members_reply_to_the_tests() {
    for options in [EtcdOptions::new(), EtcdOptions::new().client_certificates()] {
        let etcd = Etcd::start(options.encrypted(Certificates::new()));
        assert!(etcd.url("p").starts_with("etcds://127.0.0.1:"));
        etcd.put("a", "1").await.unwrap();
        etcd.compact().await;
    }
}

#[tokio::test]
async fn members_can_be_behind_a_proxy() {
    let etcd = Etcd::shared();
    let proxy = Proxy::start(etcd.address(0)).await;
    assert!(proxy.url(&etcd.url("p")).contains(&proxy.port().to_string()));
}

/// Calls `Maintenance.Status` over a connection. Returns the reply and the status of gRPC.
async fn status_over(
    client: &mut hyper::client::conn::http2::SendRequest<Full<Bytes>>,
    address: &str,
) -> (Bytes, String) {
    let request = http::Request::post(format!("http://{address}/etcdserverpb.Maintenance/Status"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        // A message without fields.
        .body(Full::from(Bytes::from_static(&[0; 5])))
        .unwrap();
    let response = client.send_request(request).await.unwrap();
    // An error without a message has its status in the header.
    let early = response.headers().get("grpc-status").cloned();
    let body = response.into_body().collect().await.unwrap();
    let late = body.trailers().and_then(|trailers| trailers.get("grpc-status")).cloned();
    let status = early.or(late).unwrap().to_str().unwrap().to_owned();
    (body.to_bytes(), status)
}

#[tokio::test]
async fn a_relay_keeps_its_client_while_the_server_changes() {
    let (first, second) = (Etcd::start(EtcdOptions::new()), Etcd::shared());
    let relay = Relay::start(first.address(0));
    let address = relay.address();
    let stream = TokioIo::new(TcpStream::connect(&address).await.unwrap());
    let (mut client, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), stream).await.unwrap();
    tokio::spawn(connection);
    let (of_first, status) = status_over(&mut client, &address).await;
    assert_eq!(status, "0");
    first.kill(0).await;
    assert_eq!(status_over(&mut client, &address).await.1, "14", "UNAVAILABLE");
    relay.retarget(second.address(0));
    let (of_second, status) = status_over(&mut client, &address).await;
    assert_eq!(status, "0");
    // The ids of cluster and member are in the replies.
    assert_ne!(of_first, of_second);
    relay.retarget(first.address(0));
    first.start_again(0).await;
    first.ready().await;
    assert_eq!(status_over(&mut client, &address).await.1, "0");
    assert_eq!(relay.accepted(), 1);
}

#[test]
fn nothing_is_left_of_a_dropped_cluster() {
    let etcd = Etcd::start(EtcdOptions::new());
    let pid = etcd.pid(0).unwrap();
    assert!(runs(pid));
    drop(etcd);
    assert!(!runs(pid));
}

const CHILD: &str = "TEST_SERVERS_CHILD";

/// Runs only as a child process of the next test, which kills it.
#[test]
fn child_with_members() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let etcd = Etcd::start(EtcdOptions::new());
    etcd.pause(0);
    println!("\netcd {}", etcd.pid(0).unwrap());
    std::thread::sleep(SOON);
}

#[tokio::test]
async fn nothing_is_left_when_the_process_is_killed() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["child_with_members", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let pid = lines.into_iter().find_map(|line| line.strip_prefix("etcd ")?.parse().ok()).unwrap();
    assert!(runs(pid));
    child.kill().unwrap();
    child.wait().unwrap();
    until("the member ends", || async { !runs(pid) }).await;
}
