//! Counts the responses to spend requests.

use std::sync::atomic::{AtomicU64, Ordering};

use axum::http::StatusCode;
use serde::Serialize;

#[derive(Debug, Default)]
pub(crate) struct Tally {
    spent: AtomicU64,
    refused: AtomicU64,
    unserved: AtomicU64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Tallied {
    /// Responses with status 200.
    spent: u64,
    /// Responses with status 402, because the balance is not enough.
    refused: u64,
    /// Other responses, mostly with status 503, because the lock was not free in time.
    unserved: u64,
}

impl Tally {
    pub(crate) fn count(&self, status: StatusCode) {
        let counter = match status {
            StatusCode::OK => &self.spent,
            StatusCode::PAYMENT_REQUIRED => &self.refused,
            _ => &self.unserved,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn read(&self) -> Tallied {
        let [spent, refused, unserved] =
            [&self.spent, &self.refused, &self.unserved].map(|counter| counter.load(Ordering::Relaxed));
        Tallied { spent, refused, unserved }
    }

    pub(crate) fn reset(&self) {
        for counter in [&self.spent, &self.refused, &self.unserved] {
            counter.store(0, Ordering::Relaxed);
        }
    }
}
