//! A store with I/O that sets tokens aside for hand-overs. It logs its calls with the holder ids in them.

use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    AdminCapabilities, Capabilities, Error, Fencing, HolderId, KeyInfo, LeaseBounds, ListQuery, LockAdmin,
    LockKey, LossReason, Scope,
};
use leasehold_engine::token::{self, Reserved};
use leasehold_engine::{
    Attempt, Backend, Confirm, Contended, Engine, Events, Granted, HoldRef, ReleaseReply, Renewed, Request,
    Timing, TokioClock,
};
use tokio::sync::Notify;

/// A call that the store has received, with the holder id in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    Acquire(HolderId),
    Renew(HolderId),
    Look(HolderId),
    Release(HolderId),
    GiveOut(HolderId),
    Adopt(HolderId),
    Ask(HolderId),
    End(HolderId),
}

/// An event that the client gets before the reply with its grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Early {
    Awaited,
    Asked,
}

/// The rows and the calls of all clients of the store.
#[derive(Debug, Default)]
pub struct RelayNet {
    pub rows: Mutex<HashMap<LockKey, HolderId>>,
    pub calls: Mutex<Vec<Call>>,
    /// The number of tokens that requests asked for.
    pub asked: Mutex<Vec<u16>>,
    pub events: Mutex<Vec<Events>>,
    /// While set, renewals wait for `answers`.
    pub renewals_wait: AtomicBool,
    pub answers: Notify,
    /// Whether releases report waiters of other clients.
    pub has_waiters: AtomicBool,
    /// The store's answer to `was_served`.
    pub served: Mutex<Option<bool>>,
    /// The only key for which the answer is *served*. Takes precedence over `served`.
    pub served_key: Mutex<Option<LockKey>>,
    /// The holders in the calls of `was_served`.
    pub looks_for_served: Mutex<Vec<HolderId>>,
    /// The event before the next grants.
    pub early: Mutex<Option<Early>>,
    /// The answers to the next adoptions, which then do nothing.
    pub adoptions: Mutex<VecDeque<Result<Attempt, Error>>>,
    drawn: AtomicU64,
}

impl RelayNet {
    pub fn calls(&self) -> Vec<Call> {
        self.calls.lock().unwrap().clone()
    }

    pub fn is_free(&self) -> bool {
        self.rows.lock().unwrap().is_empty()
    }

    pub fn holder(&self, key: &str) -> Option<HolderId> {
        self.rows.lock().unwrap().get(&LockKey::new(key).unwrap()).copied()
    }

    /// Tells the clients of an event.
    pub fn tell(&self, tell: impl Fn(&Events)) {
        self.events.lock().unwrap().iter().for_each(tell);
    }

    fn note(&self, call: impl Fn(HolderId) -> Call, holds: &[HoldRef]) {
        self.calls.lock().unwrap().extend(holds.iter().map(|hold| call(hold.holder)));
    }

    fn has(&self, hold: &HoldRef) -> bool {
        self.rows.lock().unwrap().get(&hold.key) == Some(&hold.holder)
    }

    /// Makes a grant with the next token.
    fn granted(&self, holder: HolderId, reserves: u64) -> Granted {
        let token = token::from_store_number(self.drawn.fetch_add(1, SeqCst) + 1);
        let mut granted = Granted::with_token(token).reserved(Reserved::following(reserves));
        granted.extension = Some(Box::new(holder));
        granted
    }
}

pub struct Relay {
    pub net: Arc<RelayNet>,
    pub capabilities: Capabilities,
    pub timing: Timing,
    /// The number of tokens that are set aside with each grant.
    pub reserves: u64,
}

/// How long callers pass a hold to each other.
pub const CHAIN: Duration = Duration::from_millis(100);

impl Relay {
    /// Makes a client of the store, with leases of a minute.
    pub fn new(net: &Arc<RelayNet>) -> Self {
        let mut capabilities = Capabilities::new(Scope::Network);
        let (min, max) = (Duration::from_millis(100), Duration::from_secs(3600));
        capabilities.lease = Some(LeaseBounds::new(Some(Duration::from_secs(60)), min, max));
        capabilities.fencing = Fencing::Volatile;
        (capabilities.cooldown, capabilities.relabel) = (true, true);
        capabilities.admin = AdminCapabilities::all();
        let mut timing = Timing::default();
        timing.handover_for = CHAIN;
        Self { net: Arc::clone(net), capabilities, timing, reserves: 1023 }
    }

    /// Has confirmed holds instead of leases.
    pub fn confirmed(mut self) -> Self {
        self.capabilities.lease = None;
        self.timing.confirm = Some(Confirm::new(Duration::from_secs(3), Duration::from_secs(10)));
        self
    }

    /// Starts an engine with the clock of the test's runtime.
    pub fn start(self) -> Engine {
        Engine::builder(self).clock(Arc::new(TokioClock::new())).start().unwrap()
    }
}

