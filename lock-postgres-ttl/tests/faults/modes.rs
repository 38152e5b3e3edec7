//! Leases that several holders have at once: statements, operators, upkeep, a library without them.

mod statements;
mod version_3;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::LONG;
use leasehold_api::{ErrorKind, ListQuery, Lock as _, LockExt as _, LockGuard, LossReason, Mode, Validity};
use leasehold_engine::{Attempt, Backend as _, Engine, Granted, HoldRef, Request};
use leasehold_postgres_ttl::{LeaseGuardExt as _, TtlBackend};
use sqlx::postgres::PgListener;
use sqlx::{AssertSqlSafe, Connection as _, Executor as _, PgConnection, Row as _};
use test_bounds::within;
use test_servers::{Cluster, Proxy};

use crate::sql::LEASES;
use crate::support::{Came, config, config_of, connection, holder, installed, request, take, text};

fn wanting(serial: u64, mode: Mode) -> Request {
    let mut request = request("k", serial);
    request.mode = mode;
    request
}

async fn attempt(backend: &TtlBackend, request: Request) -> Attempt {
    backend.acquire(vec![request]).await.remove(0).unwrap()
}

async fn granted(backend: &TtlBackend, request: Request) -> (HoldRef, Granted) {
    let hold = request.hold();
    match attempt(backend, request).await {
        Attempt::Granted(granted) => (hold, granted),
        other => panic!("{other:?}"),
    }
}

async fn released(backend: &TtlBackend, hold: HoldRef) {
    assert!(backend.release(vec![hold]).await.remove(0).unwrap().was_held);
}

async fn number(conn: &mut PgConnection, sql: &'static str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(conn).await.unwrap()
}

/// Loses the guard by the next confirmation, because its part or its gate is gone.
async fn assert_lost(guard: LockGuard) {
    assert_eq!(guard.confirm().await.unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(guard.lost().await, LossReason::Gone);
}

const PERMIT: Mode = Mode::Permit { of: 3 };

#[tokio::test(flavor = "multi_thread")]
async fn a_cycle_of_a_part_is_two_statements_and_a_change_of_mode_seven() {
    let cluster = Cluster::shared();
    let database = cluster.fresh_database().await;
    let proxy = Proxy::start(cluster.address()).await;
    let backend = config_of(&proxy.url(database.url())).connections(1).backend().await.unwrap();
    let mut serial = 0;
    let mut cycle = async |mode| {
        serial += 1;
        let before = proxy.traffic().round_trips;
        let (hold, _) = granted(&backend, wanting(serial, mode)).await;
        released(&backend, hold).await;
        proxy.traffic().round_trips - before
    };
    // Prepares the statements.
    let (one, all) = (Mode::Exclusive, Mode::Shared);
    for mode in [one, one, all, one, PERMIT, one, PERMIT] {
        cycle(mode).await;
    }
    assert_eq!([cycle(PERMIT).await, cycle(PERMIT).await], [2, 2]);
    cycle(Mode::Shared).await;
    assert_eq!([cycle(Mode::Shared).await, cycle(Mode::Shared).await], [2, 2]);
    assert_eq!([cycle(Mode::Exclusive).await, cycle(Mode::Shared).await], [3, 4]);
    assert_eq!([cycle(Mode::Exclusive).await, cycle(Mode::Shared).await], [3, 4]);
    assert_eq!(cycle(Mode::Exclusive).await, 3);
    assert_eq!(cycle(Mode::Exclusive).await, 2, "the statements for one holder are as before");
    backend.close().await;
}

#[tokio::test]
async fn a_batch_of_readers_of_many_keys_is_granted_and_each_has_its_part() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let requests = |serials: std::ops::Range<u64>| -> Vec<Request> {
        let of_key = |serial: u64| {
            let mut request = request(&format!("k{}", serial % 100), serial);
            request.mode = if serial.is_multiple_of(3) { PERMIT } else { Mode::Shared };
            request
        };
        serials.map(of_key).collect()
    };
    for serials in [0..100, 100..200] {
        let requests = requests(serials);
        let holds: Vec<HoldRef> = requests.iter().map(Request::hold).collect();
        for answer in backend.acquire(requests).await {
            assert!(matches!(answer, Ok(Attempt::Granted(_))), "{answer:?}");
        }
        for renewed in backend.look(holds.clone()).await {
            assert!(matches!(renewed, Ok(leasehold_engine::Renewed::Extended)), "{renewed:?}");
        }
        for renewed in backend.renew(holds.clone()).await {
            assert!(matches!(renewed, Ok(leasehold_engine::Renewed::Extended)), "{renewed:?}");
        }
        for answer in backend.release(holds).await {
            assert!(answer.unwrap().was_held);
        }
    }
    let mut conn = database.connect().await;
    let held = "SELECT count(*) FROM leasehold.lease_part WHERE NOT released";
    assert_eq!(number(&mut conn, held).await, 0);
    backend.close().await;
}

