//! Requests of several phases, under leases in Postgres.

use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use leasehold_api::{ErrorKind, ListQuery, Lock};
use leasehold_idempotency::{Begin, IdempotencyError, Journey, Journeys, PhaseKey, Stored};
use leasehold_postgres::PgConfig;
use leasehold_postgres_ttl::TtlConfig;
use serde::{Deserialize, Serialize};
use test_servers::{Cluster, PgBouncer, PgBouncerOptions};

use crate::common::{PATIENT, Pg, pool, private, world};
use crate::suite::{fresh, ident, replay, request};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Charge {
    id: String,
    cents: u64,
}

/// A provider that carries out the requested effects.
#[derive(Clone, Default)]
struct Provider(Arc<Mutex<Vec<PhaseKey>>>);

impl Provider {
    async fn charge(&self, key: PhaseKey) -> Result<Charge, IdempotencyError> {
        let mut calls = self.0.lock().unwrap();
        calls.push(key);
        Ok(Charge { id: format!("ch_{}", calls.len()), cents: 1000 })
    }

    fn calls(&self) -> Vec<PhaseKey> {
        self.0.lock().unwrap().clone()
    }
}

async fn lock(world: &Pg) -> Arc<dyn Lock> {
    let config = PgConfig::from_url(world.database.url()).unwrap().install_schema(true);
    Arc::new(TtlConfig::new(config).ttl(Duration::from_secs(120)).connect().await.unwrap())
}

/// Returns two processes.
async fn two(world: &Pg) -> [Journeys; 2] {
    [lock(world).await, lock(world).await].map(|lock| Journeys::new(world.pool.clone(), lock))
}

async fn start(journeys: &Journeys) -> Result<Begin<Journey>, IdempotencyError> {
    journeys.start(&ident("a"), &request("x")).await
}

