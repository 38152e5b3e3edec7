//! The interface that the author of a store implements: fresh stores, independent clients of one store, and
//! faults.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use leasehold_api::{Error, GrantHandle, HolderId, Lock, LockKey, LossReason, MAX_KEY_BYTES};
// The test double of `leasehold-memory` uses the same fault types.
pub use leasehold_engine::{ClientSetup, Fault, Op, Skew};

/// Makes a fresh store for each case. Its implementor is the argument of [`suite!`](crate::suite).
#[async_trait]
pub trait Factory: Send + Sync {
    /// Returns the clock that the store and its engine follow.
    fn time(&self) -> Time;

    /// Opens a store that no other case has used. Called on the runtime of the case.
    ///
    /// # Errors
    ///
    /// An error if the store cannot start. The case then fails with this error.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future while the case runs.
    async fn open(&self) -> Result<Box<dyn Harness>, Error>;

    /// Opens a fresh store on a separate server, because the case [restarts](Faults::restart) the server.
    /// Override this method if the stores of several cases share a server. The default calls
    /// [`open`](Self::open).
    ///
    /// # Errors
    ///
    /// The same as for [`open`](Self::open).
    ///
    /// # Cancel safety
    ///
    /// The same as for [`open`](Self::open).
    async fn open_alone(&self) -> Result<Box<dyn Harness>, Error> {
        self.open().await
    }

    /// Connects a child process to the store that `spec` describes. `spec` is the text from
    /// [`Harness::child`].
    ///
    /// # Errors
    ///
    /// An error if the child cannot connect. The default returns
    /// [`Unsupported`](leasehold_api::ErrorKind::Unsupported).
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn connect_child(&self, spec: &str) -> Result<Arc<dyn Lock>, Error> {
        let _ = spec;
        Err(Error::unsupported("way to be reached from a child process"))
    }
}

/// One fresh store and the ways to connect to it.
#[async_trait]
pub trait Harness: Debug + Send + Sync {
    /// Makes another independent client of the store. It has a separate engine and shares nothing with the
    /// other clients except the store.
    ///
    /// # Errors
    ///
    /// An error if the client cannot connect.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn client(&self) -> Result<Arc<dyn Lock>, Error>;

    /// Returns the means to inject faults. `None` if the harness has none.
    fn faults(&self) -> Option<&dyn Faults> {
        None
    }

    /// Returns the means to fence grants. `None` if the store has no fence.
    fn fences(&self) -> Option<&dyn Fences> {
        None
    }

    /// Returns the longest key that clients accept, in bytes: [`MAX_KEY_BYTES`] minus the bytes that a
    /// wrapper adds.
    fn longest_key(&self) -> usize {
        MAX_KEY_BYTES
    }

    /// Returns a text with which [`Factory::connect_child`] finds this store in another process. `None` if
    /// another process cannot reach the store.
    fn child(&self) -> Option<String> {
        None
    }
}

/// The fences of a store: the extension of its grants that ties a transaction of the caller to the grant.
#[async_trait]
pub trait Fences: Debug + Send + Sync {
    /// Fences the grant in a new transaction of the caller, through the extension of `grant`. The transaction is
    /// open until the returned value is dropped.
    ///
    /// # Errors
    ///
    /// The error of the fence if the grant has ended, and any error without an extension of the grant.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn fence(&self, grant: &GrantHandle) -> Result<Box<dyn Any + Send>, Error>;
}

/// The clock that the store and its engine follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(clippy::exhaustive_enums)] // A third variant cannot follow, because time is paused or not.
pub enum Time {
    /// The clock of tokio. Each case runs on one thread with paused time, so that hours pass at once.
    Virtual,
    /// Real time. Each case runs on several threads, with durations as short as the declared bounds allow.
    Real,
}

/// The faults that a harness can inject. A case that needs a fault outside of [`supports`](Faults::supports)
/// is reported as not applicable.
#[async_trait]
pub trait Faults: Debug + Send + Sync {
    /// Returns the set of supported faults.
    fn supports(&self) -> FaultSet;

    /// Makes another client, together with the means to disturb it.
    ///
    /// # Errors
    ///
    /// An error if the client cannot connect.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn client(&self, setup: ClientSetup) -> Result<FaultyClient, Error>;

    /// Ends the hold of `key` at the store, regardless of its holder, as a killed session does. The client is
    /// notified or detects the loss by itself. Returns whether the key was held. Called only if
    /// [`FaultSet::lose`] is set.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn lose(&self, key: &LockKey, reason: LossReason) -> bool {
        let _ = (key, reason);
        false
    }

    /// Ends the hold of `key` at the store without a notification, as a deleted row does. Returns whether the
    /// key was held. Called only if [`FaultSet::purge`] is set.
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn purge(&self, key: &LockKey) -> bool {
        let _ = key;
        false
    }

    /// Crashes the store without notice to its clients and starts it again. Data that the store had not
    /// persisted is lost. Returns after the store accepts calls again. Called only if [`FaultSet::restart`]
    /// is set, on a store of [`Factory::open_alone`].
    ///
    /// # Cancel safety
    ///
    /// The suite never drops this future.
    async fn restart(&self) {}
}