#[tokio::test]
async fn the_same_request_twice_takes_one_part() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let (_, first) = granted(&backend, wanting(1, PERMIT)).await;
    let (hold, again) = granted(&backend, wanting(1, PERMIT)).await;
    assert_eq!((first.permit, first.token), (again.permit, again.token));
    let mut conn = database.connect().await;
    let held = "SELECT count(*) FROM leasehold.lease_part WHERE NOT released";
    assert_eq!(number(&mut conn, held).await, 1);
    released(&backend, hold).await;
    assert_eq!(number(&mut conn, held).await, 0);
    backend.close().await;
}

#[tokio::test]
async fn a_writer_waits_for_the_lease_of_a_dead_reader_and_not_for_a_released_one() {
    const TTL: Duration = Duration::from_secs(2);
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let lock = config(&database).connect().await.unwrap();
    let (hold, _) = granted(&backend, wanting(1, Mode::Shared)).await;
    let asked = Instant::now();
    let mut dead = wanting(2, Mode::Shared);
    dead.ttl = Some(TTL);
    let (_, dead) = granted(&backend, dead).await;
    released(&backend, hold).await;
    let writer = lock.key("k").wait(LONG).acquire().await.unwrap();
    assert!(asked.elapsed() >= TTL, "{:?}", asked.elapsed());
    assert!(writer.token() > dead.token);
    writer.release().await.unwrap();
    lock.close().await.unwrap();
}

#[tokio::test]
async fn another_number_of_permits_is_refused_until_none_is_held() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let (hold, grant) = granted(&backend, wanting(1, PERMIT)).await;
    assert_eq!(grant.permit, Some(0));
    let other = || wanting(2, Mode::Permit { of: 2 });
    match attempt(&backend, other()).await {
        Attempt::Refused(error) => assert_eq!(error.kind(), ErrorKind::ModeMismatch),
        other => panic!("{other:?}"),
    }
    released(&backend, hold).await;
    let (_, grant) = granted(&backend, other()).await;
    assert_eq!(grant.permit, Some(0));
    let mut conn = database.connect().await;
    let in_use = "SELECT count(*) FROM leasehold.lease_part WHERE of = 2";
    assert_eq!(number(&mut conn, in_use).await, 2);
    backend.close().await;
}

/// Counts the keys whose parts do not fit the mode of their gate.
const MISFITS: &str = "\
SELECT count(*) FILTER (WHERE mode IS NULL AND parts > 0
        OR mode = 0 AND shared <> parts OR mode > 0 AND (parts <> mode OR permits <> mode))
