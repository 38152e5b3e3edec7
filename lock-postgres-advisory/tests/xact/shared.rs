//! Shared locks in the caller's transaction, on a real server.

use crate::common::*;
use leasehold_api::ErrorKind;
use leasehold_postgres::{LockWait, RawPair};
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
async fn a_reader_cannot_become_a_writer_and_its_transaction_goes_on() {
    let db = fresh_database().await;
    let (mut a, mut b) = (db.connect().await, db.connect().await);
    let pairs = XactLocks::new("leasehold".parse().unwrap()).numbers(RawPair);
    for (locks, key) in [(locks(), key("k")), (pairs, key("7,-3"))] {
        // By an attempt, and by a wait in the server's queue, which records the lock elsewhere.
        for waits in [false, true] {
            let mut tx = a.begin().await.unwrap();
            if waits {
                let mut writer = b.begin().await.unwrap();
                locks.lock_in(&mut writer, &key, LONG).await.unwrap();
                let mut observer = db.connect().await;
                let end = async {
                    until_waiting(&mut observer, 1).await;
                    writer.commit().await.unwrap();
                };
                tokio::join!(locks.lock_shared_in(&mut tx, &key, LONG), end).0.unwrap();
            } else {
                locks.lock_shared_in(&mut tx, &key, LONG).await.unwrap();
            }
            let both = [key.clone()];
            for error in [
                locks.try_lock_in(&mut tx, &key).await.unwrap_err(),
                locks.lock_in(&mut tx, &key, LONG).await.unwrap_err(),
                locks.lock_all_in(&mut tx, &both, LockWait::Block(LONG)).await.unwrap_err(),
            ] {
                assert_eq!((error.kind(), error.key()), (ErrorKind::Unsupported, Some(&key)), "{error}");
            }
            // The same transaction still reads, and can share again.
            locks.lock_shared_in(&mut tx, &key, LONG).await.unwrap().check(&mut tx).await.unwrap();
            tx.commit().await.unwrap();
            // A later transaction of the session begins without it.
            let mut tx = a.begin().await.unwrap();
            locks.lock_in(&mut tx, &key, LONG).await.unwrap();
            tx.commit().await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_reader_that_rolls_back_to_a_savepoint_before_its_lock_can_write() {
    let db = fresh_database().await;
    let mut a = db.connect().await;
    let (locks, key) = (locks(), key("k"));
    let mut tx = a.begin().await.unwrap();
    run(&mut *tx, "SAVEPOINT s").await;
    locks.lock_shared_in(&mut tx, &key, LONG).await.unwrap();
    locks.try_lock_in(&mut tx, &key).await.unwrap_err();
    run(&mut *tx, "ROLLBACK TO SAVEPOINT s").await;
    locks.lock_in(&mut tx, &key, LONG).await.unwrap();
    tx.commit().await.unwrap();
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
