//! The empty facade without the feature `metrics`. It costs nothing.

use std::marker::PhantomData;
use std::sync::Arc;

use leasehold_api::LockKey;

use super::KeyClass;
use crate::clock::Clock;
use crate::hold::Hold;
use crate::metrics::{AcquireOutcome, Event};

#[derive(Debug)]
pub(crate) struct FacadeMetrics;

pub(crate) struct Times;

pub(crate) struct AcquireCall<'a>(PhantomData<&'a LockKey>);

pub(crate) struct WaitingGauge;

impl Times {
    pub(crate) fn begin(_: &dyn Clock) -> Self {
        Self
    }

    pub(crate) fn go_on_from(&self, _: &Self) {}
}

impl AcquireCall<'_> {
    pub(crate) fn ended(self, _: AcquireOutcome) {}
}

impl FacadeMetrics {
    pub(crate) fn new(_: Arc<str>, _: KeyClass) -> Self {
        Self
    }

    pub(crate) fn event(&self, _: Event) {}

    pub(crate) fn attempt<'a>(&'a self, _: Option<&'a LockKey>) -> AcquireCall<'a> {
        AcquireCall(PhantomData)
    }

    pub(crate) fn granted(&self, _: &Hold) {}

    pub(crate) fn ended(&self, _: &Hold) {}

    pub(crate) fn found_lost(&self, _: &LockKey) {}

    pub(crate) fn margin(&self, _: &Hold, _: impl FnOnce() -> f64) {}

    pub(crate) fn waits(&self, _: &LockKey) -> WaitingGauge {
        WaitingGauge
    }
}
