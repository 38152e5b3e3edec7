//! The trait that the author of a store implements, with its requests and replies.

use std::any::Any;
use std::fmt::{Debug, Display};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use leasehold_api::{
    Capabilities, Error, FencingToken, HolderId, LockAdmin, LockKey, LossReason, Mode, OnCooldown,
};
use tokio_util::sync::CancellationToken;

use crate::clock::Moment;
use crate::store::events::Events;
use crate::store::token::Reserved;

/// A store, as the engine sees it. [`Engine`](crate::Engine) turns it into a `Lock`.
///
/// The engine orders local callers, waits, renews, computes validity, undoes abandoned requests and retries
/// releases. A backend carries out single requests against the store and reports their true outcome. A small
/// store implements [`SingleKey`](crate::SingleKey) instead.
///
/// # Rules that the engine relies on
///
/// - **The holder id owns.** Each request carries a holder id that is unique to the grant. If that id holds the
///   key already, a second `acquire` returns the same grant with its token. The lease then lasts at least for
///   the request's TTL from the second call, because the engine counts from the call that got a reply. `renew`
///   and `release` act on the hold of that id only.
/// - **Calls run to their end.** The engine drops a call of [`acquire`](Self::acquire), [`wait`](Self::wait),
///   [`renew`](Self::renew) or [`release`](Self::release) only if the call exceeds its time limit or the
///   runtime shuts down. A `release` with the same holder id then undoes the part that the store has carried
///   out so far. The engine may poll a call late, so a backend that shares a connection does its I/O in a
///   separate task.
/// - **A late copy is refused.** The request of a dropped call can reach the store later, from a slow connection
///   or a slow member of a cluster. After a `release` returned `Ok`, the store must not grant an earlier copy of
///   that holder's request. A store ends the connection that carried the request, or compares a number that
///   the release has changed. While a copy can still be granted, `release` returns an error, and the engine
///   repeats it. If the store cannot stop the copy, the error is [`late_copy_error`](crate::late_copy_error), for
///   which an engine that closes does not wait.
/// - **A shared lease ends no hold.** The engine repeats a failed release only until the lease of the hold is over. A
///   store whose holds share a lease must itself end a hold whose release was requested and never confirmed, because
///   the renewal of another hold extends that lease.
/// - **Replies are per request.** One key's failure does not affect another key. Return one reply for each
///   request, in the order of the requests.
/// - **An error means "not known to be held"**. The answer for a key that another client holds is
///   [`Attempt::Contended`]. After an error the engine releases by holder id until the store confirms. If the
///   store knows that it has started nothing, for example because it was not connected, return
///   [`Attempt::Refused`]. The engine then releases nothing.
/// - **Local exclusion.** For each key the engine has at most one live request at a time. An exclusive one has no live
///   hold beside it. Another one only has holds of the same mode beside it, and fewer than N for a permit of N. A hold of an
///   earlier holder id can still await its release, so find holds by holder id, never by key alone. If a session is
///   granted everything that it has already, refuse by your own records while such a hold excludes the request.
/// - **Modes.** A request has a mode that [`Capabilities::modes`] declares. A key that is in use with another number of
///   permits is [`Attempt::Refused`] with [`Error::mode_mismatch`], also from [`wait`](Self::wait).
#[async_trait]
pub trait Backend: Debug + Display + Send + Sync + 'static {
    /// Returns the features and bounds of the store. The engine calls this once, when it is built. Each bound
    /// includes the time that the engine adds under its default [`Timing`](crate::Timing).
    fn capabilities(&self) -> &Capabilities;

    /// Returns the intervals and limits with which the engine drives this store.
    fn timing(&self) -> Timing {
        Timing::default()
    }

    /// Connects the backend to its engine. The engine calls this once, before any other call. The backend can
    /// keep the events and call them from any thread.
    fn attach(&self, events: Events);

    /// Acquires without I/O, if the store can. Must not block. `None` sends the request through
    /// [`acquire`](Self::acquire).
    fn try_now(&self, request: &Request) -> Option<Result<Attempt, Error>> {
        let _ = request;
        None
    }

    /// Makes one attempt at each request and waits for no other holder. The keys are all different and in byte
    /// order. Only a grant remains in the store, or a place in its queue if the request
    /// [may queue](Request::may_queue) and its reply has [`Contended::queued`].
    async fn acquire(&self, requests: Vec<Request>) -> Vec<Result<Attempt, Error>>;

    /// Waits in the store's queue until the request is granted or `stop` fires. Returns the grant or
    /// [`Attempt::Contended`]. Called only if [`Timing::waiting`] is [`Waiting::Store`]. Continues at the place that
    /// [`acquire`](Self::acquire) has taken for this holder, if it has taken one.
    ///
    /// The request keeps its place between two polls of this future, however long. A store whose place needs work
    /// does that work in a separate task. In a store whose order is [`Fifo`](leasehold_api::Fairness::Fifo) the request
    /// also keeps its place through a cooldown if the caller waits for the end ([`Request::on_cooldown`]). Otherwise the
    /// wait returns [`Attempt::Contended`] with [`Contended::cooling_for`].
    ///
    /// After `stop`, leaves the queue and returns soon. If the grant came first, returns the grant. The engine
    /// passes it to the caller, or undoes it if the caller has given up.
    async fn wait(&self, request: Request, stop: CancellationToken) -> Result<Attempt, Error> {
        let _ = stop;
        Err(Error::unsupported("queue of its own to wait in").with_key(&request.key))
    }

    /// Extends each hold by its TTL, counted on the store's clock, if and only if its holder still has it.
    /// Confirms a hold without a lease: returns whether the holder still has it.
    async fn renew(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>>;

    /// Returns for each hold whether its holder still has it, without extending it. This is a read, and the
    /// engine can drop it at any point. [`LockGuard::confirm`](leasehold_api::LockGuard::confirm) calls it,
    /// and for leases the engine does every [`Timing::look`]. Without that setting, the engine renews leases
    /// instead. By default the same as [`renew`](Self::renew).
    ///
    /// Send a new request to the store for each call. A reply from an earlier one is
    /// [`ExtendedFrom`](Renewed::ExtendedFrom) its time. Such a reply does not end a younger doubt.
    async fn look(&self, holds: Vec<HoldRef>) -> Vec<Result<Renewed, Error>> {
        self.renew(holds).await
    }

    /// Replaces the label of the hold if and only if its holder still has it. `Extended` means that the label was
    /// replaced, but the lease is not extended. The engine calls this only if [`Capabilities::relabel`] is declared,
    /// and drops a call only at its time limit. By default [`Unsupported`](leasehold_api::ErrorKind::Unsupported).
    async fn relabel(&self, hold: HoldRef, label: Arc<str>) -> Result<Renewed, Error> {
        let _ = (hold, label);
        Err(Error::unsupported("label that can be changed"))
    }

    /// Renews the hold as [`renew`](Self::renew) does, and marks it as given out, if and only if its holder still has it.
    /// After that another client can [adopt](Self::adopt) the hold, and it outlasts this backend. The engine can still
    /// renew and release it, for example after a lost reply. Called only if [`Capabilities::portable`] is declared, and
    /// dropped as a call of `renew`. By default [`Unsupported`](leasehold_api::ErrorKind::Unsupported).
    async fn give_out(&self, hold: HoldRef) -> Result<Renewed, Error> {
        let _ = hold;
        Err(Error::unsupported("hold that another process can adopt"))
    }

    /// Grants the request if and only if the hold `given`, by holder and token, has the key and is
    /// [given out](Self::give_out). The grant has a greater token, and waiters keep their order. If the holder of the
    /// request has the key already and has not given it out, a repeated call returns the same grant. Its lease then lasts
    /// as for a second [`acquire`](Self::acquire), but never shorter than before, because the repetition can arrive after
    /// a renewal. In every other case returns [`Attempt::Refused`] with [`Lost`](leasehold_api::ErrorKind::Lost).
    ///
    /// After an error the engine repeats the call with the same holder id, or releases by it. Until then the backend must
    /// leave the request alone. This client can have waiters for the key beside the adopted hold. By default
    /// [`Unsupported`](leasehold_api::ErrorKind::Unsupported).
    async fn adopt(&self, request: Request, given: HoldRef) -> Result<Attempt, Error> {
        let _ = (request, given);
        Ok(Attempt::Refused(Error::unsupported("hold that can be adopted")))
    }

    /// Releases without I/O, if the store can. Must not block, because `Drop` calls it too. The engine does not
    /// call it if a cooldown has to end with the hold ([`HoldRef::unused`]). Such a release goes through
    /// [`release`](Self::release).
    fn release_now(&self, key: &LockKey, holder: HolderId) -> Option<Result<ReleaseReply, Error>> {
        let _ = (key, holder);
        None
    }

    /// Releases each hold if its holder still has it, and removes the holder from every queue of the store.
    /// If the hold is [`unused`](HoldRef::unused), its cooldown ends. Repeating the call does no harm. `Ok` means
    /// that no earlier copy of the holder's request will be granted.
    async fn release(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>>;

    /// Returns whether another client was granted the key since this client's `holder` released it, by a read that
    /// the engine can drop at any point. After a release that found waiters ([`ReleaseReply::waiters`]), the engine
    /// leaves the key to other clients until one of them was served. `None`, the default, if the store does
    /// not know: the engine then leaves the key alone for the whole time.
    async fn was_served(&self, key: &LockKey, holder: HolderId) -> Option<bool> {
        let _ = (key, holder);
        None
    }

    /// Releases like [`release`](Self::release), after the backend's runtime has ended. The tasks and
    /// connections of that runtime are gone or about to go. The engine calls this for about a second, on
    /// another runtime with timers and I/O. The backend can open a new connection there. [`abort`](Self::abort)
    /// follows. Override this method if `release` needs a task or a connection of the old runtime.
    async fn release_on_new_runtime(&self, holds: Vec<HoldRef>) -> Vec<Result<ReleaseReply, Error>> {
        self.release(holds).await
    }

    /// Returns the operator's view, if the store has one.
    fn admin(&self) -> Option<&dyn LockAdmin> {
        None
    }

    /// Closes the backend after the engine has released the holds that it knows: connections, tasks, files, and
    /// all else that this client still holds because a call was not polled to its end. Later calls return
    /// [`Closed`](leasehold_api::ErrorKind::Closed).
    async fn close(&self);

    /// Releases the holds that this client still has, without waiting: closes its files, drops its connections.
    /// The engine calls this when the runtime has ended and no call can be awaited. Leases without a session
    /// end by themselves.
    fn abort(&self) {}
}

/// One request for one key.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct Request {
    /// The key.
    pub key: LockKey,
    /// The holder id of the grant.
    pub holder: HolderId,
    /// The mode of the grant.
    pub mode: Mode,
    /// The TTL of the lease, within the declared bounds. `None` if the hold has no lease, by the store's nature
    /// or by its default.
    pub ttl: Option<Duration>,
    /// The time after this grant in which the key is not granted again.
    pub cooldown: Option<Duration>,
    /// Whether the caller waits for the end of a cooldown of an earlier grant, or leaves.
    pub on_cooldown: OnCooldown,
    /// The text that operators see beside the hold.
    pub label: Option<Arc<str>>,
    /// Whether the caller keeps waiting if the key is held. The store should note only such a caller for a
    /// hint.
    pub waits: bool,
    /// Whether [`Backend::acquire`] can give the request a place in the store's queue if the key is not free,
    /// because [`Backend::wait`] follows. This spares a store one write per wait. Never set for a try, for several
    /// keys in one call, with a cooldown, or with [`Waiting::Poll`].
    pub may_queue: bool,
    /// The number of tokens to set aside beyond the grant's own, because callers of this client wait and take
    /// over the hold one after another ([`Granted::reserved`]). Zero if no caller waits. A store may set aside
    /// fewer, or more.
    pub reserve: u16,
    /// The time limit of the call, from its start: [`Timing::request_timeout`], and at most the shortest TTL of an
    /// acquire. The engine gives the call up after it at the earliest, and the outcome counts as unknown. A call whose
    /// caller has gone can be polled for longer. A store that can repeat a request elsewhere divides this time.
    /// [`Duration::MAX`] for a wait.
    pub limit: Duration,
}

