//! The connections with the members of a cluster. Each member has a channel, and one member at a time is the chosen one,
//! which gets the calls first.

mod failover;
mod failure;
mod greeting;
mod heard;
mod login;
mod member;
mod socket;
mod stream;
mod tls;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use leasehold_api::{Error, ErrorKind};
use tokio::runtime::Handle;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

pub(crate) use self::failure::{Class, Failure};
pub(crate) use self::heard::Heard;
pub(crate) use self::stream::Watching;

use self::failover::{Choice, Members, Plan, Won, ask};
use self::heard::Ears;
use self::login::{Login, Token};
use self::member::{Mark, Member};
use crate::config::EtcdConfig;
use crate::wire::{
    Call, Headed, KEEP_ALIVE, LeaseKeepAliveRequest, LeaseKeepAliveResponse, RangeRequest, ResponseHeader,
    StatusRequest, StatusResponse, WATCH, WatchRequest,
};

/// The time for a member to accept a stream.
const OPEN_LIMIT: Duration = Duration::from_secs(2);

/// The connections with the members of one cluster. All parts of a client share this value.
pub(crate) struct Cluster {
    members: Vec<Member>,
    choice: Choice,
    ears: Arc<Ears>,
    login: Login,
    store: Arc<str>,
}

/// The reply to a call.
#[derive(Clone, Debug)]
pub(crate) struct Answer<R> {
    pub(crate) reply: R,
    /// Whether an earlier copy of this request can still arrive and be carried out.
    pub(crate) unsure: bool,
    /// The greatest numbers of all replies before the first copy was sent.
    pub(crate) heard_before: Heard,
}

impl<R: Headed> Answer<R> {
    /// Returns the header of the reply. All numbers are zero if the server has sent none.
    pub(crate) fn header(&self) -> ResponseHeader {
        self.reply.header().copied().unwrap_or_default()
    }
}

/// Whether a member without a leader refuses the call at once, or replies from its own state.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Leader {
    Needed,
    NotNeeded,
}

impl Cluster {
    /// Connects to the members. Checks that one of them serves clients, that all members that reply belong to one
    /// cluster, and that their versions are supported.
    pub(crate) async fn connect(config: &EtcdConfig) -> Result<Arc<Self>, Error> {
        if Handle::try_current().is_err() {
            return Err(Error::new(
                ErrorKind::NoRuntime,
                "the etcd store needs a tokio runtime; connect inside of one",
            ));
        }
        let cluster = Arc::new(Self::new(config).await?);
        cluster.greet().await.map_err(|error| error.with_store(Arc::clone(&cluster.store)))?;
        Ok(cluster)
    }

    /// Makes the channels, which connect when they are first used.
    async fn new(config: &EtcdConfig) -> Result<Self, Error> {
        let addresses = config.addresses()?;
        let trust = tls::load(config.tls.as_ref()).await?;
        let ears = Arc::new(Ears::default());
        let members = addresses
            .into_iter()
            .map(|address| Member::new(address, trust.as_ref(), &ears))
            .collect::<Result<Vec<_>, Error>>()?;
        Ok(Self {
            choice: Choice::new(members.len()),
            members,
            ears,
            login: Login::new(config.credentials.clone()),
            store: config.store(),
        })
    }

    /// Makes an idempotent call within `limit`. Also calls a second member after 0.5 s without a reply, and at once after
    /// a failure. The first reply counts.
    pub(crate) async fn call<C: Call>(
        &self,
        request: C,
        limit: Duration,
    ) -> Result<Answer<C::Reply>, Failure> {
        self.unary(request, Plan { limit, repeat: true }).await
    }

    /// Makes a call within `limit`, and repeats it only if no member has carried it out.
    pub(crate) async fn call_once<C: Call>(
        &self,
        request: C,
        limit: Duration,
    ) -> Result<Answer<C::Reply>, Failure> {
        self.unary(request, Plan { limit, repeat: false }).await
    }

    async fn unary<C: Call>(&self, request: C, plan: Plan) -> Result<Answer<C::Reply>, Failure> {
        let heard_before = self.heard();
        let won = ask(self, plan, |member| self.send(member, request.clone(), Leader::Needed)).await;
        self.answer(won, heard_before)
    }

    /// Extends a lease within `limit`. Uses the stream of etcd's call for one request and one reply.
    pub(crate) async fn keep_alive(
        &self,
        lease: i64,
        limit: Duration,
    ) -> Result<Answer<LeaseKeepAliveResponse>, Failure> {
        let heard_before = self.heard();
        let plan = Plan { limit, repeat: true };
        let won = ask(self, plan, |member| self.send_keep_alive(member, lease)).await;
        self.answer(won, heard_before)
    }

    fn answer<R>(&self, won: Result<Won<R>, Failure>, heard_before: Heard) -> Result<Answer<R>, Failure> {
        match won {
            Ok(Won { reply, unsure }) => Ok(Answer { reply, unsure, heard_before }),
            Err(failure) => Err(failure.of_store(&self.store)),
        }
    }

    /// Opens a stream of watches on the chosen member. Waits for the first of the `requests`, and then at most 2 s for
    /// the member's first reply. The member ends the stream if it has no leader.
    pub(crate) async fn watch(
        &self,
        mut requests: mpsc::Receiver<WatchRequest>,
    ) -> Result<Watching, Failure> {
        let Some(first) = requests.recv().await else {
            return Err(Failure::unsent(Class::Unreachable).of_store(&self.store));
        };
        let member = self.choice.chosen();
        let open = self.open_watch(member, first, requests);
        let opened =
            timeout(OPEN_LIMIT, open).await.unwrap_or_else(|_| Err(Failure::maybe_sent(Class::Late)));
        opened.map_err(|failure| {
            if failure.may_pass() {
                self.choice.leave(member);
            }
            failure.of_store(&self.store)
        })
    }

