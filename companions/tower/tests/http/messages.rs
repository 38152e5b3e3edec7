//! Messages in a transaction that begins with their lock.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{LONG, memory};
use crate::ledger::{number, run, until_number};
use leasehold_api::{ErrorKind, LockExt as _, LockKey};
use leasehold_postgres::Identifier;
use leasehold_postgres_advisory::XactLocks;
use leasehold_tower::{LockLayer, Message, MessageTemplate, Refused, SharedTx, TxLayer};
use serde::Serialize;
use sqlx::postgres::PgPoolOptions;
use test_bounds::within;
use test_servers::{Database, fresh_database};
use tokio::sync::Semaphore;
use tokio::sync::mpsc::unbounded_channel;
use tower::{Layer as _, ServiceExt as _, service_fn};

const COUNT: &str = "SELECT count(*) FROM work";

#[derive(Clone, Copy, Serialize)]
struct Event {
    holder: u64,
}

/// The reason why a message has no result.
#[derive(Debug)]
enum Failed {
    Refused(Refused),
    Handler,
}

type Refuse = fn(Refused) -> Result<u64, Failed>;

struct Setup {
    database: Database,
    layer: TxLayer<MessageTemplate, Message<Refuse>>,
}

fn locks() -> XactLocks {
    XactLocks::new(Identifier::new("leasehold").unwrap())
}

async fn setup() -> Setup {
    let database = fresh_database().await;
    run(&mut database.connect().await, "CREATE TABLE work (id bigserial, text text)").await;
    let pool = PgPoolOptions::new().max_connections(4).acquire_timeout(LONG);
    let pool = pool.connect(database.url()).await.unwrap();
    let refuse: Refuse = |why| Err(Failed::Refused(why));
    let template = MessageTemplate::parse("w:{{event.holder}}").unwrap();
    let layer = TxLayer::with(locks(), pool, template, Message(refuse)).unwrap().wait(LONG);
    Setup { database, layer }
}

impl Setup {
    /// Sends a message through the layer to `handler`.
    async fn send<F, Fut>(&self, handler: F) -> Result<u64, Failed>
    where
        F: Fn(Event, SharedTx) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = Result<u64, Failed>> + Send + 'static,
    {
        let service = service_fn(move |(event, tx)| handler(event, tx));
        within(LONG, "no result", self.layer.layer(service).oneshot(Event { holder: 7 })).await
    }

    /// Returns the reason for the refusal after the handler has written and run `rest`.
    async fn refusal<F, Fut>(&self, rest: F) -> Refused
    where
        F: Fn(SharedTx) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = ()> + Send + 'static,
    {
        let handler = move |_: Event, mut tx: SharedTx| {
            let rest = rest.clone();
            async move {
                write(&mut tx).await;
                rest(tx).await;
                Ok(1)
            }
        };
        match self.send(handler).await {
            Err(Failed::Refused(why)) => why,
            other => panic!("{other:?}"),
        }
    }

    async fn count(&self) -> i64 {
        number(&self.database, COUNT).await
    }

    async fn is_free(&self) -> bool {
        let mut connection = self.database.connect().await;
        run(&mut connection, "BEGIN").await;
        locks().try_lock_in(&mut connection, &key()).await.unwrap().is_some()
    }
}

fn key() -> LockKey {
    LockKey::new("w:7").unwrap()
}

async fn write(tx: &mut SharedTx) {
    run(&mut **tx, "INSERT INTO work (text) VALUES ('x')").await;
}

#[tokio::test]
async fn a_message_is_committed_after_ok_and_rolled_back_after_an_error() {
    let it = setup().await;
    let done = it.send(async |event: Event, mut tx: SharedTx| {
        assert_eq!(*tx.key(), key());
        write(&mut tx).await;
        Ok(event.holder)
    });
    assert_eq!(done.await.unwrap(), 7);
    assert_eq!(it.count().await, 1);
    assert!(it.is_free().await);

    let failed = it.send(async |_: Event, mut tx: SharedTx| {
        write(&mut tx).await;
        Err(Failed::Handler)
    });
    assert!(matches!(failed.await, Err(Failed::Handler)));
    assert_eq!(it.count().await, 1, "the second write is undone");
    assert!(it.is_free().await);
    let stats = it.layer.stats();
    assert_eq!((stats.granted, stats.release_failed, stats.in_flight), (2, 0, 0));
}

#[tokio::test]
async fn a_message_whose_transaction_is_not_committed_is_refused() {
    let mut it = setup().await;
    // After the failed statement the server would turn a commit into a rollback.
    let why =
        it.refusal(async |mut tx| drop(sqlx::query("SELECT 1 / 0").execute(&mut *tx).await.unwrap_err()));
    let why = why.await;
    assert!(matches!(why, Refused::NotCommitted(_)) && why.has_begun(), "{why:?}");

    let why = it.refusal(async |mut tx| run(&mut *tx, "ROLLBACK").await).await;
    assert!(matches!(why, Refused::CommitUnknown(_)) && why.has_begun(), "{why:?}");
    assert_eq!(it.layer.stats().release_failed, 2);

    let (sent, mut kept) = unbounded_channel();
    let keep = move |tx| {
        sent.send(tx).unwrap();
        std::future::ready(())
    };
    let why = it.refusal(keep).await;
    let Refused::NotCommitted(error) = &why else { panic!("{why:?}") };
    assert_eq!(error.kind(), ErrorKind::InvalidOption, "{error}");
    drop(kept.recv().await.unwrap());

    it.layer = it.layer.clone().max_hold(Duration::from_millis(300));
    let why = it.refusal(|tx| async move {
        let _open = tx;
        std::future::pending::<()>().await;
    });
    let why = why.await;
    assert!(matches!(why, Refused::HeldTooLong) && why.has_begun(), "{why:?}");
    assert_eq!(it.count().await, 0);
    assert!(it.is_free().await);
}

