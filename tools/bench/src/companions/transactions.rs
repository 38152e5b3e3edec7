//! Measures idempotent transactions and their replays, against the transaction with the same effect and without a
//! key.

use bench::report::{Row, row};
use leasehold_idempotency::{Begin, Ident, PgIdempotency, Stored, fingerprint};
use sqlx::postgres::PgPoolOptions;
use sqlx::{Executor as _, PgConnection, PgPool};

use crate::companions::rounds::{Contender, Worker, compete};

const CLIENTS: u32 = 8;
/// Number of keys that a replaying client has used before.
const REPLAYED: usize = 100;
/// The request, hashed like in an HTTP server.
const REQUEST: [&[u8]; 2] = [b"POST /spend", b"{\"amount\":1}"];

pub(crate) const TABLES: &str = "
    CREATE TABLE account (id bigint PRIMARY KEY, balance bigint NOT NULL) WITH (fillfactor = 50);
    CREATE TABLE entry (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, account bigint NOT NULL,
        amount bigint NOT NULL, at timestamptz NOT NULL DEFAULT now());
    CREATE TABLE used (scope text NOT NULL, key text NOT NULL, fingerprint bytea NOT NULL, status integer, body bytea,
        expires_at timestamptz NOT NULL DEFAULT now() + interval '1 day', PRIMARY KEY (scope, key)) WITH (fillfactor = 80);
    CREATE INDEX ON used (expires_at);
    INSERT INTO account SELECT n, 1000000000 FROM generate_series(0, 99) n";

/// One client with a separate account.
enum Client {
    Fresh {
        idem: PgIdempotency,
        account: i64,
        next: u64,
    },
    Replay {
        idem: PgIdempotency,
        idents: Vec<Ident>,
        next: usize,
    },
    ByHand {
        pool: PgPool,
        account: i64,
    },
    /// With the minimum of a key: its row, which waits for a concurrent request, and the response.
    ByHandWithKey {
        pool: PgPool,
        account: i64,
        next: u64,
    },
}

pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    println!("idempotency keys, {CLIENTS} clients");
    let pool = pool(url, CLIENTS).await;
    pool.execute(TABLES).await.unwrap();
    let idem = PgIdempotency::new(pool.clone());
    idem.migrate().await.unwrap();
    let accounts = || (0..CLIENTS).map(i64::from);
    let fresh = accounts().map(|account| Client::Fresh { idem: idem.clone(), account, next: 0 });
    let by_hand = accounts().map(|account| Client::ByHand { pool: pool.clone(), account });
    let with_key = accounts().map(|account| Client::ByHandWithKey { pool: pool.clone(), account, next: 0 });
    let mut replays = Vec::new();
    for account in accounts() {
        replays.push(Client::replay(&idem, account).await);
    }
    let contenders = vec![
        Contender::new("begin, spend, finish", fresh.collect()),
        Contender::new("replay", replays),
        Contender::new("by hand, without a key", by_hand.collect()),
        Contender::new("by hand, with a key", with_key.collect()),
    ];
    let series = compete(contenders).await;
    rows.push(row("idempotent transaction", &series[0], &series[2], 0.6));
    rows.push(row("idempotent transaction, beside a key by hand", &series[0], &series[3], 0.8));
    rows.push(row("replay", &series[1], &series[2], 1.2));
    pool.close().await;
}

impl Client {
    async fn replay(idem: &PgIdempotency, account: i64) -> Self {
        let mut idents = Vec::new();
        for number in 0..REPLAYED {
            let ident = Ident::new("replays", format!("{account}-{number}")).unwrap();
            carry_out(idem, &ident, account).await;
            idents.push(ident);
        }
        Self::Replay { idem: idem.clone(), idents, next: 0 }
    }
}

impl Worker for Client {
    async fn cycle(&mut self) {
        match self {
            Self::Fresh { idem, account, next } => {
                *next += 1;
                let ident = Ident::new(account.to_string(), key_of(*next)).unwrap();
                carry_out(idem, &ident, *account).await;
            }
            Self::ByHandWithKey { pool, account, next } => {
                *next += 1;
                carry_out_by_hand(pool, &key_of(*next), *account).await;
            }
            Self::Replay { idem, idents, next } => {
                *next = (*next + 1) % idents.len();
                let begun = idem.begin(&idents[*next], &fingerprint(REQUEST)).await.unwrap();
                assert!(matches!(begun, Begin::Replay(stored) if stored.body() == "spent"));
            }
            Self::ByHand { pool, account } => {
                let mut transaction = pool.begin().await.unwrap();
                spend(&mut transaction, *account).await;
                transaction.commit().await.unwrap();
            }
        }
    }
}

async fn carry_out_by_hand(pool: &PgPool, key: &str, account: i64) {
    let mut transaction = pool.begin().await.unwrap();
    let begun =
        sqlx::query("INSERT INTO used (scope, key, fingerprint) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING");
    let begun = begun.bind(account.to_string()).bind(key).bind(fingerprint(REQUEST).as_bytes().as_slice());
    assert_eq!(begun.execute(&mut *transaction).await.unwrap().rows_affected(), 1, "the key was used before");
    spend(&mut transaction, account).await;
    let finished = sqlx::query("UPDATE used SET status = 200, body = $3 WHERE scope = $1 AND key = $2");
    let finished = finished.bind(account.to_string()).bind(key).bind("spent".as_bytes());
    finished.execute(&mut *transaction).await.unwrap();
    transaction.commit().await.unwrap();
}

async fn carry_out(idem: &PgIdempotency, ident: &Ident, account: i64) {
    let Begin::Fresh(mut transaction) = idem.begin(ident, &fingerprint(REQUEST)).await.unwrap() else {
        panic!("the key was used before");
    };
    spend(&mut transaction, account).await;
    transaction.finish(Stored::done(200, "spent")).await.unwrap();
}

fn key_of(number: u64) -> String {
    format!("8f14e45f-ea6f-4e3b-{number:016x}")
}

/// The effect. It needs a transaction because it has two statements.
pub(crate) async fn spend(connection: &mut PgConnection, account: i64) {
    let taken = sqlx::query("UPDATE account SET balance = balance - 1 WHERE id = $1 AND balance >= 1");
    assert_eq!(taken.bind(account).execute(&mut *connection).await.unwrap().rows_affected(), 1);
    let entered = sqlx::query("INSERT INTO entry (account, amount) VALUES ($1, -1)").bind(account);
    entered.execute(connection).await.unwrap();
}

/// Opens a pool without the driver's ping before each use. The ping would flatter the keys, because both sides would
/// have one more round trip.
pub(crate) async fn pool(url: &str, connections: u32) -> PgPool {
    let options = PgPoolOptions::new().max_connections(connections).min_connections(connections);
    options.test_before_acquire(false).connect(url).await.unwrap()
}