impl fmt::Display for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("relay")
    }
}

impl fmt::Debug for Relay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Relay")
    }
}

#[async_trait]
impl Backend for Relay {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn timing(&self) -> Timing {
        self.timing.clone()
    }

    fn attach(&self, events: Events) {
        self.net.events.lock().unwrap().push(events);
    }

    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>> {
        tokio::task::yield_now().await;
        let mut rows = self.net.rows.lock().unwrap();
        let grant = |request: &Request| {
            self.net.calls.lock().unwrap().push(Call::Acquire(request.holder));
            self.net.asked.lock().unwrap().push(request.reserve);
            if *rows.entry(request.key.clone()).or_insert(request.holder) != request.holder {
                return Ok(Attempt::Contended(Contended::new()));
            }
            let granted = self.net.granted(request.holder, self.reserves);
            let early = *self.net.early.lock().unwrap();
            self.net.tell(|events| match early {
                Some(Early::Awaited) => events.awaited(&request.key),
                Some(Early::Asked) => events.asked(&request.key, request.holder),
                None => {}
            });
            Ok(Attempt::Granted(granted))
        };
        requests.iter().map(grant).collect()
    }

    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.net.note(Call::Renew, &holds);
        if self.net.renewals_wait.load(SeqCst) {
            self.net.answers.notified().await;
        }
        let answer = |hold: &HoldRef| {
            Ok(if self.net.has(hold) { Renewed::Extended } else { Renewed::Gone(LossReason::Gone) })
        };
        holds.iter().map(answer).collect()
    }

    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.net.note(Call::Look, &holds);
        let answer = |hold: &HoldRef| {
            Ok(if self.net.has(hold) { Renewed::Extended } else { Renewed::Gone(LossReason::Gone) })
        };
        holds.iter().map(answer).collect()
    }

    async fn relabel(&self, hold: HoldRef, _: Arc<str>) -> Result<Renewed, Error> {
        Ok(if self.net.has(&hold) { Renewed::Extended } else { Renewed::Gone(LossReason::Gone) })
    }

    async fn give_out(&self, hold: HoldRef) -> Result<Renewed, Error> {
        self.net.note(Call::GiveOut, std::slice::from_ref(&hold));
        if self.net.renewals_wait.load(SeqCst) {
            self.net.answers.notified().await;
        }
        Ok(if self.net.has(&hold) { Renewed::Extended } else { Renewed::Gone(LossReason::Gone) })
    }

    async fn adopt(&self, request: Request, given: HoldRef) -> Result<Attempt, Error> {
        self.net.calls.lock().unwrap().push(Call::Adopt(request.holder));
        let next = self.net.adoptions.lock().unwrap().pop_front();
        if let Some(answer) = next {
            return answer;
        }
        if !self.net.has(&given) {
            return Ok(Attempt::Refused(Error::lost(LossReason::Gone)));
        }
        self.net.rows.lock().unwrap().insert(request.key, request.holder);
        Ok(Attempt::Granted(self.net.granted(request.holder, self.reserves)))
    }

    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.net.note(Call::Release, &holds);
        let release = |hold: &HoldRef| {
            let was_held = self.net.has(hold);
            if was_held {
                self.net.rows.lock().unwrap().remove(&hold.key);
            }
            Ok(ReleaseReply::new(was_held).waiters(self.net.has_waiters.load(SeqCst)))
        };
        holds.iter().map(release).collect()
    }

    async fn was_served(&self, key: &LockKey, holder: HolderId) -> Option<bool> {
        self.net.looks_for_served.lock().unwrap().push(holder);
        match &*self.net.served_key.lock().unwrap() {
            Some(served) => Some(served == key),
            None => *self.net.served.lock().unwrap(),
        }
    }

    fn admin(&self) -> Option<&dyn LockAdmin> {
        Some(self)
    }

    /// Frees nothing, so that a hold forgotten by the engine stays held.
    async fn close(&self) {}
}

#[async_trait]
impl LockAdmin for Relay {
    async fn inspect(&self, _: &LockKey) -> Result<KeyInfo, Error> {
        Err(Error::unsupported("inspection"))
    }

    async fn list(&self, _: &ListQuery) -> Result<Vec<KeyInfo>, Error> {
        Err(Error::unsupported("lists"))
    }

    async fn force_release(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        self.net.calls.lock().unwrap().push(Call::End(holder));
        Ok(self.net.rows.lock().unwrap().get(key) == Some(&holder))
    }

    async fn ask(&self, key: &LockKey, holder: HolderId) -> Result<bool, Error> {
        self.net.calls.lock().unwrap().push(Call::Ask(holder));
        Ok(self.net.rows.lock().unwrap().get(key) == Some(&holder))
    }
}
