//! Lets only one request per key (its flight) use the store from this process, and decides that before a connection is
//! requested. A repetition of a request in flight therefore costs neither a connection nor a round trip.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, timeout_at};

use crate::error::IdempotencyError;
use crate::ident::{Fingerprint, Ident};
use crate::stored::Stored;

/// Maximum wait of a second caller for the first caller's lookup in the store, regardless of its `join`. A finished
/// request is then replayed to both.
const LOOK: Duration = Duration::from_secs(1);

/// All keys in flight in this process. Only the leader, which is the request that works on the key, has an entry.
#[derive(Clone, Default)]
pub(crate) struct Flights(Arc<Mutex<FlightTable>>);

type FlightTable = HashMap<Ident, watch::Receiver<FlightStage>>;

#[derive(Clone)]
enum FlightStage {
    /// The leader waits for a connection of the pool.
    Queued,
    /// The leader has queried the record, which takes one round trip.
    Looking,
    /// No record exists. The caller's code runs.
    Running,
    /// The response is recorded in the store.
    Known(Fingerprint, Stored),
}

/// The outcome of entering the flight of a key.
pub(crate) enum FlightEntry {
    /// The caller becomes the leader and queries the store.
    Lead(Flight),
    /// The leader has found or recorded this response, for a request with this fingerprint.
    Known(Fingerprint, Stored),
    /// The leader is still working.
    InFlight,
}

/// The right to work on a key. If dropped, the next caller gets it.
pub(crate) struct Flight {
    flights: Flights,
    ident: Ident,
    stage: watch::Sender<FlightStage>,
}

impl Flights {
    /// Makes the caller the leader if the key has none. Otherwise waits for the leader: until its lookup is complete,
    /// and up to `join` while its work runs.
    pub(crate) async fn enter(
        &self,
        ident: &Ident,
        join: Duration,
        limit: usize,
    ) -> Result<FlightEntry, IdempotencyError> {
        let begun = Instant::now();
        let (join, look) = (begun + join, begun + join.max(LOOK));
        loop {
            let mut stage = match self.lead(ident, limit)? {
                Ok(flight) => return Ok(FlightEntry::Lead(flight)),
                Err(stage) => stage,
            };
            loop {
                let until = match &*stage.borrow_and_update() {
                    FlightStage::Known(fingerprint, stored) => {
                        return Ok(FlightEntry::Known(*fingerprint, stored.clone()));
                    }
                    FlightStage::Looking => look,
                    FlightStage::Queued | FlightStage::Running => join,
                };
                if Instant::now() >= until {
                    return Ok(FlightEntry::InFlight);
                }
                match timeout_at(until, stage.changed()).await {
                    Ok(Ok(())) => {}
                    // The leader has ended without a result, so the caller tries to lead.
                    Ok(Err(_)) => break,
                    Err(_) => return Ok(FlightEntry::InFlight),
                }
            }
        }
    }

    fn lead(
        &self,
        ident: &Ident,
        limit: usize,
    ) -> Result<Result<Flight, watch::Receiver<FlightStage>>, IdempotencyError> {
        let mut table = self.table();
        if let Some(stage) = table.get(ident) {
            return Ok(Err(stage.clone()));
        }
        if table.len() >= limit {
            return Err(IdempotencyError::Overloaded { limit });
        }
        let (stage, seen) = watch::channel(FlightStage::Looking);
        table.insert(ident.clone(), seen);
        Ok(Ok(Flight { flights: self.clone(), ident: ident.clone(), stage }))
    }

    /// Returns the number of keys in flight in this process.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.table().len()
    }

    fn table(&self) -> MutexGuard<'_, FlightTable> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight {
    /// Marks the leader as waiting for a connection, because other callers must not wait for its lookup then.
    pub(crate) fn queued(&self) {
        self.stage.send_replace(FlightStage::Queued);
    }

    pub(crate) fn looking(&self) {
        self.stage.send_replace(FlightStage::Looking);
    }

    pub(crate) fn running(&self) {
        self.stage.send_replace(FlightStage::Running);
    }

    /// Publishes the result to the waiting callers.
    pub(crate) fn known(self, fingerprint: Fingerprint, stored: Stored) {
        self.stage.send_replace(FlightStage::Known(fingerprint, stored));
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        // Removes the entry before the channel closes, because a waiter that sees it close tries to lead.
        self.flights.table().remove(&self.ident);
    }
}

impl fmt::Debug for Flights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Flights").field(&self.table().len()).finish()
    }
}

impl fmt::Debug for Flight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Flight").field(&self.ident).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ident::fingerprint;

    const NONE: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(60);

    async fn lead(flights: &Flights, ident: &Ident) -> Flight {
        match flights.enter(ident, NONE, 10).await.unwrap() {
            FlightEntry::Lead(flight) => flight,
            _ => panic!("somebody leads already"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_waits_for_the_look_and_not_for_the_work() {
        let flights = Flights::default();
        let ident = Ident::new("s", "k").unwrap();
        let first = lead(&flights, &ident).await;
        let begun = Instant::now();
        let (second, ()) = tokio::join!(flights.enter(&ident, NONE, 10), async { first.running() });
        assert!(matches!(second.unwrap(), FlightEntry::InFlight));
        first.queued();
        assert!(matches!(flights.enter(&ident, NONE, 10).await.unwrap(), FlightEntry::InFlight));
        assert_eq!(begun.elapsed(), NONE, "the clock stands still while nobody waits for it");
        // Without the store's reply, the wait for the lookup ends too.
        first.looking();
        assert!(matches!(flights.enter(&ident, NONE, 10).await.unwrap(), FlightEntry::InFlight));
        assert_eq!(begun.elapsed(), LOOK);
    }

    #[tokio::test(start_paused = true)]
    async fn who_joins_gets_the_result_or_the_lead() {
        let flights = Flights::default();
        let ident = Ident::new("s", "k").unwrap();
        let first = lead(&flights, &ident).await;
        first.running();
        let known = async { first.known(fingerprint([]), Stored::done(200, "x")) };
        let (a, b, ()) =
            tokio::join!(flights.enter(&ident, LONG, 10), flights.enter(&ident, LONG, 10), known);
        for entry in [a, b] {
            assert!(
                matches!(entry.unwrap(), FlightEntry::Known(_, stored) if stored == Stored::done(200, "x"))
            );
        }
        let first = lead(&flights, &ident).await;
        first.running();
        let fails = async { drop(first) };
        let (a, b, ()) =
            tokio::join!(flights.enter(&ident, LONG, 10), flights.enter(&ident, LONG, 10), fails);
        let leads = [a, b].into_iter().filter(|entry| matches!(entry, Ok(FlightEntry::Lead(_)))).count();
        assert_eq!(leads, 1, "one of them takes over, the other is told so when its wait is over");
    }

    #[tokio::test(start_paused = true)]
    async fn memory_is_bounded_and_given_back() {
        let flights = Flights::default();
        let ident = |n: usize| Ident::new("s", n.to_string()).unwrap();
        let mut leads = Vec::new();
        for n in 0..10 {
            leads.push(lead(&flights, &ident(n)).await);
        }
        let refused = flights.enter(&ident(10), NONE, 10).await;
        assert!(matches!(refused, Err(IdempotencyError::Overloaded { limit: 10 })));
        assert_eq!(flights.len(), 10, "who is refused is not kept");
        leads.pop();
        assert!(matches!(flights.enter(&ident(10), NONE, 10).await, Ok(FlightEntry::Lead(_))));
        drop(leads);
        assert_eq!(flights.len(), 0);
    }
}
