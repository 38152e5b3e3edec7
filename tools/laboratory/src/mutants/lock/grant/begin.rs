//! The begin of a hold: granted by the store, or continued from another local grant.

use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold_api::{FencingToken, LossSignal};
use leasehold_engine::Request;
use tokio::sync::{Notify, SetOnce};
use tokio::time::Instant;

use super::super::baton::{Baton, Lease, Tenure};
use super::super::client::SmallClient;
use super::super::fault::LockFault as Fault;
use super::super::permits::Permit;
use super::super::renewal::{renew_while_live, watch_deadline};
use super::super::undo::UndeliveredGrant;
use super::{Hold, HoldLife, Phase};
use crate::mutants::server::fence::SmallFence;

impl Hold {
    pub(in super::super) fn begin(
        client: &Arc<SmallClient>,
        fresh: &mut UndeliveredGrant,
        permit: Option<Permit>,
        max_hold: Option<Duration>,
    ) -> Arc<Self> {
        let token = fresh.granted.token.map_or(0, FencingToken::as_u64);
        let tenure = Tenure::new(&fresh.request, token, fresh.granted.reserved.len(), fresh.sent);
        let mut lease = Lease::begin(fresh.sent, fresh.ttl());
        lease.confirm(client.fault, fresh.sent, fresh.ttl());
        Self::start(client, &fresh.request, (tenure, token, lease), permit, max_hold)
    }

    /// Continues the hold of `baton` as a grant of `request`.
    pub(in super::super) fn adopt(
        client: &Arc<SmallClient>,
        request: &Request,
        baton: Baton,
        permit: Option<Permit>,
        max_hold: Option<Duration>,
    ) -> Arc<Self> {
        let (tenure, mut lease) = (Arc::clone(&baton.tenure), baton.lease);
        let token = if client.fault == Fault::TokenNotGreater { baton.token } else { baton.token + 1 };
        let max_hold = match (client.fault, baton.ends) {
            (Fault::MaxHoldPassedOn, Some(end)) => Some(end.saturating_duration_since(Instant::now())),
            _ => max_hold,
        };
        baton.forget();
        if let (Fault::HandedOverToAnotherTtl, Some(ttl)) = (client.fault, request.ttl) {
            lease.confirm(client.fault, lease.confirmed, ttl);
        }
        Self::start(client, request, (tenure, token, lease), permit, max_hold)
    }

    fn start(
        client: &Arc<SmallClient>,
        request: &Request,
        (tenure, token, lease): (Arc<Tenure>, u64, Lease),
        permit: Option<Permit>,
        max_hold: Option<Duration>,
    ) -> Arc<Self> {
        let max_hold = max_hold.filter(|_| client.fault != Fault::MaxHoldIgnored);
        let fence = SmallFence::new(client.connection.server(), &request.key, tenure.holder, tenure.token);
        let hold = Arc::new(Self {
            client: Arc::clone(client),
            key: request.key.clone(),
            holder: request.holder,
            token: AtomicU64::new(token),
            life: Mutex::new(HoldLife { phase: Phase::Live, unused: false, lease, failing: false }),
            tenure,
            fence,
            extended: AtomicBool::new(false),
            signal: LossSignal::new(),
            permit: Mutex::new(permit),
            ends: max_hold.and_then(|limit| Instant::now().checked_add(limit)),
            changed: Notify::new(),
            renewing: tokio::sync::Mutex::default(),
            asked: SetOnce::new(),
            request: request.clone(),
        });
        if client.fault != Fault::LostWaitsForStore {
            client.handle.spawn(watch_deadline(Arc::downgrade(&hold)));
        }
        let limited = client.fault == Fault::MaxHoldReplacesRenewal && max_hold.is_some();
        if client.fault != Fault::NoRenewal && !limited {
            client.handle.spawn(renew_while_live(Arc::downgrade(&hold), Arc::clone(client), request.hold()));
        }
        hold
    }
}
