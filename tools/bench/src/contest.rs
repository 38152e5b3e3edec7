//! Contenders that take turns, with the latency of their cycles.

use std::time::{Duration, Instant};

use bench::record::{Costs, Entry};
use bench::report::{Series, thousands};
use futures_util::future::BoxFuture;
use hdrhistogram::Histogram;

/// One task.
pub(crate) trait Worker: Send + 'static {
    /// Number of cycles in one call of [`Self::cycle`]. More than one if the clock would cost more than the work.
    const CYCLES: u32 = 1;

    /// Does the work.
    fn cycle(&mut self) -> impl Future<Output = ()> + Send;
}

/// The end of a round.
#[derive(Clone, Copy)]
pub(crate) enum Until {
    Passed(Duration),
    /// After this many calls of each task.
    Done(u32),
}

/// A contender with one task per worker.
pub(crate) struct Contender {
    name: String,
    promise: &'static str,
    tasks: Box<dyn Tasks>,
    pub(crate) costs: Costs,
}

impl Contender {
    pub(crate) fn new<W: Worker>(name: &str, promise: &'static str, workers: Vec<W>) -> Self {
        let tasks = workers.into_iter().map(|worker| (worker, latencies())).collect::<Vec<_>>();
        Self { name: name.to_owned(), promise, tasks: Box::new(tasks), costs: Costs::default() }
    }

    /// Runs all tasks. Returns cycles per second.
    pub(crate) async fn round(&mut self, until: Until) -> f64 {
        let begun = Instant::now();
        let cycles = self.tasks.run(until).await;
        cycles as f64 / begun.elapsed().as_secs_f64()
    }

    fn entry(&self, series: Series) -> Entry {
        let all = self.tasks.latencies();
        let micros = |share| (!all.is_empty()).then(|| all.value_at_quantile(share) as f64 / 1000.0);
        let promise = self.promise.to_owned();
        Entry { series, promise, p50: micros(0.5), p99: micros(0.99), costs: self.costs }
    }
}

/// Returns the entry of a peer that this machine lacks.
pub(crate) fn missing(name: &str, promise: &str) -> Entry {
    Entry { series: Series::new(name), promise: promise.to_owned(), ..Entry::default() }
}

/// Runs all contenders in turn, round after round. Each round starts with the next contender, because a contender could
/// profit from the state in which its predecessor leaves the processors.
pub(crate) async fn compete(contenders: &mut [Contender], rounds: usize, length: Duration) -> Vec<Entry> {
    let rounds = bench::or_smoke(rounds, 2);
    let length = bench::or_smoke(length, length.min(Duration::from_millis(100)));
    for contender in contenders.iter_mut() {
        contender.round(Until::Passed(length / 4)).await;
        contender.tasks.forget();
    }
    let mut series: Vec<Series> = contenders.iter().map(|contender| Series::new(&contender.name)).collect();
    for round in 0..rounds {
        for at in turns(round, contenders.len()) {
            let rate = contenders[at].round(Until::Passed(length)).await;
            series[at].rounds.push(rate);
        }
    }
    for series in &series {
        let rates: Vec<_> = series.rounds.iter().map(|rate| thousands(*rate)).collect();
        println!("    {:44} {}", series.name, rates.join(" "));
    }
    contenders.iter().zip(series).map(|(contender, series)| contender.entry(series)).collect()
}

/// Returns the order of the contenders in a round.
fn turns(round: usize, contenders: usize) -> impl Iterator<Item = usize> {
    (0..contenders).map(move |step| (round + step) % contenders)
}

/// The tasks of a contender, without their type.
trait Tasks: Send {
    /// Returns the number of cycles.
    fn run(&mut self, until: Until) -> BoxFuture<'_, u64>;
    /// Returns the latencies of all tasks, nanoseconds per cycle.
    fn latencies(&self) -> Histogram<u64>;
    fn forget(&mut self);
}

impl<W: Worker> Tasks for Vec<(W, Histogram<u64>)> {
    fn run(&mut self, until: Until) -> BoxFuture<'_, u64> {
        Box::pin(async move {
            let begun = Instant::now();
            let started =
                self.drain(..).map(|(worker, latencies)| tokio::spawn(task(worker, latencies, begun, until)));
            let started: Vec<_> = started.collect();
            let mut cycles = 0;
            for task in started {
                let (worker, latencies, own) = task.await.unwrap();
                self.push((worker, latencies));
                cycles += own;
            }
            cycles
        })
    }

    fn latencies(&self) -> Histogram<u64> {
        let mut all = latencies();
        for (_, own) in self {
            all.add(own).unwrap();
        }
        all
    }

    fn forget(&mut self) {
        for (_, latencies) in self {
            latencies.reset();
        }
    }
}

/// Repeats the work of one task. The clock is read once per call, for the end and for the latency.
async fn task<W: Worker>(
    mut worker: W,
    mut latencies: Histogram<u64>,
    begun: Instant,
    until: Until,
) -> (W, Histogram<u64>, u64) {
    let (mut calls, mut last) = (0_u32, Instant::now());
    loop {
        let goes_on = match until {
            Until::Passed(length) => last.duration_since(begun) < length,
            Until::Done(most) => calls < most,
        };
        if !goes_on {
            return (worker, latencies, u64::from(calls) * u64::from(W::CYCLES));
        }
        worker.cycle().await;
        // Lets other tasks run, because some work never waits.
        tokio::task::coop::consume_budget().await;
        let now = Instant::now();
        latencies.saturating_record((now - last).as_nanos() as u64 / u64::from(W::CYCLES));
        (calls, last) = (calls + 1, now);
    }
}

/// Returns a histogram for a nanosecond up to a minute, with two digits.
fn latencies() -> Histogram<u64> {
    Histogram::new_with_bounds(1, 60_000_000_000, 2).unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Counted(u32);

    impl Worker for Counted {
        const CYCLES: u32 = 10;

        async fn cycle(&mut self) {
            self.0 += 1;
        }
    }

    #[test]
    fn each_round_starts_with_the_next_contender() {
        let orders: Vec<Vec<usize>> = (0..4).map(|round| turns(round, 3).collect()).collect();
        assert_eq!(orders, [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]);
    }

    #[tokio::test]
    async fn a_call_counts_all_its_cycles_and_one_latency() {
        let mut tasks = vec![(Counted(0), latencies()), (Counted(0), latencies())];
        assert_eq!(tasks.run(Until::Done(3)).await, 2 * 3 * 10);
        assert_eq!((tasks[0].0.0, Tasks::latencies(&tasks).len()), (3, 6));
        tasks.forget();
        assert!(Tasks::latencies(&tasks).is_empty());
    }

    #[tokio::test]
    async fn contenders_take_turns_and_keep_their_order() {
        let mut contenders = ["a", "b"].map(|name| Contender::new(name, "nothing", vec![Counted(0)]));
        let entries = compete(&mut contenders, 3, Duration::from_millis(20)).await;
        let rounds: Vec<_> =
            entries.iter().map(|entry| (entry.series.name.as_str(), entry.series.rounds.len())).collect();
        assert_eq!(rounds, [("a", 3), ("b", 3)]);
        assert!(entries.iter().all(|entry| entry.p50.is_some() && entry.p99 >= entry.p50));
    }
}
