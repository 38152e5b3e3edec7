//! Without the feature nothing is published, and not publishing costs nothing.

use std::marker::PhantomData;
use std::sync::Arc;

use leasehold_api::LockKey;

use super::KeyClass;
use crate::clock::Clock;
use crate::hold::Hold;
use crate::metrics::{Attempted, Event};

#[derive(Debug)]
pub(crate) struct Published;

pub(crate) struct Times;

pub(crate) struct Attempt<'a>(PhantomData<&'a LockKey>);

pub(crate) struct Waiting;

impl Times {
    pub(crate) fn begin(_: &dyn Clock) -> Self {
        Self
    }

    pub(crate) fn go_on_from(&self, _: &Self) {}
}

impl Attempt<'_> {
    pub(crate) fn ended(self, _: Attempted) {}
}

impl Published {
    pub(crate) fn new(_: Arc<str>, _: KeyClass) -> Self {
        Self
    }

    pub(crate) fn event(&self, _: Event) {}

    pub(crate) fn attempt<'a>(&'a self, _: Option<&'a LockKey>) -> Attempt<'a> {
        Attempt(PhantomData)
    }

    pub(crate) fn granted(&self, _: &Hold) {}

    pub(crate) fn ended(&self, _: &Hold) {}

    pub(crate) fn found_lost(&self, _: &LockKey) {}

    pub(crate) fn margin(&self, _: &Hold, _: impl FnOnce() -> f64) {}

    pub(crate) fn waits(&self, _: &LockKey) -> Waiting {
        Waiting
    }
}