FROM (
    SELECT k.key, CASE WHEN NOT l.released AND l.expires_at = 'infinity' THEN
            CASE WHEN l.holder = '*' THEN 0 WHEN l.holder LIKE '#%' THEN substr(l.holder, 2)::int END END AS mode,
        (SELECT count(*) FROM leasehold.lease_part p WHERE p.key = k.key AND p.of >= 0) AS parts,
        (SELECT count(*) FROM leasehold.lease_part p WHERE p.key = k.key AND p.of = 0) AS shared,
        (SELECT count(*) FROM leasehold.lease_part p WHERE p.key = k.key AND l.holder = '#' || p.of) AS permits
    FROM (SELECT key FROM leasehold.lease UNION SELECT key FROM leasehold.lease_part) k
    LEFT JOIN leasehold.lease l USING (key)
) x";

#[tokio::test(flavor = "multi_thread")]
async fn the_parts_of_a_key_fit_its_gate_in_every_snapshot() {
    let database = installed().await;
    let mut locks: Vec<Arc<Engine>> = Vec::new();
    for _ in 0..3 {
        locks.push(Arc::new(config(&database).connect().await.unwrap()));
    }
    let mut tasks = Vec::new();
    for task in 0..12 {
        let lock = Arc::clone(&locks[task % 3]);
        let modes = [Mode::Shared, Mode::Exclusive, PERMIT, Mode::Shared];
        tasks.push(tokio::spawn(async move {
            for round in 0..20 {
                let key = format!("k{}", (task + round) % 2);
                let mode = modes[(task + round) % 4];
                let request = lock.wanting([(key.as_str(), mode)]).wait(LONG);
                let guards = request.acquire().await.unwrap();
                tokio::task::yield_now().await;
                guards.release().await.unwrap();
            }
        }));
    }
    let mut conn = database.connect().await;
    let mut snapshots = 0;
    while !tasks.iter().all(tokio::task::JoinHandle::is_finished) {
        assert_eq!(number(&mut conn, MISFITS).await, 0);
        snapshots += 1;
    }
    for task in tasks {
        task.await.unwrap();
    }
    assert!(snapshots > 10, "{snapshots} snapshots");
    for lock in locks {
        lock.close().await.unwrap();
    }
}

#[tokio::test]
async fn a_library_without_parts_sees_a_holder_that_it_does_not_know() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let (hold, _) = granted(&backend, wanting(1, Mode::Shared)).await;
    let mut old = connection(&database).await;
    assert_eq!(take(&mut old, LEASES.grant_one, "k", holder(9), LONG).await, Came::Rows(0));
    let refusal = sqlx::query(text(version_3::GRANT)).bind(vec!["k"]).bind(vec![holder(9).to_string()]);
    let refusal =
        refusal.bind(vec![1_i64]).bind(vec![None::<i64>]).bind(vec![None::<&str>]).bind("old").bind(1_i64);
    let rows = refusal.fetch_all(&mut old).await.unwrap();
    let [row] = &rows[..] else { panic!("{} rows", rows.len()) };
    let (token, live, until): (Option<i64>, bool, Option<i64>) = (row.get(1), row.get(2), row.get(3));
    assert_eq!((token, live, until), (None, true, None), "held by another holder, without an end");

    let list = sqlx::query(text(version_3::LIST)).bind("").bind("z").bind(true).bind(10_i64);
    let rows = list.fetch_all(&mut old).await.unwrap();
    let shown: Vec<(String, String, i16)> =
        rows.iter().map(|row| (row.get(0), row.get(1), row.get(6))).collect();
    assert_eq!(shown, [("k".to_owned(), "*".to_owned(), 0)]);
    assert!("*".parse::<leasehold_api::HolderId>().is_err());

    let force = sqlx::query(text(LEASES.force)).bind("k").bind(holder(1).to_string());
    assert!(force.fetch_all(&mut old).await.unwrap().is_empty(), "it has no name for the reader");
    let purge = sqlx::query(text(LEASES.purge)).bind(0_i64).bind("").bind(10_i64);
    assert_eq!(purge.fetch_one(&mut old).await.unwrap().get::<i64, _>(0), 0);

    // It waits: the release of the last reader notifies it, and a library with parts opens the key.
    let mut listener = PgListener::connect(database.url()).await.unwrap();
    listener.listen(backend.channel()).await.unwrap();
    let mark = sqlx::query(text(LEASES.mark)).bind(vec!["k"]).bind(60_000_000_i64);
    assert_eq!(mark.fetch_all(&mut old).await.unwrap().len(), 1);
    let reply = backend.release(vec![hold]).await.remove(0).unwrap();
    assert!(reply.was_held && reply.waiters);
    // The mark of a waiter notifies the holders of a young grant.
    while within(LONG, "no notification", listener.recv()).await.unwrap().payload() != "fk" {}
    assert_eq!(take(&mut old, LEASES.grant_one, "k", holder(9), LONG).await, Came::Rows(0));
    let age = "UPDATE leasehold.lease SET acquired_at = now() - interval '2 days';
        UPDATE leasehold.lease_part SET expires_at = now() - interval '2 days'";
    database.connect().await.execute(age).await.unwrap();
    assert_eq!(backend.purge(Duration::ZERO).await.unwrap(), 1, "the part");
    assert_eq!(take(&mut old, LEASES.grant_one, "k", holder(9), LONG).await, Came::Rows(1));
    backend.close().await;
}

