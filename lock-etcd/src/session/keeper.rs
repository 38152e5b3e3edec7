//! The task that keeps places in queues alive, and ends the holds that the engine no longer renews.
//!
//! A lease is shared, so it lasts while one of its holds is renewed or one of its places is kept. The keeper deletes the
//! entry of a hold at the end of that hold's TTL, and repeats a release that failed. If the client dies, the lease ends with
//! everything under it.

use std::sync::Arc;
use std::time::Duration;

use leasehold_engine::Request;

use crate::backend::requests::{Abandoned, Ended};
use crate::backend::{Shared, Way};

/// The interval of the checks, so a hold is deleted at most this late.
const EVERY: Duration = Duration::from_millis(100);

/// The limit of a deletion, and the pause before it is repeated.
const LIMIT: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(500);

impl Shared {
    /// Runs until the client is closed.
    pub(crate) async fn keep(self: Arc<Self>) {
        let run = async {
            loop {
                if self.requests.is_empty() {
                    self.requests.arrived().await;
                }
                tokio::time::sleep(EVERY).await;
                self.keep_once();
            }
        };
        tokio::select! {
            () = self.closed.cancelled() => {}
            () = run => {}
        }
    }

    fn keep_once(self: &Arc<Self>) {
        let now = self.now();
        let work = self.requests.work(now);
        for session in self.sessions.live() {
            // Sends keep-alives often, because a grant to a waiter needs a recent proof.
            if work.awaited.contains(&session.lease) && now.since(session.kept()) >= session.ttl / 8 {
                self.keep_alive_soon(&session);
            }
        }
        for ended in work.ended {
            let shared = Arc::clone(self);
            self.in_background(async move { shared.end(&ended).await });
        }
        for abandoned in work.abandoned {
            let shared = Arc::clone(self);
            self.in_background(async move { shared.repeat_release(abandoned).await });
        }
    }

    /// Deletes the entry of a hold that has ended. Repeats this until the store confirms it or a release removes the
    /// request.
    async fn end(&self, ended: &Ended) {
        tracing::debug!(store = %self.cluster.store(), key = %ended.key, "ends a hold that was not renewed");
        let at = self.at(&ended.key, ended.holder, ended.mode);
        while self.requests.knows(ended.holder) {
            if self.lane.call(at.touches(), at.end(ended.created, &ended.numbers), LIMIT).await.is_ok() {
                return;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    /// Repeats a release that the engine no longer repeats, until the store confirms it.
    async fn repeat_release(&self, abandoned: Abandoned) {
        let mut hold = Request::new(abandoned.key, abandoned.holder).hold();
        (hold.mode, hold.unused, hold.limit) = (abandoned.mode, abandoned.unused, LIMIT);
        while self.requests.knows(hold.holder) {
            if let Err(error) = self.release(&hold, Way::Lane).await {
                tracing::debug!(store = %self.cluster.store(), key = %hold.key, %error, "a release is repeated");
                tokio::time::sleep(AGAIN).await;
            }
        }
    }
}
