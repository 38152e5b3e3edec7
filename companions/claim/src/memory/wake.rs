//! Listens for new work in memory.

use async_trait::async_trait;
use tokio::sync::watch;

use super::MemoryClaims;
use crate::error::ClaimError;
use crate::store::Wake;

#[derive(Debug)]
pub(super) struct MemoryWake {
    news: watch::Receiver<u64>,
    has_heard: bool,
    /// Keeps the sender of wake-ups alive. After the last other clone is dropped, a listener must wait and not fail.
    _claims: MemoryClaims,
}

impl MemoryWake {
    pub(super) fn new(claims: &MemoryClaims) -> Self {
        Self { news: claims.shared.news.subscribe(), has_heard: false, _claims: claims.clone() }
    }
}

#[async_trait]
impl Wake for MemoryWake {
    async fn woken(&mut self) -> Result<(), ClaimError> {
        if self.news.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        self.has_heard = true;
        Ok(())
    }

    fn announces(&self) -> bool {
        self.has_heard
    }
}
