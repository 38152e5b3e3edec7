//! Counts connections, server memory, statements and round trips. Each peer has a server's counters to itself.

use std::fs;

use bench::record::Costs;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};
use test_servers::{Cluster, Proxy};

use super::peer::Peer;
use super::redis::Redis;
use crate::contest::{Contender, Until};
use crate::postgres::prepared;

/// Calls of each task that prepare statements and create rows. They are not counted.
const BEFORE: u32 = 16;
/// Counted calls of each task.
const COUNTED: u32 = 50;

/// Returns the costs of each peer that this machine has, with `tasks` tasks.
pub(crate) async fn measure(redis: Option<&Redis>, tasks: usize) -> Vec<(Peer, Costs)> {
    println!("costs on the server, {tasks} tasks");
    let options = bench::server()
        .setting("shared_preload_libraries", "pg_stat_statements")
        // The statements of the library are long.
        .setting("track_activity_query_size", "16kB");
    let cluster = Cluster::start(options);
    let mut all = Vec::new();
    for peer in Peer::ALL {
        let costs = if peer.is_postgres() {
            Some(of_postgres(&cluster, peer, tasks).await)
        } else {
            of_redis(redis, peer, tasks).await
        };
        all.extend(costs.map(|costs| (peer, costs)));
    }
    all
}

async fn of_postgres(cluster: &Cluster, peer: Peer, tasks: usize) -> Costs {
    let database = prepared(cluster).await;
    let mut observer = database.connect().await;
    observer.execute("CREATE EXTENSION pg_stat_statements").await.unwrap();
    let alone = {
        // Ends with its connections.
        let proxy = Proxy::start(cluster.address()).await;
        let mut contender =
            peer.contender(&proxy.url(database.url()), None, 1).await.expect("Postgres is running");
        contender.round(Until::Done(BEFORE)).await;
        trips(&mut contender, &proxy, 1).await
    };
    let proxy = Proxy::start(cluster.address()).await;
    let mut contender =
        peer.contender(&proxy.url(database.url()), None, tasks).await.expect("Postgres is running");
    contender.round(Until::Done(BEFORE)).await;
    let before = statements(&mut observer).await;
    let trips = trips(&mut contender, &proxy, tasks).await;
    let counted = statements(&mut observer).await - before;
    let pids = backends(&mut observer).await;
    observer.close().await.unwrap();
    Costs {
        connections: Some(pids.len() as f64),
        memory: Some(pids.iter().map(|pid| private_kib(*pid)).sum()),
        statements: Some(counted / cycles(tasks)),
        trips: Some(trips),
        trips_alone: Some(alone),
    }
}

async fn of_redis(redis: Option<&Redis>, peer: Peer, tasks: usize) -> Option<Costs> {
    let redis = redis?;
    let (through, proxy) = redis.through_proxy().await;
    let mut alone = peer.contender("", Some(&through), 1).await?;
    alone.round(Until::Done(BEFORE)).await;
    let trips_alone = trips(&mut alone, &proxy, 1).await;
    drop(alone);
    let (through, proxy) = redis.through_proxy().await;
    let mut contender = peer.contender("", Some(&through), tasks).await?;
    contender.round(Until::Done(BEFORE)).await;
    let before = redis.commands().await;
    let trips = trips(&mut contender, &proxy, tasks).await;
    let counted = redis.commands().await - before;
    Some(Costs {
        connections: Some(proxy.traffic().open as f64),
        memory: redis.pid().map(private_kib),
        statements: Some(counted as f64 / cycles(tasks)),
        trips: Some(trips),
        trips_alone: Some(trips_alone),
    })
}

/// Returns the round trips per cycle through the proxy.
async fn trips(contender: &mut Contender, proxy: &Proxy, tasks: usize) -> f64 {
    let before = proxy.traffic().round_trips;
    contender.round(Until::Done(COUNTED)).await;
    (proxy.traffic().round_trips - before) as f64 / cycles(tasks)
}

/// Returns the number of counted cycles of all tasks.
fn cycles(tasks: usize) -> f64 {
    f64::from(COUNTED) * tasks as f64
}

/// Returns the number of statements executed in this database, without the observer's.
async fn statements(observer: &mut PgConnection) -> f64 {
    let query = "SELECT coalesce(sum(calls), 0)::float8 FROM pg_stat_statements s JOIN pg_database d ON d.oid = s.dbid
        WHERE d.datname = current_database() AND s.query NOT LIKE '%pg\\_stat\\_%'";
    observer.fetch_one(query).await.unwrap().get(0)
}

/// Returns the processes of the other connections to this database.
async fn backends(observer: &mut PgConnection) -> Vec<u32> {
    let query = "SELECT pid FROM pg_stat_activity
        WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()";
    let rows = observer.fetch_all(query).await.unwrap();
    rows.iter().map(|row| u32::try_from(row.get::<i32, _>(0)).unwrap()).collect()
}

/// Returns the memory of a process that no other process shares.
fn private_kib(pid: u32) -> f64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap_or_default();
    private_in(&rollup)
}

fn private_in(rollup: &str) -> f64 {
    let private = rollup.lines().filter(|line| line.starts_with("Private_"));
    let kib = |line: &str| line.split_whitespace().nth(1)?.parse::<f64>().ok();
    private.filter_map(kib).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn private_memory_is_clean_and_dirty_pages_alone() {
        let rollup =
            "Rss: 9000 kB\nShared_Clean: 100 kB\nPrivate_Clean: 20 kB\nPrivate_Dirty: 300 kB\nSwap: 0 kB";
        assert_eq!(private_in(rollup), 320.0);
    }
}
