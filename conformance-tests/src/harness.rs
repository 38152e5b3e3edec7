//! What the author of a store provides: fresh stores, independent clients of one store, and the faults
//! that can be injected.

use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_api::{Error, HolderId, Lock, LockKey, LossReason, MAX_KEY_BYTES};
// What happens to a call, in the words that the test double of `leasehold-memory` uses too.
pub use leasehold_engine::{ClientSetup, Fault, Op, Skew};

/// Makes a fresh store for each case. The argument of [`suite!`](crate::suite).
#[async_trait]
pub trait Factory: Send + Sync {
    /// The clock that the store and its engine follow.
    fn time(&self) -> Time;

    /// A store that no other case has touched. Called on the runtime of the case.
    ///
    /// # Errors
    ///
    /// Whatever keeps the store from starting; the case fails with it.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future while the case runs.
    async fn open(&self) -> Result<Box<dyn Harness>, Error>;

    /// A store like that of [`open`](Self::open) on a server of its own: the case [restarts](Faults::restart) it. Replace it
    /// if the stores of several cases share a server.
    ///
    /// # Errors
    ///
    /// As [`open`](Self::open).
    ///
    /// # Cancel safety
    ///
    /// As [`open`](Self::open).
    async fn open_alone(&self) -> Result<Box<dyn Harness>, Error> {
        self.open().await
    }

    /// Connects from a child process to the store that [`Harness::child`] described.
    ///
    /// # Errors
    ///
    /// Whatever keeps the child from connecting. The default: [`Unsupported`](leasehold_api::ErrorKind::Unsupported).
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn connect_child(&self, spec: &str) -> Result<Arc<dyn Lock>, Error> {
        let _ = spec;
        Err(Error::unsupported("way to be reached from a child process"))
    }
}

/// One fresh store and the ways to reach it.
#[async_trait]
pub trait Harness: Debug + Send + Sync {
    /// One more independent client of the store: its own engine, which shares nothing with the other
    /// clients but the store itself.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from connecting.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn client(&self) -> Result<Arc<dyn Lock>, Error>;

    /// The faults that can be injected, if there are any.
    fn faults(&self) -> Option<&dyn Faults> {
        None
    }

    /// The longest key that clients take, in bytes: [`MAX_KEY_BYTES`], less what a wrapper adds.
    fn longest_key(&self) -> usize {
        MAX_KEY_BYTES
    }

    /// A text from which [`Factory::connect_child`] finds this store in another process. `None`: the
    /// store cannot be reached from there.
    fn child(&self) -> Option<String> {
        None
    }
}

/// Which clock the store and its engine follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)] // Time can be paused or it cannot.
pub enum Time {
    /// The clock of tokio: cases run on one thread with paused time, and hours pass in no time.
    Virtual,
    /// Real time: cases run on several threads, with durations as short as the declared bounds allow.
    Real,
}

/// Faults that a harness injects. A case that needs a fault which [`supports`](Faults::supports) does
/// not name is reported as not applicable.
#[async_trait]
pub trait Faults: Debug + Send + Sync {
    /// Which faults there are.
    fn supports(&self) -> FaultSet;

    /// One more client, which can be disturbed.
    ///
    /// # Errors
    ///
    /// Whatever keeps it from connecting.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error>;

    /// Ends the hold of `key` at the store, whoever has it, as a killed session would: its client is
    /// told or notices by itself. Returns whether there was one. Only called where [`FaultSet::lose`]
    /// is set.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn lose(&self, key: &LockKey, reason: LossReason) -> bool {
        let _ = (key, reason);
        false
    }

    /// Ends the hold of `key` at the store without telling anybody, as if its row had been deleted.
    /// Returns whether there was one. Only called where [`FaultSet::purge`] is set.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn purge(&self, key: &LockKey) -> bool {
        let _ = key;
        false
    }

    /// Stops the store as a crash does, without a word to its clients, and starts it again: what it had not written down by
    /// then is gone. Returns once it answers. Only called where [`FaultSet::restart`] is set, on a store of
    /// [`Factory::open_alone`].
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn restart(&self) {}
}

/// Which faults a harness can inject.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultSet {
    /// [`Faults::lose`] ends a hold at the store.
    pub lose: bool,
    /// It ends with it whatever else the same session of the store holds. Not a fault, but what one brings
    /// along: [`all`](Self::all) leaves it out.
    pub lose_together: bool,
    /// [`Faults::purge`] ends a hold without telling.
    pub purge: bool,
    /// [`ClientFaults::silence`] cuts one client off.
    pub silence: bool,
    /// [`ClientFaults::script`] disturbs the next calls of one client.
    pub script: bool,
    /// [`ClientFaults::mute`] loses the wake-ups of one client.
    pub mute: bool,
    /// [`ClientFaults::calls`] counts.
    pub calls: bool,
    /// [`ClientSetup::skew`] is followed.
    pub skew: bool,
    /// [`Faults::restart`] restarts the store.
    pub restart: bool,
    /// [`ClientFaults::script_key`] disturbs single keys.
    pub keys: bool,
    /// [`ClientFaults::tell_lost`] notifies of losses.
    pub late_losses: bool,
}

impl FaultSet {
    /// All of them; unset what is missing.
    #[must_use]
    pub const fn all() -> Self {
        Self {
            lose: true,
            lose_together: false,
            purge: true,
            silence: true,
            script: true,
            mute: true,
            calls: true,
            skew: true,
            restart: true,
            keys: true,
            late_losses: true,
        }
    }

    /// None; set what there is.
    #[must_use]
    pub const fn none() -> Self {
        Self {
            lose: false,
            lose_together: false,
            purge: false,
            silence: false,
            script: false,
            mute: false,
            calls: false,
            skew: false,
            restart: false,
            keys: false,
            late_losses: false,
        }
    }
}

/// A client and the means to disturb it alone.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct FaultyClient {
    /// The client.
    pub lock: Arc<dyn Lock>,
    /// What disturbs it.
    pub faults: Arc<dyn ClientFaults>,
}

impl FaultyClient {
    /// Puts the two together.
    #[must_use]
    pub fn new(lock: Arc<dyn Lock>, faults: Arc<dyn ClientFaults>) -> Self {
        Self { lock, faults }
    }
}

/// Disturbs one client. What [`FaultSet`] does not name is never called.
pub trait ClientFaults: Debug + Send + Sync {
    /// While `silent`, no request of this client reaches the store and none is answered: calls hang.
    /// Those that still hang when the silence ends are carried out then. Events do not arrive either.
    fn silence(&self, silent: bool) {
        let _ = silent;
    }

    /// Queues what happens to the next call of `op` that has no fault queued before it.
    fn script(&self, op: Op, fault: Fault) {
        let _ = (op, fault);
    }

    /// Queues what happens to the next request of `op` for `key` alone, also where one call has several requests: `Error`,
    /// `Refuse` and `LoseReply`. Other faults change nothing.
    fn script_key(&self, op: Op, key: &LockKey, fault: Fault) {
        let _ = (op, key, fault);
    }

    /// Notifies this client that `holder` has lost `key`, whatever the store says: as a message of the store does that was
    /// late.
    fn tell_lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        let _ = (key, holder, reason);
    }

    /// While `muted`, wake-ups of this client are lost; everything else works.
    fn mute(&self, muted: bool) {
        let _ = muted;
    }

    /// How many calls of `op` this client has made to its store so far. A call with several requests
    /// counts once.
    fn calls(&self, op: Op) -> u64 {
        let _ = op;
        0
    }
}