#[tokio::test]
async fn the_upkeep_opens_idle_keys_and_removes_their_rows() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let (hold, _) = granted(&backend, wanting(1, PERMIT)).await;
    let mut conn = database.connect().await;
    let age = "UPDATE leasehold.lease SET acquired_at = now() - interval '2 days';
        UPDATE leasehold.lease_part SET expires_at = now() - interval '2 days' WHERE part > 0";
    conn.execute(age).await.unwrap();
    assert_eq!(backend.purge(Duration::ZERO).await.unwrap(), 0, "one permit is held");
    released(&backend, hold).await;
    conn.execute("UPDATE leasehold.lease_part SET expires_at = now() - interval '2 days'").await.unwrap();
    assert_eq!(backend.purge(Duration::ZERO).await.unwrap(), 3, "the parts");
    assert_eq!(number(&mut conn, "SELECT count(*) FROM leasehold.lease WHERE released").await, 1);
    conn.execute("UPDATE leasehold.lease SET expires_at = now() - interval '2 days'").await.unwrap();
    assert_eq!(backend.purge(Duration::ZERO).await.unwrap(), 1, "the gate");
    let (_, grant) = granted(&backend, wanting(2, PERMIT)).await;
    assert_eq!(grant.permit, Some(0));
    backend.close().await;
}

#[tokio::test]
async fn an_operator_who_removes_a_part_or_opens_the_gate_ends_the_holds() {
    let database = installed().await;
    let (lock, other_client) =
        (config(&database).connect().await.unwrap(), config(&database).connect().await.unwrap());
    let mut conn = database.connect().await;
    for change in [
        "DELETE FROM leasehold.lease_part WHERE NOT released",
        "UPDATE leasehold.lease SET released = true",
        "DELETE FROM leasehold.lease",
    ] {
        let one = lock.key("k").shared().wait(LONG).acquire().await.unwrap();
        let other = other_client.key("k").shared().wait(LONG).acquire().await.unwrap();
        assert!(lock.key("k").try_acquire().await.unwrap().is_none());
        conn.execute(change).await.unwrap();
        assert_lost(one).await;
        assert_lost(other).await;
        let writer = lock.key("k").wait(LONG).acquire().await.unwrap();
        let reader = other_client.key("k").shared().try_acquire().await.unwrap();
        assert!(reader.is_none(), "beside a writer: {change}");
        writer.release().await.unwrap();
        // The parts that were left end by themselves.
        conn.execute("UPDATE leasehold.lease_part SET released = true").await.unwrap();
        lock.key("k").wait(LONG).acquire().await.unwrap().release().await.unwrap();
    }
    other_client.close().await.unwrap();
    lock.close().await.unwrap();
}

