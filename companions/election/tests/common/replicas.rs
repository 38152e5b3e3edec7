//! Replicas on one memory store, in virtual time.

#![allow(clippy::unwrap_used, dead_code, unreachable_pub)] // A failed `unwrap` fails the test.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use leasehold_api::{Error, GrantHandle, LockKey, Validity};
use leasehold_election::{Election, ElectionHandle, Next, OnLoss, State, TermResult};
use leasehold_engine::Engine;
use leasehold_memory::{ClientFaults, ClientSetup, MemoryStore};
use test_bounds::within;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::task::JoinHandle;

/// A time that no test reaches, real or virtual.
pub const LONG: Duration = Duration::from_secs(10_000_000);
pub const TTL: Duration = Duration::from_secs(30);

pub fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

pub fn key() -> LockKey {
    LockKey::new("leader").unwrap()
}

pub fn leases() -> MemoryStore {
    MemoryStore::new().default_ttl(TTL)
}

/// A report of a body.
#[derive(Debug)]
pub enum Event {
    Leads(GrantHandle),
    /// The body has ended, with the validity of its grant and the state of its campaign at that moment.
    Ended(Validity, State),
}

/// Reports the end of a body, however it ends.
struct Probe {
    grant: GrantHandle,
    handle: ElectionHandle,
    events: UnboundedSender<Event>,
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.events.send(Event::Ended(self.grant.validity(), self.handle.state()));
    }
}

/// A candidate whose body waits for the test.
pub struct Replica {
    pub lock: Arc<Engine>,
    pub faults: ClientFaults,
    pub handle: ElectionHandle,
    pub task: JoinHandle<Result<(), Error>>,
    /// What the running body returns next.
    pub orders: UnboundedSender<TermResult>,
    events: UnboundedReceiver<Event>,
}

impl Replica {
    pub fn start(store: &MemoryStore, name: &'static str) -> Self {
        Self::with(store, name, |election| election)
    }

    pub fn with(
        store: &MemoryStore,
        name: &'static str,
        settings: impl FnOnce(Election<Arc<Engine>>) -> Election<Arc<Engine>>,
    ) -> Self {
        let client = store.client_with(ClientSetup::new()).unwrap();
        Self::of(Arc::new(client.lock), client.faults, name, settings)
    }

    pub fn of(
        lock: Arc<Engine>,
        faults: ClientFaults,
        name: &'static str,
        settings: impl FnOnce(Election<Arc<Engine>>) -> Election<Arc<Engine>>,
    ) -> Self {
        let election = settings(Election::new(Arc::clone(&lock), key()).value(name));
        let handle = election.handle();
        let ((report, events), (orders, order)) = (unbounded_channel(), unbounded_channel());
        let order = Arc::new(tokio::sync::Mutex::new(order));
        let probe_of = handle.clone();
        let task = tokio::spawn(async move {
            let campaign = election.lead_boxed(|term| {
                let (grant, handle, events) = (term.guard().handle(), probe_of.clone(), report.clone());
                let _ = events.send(Event::Leads(grant.clone()));
                let probe = Probe { grant, handle, events };
                let order = Arc::clone(&order);
                Box::pin(async move {
                    let _probe = probe;
                    order.lock().await.recv().await.unwrap()
                })
            });
            campaign.await
        });
        Self { lock, faults, handle, task, orders, events }
    }

    /// Lets the running body return.
    pub fn order(&self, result: TermResult) {
        self.orders.send(result).unwrap();
    }

    pub fn again(&self) {
        self.order(Ok(Next::Again));
    }

    /// Waits for the next term.
    pub async fn leads(&mut self) -> GrantHandle {
        match within(LONG, "not elected", self.events.recv()).await.unwrap() {
            Event::Leads(grant) => grant,
            event @ Event::Ended(..) => panic!("{event:?}"),
        }
    }

    /// Waits for the end of the running body.
    pub async fn ended(&mut self) -> (Validity, State) {
        match within(LONG, "not ended", self.events.recv()).await.unwrap() {
            Event::Ended(validity, state) => (validity, state),
            event @ Event::Leads(_) => panic!("{event:?}"),
        }
    }

    /// Returns the reports that have arrived.
    pub fn reports(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.events.try_recv().ok()).collect()
    }

    /// Waits until the state is as wanted, and returns it.
    pub async fn until(&self, is_wanted: impl Fn(&State) -> bool) -> State {
        let mut handle = self.handle.clone();
        let wait = async {
            let mut state = handle.state();
            while !is_wanted(&state) {
                state = handle.changed().await;
            }
            state
        };
        within(LONG, "never in this state", wait).await
    }

    /// Waits for the result of the campaign.
    pub async fn result(mut self) -> Result<(), Error> {
        within(LONG, "the campaign goes on", &mut self.task).await.unwrap()
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub fn is_resting(state: &State) -> bool {
    matches!(state, State::Resting { .. })
}

pub fn is_candidate(state: &State) -> bool {
    matches!(state, State::Candidate)
}

pub fn is_failed(state: &State) -> bool {
    matches!(state, State::Failed { .. })
}

/// Lets all tasks run until they wait, without a step of the clock.
pub async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

pub async fn in_time<F: Future>(what: &str, future: F) -> F::Output {
    within(LONG, what, future).await
}

pub fn telling(election: Election<Arc<Engine>>) -> Election<Arc<Engine>> {
    election.on_loss(OnLoss::Tell)
}