#[tokio::test]
async fn a_message_that_does_not_get_its_lock_is_refused_before_its_handler() {
    let mut it = setup().await;
    let mut other = it.database.connect().await;
    run(&mut other, "BEGIN").await;
    locks().lock_in(&mut other, &key(), LONG).await.unwrap();
    it.layer = it.layer.clone().wait(Duration::ZERO);
    let (sent, mut called) = unbounded_channel();
    let call = move |_| {
        sent.send(()).unwrap();
        std::future::ready(())
    };
    let why = it.refusal(call).await;
    assert!(matches!(why, Refused::Contended { .. }) && !why.has_begun(), "{why:?}");
    assert!(why.retry_after().is_some() && called.try_recv().is_err());
    assert_eq!(it.layer.stats().contended, 1);
}

#[tokio::test]
async fn a_message_whose_caller_leaves_is_committed() {
    let it = setup().await;
    let (written, mut has_written) = unbounded_channel();
    let gate = Arc::new(Semaphore::new(0));
    let opened = Arc::clone(&gate);
    let handler = move |_: Event, mut tx: SharedTx| {
        let (written, opened) = (written.clone(), Arc::clone(&opened));
        async move {
            write(&mut tx).await;
            written.send(()).unwrap();
            opened.acquire().await.unwrap().forget();
            Ok(1)
        }
    };
    let mut sending = Box::pin(it.send(handler));
    tokio::select! {
        _ = &mut sending => panic!("the handler waits at the gate"),
        _ = has_written.recv() => {}
    }
    drop(sending);
    assert_eq!((it.count().await, it.layer.stats().in_flight), (0, 1));
    gate.add_permits(1);
    within(LONG, "not ended", it.layer.idle()).await;
    assert_eq!(it.count().await, 1);
    assert!(it.is_free().await);
}

/// Commits of `work` wait at a gate until it opens.
const GATE: &str = "CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN PERFORM pg_advisory_xact_lock_shared(4711, 1); RETURN NULL; END $$;
    CREATE CONSTRAINT TRIGGER gate AFTER INSERT ON work DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION gate()";
const COMMITTING: &str = "SELECT count(*) FROM pg_locks JOIN pg_database d ON d.oid = database
    WHERE locktype = 'advisory' AND NOT granted AND classid = 4711 AND d.datname = current_database()";

#[tokio::test]
async fn a_lock_inside_of_the_transaction_of_a_message_lasts_until_the_commit() {
    let it = setup().await;
    let (_, lock) = memory();
    let refuse: Refuse = |why| Err(Failed::Refused(why));
    let by_holder = |message: &(Event, SharedTx)| leasehold_api::key!["inside", message.0.holder];
    let inside = LockLayer::with(Arc::clone(&lock), by_holder, Message(refuse)).wait(LONG);
    let handler = inside.layer(service_fn(async |(_, mut tx): (Event, SharedTx)| {
        write(&mut tx).await;
        Ok(1)
    }));
    let mut gate = it.database.connect().await;
    run(&mut gate, GATE).await;
    run(&mut gate, "SELECT pg_advisory_lock(4711, 1)").await;
    let sending = tokio::spawn(it.layer.layer(handler).oneshot(Event { holder: 7 }));
    until_number(&it.database, COMMITTING, 1).await;
    let inside = leasehold_api::key!["inside", 7].unwrap();
    assert!(lock.key(&inside).try_acquire().await.unwrap().is_none(), "the commit is to come");
    run(&mut gate, "SELECT pg_advisory_unlock(4711, 1)").await;
    assert_eq!(within(LONG, "no result", sending).await.unwrap().unwrap(), 1);
    assert!(lock.key(&inside).try_acquire().await.unwrap().is_some());
    assert_eq!(it.count().await, 1);
}

#[tokio::test]
async fn a_second_transaction_inside_of_that_of_a_message_is_refused() {
    let it = setup().await;
    let pool = PgPoolOptions::new().max_connections(4).connect(it.database.url()).await.unwrap();
    let refuse: Refuse = |why| Err(Failed::Refused(why));
    let other = |_: &(Event, SharedTx)| leasehold_api::key!["other"];
    let inside = TxLayer::with(locks(), pool, other, Message(refuse)).unwrap().wait(LONG);
    let handler = inside.layer(service_fn(async |_: ((Event, SharedTx), SharedTx)| Ok(1)));
    let sent = it.layer.layer(handler).oneshot(Event { holder: 7 });
    let refused = within(LONG, "no result", sent).await;
    assert!(matches!(refused, Err(Failed::Refused(Refused::OpenTransaction))), "{refused:?}");
}
