//! Runs the suite on the example store. Use a file like this for your own store.

// The example is a program, but only its store is used here.
#[allow(unreachable_pub)]
#[path = "../examples/your_store.rs"]
mod your_store;

use std::sync::Arc;

use leasehold_api::{Error, Lock};
use leasehold_conformance::{
    ClientSetup, Disturbed, Factory, FaultSet, Faults, FaultyClient, Harness, SkewedClock, Time, async_trait,
    suite,
};
use leasehold_engine::{Engine, Single, TokioClock};
use your_store::{Table, TableClient, backend, connect};

suite!(TableFactory);

struct TableFactory;

#[async_trait]
impl Factory for TableFactory {
    fn time(&self) -> Time {
        // The table and its engines follow tokio's clock. A server's time is `Time::Real`.
        Time::Virtual
    }

    async fn open(&self) -> Result<Box<dyn Harness>, Error> {
        Ok(Box::new(TableHarness { table: Arc::default() }))
    }
}

#[derive(Debug)]
struct TableHarness {
    table: Arc<Table>,
}

#[async_trait]
impl Harness for TableHarness {
    async fn client(&self) -> Result<Arc<dyn Lock>, Error> {
        Ok(Arc::new(connect(&self.table)?))
    }

    fn faults(&self) -> Option<&dyn Faults> {
        Some(self)
    }
}

#[async_trait]
impl Faults for TableHarness {
    fn supports(&self) -> FaultSet {
        let mut set = Disturbed::<Single<TableClient>>::supports();
        // The waiters poll.
        (set.skew, set.mute) = (true, true);
        set
    }

    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error> {
        let backend = Disturbed::new(backend(&self.table));
        let faults = backend.faults();
        let lock = Engine::builder(backend)
            .clock(Arc::new(SkewedClock::new(TokioClock::new(), setup.skew)))
            .start()?;
        Ok(FaultyClient::new(Arc::new(lock), faults))
    }
}