impl Request {
    /// Makes an exclusive request without options, for tests of backends.
    #[must_use]
    pub fn new(key: LockKey, holder: HolderId) -> Self {
        Self {
            key,
            holder,
            mode: Mode::Exclusive,
            ttl: None,
            cooldown: None,
            on_cooldown: OnCooldown::default(),
            label: None,
            waits: false,
            may_queue: false,
            reserve: 0,
            limit: Timing::default().request_timeout,
        }
    }

    /// Returns the hold that a grant of this request creates.
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
            limit: self.limit,
        }
    }
}

/// The reply to one attempt.
#[non_exhaustive]
#[derive(Debug)]
pub enum Attempt {
    /// The key is held by the request's holder id.
    Granted(Granted),
    /// Another client holds the key or is ahead in the store's queue, or a cooldown lasts.
    Contended(Contended),
    /// The request failed before it arrived, or was rejected before a write. The engine releases nothing.
    Refused(Error),
}

/// A grant of the store.
#[non_exhaustive]
#[derive(Debug, Default)]
pub struct Granted {
    /// The fencing token.
    pub token: Option<FencingToken>,
    /// The number of a permit of N, from 0 to N - 1, which no other live permit of the key has.
    pub permit: Option<u32>,
    /// The time on the engine's clock ([`Events::now`]) from which the deadline of a lease counts: just before the
    /// request was sent from which the store counts the lease. Set if this is not the start of the engine's call:
    /// later in a wait that polls or queues, earlier if an earlier request has renewed a lease that the hold shares.
    pub asked_at: Option<Moment>,
    /// The value that [`LockGuard::extension`](leasehold_api::LockGuard::extension) returns.
    pub extension: Option<Box<dyn Any + Send + Sync>>,
    /// Data that the backend keeps with this hold (a lease id, a file). It comes back in [`HoldRef::state`], so
    /// a backend needs no table for it.
    pub state: Option<OpaqueState>,
    /// The tokens that the store has set aside for this grant, drawn together with its own. Callers of this
    /// client then pass the hold to each other without a call of the store, each with the next of these tokens,
    /// for up to [`Timing::handover_for`]. By default none, and the hold is released after its first caller.
    pub reserved: Reserved,
}