/// Starts the journey once the lease is free.
async fn start_when_free(journeys: &Journeys) -> Journey {
    let deadline = std::time::Instant::now() + PATIENT;
    loop {
        match start(journeys).await.unwrap() {
            Begin::Fresh(journey) => return journey,
            Begin::InFlight { .. } => assert!(std::time::Instant::now() < deadline, "held for ever"),
            other => panic!("{other:?}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn kind(error: &IdempotencyError) -> ErrorKind {
    match error {
        IdempotencyError::Store(error) => error.kind(),
        other => panic!("{other}"),
    }
}

#[tokio::test]
async fn phases_run_once_and_the_end_is_replayed() {
    let world = world(8).await;
    let [here, there] = two(&world).await;
    let provider = Provider::default();
    let mut journey = fresh(start(&here).await);
    for _ in 0..2 {
        let charge = journey.phase("charged", async |key| provider.charge(key).await).await.unwrap();
        assert_eq!(charge, Charge { id: "ch_1".into(), cents: 1000 });
    }
    assert!(matches!(start(&there).await, Ok(Begin::InFlight { .. })));
    assert!(matches!(start(&here).await, Ok(Begin::InFlight { .. })));
    let stored = journey.finish(Stored::done(200, "paid")).await.unwrap();
    for journeys in [&here, &there] {
        assert_eq!(replay(start(journeys).await), stored);
        assert!(matches!(journeys.start(&ident("a"), &request("y")).await, Ok(Begin::Mismatch)));
    }
    let [first] = provider.calls().try_into().unwrap();
    assert_eq!(first.as_str().len(), 64);
    // Other phases and other journeys have other keys.
    let mut other = fresh(here.start(&ident("b"), &request("x")).await);
    other.phase("charged", async |key| provider.charge(key).await).await.unwrap();
    other.phase("booked", async |key| provider.charge(key).await).await.unwrap();
    other.finish(Stored::rejected(402, "")).await.unwrap();
    assert!(replay(here.start(&ident("b"), &request("x")).await).is_rejected());
    let keys: std::collections::HashSet<_> =
        provider.calls().iter().map(|key| key.as_str().to_owned()).collect();
    assert_eq!(keys.len(), 3);
}

#[tokio::test]
async fn one_that_died_between_effect_and_record_is_resumed_with_the_same_key() {
    let world = world(8).await;
    let [here, there] = two(&world).await;
    let provider = Provider::default();
    let mut journey = fresh(start(&here).await);
    journey.phase("reserved", async |_| Ok::<_, IdempotencyError>(7_u32)).await.unwrap();
    {
        // The effect takes place, but its process dies before the record.
        let mut charging = Box::pin(journey.phase("charged", async |key| {
            provider.charge(key).await?;
            std::future::pending::<Result<Charge, IdempotencyError>>().await
        }));
        assert!(futures_util::poll!(&mut charging).is_pending());
    }
    drop(journey);
    let mut resumed = start_when_free(&there).await;
    let reserved = resumed.phase("reserved", async |_| panic!("it is recorded")).await;
    assert_eq!(reserved.map_err(|error: IdempotencyError| error.to_string()), Ok(7_u32));
    resumed.phase("charged", async |key| provider.charge(key).await).await.unwrap();
    resumed.finish(Stored::done(200, "paid")).await.unwrap();
    let [first, second] = provider.calls().try_into().unwrap();
    assert_eq!(first.as_str(), second.as_str());
    assert!(first.token() < second.token(), "{first:?} {second:?}");
}

#[tokio::test]
async fn who_has_lost_the_lease_records_nothing() {
    let world = world(8).await;
    let [here, there] = two(&world).await;
    let provider = Provider::default();
    let mut zombie = fresh(start(&here).await);
    zombie.phase("charged", async |key| provider.charge(key).await).await.unwrap();
    let mut late = fresh(here.start(&ident("late"), &request("x")).await);
    let operator = lock(&world).await;
    let admin = operator.admin().unwrap();
    // The lease is lost during the effect, because its client was closed.
    let mut second = None;
    let booked = zombie
        .phase("booked", async |_| {
            for info in admin.list(&ListQuery::new()).await.unwrap() {
                assert!(
                    admin.force_release(&info.key, info.holder().unwrap().holder.unwrap()).await.unwrap()
                );
            }
            second = Some(start_when_free(&there).await);
            Ok::<_, IdempotencyError>(1)
        })
        .await;
    assert_eq!(kind(&booked.unwrap_err()), ErrorKind::Lost);
    let mut second = second.unwrap();
    let charge = second.phase("charged", async |_| panic!("it is recorded")).await;
    assert_eq!(
        charge.map_err(|error: IdempotencyError| error.to_string()),
        Ok(Charge { id: "ch_1".into(), cents: 1000 })
    );
    assert_eq!(kind(&zombie.finish(Stored::done(500, "zombie")).await.unwrap_err()), ErrorKind::Lost);
    second.phase("booked", async |_| Ok::<_, IdempotencyError>(2)).await.unwrap();
    second.finish(Stored::done(200, "second")).await.unwrap();
    assert_eq!(replay(start(&here).await).body(), "second");
    // No other process has resumed the journey, but the lease is lost.
    let lost = late.phase("charged", async |key| provider.charge(key).await).await;
    assert_eq!(kind(&lost.unwrap_err()), ErrorKind::Lost);
}

#[tokio::test]
async fn an_effect_that_fails_records_nothing_and_can_be_tried_again() {
    let world = world(8).await;
    let [here, _] = two(&world).await;
    let mut journey = fresh(start(&here).await);
    let failed: Result<u32, IdempotencyError> =
        journey.phase("charged", async |_| Err(IdempotencyError::InvalidIdent("declined".into()))).await;
    assert!(failed.is_err());
    let large: Result<String, IdempotencyError> =
        journey.phase("large", async |_| Ok("x".repeat(65_536))).await;
    assert!(matches!(large, Err(IdempotencyError::TooLarge { .. })));
    let charged: Result<u32, IdempotencyError> = journey.phase("charged", async |_| Ok(1)).await;
    assert_eq!(charged.unwrap(), 1);
    drop(journey);
    // A record of another version.
    let mut resumed = start_when_free(&here).await;
    let other: Result<Charge, IdempotencyError> =
        resumed.phase("charged", async |_| panic!("it is recorded")).await;
    assert!(
        matches!(&other, Err(IdempotencyError::Unreadable(text)) if text.contains("charged")),
        "{other:?}"
    );
}

#[tokio::test]
async fn an_expired_journey_begins_anew_with_other_keys_and_is_purged() {
    let world = world(8).await;
    let [here, _] = two(&world).await;
    let expire = async || world.run("UPDATE leasehold.journey SET expires_at = clock_timestamp()").await;
    let provider = Provider::default();
    let mut journey = fresh(start(&here).await);
    journey.phase("charged", async |key| provider.charge(key).await).await.unwrap();
    journey.finish(Stored::done(200, "old")).await.unwrap();
    expire().await;
    let mut journey = fresh(here.start(&ident("a"), &request("y")).await);
    journey.phase("charged", async |key| provider.charge(key).await).await.unwrap();
    journey.finish(Stored::done(200, "new")).await.unwrap();
    let [old, new] = provider.calls().try_into().unwrap();
    assert_ne!(old.as_str(), new.as_str());
    assert_eq!(here.purge(10).await.unwrap(), 0);
    expire().await;
    assert_eq!(here.purge(10).await.unwrap(), 1);
}

#[tokio::test]
async fn a_lock_of_another_store_is_refused() {
    let world = world(8).await;
    let journeys = Journeys::new(world.pool.clone(), leasehold_memory_lock());
    let refused = start(&journeys).await.unwrap_err();
    assert_eq!(kind(&refused), ErrorKind::Unsupported, "{refused}");
    assert_eq!(world.number("SELECT count(*) FROM leasehold.journey").await, 0);
}

fn leasehold_memory_lock() -> Arc<dyn Lock> {
    Arc::new(leasehold_memory::connect().unwrap())
}

#[tokio::test]
async fn a_value_that_cannot_be_read_again_is_not_recorded() {
    let world = world(8).await;
    let [here, _] = two(&world).await;
    let mut journey = fresh(start(&here).await);
    let rate: Result<f64, IdempotencyError> = journey.phase("rate", async |_| Ok(f64::NAN)).await;
    assert!(matches!(&rate, Err(IdempotencyError::Unreadable(text)) if text.contains("rate")), "{rate:?}");
    let note: Result<String, IdempotencyError> = journey.phase("note", async |_| Ok("a\0b".to_owned())).await;
    assert!(matches!(&note, Err(IdempotencyError::Unreadable(text)) if text.contains("note")), "{note:?}");
    // An escaped backslash before `u0000` is not a zero character.
    let text: Result<String, IdempotencyError> =
        journey.phase("text", async |_| Ok("\\u0000".to_owned())).await;
    assert_eq!(text.unwrap(), "\\u0000");
    assert_eq!(world.number("SELECT count(*) FROM leasehold.journey WHERE phases ? 'rate'").await, 0);
    drop(journey);
    // The journey can be resumed.
    let mut resumed = start_when_free(&here).await;
    let rate: Result<f64, IdempotencyError> = resumed.phase("rate", async |_| Ok(0.5)).await;
    assert_eq!(rate.unwrap().to_bits(), 0.5_f64.to_bits());
    resumed.finish(Stored::done(200, "")).await.unwrap();
}

/// Otherwise a purge could remove the journey during a phase, and the next try would have another key.
#[tokio::test]
async fn a_journey_that_is_resumed_is_remembered_from_then_on() {
    let world = world(8).await;
    let [here, _] = two(&world).await;
    let provider = Provider::default();
    let mut journey = fresh(start(&here).await);
    journey.phase("reserved", async |_| Ok::<_, IdempotencyError>(7_u32)).await.unwrap();
    drop(journey);
    world.run("UPDATE leasehold.journey SET expires_at = clock_timestamp() + interval '1 hour'").await;
    // A request with another fingerprint does not renew the retention.
    assert!(matches!(here.start(&ident("a"), &request("y")).await, Ok(Begin::Mismatch)));
    let left = "SELECT extract(epoch FROM expires_at - clock_timestamp())::bigint FROM leasehold.journey";
    assert!(world.number(left).await <= 3600);
    let mut resumed = start_when_free(&here).await;
    assert!(world.number(left).await > 80_000, "a day");
    resumed
        .phase("reserved", async |_| -> Result<u32, IdempotencyError> { panic!("recorded") })
        .await
        .unwrap();
    resumed.phase("charged", async |key| provider.charge(key).await).await.unwrap();
    let stored = resumed.finish(Stored::done(200, "paid")).await.unwrap();
    assert_eq!(replay(start(&here).await), stored);
}

#[tokio::test]
async fn journeys_behind_a_pooler_in_transaction_mode() {
    let world = private(8).await;
    let options = PgBouncerOptions::new().pool_size(4).round_robin();
    let options = options.setting("ignore_startup_parameters", "extra_float_digits");
    let bouncer = PgBouncer::start(Cluster::shared(), &options);
    let pooled = pool(&bouncer.url(world.database.name()), 4).await;
    let journeys = Journeys::new(pooled, lock(&world).await).behind_pooler();
    for n in 0..12 {
        let key = ident(&format!("k{n}"));
        let mut journey = fresh(journeys.start(&key, &request("x")).await);
        for name in ["a", "b"] {
            journey.phase(name, async |_| Ok::<_, IdempotencyError>(n)).await.unwrap();
        }
        let stored = journey.finish(Stored::done(200, "x")).await.unwrap();
        assert_eq!(replay(journeys.start(&key, &request("x")).await), stored);
    }
}
