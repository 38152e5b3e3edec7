//! The table's record of a hold.

use std::sync::{Arc, Mutex};

use leasehold_api::{FencingToken, HolderId, LockKey, Mode};
use leasehold_engine::token;
use tokio::time::Instant;

/// The cause of the end of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EndedBy {
    Release,
    /// The end of its lease or session.
    Itself,
    /// A forced release by an operator.
    Force,
}

/// The record of one hold.
#[derive(Clone, Debug)]
pub(crate) struct HoldRecord {
    pub(crate) key: LockKey,
    pub(crate) holder: HolderId,
    pub(crate) client: u64,
    pub(crate) mode: Mode,
    pub(crate) token: u64,
    /// The number of tokens after its own that the store has reserved for it.
    pub(crate) reserved: u64,
    /// When its client was last notified of another client that waits.
    pub(crate) told: Arc<Mutex<Option<Instant>>>,
    pub(crate) from: Instant,
    /// Whether the store has renewed it.
    pub(crate) is_renewed: bool,
    /// Whether a late copy of its request was granted, which its client has no reply to.
    pub(crate) is_late_copy: bool,
    pub(crate) ended: Option<(Instant, EndedBy)>,
}

impl HoldRecord {
    /// Returns whether an operator ended the hold.
    pub(crate) fn was_forced_out(&self) -> bool {
        matches!(self.ended, Some((_, EndedBy::Force)))
    }

    /// Returns whether the store has drawn `token` for this hold.
    pub(crate) fn has_token(&self, token: Option<FencingToken>) -> bool {
        let own = token::from_store_number(self.token);
        let Some((own, token)) = own.zip(token) else { return false };
        (own.as_u64()..=own.as_u64() + self.reserved).contains(&token.as_u64())
    }

    /// Returns whether `token` is the last token of this hold.
    pub(crate) fn is_last_token(&self, token: Option<FencingToken>) -> bool {
        let last = token::from_store_number(self.token).map(|own| own.as_u64() + self.reserved);
        last == token.map(FencingToken::as_u64)
    }

    /// Describes the hold for people, with times since `start`.
    pub(crate) fn describe(&self, start: Instant) -> String {
        let Self { key, holder, client, mode, token, from, ended, .. } = self;
        let from = from.duration_since(start);
        let ended = match ended {
            Some((at, by)) => format!("{:.3?} by {by:?}", at.duration_since(start)),
            None => "never".to_owned(),
        };
        let mode = if *mode == Mode::Exclusive { String::new() } else { format!(" as {mode:?}") };
        format!(
            "{from:>12.3?}  client {client}  {key}  held by {holder}{mode} with number {token} until {ended}"
        )
    }
}
