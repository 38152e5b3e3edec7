//! A case, its needs and its outcomes.

use std::fmt;
use std::future::Future;
use std::pin::Pin;

use leasehold_api::{Capabilities, Fairness, Fencing, LockExt as _, Scope};

use crate::context::Context;
use crate::harness::{Harness, Time};

/// The future of a running case.
pub(crate) type CaseFuture<'a> = Pin<Box<dyn Future<Output = ()> + 'a>>;

/// One case of the suite.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub struct Case {
    /// The name, in the form `group::case`.
    pub name: &'static str,
    /// The rules of the contract that the case checks, such as `"C1"`.
    pub rules: &'static [&'static str],
    /// The needs of the case from the store and its harness.
    pub needs: &'static [Need],
    pub(crate) body: for<'a> fn(&'a Context) -> CaseFuture<'a>,
}

impl Case {
    /// Returns the part of the name before `::`.
    #[must_use]
    pub fn group(&self) -> &'static str {
        self.name.split("::").next().unwrap_or(self.name)
    }
}

impl fmt::Debug for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Case")
            .field("name", &self.name)
            .field("rules", &self.rules)
            .field("needs", &self.needs)
            .finish_non_exhaustive()
    }
}

/// How a case ended.
#[non_exhaustive]
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The store kept the rule.
    Passed,
    /// The store does not declare the capability under test. It refused the call with a typed error.
    Refused {
        /// The missing capability.
        capability: &'static str,
    },
    /// The case cannot run with this store or harness.
    NotApplicable {
        /// The reason.
        reason: String,
    },
    /// The case failed in real time, perhaps because the machine did not let it run in time.
    Inconclusive {
        /// The observation, and how long the process stood still.
        message: String,
    },
    /// The store broke the rule.
    Failed {
        /// The observation.
        message: String,
    },
}

impl Outcome {
    /// Returns whether the case is neither failed nor inconclusive.
    #[must_use]
    pub const fn is_ok(&self) -> bool {
        !matches!(self, Self::Failed { .. } | Self::Inconclusive { .. })
    }
}

/// A precondition of a case. If the store does not declare a capability, it must refuse its use. Any other
/// missing need makes the case not applicable.
#[non_exhaustive]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Need {
    /// Leases.
    Lease,
    /// Holds that last until their release, unless the acquire sets a lease.
    Endless,
    /// Fencing tokens.
    Tokens,
    /// Tokens that survive a restart of the store.
    DurableTokens,
    /// Cooldowns.
    Cooldown,
    /// Inspection of one key by an administrator.
    Inspect,
    /// Labels that a holder can change.
    Relabel,
    /// Holds that one client gives out and another one adopts.
    Portable,
    /// Shared grants.
    Shared,
    /// A store on which readers of one client share a hold.
    Sharing,
    /// Permits of semaphores.
    Permits,
    /// Listing of holds.
    List,
    /// Forced release.
    ForceRelease,
    /// Requests to release.
    Ask,
    /// Strict first-come-first-served order across clients.
    Fifo,
    /// A hold that ends within a declared time after the death of its process.
    CrashRelease,
    /// Exclusion between processes, and a harness that can start a child process.
    Child,
    /// A store whose time is virtual.
    Virtual,
    /// A harness that can end a hold at the store.
    Lose,
    /// A store on which the loss of one hold does not end other holds of the same client.
    Alone,
    /// A harness that can end a hold at the store without a notification.
    Purge,
    /// A harness that can cut a client off.
    Silence,
    /// A harness that can disturb single calls of a client.
    Script,
    /// A harness that can lose the wake-ups of a client.
    Mute,
    /// A harness that counts the calls of a client.
    Calls,
    /// A harness that can skew the clock of a client.
    Skew,
    /// A harness that can restart the store.
    Restart,
    /// A harness that can disturb single keys.
    Keyed,
    /// A harness that can notify a client of a loss.
    LateLoss,
    /// A store on which a client passes its hold from one of its callers to the next.
    HandOver,
    /// A harness that can turn the hand-over of a client off, if the store declares one.
    HandOverOff,
    /// A store with a fence.
    Fence,
    /// A harness that can hold requests of a client back on their way to the store.
    LateRequests,
}