impl Granted {
    /// Makes a grant with this token.
    #[must_use]
    pub fn with_token(token: Option<FencingToken>) -> Self {
        Self { token, ..Self::default() }
    }

    /// Sets the tokens that the store has set aside for this grant.
    #[must_use]
    pub fn reserved(mut self, reserved: Reserved) -> Self {
        self.reserved = reserved;
        self
    }
}

/// Data of any type that a backend keeps with a hold.
pub type OpaqueState = Arc<dyn Any + Send + Sync>;

/// The reason for a refused attempt, if the store knows more.
#[non_exhaustive]
#[derive(Clone, Debug, Default)]
pub struct Contended {
    /// The time from now until the current hold can end by itself, such as the end of its lease.
    pub retry_after: Option<Duration>,
    /// The rest of a running cooldown.
    pub cooling_for: Option<Duration>,
    /// Whether the request has a place in the store's queue. Only for a request that
    /// [may queue](Request::may_queue). The engine then calls [`Backend::wait`] for it, or releases its holder.
    pub queued: bool,
}

impl Contended {
    /// Makes the reply of a key that another client holds, without more details.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

/// A hold of the store, identified by its key and holder id.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct HoldRef {
    /// The key.
    pub key: LockKey,
    /// The holder id.
    pub holder: HolderId,
    /// The mode of the request.
    pub mode: Mode,
    /// The fencing token. `None` also if the outcome of the attempt is unknown.
    pub token: Option<FencingToken>,
    /// The lease's TTL, for renewal.
    pub ttl: Option<Duration>,
    /// Whether no caller ever had the hold's guard. The release then undoes an attempt, and a cooldown that
    /// this grant started ends too, even if its lease has ended and no client has taken the key since. The
    /// cooldown of another grant stays.
    pub unused: bool,
    /// The value of [`Granted::state`] for this hold. `None` also if the outcome of the attempt is unknown.
    pub state: Option<OpaqueState>,
    /// The time limit of the call, as in [`Request::limit`]. For a renewal a third of the shortest TTL in the call, or an
    /// eighth after a renewal without an answer. For a look the shortest TTL in the call. At most
    /// [`Timing::request_timeout`]. The TTLs of one call differ by up to four times.
    pub limit: Duration,
}

