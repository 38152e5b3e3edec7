//! Shared locks in the caller's transaction, on a real server.

use crate::common::*;
use leasehold_api::ErrorKind;
use leasehold_postgres::RawPair;
use leasehold_postgres_advisory::XactLocks;
use sqlx::Connection as _;
use test_servers::fresh_database;

#[tokio::test]
async fn shared_locks_exclude_exclusive_ones_both_ways_and_not_each_other() {
    let db = fresh_database().await;
    let (mut a, mut b, mut c) = (db.connect().await, db.connect().await, db.connect().await);
    // In each of the server's two spaces of numbers.
    let pairs = XactLocks::new("leasehold".parse().unwrap()).numbers(RawPair);
    for (locks, key) in [(locks(), key("k")), (pairs, key("7,-3"))] {
        let (mut first, mut second, mut third) =
            (a.begin().await.unwrap(), b.begin().await.unwrap(), c.begin().await.unwrap());
        let proof = locks.lock_shared_in(&mut first, &key, LONG).await.unwrap();
        let other = locks.try_lock_shared_in(&mut second, &key).await.unwrap().unwrap();
        assert_eq!(proof, other);
        proof.check(&mut first).await.unwrap();
        assert_eq!(proof.check(&mut third).await.unwrap_err().kind(), ErrorKind::Lost);
        // Held shared, it is not free exclusively, even after one of the two has ended.
        assert_eq!(locks.try_lock_in(&mut third, &key).await.unwrap(), None);
        first.commit().await.unwrap();
        let error = locks.lock_in(&mut third, &key, ms(1)).await.unwrap_err();
        assert_eq!((error.kind(), error.key()), (ErrorKind::Timeout, Some(&key)));
        second.rollback().await.unwrap();

        // Held exclusively, it is not free shared.
        let exclusive = locks.lock_in(&mut third, &key, LONG).await.unwrap();
        assert_ne!(exclusive, proof, "a proof says how the lock is held");
        let mut first = a.begin().await.unwrap();
        assert_eq!(locks.try_lock_shared_in(&mut first, &key).await.unwrap(), None);
        let error = locks.lock_shared_in(&mut first, &key, ms(1)).await.unwrap_err();
        assert_eq!((error.kind(), error.key()), (ErrorKind::Timeout, Some(&key)));
        third.commit().await.unwrap();
        locks.lock_shared_in(&mut first, &key, LONG).await.unwrap();
        first.rollback().await.unwrap();
    }
}

#[tokio::test]
async fn readers_do_not_overtake_a_writer_who_waits() {
    let db = fresh_database().await;
    let (mut a, mut b, mut c) = (db.connect().await, db.connect().await, db.connect().await);
    let mut observer = db.connect().await;
    let (locks, key) = (locks(), key("k"));
    let mut reader = a.begin().await.unwrap();
    locks.lock_shared_in(&mut reader, &key, LONG).await.unwrap();
    let writer = async {
        let mut tx = b.begin().await.unwrap();
        locks.lock_in(&mut tx, &key, LONG).await.unwrap();
        tx.commit().await.unwrap();
    };
    let late_reader = async {
        until_waiting(&mut observer, 1).await;
        let mut tx = c.begin().await.unwrap();
        assert_eq!(locks.try_lock_shared_in(&mut tx, &key).await.unwrap(), None);
        let late = locks.lock_shared_in(&mut tx, &key, LONG);
        let end_of_the_first = async {
            until_waiting(&mut observer, 2).await;
            reader.commit().await.unwrap();
        };
        tokio::join!(late, end_of_the_first).0.unwrap();
        tx.commit().await.unwrap();
    };
    tokio::join!(writer, late_reader);
}

#[tokio::test]
async fn a_reader_can_become_a_writer_and_of_two_one_is_told_of_the_deadlock() {
    let db = fresh_database().await;
    let (mut a, mut b, mut observer) = (db.connect().await, db.connect().await, db.connect().await);
    let (locks, key) = (locks(), key("k"));
    let mut alone = a.begin().await.unwrap();
    let shared = locks.lock_shared_in(&mut alone, &key, LONG).await.unwrap();
    let exclusive = locks.try_lock_in(&mut alone, &key).await.unwrap().unwrap();
    shared.check(&mut alone).await.unwrap();
    exclusive.check(&mut alone).await.unwrap();
    alone.commit().await.unwrap();

    let (mut first, mut second) = (a.begin().await.unwrap(), b.begin().await.unwrap());
    for tx in [&mut first, &mut second] {
        locks.lock_shared_in(tx, &key, LONG).await.unwrap();
    }
    let one = async {
        let outcome = locks.lock_in(&mut first, &key, LONG).await;
        first.rollback().await.unwrap();
        outcome
    };
    let other = async {
        until_waiting(&mut observer, 1).await;
        let outcome = locks.lock_in(&mut second, &key, LONG).await;
        second.rollback().await.unwrap();
        outcome
    };
    let (one, other) = tokio::join!(one, other);
    let failed: Vec<_> = [one, other].into_iter().filter_map(Result::err).map(|error| error.kind()).collect();
    assert_eq!(failed, [ErrorKind::Deadlock]);
}

#[tokio::test]
async fn a_shared_wait_leaves_the_settings_as_they_were() {
    let db = fresh_database().await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let (locks, key) = (locks(), key("k"));
    let mut holder = b.begin().await.unwrap();
    locks.lock_in(&mut holder, &key, LONG).await.unwrap();
    let mut tx = a.begin().await.unwrap();
    run(&mut *tx, "SET LOCAL lock_timeout = 1234; SET LOCAL statement_timeout = 56789").await;
    locks.lock_shared_in(&mut tx, &key, ms(1)).await.unwrap_err();
    for (setting, value) in [("lock_timeout", "1234ms"), ("statement_timeout", "56789ms")] {
        assert_eq!(text(&mut *tx, &format!("SHOW {setting}")).await, value);
    }
}
