//! A listener whose network path dies silently.

use std::sync::mpsc;
use std::time::Duration;

use crate::common::*;
use leasehold_claim::ClaimStore as _;
use leasehold_claim::api::ErrorKind;
use sqlx::postgres::PgConnectOptions;
use test_bounds::Bound;
use test_servers::{Cluster, Proxy};
use tokio::time::advance;

/// Longer than the interval between two checks of a listener's session.
const NEXT: Duration = Duration::from_secs(31);

/// Waits in real time for other threads, because the runtime's time is paused.
async fn until(what: &str, is_so: impl Fn() -> bool) {
    let bound = Bound::new(LONG);
    while !is_so() {
        bound.check(format_args!("not so: {what}"));
        tokio::task::yield_now().await;
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A listener without notifications stays while its session answers. If the path drops the connection, the listener ends,
/// and its claimer polls and listens again.
#[tokio::test(start_paused = true)]
async fn a_listener_notices_that_its_path_is_dead() {
    // While a blocking task runs, time advances only when this test says so.
    let (end, ended) = mpsc::channel::<()>();
    let still = tokio::task::spawn_blocking(move || ended.recv().is_ok());
    let world = World::private(REQUEST).await;
    let claims = world.claims(request());
    claims.spec().migration().apply(&world.pool).await.unwrap();
    // Opens the pool's connections first, so only the listener's connection goes through the proxy.
    let mut ready = Vec::new();
    for _ in 0..20 {
        ready.push(world.pool.acquire().await.unwrap());
    }
    drop(ready);
    let proxy = Proxy::start(Cluster::shared().address()).await;
    let through: PgConnectOptions = proxy.url(world.database.url()).parse().unwrap();
    world.pool.set_connect_options(through);
    let claims = claims.timeout(Duration::from_secs(10));
    let mut wake = claims.listen().await.unwrap();
    assert!(wake.announces());
    assert_eq!(proxy.traffic().accepted, 1);

    for payload in ["returned", "returned", ""] {
        let before = proxy.traffic().round_trips;
        let listening = tokio::spawn(async move {
            let woken = wake.woken().await;
            (woken, wake)
        });
        tokio::task::yield_now().await;
        advance(NEXT).await;
        until("the session is asked", || proxy.traffic().round_trips > before).await;
        assert!(!listening.is_finished(), "nothing has happened");
        // This notification arrives after the answer to the check.
        world.run(&format!("SELECT pg_notify('{}', '{payload}')", claims.spec().channel())).await;
        until("the news are heard", || listening.is_finished()).await;
        let woken;
        (woken, wake) = listening.await.unwrap();
        woken.unwrap();
    }

    let held = proxy.traffic().held;
    proxy.stall();
    let listening = tokio::spawn(async move { wake.woken().await });
    tokio::task::yield_now().await;
    advance(NEXT).await;
    until("the session is asked, and nothing comes back", || proxy.traffic().held > held).await;
    assert!(!listening.is_finished(), "it may answer yet");
    advance(Duration::from_secs(11)).await;
    until("the listener gives up", || listening.is_finished()).await;
    let error = listening.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("has not answered within 10s"), "{error}");
    assert!(
        matches!(&error, leasehold_claim::ClaimError::Store(error) if error.kind() == ErrorKind::Unavailable)
    );

    proxy.restore();
    assert!(claims.listen().await.unwrap().announces(), "the next one listens");
    end.send(()).unwrap();
    assert!(still.await.unwrap());
}
