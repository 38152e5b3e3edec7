//! What a store author writes.

use std::any::Any;
use std::fmt::{Debug, Display};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{Capabilities, Error, FencingToken, HolderId, LockAdmin, LockKey, LossReason, Mode};
use tokio_util::sync::CancellationToken;

use crate::clock::Moment;
use crate::store::events::Events;

/// A store, as the engine sees it. [`Engine`](crate::Engine) turns it into a `Lock`.
///
/// The engine keeps order among local callers, waits, renews, computes validity, undoes what was
/// abandoned and retries releases; a backend carries out single requests against the store and tells
/// the truth about them. A small store implements [`SingleKey`](crate::SingleKey) instead.
///
/// # What the engine relies on
///
/// - **The holder id owns.** Every request carries one that is unique to the grant. A second
///   `acquire` with the id that already holds the key answers the same grant again (with its token), and its
///   lease lasts for the request's TTL from then on, if it would have ended sooner: the engine counts it from the
///   call that was answered, and an earlier copy of it may have been granted without anybody's knowing. `renew` and
///   `release` act on that id's hold alone and leave anybody else's untouched.
/// - **Calls run to their end.** The engine never drops a call of [`acquire`](Self::acquire),
///   [`wait`](Self::wait), [`renew`](Self::renew) or [`release`](Self::release) half-way except when
///   the call exceeds its time limit or the runtime shuts down; what a dropped call has done is found
///   out by a `release` with the same holder id. A call need not be polled promptly: a backend that
///   shares a connection does its I/O in a task of its own.
/// - **Answers are per request.** One key's failure is not its neighbour's. The answers come in the
///   order of the requests, as many as there were requests.
/// - **Errors mean "not known to be held"**, never "held by somebody else": that is
///   [`Attempt::Contended`]. After an error the engine releases by holder id, until the store has answered. A
///   store that knows that nothing was begun (no connection, no permission, no table) says so with
///   [`Attempt::Refused`], and nothing is released.
/// - **Local exclusion.** For one key the engine has at most one live request or hold at a time, but an abandoned hold
///   of an earlier holder id may still be on its way out: look holds up by holder id, never by key alone. Every request
///   is [`Mode::Exclusive`]. This engine answers the other modes with
///   [`Unsupported`](leasehold_api::ErrorKind::Unsupported), whatever [`Capabilities::modes`] declares.
#[async_trait]
pub trait Backend: Debug + Display + Send + Sync + 'static {
    /// What the store has. Asked once, when the engine is built; every bound is the store's promise
    /// including what the engine adds under its default [`Timing`](crate::Timing).
    fn capabilities(&self) -> &Capabilities;

    /// How the engine drives this store: renewals, polls and limits.
    fn timing(&self) -> Timing {
        Timing::default()
    }

    /// Called once, before anything else: how the backend reaches its engine. The events may be kept
    /// and called from anywhere.
    fn attach(&self, events: Events);

    /// Answers an acquire without I/O, if the store can: `None` sends the request through
    /// [`acquire`](Self::acquire). Must not block.
    fn try_now(&self, request: &Request) -> Option<Result<Attempt, Error>> {
        let _ = request;
        None
    }

    /// One attempt at each request, none of which waits for another holder. The keys are all different
    /// and ordered by bytes.
    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>>;

    /// Waits in the store's own queue until the request is granted or `stop` fires, then answers with
    /// the grant or [`Attempt::Contended`]. Only called when [`Timing::waiting`] is [`Waiting::Store`].
    ///
    /// After `stop` it leaves the queue and returns soon. If a grant came first it is returned: the caller
    /// who still waits has it, and for one who has gone the engine undoes it.
    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        let _ = stop;
        Err(Error::unsupported("queue of its own to wait in").with_key(&request.key))
    }

    /// Extends each hold by its TTL from now on the store's clock, if and only if it is still held by
    /// that holder; where there is no lease, confirms that it is still held.
    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>>;

    /// Whether each hold is still that holder's, without extending it: a read, which may be dropped half-way.
    /// For [`LockGuard::confirm`](leasehold_api::LockGuard::confirm), and of leases every [`Timing::look`].
    /// Without that setting leases are renewed instead. By default the same as [`renew`](Self::renew).
    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.renew(holds).await
    }

    /// Answers a release without I/O, if the store can. Must not block. It is also called from `Drop`. Not
    /// asked where a cooldown would have to end with the hold ([`HoldRef::unused`]): that goes through
    /// [`release`](Self::release).
    fn release_now(&self, key: &LockKey, holder: HolderId) -> Option<Result<ReleaseReply, Error>> {
        let _ = (key, holder);
        None
    }

    /// Frees each hold if it is still that holder's, and takes that holder out of any queue of the
    /// store. With one that is [`unused`](HoldRef::unused) its cooldown ends. Repeating it does no harm.
    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>>;

    /// As [`release`](Self::release), after the runtime on which this backend has worked has ended: its tasks
    /// there and their connections are gone, or go next. Called on another runtime with timers and I/O, on
    /// which the backend can open a new connection, for about a second. [`abort`](Self::abort) follows.
    /// Override it if `release` needs a task or a connection of the old runtime.
    async fn release_on_new_runtime(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.release(holds).await
    }

    /// The operator's view, if there is one.
    fn admin(&self) -> Option<&dyn LockAdmin> {
        None
    }

    /// Ends the backend after the engine has released what it knows of: connections, tasks, files, and
    /// whatever this client still holds because a call was not polled to its end. Every later call
    /// answers [`Closed`](leasehold_api::ErrorKind::Closed).
    async fn close(&self);

    /// The last resort, when the runtime has gone and nothing can be awaited: let go of everything
    /// that this client still holds in the store, as far as that is possible without waiting (close
    /// the files, drop the connections). Leases without a session end by themselves.
    fn abort(&self) {}
}