/// The reply to one renewal.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewed {
    /// The holder still has the key. Its lease, if it has one, lasts for its TTL from the arrival of the
    /// request.
    Extended,
    /// The holder still has the key. Its lease lasts for its TTL from this time on the engine's clock, as in
    /// [`Granted::asked_at`]. For a store that repeats a renewal, or replies from a recent one. A time before the call
    /// is no confirmation: [`confirm`](leasehold_api::LockGuard::confirm) calls again once, then fails. A store that
    /// replies so to renewals therefore needs [`Timing::look`].
    ExtendedFrom(Moment),
    /// The holder no longer has the key, for this reason.
    Gone(LossReason),
}

/// The reply to one release.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReleaseReply {
    /// Whether the holder of the request held the key until now.
    pub was_held: bool,
    /// Whether other clients wait for the key at the store. This client then yields to them
    /// ([`Timing::yield_to_remote`]).
    pub waiters: bool,
}

impl ReleaseReply {
    /// Makes the reply of a release without known waiters. `was_held` is whether the holder held the key until
    /// then.
    #[must_use]
    pub const fn new(was_held: bool) -> Self {
        Self { was_held, waiters: false }
    }

    /// Sets whether other clients wait for the key.
    #[must_use]
    pub const fn waiters(mut self, waiters: bool) -> Self {
        self.waiters = waiters;
        self
    }
}

