//! Follows the validity of a hold: when doubt begins, when it ends, and the end of the hold.

use std::future::pending;
use std::sync::Arc;

use leasehold_api::Validity;
use tokio::time::sleep;

use crate::clock::Moment;
use crate::driver::LONGEST_SLEEP;
use crate::hold::Hold;

impl Hold {
    /// Waits until the validity differs from `seen` or the hold has ended, and returns it.
    pub(crate) async fn other_validity(self: Arc<Self>, seen: Validity) -> Validity {
        let changed = async {
            loop {
                // Registers before the check, because a change between the two would be missed.
                let moved = self.stored_lease().map(|lease| lease.moved.notified());
                let now = self.current_validity();
                if now != seen || !now.is_held() {
                    return now;
                }
                tokio::select! {
                    biased;
                    _ = self.phase.watch().ended() => {}
                    () = async { match moved { Some(moved) => moved.await, None => pending().await } } => {}
                    () = self.next_change(now) => {}
                }
            }
        };
        // Reads the validity again if the runtime has ended, because all holds are then lost.
        self.core.on_runtime(changed).await.unwrap_or_else(|| self.current_validity())
    }

    /// Sleeps until the clock can change the validity `now`, or for the longest sleep, because timers might not run
    /// during suspend.
    async fn next_change(&self, now: Validity) {
        let nexts = self.leases().map(|lease| match now {
            Validity::Valid => lease.doubt().min(lease.end()),
            _ => lease.end(),
        });
        let next = nexts.min().unwrap_or(Moment::NEVER);
        if next == Moment::NEVER {
            return pending().await;
        }
        sleep(next.since(self.core.clock.now()).min(LONGEST_SLEEP)).await;
    }
}
