//! Contenders that take turns.

use std::time::{Duration, Instant};

use bench::report::{Series, thousands};

/// Number and length of the rounds. Many short rounds, because other load of the machine must affect both contenders.
const ROUNDS: usize = 20;
const ROUND: Duration = Duration::from_millis(200);

fn round_length() -> Duration {
    bench::or_smoke(ROUND, Duration::from_millis(20))
}

/// One client.
pub(crate) trait Worker: Send + 'static {
    /// Does the work once.
    fn cycle(&mut self) -> impl Future<Output = ()> + Send;
}

/// A contender with one task per client.
pub(crate) struct Contender<W> {
    name: String,
    workers: Vec<W>,
}

impl<W: Worker> Contender<W> {
    pub(crate) fn new(name: &str, workers: Vec<W>) -> Self {
        Self { name: name.to_owned(), workers }
    }

    /// Returns cycles per second.
    async fn round(&mut self, length: Duration) -> f64 {
        let begun = Instant::now();
        let deadline = begun + length;
        let work = move |mut worker: W| async move {
            let mut cycles = 0_u64;
            while Instant::now() < deadline {
                worker.cycle().await;
                cycles += 1;
            }
            (worker, cycles)
        };
        let tasks: Vec<_> = self.workers.drain(..).map(|worker| tokio::spawn(work(worker))).collect();
        let mut total = 0;
        for task in tasks {
            let (worker, cycles) = task.await.unwrap();
            self.workers.push(worker);
            total += cycles;
        }
        total as f64 / begun.elapsed().as_secs_f64()
    }
}

/// Runs all contenders in turn, round after round. Every other round runs backwards, because the later contender has
/// warmer caches.
pub(crate) async fn compete<W: Worker>(mut contenders: Vec<Contender<W>>) -> Vec<Series> {
    for contender in &mut contenders {
        contender.round(round_length()).await;
    }
    let series = |contender: &Contender<W>| Series { name: contender.name.clone(), rounds: Vec::new() };
    let mut series: Vec<Series> = contenders.iter().map(series).collect();
    for round in 0..bench::or_smoke(ROUNDS, 2) {
        let mut turns: Vec<_> = contenders.iter_mut().zip(&mut series).collect();
        if round % 2 == 1 {
            turns.reverse();
        }
        for (contender, series) in turns {
            series.rounds.push(contender.round(round_length()).await);
        }
    }
    for series in &series {
        let rounds: Vec<_> = series.rounds.iter().map(|rate| thousands(*rate)).collect();
        println!("    {:28} {}", series.name, rounds.join(" "));
    }
    series
}