    async fn open_watch(
        &self,
        member: usize,
        first: WatchRequest,
        requests: mpsc::Receiver<WatchRequest>,
    ) -> Result<Watching, Failure> {
        // Reads the same key to find out whether the token has ended, because a failed stream does not return its
        // requests.
        if self.login.is_used() {
            let read = RangeRequest::key(first.key()).count_only();
            self.send(member, read, Leader::Needed).await?;
        }
        let token = self.token(member).await?;
        let peer = &self.members[member];
        let replies = peer.stream(stream::of_requests(first, requests), WATCH, &token).await?;
        Ok(Watching::new(Arc::clone(peer.name()), replies, Arc::clone(&self.ears), &self.store))
    }

    /// Makes one call to one member, with a new token if the current one has ended.
    async fn send<C: Call>(&self, member: usize, request: C, leader: Leader) -> Result<C::Reply, Failure> {
        let token = self.token(member).await?;
        let peer = &self.members[member];
        let result = match peer.unary(request.clone(), &token, leader).await {
            Err(failure) if failure.wants_token() && self.login.is_used() => {
                let token = self.new_token(member, &token).await?;
                peer.unary(request, &token, leader).await
            }
            other => other,
        };
        self.checked(result)
    }

    async fn send_keep_alive(&self, member: usize, lease: i64) -> Result<LeaseKeepAliveResponse, Failure> {
        let token = self.token(member).await?;
        let result = match self.ask_keep_alive(member, lease, &token).await {
            Err(failure) if failure.wants_token() && self.login.is_used() => {
                let token = self.new_token(member, &token).await?;
                self.ask_keep_alive(member, lease, &token).await
            }
            other => other,
        };
        self.checked(result)
    }

    async fn ask_keep_alive(
        &self,
        member: usize,
        lease: i64,
        token: &Token,
    ) -> Result<LeaseKeepAliveResponse, Failure> {
        let peer = &self.members[member];
        let question = futures_util::stream::iter([LeaseKeepAliveRequest { id: lease }]);
        let mut replies = peer.stream(question, KEEP_ALIVE, token).await?;
        match replies.message().await {
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(Failure::maybe_sent(Class::Lost)),
            Err(status) => Err(peer.failure(status)),
        }
    }

    /// Notes the numbers of the reply. Fails if another cluster has sent it.
    fn checked<R: Headed>(&self, result: Result<R, Failure>) -> Result<R, Failure> {
        let reply = result?;
        self.ears.note(reply.header())?;
        Ok(reply)
    }

    /// Returns the current token. Authenticates first if there is a user and no token yet.
    async fn token(&self, member: usize) -> Result<Token, Failure> {
        let token = self.login.current();
        if self.login.is_used() && token.is_missing() {
            self.new_token(member, &token).await
        } else {
            Ok(token)
        }
    }

    async fn new_token(&self, member: usize, ended: &Token) -> Result<Token, Failure> {
        let peer = &self.members[member];
        let nobody = Token::default();
        let authenticate = |request| async {
            let request = request;
            peer.unary(request, &nobody, Leader::Needed).await
        };
        self.login.renewed(ended, authenticate).await
    }

    /// Returns the greatest numbers of all replies so far.
    pub(crate) fn heard(&self) -> Heard {
        self.ears.heard()
    }

    /// Replaces the greatest revision and term by the numbers of `header`, for a cluster that was restored from a backup.
    /// The caller must first make sure that its tokens cannot repeat.
    pub(crate) fn start_over(&self, header: &ResponseHeader) {
        self.ears.start_over(header);
    }

    /// Returns a receiver that changes if another member becomes the chosen one. Streams to the old one should then be
    /// opened again.
    pub(crate) fn moved(&self) -> watch::Receiver<u64> {
        self.choice.moved()
    }

    /// Returns the name of a member, `host:port`.
    pub(crate) fn name_of(&self, member: usize) -> &str {
        self.members.get(member).map_or("", |member| member.name())
    }

    /// Returns the name of the store for errors. It contains no password.
    pub(crate) fn store(&self) -> &Arc<str> {
        &self.store
    }

    /// Queries the state of all members at the same time. Returns one reply for each, in the order of the settings.
    pub(crate) async fn status_of_all(&self, limit: Duration) -> Vec<Result<StatusResponse, Failure>> {
        join_all((0..self.members.len()).map(|member| async move {
            let status = timeout(limit, self.status(member)).await;
            let status = status.unwrap_or_else(|_| Err(Failure::maybe_sent(Class::Late)));
            status.map_err(|failure| failure.of_store(&self.store))
        }))
        .await
    }

    async fn status(&self, member: usize) -> Result<StatusResponse, Failure> {
        self.send(member, StatusRequest {}, Leader::NotNeeded).await
    }

    /// Replaces all channels by new ones on the current runtime, because the tasks of a channel end with their runtime.
    pub(crate) fn move_to_this_runtime(&self) {
        for member in &self.members {
            member.replace_channel();
        }
    }
}

impl Members for Cluster {
    type Mark = Mark;

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn mark(&self, member: usize) -> Mark {
        self.members[member].mark()
    }

    fn may_have_left(&self, member: usize, mark: Mark) -> bool {
        self.members[member].may_have_left(mark)
    }

    fn is_alive(&self, member: usize, mark: Mark) -> bool {
        self.members[member].is_alive(mark)
    }

    fn gave_up(&self, member: usize) {
        self.members[member].gave_up();
    }
}

/// Shows no password.
impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("store", &self.store)
            .field("heard", &self.heard())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