#[tokio::test]
async fn a_semaphore_without_one_of_its_parts_has_one_permit_less_until_it_is_free() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let mut conn = database.connect().await;
    let (first, _) = granted(&backend, wanting(1, PERMIT)).await;
    conn.execute("DELETE FROM leasehold.lease_part WHERE part = 2").await.unwrap();
    let (second, grant) = granted(&backend, wanting(2, PERMIT)).await;
    assert_eq!(grant.permit, Some(1));
    assert!(matches!(attempt(&backend, wanting(3, PERMIT)).await, Attempt::Contended(_)));
    released(&backend, first).await;
    released(&backend, second).await;
    let (hold, _) = granted(&backend, wanting(4, Mode::Exclusive)).await;
    released(&backend, hold).await;
    for serial in 5..8 {
        let (_, grant) = granted(&backend, wanting(serial, PERMIT)).await;
        assert_eq!(grant.permit.map(u64::from), Some(serial - 5));
    }
    backend.close().await;
}

#[tokio::test]
async fn lists_show_every_holder_of_a_key_and_no_free_one() {
    let database = installed().await;
    let lock = config(&database).connect().await.unwrap();
    // Readers of one client would share one hold.
    let other = config(&database).connect().await.unwrap();
    let readers = [lock.key("a").shared(), other.key("a").shared(), lock.key("b").permits(3)];
    let mut guards = Vec::new();
    for reader in readers {
        guards.push(reader.acquire().await.unwrap());
    }
    lock.key("c").shared().acquire().await.unwrap().release().await.unwrap();
    let admin = lock.admin().unwrap();
    let list = admin.list(&ListQuery::new()).await.unwrap();
    let shown: Vec<(&str, Vec<_>)> = list
        .iter()
        .map(|info| (info.key.as_str(), info.holders.iter().map(|hold| (hold.mode, hold.permit)).collect()))
        .collect();
    let shared = (Mode::Shared, None);
    assert_eq!(shown, [("a", vec![shared, shared]), ("b", vec![(PERMIT, Some(0))])]);
    // The last key of a page is where the next one begins.
    assert_eq!(admin.list(&ListQuery::new().limit(1)).await.unwrap()[0].holders.len(), 2);
    assert!(admin.inspect(&"c".parse().unwrap()).await.unwrap().holders.is_empty());
    for guard in guards {
        guard.release().await.unwrap();
    }
    assert!(admin.list(&ListQuery::new()).await.unwrap().is_empty());
    lock.close().await.unwrap();
}

#[tokio::test]
async fn a_transaction_fenced_by_a_shared_lease_keeps_writers_out_until_it_ends() {
    let database = installed().await;
    let lock = config(&database).connect().await.unwrap();
    let reader = lock.key("k").shared().acquire().await.unwrap();
    let mut user = database.connect().await;
    let mut tx = user.begin().await.unwrap();
    reader.fence(&mut tx).await.unwrap();
    let other = lock.key("k").shared().acquire().await.unwrap();
    other.release().await.unwrap();
    reader.release().await.unwrap();
    assert!(lock.key("k").try_acquire().await.unwrap().is_none());
    tx.commit().await.unwrap();
    let writer = lock.key("k").wait(LONG).acquire().await.unwrap();
    assert_eq!(writer.validity(), Validity::Valid);
    writer.release().await.unwrap();
    lock.close().await.unwrap();
}

#[tokio::test]
async fn columns_that_an_operator_adds_do_not_disturb_the_statements() {
    let database = installed().await;
    let backend = config(&database).backend().await.unwrap();
    let more = "ALTER TABLE leasehold.lease_part ADD COLUMN note text DEFAULT 'x'";
    database.connect().await.execute(AssertSqlSafe(more)).await.unwrap();
    let (hold, _) = granted(&backend, wanting(1, Mode::Shared)).await;
    released(&backend, hold).await;
    backend.close().await;
}
