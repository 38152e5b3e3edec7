//! Users, passwords, rights and tokens (hazard E10).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use leasehold_api::{Error, ErrorKind, Lock as _, LockExt as _};
use leasehold_etcd::{EtcdConfig, EtcdCredentials, connect};
use test_servers::{Etcd, EtcdOptions, EtcdProgram, EtcdUser};

use crate::support::{MINUTES, acquired, config, cycle, queue, renewed, soon};

const PREFIX: &str = "locks";
const PASSWORD: &str = "s3cret/@:?";

/// Returns the user `app`. As in production, its role has rights to the prefix of the store only.
fn app() -> EtcdUser {
    EtcdUser::new("app", PASSWORD, format!("{PREFIX}/"))
}

/// Starts a cluster with the user [`app`], whose tokens end after two seconds without use.
async fn secured(program: EtcdProgram) -> Etcd {
    let etcd = Etcd::start(EtcdOptions::new().program(program).token_ttl(2));
    etcd.require_users(&[app()]).await;
    etcd
}

fn as_app(etcd: &Etcd) -> EtcdConfig {
    config(etcd, PREFIX).credentials("app", PASSWORD)
}

async fn refused(config: EtcdConfig) -> Error {
    let error = soon("the client never gives up", config.connect()).await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("s3cret"), "{error:?}");
    error
}

#[tokio::test]
async fn a_client_without_its_right_is_refused_at_the_start() {
    for program in [EtcdProgram::Vendored, EtcdProgram::Installed] {
        let etcd = secured(program).await;
        for wrong in [
            config(&etcd, PREFIX),
            config(&etcd, PREFIX).credentials("app", "s3cret but wrong"),
            config(&etcd, PREFIX).credentials("nobody", PASSWORD),
            config(&etcd, "elsewhere").credentials("app", PASSWORD),
        ] {
            let shown = format!("{wrong:?}");
            let error = refused(wrong).await;
            assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{program:?}, {shown}: {error:?}");
        }
        assert!(etcd.entries("locks//q/").await.is_empty());
    }
}

#[tokio::test]
async fn a_role_on_the_prefix_is_enough() {
    for program in [EtcdProgram::Vendored, EtcdProgram::Installed] {
        let etcd = secured(program).await;
        let url = etcd.url(PREFIX).replace("://", "://app:s3cret%2F%40%3A%3F@");
        let lock = connect(&url).await.unwrap();
        let other = as_app(&etcd).connect().await.unwrap();
        let held = acquired(&lock, "k").await;
        renewed(&held).await;
        held.confirm().await.unwrap();
        assert!(other.key("k").try_acquire().await.unwrap().is_none());
        let info = other.admin().unwrap().inspect(held.key()).await.unwrap();
        assert_eq!(info.holder().unwrap().token, held.token());
        let waiter = tokio::spawn(async move { other.key("k").acquire().await });
        crate::support::queue_of(&etcd, PREFIX, "k", 2).await;
        held.release().await.unwrap();
        soon("never granted", waiter).await.unwrap().unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn a_token_that_has_ended_is_replaced() {
    let etcd = secured(EtcdProgram::Vendored).await;
    let lock = as_app(&etcd).ttl(MINUTES).connect().await.unwrap();
    cycle(&lock, "k").await;
    // The server's own timer ends the token, which no other call shows.
    tokio::time::sleep(Duration::from_secs(5)).await;
    lock.key("k").acquire().await.unwrap().release().await.unwrap();
    // A restarted server knows no token.
    let held = acquired(&lock, "held").await;
    etcd.crash().await;
    acquired(&lock, "k").await.release().await.unwrap();
    renewed(&held).await;
    held.release().await.unwrap();
}

#[tokio::test]
async fn a_changed_password_is_read_again() {
    let etcd = secured(EtcdProgram::Vendored).await;
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let credentials = EtcdCredentials::from_program(move || {
        let call = counted.fetch_add(1, Ordering::SeqCst);
        async move { Ok(("app".to_owned(), if call == 0 { PASSWORD } else { "changed" }.to_owned())) }
    });
    let lock = config(&etcd, PREFIX).credentials_from(credentials).connect().await.unwrap();
    cycle(&lock, "k").await;
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    etcd.change_password("app", "changed").await;
    etcd.crash().await;
    cycle(&lock, "k").await;
    assert!(calls.load(Ordering::SeqCst) > 1);
    let error = refused(as_app(&etcd)).await;
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error:?}");
}

#[tokio::test]
async fn a_right_that_is_withdrawn_ends_acquires_with_an_error() {
    let etcd = secured(EtcdProgram::Vendored).await;
    let lock = as_app(&etcd).connect().await.unwrap();
    cycle(&lock, "k").await;
    etcd.withdraw_right(&app()).await;
    let error = soon("an acquire never ends", lock.key("k").acquire()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{error:?}");
    assert_eq!(queue(&etcd, PREFIX, "k").await, []);
}
