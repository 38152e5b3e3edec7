//! Measures many callers of one key on few connections: the time until the late callers get their response.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bench::report::{Row, micros, quantile};
use leasehold_idempotency::{Begin, Fingerprint, Ident, PgIdempotency, Stored, fingerprint};
use tokio::sync::{Barrier, Semaphore};

use crate::companions::transactions::pool;

const CALLERS: u32 = 200;
const CONNECTIONS: u32 = 2;
const ROUNDS: usize = 50;
const GOAL: Duration = Duration::from_millis(10);

/// All callers of one key.
struct Round {
    idem: PgIdempotency,
    ident: Ident,
    fingerprint: Fingerprint,
    start: Barrier,
    /// One permit per caller that got `InFlight`.
    told: Semaphore,
}

/// Time until one caller's response.
enum Answered {
    First(Duration),
    TooLate(Duration),
}

pub(crate) async fn measure(url: &str, rows: &mut Vec<Row>) {
    println!("{CALLERS} callers of one key, {CONNECTIONS} connections, {ROUNDS} keys");
    let pool = pool(url, CONNECTIONS).await;
    let idem = PgIdempotency::new(pool.clone());
    idem.migrate().await.unwrap();
    let (mut first, mut too_late) = (Vec::new(), Vec::new());
    let rounds = bench::or_smoke(ROUNDS, 2);
    for round in 0..=rounds {
        let round_of_all = Arc::new(Round {
            idem: idem.clone(),
            ident: Ident::new("callers", round.to_string()).unwrap(),
            fingerprint: fingerprint([b"POST /spend".as_slice()]),
            start: Barrier::new(CALLERS as usize),
            told: Semaphore::new(0),
        });
        let callers: Vec<_> = (0..CALLERS).map(|_| tokio::spawn(Arc::clone(&round_of_all).call())).collect();
        for caller in callers {
            match caller.await.unwrap() {
                // Skips the first round, because the statements are not prepared yet.
                _ if round == 0 => {}
                Answered::First(took) => first.push(micros(took)),
                Answered::TooLate(took) => too_late.push(micros(took)),
            }
        }
    }
    assert_eq!((first.len(), too_late.len()), (rounds, rounds * (CALLERS as usize - 1)));
    let millis = |values: &[f64], share| quantile(values, share) / 1e3;
    println!("    too late: p50 {:.2} ms, p99 {:.2} ms", millis(&too_late, 0.5), millis(&too_late, 0.99));
    rows.push(Row {
        work: format!("{CALLERS} callers of one key, pool of {CONNECTIONS}: in flight"),
        measured: format!("p99 {:.2} ms", millis(&too_late, 0.99)),
        floor: format!("the first one's begin, p50 {:.2} ms", millis(&first, 0.5)),
        ratio: "-".to_owned(),
        goal: format!("at most {} ms", GOAL.as_millis()),
        met: Some(quantile(&too_late, 0.99) <= micros(GOAL)),
        ..Row::default()
    });
    pool.close().await;
}

impl Round {
    async fn call(self: Arc<Self>) -> Answered {
        self.start.wait().await;
        let begun = Instant::now();
        let answer = self.idem.begin(&self.ident, &self.fingerprint).await.unwrap();
        let took = begun.elapsed();
        match answer {
            Begin::Fresh(transaction) => {
                // Works until all other callers have their response, because none of them must wait for the work.
                self.told.acquire_many(CALLERS - 1).await.unwrap().forget();
                transaction.finish(Stored::done(200, "spent")).await.unwrap();
                Answered::First(took)
            }
            Begin::InFlight { .. } => {
                self.told.add_permits(1);
                Answered::TooLate(took)
            }
            other => panic!("nobody has finished, and yet: {other:?}"),
        }
    }
}
