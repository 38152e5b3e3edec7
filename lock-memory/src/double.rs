//! The test double: a store whose time, faults and losses a test controls.

use std::fmt;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use leasehold_api::{Error, FencingToken, HolderId, LockKey, LossReason};
use leasehold_engine::{Attempt, ClientSetup, Engine, Fault, Op, Request, Skew};

use crate::backend::{MemoryBackend, Peer};
use crate::config::MemoryStore;

fn nanos(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX / 4).min(i64::MAX / 4)
}

/// A client under test: the lock and its faults.
#[derive(Debug)]
pub struct Client {
    /// The lock.
    pub lock: Engine,
    /// The handle that injects faults.
    pub faults: ClientFaults,
}

/// Injects faults into one client. Clones address the same client.
#[derive(Clone)]
pub struct ClientFaults {
    peer: Arc<Peer>,
}

impl ClientFaults {
    /// Queues `fault` for the next calls of `op`, one fault per call. Operations that are batched in one call,
    /// such as the renewal of several leases, share its fault.
    pub fn script(&self, op: Op, fault: Fault) {
        self.peer.faults.add(op, fault);
    }

    /// Removes the queued faults.
    pub fn clear(&self) {
        self.peer.faults.clear();
    }

    /// Sets whether the client is cut off, with requests and replies lost in both directions.
    pub fn silence(&self, silent: bool) {
        self.peer.faults.silence(silent);
    }

    /// Sets whether hints that a key may be free are lost.
    pub fn mute(&self, muted: bool) {
        self.peer.faults.mute(muted);
    }

    /// Returns the number of calls of `op` by this client. A call for several keys counts once.
    #[must_use]
    pub fn calls(&self, op: Op) -> u64 {
        self.peer.faults.calls(op)
    }

    /// Sets this client's clock ahead of the store's.
    pub fn skew_ahead(&self, by: Duration) {
        self.peer.clock.skew(nanos(by));
        self.peer.resync();
    }

    /// Sets this client's clock behind the store's.
    pub fn skew_behind(&self, by: Duration) {
        self.peer.clock.skew(-nanos(by));
        self.peer.resync();
    }
}

impl fmt::Debug for ClientFaults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientFaults").finish_non_exhaustive()
    }
}

impl MemoryStore {
    /// Makes a client, with a handle that injects faults.
    ///
    /// # Errors
    ///
    /// As [`MemoryStore::client`].
    pub fn client_with(&self, setup: ClientSetup) -> Result<Client, Error> {
        let skew = match setup.skew {
            Skew::None => 0,
            Skew::Ahead(by) => nanos(by),
            Skew::Behind(by) => -nanos(by),
        };
        let backend = MemoryBackend::new(self, skew);
        let faults = ClientFaults { peer: Arc::clone(&backend.peer) };
        Ok(Client { lock: self.start(backend)?, faults })
    }

    /// Moves the clocks of the store and of every client, in addition to the time that passes or is paused.
    pub fn advance(&self, by: Duration) {
        self.store.clock.advance(by);
        self.store.moved.notify_waiters();
        let peers = self.store.peers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for peer in peers.iter().filter_map(std::sync::Weak::upgrade) {
            peer.resync();
        }
    }

    /// Ends the hold of `key` at the store and notifies its client. Returns whether the key was held.
    pub fn lose(&self, key: &LockKey, reason: LossReason) -> bool {
        self.store.end(key, None, Some(reason))
    }

    /// Ends the hold of `key` without a notification, like a deleted row. Returns whether the key was held.
    pub fn purge(&self, key: &LockKey) -> bool {
        self.store.end(key, None, None)
    }

    /// Takes `key` as another program would, until the value is dropped. `None` if the key is not free.
    #[must_use]
    pub fn occupy(&self, key: &LockKey) -> Option<Occupied> {
        let backend = MemoryBackend::new(self, 0);
        let request = Request::new(key.clone(), HolderId::from_parts(0, nanos_since_start(self)));
        match self.store.acquire(&request, &backend.peer, true) {
            Ok(Attempt::Granted(granted)) => Some(Occupied { backend, request, token: granted.token }),
            _ => None,
        }
    }
}

/// Returns a serial number for an outside holder's id. No two are equal for one key, because two holders take
/// it at different times.
fn nanos_since_start(store: &MemoryStore) -> u64 {
    store.store.clock.now().as_nanos()
}

/// A key that another program holds. Dropping it releases the key.
#[derive(Debug)]
#[must_use = "dropping it frees the key"]
pub struct Occupied {
    backend: MemoryBackend,
    request: Request,
    token: Option<FencingToken>,
}

impl Occupied {
    /// Returns the token of the outside holder.
    #[must_use]
    pub fn token(&self) -> Option<FencingToken> {
        self.token
    }
}

impl Drop for Occupied {
    fn drop(&mut self) {
        self.backend.store.release(&self.request.key, self.request.holder, false);
    }
}
