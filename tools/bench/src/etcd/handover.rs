//! Measures the time from a release until another client holds the key, against the least that etcd needs: a put until a
//! watch on another member sees it, and one linearizable read there.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench::record::{Axis, Chart, Group, Line};
use bench::report::{Row, Series, millis, quantile};
use leasehold_api::{AcquireOptions, Lock, LockKey};
use leasehold_etcd::EtcdConfig;
use test_servers::Etcd;

use crate::etcd::wire::Member;

const HOPS: usize = 200;
/// Time until the other client has its place in the queue, for which three members sync their disk.
const HOLD: Duration = Duration::from_millis(25);
const KEY: &str = "watched";
const MOST: f64 = 1.2;

pub(crate) async fn measure(etcd: &Etcd, group: &mut Group) {
    println!("hand-over between two clients on two members");
    let prefix = Etcd::fresh_prefix();
    let connect = async |member| {
        let config = EtcdConfig::new([etcd.address(member)], prefix.as_str());
        let lock: Arc<dyn Lock> = Arc::new(config.connect().await.unwrap());
        lock
    };
    let (holder, waiter) = (connect(0).await, connect(1).await);
    let (mut writer, mut reader) =
        (Member::connect(&etcd.address(0)).await, Member::connect(&etcd.address(1)).await);
    let mut changes = reader.watch(KEY).await;
    let [mut ours, mut floor] = ["leasehold", "put, watch and read"].map(Series::new);
    let options = AcquireOptions::new().wait_forever();
    for hop in 0..bench::or_smoke(HOPS, 5) {
        // A new key, because traces of the last hop must not affect it.
        let key = LockKey::new(format!("handed:{hop}")).unwrap();
        let guard = holder.acquire(&key, &options).await.unwrap();
        let waiting = tokio::spawn({
            let (waiter, key, options) = (Arc::clone(&waiter), key.clone(), options.clone());
            async move {
                let guard = waiter.acquire(&key, &options).await.unwrap();
                (Instant::now(), guard)
            }
        });
        tokio::time::sleep(HOLD).await;
        let released = Instant::now();
        guard.release().await.unwrap();
        let (granted, guard) = waiting.await.unwrap();
        ours.rounds.push(millis(granted - released));
        guard.release().await.unwrap();

        tokio::time::sleep(HOLD).await;
        let begun = Instant::now();
        let seen = async {
            while changes.message().await.unwrap().unwrap().events.is_empty() {}
            reader.read(KEY).await;
            begun.elapsed()
        };
        let (written, seen) = tokio::join!(writer.put(KEY), seen);
        written.unwrap();
        floor.rounds.push(millis(seen));
    }
    group.rows.push(row(&ours, &floor));
    let line = |series: &Series| {
        let micros: Vec<f64> = series.rounds.iter().map(|millis| millis * 1000.0).collect();
        Line::distribution(&series.name, &micros)
    };
    group.charts.push(Chart {
        file: "etcd-hand-over".to_owned(),
        title: "Hand-over between two clients on two of three members".to_owned(),
        x: Axis::logarithmic("us from the release to the grant"),
        y: Axis::linear("% of the hand-overs"),
        lines: vec![line(&ours), line(&floor)],
    });
    holder.close().await.unwrap();
    waiter.close().await.unwrap();
}

/// Returns a row with the ratio of the medians, because a hand-over and the write beside it share no load.
fn row(ours: &Series, floor: &Series) -> Row {
    let shown = |series: &Series| {
        let [p50, p99] = [0.5, 0.99].map(|share| quantile(&series.rounds, share));
        format!("{} p50 {p50:.2}, p99 {p99:.2} ms", series.name)
    };
    let ratio = ours.median() / floor.median();
    Row {
        work: "etcd hand-over between two clients".to_owned(),
        measured: shown(ours),
        floor: shown(floor),
        ratio: format!("{ratio:.2} times its time"),
        goal: format!("at most {MOST}"),
        met: Some(ratio <= MOST),
        series: vec![ours.clone(), floor.clone()],
    }
}