/// The decision whether a case runs.
pub(crate) enum CaseDecision {
    Run,
    Refusal(Need),
    NotApplicable(String),
}

impl Need {
    /// Decides from the declared capabilities and the abilities of the harness.
    pub(crate) fn judge(
        needs: &[Self],
        has: &Capabilities,
        harness: &dyn Harness,
        time: Time,
        child_test: bool,
    ) -> CaseDecision {
        // Checks for missing capabilities before missing abilities, because the test of a refusal needs no faults.
        for need in needs {
            if need.undeclared(has) {
                return CaseDecision::Refusal(*need);
            }
        }
        for need in needs {
            if let Some(reason) = need.hindrance(has, harness, time, child_test) {
                return CaseDecision::NotApplicable(reason);
            }
        }
        CaseDecision::Run
    }

    fn undeclared(self, has: &Capabilities) -> bool {
        match self {
            Self::Lease => has.lease.is_none(),
            Self::Tokens | Self::DurableTokens => has.fencing == Fencing::None,
            Self::Cooldown => !has.cooldown,
            Self::Inspect => !has.admin.inspect,
            Self::Relabel => !has.relabel,
            Self::Portable => !has.portable,
            Self::Shared | Self::Sharing => !has.modes.shared,
            Self::Permits => has.modes.max_permits == 0,
            Self::List => !has.admin.list,
            Self::ForceRelease => !has.admin.force_release,
            Self::Ask => !has.admin.ask,
            _ => false,
        }
    }

    pub(crate) fn hindrance(
        self,
        has: &Capabilities,
        harness: &dyn Harness,
        time: Time,
        child_test: bool,
    ) -> Option<String> {
        let set = harness.faults().map(crate::harness::Faults::supports).unwrap_or_default();
        let fault = |there: bool, what: &str| (!there).then(|| format!("the harness cannot {what}"));
        match self {
            Self::Endless if has.lease.is_some_and(|lease| lease.default.is_some()) => {
                Some("every hold is a lease".into())
            }
            Self::DurableTokens if has.fencing != Fencing::Durable => {
                Some(format!("the store declares tokens {}", has.fencing))
            }
            Self::Fifo if has.fairness != Fairness::Fifo => {
                Some(format!("the store declares its order among clients as {}", has.fairness))
            }
            Self::CrashRelease if has.crash_release.is_none() => {
                Some("the store declares that a dead holder's hold stays".into())
            }
            Self::Child if has.scope == Scope::Process => {
                Some("the store declares to exclude within one process".into())
            }
            Self::Child if harness.child().is_none() => {
                Some("the harness names no way to reach the store from a child process".into())
            }
            Self::Child if !child_test => {
                Some("no test was mounted that can act as the child process".into())
            }
            Self::Child if !cfg!(unix) => Some("child processes are driven by Unix signals".into()),
            Self::Virtual if time != Time::Virtual => Some("the store follows real time".into()),
            Self::Alone if set.lose_together => {
                Some("what one session of the store holds ends together".into())
            }
            Self::Lose => fault(set.lose, "end a hold at the store"),
            Self::Purge => fault(set.purge, "end a hold at the store without telling"),
            Self::Silence => fault(set.silence, "cut a client off from the store"),
            Self::Script => fault(set.script, "disturb single calls of a client"),
            Self::Mute => fault(set.mute, "lose the wake-ups of a client"),
            Self::Calls => fault(set.calls, "count the calls of a client"),
            Self::Skew => fault(set.skew, "skew the clock of a client"),
            Self::Restart => fault(set.restart, "restart the store"),
            Self::Keyed => fault(set.keys, "disturb single keys"),
            Self::LateLoss => fault(set.late_losses, "notify a client of a loss"),
            Self::Sharing if has.share_for.is_zero() => {
                Some("the store declares that each reader has a separate hold".into())
            }
            Self::HandOver if has.handover_for.is_zero() => {
                Some("the store declares that every grant is its own".into())
            }
            Self::HandOverOff if !has.handover_for.is_zero() => {
                fault(set.hand_over_off, "turn the hand-over of a client off")
            }
            Self::Fence if harness.fences().is_none() => Some("the harness names no fence".into()),
            Self::LateRequests => {
                fault(set.late_requests, "hold requests of a client back on their way to the store")
            }
            _ => None,
        }
    }