/// One request for one key.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Request {
    /// The key.
    pub key: LockKey,
    /// The identity of the grant to be.
    pub holder: HolderId,
    /// Which holders the grant excludes. Always [`Mode::Exclusive`]: this engine refuses the others.
    pub mode: Mode,
    /// The lease's TTL, within the declared bounds; `None` on stores without leases, or for a hold
    /// without one where the store's default says so.
    pub ttl: Option<Duration>,
    /// No new grant before this long after this one.
    pub cooldown: Option<Duration>,
    /// What operators shall see.
    pub label: Option<Arc<str>>,
    /// Whether the caller goes on waiting when the answer is held: only then is it worth noting who was
    /// turned away.
    pub waits: bool,
    /// How many tokens to set aside beyond the grant's own, for local callers that would share the hold
    /// ([`token::LOCAL_BITS`](crate::token::LOCAL_BITS)). Always 0: this engine asks the store for each
    /// grant.
    pub reserve: u16,
}

impl Request {
    /// An exclusive request with nothing beside, for tests of backends.
    #[must_use]
    pub fn new(key: LockKey, holder: HolderId) -> Self {
        Self {
            key,
            holder,
            mode: Mode::Exclusive,
            ttl: None,
            cooldown: None,
            label: None,
            waits: false,
            reserve: 0,
        }
    }

    /// The hold that a grant of this request gives.
    #[must_use]
    pub fn hold(&self) -> HoldRef {
        HoldRef {
            key: self.key.clone(),
            holder: self.holder,
            mode: self.mode,
            token: None,
            ttl: self.ttl,
            unused: false,
            state: None,
        }
    }
}

/// The answer to one attempt.
#[non_exhaustive]
#[derive(Debug)]
pub enum Attempt {
    /// The key is held by the request's holder id.
    Granted(Granted),
    /// Somebody else holds the key, is before us in the store's queue, or a cooldown lasts.
    Contended(Contended),
    /// The request failed, and the store knows nothing of it: it never arrived, or was turned down before
    /// anything was written. There is nothing to release.
    Refused(Error),
}

/// A grant of the store.
#[non_exhaustive]
#[derive(Debug, Default)]
pub struct Granted {
    /// The fencing token.
    pub token: Option<FencingToken>,
    /// The moment on the engine's clock (see [`Events::now`]) just before the request that was granted
    /// was sent, where that is later than the start of the engine's call: a wait that polls or queues
    /// names it. A lease's deadline counts from it.
    pub asked_at: Option<Moment>,
    /// What [`LockGuard::extension`](leasehold_api::LockGuard::extension) finds.
    pub extension: Option<Box<dyn Any + Send + Sync>>,
    /// Whatever the backend needs to know of this hold later (a lease id, a file): it comes back in
    /// [`HoldRef::state`], so that a backend needs no table of its own.
    pub state: Option<OpaqueState>,
}

impl Granted {
    /// A grant with this token.
    #[must_use]
    pub fn with_token(token: Option<FencingToken>) -> Self {
        Self { token, ..Self::default() }
    }
}

/// What a backend keeps with a hold, of a type of its own.
pub type OpaqueState = Arc<dyn Any + Send + Sync>;

