use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use cookbook::outside::{FencedError, Object, ObjectStore, PutOutcome, each_while_held, update_fenced};
use leasehold_api::{FencingToken, Lock as _, LockExt as _, LockKey, RunError, Validity};
use leasehold_engine::Engine;
use leasehold_memory::{ClientSetup, MemoryStore};
use leasehold_postgres::PgConfig;
use leasehold_postgres_advisory::AdvisoryConfig;
use leasehold_postgres_ttl::TtlConfig;
use test_bounds::within;
use tokio::sync::Notify;

use crate::support::*;

/// An object store in memory, with the conditional writes of S3.
#[derive(Debug, Default)]
struct Bucket {
    objects: Mutex<HashMap<String, Object>>,
    versions: AtomicU32,
}

impl Bucket {
    fn write(&self, name: &str, token: FencingToken, body: Vec<u8>) {
        let etag = self.versions.fetch_add(1, Ordering::Relaxed).to_string();
        self.objects.lock().unwrap().insert(name.to_owned(), Object::new(etag, Some(token), body));
    }

    fn read(&self, name: &str) -> Option<Object> {
        self.objects.lock().unwrap().get(name).cloned()
    }

    fn body(&self) -> String {
        String::from_utf8(self.read("report").unwrap().body).unwrap()
    }
}

impl ObjectStore for Bucket {
    type Error = Infallible;

    async fn get(&self, name: &str) -> Result<Option<Object>, Infallible> {
        Ok(self.read(name))
    }

    async fn put_if(
        &self,
        name: &str,
        expected: Option<String>,
        token: FencingToken,
        body: Vec<u8>,
    ) -> Result<PutOutcome, Infallible> {
        if self.read(name).map(|object| object.etag) != expected {
            return Ok(PutOutcome::Changed);
        }
        self.write(name, token, body);
        Ok(PutOutcome::Written)
    }
}

/// The bucket for a holder that is paused after its first read.
struct Pausing<'a> {
    bucket: &'a Bucket,
    has_read: Notify,
    goes_on: Notify,
    pauses: AtomicU32,
}

impl<'a> Pausing<'a> {
    fn new(bucket: &'a Bucket) -> Self {
        Self { bucket, has_read: Notify::new(), goes_on: Notify::new(), pauses: AtomicU32::new(1) }
    }
}

impl ObjectStore for Pausing<'_> {
    type Error = Infallible;

    async fn get(&self, name: &str) -> Result<Option<Object>, Infallible> {
        let read = self.bucket.read(name);
        if self.pauses.swap(0, Ordering::Relaxed) > 0 {
            self.has_read.notify_one();
            self.goes_on.notified().await;
        }
        Ok(read)
    }

    async fn put_if(
        &self,
        name: &str,
        expected: Option<String>,
        token: FencingToken,
        body: Vec<u8>,
    ) -> Result<PutOutcome, Infallible> {
        self.bucket.put_if(name, expected, token, body).await
    }
}

/// Returns the token of a holder that was paused until its lease ended, and the token of the next holder.
async fn paused_and_next() -> [FencingToken; 2] {
    let db = database("").await;
    let client = || async {
        let server = PgConfig::from_url(db.url()).unwrap().install_schema(true);
        TtlConfig::new(server).connect().await.unwrap()
    };
    let (one, other) = (client().await, client().await);
    let paused = one.key("report").acquire().await.unwrap();
    assert!(other.admin().unwrap().force_release(paused.key(), paused.holder()).await.unwrap());
    let next = other.key("report").wait(LONG).acquire().await.unwrap();
    [paused.token().unwrap(), next.token().unwrap()]
}

