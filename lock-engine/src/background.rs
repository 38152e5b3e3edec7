//! The thread on which drivers run.

use std::sync::OnceLock;

use tokio::runtime::{Builder, Handle, RuntimeFlavor};

/// Where the driver of an engine on `runtime` runs.
///
/// On a runtime with several workers: on a thread of its own, one for all engines of the process. A task that was
/// woken by a worker stays with that worker until it yields (tokio keeps it in a slot that others cannot steal
/// from), so that a driver among the callers' tasks would stand still as long as the body that a caller runs
/// right after its grant blocks the thread, and the lease would end although other workers are idle. The thread
/// only keeps time and decides; calls of the store run on `runtime`, where any idle worker takes them.
///
/// On a runtime of one thread: there. Whoever blocks that thread stops the store's connections as well, and
/// with paused time the driver has to see the same time as its callers.
pub(crate) fn driver_runtime(runtime: &Handle) -> Option<&'static Handle> {
    static THREAD: OnceLock<Option<Handle>> = OnceLock::new();
    match runtime.runtime_flavor() {
        RuntimeFlavor::CurrentThread => None,
        _ => THREAD.get_or_init(start).as_ref(),
    }
}

/// Starts the thread. It lasts as long as the process and sleeps while no engine has anything to do. `None` where
/// no thread can be had: then drivers run among the callers.
fn start() -> Option<Handle> {
    let runtime = Builder::new_current_thread().enable_time().build().ok()?;
    let handle = runtime.handle().clone();
    let run = move || runtime.block_on(std::future::pending::<()>());
    std::thread::Builder::new().name("leasehold".to_owned()).spawn(run).ok()?;
    Some(handle)
}