/// Why an attempt was not granted, as far as the store knows.
#[non_exhaustive]
#[derive(Clone, Debug, Default)]
pub struct Contended {
    /// When the store lets go by itself at the earliest, such as the lease's end: how long from now.
    pub retry_after: Option<Duration>,
    /// How much longer a cooldown lasts.
    pub cooling_for: Option<Duration>,
}

impl Contended {
    /// Held by somebody else, and nothing else is known.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

/// A hold of the store, named by what identifies it.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct HoldRef {
    /// The key.
    pub key: LockKey,
    /// Whose hold.
    pub holder: HolderId,
    /// As acquired.
    pub mode: Mode,
    /// As granted; `None` also when the outcome of the attempt is not known.
    pub token: Option<FencingToken>,
    /// The lease's TTL, for renewal.
    pub ttl: Option<Duration>,
    /// No caller has ever had its guard: the release undoes an attempt, and a cooldown that this grant has
    /// begun ends with it, also where its lease has ended and nobody has taken the key since. What another
    /// grant has begun stays.
    pub unused: bool,
    /// What the grant said in [`Granted::state`]; `None` also when the outcome of the attempt is not known.
    pub state: Option<OpaqueState>,
}

/// The answer to one renewal.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewed {
    /// Still held, and a lease runs for its TTL from when the request arrived.
    Extended,
    /// Not held by that holder any more.
    Gone(LossReason),
}

/// The answer to one release.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReleaseReply {
    /// Whether that holder held the key until now.
    pub was_held: bool,
    /// Whether others are known to wait for the key at the store. This client yields to them
    /// ([`Timing::yield_to_remote`]).
    pub waiters: bool,
}

impl ReleaseReply {
    /// The hold was released, or (`was_held` false) not held to begin with. No waiters are known.
    #[must_use]
    pub const fn new(was_held: bool) -> Self {
        Self { was_held, waiters: false }
    }

    /// Adds whether others are known to wait.
    #[must_use]
    pub const fn waiters(mut self, waiters: bool) -> Self {
        self.waiters = waiters;
        self
    }
}

/// How the engine drives a store. A backend chooses defaults that keep its declared bounds.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The longest that one call of the backend may take before its outcome counts as unknown.
    pub request_timeout: Duration,
    /// How a waiter learns that the key may be free.
    pub waiting: Waiting,
    /// With [`Waiting::Store`], where some wait outside of the store's queue: how long this client leaves a
    /// key to them after a release that found some ([`ReleaseReply::waiters`]). Polling stores leave it for
    /// one and a half intervals.
    pub yield_to_remote: Option<Duration>,
    /// Stores with leases on another machine than their holders: how often to [`look`](Backend::look) whether
    /// the leases are still there, and at least every sixth of the TTL. It bounds how long a guard can read
    /// valid after its machine was stopped together with its clocks.
    pub look: Option<Duration>,
    /// Stores without leases: how often to confirm that the holds are still there, if that can end.
    pub confirm: Option<Confirm>,
    /// How long `close` waits for the store.
    pub close: Duration,
}

impl Default for Timing {
    /// 10 s a call, polling every 100 ms, no look and no confirmation, 10 s for closing.
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(10),
            waiting: Waiting::Poll { every: Duration::from_millis(100) },
            yield_to_remote: None,
            look: None,
            confirm: None,
            close: Duration::from_secs(10),
        }
    }
}

/// How a waiter learns that the key may be free.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// By asking again, jittered around this interval; [`Events::wake`] makes it sooner.
    Poll {
        /// The interval.
        every: Duration,
    },
    /// In the store's own queue, through [`Backend::wait`].
    Store,
}

/// Confirmation of holds that have no lease.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirm {
    /// How often to ask.
    pub every: Duration,
    /// How long after the last answered question was *sent* the holds count as lost. The store must
    /// not let go by itself sooner.
    pub lost_after: Duration,
    /// Whether a hold that counts as lost is left in the store until an operator ends it, like that of a
    /// holder that has died: for stores that never let go by themselves.
    pub sticky: bool,
}

impl Confirm {
    /// Asks `every` so often; lost `lost_after` the last answered question was sent.
    #[must_use]
    pub const fn new(every: Duration, lost_after: Duration) -> Self {
        Self { every, lost_after, sticky: false }
    }

    /// Leaves a hold that counts as lost in the store.
    #[must_use]
    pub const fn sticky(mut self) -> Self {
        self.sticky = true;
        self
    }
}
