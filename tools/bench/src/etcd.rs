//! Measures the etcd store on three members that sync their disks, against `v3lock` by hand and the calls of
//! `etcdctl lock`, in the same rounds.

mod by_hand;
mod gap;
mod handover;
mod renewal;
mod start;
mod wire;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench::record::{Axis, Chart, Contest, Entry, Group, Line};
use bench::report::{Row, micros, quantile, row};
use leasehold_api::{AcquireOptions, Lock, LockKey};
use leasehold_etcd::EtcdConfig;
use test_servers::{Counter, Etcd, EtcdOptions};

use self::wire::Member;
use crate::Sections;
use crate::contest::{Contender, Until, Worker, compete};

const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_secs(1);
/// Cycles whose proposals are counted.
const COUNTED: u32 = 200;

const OURS: &str =
    "ends after its TTL unless renewed; timeouts, fencing, order, guards against late grants, inspection";
const V3LOCK: &str =
    "ends with its lease; one lease for all, never renewed here; order; lacks fencing and guards";
const ETCDCTL: &str =
    "ends with its lease; a lease per lock, as each process takes one; order; lacks fencing and guards";

/// The work of a contest: its tasks, and the least ratios to `v3lock` and to the calls of `etcdctl lock`.
const TASKS: [(usize, Option<f64>, Option<f64>); 4] =
    [(1, Some(0.9), None), (8, None, None), (64, Some(1.2), Some(3.0)), (512, Some(2.0), Some(3.5))];

pub(crate) async fn measure(sections: &Sections, group: &mut Group) {
    let Some(etcd) = cluster(group) else { return };
    // All contenders call the first member first.
    etcd.make_leader(0).await;
    let version = etcd.status(0).await.map_or_else(|refusal| refusal.to_string(), |status| status.version);
    let put = put_alone(&etcd).await;
    group.note(format!(
        "Three members of etcd {version} sync one disk, and a put alone takes {put:.0} us. All contenders call the leader."
    ));
    if sections.want("cycles") {
        cycles(&etcd, group).await;
    }
    if sections.want("proposals") {
        proposals(&etcd, &mut group.rows).await;
    }
    if sections.want("hand-over") {
        handover::measure(&etcd, group).await;
    }
    if sections.want("renewal") {
        renewal::measure(&etcd, &mut group.rows).await;
    }
    if sections.want("start") {
        start::measure(&etcd, group);
    }
    if sections.want_long("gap") {
        gap::measure(&etcd, &mut group.rows).await;
    }
}

/// Starts three members that sync their disks. Returns `None` with a note if etcd is missing.
pub(crate) fn cluster(group: &mut Group) -> Option<Etcd> {
    // The start panics with advice if the program is missing.
    let started = std::panic::catch_unwind(|| Etcd::start(EtcdOptions::three().durable())).ok();
    if started.is_none() {
        group.note("etcd is missing here.");
    }
    started
}

/// Returns the median time of a put, microseconds.
async fn put_alone(etcd: &Etcd) -> f64 {
    let mut member = Member::connect(&etcd.address(0)).await;
    let mut took = Vec::new();
    for _ in 0..bench::or_smoke(200, 20) {
        let begun = Instant::now();
        member.put("alone").await.unwrap();
        took.push(micros(begun.elapsed()));
    }
    quantile(&took, 0.5)
}

/// Returns a client of the store with its own prefix, on all members.
async fn connect(etcd: &Etcd, prefix: &str) -> Arc<dyn Lock> {
    Arc::new(EtcdConfig::from_url(&etcd.url(prefix)).unwrap().connect().await.unwrap())
}

async fn cycles(etcd: &Etcd, group: &mut Group) {
    let names = ["v3lock by hand", "leasehold", "the calls of etcdctl lock"];
    let mut lines = names.map(|name| Line { name: name.to_owned(), points: Vec::new() });
    for (tasks, least, least_of_command) in TASKS {
        println!("{tasks} tasks");
        let lock = connect(etcd, &Etcd::fresh_prefix()).await;
        let ours = (0..tasks).map(|task| Library::new(&lock, &format!("ledger:{task}"))).collect();
        let mut contenders = [
            Contender::new(names[0], V3LOCK, by_hand::v3lock(&etcd.address(0), tasks).await),
            Contender::new(names[1], OURS, ours),
            Contender::new(names[2], ETCDCTL, by_hand::command(&etcd.address(0), tasks).await),
        ];
        let entries = compete(&mut contenders, ROUNDS, ROUND).await;
        lock.close().await.unwrap();
        for (line, entry) in lines.iter_mut().zip(&entries) {
            line.points.push((tasks as f64, entry.series.median()));
        }
        goals(tasks, &entries, (least, least_of_command), &mut group.rows);
        let title =
            format!("Cycles of {tasks} task{}, each on its own key", if tasks == 1 { "" } else { "s" });
        group.contests.push(Contest { title, baseline: names[0].to_owned(), entries });
    }
    group.charts.push(Chart {
        file: "etcd-tasks".to_owned(),
        title: "Throughput over tasks, three members".to_owned(),
        x: Axis::logarithmic("tasks"),
        y: Axis::logarithmic("cycles/s"),
        lines: lines.to_vec(),
    });
}

fn goals(tasks: usize, entries: &[Entry], least: (Option<f64>, Option<f64>), rows: &mut Vec<Row>) {
    let work = format!("etcd cycle, {tasks} tasks");
    for (floor, least) in [(&entries[0], least.0), (&entries[2], least.1)] {
        if least.is_some() {
            rows.push(row(&work, &entries[1].series, &floor.series, least));
        }
    }
}

/// Counts the proposals of a cycle without and with another client that wants the key.
async fn proposals(etcd: &Etcd, rows: &mut Vec<Row>) {
    for (what, keys) in [("uncontended", ["left", "right"]), ("contended", ["same", "same"])] {
        let prefix = Etcd::fresh_prefix();
        let (first, second) = (connect(etcd, &prefix).await, connect(etcd, &prefix).await);
        let workers = vec![Library::new(&first, keys[0]), Library::new(&second, keys[1])];
        let mut contender = Contender::new("leasehold", OURS, workers);
        contender.round(Until::Done(10)).await;
        let before = etcd.counter(0, Counter::Proposals).await;
        let counted = bench::or_smoke(COUNTED, 20);
        contender.round(Until::Done(counted)).await;
        let proposals = (etcd.counter(0, Counter::Proposals).await - before) as f64 / f64::from(2 * counted);
        rows.push(Row {
            work: format!("proposals per {what} cycle, two clients"),
            measured: format!("{proposals:.2}"),
            goal: "at most 2".to_owned(),
            // The member can apply a few proposals of the last cycle later.
            met: Some(proposals <= 2.05),
            ..Row::default()
        });
        first.close().await.unwrap();
        second.close().await.unwrap();
    }
}

struct Library {
    lock: Arc<dyn Lock>,
    key: LockKey,
    options: AcquireOptions,
}

impl Library {
    fn new(lock: &Arc<dyn Lock>, key: &str) -> Self {
        let options = AcquireOptions::new().wait_forever();
        Self { lock: Arc::clone(lock), key: LockKey::new(key).unwrap(), options }
    }
}

impl Worker for Library {
    async fn cycle(&mut self) {
        self.lock.acquire(&self.key, &self.options).await.unwrap().release().await.unwrap();
    }
}