/// Returns a change that appends `line`.
fn add(line: &str) -> impl Fn(Option<&[u8]>) -> Vec<u8> + '_ {
    move |before| [before.unwrap_or_default(), line.as_bytes()].concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_paused_before_it_reads_is_refused() {
    let [paused, next] = paused_and_next().await;
    let bucket = Bucket::default();
    update_fenced(&bucket, "report", next, add("next ")).await.unwrap();
    let late = update_fenced(&bucket, "report", paused, add("paused ")).await;
    assert!(matches!(late, Err(FencedError::Superseded)), "{late:?}");
    update_fenced(&bucket, "report", next, add("again ")).await.unwrap();
    assert_eq!(bucket.body(), "next again ");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_holder_paused_before_it_writes_is_refused() {
    let [paused, next] = paused_and_next().await;
    let bucket = Bucket::default();
    let slow = Pausing::new(&bucket);
    let overtaking = async {
        slow.has_read.notified().await;
        update_fenced(&bucket, "report", next, add("next ")).await.unwrap();
        slow.goes_on.notify_one();
    };
    let late = async { tokio::join!(update_fenced(&slow, "report", paused, add("paused ")), overtaking).0 };
    let late = within(LONG, "not ended", late).await;
    assert!(matches!(late, Err(FencedError::Superseded)), "{late:?}");
    assert_eq!(bucket.body(), "next ");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_holder_recomputes_after_an_older_one_wrote() {
    let [older, newer] = paused_and_next().await;
    let bucket = Bucket::default();
    let slow = Pausing::new(&bucket);
    let late = async {
        slow.has_read.notified().await;
        update_fenced(&bucket, "report", older, add("older ")).await.unwrap();
        slow.goes_on.notify_one();
    };
    let both = async { tokio::join!(update_fenced(&slow, "report", newer, add("newer ")), late).0 };
    within(LONG, "not ended", both).await.unwrap();
    assert_eq!(bucket.body(), "older newer ", "nothing is lost");
    assert_eq!(bucket.read("report").unwrap().token, Some(newer));
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_an_unconditional_write_overwrites() {
    let [paused, next] = paused_and_next().await;
    let bucket = Bucket::default();
    bucket.write("report", next, b"next ".to_vec());
    bucket.write("report", paused, b"paused ".to_vec());
    assert_eq!(bucket.body(), "paused ", "the later holder's work is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_compare_then_write_overwrites() {
    let [paused, next] = paused_and_next().await;
    let bucket = Bucket::default();
    let newest = bucket.read("report").and_then(|object| object.token);
    assert!(newest.is_none_or(|newest| newest <= paused), "nothing speaks against it");
    bucket.write("report", next, b"next ".to_vec());
    bucket.write("report", paused, b"paused ".to_vec());
    assert_eq!(bucket.body(), "paused ", "the later holder's work is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn losing_the_connection_stops_the_body_between_two_effects() {
    let db = database("").await;
    let server = PgConfig::from_url(db.url()).unwrap().install_schema(true);
    let lock: Engine = AdvisoryConfig::new(server).connect().await.unwrap();
    let key = LockKey::new("charge").unwrap();
    let charged = AtomicU32::new(0);
    let charge = async |step: u32, token: Option<FencingToken>| {
        assert!(token.is_some());
        charged.fetch_add(1, Ordering::Relaxed);
        if step == 2 {
            // During the long second call, the session that holds the lock is terminated.
            let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE locktype = 'advisory' AND granted
                AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
            assert_eq!(text(&mut db.connect().await, end).await, "1");
            std::future::pending::<()>().await;
        }
    };
    let stopped = within(LONG, "not ended", each_while_held(&lock, &key, 1..=5, charge)).await;
    assert!(matches!(stopped, Err(RunError::Stopped(_))), "{stopped:?}");
    assert_eq!(charged.load(Ordering::Relaxed), 2, "and no third");
    let guard = lock.key(key).wait(LONG).acquire().await.unwrap();
    assert_eq!(guard.validity(), Validity::Valid, "others go on");
}

#[tokio::test]
async fn a_step_without_an_await_is_the_last_of_a_lost_lease() {
    let store = MemoryStore::new().default_ttl(Duration::from_secs(30));
    let client = store.client_with(ClientSetup::new()).unwrap();
    let charged = AtomicU32::new(0);
    let charge = async |_: u32, _: Option<FencingToken>| {
        charged.fetch_add(1, Ordering::Relaxed);
        // The step takes longer than the lease, without an await at which `run` could end it.
        store.advance(Duration::from_secs(3600));
    };
    let key = LockKey::new("charge").unwrap();
    let stopped = within(LONG, "not ended", each_while_held(&client.lock, &key, 1..=5, charge)).await;
    assert!(matches!(stopped, Err(RunError::Stopped(_))), "{stopped:?}");
    assert_eq!(charged.load(Ordering::Relaxed), 1);
}