/// A set of faults that a harness can inject.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultSet {
    /// Whether [`Faults::lose`] ends a hold at the store.
    pub lose: bool,
    /// Whether [`Faults::lose`] also ends the other holds of the same store session. [`all`](Self::all)
    /// leaves it unset, because it is a side effect and not a fault.
    pub lose_together: bool,
    /// Whether [`Faults::purge`] ends a hold without a notification.
    pub purge: bool,
    /// Whether [`ClientFaults::silence`] cuts one client off.
    pub silence: bool,
    /// Whether [`ClientFaults::script`] disturbs the next calls of one client.
    pub script: bool,
    /// Whether [`ClientFaults::mute`] loses the wake-ups of one client.
    pub mute: bool,
    /// Whether [`ClientFaults::calls`] counts calls.
    pub calls: bool,
    /// Whether clients follow [`ClientSetup::skew`].
    pub skew: bool,
    /// Whether [`Faults::restart`] restarts the store.
    pub restart: bool,
    /// Whether [`ClientFaults::script_key`] disturbs single keys.
    pub keys: bool,
    /// Whether [`ClientFaults::tell_lost`] notifies clients of losses.
    pub late_losses: bool,
    /// Whether clients follow [`ClientSetup::without_hand_over`].
    pub hand_over_off: bool,
    /// Whether clients with [`ClientSetup::holds_requests_back`] have a [`Wire`].
    pub late_requests: bool,
}

impl FaultSet {
    /// Returns the set of all faults. Unset the missing ones.
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
            hand_over_off: true,
            late_requests: true,
        }
    }

    /// Returns the empty set. Set the supported faults.
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
            hand_over_off: false,
            late_requests: false,
        }
    }
}

/// A client and the means to disturb only this client.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct FaultyClient {
    /// The client.
    pub lock: Arc<dyn Lock>,
    /// The means to disturb the client.
    pub faults: Arc<dyn ClientFaults>,
}

impl FaultyClient {
    /// Combines a client with the means to disturb it.
    #[must_use]
    pub fn new(lock: Arc<dyn Lock>, faults: Arc<dyn ClientFaults>) -> Self {
        Self { lock, faults }
    }
}

/// Disturbs one client. The suite calls no method whose fault is missing from [`FaultSet`].
pub trait ClientFaults: Debug + Send + Sync {
    /// Cuts the client off from the store while `silent` is set. No request reaches the store, and calls hang.
    /// Events may still arrive. Calls that still hang at the end of the silence are then carried out.
    fn silence(&self, silent: bool) {
        let _ = silent;
    }

    /// Queues `fault` for the next call of `op` that has no fault yet.
    fn script(&self, op: Op, fault: Fault) {
        let _ = (op, fault);
    }

    /// Queues `fault` for the next request of `op` for `key`, even if its call contains other requests.
    /// `Error`, `Refuse` and `LoseReply` take effect, other faults change nothing.
    fn script_key(&self, op: Op, key: &LockKey, fault: Fault) {
        let _ = (op, key, fault);
    }

    /// Notifies this client that `holder` has lost `key`, regardless of the state of the store. This imitates
    /// a late message of the store.
    fn tell_lost(&self, key: &LockKey, holder: HolderId, reason: LossReason) {
        let _ = (key, holder, reason);
    }

    /// Loses the wake-ups of this client while `muted` is set. Everything else works.
    fn mute(&self, muted: bool) {
        let _ = muted;
    }

    /// Returns how many calls of `op` this client has made to its store so far. A call with several requests
    /// counts once.
    fn calls(&self, op: Op) -> u64 {
        let _ = op;
        0
    }

    /// Returns how many releases the store has answered without an error so far.
    fn released(&self) -> u64 {
        0
    }

    /// Returns the way of the client's requests to the store. Set if [`FaultSet::late_requests`] is declared and
    /// the client was made with [`ClientSetup::holds_requests_back`].
    fn wire(&self) -> Option<&dyn Wire> {
        None
    }
}

/// The way of one client's requests to the store, below its backend, for example a proxy in front of the server.
pub trait Wire: Debug + Send + Sync {
    /// Holds back the requests on the connections that are open now, also if the client closes these connections.
    /// Requests on later connections arrive. The messages that a client sends before a try pass, for example `BEGIN`,
    /// because the client awaits their replies, and the try itself must be held back.
    fn hold_back(&self);

    /// Returns how many requests, or parts of them, were held back so far.
    fn held_back(&self) -> u64;

    /// Delivers the held requests, and holds no later ones.
    fn deliver(&self);

    /// Returns whether a hold ends with the connection that carried its request, whose end is held back too. A late copy
    /// can then be granted until that end arrives, for at most [`Capabilities::undo`](leasehold_api::Capabilities::undo).
    fn ends_with_connection(&self) -> bool {
        false
    }
}
