//! Compares the Postgres stores with other locks of the same kind: cycles over the number of tasks, costs on the server, and
//! cycles over the round-trip time.

mod by_hand;
mod costs;
mod peer;
mod redis;

use std::time::Duration;

use bench::record::{Axis, Chart, Contest, Costs, Entry, Group, Line};
use test_servers::{Cluster, Proxy};

use self::peer::Peer;
use self::redis::Redis;
use crate::Sections;
use crate::contest::{Contender, compete, missing};
use crate::postgres::prepared;

const TASKS: [usize; 4] = [1, 8, 64, 512];
/// The number of tasks of the table with costs.
const SHOWN: usize = 64;
const ROUNDS: usize = 5;
const ROUND: Duration = Duration::from_millis(600);
/// Round-trip times, milliseconds. The proxy delays each way by half of them.
const TRIPS: [u32; 3] = [0, 1, 5];
const MISSING: &str = "Redis is missing here. The package `redis-server` of Debian installs it.";

pub(crate) async fn measure(sections: &Sections, group: &mut Group) {
    let redis = Redis::start().await;
    if redis.is_none() {
        group.note(MISSING);
    }
    if sections.want("tasks") {
        let costs = costs::measure(redis.as_ref(), SHOWN).await;
        over_tasks(redis.as_ref(), &costs, group).await;
    }
    if sections.want("trips") {
        over_trips(redis.as_ref(), group).await;
    }
}

/// Measures cycles of 1 to 512 tasks.
async fn over_tasks(redis: Option<&Redis>, costs: &[(Peer, Costs)], group: &mut Group) {
    let cluster = Cluster::start(bench::server());
    let database = prepared(&cluster).await;
    let mut lines: Vec<Line> = Peer::ALL.iter().map(|peer| line(*peer)).collect();
    for tasks in TASKS {
        println!("{tasks} tasks");
        let mut contenders = contenders(database.url(), redis, tasks).await;
        for (peer, contender) in &mut contenders {
            if tasks == SHOWN {
                contender.costs =
                    costs.iter().find(|(of, _)| *of == *peer).map(|(_, costs)| *costs).unwrap_or_default();
            }
        }
        let entries = run(contenders, ROUNDS, ROUND).await;
        for (line, entry) in lines.iter_mut().zip(&entries) {
            if !entry.series.rounds.is_empty() {
                line.points.push((tasks as f64, entry.series.median()));
            }
        }
        let title =
            format!("Cycles of {tasks} task{}, each on its own keys", if tasks == 1 { "" } else { "s" });
        group.contests.push(Contest { title, baseline: Peer::ALL[0].name().to_owned(), entries });
    }
    lines.retain(|line| !line.points.is_empty());
    group.charts.push(Chart {
        file: "tasks".to_owned(),
        title: "Throughput over tasks".to_owned(),
        x: Axis::logarithmic("tasks"),
        y: Axis::logarithmic("cycles/s"),
        lines,
    });
}

/// Measures cycles of a task alone, with a delay between client and server.
async fn over_trips(redis: Option<&Redis>, group: &mut Group) {
    let cluster = Cluster::start(bench::server());
    let database = prepared(&cluster).await;
    let proxy = Proxy::start(cluster.address()).await;
    let redis = match redis {
        Some(redis) => Some(redis.through_proxy().await),
        None => None,
    };
    let mut lines: Vec<Line> = Peer::ALL.iter().map(|peer| line(*peer)).collect();
    for milliseconds in TRIPS {
        println!("a task alone, {milliseconds} ms per round trip");
        let delay = Duration::from_micros(500 * u64::from(milliseconds));
        proxy.delay(delay);
        if let Some((_, proxy)) = &redis {
            proxy.delay(delay);
        }
        let through = redis.as_ref().map(|(redis, _)| redis);
        let contenders = contenders(&proxy.url(database.url()), through, 1).await;
        for (line, entry) in lines.iter_mut().zip(run(contenders, 3, ROUND).await) {
            if let Some(median) = entry.p50 {
                line.points.push((f64::from(milliseconds), median / 1000.0));
            }
        }
    }
    lines.retain(|line| !line.points.is_empty());
    group.charts.push(Chart {
        file: "round-trips".to_owned(),
        title: "Cost over round-trip time, a task alone".to_owned(),
        x: Axis::linear("ms per round trip"),
        y: Axis::linear("ms per cycle, median"),
        lines,
    });
}

fn line(peer: Peer) -> Line {
    Line { name: peer.name().to_owned(), points: Vec::new() }
}

/// Returns all peers that this machine has.
async fn contenders(url: &str, redis: Option<&Redis>, tasks: usize) -> Vec<(Peer, Contender)> {
    let mut contenders = Vec::new();
    for peer in Peer::ALL {
        if let Some(contender) = peer.contender(url, redis, tasks).await {
            contenders.push((peer, contender));
        }
    }
    contenders
}

/// Returns an entry for each peer in the order of [`Peer::ALL`], also for a missing one.
async fn run(contenders: Vec<(Peer, Contender)>, rounds: usize, length: Duration) -> Vec<Entry> {
    let (peers, mut contenders): (Vec<Peer>, Vec<Contender>) = contenders.into_iter().unzip();
    let mut measured =
        peers.into_iter().zip(compete(&mut contenders, rounds, length).await).collect::<Vec<_>>();
    let mut entries = Vec::new();
    for peer in Peer::ALL {
        let found = measured.iter().position(|(of, _)| *of == peer);
        entries.push(match found {
            Some(at) => measured.swap_remove(at).1,
            None => missing(peer.name(), peer.promise()),
        });
    }
    entries
}
