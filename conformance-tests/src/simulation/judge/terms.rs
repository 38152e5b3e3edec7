//! Campaigns: what they show, and when the bodies of their terms run, compared with the guards of the terms.

use std::sync::Arc;

use futures_util::FutureExt as _;
use leasehold_api::{GrantHandle, HolderId, LockKey, Validity};

use super::super::client::ClientTurns;
use super::super::coverage::Situation;
use super::{Judge, Observations, WatchedGuard};

/// Returns whether a campaign shows that it leads.
pub(crate) type Shows = Box<dyn Fn() -> bool + Send>;

/// The rule in the text of a violation.
const RULE: &str = "election";

/// A campaign that has not ended.
pub(crate) struct WatchedCampaign {
    pub(super) client: u64,
    pub(super) key: LockKey,
    turns: Arc<ClientTurns>,
    /// Set when the campaign starts.
    shows: Option<Shows>,
    /// The holder of the last term.
    term: Option<HolderId>,
    /// Whether a request to release must end a term.
    steps_down_if_asked: bool,
    body: BodyState,
    doubted: bool,
}

/// The state of the body of the last term.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BodyState {
    NotStarted,
    Running,
    Returned,
    Dropped,
}

impl WatchedCampaign {
    fn shows_leading(&self) -> bool {
        self.shows.as_ref().is_some_and(|shows| shows())
    }

    /// Returns the grant of the last term, or `None` if it was released.
    fn grant<'a>(&self, guards: &'a [WatchedGuard]) -> Option<&'a GrantHandle> {
        let mut grants = guards.iter().map(|guard| &guard.handle);
        grants.find(|grant| Some(grant.holder()) == self.term)
    }
}

impl Judge {
    /// Notes a new campaign. Returns its number.
    pub(crate) fn campaign(&self, client: u64, key: &LockKey, turns: &Arc<ClientTurns>) -> u64 {
        let mut state = self.lock();
        let number = state.next_call;
        state.next_call += 1;
        let campaign = WatchedCampaign {
            client,
            key: key.clone(),
            turns: Arc::clone(turns),
            shows: None,
            term: None,
            steps_down_if_asked: false,
            body: BodyState::NotStarted,
            doubted: false,
        };
        state.campaigns.insert(number, campaign);
        number
    }

    pub(crate) fn campaign_shows(&self, number: u64, shows: Shows) {
        if let Some(campaign) = self.lock().campaigns.get_mut(&number) {
            campaign.shows = Some(shows);
        }
    }

    pub(crate) fn campaign_steps_down_if_asked(&self, number: u64) {
        if let Some(campaign) = self.lock().campaigns.get_mut(&number) {
            campaign.steps_down_if_asked = true;
        }
    }

    pub(crate) fn campaign_ended(&self, number: u64) {
        let ended = self.lock().campaigns.remove(&number);
        // Dropped here, without the mutex, because it can own the last handle of a grant.
        drop(ended);
    }

    /// Notes the grant of a new term.
    pub(crate) fn elected(&self, number: u64, holder: HolderId) {
        if let Some(campaign) = self.lock().campaigns.get_mut(&number) {
            (campaign.term, campaign.body, campaign.doubted) = (Some(holder), BodyState::NotStarted, false);
        }
    }

    /// Checks a body that is about to run a step. `is_dropped` is set if the end of the term must drop the body.
    pub(crate) fn body_steps(&self, number: u64, is_dropped: bool) {
        let state = &mut *self.lock();
        let Some(campaign) = state.campaigns.get_mut(&number) else { return };
        if std::mem::replace(&mut campaign.body, BodyState::Running) == BodyState::NotStarted {
            self.note(Situation::Term);
        }
        let (client, grant) = (campaign.client, campaign.grant(&state.guards));
        let validity = grant.map(GrantHandle::validity);
        let is_asked = grant.is_some_and(|grant| grant.asked().now_or_never().is_some());
        if validity.is_none_or(|validity| is_dropped && !validity.is_held()) {
            let what = format!("a body of client {client} runs, and its guard is {validity:?}");
            state.violation(self.start, RULE, &what);
        } else if is_dropped && is_asked && campaign.steps_down_if_asked {
            let what = format!("a body of client {client} runs after a request to release");
            state.violation(self.start, RULE, &what);
        }
    }

    pub(crate) fn body_ended(&self, number: u64, body: BodyState) {
        if let Some(campaign) = self.lock().campaigns.get_mut(&number) {
            campaign.body = body;
        }
    }

    /// Checks a term whose key is about to be released.
    pub(crate) fn term_ends(&self, number: u64) {
        let state = &mut *self.lock();
        let Some(campaign) = state.campaigns.get(&number) else { return };
        let client = campaign.client;
        let (runs, leads) = (campaign.body == BodyState::Running, campaign.shows_leading());
        if runs || leads {
            let what = match runs {
                true => format!("client {client} releases the key of a term, and its body still runs"),
                false => format!("client {client} releases the key of a term, and still shows that it leads"),
            };
            state.violation(self.start, RULE, &what);
        }
    }

    /// Notes why a term ends.
    pub(crate) fn note_end_of_term(&self, number: u64, grant: &GrantHandle, is_asked: bool) {
        let body = self.lock().campaigns.get(&number).map(|campaign| campaign.body);
        if !grant.validity().is_held() {
            self.note(Situation::TermLost);
        } else if body == Some(BodyState::Dropped) {
            self.note(if is_asked { Situation::SteppedDownWhenAsked } else { Situation::SteppedDown });
        }
    }

    /// Checks that each campaign that shows that it leads has a valid guard. Two leaders have two valid guards then,
    /// which the check of the guards reports.
    pub(super) fn check_campaigns(&self, state: &mut Observations) {
        let mut wrong = Vec::new();
        for campaign in state.campaigns.values_mut().filter(|campaign| !campaign.turns.is_paused()) {
            let validity = campaign.grant(&state.guards).map(GrantHandle::validity);
            if validity == Some(Validity::InDoubt) && !std::mem::replace(&mut campaign.doubted, true) {
                self.note(Situation::TermInDoubt);
            }
            if validity != Some(Validity::Valid) && campaign.shows_leading() {
                let WatchedCampaign { client, key, .. } = campaign;
                wrong.push(format!(
                    "client {client} shows that it leads {key}, and its guard is {validity:?}"
                ));
            }
        }
        wrong.iter().for_each(|what| state.violation(self.start, RULE, what));
    }
}
