//! The time limit of one call of the engine, divided among its requests.

use std::time::Duration;

use tokio::time::Instant;

/// The longest limit of one request to the cluster. The call then sends its next request or fails.
const LONGEST: Duration = Duration::from_secs(8);

/// The time at which a call ends. `None` for a wait, whose requests are each limited.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TimeLimit(Option<Instant>);

impl TimeLimit {
    /// Starts a limit that ends a tenth earlier than `limit`, because the engine drops the call at `limit` and gets no
    /// error then.
    pub(crate) fn start(limit: Duration) -> Self {
        Self(Instant::now().checked_add(limit / 10 * 9))
    }

    /// Makes the limit of a wait, which limits each request but not their sum.
    pub(crate) const fn of_each_request() -> Self {
        Self(None)
    }

    /// Returns the limit of the next request.
    pub(crate) fn left(self) -> Duration {
        self.0.map_or(LONGEST, |end| end.saturating_duration_since(Instant::now())).min(LONGEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_call_ends_before_the_engine_gives_it_up() {
        let limit = TimeLimit::start(Duration::from_secs(2));
        assert_eq!(limit.left(), Duration::from_millis(1_800));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(limit.left(), Duration::from_millis(800));
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(limit.left(), Duration::ZERO);
        assert_eq!(TimeLimit::start(Duration::MAX).left(), LONGEST);
        assert_eq!(TimeLimit::of_each_request().left(), LONGEST);
    }
}