    /// Returns the name of the capability. Empty for a need that no capability satisfies.
    pub(crate) const fn capability(self) -> &'static str {
        match self {
            Self::Lease => "leases",
            Self::Tokens | Self::DurableTokens => "fencing tokens",
            Self::Cooldown => "cooldowns",
            Self::Inspect => "inspection",
            Self::Relabel => "labels that can be changed",
            Self::Portable => "portable holds",
            Self::Shared | Self::Sharing => "shared grants",
            Self::Permits => "permits",
            Self::List => "listing",
            Self::ForceRelease => "forced release",
            Self::Ask => "requests to release",
            _ => "",
        }
    }

    /// Asserts that the store refuses the use of the undeclared capability.
    pub(crate) async fn assert_refused(self, cx: &Context) {
        use leasehold_api::{ErrorKind, FencingToken, HolderId, ListQuery, PortableHold};
        let lock = cx.client().await;
        let key = cx.key();
        let refused = match self {
            Self::Lease => lock.key(&key).ttl(cx.ttl()).acquire().await.map(drop),
            Self::Cooldown => lock.key(&key).cooldown(cx.ttl()).acquire().await.map(drop),
            Self::Shared | Self::Sharing => lock.key(&key).shared().acquire().await.map(drop),
            Self::Permits => lock.key(&key).permits(2).acquire().await.map(drop),
            Self::Relabel => cx.take(&lock, &key).await.relabel("new").await,
            Self::Portable => {
                let guard = cx.take(&lock, &key).await;
                let token = guard.token().unwrap_or(FencingToken::from_u64(1));
                let portable = PortableHold::new(&key, guard.stored_holder(), token, cx.ttl());
                match lock.adopt(portable.expose()).await {
                    Ok(_) => panic!("portable holds are not declared, yet one was adopted"),
                    Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}"),
                }
                cx.assert_valid(&guard);
                guard.into_ref(cx.ttl()).await.map(drop)
            }
            Self::Tokens | Self::DurableTokens => {
                let guard = cx.take(&lock, &key).await;
                assert_eq!(guard.token(), None, "a token from a store that declares none");
                return;
            }
            Self::Inspect | Self::List | Self::ForceRelease | Self::Ask => match lock.admin() {
                None => return,
                Some(admin) if self == Self::Inspect => admin.inspect(&key).await.map(drop),
                Some(admin) if self == Self::List => admin.list(&ListQuery::new()).await.map(drop),
                Some(admin) if self == Self::Ask => {
                    admin.ask(&key, HolderId::from_parts(1, 1)).await.map(drop)
                }
                Some(admin) => admin.force_release(&key, HolderId::from_parts(1, 1)).await.map(drop),
            },
            _ => return,
        };
        match refused {
            Ok(()) => panic!("{} are not declared, yet the store answered Ok", self.capability()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}"),
        }
        // The refused call must leave nothing behind, so the key is free, also after a call that consumes its guard.
        drop(match self {
            Self::Portable => cx.free_within(&lock, &key, cx.capabilities().undo).await,
            _ => cx.take(&lock, &key).await,
        });
    }
}
