//! The test double: a store whose time, faults and losses a test decides.

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

/// A client under test: the lock, and what can be done to it.
#[derive(Debug)]
pub struct Client {
    /// The lock.
    pub lock: Engine,
    /// What can be done to it.
    pub faults: ClientFaults,
}

/// What a test can do to one client. Clones address the same client.
#[derive(Clone)]
pub struct ClientFaults {
    peer: Arc<Peer>,
}

impl ClientFaults {
    /// Adds `fault` to those that the next calls of `op` meet, one each. Operations that come in one
    /// call, such as the renewal of several leases, meet it together.
    pub fn script(&self, op: Op, fault: Fault) {
        self.peer.faults.add(op, fault);
    }

    /// Takes back the faults that no call has met yet.
    pub fn clear(&self) {
        self.peer.faults.clear();
    }

    /// From now on the store neither hears this client nor is heard by it, until told otherwise.
    pub fn silence(&self, silent: bool) {
        self.peer.faults.silence(silent);
    }

    /// From now on hints that a key may be free do not reach this client, until told otherwise.
    pub fn mute(&self, muted: bool) {
        self.peer.faults.mute(muted);
    }

    /// How many calls of `op` this client has made; a call for several keys is one.
    #[must_use]
    pub fn calls(&self, op: Op) -> u64 {
        self.peer.faults.calls(op)
    }

    /// Steps this client's clock to so far ahead of the store's.
    pub fn skew_ahead(&self, by: Duration) {
        self.peer.clock.skew(nanos(by));
        self.peer.resync();
    }

    /// Steps this client's clock to so far behind the store's.
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
    /// One more client, with a handle on what can go wrong for it.
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

    /// Moves the store's clock and every client's, on top of the time that passes or is paused.
    pub fn advance(&self, by: Duration) {
        self.store.clock.advance(by);
        self.store.moved.notify_waiters();
        let peers = self.store.peers.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for peer in peers.iter().filter_map(std::sync::Weak::upgrade) {
            peer.resync();
        }
    }

    /// Ends the hold of `key` from the store's side and tells its client. Whether there was one.
    pub fn lose(&self, key: &LockKey, reason: LossReason) -> bool {
        self.store.end(key, None, Some(reason))
    }

    /// Ends the hold of `key` without telling anybody, as if its row had been deleted. Whether there was one.
    pub fn purge(&self, key: &LockKey) -> bool {
        self.store.end(key, None, None)
    }

    /// Takes `key` as somebody outside would, until the value is dropped; `None` when it is not free.
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

/// Distinguishes holders from outside; each takes the key at another moment or another key.
fn nanos_since_start(store: &MemoryStore) -> u64 {
    store.store.clock.now().as_nanos()
}

/// A key that is held by somebody outside; dropping it frees the key.
#[derive(Debug)]
#[must_use = "dropping it frees the key"]
pub struct Occupied {
    backend: MemoryBackend,
    request: Request,
    token: Option<FencingToken>,
}

impl Occupied {
    /// The token that the outside holder was given.
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
