//! What a store declares and the harness cannot try.

use leasehold_api::{Capabilities, Error, Fencing, Scope};

use crate::case::Need;
use crate::harness::{Factory, Harness, Time};
use crate::runner::runtime;

/// What the store of `factory` declares, and no case can show, each with the reason.
pub(crate) fn unproven(factory: &dyn Factory, child_test: bool) -> Result<Vec<String>, Error> {
    let runtime = runtime(factory.time())
        .map_err(|error| Error::new(leasehold_api::ErrorKind::Unavailable, error.to_string()))?;
    let found = runtime.block_on(async {
        let harness = factory.open().await?;
        let client = harness.client().await?;
        let found = list(client.capabilities(), &*harness, factory.time(), child_test);
        client.close().await.map(|()| found)
    });
    runtime.shutdown_background();
    found
}

fn list(has: &Capabilities, harness: &dyn Harness, time: Time, child_test: bool) -> Vec<String> {
    let mut claims = vec![
        (format!("loss_detection = {:?}", has.loss_detection), Need::Silence),
        (format!("undo = {:?}", has.undo), Need::Script),
    ];
    if has.lease.is_some() {
        claims.push(("lease, by the store's clock".to_owned(), Need::Skew));
    }
    if has.fencing == Fencing::Durable {
        claims.push((format!("fencing = {:?}", has.fencing), Need::Child));
    }
    if has.scope != Scope::Process {
        claims.push((format!("scope = {:?}", has.scope), Need::Child));
        if let Some(bound) = has.crash_release {
            claims.push((format!("crash_release = {bound:?}"), Need::Child));
        }
    }
    let reason = |need: Need| need.hindrance(has, harness, time, child_test);
    claims.into_iter().filter_map(|(claim, need)| Some(format!("{claim} ({})", reason(need)?))).collect()
}