/// The intervals and limits with which the engine drives a store. A backend chooses defaults that keep its
/// declared bounds.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The time limit of one call of the backend. After it, the outcome counts as unknown. The calls of
    /// [`acquire`](Backend::acquire), [`renew`](Backend::renew) and [`look`](Backend::look) for a short lease have a
    /// shorter limit ([`Request::limit`], [`HoldRef::limit`]).
    pub request_timeout: Duration,
    /// How a waiter learns that the key may be free.
    pub waiting: Waiting,
    /// How long this client leaves a key to other waiters after a release that found some
    /// ([`ReleaseReply::waiters`]). For stores with [`Waiting::Store`] where some clients wait outside the
    /// store's queue. With [`Waiting::Poll`] the client always leaves the key for one and a half intervals, or until
    /// [`Backend::was_served`].
    pub yield_to_remote: Option<Duration>,
    /// The interval of [`look`](Backend::look), at most a sixth of the TTL, which checks whether leases still
    /// exist. For stores with leases on another machine. It bounds how long a guard can read valid after its
    /// machine was stopped together with its clocks.
    pub look: Option<Duration>,
    /// The confirmation of holds, for stores without leases whose holds can still end.
    pub confirm: Option<Confirm>,
    /// How long callers of this client pass one hold of the store to each other, counted from when the granted
    /// request was sent. [`Events::awaited`] ends it at once. Zero for a store that grants each hold itself.
    /// The engine declares it as [`Capabilities::handover_for`].
    pub handover_for: Duration,
    /// How long readers of this client join one hold of the store without a call of the store, counted from when the
    /// granted request was sent. A call that takes longer is not shared. [`Events::awaited`] ends it at once. With zero
    /// each reader has a separate hold. Declared as [`Capabilities::share_for`] if the store has shared grants.
    pub share_for: Duration,
    /// The time limit of `close`.
    pub close: Duration,
}

impl Default for Timing {
    /// Returns 10 s for a call, polling every 100 ms, no look, confirmation or hand-over, 50 ms for sharing, and 10 s for
    /// closing.
    fn default() -> Self {
        Self {
            request_timeout: Duration::from_secs(10),
            waiting: Waiting::Poll { every: Duration::from_millis(100) },
            yield_to_remote: None,
            look: None,
            confirm: None,
            handover_for: Duration::ZERO,
            // Longer than a usual call of a store, and short against the polls of a writer.
            share_for: Duration::from_millis(50),
            close: Duration::from_secs(10),
        }
    }
}

/// How a waiter learns that the key may be free.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waiting {
    /// The waiter polls, jittered around this interval. [`Events::wake`] makes the next poll sooner.
    Poll {
        /// The interval.
        every: Duration,
    },
    /// The waiter waits in the store's own queue, through [`Backend::wait`].
    Store,
}

/// Confirmation of holds that have no lease.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Confirm {
    /// The interval between two confirmations.
    pub every: Duration,
    /// The time after which the holds count as lost, counted from when the last answered confirmation was
    /// *sent*. The store must not end the hold sooner.
    pub lost_after: Duration,
    /// Whether a lost hold stays in the store until an operator ends it, like the hold of a dead holder. For
    /// stores whose holds never end by themselves.
    pub sticky: bool,
}

impl Confirm {
    /// Confirms at the interval `every`. A hold counts as lost when the last answered confirmation was sent
    /// `lost_after` ago.
    #[must_use]
    pub const fn new(every: Duration, lost_after: Duration) -> Self {
        Self { every, lost_after, sticky: false }
    }

    /// Leaves a lost hold in the store.
    #[must_use]
    pub const fn sticky(mut self) -> Self {
        self.sticky = true;
        self
    }
}
